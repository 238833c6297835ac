"""How planners are asked: losses become events, plans become layouts of exactly the members."""

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from elaswave.blocks.placement import place_blocks
from elaswave.config.cluster import device_of, emulated_costs, estimated_costs
from elaswave.config.load import build_config
from elaswave.coordinator.planning import replanning
from elaswave.coordinator.planning.replanning import Replanner
from elaswave.engine.blueprint import Blueprint
from elaswave.errors import ConfigError, InvalidProgramError
from elaswave.planning.costs.schedules import bounds_within, in_flight_bounds
from elaswave.planning.programs.execution import programs_of
from elaswave.planning.programs.layout import JobModel, validate_layout, with_idle, without_idle
from elaswave.planning.programs.prediction import estimate
from elaswave.planning.programs.routes import allocation_of, make_routes
from elaswave.planning.programs.validation import validate_programs
from elaswave.planning.search.recovery import survivor_layout
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import Record
from elaswave.protocol.messages import Decision, InForce
from elaswave.types import ExecutionParameters, Hop, Layout, Stage, struct_hash


def with_memory(job: JobModel, memory_bytes: np.ndarray) -> JobModel:
    return job._replace(cluster=replace(job.cluster, memory_bytes=memory_bytes))


def config(policy: str = "elaswave", name: str = "a100", **device: Any):
    return build_config(
        {
            "model": {"num_layers": 12, "hidden_size": 16, "num_heads": 2, "context_length": 8},
            "batch": {"num_microbatches": 12, "microbatch_size": 1},
            "layout": {"widths": [3, 3]},
            "elastic": {"policy": policy},
            "device": {"kind": "emulated", "model": "gpt2-small", "name": name, **device},
        }
    )


def start(given):
    blueprint = Blueprint(given)
    return blueprint.layout, blueprint.execution, emulated_costs(given)


def busy(layout):
    return {hop.worker for route in layout.routes for hop in route}


@pytest.mark.parametrize(
    "policy", ["recycle_rerouting", "recycle_normalized", "torchft", "torchft_batch_kept", "oobleck_aligned"]
)
def test_a_baselines_layout_has_all_members(policy):
    given = config(policy)
    layout, execution, costs = start(given)
    found = Replanner(given).baseline(layout, execution, [1], costs)
    validate_layout(found.layout)
    assert found.layout.workers == (0, 2, 3, 4, 5)
    assert found.layout.num_microbatches == (8 if policy == "torchft" else 12)
    assert found.predicted_step_s > 0 and policy in found.reason
    again = Replanner(given).baseline(found.layout, found.execution, [5], costs)
    validate_layout(again.layout)
    assert again.layout.workers == (0, 2, 3, 4)


def test_a_torchft_group_that_has_lost_a_worker_stays_out():
    given = config("torchft_batch_kept")
    layout, execution, costs = start(given)
    replanner = Replanner(given)
    first = replanner.baseline(layout, execution, [1], costs)
    assert len(busy(first.layout)) == 4
    (idle,) = set(first.layout.workers) - busy(first.layout)
    # The idle one dies: those that compute go on as before.
    second = replanner.baseline(first.layout, first.execution, [idle], costs)
    assert busy(second.layout) == busy(first.layout)


def test_a_policy_without_a_plan_falls_back_and_says_so():
    given = config("torchft")
    layout, execution, costs = start(given)
    found = Replanner(given).baseline(layout, execution, [0, 1, 5], costs)
    assert found.layout == survivor_layout(layout, [0, 1, 5])
    assert found.reason.startswith("torchft has no plan (") and "survivors keep their stages" in found.reason
    assert found.execution == execution


def test_a_baseline_that_fails_does_not_end_the_job(monkeypatch, caplog):
    def fail(*arguments):
        raise KeyError("an unknown worker")

    monkeypatch.setattr(replanning, "make_policies", lambda times, others: {"recycle_rerouting": fail})
    given = config("recycle_rerouting")
    layout, execution, costs = start(given)
    found = Replanner(given).baseline(layout, execution, [1], costs)
    assert found.layout == survivor_layout(layout, [1])
    assert "an unknown worker" in found.reason
    assert "Traceback" in caplog.text


def test_only_a_full_restart_restarts():
    assert Replanner(config("full_restart")).restarts
    assert Replanner(config("full_restart_spares")).restarts
    assert not Replanner(config("recycle_rerouting")).restarts


@pytest.mark.parametrize(("policy", "waits"), [("full_restart", False), ("full_restart_spares", True)])
def test_workers_that_join_stand_by_until_a_loss_only_where_a_policy_keeps_spares(policy, waits):
    given = config(policy)
    layout, execution, costs = start(given)
    joined = msgspec.structs.replace(layout, idle=(6, 7))
    replanner = Replanner(given)
    found = replanner.for_members(joined, execution, (), costs)
    assert (found.layout == joined) is waits and found.layout.workers == tuple(range(8))
    assert ("6, 7 stand by until a loss" in found.reason) is waits
    # Three pipelines of two stages as before, though two workers of one stage are lost.
    after = replanner.baseline(joined, execution, [0, 1], costs)
    validate_layout(after.layout)
    assert busy(after.layout) == {2, 3, 4, 5, 6, 7} and "3 pipelines of 2 stages" in after.reason
    # One that leaves is relieved, and spares stand by all the same.
    left = replanner.for_members(joined, execution, (2,), costs)
    assert set(left.layout.idle) >= {2, *((6, 7) if waits else ())} and "2 are to leave" in left.reason


def test_elaswave_finds_a_better_layout_than_the_interim_one():
    given = config()
    layout, execution, costs = start(given)
    present = survivor_layout(layout, [1])
    replanner = Replanner(given)
    predicted_s, found = replanner.improve(layout, present, execution, [1], costs)
    assert predicted_s == replanner.predict(present, execution, costs)
    assert found is not None and found.predicted_step_s < predicted_s
    assert found.layout.workers == present.workers and found.layout.num_microbatches == 12
    assert found.reason.startswith("elaswave: ")
    assert found.execution.layer_s and found.predicted_step_s == replanner.predict(found.layout, found.execution, costs)


def test_no_change_is_planned_that_brings_nothing():
    given = config()
    layout, execution, costs = start(given)
    replanner = Replanner(given)
    _, found = replanner.improve(layout, survivor_layout(layout, [1]), execution, [1], costs)
    assert found is not None
    # Where the better layout is in force already, no worker has to move.
    _, again = replanner.improve(layout, found.layout, found.execution, [1], costs)
    assert again is None


def test_without_a_loss_nothing_is_planned():
    given = config()
    layout, execution, costs = start(given)
    replanner = Replanner(given)
    assert replanner.improve(layout, layout, execution, [], costs) == (
        replanner.predict(layout, execution, costs),
        None,
    )


def test_frequencies_are_planned_only_where_they_can_be_set():
    for actuator, planned in (("none", False), ("emulated", True)):
        given = config(name="ascend-910b", frequency=actuator)
        layout, execution, costs = start(given)
        _, found = Replanner(given).improve(layout, survivor_layout(layout, [1]), execution, [1], costs)
        assert found is not None
        assert bool(found.execution.levels) is planned
        if planned:  # programs are compiled by the speeds that the levels bring
            assert set(found.execution.speeds) == set(found.execution.levels)


def test_an_emulated_run_begins_and_goes_on_within_its_memory():
    """What does not fit is refused; what fits with less in flight runs so, also as the survivors' interim layout."""
    with pytest.raises(ConfigError, match="llama-2-70b does not fit into 2 emulated h100: memory: worker 0 would hold"):
        emulated = {"kind": "emulated", "model": "llama-2-70b", "name": "h100"}
        _ = Blueprint(
            build_config(
                {
                    "device": emulated,
                    "layout": {"widths": [1, 1]},
                    "model": {"num_layers": 80, "hidden_size": 8, "num_heads": 1},
                }
            )
        ).execution
    given = config("elaswave")
    layout, execution, _ = start(given)
    replanner = Replanner(given)
    assert execution.in_flight == {} and replanner.within_memory(layout, execution) == execution
    after = survivor_layout(layout, [1])
    wanted = in_flight_bounds(after, given.layout.schedule)
    for share in np.linspace(1.0, 0.01, 200):
        replanner._job = with_memory(replanner._job, np.full(6, 4e9 * share))
        held = replanner.within_memory(after, execution)
        if held.in_flight:
            break
    assert all(1 <= bound < wanted[worker] for worker, bound in held.in_flight.items())
    assert replace_struct(held, in_flight={}) == execution
    replanner._job = with_memory(replanner._job, np.full(6, 1.0))
    assert set(replanner.within_memory(after, execution).in_flight.values()) == {1}


def test_a_coordinator_begins_with_the_execution_parameters_of_the_start_and_takes_over_the_newest():
    """What the first loss strikes is what runs: else its decision would forget durations and limits of memory."""
    given = config()
    blueprint = Blueprint(given)

    def coordinator(*records: Record) -> Coordinator:
        return Coordinator(
            InForce(blueprint.layout, blueprint.placement, blueprint.execution),
            blocks=blueprint.blocks,
            scatter_width=blueprint.scatter_width,
            records=records,
        )

    assert blueprint.execution.layer_s
    assert coordinator().in_force() == (blueprint.layout, blueprint.placement, blueprint.execution, 0)
    after = survivor_layout(blueprint.layout, [1])
    decision = Decision(
        term=1,
        generation=2,
        members=after.workers,
        lost=(1,),
        evidence=None,
        resume_step=1,
        resume_attempt=1,
        layout=after,
        placement=place_blocks(after.with_followers(1), blueprint.blocks, scatter_width=blueprint.scatter_width),
        deliver=(),
        rollback=None,
        evaluate=False,
        checkpoint=False,
        published=0,
        promoted=0,
        reason="worker 1 has ended",
        execution=replace_struct(blueprint.execution, in_flight={0: 1}),
    )
    assert coordinator(decision).in_force().execution.in_flight == {0: 1}


def test_a_measured_straggler_is_given_less():
    given = build_config({"batch": {"num_microbatches": 24}, "layout": {"widths": [4, 4]}})
    layout, costs = Blueprint(given).layout, estimated_costs(given)
    replanner = Replanner(given)
    assert replanner.at({}) is replanner
    known = replanner.at({6: 0.5})
    assert known.predict(layout, ExecutionParameters(), costs) > 1.3 * replanner.predict(
        layout, ExecutionParameters(), costs
    )
    present = survivor_layout(layout, [1])
    now_s, found = known.improve(layout, present, ExecutionParameters(), [1], costs)
    assert found is not None and found.predicted_step_s < now_s
    done: Counter[int] = Counter()
    for hop in (hop for route in found.layout.routes for hop in route):
        done[hop.worker] += round(1e9 * costs.between("busy_s", hop.start, hop.stop))
    assert done[6] < 0.7 * min(done[worker] for worker in present.workers if worker != 6)
    assert replanner.predict(layout, ExecutionParameters(), costs) < now_s  # it knows nothing of it


def done_by(layout, costs):
    """Seconds of each worker in a step, at speed 1; 0 for those without work."""
    done = dict.fromkeys(layout.workers, 0.0)
    for hop in (hop for route in layout.routes for hop in route):
        done[hop.worker] += costs.between("busy_s", hop.start, hop.stop)
    return done


@pytest.mark.parametrize("speed", [0.7, 0.5, 0.3, 0.01])
def test_who_becomes_slow_gets_as_much_less_to_do(speed):
    given = config()
    layout, execution, costs = start(given)
    now_s, found = Replanner(given).at({1: speed}).rebalance(layout, execution, [1], costs)
    assert found is not None and found.layout.workers == layout.workers
    validate_layout(found.layout)
    assert now_s > found.predicted_step_s
    assert found.reason.startswith("elaswave: ")
    done = done_by(found.layout, costs)
    most = max(done.values())
    assert done[1] < (speed + 0.15) * most
    assert 1 in busy(found.layout) or speed < 0.1  # then it may cost more than it gives
    assert sum(done.values()) == pytest.approx(12 * costs.between("busy_s", 0, costs.num_layers))


def test_who_is_fast_again_gets_as_much_as_the_others():
    given = config()
    layout, execution, costs = start(given)
    _, slow = Replanner(given).at({1: 0.3}).rebalance(layout, execution, [1], costs)
    assert slow is not None
    now_s, found = Replanner(given).rebalance(slow.layout, slow.execution, [1], costs)
    assert found is not None and found.predicted_step_s < now_s
    done = done_by(found.layout, costs)
    assert done[1] > 0.8 * max(done.values())


def test_no_layout_changes_for_a_speed_that_does_not_matter():
    given = config()
    layout, execution, costs = start(given)
    _, found = Replanner(given).at({1: 0.5}).rebalance(layout, execution, [1], costs)
    assert found is not None
    for speed in (0.5, 0.49):
        _, again = Replanner(given).at({1: speed}).rebalance(found.layout, found.execution, [1], costs)
        assert again is None


def test_beside_a_slow_worker_clocks_differ():
    """Whoever then has most to do gets the highest one, and the others draw what the power limit leaves."""
    given = config(name="ascend-910b", frequency="emulated")
    layout, execution, costs = start(given)
    now_s, found = Replanner(given).at({1: 0.8}).rebalance(layout, execution, [1], costs)
    assert found is not None and found.predicted_step_s < now_s
    levels = {worker: found.execution.levels.get(worker, device_of(given).base_level) for worker in layout.workers}
    done = done_by(found.layout, costs)
    assert max(levels.values()) > min(levels.values())
    highest = [worker for worker in levels if levels[worker] == max(levels.values())]
    assert max(done, key=lambda worker: done[worker]) in highest or 1 in highest


def under_quota(quota):
    device = {"frequency": "cgroup"} | ({} if quota is None else {"quota": quota})
    return build_config(
        {"batch": {"num_microbatches": 24}, "layout": {"widths": [3, 3]}, "model": {"num_layers": 6}, "device": device}
    )


@pytest.mark.parametrize("lost", [[1], [1, 4], [0, 1, 4]])
def test_the_cores_of_lost_workers_go_to_the_others(lost):
    """On a real device under quotas: together workers use no more than their shares at the beginning."""
    given = under_quota(0.25)
    layout, costs = Blueprint(given).layout, estimated_costs(given)
    present = survivor_layout(layout, lost)
    _, found = Replanner(given).improve(layout, present, ExecutionParameters(), lost, costs)
    _, unbounded = Replanner(under_quota(None)).improve(layout, present, ExecutionParameters(), lost, costs)
    assert found is not None and unbounded is not None and not unbounded.execution.levels
    assert set(found.execution.levels) <= set(present.workers)
    speeds = {worker: device_of(given).levels[level].speed for worker, level in found.execution.levels.items()}
    assert found.execution.speeds == speeds  # programs are compiled by what the quotas bring
    cores = sum(0.25 * speeds.get(worker, 1.0) for worker in present.workers)
    assert 0.25 * len(present.workers) < cores <= 6 * 0.25 + 1e-9
    assert found.predicted_step_s < 0.85 * unbounded.predicted_step_s


def test_no_quota_is_more_than_a_core():
    levels = device_of(under_quota(0.3)).levels
    assert levels[0].speed == 1.0 and levels[-1].speed * 0.3 == pytest.approx(1.0)
    assert [level.power_w / level.speed for level in levels] == pytest.approx([0.3] * len(levels))
    assert len(device_of(under_quota(1.0)).levels) == len(device_of(under_quota(None)).levels) == 1


def test_a_real_device_keeps_its_schedule():
    given = build_config({"batch": {"num_microbatches": 12}, "layout": {"widths": [3, 3]}})
    blueprint = Blueprint(given)
    layout = blueprint.layout
    _, found = Replanner(given).improve(
        layout, survivor_layout(layout, [1]), blueprint.execution, [1], estimated_costs(given)
    )
    assert found is None or found.execution.schedule == "1f1b"


def test_programs_hold_no_more_in_flight_than_was_planned():
    given = config("recycle_rerouting")
    layout, execution, costs = start(given)
    replanner = Replanner(given)
    roomy = replanner.baseline(layout, execution, [1], costs)
    assert roomy.execution.in_flight == {}
    lowest = estimate(
        replanner._job.cluster.without([1]), costs, allocation_of(roomy.layout, "gpipe", {})
    ).memory_bytes.min()
    for share in np.linspace(0.3, 1.0, 50):
        replanner._job = with_memory(replanner._job, np.full(6, lowest * share))
        tight = replanner.baseline(layout, execution, [1], costs)
        if tight.reason.startswith("recycle_rerouting: "):
            break
    wanted = in_flight_bounds(tight.layout, tight.execution.schedule)
    bounds = bounds_within(tight.layout, tight.execution.schedule, tight.execution.in_flight)
    assert any(bounds[worker] < bound for worker, bound in wanted.items())
    programs = programs_of(tight.layout, tight.execution, given.layout.schedule)
    validate_programs(tight.layout, programs, max_in_flight=bounds)
    with pytest.raises(InvalidProgramError):
        unlimited = programs_of(tight.layout, replace_struct(tight.execution, in_flight={}), given.layout.schedule)
        validate_programs(tight.layout, unlimited, max_in_flight=bounds)
    assert tight.predicted_step_s > roomy.predicted_step_s
    # They stand in what every worker hashes, and an evaluation holds nothing.
    assert struct_hash(tight.execution) != struct_hash(replace_struct(tight.execution, in_flight={}))
    assert programs_of(tight.layout, tight.execution, given.layout.schedule, forward_only=True)


@pytest.mark.parametrize("policy", ["elaswave", "torchft_batch_kept"])
def test_only_elaswave_is_told_of_idle_workers(policy):
    given = config("torchft_batch_kept")
    layout, execution, costs = start(given)
    first = Replanner(given).baseline(layout, execution, [1], costs)
    (idle,) = set(first.layout.workers) - busy(first.layout)
    lost = min(busy(first.layout))
    asked = []
    replanner = Replanner(config(policy))
    planner = replanner._policies[policy]
    replanner._policies[policy] = lambda *given: (asked.append(given[2]), planner(*given))[1]
    replanner._ask_after_loss(policy, first.layout, first.execution, [lost], costs)
    assert (idle in asked[0].workers) == (policy == "elaswave")


def test_speeds_of_workers_count():
    slow = config(speeds=[1, 1, 1, 0.5, 1, 1])
    layout, execution, costs = start(slow)
    even = config()
    assert Replanner(slow).predict(layout, execution, costs) > Replanner(even).predict(*start(even))
    assert execution.speeds == {3: 0.5}


# ------------------------------------------------------------------------------------------------------- idle workers

TWO = Layout(
    stages=(Stage(start=0, stop=2, workers=(0, 1)), Stage(start=2, stop=4, workers=(2, 3))),
    routes=((Hop(0, 0, 0, 2), Hop(2, 1, 2, 4)),),
)


def test_idle_workers_join_the_nearest_stage():
    planned = Layout(
        stages=(Stage(start=0, stop=3, workers=(0,)), Stage(start=3, stop=4, workers=(2,))),
        routes=((Hop(0, 0, 0, 3), Hop(2, 1, 3, 4)),),
    )
    full = with_idle(planned, TWO)
    assert [stage.workers for stage in full.stages] == [(0, 1), (2, 3)]
    assert full.routes == planned.routes
    assert with_idle(full, TWO) is full
    joined = msgspec.structs.replace(TWO, idle=(7,))  # it holds nothing of any stage
    assert with_idle(planned, joined) == msgspec.structs.replace(full, idle=(7,))


def test_without_its_idle_workers_a_layout_is_what_computes():
    assert [stage.workers for stage in without_idle(TWO).stages] == [(0,), (2,)]
    alone = Layout(
        stages=(
            Stage(start=0, stop=4, workers=(0,)),
            Stage(start=0, stop=4, workers=(1,)),
            Stage(start=0, stop=4, workers=(2,)),
        ),
        routes=((Hop(2, 2, 0, 4),), (Hop(0, 0, 0, 4),)),
    )
    assert without_idle(alone).routes == ((Hop(2, 1, 0, 4),), (Hop(0, 0, 0, 4),))


def test_an_empty_tuning_means_as_configured():
    given = config()
    layout, _, costs = start(given)
    assert Replanner(given).predict(layout, ExecutionParameters(), costs) > 0


def test_microbatches_keep_their_workers_only_where_that_is_no_slower():
    given = build_config(
        {
            "model": {"num_layers": 12, "hidden_size": 16, "num_heads": 2, "context_length": 8},
            "batch": {"num_microbatches": 16, "microbatch_size": 1},
            "layout": {"widths": [8, 8, 8, 8], "schedule": "zero-bubble"},
            "elastic": {"policy": "recycle_rerouting"},
            "device": {"kind": "emulated", "model": "gpt2-small", "name": "a100"},
        }
    )
    layout, execution, costs = start(given)
    replanner = Replanner(given)
    lost = [0, 1, 10, 19, 28]
    present = survivor_layout(layout, lost)
    found = replanner.baseline(layout, execution, lost, costs)
    allocation = allocation_of(found.layout, "zero-bubble", {})
    kept = make_routes(allocation, costs, replanner._job.cluster, previous=present)
    anew = make_routes(allocation, costs, replanner._job.cluster)
    seconds = [replanner.predict(each, found.execution, costs) for each in (kept, anew)]
    assert seconds[0] != seconds[1], "the case does not tell them apart"
    assert found.predicted_step_s == pytest.approx(min(seconds))
