"""What a step costs beside its actions, by layout."""

import msgspec
import numpy as np
import pytest
from tests.property.clusters import make_cluster, make_costs

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.plan import StageShare
from elaswave.planning.policy.fault_free_policies import fault_free
from elaswave.planning.programs.prediction import step_s
from elaswave.planning.search.exhaustive import all_shapes
from elaswave.planning.search.pipelines import PipelineWorkers, mixed_pipelines, ranges_of
from elaswave.planning.search.planner import plan
from elaswave.planning.search.shapes import build, score
from elaswave.types import Stage


def linked(seconds: list[float], *, parameter_bytes: float = 10.0, bandwidth: float = 100.0) -> Costs:
    """Layers of equal size whose sums, twice as many bytes, and parameters travel over a slow link."""
    costs = make_costs(seconds, parameter_bytes=parameter_bytes)
    link = NetworkLink(bandwidth_bytes_per_s=bandwidth, latency_s=0.5)
    return msgspec.structs.replace(costs, end_link=link, step_overhead_s=1.0)


def stages(*ranges: tuple[int, int, int]) -> list[Stage]:
    """By first layer, end and number of workers."""
    found, first = [], 0
    for start, stop, width in ranges:
        found.append(Stage(start=start, stop=stop, workers=tuple(range(first, first + width))))
        first += width
    return found


def test_bytes_per_worker_of_the_layers_of_a_stage_and_the_width_of_its_group() -> None:
    costs = linked([1.0] * 8)
    # Of two workers each sends half of one layer's sums and fetches half of four layers' parameters.
    assert costs.overhead_s(stages((0, 4, 2), (4, 8, 2))) == pytest.approx(1 + 0.5 + (20 + 40) / 2 / 100)
    assert costs.overhead_s(stages((0, 4, 5), (4, 8, 2))) == pytest.approx(1 + 0.5 + (20 + 40) * 4 / 5 / 100)
    assert costs.overhead_s(stages((0, 2, 2), (2, 8, 2))) == pytest.approx(1 + 0.5 + (20 + 60) / 2 / 100)
    assert costs.overhead_s(stages((0, 4, 1), (4, 8, 1))) == 1.0  # nobody to send to
    # Layers 3 and 4 are held by both stages, hence by four workers.
    shared = costs.overhead_s(stages((0, 5, 2), (3, 8, 2)))
    assert shared == pytest.approx(1 + 0.5 + (20 * 3 / 4 + 20 * 3 / 4 + 30 / 2) / 100)
    without = msgspec.structs.replace(costs, end_link=None)
    assert without.overhead_s(stages((0, 4, 2), (4, 8, 2))) == 1.0


def test_what_was_measured_is_kept_for_its_layout_and_others_differ_by_what_travels() -> None:
    costs = msgspec.structs.replace(linked([1.0] * 8), step_overhead_s=0.0)
    here, other = stages((0, 4, 2), (4, 8, 2)), stages((0, 2, 2), (2, 8, 2))
    measured = costs.measured_at(here, 3.0)
    assert measured.overhead_s(here) == pytest.approx(3.0)
    assert measured.overhead_s(other) == pytest.approx(3.0 + 10 / 100)
    faster = costs.measured_at(here, 0.4)  # the link takes 0.8 s by its description
    assert faster.overhead_s(here) == pytest.approx(0.4)
    assert faster.overhead_s(other) == pytest.approx((0.5 + 40 / 100) / 2)
    assert costs.measured_at(here, 0.0).overhead_s(other) == 0.0
    alone = stages((0, 8, 1))
    assert costs.measured_at(alone, 3.0).overhead_s(alone) == 3.0


def test_every_fidelity_and_ranking_adds_the_layouts_own() -> None:
    cluster, costs = make_cluster([1.0] * 6), linked([1.0] * 6)
    bare = msgspec.structs.replace(costs, end_link=None, step_overhead_s=0.0)
    for number in (2, 3):
        allocation = fault_free(cluster, costs, number, 6 // number, 6)
        added = costs.overhead_s(allocation.chains[0].stages)
        for fidelity in ("bound", "exact", "contended"):
            both = [step_s(cluster, each, allocation, fidelity) for each in (costs, bare)]  # type: ignore[arg-type]
            assert both[0] - both[1] == pytest.approx(added)
    held = np.zeros((6, 2), dtype=np.int64)
    for each in (costs, bare):
        ranked = all_shapes(cluster, each, np.arange(6), held, 6, "1f1b", followers=1, most=20)
        for seconds, shape, *_ in ranked:
            share = build(cluster, each, shape, "1f1b", np.zeros(6, dtype=np.int64)).chains[0].stages
            extra = each.overhead_s(share)
            assert seconds - extra == pytest.approx(score(cluster, each, shape, "1f1b") - extra, rel=0.05)
    assert len({len(shape.members) for _, shape, *_ in ranked}) > 1


def test_pipelines_beside_each_other_reduce_with_all_that_hold_the_layer() -> None:
    cluster, costs = make_cluster([1.0] * 7), linked([1.0] * 6)
    start = fault_free(cluster, costs, 3, 2, 8)
    crew = PipelineWorkers(
        usual=ranges_of(start.chains[0]),
        members=[share.workers for share in start.chains[0].stages],
        free=np.array([6]),
        held=np.zeros((7, 2), dtype=np.int64),
        levels=np.zeros(7, dtype=np.int64),
    )
    mixes = mixed_pipelines(cluster, costs, crew, 8, "1f1b", followers=1, most=4)
    several = [allocation for allocation, _ in mixes if len(allocation.chains) > 1]
    assert several
    for allocation in several:
        shares: list[StageShare] = [stage for chain in allocation.chains for stage in chain.stages]
        bare = msgspec.structs.replace(costs, end_link=None, step_overhead_s=0.0)
        added = step_s(cluster, costs, allocation, "exact") - step_s(cluster, bare, allocation, "exact")
        assert added == pytest.approx(costs.overhead_s(shares)) and added > 1


def test_a_plan_counts_what_travels_at_the_end_of_a_step() -> None:
    def planned(cluster: Cluster, costs: Costs) -> int:
        start = fault_free(make_cluster([1.0] * 8), costs, 4, 2, 8)
        found = plan(cluster, costs, start, ClusterEvent(kind="lost", workers=(7,)))
        return max(stage.stop - stage.start for chain in found.allocation.chains for stage in chain.stages)

    left = make_cluster([1.0] * 8).without([7])
    # Where parameters take long to fetch, stages hold few layers.
    assert planned(left, linked([1.0] * 8, bandwidth=1.0)) < planned(left, linked([1.0] * 8, bandwidth=1e6))
