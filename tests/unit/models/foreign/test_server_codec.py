"""The codec of the protocol of foreign parts, which stands in the file of the server."""

import ast
import ctypes
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.integration.foreign_parts import NumpyMiddle

from elaswave.models.foreign import server
from elaswave.models.foreign.server import (
    ARRAYS_MAX,
    DIGEST,
    FAILED,
    FORWARD,
    HEADER_BYTES,
    HELD,
    INITIAL,
    ONE,
    ONLY_HASH,
    PARAMETERS,
    PROTOCOL,
    RESULT,
    TEXT_BYTES_MAX,
    Array,
    Jax,
    Numpy,
    PartMessage,
    ProtocolError,
    Server,
    aligned_room,
    decode_message,
    decode_message_header,
    encode_message,
    hash_arrays,
    load_factory,
)

LIMIT = 1 << 16


def taken(data: bytes, limit: int = LIMIT) -> PartMessage:
    header = decode_message_header(data[:HEADER_BYTES], limit)
    return decode_message(header, memoryview(data)[HEADER_BYTES:])


def plain(message: PartMessage) -> PartMessage:
    """With arrays that can be compared."""
    return message._replace(arrays=[Array(kind, tuple(shape), bytes(data)) for kind, shape, data in message.arrays])


ARRAYS = [
    Array("float32", (2, 3), bytes(range(24))),
    Array("bfloat16", (), b"ab"),
    Array("int64", (0, 4), b""),
    Array("bool", (65,), bytes(65)),
]
MESSAGE = PartMessage(
    FORWARD, 7, "grüße", ARRAYS, flags=3, step=1 << 40, microbatch=5, hash=bytes(range(16))
)  # fmt: skip


def test_a_message_comes_back_as_it_was():
    data = b"".join(encode_message(MESSAGE))
    assert plain(taken(data)) == MESSAGE
    assert len(data) % 64 == 0, "a body is padded"
    assert plain(taken(b"".join(encode_message(PartMessage(1))))) == PartMessage(1, arrays=[])


def test_arrays_begin_at_multiples_of_64_bytes():
    header, *payload = encode_message(MESSAGE)
    assert [len(header) % 64, *(sum(map(len, payload[:at])) % 64 for at in (2, 4))] == [0, 0, 0]
    room = aligned_room(100)
    assert len(room) == 100 and not room.readonly
    assert ctypes.addressof(ctypes.c_char.from_buffer(room)) % 64 == 0


@pytest.mark.parametrize(
    ("place", "form", "value", "error"),
    [
        (0, "4s", b"HTTP", "begins with b'HTTP', needed: b'ELWF'"),
        (4, "<H", PROTOCOL + 1, f"speaks protocol {PROTOCOL + 1}, and this one {PROTOCOL}: use one server.py"),
        (44, "<I", TEXT_BYTES_MAX + 1, f"announces {TEXT_BYTES_MAX + 1} bytes of text"),
        (48, "<I", ARRAYS_MAX + 1, f"{ARRAYS_MAX + 1} arrays"),
        (52, "<Q", LIMIT + 1, f"{LIMIT + 1} bytes in all; at most {TEXT_BYTES_MAX}, {ARRAYS_MAX} and {LIMIT}"),
        (52, "<Q", 8, "announces more text and arrays than it has room for"),
        (52, "<Q", 64, "ends within what it says of its arrays"),
        (44, "<I", 64, "array"),
        (64, "4s", b"\xff\xff\xff\xff", "no UTF-8"),
        (71, "B", 9, "an array has type 9 and 2 dimensions"),
        (72, "B", 17, "17 dimensions"),
        (79, "<Q", 1 << 63, "does not fit into the message's"),
        (52, "<Q", 128, "does not fit into the message's 128 bytes"),
        (79, "<Q", 0, "bytes, and its text and arrays take"),
    ],
)
def test_what_is_wrong_is_named(place, form, value, error):
    data = bytearray(b"".join(encode_message(MESSAGE)))
    assert data[71] == 1, "the first array is described behind the text"
    struct.pack_into(form, data, place, value)
    with pytest.raises(ProtocolError, match=error.replace("(", r"\(")):
        header = decode_message_header(data[:HEADER_BYTES], LIMIT)
        decode_message(header, memoryview(data)[HEADER_BYTES : HEADER_BYTES + header.body_bytes])


def test_what_does_not_travel_is_refused():
    for message, error in (
        (PartMessage(1, text="x" * (TEXT_BYTES_MAX + 1)), "a text of 1048577 bytes"),
        (PartMessage(1, arrays=[Array("float64", (1,), bytes(8))]), "an array of type float64, needed: one of float32"),
        (PartMessage(1, arrays=[Array("bool", (1,) * 17, bytes(1))]), "17 dimensions, at most 16"),
    ):
        with pytest.raises(ProtocolError, match=error):
            encode_message(message)


def test_a_hash_covers_types_shapes_and_bits():
    one = Array("float32", (2, 1), bytes(8))
    others = [Array("float32", (1, 2), bytes(8)), Array("int32", (2, 1), bytes(8)), Array("float32", (2, 1), b"1" * 8)]
    found = {hash_arrays([each]) for each in (one, *others)} | {hash_arrays([]), hash_arrays([one, one])}
    assert len(found) == 6 and all(len(each) == 16 for each in found)


def test_the_file_needs_the_standard_library_and_one_numeric_library():
    tree = ast.parse(Path(server.__file__).read_text())
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert names - sys.stdlib_module_names == {"numpy", "torch"}, "and jax, which is imported by its name"
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(alias.name in ("numpy", "torch") for node in top for alias in node.names)


def test_jax_gets_whole_numbers_that_fit_into_32_bits():
    adapter = Jax.__new__(Jax)  # with numpy in the place of JAX, which these tests need not have
    adapter.jax, adapter.numpy = SimpleNamespace(numpy=np, device_put=lambda values: values), np
    for least, most in ((-(2**31), 2**31 - 1), (0, 0)):
        found = adapter._values(Array("int64", (2,), np.array([least, most], dtype=np.int64).tobytes()))
        assert found.dtype == np.int32 and found.tolist() == [least, most]
    assert adapter._values(Array("int64", (0,), b"")).shape == (0,)
    for value in (2**31, -(2**31) - 1, -(2**63), 2**63 - 1):  # the absolute value of -2**63 is -2**63
        with pytest.raises(RuntimeError, match="JAX has whole numbers of 32 bits"):
            adapter._values(Array("int64", (1,), np.array([value], dtype=np.int64).tobytes()))


def test_a_part_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "parts.py"
    path.write_text("class Middle: ...\n")
    before = list(sys.path)
    try:
        _, text = load_factory(f"{path}:Middle")
        with pytest.raises(SystemExit, match="has no 'Other'; give FILE.py:NAME"):
            load_factory(f"{path}:Other")
        path.write_text("class Middle: ...  # changed\n")
        assert load_factory(f"{path}:Middle")[1] != text, "a change of the code shows"
        assert text.startswith("parts.py:Middle ")
    finally:
        sys.path[:] = before
        sys.modules.pop("elaswave_foreign_part", None)
    assert load_factory("json:JSONDecoder")[1].startswith("json:JSONDecoder ")


def test_a_server_computes_with_no_other_parameters_than_asked_for():
    asked = Server(Numpy(NumpyMiddle, {"width": 2}), "part")
    values = asked.answer(PartMessage(INITIAL, 1, step=3)).arrays
    x = Array("float32", (1, 2), bytes(8))
    held = hash_arrays(values)

    def refused(message):
        answer = asked.answer(message)
        found = json.loads(answer.text)
        assert (answer.kind, found["is_ours"]) == (FAILED, True)
        return found["message"]

    forward = PartMessage(FORWARD, 2, arrays=[x], hash=held)
    assert "those that are held are none" in refused(forward)
    assert f"announced was {bytes(16).hex()}" in refused(PartMessage(PARAMETERS, 3, arrays=values))
    assert "1 parameters came, and the part has 2" in refused(PartMessage(PARAMETERS, 3, arrays=values[:1]))
    turned = PartMessage(PARAMETERS, 3, arrays=values[::-1])
    assert "parameter weight came with shape [2], needed: [2, 2]" in refused(turned)
    answer = asked.answer(PartMessage(PARAMETERS, 4, arrays=values, hash=held, step=7))
    assert (answer.kind, answer.hash, answer.step, answer.number) == (HELD, held, 7, 4)
    result = asked.answer(forward)
    assert result.kind == RESULT and result.flags == ONE
    digest = asked.answer(forward._replace(flags=ONLY_HASH))
    assert (digest.kind, digest.hash) == (DIGEST, hash_arrays(result.arrays))
    assert held.hex() in refused(forward._replace(hash=bytes(16)))
    assert "a request of kind 99 is not known" in refused(PartMessage(99))
