"""Loaders in real jobs: the same bits with and without them, through losses of workers and of loaders; none is left."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.jobs import Job, run_job

from elaswave.data.samples import TokenSamples
from elaswave.errors import RecoveryError, WorkerError
from elaswave.faults.injection import Phase
from elaswave.launcher import local_job
from elaswave.observability.events import StepCommitted, read_events
from elaswave.observability.processes import RunProcess, lives, read_processes
from elaswave.training.dataset import UserDataError
from elaswave.training.definition import builtin_training

SETTINGS = {"run.steps": 8, "layout.widths": "[2, 2]", "run.eval_every": 4, "run.eval_microbatches": 3}


def with_loaders(
    monkeypatch: pytest.MonkeyPatch, num_loaders: int, samples: Callable[[TokenSamples], Any] = lambda samples: samples
) -> None:
    """Lets jobs that are started from now on have loaders; `samples` may stand between them and the tokens."""
    setup = local_job.ForkServerSetup

    def made(**options: Any) -> Any:
        training = builtin_training(options["job"].config)
        opened = training.open_samples
        options["training"] = replace(
            training,
            loaders=num_loaders,
            open_samples=lambda folder: samples(opened(folder)),  # type: ignore[arg-type]
        )
        return setup(**options)

    monkeypatch.setattr(local_job, "ForkServerSetup", made)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("plain"), SETTINGS)


class Between:
    """Stands between loaders and tokens."""

    def __init__(self, samples: TokenSamples) -> None:
        self.sources = samples.sources
        self.num_samples = samples.num_samples
        self.hashes = samples.hashes
        self._batch = samples.batch

    def batch(self, draws: Any, split: Any) -> Any:
        self.before(draws, split)
        return self._batch(draws, split)

    def before(self, draws: Any, split: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    "faults", [pytest.param([], marks=pytest.mark.slow), ["kill:3@3:backward", "kill:0@6:forward"]]
)
def test_the_bits_are_those_without_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Job, faults: list[str]
) -> None:
    with_loaders(monkeypatch, 2)
    job = run_job(tmp_path, SETTINGS, faults=faults)
    assert job.computation == plain.computation
    assert job.result.val_losses == plain.result.val_losses
    assert len(job.result.recoveries) == len(faults)
    assert set(job.result.data_wait_s) == {0, 1, 2, 3} - ({0, 3} if faults else set())
    steps = [event for event in read_events(tmp_path / "events.jsonl") if isinstance(event, StepCommitted)]
    assert all(0 <= step.phases_s.get("data", 0.0) <= step.phases_s["run"] for step in steps)


class StrikesLoaders:
    """Stops or kills the loaders of worker 0 when it comes to a step; a probe of every worker."""

    def __init__(self, run_dir: Path, number: signal.Signals) -> None:
        self._run_dir = run_dir
        self._number = number

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        if (machine.worker, machine.step, phase, index) == (0, 4, "forward", 0):
            struck = [process for process in read_processes(self._run_dir) if process.role == "loader"]
            struck = [process for process in struck if process.id == 0]
            assert len(struck) == 2
            for process in struck:
                os.kill(process.pid, self._number)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
def test_loaders_that_die_or_hang_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Job, number: signal.Signals
) -> None:
    monkeypatch.setattr("elaswave.engine.batches.HANG_S", 0.3)
    monkeypatch.setattr("elaswave.engine.batches.HANG_FLOOR_S", 0.3)
    with_loaders(monkeypatch, 2)
    job = run_job(tmp_path, SETTINGS, probe=StrikesLoaders(tmp_path, number))
    assert job.computation == plain.computation
    assert not job.result.recoveries, "no worker was lost"


def test_an_exception_in_the_data_is_shown_with_sample_and_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Between):
        def before(self, draws: Any, split: Any) -> None:
            if any(draw.position == 33 for draw in draws):
                try:
                    raise OSError("no such image")
                except OSError as error:
                    raise UserDataError("dataset[17]", error) from error

    with_loaders(monkeypatch, 1, Broken)
    with pytest.raises(WorkerError) as caught:
        run_job(tmp_path, {**SETTINGS, "run.eval_every": 0})
    # Sample 33 is in the second half of micro-batch 16 of the run: the second of step 4, with 5 of 2 samples each.
    assert caught.value.summary.startswith("OSError: no such image (in dataset[17]) (at step 4, micro-batch 1)")
    assert 'raise OSError("no such image")' in caught.value.traceback_text


@pytest.mark.slow
def test_data_that_end_their_process_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaves(Between):
        def before(self, draws: Any, split: Any) -> None:
            if any(draw.position == 33 for draw in draws):
                os._exit(7)

    with_loaders(monkeypatch, 1, Leaves)
    with pytest.raises(WorkerError, match="3 loaders, one after the other, have ended .*step 4, micro-batch 1"):
        run_job(tmp_path, {**SETTINGS, "run.eval_every": 0})


class KillsTheForkServer:
    """Kills the forkserver from a worker, and keeps what processes there were; a probe of every worker."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        if (machine.worker, machine.step, phase, index) == (0, 3, "forward", 0):
            found = read_processes(self._run_dir)
            (self._run_dir / "seen.json").write_bytes(msgspec.json.encode(found))
            os.kill(next(process.pid for process in found if process.role == "forkserver"), signal.SIGKILL)


def test_loaders_end_with_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_loaders(monkeypatch, 2)
    with pytest.raises(RecoveryError, match="the forkserver, .* was killed by SIGKILL"):
        run_job(tmp_path, SETTINGS, probe=KillsTheForkServer(tmp_path))
    seen = msgspec.json.decode((tmp_path / "seen.json").read_bytes(), type=list[RunProcess])
    assert sum(process.role == "loader" for process in seen) == 8
    assert not [process for process in seen if process.role != "launcher" and lives(process)]
