"""What a worker says again to every coordinator, and in which order."""

from elaswave.protocol.step.replayed_state import ReplayedState


def said() -> ReplayedState:
    replayed_state = ReplayedState()
    replayed_state.ended("end")
    replayed_state.part(8, 2, "part of step 8")
    replayed_state.part(4, 1, "part of step 4")
    replayed_state.link_lost(3, "lost 3")
    replayed_state.ready("ready")
    return replayed_state


def test_parts_of_checkpoints_are_said_before_the_end_whatever_happened_first():
    assert ReplayedState().standing() == []
    assert said().standing() == ["ready", "lost 3", "part of step 4", "part of step 8", "end"]


def test_a_new_generation_withdraws_the_end_and_the_broken_links():
    replayed_state = said()
    replayed_state.moved()
    assert replayed_state.standing() == ["ready", "part of step 4", "part of step 8"]


def test_a_settled_checkpoint_is_not_spoken_of_any_more():
    replayed_state = said()
    replayed_state.part(4, 2, "again")
    replayed_state.settled(4)
    replayed_state.settled(5)
    assert replayed_state.standing() == ["ready", "lost 3", "part of step 8", "end"]


def test_a_rollback_makes_later_parts_void():
    replayed_state = said()
    replayed_state.rolled_back(4)
    assert replayed_state.standing() == ["ready", "lost 3", "part of step 4", "end"]


def test_a_notice_stands_until_the_end_and_is_said_before_it():
    replayed_state = said()
    replayed_state.leaving("leaves")
    assert replayed_state.standing() == ["ready", "lost 3", "leaves", "part of step 4", "part of step 8", "end"]
    replayed_state.moved()
    replayed_state.rolled_back(0)
    assert replayed_state.standing() == ["ready", "leaves"]
