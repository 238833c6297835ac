"""A job's weeks in virtual time: against arithmetic done by hand, against steps told apart, and the same every time."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planning_cases import layers, machines

from elaswave.config.policy_code import other_policies, policies
from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.policy.policies import make_policies
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.policy.policy_parts import make_plan, rectangle
from elaswave.planning.state_moves.placed_blocks import num_blocks
from elaswave.sim.cluster.failures import DAY_S, ClusterChange, Rates, Scenario, draw
from elaswave.sim.cluster.job import simulate
from elaswave.sim.cluster.outcome import PolicyOutcome
from elaswave.sim.cluster.summary import interval_of, summarize_outcomes

COSTS = layers(1, 1, 1, 1)
POLICIES = policies()
HOUR_S = 3600.0
RATES = Rates(losses_per_worker_day=0.5, repair_s=4 * HOUR_S, stragglers_per_worker_day=0.5)
NO_STALL = RecoveryTimes(checkpoint_stall_s=0.0, backup_interval_s=HOUR_S)


def scenario(*changes: ClusterChange, num_workers: int = 8, duration_s: float = 10 * HOUR_S) -> Scenario:
    ids = tuple(range(num_workers))
    return Scenario(initial=ids, nodes=tuple(each // 4 for each in ids), changes=changes, duration_s=duration_s)


def lost(at_s: float, *workers: int) -> ClusterChange:
    return ClusterChange(at_s=at_s, event=ClusterEvent(kind="lost", workers=workers))


def joined(at_s: float, *workers: int) -> ClusterChange:
    return ClusterChange(at_s=at_s, event=ClusterEvent(kind="joined", workers=workers), nodes=(0,) * len(workers))


def planner_of(policy: str, pauses: RecoveryTimes, **more) -> Planner:
    return make_policies(pauses, others=other_policies(), **more)[policy]


def run(
    life: Scenario, policy: str, pauses: RecoveryTimes = NO_STALL, num_microbatches: int = 16, planner=None, **more
) -> PolicyOutcome:
    return simulate(
        life, machines(1), COSTS, policy, planner or planner_of(policy, pauses), num_stages=2,
        num_microbatches=num_microbatches, pauses=pauses, **more,
    )  # fmt: skip


def parts(outcome: PolicyOutcome) -> float:
    return (
        outcome.useful_s + outcome.lost_work_s + sum(outcome.pauses_s.values()) + outcome.waiting_s + outcome.slower_s
    )


@pytest.mark.parametrize(
    "policy",
    [
        name
        for name, each in POLICIES.items()
        if not (policy_metadata_of(each).own_steps or policy_metadata_of(each).num_spares)
    ],
)
def test_an_undisturbed_job_has_a_goodput_of_one(policy):
    outcome = run(scenario(), policy)
    assert outcome.goodput == pytest.approx(1)
    assert outcome.availability == pytest.approx(1)
    assert outcome.lost_work_s == outcome.waiting_s == outcome.migrated_bytes == 0
    assert outcome.slower_s == pytest.approx(0, abs=1e-6)
    busy = 8 * 16 / 4 * 6 / 8 / outcome.undisturbed_step_s  # micro-batches of 6 s on 4 replicas, share of the time
    assert outcome.energy_j == pytest.approx(10 * HOUR_S * 8 * (50 + 250 * busy), rel=1e-6)


def test_recycle_needs_no_barrier_without_a_loss_either():
    """16 micro-batches of 6 s on 4 replicas of 2 stages: 12 s of work for each worker in a step."""
    outcome = run(scenario(), "recycle")
    assert outcome.slower_s < 0 and outcome.lost_work_s == 0
    assert parts(outcome) == pytest.approx(outcome.duration_s)
    assert outcome.goodput == pytest.approx(outcome.undisturbed_step_s / (4 * 6), rel=0.01)


def test_hot_spares_keep_the_pipelines_that_there_are():
    life = scenario(lost(HOUR_S, 0), lost(2 * HOUR_S, 1), num_workers=20)
    outcome = run(life, "full_restart_spares", num_microbatches=20)
    # 20 workers less 2 spares are 9 pipelines of 2 stages; 18 are enough for them after two losses.
    first, *_, last = [sample.throughput for sample in outcome.timeline]
    assert first == pytest.approx(last)
    assert outcome.num_pauses["lost"] == 2
    without = run(life, "full_restart", num_microbatches=20)
    first, *_, last = [sample.throughput for sample in without.timeline]
    assert last < first == pytest.approx(1)


def test_checkpoints_cost_their_stalls():
    outcome = run(scenario(), "full_restart", RecoveryTimes(checkpoint_interval_s=99.0, checkpoint_stall_s=1.0))
    assert outcome.goodput == pytest.approx(0.99)
    assert outcome.pauses_s == pytest.approx({"checkpoint": 0.01 * 10 * HOUR_S})
    assert outcome.num_pauses == {"checkpoint": 360}


def test_a_loss_by_hand():
    """full_restart: 4 replicas become 3 (16 micro-batches: 6 instead of 4), 300 s stand still, 500 s are lost."""
    pauses = RecoveryTimes(checkpoint_stall_s=0.0, checkpoint_interval_s=1000.0, restart_s=300.0)
    outcome = run(scenario(lost(4500.0, 0)), "full_restart", pauses)
    before_s, after_s = (4 + 1) * 6.0, (6 + 1) * 6.0
    assert outcome.undisturbed_step_s == pytest.approx(before_s, rel=1e-3)
    assert outcome.lost_work_s == pytest.approx(500, rel=1e-3)
    assert outcome.pauses_s["lost"] == 300
    assert outcome.num_pauses["lost"] == 1
    left_s = 10 * HOUR_S - 4800
    assert outcome.useful_s == pytest.approx(4000 + left_s * before_s / after_s, rel=1e-3)
    assert outcome.slower_s == pytest.approx(left_s * (1 - before_s / after_s), rel=1e-2)
    assert outcome.availability == pytest.approx((4500 * 8 + (36_000 - 4500) * 7) / 8 / 36_000)
    assert [sample.num_workers for sample in outcome.timeline] == [8, 7, 7]
    assert [sample.throughput for sample in outcome.timeline] == pytest.approx([1, 0, before_s / after_s], rel=1e-3)


def test_the_effective_training_time_ratio_by_hand():
    """Slower training is effective, standing still and what is trained again is not."""
    pauses = RecoveryTimes(checkpoint_stall_s=0.0, checkpoint_interval_s=1000.0, restart_s=300.0)
    outcome = run(scenario(lost(0.0, 0), lost(4500.0, 1)), "full_restart", pauses)
    assert outcome.lost_training_s == pytest.approx(200)  # 4,200 s of training, saved every 1,000
    assert outcome.lost_work_s == pytest.approx(200 * 30 / 42, rel=1e-3)  # with 3 of 4 replicas
    assert outcome.ettr == pytest.approx(1 - (300 + 300 + 200) / 36_000)
    assert outcome.goodput < outcome.ettr
    stalled = run(scenario(), "full_restart", RecoveryTimes(checkpoint_interval_s=99.0, checkpoint_stall_s=1.0))
    assert stalled.ettr == pytest.approx(0.99)
    waits = run(scenario(lost(HOUR_S - 1, *range(7))), "recycle_rerouting")
    assert waits.ettr == pytest.approx(0, abs=1e-6)  # what was done in the hour was lost with all copies
    half = run(scenario(lost(5000.0, 0)), "recycle_rerouting")
    assert half.ettr == pytest.approx(
        1 - (NO_STALL.at(7, num_blocks(COSTS)).recover_s + half.undisturbed_step_s / 2) / 36_000
    )


def test_half_of_an_interrupted_step_is_lost_and_none_of_a_drained_one():
    outcome = run(scenario(lost(5000.0, 0)), "recycle_rerouting")
    assert outcome.lost_work_s == pytest.approx(outcome.undisturbed_step_s / 2)
    drained = ClusterChange(at_s=5000.0, event=ClusterEvent(kind="drained", workers=(0,)))
    assert run(scenario(drained), "recycle_rerouting").lost_work_s == 0
    during_the_pause = run(scenario(lost(5000.0, 0), lost(5000.01, 5)), "recycle_rerouting")
    assert during_the_pause.lost_work_s == pytest.approx(outcome.undisturbed_step_s / 2)
    assert during_the_pause.pauses_s["lost"] == pytest.approx(0.01 + NO_STALL.at(6, num_blocks(COSTS)).recover_s)


def test_torchft_does_less_with_a_smaller_batch():
    outcome = run(scenario(lost(0.0, 0)), "torchft")
    assert outcome.goodput == pytest.approx(3 / 4, rel=1e-4)
    back = run(scenario(lost(0.0, 0), joined(5 * HOUR_S, 8)), "torchft")
    assert back.goodput == pytest.approx(7 / 8, rel=1e-4)
    assert back.migrated_bytes > 0


def test_a_layout_counts_when_its_state_is_there():
    """A policy that copies for 1,000 s in the background after a loss, with steps of twice the time until then."""

    def copying(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
        found = POLICIES["recycle"](cluster, costs, allocation, event)
        step_s = found.predicted_step_s
        return replace(found, copy_s=1000.0, interim_step_s=2 * step_s, predicted_pause_s=0.0, lost_work_s=0.0)

    one = run(scenario(lost(0.0, 0)), "mine", planner=copying)
    left_s = 10 * HOUR_S
    at_once = run(scenario(lost(0.0, 0)), "recycle", msgspec.structs.replace(NO_STALL, recover_s=0.0))
    whole_s = at_once.useful_s + at_once.lost_work_s
    assert one.useful_s == pytest.approx(whole_s * (left_s - 500) / left_s)
    assert [sample.at_s for sample in one.timeline] == [0.0, 0.0, 1000.0]
    assert one.timeline[1].throughput == pytest.approx(one.timeline[2].throughput / 2)
    # The second one's copies wait for the first one's.
    two = run(scenario(lost(0.0, 0), lost(500.0, 5)), "mine", planner=copying)
    assert [sample.at_s for sample in two.timeline] == [0.0, 0.0, 500.0, 2000.0]


def test_who_joins_counts_when_it_has_its_state_and_others_go_on_slower():
    large = Costs(
        layers=tuple(msgspec.structs.replace(each, parameter_bytes=1e12) for each in COSTS.layers),
        end_link=machines(1).between_nodes,
    )
    life = scenario(lost(0.0, 0), joined(HOUR_S, 8))
    outcome = simulate(
        life,
        machines(1, memory_bytes=1e15),
        large,
        "recycle_rerouting",
        planner_of("recycle_rerouting", NO_STALL),
        num_stages=2,
        num_microbatches=16,
        pauses=NO_STALL,
    )
    link = machines(1).between_nodes
    copied_s = (2e12 + sum(each.optimizer_bytes for each in COSTS.layers[:2]) / 4) / link.bandwidth_bytes_per_s / 0.25
    begins, ends = [sample for sample in outcome.timeline if sample.at_s >= HOUR_S and sample.throughput > 0][-2:]
    assert ends.at_s - begins.at_s == pytest.approx(copied_s, rel=0.01)
    before = [sample for sample in outcome.timeline if 0 < sample.at_s < HOUR_S][-1]
    assert begins.throughput < before.throughput < ends.throughput


def test_a_job_waits_while_there_are_too_few_and_begins_again():
    life = scenario(lost(HOUR_S, *range(7)), joined(2 * HOUR_S, *range(8, 15)), joined(3 * HOUR_S, 15), num_workers=8)
    for policy in ("recycle_rerouting", "torchft", "full_restart"):
        outcome = run(life, policy, schedule="zero-bubble")
        assert outcome.waiting_s == pytest.approx(HOUR_S), policy
        assert outcome.pauses_s["restart"] == pytest.approx(300)
        assert 0.5 < outcome.goodput < 0.9
    never = run(scenario(lost(HOUR_S, *range(7))), "recycle_rerouting")
    assert never.waiting_s == pytest.approx(9 * HOUR_S)
    assert never.goodput <= 0.1


def test_a_job_that_begins_later_and_with_workers_left_over():
    life = Scenario(
        initial=(0,), nodes=(0,), changes=(joined(HOUR_S, 1, 2, 3), joined(2 * HOUR_S, 4)), duration_s=10 * HOUR_S
    )
    outcome = run(life, "recycle_rerouting")
    assert outcome.waiting_s == HOUR_S
    assert "restart" not in outcome.pauses_s
    # A schedule with fewer bubbles than the undisturbed job's makes up for some of the hour.
    assert 0.9 < outcome.goodput < 1


def test_events_about_nobody_are_no_events():
    ghost = ClusterChange(at_s=10.0, event=ClusterEvent(kind="slowed", workers=(99,), speed=0.5))
    outcome = run(scenario(ghost), "recycle_rerouting")
    assert outcome.goodput == pytest.approx(1)
    assert len(outcome.timeline) == 1


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 50))
def test_time_adds_up_and_is_the_same_every_time(policy, seed):
    life = draw(RATES, num_workers=8, duration_s=2 * DAY_S, seed=seed, workers_per_node=4)
    outcome = run(life, policy, RecoveryTimes().for_mtbf(life.mtbf_s))
    assert parts(outcome) == pytest.approx(outcome.duration_s)
    assert outcome.useful_s >= 0
    assert 0 <= outcome.ettr <= 1
    assert min(outcome.lost_work_s, outcome.waiting_s, outcome.energy_j, *outcome.pauses_s.values()) >= 0
    assert all(sample.throughput >= 0 for sample in outcome.timeline)
    assert outcome == run(life, policy, RecoveryTimes().for_mtbf(life.mtbf_s))
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=PolicyOutcome) == outcome


def by_steps(life: Scenario, policy: str, pauses: RecoveryTimes) -> float:
    """Useful seconds of a job whose steps are told apart: one after the other, and one that is interrupted is lost.

    Independent of the simulation, for policies that do not begin again; half a step less a loss on average.
    """
    cluster = machines(len(life.initial))
    allocation = rectangle(cluster, COSTS, num_stages=2, num_microbatches=16, schedule="1f1b")
    plan = make_plan(policy, cluster, COSTS, allocation, pause_s=0, lost_steps=0, reason="begins")
    undisturbed_s, now_s, steps = plan.predicted_step_s, 0.0, 0
    for change in [*life.changes, None]:
        until_s = life.duration_s if change is None else change.at_s
        while now_s + plan.predicted_step_s <= until_s:
            now_s += plan.predicted_step_s
            steps += 1
        if change is None:
            return steps * undisturbed_s
        cluster = cluster.without(change.event.workers)
        plan = POLICIES[policy](cluster, COSTS, plan.allocation, change.event)
        now_s = until_s + plan.predicted_pause_s
    raise AssertionError


@pytest.mark.parametrize("policy", ["recycle_rerouting", "oobleck", "torchft_batch_kept"])
def test_aggregated_time_agrees_with_steps_told_apart(policy):
    """Over many seeds, since a failure hits any part of a step."""
    rates = Rates(losses_per_worker_day=0.1, repair_s=None)
    lives = [draw(rates, num_workers=16, duration_s=2 * DAY_S, seed=seed) for seed in range(40)]
    aggregated, told_apart, losses, pauses = 0.0, 0.0, 0, RecoveryTimes(checkpoint_stall_s=0.0)
    for life in lives:
        if len(life.changes) > 3:
            continue
        outcome = simulate(
            life,
            machines(1),
            COSTS,
            policy,
            planner_of(policy, pauses),
            num_stages=2,
            num_microbatches=16,
            pauses=pauses,
        )
        aggregated += outcome.useful_s
        told_apart += by_steps(life, policy, RecoveryTimes())
        losses += len(life.changes)
    assert losses > 20
    # Also the step that the end interrupts; by a step or so of 20 s for each loss they may differ by chance.
    assert aggregated == pytest.approx(told_apart, abs=20 * losses**0.5 * 3 + 20 * len(lives))
    assert aggregated == pytest.approx(told_apart, rel=1e-3)


def test_a_planner_of_ones_own():
    def stop(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
        raise InfeasiblePlan("never")

    outcome = run(scenario(lost(HOUR_S - 1, 0)), "mine", planner=stop)
    assert outcome.policy == "mine"
    assert outcome.lost_work_s == pytest.approx(HOUR_S, rel=1e-3)  # begun again from the last backup, an hour ago
    assert outcome.pauses_s["restart"] == 300


def test_what_cannot_be_simulated():
    with pytest.raises(InfeasiblePlan, match="a pipeline of 2 stages needs 2 workers, but 1 are there"):
        run(scenario(num_workers=1), "recycle_rerouting")


def test_confidence_intervals():
    assert interval_of([2.0]).half_width == 0
    found = interval_of([1.0, 2.0, 3.0])
    assert (found.mean, found.half_width) == (2.0, pytest.approx(4.303 / 3**0.5))
    many = interval_of([0.0, 1.0] * 50)
    assert many.half_width == pytest.approx(1.96 * 0.5025 / 10, rel=1e-3)
    with pytest.raises(ValueError, match="mean of no values"):
        interval_of([])


def test_summaries():
    lives = [draw(RATES, num_workers=8, duration_s=DAY_S, seed=seed) for seed in range(3)]
    outcomes = [run(life, "recycle_rerouting") for life in lives]
    summary = summarize_outcomes(outcomes)
    assert (summary.policy, summary.num_seeds) == ("recycle_rerouting", 3)
    assert summary.goodput.mean == pytest.approx(sum(each.goodput for each in outcomes) / 3)
    assert summary.goodput.half_width > 0
    assert summary.ettr.mean == pytest.approx(sum(each.ettr for each in outcomes) / 3)
    assert summary.pauses_s["lost"].mean > 0
    with pytest.raises(ValueError, match=r"policies \['oobleck', 'recycle_rerouting'\] were given"):
        summarize_outcomes([outcomes[0], run(lives[0], "oobleck")])
    with pytest.raises(ValueError, match=r"policies \[\] were given"):
        summarize_outcomes([])
