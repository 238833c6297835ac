"""Workers are lost in every way and at every point; the survivors compute the same bits as if nothing had happened.

Real processes, real signals. Every job here is compared with its reference run: losses, state digest, the digest of
every tensor, the number of steps. `run_job` also checks that no process, socket or file is left.
"""

import os
import re
import signal
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Job, QuietReporter, run_job
from tests.integration.waits import held_up, wait_until

from elaswave.errors import RecoveryError
from elaswave.faults.injection import read_fault_records
from elaswave.observability.run_folder import FAULTS_FILE
from elaswave.protocol import events
from elaswave.protocol.step.engine import PHASES

LAYOUTS: dict[str, dict[str, Any]] = {
    "2x2": {"layout.stages": 2, "layout.replicas": 2},
    "[1,3]": {"layout.widths": "[1,3]"},
    "[3,1]": {"layout.widths": "[3,1]"},
}
STEPS = {"run.steps": 6}


@lru_cache(maxsize=1)
def _reference(folder: str) -> Job:
    """The undisturbed run. One is enough: the layout does not show in the result."""
    return run_job(Path(folder), LAYOUTS["2x2"] | STEPS)


@pytest.fixture
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return _reference(str(tmp_path_factory.getbasetemp() / "undisturbed"))


def _survive(
    run_dir: Path,
    reference: Job,
    faults: Sequence[str],
    settings: dict[str, Any] | None = None,
    *,
    layout: str = "2x2",
    **options: Any,
) -> Job:
    job = run_job(run_dir, LAYOUTS[layout] | STEPS | (settings or {}), faults=faults, **options)
    assert job.computation == reference.computation
    assert job.result.steps == len(job.result.losses) == STEPS["run.steps"]
    return job


def _check_kill(run_dir: Path, reference: Job, layout: str, worker: int, phase: str) -> None:
    job = _survive(run_dir, reference, [f"kill:{worker}@3:{phase}"], layout=layout)
    (recovery,) = job.result.recoveries
    assert (recovery.kind, recovery.worker, recovery.step, recovery.phase) == ("lost", worker, 3, phase)
    assert recovery.detected_by in ("exit", "link")
    assert recovery.outcome == ("committed" if phase in ("apply", "gather") else "retried")
    assert recovery.detect_s is not None and 0 <= recovery.detect_s <= recovery.total_s
    alone = layout != "2x2" and worker == (0 if layout == "[1,3]" else 3)
    assert (recovery.critical_bytes > 0) is alone  # a whole stage is lost: its parameters have to move
    assert [generation.generation for generation in job.result.generations] == [1, 2]
    assert worker not in job.result.generations[-1].layout.workers
    assert any(f"worker {worker} (stage" in message for message in job.messages)


QUICK_PHASES = ("forward", "backward", "apply")
"""In the others workers of `test_salvage.py` are lost."""


@pytest.mark.parametrize(
    ("layout", "worker", "phase"),
    [
        pytest.param(
            ["2x2", "[1,3]", "[3,1]"][index % 3],
            (index * 3 + index // 3) % 4,
            phase,
            marks=() if phase in QUICK_PHASES else pytest.mark.slow,
        )
        for index, phase in enumerate(PHASES)
    ]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("[1,3]", 0, "backward"), ("[3,1]", 3, "vote"))],
)
def test_a_kill_in_each_phase(tmp_path: Path, reference: Job, layout: str, worker: int, phase: str) -> None:
    _check_kill(tmp_path / "run", reference, layout, worker, phase)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("worker", range(4))
@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_of_each_worker_in_each_phase(
    tmp_path: Path, reference: Job, layout: str, worker: int, phase: str
) -> None:
    _check_kill(tmp_path / "run", reference, layout, worker, phase)


@pytest.mark.slow
def test_an_exactly_addressed_kill_strikes_where_it_should(tmp_path: Path, reference: Job) -> None:
    job = _survive(tmp_path / "run", reference, ["kill:1@3:apply+5"])
    (record,) = read_fault_records(job.run_dir / FAULTS_FILE)
    assert (record.worker, record.step, record.phase, record.action) == (1, 3, "apply", 5)


def test_a_hang_is_noticed_by_its_silence(tmp_path: Path, reference: Job) -> None:
    job = _survive(tmp_path / "run", reference, ["hang:2@3:backward"])
    assert [recovery.detected_by for recovery in job.result.recoveries] == ["heartbeat"]


@pytest.mark.slow
def test_a_worker_that_is_cut_off(tmp_path: Path, reference: Job) -> None:
    job = _survive(tmp_path / "run", reference, ["cut:3@3:forward"])
    (recovery,) = job.result.recoveries
    assert recovery.worker == 3
    assert recovery.detected_by in ("heartbeat", "link")


def test_a_worker_whose_links_are_closed_is_noticed_by_its_peers(tmp_path: Path, reference: Job) -> None:
    """Its process goes on: what the others say of their links to it is the first that the coordinator hears."""
    job = _survive(tmp_path / "run", reference, ["cut-close:3@3:forward"])
    (recovery,) = job.result.recoveries
    assert (recovery.worker, recovery.detected_by) == (3, "link")


@pytest.mark.slow
def test_two_kills_in_one_step(tmp_path: Path, reference: Job) -> None:
    job = _survive(tmp_path / "run", reference, ["kill:1@3:vote", "kill:2@3:reduce"])
    assert sorted(recovery.worker or 0 for recovery in job.result.recoveries) == [1, 2]


def test_two_followers_survive_the_loss_of_any_two_at_once(tmp_path: Path, reference: Job) -> None:
    """Workers 0 and 1 are the whole first stage; nothing but their followers elsewhere has its state."""
    job = _survive(
        tmp_path / "run", reference, ["kill:0@3:backward", "kill:1@3:backward"], {"elastic.num_followers": 2}
    )
    assert job.result.generations[-1].layout.workers == (2, 3)


@pytest.mark.slow
def test_followers_are_replicated_again_so_that_a_later_loss_is_survived_too(tmp_path: Path, reference: Job) -> None:
    job = _survive(tmp_path / "run", reference, ["kill:0@2:forward", "kill:1@4:gather", "kill:2@6:vote"])
    assert job.result.generations[-1].layout.workers == (3,)


@pytest.mark.parametrize("replicated_bytes", [12 * 1024, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_a_kill_during_re_replication(tmp_path: Path, reference: Job, replicated_bytes: int) -> None:
    """With two followers every block still has another copy, however far re-replication has come."""
    settings = {"elastic.num_followers": 2, "elastic.refill_bytes_per_step": replicated_bytes}
    _survive(tmp_path / "run", reference, ["kill:0@2:backward", "kill:1@3:reduce"], settings)


def test_without_another_copy_everybody_goes_back_to_the_checkpoint(tmp_path: Path, reference: Job) -> None:
    settings = {"elastic.refill_bytes_per_step": 1, "run.checkpoint_every": 1}
    job = _survive(tmp_path / "run", reference, ["kill:0@4:backward", "kill:1@5:reduce"], settings)
    assert any("goes back to the checkpoint of step" in message for message in job.messages)


def test_without_another_copy_and_without_a_checkpoint_the_blocks_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        RecoveryError, match=r"all copies of \d+ of \d+ blocks \(.*\) were lost with workers \[.*\], and there"
    ):
        run_job(tmp_path, LAYOUTS["2x2"] | STEPS, faults=["kill:0@3:backward", "kill:1@3:backward"])


def test_fewer_workers_than_wanted_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="3 workers are left .* elastic.min_workers asks for 4"):
        run_job(tmp_path, LAYOUTS["2x2"] | STEPS | {"elastic.min_workers": 4}, faults=["kill:0@3"])


def test_too_many_failures_in_an_hour_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="workers were lost 2 times within an hour.*allows 1"):
        run_job(
            tmp_path, LAYOUTS["2x2"] | STEPS | {"elastic.max_failures_per_hour": 1}, faults=["kill:0@2", "kill:2@4"]
        )


def test_the_coordinator_dies_and_training_goes_on_under_a_new_one(tmp_path: Path, reference: Job) -> None:
    job = _survive(tmp_path / "run", reference, ["kill:coordinator@3", "kill:1@5:backward"])
    assert [recovery.kind for recovery in job.result.recoveries] == ["coordinator", "lost"]


class _KillBefore:
    """Kills the coordinator once, before an effect of one kind is carried out."""

    def __init__(self, kind: type, mark: Path) -> None:
        self.kind = kind
        self.mark = mark

    def __call__(self, effect: events.CoordinatorEffect) -> None:
        interesting = isinstance(effect, self.kind) and not (
            isinstance(effect, events.Persist) and isinstance(effect.record, events.TermRecord | events.StartRecord)
        )
        if interesting and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "kind",
    [
        events.Send,
        events.Decided,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (events.Persist, events.NewGeneration, events.Resumed)
        ),
    ],
)
def test_the_coordinator_dies_in_the_middle_of_a_recovery(tmp_path: Path, reference: Job, kind: type) -> None:
    killer = _KillBefore(kind, tmp_path / "killed")
    job = _survive(tmp_path / "run", reference, ["kill:2@3:backward"], before_effect=killer)
    assert (tmp_path / "killed").exists()
    assert job.result.generations[-1].layout.workers == (0, 1, 3)


def test_a_kill_during_a_recovery(tmp_path: Path, reference: Job) -> None:
    """Another worker dies while the survivors of the first loss install the decision."""

    class WritePid:
        def reached(self, phase: str, index: int, machine: Any) -> None:
            if machine.worker == 3 and (machine.step, phase, index) == (1, "forward", 0):
                (tmp_path / "pid").write_text(str(os.getpid()))
            if machine.worker == 1 and (machine.step, phase, index) == (3, "backward", 1):
                os.kill(os.getpid(), signal.SIGKILL)

    def kill_third(effect: events.CoordinatorEffect) -> None:
        if isinstance(effect, events.Send) and isinstance(effect.message, events.Decision) and effect.worker == 3:
            mark = tmp_path / "killed"
            if not mark.exists():
                mark.touch()
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    job = _survive(tmp_path / "run", reference, [], probe=WritePid(), before_effect=kill_third)
    assert (tmp_path / "killed").exists()
    assert job.result.generations[-1].layout.workers == (0, 2)


def test_a_worker_that_wakes_up_after_it_was_declared_lost_ends_itself_and_changes_nothing(
    tmp_path: Path, reference: Job
) -> None:
    """SIGSTOP, declared lost, SIGCONT while the others go on."""
    log, pid = tmp_path / "run" / "logs" / "worker-1.log", tmp_path / "pid"

    class Hang:
        def reached(self, phase: str, index: int, machine: Any) -> None:
            if machine.worker == 1 and (machine.step, phase, index) == (3, "backward", 1):
                pid.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            elif machine.worker != 1 and machine.step == 5 and phase == "forward" and index == 0:
                with held_up(machine):  # it must end while the others train
                    wait_until(lambda: "no member any more" in log.read_text())

    def wake(effect: events.CoordinatorEffect) -> None:
        is_decided = isinstance(effect, events.Send) and isinstance(effect.message, events.Decision)
        if is_decided and pid.exists() and not woken:
            woken.append(int(pid.read_text()))
            os.kill(woken[0], signal.SIGCONT)

    woken: list[int] = []
    job = _survive(tmp_path / "run", reference, [], probe=Hang(), before_effect=wake)
    assert [recovery.worker for recovery in job.result.recoveries] == [1]
    assert "worker 1 is no member any more and ends itself" in log.read_text()


def test_the_line_on_the_terminal_says_what_happened(tmp_path: Path, reference: Job) -> None:
    class InOrder(QuietReporter):
        def step(self, step: int, *facts: Any) -> None:
            shown.append((step, facts[-2]))
            self.losses[step] = facts[1]

        def message(self, text: str) -> None:
            super().message(text)
            shown.append(text)

    shown: list[Any] = []
    reporter = InOrder()
    _survive(tmp_path / "run", reference, ["kill:3@3:backward"], reporter=reporter)
    (told,) = [index for index, entry in enumerate(shown) if isinstance(entry, str) and "lost in" in entry]
    assert {layout for _, layout in shown[:told]} == {"2x2"}, "a recovery is told before its layout is shown"
    assert {entry[1] for entry in shown[told + 1 :] if isinstance(entry, tuple)} == {"[2,1]"}
    (line,) = [message for message in reporter.messages if "lost in" in message]
    assert line.startswith("worker 3 (stage 1) lost in backward of step 3 (")
    assert re.search(
        r"generation 2, \d+ micro-batches rerouted, \d+ blocks promoted, 0 B moved, going on after \d+ ms", line
    )
    assert ", step redone in " in line
