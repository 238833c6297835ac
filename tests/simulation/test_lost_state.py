"""Simulated state that can be lost: by hand, and against blocks that are placed one by one."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.simulation.test_cluster import COSTS, HOUR_S, joined, lost, planner_of, scenario
from tests.unit.planning_cases import layers, machines

from elaswave.config.policy_code import policies
from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Plan, StateTransfer
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.policy.policy_parts import rectangle
from elaswave.planning.state_moves.placed_blocks import PlacedBlocks, Placing
from elaswave.sim.cluster.held_state import HeldBlocks, HeldWhole, held_state
from elaswave.sim.cluster.job import simulate
from elaswave.sim.cluster.outcome import PolicyOutcome

PAUSES = RecoveryTimes(checkpoint_stall_s=0.0, backup_interval_s=1000.0, storage_bytes_per_s=1e6)
PAIRS = Placing(scatter_width=1)


def run(*changes, policy: str = "elaswave", placing: Placing = PAIRS, num_workers: int = 8, **more) -> PolicyOutcome:
    return simulate(
        scenario(*changes, num_workers=num_workers), machines(1), COSTS, policy,
        planner_of(policy, PAUSES, followers=placing.planned_followers), num_stages=2, num_microbatches=16,
        schedule="zero-bubble", pauses=PAUSES, placing=placing, **more,
    )  # fmt: skip


def first_job(num_workers: int = 8) -> tuple[Cluster, Plan]:
    """With whom `run` begins: 2 stages, hosts of 4 workers."""
    cluster = machines(num_workers)
    allocation = rectangle(cluster, COSTS, num_stages=2, num_microbatches=16, schedule="zero-bubble")
    return cluster, Plan(policy="", allocation=allocation, predicted_step_s=10.0, predicted_pause_s=0.0)


def pairs(num_workers: int = 8) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """ReplicaPeers, and two workers that are none, of the first job."""
    cluster, plan = first_job(num_workers)
    fatal = sorted(PlacedBlocks.of(plan.allocation, cluster, PAIRS, COSTS).fatal_sets(2))
    others = [(a, b) for a in range(num_workers) for b in range(a + 1, num_workers) if (a, b) not in fatal]
    return fatal, others


def test_partners_that_are_lost_at_one_instant_lead_back_to_the_checkpoint():
    """Others do not. A worker loads its layers' parameters and its share of their state, at 1 MB/s."""
    (fatal, *_), (harmless, *_) = pairs()
    outcome = run(lost(4500.0, *fatal))
    assert outcome.num_rollbacks == outcome.num_pauses["rollback"] == 1
    assert outcome.lost_training_s == pytest.approx(500)
    widths = (3, 3) if fatal[0] < 4 <= fatal[1] else (2, 4)
    layers, parameters, state = 2, 1.0, 3.0
    loaded = layers * (parameters + 2 * state / min(widths))
    assert outcome.pauses_s["rollback"] == pytest.approx(PAUSES.recover_s + loaded, rel=0.5)
    assert "restart" not in outcome.pauses_s
    goes_on = run(lost(4500.0, *harmless))
    assert (goes_on.num_rollbacks, goes_on.pauses_s.get("rollback")) == (0, None)
    assert goes_on.lost_training_s < 30


def test_without_partners_every_pair_of_a_stage_is_fatal():
    """As it was with copies on all other workers of a stage."""
    everybody = Placing(scatter_width=None, knows_hosts=False)
    assert run(lost(4500.0, 0, 3), placing=everybody).num_rollbacks == 1
    assert run(lost(4500.0, 0, 7), placing=everybody).num_rollbacks == 0


def test_a_whole_rack_takes_no_state_with_it_where_racks_are_known():
    """Hosts of 4 workers are linked with their neighbours, which share a rack, unless racks are known."""
    for racks, rollbacks in (((0, 0, 1, 1, 2, 2, 3, 3), 0), ((), 1)):
        life = msgspec.structs.replace(scenario(lost(4500.0, *range(8)), num_workers=32), racks=racks)
        outcome = simulate(
            life, machines(1), COSTS, "elaswave", planner_of("elaswave", PAUSES), num_stages=2, num_microbatches=32,
            schedule="zero-bubble", pauses=PAUSES, placing=PAIRS,
        )  # fmt: skip
        assert outcome.num_rollbacks == rollbacks, racks


AUTO = Placing(followers="auto", scatter_width=1)


def test_all_of_a_stage_but_one_may_be_lost_where_all_follow():
    """Workers 0 to 3 are a stage, and a host: one outside follows each block, too."""
    for gone, rollbacks in (((0, 1, 2), 0), ((0, 1, 2, 3), 0), ((0, 1, 2, 3, 4, 5, 6), 1)):
        assert run(lost(4500.0, *gone), placing=AUTO).num_rollbacks == rollbacks, gone
    one = Placing(followers=1, scatter_width=2, knows_hosts=False)
    assert run(lost(4500.0, 0, 1, 2), placing=one).num_rollbacks == 1
    one_after_the_other = [lost(4500.0 + worker, worker) for worker in range(3)]
    assert run(*one_after_the_other, placing=AUTO).num_rollbacks == 0  # nothing has to be made again


def test_a_stage_may_be_gone_whose_blocks_another_holds():
    """Until the others' plan is in force nobody owns them."""
    cluster, plan = first_job()
    for followers in (2, "auto"):
        placed = PlacedBlocks.of(plan.allocation, cluster, replace(AUTO, followers=followers), COSTS).without(range(4))
        assert placed.lost_with([4, 5, 6, 7])
        assert not placed.lost_with([4])


def coming(bytes_per_step: int) -> HeldBlocks:
    """Workers 0 and 1 are a stage that worker 2 joins at 100 s, which is sent 2 layers in 1 s, and behind that a third
    of their 6 MB of state."""
    cluster = machines(6, workers_per_node=1)
    plans = [
        Plan(
            policy="", predicted_step_s=10.0, predicted_pause_s=0.0, transfers=transfers,
            allocation=rectangle(there, COSTS, num_stages=2, num_microbatches=12, schedule="1f1b", workers=workers),
        )
        for there, workers, transfers in (
            (cluster, np.array([0, 1, 3, 4]), ()),
            (cluster, np.arange(6), (StateTransfer(start=0, stop=2, workers=(2,), num_bytes=1e9),)),
        )
    ]  # fmt: skip
    held = HeldBlocks(COSTS, cluster.between_nodes, replace(AUTO, refill_bytes_per_step=bytes_per_step))
    held.begin(plans[0], cluster)
    held.adopt(100.0, plans[1], cluster, 0.0)
    return held


def test_who_has_joined_a_stage_counts_once_it_has_been_filled_up():
    """2 MB, of which the others send a half each."""
    for bytes_per_step, steps in ((10_000_000, 1), (1_000_000, 2), (500_000, 4)):
        filled_s = coming(bytes_per_step).filled_s
        assert filled_s == pytest.approx(101 + steps * 10)
        for at_s, fatal in ((100.5, True), (102.0, True), (filled_s - 1, True), (filled_s + 1, False)):
            assert coming(bytes_per_step).lose(at_s, [0, 1]) is fatal, (bytes_per_step, at_s)
    # What it owns, and what it is the first follower of, it holds from the beginning.
    fatal = {pair: coming(500_000).lose(102.0, pair) for pair in ((0, 1), (0, 2), (1, 2))}
    assert fatal == {(0, 1): True, (0, 2): False, (1, 2): False}


def test_steps_take_at_most_a_twentieth_longer_while_copies_are_sent():
    """Over links of 1 MB/s a step ends with 3 s of sending; copies might have nearly all of them."""
    cluster, plan = first_job()
    link = msgspec.structs.replace(cluster.between_nodes, bandwidth_bytes_per_s=1e6)
    there, costs = replace(cluster, between_nodes=link), msgspec.structs.replace(COSTS, end_link=link)
    held = HeldBlocks(costs, msgspec.structs.replace(link, bandwidth_bytes_per_s=0.99e6), AUTO)
    held.begin(replace(plan, predicted_step_s=27.0), there)
    assert 0.02 < held.slower <= 0.05


def test_why_a_job_went_back_is_told():
    """Copies; too few workers for two stages; a policy that always does."""
    assert run(lost(4500.0, *pairs()[0][0])).rollbacks == {"copies": 1}
    assert run(lost(4500.0, *range(1, 8)), policy="recycle").rollbacks == {"workers": 1}
    assert run(lost(4500.0, 0, 3), policy="torchft", num_workers=4).rollbacks == {"copies": 1}  # two are left
    assert run(lost(4500.0, 0), policy="full_restart").rollbacks == {"policy": 1}


@pytest.mark.parametrize("policy", ["recycle", "recycle_rerouting", "oobleck", "torchft"])
def test_rivals_pay_for_the_copies_that_they_are_credited_with(policy):
    """All of a stage's state on each worker: 12 MB of 2 layers, where elaswave has two slices of four and takes 9."""
    costs = layers(1, 1, 1, 1, activation_bytes=1e3)

    def live(policy: str, **more) -> PolicyOutcome:
        return simulate(
            scenario(), machines(1, memory_bytes=10.5e6), costs, policy, planner_of(policy, PAUSES), num_stages=2,
            num_microbatches=16, schedule="1f1b", pauses=PAUSES, **more,
        )  # fmt: skip

    with pytest.raises(InfeasiblePlan, match="worker 0 would hold"):
        live(policy)
    assert live(policy, free_copies=True).num_rollbacks == live("elaswave").num_rollbacks == 0


def test_without_followers_every_loss_goes_back_and_two_survive_any_pair():
    assert run(lost(4500.0, 0), placing=Placing(followers=0)).num_rollbacks == 1
    for pair in pairs()[0]:
        assert run(lost(4500.0, *pair), placing=Placing(followers=2, scatter_width=1)).num_rollbacks == 0


@pytest.mark.parametrize("later_s, rollbacks", [(5.0, 1), (600.0, 0)])
def test_a_second_loss_is_fatal_until_the_copies_of_the_first_are_made_again(later_s, rollbacks):
    """A step takes some 30 s, and copies at least one step."""
    fatal, _ = pairs(num_workers=16)
    one, other = fatal[0]
    outcome = run(lost(4500.0, one), lost(4500.0 + later_s, other), num_workers=16)
    assert outcome.num_rollbacks == rollbacks


def test_refilling_takes_steps_or_link_time_whichever_is_more():
    cluster, plan = first_job()
    (one, other), *_ = pairs()[0]
    per_step = 1e6  # a worker owns 2 layers x 3 MB / 4 workers, its one replica peer sends that twice: 3 steps of 10 s
    for bytes_per_step, steps in ((None, 1), (per_step, 3), (per_step * 2, 2)):
        for at_s, fatal in ((steps * 10 - 1, True), (steps * 10 + 1, False)):
            placing = replace(PAIRS, refill_bytes_per_step=bytes_per_step)
            held = HeldBlocks(COSTS, cluster.between_nodes, placing)
            held.begin(plan, cluster)
            assert not held.lose(0.0, [one])
            assert held.lose(at_s, [other]) is fatal, (bytes_per_step, at_s)


def test_who_has_joined_holds_nothing_before_its_copies_have_come():
    """The only other worker of a stage may not be lost before."""
    life = lost(HOUR_S, 0), joined(2 * HOUR_S, 4)
    for seconds, rollbacks in ((0.001, 1), (HOUR_S, 0)):
        outcome = run(*life, lost(2 * HOUR_S + seconds, 1), policy="recycle", num_workers=4)
        assert outcome.num_rollbacks == rollbacks
        assert ("rollback" in outcome.num_pauses) == bool(rollbacks)
        if rollbacks:
            assert outcome.pauses_s["rollback"] == PAUSES.restart_s


@pytest.mark.parametrize("policy", ["recycle", "oobleck", "torchft"])
def test_rivals_go_back_when_all_replicas_of_something_are_lost(policy):
    """Two pipelines of two stages, workers 0 and 1 in the first stage: both hold all of it."""
    together = run(lost(4500.0, 0, 1), policy=policy, num_workers=4)
    assert together.num_rollbacks == 1
    # In torchft both groups are broken by workers of different stages, too; the others have a copy of each layer left.
    across = run(lost(4500.0, 0, 3), policy=policy, num_workers=4)
    assert across.num_rollbacks == (policy == "torchft")


def test_full_restart_always_goes_back():
    assert run(lost(4500.0, 0), lost(9000.0, 5), policy="full_restart").num_rollbacks == 2


def test_what_each_policy_holds_is_said_beside_it():
    for name, planner in policies().items():
        replication = policy_metadata_of(planner).replication
        assert replication.what and replication.source, name
        held = held_state(replication, COSTS, machines(1).between_nodes, PAIRS)
        assert isinstance(held, HeldBlocks if name == "elaswave" else HeldWhole)


def test_a_planned_leave_takes_no_copies_with_it():
    """A drained worker hands over before it goes, so its replica peer may be lost right after."""
    (one, other), *_ = pairs()[0]
    drained = type(lost(0.0, 0))(at_s=4500.0, event=ClusterEvent(kind="drained", workers=(one,)))
    assert run(drained, lost(4500.5, other)).num_rollbacks == 0


def test_the_default_interval_is_the_engines():
    from elaswave.config.schema import RunConfig

    assert RecoveryTimes().backup_interval_s == RunConfig().checkpoint_every_s
