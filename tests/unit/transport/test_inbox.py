"""The bookkeeping of frames that no receive has asked for yet: what is counted against the bound, and until when."""

import pytest
import torch

from elaswave.errors import FrameError
from elaswave.transport.interface import BYTES_CODE, Failures, FrameHeader, Handle, Tag
from elaswave.transport.link import Inbox

TAG = Tag(channel=1, step=1, attempt=0)
LIMIT = 1000


def header(generation: int, length: int) -> FrameHeader:
    return FrameHeader(generation, TAG, BYTES_CODE, (length,), length)


def take(inbox: Inbox) -> bool:
    """Asks for the oldest frame; whether it was here."""
    return inbox.post(Handle("recv", 0, TAG, Failures()))


def arrive(inbox: Inbox, generation: int, length: int) -> None:
    inbox.deliver(header(generation, length), [memoryview(bytes(length))])


def assert_room(inbox: Inbox, length: int) -> None:
    """Exactly so many bytes are still taken."""
    with pytest.raises(FrameError, match=f"sent {LIMIT + 1} bytes that were not asked for, the limit is {LIMIT}"):
        inbox.begin(header(inbox.generation, length + 1))
    arrive(inbox, inbox.generation, length)


def test_a_frame_of_the_next_generation_that_is_half_here_keeps_its_share_of_the_bound():
    """It began to arrive before this worker came to its generation, and goes on arriving."""
    inbox = Inbox(0, 0, LIMIT)
    frame = inbox.begin(header(1, 600))
    inbox.advance(1, frame)
    inbox.finish(frame)
    assert_room(inbox, 400)
    assert take(inbox) and take(inbox)
    assert_room(inbox, 1000)


def test_a_frame_that_is_dropped_with_its_generation_gives_its_share_back():
    inbox = Inbox(0, 0, LIMIT)
    frame = inbox.begin(header(0, 600))
    inbox.advance(1, frame)
    inbox.finish(frame)
    assert not inbox.has_frame(TAG)
    assert_room(inbox, 1000)


def test_frames_of_later_generations_keep_their_share_when_an_generation_begins():
    inbox = Inbox(0, 0, LIMIT)
    for generation in (0, 1, 2):
        arrive(inbox, generation, 300)
    inbox.advance(1, None)
    assert_room(inbox, 400)


def test_a_frame_that_will_never_be_whole_gives_its_share_back():
    inbox = Inbox(0, 0, LIMIT)
    inbox.abandon(inbox.begin(header(0, 600)), FrameError("cut off"))
    assert_room(inbox, 1000)


def test_a_frame_that_is_asked_for_counts_nothing():
    inbox = Inbox(0, 0, LIMIT)
    handle = Handle("recv", 0, TAG, Failures())
    inbox.post(handle)
    arrive(inbox, 0, 900)
    assert handle.done and isinstance(handle.result, torch.Tensor)
    assert_room(inbox, 1000)
