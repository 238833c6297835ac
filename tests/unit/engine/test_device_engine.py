"""What an engine keeps to on a device that computes behind the worker's back."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import small_config

from elaswave.blocks.placement import place_blocks
from elaswave.data.samples import Draw
from elaswave.devices.interface import HOST, Device
from elaswave.devices.loopback import Loopback
from elaswave.engine.activity import ActionTimer
from elaswave.engine.blueprint import Blueprint, materialise
from elaswave.engine.checks.spot_checks import CheckKind, SpotChecks
from elaswave.engine.torch_engine import RUN_AHEAD_ACTIONS, EngineContext, TorchEngine
from elaswave.types import Action

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
    return engine_of(tmp_path, Loopback(), SETTINGS)


def engine_of(tmp_path: Path, device: Device, settings: Mapping[str, Any]) -> TorchEngine:
    blueprint = Blueprint(small_config(settings))
    layout, source = blueprint.layout, blueprint.open_samples(tmp_path)
    placement = place_blocks(layout.with_followers(0), blueprint.blocks, scatter_width=blueprint.scatter_width)
    here, _, _ = materialise(blueprint, 0, layout, placement, None, device)
    context = EngineContext(
        blueprint=blueprint,
        worker=0,
        batches=lambda step, microbatch: source.batch([Draw(microbatch, 0, microbatch)], "train"),
        evaluation_batches=lambda step, microbatch: source.batch([Draw(microbatch, 0, microbatch)], "validation"),
        timer=ActionTimer(0, None, lambda until_s: None),
        run_dir=tmp_path,
        device=device,
    )
    return TorchEngine(context, here)


class Checks(SpotChecks):
    """Looks at micro-batch 1 in all layers, for what counts as a thousand seconds."""

    def due(self, layer: int, microbatch: int) -> CheckKind | None:
        return CheckKind.RUN if microbatch == 1 else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        with super().aside():
            yield
        self.spent_ns += 10**12


@pytest.mark.parametrize("device", [HOST, Loopback()])
def test_the_time_of_spot_checks_is_no_part_of_an_action_or_an_attempt(device: Device, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, device, {**SETTINGS, "elastic.verify": True})
    engine.compute._spots = Checks(1, 1.0, 5, 1)
    layers, began_ns, starts_ns = engine.context.blueprint.layout.layers_of(0), time.monotonic_ns(), list[int]()
    engine.context.timer.on_computed = lambda *where: starts_ns.append(where[-1])  # type: ignore[method-assign]
    engine.begin(1, [0] * len(engine.context.blueprint.tensors))
    for microbatch in (0, 1):
        engine.run(Action(0, "F", microbatch), layers, 1, None, first=True, last=False)
    shift_ns = len(layers) * 10**12
    if device.is_host:
        assert starts_ns[0] - began_ns < 10**12 <= shift_ns <= starts_ns[1] - began_ns < shift_ns + 10**12
    else:
        assert [action.microbatch for action, *_ in engine._untimed] == [0]
    assert engine.measured().duration_us <= (time.monotonic_ns() - began_ns - shift_ns) // 1000


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
