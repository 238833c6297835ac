"""What a worker asks for in its votes because the coordinator has told it to."""

from types import SimpleNamespace
from typing import cast

from elaswave.channel.messages.worker import Stop, TakeCheckpoint
from elaswave.protocol.step.ballot import Request
from elaswave.transport.interface import Transport
from elaswave.worker.control import Mailbox


def mailbox() -> Mailbox:
    return Mailbox(3, cast(Transport, SimpleNamespace(address="unix:/nowhere")))


def test_a_checkpoint_is_asked_for_until_a_vote_has_taken_it() -> None:
    box = mailbox()
    assert box.request is Request.NONE
    box.receive(TakeCheckpoint(generation=1, after=5))
    assert box.request is Request.CHECKPOINT
    box.asked_for_checkpoint(1, 5)
    assert box.request is Request.CHECKPOINT, "step 5 was committed before it was asked for"
    box.asked_for_checkpoint(1, 6)
    assert box.request is Request.NONE


def test_what_comes_twice_or_late_makes_no_second_checkpoint() -> None:
    box = mailbox()
    box.asked_for_checkpoint(1, 7)
    for _ in range(2):
        box.receive(TakeCheckpoint(generation=1, after=6))
        assert box.request is Request.NONE
    box.receive(TakeCheckpoint(generation=2, after=3))
    assert box.request is Request.CHECKPOINT, "after a return to a checkpoint step 7 is void"
    box.asked_for_checkpoint(2, 4)
    assert box.request is Request.NONE


def test_the_end_is_stronger() -> None:
    box = mailbox()
    box.receive(TakeCheckpoint(generation=1, after=0))
    box.receive(Stop())
    assert box.request is Request.STOP
