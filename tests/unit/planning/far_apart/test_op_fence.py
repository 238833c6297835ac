"""OP-Fence and its rivals: what their plans keep, and what they make of networks that are easy to see through."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.far_jobs import far_cluster, far_costs, far_job

from elaswave.cli.whatif.far_apart import far_planners
from elaswave.config.network import read_network, scaled
from elaswave.config.presets import model_shape
from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.analytic import analytic_costs
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.far_apart.cuts import clusterings, orders
from elaswave.planning.far_apart.job import FarJob, allocation_of_plan
from elaswave.planning.far_apart.objective import Model, time_plan
from elaswave.planning.far_apart.op_fence import op_fence
from elaswave_rivals.genetic import genetic_stages

SLOW = NetworkLink(bandwidth_bytes_per_s=1e6, latency_s=0.05)
TEN = Path(__file__).parents[4] / "examples" / "far_apart" / "ten_regions.toml"


@pytest.fixture(scope="module")
def ten_regions():
    file = read_network(TEN)
    return FarJob(
        cluster=scaled(file.cluster, 80),
        costs=tuple(analytic_costs(model_shape("gpt2-small"), preset) for preset in file.presets),
        num_microbatches=32,
        element_bytes=2,
        codec="int8",
    )


def sites_of(job, stage):
    return {int(job.site[device]) for device in stage.devices}


def test_48_devices_are_all_used_and_replicas_share_a_site(ten_regions):
    plan = op_fence(ten_regions, use_all=True)
    devices = Counter(device for stage in plan.stages for device in stage.devices)
    assert sorted(devices) == list(range(48))
    assert set(devices.values()) == {1}
    assert all(len(sites_of(ten_regions, stage)) == 1 for stage in plan.stages)
    assert plan.fences
    assert [sum(counts) for counts in plan.num_microbatches] == [32] * len(plan.stages)
    allocation_of_plan(ten_regions, plan).check()
    for name in ("equal_number", "equal_compute"):
        assert plan.step_s < far_planners()[name](ten_regions).step_s


def test_embedding_and_head_are_alone_where_they_end_the_step(ten_regions, monkeypatch):
    """With links this fast a step ends with what they send within their regions, and either alone changes nothing."""
    job = replace(ten_regions, cluster=scaled(ten_regions.cluster, 10_000))
    plan = op_fence(job, use_all=True)
    assert len(plan.stages[0].devices) == len(plan.stages[-1].devices) == 1
    assert plan.parts.reduce_s + plan.parts.gather_s < 1.0
    monkeypatch.setattr("elaswave.planning.far_apart.op_fence._narrow_ends", lambda *args: iter(()))
    assert plan.step_s < 0.96 * op_fence(job, use_all=True).step_s


def test_equal_jobs_have_equal_plans(ten_regions):
    assert op_fence(ten_regions, budget=300) == op_fence(ten_regions, budget=300)


def test_a_site_that_costs_more_than_it_brings_is_left_out():
    job = far_job(far_cluster([2, 2], between=SLOW), far_costs([0.001] * 6, boundary_bytes=1e6))
    plan = op_fence(job)
    assert len({site for stage in plan.stages for site in sites_of(job, stage)}) == 1
    assert op_fence(job, use_all=True).step_s > plan.step_s


def test_layers_are_cut_where_little_travels():
    costs = far_costs([1.0] * 6, boundary_bytes=1e8, parameters=1e7)
    layers = list(costs.layers)
    layers[3] = type(layers[3])(**{name: getattr(layers[3], name) for name in layers[3].__struct_fields__}
                                | {"boundary_bytes": 10.0})  # fmt: skip
    job = far_job(far_cluster([1, 1], between=SLOW), type(costs)(layers=tuple(layers)))
    plan = op_fence(job, use_all=True)
    assert plan.fences == (4,)


def test_copies_outside_cost_what_they_send():
    costs = far_costs([0.1] * 4, parameters=1e6, boundary_bytes=1e3)
    inside, outside = (
        op_fence(far_job(far_cluster([2, 2], between=SLOW), costs, copies=copies)) for copies in ("inside", "outside")
    )
    assert outside.parts.reduce_s > inside.parts.reduce_s + 1


def test_memory_that_lacks_is_said():
    job = far_job(far_cluster([1, 1], between=SLOW, memory_bytes=10.0), far_costs([1.0, 1.0], activation_bytes=30.0))
    for planner in far_planners().values():
        with pytest.raises(InfeasiblePlan, match="memory: .*add devices, or take those with more memory"):
            planner(job)


def test_clusters_follow_bandwidth(ten_regions):
    names = ten_regions.cluster.network.sites
    model = Model(ten_regions)
    found = clusterings(model)
    assert len(found[0]) == len(names) == 10
    merged = [{names[int(ten_regions.site[device])] for device in cluster} for cluster in found[-1]]
    assert all(set().union(*merged) == set(names) for _ in merged)
    order = orders(model, found[0], 1)[0]
    seconds = [model.latency[before[0], after[0]] for before, after in zip(order, order[1:])]
    assert max(seconds) < 0.15  # never across the world: the longest link has 265 ms


def test_the_genetic_search_gathers_what_is_near():
    job = far_job(far_cluster([2, 2], between=SLOW), far_costs([1.0] * 4, parameters=1e6))
    stages = genetic_stages(Model(job), 2)
    assert sorted(sorted(stage) for stage in stages) == [[0, 1], [2, 3]]


def test_programs_take_about_what_the_objective_says():
    job = far_job(far_cluster([2, 2], between=SLOW, speeds=[1, 1, 1, 0.5]), far_costs([0.1] * 8, boundary_bytes=1e4))
    for name, planner in far_planners().items():
        timing = time_plan(job, planner(job))
        assert timing.alone_s <= timing.shared_s * (1 + 1e-9), name
        assert timing.objective_s == pytest.approx(timing.shared_s, rel=0.25), name
