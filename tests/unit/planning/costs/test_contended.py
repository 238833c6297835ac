"""A step on virtual time: equal to the planner's timing without contention, by hand with it, and as a trace."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.programs import parse_programs
from tests.property.layouts import layouts
from tests.trace_format import validate_trace

from elaswave.errors import InvalidProgramError
from elaswave.observability.trace import ACTION, step_trace, write_step_trace
from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.machines import Cluster, DeviceSpec
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.schedules import SCHEDULES
from elaswave.planning.costs.step_time.contended import simulate_step
from elaswave.planning.costs.step_time.exact import durations_of, time_programs, transfer_of
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.programs.programs import compile_programs
from elaswave.types import Hop, Layout, Stage

DEVICE = DeviceSpec(name="d", flops_per_s=1.0, memory_bytes=1.0)


def costs_of(seconds, boundary_bytes, overhead_s=0.0):
    return Costs(
        layers=tuple(
            LayerCosts(forward_s=each, input_gradient_s=each, weight_gradient_s=each, parameter_bytes=0.0,
                       accumulator_bytes=0.0, optimizer_bytes=0.0, activation_bytes=0.0, boundary_bytes=boundary_bytes)
            for each in seconds
        ),
        step_overhead_s=overhead_s,
    )  # fmt: skip


def cluster_of(layout, bandwidth, latency_s=0.0, workers_per_node=2):
    return Cluster.uniform(
        max(layout.workers) + 1,
        DEVICE,
        within_node=NetworkLink(bandwidth_bytes_per_s=4 * bandwidth, latency_s=latency_s),
        between_nodes=NetworkLink(bandwidth_bytes_per_s=bandwidth, latency_s=2 * latency_s),
        workers_per_node=workers_per_node,
    )


@given(layouts, st.sampled_from(SCHEDULES), st.data())
def test_contention_only_delays_and_nothing_else_does(layout, schedule, data):
    seconds = [data.draw(st.integers(0, 3)) / 2 for _ in range(layout.num_layers)]
    num_bytes, latency_s = data.draw(st.sampled_from([0.0, 1.0, 3.0])), data.draw(st.sampled_from([0.0, 0.5]))
    costs, cluster = costs_of(seconds, num_bytes, overhead_s=0.25), cluster_of(layout, 4.0, latency_s)
    durations, transfer_s = durations_of(costs.layer_s, cluster.speed_of()), transfer_of(costs, cluster)
    programs = compile_programs(layout, schedule, durations=durations, transfer_s=transfer_s)
    alone = time_programs(layout, programs, durations, transfer_s)
    step = simulate_step(layout, programs, costs, cluster)
    assert step.uncontended_s == alone.step_s + 0.25
    assert step.step_s == step.timeline.step_s + 0.25
    for worker, ends in alone.end_s.items():
        if num_bytes == 0:
            assert step.timeline.end_s[worker] == ends
        assert all(late >= early - 1e-9 for late, early in zip(step.timeline.end_s[worker], ends, strict=True))
    assert len(step.transfers) == 2 * sum(len(route) - 1 for route in layout.routes)
    assert sum(step.sent_bytes.values()) == num_bytes * len(step.transfers)
    for each in step.transfers:
        assert each.start_s <= each.sent_s <= each.end_s
        assert each.sent_s - each.start_s >= num_bytes / 16.0 - 1e-9
    # Each sender's bytes fit through its links: nothing leaves before all that was handed over earlier could have.
    for worker in layout.workers:
        own = [each for each in step.transfers if each.source == worker]
        if own:
            assert max(each.sent_s for each in own) >= len(own) * num_bytes / (16.0 + 4.0) - 1e-9


def test_transfers_of_one_sender_share_its_link():
    """Worker 0 sends to 1 and 2, half a second apart; each transfer takes 1 s alone."""
    stages = (Stage(start=0, stop=1, workers=(0,)), Stage(start=1, stop=2, workers=(1, 2)))
    layout = Layout(stages=stages, routes=((Hop(0, 0, 0, 1), Hop(1, 1, 1, 2)), (Hop(0, 0, 0, 1), Hop(2, 1, 1, 2))))
    programs = parse_programs("worker 0: 0F0 0F1 0B0 0B1\nworker 1: 1F0 1B0\nworker 2: 1F1 1I1 1W1")
    costs = costs_of([0.5, 10.0], 8.0)
    step = simulate_step(layout, programs, costs, cluster_of(layout, 8.0, workers_per_node=1))
    # The first has the link for 0.5 s, both share it for 1 s, the second one ends alone after 0.5 s more.
    assert [(each.target, each.start_s, each.sent_s) for each in step.transfers[:2]] == [(1, 0.5, 2.0), (2, 1.0, 2.5)]
    assert step.timeline.start_s[1][0] == 2.0 and step.timeline.start_s[2][0] == 2.5
    # The gradients come from two senders: no link is shared.
    assert [(each.source, each.sent_s - each.start_s) for each in step.transfers[2:]] == [(2, 1.0), (1, 1.0)]
    # Worker 0 waits for the first one although the second one is there: its program says so.
    assert step.timeline.start_s[0][2:] == [33.0, 34.0]
    assert step.step_s == 35.0
    assert step.timeline.stage_bubble_fractions == [1 - 3.0 / 35.0, 1 - 30.0 / 35.0]
    assert step.uncontended_s == 34.5
    near = simulate_step(layout, programs, costs, cluster_of(layout, 8.0, workers_per_node=3))
    assert near.timeline.start_s[1][0] == 0.75  # within a node links are four times as fast
    mixed = simulate_step(layout, programs, costs, cluster_of(layout, 8.0, latency_s=0.125, workers_per_node=2))
    assert mixed.timeline.start_s[1][0] == 0.875 and mixed.timeline.start_s[2][0] == 2.25  # another link each
    assert json.loads(json.dumps(step.to_json()))["stage_bubble_fractions"] == step.timeline.stage_bubble_fractions


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_trace_is_that_of_a_real_run(tmp_path, schedule):
    layout = make_layout(widths=[2, 3], layers_per_stage=[2, 1], num_microbatches=7)
    cluster, costs = cluster_of(layout, 8.0), costs_of([1.0, 2.0, 3.0], 4.0)
    programs = compile_programs(layout, schedule)
    step = simulate_step(layout, programs, costs, cluster)
    for part in step_trace(step):
        actions = [span for span in part.spans if span.category == ACTION]
        assert [span.name for span in actions] == list(map(str, programs[part.worker]))
        assert part.stage == layout.stage_of(part.worker)
        waits = [span for span in part.spans if span.category == "wait"]
        spans = sorted([*actions, *waits], key=lambda span: (span.start_ns, span.end_ns))
        assert spans[0].start_ns == 0
        assert all(before.end_ns == after.start_ns for before, after in zip(spans, spans[1:]))
    write_step_trace(tmp_path / "trace.json", step)
    document = json.loads((tmp_path / "trace.json").read_text())
    validate_trace(document)
    arrows = [event for event in document["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == len(step.transfers) == 14


def test_the_same_step_twice_and_programs_that_cannot_run():
    layout = make_layout(widths=[1, 2], layers_per_stage=[1, 1], num_microbatches=4)
    cluster, costs = cluster_of(layout, 8.0, 0.01), costs_of([1.0, 1.5], 4.0)
    programs = compile_programs(layout, "zero-bubble")
    one, other = (simulate_step(layout, programs, costs, cluster) for _ in range(2))
    assert one.transfers == other.transfers and one.timeline.end_s == other.timeline.end_s
    with pytest.raises(InvalidProgramError, match="for ever"):
        simulate_step(layout, parse_programs("worker 0: 0B0 0F0\nworker 1: 1F0 1B0"), costs, cluster)
    with pytest.raises(KeyError):
        simulate_step(layout, programs, costs, cluster.without([2]))
