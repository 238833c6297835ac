"""The planner's axes and what composes them: examples, and what is refused and how."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct
from tests.property.clusters import LEVELS, LINK, make_cluster, make_costs
from tests.unit.planning_cases import plan, predict

from elaswave.config.presets import device_preset, model_shape
from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.analytic import analytic_costs, preset_cluster
from elaswave.planning.costs.layers import MemoryModel
from elaswave.planning.costs.machines import ClusterEvent, DeviceSpec, FrequencyLevel, worker_power, worker_speeds
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.schedules import SCHEDULES, in_flight, in_flight_bounds
from elaswave.planning.costs.step_time.exact import durations_of, time_programs
from elaswave.planning.frequency import check_power, choose_levels, common_levels
from elaswave.planning.plan import Plan, StageShare, StateTransfer, at_levels, levels_of, num_actions
from elaswave.planning.policy.fault_free_policies import fastest_fault_free, fault_free
from elaswave.planning.programs.prediction import estimate, stages_of, time_as_it_is, time_within_memory
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import allocation_of, make_routes
from elaswave.planning.programs.shared_layers import cuts_of, share_layers, widen_cuts
from elaswave.planning.search.apportionment import apportion
from elaswave.planning.search.candidates import AXES, Options
from elaswave.planning.search.exhaustive import all_shapes
from elaswave.planning.search.memory_limits import MemoryBudget, check_worker_memory, layout_limits
from elaswave.planning.search.partition import choose_widths, split_layers
from elaswave.planning.search.shapes import Shape, balanced_widths, build, move_workers, score, whole_layers
from elaswave.planning.state_moves.transfers import Sources, needed_transfers, receiving_s
from elaswave.types import Hop, Layout, Stage


def lost(*workers):
    return ClusterEvent(kind="lost", workers=workers)


# ------------------------------------------------------------------------------------------------------------ dataflow


def test_faster_workers_get_more_micro_batches():
    assert apportion(9, np.array([1.0, 2.0, 2.0])).tolist() == [5, 2, 2]
    assert apportion(5, np.array([1.0, 1.0])).tolist() == [3, 2]
    assert apportion(20, 1 / np.array([0.5, 1.0, 1.0, 1.0])).tolist() == [2, 6, 6, 6], "of equals the faster takes it"
    assert apportion(0, np.array([1.0, 2.0])).tolist() == [0, 0]
    assert apportion(6, np.array([1.0, 1.0, 1.0]), np.array([1, 9, 2])).tolist() == [1, 3, 2]


def test_an_impossible_apportionment_is_refused():
    with pytest.raises(ValueError, match="over no workers: give at least one"):
        apportion(3, np.array([]))
    with pytest.raises(ValueError, match="needed are finite ones above 0"):
        apportion(3, np.array([1.0, 0.0]))
    with pytest.raises(InfeasiblePlan, match="can take 2 micro-batches, but have to take 3: 1 too many"):
        apportion(3, np.array([1.0, 1.0]), np.array([1, 1]))


# --------------------------------------------------------------------------------------------------------------- graph


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="cannot split 1 layers into 2 stages"):
        split_layers([0.0, 1.0], [1.0, 1.0])


def test_workers_that_are_not_needed_stay_where_they_are():
    assert choose_widths(np.array([1.0, 1.0]), 7, 8, [4, 3]).tolist() == [4, 3]
    assert choose_widths(np.array([3.0, 1.0]), 4, 6, [2, 2]).tolist() == [3, 1]
    assert choose_widths(np.array([1.0, 1.0]), 1, 4, [1, 0]) is None


def test_a_boundary_is_shared_in_proportion_to_the_workers():
    prefix = np.arange(9.0)
    assert share_layers(prefix, np.array([1.0, 1.0]), 6) == ({4: 6},)
    assert share_layers(prefix, np.array([3.0, 2.0]), 10) == ({4: 2, 5: 8},)
    assert share_layers(np.arange(2.0), np.array([1.0, 1.0]), 6) is None


def test_memory_moves_shared_boundaries():
    """The first of two equal stages may hold three layers only, the second takes the rest."""

    def fits(stage, start, stop, *_):
        return stage or stop - start <= 3

    cuts = share_layers(np.arange(9.0), np.array([1.0, 1.0]), 6, fits)
    assert cuts == ({3: 6},)
    assert share_layers(np.arange(9.0), np.array([1.0, 1.0]), 6, lambda *_: False) is None


def test_a_stage_without_room_for_a_whole_layer_shares_it():
    """The first of three stages may hold five layers only if the next one has the fifth as well: one micro-batch of
    it, since the first is the fastest."""

    def fits(stage, start, stop, shared_before=0, shared_behind=0):
        return stage or stop - start < 5 + shared_behind

    cuts = share_layers(np.arange(10.0), np.array([8.0, 2.0, 2.0]), 6, fits)
    assert cuts[0] == {4: 1, 5: 5}
    assert sum(cuts[1].values()) == 6


def test_cuts_are_spread_where_workers_have_unequal_numbers():
    """Five micro-batches on four and three workers: a worker with two of them should run fewer layers of each."""
    prefix = np.arange(13.0)
    counts, speeds = [np.array([2, 1, 1, 1]), np.array([2, 2, 1])], [np.ones(4), np.ones(3)]
    cuts = share_layers(prefix, np.array([4.0, 3.0]), 5)
    wider = widen_cuts(prefix, cuts, counts, speeds)
    assert len(wider[0]) > len(cuts[0])
    assert sum(wider[0].values()) == 5
    assert sum(layer * n for layer, n in wider[0].items()) == sum(layer * n for layer, n in cuts[0].items())
    assert widen_cuts(prefix, cuts, counts, speeds, lambda *_: False) == cuts


def test_few_workers_move_and_free_ones_first():
    cluster = make_cluster([1.0] * 7)
    members = (np.array([0, 1, 2, 3]), np.array([4, 5]))
    moved = move_workers(cluster, members, np.array([6]), np.array([3, 4]))
    assert [stage.tolist() for stage in moved] == [[0, 1, 2], [3, 4, 5, 6]]


def held_by(members, ranges, num_workers):
    held = np.zeros((num_workers, 2), dtype=np.int64)
    for own, layers in zip(members, ranges, strict=True):
        held[own] = layers
    return held


def test_layouts_are_listed_only_where_they_are_few():
    costs = make_costs([1.0] * 6)
    members = (np.arange(3), np.arange(3, 6))
    held = held_by(members, [(0, 3), (3, 6)], 6)
    arguments = {"followers": 1, "most": 1000}
    cluster = make_cluster([1.0] * 6)
    found = all_shapes(cluster, costs, np.arange(6), held, 4, "1f1b", **arguments)
    # k stages: every way to divide six workers times every way to divide six layers.
    assert len(found) == sum(math.comb(5, k - 1) ** 2 for k in range(1, 7))
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert len(all_shapes(cluster, costs, np.arange(6), held, 4, "1f1b", stages=members, **arguments)) == 5
    assert all_shapes(make_cluster([1.0] * 13), costs, np.arange(13), held, 4, "1f1b", **arguments) == []
    deep = make_costs([1.0] * 60)
    few = all_shapes(make_cluster([1.0] * 12), deep, np.arange(12), held_by([], [], 12), 4, "1f1b", **arguments)
    assert {len(each.shape.members) for each in few} == {1, 2, 3}  # of more stages there are too many
    assert balanced_widths(make_cluster([1.0]), costs, members, 1, 4) == []


def test_workers_keep_the_layers_they_hold():
    """Of layouts of one kind that in which the fewest workers have to be sent anything."""
    cluster, costs = make_cluster([1.0, 0.5, 1.0, 0.5]), make_costs([1.0] * 4)
    members = [np.array([0, 3]), np.array([1, 2])]
    held = held_by(members, [(0, 2), (2, 4)], 4)
    found = all_shapes(cluster, costs, np.arange(4), held, 6, "1f1b", followers=1, most=50)
    same = next(
        each.shape
        for each in found
        if [own.tolist() for own in each.shape.members] == [[0, 3], [1, 2]] and each.shape.cuts == ({2: 6},)
    )
    assert same.origin == "2 stages of whole layers"


def test_layouts_that_do_not_fit_are_left_out():
    costs = make_costs([1.0] * 4, parameter_bytes=10.0)
    tight = make_cluster([1.0] * 4, memory_bytes=100.0)
    found = all_shapes(tight, costs, np.arange(4), np.zeros((4, 2), np.int64), 4, "1f1b", followers=1, most=100)
    assert found
    # A layer takes 30 bytes beside its activations and 60 of state, shared by the workers of its stage.
    assert all(len(each.shape.members) > 1 for each in found)


def test_a_slow_worker_does_not_cost_more_than_itself():
    """Llama-2 13B on 12 x 8 workers, three lost: with another one slow, a plan is no slower than without that one."""
    preset = device_preset("h200")
    costs, even = analytic_costs(model_shape("llama-2-13b"), preset), preset_cluster(96, preset)
    start = fastest_fault_free(even, costs, 8, 12, 48)
    gone = (41, 76, 91)
    speed = even.speed.copy()
    speed[1] = 0.7
    slow = replace(even, speed=speed).without(gone)
    found = plan(slow, costs, start, lost(*gone), horizon_s=1e12)
    without = plan(slow.without([1]), costs, start, lost(1, *gone), horizon_s=1e12)
    assert found.predicted_step_s <= without.predicted_step_s * 1.005
    kept = plan(slow, costs, start, lost(*gone), horizon_s=1e12, options=Options(leave_out=False))
    assert set(kept.allocation.workers.tolist()) == set(slow.ids.tolist())


def test_a_slow_worker_does_not_make_a_job_impossible():
    """With equal speeds, and without the slow worker, there is a plan; so there is one with it."""
    preset = device_preset("h100")
    costs, even = analytic_costs(model_shape("llama-2-13b"), preset), preset_cluster(15, preset)
    start = fastest_fault_free(even, costs, 3, 5, 20)
    gone = (3, 4, 14)
    speed = even.speed.copy()
    speed[1] = 0.5
    left = replace(even, speed=speed).without(gone)
    found = plan(left, costs, start, lost(*gone))
    assert bool(np.all(found.memory_bytes <= left.memory_bytes[0]))
    assert found.allocation.num_microbatches == 20


# ----------------------------------------------------------------------------------------------------------- frequency


def test_the_bottleneck_is_lifted_and_slack_is_lowered():
    devices = make_cluster([1.0], levels=LEVELS).devices
    device = np.zeros(3, dtype=np.int64)
    loads = np.array([5.0, 2.0, 4.0])
    assert choose_levels(loads, device, devices).tolist() == [2, 0, 1]
    assert choose_levels(loads, device, devices, least_speed=1.0).tolist() == [2, 1, 1]
    assert choose_levels(loads, device, devices, power_limit_w=250.0).tolist() == [1, 0, 1]
    with pytest.raises(InfeasiblePlan, match=re.escape("draw at least 120.0 W together while they compute, but may")):
        choose_levels(loads, device, devices, power_limit_w=100.0)


def test_devices_may_have_different_levels():
    one, other = make_cluster([1.0], levels=LEVELS).devices[0], DeviceSpec(name="e", flops_per_s=1.0, memory_bytes=1.0)
    cluster = replace(make_cluster([1.0, 2.0]), devices=(one, other), device=np.array([0, 1]))
    where, levels = np.array([0, 1]), np.array([2, 0])
    speed, (draw, idle) = worker_speeds(cluster, where, levels), worker_power(cluster, where, levels)
    assert (speed.tolist(), draw.tolist(), idle.tolist()) == ([1.25, 2.0], [150.0, 0.0], [10.0, 0.0])
    found = choose_levels(np.array([5.0, 4.0]), cluster.device, cluster.devices)
    assert found.tolist() == [2, 0]
    costs = make_costs([1.0] * 4)
    assert predict(cluster, costs, fault_free(cluster, costs, 2, 1, 4)) > 0


# ------------------------------------------------------------------------------------------------------------ estimate


@pytest.mark.parametrize(("num_stages", "replicas", "num_microbatches"), [(1, 1, 3), (4, 1, 8), (4, 2, 16), (3, 2, 12)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_follow_the_textbook(num_stages, replicas, num_microbatches, schedule):
    """(m + S - 1)(f + b), in closed form and exactly."""
    cluster, costs = make_cluster([1.0] * num_stages * replicas), make_costs([1.5] * 2 * num_stages)
    allocation = fault_free(cluster, costs, num_stages, replicas, num_microbatches, schedule)
    expected = (num_microbatches / replicas + num_stages - 1) * 3.0
    assert estimate(cluster, costs, allocation).step_s == pytest.approx(expected)
    assert predict(cluster, costs, allocation) == pytest.approx(expected)
    assert num_actions(allocation) == 2 * num_microbatches * num_stages


def test_split_backwards_follow_their_paper():
    """m(f + b) + (S - 1)(f + i - w)."""
    cluster, costs = make_cluster([1.0] * 4), make_costs([3.0] * 4)
    allocation = fault_free(cluster, costs, 4, 1, 8, "zero-bubble")
    assert estimate(cluster, costs, allocation).step_s == pytest.approx(8 * 3 + 3 * 1)
    assert predict(cluster, costs, allocation) == pytest.approx(8 * 3 + 3 * 1)


def test_the_closed_form_takes_over_where_there_are_many_actions():
    cluster, costs = make_cluster([1.0, 1.0]), make_costs([1.0, 2.0])
    allocation = fault_free(cluster, costs, 2, 1, 4, "zero-bubble")
    assert predict(cluster, costs, allocation, exact_actions=0) == estimate(cluster, costs, allocation).step_s


def test_a_worker_holds_parameters_state_and_what_is_in_flight():
    cluster, costs = make_cluster([1.0] * 4), make_costs([1.0] * 4, parameter_bytes=10.0, activation_bytes=7.0)
    found = estimate(cluster, costs, fault_free(cluster, costs, 2, 2, 8))
    state = 2 * 30.0 * 2 / 2  # two layers' masters and slots, owner and follower, over two workers
    assert found.memory_bytes.tolist() == [2 * 30 + state + 2 * 14] * 2 + [2 * 30 + state + 14] * 2
    assert in_flight(np.array([2, 2]), "gpipe").min() > 10**9
    assert in_flight(np.array([1, 3, 1]), "zero-bubble").tolist() == [7, 7, 7]
    assert in_flight(np.array([1, 3, 1]), "zero-bubble-h2").tolist() == [14, 14, 14]
    with pytest.raises(InfeasiblePlan, match=re.escape("worker 0 would hold 0.00 GB, but has 0.00 GB")):
        check_worker_memory(found.workers, found.memory_bytes, np.full(4, 100.0))
    with pytest.raises(InfeasiblePlan, match=re.escape("would draw 400.0 W while all of them compute, but may draw")):
        check_power(make_cluster([1.0] * 4, power_limit_w=300.0), found.peak_power_w)


def test_an_undisturbed_job_that_cannot_be_is_refused():
    cluster, costs = make_cluster([1.0] * 4), make_costs([1.0] * 3)
    with pytest.raises(InfeasiblePlan, match="need 6, but there are 4: 2 too few"):
        fault_free(cluster, costs, 3, 2, 8)
    with pytest.raises(InfeasiblePlan, match="4 stages for 3 layers, 1 stages too many"):
        fault_free(cluster, costs, 4, 1, 8)
    with pytest.raises(ValueError, match="must be at least 1"):
        fault_free(cluster, costs, 0, 1, 8)
    small = make_cluster([1.0] * 4, memory_bytes=20.0)
    with pytest.raises(InfeasiblePlan, match=r"needs 0\.00 GB per worker and has 0\.00 GB: 0\.00 GB too little"):
        fault_free(small, make_costs([1.0] * 4, parameter_bytes=10.0), 2, 2, 8)
    shared = fault_free(make_cluster([1.0] * 2), make_costs([1.0] * 9), 2, 1, 32, share_layers=True)
    assert shared.chains[0].cuts == ({4: 16, 5: 16},)


def test_what_does_not_fit_is_refused_with_the_parts_of_its_memory_and_sums_of_48_bits_are_smaller():
    """Llama-2 34B on 96 devices of 64 GiB: as 4 stages with neither width, as 6 stages with 48 bits."""
    shape, preset = model_shape("llama-2-34b"), device_preset("ascend-910b")
    cluster = preset_cluster(96, preset)
    wide, narrow = (analytic_costs(shape, preset, accumulator_bits=bits, recompute=True) for bits in (64, 48))
    for costs, sums in ((wide, "68.54"), (narrow, "51.40")):
        parts = (
            f"parameters 17.13 GB, sums of gradients {sums} GB, optimizer state and copies 8.57 GB, "
            "activations 1.73 GB, kept for interrupts 0.13 GB"
        )
        with pytest.raises(InfeasiblePlan, match=re.escape(f"GB too little ({parts})")):
            fault_free(cluster, costs, 4, 24, 384)
    with pytest.raises(InfeasiblePlan, match="sums of gradients 46.39 GB"):
        fault_free(cluster, wide, 6, 16, 384)
    assert fault_free(cluster, narrow, 6, 16, 384).num_microbatches == 384


def test_an_undisturbed_job_holds_fewer_micro_batches_where_memory_is_short():
    """Of four micro-batches that the first stage should hold there is room for two; gpipe has to hold all."""
    costs = make_costs([3.0] * 4, parameter_bytes=0.0, activation_bytes=10.0)
    roomy, tight = (make_cluster([1.0] * 4, memory_bytes=size) for size in (1e9, 25.0))
    taken = {}
    for cluster in (roomy, tight):
        allocation = fault_free(cluster, costs, 4, 1, 8)
        timed = time_within_memory(cluster, costs, allocation)
        check_worker_memory(timed.found.workers, timed.found.memory_bytes, cluster.memory_bytes)
        taken[cluster] = timed.step_s
        assert timed.num_limited == (2 if cluster is tight else 0)
    assert taken[tight] > taken[roomy] * 1.2
    with pytest.raises(InfeasiblePlan, match=re.escape("memory: no split of 4 layers over 4 stages fits")):
        fault_free(tight, costs, 4, 1, 8, "gpipe")
    assert fastest_fault_free(tight, costs, 4, 1, 8).schedule != "gpipe"
    too_large = time_as_it_is(make_cluster([1.0] * 4, memory_bytes=1.0), costs, fault_free(roomy, costs, 4, 1, 8))
    assert too_large.step_s == taken[roomy] and too_large.num_limited == 0
    with pytest.raises(InfeasiblePlan, match=re.escape("memory: no split of 4 layers over 4 stages fits")):
        fastest_fault_free(make_cluster([1.0] * 4, memory_bytes=9.0), costs, 4, 1, 8)


def test_more_in_flight_is_for_uneven_stages():
    """Equal stages gain nothing by holding more, so they do not; unequal ones do."""
    cluster, costs = make_cluster([1.0] * 12), make_costs([3.0] * 4)
    even = fastest_fault_free(cluster, costs, 4, 3, 24)
    assert even.schedule == "zero-bubble"
    uneven = plan(cluster.without([4]), costs, even, lost(4), options=Options(move_workers=False, share_layers=False))
    assert uneven.allocation.schedule == "zero-bubble-h2"
    half = replace(uneven.allocation, schedule="zero-bubble")
    assert uneven.predicted_step_s < 0.99 * predict(cluster, costs, half)
    alone = plan(make_cluster([1.0] * 3), make_costs([3.0]), fault_free(cluster, make_costs([3.0]), 1, 3, 24), lost(4))
    assert alone.allocation.schedule == "1f1b"


def test_memory_splits_layers_unevenly():
    cluster = make_cluster([1.0] * 2, memory_bytes=[60.0, 1e9])
    costs = make_costs([1.0] * 6, parameter_bytes=3.0)
    members = (np.array([0]), np.array([1]))
    room = MemoryBudget(cluster, costs, members, 4, "1f1b", followers=0)
    assert whole_layers(cluster, costs, members, 4, room) == ({3: 4},)
    tight = replace(cluster, memory_bytes=np.array([45.0, 1e9]))
    room = MemoryBudget(tight, costs, members, 4, "1f1b", followers=0)
    assert whole_layers(tight, costs, members, 4, room) == ({2: 4},)
    assert room.was_short


def test_state_of_a_shared_layer_is_sliced_over_the_workers_of_both_stages():
    costs = make_costs([1.0] * 6, parameter_bytes=3.0)
    members = (np.array([0, 1]), np.array([2]))
    stages = [
        StageShare(start=start, stop=stop, workers=own, num_microbatches=own, levels=own)
        for (start, stop), own in zip(((0, 4), (3, 6)), members, strict=True)
    ]
    exact = MemoryModel.of_stages(costs, stages, 1).total_bytes(np.array([0, 3]), np.array([4, 6]), 1)
    for stage, (start, stop, before, behind) in enumerate(((0, 4, 0, 1), (3, 6, 1, 0))):
        for factor, fits in ((1 + 1e-9, True), (1 - 1e-9, False)):
            cluster = make_cluster([1.0] * 3, memory_bytes=float(exact[stage]) * factor)
            budget = MemoryBudget(cluster, costs, members, 4, "1f1b", at_most=1)
            assert budget.fits(stage, start, stop, before, behind) is fits
            assert not budget.fits(stage, start, stop)


def test_what_is_handed_on_takes_memory_where_a_stage_begins_and_ends():
    costs = make_costs([1.0] * 6, parameter_bytes=3.0)
    borders = (40.0, 5.0, 0.0, 60.0, 1.0, 7.0)
    layers = tuple(replace_struct(each, boundary_bytes=of) for each, of in zip(costs.layers, borders, strict=True))
    costs = replace_struct(costs, layers=layers)
    members = (np.array([0]), np.array([1]))
    for memory_bytes in (30.0, 60.0, 90.0, 120.0, 180.0, 240.0, 400.0):
        room = MemoryBudget(make_cluster([1.0] * 2, memory_bytes=memory_bytes), costs, members, 4, "1f1b", followers=0)
        for stage, (in_flight_there, earliest) in enumerate(zip((2, 1), room.earliest_starts(), strict=True)):
            assert earliest == sorted(earliest)
            for stop, first in enumerate(earliest):
                assert all(room.fits(stage, start, stop) for start in range(first, stop))
            needed = MemoryModel.of_width(costs, 1, copies=1).parts(1, 4, in_flight_there).total
            assert room.needed_bytes(stage, 1, 4) == pytest.approx(needed)


# -------------------------------------------------------------------------------------------------------------- routes


def test_stages_of_one_layout_may_not_lie_inside_each_other():
    cluster, costs = make_cluster([1.0] * 4), make_costs([1.0] * 4)
    long = fault_free(cluster, costs, 1, 1, 2)
    short = fault_free(cluster.take(np.array([1, 2, 3])), costs, 3, 1, 2)
    nested = replace(long, chains=(long.chains[0], short.chains[0]))
    with pytest.raises(ValueError, match="of one stage lie inside those of another, .*must begin and end in one order"):
        make_routes(nested, costs, cluster)


def test_pipelines_of_different_depth_become_one_layout_and_back():
    cluster, costs = make_cluster([1.0] * 5), make_costs([1.0] * 6)
    two = fault_free(cluster.take(np.array([0, 1])), costs, 2, 1, 3)
    three = fault_free(cluster.take(np.array([2, 3, 4])), costs, 3, 1, 4)
    both = replace(two, chains=(two.chains[0], three.chains[0]))
    layout = make_routes(both, costs, cluster)
    assert [len(route) for route in layout.routes] == [3, 2, 3, 2, 3, 2, 3]
    again = allocation_of(layout, "1f1b", {0: 0})
    assert sorted(chain.num_microbatches for chain in again.chains) == [3, 4]
    assert again.workers.tolist() == [0, 1, 2, 3, 4]


def test_an_idle_worker_is_in_one_chain_only():
    """Pipelines of two and of three stages begin with the same layers; a worker of these has nothing to do."""
    stages = tuple(
        Stage(start=a, stop=b, workers=w)
        for a, b, w in [(0, 2, (0, 1, 2)), (2, 4, (3, 4)), (4, 5, (5,)), (4, 6, (6,)), (5, 6, (7,))]
    )
    routes = (
        (Hop(0, 0, 0, 2), Hop(3, 1, 2, 4), Hop(6, 3, 4, 6)),
        (Hop(1, 0, 0, 2), Hop(4, 1, 2, 4), Hop(5, 2, 4, 5), Hop(7, 4, 5, 6)),
    )
    found = allocation_of(Layout(stages=stages, routes=routes), "1f1b", {})
    found.check()
    assert found.workers.tolist() == list(range(8))


def test_pipelines_side_by_side_are_compiled_each_by_itself():
    """Five of three stages beside one of four, with the first stages in common: each holds what it would hold alone."""
    cluster, costs = make_cluster([1.0] * 19), make_costs([1.0] * 6)
    three = fault_free(cluster.take(np.arange(15)), costs, 3, 5, 20)
    four = fault_free(cluster.take(np.arange(15, 19)), costs, 4, 1, 6)
    both = replace(three, chains=(three.chains[0], four.chains[0]))
    layout = make_routes(both, costs, cluster)
    for schedule in SCHEDULES:
        apart = {}
        for each in (three, four):
            apart |= in_flight_bounds(make_routes(each, costs, cluster), schedule)
        assert in_flight_bounds(layout, schedule) == apart
    durations = durations_of(costs.layer_s, cluster.speed_of())
    programs = compile_programs(layout, "zero-bubble-h2", durations=durations)
    together = predict(cluster, costs, replace(both, schedule="zero-bubble-h2"))
    assert time_programs(layout, programs, durations).step_s == pytest.approx(together)


def test_pipelines_side_by_side_stay_if_nothing_is_better():
    cluster, costs = make_cluster([1.0] * 19), make_costs([1.0] * 6)
    three = fault_free(cluster.take(np.arange(15)), costs, 3, 5, 20)
    four = fault_free(cluster.take(np.arange(15, 19)), costs, 4, 1, 4)
    both = replace(three, chains=(three.chains[0], four.chains[0]))
    nothing = ClusterEvent(kind="slowed", workers=(0,))
    found = plan(cluster, costs, both, nothing, axes={"dataflow"})
    assert found.predicted_step_s <= predict(cluster, costs, both) * (1 + 1e-9)
    assert len(found.allocation.chains) == 2 and found.reason.startswith("rerouting")
    after = plan(cluster.without([1]), costs, both, lost(1), axes={"dataflow"})
    assert [chain.num_microbatches for chain in after.allocation.chains] == [20, 4]


def test_pipelines_side_by_side_stay_several_where_the_graph_may_not_change():
    """One chain of them all would be quicker, and is what is taken where the graph may change."""
    cluster, costs = make_cluster([1.0] * 8), make_costs([1.0] * 4)
    few = fault_free(cluster.take(np.arange(4)), costs, 2, 2, 20)
    many = fault_free(cluster.take(np.arange(4, 8)), costs, 2, 2, 40)
    both = replace(few, chains=(few.chains[0], many.chains[0]))
    nothing = ClusterEvent(kind="slowed", workers=(0,))
    found = plan(cluster, costs, both, nothing, axes=set())
    assert [chain.num_microbatches for chain in found.allocation.chains] == [20, 40]
    assert found.allocation.schedule == "zero-bubble" and found.reason.startswith("rerouting, "), "under any schedule"
    assert found.predicted_step_s < predict(cluster, costs, both)
    assert len(plan(cluster, costs, both, nothing).allocation.chains) == 1
    alone = plan(cluster, costs, both, nothing, axes=set(), options=Options(schedules=("1f1b",)))
    assert alone.predicted_step_s == predict(cluster, costs, both)


def test_pipelines_that_fit_under_another_schedule_stay_several():
    cluster = make_cluster([1.0] * 8, memory_bytes=60.0)
    costs = make_costs([1.0] * 4, parameter_bytes=0.0, activation_bytes=10.0)
    few, many = (
        fault_free(make_cluster([1.0] * 8).take(np.arange(at, at + 4)), costs, 2, 2, 20, "gpipe") for at in (0, 4)
    )
    both = replace(few, chains=(few.chains[0], many.chains[0]))
    found = plan(cluster, costs, both, ClusterEvent(kind="slowed", workers=(0,)), axes=set())
    assert len(found.allocation.chains) == 2 and found.allocation.schedule != "gpipe"


def test_baselines_set_no_frequencies_where_a_plan_may_not():
    """One runs everything at the highest level; with the axis, or without it, the same at the levels of before."""
    cluster, costs = make_cluster([1.0] * 4, levels=LEVELS), make_costs([1.0] * 4)
    before = at_levels(fault_free(cluster, costs, 2, 2, 6), np.zeros(4, dtype=np.int64))
    event = ClusterEvent(kind="slowed", workers=(0,))
    idle = plan(cluster, costs, before, event, axes=set())

    def quicker(*_):
        return replace(idle, policy="quicker", allocation=at_levels(idle.allocation, np.full(4, 2)))

    free, bound = (
        plan(cluster, costs, before, event, axes=axes, baselines=[quicker]) for axes in (AXES, AXES - {"frequency"})
    )
    assert set(levels_of(bound.allocation).values()) == {0}
    assert set(levels_of(free.allocation).values()) == {2}


def test_a_layouts_limits_are_those_of_its_workers_memory():
    costs = make_costs([3.0] * 4, parameter_bytes=0.0, activation_bytes=10.0)
    layout = make_routes(fault_free(make_cluster([1.0] * 4), costs, 4, 1, 8), costs, make_cluster([1.0] * 4))
    cluster = make_cluster([1.0] * 4, memory_bytes=[25.0, 100.0, 15.0, 100.0])
    assert layout_limits(cluster, costs, layout, "1f1b") == {0: 2, 2: 1}
    assert layout_limits(make_cluster([1.0] * 4), costs, layout, "gpipe") == {}
    with pytest.raises(InfeasiblePlan, match=re.escape("memory: worker 0 would hold 0.00 GB, but has 0.00 GB")):
        layout_limits(cluster, costs, layout, "gpipe")
    with pytest.raises(InfeasiblePlan, match=re.escape("memory: worker 2 would hold")):
        layout_limits(make_cluster([1.0] * 4, memory_bytes=[99.0, 99.0, 9.0, 99.0]), costs, layout, "1f1b")


def test_routes_that_are_no_chain_are_refused():
    stages = tuple(Stage(start=a, stop=b, workers=(w,)) for w, (a, b) in enumerate([(0, 2), (1, 3), (2, 4)]))
    routes = ((Hop(0, 0, 0, 2), Hop(2, 2, 2, 4)), (Hop(0, 0, 0, 1), Hop(1, 1, 1, 3), Hop(2, 2, 3, 4)))
    with pytest.raises(ValueError, match="pass different stages"):
        allocation_of(Layout(stages=stages, routes=routes), "1f1b", {})


def test_micro_batches_keep_their_workers():
    cluster, costs = make_cluster([1.0] * 6), make_costs([1.0] * 6)
    before = make_routes(fault_free(cluster, costs, 2, 3, 9), costs, cluster)
    left = cluster.without([1])
    found = plan(left, costs, allocation_of(before, "1f1b", {}), lost(1), axes={"dataflow"})
    after = make_routes(found.allocation, costs, left, previous=before)
    for old, new in zip(before.routes, after.routes, strict=True):
        assert old[1] == new[1]
        assert old[0] == new[0] or old[0].worker == 1


# ------------------------------------------------------------------------------------------------------------- planner


@pytest.fixture
def job():
    cluster, costs = make_cluster([1.0] * 12), make_costs([1.0] * 12)
    return cluster, costs, fault_free(cluster, costs, 3, 4, 16, "1f1b")


def test_a_plan_says_what_each_axis_brought(job):
    cluster, costs, allocation = job
    left = cluster.without([0, 1])
    found = plan(left, costs, allocation, lost(0, 1))
    assert found.policy == "elaswave"
    assert set(found.contributions) == AXES
    assert "nothing to move" in found.contributions["randomness"]
    assert re.search(r": .* s to .* s per step \(-", found.contributions["graph"])
    assert "rerouting alone" in found.reason
    assert found.transfers
    assert found.predicted_pause_s == Options().pause_of("lost", moves=True)
    nothing = plan(left, costs, allocation, lost(0, 1), axes=())
    assert set(nothing.contributions.values()) == {"off"}
    assert nothing.predicted_step_s > found.predicted_step_s
    assert not plan(left, costs, allocation, lost(0, 1), axes=("dataflow",)).transfers


@pytest.mark.parametrize(
    ("kind", "moves", "pause_s"),
    [
        ("lost", False, 1.0),
        ("lost", True, 5.0),
        ("joined", True, 6.0),
        ("drained", False, 2.0),
        ("slowed", True, 4.0),
    ],
)
def test_a_pause_is_that_of_the_event_and_of_the_change_of_layout(kind, moves, pause_s):
    options = Options(pause_s=1.0, join_pause_s=2.0, move_pause_s=4.0)
    assert options.pause_of(kind, moves=moves) == pause_s


def test_slow_workers_get_fewer_micro_batches(job):
    cluster, costs, allocation = job
    slow = replace(cluster, speed=np.array([0.5] + [1.0] * 11))
    event = ClusterEvent(kind="slowed", workers=(0,), speed=0.5)
    found = plan(slow, costs, allocation, event, axes=("dataflow",))
    assert found.allocation.chains[0].stages[0].num_microbatches.tolist() == [2, 5, 5, 4]
    assert "micro-batches by speed" in found.contributions["dataflow"]
    even = plan(slow, costs, allocation, event, axes=())
    assert even.allocation.chains[0].stages[0].num_microbatches.tolist() == [4, 4, 4, 4]
    assert found.predicted_step_s < even.predicted_step_s


def test_state_moves_only_if_it_pays_until_the_next_event(job):
    cluster, costs, allocation = job
    left = cluster.without([0])
    soon = plan(left, costs, allocation, lost(0), horizon_s=1e-9)
    assert not soon.transfers
    assert plan(left, costs, allocation, lost(0), horizon_s=1e9).transfers


def test_a_stage_that_has_lost_everybody_gets_others_or_is_dissolved(job):
    cluster, costs, allocation = job
    left = cluster.without([4, 5, 6, 7])
    found = plan(left, costs, allocation, lost(4, 5, 6, 7))
    assert found.predicted_pause_s > Options().pause_of("lost", moves=True)  # its state has to be fetched
    dissolved = plan(left, costs, allocation, lost(4, 5, 6, 7), options=Options(move_workers=False), axes=())
    assert len(dissolved.allocation.chains[0].stages) == 2
    assert dissolved.allocation.num_layers == 12


def test_workers_that_joined_are_used(job):
    cluster, costs, allocation = job
    left = cluster.without([0, 1])
    smaller = plan(left, costs, allocation, lost(0, 1)).allocation
    event = ClusterEvent(kind="joined", workers=(0, 1))
    found = plan(cluster, costs, smaller, event)
    assert found.allocation.workers.tolist() == list(range(12))
    assert found.lost_work_s == 0.0


def test_nobody_left_is_refused(job):
    cluster, costs, allocation = job
    with pytest.raises(InfeasiblePlan, match="none is left, at least 1 is needed"):
        plan(cluster.take(np.zeros(12, dtype=bool)), costs, allocation, lost(*range(12)))


def test_a_baselines_better_plan_is_taken_and_a_smaller_batch_is_not(job):
    cluster, costs, allocation = job
    left = cluster.without([0])
    ours = plan(left, costs, allocation, lost(0), axes=())

    def better(*arguments):
        chosen = plan(*arguments, horizon_s=1e12)
        return replace(chosen, policy="better")

    def smaller(cluster, costs, allocation, event):
        return Plan(
            policy="smaller",
            allocation=fault_free(cluster, costs, 3, 2, 1),
            predicted_step_s=0.0,
            predicted_pause_s=0.0,
        )

    def impossible(*arguments):
        raise InfeasiblePlan("memory: no")

    found = plan(left, costs, allocation, lost(0), axes=(), horizon_s=1e12, baselines=(better, smaller, impossible))
    assert "as better does" in found.reason
    assert found.predicted_step_s < ours.predicted_step_s


def test_power_permits_only_lower_levels(job):
    cluster, costs, _ = job
    powered = make_cluster([1.0] * 12, levels=LEVELS, power_limit_w=700.0)
    allocation = fault_free(powered, costs, 3, 4, 16, "1f1b")
    left = powered.without([0])
    found = plan(left, costs, allocation, lost(0))
    levels = np.concatenate([stage.levels for stage in found.allocation.chains[0].stages])
    assert sum(LEVELS[level].power_w for level in levels.tolist()) <= 700.0
    # Without the axis all are held to one speed, as the undisturbed job is.
    common = plan(left, costs, allocation, lost(0), axes=("dataflow", "graph"))
    assert set(levels_of(common.allocation).values()) == set(levels_of(allocation).values()) == {0}
    assert found.predicted_step_s <= common.predicted_step_s
    with pytest.raises(InfeasiblePlan, match="power: the workers would draw 440.0 W .* 400.0 W together: 40.0 W too"):
        plan(replace(left, power_limit_w=400.0), costs, allocation, lost(0), options=Options(leave_out=False))
    dark = plan(replace(left, power_limit_w=400.0), costs, allocation, lost(0))  # 40 W each: ten workers of eleven
    assert len(dark.allocation.workers) <= 10
    with pytest.raises(InfeasiblePlan, match="power: the workers would draw 480.0 W"):
        fault_free(replace(powered, power_limit_w=400.0), costs, 3, 4, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axes": {"graph", "grpah"}}, "axes is ['grpah'], needed: of dataflow, frequency, graph, randomness"),
        ({"schedules": ("1f1b", "2f2b")}, "schedules is ['2f2b'], needed: of 1f1b, gpipe, zero-bubble"),
        ({"schedules": ()}, "schedules are none"),
        ({"horizon_s": float("inf")}, "horizon_s is inf, needed: above 0 and finite"),
        ({"horizon_s": 0.0, "followers": -1}, "horizon_s is 0.0, needed: above 0 and finite; followers is -1"),
        ({"exact_actions": -1}, "exact_actions is -1, needed: finite and at least 0"),
        ({"pause_s": float("nan")}, "pause_s is nan"),
    ],
)
def test_options_that_cannot_be(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Options(**given)


def test_stages_that_cost_nothing_are_planned_too():
    costs = make_costs([0.0, 0.0, 0.0, 3.0], activation_bytes=0.0)
    cluster = make_cluster([1.0, 0.5, 1.0, 1.0], memory_bytes=1000.0)
    allocation = fault_free(cluster, costs, 2, 2, 8)
    free = Shape(
        members=(np.array([0, 1]), np.array([2, 3])), cuts=({3: 8},), num_microbatches=8, origin="whatever is free"
    )
    assert np.isfinite(score(cluster, costs, free, "1f1b"))
    with pytest.raises(InfeasiblePlan):  # no room for parameters: said, and not divided by
        build(replace(cluster, memory_bytes=np.full(4, 1.0)), costs, free, "1f1b", np.zeros(4, dtype=np.int64))
    event = ClusterEvent(kind="slowed", workers=(1,), speed=0.5)
    assert plan(cluster, costs, allocation, event).predicted_step_s > 0


def test_a_limit_of_power_holds_all_to_one_speed():
    powered = make_cluster([1.0] * 12, levels=LEVELS)
    all_workers = np.arange(12)
    for limit_w, level in ((None, 1), (1800.0, 2), (1799.0, 1), (1200.0, 1), (1199.0, 0), (480.0, 0), (100.0, 0)):
        assert common_levels(replace(powered, power_limit_w=limit_w), all_workers).tolist() == [level] * 12
    assert common_levels(replace(powered, power_limit_w=1199.0), all_workers[:11]).tolist() == [1] * 11
    (device,) = powered.devices
    mixed = replace(
        powered,
        devices=(device, replace_struct(device, levels=(FrequencyLevel(speed=1.0, power_w=500.0),))),
        device=np.array([0, 1] * 6),
        power_limit_w=3300.0,
    )
    # The second kind has no lower level.
    assert common_levels(mixed, all_workers).tolist() == [0, 0] * 6
    assert common_levels(replace(mixed, power_limit_w=3600.0), all_workers).tolist() == [1, 0] * 6


def test_the_workers_of_the_stage_that_bounds_the_step_are_lifted():
    cluster, costs = make_cluster([1.0] * 4, levels=LEVELS), make_costs([1.0, 3.0])
    allocation = fault_free(cluster, costs, 2, 2, 8, "1f1b")
    event = ClusterEvent(kind="slowed", workers=(0,), speed=1.0)
    options = Options(share_layers=False, move_workers=False, schedules=("1f1b",))
    fast = plan(cluster, costs, allocation, event, options=options)
    assert fast.allocation.chains[0].stages[1].levels.tolist() == [2, 2]
    base = plan(cluster, costs, allocation, event, options=options, axes=("dataflow", "graph"))
    assert fast.predicted_step_s < base.predicted_step_s


def test_transfers_are_what_workers_lack():
    cluster, costs = make_cluster([1.0] * 4), make_costs([1.0] * 4)
    shape = Shape(
        members=(np.array([0]), np.array([1, 2, 3])), cuts=cuts_of((0, 1, 4), 6), num_microbatches=6, origin=""
    )
    allocation = build(cluster, costs, shape, "1f1b", np.zeros(4, dtype=np.int64))
    start, stop = np.array([0, 0, 2, 0]), np.array([2, 2, 4, 0])
    transfers, seconds = needed_transfers(cluster, costs, allocation, np.arange(4), start, stop)
    found = sorted((each.start, each.stop, each.workers) for each in transfers)
    assert found == [(1, 2, (2,)), (1, 4, (3,)), (2, 4, (1,))]
    assert seconds > 0
    before = fault_free(cluster, costs, 2, 2, 6)
    assert Sources.of(costs, before, start, stop).holders.tolist() == [2, 2, 1, 1]
    assert Sources.of(costs, before, start[:2], stop[:2]).holders.tolist() == [2, 2, 0, 0]
    assert Sources.of_stages(costs, before.chains[0].stages).holders.tolist() == [2, 2, 2, 2]


def test_copies_take_as_long_as_the_worker_that_receives_or_sends_most():
    costs, link = make_costs([1.0] * 4, parameter_bytes=10.0), NetworkLink(bandwidth_bytes_per_s=10.0)
    one = StateTransfer(start=0, stop=2, workers=(5,), num_bytes=40.0)
    three = StateTransfer(start=0, stop=2, workers=(5, 6, 7), num_bytes=120.0)
    assert receiving_s(link, [one, one]) == 8.0 and receiving_s(link, [three]) == 4.0
    pair = Sources(np.array([2, 2, 1, 1]), ((0, 2), (2, 4)))
    assert pair.sending_s(link, costs, [three]) == 6.0  # each of two sends a half
    whole = Sources(np.array([2, 2, 2, 2]), ((0, 4),))
    both = [three, replace(three, start=2, stop=4)]
    assert whole.sending_s(link, costs, both) == 12.0 and pair.sending_s(link, costs, both) == 12.0
    assert pair.sending_s(link, costs, []) == receiving_s(link, []) == 0.0


def test_until_copies_are_there_the_workers_go_on_where_they_are():
    costs = replace_struct(make_costs([1.0] * 8, parameter_bytes=1e9), end_link=LINK)
    cluster = make_cluster([1.0] * 8, memory_bytes=1e12)
    start = fault_free(cluster, costs, 4, 2, 16)
    found = plan(cluster.without([7]), costs, start, lost(7), options=Options(horizon_s=1e12, copy_share=0.2))
    assert found.transfers and found.interim_step_s is not None
    only = Options(axes=frozenset({"dataflow"}), schedules=("1f1b",))
    staying = plan(cluster.without([7]), costs, start, lost(7), options=only)
    extra = costs.overhead_s(stages_of(staying.allocation)) * (1 / 0.8 - 1)
    assert found.interim_step_s == pytest.approx(staying.predicted_step_s + extra)
    half = plan(cluster.without([7]), costs, start, lost(7), options=Options(horizon_s=1e12, copy_share=0.4))
    assert half.copy_s == pytest.approx(found.copy_s / 2) and half.copy_s > 0
    assert half.predicted_pause_s == found.predicted_pause_s
    assert (staying.copy_s, staying.interim_step_s) == (0.0, None)
