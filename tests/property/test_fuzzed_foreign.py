"""The codec of foreign parts against bytes that are almost right, on both sides; see `test_fuzzed_codecs`."""

import json
from typing import Any

import numpy
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.foreign_parts import NumpyMiddle
from tests.property.test_fuzzed_codecs import FUZZ, changed

from elaswave.models.foreign import server
from elaswave.models.foreign.server import (
    BACKWARD,
    FAILED,
    FORWARD,
    HEADER_BYTES,
    HELLO,
    INITIAL,
    ONLY_HASH,
    PARAMETERS,
    Array,
    Numpy,
    PartMessage,
    ProtocolError,
    Server,
    decode_message,
    decode_message_header,
    encode_message,
    hash_arrays,
)

LIMIT = 1 << 14


def array(*shape: int) -> Array:
    return Array("float32", shape, numpy.ones(shape, "float32").tobytes())


PARTS = [array(4, 4), array(4)]
HASH = hash_arrays(PARTS)
REQUESTS = [
    PartMessage(HELLO, 1),
    PartMessage(INITIAL, 2, step=3),
    PartMessage(PARAMETERS, 3, arrays=PARTS, hash=HASH, step=1),
    PartMessage(FORWARD, 4, arrays=[array(2, 4)], hash=HASH),
    PartMessage(FORWARD, 5, arrays=[array(2, 4)], hash=HASH, flags=ONLY_HASH),
    PartMessage(BACKWARD, 6, json.dumps({"inputs": 1}), [array(2, 4), array(2, 4)], hash=HASH),
]
MESSAGES = [b"".join(encode_message(message)) for message in REQUESTS]


def taken(data: bytes) -> PartMessage | None:
    """The message of some bytes; None: they are none."""
    if len(data) < HEADER_BYTES:
        return None
    try:
        header = decode_message_header(data[:HEADER_BYTES], LIMIT)
        body = memoryview(data)[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        return decode_message(header, body) if len(body) == header.body_bytes else None
    except ProtocolError:
        return None


def test_the_originals_are_answered() -> None:
    asked = Server(Numpy(NumpyMiddle, {"width": 4}), "part")
    kinds = [asked.answer(message).kind for message in map(taken, MESSAGES) if message is not None]
    assert kinds == [server.WELCOME, server.VALUES, server.HELD, server.RESULT, server.DIGEST, server.RESULT]


@FUZZ
@given(data=changed(MESSAGES))
def test_what_is_no_message_is_refused_and_what_is_one_is_within_its_bytes(data: bytes) -> None:
    message = taken(data)
    if message is not None:
        assert sum(each.num_bytes for each in message.arrays) <= len(data)
        assert len(message.text) <= len(data) and len(message.arrays) * 8 <= len(data)
        again = taken(b"".join(encode_message(message)))
        assert again is not None and again._replace(arrays=()) == message._replace(arrays=())
        assert hash_arrays(again.arrays) == hash_arrays(message.arrays)


@FUZZ
@given(data=st.lists(changed(MESSAGES, changes_max=2), max_size=4))
def test_a_server_answers_whatever_it_is_asked(data: list[bytes]) -> None:
    asked = Server(Numpy(NumpyMiddle, {"width": 4}), "part")
    for message in map(taken, data):
        if message is None:
            continue
        answer: Any = asked.answer(message)
        assert answer.number == message.number
        back = taken(b"".join(encode_message(answer)))
        assert back is not None and back.kind == answer.kind
        if answer.kind == FAILED:
            assert set(json.loads(answer.text)) == {"kind", "message", "traceback", "is_ours"}
