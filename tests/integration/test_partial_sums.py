"""Partial sums that change between the worker that has added them and the mean that is made of them.

Step engines as threads: what changes is inside the REDUCE of one of them. `test_planted_bugs` has real processes.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.crew import Machine, Training, train

from elaswave.engine.reduction import Reduction
from elaswave.engine.torch_engine import TorchEngine
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.step.engine import Committed
from elaswave.protocol.step.execution import Life

STEP = 2
LAYOUT = make_layout(widths=(2,), layers_per_stage=(4,), num_microbatches=5)


def flip_received(reduction: Reduction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit 40 of a word in the first frame of partial sums that worker 0 has received."""
    reduction._slots[0, 1][0][0] ^= 1 << 40


def flip_total(reduction: Reduction, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next total that this worker's thread makes, after all have come, lacks a bit."""
    add_up, thread = reduction._add_planes, threading.get_ident()

    def wrong(parts: Any) -> torch.Tensor:
        if threading.get_ident() != thread:
            return add_up(parts)
        monkeypatch.setattr(reduction, "_add_planes", add_up)
        total = add_up(parts)
        total[0] ^= 1 << 40
        return total

    monkeypatch.setattr(reduction, "_add_planes", wrong)


Spoil = Callable[[Reduction, pytest.MonkeyPatch], None]


def spoilt_training(spoil: Spoil, monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> Any:
    """A training in which one worker's REDUCE is spoilt once: what comes of it, and why steps were tried again."""
    reduce, retries, machines = Reduction.reduce, {}, {}
    first_layer = LAYOUT.num_layers - 1 if spoil is flip_total else 0

    def spoilt(reduction: Reduction, layer: int, *arguments: Any) -> None:
        machine = machines.get(id(reduction))
        here = None if machine is None else (machine.worker, machine.step, machine.attempt, layer)
        if here != (0, STEP, 1, first_layer):
            reduce(reduction, layer, *arguments)
            return
        with monkeypatch.context() as patch:
            spoil(reduction, patch)
            reduce(reduction, layer, *arguments)

    def note(machine: Machine) -> None:
        assert isinstance(machine.engine, TorchEngine)
        machines[id(machine.engine.reduction)] = machine
        run_step = machine.steps.run_step

        def noted(step: int) -> Life[Committed]:
            committed = yield from run_step(step)
            retries[machine.worker, step] = committed.retries
            return committed

        machine.steps.run_step = noted  # type: ignore[method-assign, assignment]

    monkeypatch.setattr(Reduction, "reduce", spoilt)
    training = train(LAYOUT, folder, settings, change=note)
    return training, retries


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train(LAYOUT, tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize(
    "spoil, finding",
    [
        (flip_received, "partial sums of block 0 changed on their way to its owner, worker 0"),
        (flip_total, "worker 0 added up partial sums wrongly"),
    ],
    ids=["on the way", "added up"],
)
def test_a_bit_that_flips_after_a_sum_has_left_costs_an_attempt_and_no_bit(
    undisturbed: Training, spoil: Spoil, finding: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training, retries = spoilt_training(spoil, monkeypatch, tmp_path)
    assert (training.losses, training.digests) == (undisturbed.losses, undisturbed.digests)
    for worker in LAYOUT.workers:
        assert retries[worker, STEP] == (f"the certificate does not hold: partial sums ({finding})",)
        assert retries[worker, STEP + 1] == ()


def test_without_verification_such_a_bit_is_committed(
    undisturbed: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So the tests above can fail."""
    settings = {"elastic.verify": False, "elastic.num_followers": 0}
    training, retries = spoilt_training(flip_received, monkeypatch, tmp_path, **settings)
    assert retries[0, STEP] == ()
    assert training.digests != undisturbed.digests
