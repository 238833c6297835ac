"""When the coordinator plans again because workers have become slower or faster, and what it says of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from elaswave.config.load import build_config
from elaswave.coordinator.planning.measurements import Shift
from elaswave.coordinator.planning.run_planner import LayoutSearches, RunPlanner
from elaswave.engine.blueprint import Blueprint
from elaswave.job.plan import RunPlan
from elaswave.planning.programs.layout import RunningLayout
from elaswave.planning.search.recovery import set_idle
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import PlanRecovery
from elaswave.protocol.messages import InForce, LayoutChange


def plan(**elastic: Any) -> RunPlan:
    config = build_config(
        {
            "model": {"num_layers": 12, "hidden_size": 16, "num_heads": 2, "context_length": 8},
            "batch": {"num_microbatches": 32, "microbatch_size": 1},
            "layout": {"widths": [2, 2]},
            "elastic": elastic,
            "device": {"kind": "emulated", "model": "gpt2-small", "name": "a100"},
        }
    )
    return RunPlan(config, Blueprint(config).state)


def in_force(given: RunPlan) -> InForce:
    return InForce(given.layout, given.placement, given.execution)


def shifted(run: RunPlanner, worker: int, speed: float) -> None:
    run.measurements.stragglers.plan_with({worker: speed})
    run.measurements.shift = Shift((worker,), f"worker {worker} computes at {speed:.2f} of its speed, not 1.00")


def test_costs_are_worked_out_only_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a millisecond, and it is asked with every report of times, and after every step."""
    given = plan()
    run = RunPlanner(given)
    shifted(run, 1, 0.5)
    decision: Any = SimpleNamespace(generation=2, layout=given.layout, execution=given.execution, lost=(3,))
    assert run.search(decision, given.layout, in_force(given)) is not None and run.measurements.shift is None
    monkeypatch.setattr(run.measurements, "costs", lambda: pytest.fail("nothing is to be planned"))
    assert run.search(decision, given.layout, in_force(given)) is None
    assert run.rebalance(1, in_force(given)) is None


def test_a_shift_is_planned_for_once_and_both_are_said():
    given = plan()
    run = RunPlanner(given)
    assert run.rebalance(1, in_force(given)) is None
    shifted(run, 1, 0.5)
    search = run.rebalance(1, in_force(given))
    assert search is not None and run.rebalance(1, in_force(given)) is None
    present_s, change, news = search()
    assert change is not None and change.generation == 1 and change.predicted_step_s < present_s
    assert change.reason.startswith("elaswave: ")
    assert change.reason.endswith("; worker 1 computes at 0.50 of its speed, not 1.00")
    assert news.startswith("worker 1 computes at 0.50 of its speed, not 1.00: the layout changes (")


@pytest.mark.parametrize(
    "elastic, leaving, drained",
    [
        ({}, (), 1),
        ({"rebalance": False}, (), None),
        ({"min_workers": 4}, (), None),
        ({"num_followers": 3}, (), None),
        ({"num_followers": 2}, (), 1),
        ({"num_followers": 2}, (3,), None),
        ({}, (1,), None),
        ({"policy": "recycle_rerouting"}, (), None),
    ],
)
def test_a_hopeless_worker_leaves_where_the_others_suffice(
    elastic: dict[str, Any], leaving: tuple[int, ...], drained: int | None
) -> None:
    given = plan(**elastic)
    run = RunPlanner(given)
    layout = given.layout
    spare = msgspec.structs.replace(
        layout,
        routes=tuple(
            tuple(msgspec.structs.replace(hop, worker=0) if hop.worker == 1 else hop for hop in route)
            for route in layout.routes
        ),
    )
    assert run.costs_more_than_it_gives(spare, leaving) is None
    stragglers, others = run.measurements.stragglers, dict.fromkeys((0, 2, 3), 1.0)
    while not stragglers.hopeless:
        if stragglers.speeds:
            stragglers.observe(others, (0, 1, 2, 3))
        else:
            stragglers.observe({**others, 1: 0.05}, (0, 1, 2, 3))
    assert run.costs_more_than_it_gives(spare, leaving) == drained
    assert run.costs_more_than_it_gives(layout, leaving) is None, "it has work"


def test_where_no_layout_is_better_that_is_said_and_a_successor_knows_the_speed():
    given = plan()
    run = RunPlanner(given)
    before, change, news = in_force(given), None, ""
    for number in range(1, 7):  # each layout is better than the one before
        shifted(run, 1, 0.5)
        search = run.rebalance(1, before)
        assert search is not None
        _, change, news = search()
        if change is None:
            break
        before = InForce(change.layout, change.placement, change.execution, number)
    assert change is None
    assert "no layout is better than the present one (" in news
    successor = RunPlanner(given)
    successor.take_over(before.execution)
    assert successor.measurements.speeds() == {1: pytest.approx(0.5)}


@pytest.mark.parametrize("elastic", [{"rebalance": False}, {"policy": "recycle_rerouting"}])
def test_a_run_that_does_not_rebalance_or_has_another_policy_stays_as_it_is(elastic):
    given = plan(**elastic)
    run = RunPlanner(given)
    shifted(run, 1, 0.5)
    assert run.rebalance(1, in_force(given)) is None


@pytest.mark.parametrize("elastic", [{}, {"rebalance": False}])
def test_an_idle_worker_that_is_to_leave_is_relieved_of_what_a_loss_has_left_with_it(elastic):
    given = plan(**elastic)
    run = RunPlanner(given)
    before = InForce(set_idle(given.layout, [1]), given.placement, given.execution, 0)
    assert before.placement.holds(1)
    search = run.for_members(1, before, {1})
    assert search is not None
    _, change, _ = search()
    assert change is not None and change.layout == before.layout and not change.placement.holds(1)
    assert run.for_members(1, before._replace(placement=change.placement), {1}) is None


@pytest.mark.parametrize("elastic", [{}, {"rebalance": False}, {"policy": "recycle_rerouting"}])
def test_idle_members_take_over_where_all_that_work_are_to_leave(elastic):
    given = plan(**elastic)
    run = RunPlanner(given)
    before = InForce(set_idle(given.layout, [1, 3]), given.placement, given.execution, 0)
    search = run.for_members(1, before, {0, 2})
    assert search is not None
    _, change, _ = search()
    assert change is not None and change.layout.active == (1, 3) and change.layout.idle == (0, 2)
    assert not change.placement.holds(0) and not change.placement.holds(2)
    search = run.for_members(1, before, {0, 2, 3})
    assert search is not None
    _, change, _ = search()
    assert change is not None and change.layout.active == (1,) and change.layout.idle == (0, 2, 3)
    assert run.for_members(1, before, {0, 1, 2, 3}) is None, "the job ends"


def searches(given: RunPlan, core: Any) -> tuple[LayoutSearches, list[Any], list[LayoutChange]]:
    """Searches whose work is begun by the test, with what is begun and what comes of it."""
    begun: list[Any] = []
    changes: list[LayoutChange] = []
    background: Any = SimpleNamespace(begin=begun.append)
    silent: Any = SimpleNamespace(say=lambda text: None, predicted=lambda seconds: None)
    made = LayoutSearches(
        RunPlanner(given), core, silent, silent, background, is_over=lambda: False, change=changes.append
    )
    return made, begun, changes


@pytest.mark.parametrize("is_under_way", [False, True])
def test_who_is_told_to_leave_while_a_layout_is_looked_for_leaves_with_the_others(is_under_way):
    given = plan()
    core: Any = SimpleNamespace(
        state=CoordinatorState.TRAINING,
        generation=1,
        in_force=lambda: in_force(given),
        is_changing=is_under_way,
        may_supersede=is_under_way,
        admissions=SimpleNamespace(leaving={1}, is_asked=False),
    )
    made, begun, changes = searches(given, core)
    made.plan_for_members()
    core.admissions.leaving.add(3)
    made.plan_for_members()
    assert len(begun) == 1, "one search at a time"
    asyncio.run(begun.pop())
    assert changes == [] and len(begun) == 1, "it is looked for anew, for both"
    asyncio.run(begun.pop())
    (change,) = changes
    assert change.layout.idle == (1, 3) and not begun


def test_a_change_under_way_that_relieves_all_is_left_alone():
    given = plan()
    core: Any = SimpleNamespace(
        state=CoordinatorState.TRAINING,
        is_changing=True,
        may_supersede=False,
        admissions=SimpleNamespace(leaving={1}, is_asked=False),
    )
    made, begun, _ = searches(given, core)
    made.plan_for_members()
    assert not begun


def test_others_that_are_asked_to_leave_during_a_search_do_not_disturb_it():
    given = plan()
    leaving = {1}
    search = RunPlanner(given).for_members(1, in_force(given), leaving)
    assert search is not None
    leaving.update(given.layout.workers)
    _, change, _ = search()
    assert change is not None and change.layout.idle == (1,)


def far_plan() -> RunPlan:
    config = build_config(
        {
            "model": {
                "num_layers": 12, "hidden_size": 64, "num_heads": 2, "context_length": 64,
                "fences": ["block.1:adatopk50", "block.8:adatopk50"],
            },
            "batch": {"num_microbatches": 8, "microbatch_size": 1},
            "layout": {"widths": [1, 2, 1], "layers": [3, 7, 4]},
            "device": {"kind": "emulated", "model": "gpt2-small", "name": "a100", "time_scale": 1.0},
            "sites": {
                "network": "examples/far_apart/four_regions_small.toml", "rate": 0.001,
                "of_workers": ["oregon", "virginia", "virginia", "tokyo"],
            },
        }
    )  # fmt: skip
    return RunPlan(config, Blueprint(config).state)


def test_a_decision_keeps_the_ratios_in_force_and_a_planned_change_brings_those_of_its_layout() -> None:
    """So a step that is tried again is coded as before, and other ratios come with a vote."""
    given = far_plan()
    run = RunPlanner(given)
    in_force = msgspec.structs.replace(given.execution, ratios={2: 33, 9: 44})
    blocks = {
        worker: frozenset(block.id for block in given.blocks if worker in given.placement.holders(block.id))
        for worker in (0, 2, 3)
    }
    question = PlanRecovery(1, 2, (0, 2, 3), (1,), given.layout, in_force, 0, given.placement, blocks, 4)
    assert run._survivors(question).execution.ratios == {2: 33, 9: 44}
    assert given.ratios_of(given.layout) == given.execution.ratios != {2: 33, 9: 44}
    replanned = RunningLayout(given.layout, in_force, 1.0, "because")
    before = InForce(given.layout, given.placement, in_force, 0)
    change = run.change(replanned, 2, before)
    assert change is not None and change.execution.ratios == given.execution.ratios
    assert run.change(replanned, 2, before._replace(execution=change.execution)) is None
