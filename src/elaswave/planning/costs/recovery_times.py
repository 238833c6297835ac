"""How long training stands still, by policy: the parameters of the planners, each with its source."""

from math import sqrt

import msgspec

WORKER_S_BETWEEN_LOSSES = 54 * 86_400 * 16_384 / 419
"""The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions in 54 days on 16,384
GPUs."""


class RecoveryTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of standing still and of work between copies. Everything is a parameter: clusters differ."""

    recover_s: float = 0.012
    """From a loss until the survivors compute again, beside what the coordinator does for each worker and block
    (`agree_s` and below): detection, and what survivors do side by side. This engine's median with 4 workers on two
    cores (benchmarks/recovery.py, kills, paced); the same for every policy that goes on without a restart."""
    join_s: float = 0.02
    """For the new generation in which a worker joins or leaves between two steps, whose state travels in the
    background, beside what the coordinator does. Measured with benchmarks/join.py, three workers and one that joins: 20
    ms (15 to 44), the median of three joins; the others' steps of 0.88 s took at most 1.05 of a normal one (median)."""
    agree_s: float = 19e-6
    """Of the one coordinator for every worker: it hears all survivors' reports, decides, and sends the decision.
    Measured with benchmarks/agreement.py: 75 ms at 4,096 workers, 34 ms at 1,024."""
    agree_block_s: float = 1.8e-6
    """The same for every block of the model, all of which it looks at. The same benchmark, a million blocks at 1,024
    workers: 1.9 s."""
    agree_send_s: float = 1.6e-9
    """For every pair of workers: a decision goes to each, over a link of 100 Gbit/s of the coordinator's (an
    assumption), and is 20 bytes long for each that it names. The same benchmark: 87 KB, compressed, at 4,096."""
    move_s: float = 0.06
    """How much longer the step is with which the layout changes, after a copy in the background. Measured with
    benchmarks/migration.py, 10 M parameters, steps of 1.15 s: 61 ms, the median of four moves, on a busy machine."""
    copy_share: float = 0.25
    """Of the bandwidth of a worker's links that state may take which is copied in the background, while training has
    the rest. An assumption: a run's own budget is in bytes per step (elastic.copy_bytes_per_step)."""
    torchft_recover_s: float = 0.21
    """torchft's own recovery. Measured: 212, 227 and 234 ms with 3 replicas and the most aggressive settings, 5 s with
    its defaults (benchmarks/torchft_recovery.py)."""
    restart_s: float = 300.0
    """To stop a job, start it again and load a checkpoint. The Llama 3 Herd of Models (arXiv 2407.21783), section
    3.3.4, states over 90 % effective training time with 466 interruptions in 54 days, so at most some 1,000 s were lost
    to each, the work done again included; 300 s leaves more than half of that to the work."""
    checkpoint_interval_s: float = 600.0
    """Between durable checkpoints where a loss leads back to one; `for_mtbf` computes the best."""
    checkpoint_stall_s: float = 1.0
    """Of training, for each durable checkpoint: the copy to host memory; writing overlaps with training."""
    backup_interval_s: float = 1200.0
    """Between durable checkpoints of policies that need them only when all copies of some state are lost. The engine's
    default, `run.checkpoint_every_s`."""
    storage_bytes_per_s: float = 2e12 / 16_384
    """What a worker reads of a checkpoint per second while all do. The Llama 3 Herd of Models (arXiv 2407.21783),
    section 3.3.1: storage with a sustainable throughput of 2 TB/s, for jobs of up to 16,384 GPUs (section 3.3.4). That
    storage grows with a job is our assumption."""
    horizon_s: float | None = None
    """Expected time to the next event: what costs more than it gains until then is not done. None means as Llama 3's
    rate says for so many workers."""

    def __post_init__(self) -> None:
        """Checks the figures.

        Raises:
            ValueError: with every figure that cannot be.
        """
        positive = ("checkpoint_interval_s", "backup_interval_s", "storage_bytes_per_s", "horizon_s", "copy_share")
        problems = [
            f"{name} is {value}, needed: finite and {'above' if name in positive else 'at least'} 0"
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
            and (not 0 <= value < float("inf") or (name in positive and value == 0))
        ]
        if self.copy_share >= 1:
            problems.append(f"copy_share is {self.copy_share}, needed: below 1, training needs its links too")
        if problems:
            raise ValueError("pauses are impossible: " + "; ".join(problems))

    def at(self, num_workers: int, num_blocks: int = 0) -> "RecoveryTimes":
        """Computes the pauses of a job of so many workers, all in the constants.

        Args:
            num_workers: that agree.
            num_blocks: of the model.
        """
        grown_s = num_workers * (self.agree_s + self.agree_send_s * num_workers) + self.agree_block_s * num_blocks
        return msgspec.structs.replace(
            self,
            recover_s=self.recover_s + grown_s,
            join_s=self.join_s + grown_s,
            agree_s=0.0,
            agree_block_s=0.0,
            agree_send_s=0.0,
        )

    def horizon(self, num_workers: int) -> float:
        """Computes the expected seconds to the next event of so many workers."""
        return WORKER_S_BETWEEN_LOSSES / max(1, num_workers) if self.horizon_s is None else self.horizon_s

    def load_s(self, num_bytes: float) -> float:
        """Computes the seconds in which a worker loads so many bytes of a checkpoint, while all others load theirs."""
        return num_bytes / self.storage_bytes_per_s

    def for_mtbf(self, mtbf_s: float) -> "RecoveryTimes":
        """Returns these times with the horizon, and the checkpoint interval that loses least, at this mean time between
        losses.

        The interval is Young's first-order optimum (CACM 17(9), 1974), sqrt(2 x stall x mtbf), at least a minute:
        writing takes its time too.

        Raises:
            ValueError: a time that is not above 0.
        """
        if not 0 < mtbf_s < float("inf"):
            raise ValueError(f"mean time between losses is {mtbf_s} s, needed: above 0 and finite")
        interval_s = max(60.0, sqrt(2 * self.checkpoint_stall_s * mtbf_s))
        return msgspec.structs.replace(self, checkpoint_interval_s=interval_s, horizon_s=mtbf_s)
