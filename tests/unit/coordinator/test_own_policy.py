"""A training job whose planner is a person's own: when it is asked, what is checked, and what follows when it fails."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from elaswave.config.cluster import emulated_costs
from elaswave.config.load import build_config
from elaswave.config.schema import Config
from elaswave.coordinator.planning import replanning
from elaswave.coordinator.planning.measurements import Shift
from elaswave.coordinator.planning.replanning import Replanner
from elaswave.coordinator.planning.run_planner import RunPlanner
from elaswave.engine.blueprint import Blueprint
from elaswave.job.plan import RunPlan
from elaswave.planning.programs.layout import validate_layout
from elaswave.planning.search.recovery import set_idle, survivor_layout
from elaswave.protocol.events import PlanRecovery
from elaswave.protocol.messages import InForce
from elaswave.types import Layout

EXAMPLES = Path(__file__).parents[3] / "examples" / "policies"
FLAT = """
import numpy as np
from elaswave.planning.policy.policy_parts import make_plan, rectangle

ASKED = []

def plan(cluster, costs, allocation, event):
    ASKED.append((event.kind, event.workers, event.speed, cluster.ids.tolist(), allocation.workers.tolist()))
    flat = rectangle(
        cluster, costs, num_stages=1, num_microbatches=allocation.num_microbatches, schedule=allocation.schedule
    )
    return make_plan("own", cluster, costs, flat, pause_s=1.0, lost_steps=0.0, reason="one stage of all")
"""
"""Every worker runs the whole model."""


@pytest.fixture
def config(tmp_path: Path):
    def make(body: str, **elastic: Any):
        (tmp_path / "own.py").write_text(body)
        return build_config(
            {
                "model": {"num_layers": 12, "hidden_size": 16, "num_heads": 2, "context_length": 8},
                "batch": {"num_microbatches": 12, "microbatch_size": 1},
                "layout": {"widths": [3, 3]},
                "elastic": {"policy": f"{tmp_path / 'own.py'}:plan"} | elastic,
                "device": {"kind": "emulated", "model": "gpt2-small", "name": "a100"},
            }
        )

    return make


def asked() -> list[Any]:
    found: list[Any] = sys.modules["elaswave_policy_own"].ASKED  # type: ignore[attr-defined]
    return found


def depth(layout: Layout) -> int:
    return max(len(route) for route in layout.routes)


def test_a_loss_installs_the_policys_layout(config):
    given = config(FLAT)
    blueprint = Blueprint(given)
    assert depth(blueprint.layout) == 2
    found = Replanner(given).baseline(blueprint.layout, blueprint.execution, [1], emulated_costs(given))
    validate_layout(found.layout)
    assert depth(found.layout) == 1 and found.layout.workers == (0, 2, 3, 4, 5)
    assert found.layout.num_microbatches == 12
    assert found.reason == f"{given.elastic.policy}: one stage of all"
    assert asked() == [("lost", (1,), 1.0, [0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])]


def test_it_is_asked_beside_the_coordinator_and_nothing_better_is_looked_for_afterwards(config):
    given = config(FLAT)
    run = RunPlanner(RunPlan(given, Blueprint(given).state))
    assert not run.is_quick(lost_question(given))
    plan = run.recovery(lost_question(given))()
    assert depth(plan.layout) == 1 and "one stage of all" in plan.reason


def lost_question(given: Config) -> PlanRecovery:
    """Worker 1 is lost, all others hold valid copies of everything."""
    plan = RunPlan(given, Blueprint(given).state)
    members = (0, 2, 3, 4, 5)
    return PlanRecovery(
        sequence=1,
        generation=2,
        members=members,
        lost=(1,),
        layout=plan.layout,
        execution=plan.execution,
        change=0,
        placement=plan.placement,
        valid={worker: frozenset(plan.blocks) for worker in members},
        base=3,
    )


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ("my_policy:plan", None),
        ("bamboo:plan", None),
        ("varuna:plan", None),
        ("dynatrain:plan", None),
        ("trainmover:plan", None),
        ("ft_hsdp:plan_batch_kept", None),
        ("ft_hsdp:plan", "it runs 8 micro-batches in a step, needed: all 12"),
    ],
)
def test_the_published_policies_run_here(config, policy, problem):
    file, _, function = policy.partition(":")
    given = config(FLAT, policy=f"{EXAMPLES / file}.py:{function}")
    blueprint, costs = Blueprint(given), emulated_costs(given)
    replanner = Replanner(given)
    found = replanner.baseline(blueprint.layout, blueprint.execution, [1], costs)
    validate_layout(found.layout)
    assert ("has no plan" in found.reason) is (problem is not None) and (problem or "") in found.reason
    again = replanner.baseline(found.layout, found.execution, [5], costs)
    assert again.layout.workers == (0, 2, 3, 4)


def test_a_worker_of_bamboos_runs_two_stages_here(config):
    given = config(FLAT, policy=f"{EXAMPLES / 'bamboo'}.py:plan")
    given = build_config(given.to_dict() | {"layout": {"widths": [12] * 4}, "batch": {"num_microbatches": 48}})
    blueprint = Blueprint(given)
    found = Replanner(given).baseline(blueprint.layout, blueprint.execution, [13], emulated_costs(given))
    assert found.reason == f"{given.elastic.policy}: 1 workers run two stages"
    assert sorted({len(route) for route in found.layout.routes}) == [3, 4]
    assert len(found.layout.stages) == 5


def test_joins_and_leaves_are_planned_by_it(config):
    given = config(FLAT)
    blueprint = Blueprint(given)
    replanner, costs = Replanner(given), emulated_costs(given)
    with_idle = set_idle(blueprint.layout, [5])
    joined = replanner.for_members(with_idle, blueprint.execution, (), costs)
    assert depth(joined.layout) == 1 and not joined.layout.idle
    assert asked()[-1][:2] == ("joined", (5,)) and asked()[-1][4] == [0, 1, 2, 3, 4]
    left = replanner.for_members(blueprint.layout, blueprint.execution, (2,), costs)
    assert depth(left.layout) == 1 and left.layout.idle == (2,)
    assert asked()[-1][:2] == ("drained", (2,)) and 2 not in asked()[-1][3]


def test_a_change_of_speed_is_planned_by_it_and_comes_into_force_if_it_is_faster(config):
    given = config(FLAT)
    plan = RunPlan(given, Blueprint(given).state)
    run = RunPlanner(plan)
    run.measurements.stragglers.plan_with({1: 0.5})
    run.measurements.shift = Shift((1,), "worker 1 computes at 0.50 of its speed, not 1.00")
    search = run.rebalance(1, InForce(plan.layout, plan.placement, plan.execution))
    assert search is not None
    present_s, change, _ = search()
    assert asked()[-1][:3] == ("slowed", (1,), 0.5)
    if change is not None:
        assert depth(change.layout) == 1 and change.predicted_step_s < present_s


@pytest.mark.parametrize("elastic", [{"rebalance": False}])
def test_without_rebalancing_it_is_asked_after_losses_only(config, elastic):
    given = config(FLAT, **elastic)
    blueprint = Blueprint(given)
    found = Replanner(given).for_members(blueprint.layout, blueprint.execution, (2,), emulated_costs(given))
    assert not asked() and found.reason == "workers 2 are to leave"


SMALLER = FLAT.replace("allocation.num_microbatches", "allocation.num_microbatches - 2")
UNORDERED = FLAT.replace("    return make_plan(", "    import dataclasses\n    return nested(") + (
    """

def nested(policy, cluster, costs, flat, pause_s, lost_steps, reason):
    from elaswave.planning.policy.policy_parts import chain_of
    from elaswave.planning.plan import Allocation, Plan
    ids, last = cluster.ids, costs.num_layers
    one = [np.array([2]), np.array([2]), np.array([2])]
    long = chain_of(cluster, ((0, 3), (3, 6), (6, last)), [ids[:1], ids[1:2], ids[2:3]], [np.array([6])] * 3)
    short = chain_of(cluster, ((0, 7), (7, last)), [ids[3:4], ids[4:5]], [np.array([6])] * 2)
    return Plan(policy=policy, allocation=Allocation(chains=(long, short), schedule="1f1b"), predicted_step_s=1.0,
                predicted_pause_s=0.0, reason=reason)
"""
)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def plan(*_): return 1 / 0", "raised ZeroDivisionError: division by zero ("),
        ("def plan(*_): return 3", "returned int, needed: elaswave.planning.plan.Plan"),
        ("def plan(*_):\n    while True: pass", "has not planned within 0.1 s; it is not asked again"),
        (SMALLER, "has planned what this job cannot run: it runs 10 micro-batches in a step, needed: all 12"),
        (UNORDERED, "has planned what this job cannot run: layers [3, 6) of one stage lie inside those of another"),
        (
            "from elaswave.errors import InfeasiblePlan\ndef plan(*_): raise InfeasiblePlan('two workers too few')",
            "has no plan (two workers too few)",
        ),
    ],
)
def test_without_a_plan_that_can_run_the_survivors_keep_their_stages(config, body, problem, monkeypatch):
    monkeypatch.setattr(replanning, "POLICY_TIMEOUT_S", 0.1)
    given = config(body)
    blueprint, costs = Blueprint(given), emulated_costs(given)
    replanner = Replanner(given)
    found = replanner.baseline(blueprint.layout, blueprint.execution, [1], costs)
    assert found.layout == survivor_layout(blueprint.layout, [1])
    assert found.reason.startswith(f"{given.elastic.policy} has no plan (") and problem in found.reason
    assert found.reason.endswith("): survivors keep their stages")
    if "micro-batches" not in problem:
        joined = replanner.for_members(set_idle(blueprint.layout, [5]), blueprint.execution, (), costs)
        assert joined.reason.startswith("workers 5 have joined; ") and not joined.layout.idle


def test_a_successor_that_cannot_load_it_goes_on(config):
    given = config(FLAT)
    os.unlink(given.elastic.policy.rpartition(":")[0])
    blueprint = Blueprint(given)
    found = Replanner(given).baseline(blueprint.layout, blueprint.execution, [1], emulated_costs(given))
    assert found.layout == survivor_layout(blueprint.layout, [1])
    assert "there is no file" in found.reason


def test_a_person_who_asks_for_a_better_layout_is_told_who_plans(config):
    given = config(FLAT)
    plan = RunPlan(given, Blueprint(given).state)
    answer = RunPlanner(plan).look(1, InForce(plan.layout, plan.placement, plan.execution, 0))
    assert answer == f"elastic.policy is {given.elastic.policy}, which plans after events only"
