"""What a worker says again to every coordinator, and in which order."""

from elaswave.protocol.step.facts import Facts


def said() -> Facts:
    facts = Facts()
    facts.ended("end")
    facts.part(8, 2, "part of step 8")
    facts.part(4, 1, "part of step 4")
    facts.link_lost(3, "lost 3")
    facts.ready("ready")
    return facts


def test_parts_of_checkpoints_are_said_before_the_end_whatever_happened_first():
    assert Facts().standing() == []
    assert said().standing() == ["ready", "lost 3", "part of step 4", "part of step 8", "end"]


def test_a_new_epoch_withdraws_the_end_and_the_broken_links():
    facts = said()
    facts.moved()
    assert facts.standing() == ["ready", "part of step 4", "part of step 8"]


def test_a_settled_checkpoint_is_not_spoken_of_any_more():
    facts = said()
    facts.part(4, 2, "again")
    facts.settled(4)
    facts.settled(5)
    assert facts.standing() == ["ready", "lost 3", "part of step 8", "end"]


def test_a_rollback_makes_later_parts_void():
    facts = said()
    facts.rolled_back(4)
    assert facts.standing() == ["ready", "lost 3", "part of step 4", "end"]


def test_a_notice_stands_until_the_end_and_is_said_before_it():
    facts = said()
    facts.leaving("leaves")
    assert facts.standing() == ["ready", "lost 3", "leaves", "part of step 4", "part of step 8", "end"]
    facts.moved()
    facts.rolled_back(0)
    assert facts.standing() == ["ready", "leaves"]
