"""A worker's machines: its ledger refuses every other order, its membership ignores what is old."""

import pytest
from tests.protocol.machines import THREE, vote

from elaswave.protocol.messages import BlockReplicas, Decision, Evidence, FencedOff, Prepare
from elaswave.protocol.step.ledger import CatchUp, Ledger, LedgerError
from elaswave.protocol.step.member import Ignored, Install, Leave, Member, MemberState, MoveAndReport, ReportAgain
from verify.simulator.job import model_of

HELD = BlockReplicas(blocks=[0, 3], owned=[True, False], versions=[0, 0])


def decision(
    generation: int = 2,
    *,
    term: int = 1,
    evidence: Evidence | None = None,
    resume: tuple[int, int] = (1, 2),
    rollback: int | None = None,
) -> Decision:
    model = model_of(THREE)
    return Decision(
        term=term,
        generation=generation,
        members=(0, 2),
        lost=(1,),
        evidence=evidence,
        resume_step=resume[0],
        resume_attempt=resume[1],
        layout=model.layout,
        placement=model.placement,
        deliver=(),
        rollback=rollback,
        evaluate=False,
        checkpoint=False,
        published=0,
        promoted=0,
        reason="worker 1 was lost",
    )


def prepared(step: int = 1) -> Ledger:
    ledger = Ledger(0, step - 1)
    ledger.begin(step, 1)
    ledger.prepare()
    return ledger


def test_a_step():
    ledger = prepared()
    assert not ledger.may_write_parameters(1)
    evidence = ledger.learn(b"sums", commits=True)
    assert (evidence.order, evidence.committed_step) == ((1, 1), 1)
    assert ledger.may_write_parameters(1)
    assert not ledger.may_write_parameters(2)
    ledger.gathered(1)
    ledger.begin(2, 1)
    assert not ledger.prepared
    assert ledger.parameters_step == 1


def test_a_vote_that_asks_for_another_attempt_proves_the_step_before():
    ledger = prepared(4)
    assert ledger.learn(b"", commits=False).committed_step == 3
    assert not ledger.may_write_parameters(4)
    ledger.begin(4, 2)


def test_only_forward():
    ledger = prepared(2)
    for step, attempt in ((2, 1), (1, 9)):
        with pytest.raises(LedgerError, match=f"attempt {attempt} of step {step} after attempt 1 of step 2"):
            ledger.begin(step, attempt)


def test_a_vote_is_learned_only_when_prepared():
    ledger = Ledger(0, 0)
    ledger.begin(1, 1)
    with pytest.raises(LedgerError, match="a vote on step 1 was learned by a worker that was not prepared"):
        ledger.learn(b"", commits=True)


def test_an_answer_is_a_promise():
    ledger = prepared()
    report = ledger.promise(2, HELD, (0, 1))
    assert (report.generation, report.prepared, report.evidence, report.decided) == (2, True, None, 0)
    assert (report.copies.blocks, report.copies.owned, report.copies.versions) == ([0, 3], [True, False], [0, 0])
    for what, call in (
        ("learn a vote", lambda: ledger.learn(b"", commits=True)),
        ("begin an attempt", lambda: ledger.begin(1, 2)),
        ("prepare", ledger.prepare),
    ):
        with pytest.raises(LedgerError, match=f"cannot {what}: generation 2 is promised and not decided"):
            call()
    with pytest.raises(LedgerError, match="asked to promise generation 2 after 2"):
        ledger.promise(2, HELD, (0, 1))
    assert ledger.promise(3, HELD, (0, 1)).generation == 3
    with pytest.raises(LedgerError, match="a decision of generation 2 after a promise of 3"):
        ledger.accept(decision(2))
    assert ledger.accept(decision(3)) is CatchUp.NOTHING
    ledger.begin(1, 2)
    assert ledger.promise(4, HELD, (0, 1)).decided == 3


def test_a_vote_that_others_saw_is_applied():
    ledger = prepared()
    ledger.promise(2, HELD, (0, 1))
    assert ledger.accept(decision(evidence=vote(1), resume=(2, 1))) is CatchUp.APPLY
    assert ledger.evidence == vote(1)
    # Interrupted before it had applied everything, it is told so again.
    assert ledger.promise(3, HELD, (0, 1)).evidence == vote(1)
    assert ledger.accept(decision(3, evidence=vote(1), resume=(2, 1))) is CatchUp.APPLY
    ledger.begin(2, 1)


def test_grids_that_others_saw_are_adopted():
    ledger = prepared()
    ledger.promise(2, HELD, (0, 1))
    assert ledger.accept(decision(evidence=vote(1, commits=False))) is CatchUp.ADOPT_GRIDS
    ledger.begin(1, 2)


def test_a_checkpoint_that_was_asked_for_is_told_in_every_later_vote():
    ledger = prepared()
    assert ledger.learn(b"", commits=True, asks_checkpoint=True).checkpoint == 1
    ledger.begin(2, 1)
    ledger.prepare()
    assert ledger.learn(b"", commits=False).checkpoint == 1
    assert ledger.promise(2, HELD, (0, 1)).evidence == ledger.evidence
    # A decision knows what this worker has not seen.
    ledger.accept(decision(evidence=vote(2, 1, commits=False, checkpoint=1), resume=(2, 2)))
    assert ledger.checkpoint == 1
    ledger.promise(3, HELD, (0, 1))
    ledger.accept(decision(3, rollback=0, resume=(1, 1)))
    assert ledger.checkpoint == 0
    ledger.begin(2, 1)
    ledger.prepare()
    with pytest.raises(LedgerError, match="a checkpoint of step 2 is asked for by a vote that does not commit it"):
        ledger.learn(b"", commits=False, asks_checkpoint=True)


def test_a_checkpoint_ends_all_that_was_known():
    ledger = prepared(5)
    ledger.learn(b"", commits=True)
    ledger.promise(2, HELD, (0, 1))
    assert ledger.accept(decision(rollback=2, resume=(3, 1))) is CatchUp.ROLL_BACK
    assert ledger.evidence is None
    ledger.begin(3, 1)


def test_decisions_that_cannot_be_right():
    ledger = prepared()
    ledger.learn(b"v", commits=True)
    for wrong in (None, vote(1, 0)):
        ledger.promise((ledger.promised_generation or 1) + 1, HELD, (0, 1))
        assert ledger.promised_generation is not None
        with pytest.raises(LedgerError, match="is older than the vote that we know"):
            ledger.accept(decision(ledger.promised_generation, evidence=wrong))
        ledger.promised_generation = None
    behind = Ledger(2, 0)
    behind.begin(1, 1)
    behind.promise(2, HELD, (0, 1))
    with pytest.raises(LedgerError, match="commits attempt 1 of step 1, .* attempt 1 of step 1, not prepared"):
        behind.accept(decision(evidence=vote(1)))


def prepare(generation: int, *, term: int = 1, members: tuple[int, ...] = (0, 2)) -> Prepare:
    return Prepare(term=term, generation=generation, members=members, lost=(1,), reason="worker 1 was lost")


def test_membership():
    member = Member(0, 1)
    assert member.handle(prepare(2)) == MoveAndReport(2, (0, 2))
    assert member.handle(prepare(2)) == ReportAgain()
    assert member.handle(prepare(3)) == MoveAndReport(3, (0, 2))
    assert isinstance(member.handle(prepare(2)), Ignored)
    assert isinstance(member.handle(decision(2)), Ignored)
    assert member.handle(decision(3)) == Install(decision(3))
    assert member.state is MemberState.TRAINING
    assert member.handle(decision(3)) == Ignored("a decision of generation 3 in generation 3, training")
    assert member.handle(prepare(3)) == Ignored("generation 3 is installed already")


def test_an_older_coordinator_is_ignored():
    member = Member(0, 1)
    member.handle(prepare(2, term=2))
    assert member.handle(decision(2, term=1)) == Ignored("it is of term 1, the coordinator's is 2")
    assert member.handle(decision(2, term=2)) == Install(decision(2, term=2))


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize(
    "message",
    [FencedOff(term=1, generation=3, reason="it hung"), prepare(3, members=(1, 2))],
    ids=["fenced off", "left out"],
)
def test_whoever_is_left_behind_ends_itself(asked_before, message):
    member = Member(0, 1)
    if asked_before:
        member.handle(prepare(2))
    assert isinstance(member.handle(message), Leave)
    assert member.state is MemberState.FENCED_OFF
    assert member.handle(prepare(4)) == Ignored("this worker is fenced off")
