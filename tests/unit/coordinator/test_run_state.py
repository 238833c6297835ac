"""The state of a run, record by record."""

import math

import msgspec
import pytest

from elaswave.blocks.placement import Placement
from elaswave.channel.messages.worker import Finished, StepReport, TrainingStanding
from elaswave.coordinator.records.run_state import RunState
from elaswave.errors import StateError
from elaswave.observability.events import (
    Evaluated,
    LayoutChosen,
    Recovered,
    RunFinished,
    StepTimeMeasured,
    StepTimePredicted,
)
from elaswave.observability.result import Recovery
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.search.recovery import survivor_layout
from elaswave.protocol.messages import Decision
from elaswave.store.store import CheckpointGivenUp, Entered, Published

LAYOUT = make_layout(widths=(2, 1), layers_per_stage=[1, 1], num_microbatches=4)
AFTER = survivor_layout(LAYOUT, [1])


def published(step, loss=2.0):
    return Published(step=step, loss=loss, finished_s=10.0 * step)


def chosen(generation=1, layout=LAYOUT, first_step=1, **values):
    event = LayoutChosen(
        generation=generation, layout=layout, reason="", first_step=first_step, layer_names=[], layer_parameters=[],
        start_up_s=values.pop("start_up_s", 3.0), **values,
    )  # fmt: skip
    return Entered(event=event)


def finished(worker, generation=1, step=2, stopped=False):
    standing = TrainingStanding(generation=generation, step=step, num_updates=step, calibrated=True, exponents=[])
    return Finished(
        worker=worker, standing=standing, stopped=stopped, owner_digests={}, followed_digests={}, follower_digests={},
        optimizer_bytes=0, peak_bytes=0, bytes_sent=0,
    )  # fmt: skip


def reported(step, attempt=1, generation=1):
    return msgspec.structs.replace(REPORT, step=step, attempt=attempt, generation=generation)


REPORT = StepReport(
    worker=0, generation=1, step=1, attempt=1, loss=2.0, norm=1.0, learning_rate=0.1, duration_s=9.0,
    phases_s={}, retries=[], vector=b"", change=0, checkpoint=0,
)  # fmt: skip


def state_of(*records, **options) -> RunState:
    state = RunState(LAYOUT, **options)
    for record in records:
        state.apply(record)
    return state


def test_losses_follow_each_other():
    state = state_of(published(1), published(2, 1.5))
    assert (state.losses, state.last_step, state.finished_s) == ([2.0, 1.5], 2, {1: 10.0, 2: 20.0})
    assert state.is_new_loss(3, 1.0)
    assert not state.is_new_loss(2, 1.5)
    with pytest.raises(StateError, match=r"step 4 was reported, but step 3 never was"):
        state.is_new_loss(4, 1.0)
    with pytest.raises(StateError, match=r"step 2 had the loss 1.5 and, repeated, 1.25; in bitwise mode"):
        state.is_new_loss(2, 1.25)
    assert state.losses == [2.0, 1.5], "asking changes nothing"


def test_a_loss_that_is_no_number_equals_itself():
    assert not state_of(published(1, math.nan)).is_new_loss(1, math.nan)


def test_without_bitwise_consistency_a_repeated_step_may_have_another_loss():
    state = state_of(published(1), repeats_exactly=False)
    assert state.is_new_loss(1, 1.75) and not state.is_new_loss(1, 2.0)
    state.apply(published(1, 1.75))
    assert state.losses == [1.75]


def test_a_resumed_run_begins_behind_its_checkpoint():
    state = state_of(losses=[3.0, 2.5], val_losses={2: 2.75})
    assert (state.first_step, state.last_step, state.val_losses) == (3, 2, {2: 2.75})
    state.apply(published(3))
    assert state.losses == [3.0, 2.5, 2.0]


def test_validation_losses_by_step():
    state = state_of(Entered(event=Evaluated(step=2, loss=1.5)), Entered(event=Evaluated(step=4, loss=math.nan)))
    assert list(state.val_losses) == [2, 4] and math.isnan(state.val_losses[4])
    assert not state.is_new_validation(2, 1.25), "a repeated one has the same loss, or is not to be looked at"
    assert state.is_new_validation(6, 1.0)
    other = state_of(Entered(event=Evaluated(step=2, loss=1.5)), repeats_exactly=False)
    assert other.is_new_validation(2, 1.25) and not other.is_new_validation(2, 1.5)


def test_the_first_layout_is_shown_when_every_member_is_ready():
    state = state_of()
    assert [state.ready(worker) for worker in (0, 0, 2)] == [False, False, False]
    assert state.ready(1)
    state.apply(chosen())
    assert not state.ready(1), "once is enough"


def test_layouts_and_their_steps():
    state = state_of(published(1), published(2), chosen(), chosen(2, AFTER, first_step=3))
    assert (state.generation, state.members, state.layout, state.start_up_s) == (2, AFTER.workers, AFTER, 3.0)
    assert state.layout_of(2) == LAYOUT and state.layout_of(3) == AFTER
    assert state.layout_of(3, generation=1) == LAYOUT, "it was committed before the loss was known"
    assert state.layout_before(2) == LAYOUT and state.layout_before(1) == LAYOUT
    assert state_of().layout == LAYOUT and state_of().layout_of(1) == LAYOUT


def test_a_change_that_is_heard_of_after_its_generation_does_not_bring_the_lost_back():
    state = state_of(chosen())
    state.new_generation(2)
    state.apply(chosen(1, LAYOUT, first_step=2, change=1))
    assert (state.generation, state.newest_change) == (2, 1)
    state.apply(chosen(2, AFTER, first_step=3))
    assert state.members == AFTER.workers


def test_predicted_and_measured_times_belong_to_the_newest_layout():
    state = state_of(chosen())
    assert state.lacks_prediction()
    state.apply(Entered(event=StepTimePredicted(generation=1, change=0, predicted_step_s=0.5)))
    assert not state.lacks_prediction()
    state.apply(
        Entered(
            event=StepTimeMeasured(generation=1, change=0, predicted_step_s=0.5, measured_step_s=0.75, num_steps=4),
        )
    )
    assert (state.generations[0].predicted_step_s, state.generations[0].measured_step_s) == (0.5, 0.75)
    assert not state_of().lacks_prediction()


def test_step_times_count_from_one_end_to_the_next():
    state = state_of(chosen())
    for step, attempt in ((1, 1), (2, 1), (3, 2), (4, 1)):
        state.apply(published(step))
        state.time_step(reported(step, attempt), 10.0 * step)
    measured = state.step_time_measured()
    assert measured is not None
    assert (measured.measured_step_s, measured.num_steps) == (10.0, 2), "not the first, nor one that was tried again"
    state.apply(Entered(event=measured))
    assert state.step_time_measured() is None, "they are told once"
    assert state_of(published(1)).step_time_measured() is None


def test_recoveries_and_restarts():
    lost = Recovery(
        kind="lost", worker=1, step=2, phase="any", detected_by="exit", generation=2, attempt=1, outcome="retried",
        detect_s=None, agree_s=0.0, plan_s=0.0, edit_s=0.0, promote_s=0.0, redo_s=0.0, total_s=0.1, critical_bytes=0,
        num_microbatches_recomputed=0,
    )  # fmt: skip
    restart = msgspec.structs.replace(lost, kind="coordinator", worker=None)
    state = state_of(Entered(event=Recovered(recovery=lost)), Entered(event=Recovered(recovery=restart)))
    assert (state.recoveries, state.num_restarts) == ([lost, restart], 1)
    decision = Decision(
        term=1, generation=3, members=(0,), lost=(1, 2), evidence=None, resume_step=1, resume_attempt=1, layout=LAYOUT,
        placement=Placement.of((0,), ((),)), deliver=(), rollback=None, evaluate=False, checkpoint=False, published=0,
        promoted=0, reason="",
    )  # fmt: skip
    assert state.unreported(decision) == ((2,), (), ())
    decision = msgspec.structs.replace(decision, joined=(3,), left=(4,))
    assert state.unreported(decision) == ((2,), (3,), (4,))
    joined = msgspec.structs.replace(lost, kind="joined", worker=3)
    state.apply(Entered(event=Recovered(recovery=joined)))
    assert state.unreported(decision) == ((2,), (), (4,))


def test_planned_changes_that_move_layers_or_follow_slow_workers_are_entries():
    wider = make_layout(widths=(1, 2), layers_per_stage=[1, 1], num_microbatches=4)
    state = state_of(
        chosen(),
        chosen(layout=wider, first_step=5, change=1),
        chosen(layout=wider, first_step=8, change=2, speeds={2: 0.5}),
        chosen(layout=wider, first_step=9, change=3, speeds={2: 0.5}),
        chosen(generation=2, layout=AFTER, first_step=11),
    )
    found = [(each.kind, each.worker, each.step) for each in state.recoveries]
    assert found == [("migrated", None, 5), ("slowed", 2, 8)]


def test_the_end_is_known_when_every_member_has_finished_in_this_generation():
    state = state_of(published(1), published(2))
    for worker in (0, 1):
        state.finish(finished(worker))
    assert not state.all_finished
    state.finish(finished(2, generation=0))
    assert not state.all_finished, "an older generation's"
    state.finish(finished(2))
    assert state.all_finished and not state.was_stopped
    state.finish(finished(2, step=3))
    assert not state.all_finished, "a loss is still to come"
    state.finish(finished(2, stopped=True))
    assert state.was_stopped
    state.new_generation(2)
    assert not state.finished and state.generation == 2


def test_the_outcome_outlives_the_coordinator():
    assert state_of().outcome is None
    state = state_of(chosen(), Entered(event=RunFinished(outcome="failed", steps=1, duration_s=1.0, reason="why")))
    assert (state.outcome, state.reason) == ("failed", "why")
    assert not state.lacks_prediction(), "nothing is entered after the end"


def test_a_checkpoint_that_was_given_up_changes_nothing_here():
    before, after = state_of(published(1)), state_of(published(1), CheckpointGivenUp(step=1))
    assert vars(before) == vars(after)


def test_throughput_leaves_out_the_first_steps():
    records = [published(step) for step in range(1, 6)]
    assert state_of(*records[:3]).samples_per_s(8) is None
    assert state_of(*records).samples_per_s(8) == 4 * 8 / 10.0
    assert state_of(chosen(), *records).samples_per_s(8) == 4 * 8 / 10.0


def test_a_live_state_and_a_restored_one_are_equal():
    records = [chosen(), published(1), Entered(event=Evaluated(step=1, loss=1.5)), chosen(2, AFTER, first_step=2)]
    live = state_of(records[0])
    live.apply(records[1])
    live.time_step(reported(1), 10.0)
    live.apply(records[2])
    live.new_generation(2)
    live.apply(records[3])
    assert vars(live) == vars(state_of(*records))
