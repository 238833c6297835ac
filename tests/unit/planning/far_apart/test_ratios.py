"""Ratios of adaptive fences, for links whose times can be told by hand."""

from dataclasses import replace

import numpy as np
from tests.unit.benchmarks.test_far_step import DEVICE, FAST

from elaswave.config.load import far_job, load_config
from elaswave.fences import TopK, coded_bytes
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.network import Network
from elaswave.planning.far_apart.job import FarJob, FarPlan
from elaswave.planning.far_apart.objective import time_plan
from elaswave.planning.far_apart.op_fence import op_fence
from elaswave.planning.far_apart.ratios import ROUNDS, adapted_ratios, plan_with_ratios
from elaswave.planning.programs.layout import make_layout
from elaswave.types import Layout

EXAMPLE = [
    "sites.network=examples/far_apart/four_regions_small.toml", "sites.rate=0.0005", "device.kind=emulated",
    "device.model=gpt2-small", "device.name=a100", "device.time_scale=100", "model.num_layers=12",
    "layout.widths=[1]",
]  # fmt: skip
ELEMENTS = 1024 * 100
RAW = [4.0 * ELEMENTS] * 4


def cluster(rates: list[list[float]]) -> Cluster:
    """Each worker at a site of its own, with bytes per second from each to each."""
    count = len(rates)
    ids = np.arange(count, dtype=np.int64)
    network = Network(
        sites=tuple(f"s{site}" for site in range(count)),
        latency_s=np.zeros((count, count)),
        bandwidth_bytes_per_s=np.array(rates),
    )
    return Cluster(
        ids=ids, node=ids, speed=np.ones(count), memory_bytes=np.full(count, 1e9), device=0 * ids, devices=(DEVICE,),
        within_node=FAST, between_nodes=FAST, network=network, site=ids,
    )  # fmt: skip


def chain(slow: float, fast: float) -> list[list[float]]:
    """Three sites in a row, whose second link is the fast one."""
    return [[1e9, slow, slow], [slow, 1e9, fast], [slow, fast, 1e9]]


def layout(widths: tuple[int, ...] = (1, 1, 1), num_microbatches: int = 2) -> Layout:
    return make_layout(
        widths=widths, layers_per_stage=(1,) * (len(widths) - 1) + (2,), num_microbatches=num_microbatches, shared=()
    )


def ratios(rates: list[list[float]], layer_s: float = 0.0, most: int = 100) -> dict[int, int]:
    seconds = [(layer_s, 0.0, 0.0)] * 4
    return adapted_ratios(layout(), {0: most, 1: most}, RAW, seconds, cluster(rates), element_bytes=4)


def test_the_slowest_fence_gets_what_was_asked_for_and_others_no_more_than_they_need() -> None:
    found = ratios(chain(1e4, 1e5))
    assert found[0] == 100
    sizes = {each: coded_bytes(str(TopK(each)), (ELEMENTS,), 4) for each in (found[1] - 1, found[1], 100)}
    assert sizes[found[1]] / 1e5 <= sizes[100] / 1e4 < sizes[found[1] - 1] / 1e5


def test_a_fence_whose_link_is_fast_enough_as_it_is_has_none() -> None:
    assert ratios(chain(1e4, 1e8)) == {0: 100, 1: 1}


def test_what_hides_behind_computing_is_not_coded() -> None:
    assert ratios(chain(1e6, 1e6), layer_s=10.0) == {0: 1, 1: 1}


def test_the_slower_direction_counts() -> None:
    rates = chain(1e5, 1e5)
    rates[1][0] = 1e4
    found = ratios(rates)
    assert found[0] == 100 and 1 < found[1] < 100


def test_side_by_side_the_slowest_link_of_a_fence_decides() -> None:
    rates = [[1e9, 1e9, 1e4], [1e9, 1e9, 1e8], [1e4, 1e8, 1e9]]
    found = adapted_ratios(layout((2, 1), 4), {0: 50}, RAW, [(0.0, 0.0, 0.0)] * 3, cluster(rates), element_bytes=4)
    assert found == {0: 50}


def test_a_fence_that_no_link_carries_is_not_coded_and_without_a_network_all_have_the_largest() -> None:
    one = make_layout(widths=(1, 1), layers_per_stage=(2, 2), num_microbatches=2, shared=())
    free = [(0.0, 0.0, 0.0)] * 4
    assert adapted_ratios(one, {0: 9, 1: 9}, RAW, free, cluster([[1e9, 1e4], [1e4, 1e9]]),
                          element_bytes=4) == {0: 1, 1: 9}  # fmt: skip
    near = Cluster.uniform(2, DEVICE, within_node=FAST, between_nodes=FAST)
    assert adapted_ratios(one, {0: 9, 1: 7}, RAW, free, near, element_bytes=4) == {0: 9, 1: 7}


def test_cuts_and_ratios_are_found_in_turns_and_the_best_round_is_kept() -> None:
    """A planner that follows the sizes: it ends when they are what it has been given, or after three rounds."""
    config = load_config(None, EXAMPLE)
    job = far_job(config, "adatopk50")
    asked: list[dict[int, int]] = []

    def plan_for(given: FarJob) -> FarPlan:
        asked.append(dict(given.ratios))
        return op_fence(given, use_all=True)

    best, plan = plan_with_ratios(job, plan_for)
    assert asked[0] == {} and len(asked) == ROUNDS and asked[1]
    assert set(asked[-1].values()) == {1}, "the last round plans without codes"
    assert set(best.ratios) == {fence - 1 for fence in plan.fences}
    assert max(best.ratios.values()) > min(best.ratios.values())
    first = op_fence(job, use_all=True)
    largest = replace(job, ratios={fence - 1: 50 for fence in first.fences})
    assert (
        time_plan(best, plan).shared_s <= time_plan(largest, first).shared_s * 1.1
    )  # fences that bound nothing send more

    asked.clear()
    assert plan_with_ratios(replace(job, codec="int8"), plan_for)[0].ratios == {} and len(asked) == 1
