"""Steps without a barrier: the event graph against one that is written out, and what its period keeps to."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.layouts import irregular_layouts
from tests.unit.planning_cases import layers, machines

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.schedules import SCHEDULES, Schedule, bounds_within, in_flight_bounds
from elaswave.planning.costs.step_time.exact import Durations, durations_of, time_programs
from elaswave.planning.plan import Allocation
from elaswave.planning.policy.policy_parts import rectangle
from elaswave.planning.programs.prediction import estimate, step_s
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.programs.validation import validate_programs
from elaswave.types import Action, Hop, Layout, Program
from elaswave_rivals import recycle
from elaswave_rivals.staggered import repeat_programs, staggered_bound_s, staggered_step_s


def unfolded_ends(
    layout: Layout, programs: Mapping[int, Program], durations: Durations, link_s: float, overhead_s: float, steps: int
) -> list[float]:
    """When each step ends: all steps written out as one graph, its longest ways found by looking back from each node.

    Independent of the engine's timer: nothing is run, there are no clocks.
    """
    hops: dict[tuple[int, int], Hop] = {
        (microbatch, hop.stage): hop for microbatch, route in enumerate(layout.routes) for hop in route
    }
    stage_of = {worker: index for index, stage in enumerate(layout.stages) for worker in stage.workers}

    def shares_layers(one: int, other: int) -> bool:
        first, second = layout.stages[one], layout.stages[other]
        return bool(set(range(first.start, first.stop)) & set(range(second.start, second.stop)))

    @cache
    def end(step: int, worker: int, position: int) -> float:
        action = programs[worker][position]
        hop = hops[action.microbatch, action.stage]
        before = [entry(step, stage_of[worker])]
        if position:
            before.append(end(step, worker, position - 1))
        before += [arrival for arrival in (arrives(step, action),) if arrival is not None]
        return max(before) + durations(hop, action.kind)

    @cache
    def entry(step: int, stage: int) -> float:
        if step == 0:
            return 0.0
        others = [worker for worker, own in stage_of.items() if shares_layers(own, stage)]
        return max(done(step - 1, worker) for worker in others) + overhead_s

    def done(step: int, worker: int) -> float:
        program = programs[worker]
        return end(step, worker, len(program) - 1) if program else entry(step, stage_of[worker])

    def arrives(step: int, action: Action) -> float | None:
        if action.kind == "W":
            return None
        route = layout.routes[action.microbatch]
        at = [hop.stage for hop in route].index(action.stage)
        if action.kind == "F":
            return None if at == 0 else sent(step, route[at - 1], "F", action.microbatch, route[at])
        if at == len(route) - 1:
            return sent(step, route[at], "F", action.microbatch, route[at])
        kinds = {each.kind for each in programs[route[at + 1].worker]}
        return sent(step, route[at + 1], "B" if "B" in kinds else "I", action.microbatch, route[at])

    def sent(step: int, source: Hop, kind: str, microbatch: int, target: Hop) -> float:
        position = programs[source.worker].index(Action(source.stage, kind, microbatch))  # type: ignore[arg-type]
        return end(step, source.worker, position) + (link_s if source.stage != target.stage else 0.0)

    return [max(done(step, worker) for worker in stage_of) for step in range(steps)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Cluster, Costs, Allocation]:
    """A few stages of unequal width, layers of unequal length, workers of unequal speed."""
    num_stages, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    costs = layers(*draw(st.lists(st.sampled_from([0.5, 1.0, 1.7]), min_size=num_stages, max_size=5)))
    cluster = machines(num_stages * width)
    speeds = draw(st.lists(st.sampled_from([1.0, 1.0, 0.6]), min_size=len(cluster.ids), max_size=len(cluster.ids)))
    cluster = replace(cluster, speed=np.array(speeds))
    schedule = draw(st.sampled_from([each for each in SCHEDULES if each != "gpipe"]))
    before = rectangle(
        cluster, costs, num_stages=num_stages, num_microbatches=width * draw(st.integers(1, 3)), schedule=schedule
    )
    lost = draw(st.sampled_from([(), (0,)])) if width > 1 else ()
    if not lost:
        return cluster, costs, before
    left = cluster.without(lost)
    found = recycle.plan_recycle(
        left, costs, before, ClusterEvent(kind="lost", workers=lost), staggered_optimizer=False, normalize=False
    )
    return left, costs, replace(found.allocation, schedule=schedule)


@settings(max_examples=40, deadline=None)
@given(irregular_layouts(), st.sampled_from(["1f1b", "zero-bubble", "zero-bubble-h2"]), st.data())
def test_the_period_is_that_of_the_graph_written_out(layout: Layout, schedule: Schedule, data: st.DataObject) -> None:
    """Stages of any width that may share layers, micro-batches on any of their workers, some without any."""
    overhead_s, link_s = data.draw(st.sampled_from([0.0, 0.3])), data.draw(st.sampled_from([0.0, 0.25]))
    num_layers = layout.stages[-1].stop
    seconds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.7]), min_size=num_layers, max_size=num_layers))
    speeds = {worker: data.draw(st.sampled_from([1.0, 1.0, 0.6])) for worker in layout.workers}
    durations = durations_of([(each, each, each / 2) for each in seconds], speeds.__getitem__)

    def transfer_s(source: Hop, target: Hop, layer: int) -> float:
        return link_s

    programs = compile_programs(layout, schedule, durations=durations, transfer_s=transfer_s)
    for _ in range(2):
        found = repeat_programs(
            layout, programs, durations, transfer_s, [overhead_s] * len(layout.stages), num_steps=4
        )  # fmt: skip
        ends = unfolded_ends(layout, programs, durations, link_s, overhead_s, 4)
        assert found.period_s == pytest.approx(ends[3] - ends[2])
        # The same for programs of workers that begin at different times; they run all actions, and hold no more.
        programs = compile_programs(
            layout, schedule, durations=durations, transfer_s=transfer_s, begins_s=found.begins_s
        )  # fmt: skip
        validate_programs(layout, programs, max_in_flight=in_flight_bounds(layout, schedule))


@settings(max_examples=40, deadline=None)
@given(jobs(), st.sampled_from([0.0, 0.3]))
def test_the_period_is_between_its_bound_and_the_step_with_a_barrier(
    job: tuple[Cluster, Costs, Allocation], overhead_s: float
) -> None:
    cluster, costs, allocation = job
    costs = Costs(layers=costs.layers, step_overhead_s=overhead_s)
    found = staggered_step_s(cluster, costs, allocation)
    assert found <= step_s(cluster, costs, allocation, "exact") * (1 + 1e-9)
    pace_s = estimate(cluster, costs, allocation).pace_s
    assert staggered_bound_s(cluster, costs, allocation, pace_s) >= pace_s + overhead_s
    assert staggered_bound_s(cluster, costs, allocation, pace_s) <= found * (1 + 1e-9)


def test_equal_stages_lose_the_way_through_the_pipeline_once_and_not_in_every_step() -> None:
    """Split backwards and room for twice the micro-batches: each worker computes all the time."""
    costs, cluster = layers(1, 1, 1, 1), machines(8)
    allocation = rectangle(cluster, costs, num_stages=4, num_microbatches=16, schedule="zero-bubble-h2")
    fast = machines(8)
    assert step_s(fast, costs, allocation, "exact") > 8 * 3 + 2
    assert staggered_step_s(fast, costs, allocation) == pytest.approx(8 * 3, rel=1e-3)
    # Without split backwards the first stage enters when the last gradient is back: nothing is gained.
    plain = replace(allocation, schedule="1f1b")
    assert staggered_step_s(fast, costs, plain) == pytest.approx(step_s(fast, costs, plain, "exact"), rel=1e-3)


def test_six_steps_show_the_period() -> None:
    """As long as what many steps take on average, within half a percent, in layouts of all kinds."""
    costs = layers(1, 0.8, 1.2, 1, 1, 1)
    cluster = machines(18)
    for stages, number, gone, schedule in (
        (3, 24, (0,), "zero-bubble"), (3, 30, (0, 1, 7), "zero-bubble-h2"), (6, 24, (4,), "zero-bubble-h2"),
        (6, 12, (4, 9), "1f1b"),
    ):  # fmt: skip
        before = rectangle(cluster, costs, num_stages=stages, num_microbatches=number, schedule="1f1b")
        left = cluster.without(gone)
        plan = recycle.plan_recycle(
            left, costs, before, ClusterEvent(kind="lost", workers=gone), staggered_optimizer=False
        )
        layout = make_routes(plan.allocation, costs, left)
        durations = durations_of(costs.layer_s, lambda _: 1.0)
        programs = compile_programs(layout, schedule, durations=durations)
        few, many, more = (
            repeat_programs(layout, programs, durations, None, [0.1] * stages, num_steps=steps) for steps in (6, 30, 60)
        )
        assert few.period_s == pytest.approx(many.period_s, rel=5e-3)
        assert few.period_s == pytest.approx(more.period_s, rel=5e-3)


def test_memory_that_is_short_bounds_what_is_in_flight_and_so_the_period() -> None:
    costs = layers(1, 1, 1, 1, activation_bytes=2e6)
    cluster = machines(8)
    before = rectangle(cluster, costs, num_stages=4, num_microbatches=16, schedule="zero-bubble-h2")
    roomy = recycle.plan_recycle(*_lost(cluster, costs, before))
    fixed = 1e6 + 2e6 + 3e6 * 2
    periods = []
    for held in (6, 4, 2):
        tight = replace(cluster, memory_bytes=np.full(8, fixed + held * 2e6))
        plan = recycle.plan_recycle(*_lost(tight, costs, before))
        assert (plan.memory_bytes <= fixed + held * 2e6).all()
        assert "fewer micro-batches in flight" in plan.reason
        periods.append(plan.predicted_step_s)
    assert roomy.predicted_step_s <= periods[0] <= periods[1] < periods[2]
    with pytest.raises(InfeasiblePlan, match="memory: worker"):
        recycle.plan_recycle(*_lost(replace(cluster, memory_bytes=np.full(8, fixed + 1e6)), costs, before))


def _lost(cluster: Cluster, costs: Costs, before: Allocation) -> tuple[Cluster, Costs, Allocation, ClusterEvent]:
    return cluster.without([0]), costs, before, ClusterEvent(kind="lost", workers=(0,))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_programs_of_steps_that_begin_apart_keep_to_what_may_be_held(most: int) -> None:
    costs, cluster = layers(1, 1, 1), machines(6)
    allocation = rectangle(cluster, costs, num_stages=3, num_microbatches=12, schedule="zero-bubble-h2")
    layout = make_routes(allocation, costs, cluster)
    bounds = bounds_within(layout, allocation.schedule, dict.fromkeys(layout.workers, most))
    programs = compile_programs(
        layout, allocation.schedule, max_in_flight=bounds, durations=durations_of(costs.layer_s, lambda _: 1.0),
        begins_s={worker: float(worker // 2) for worker in layout.workers},
    )  # fmt: skip
    validate_programs(layout, programs, max_in_flight=bounds)


def test_steps_of_too_many_actions_take_the_bound() -> None:
    """Nothing is compiled, so a job of many workers is planned at once, and never above the step with a barrier."""
    costs, cluster = layers(*[1.0] * 16), machines(1024)
    before = rectangle(cluster, costs, num_stages=8, num_microbatches=128 * 16, schedule="zero-bubble")
    lost = _lost(cluster, costs, before)
    found, barrier = recycle.plan_recycle(*lost), recycle.plan_recycle(*lost, staggered_optimizer=False)
    pace_s = estimate(lost[0], costs, found.allocation).pace_s
    assert found.predicted_step_s == pytest.approx(
        staggered_bound_s(lost[0], costs, found.allocation, pace_s)
    )  # fmt: skip
    assert pace_s <= found.predicted_step_s < barrier.predicted_step_s


def test_workers_that_begin_later_need_durations() -> None:
    costs, cluster = layers(1, 1), machines(2)
    allocation = rectangle(cluster, costs, num_stages=2, num_microbatches=2, schedule="1f1b")
    layout = make_routes(allocation, costs, cluster)
    with pytest.raises(ValueError, match="seconds at which workers begin are given, but none of actions"):
        compile_programs(layout, "1f1b", begins_s={0: 0.0, 1: 1.0})
    durations = durations_of(costs.layer_s, lambda _: 1.0)
    alike = compile_programs(layout, "zero-bubble", durations=durations, begins_s={0: 0.0, 1: 0.0})
    assert alike == compile_programs(layout, "zero-bubble", durations=durations)
    assert time_programs(layout, alike, durations).step_s > 0
