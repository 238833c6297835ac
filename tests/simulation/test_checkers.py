"""Every checker has a run in which it fails, told to it by hand."""

import pytest

from elaswave.blocks.placement import Placement
from elaswave.protocol.events import NewGenerationRecord, TermRecord
from elaswave.protocol.membership.effects import LeaveAsked, PlaceTaken
from elaswave.protocol.messages import Decision, FencedOff, LayoutChange, Prepare
from elaswave.types import ExecutionParameters
from verify.simulator.checkers import (
    Agreement,
    ChangesHeld,
    CheckpointsKept,
    Ends,
    EnoughCopies,
    ExactlyOnce,
    FencingOff,
    LogCounts,
    NoSilentLoss,
    OneLayout,
    OneOwner,
    OneRatio,
    PublishedOnce,
    SameBits,
    Violation,
    all_checkers,
)
from verify.simulator.host_checker import HeldForACause, HostsApart, OneInEachPlace, OneProcess, Orphans
from verify.simulator.job import Job, model_of, other_layout, parameter, undisturbed
from verify.simulator.observer import Observer, together
from verify.simulator.one_coordinator import OneCoordinator, OneHistory
from verify.simulator.schedule import parse_schedule

JOB = Job(steps=2)
TRUTH = undisturbed(JOB)
MODEL = model_of(JOB)
P = MODEL.placement


def never_asked(vector: bytes) -> bool:
    return False


def decision(generation: int = 2, *, members: tuple[int, ...] = (0, 1), resume: int = 2, **changes: object) -> Decision:
    values: dict[str, object] = {
        "term": 1,
        "generation": generation,
        "members": members,
        "lost": (2,),
        "evidence": None,
        "resume_step": resume,
        "resume_attempt": 1,
        "layout": MODEL.layout,
        "placement": P,
        "deliver": (),
        "rollback": None,
        "evaluate": False,
        "checkpoint": False,
        "promoted": 0,
        "reason": "worker 2 was lost",
        "published": 0,
    }
    known = {name: value for name, value in {**values, **changes}.items() if name in Decision.__struct_fields__}
    return Decision(**known)


def states(worker: int, change: dict[int, tuple[bool, int, tuple[int, int]]] | None = None):
    held = {
        block.id: (P.owner[block.id] == worker, 2, TRUTH.states[2][block.id])
        for block in MODEL.blocks
        if worker in P.holders(block.id)
    }
    return {**held, **(change or {})}


def test_same_bits():
    checker = SameBits(TRUTH)
    checker.applied(0, 1, 1, TRUTH.states[1][1])
    checker.used_parameter(0, 2, 1, parameter(TRUTH.states[1][1]))
    checker.loaded(0, 1, 2, TRUTH.states[2][1])
    checker.learned(0, 1, 1, 1, True, b"", TRUTH.grids[1])
    checker.learned(0, 1, 1, 1, False, b"", 77)
    checker.published(1, TRUTH.losses[1])
    checker.finished((0, 1, 2), {worker: states(worker) for worker in range(3)})
    with pytest.raises(Violation, match="block 1 on worker 0 differs after step 1"):
        checker.applied(0, 1, 1, TRUTH.states[2][1])
    with pytest.raises(Violation, match="computes step 2 with a parameter of block 1 of another step"):
        checker.used_parameter(0, 2, 1, parameter(TRUTH.states[2][1]))
    with pytest.raises(Violation, match="block 1 loaded on worker 0 differs"):
        checker.loaded(0, 1, 2, TRUTH.states[1][1])
    with pytest.raises(Violation, match="the grid after step 1 differs"):
        checker.learned(0, 1, 1, 1, True, b"", (0,))
    with pytest.raises(Violation, match="published losses of step 1 differ"):
        checker.published(1, TRUTH.losses[2])
    with pytest.raises(Violation, match="at the end the owned blocks are"):
        checker.finished((0, 1), {worker: states(worker) for worker in range(2)})
    for wrong in ((False, 1, TRUTH.states[1][0]), (False, 2, TRUTH.states[1][0])):
        with pytest.raises(Violation, match="block 0 on worker 1 differs at the end"):
            checker.finished((0, 1, 2), {w: states(w, {0: wrong} if w == 1 else None) for w in range(3)})


def test_exactly_once():
    checker = ExactlyOnce(2, 2)
    for layer in range(2):
        for microbatch in range(2):
            checker.computed(0, 1, 1, 1, layer, microbatch)
    checker.learned(0, 1, 1, 1, True, b"", 0)
    checker.learned(1, 1, 1, 1, True, b"", 0)
    checker.computed(0, 1, 2, 1, 0, 0)
    checker.learned(0, 1, 2, 1, False, b"", 0)
    with pytest.raises(Violation, match="step 2 was committed with 1 gradients"):
        checker.learned(0, 1, 2, 1, True, b"", 0)
    for microbatch in (0, 0, 1, 1):
        checker.computed(0, 1, 3, 1, 0, microbatch)
    with pytest.raises(Violation, match="4 gradients, 2 different ones, of 4"):
        checker.learned(0, 1, 3, 1, True, b"", 0)
    checker.applied(0, 5, 1, (0, 0))
    with pytest.raises(Violation, match="applies step 1 to block 5, which is at step 1"):
        checker.applied(0, 5, 1, (0, 0))
    with pytest.raises(Violation, match="applies step 3 to block 5, which is at step 1"):
        checker.applied(0, 5, 3, (0, 0))
    checker.loaded(0, 5, 7, (0, 0))
    checker.applied(0, 5, 8, (0, 0))


def test_one_coordinator():
    checker = OneCoordinator()
    prepare = Prepare(term=1, generation=2, members=(0, 1), lost=(2,), reason="worker 2 was lost")
    began = TermRecord(term=1)
    raised = NewGenerationRecord(term=1, generation=2, members=(0, 1), lost=(2,), reason="worker 2 was lost")
    change = LayoutChange(
        term=1,
        generation=2,
        number=4,
        layout=MODEL.layout,
        placement=P,
        execution=ExecutionParameters(),
        reason="another layout",
    )
    checker.claimed(1)
    checker.persisted(1, 1, began)
    checker.persisted(1, 2, raised)
    checker.spoke(1, prepare, [began, raised])
    checker.spoke(1, decision(), [raised, decision()])
    checker.spoke(1, change, [change])
    checker.spoke(1, FencedOff(term=1, generation=2, reason="worker 2 was lost"), [])
    for message in (prepare, decision(), change):
        with pytest.raises(Violation, match="is sent before it is durable"):
            checker.spoke(1, message, [began, decision(generation=3)])
    with pytest.raises(Violation, match="NewGenerationRecord of term 1 is written twice"):
        checker.persisted(1, 2, raised)
    with pytest.raises(Violation, match="two coordinators write in term 1"):
        checker.persisted(2, 1, raised)
    with pytest.raises(Violation, match="term 1 is claimed although 1 was"):
        checker.claimed(1)
    checker.claimed(2)
    checker.persisted(2, 1, TermRecord(term=2))
    with pytest.raises(Violation, match="a record of term 1 is written after term 2 has begun"):
        checker.persisted(1, 3, raised)
    checker.lease_lost(1)
    with pytest.raises(Violation, match="a coordinator that was replaced, and knows it, sends Prepare"):
        checker.spoke(1, prepare, [raised])


def test_one_ratio():
    checker = OneRatio()
    for worker, layer, ratio in ((0, 0, 3), (1, 1, 3), (1, 2, 4)):
        checker.coded(worker, 2, layer, 0, ratio)
    checker.computed(0, 1, 2, 1, 0, 0)
    checker.computed(1, 1, 2, 1, 1, 0)
    checker.learned(0, 1, 2, 1, True, b"", 0)
    checker.computed(0, 1, 2, 2, 0, 0)
    checker.kept(1, 1, 2, 2, 2, 0)
    checker.learned(0, 1, 2, 2, False, b"", 0)
    with pytest.raises(Violation, match=r"step 2 was committed with the ratios \[3, 4\]"):
        checker.learned(0, 1, 2, 2, True, b"", 0)


OTHER_OWNER = Placement.of((1, *P.owner[1:]), P.followers)


def test_one_owner():
    checker = OneOwner()
    checker.began(0, 1, 1, 1, P)
    checker.began(1, 1, 1, 1, P)
    with pytest.raises(Violation, match="worker 2 has other owners in step 1"):
        checker.began(2, 1, 1, 1, OTHER_OWNER)
    checker.began(2, 1, 2, 1, OTHER_OWNER)  # a change has come into force
    checker.began(2, 2, 2, 1, OTHER_OWNER)
    with pytest.raises(Violation, match="two decisions about generation 2"):
        checker.decided(decision(2))


def test_enough_copies():
    checker = EnoughCopies(2)
    layout = MODEL.layout
    holders = tuple(tuple(worker for worker in range(3) if worker != owner) for owner in P.owner)
    checker.switched(0, 1, 2, layout, Placement.of(P.owner, holders))
    with pytest.raises(Violation, match="block 0 is left with holders .*: 3 are needed"):
        checker.switched(0, 1, 2, layout, P)
    with pytest.raises(Violation, match="block 0 is left with holders"):
        twice = tuple((owner, other[0]) for owner, other in zip(P.owner, holders))
        checker.switched(0, 1, 2, layout, Placement.of(P.owner, twice))


def test_orphans():
    checker = Orphans(100)
    checker.waits(1, 500, 90)
    checker.waits(1, 90, 500)
    checker.orphaned(1, 100, 100)
    for alone, idle in ((99, 500), (500, 99)):
        with pytest.raises(Violation, match=f"agent 1 ends after {alone} without a coordinator, {idle} without a"):
            checker.orphaned(1, alone, idle)
    with pytest.raises(Violation, match="agent 2 goes on after 130 without a coordinator, 120 without a commit"):
        checker.waits(2, 130, 120)


def test_hosts_apart():
    """Two hosts: workers 0 and 2 on one, 1 and 3 on the other."""
    job = Job(widths=(2, 2), num_hosts=2, blocks_per_layer=1, blocks_per_round=8)
    model = model_of(job)
    assert model.layout.domains == ((0, "h0"), (1, "h1"), (2, "h0"), (3, "h1"))
    together = Placement.of((0, 2), ((2,), (0,)))
    loss = {"placement": together, "layout": model.layout, "rollback": 1, "members": (1, 3)}
    checker = HostsApart(job)
    checker.began(0, 1, 1, 1, model.placement)
    with pytest.raises(Violation, match=r"in step 2 of generation 1 all copies of block 0 are on host h0, .* \(0, 2\)"):
        checker.began(0, 1, 2, 1, together)
    for lost, is_survived in (((0, 2), True), ((0, 1), False)):
        checker = HostsApart(job)
        if is_survived:
            with pytest.raises(Violation, match=r"only workers \[0, 2\] of one host were lost, and their state"):
                checker.ended("worker 2 was lost", (1, 3), (0, 2), (0,))
            with pytest.raises(Violation, match=r"only workers \[0, 2\] of one host were lost, and their state"):
                checker.decided(decision(lost=lost, **loss))
        else:
            checker.decided(decision(lost=lost, **loss))
    checker = HostsApart(job)
    checker.decided(decision(lost=(0,), layout=model.layout, resume=2))
    checker.began(1, 2, 3, 1, together)  # copies are still made
    with pytest.raises(Violation, match="all copies of block 0 are on host h0"):
        checker.began(1, 2, 4, 1, together)
    checker.switched(1, 2, 6, model.layout, together)
    checker.began(1, 2, 6, 1, together)
    with pytest.raises(Violation, match="in step 7 of generation 2"):
        checker.began(1, 2, 7, 1, together)
    HostsApart(job._replace(num_hosts=0)).began(0, 1, 1, 1, together)


def test_fencing():
    checker = FencingOff()
    checker.consumed(0, 2, 5, 1, (2, 5, 1), True)
    for frame in ((1, 5, 1), (2, 4, 1), (2, 5, 2)):
        with pytest.raises(Violation, match="uses a frame of"):
            checker.consumed(0, 2, 5, 1, frame, True)
    with pytest.raises(Violation, match="no member of generation 2"):
        checker.consumed(0, 2, 5, 1, (2, 5, 1), False)


def test_agreement():
    checker = Agreement()
    checker.began(0, 1, 1, 1, P)
    checker.learned(0, 1, 1, 1, True, b"a", 0)
    checker.learned(1, 1, 1, 1, True, b"a", 0)
    with pytest.raises(Violation, match="learned another vote on step 1"):
        checker.learned(2, 1, 1, 1, True, b"b", 0)
    with pytest.raises(Violation, match="learned another vote on step 1"):
        checker.learned(2, 1, 1, 1, False, b"a", 0)
    checker.decided(decision(2, resume=2))
    with pytest.raises(Violation, match="generation 2 resumes with step 1, but step 1 is committed"):
        checker.decided(decision(2, resume=1))
    checker.installed(0, decision(2, resume=2), [1, 1], 0)
    with pytest.raises(Violation, match=r"goes on after step 1 with copies of \{0, 1\}|\{1, 0\}"):
        checker.installed(0, decision(2, resume=2), [1, 0], 0)
    with pytest.raises(Violation, match="worker 0 begins step 3 after step 1"):
        checker.began(0, 2, 3, 1, P)
    checker.decided(decision(3, resume=1, rollback=0))  # a return to a checkpoint may undo what was committed
    checker.began(0, 3, 1, 1, P)


def test_no_silent_loss():
    everything = tuple(range(len(MODEL.blocks)))
    checker = NoSilentLoss()
    with pytest.raises(Violation, match="state was given up that can be made from the seed"):
        checker.ended("nothing is committed yet", (0,), (1,), everything)
    checker.learned(0, 1, 1, 1, False, b"", 0)
    with pytest.raises(Violation, match="state was given up that can be made from the seed"):
        checker.ended("a vote asked for another attempt", (0,), (1,), everything)
    checker.learned(0, 1, 1, 1, True, b"", 0)
    checker.ended("nothing is known yet", (0,), (1,), everything)
    for worker in range(3):
        checker.began(worker, 1, 1, 1, P)
    checker.gone(2)
    # Whatever worker 2 held has another holder, so one loss is no reason.
    with pytest.raises(Violation, match="although survivors hold it"):
        checker.ended("worker 2 was lost", (0, 1), (2,), everything)
    with pytest.raises(Violation, match="although survivors hold it"):
        checker.decided(decision(2, members=(0, 1), rollback=0))
    checker.ended("no checkpoint, but all workers are lost", (0, 1), (2,), ())
    alone = next(worker for worker in range(3) if any(worker not in P.holders(block) for block in everything))
    checker.ended("two were lost", (alone,), (), everything)
    # A placement that one vote has brought into force leaves out worker 0: a member that knows of it does not count on
    # it.
    without = Placement.of(tuple(1 if owner == 0 else owner for owner in P.owner), P.followers)
    checker.placed(1, without)
    checker = NoSilentLoss()
    checker.learned(0, 1, 1, 1, True, b"", 0)
    checker.began(0, 1, 1, 1, P)
    checker.began(1, 1, 1, 1, P)
    checker._loading = {0, 1}
    checker.ended("a second loss before the checkpoint was loaded", (0, 1), (2,), everything)
    for worker in range(2):
        checker.installed(worker, decision(2), [], 0)
    with pytest.raises(Violation, match="although survivors hold it"):
        checker.ended("a later one", (0, 1), (2,), everything)


def test_published_once():
    checker = PublishedOnce()
    checker.published(1, (1, 2))
    checker.published(1, (1, 2))
    checker.finished((), {})
    with pytest.raises(Violation, match="step 1 was published with other losses before"):
        checker.published(1, (1, 3))
    checker.published(3, (1, 2))
    with pytest.raises(Violation, match=r"the published steps are \[1, 3\]"):
        checker.finished((), {})


def test_checkpoints_kept():
    blocks = range(len(MODEL.blocks))
    states, grid = dict(enumerate(TRUTH.states[2])), TRUTH.grids[2]
    checker = CheckpointsKept(2, 2, len(blocks), never_asked)
    with pytest.raises(Violation, match=r"ended without a word about the checkpoints of steps \[2\]"):
        checker.finished((0, 1), {})
    with pytest.raises(Violation, match="a checkpoint of step 3 was not asked for"):
        checker.checkpointed(3, states, grid)
    checker.wrote(0, 2, blocks[:1])
    checker.wrote(1, 2, blocks[1:])
    with pytest.raises(Violation, match="step 2 was given up although the members have written all of it"):
        checker.given_up(2, (0, 1))
    checker.decided(decision(2, members=(0,), resume=4))
    checker.given_up(2, (0,))
    checker.finished((0,), {})
    checker = CheckpointsKept(2, 2, len(blocks), never_asked)
    checker.wrote(0, 2, blocks)
    checker.decided(decision(2, members=(0, 1), rollback=0))
    checker.given_up(2, (0, 1))  # what was written before all members went back does not count
    checker.checkpointed(2, states, grid)
    with pytest.raises(Violation, match=r"checkpoints of steps \[3\]"):
        CheckpointsKept(3, 0, len(blocks), never_asked).finished((0,), {})  # the last step's is always due


@pytest.mark.parametrize(("term", "members", "is_excused"), [(2, (1, 2), True), (1, (1, 2), False), (2, (0, 2), False)])
def test_a_checkpoint_may_be_forgotten_with_all_processes_that_knew_of_it(term, members, is_excused):
    checker = CheckpointsKept(3, 1, len(MODEL.blocks), never_asked)
    checker.wrote(0, 1, ())
    checker.decided(decision(members=members, resume=3, term=term, checkpoint=True))
    for step in (2, 3):
        checker.checkpointed(step, {}, ())
    if is_excused:
        checker.finished(members, {})
    else:
        with pytest.raises(Violation, match=r"without a word about the checkpoints of steps \[1\]"):
            checker.finished(members, {})


def test_a_checkpoint_holds_the_same_bits():
    checker = SameBits(TRUTH)
    states, grid = dict(enumerate(TRUTH.states[2])), TRUTH.grids[2]
    checker.checkpointed(2, states, grid)
    with pytest.raises(Violation, match="the checkpoint of step 2 differs"):
        checker.checkpointed(2, {**states, 0: TRUTH.states[1][0]}, grid)
    with pytest.raises(Violation, match="the grid in the checkpoint of step 2 differs"):
        checker.checkpointed(2, states, (0,))


def test_progress():
    checker = Ends(2)
    checker.published(1, ())
    with pytest.raises(Violation, match="finished after step 1 of 2"):
        checker.stopped("finished", 10)
    with pytest.raises(Violation, match="nothing happens any more at time 10, after step 1"):
        checker.stopped("stuck", 10)
    checker.published(2, ())
    checker.stopped("finished", 10)
    checker.ended("worker 2 was lost", (0,), (2,), ())
    with pytest.raises(Violation, match="although no worker was lost"):
        checker.ended("a bad day", (0,), (), ())
    with pytest.raises(Violation, match=r"does not name any of the lost workers \[2\]"):
        checker.ended("a bad day", (0,), (2,), ())


def test_an_observer_may_ignore_everything():
    calls = [name for name in vars(Observer) if not name.startswith("_")]
    assert len(calls) == 45
    seen = []

    class Listens(Observer):
        def gone(self, worker: int) -> None:
            seen.append(worker)

    both = together([Observer(), Listens(), Listens()])
    both.gone(4)
    both.placed(1, P)
    assert seen == [4, 4]
    assert {type(checker) for checker in all_checkers(TRUTH, 2, 2)} == {
        SameBits,
        ExactlyOnce,
        OneLayout,
        OneOwner,
        OneRatio,
        ChangesHeld,
        EnoughCopies,
        FencingOff,
        LogCounts,
        Agreement,
        NoSilentLoss,
        PublishedOnce,
        CheckpointsKept,
        Ends,
    }


def test_one_layout():
    see = together([OneLayout()])
    other = other_layout(MODEL.layout)
    see.switched(0, 1, 2, other, P)
    see.switched(1, 1, 2, other, P)
    see.switched(0, 2, 2, MODEL.layout, P)  # the vote of generation 1 was known to no member that is left
    with pytest.raises(Violation, match="worker 1 goes on after step 2 with another layout than a peer"):
        see.switched(1, 2, 2, other, P)


def test_a_change_that_has_come_is_held_from_the_next_step_on():
    see = together([ChangesHeld()])
    see.holds(0, 1, 2, 0, 1)
    see.offered(0, 1, 2, 1, 1)
    see.holds(0, 1, 2, 0, 1)  # another attempt of the step in which it came
    see.holds(0, 1, 3, 1, 1)
    see.holds(0, 1, 3, 0, 2)  # it has heard of the next coordinator, and not yet of the change from it
    see.offered(0, 1, 3, 1, 2)  # said again
    see.holds(0, 2, 4, 0, 2)  # of another generation
    see.holds(1, 1, 4, 0, 2)
    with pytest.raises(Violation, match="change 1 came to worker 0 in step 3, and it begins step 4 without it"):
        see.holds(0, 1, 4, 0, 2)


def test_checkpoints_that_a_vote_asked_for_are_kept():
    asks = b"a vote that asks for one"
    states, grid = dict(enumerate(TRUTH.states[1])), TRUTH.grids[1]

    def checker() -> CheckpointsKept:
        watch = CheckpointsKept(3, 0, len(MODEL.blocks), lambda vector: vector == asks)
        watch.checkpointed(3, states, grid)  # after the last step one is due anyway
        watch.learned(0, 1, 1, 1, False, asks, 0)  # commits nothing, so asks for nothing
        watch.learned(0, 1, 1, 2, True, asks, 0)
        return watch

    made = checker()
    made.decided(decision(resume=2, checkpoint=True))
    made.checkpointed(1, states, grid)
    made.decided(decision(3, resume=2, checkpoint=False))
    made.finished((0,), {})
    with pytest.raises(Violation, match="after step 1, whose checkpoint is not written, and does not write it"):
        checker().decided(decision(resume=2, checkpoint=False))
    twice = checker()
    twice.checkpointed(1, states, grid)
    with pytest.raises(Violation, match="is written, and writes it again"):
        twice.decided(decision(resume=2, checkpoint=True))
    given_up = checker()
    given_up.decided(decision(resume=2, checkpoint=True))
    given_up.given_up(1, (0,))
    with pytest.raises(Violation, match=r"checkpoints of steps \[1\] are not there, and no worker was lost since"):
        given_up.finished((0,), {})
    back = checker()
    back.decided(decision(resume=1, rollback=0))
    with pytest.raises(Violation, match=r"without a word about the checkpoints of steps \[3\]"):
        back.finished((0,), {})  # the one of before was put aside
    back.checkpointed(3, states, grid)
    back.finished((0,), {})
    again = checker()
    again.decided(decision(resume=2, rollback=1))  # that one was made durable by a coordinator that was replaced
    again.decided(decision(resume=2, checkpoint=False))
    again.decided(decision(resume=2, checkpoint=True))
    further = checker()
    further.decided(decision(resume=3, checkpoint=False))  # an owner was lost with its part, the others had gone on
    with pytest.raises(Violation, match="ended without a word"):
        further.finished((0,), {})
    further.given_up(1, (0,))
    further.finished((0,), {})


def test_no_worker_follows_two_histories():
    see = together([OneHistory()])
    see.sent(0, (b"a", b"b"))
    see.sent(1, (b"a", b"c"))
    see.sent(0, (b"a", b"b", b"d"))
    with pytest.raises(Violation, match="worker 0 was told of 3 entries, and now by a coordinator that has 2"):
        see.sent(0, (b"a", b"b"))
    with pytest.raises(Violation, match="the store has not gone back, and the job ends"):
        see.gone_back("an entry is missing")
    see.went_back(1, [], [])
    see.gone_back("an entry is missing")


def test_each_id_is_one_process_of_one_agent():
    see = together([OneProcess()])
    see.given(3, 1)
    see.forked(3, 1)
    with pytest.raises(Violation, match="worker 3 is started twice"):
        see.forked(3, 1)
    with pytest.raises(Violation, match="worker 3 is started by agent 2, not by 1"):
        see.forked(3, 2)
    with pytest.raises(Violation, match="the id 3 is given to agent 2, and was to 1"):
        see.given(3, 2)


def place_taken(worker: int, place: int, request: int = 0) -> PlaceTaken:
    return PlaceTaken(worker=worker, place=place, at_s=0.0, request=request)


def test_a_place_has_one_worker_at_a_time():
    checker = OneInEachPlace(2, 1)
    checker.held_for_lost(0, "exit")
    checker.wrote_down(place_taken(2, 0))
    checker.forked(2, 0)
    checker.wrote_down(place_taken(3, 2, request=1))
    with pytest.raises(Violation, match="one more than were asked for"):
        checker.wrote_down(place_taken(4, 3, request=1))
    checker = OneInEachPlace(2, 1)
    with pytest.raises(Violation, match="takes the place 0 of worker 0, which is there"):
        checker.wrote_down(place_taken(2, 0))
    checker.gone(1)
    with pytest.raises(Violation, match="the id 0 is given to a second worker"):
        checker.wrote_down(place_taken(0, 1))
    checker.wrote_down(LeaveAsked(worker=1, within_s=1.0, at_s=0.0))
    with pytest.raises(Violation, match="takes the place 1 of worker 1, which was asked to leave"):
        checker.wrote_down(place_taken(2, 1))
    with pytest.raises(Violation, match="worker 5 is started, and worker None has its place"):
        checker.forked(5, 0)
    checker.stopping([0, 1], [0, 1])
    with pytest.raises(Violation, match="is to join a job that is about to end"):
        checker.wrote_down(place_taken(2, 2))


def test_who_is_a_member_is_no_joiner():
    checker = OneInEachPlace(2, 1)
    checker.expects([2], [0, 1])
    with pytest.raises(Violation, match="are waited for as joiners, and are members"):
        checker.expects([1, 2], [0, 1])
    checker.killed(2)
    checker.began(2, 2, 1, 1, P)
    with pytest.raises(Violation, match="worker 2 is killed as a joiner, and is a member"):
        checker.killed(2)


def test_who_is_held_for_lost_has_met_with_something():
    checker = HeldForACause(parse_schedule("widths=2,2 hang:1@5+20"))
    checker.held_for_lost(1, "heartbeat")
    for worker, detected_by in ((0, "heartbeat"), (1, "exit"), (0, "drain")):
        with pytest.raises(Violation, match="and nothing has befallen it"):
            checker.held_for_lost(worker, detected_by)
    checker.gone(0)
    checker.held_for_lost(0, "exit")
    checker.wrote_down(LeaveAsked(worker=2, within_s=1.0, at_s=0.0))
    checker.held_for_lost(2, "drain")


def test_a_job_is_stopped_early_only_if_too_few_would_stay():
    checker = Ends(3)
    checker.published(1, ())
    with pytest.raises(Violation, match="the job is to stop, and of its members"):
        checker.stopping([0, 1, 2], [0, 1])
    checker.stopping([0, 1], [0, 1])
    checker.stopped("finished", 5)
