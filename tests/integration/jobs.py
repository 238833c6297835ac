"""Whole jobs with real worker processes, small enough to run many of them, and what is left when they have ended."""

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elaswave.config.cluster import labels_of, sites_that_may_part
from elaswave.config.load import load_config
from elaswave.config.schema import Config
from elaswave.faults.injection import Probe, parse_faults
from elaswave.launcher import launcher
from elaswave.observability.processes import read_processes
from elaswave.observability.result import RunResult, read_digests
from elaswave.protocol.events import CoordinatorEffect
from elaswave.types import Layout

SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_heads": 2,
    "model.context_length": 16,
    "batch.num_microbatches": 5,
    "batch.microbatch_size": 2,
    "optimizer.lr": 1e-3,
    "elastic.block_size": 1024,
    "elastic.num_followers": 1,
    "elastic.rebalance": False,
    "elastic.respawn": False,
    "run.steps": 12,
}
"""A GPT of 4 layers and some 42,000 parameters in 44 blocks; five micro-batches divide by no number of workers."""


class QuietReporter:
    """A reporter that keeps what it was told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.errors: list[str] = []
        self.losses: dict[int, float] = {}

    def started(self, config: object, layout: Layout, run_dir: Path) -> None:
        pass

    def step(
        self,
        step: int,
        total_steps: int,
        loss: float,
        tokens_per_s: float,
        data_pass: int,
        generation: int,
        layout_name: str,
        unit: str,
    ) -> None:
        self.losses[step] = loss

    def evaluation(self, step: int, loss: float) -> None:
        pass

    def message(self, text: str) -> None:
        self.messages.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)

    def finished(self, result: RunResult, run_dir: Path) -> None:
        pass

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


class Job(NamedTuple):
    """A job that has ended well."""

    run_dir: Path
    result: RunResult
    digests: dict[str, str]
    messages: list[str]
    errors: Sequence[str] = ()

    @property
    def computation(self) -> tuple[list[Any], str, dict[str, str]]:
        """What must be equal for two jobs to be the same computation: losses, state digest, digests per tensor."""
        return self.result.losses, self.result.state_digest, self.digests


Calm = Callable[[Mapping[str, Any]], Job]
"""The fixture `calm`: gives the undisturbed job with changes by dotted key."""


def small_config(settings: Mapping[str, Any] | None = None) -> Config:
    """The small model's configuration with changes by dotted key; its layout is resolved."""
    values = {**SMALL, **(settings or {})}
    return load_config(None, [f"{key}={as_toml(value)}" for key, value in values.items()], None)


def run_job(
    run_dir: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    probe: Probe | None = None,
    resume: bool = False,
    reporter: QuietReporter | None = None,
    faults: Sequence[str] = (),
    before_effect: Callable[[CoordinatorEffect], None] = lambda effect: None,
) -> Job:
    """Trains in real processes, and checks that nothing of the job is left.

    Args:
        run_dir: made if it is not there.
        settings: changes to `SMALL`, by dotted key.
        probe: told of every point inside the workers.
        resume: go on from the newest checkpoint in run_dir.
        reporter: gets the messages.
        faults: specs as of ``--fault``.
        before_effect: called in the coordinator before each effect of the protocol.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    reporter = reporter or QuietReporter()
    config = small_config(settings)
    injected = parse_faults(
        faults,
        seed=config.run.seed,
        workers=range(sum(config.widths)),
        num_steps=config.run.steps,
        respawns=config.elastic.respawns,
        hosts=labels_of(config),
        sites=sites_that_may_part(config),
    )
    with nothing_left():
        result = launcher.train(
            config,
            run_dir,
            resume=resume,
            probe=probe,
            reporter=reporter,
            faults=injected,
            before_effect=before_effect,
        )
    digests = read_digests(run_dir)
    assert digests is not None
    assert all((run_dir / point.path).is_dir() for point in result.checkpoints)
    return Job(run_dir, result, digests, reporter.messages, reporter.errors)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Whatever happens inside, no process, thread, descriptor, socket or temporary file of a job may stay."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        gc.collect()  # what earlier tests have dropped is not to vanish while this one is watched
        before = _traces()
        previous, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = previous
            now = _traces()
            names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            left = {name: f"{now.get(name)} instead of {before.get(name)}" for name in names}
            # torch makes an empty folder for its compiler when it is first used.
            files = [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]
            left |= {"temporary files": str(files)} if files else {}
            assert not left, f"left behind: {left}"


def _traces() -> dict[str, object]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        children = True
    except ChildProcessError:
        children = False
    return {
        "child processes": children,
        "threads": threading.active_count(),
        "shared memory": sorted(name for name in os.listdir("/dev/shm") if "elaswave" in name),
        **_descriptors(),
    }


def _descriptors() -> dict[str, str]:
    """What each open descriptor refers to. That of the listing itself is none of them: which number it has also depends
    on what another thread is about to open."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed by now, or not open yet
            found[f"descriptor {number}"] = os.readlink(f"/proc/self/fd/{number}")
    return found


def coordinator_of(run_dir: Path) -> int:
    """The process id of a job's coordinator, as its run folder has it."""
    return next(process.pid for process in read_processes(run_dir) if process.role == "coordinator")


def as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flips one bit of one element of a contiguous float32 tensor."""
    tensor.view(torch.int32)[element] ^= 1 << bit
