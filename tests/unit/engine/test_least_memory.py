"""What a worker's device has to have free before it begins."""

import pytest

from elaswave.config.load import load_config
from elaswave.devices.loopback import Loopback
from elaswave.engine.blueprint import Blueprint, materialise
from elaswave.engine.reduction import Reduction

SMALL = ["layout.widths=[1, 3]", "model.num_layers=3", "model.hidden_size=32", "elastic.block_size=1024"]


@pytest.mark.parametrize(
    "settings",
    [
        ["model.dtype=float32"],
        ["model.dtype=bfloat16", "elastic.accumulator_bits=48", "optimizer.ema_decay=0.9"],
        ["model.dtype=bfloat16", "elastic.consistency=scaled", "elastic.num_followers=0"],
    ],
)
def test_no_worker_begins_with_less_than_it_is_said_to_need(settings: list[str]) -> None:
    blueprint = Blueprint(load_config(None, [*SMALL, *settings]))
    needed, config = [], blueprint.config
    for worker in blueprint.layout.workers:
        here, store, _ = materialise(blueprint, worker, blueprint.layout, blueprint.placement, None, Loopback())
        reduction = Reduction(
            worker,
            blueprint.blocks,
            blueprint.shapes,
            exact=config.elastic.consistency == "bitwise",
            checked=True,
            width=config.elastic.accumulator_bits,
        )
        reduction.hold(list(here))
        tensors = [layer.flat for layer in here.values()]
        tensors += [values for held in store for values in held.slots.values()]
        tensors += [plane for each in reduction.accumulators.values() for plane in each.planes]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        held_bytes = sum(storages.values())
        needed.append(blueprint.least_bytes(worker))
        assert 0.99 * held_bytes < needed[-1] <= held_bytes, worker
    assert blueprint.least_bytes(None) == min(needed) < max(needed)
