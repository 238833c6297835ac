"""What each worker is said to hold."""

from types import SimpleNamespace
from typing import Any

import msgspec

from elaswave.blocks.placement import make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.coordinator.records.recorder import holdings_of
from elaswave.planning.programs.layout import make_layout

LAYOUT = make_layout(widths=(2, 1), layers_per_stage=[1, 1], num_microbatches=4, shared=((0, 1),))
SIZES = (40, 20, 10)


def a_plan() -> Any:
    slots = [
        [SimpleNamespace(numel=size - 1, is_buffer=False), SimpleNamespace(numel=1, is_buffer=True)] for size in SIZES
    ]
    return SimpleNamespace(
        blocks=make_blocks(SIZES, 10),
        state=SimpleNamespace(layers=[SimpleNamespace(tensors=tensors) for tensors in slots]),
    )


def test_workers_that_have_come_or_idle_are_counted_as_well() -> None:
    plan = a_plan()
    layout = msgspec.structs.replace(LAYOUT, idle=(7,))
    placement = place_blocks(layout.with_followers(1), plan.blocks, scatter_width=EVERYBODY)
    found = holdings_of(plan, layout, placement)
    assert sorted(found) == [0, 1, 2, 7]
    assert sum(held.num_owned_parameters for held in found.values()) == sum(SIZES)
    assert sum(held.num_followed_blocks for held in found.values()) == len(plan.blocks)
    assert [found[worker].num_parameters for worker in (0, 1, 2, 7)] == [39 + 9, 39 + 9, 19 + 9, 0]
    assert found[7].num_owned_blocks == found[7].num_followed_blocks == 0
    for worker in (0, 1, 2):
        assert found[worker].num_owned_blocks == placement.owner.count(worker)
