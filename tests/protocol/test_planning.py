"""A recovery that takes its time to be planned: what may happen meanwhile, and which answers count."""

import msgspec
import pytest
from tests.protocol.machines import (
    FIVE,
    THREE,
    answer,
    coordinator,
    failure,
    registered,
    report,
    shown,
    started,
    suspicion,
    vote,
)

from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.planning.search.recovery import survivor_layout
from elaswave.protocol.coordinator.decisions import as_decided, make_decision, plan_survivors, plan_with
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import (
    CheckpointFound,
    Decided,
    EvidenceSeen,
    PendingWork,
    Persist,
    PlanRecovery,
    RecoveryPlanned,
)
from elaswave.protocol.messages import BlockReplicas
from elaswave.types import ExecutionParameters
from verify.simulator.job import model_of, other_layout


def question_of(effects) -> PlanRecovery:
    (question,) = [effect for effect in effects if isinstance(effect, PlanRecovery)]
    return question


def decision_of(effects):
    (decision,) = [effect.decision for effect in effects if isinstance(effect, Decided)]
    return decision


def asked(machine: Coordinator | None = None, generation: int = 2, **options) -> tuple[Coordinator, PlanRecovery]:
    """A machine that has lost worker 1 of five and waits for its planner."""
    machine = machine or started(FIVE, Coordinator)
    effects = machine.handle(suspicion(1), 0.0)
    for worker in machine.members:
        effects = machine.handle(report(worker, generation, job=FIVE, **options), 0.0)
    assert machine.state is CoordinatorState.PLANNING
    return machine, question_of(effects)


def test_the_question_says_all_that_a_plan_needs():
    machine, question = asked(evidence=vote(3), step=4)
    model = model_of(FIVE)
    assert question[:4] == (1, 2, (0, 2, 3, 4), (1,))
    assert (question.layout, question.execution, question.change) == (model.layout, ExecutionParameters(), 0)
    assert (question.base, question.evidence, question.rollback) == (3, vote(3), False)
    for worker in question.members:
        held = {block.id for block in model.blocks if worker in model.placement.holders(block.id)}
        assert question.valid[worker] == held
    assert question.placement.owner == model.placement.owner
    assert all(1 not in followers for followers in question.placement.followers), "only what members have reported"
    assert shown(machine.handle(answer(question), 0.0))[-1] == "decided 2"


def test_nothing_is_persisted_or_sent_before_the_answer():
    machine = started(FIVE, Coordinator)
    machine.handle(suspicion(1), 0.0)
    effects = []
    for worker in machine.members:
        effects += machine.handle(report(worker, 2, job=FIVE), 0.0)
    assert shown(effects) == ["plan 1 of generation 2: [0, 2, 3, 4] after step 0"]
    assert shown(machine.handle(answer(effects[0]), 0.0)) == [
        "persist decision 2 of term 1: [0, 2, 3, 4] resume 1.2",
        *(f"to {worker}: decision 2 of term 1: [0, 2, 3, 4] resume 1.2" for worker in (0, 2, 3, 4)),
        "decided 2",
    ]


def test_another_loss_makes_the_question_void():
    machine, first = asked()
    effects = machine.handle(suspicion(3), 0.0)
    assert shown(effects)[0] == "persist new generation 3" and machine.state is CoordinatorState.COLLECTING
    assert shown(machine.handle(answer(first), 0.0)) == ["note: answer 1 of the planner is not awaited any more"]
    for worker in machine.members:
        effects = machine.handle(report(worker, 3, job=FIVE), 0.0)
    second = question_of(effects)
    assert (second.sequence, second.members, second.lost) == (2, (0, 2, 4), (1, 3))
    assert shown(machine.handle(answer(first), 0.0)) == ["note: answer 1 of the planner is not awaited any more"]
    assert machine.state is CoordinatorState.PLANNING
    assert decision_of(machine.handle(answer(second), 0.0)).members == (0, 2, 4)


def test_a_newer_vote_makes_the_question_void():
    machine, first = asked(step=1, prepared=True)
    assert first.base == 0
    second = question_of(machine.handle(EvidenceSeen(vote(1), 1), 0.0))
    assert (second.sequence, second.base, second.evidence) == (2, 1, vote(1))
    assert machine.handle(EvidenceSeen(vote(1), 1), 0.0) == [], "nothing new"
    assert shown(machine.handle(answer(first), 0.0)) == ["note: answer 1 of the planner is not awaited any more"]
    decision = decision_of(machine.handle(answer(second), 0.0))
    assert (decision.resume_step, decision.resume_attempt, decision.evidence) == (2, 1, vote(1))


def test_an_older_vote_changes_nothing():
    machine, question = asked(evidence=vote(2), step=3)
    assert machine.handle(EvidenceSeen(vote(1), 1), 0.0) == []
    assert decision_of(machine.handle(answer(question), 0.0)).evidence == vote(2)


def test_a_second_answer_has_no_effect():
    machine, question = asked()
    machine.handle(answer(question), 0.0)
    assert shown(machine.handle(answer(question), 0.0)) == ["note: answer 1 of the planner is not awaited any more"]
    fresh = started(FIVE, Coordinator)
    assert shown(fresh.handle(answer(question), 0.0)) == ["note: answer 1 of the planner is not awaited any more"]


def test_a_planner_without_an_answer_is_replaced_by_the_survivors_layout():
    machine, question = asked()
    effects = machine.handle(failure(question), 0.0)
    decision = decision_of(effects)
    assert decision.layout == survivor_layout(model_of(FIVE).layout, [1])
    assert decision.placement == answer(question).plan.placement
    assert decision.plan == "the planner has failed: survivors keep their stages"
    assert isinstance(effects[0], Persist)


def test_a_planners_layout_and_parameters_count():
    machine, question = asked()
    layout = other_layout(survivor_layout(question.layout, question.lost))
    execution = ExecutionParameters(schedule="gpipe")
    plan = plan_with(
        question,
        layout,
        model_of(FIVE).blocks,
        scatter_width=EVERYBODY,
        execution=execution,
        reason="balanced",
        predicted_step_s=0.25,
    )
    pending = PendingWork(evaluate=True, checkpoint=True, published=7)
    effects = machine.handle(RecoveryPlanned(question.sequence, plan, pending), 0.0)
    decision = decision_of(effects)
    assert (decision.layout, decision.execution, decision.plan) == (layout, execution, "balanced")
    assert (decision.evaluate, decision.checkpoint, decision.published) == (True, True, 7)
    assert effects[-1].predicted_step_s == 0.25


def test_a_plan_for_other_workers_is_refused_where_it_is_made_and_where_it_is_taken():
    machine, question = asked()
    with pytest.raises(ValueError, match=r"the layout is of workers \(0, 1, 2, 3, 4\), but the members are \(0, 2, 3"):
        plan_with(question, model_of(FIVE).layout, model_of(FIVE).blocks, scatter_width=EVERYBODY)
    whole = plan_survivors(
        question._replace(lost=(), members=(0, 1, 2, 3, 4)), model_of(FIVE).blocks, scatter_width=EVERYBODY
    )
    with pytest.raises(AssertionError, match=r"a plan for workers \(0, 1, 2, 3, 4\), but the members are \(0, 2, 3"):
        make_decision(question, whole, PendingWork(False, False), [], term=1, lost=(1,), reason="")


def test_a_new_coordinator_asks_the_members_and_the_planner_again():
    machine = started(FIVE, Coordinator)
    records = [effect.record for effect in machine.handle(suspicion(1), 0.0) if isinstance(effect, Persist)]
    reports = [report(worker, 2, job=FIVE) for worker in machine.members]
    for each in reports:
        machine.handle(each, 0.0)
    assert machine.state is CoordinatorState.PLANNING
    successor = coordinator(records, FIVE, Coordinator)
    assert successor.state is CoordinatorState.COLLECTING
    successor.begin()
    effects = []
    for each in reports:
        effects = successor.handle(registered(each.worker, 2, each), 0.0)
    assert question_of(effects).sequence == 1
    assert decision_of(successor.handle(answer(question_of(effects)), 0.0)).members == (0, 2, 3, 4)


def test_a_member_that_connects_again_waits_for_the_decision():
    machine, question = asked()
    assert shown(machine.handle(registered(0, 2, report(0, 2, job=FIVE)), 0.0)) == ["start [0, 1, 2, 3, 4]"]
    assert shown(machine.handle(report(0, 2, job=FIVE), 0.0)) == [
        "note: a report of worker 0 for generation 2 is not awaited"
    ]
    assert decision_of(machine.handle(answer(question), 0.0)).members == question.members


def test_a_return_to_a_checkpoint_is_planned_too():
    machine = started(FIVE, Coordinator)
    machine.suspect([suspicion(1), suspicion(2)], 0.0)
    for worker in (0, 3, 4):
        machine.handle(report(worker, 2, job=FIVE, evidence=vote(5), step=6), 0.0)
    question = question_of(machine.handle(CheckpointFound(1, 4), 0.0))
    assert (question.base, question.rollback, question.evidence) == (4, True, None)
    assert machine.handle(EvidenceSeen(vote(6), 1), 0.0) == [], "nothing newer can count any more"
    for reply in (answer(question), failure(question)):
        decision = make_decision(
            question,
            reply.plan
            if isinstance(reply, RecoveryPlanned)
            else plan_survivors(question, model_of(FIVE).blocks, scatter_width=EVERYBODY),
            PendingWork(evaluate=True, checkpoint=True, published=9),
            [],
            term=1,
            lost=(1, 2),
            reason="lost",
        )
        assert (decision.rollback, decision.resume_step, decision.published) == (4, 5, 4)
        assert not decision.evaluate and not decision.checkpoint and not decision.deliver
        assert all(decision.placement.followers), "placed afresh"
    assert decision_of(machine.handle(answer(question), 0.0)).rollback == 4


def test_a_loss_while_a_return_to_a_checkpoint_is_planned():
    machine = started(FIVE, Coordinator)
    machine.suspect([suspicion(1), suspicion(2)], 0.0)
    for worker in (0, 3, 4):
        machine.handle(report(worker, 2, job=FIVE, evidence=vote(5), step=6), 0.0)
    machine.handle(CheckpointFound(1, 4), 0.0)
    machine.handle(suspicion(4), 0.0)
    for worker in (0, 3):
        effects = machine.handle(report(worker, 3, job=FIVE, evidence=vote(5), step=6), 0.0)
    assert shown(effects) == ["find a checkpoint"], "what was found for another generation does not count"
    assert question_of(machine.handle(CheckpointFound(3, 3), 0.0)).base == 3


def test_a_question_after_an_abandoned_return_is_about_the_newest_vote():
    """Both copies of a block seemed lost with workers 1 and 2; then worker 4 is lost, and reports are as before."""
    machine = started(FIVE, Coordinator)
    machine.suspect([suspicion(1), suspicion(2)], 0.0)
    for worker in (0, 3, 4):
        machine.handle(report(worker, 2, job=FIVE, evidence=vote(5), step=6), 0.0)
    machine.handle(CheckpointFound(1, 4), 0.0)
    machine.handle(suspicion(4), 0.0)
    whole = [report(worker, 3, job=FIVE, evidence=vote(5), step=6) for worker in (0, 3)]
    blocks = list(range(len(model_of(FIVE).blocks)))
    copies = BlockReplicas(blocks=blocks, owned=[False] * len(blocks), versions=[5] * len(blocks))
    machine.handle(msgspec.structs.replace(whole[0], copies=copies), 0.0)
    question = question_of(machine.handle(whole[1], 0.0))
    assert (question.base, question.rollback) == (5, False)


def test_three_workers_of_which_two_are_lost_one_after_the_other():
    machine = started(THREE, Coordinator)
    machine.handle(suspicion(1), 0.0)
    machine.handle(report(0, 2), 0.0)
    first = question_of(machine.handle(report(2, 2), 0.0))
    machine.handle(suspicion(0), 0.0)
    assert shown(machine.handle(answer(first), 0.0)) == ["note: answer 1 of the planner is not awaited any more"]


def test_of_a_member_that_missed_the_decision_only_what_that_decision_counts_on_counts():
    machine, question = asked()
    decision = decision_of(machine.handle(answer(question), 0.0))
    everything = list(range(len(model_of(FIVE).blocks)))
    claims = msgspec.structs.replace(
        report(0, 3, job=FIVE),
        copies=BlockReplicas(blocks=everything, owned=[False] * len(everything), versions=[0] * len(everything)),
    )
    held = [block for block in everything if 0 in decision.placement.holders(block)]
    assert 0 < len(held) < len(everything)
    missed = as_decided(msgspec.structs.replace(claims, decided=decision.generation - 1), decision)
    assert missed.copies.blocks == held
    assert len(missed.copies.owned) == len(missed.copies.versions) == len(held)
    assert missed.parameters_step == claims.parameters_step, "this decision sends it none"
    sends = msgspec.structs.replace(decision, deliver=((0, 0), (2, 1)))
    assert as_decided(msgspec.structs.replace(claims, decided=0), sends).parameters_step == -1
    for taken, newest in ((decision.generation, sends), (0, None)):
        found = msgspec.structs.replace(claims, decided=taken)
        assert as_decided(found, newest) is found
