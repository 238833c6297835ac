"""The policies of examples/policies: what they do, and published figures that set none of their parameters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elaswave.config.policy_code import find_policy
from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.machines import Cluster, ClusterEvent, DeviceSpec
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.policy.policy_parts import rectangle
from elaswave.sim.cluster.failures import ClusterChange, Scenario
from elaswave.sim.cluster.job import simulate

FOLDER = Path(__file__).parents[3] / "examples" / "policies"
LAYER = LayerCosts(
    forward_s=0.01, input_gradient_s=0.01, weight_gradient_s=0.01, parameter_bytes=2e6, accumulator_bytes=8e6,
    optimizer_bytes=12e6, activation_bytes=1e6, boundary_bytes=1e5,
)  # fmt: skip
COSTS = Costs(layers=(LAYER,) * 12)
LINK = NetworkLink(bandwidth_bytes_per_s=1e11)


def policy(name: str) -> Planner:
    file, _, function = name.partition(":")
    return find_policy(f"{FOLDER / file}.py:{function or 'plan'}")


def cluster_of(number: int) -> Cluster:
    device = DeviceSpec(name="even", flops_per_s=1e14, memory_bytes=80e9)
    return Cluster.uniform(number, device, within_node=LINK, between_nodes=LINK)


def job(number: int, stages: int, used: int | None = None) -> tuple[Cluster, Allocation]:
    """A cluster, and equal pipelines of its first workers."""
    cluster = cluster_of(number)
    workers = cluster.ids[: used or number]
    return cluster, rectangle(
        cluster, COSTS, num_stages=stages, num_microbatches=4 * number, schedule="1f1b", workers=workers
    )


def after(name: str, kind: Any, workers: tuple[int, ...], cluster: Cluster, before: Allocation, **event: Any) -> Plan:
    left = cluster.without(workers) if kind in ("lost", "drained") else cluster
    return policy(name)(left, COSTS, before, ClusterEvent(kind=kind, workers=workers, **event))


# -------------------------------------------------------------------------------------------------------------- Bamboo


def test_bamboos_neighbour_runs_the_lost_workers_stage_too():
    cluster, before = job(96, 6)  # stage s has workers 16 s to 16 s + 15
    plan = after("bamboo", "lost", (35,), cluster, before)
    whole, broken = plan.allocation.chains
    assert [stage.width for stage in whole.stages] == [15] * 6
    assert [(stage.start, stage.stop, stage.workers.tolist()) for stage in broken.stages] == [
        (0, 2, [3]), (2, 6, [19]), (6, 8, [51]), (8, 10, [67]), (10, 12, [83])
    ]  # fmt: skip
    assert plan.allocation.num_microbatches == before.num_microbatches and plan.predicted_pause_s == 0.0
    first = after("bamboo", "lost", (3,), cluster, before).allocation.chains[1]
    assert (first.stages[0].stop, first.stages[0].workers.tolist()) == (4, [19])
    back = after("bamboo", "joined", (35,), cluster, plan.allocation)
    assert [len(chain.stages) for chain in back.allocation.chains] == [6] and back.predicted_pause_s == 20.0
    assert sum(len(each.workers) for each in back.transfers) == 1


@pytest.mark.parametrize(
    ("lost", "is_fatal"), [((35, 19), True), ((35, 51), True), ((35, 67), False), ((35, 20), False)]
)  # fmt: skip
def test_two_losses_side_by_side_are_fatal_to_bamboo(lost: tuple[int, ...], is_fatal: bool):
    cluster, before = job(96, 6)
    plan = after("bamboo", "lost", tuple(sorted(lost)), cluster, before)
    assert plan.from_checkpoint is is_fatal
    later = after("bamboo", "lost", (35,), cluster, before)
    second = policy("bamboo")(
        cluster.without(lost), COSTS, later.allocation, ClusterEvent(kind="lost", workers=(lost[1],))
    )
    assert second.from_checkpoint is is_fatal  # worker 19 runs two stages by then, and holds no copy of a third


def test_bamboo_reconfigures_before_a_further_loss_is_too_likely_to_be_fatal():
    cluster, before = job(24, 4)
    plan = after("bamboo", "lost", (7,), cluster, before)
    assert plan.reason.startswith("reconfigured to 5 pipelines of 4 workers, 3 wait")
    assert plan.predicted_pause_s == 20.0 and plan.lost_work_s == 0.5 * plan.predicted_step_s


def test_bamboos_redundant_forwards_take_time_where_bubbles_do_not_suffice():
    cluster, before = job(96, 2)
    busy_s = 8 * 6 * 0.03
    plan = after("bamboo", "slowed", (0,), cluster, before, speed=0.99)
    assert plan.predicted_step_s == pytest.approx(busy_s + 8 * 6 * 0.01)


# --------------------------------------------------------------------------------------------- Varuna and DynaTrain


def test_varuna_morphs_to_the_fastest_depth_from_the_last_checkpoint():
    cluster, before = job(13, 4, used=12)
    lost = after("varuna", "lost", (2,), cluster, before)
    assert lost.from_checkpoint and lost.predicted_pause_s == 300.0 and lost.allocation.num_microbatches == 52
    assert sum(stage.width for stage in lost.allocation.chains[0].stages) == 12  # the spare one is used
    told = after("varuna", "drained", (2,), cluster, before)
    assert not told.from_checkpoint and told.lost_work_s == 0.0 and told.predicted_pause_s == 301.0
    for plan in (after("varuna", "lost", (12,), cluster, before), after("varuna", "slowed", (2,), cluster, before)):
        assert plan.predicted_pause_s == 0.0 and plan.allocation is before


def test_dynatrain_switches_while_every_layer_has_a_holder():
    cluster, before = job(12, 4)
    plan = after("dynatrain", "lost", (2,), cluster, before)
    assert not plan.from_checkpoint and plan.predicted_pause_s == 2.0
    assert sum(stage.width for stage in plan.allocation.chains[0].stages) == 11
    gone = after("dynatrain", "lost", (3, 4, 5), cluster, before)
    assert gone.from_checkpoint and "a stage has lost all of its workers" in gone.reason


def test_dynatrains_larger_models_take_longer():
    large = Costs(layers=tuple(replace_bytes(layer, 235e9 * 2 / 12) for layer in COSTS.layers))
    cluster, before = job(12, 4)
    cluster = replace(cluster, memory_bytes=np.full(12, 1e13))
    plan = policy("dynatrain")(cluster.without([2]), large, before, ClusterEvent(kind="lost", workers=(2,)))
    assert plan.predicted_pause_s == 4.36


def replace_bytes(layer: LayerCosts, parameter_bytes: float) -> LayerCosts:
    values = {name: getattr(layer, name) for name in LayerCosts.__struct_fields__}
    return LayerCosts(**(values | {"parameter_bytes": parameter_bytes}))


# ------------------------------------------------------------------------------------------- FT-HSDP and TrainMover


def test_ft_hsdp_loses_whole_replicas_and_stalls():
    cluster, before = job(12, 4)
    plan = after("ft_hsdp", "lost", (2,), cluster, before)
    assert plan.predicted_pause_s == 180.0 and plan.allocation.num_microbatches == 32
    assert after("ft_hsdp:plan_batch_kept", "lost", (2,), cluster, before).allocation.num_microbatches == 48
    assert after("ft_hsdp", "joined", (2,), cluster, plan.allocation).predicted_pause_s == 0.0


def test_trainmovers_standby_takes_the_place_of_any_worker():
    cluster, before = job(13, 4, used=12)
    plan = after("trainmover", "lost", (4,), cluster, before)
    assert [stage.workers.tolist() for stage in plan.allocation.chains[0].stages] == [
        [0, 1, 2], [3, 5, 12], [6, 7, 8], [9, 10, 11]
    ]  # fmt: skip
    assert plan.predicted_pause_s == 21.1 and [each.workers for each in plan.transfers] == [(12,)]
    assert plan.predicted_step_s == after("trainmover", "drained", (4,), cluster, before).predicted_step_s
    assert after("trainmover", "drained", (4,), cluster, before).predicted_pause_s == 16.6
    slowed = replace(cluster, speed=np.where(cluster.ids == 4, 0.5, 1.0))
    out = policy("trainmover")(slowed, COSTS, before, ClusterEvent(kind="slowed", workers=(4,), speed=0.5))
    assert 4 not in out.allocation.workers and 12 in out.allocation.workers and out.predicted_pause_s == 16.6


def test_without_a_standby_a_pipeline_stops_and_its_workers_are_standbys():
    cluster, before = job(12, 4)
    plan = after("trainmover", "lost", (4,), cluster, before)
    assert [stage.width for stage in plan.allocation.chains[0].stages] == [2] * 4
    assert plan.predicted_pause_s == 21.1 and plan.allocation.num_microbatches == before.num_microbatches
    left = cluster.without([4])
    second = policy("trainmover")(
        left.without([0]), COSTS, plan.allocation, ClusterEvent(kind="lost", workers=(0,))
    )  # fmt: skip
    assert [stage.width for stage in second.allocation.chains[0].stages] == [2] * 4
    assert second.reason == "1 standbys take over"
    all_of_a_stage = after("trainmover", "lost", (3, 4, 5), cluster, before)
    assert all_of_a_stage.from_checkpoint


# ------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("bamboo", "stages"),
        ("varuna", "nothing"),
        ("ft_hsdp", "groups"),
        ("ft_hsdp:plan_batch_kept", "groups"),
        ("dynatrain", "stages"),
        ("trainmover", "stages"),
        ("my_policy", "stages"),  # which says nothing
    ],
)
def test_what_they_hold_more_than_once(name: str, unit: str):
    assert policy_metadata_of(policy(name)).replication.unit == unit


def test_a_simulated_job_goes_back_by_what_its_policy_declares():
    """Every stage keeps a worker, which is enough for TrainMover and DynaTrain; Varuna has its checkpoint only, and of
    FT-HSDP's replicas none is whole after the second event."""
    lost = ClusterChange(at_s=900.0, event=ClusterEvent(kind="lost", workers=(0, 1)))
    rollbacks = {name: lived(name, (lost,), 1000.0, 12, 4).num_rollbacks for name in ("trainmover", "varuna")}
    assert rollbacks == {"trainmover": 0, "varuna": 1}
    every_group = ClusterChange(at_s=900.0, event=ClusterEvent(kind="lost", workers=(0, 4, 8)))
    rollbacks = {name: lived(name, (every_group,), 1000.0, 12, 4).num_rollbacks for name in ("dynatrain", "ft_hsdp")}
    assert rollbacks == {"dynatrain": 0, "ft_hsdp": 1}


# ------------------------------------------------------------------------------------------------- published figures


def lived(name: str, changes: tuple[ClusterChange, ...], duration_s: float, number: int, stages: int) -> Any:
    scenario = Scenario(
        source="made", duration_s=duration_s, initial=tuple(range(number)), nodes=(0,) * number, changes=changes
    )
    return simulate(
        scenario, cluster_of(number), COSTS, name, policy(name), num_stages=stages, num_microbatches=4 * number,
        pauses=RecoveryTimes(checkpoint_stall_s=0.0),
    )  # fmt: skip


def test_ft_hsdps_share_of_effective_training_time_is_within_5_points():
    """arXiv 2602.00277, abstract: 44 % with stalls of 10 minutes, 80 % with 3. The first gives the time between
    failures, 10 / 0.56 minutes; the stall of 3 minutes is the plug-in's parameter; the 80 % follow."""
    between_s = 600.0 / (1 - 0.44)
    changes = tuple(
        change
        for number in range(10)
        for change in (
            ClusterChange(at_s=number * between_s, event=ClusterEvent(kind="lost", workers=(2 * number,))),
            ClusterChange(
                at_s=number * between_s + 600.0,
                event=ClusterEvent(kind="joined", workers=(2 * number,)),
                nodes=(0,),
            ),
        )
    )
    outcome = lived("ft_hsdp", changes, 10 * between_s, 64, 2)
    stalled = outcome.pauses_s["lost"] / outcome.duration_s
    assert 1 - stalled == pytest.approx(0.832, abs=1e-3)
    assert outcome.goodput == pytest.approx(0.80, abs=0.05)


def test_trainmovers_efficiency_with_a_rebalancing_every_10_minutes_is_within_a_point():
    """The authors' article of 5 May 2026, part 6: 97 % of effective training time."""
    changes = tuple(
        ClusterChange(
            at_s=600.0 * number + at_s, event=ClusterEvent(kind=kind, workers=(11 + number % 2,)), nodes=nodes
        )
        for number in range(12)
        for kind, at_s, nodes in (("drained", 0.0, ()), ("joined", 60.0, (0,)))
    )
    outcome = lived("trainmover", changes, 600.0 * 12, 13, 4)
    assert outcome.num_pauses["drained"] == 12
    assert outcome.goodput == pytest.approx(0.97, abs=0.01)
