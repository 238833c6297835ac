"""Planned changes of the layout, event by event: when they count, when they are void, and what a loss makes of them."""

import msgspec
import pytest
from tests.protocol.machines import THREE, coordinator, registered, report, suspicion, vote

from elaswave.blocks.placement import place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.planning.search.recovery import set_idle, survivor_layout
from elaswave.protocol.coordinator.history import SUPERSEDE_MAX
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import (
    CheckpointFound,
    Decided,
    EvidenceSeen,
    LeaveWanted,
    Note,
    Persist,
    Send,
    StartRecord,
)
from elaswave.protocol.messages import Decision, LayoutChange, Prepare
from elaswave.protocol.step.ledger import Ledger, LedgerError
from elaswave.protocol.step.member import Hold, Ignored, Member, MemberState
from elaswave.types import ExecutionParameters
from elaswave.worker.links import FULL_MESH_WORKERS
from verify.simulator.job import Job, model_of, other_layout

LAYOUT = model_of(THREE).layout
OTHER = other_layout(LAYOUT)
"""Worker 1 has moved to the second stage."""
EXECUTION = ExecutionParameters(schedule="gpipe", levels={0: 1})
PLACEMENT = model_of(THREE).placement
TARGET = place_blocks(OTHER.with_followers(1), model_of(THREE).blocks, scatter_width=EVERYBODY)


def planned(generation=1, layout=OTHER):
    return LayoutChange(
        generation=generation,
        layout=layout,
        placement=TARGET,
        execution=EXECUTION,
        reason="faster",
        predicted_step_s=0.5,
    )


def training(records=()):
    """A coordinator whose three workers train."""
    core = coordinator(records)
    core.begin()
    for worker in range(3):
        core.handle(registered(worker), 0.0)
    assert core.state is CoordinatorState.TRAINING
    return core


def changed_vote(step, number):
    return msgspec.structs.replace(vote(step), change=number)


def messages_to(effects, worker):
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.worker == worker]


def decide(core, lost, reports):
    """Loses a worker; the others answer."""
    core.handle(suspicion(lost), 0.0)
    effects = []
    for each in reports:
        effects = core.handle(each, 0.0)
    return next(effect.decision for effect in effects if isinstance(effect, Decided))


def test_a_change_is_persisted_before_it_is_sent_to_every_member():
    core = training()
    first, *others = core.handle(planned(), 0.0)
    assert isinstance(first, Persist) and isinstance(first.record, LayoutChange)
    change = first.record
    assert (change.generation, change.number, change.layout, change.execution) == (1, 1, OTHER, EXECUTION)
    assert change.placement == TARGET
    assert others == [Send(worker, change) for worker in range(3)]


def test_there_is_one_change_at_a_time():
    core = training()
    core.handle(planned(), 0.0)
    assert core.is_changing
    (note,) = core.handle(planned(layout=LAYOUT), 0.0)
    assert isinstance(note, Note) and "a plan comes while change 1 is under way" in note.text
    core.handle(EvidenceSeen(changed_vote(2, 1), 1), 0.0)
    assert not core.is_changing
    second = core.handle(planned(layout=LAYOUT), 0.0)[0]
    assert isinstance(second, Persist) and second.record.number == 2


def without(*leaving):
    """A plan that relieves workers of all."""
    layout = set_idle(LAYOUT, leaving)
    placement = place_blocks(layout, model_of(THREE).blocks, scatter_width=EVERYBODY)
    return msgspec.structs.replace(planned(layout=layout), placement=placement)


def test_a_change_that_relieves_more_leaving_members_supersedes_the_one_under_way():
    core = training()
    core.handle(LeaveWanted(0), 0.0)
    assert not core.may_supersede, "no change is under way"
    core.handle(without(0), 0.0)
    assert core.unrelieved == frozenset() and not core.may_supersede
    core.handle(LeaveWanted(1), 0.0)
    assert core.unrelieved == {1} and core.may_supersede
    (note,) = core.handle(without(0), 0.0)
    assert "a plan comes while change 1 is under way" in note.text, "it relieves nobody more"
    (note,) = core.handle(without(1), 0.0)
    assert "a plan comes while change 1 is under way" in note.text, "it would burden worker 0 again"
    first, *sent = core.handle(without(0, 1), 0.0)
    assert isinstance(first, Persist) and first.record.number == 2
    assert [effect.message.number for effect in sent] == [2, 2, 2]
    assert not core.may_supersede and core.unrelieved == frozenset()
    # The first one may come into force all the same: with the vote that was under way.
    core.handle(EvidenceSeen(changed_vote(2, 1), 1), 0.0)
    assert core.in_force().layout.idle == (0,) and core.is_changing
    core.handle(EvidenceSeen(changed_vote(3, 2), 1), 0.0)
    assert core.in_force().layout.idle == (0, 1) and not core.is_changing


def test_a_change_for_another_reason_does_not_hold_up_who_is_to_leave():
    core = training()
    core.handle(planned(), 0.0)
    core.handle(LeaveWanted(0), 0.0)
    assert core.may_supersede
    assert isinstance(core.handle(without(0), 0.0)[0], Persist)


def test_a_successor_knows_both_changes():
    core = training()
    records = [StartRecord(term=1)]
    for event in (LeaveWanted(0), without(0), LeaveWanted(1), without(0, 1)):
        records += [effect.record for effect in core.handle(event, 0.0) if isinstance(effect, Persist)]
    successor = training(records)
    assert successor.is_changing and not successor.may_supersede
    successor.handle(EvidenceSeen(changed_vote(2, 1), 1), 0.0)
    assert successor.in_force().layout.idle == (0,) and successor.is_changing


def test_in_a_job_without_links_between_all_no_change_is_superseded(monkeypatch):
    monkeypatch.setattr("elaswave.protocol.coordinator.history.SUPERSEDE_MAX", 2)
    core = training()
    core.handle(planned(), 0.0)
    core.handle(LeaveWanted(0), 0.0)
    assert core.unrelieved == {0} and not core.may_supersede
    assert isinstance(core.handle(without(0), 0.0)[0], Note)
    assert SUPERSEDE_MAX == FULL_MESH_WORKERS


def test_a_plan_that_comes_too_late_is_dropped():
    core = training()
    core.handle(suspicion(2), 0.0)
    (note,) = core.handle(planned(), 0.0)
    assert isinstance(note, Note) and "a plan for generation 1 comes in generation 2, collecting" in note.text


def test_a_plan_for_other_workers_is_dropped():
    core = training()
    (note,) = core.handle(planned(layout=survivor_layout(OTHER, [0])), 0.0)
    assert isinstance(note, Note) and "the members are (0, 1, 2)" in note.text


def test_until_a_vote_shows_it_a_change_is_not_in_force():
    core = training()
    core.handle(planned(), 0.0)
    assert core.in_force() == (LAYOUT, PLACEMENT, ExecutionParameters(), 0)
    core.handle(EvidenceSeen(vote(1), 1), 0.0)
    assert core.in_force() == (LAYOUT, PLACEMENT, ExecutionParameters(), 0)
    core.handle(EvidenceSeen(changed_vote(2, 1), 1), 0.0)
    assert core.in_force() == (OTHER, TARGET, EXECUTION, 1)


def test_a_change_is_under_way_until_a_vote_shows_it_or_a_decision_makes_it_void():
    core = training()
    assert not core.is_changing
    core.handle(planned(), 0.0)
    assert core.is_changing
    core.handle(EvidenceSeen(vote(1), 1), 0.0)
    assert core.is_changing
    core.handle(EvidenceSeen(changed_vote(2, 1), 1), 0.0)
    assert not core.is_changing
    core = training()
    core.handle(planned(), 0.0)
    assert core.is_changing
    decide(core, 2, [report(0, 2, version=0), report(1, 2, version=0)])
    assert not core.is_changing


def test_a_loss_after_the_vote_goes_on_from_the_next_layout():
    core = training()
    core.handle(planned(), 0.0)
    # Only worker 0 has learned the vote; worker 1 was prepared, and hears of it with the decision.
    learned = changed_vote(1, 1)
    decision = decide(core, 2, [report(0, 2, evidence=learned), report(1, 2, prepared=True, version=0)])
    assert decision.evidence == learned and decision.resume_step == 2
    assert decision.layout == survivor_layout(OTHER, [2])
    assert (decision.change, decision.execution) == (1, EXECUTION)
    # Neither has the parameters of the step under the next layout, except who has completed them.
    assert (1, 1) in decision.deliver


def test_a_loss_before_the_vote_makes_the_change_void():
    core = training()
    core.handle(planned(), 0.0)
    decision = decide(core, 2, [report(0, 2, version=0), report(1, 2, version=0)])
    assert decision.resume_step == 1
    assert decision.layout == survivor_layout(LAYOUT, [2])
    assert (decision.change, decision.execution) == (0, ExecutionParameters())
    # The next one has a number of its own.
    two = tuple(decision.layout.workers)
    effects = core.handle(planned(generation=2, layout=decision.layout), 0.0)
    assert isinstance(effects[0], Persist) and effects[0].record.number == 2
    assert [effect.worker for effect in effects[1:]] == list(two)


def test_a_new_coordinator_knows_the_changes_and_says_them_again_in_its_own_name():
    core = training()
    change = core.handle(planned(), 0.0)[0].record
    again = coordinator([StartRecord(term=1), change])
    again.begin()
    (sent,) = [m for m in messages_to(again.handle(registered(1), 0.0), 1) if isinstance(m, LayoutChange)]
    assert sent == msgspec.structs.replace(change, term=2)
    again.handle(EvidenceSeen(changed_vote(3, 1), 1), 0.0)
    assert again.in_force()[0] == OTHER


def test_a_new_coordinator_knows_that_its_predecessor_has_planned():
    core = training()
    assert not core.has_planned
    core.handle(planned(), 0.0)
    assert core.has_planned
    records = [
        StartRecord(term=1),
        LayoutChange(
            term=1, generation=1, number=1, layout=OTHER, placement=TARGET, execution=EXECUTION, reason="faster"
        ),
    ]
    successor = training(records)
    assert successor.has_planned
    decide(successor, 2, [report(0, generation=2), report(1, generation=2)])
    assert not successor.has_planned


def test_changes_of_before_a_decision_are_forgotten():
    core = training()
    change = core.handle(planned(), 0.0)[0].record
    decision = decide(core, 2, [report(0, 2, version=0), report(1, 2, version=0)])
    again = coordinator([change, decision])
    effects = again.begin() + again.handle(registered(1, generation=2), 0.0)
    assert not [m for m in messages_to(effects, 1) if isinstance(m, LayoutChange)]
    assert again.in_force() == (decision.layout, decision.placement, ExecutionParameters(), 0)


def test_a_return_to_a_checkpoint_makes_changes_void():
    core = training()
    core.handle(planned(), 0.0)
    core.handle(EvidenceSeen(changed_vote(2, 1), 1), 0.0)
    assert core.decision is None
    core.handle(suspicion(0), 0.0)
    core.handle(suspicion(1), 0.0)
    core.handle(report(2, 3, evidence=changed_vote(2, 1)), 0.0)
    assert core.state is CoordinatorState.ROLLING_BACK
    effects = core.handle(CheckpointFound(1, 1), 0.0)
    (decision,) = [effect.decision for effect in effects if isinstance(effect, Decided)]
    assert isinstance(decision, Decision)
    assert (decision.rollback, decision.change) == (1, 1)
    assert decision.layout == survivor_layout(OTHER, [0, 1])


# ------------------------------------------------------------------------------------------------------------- member


def change_of(generation=1, number=1, term=1):
    return LayoutChange(
        term=term,
        generation=generation,
        number=number,
        layout=OTHER,
        placement=TARGET,
        execution=EXECUTION,
        reason="faster",
    )


def test_a_member_holds_a_change_of_its_generation():
    member = Member(0, 1)
    assert member.handle(change_of()) == Hold(change_of())
    assert isinstance(member.handle(change_of(generation=2)), Ignored)
    assert member.state is MemberState.TRAINING


def test_a_member_that_waits_for_a_decision_holds_nothing():
    member = Member(0, 1)
    member.handle(Prepare(term=1, generation=2, members=(0, 1), lost=(2,), reason=""))
    assert isinstance(member.handle(change_of(generation=2)), Ignored)


def test_a_change_of_a_replaced_coordinator_is_ignored():
    member = Member(0, 1)
    member.handle(change_of(term=2))
    assert isinstance(member.handle(change_of(term=1, number=2)), Ignored)


# ------------------------------------------------------------------------------------------------------------- ledger


def prepared():
    ledger = Ledger(0, 0)
    ledger.begin(1, 1)
    ledger.prepare()
    return ledger


def test_evidence_tells_the_change_that_is_in_force():
    ledger = prepared()
    assert ledger.learn(b"v", commits=True, change=3).change == 3
    ledger.begin(2, 1)
    ledger.prepare()
    assert ledger.learn(b"w", commits=True).change == 3


@pytest.mark.parametrize(("commits", "change"), [(False, 1), (True, 0)])
def test_a_change_needs_a_vote_that_commits_and_a_new_number(commits, change):
    with pytest.raises(LedgerError, match=f"change {change} of the layout after change 0"):
        prepared().learn(b"v", commits=commits, change=change)


def test_a_job_of_one_stage_or_of_single_workers_changes_too():
    for widths in ((3,), (1, 1)):
        layout = model_of(Job(widths=widths, num_microbatches=3)).layout
        changed = other_layout(layout)
        assert changed != layout and changed.workers == layout.workers
