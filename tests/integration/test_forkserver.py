"""The forkserver: who holds torch, what its end means, and how checkpoints are committed by its children."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration import own
from tests.integration.jobs import Calm, QuietReporter, nothing_left, run_job, small_config
from tests.integration.waits import held_up
from tests.signals import hear_signals
from torch import Tensor, nn

from elaswave.checkpoints import commit as checkpoint_commit
from elaswave.checkpoints.checkpoint import CheckpointSearch, find_newest_checkpoint
from elaswave.coordinator.records import checkpoints, job_end
from elaswave.errors import LaunchError, RecoveryError
from elaswave.faults.injection import Phase
from elaswave.launcher import launcher, processes
from elaswave.launcher.forkserver import server
from elaswave.launcher.forkserver.machine import COMMITTER
from elaswave.launcher.forkserver.messages import Spawned
from elaswave.observability.events import RunFinished, read_events
from elaswave.observability.processes import RunProcess, lives, read_processes
from elaswave.protocol.events import CoordinatorEffect, FindCheckpoint
from elaswave.training import definition as builtin

WAIT_S = 120.0
PATIENT = ["run.steps=100000", "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "layout.widths=[2]"]
SETTINGS = {"run.steps": 6, "run.checkpoint_every": 2, "layout.widths": "[1, 1]"}


def start(folder: Path) -> subprocess.Popen[str]:
    """A job that goes on until it is ended, as a person starts it."""
    (folder / "tmp").mkdir()
    settings = [word for pair in PATIENT for word in ("--set", pair)]
    command = [sys.executable, "-m", "elaswave", "train", "--run-dir", str(folder / "run"), *settings]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=hear_signals,
    )


def wait_for(what: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        found = what()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it never came")


def roles(run_dir: Path, *wanted: str) -> dict[str, RunProcess]:
    """One process of each role, once all roles are there."""
    found = {process.role: process for process in read_processes(run_dir)}
    return found if set(wanted) <= set(found) else {}


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def status_of(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def test_launcher_and_coordinator_hold_no_torch(tmp_path: Path) -> None:
    job = start(tmp_path)
    try:
        log = tmp_path / "run" / "events.jsonl"
        wait_for(lambda: log.exists() and '"kind":"step"' in log.read_text())
        found = roles(tmp_path / "run", "launcher", "forkserver", "coordinator", "worker")
        assert {role: maps_torch(process.pid) for role, process in found.items()} == {
            "launcher": False,
            "forkserver": True,
            "coordinator": False,
            "worker": True,
        }
        resident_kb = {role: status_of(process.pid, "VmRSS") for role, process in found.items()}
        assert max(resident_kb["launcher"], resident_kb["coordinator"]) < resident_kb["forkserver"] / 2, resident_kb
        wait_for(lambda: status_of(found["forkserver"].pid, "Threads") == 1)
        assert status_of(found["launcher"].pid, "Threads") == 1, "they fork"
    finally:
        job.send_signal(signal.SIGINT)
        try:
            job.communicate(timeout=WAIT_S)
        finally:
            job.kill()
    assert job.returncode == 130
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("launcher", "step"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("launcher", "forkserver"),
                ("launcher", "coordinator"),
                ("forkserver", "coordinator"),
                ("forkserver", "forkserver"),
                ("forkserver", "step"),
            )
        ),
    ],
)
def test_the_end_of_launcher_or_template_is_the_end_of_all(victim: str, moment: str, tmp_path: Path) -> None:
    job = start(tmp_path)
    run_dir = tmp_path / "run"
    try:
        seen: list[RunProcess] = []
        if moment == "step":
            log = run_dir / "events.jsonl"
            wait_for(lambda: log.exists() and '"kind":"step"' in log.read_text())
        else:
            wait_for(lambda: roles(run_dir, moment))
        seen = read_processes(run_dir)
        os.kill(roles(run_dir, victim)[victim].pid, signal.SIGKILL)
        _, shown = job.communicate(timeout=WAIT_S)
        wait_for(lambda: not any(lives(process) for process in [*seen, *read_processes(run_dir)]))
    finally:
        job.kill()
        job.wait()
    if victim == "launcher":
        assert job.returncode == -signal.SIGKILL
        return
    assert job.returncode == 1
    error = shown.splitlines()[-1]
    assert "error: the forkserver, from which" in error and "was killed by SIGKILL" in error, shown
    assert "Traceback" not in shown
    assert os.listdir(tmp_path / "tmp") == []
    assert not read_processes(run_dir)
    if moment == "step":
        last = read_events(run_dir / "events.jsonl")[-1]
        assert isinstance(last, RunFinished) and last.outcome == "failed"


class KillsTheForkServer:
    """Worker 0 kills the process that it was forked from in step 5, when a checkpoint is durable."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        if (machine.worker, machine.step, phase, index) == (0, 5, "forward", 0):
            with held_up(machine):
                wait_for(lambda: list(self._run_dir.glob("checkpoints/step-????????")))
            os.kill(os.getppid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_job_whose_template_was_killed_goes_on_from_its_checkpoint(tmp_path: Path, calm: Calm) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(RecoveryError, match="was killed by SIGKILL, and all workers have ended with it") as raised:
        run_job(run_dir, SETTINGS, probe=KillsTheForkServer(run_dir))
    assert "to go on from there: elaswave train --resume" in str(raised.value)
    job = run_job(run_dir, SETTINGS, resume=True)
    assert job.computation == calm(SETTINGS).computation


def test_a_template_that_is_killed_when_the_result_is_written_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, run_dir = job_end.write_result, tmp_path / "run"

    def write_and_kill(*arguments: Any) -> None:
        write(*arguments)
        server = roles(run_dir, "forkserver")["forkserver"]
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not lives(server))

    monkeypatch.setattr(job_end, "write_result", write_and_kill)
    job = run_job(run_dir, SETTINGS)
    assert job.result.steps == 6 and [record.step for record in job.result.checkpoints][-1] == 6


def test_a_template_that_cannot_load_what_workers_need_ends_the_job_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **keywords: object) -> None:
        raise ImportError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(builtin, "build_model", broken)
    with nothing_left(), pytest.raises(LaunchError) as raised:
        launcher.train(small_config(), tmp_path, reporter=QuietReporter())
    assert "cannot load torch and the model: ImportError: libtorch_cpu.so: cannot open" in str(raised.value)
    assert "ImportError" in (tmp_path / "logs" / "forkserver.log").read_text()


class Unlucky:
    """In place of `commit_checkpoint`: the first committers of the job are killed."""

    def __init__(self, folder: Path, times: int, also: Callable[[], None] = lambda: None) -> None:
        self._commit, self._folder, self._times, self._also = checkpoint_commit.commit_checkpoint, folder, times, also

    def __call__(self, *arguments: Any, **keywords: Any) -> object:
        mark = self._folder / f"lost-{len(list(self._folder.glob('lost-*')))}"
        if mark.name == f"lost-{self._times}":
            return self._commit(*arguments, **keywords)
        mark.touch()
        self._also()
        os.kill(os.getpid(), signal.SIGKILL)
        return None


@pytest.mark.parametrize(("lost", "durable"), [pytest.param(1, [2, 4, 6], marks=pytest.mark.slow), (2, [4, 6])])
def test_a_lost_committer_costs_at_most_its_checkpoint(
    lost: int, durable: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    monkeypatch.setattr(checkpoint_commit, "commit_checkpoint", Unlucky(tmp_path, lost))
    reporter = QuietReporter()
    job = run_job(tmp_path / "run", SETTINGS | {"run.keep_checkpoints": 9}, reporter=reporter)
    assert [record.step for record in job.result.checkpoints] == durable
    told = [text for text in reporter.errors if "the process that committed it was lost" in text]
    assert len(told) == lost - 1
    assert len(list(tmp_path.glob("lost-*"))) == lost
    monkeypatch.undo()
    assert job.computation == calm(SETTINGS).computation


def test_a_coordinator_that_is_lost_during_a_commit_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"

    def take_the_coordinator_along() -> None:
        os.kill(roles(run_dir, "coordinator")["coordinator"].pid, signal.SIGKILL)

    monkeypatch.setattr(checkpoint_commit, "commit_checkpoint", Unlucky(tmp_path, 1, take_the_coordinator_along))
    job = run_job(run_dir, SETTINGS | {"run.keep_checkpoints": 9})
    assert [record.step for record in job.result.checkpoints] == [2, 4, 6]
    assert [recovery.kind for recovery in job.result.recoveries] == ["coordinator"]
    assert list((run_dir / "checkpoints").glob("*.tmp")) == []


class Hangs:
    """In place of `commit_checkpoint`: the first committer of the job does not come to an end.

    Args:
        folder: for the mark that there has been one.
        first: what it does before.
    """

    def __init__(self, folder: Path, first: Callable[[], None] = lambda: None) -> None:
        self._commit, self._mark, self._first = checkpoint_commit.commit_checkpoint, folder / "hangs", first

    def __call__(self, *arguments: Any, **keywords: Any) -> object:
        if self._mark.exists():
            return self._commit(*arguments, **keywords)
        self._mark.touch()
        self._first()
        time.sleep(10 * WAIT_S)
        raise AssertionError("it was to be killed")


def in_half_a_second(monkeypatch: pytest.MonkeyPatch) -> Callable[[processes.LauncherWaits, float], None]:
    """A `LauncherWaits.for_commit` that shortens the bound from then on: a coordinator that a busy machine keeps from
    starting has the usual one."""
    for_commit = processes.LauncherWaits.for_commit

    def shortened(waits: processes.LauncherWaits, now_s: float) -> None:
        monkeypatch.setattr(processes, "KILLED_S_MAX", 0.5)
        for_commit(waits, now_s)

    return shortened


@pytest.mark.slow
def test_a_commit_that_takes_too_long_is_ended_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_commit, "commit_checkpoint", Hangs(tmp_path))
    monkeypatch.setattr(checkpoints, "COMMIT_S_MAX", 4.0)
    reporter = QuietReporter()
    job = run_job(tmp_path / "run", SETTINGS | {"run.keep_checkpoints": 9}, reporter=reporter)
    assert [record.step for record in job.result.checkpoints] == [4, 6]
    (told,) = reporter.errors
    assert "the checkpoint of step 2 could not be written, training goes on without it: its commit has not" in told
    assert sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.parametrize(
    "is_told",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["before the launcher knows of it", "at work"],
)
def test_a_commit_that_cannot_be_ended_for_the_next_coordinator_ends_the_job(
    is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk that is gone; here the process is stopped that would have to end it."""
    run_dir = tmp_path / "run"
    say = server._Serving._say

    def stop(serving: server._Serving, message: Any) -> None:
        """In the forkserver, which has forked the committer."""
        is_of_committer = isinstance(message, Spawned) and message.child == COMMITTER
        if is_told or not is_of_committer:
            say(serving, message)
        if is_of_committer:
            os.kill(roles(run_dir, "coordinator")["coordinator"].pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(server._Serving, "_say", stop)
    monkeypatch.setattr(checkpoint_commit, "commit_checkpoint", Hangs(tmp_path))
    monkeypatch.setattr(processes.LauncherWaits, "for_commit", in_half_a_second(monkeypatch))
    with pytest.raises(RecoveryError, match="no other one can be started: the process that was committing") as raised:
        run_job(run_dir, SETTINGS)
    assert "it has no checkpoint, so it can only begin again" in str(raised.value)
    assert read_processes(run_dir) == []


@pytest.mark.parametrize(
    ("where", "told"),
    [
        pytest.param(
            "run_forkserver",
            r"cannot load torch and the model: it has used no processor time for \d+ s and is stopped",
            marks=pytest.mark.slow,
        ),
        ("_Serving", r"does not fork worker 0, worker 1: it has used no processor time for \d+ s and is stopped"),
    ],
    ids=["loading", "forking"],
)
def test_a_template_that_was_stopped_is_noticed(
    where: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_itself(*arguments: object) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 1

    monkeypatch.setattr(processes, "STOPPED_S_MAX", 1.0)
    if where == "run_forkserver":
        monkeypatch.setattr(processes, "run_forkserver", stop_itself)
    else:
        monkeypatch.setattr(server._Serving, "run", stop_itself)
    with nothing_left(), pytest.raises((LaunchError, RecoveryError), match=told):
        launcher.train(small_config({"layout.widths": "[1, 1]"}), tmp_path, reporter=QuietReporter())


def test_a_template_that_could_not_fork_all_workers_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the ends of those whom it has forked, not for the end of one that never was."""
    fork, has_ended, forks, answers = os.fork, processes._has_ended, [], []

    def fork_or_fail() -> int:
        forks.append(1)
        if len(forks) > 2:  # of the forkserver itself, and of one worker
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    def ended(child: Any, timeout_s: float) -> bool:
        answers.append((timeout_s > 0, has_ended(child, 10 * timeout_s)))
        return answers[-1][1]

    monkeypatch.setattr(os, "fork", fork_or_fail)
    monkeypatch.setattr(processes, "_has_ended", ended)
    with nothing_left(), pytest.raises(LaunchError, match="the process of worker 1 cannot be started"):
        launcher.train(small_config({"layout.widths": "[1, 1]"}), tmp_path, reporter=QuietReporter())
    assert answers[-1] == (True, True), "it was not killed"


def test_a_system_that_refuses_the_committer_costs_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, forks = os.fork, []

    def fork_or_fail() -> int:
        forks.append(1)
        if len(forks) in (4, 5):  # after the forkserver itself and its two workers; a last checkpoint is to be written
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", fork_or_fail)
    reporter = QuietReporter()
    job = run_job(tmp_path, SETTINGS, reporter=reporter)
    assert job.result.steps == 6 and [point.step for point in job.result.checkpoints] == [6]
    told = [
        text for text in reporter.errors if "the process of the committer of a checkpoint cannot be started" in text
    ]
    assert len(told) == 2


def test_a_coordinator_that_looks_for_checkpoints_waits_for_one_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers would go back to an older one, and the newer one would be complete afterwards."""
    commit, mark, begun, early = checkpoint_commit.commit_checkpoint, *(tmp_path / name for name in ("a", "b", "c"))
    run_dir = tmp_path / "run"

    def slow(*arguments: Any, **keywords: Any) -> object:
        if arguments[0].name.startswith("step-00000004"):
            begun.touch()
            wait_for(mark.exists)
        return commit(*arguments, **keywords)

    def note(effect: CoordinatorEffect) -> None:
        if isinstance(effect, FindCheckpoint):
            mark.touch()

    def look(folder: Path, *options: Any) -> CheckpointSearch:
        if list(folder.glob("checkpoints/step-00000004.tmp")):
            early.touch()
        return find_newest_checkpoint(folder, *options)

    class KillsItself:
        def reached(self, phase: Phase, index: int, machine: Any) -> None:
            if (machine.worker, machine.step, phase, index) == (1, 5, "backward", 0):
                with held_up(machine):
                    wait_for(begun.exists)
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(checkpoint_commit, "commit_checkpoint", slow)
    monkeypatch.setattr(checkpoints, "find_newest_checkpoint", look)
    settings = SETTINGS | {"elastic.num_followers": 0, "layout.widths": "[2]"}
    job = run_job(run_dir, settings, probe=KillsItself(), before_effect=note)
    assert mark.exists() and not early.exists()
    assert any("goes back to the checkpoint of step 4" in text for text in job.messages), job.messages
    assert job.result.steps == 6


class Helped(nn.Module):
    """A layer that has a process of its own in workers, in a session of its own, as a compiler's pool is."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self.inner, self.note, self.script = nn.Linear(6, 2), note, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.script and not hasattr(self, "helper"):
            self.helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with self.note.open("a") as note:
                note.write(f"{self.helper.pid}\n")
        return self.inner(x)


def test_what_workers_have_started_ends_with_the_job_and_nothing_else_does(tmp_path: Path) -> None:
    note = tmp_path / "note"
    settings = {"layout.widths": [2], "run.steps": 6}
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            own.train(tmp_path / "run", settings, model=nn.Sequential(Helped(note)), faults=["kill:1@3:backward"])
            assert other.poll() is None, "it is the script's"
        finally:
            other.kill()
    helpers = note.read_text().split()
    assert len(helpers) >= 2 and not any(Path(f"/proc/{pid}").exists() for pid in helpers)
