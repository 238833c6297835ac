"""Both codecs against bytes that are almost right: control messages and data frames of a real job, changed at random.

Whatever comes, a decoder answers with what it has decoded or with the two errors that it may raise, holds no more than
its bounds, and takes bytes the same however they are cut. `tests/property/corpus` has the starting points
(`record_corpus.py` makes them). A run of the suite draws the same hundred inputs for each target; `scripts/fuzz` draws
other ones for as long as it is told, and prints a failing input in its smallest form.
"""

import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave.channel.messages.agent import ToAgent, ToCoordinator
from elaswave.channel.messages.operator import ToOperator
from elaswave.channel.messages.worker import ToWorker
from elaswave.channel.wire import COORDINATOR, ControlFrameKind, Session, encode_payload
from elaswave.errors import AuthenticationError, FrameError
from elaswave.transport.handshake import Listener
from elaswave.transport.interface import HEADER_BYTES, Failures, Tag, decode_header, empty_tensor, encode_header
from elaswave.transport.link import SCRATCH_BYTES, Inbox, Link, LinkEndedError, make_recv

KEY = b"a key of sixteen bytes or more"
CORPUS = Path(__file__).with_name("corpus")
EXAMPLES = os.environ.get("ELASWAVE_FUZZ_EXAMPLES")
FUZZ = settings(max_examples=int(EXAMPLES or 100), derandomize=EXAMPLES is None)
SIDES: dict[str, Any] = {
    "coordinator": ToCoordinator,
    "worker": ToWorker,
    "agent": ToAgent,
    "operator": ToOperator,
}
"""What may arrive at whom."""
MAX_FRAME_BYTES = 1 << 16
MAX_UNEXPECTED_BYTES = 1 << 17


def corpus(name: str) -> list[bytes]:
    return [bytes.fromhex(line.split()[1]) for line in (CORPUS / f"{name}.txt").read_text().splitlines()]


MESSAGES, HEADERS = corpus("control"), corpus("frames")


@st.composite
def changed(draw: st.DrawFn, originals: list[bytes], changes_max: int = 4) -> bytes:
    """One of the originals with bytes replaced, flipped, inserted, left out, repeated, or spliced with another's."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(0, changes_max))):
        at = draw(st.integers(0, len(data)))
        stop = min(len(data), at + draw(st.integers(0, 8)))
        how = draw(st.sampled_from(["replace", "flip", "insert", "leave out", "repeat", "splice", "cut"]))
        if how == "replace":
            data[at:stop] = draw(st.binary(min_size=stop - at, max_size=stop - at))
        elif how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif how == "leave out":
            del data[at:stop]
        elif how == "repeat":
            data[at:at] = data[at:stop] * draw(st.integers(1, 3))
        elif how == "splice":
            other = draw(st.sampled_from(originals))
            data[at:] = other[draw(st.integers(0, len(other))) :]
        elif how == "cut":
            del data[at:]
    return bytes(data)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in zip(places, places[1:])]


CUTS = st.lists(st.integers(0, 1 << 16), max_size=3)

# --------------------------------------------------------------------------------------------------- control messages


def joined(receives: Any) -> tuple[Session, Session]:
    """Both ends of a control connection after the handshake; the second one hears `receives`."""
    speaker: Session = Session.dialling(KEY, 5, COORDINATOR, ToWorker)
    hearer: Session = Session.listening(KEY, COORDINATOR, receives)
    while not (speaker.open and hearer.open):
        hearer.feed(speaker.take())
        speaker.feed(hearer.take())
    return speaker, hearer


def heard(hearer: Session, data: list[bytes]) -> tuple[list[Any], str]:
    """The frames that come of the bytes, and why the connection ends then, or ""."""
    frames: list[Any] = []
    for piece in data:
        try:
            frames += hearer.feed(piece)
        except (AuthenticationError, FrameError) as error:
            return frames, str(error)
    return frames, ""


def test_the_corpus_holds_messages_to_everybody() -> None:
    for side, receives in SIDES.items():
        decoder, known = msgspec.msgpack.Decoder(receives), 0
        for message in MESSAGES:
            try:
                decoder.decode(message)
                known += 1
            except msgspec.MsgspecError:
                pass
        assert known >= 2, f"{side}: python -m tests.property.record_corpus"


@pytest.mark.parametrize("side", SIDES)
@FUZZ
@given(payload=changed(MESSAGES), kind=st.integers(0, 6), number=st.integers(0, 2**64 - 1), cuts=CUTS)
def test_what_a_peer_with_the_key_may_say(side: str, payload: bytes, kind: int, number: int, cuts: list[int]) -> None:
    """The frame's code is right, as a broken or hostile member would make it; all else may be wrong."""
    speaker, hearer = joined(SIDES[side])
    speaker.write(kind, number, payload)  # type: ignore[arg-type]
    frames, error = heard(hearer, pieces(speaker.take(), cuts))
    assert (len(frames) == 1) != bool(error)
    for frame in frames:
        assert frame.kind in ControlFrameKind and frame.number == number
        if frame.message is not None:
            again = encode_payload(frame.message)
            assert msgspec.msgpack.Decoder(SIDES[side]).decode(again) == frame.message or b"\xcb\x7f\xf8" in again
    assert len(hearer._arrived) == 0 or error


@FUZZ
@given(data=st.data(), cuts=CUTS)
def test_what_somebody_on_the_way_may_do_to_frames(data: st.DataObject, cuts: list[int]) -> None:
    """Whatever is done to a stream of frames, what is taken is a beginning of what was said."""
    speaker, hearer = joined(SIDES["coordinator"])
    for number in range(3):
        speaker.write(ControlFrameKind.HEARTBEAT, number)
    good = speaker.take()
    said = data.draw(changed([good]))
    frames, error = heard(hearer, pieces(said, cuts))
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert len(frames) <= 3 and len(hearer._arrived) <= len(said)


@FUZZ
@given(data=st.data(), cuts=CUTS)
def test_what_somebody_without_the_key_may_say(data: st.DataObject, cuts: list[int]) -> None:
    """No frame, no open connection, a few hundred bytes of memory."""
    dialler: Session = Session.dialling(b"another key of sixteen bytes", 5, COORDINATOR, ToWorker)
    hearer: Session = Session.listening(KEY, COORDINATOR, SIDES["coordinator"])
    opening = dialler.take()
    frames, error = heard(hearer, pieces(data.draw(changed([opening, opening + bytes(32), *HEADERS])), cuts))
    assert not frames and not hearer.open
    assert len(hearer._arrived) < 64 or error


@FUZZ
@given(data=st.data())
def test_the_handshake_of_links(data: st.DataObject) -> None:
    """Fixed sizes: any 50 bytes, then any 32, are refused unless they are what the key makes of them."""
    from elaswave.transport.handshake import Dialler

    dialler = Dialler(KEY, 0, 1, bytes(32))
    listener = Listener(KEY, 1, b"\1" * 32, lambda peer: None)
    hello = (data.draw(changed([dialler.opening()])) + bytes(listener.bytes_needed))[: listener.bytes_needed]
    try:
        proof = listener.receive(hello)
        answer = dialler.receive(proof)
        said = (data.draw(changed([answer])) + bytes(32))[:32]
        listener.receive(said)
    except AuthenticationError:
        assert not listener.done
    else:
        assert hello == dialler.opening() and said == answer


# -------------------------------------------------------------------------------------------------------- data frames

FRAMES = [
    *HEADERS,
    *(
        encode_header(generation, Tag(1, step, 0), tensor, tensor.nbytes) + tensor.numpy().tobytes()
        for generation in (0, 1, 2)
        for step, tensor in enumerate([torch.arange(5.0), torch.zeros(0), torch.ones(3, 2, dtype=torch.int64)])
    ),
]
STREAMS = [b"".join(FRAMES[start : start + 3]) for start in range(len(FRAMES))]


@FUZZ
@given(data=changed(HEADERS))
def test_a_header_is_refused_or_consistent(data: bytes) -> None:
    data = (data + bytes(HEADER_BYTES))[:HEADER_BYTES]
    try:
        header = decode_header(data, 0, MAX_FRAME_BYTES)
    except FrameError:
        return
    assert empty_tensor(header.dtype_code, header.shape).nbytes == header.length <= MAX_FRAME_BYTES


def taken(stream: list[bytes]) -> tuple[list[tuple[int, Any]], str]:
    """What a link in generation 1 makes of bytes: the receives that are done with their content, and why the link
    ends."""
    ours, theirs = socket.socketpair()
    failures = Failures()
    inbox = Inbox(1, 1, MAX_UNEXPECTED_BYTES)
    out = torch.zeros(5)
    handles = [make_recv(1, Tag(1, step, 0), out if step == 0 else None, failures) for step in range(3)]
    for handle in handles:
        inbox.post(handle)
    with ours, theirs:
        ours.setblocking(False)
        link = Link(1, ours, inbox, bytearray(SCRATCH_BYTES), MAX_FRAME_BYTES)
        end = ""
        try:
            for piece in stream:
                theirs.sendall(piece)
                link.read()
                assert inbox.stored_bytes <= MAX_UNEXPECTED_BYTES
            theirs.close()
            for _ in range(3):
                link.read()
        except (FrameError, LinkEndedError) as error:
            end = str(error)
        assert end, "the end of the connection was not noticed"
        link.close(end)
    done = [(step, handle.result) for step, handle in enumerate(handles) if handle.done and handle.error is None]
    assert all(handle.done for handle in handles), "a receive waits for a link that is gone"
    return [(step, [part.tolist() for part in _parts(result)]) for step, result in done], end


def _parts(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@FUZZ
@given(stream=changed(STREAMS), cuts=CUTS)
def test_a_link_takes_whatever_comes_the_same_however_it_is_cut(stream: bytes, cuts: list[int]) -> None:
    torch.manual_seed(0)
    whole, cut = taken([stream] if stream else []), taken(pieces(stream, cuts))
    assert repr(whole) == repr(cut)  # as text: what is not a number equals itself there
