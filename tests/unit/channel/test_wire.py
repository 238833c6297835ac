"""Sessions as pure bytes: however they are cut, messages come out whole, typed and in order."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave.channel import wire
from elaswave.channel.wire import (
    COMPRESSED_FROM_BYTES,
    COORDINATOR,
    FIRST_AGENT,
    ControlFrameKind,
    Frame,
    Session,
    agent_id,
    encode_payload,
    peer_name,
)
from elaswave.errors import AuthenticationError, FrameError

KEY = b"a key of sixteen bytes or more"


class Note(msgspec.Struct, frozen=True, tag=True):
    text: str = ""
    layout: tuple[tuple[int, ...], ...] = ()


class Mark(msgspec.Struct, frozen=True, tag=True):
    numbers: dict[int, bytes] = {}


def ends(**options) -> tuple[Session, Session]:
    return Session.dialling(KEY, 5, COORDINATOR, Note | Mark, **options), Session.listening(
        KEY, COORDINATOR, Note | Mark
    )


def joined(**options) -> tuple[Session, Session]:
    """Both ends after the handshake."""
    dialler, listener = ends(**options)
    while not (dialler.open and listener.open):
        assert listener.feed(dialler.take()) == []
        assert dialler.feed(listener.take()) == []
    return dialler, listener


def test_both_ends_open_and_know_each_other():
    dialler, listener = ends()
    assert not dialler.open and not listener.open and listener.peer == -1
    dialler, listener = joined()
    assert (dialler.peer, listener.peer) == (COORDINATOR, 5)


@given(
    messages=st.lists(
        st.builds(Note, text=st.text(max_size=50), layout=st.just(((1, 2), ())))
        | st.builds(Mark, numbers=st.dictionaries(st.integers(0, 9), st.binary(max_size=100), max_size=3)),
        max_size=5,
    ),
    cut=st.integers(1, 300),
)
@settings(max_examples=30)
def test_messages_survive_any_cut_of_the_stream(messages, cut):
    for speaker, hearer in (joined(), joined()[::-1]):
        for number, message in enumerate(messages):
            speaker.write(ControlFrameKind.MESSAGE, number, encode_payload(message))
        speaker.write(ControlFrameKind.ACK, 2**64 - 1)
        data = speaker.take()
        frames = [frame for at in range(0, len(data), cut) for frame in hearer.feed(data[at : at + cut])]
        assert frames == [
            *(Frame(ControlFrameKind.MESSAGE, number, message) for number, message in enumerate(messages)),
            Frame(ControlFrameKind.ACK, 2**64 - 1, None),
        ]
        assert speaker.take() == b""


def test_a_frame_tells_how_long_its_message_has_waited():
    speaker, hearer = joined()
    for age_s in (0.0, 0.25, -1.0, 1e9):
        speaker.write(ControlFrameKind.MESSAGE, 1, encode_payload(Note("it")), age_s)
    ages = [frame.age_s for frame in hearer.feed(speaker.take())]
    assert ages == [0.0, 0.25, 0.0, 4294967.295], "in whole milliseconds, 49 days at most"


def test_no_two_connections_say_the_same_bytes():
    (first, _), (second, _) = joined(), joined()
    for session in (first, second):
        session.write(ControlFrameKind.MESSAGE, 1, encode_payload(Note("the same")))
    ours, theirs = first.take(), second.take()
    assert ours[:-16] == theirs[:-16] and ours[-16:] != theirs[-16:]
    first.write(ControlFrameKind.MESSAGE, 1, encode_payload(Note("the same")))
    assert first.take()[-16:] != ours[-16:]


@pytest.mark.parametrize("size", [100, 4096, 20_000], ids=["short", "hashed", "compressed"])
def test_a_changed_byte_of_a_payload_ends_the_connection(size):
    """Long payloads stand in the mac by their hash."""
    message = Note(random.Random(1).randbytes(size // 2).hex())
    for at in (0, size // 2, size):
        speaker, hearer = joined()
        speaker.write(ControlFrameKind.MESSAGE, 1, encode_payload(message))
        data = bytearray(speaker.take())
        data[22 + at * (len(data) - 40) // size] ^= 1
        with pytest.raises(AuthenticationError, match="a frame that worker 5 did not send in this place"):
            hearer.feed(bytes(data))


def test_one_message_for_many_is_hashed_once():
    message = encode_payload(Note(random.Random(2).randbytes(5000).hex()))
    hashed = wire._shared_content.cache_info().misses
    for _ in range(5):
        speaker, hearer = joined()
        speaker.write(ControlFrameKind.MESSAGE, 1, message)
        (frame,) = hearer.feed(speaker.take())
        assert encode_payload(frame.message) == message
    assert wire._shared_content.cache_info().misses == hashed + 1


def test_a_message_may_be_as_large_as_agreed_and_not_a_byte_larger():
    message = Note("x" * 100)
    size = len(encode_payload(message))
    assert encode_payload(message, size)
    with pytest.raises(FrameError, match=rf"a Note of {size} bytes is larger than the {size - 1} that a control"):
        encode_payload(message, size - 1)
    dialler, listener = joined(max_message_bytes=size)
    listener.write(ControlFrameKind.MESSAGE, 0, encode_payload(message))
    assert dialler.feed(listener.take())[0].message == message
    listener.write(ControlFrameKind.MESSAGE, 0, encode_payload(Note("x" * 101)))
    with pytest.raises(FrameError, match=f"a message of {size + 1} bytes from the coordinator; at most {size}"):
        # The header alone is enough: nothing of the message is waited for or kept.
        dialler.feed(listener.take()[:18])


def test_long_messages_are_compressed_and_unpacked_within_the_limit():
    layout = tuple((worker, worker % 8) for worker in range(20_000))
    message = Note(layout=layout)
    plain = len(msgspec.msgpack.encode(message))
    payload = encode_payload(message)
    assert len(payload) < plain / 2
    dialler, listener = joined()
    dialler.write(ControlFrameKind.MESSAGE, 1, payload)
    assert listener.feed(dialler.take())[0].message == message
    noise = Mark({0: random.Random(0).randbytes(COMPRESSED_FROM_BYTES)})
    assert encode_payload(noise) == msgspec.msgpack.encode(noise), "nothing to gain"

    dialler, listener = joined(max_message_bytes=plain - 1)
    listener.write(ControlFrameKind.MESSAGE, 1, payload)
    with pytest.raises(FrameError, match=f"it is longer than {plain - 1} bytes when it is unpacked"):
        dialler.feed(listener.take())


@pytest.mark.parametrize(
    ("damage", "trouble"),
    [
        (lambda payload: payload[:-1], "does not end where its frame ends"),
        (lambda payload: payload + b"x", "does not end where its frame ends"),
        (lambda payload: payload[:100] + b"x" + payload[101:], "Error -[35]|does not end"),
    ],
)
def test_what_does_not_unpack_is_refused(damage, trouble):
    dialler, listener = joined()
    payload = encode_payload(Note("to be, or not to be. " * 2000))
    dialler.write(ControlFrameKind.MESSAGE, 1, damage(payload))
    with pytest.raises(FrameError, match=f"a malformed message from worker 5: .*({trouble})"):
        listener.feed(dialler.take())


def test_nothing_is_built_from_a_message_but_what_was_agreed():
    dialler, listener = joined()
    dialler.write(ControlFrameKind.MESSAGE, 0, msgspec.msgpack.encode({"type": "System", "command": "true"}))
    with pytest.raises(FrameError, match="a malformed message from worker 5: Invalid value 'System'"):
        listener.feed(dialler.take())


@pytest.mark.parametrize(
    ("peer", "name"),
    [(0, "worker 0"), (FIRST_AGENT - 1, "worker 2147483647"), (agent_id(7), "agent 7"),
     (COORDINATOR, "the coordinator")],
)  # fmt: skip
def test_names(peer, name):
    assert peer_name(peer) == name
