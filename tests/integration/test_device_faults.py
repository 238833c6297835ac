"""Faults of devices in whole jobs, on the loopback device: the worker ends itself in the device's own words, the others
go on with the same bits, and what would strike all of them ends the job."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.jobs import Job, run_job
from tests.integration.unlucky import make_unlucky

from elaswave.devices.interface import DeviceMemory
from elaswave.devices.loopback import Loopback
from elaswave.errors import WorkerError
from elaswave.protocol.step.activity import IDLE

ASSERTED = "CUDA error: device-side assert triggered"
LOST = "CUDA error: uncorrectable ECC error encountered"
JOB: dict[str, Any] = {
    "device.kind": "loopback",
    "layout.stages": 2,
    "layout.replicas": 2,
    "run.steps": 12,
    "optimizer.schedule": "constant",
}


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training, nothing going wrong."""
    return run_job(tmp_path_factory.mktemp("unharmed"), JOB)


class Raises:
    """Some workers meet a fault of their device in step 4.

    Args:
        workers: they.
        words: the device's.
    """

    def __init__(self, workers: tuple[int, ...], words: str) -> None:
        self.workers, self.words = workers, words

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if machine.worker in self.workers and (machine.step, phase, index) == (4, "backward", 0):
            raise torch.AcceleratorError(self.words + "\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.")


def test_others_go_on_without_a_worker_whose_context_is_broken(tmp_path: Path, unharmed: Job) -> None:
    job = run_job(tmp_path, JOB, probe=Raises((3,), ASSERTED))
    assert job.computation == unharmed.computation
    (recovery,) = job.result.recoveries
    assert (recovery.worker, recovery.detected_by) == (3, "exit")
    said = job.result.generations[-1].reason
    assert f"broken device context: {ASSERTED} (met at step 4, in backward of micro-batch " in said
    assert "TORCH_USE_CUDA_DSA" not in said
    assert "TORCH_USE_CUDA_DSA" in (tmp_path / "logs" / "worker-3.log").read_text()


def test_a_broken_context_of_two_workers_at_one_step_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=rf"{ASSERTED} .*; the same error has ended worker [13]"):
        run_job(tmp_path, JOB, probe=Raises((1, 3), ASSERTED))


@pytest.mark.slow
def test_devices_that_are_lost_together_are_no_fault_of_the_program(tmp_path: Path, unharmed: Job) -> None:
    job = run_job(tmp_path, JOB, probe=Raises((1, 3), LOST))
    assert job.computation == unharmed.computation
    assert sorted(recovery.worker for recovery in job.result.recoveries) == [1, 3]


def no_memory(output: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def test_memory_that_a_micro_batch_does_not_fit_into_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unlucky(monkeypatch, no_memory, probability=1.0)
    words = (
        r"out of device memory: CUDA out of memory\. Tried .* \(at step 1, micro-batch \d, layer 2 \(block\.1\), in "
    )
    with pytest.raises(WorkerError, match=words + r"forward of micro-batch \d in stage \d\)"):
        run_job(tmp_path, JOB)


class Sticks:
    """The device of worker 2 comes to no end in step 8, when bounds are learned; in step 10 the others wait until that
    worker has ended itself.

    Args:
        phase: at which it sticks; vote: while the numbers for it are read.
        log: of worker 2.
    """

    def __init__(self, phase: str, log: Path) -> None:
        self.phase, self.log = phase, log

    def reached(self, phase: str, index: int, machine: Any) -> None:
        engine = machine.engine
        if machine.worker == 2:
            if (machine.step, phase, index) == (8, "forward", 0):
                if self.phase == "forward":
                    engine.device.stick()
                else:
                    measured = engine.measured
                    engine.measured = lambda: (engine.device.stick(), measured())[1]
        elif (machine.step, phase, index) == (10, "forward", 0):
            activity = machine.observer.activity
            label = activity.label
            activity.wait(IDLE[0])  # else it would pass for a hang
            deadline_s = time.monotonic() + 40
            while "is no member any more" not in self.log.read_text() and time.monotonic() < deadline_s:
                time.sleep(0.05)
            activity.compute(label)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("forward", "is no member any more and ends itself: "),  # it leaves an action's wait when it is told
        ("vote", "is no member any more, and has been stuck for 10 s: "),  # but not that for the numbers of a vote
    ],
)
def test_a_kernel_that_never_ends_is_seen_and_its_process_ends(
    phase: str, words: str, tmp_path: Path, unharmed: Job
) -> None:
    log = tmp_path / "logs" / "worker-2.log"
    job = run_job(tmp_path, JOB, probe=Sticks(phase, log))
    assert job.computation == unharmed.computation
    (recovery,) = job.result.recoveries
    assert (recovery.worker, recovery.detected_by) == (2, "progress")
    assert f"worker 2 {words}" in log.read_text()


class WaitsForLooks:
    """Worker 0 begins step 6 when memory has been looked at so often.

    Args:
        looks: a line for each.
        number: how often.
    """

    def __init__(self, looks: Path, number: int) -> None:
        self.looks, self.number = looks, number

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if machine.worker == 0 and (machine.step, phase, index) == (6, "forward", 0):
            activity = machine.observer.activity
            label = activity.label
            activity.wait(IDLE[0])
            deadline_s = time.monotonic() + 120
            while len(self.looks.read_text().splitlines()) < self.number and time.monotonic() < deadline_s:
                time.sleep(0.05)
            activity.compute(label)


@pytest.mark.slow
def test_a_process_that_takes_a_place_waits_for_the_memory_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, run_dir = tmp_path / "looks", tmp_path / "run"

    def memory(device: Loopback) -> DeviceMemory:
        """Four founders and then a successor look; what it needs is there at its fourth look."""
        with open(looks, "a") as file:
            file.write(f"{os.getpid()}\n")
        return DeviceMemory(0 if 4 < len(looks.read_text().splitlines()) < 8 else 1 << 40, 1 << 40)

    monkeypatch.setattr(Loopback, "memory", memory)
    monkeypatch.setattr(Loopback, "gauges", lambda device: None)  # which looks at memory, too
    settings = JOB | {"elastic.respawn": True}
    run_job(run_dir, settings, faults=["kill:3@4:backward"], probe=WaitsForLooks(looks, 8))
    *founders, first, second, third, last = looks.read_text().split()
    assert len(set(founders)) == 4 and first == second == third == last not in founders
