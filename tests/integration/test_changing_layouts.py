"""Planned changes of the layout between the steps of real engines: layers go away and come back, the bits stay."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.integration.crew import Machine, train
from tests.integration.test_any_layout import MODELS, pipelines_of_unequal_depth, regular, shared_boundary

from elaswave.blocks.placement import ReplicaRole
from elaswave.engine.torch_engine import TorchEngine
from elaswave.planning.state_moves.target_placement import target_placement
from elaswave.protocol.messages import LayoutChange
from elaswave.protocol.step.engine import Committed
from elaswave.protocol.step.execution import Life
from elaswave.types import ExecutionParameters, Hop, Layout, Stage

START = regular(2, 3, layers=(2, 2))


def exchanged() -> Layout:
    """Each worker is in the other stage: all layers go away, and others come."""
    stages = (Stage(start=0, stop=2, workers=(2, 3, 4)), Stage(start=2, stop=4, workers=(0, 1)))
    routes = tuple((Hop(2 + index % 3, 0, 0, 2), Hop(index % 2, 1, 2, 4)) for index in range(5))
    return Layout(stages=stages, routes=routes)


CHANGES: dict[int, tuple[Layout, str]] = {
    2: (exchanged(), ""),
    5: (shared_boundary(), "gpipe"),
    8: (pipelines_of_unequal_depth(), "zero-bubble"),
    11: (START, "1f1b"),
}
"""Step with whose vote it is adopted -> layout and schedule. Copies travel in the next one, and with the vote of the
one after that it is in force."""
STEPS = 14


class Changing:
    """Gives every worker the changes that are planned for its steps.

    Args:
        changes: by the step in which they are held.
    """

    def __init__(self, changes: Mapping[int, tuple[Layout, str]]) -> None:
        self._changes = changes
        self.machines: list[Machine] = []

    def __call__(self, machine: Machine) -> None:
        run = machine.steps.run_step
        self.machines.append(machine)

        def run_step(step: int, attempt: int = 1) -> Life[Committed]:
            if step in self._changes:
                layout, schedule = self._changes[step]
                execution = ExecutionParameters(schedule=schedule)
                terms = machine.terms
                layout = layout.with_followers_of(machine.layout)
                placement = target_placement(layout, terms.blocks, machine.placement, scatter_width=terms.scatter_width)
                machine.planned.hold(
                    LayoutChange(
                        term=1,
                        generation=1,
                        number=step,
                        layout=layout,
                        placement=placement,
                        execution=execution,
                        reason="",
                        predicted_step_s=None,
                    )
                )
            result = yield from run(step, attempt)
            if step - 2 in self._changes:
                assert machine.layout == self._changes[step - 2][0]
            return result

        machine.steps.run_step = run_step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("model", "num_followers"),
    [
        pytest.param(model, num_followers, marks=() if index == num_followers == 1 else pytest.mark.slow)
        for index, model in enumerate(MODELS, start=1)
        for num_followers in (0, 1, 2)
    ],
)
def test_changes_do_not_show(tmp_path: Path, model: str, num_followers: int) -> None:
    settings: dict[str, Any] = MODELS[model] | {"elastic.num_followers": num_followers}
    alone = train(START, tmp_path, settings, steps=STEPS)
    changing = Changing(CHANGES)
    found = train(START, tmp_path, settings, steps=STEPS, change=changing)
    assert found.losses == alone.losses
    assert found.digests == alone.digests
    assert found.followers_digests == alone.followers_digests
    for machine in changing.machines:
        stage = machine.layout.stages[machine.layout.stage_of(machine.worker)]
        assert sorted(machine.engine.layers) == list(range(stage.start, stage.stop))
        assert machine.placement == target_placement(
            START.with_followers(num_followers),
            machine.terms.blocks,
            machine.placement,
            scatter_width=machine.terms.scatter_width,
        )
        for block, copy in machine.copies.items():
            assert machine.worker in machine.placement.holders(block)
            assert (machine.placement.owner[block] == machine.worker) == (copy.role is ReplicaRole.OWNER)


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_that_has_gone_leaves_nothing_behind(tmp_path: Path, model: str) -> None:
    """A float32 layer's masters lie in its own storage: the whole of it must not stay for the sake of some blocks."""
    changing = Changing({2: (exchanged(), "")})
    train(START, tmp_path, MODELS[model], steps=4, change=changing)
    for machine in changing.machines:
        assert isinstance(machine.engine, TorchEngine)
        storages = {layer.flat.untyped_storage().data_ptr() for layer in machine.engine.layers.values()}
        for held in machine.copies.values():
            storage = held.slots["master"].untyped_storage()
            assert storage.data_ptr() in storages or storage.nbytes() <= 2 * held.slots["master"].nbytes
