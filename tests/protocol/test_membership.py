"""Joins and leaves, event by event: when members are asked to pause, what a loss or a new coordinator changes."""

import msgspec
import pytest
from tests.protocol.machines import THREE, coordinator, registered, report, suspicion, vote

from elaswave.blocks.placement import Placement
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.planning.search.recovery import set_idle
from elaswave.planning.state_moves.target_placement import target_placement
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import (
    Decided,
    EvidenceSeen,
    JoinerCame,
    JoinerGone,
    LeaveWanted,
    LeavingRecord,
    NewGeneration,
    NewGenerationRecord,
    Note,
    Persist,
    Send,
    StartRecord,
    TermRecord,
)
from elaswave.protocol.messages import (
    AskPause,
    Dial,
    FencedOff,
    GoOn,
    Installed,
    LayoutChange,
    Linked,
    Paused,
    Progress,
    Released,
)
from elaswave.protocol.step.ledger import CatchUp, HeldCopies, Ledger
from verify.simulator.job import model_of
from verify.simulator.run import run_schedule
from verify.simulator.schedule import parse_schedule

PROGRESS = Progress(
    num_updates=2, exponents=(3, 4), calibrated=True, exact=True, determinism_hashes={0: 1}, engine="options"
)


def training(records=()):
    core = coordinator(records)
    core.begin()
    for worker in range(3):
        core.handle(registered(worker), 0.0)
    assert core.state is CoordinatorState.TRAINING
    return core


def planned(core, layout, placement, reason):
    return LayoutChange(
        generation=core.generation, layout=layout, placement=placement, execution=core.execution, reason=reason
    )


def sent(effects, kind):
    return {
        effect.worker: effect.message
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    }


def link(core, joiner=3, members=(0, 1, 2)):
    """All say that they have links to a joiner; the effects of the last word."""
    core.handle(JoinerCame(joiner, "there"), 0.0)
    for worker in members:
        core.handle(Linked(worker=worker, peers=(joiner,)), 0.0)
    return core.handle(Linked(worker=joiner, peers=tuple(members)), 0.0)


def pause(core, members=(0, 1, 2), generation=1, step=2):
    effects = []
    for worker in members:
        effects = core.handle(Paused(worker=worker, generation=generation, step=step), 0.0)
    return effects


def installed(core, generation):
    effects = []
    for worker in core.members:
        effects = core.handle(
            Installed(worker=worker, generation=generation, edit_s=0, promote_s=0, critical_bytes=0), 0.0
        )
    return effects


def put_aside(core, worker, *, holds_nothing=True, step=2):
    """A change comes into force in which a worker is idle; the effects of that."""
    layout = set_idle(core.in_force().layout, [worker])
    placement = core.placement
    if holds_nothing:
        blocks = model_of(THREE).blocks
        placement = target_placement(
            layout.with_followers(1), blocks, placement, scatter_width=EVERYBODY, excluded=[worker]
        )
    core.handle(planned(core, layout, placement, "it is to leave"), 0.0)
    change = core.newest_change.number
    return core.handle(EvidenceSeen(msgspec.structs.replace(vote(step), change=change), core.generation), 0.0)


def test_a_joiner_becomes_a_member_at_a_voted_boundary():
    core = training()
    calls = sent(core.handle(JoinerCame(3, "there"), 0.0), Dial)
    assert calls[0].addresses == {3: "there"} and set(calls[3].addresses) == {0, 1, 2}
    for worker in range(3):
        assert core.handle(Linked(worker=worker, peers=(3,)), 0.0) == []
    assert sent(core.handle(Linked(worker=3, peers=(0, 1)), 0.0), AskPause) == {}
    assert set(sent(core.handle(Linked(worker=3, peers=(0, 1, 2)), 0.0), AskPause)) == {0, 1, 2}
    assert pause(core, members=(0, 2)) == []
    first, *rest = pause(core, members=(1,))
    assert isinstance(first, Persist) and isinstance(first.record, NewGenerationRecord)
    assert (first.record.generation, first.record.members, first.record.joined, first.record.lost) == (
        2,
        (0, 1, 2, 3),
        (3,),
        (),
    )
    assert NewGeneration(2, (), (3,), ()) in rest
    assert {
        effect.worker: effect.message.with_progress for effect in rest if isinstance(effect, Send)
    } == dict.fromkeys(range(4), True)
    for worker in range(3):
        told = report(worker, 2, evidence=vote(2), version=2)
        core.handle(msgspec.structs.replace(told, progress=PROGRESS), 0.0)
    effects = core.handle(newcomer(3, 2), 0.0)
    (decision,) = [effect.decision for effect in effects if isinstance(effect, Decided)]
    assert (decision.joined, decision.progress, decision.resume_step) == ((3,), PROGRESS, 3)
    assert decision.layout.idle == (3,) and 3 not in {*decision.placement.owner, *sum(decision.placement.followers, ())}
    # Nobody is wanted any more, once all have installed it.
    assert {call.addresses == {} for call in sent(installed(core, 2), Dial).values()} == {True}


def newcomer(worker, generation):
    told = Ledger(worker, 0, is_fresh=True).promise(generation, HeldCopies().replicas(), (0, 0), progress=PROGRESS)
    assert told.progress is None and told.decided == 0
    return told


def test_a_joiner_that_ends_is_nobodys_loss():
    core = training()
    link(core)
    effects = core.handle(JoinerGone(3), 0.0)
    assert set(sent(effects, GoOn)) == {0, 1, 2} and core.generation == 1
    # Who has paused meanwhile is let go on, also if the word about it was under way.
    assert set(sent(pause(core, members=(1,)), GoOn)) == {1}


def test_a_loss_does_not_wait_for_a_joiner():
    core = training()
    link(core)
    pause(core, members=(0,))
    effects = core.handle(suspicion(2), 0.0)
    assert isinstance(effects[0].record, NewGenerationRecord) and effects[0].record.joined == ()
    assert core.state is CoordinatorState.COLLECTING and core.members == (0, 1)
    # What was said of the old generation does not count; the joiner and its links are still there.
    assert core.admissions.paused == {} and core.admissions.ready(core.members) == (3,)
    for worker in (0, 1):
        core.handle(report(worker, 2, version=0), 0.0)
    assert set(sent(installed(core, 2), AskPause)) == {0, 1}


def test_a_pause_for_an_earlier_coordinator_is_over():
    core = training()
    assert sent(core.handle(Paused(worker=1, generation=1, step=4), 0.0), GoOn).keys() == {1}
    link(core)  # and now this one asks
    assert sent(core.handle(Paused(worker=2, generation=1, step=4), 0.0), GoOn).keys() == {2}
    assert pause(core, step=5)[0].record.joined == (3,)


def test_nobody_waits_for_a_member_that_an_earlier_coordinator_has_let_go_on():
    core = training()
    link(core)
    core.handle(Paused(worker=2, generation=1, step=4), 0.0)  # it has not heard that the pause is over
    effects = core.handle(Paused(worker=1, generation=1, step=4, is_over=True), 0.0)
    assert sent(effects, GoOn).keys() == sent(effects, AskPause).keys() == {2} and core.admissions.paused == {}
    assert pause(core, step=5)[0].record.joined == (3,)


def test_a_member_that_comes_back_hears_again_that_a_pause_is_asked_for():
    core = training()
    link(core)
    assert sent(core.handle(registered(1), 0.0), AskPause).keys() == {1}
    core.handle(JoinerGone(3), 0.0)
    assert sent(core.handle(registered(1), 0.0), AskPause) == {}


@pytest.mark.parametrize("instant", [15, 16])
def test_a_joiner_comes_in_though_the_only_member_was_away(instant):
    schedule = parse_schedule(f"widths=1 num_microbatches=1 join_step=1 steps=14 disconnect:0@{instant}")
    outcome = run_schedule(schedule)
    assert (outcome.violation, outcome.ended, outcome.counts["decisions"]) == (None, "finished", 1)


def test_no_pause_is_asked_for_while_blocks_move():
    core = training()
    layout = core.layout
    core.handle(planned(core, layout, core.placement, "better"), 0.0)
    assert sent(link(core), AskPause) == {}


def test_no_change_is_planned_while_the_members_pause():
    core = training()
    link(core)
    (note,) = core.handle(planned(core, core.layout, core.placement, "better"), 0.0)
    assert isinstance(note, Note) and "membership is about to change" in note.text


def test_a_member_leaves_once_it_holds_nothing():
    core = training()
    (persisted,) = core.handle(LeaveWanted(1), 0.0)
    assert persisted == Persist(LeavingRecord(term=1, worker=1))
    assert isinstance(core.handle(LeaveWanted(1), 0.0)[0], Note)
    assert isinstance(core.handle(LeaveWanted(7), 0.0)[0], Note)
    assert sent(put_aside(core, 1, holds_nothing=False), AskPause) == {}
    assert set(sent(put_aside(core, 1, step=3), AskPause)) == {0, 1, 2}
    effects = pause(core)
    assert (effects[0].record.members, effects[0].record.left, effects[0].record.lost) == ((0, 2), (1,), ())
    assert set(sent(effects, Released)) == {1}
    assert core.admissions.leaving == set()


def test_a_member_that_holds_nothing_leaves_as_soon_as_it_is_asked_to():
    core = training()
    put_aside(core, 1)
    persisted, *asked = core.handle(LeaveWanted(1), 0.0)
    assert persisted == Persist(LeavingRecord(term=1, worker=1))
    assert set(sent(asked, AskPause)) == {0, 1, 2}


def test_a_joiner_leaves_with_nothing_that_nobody_else_holds():
    schedule = parse_schedule("join_step=1 leave_step=6 leaver=3 steps=14 num_followers=0")
    outcome = run_schedule(schedule)
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_a_successor_knows_who_is_leaving():
    assert training([LeavingRecord(term=1, worker=1)]).admissions.leaving == {1}
    left = NewGenerationRecord(term=1, generation=2, members=(0, 2), lost=(), reason="", left=(1,))
    successor = coordinator([LeavingRecord(term=1, worker=1), left])
    assert successor.admissions.leaving == set() and successor.members == (0, 2)
    assert successor._loss_events_at_s == []


@pytest.mark.parametrize("is_successor", [False, True])
def test_a_member_that_has_missed_its_release_is_let_go_when_it_comes_back(is_successor):
    core = training()
    put_aside(core, 1)
    core.handle(LeaveWanted(1), 0.0)
    record = pause(core)[0].record
    if is_successor:
        core = coordinator([LeavingRecord(term=1, worker=1), record])
        core.begin()
    assert set(sent(core.handle(registered(1), 0.0), Released)) == {1}
    assert isinstance(core.dismissal(1), Released) and isinstance(core.dismissal(9), FencedOff)


def test_a_successor_withdraws_what_its_predecessor_wanted_of_joiners_that_are_gone():
    core = training([TermRecord(term=1), StartRecord(term=1)])
    assert sent(core.handle(registered(2), 0.0), Dial)[2].addresses == {}
    core.handle(JoinerCame(3, "there"), 0.0)
    again = sent(core.handle(registered(2), 0.0), Dial)
    assert again.keys() == {2, 3} and again[2].addresses == {3: "there"} and set(again[3].addresses) == {0, 1, 2}


def test_a_joiner_that_is_lost_before_the_decision_has_not_joined_for_a_successor():
    records = [
        NewGenerationRecord(term=1, generation=2, members=(0, 1, 2, 3), lost=(), reason="", joined=(3,)),
        NewGenerationRecord(term=1, generation=3, members=(0, 1, 2), lost=(3,), reason=""),
    ]
    assert coordinator(records).joined == ()


def test_all_members_cannot_leave_together():
    core = training()
    for worker in range(3):
        core.handle(LeaveWanted(worker), 0.0)
    layout = msgspec.structs.replace(core.layout, idle=core.members)
    nothing = Placement.of(owners=(), followers=())
    assert core.admissions.released(core.members, layout, nothing) == ()
    assert core.admissions.released((*core.members, 3), layout, nothing) == (0, 1, 2)


def test_a_newcomer_takes_over_where_training_stands_and_has_nothing_to_catch_up():
    ledger = Ledger(3, 0, is_fresh=True)
    told = ledger.promise(2, HeldCopies().replicas(), (0, 0), progress=PROGRESS)
    assert (told.decided, told.progress, told.copies.blocks) == (0, None, [])
    decision = decide_for(newcomer_generation=2)
    assert ledger.accept(decision) is CatchUp.JOIN
    # A loss before the next vote: nothing of it could be behind.
    assert ledger.promise(3, HeldCopies().replicas(), (0, 0), progress=PROGRESS).progress == PROGRESS
    assert ledger.accept(decide_for(newcomer_generation=3)) is CatchUp.NOTHING


def decide_for(newcomer_generation):
    core = training()
    link(core)
    pause(core)
    for worker in range(3):
        core.handle(report(worker, 2, evidence=vote(2), version=2), 0.0)
    effects = core.handle(newcomer(3, 2), 0.0)
    (decision,) = [effect.decision for effect in effects if isinstance(effect, Decided)]
    return msgspec.structs.replace(decision, generation=newcomer_generation)


@pytest.mark.parametrize("decided", [0, 1])
def test_a_member_without_state_has_missed_no_return_to_a_checkpoint(decided):
    core = training()
    core.rollback_generation = 5
    assert core.is_new(msgspec.structs.replace(newcomer(3, 2), decided=decided)) is (decided == 0)
    assert not core.is_new(report(0, 2))  # it began with the job
    assert model_of(THREE).layout.workers == (0, 1, 2)
