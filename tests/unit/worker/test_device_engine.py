"""What an engine keeps to on a device that computes behind the worker's back."""

from pathlib import Path

import pytest
from tests.integration.jobs import small_config

from elaswave.data.sampler import Draw
from elaswave.devices.loopback import Loopback
from elaswave.state.placement import place_blocks
from elaswave.types import Action
from elaswave.worker.blueprint import Blueprint
from elaswave.worker.materialise import materialise
from elaswave.worker.pacing import ActionTimer
from elaswave.worker.torch_engine import RUN_AHEAD_ACTIONS, EngineContext, TorchEngine

SETTINGS = {
    "layout.stages": 2,
    "layout.replicas": 1,
    "elastic.num_followers": 0,
    "elastic.consistency": "scaled",
    "elastic.verify": False,
}
"""With these the first stage has nothing that is read for the vote."""


@pytest.fixture
def engine(tmp_path: Path) -> TorchEngine:
    """Of the first of two stages."""
    blueprint, device = Blueprint(small_config(SETTINGS)), Loopback()
    layout, source = blueprint.layout, blueprint.open_samples(tmp_path)
    placement = place_blocks(layout, blueprint.blocks, num_followers=0, scatter_width=blueprint.scatter_width)
    here, _, _ = materialise(blueprint, 0, layout, placement, None, device)
    context = EngineContext(
        blueprint=blueprint,
        worker=0,
        batches=lambda step, microbatch: source.batch([Draw(microbatch, 0, microbatch)], "train"),
        evaluation_batches=lambda step, microbatch: source.batch([Draw(microbatch, 0, microbatch)], "validation"),
        check=lambda: None,
        timer=ActionTimer(0, None, lambda until_s: None),
        run_dir=tmp_path,
        device=device,
    )
    return TorchEngine(context, here)


def test_actions_are_timed_once_the_device_has_come_to_their_ends(engine: TorchEngine) -> None:
    layers = engine.context.blueprint.layout.layers_of(0)
    engine.begin(1, [0] * len(engine.context.blueprint.tensors))
    for microbatch in range(RUN_AHEAD_ACTIONS):
        output = engine.run(Action(0, "F", microbatch), layers, 1, None, first=True, last=False)
        engine.device.fetch(output)
    engine.measured()


def test_a_device_that_is_slowed_down_holds_its_actions(engine: TorchEngine) -> None:
    rested, timer = [], engine.context.timer
    timer._rest = rested.append
    layers = engine.context.blueprint.layout.layers_of(0)
    engine.begin(1, [0] * len(engine.context.blueprint.tensors))
    engine.run(Action(0, "F", 0), layers, 1, None, first=True, last=False)
    assert not rested
    timer.slow_down(0.5)
    engine.run(Action(0, "F", 1), layers, 1, None, first=True, last=False)
    assert len(rested) == 1


def test_few_actions_are_queued_and_an_interrupt_comes_before_the_next(engine: TorchEngine) -> None:
    device, layers = engine.device, engine.context.blueprint.layout.layers_of(0)
    assert isinstance(device, Loopback)
    engine.begin(1, [0] * len(engine.context.blueprint.tensors))
    for microbatch in range(3 * RUN_AHEAD_ACTIONS):
        device.fetch(engine.run(Action(0, "F", microbatch), layers, 1, None, first=True, last=False))
        assert microbatch + 1 - device.num_copied <= RUN_AHEAD_ACTIONS + 1


def test_evaluation_does_not_run_ahead_of_the_device(engine: TorchEngine) -> None:
    device, layers = engine.device, engine.context.blueprint.layout.layers_of(0)
    assert isinstance(device, Loopback)
    engine.forget_scores()
    for microbatch in range(3 * RUN_AHEAD_ACTIONS):
        device.fetch(engine.evaluate(layers, 1, microbatch, None, first=True, last=False))
        assert microbatch + 1 - device.num_copied <= RUN_AHEAD_ACTIONS + 1
