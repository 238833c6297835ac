"""The baselines' planners: what each does with a loss, a join and a straggler, and that its plans can be run."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planning_cases import layers, machines, predict

from elaswave.blocks.placement import default_block_size, make_blocks
from elaswave.config.policy_code import policies
from elaswave.config.presets import device_preset, model_shape
from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.analytic import PARAMETER_BYTES, analytic_costs
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent, FrequencyLevel
from elaswave.planning.costs.recovery_times import WORKER_S_BETWEEN_LOSSES, RecoveryTimes
from elaswave.planning.costs.schedules import splits_backwards
from elaswave.planning.plan import Allocation, Plan, StateTransfer, at_levels, levels_of
from elaswave.planning.policy import full_restart
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.policy.policy_parts import balanced_ranges, copy_s, rectangle
from elaswave.planning.programs.layout import validate_layout
from elaswave.planning.programs.prediction import estimate
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.programs.validation import validate_programs
from elaswave.planning.search.apportionment import apportion_pipelines, evenly, topped_up
from elaswave.planning.search.pipelines import ranges_of
from elaswave.planning.state_moves.placed_blocks import num_blocks
from elaswave_rivals import oobleck, recycle, torchft

POLICIES = policies()
PREDICTED_ONLY = {name for name, planner in POLICIES.items() if not policy_metadata_of(planner).runs_here}
CANDIDATES = {name for name, planner in POLICIES.items() if policy_metadata_of(planner).is_candidate}
BASELINES = {name: planner for name, planner in POLICIES.items() if name != "elaswave"}
normalized = partial(recycle.plan_recycle, staggered_optimizer=False)
rerouting = partial(recycle.plan_recycle, normalize=False, staggered_optimizer=False)
LOST, JOINED, SLOWED, DRAINED = "lost", "joined", "slowed", "drained"


def begin(num_workers: int, num_stages: int, num_microbatches: int, costs: Costs) -> tuple[Cluster, Allocation]:
    cluster = machines(num_workers)
    return cluster, rectangle(cluster, costs, num_stages=num_stages, num_microbatches=num_microbatches, schedule="1f1b")


def losing(cluster: Cluster, *workers: int) -> tuple[Cluster, ClusterEvent]:
    return cluster.without(workers), ClusterEvent(kind="lost", workers=workers)


def slower(cluster: Cluster, worker: int, speed: float) -> tuple[Cluster, ClusterEvent]:
    speeds = cluster.speed.copy()
    speeds[cluster.index_of([worker])] = speed
    return replace(cluster, speed=speeds), ClusterEvent(kind="slowed", workers=(worker,), speed=speed)


def counts(plan: Plan, chain: int = 0) -> list[list[int]]:
    return [stage.num_microbatches.tolist() for stage in plan.allocation.chains[chain].stages]


def workers(plan: Plan, chain: int = 0) -> list[list[int]]:
    return [stage.workers.tolist() for stage in plan.allocation.chains[chain].stages]


@pytest.mark.parametrize("name", [*BASELINES, "elaswave"])
def test_a_plan_keeps_to_the_limit_of_power_and_elaswave_is_never_below(name: str) -> None:
    levels = tuple(
        FrequencyLevel(speed=speed, power_w=power) for speed, power in ((0.5, 90.0), (0.75, 160.0), (1.0, 300.0))
    )
    costs = layers(*[1.0] * 9)
    cluster = machines(9)
    powered = replace(
        cluster, devices=(msgspec.structs.replace(cluster.devices[0], levels=levels),), power_limit_w=9 * 200.0
    )
    start = rectangle(powered, costs, num_stages=3, num_microbatches=12, schedule="1f1b")
    left, event = losing(powered, 4)
    found = POLICIES[name](left, costs, start, event)
    assert estimate(left, costs, found.allocation).peak_power_w <= 1800.0
    if name not in PREDICTED_ONLY and found.allocation.num_microbatches == 12:
        ours = POLICIES["elaswave"](left, costs, start, event)
        assert found.predicted_step_s >= ours.predicted_step_s * (1 - 1e-9)
    with pytest.raises(InfeasiblePlan, match="power: the workers would draw"):
        POLICIES[name](replace(left, power_limit_w=300.0), costs, start, event)


def test_oobleck_begins_anew_with_workers_of_every_layer_but_no_whole_pipeline() -> None:
    costs = layers(*[1.0] * 3)
    cluster, start = begin(9, 3, 6, costs)
    left, event = losing(cluster, 0, 2, 4, 5, 6, 7)
    tight = replace(left, memory_bytes=np.full(3, 12e6))  # the model is too large for a pipeline of one
    for there in (left, tight):
        found = oobleck.plan_oobleck(there, costs, start, event)
        check(found, there, costs, 6)


def test_a_model_that_costs_nothing_is_planned_too() -> None:
    costs = layers(*[0.0] * 6)
    cluster, start = begin(6, 3, 4, costs)
    left, event = losing(cluster, 1)
    for policy in POLICIES.values():
        assert policy(left, costs, start, event).predicted_step_s >= 0


def check(plan: Plan, cluster: Cluster, costs: Costs, num_microbatches: int | None) -> None:
    """What holds for every plan: the batch, every layer once, live workers only, and it can be compiled and run."""
    allocation = plan.allocation
    if num_microbatches is not None:
        assert allocation.num_microbatches == num_microbatches
    used = allocation.workers
    assert len(np.unique(used)) == len(used)
    assert np.isin(used, cluster.ids).all()
    assert len(plan.memory_bytes) == len(used)
    assert (plan.memory_bytes <= cluster.memory_bytes[cluster.index_of(used)]).all()
    for chain in allocation.chains:
        assert chain.stages[0].start == 0
        assert chain.stages[-1].stop == costs.num_layers
        for before, after in pairwise(chain.stages):
            assert before.start < after.start <= before.stop < after.stop
        for stage in chain.stages:
            assert (np.diff(stage.workers) > 0).all()
            assert stage.num_microbatches.sum() == chain.num_microbatches
            assert (stage.num_microbatches >= 0).all()
    if plan.policy in PREDICTED_ONLY and oobleck.is_nested(allocation):
        assert "this engine cannot run it" in plan.reason
    else:
        layout = make_routes(allocation, costs, cluster)
        validate_layout(layout)
        validate_programs(layout, compile_programs(layout, allocation.schedule))
    assert plan.predicted_step_s > 0
    assert plan.predicted_pause_s >= 0
    assert plan.reason


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_events_one_after_the_other(data):
    """Losses, joins and stragglers in any order: each policy's plan is valid, follows from the plan before."""
    name = data.draw(st.sampled_from(sorted(BASELINES)))
    num_stages, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    costs = layers(*data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_stages, max_size=8)))
    num_microbatches = width * data.draw(st.integers(1, 4))
    cluster, allocation = begin(num_stages * width, num_stages, num_microbatches, costs)
    next_id = cluster.num_workers
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from([LOST, LOST, JOINED, SLOWED, DRAINED]))
        ids = cluster.ids.tolist()
        if kind == JOINED:
            number = data.draw(st.integers(1, 3))
            new = tuple(range(next_id, next_id + number))
            next_id += number
            columns = {"ids": [*ids, *new]} | {
                column: [*getattr(cluster, column).tolist(), *[value] * number]
                for column, value in (("node", 0), ("speed", 1.0), ("memory_bytes", 1e12), ("device", 0))
            }
            cluster = replace(cluster, **{column: np.array(values) for column, values in columns.items()})
            event = ClusterEvent(kind=JOINED, workers=new)
        elif kind == SLOWED:
            cluster, event = slower(cluster, data.draw(st.sampled_from(ids)), data.draw(st.sampled_from([0.3, 1.0])))
        else:
            hit = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=2, unique=True))
            event = ClusterEvent(kind=kind, workers=tuple(sorted(hit)))
            cluster = cluster.without(hit)
        try:
            plan = BASELINES[name](cluster, costs, allocation, event)
        except InfeasiblePlan as refusal:
            assert name in str(refusal) or "too few" in str(refusal)
            return
        check(plan, cluster, costs, None if name == "torchft" else num_microbatches)
        allocation = plan.allocation


# ------------------------------------------------------------------------------------------------------------- recycle


def test_recycle_deals_to_the_peers_of_the_lost_and_moves_nothing_else():
    costs = layers(1, 1, 1, 1)
    cluster, before = begin(8, 2, 12, costs)
    plan = rerouting(*_after(cluster, costs, before, 1))
    assert workers(plan) == [[0, 2, 3], [4, 5, 6, 7]]
    assert counts(plan) == [[4, 4, 4], [3, 3, 3, 3]]
    assert ranges_of(plan.allocation.chains[0]) == ranges_of(before.chains[0])
    assert (plan.transfers, plan.predicted_pause_s) == ((), RecoveryTimes().recover_s)
    assert plan.lost_work_s == plan.predicted_step_s / 2
    again = rerouting(*_after(cluster.without([1]), costs, plan.allocation, 0))
    assert counts(again)[0] == [6, 6]


def _after(
    cluster: Cluster, costs: Costs, allocation: Allocation, *lost: int
) -> tuple[Cluster, Costs, Allocation, ClusterEvent]:
    left, event = losing(cluster, *lost)
    return left, costs, allocation, event


def test_recycle_fills_bubbles():
    """Few micro-batches, so many bubbles: rerouted ones fit into them when backwards are split."""
    costs = layers(1, 1, 1, 1)
    cluster, before = begin(12, 4, 12, costs)
    undisturbed = predict(cluster, costs, before)
    assert undisturbed == pytest.approx((4 + 3) * 3, rel=1e-3)
    plan = rerouting(*_after(cluster, costs, before, 4))
    assert splits_backwards(plan.allocation.schedule)
    assert counts(plan)[1] == [6, 6]
    rerouted = predict(cluster.without([4]), costs, replace(plan.allocation, schedule="1f1b"))
    assert plan.predicted_step_s < rerouted
    # A worker with 6 micro-batches of 3 s computes 18 s; less than the way of all through the bubbles before.
    assert 18 < plan.predicted_step_s <= undisturbed * 1.12


def test_recycle_is_all_three_mechanisms():
    """Rerouting, normalization and the staggered optimizer, each no slower than without it."""
    costs = layers(1, 1, 1, 1)
    cluster, before = begin(32, 4, 32, costs)
    lost = _after(cluster, costs, before, 0, 1, 2, 3)
    rerouted, spread, whole = rerouting(*lost), normalized(*lost), recycle.plan_recycle(*lost)
    assert workers(whole) == workers(spread) != workers(rerouted)
    assert whole.predicted_step_s < spread.predicted_step_s < rerouted.predicted_step_s
    assert "this engine cannot run it" in whole.reason
    assert whole.predicted_pause_s == spread.predicted_pause_s
    # 3 stages there and back, 5 forwards and input gradients of the last, the first's last weight gradient: with so few
    # micro-batches no order is shorter, though a worker computes 15 s at most.
    assert whole.predicted_step_s == pytest.approx(3 * 2 + 5 * 2 + 1, rel=1e-3)


def test_elaswave_takes_no_plan_that_it_cannot_run():
    """ReCycle's steps without a barrier are shorter than any layout's here, if by no more than a tensor's way."""
    costs = layers(1, 1, 1, 1)
    cluster, before = begin(16, 4, 16, costs)
    lost = _after(cluster, costs, before, 4)
    assert POLICIES["recycle"](*lost).predicted_step_s < POLICIES["elaswave"](*lost).predicted_step_s
    assert set(POLICIES) - {"elaswave", "torchft", "full_restart_spares"} == CANDIDATES | PREDICTED_ONLY


def test_recycle_normalized_spreads_the_losses_of_one_stage():
    costs = layers(1, 1, 1, 1)
    cluster, before = begin(32, 4, 32, costs)
    plain = rerouting(*_after(cluster, costs, before, 0, 1, 2, 3))
    spread = normalized(*_after(cluster, costs, before, 0, 1, 2, 3))
    assert [len(own) for own in workers(plain)] == [4, 8, 8, 8]
    assert [len(own) for own in workers(spread)] == [7, 7, 7, 7]
    assert max(max(own) for own in counts(spread)) == 5
    assert spread.predicted_step_s < plain.predicted_step_s
    assert sum(len(each.workers) for each in spread.transfers) == 3
    assert spread.predicted_pause_s > plain.predicted_pause_s
    check(spread, cluster.without([0, 1, 2, 3]), costs, 32)


@pytest.mark.parametrize("lost", [(0,), (0, 1), (0, 1, 2), (0, 1, 5), (0, 3, 6, 7)])
def test_recycle_normalizes_as_well_as_any_distribution_of_workers(lost):
    costs = layers(1, 2, 1)
    cluster, before = begin(9, 3, 18, costs)
    plan = normalized(*_after(cluster, costs, before, *lost))
    left = 9 - len(lost)
    seconds = [costs.between("busy_s", start, stop) for start, stop in ranges_of(before.chains[0])]

    def slowest(widths: tuple[int, ...]) -> float:
        return max(-(-18 // width) * each for width, each in zip(widths, seconds, strict=True))

    best = min(slowest(widths) for widths in product(range(1, left), repeat=3) if sum(widths) == left)
    assert slowest(tuple(len(own) for own in workers(plan))) == best


def test_recycle_takes_a_joined_worker_where_most_are_missing():
    costs = layers(1, 1, 1, 1)
    cluster, before = begin(8, 2, 12, costs)
    plan = rerouting(*_after(cluster, costs, before, 5))
    whole = machines(9).without([5])
    back = rerouting(whole, costs, plan.allocation, ClusterEvent(kind="joined", workers=(8,)))
    assert workers(back) == [[0, 1, 2, 3], [4, 6, 7, 8]]
    assert counts(back)[1] == [3, 3, 3, 3]
    assert [(each.start, each.stop, each.workers) for each in back.transfers] == [(2, 4, (8,))]
    assert back.transfers[0].num_bytes == 2 * 1e6 + 2 * 3e6 / 4


def test_recycle_begins_again_if_a_stage_is_lost():
    costs = layers(1, 1)
    cluster, before = begin(4, 2, 4, costs)
    plan = rerouting(*_after(cluster, costs, before, 0, 1))
    assert plan.from_checkpoint
    assert plan.policy == "recycle"
    assert "a stage has lost all of its workers" in plan.reason
    assert workers(plan) == [[2], [3]]
    with pytest.raises(InfeasiblePlan, match="a pipeline of 2 stages needs 2 workers, but 1 are there: 1 too few"):
        rerouting(*_after(cluster, costs, before, 0, 1, 2))


def test_recycle_puts_a_straggler_out_if_that_is_faster():
    costs = layers(1, 1)
    cluster, before = begin(8, 2, 12, costs)
    slow, event = slower(cluster, 1, 0.2)
    out = rerouting(slow, costs, before, event)
    assert 1 not in out.allocation.workers
    assert "put out as slow" in out.reason
    assert out.lost_work_s == 0
    kept = rerouting(*_pair(slower(cluster, 1, 0.95), costs, before))
    assert 1 in kept.allocation.workers
    # Still slow, it is not taken back when another worker is lost; as fast as before, it is.
    lost = rerouting(*_after(slow, costs, out.allocation, 0))
    assert 1 not in lost.allocation.workers
    back = rerouting(cluster, costs, out.allocation, ClusterEvent(kind="slowed", workers=(1,), speed=1.0))
    assert 1 in back.allocation.workers


def _pair(
    changed: tuple[Cluster, ClusterEvent], costs: Costs, allocation: Allocation
) -> tuple[Cluster, Costs, Allocation, ClusterEvent]:
    return changed[0], costs, allocation, changed[1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 40))
def test_dealing_one_by_one_to_the_poorest(before, extra):
    expected = list(before)
    for _ in range(extra):
        expected[expected.index(min(expected))] += 1
    dealt = topped_up(np.array(before), extra)
    assert dealt.sum() == sum(before) + extra
    assert (dealt >= before).all()
    assert sorted(dealt.tolist()) == sorted(expected)


# ------------------------------------------------------------------------------------------------------------- torchft


def test_torchft_drops_whole_groups():
    costs = layers(1, 1, 1)
    cluster, before = begin(12, 3, 16, costs)
    plan = torchft.plan_torchft(*_after(cluster, costs, before, 1, 6))
    assert workers(plan) == [[0, 3], [4, 7], [8, 11]]
    assert plan.allocation.num_microbatches == 8
    assert counts(plan) == [[4, 4]] * 3
    assert plan.predicted_step_s == pytest.approx(predict(cluster, costs, before))
    assert plan.predicted_pause_s == RecoveryTimes().torchft_recover_s
    kept = torchft.plan_torchft(*_after(cluster, costs, before, 1, 6), keep_batch=True, name="torchft_batch_kept")
    assert counts(kept) == [[8, 8]] * 3
    assert kept.policy == "torchft_batch_kept"


def test_torchft_forms_groups_when_workers_come():
    costs = layers(1, 1, 1)
    cluster, before = begin(12, 3, 16, costs)
    broken = torchft.plan_torchft(*_after(cluster, costs, before, 0)).allocation
    more = machines(13).without([0])
    back = torchft.plan_torchft(more, costs, broken, ClusterEvent(kind="joined", workers=(12,)))
    assert counts(back) == [[4] * 4] * 3
    assert sum(len(each.workers) for each in back.transfers) == 3
    alone = torchft.plan_torchft(machines(13), costs, before, ClusterEvent(kind="joined", workers=(12,)))
    assert alone.allocation.num_microbatches == 16
    assert alone.transfers == ()


def test_torchft_without_a_whole_group():
    costs = layers(1, 1)
    cluster, before = begin(4, 2, 4, costs)
    with pytest.raises(InfeasiblePlan, match="every replica group of 2 workers has lost one"):
        torchft.plan_torchft(*_after(cluster, costs, before, 0, 3))


def test_torchft_puts_the_group_of_a_straggler_out_if_more_is_done():
    costs = layers(1, 1)
    cluster, before = begin(16, 2, 32, costs)
    out = torchft.plan_torchft(*_pair(slower(cluster, 3, 0.3), costs, before))
    assert workers(out)[0] == [0, 1, 2, 4, 5, 6, 7]
    kept = torchft.plan_torchft(*_pair(slower(cluster, 3, 0.97), costs, before))
    assert len(workers(kept)[0]) == 8


# ------------------------------------------------------------------------------------------------------------- oobleck


def test_oobleck_goes_on_with_a_shorter_pipeline():
    costs = layers(1, 1, 1, 1, 1, 1)
    cluster, before = begin(6, 3, 12, costs)
    plan = oobleck.plan_oobleck(*_after(cluster, costs, before, 2))
    assert workers(plan, 0) == [[1], [3], [5]]
    assert workers(plan, 1) == [[0], [4]]
    assert [ranges_of(chain) for chain in plan.allocation.chains] == [
        ((0, 2), (2, 4), (4, 6)),
        ((0, 3), (3, 6)),
    ]
    # Stages of two layers against stages of three: the longer pipeline takes more.
    first, second = (chain.num_microbatches for chain in plan.allocation.chains)
    assert (first, second) == (7, 5)
    assert [(each.start, each.stop, each.workers) for each in plan.transfers] == [(2, 3, (0,)), (3, 4, (4,))]
    assert plan.predicted_pause_s > RecoveryTimes().recover_s
    check(plan, cluster.without([2]), costs, 12)


def test_oobleck_borrows_and_merges_where_memory_needs_longer_pipelines():
    costs = layers(1, 1, 1, 1, activation_bytes=0.0)
    # A stage holds 2 layers at most: 2 (parameters) + 4 (sums) + 3 (its share of the optimizer, twice), and not 3.
    cluster = replace(machines(12), memory_bytes=np.full(12, 1.3e7))
    before = rectangle(cluster, costs, num_stages=3, num_microbatches=12, schedule="1f1b")
    two_short = oobleck.plan_oobleck(*_after(cluster, costs, before, 0, 4))
    check(two_short, cluster.without([0, 4]), costs, 12)
    short = oobleck.plan_oobleck(*_after(cluster, costs, before, 0, 4, 8))
    check(short, cluster.without([0, 4, 8]), costs, 12)
    # One is left of the first pipeline: it borrows from a whole one, and both go on with two.
    borrowed = oobleck.plan_oobleck(*_after(cluster, costs, before, 0, 4))
    depths = sorted(len(chain.stages) for chain in borrowed.allocation.chains for _ in range(chain.stages[0].width))
    assert depths == [2, 2, 3, 3]


def test_oobleck_merges_if_nobody_can_lend():
    costs = layers(1, 1, 1, 1, activation_bytes=0.0)
    cluster = replace(machines(6), memory_bytes=np.full(6, 1.3e7))
    before = rectangle(cluster, costs, num_stages=2, num_microbatches=12, schedule="1f1b")
    plan = oobleck.plan_oobleck(*_after(cluster, costs, before, 0))
    depths = sorted(len(chain.stages) for chain in plan.allocation.chains for _ in range(chain.stages[0].width))
    assert depths == [2, 3]
    check(plan, cluster.without([0]), costs, 12)


def test_oobleck_uses_everybody_who_comes():
    costs = layers(1, 1, 1, 1, 1, 1)
    cluster, before = begin(6, 3, 12, costs)
    short = oobleck.plan_oobleck(*_after(cluster, costs, before, 2)).allocation
    more = machines(7).without([2])
    filled = oobleck.plan_oobleck(more, costs, short, ClusterEvent(kind="joined", workers=(6,)))
    assert [len(chain.stages) for chain in filled.allocation.chains] == [3]
    assert counts(filled) == [[6, 6]] * 3
    longer = oobleck.plan_oobleck(machines(7), costs, before, ClusterEvent(kind="joined", workers=(6,)))
    assert sorted(len(chain.stages) for chain in longer.allocation.chains) == [3, 4]
    third = oobleck.plan_oobleck(machines(9), costs, before, ClusterEvent(kind="joined", workers=(6, 7, 8)))
    assert counts(third) == [[4, 4, 4]] * 3
    check(longer, machines(7), costs, 12)


def test_oobleck_splits_every_template_by_itself():
    """A pipeline of five stages beside one of two: stages of two layers lie inside those of five."""
    costs = layers(*[1.0] * 10)
    cluster, before = begin(10, 5, 20, costs)
    lost = _after(cluster, costs, before, 0, 2, 4)
    published, aligned = oobleck.plan_oobleck(*lost), oobleck.plan_oobleck(*lost, aligned=True, name="oobleck_aligned")
    assert [ranges_of(chain) for chain in published.allocation.chains] == [
        ((0, 2), (2, 4), (4, 6), (6, 8), (8, 10)),
        ((0, 5), (5, 10)),
    ]
    assert oobleck.is_nested(published.allocation) and "this engine cannot run it" in published.reason
    assert not oobleck.is_nested(aligned.allocation) and aligned.policy == "oobleck_aligned"
    check(published, cluster.without([0, 2, 4]), costs, 20)
    check(aligned, cluster.without([0, 2, 4]), costs, 20)


def test_oobleck_says_what_it_cannot_do():
    costs = layers(1, 1)
    cluster, before = begin(4, 2, 4, costs)
    restarted = oobleck.plan_oobleck(*_after(cluster, costs, before, 0, 1))
    assert restarted.from_checkpoint
    assert "all copies of a layer are lost" in restarted.reason
    alone = oobleck.plan_oobleck(*_after(cluster, costs, before, 0, 2))
    assert "fewer than f + 1 = 2 are left" in alone.reason
    small = replace(machines(2), memory_bytes=np.full(2, 1.3e7))
    tight = rectangle(small, layers(1, 1, 1, 1, activation_bytes=0.0), num_stages=2, num_microbatches=4,
                      schedule="1f1b")  # fmt: skip
    with pytest.raises(InfeasiblePlan, match="too few"):
        oobleck.plan_oobleck(small.without([0]), layers(1, 1, 1, 1, activation_bytes=0.0), tight,
                     ClusterEvent(kind="lost", workers=(0,)))  # fmt: skip


@settings(max_examples=60)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_micro_batches_over_pipelines_as_brute_force(num_microbatches, kinds):
    numbers = [number for number, _, _ in kinds]
    times = [(float(fixed), float(pace)) for _, fixed, pace in kinds]

    def slowest(totals: tuple[int, ...]) -> float:
        return max(
            fixed + -(-total // number) * pace
            for total, number, (fixed, pace) in zip(totals, numbers, times, strict=True)
            if total
        )

    dealt = apportion_pipelines(num_microbatches, numbers, times)
    assert sum(dealt) == num_microbatches
    splits = product(range(num_microbatches + 1), repeat=len(kinds))
    best = min(slowest(split) for split in splits if sum(split) == num_microbatches)
    assert slowest(tuple(dealt)) == best


# -------------------------------------------------------------------------------------------------------- full restart


def test_full_restart_begins_again_with_what_is_left():
    costs = layers(1, 1, 1)
    cluster, before = begin(12, 3, 24, costs)
    plan = full_restart.plan_full_restart(*_after(cluster, costs, before, 1, 6))
    assert [len(own) for own in workers(plan)] == [3, 3, 3]
    assert counts(plan) == [[8, 8, 8]] * 3
    assert plan.predicted_pause_s == RecoveryTimes().restart_s
    assert plan.lost_work_s == RecoveryTimes().checkpoint_interval_s / 2
    assert plan.from_checkpoint
    assert sum(each.num_bytes for each in plan.transfers) == pytest.approx(9 * 1e6 + 3 * 3e6)
    spare = full_restart.plan_full_restart(*_after(cluster.without([1, 6]), costs, plan.allocation, 11))
    assert spare.predicted_pause_s == 0
    assert "only spare workers are gone" in spare.reason


def test_full_restart_waits_unless_a_restart_repays():
    costs = layers(1, 1, 1)
    cluster, before = begin(6, 3, 24, costs)
    joined = ClusterEvent(kind="joined", workers=(6, 7, 8))
    short = full_restart.plan_full_restart(machines(9), costs, before, joined, times=RecoveryTimes(horizon_s=600.0))
    assert short.predicted_pause_s == 0
    assert short.allocation is before
    long = full_restart.plan_full_restart(machines(9), costs, before, joined, times=RecoveryTimes(horizon_s=6000.0))
    assert [len(own) for own in workers(long)] == [3, 3, 3]
    assert long.lost_work_s == 0
    too_few = full_restart.plan_full_restart(machines(7), costs, before, ClusterEvent(kind="joined", workers=(6,)))
    assert too_few.allocation is before
    slow, event = slower(cluster, 1, 0.3)
    assert (
        full_restart.plan_full_restart(slow, costs, before, event, times=RecoveryTimes(horizon_s=310.0)).allocation
        is before
    )
    out = full_restart.plan_full_restart(slow, costs, before, event, times=RecoveryTimes(horizon_s=6000.0))
    assert 1 not in out.allocation.workers
    alone, only = begin(3, 3, 24, costs)
    assert full_restart.plan_full_restart(*_pair(slower(alone, 1, 0.2), costs, only)).allocation is only


def test_full_restart_with_hot_spares_keeps_its_pipelines():
    costs = layers(1, 1, 1)
    cluster = machines(33)
    before = rectangle(cluster, costs, num_stages=3, num_microbatches=110, schedule="1f1b", most=10)
    policy = partial(full_restart.plan_full_restart, num_spares=3, name="full_restart_spares")
    plan = policy(*_after(cluster, costs, before, 1, 6))
    assert plan.policy == "full_restart_spares" and plan.from_checkpoint
    assert counts(plan) == [[11] * 10] * 3
    assert plan.predicted_pause_s == RecoveryTimes().restart_s
    spare = policy(*_after(cluster.without([1, 6]), costs, plan.allocation, 32))
    assert spare.predicted_pause_s == 0
    # Who comes stands by until there are more than the spares that are wanted.
    long = RecoveryTimes(horizon_s=1e6)
    joined = ClusterEvent(kind="joined", workers=(33, 34))
    assert policy(machines(35), costs, before, joined, times=long).allocation is before
    joined = ClusterEvent(kind="joined", workers=(33, 34, 35))
    more = policy(machines(36), costs, before, joined, times=long)
    assert [len(own) for own in workers(more)] == [11, 11, 11]
    assert len(workers(full_restart.plan_full_restart(machines(36), costs, before, joined, times=long))[0]) == 12
    assert full_restart.num_pipelines(12, 3, 8) == 3, "no more than a tenth stands by"


# -------------------------------------------------------------------------------------------------- what they share


def test_memory_that_is_short_holds_micro_batches_back():
    """A stage of one worker beside one of two would hold more in flight than it has memory for."""
    costs = layers(1, 1, 1, 1, activation_bytes=2e6)
    cluster, before = begin(8, 4, 16, costs)
    wide = rerouting(*_after(cluster, costs, before, 0))
    fixed = 1e6 + 2e6 + 3e6 * 2
    tight = replace(cluster, memory_bytes=np.full(8, fixed + 4 * 2e6))
    check_before = estimate(tight, costs, before).memory_bytes
    assert (check_before <= tight.memory_bytes).all()
    held = rerouting(*_after(tight, costs, before, 0))
    assert held.predicted_step_s >= wide.predicted_step_s
    assert (held.memory_bytes <= fixed + 4 * 2e6).all()
    tiny = replace(cluster, memory_bytes=np.full(8, fixed + 1e6))
    with pytest.raises(InfeasiblePlan, match="memory: worker"):
        rerouting(*_after(tiny, costs, before, 0))


def test_layers_and_micro_batches_are_split_evenly():
    assert evenly(7, 3).tolist() == [3, 2, 2]
    assert evenly(7, 3, np.array([0, 5, 1])).tolist() == [2, 3, 2]
    assert balanced_ranges(layers(1, 1, 2, 2), 3) == ((0, 2), (2, 3), (3, 4))
    with pytest.raises(InfeasiblePlan, match="3 stages need a layer each, but there are 2 layers"):
        balanced_ranges(layers(1, 1), 3)


def test_pauses_are_checked_and_tuned():
    with pytest.raises(ValueError, match="restart_s is -1.0, needed: finite and at least 0"):
        RecoveryTimes(restart_s=-1.0)
    with pytest.raises(ValueError, match="checkpoint_interval_s is 0.0, needed: finite and above 0"):
        RecoveryTimes(checkpoint_interval_s=0.0)
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"copy_share is {share}, needed"):
            RecoveryTimes(copy_share=share)
    tuned = RecoveryTimes(checkpoint_stall_s=2.0).for_mtbf(10_000.0)
    assert tuned.checkpoint_interval_s == pytest.approx(200.0)
    assert tuned.horizon(5) == 10_000.0
    assert RecoveryTimes().horizon(100_000) == WORKER_S_BETWEEN_LOSSES / 100_000
    assert RecoveryTimes().for_mtbf(60.0).checkpoint_interval_s == 60.0
    with pytest.raises(ValueError, match="mean time between losses is 0"):
        RecoveryTimes().for_mtbf(0)


def test_pauses_grow_with_the_number_of_workers_for_all_that_run_on_this_engine():
    """With what the coordinator does for each worker and block, and sends to each; torchft has its own."""
    times, fixed = RecoveryTimes(), RecoveryTimes().recover_s
    assert times.at(4096).recover_s - fixed == pytest.approx(0.075 + 4096 * 4096 * 20 / 12.5e9, rel=0.05), "measured"
    assert times.at(1024, 1_052_561).recover_s - fixed == pytest.approx(1.915, rel=0.05), "measured"
    assert times.at(4096).join_s - times.join_s == pytest.approx(times.at(4096).recover_s - fixed)
    assert RecoveryTimes().at(4).at(8) == RecoveryTimes().at(4)
    costs = layers(1, 1, 1, 1)
    for number in (8, 64):
        cluster, before = begin(number, 2, 2 * number, costs)
        event = ClusterEvent(kind="lost", workers=(1,))
        left = cluster.without([1])
        expected_s = RecoveryTimes().at(number - 1, num_blocks(costs)).recover_s
        for name in ("elaswave", "recycle_rerouting"):
            found = POLICIES[name](left, costs, before, event)
            moves_s = RecoveryTimes().move_s if found.transfers else 0.0
            assert found.predicted_pause_s == pytest.approx(expected_s + moves_s)
        assert POLICIES["oobleck"](left, costs, before, event).predicted_pause_s > expected_s
        assert POLICIES["torchft"](left, costs, before, event).predicted_pause_s == RecoveryTimes().torchft_recover_s


@pytest.mark.parametrize(
    ("model", "expected"), [("gpt2-small", 2_498), ("llama-2-13b", 198_641), ("llama-2-70b", 131_641)]
)
def test_pauses_count_the_blocks_that_the_engine_cuts(model, expected):
    costs = analytic_costs(model_shape(model), device_preset("h100"))
    sizes = [int(layer.parameter_bytes // PARAMETER_BYTES) for layer in costs.layers]
    assert num_blocks(costs) == len(make_blocks(sizes, default_block_size(sum(sizes)))) == expected


def test_power_that_lost_workers_leave_raises_everybodys_clocks():
    costs = layers(1, 1, 1, 1)
    cluster, before = begin(8, 2, 16, costs)
    (device,) = cluster.devices
    base_w = device.levels[device.base_level].power_w
    levels = (FrequencyLevel(speed=1.0, power_w=base_w), FrequencyLevel(speed=1.25, power_w=2 * base_w))
    capped = replace(cluster, devices=(msgspec.structs.replace(device, levels=levels),), power_limit_w=8.1 * base_w)
    before = at_levels(before, np.zeros(8, dtype=np.int64))
    for name in ("recycle_rerouting", "torchft", "oobleck", "full_restart"):
        one, four = (
            POLICIES[name](capped.without(gone), costs, before, ClusterEvent(kind="lost", workers=gone))
            for gone in ((1,), (0, 1, 4, 5))
        )
        assert set(levels_of(one.allocation).values()) == ({0} if len(one.allocation.workers) > 4 else {1}), name
        assert set(levels_of(four.allocation).values()) == {1}, name


def test_those_who_hold_a_layer_share_what_is_sent_of_it_while_training_stands():
    costs = layers(1, 1, 1, 1)
    cluster, before = begin(8, 2, 16, costs)  # two layers on each of 4 workers
    link = cluster.between_nodes
    sent = [StateTransfer(start=0, stop=2, workers=(4, 5), num_bytes=8e9)]
    receiving = link.transfer_s(4e9)
    assert copy_s(cluster, costs, before, sent) == pytest.approx(receiving)
    assert copy_s(cluster.without([0, 1, 2]), costs, before, sent) == pytest.approx(link.transfer_s(8e9))
    assert copy_s(cluster, costs, before, []) == 0.0
