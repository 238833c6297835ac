"""Simulated state that can be lost: by hand, and against blocks that are placed one by one."""

from dataclasses import replace

import msgspec
import pytest
from tests.simulation.test_cluster import COSTS, HOUR_S, joined, lost, planner_of, scenario
from tests.unit.planning_cases import machines

from elaswave.config.policy_code import policies
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Plan
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
        planner_of(policy, PAUSES, followers=placing.followers), num_stages=2, num_microbatches=16,
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
    fatal = sorted(PlacedBlocks.of(plan.allocation, cluster, PAIRS).fatal_sets(2))
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
