"""APPLY on a device, which updates some blocks at once: the bits of one by one, also where it is interrupted."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.jobs import small_config
from tests.integration.test_instants_of_loss import Probe
from tests.integration.test_own_optimizers import two_groups
from tests.integration.thread_jobs import Machine, ThreadJob, wait_until

from elaswave.channel.messages.worker import FromWorker
from elaswave.devices.interface import Batch
from elaswave.devices.loopback import Loopback
from elaswave.protocol.messages import Report
from elaswave.protocol.step.engine import Phase
from elaswave.training.definition import builtin_training
from elaswave.training.own_optimizer import OwnOptimizer

SETTINGS: dict[str, Any] = {"run.steps": 6, "device.kind": "loopback"}
LOST, STEP = 3, 3

CASES: dict[str, dict[str, Any]] = {
    "clipped": {"optimizer.grad_clip": 0.05, "optimizer.weight_decay": 0.1},
    "not clipped": {"optimizer.grad_clip": 0.0, "optimizer.ema_decay": 0.9},
    "sgd": {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.weight_decay": 0.1},
    "bfloat16": {"model.family": "llama", "model.dtype": "bfloat16", "elastic.accumulator_bits": 48},
    "AdamW": {},
    "RAdam": {},
}
OWN: dict[str, OwnOptimizer] = {
    "AdamW": OwnOptimizer(two_groups),
    "RAdam": OwnOptimizer(lambda p: torch.optim.RAdam(p, lr=1e-3)),
}


def make_job(folder: Path, case: str, widths: str, probe: Probe | None = None, **options: Any) -> ThreadJob:
    settings = SETTINGS | CASES.get(case, {}) | {"layout.widths": widths} | options.pop("settings", {})
    training = None
    if case in OWN:
        training = dataclasses.replace(builtin_training(small_config(settings)), make_optimizer=OWN[case])
    job = ThreadJob(folder, settings, probe=probe, training=training, **options)
    if probe is not None:
        probe.job = job
    return job


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ThreadJob]:
    """The training of each case by one worker that updates each block alone."""

    @functools.cache
    def job_of(case: str) -> ThreadJob:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(Loopback, "batch", Batch(blocks=1, elements=1 << 62))
            return make_job(tmp_path_factory.mktemp("alone"), case, "[1]").run(monkeypatch)

    return job_of


class DiesBetweenBatches(Probe):
    """A worker dies when two of its batches are updated; the others hear of it as their second one is."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.mixed: list[set[int]] = []
        """Versions of the copies of each worker that reports, where they are not all the same."""

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        if (phase, machine.step) != ("apply", STEP) or self.job.new_generations:
            return
        if machine.worker == LOST and index == 2:
            wait_until(lambda: len(self.waiting) == 3)
            self.die(machine)
        elif machine.worker != LOST and index == 1:
            self.waiting.add(machine.worker)
            wait_until(lambda: self.job.mailboxes[machine.worker].urgent)

    def heard(self, message: FromWorker) -> None:
        if isinstance(message, Report):
            versions = set(message.copies.versions)
            if len(versions) > 1:
                self.mixed.append(versions)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ("clipped", "bfloat16", "AdamW") else pytest.mark.slow) for case in CASES],
)
def test_a_loss_between_two_batches_changes_no_bit(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_by_one: Callable[[str], ThreadJob]
) -> None:
    """What was queued is at the step, what was not is updated as the decision is carried out."""
    probe = DiesBetweenBatches()
    job = make_job(tmp_path, case, "[2,2]", probe, on_message=probe.heard).run(monkeypatch)
    assert probe.mixed == [{STEP - 1, STEP}] * 3
    [decision] = job.decisions
    assert decision.resume_step == STEP + 1
    assert job.computation == one_by_one(case).computation


def test_float32_sums_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = {"elastic.consistency": "scaled"}
    probe = DiesBetweenBatches()
    job = make_job(tmp_path / "lost", "clipped", "[2,2]", probe, on_message=probe.heard, settings=scaled)
    job.run(monkeypatch)
    assert probe.mixed == [{STEP - 1, STEP}] * 3
    undisturbed = make_job(tmp_path / "undisturbed", "clipped", "[2,2]", settings=scaled).run(monkeypatch)
    assert len(job.losses) == 6
    assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(job.losses, undisturbed.losses))
