"""The coordinator's machine, as transcripts: what happens, and what it does, in its order."""

import msgspec
import pytest
from tests.protocol.machines import (
    FIVE,
    coordinator,
    registered,
    report,
    shown,
    started,
    suspicion,
    vote,
)

from elaswave.protocol.coordinator.decisions import can_reach
from elaswave.protocol.coordinator.machine import Bounds, Coordinator
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import (
    CheckpointFound,
    Decided,
    End,
    EvidenceSeen,
    FindCheckpoint,
    NewGenerationRecord,
    Persist,
    Record,
    Send,
    StartRecord,
    WorkerFailed,
)
from elaswave.protocol.messages import BlockReplicas, Decision, Installed, Report, Unsound
from elaswave.protocol.step.salvage import AccumulatedUnits, Partial


def persisted(effects) -> list[Record]:
    return [effect.record for effect in effects if isinstance(effect, Persist)]


def decision_of(effects) -> Decision:
    (decided,) = [effect.decision for effect in effects if isinstance(effect, Decided)]
    return decided


def test_a_loss_from_start_to_end():
    machine = coordinator()
    assert shown(machine.begin()) == ["persist term of term 1"]
    assert shown(machine.handle(registered(0), 0.0)) == []
    assert shown(machine.handle(registered(2), 0.0)) == []
    assert shown(machine.handle(registered(1), 0.0)) == ["persist start of term 1", "start [0, 1, 2]"]
    assert machine.handle(EvidenceSeen(vote(1), 1), 0.0) == []
    assert shown(machine.handle(suspicion(1), 0.0)) == [
        "persist new generation 2",
        "to 0: prepare 2 of term 1: [0, 2]",
        "to 2: prepare 2 of term 1: [0, 2]",
        "to 1: fenced at 2",
        "show generation 2",
    ]
    assert machine.state is CoordinatorState.COLLECTING
    # Worker 0 has seen the vote on step 2; worker 2 has not, but it was prepared, as every voter is.
    assert machine.handle(report(0, 2, evidence=vote(2), step=2, prepared=True), 0.0) == []
    late = report(2, 2, evidence=vote(1), step=2, prepared=True)
    effects = machine.handle(late, 0.0)
    assert shown(effects) == [
        "persist decision 2 of term 1: [0, 2] resume 3.1, vote 2.1",
        "to 0: decision 2 of term 1: [0, 2] resume 3.1, vote 2.1",
        "to 2: decision 2 of term 1: [0, 2] resume 3.1, vote 2.1",
        "decided 2",
    ]
    assert set(decision_of(effects).placement.owner) <= {0, 2}
    assert (2, 1) in decision_of(effects).deliver, "its parameters are of step 1"
    assert machine.state is CoordinatorState.TRAINING
    installed = [Installed(worker=w, generation=2, edit_s=0, promote_s=0, critical_bytes=0) for w in (0, 2, 0)]
    assert [shown(machine.handle(event, 0.0)) for event in installed] == [[], ["resumed 2"], []]


def test_without_evidence_the_step_is_tried_again():
    machine = started()
    machine.handle(suspicion(1), 0.0)
    machine.handle(report(0, 2, step=1, attempt=2, prepared=True), 0.0)
    effects = machine.handle(report(2, 2, step=1, attempt=2), 0.0)
    assert shown(effects)[0] == "persist decision 2 of term 1: [0, 2] resume 1.3"


def test_a_vote_that_asked_for_another_attempt_is_passed_on():
    machine = started()
    machine.handle(suspicion(1), 0.0)
    machine.handle(report(0, 2, evidence=vote(1, 1, commits=False), step=1, prepared=True), 0.0)
    effects = machine.handle(report(2, 2, step=1, prepared=True), 0.0)
    assert shown(effects)[0] == "persist decision 2 of term 1: [0, 2] resume 1.2, vote 1.1"


def test_the_coordinators_own_log_counts():
    machine = started()
    machine.handle(EvidenceSeen(vote(1), 1), 0.0)
    machine.handle(suspicion(1), 0.0)
    machine.handle(report(0, 2, step=1, prepared=True), 0.0)
    effects = machine.handle(report(2, 2, step=1, prepared=True), 0.0)
    assert shown(effects)[0] == "persist decision 2 of term 1: [0, 2] resume 2.1, vote 1.1"


@pytest.mark.parametrize(
    ("evidence", "step", "asked"),
    [
        pytest.param(vote(2, checkpoint=2), 2, True, id="by the newest vote"),
        pytest.param(vote(3, commits=False, checkpoint=2), 3, True, id="and the next one does not commit"),
        pytest.param(vote(2, checkpoint=1), 2, False, id="of an earlier step"),
        pytest.param(vote(2), 2, False, id="never"),
    ],
)
def test_a_checkpoint_that_a_vote_asked_for_is_remembered_by_the_decision(evidence, step, asked):
    machine = coordinator()
    for worker in range(3):
        machine.handle(registered(worker), 0.0)
    machine.handle(suspicion(0), 0.0)  # the lowest member, who had asked
    machine.handle(report(1, 2, evidence=evidence, step=step, prepared=True), 0.0)
    effects = machine.handle(report(2, 2, evidence=evidence, step=step, prepared=True), 0.0)
    assert machine.asked.base == 2
    assert decision_of(effects).checkpoint is asked


def lose_one(machine: Coordinator) -> list[Record]:
    records = persisted(machine.handle(suspicion(1), 0.0))
    machine.handle(report(0, 2), 0.0)
    return records + persisted(machine.handle(report(2, 2), 0.0))


def test_a_lost_workers_late_vote_does_not_count():
    machine = started()
    lose_one(machine)
    assert shown(machine.handle(EvidenceSeen(vote(1), 1), 0.0)) == [
        "note: a vote of generation 1 comes after the decision of generation 2"
    ]


def test_a_new_coordinator_asks_again_and_decides_the_same():
    first = started()
    records = persisted(first.begin()) + persisted(first.handle(suspicion(1), 0.0))
    second = coordinator(records)
    assert second.state is CoordinatorState.COLLECTING
    assert shown(second.begin()) == [
        "persist term of term 2",
        "to 0: prepare 2 of term 2: [0, 2]",
        "to 2: prepare 2 of term 2: [0, 2]",
    ]
    # A member that has answered the first one says so when it registers; the other is asked.
    answered = report(0, 2)
    assert second.handle(registered(0, 2, answered), 0.0) == []
    # No process knows whether the first one's start has reached all members, so it is said again.
    assert shown(second.handle(registered(2), 0.0)) == ["start [0, 2]", "to 2: prepare 2 of term 2: [0, 2]"]
    assert shown(second.handle(report(2, 2), 0.0))[0] == "persist decision 2 of term 2: [0, 2] resume 1.2"


def test_a_stored_decision_is_sent_under_the_term_of_whoever_sends_it():
    """A worker that has heard of term 2 ignores a message of term 1, also if it is the decision it waits for."""
    first = started()
    records = persisted(first.begin()) + lose_one(first)
    second = coordinator(records)
    assert second.state is CoordinatorState.TRAINING
    assert shown(second.begin()) == ["persist term of term 2"]
    assert shown(second.handle(registered(0, 2, report(0, 2)), 0.0)) == [
        "to 0: prepare 2 of term 2: [0, 2]",
        "to 0: decision 2 of term 2: [0, 2] resume 1.2",
        "to 0: dial 2",
    ]
    assert shown(second.handle(registered(2, 2), 0.0)) == ["to 2: dial 2"], "it has installed it"
    assert "note: worker 2 registers in generation 3, the newest is 2" in shown(second.handle(registered(2, 3), 0.0))
    assert shown(second.handle(registered(1), 0.0)) == ["to 1: fenced at 2"]


def test_a_start_that_was_lost_is_said_again():
    machine = started()
    assert shown(machine.handle(registered(1), 0.0)) == ["start [0, 1, 2]"]
    first = coordinator()
    records = persisted(first.begin())
    for worker in range(3):
        records += persisted(first.handle(registered(worker), 0.0))
    second = coordinator(records)
    assert second.state is CoordinatorState.TRAINING
    assert [shown(second.handle(registered(worker), 0.0)) for worker in range(3)] == [
        ["to 0: dial 1"],
        ["to 1: dial 1"],
        ["start [0, 1, 2]", "to 2: dial 1"],
    ]


def test_a_start_that_was_lost_is_said_before_the_question_about_a_loss():
    """A worker that does not know its peers can neither leave a generation nor report."""
    first = coordinator()
    records = persisted(first.begin())
    for worker in range(3):
        records += persisted(first.handle(registered(worker), 0.0))
    second = coordinator(records)
    for worker in (0, 2):
        assert shown(second.handle(registered(worker), 0.0)) == [f"to {worker}: dial 1"]
    assert shown(second.handle(suspicion(1), 0.0))[:4] == [
        "persist new generation 2",
        "start [0, 2]",
        "to 0: prepare 2 of term 2: [0, 2]",
        "to 2: prepare 2 of term 2: [0, 2]",
    ]


def test_what_peers_say_counts_in_their_own_generation():
    machine = started()
    assert machine.believes(0, 1, generation=1)
    assert shown(machine.handle(suspicion(1), 0.0))[0] == "persist new generation 2"
    assert machine.believes(0, 2, generation=2)
    assert not machine.believes(0, 2, generation=1), "links are made again with every new generation"
    assert not machine.believes(1, 2, generation=2), "the one that says so is no member"
    assert not machine.believes(0, 1, generation=2), "the other one is no member any more"
    assert shown(machine.handle(suspicion(1), 0.0)) == ["note: the suspicion of worker 1 does not count"]
    assert machine.generation == 2


def test_reports_that_nobody_awaits():
    machine = started()
    assert shown(machine.handle(report(0, 2), 0.0)) == ["note: a report of worker 0 for generation 2 is not awaited"]
    machine.handle(suspicion(1), 0.0)
    assert shown(machine.handle(report(0, 1), 0.0)) == ["note: a report of worker 0 for generation 1 is not awaited"]
    assert shown(machine.handle(report(1, 2), 0.0)) == ["to 1: fenced at 2"]
    assert shown(machine.handle(CheckpointFound(1, 3), 0.0)) == [
        "note: the checkpoint that answers question 1 is not waited for"
    ]
    assert shown(started().handle(registered(0, 2), 0.0))[-1] == (
        "note: worker 0 registers in generation 2, the newest is 1"
    )
    fresh = coordinator()
    assert shown(fresh.handle(registered(0, 2), 0.0)) == ["note: worker 0 registers in generation 2 at the start"]


def lose_everything_of_a_block(machine: Coordinator, *, version: int, **options) -> list:
    """Workers 1 and 2 hold some block of stage 0 between them; both are lost."""
    machine.suspect([suspicion(1), suspicion(2)], 0.0)
    for worker in (0, 3):
        machine.handle(report(worker, machine.generation, job=FIVE, version=version, **options), 0.0)
    return machine.handle(report(4, machine.generation, job=FIVE, version=version, **options), 0.0)


def test_without_a_checkpoint_the_blocks_that_were_lost_are_named():
    machine = started(FIVE)
    lost = lose_everything_of_a_block(machine, version=1, evidence=vote(1), step=2, prepared=True)
    assert shown(lost) == ["find a checkpoint"]
    assert machine.state is CoordinatorState.ROLLING_BACK
    (end,) = machine.handle(CheckpointFound(1, None), 0.0)
    assert isinstance(end, End)
    assert end.reason == (
        "all copies of 1 of 4 blocks (1) were lost with workers [1, 2], and there is no valid durable checkpoint to go "
        "back to. elastic.num_followers = 1 survives any 1 at one instant, and any number with some steps between "
        "them; 2 would survive any 2 at one instant, and auto all of a stage but one. With run.checkpoint_every or "
        "run.checkpoint_every_s the job goes back to its newest checkpoint by itself, and --resume continues from it "
        "later"
    )
    assert end.orphans == (1,)
    assert shown(machine.handle(registered(0), 0.0)) == ["note: Registered after the end is ignored"]
    assert shown(machine.suspect([suspicion(0)], 0.0)) == ["note: the suspicion of worker 0 does not count"]


def test_before_the_first_commit_what_was_lost_is_made_again_from_the_seed():
    machine = started(FIVE)
    assert shown(lose_everything_of_a_block(machine, version=0)) == ["find a checkpoint"]
    effects = machine.handle(CheckpointFound(1, None), 0.0)
    assert shown(effects)[0] == "persist decision 2 of term 1: [0, 3, 4] resume 1.1, back to 0"
    # And once more, when another one is lost before all members have begun again.
    machine.handle(suspicion(4), 0.0)
    machine.handle(report(0, 3, job=FIVE, decided=2), 0.0)
    assert shown(machine.handle(report(3, 3, job=FIVE), 0.0)) == ["find a checkpoint"]
    effects = machine.handle(CheckpointFound(3, None), 0.0)
    assert shown(effects)[0] == "persist decision 3 of term 1: [0, 3] resume 1.1, back to 0"


def test_a_resumed_job_cannot_begin_again_from_the_seed():
    machine = coordinator(job=FIVE, first_step=8)
    for worker in range(5):
        machine.handle(registered(worker), 0.0)
    lose_everything_of_a_block(machine, version=7, step=8)
    (end,) = machine.handle(CheckpointFound(1, None), 0.0)
    assert isinstance(end, End)
    assert "there is no valid durable checkpoint" in end.reason


def test_a_worker_that_never_registers_is_left_behind_and_what_it_held_is_made_again():
    machine = coordinator(job=FIVE)
    machine.begin()
    for worker in (0, 3, 4):
        assert machine.handle(registered(worker), 0.0) == []
    assert shown(machine.suspect([suspicion(1), suspicion(2)], 20.0)) == [
        "persist new generation 2",
        "start [0, 3, 4]",
        *(f"to {worker}: prepare 2 of term 1: [0, 3, 4]" for worker in (0, 3, 4)),
        "to 1: fenced at 2",
        "to 2: fenced at 2",
        "show generation 2",
    ]
    for worker in (0, 3):
        assert machine.handle(report(worker, 2, job=FIVE), 20.0) == []
    assert shown(machine.handle(report(4, 2, job=FIVE), 20.0)) == ["find a checkpoint"]
    effects = machine.handle(CheckpointFound(1, None), 20.0)
    assert shown(effects)[0] == "persist decision 2 of term 1: [0, 3, 4] resume 1.1, back to 0"
    assert shown(machine.handle(registered(1), 30.0)) == ["to 1: fenced at 2"], "it wakes up, too late"


def back_to_a_checkpoint() -> Coordinator:
    machine = started(FIVE)
    seen = vote(5)
    lose_everything_of_a_block(machine, version=5, evidence=seen, step=6, prepared=True)
    effects = machine.handle(CheckpointFound(1, 4), 0.0)
    assert shown(effects)[0] == "persist decision 2 of term 1: [0, 3, 4] resume 5.1, back to 4"
    assert "all copies of 1 of 4 blocks (1) were lost" in decision_of(effects).reason
    return machine


def test_a_return_to_a_checkpoint_that_somebody_missed_is_repeated():
    """Worker 4 was lost before worker 3 had heard of the decision: what 3 reports is of steps that do not count."""
    machine = back_to_a_checkpoint()
    machine.handle(suspicion(4), 0.0)
    machine.handle(report(0, 3, job=FIVE, version=4, step=5, decided=2), 0.0)
    old = report(3, 3, job=FIVE, evidence=vote(4), version=4, step=5, prepared=True)
    assert shown(machine.handle(old, 0.0)) == ["find a checkpoint"]
    effects = machine.handle(CheckpointFound(3, 4), 0.0)
    assert shown(effects)[0] == "persist decision 3 of term 1: [0, 3] resume 5.1, back to 4"
    assert decision_of(effects).reason == (
        "worker 4 was killed; workers [4] were lost before all members had gone back to the last checkpoint"
    )


@pytest.mark.parametrize("restarted", [False, True])
def test_the_step_to_go_on_from_outlives_the_decision_that_went_back_to_it(restarted):
    """No vote has passed since the return to step 4; neither the next loss nor the one after may forget that."""
    machine = back_to_a_checkpoint()
    placement = machine.placement

    def again(before: Coordinator) -> Coordinator:
        assert before.decision is not None
        return coordinator([before.decision], FIVE) if restarted else before

    def loaded(worker: int, generation: int, blocks: list[int]) -> Report:
        copies = BlockReplicas(blocks=blocks, owned=[False] * len(blocks), versions=[4] * len(blocks))
        plain = report(worker, generation, job=FIVE, version=4, step=5, decided=generation - 1)
        return msgspec.structs.replace(plain, copies=copies)

    machine = again(machine)
    machine.handle(suspicion(3), 0.0)
    everything = list(range(len(placement.owner)))
    machine.handle(loaded(0, 3, [block for block in everything if 0 in placement.holders(block)]), 0.0)
    assert shown(machine.handle(loaded(4, 3, everything), 0.0))[0].endswith(": [0, 4] resume 5.2")
    machine = again(machine)
    machine.handle(suspicion(0), 0.0)
    assert shown(machine.handle(loaded(4, 4, everything), 0.0))[0].endswith(": [4] resume 5.2")


def test_a_second_loss_while_a_checkpoint_is_sought():
    machine = started(FIVE)
    lose_everything_of_a_block(machine, version=0)
    assert shown(machine.handle(suspicion(4), 0.0))[0] == "persist new generation 3"
    assert machine.state is CoordinatorState.COLLECTING
    too_late = ["note: the checkpoint that answers question 1 is not waited for"]
    assert shown(machine.handle(CheckpointFound(1, 2), 0.0)) == too_late
    machine.handle(report(0, 3, job=FIVE), 0.0)
    assert shown(machine.handle(report(3, 3, job=FIVE), 0.0)) == ["find a checkpoint"]
    assert shown(machine.handle(CheckpointFound(1, 2), 0.0)) == too_late, "a newer one may be durable since"
    assert decision_of(machine.handle(CheckpointFound(2, 3), 0.0)).rollback == 3


def test_losses_that_follow_each_other_before_a_decision_are_all_named_in_it():
    machine = started(FIVE)
    machine.handle(suspicion(1), 0.0)
    [record] = persisted(machine.handle(suspicion(4), 0.0))
    assert isinstance(record, NewGenerationRecord) and record.lost == (1, 4)
    for worker in (0, 2):
        assert machine.handle(report(worker, 3, job=FIVE), 0.0) == []
    assert decision_of(machine.handle(report(3, 3, job=FIVE), 0.0)).lost == (1, 4)


def test_a_copy_is_valid_at_the_committed_step_or_just_before_it_with_its_gradients():
    evidence = vote(5)
    prepared = report(0, 2, step=5, prepared=True)
    voted = report(0, 2, step=5, evidence=evidence)
    behind, another_attempt = report(0, 2, step=5), report(0, 2, step=5, attempt=2, prepared=True)
    for each in (prepared, voted, behind, another_attempt):
        assert can_reach(5, each, evidence, 5)
        assert can_reach(4, each, evidence, 5) == (each in (prepared, voted))
        assert not can_reach(3, each, evidence, 5)
        assert not can_reach(6, each, evidence, 5)
    assert not can_reach(4, prepared, vote(5, commits=False), 5)
    assert not can_reach(4, prepared, None, 5)


def test_the_same_error_twice_ends_the_job():
    machine = started()
    assert (
        shown(machine.handle(WorkerFailed(1, "step 3, micro-batch 2", "ValueError: bad token"), 0.0))[0]
        == "persist new generation 2"
    )
    assert shown(machine.handle(WorkerFailed(0, "step 3, micro-batch 2", "ValueError: bad token"), 0.0)) == [
        "end: ValueError: bad token; the same error has ended worker 1"
    ]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_was_computed_with_wrong_numbers_is_kept_by_nobody(is_wrong):
    """Also if another coordinator takes over before the decision, and not beyond it."""

    def with_sums(worker, generation, step=1):
        rows = (AccumulatedUnits(0, 1, 0, "1"),) if worker == 0 else (AccumulatedUnits(1, 2, 0, "3"),)
        partial = Partial(worker=worker, step=step, root=1, num_microbatches=2, can_be_kept=True, rows=rows)
        return msgspec.structs.replace(report(worker, generation, step=step), partial=partial)

    machine = started()
    effects = machine.handle(WorkerFailed(1, "SpotCheckError at step 1", "other bits", is_wrong=is_wrong), 0.0)
    records = [effect.record for effect in effects if isinstance(effect, Persist)]
    for each in (machine, coordinator([StartRecord(term=1), *records])):
        if each is not machine:
            each.begin()
        for worker in (0, 2):
            each.handle(with_sums(worker, 2), 0.0)
        assert each.decision.generation == 2 and (each.decision.kept == ()) is is_wrong
        assert not each.doubts_step


def test_an_error_that_a_vote_has_shown_ends_the_job_at_once():
    """Else the others, who are about to end with it too, might be asked to go on without the first one."""
    machine = started()
    failed = WorkerFailed(1, "VoteError at step 3", "step 3 cannot be committed", is_common=True)
    assert shown(machine.handle(failed, 0.0)) == ["end: step 3 cannot be committed"]
    assert shown(machine.handle(failed._replace(worker=0), 0.0)) == ["note: WorkerFailed after the end is ignored"]


def test_the_last_workers_error_ends_the_job():
    machine = started()
    machine.handle(suspicion(1), 0.0)
    machine.handle(suspicion(2), 0.0)
    assert shown(machine.handle(WorkerFailed(0, "x", "MemoryError"), 0.0)) == ["end: MemoryError"]


def test_bounds():
    machine = coordinator(bounds=Bounds(min_workers=2, max_failures_per_hour=100))
    for worker in range(3):
        machine.handle(registered(worker), 0.0)
    machine.handle(suspicion(1), 0.0)
    assert shown(machine.handle(suspicion(2), 0.0)) == [
        "end: 1 workers are left after the loss of workers [1, 2], elastic.min_workers asks for 2"
    ]
    machine = coordinator(bounds=Bounds(min_workers=1, max_failures_per_hour=1))
    for worker in range(3):
        machine.handle(registered(worker), 0.0)
    lose_and_decide(machine)
    assert shown(machine.handle(suspicion(2), 3599.0)) == [
        "end: workers were lost 2 times within an hour, elastic.max_failures_per_hour allows 1"
    ]
    machine = coordinator(bounds=Bounds(min_workers=1, max_failures_per_hour=1))
    for worker in range(3):
        machine.handle(registered(worker), 0.0)
    lose_and_decide(machine)
    assert shown(machine.handle(suspicion(2), 3601.0))[0] == "persist new generation 3"
    assert shown(coordinator(bounds=Bounds(min_workers=3)).handle(suspicion(2), 0.0)) == [
        "end: 2 workers are left after the loss of workers [2], elastic.min_workers asks for 3"
    ]


def lose_and_decide(machine: Coordinator) -> list[Record]:
    """Worker 1 of three is lost, and the others go on. Returns what is persisted."""
    effects = machine.handle(suspicion(1), 0.0)
    for worker in (0, 2):
        effects += machine.handle(report(worker, 2), 0.0)
    assert machine.state is CoordinatorState.TRAINING
    return persisted(effects)


def test_losses_until_the_decision_are_one_event_of_those_that_an_hour_may_have():
    machine = started(FIVE, bounds=Bounds(max_failures_per_hour=1))
    machine.handle(suspicion(0), 0.0)
    assert shown(machine.handle(suspicion(3), 1.0))[0] == "persist new generation 3"
    for worker in (1, 2, 4):
        machine.handle(report(worker, 3, job=FIVE), 1.0)
    assert machine.state is CoordinatorState.TRAINING and machine.decision is not None
    assert machine.report_collection.sequence == 1, "it is planned once"
    assert machine.decision.lost == (0, 3)
    (end,) = machine.handle(suspicion(1), 2.0)
    assert end.reason.startswith("workers were lost 2 times within an hour"), end


def test_a_successor_counts_the_same_events():
    bounds = Bounds(max_failures_per_hour=1)
    first = started(FIVE, bounds=bounds)
    records: list[Record] = [StartRecord(term=1)]
    records += persisted(first.handle(suspicion(0), 0.0) + first.handle(suspicion(3), 1.0))
    second = coordinator(records, FIVE, bounds=bounds)
    assert shown(second.handle(suspicion(1), 2.0))[0] == "persist new generation 4", "nothing is decided yet"
    effects = [effect for worker in (1, 2, 4) for effect in first.handle(report(worker, 3, job=FIVE), 1.0)]
    records += persisted(effects)
    (end,) = coordinator(records, FIVE, bounds=bounds).handle(suspicion(1), 2.0)
    assert end.reason.startswith("workers were lost 2 times within an hour"), end
    # An event counts by when it began.
    assert not isinstance(coordinator(records, FIVE, bounds=bounds).handle(suspicion(1), 3600.5)[0], End)


def test_a_loss_before_everybody_has_registered():
    machine = coordinator()
    assert shown(machine.handle(registered(0), 0.0)) == []
    assert shown(machine.handle(suspicion(2), 0.0))[:1] == ["persist new generation 2"]
    assert shown(machine.handle(registered(1), 0.0)) == ["start [0, 1]", "to 1: prepare 2 of term 1: [0, 1]"]
    machine.handle(report(0, 2), 0.0)
    decided = shown(machine.handle(report(1, 2), 0.0))
    assert decided[0].startswith("persist decision"), decided


def test_nothing_is_sent_before_it_is_persisted():
    machine = started()
    begun = machine.handle(suspicion(1), 0.0)
    machine.handle(report(0, 2), 0.0)
    decided = machine.handle(report(2, 2), 0.0)
    for effects in (begun, decided):
        kinds = [type(effect) for effect in effects]
        assert kinds.index(Persist) < kinds.index(Send)


def test_a_successor_knows_what_its_predecessor_has_counted_and_been_told_of():
    """Losses within the hour, and errors of workers: both decide when a job ends."""
    first = coordinator(bounds=Bounds(min_workers=1, max_failures_per_hour=2))
    effects = [effect for worker in range(3) for effect in first.handle(registered(worker), 0.0)]
    effects += first.handle(WorkerFailed(1, "ValueError at step 3", "worker 1: ValueError: bad"), 50.0)
    records = [effect.record for effect in effects if isinstance(effect, Persist)]

    second = coordinator(bounds=Bounds(min_workers=1, max_failures_per_hour=2), records=records)
    (end,) = second.handle(WorkerFailed(2, "ValueError at step 3", "worker 2: ValueError: bad"), 60.0)
    assert isinstance(end, End) and end.worker == 2
    assert end.reason == "worker 2: ValueError: bad; the same error has ended worker 1"

    records += persisted([effect for worker in (0, 2) for effect in first.handle(report(worker, 2), 50.0)])
    third = coordinator(bounds=Bounds(min_workers=1, max_failures_per_hour=1), records=records)
    (end,) = third.handle(suspicion(2), 60.0)
    assert isinstance(end, End) and "workers were lost 2 times within an hour" in end.reason
    fourth = coordinator(bounds=Bounds(min_workers=1, max_failures_per_hour=1), records=records)
    assert not any(isinstance(effect, End) for effect in fourth.handle(suspicion(2), 3700.0))


def told_by(core: Coordinator, **replayed_state):
    """The effects of all reports of generation 2, of which worker 2's has these facts: it alone has ended the
    diagnosis."""
    effects = []
    for worker in (0, 1, 2):
        told = report(worker, 2)
        effects = core.handle(msgspec.structs.replace(told, **replayed_state) if worker == 2 else told, 0.0)
    return effects


def test_a_copy_that_any_member_knows_to_be_wrong_is_not_promoted_and_all_parameters_are_sent_again():
    core = started()
    effects = core.handle(Unsound(worker=1, generation=1, step=3, reason="a bit has flipped"), 0.0)
    assert shown(effects) == [
        "persist new generation 2",
        *(f"to {worker}: prepare 2 of term 1: [0, 1, 2]" for worker in (0, 1, 2)),
        "show generation 2",
    ]
    assert effects[-1].unsound == (1,) and not effects[-1].suspicions
    block, owner = 0, core.placement.owner[0]
    decision = decision_of(told_by(core, wrong=((block, owner),), proven=1))
    assert decision.rollback is None and decision.promoted == 1
    assert owner not in decision.placement.holders(block)
    assert {worker for worker, _ in decision.deliver} == {0, 1, 2}
    # The same, said in the generation before, is over.
    assert core.handle(Unsound(worker=0, generation=1, step=3, reason="late"), 0.0)[0].text.endswith("is not awaited")


def test_where_no_copy_is_right_the_job_goes_back_to_what_is_proven():
    core = started()
    core.handle(Unsound(worker=1, generation=1, step=3, reason="copies differ"), 0.0)
    (question,) = told_by(core, wrong=tuple((0, worker) for worker in range(3)), proven=7)
    assert question == FindCheckpoint(question.sequence, 7)
