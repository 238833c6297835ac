"""What a recovery report says must not depend on the order in which survivors' messages come."""

from pathlib import Path

import msgspec
import pytest

from elaswave.blocks.placement import Placement
from elaswave.channel.messages.worker import StepReport
from elaswave.coordinator.records.recoveries import RecoveryLog, layout_changed
from elaswave.faults.injection import FaultRecord
from elaswave.observability.events import LayoutChosen
from elaswave.observability.processes import clock_here
from elaswave.observability.result import Recovery
from elaswave.observability.run_folder import FAULTS_FILE
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.search.recovery import survivor_layout
from elaswave.protocol.detection.detector import WorkerActivity
from elaswave.protocol.events import NewGeneration, Suspected
from elaswave.protocol.messages import Decision, Installed
from elaswave.types import Layout

LAYOUT = make_layout(widths=(1, 3), layers_per_stage=(2, 2), num_microbatches=5)


@pytest.fixture
def log(tmp_path: Path) -> RecoveryLog:
    return RecoveryLog(tmp_path, 20)


def _lose(
    log: RecoveryLog,
    worker: int,
    generation: int,
    layout: Layout = LAYOUT,
    *,
    step: int = 3,
    received: tuple[int, str] | None = None,
) -> Layout:
    """A worker is lost in a step, and the survivors are told how to go on.

    Args:
        heard: step and label of its last heartbeat.
    """
    at, label = received or (step, "backward")
    log.seen(worker, WorkerActivity(generation - 1, at, 1, label, computing=True, waiting_on=(), since_s=0.0))
    log.new_generation(
        NewGeneration(generation, (Suspected(worker, "exit", "it has ended"),)), layout, now_s=10.0 * generation
    )
    after = survivor_layout(layout, [worker])
    decision = Decision(
        term=1,
        generation=generation,
        members=after.workers,
        lost=(worker,),
        evidence=None,
        resume_step=step,
        resume_attempt=2,
        layout=after,
        placement=Placement.of((), ()),
        deliver=(),
        rollback=None,
        evaluate=False,
        checkpoint=False,
        published=step - 1,
        promoted=4,
        reason="it has ended",
        num_microbatches_recomputed=3,
    )
    log.decided(decision, now_s=10.0 * generation + 1, plan_s=0.25)
    return after


def _installed(worker: int, generation: int = 2) -> Installed:
    return Installed(worker=worker, generation=generation, edit_s=0.1 * worker, promote_s=0.2, critical_bytes=1000)


def _report(step: int, generation: int) -> StepReport:
    return StepReport(
        worker=1,
        generation=generation,
        step=step,
        attempt=2,
        loss=1.0,
        norm=1.0,
        learning_rate=0.1,
        duration_s=2.0,
        phases_s={},
        vector=b"",
        change=0,
        checkpoint=0,
        retries=[],
        skipped=None,
        skipped_microbatch=None,
        skipped_layer=None,
    )


def _summary(recovery: Recovery) -> tuple[int, float, float]:
    return recovery.critical_bytes, round(recovery.edit_s, 3), recovery.total_s


def test_the_redone_step_completes_a_recovery(log: RecoveryLog) -> None:
    _lose(log, 0, 2)
    for worker in (1, 2, 3):
        log.installed(_installed(worker))
    assert log.resumed(22.0) == []
    (recovery,) = log.committed(_report(3, 2), 24.0)
    assert _summary(recovery) == (3000, 0.3, 4.0)
    assert recovery.num_microbatches_recomputed == 3
    assert log.committed(_report(4, 2), 26.0) == log.flush() == []


@pytest.mark.parametrize(
    ("received", "label", "place"),
    [
        (1, "backward", (3, "any")),
        (2, "1F0", (3, "any")),
        (2, "reduce", (3, "any")),
        (2, "vote", (2, "vote")),
        (2, "apply", (2, "apply")),
        (3, "1F0", (3, "forward")),
    ],
)
def test_a_heartbeat_older_than_the_last_vote_does_not_tell_the_step(
    log: RecoveryLog, received: int, label: str, place: tuple[int, str]
) -> None:
    """Steps may be quicker than heartbeats."""
    _lose(log, 0, 2, received=(received, label))
    log.resumed(21.5)
    (recovery,) = log.committed(_report(3, 2), 24.0)
    assert (recovery.step, recovery.phase) == place
    assert recovery.outcome == ("retried" if place[0] == 3 else "committed")
    assert (recovery.redo_s > 0) == (place[0] == 3)


def test_a_step_that_is_redone_before_everybody_was_heard_waits_for_what_they_have_to_say(log: RecoveryLog) -> None:
    """Each worker has a connection of its own, so the step's report may overtake what another has said before."""
    _lose(log, 0, 2)
    log.installed(_installed(1))
    assert log.committed(_report(3, 2), 24.0) == []
    for worker in (2, 3):
        log.installed(_installed(worker))
    (recovery,) = log.resumed(25.0)
    assert _summary(recovery) == (3000, 0.3, 4.0)
    assert recovery.redo_s == 2.0  # from the beginning of the step that was redone
    assert log.committed(_report(4, 2), 26.0) == log.flush() == []


def test_a_step_that_is_done_before_the_last_was_heard_takes_no_negative_time(log: RecoveryLog) -> None:
    _lose(log, 0, 2)
    for worker in (1, 2, 3):
        log.installed(_installed(worker))
    assert log.resumed(24.5) == []
    (recovery,) = log.committed(_report(3, 2), 24.0)
    assert recovery.redo_s == 2.0 and recovery.total_s == 4.0
    assert log.describe(recovery).endswith("step redone in 2000 ms (3 micro-batches run again)")


def test_a_survivor_that_is_lost_before_it_was_heard_holds_no_report_up(log: RecoveryLog) -> None:
    after = _lose(log, 0, 2)
    log.installed(_installed(1))
    assert log.committed(_report(3, 2), 24.0) == []
    _lose(log, 2, 3, after, step=4)
    (recovery,) = log.committed(_report(4, 3), 34.0)
    assert (recovery.worker, recovery.generation, recovery.outcome) == (0, 2, "retried")
    assert _summary(recovery) == (1000, 0.1, 4.0)
    log.installed(_installed(1, generation=3))
    log.installed(_installed(3, generation=3))
    (second,) = log.resumed(35.0)
    assert (second.worker, second.generation, second.critical_bytes) == (2, 3, 2000)


def test_another_loss_before_the_decision_is_carried_out_continues_the_recovery(log: RecoveryLog) -> None:
    after = _lose(log, 0, 2)
    log.installed(_installed(1))
    _lose(log, 2, 3, after)
    for worker in (1, 3):
        log.installed(_installed(worker, generation=3))
    assert log.resumed(32.0) == []
    recoveries = log.committed(_report(3, 3), 34.0)
    assert [(each.worker, each.generation, each.critical_bytes) for each in recoveries] == [(0, 3, 2000), (2, 3, 2000)]


def test_the_end_of_the_job_completes_what_is_left(log: RecoveryLog) -> None:
    _lose(log, 0, 2)
    assert log.committed(_report(3, 2), 24.0) == []
    (recovery,) = log.flush()
    assert _summary(recovery) == (0, 0.0, 4.0)
    assert log.flush() == []


def test_nothing_is_reported_of_a_loss_that_nobody_has_decided_upon(log: RecoveryLog) -> None:
    log.new_generation(NewGeneration(2, (Suspected(0, "exit", "it has ended"),)), LAYOUT, now_s=20.0)
    assert log.resumed(21.0) == log.committed(_report(3, 1), 22.0) == log.flush() == []


def _change_members(
    log: RecoveryLog, generation: int, *, joined: tuple[int, ...] = (), left: tuple[int, ...] = ()
) -> None:
    """Members have paused before step 7; others come and go, and all are told how to go on."""
    log.new_generation(NewGeneration(generation, (), joined, left), LAYOUT, now_s=10.0 * generation)
    members = tuple(sorted({*LAYOUT.workers, *joined} - set(left)))
    decision = Decision(
        term=1, generation=generation, members=members, lost=(), evidence=None, resume_step=7, resume_attempt=1,
        layout=LAYOUT,
        placement=Placement.of((), ()), deliver=(), rollback=None, evaluate=False, checkpoint=False, published=6,
        promoted=0, reason="members have changed", joined=joined, left=left,
    )  # fmt: skip
    log.decided(decision, now_s=10.0 * generation + 1, plan_s=0.25)


def test_joins_and_leaves_have_entries_that_begin_with_the_pause(log: RecoveryLog) -> None:
    _change_members(log, 2, joined=(4,), left=(1,))
    log.installed(_installed(3))
    assert log.resumed(22.0) == [], "the next step is not known to be done"
    joined, drained = log.committed(_report(7, 2), 23.0)
    assert [(each.kind, each.worker, each.detected_by) for each in (joined, drained)] == [
        ("joined", 4, None),
        ("drained", 1, "drain"),
    ]
    for each in (joined, drained):
        assert (each.step, each.generation, each.outcome, each.detect_s) == (7, 2, "committed", None)
        assert (each.agree_s, each.plan_s, each.redo_s, each.total_s) == (0.75, 0.25, 0.0, 2.0)
        assert not each.is_failure
    assert log.describe(joined) == "worker 4 has joined: training paused for 2000 ms"
    assert log.describe(drained) == "worker 1 has left: training paused for 2000 ms"


def test_a_joiner_that_is_lost_before_the_decision_has_not_joined(log: RecoveryLog) -> None:
    log.new_generation(NewGeneration(2, (), (4,)), LAYOUT, now_s=20.0)
    _lose(log, 4, 3)
    log.resumed(32.0)
    assert [(each.kind, each.worker) for each in log.committed(_report(3, 3), 33.0)] == [("lost", 4)]


def _changed(layout: Layout, **speeds: float) -> LayoutChosen:
    by_worker = {int(name[1:]): speed for name, speed in speeds.items()}
    return LayoutChosen(generation=2, layout=layout, reason="planned", first_step=9, change=1, speeds=by_worker)


def test_a_planned_change_is_a_slow_down_or_a_migration_or_nothing_to_tell() -> None:
    other = make_layout(widths=(1, 3), layers_per_stage=(1, 3), num_microbatches=5)

    def found(event: LayoutChosen, speeds: dict[int, float]) -> list[tuple[str, int | None, int]]:
        return [(each.kind, each.worker, each.step) for each in layout_changed(event, LAYOUT, speeds)]

    assert found(_changed(other), {}) == [("migrated", None, 9)]
    assert found(_changed(LAYOUT), {}) == [], "micro-batches are divided in another way"
    assert found(_changed(other, w1=0.5, w2=0.8), {2: 0.8}) == [("slowed", 1, 9)]
    assert found(_changed(LAYOUT, w1=0.5), {1: 0.7}) == [("slowed", 1, 9)]
    assert found(_changed(other, w1=0.9), {1: 0.5}) == [("migrated", None, 9)], "it has become faster"
    assert found(_changed(LAYOUT, w1=1.0), {1: 2.0}) == [], "as fast as configured"


@pytest.mark.parametrize("is_own_clock", [True, False])
def test_a_fault_of_another_clock_is_counted_from_when_it_was_noticed(log: RecoveryLog, is_own_clock: bool) -> None:
    record = FaultRecord(
        position=0,
        fault="kill:0@3",
        worker=0,
        step=3,
        attempt=1,
        phase="vote",
        action=0,
        time_s=19.5,
        clock=clock_here() if is_own_clock else "of another host",
    )
    (log._run_dir / FAULTS_FILE).write_bytes(msgspec.json.encode(record) + b"\n")
    _lose(log, 0, 2)
    for worker in (1, 2, 3):
        log.installed(_installed(worker))
    log.resumed(22.0)
    (recovery,) = log.committed(_report(3, 2), 24.0)
    assert (recovery.step, recovery.phase) == (3, "vote")
    assert (recovery.detect_s, recovery.total_s) == ((0.5, 4.5) if is_own_clock else (None, 4.0))
