"""Times of programs: closed forms, transfers, durations from costs."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.programs import parse_programs
from tests.property.layouts import layouts

from elaswave.errors import InvalidProgramError
from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.machines import Cluster, DeviceSpec, FrequencyLevel
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.schedules import SCHEDULES, in_flight_bounds, independent_pipelines
from elaswave.planning.costs.step_time.exact import StepGraph, durations_of, run_in_order, time_programs, transfer_of
from elaswave.planning.programs import programs as planning_programs
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.programs.programs import compile_programs, compiled_step_s
from elaswave.planning.programs.validation import validate_programs
from elaswave.types import Hop

FORWARD, INPUT, WEIGHT = 1.0, 1.25, 0.75


def uniform(hop, kind):
    return {"F": FORWARD, "B": INPUT + WEIGHT, "I": INPUT, "W": WEIGHT}[kind]


def layout_of(widths, num_microbatches):
    return make_layout(widths=widths, layers_per_stage=[1] * len(widths), num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("per_worker", [1, 2, 8, 19])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_uniform_stages_take_as_long_as_the_closed_form_says(num_stages, width, per_worker, schedule):
    """(M + S - 1) * (F + B), for both schedules (GPipe, section 2.3; PipeDream-Flush, section 2.2)."""
    layout = layout_of([width] * num_stages, width * per_worker)
    timeline = time_programs(layout, compile_programs(layout, schedule, durations=uniform), uniform)
    each = FORWARD + INPUT + WEIGHT
    assert timeline.step_s == (per_worker + num_stages - 1) * each
    bubble = pytest.approx((num_stages - 1) / (per_worker + num_stages - 1))
    assert timeline.stage_bubble_fractions == [bubble] * num_stages
    assert timeline.bubble_fractions == dict.fromkeys(layout.workers, bubble)
    assert timeline.busy_s == dict.fromkeys(layout.workers, pytest.approx(per_worker * each))


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_zero_bubble_on_uniform_stages_takes_as_long_as_its_paper_says(num_stages, rounds):
    """ZB-H1: M (F + I + W) + (S - 1) (F + I - W), Zero Bubble Pipeline Parallelism, table 2; with F = I = W."""
    layout = layout_of([1] * num_stages, rounds * num_stages)

    def ones(hop, kind):
        return 2.0 if kind == "B" else 1.0

    programs = compile_programs(layout, "zero-bubble", durations=ones)
    assert time_programs(layout, programs, ones).step_s == 3 * layout.num_microbatches + num_stages - 1
    assert max(in_flight_bounds(layout, "zero-bubble").values()) == num_stages


@given(layouts, st.sampled_from(SCHEDULES), st.integers(0, 9), st.lists(st.floats(0.5, 1.5), max_size=4))
def test_a_step_is_timed_only_as_exactly_as_is_asked(layout, schedule, scale, shares):
    """Whatever has been asked before, and whatever was left out then: no less than asked for, or the very seconds."""
    forget_programs()

    def durations(hop, kind):
        whole = {"F": 0.1, "I": 0.23, "W": 0.17}
        return (0.4 if kind == "B" else whole[kind]) * (1 + scale * (hop.worker % 3))

    exact = time_programs(layout, compile_programs(layout, schedule, durations=durations), durations).step_s
    forget_programs()
    for share in [*shares, 1.0, float("inf")]:
        found = compiled_step_s(layout, schedule, durations, within_s=share * exact)
        assert found == exact or found >= share * exact
        assert found == exact or share <= 1 + 1e-6


def forget_programs():
    for memo in (planning_programs._PROGRAMS, planning_programs._TIMES, planning_programs._AT_LEAST):
        memo._known.clear()


@given(layouts, st.integers(0, 9), st.booleans())
def test_orders_that_are_given_up_are_those_that_are_not_the_best(layout, scale, begins_late):
    def durations(hop, kind):
        return {"F": 1.0, "B": 2.3, "I": 1.2, "W": 1.1}[kind] * (1 + scale * (hop.worker % 3) / 4)

    for part, _ in independent_pipelines(layout):
        flow = StepGraph(part, durations, ticks=True)
        begins = [flow.seconds[0] * position for position in range(len(flow.workers))] if begins_late else []
        bounds = in_flight_bounds(part, "zero-bubble-h2")
        open_, tried = planning_programs._limits(part, flow, "zero-bubble-h2", bounds)
        ends = []
        for held in tried:
            for limits, prefers_backward in ((open_, False), (held, True)):
                compiler = planning_programs._Compiler(
                    flow,
                    held,
                    open_=limits,
                    kinds=planning_programs._SPLIT,
                    prefers_backward=prefers_backward,
                    begins=begins,
                )
                compiler.run()
                ends.append(planning_programs._longest_since(compiler.ends, begins))
        programs = planning_programs._zero_bubble(flow, open_, tried, begins, None)
        found = [own[-1] if own else 0 for own in run_in_order(flow, programs, begins or None).ends]
        longest = planning_programs._longest_since(found, begins)
        assert longest <= min(ends)
        assert begins_late or longest >= planning_programs._least_ticks(flow)
        assert planning_programs._zero_bubble(flow, open_, tried, begins, longest) is None
        assert planning_programs._zero_bubble(flow, open_, tried, begins, longest + 1) == programs


@given(layouts, st.sampled_from(SCHEDULES), st.integers(1, 3), st.integers(0, 7))
def test_a_step_is_timed_without_its_programs_to_the_last_bit(layout, schedule, most, scale):
    """Also where the same pipeline has been asked for before, under other bounds, schedules and durations."""

    def durations(hop, kind):
        whole = {"F": 0.1, "I": 0.23, "W": 0.17}
        return (sum(whole.values()) - 0.1 if kind == "B" else whole[kind]) * (1 + scale * (hop.worker % 3)) / 3

    def transfer_s(source, target, layer):
        return 0.01 * (source.worker != target.worker)

    bounds = None if schedule == "gpipe" else dict.fromkeys(layout.workers, most)
    programs = compile_programs(layout, schedule, max_in_flight=bounds, durations=durations, transfer_s=transfer_s)
    expected = time_programs(layout, programs, durations, transfer_s).step_s
    found = compiled_step_s(layout, schedule, durations, max_in_flight=bounds, transfer_s=transfer_s)
    assert found == expected
    with_room = compiled_step_s(layout, schedule, durations, transfer_s=transfer_s)
    programs = compile_programs(layout, schedule, durations=durations, transfer_s=transfer_s)
    assert with_room == time_programs(layout, programs, durations, transfer_s).step_s


def test_pipelines_that_are_alike_are_compiled_once(monkeypatch):
    compiled = []
    compile_one = planning_programs._Compiler.run

    def run(self):
        compiled.append(self)
        return compile_one(self)

    monkeypatch.setattr(planning_programs._Compiler, "run", run)

    def durations(hop, kind):
        return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[kind] * 0.731  # of no other test

    side_by_side = layout_of([5, 5], 20)
    assert compiled_step_s(side_by_side, "1f1b", durations) == 5 * 3 * 0.731
    assert len(compiled) == 1
    programs = compile_programs(side_by_side, "1f1b", durations=durations)
    assert len(compiled) == 1
    assert {len(program) for program in programs.values()} == {8}
    assert len({action.microbatch for program in programs.values() for action in program}) == 20


@given(layouts, st.data())
def test_zero_bubble_is_never_slower_than_1f1b(layout, data):
    seconds = {}

    def durations(hop, kind):
        if kind == "B":
            return durations(hop, "I") + durations(hop, "W")
        key = (hop, kind)
        if key not in seconds:
            seconds[key] = data.draw(st.integers(0, 4)) / 4
        return seconds[key]

    delay = data.draw(st.integers(0, 4)) / 8
    for transfer_s in (None, lambda source, target, layer: delay):
        times = {}
        for schedule in SCHEDULES:
            programs = compile_programs(layout, schedule, durations=durations, transfer_s=transfer_s)
            validate_programs(layout, programs, max_in_flight=in_flight_bounds(layout, schedule))
            timeline = time_programs(layout, programs, durations, transfer_s)
            times[schedule] = timeline.step_s
            assert timeline.step_s >= max(timeline.busy_s.values())
        # Orders are chosen by rounded durations.
        assert times["zero-bubble-h2"] <= times["zero-bubble"] * (1 + 1e-6) <= times["1f1b"] * (1 + 2e-6)


def test_actions_wait_for_transfers_but_nobody_computes_them():
    layout = layout_of([1, 1], 2)
    programs = parse_programs("worker 0: 0F0 0F1 0B0 0I1 0W1\nworker 1: 1F0 1B0 1F1 1I1 1W1")
    seen = []

    def transfer_s(source, target, layer):
        seen.append((source.worker, target.worker, layer))
        return 10.0 if source.worker == 0 else 100.0

    timeline = time_programs(layout, programs, uniform, transfer_s)
    assert timeline.start_s == {0: [0.0, 1.0, 114.0, 116.25, 117.5], 1: [11.0, 12.0, 14.0, 15.0, 16.25]}
    assert timeline.end_s[1] == [12.0, 14.0, 15.0, 16.25, 17.0]
    assert timeline.step_s == 118.25
    assert set(seen) == {(0, 1, 0), (1, 0, 0)}


def test_programs_that_cannot_run_are_refused():
    layout = layout_of([1, 1], 2)
    stuck = parse_programs("worker 0: 0F0 0B0 0F1 0B1\nworker 1: 1F1 1F0 1B0 1B1")
    with pytest.raises(InvalidProgramError, match="worker 0 waits for the input of 0B0 for ever"):
        time_programs(layout, stuck, uniform)
    for text, action in (("worker 0: 1F0", "1F0"), ("worker 0: 0F2", "0F2"), ("worker 1: 7B0", "7B0")):
        with pytest.raises(InvalidProgramError, match=f"cannot run {action}: no route passes it there"):
            time_programs(layout, parse_programs(text), uniform)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_seconds_are_refused(value):
    layout = layout_of([1, 1], 2)
    programs = compile_programs(layout, "1f1b")
    with pytest.raises(ValueError, match=re.escape("an action of worker 0 on layers [0, 1) takes")):
        time_programs(layout, programs, lambda hop, kind: value)
    with pytest.raises(ValueError, match="transfers between workers 0 and 1 take"):
        time_programs(layout, programs, uniform, lambda source, target, layer: value)
    with pytest.raises(ValueError, match="give durations as well"):
        compile_programs(layout, "1f1b", transfer_s=lambda source, target, layer: 1.0)


def test_a_step_without_work_takes_no_time():
    layout = layout_of([1, 1], 2)
    timeline = time_programs(layout, compile_programs(layout, "1f1b"), lambda hop, kind: 0.0)
    assert timeline.step_s == 0.0 and timeline.stage_bubble_fractions == [0.0, 0.0]
    assert time_programs(layout, {}, uniform).step_s == 0.0


def test_durations_and_transfers_follow_from_costs_and_cluster():
    layers = tuple(
        LayerCosts(forward_s=1.0 + index, input_gradient_s=2.0, weight_gradient_s=3.0, parameter_bytes=0.0,
                   accumulator_bytes=0.0, optimizer_bytes=0.0, activation_bytes=0.0, boundary_bytes=100.0 * (index + 1))
        for index in range(4)
    )  # fmt: skip
    levels = (FrequencyLevel(speed=0.5, power_w=1.0), FrequencyLevel(speed=1.0, power_w=2.0))
    cluster = Cluster.uniform(
        3,
        DeviceSpec(name="d", flops_per_s=1.0, memory_bytes=1.0, levels=levels),
        within_node=NetworkLink(bandwidth_bytes_per_s=100.0),
        between_nodes=NetworkLink(bandwidth_bytes_per_s=10.0, latency_s=1.0),
        workers_per_node=2,
    )
    cluster.speed[1] = 0.25
    costs = Costs(layers=layers)
    base = durations_of(costs.layer_s, cluster.speed_of())
    assert [base(Hop(0, 0, 1, 3), kind) for kind in "FIWB"] == [5.0, 4.0, 6.0, 10.0]
    assert base(Hop(1, 0, 1, 3), "F") == 20.0
    slow = durations_of(costs.layer_s, cluster.speed_of({0: 0, 2: 1}))
    assert [slow(Hop(worker, 0, 0, 1), "F") for worker in (0, 1, 2)] == [2.0, 4.0, 1.0]
    transfer_s = transfer_of(costs, cluster)
    hops = [Hop(worker, worker, worker, worker + 1) for worker in range(3)]
    assert transfer_s(hops[0], hops[1], 0) == 1.0
    assert transfer_s(hops[1], hops[2], 1) == transfer_s(hops[2], hops[1], 1) == 21.0
    assert transfer_s(hops[1], hops[1], 1) == 0.0
    for function in (lambda: base(Hop(9, 0, 0, 1), "F"), lambda: transfer_s(hops[0], Hop(9, 1, 1, 2), 0)):
        with pytest.raises(KeyError):
            function()
    assert np.all(cluster.ids == [0, 1, 2])
