"""A worker that goes back to a checkpoint has one state in memory, not two."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.thread_jobs import Machine, ThreadJob
from torch.multiprocessing.reductions import StorageWeakRef

from elaswave.engine import torch_engine
from elaswave.engine.torch_engine import TorchEngine
from elaswave.faults.injection import Probe
from elaswave.protocol.messages import Decision
from elaswave.protocol.step.engine import Phase
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.state.flat import HeldBlock


class Dies(Probe):
    """Kills worker 1 in its backwards."""

    job: ThreadJob

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        if (machine.worker, machine.step, phase, index) == (1, 3, "backward", 1):
            self.job.kill(1)
            self.job.reached(phase, index, machine)


def memory_of(machine: Machine) -> Iterator[tuple[str, torch.Tensor]]:
    """All that a worker has of its state, and of the step that was interrupted."""
    engine = machine.engine
    assert isinstance(engine, TorchEngine)
    for index, unit in engine.layers.items():
        yield f"unit {index}", unit.flat
    for index, accumulator in engine.reduction.accumulators.items():
        yield f"the sum of unit {index}", accumulator.sum
    for block, copy in machine.copies.items():
        for name, values in copy.slots.items():
            yield f"{name} of block {block}", values
    for place, saved in engine.compute._saved.items():
        for leaf in saved.given.leaves:
            yield f"the input of layer {place[0]}", leaf
    for microbatch, loss in engine.compute._losses.items():
        yield f"the loss of micro-batch {microbatch}", loss.scored.total
        for leaf in loss.given.leaves:
            yield f"the input of the loss of micro-batch {microbatch}", leaf
    for slot in engine.reduction._slots.values():
        for plane in slot:
            yield "what came from a peer", plane


def test_the_state_before_is_gone_when_that_of_a_checkpoint_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[int, list[tuple[str, StorageWeakRef]]] = {}
    left: dict[int, list[str]] = {}
    roll_back, make = WorkerMachine.roll_back, torch_engine.materialise

    def noting(machine: WorkerMachine[HeldBlock], decision: Decision) -> int:
        memory = memory_of(machine)
        before[threading.get_ident()] = [(name, StorageWeakRef(each.untyped_storage())) for name, each in memory]
        return roll_back(machine, decision)

    def looking(*arguments: Any) -> Any:
        me = threading.get_ident()
        left[me] = [name for name, storage in before[me] if not storage.expired()]
        return make(*arguments)

    monkeypatch.setattr(WorkerMachine, "roll_back", noting)
    monkeypatch.setattr(torch_engine, "materialise", looking)
    probe = Dies()
    probe.job = ThreadJob(tmp_path, {"layout.widths": "[2,2]"}, probe=probe, restart_in=[2])
    job = probe.job.run(monkeypatch)
    assert [decision.rollback for decision in job.decisions] == [0]
    assert len(before) == len(left) == 3
    names = {name.rsplit(" ", 1)[0] for found in before.values() for name, _ in found}
    assert {"unit", "the sum of unit", "master of block"} <= names, "of activations there may be none at this instant"
    assert list(left.values()) == [[]] * 3
