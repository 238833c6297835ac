"""Trees of tensors: taken apart, put together, described, and as one frame."""

from typing import NamedTuple

import pytest
import torch

from elaswave.engine.checks.values import Signatures, at_boundary, flatten, num_leaves, unflatten
from elaswave.errors import FrameError, UsageError
from elaswave.worker.links import pack_value, unpack_value


class Pair(NamedTuple):
    """Found by its name in any process that has imported this module."""

    hidden: torch.Tensor
    mask: torch.Tensor | None


CPU = torch.device("cpu")
A, B = torch.arange(6.0).view(2, 3), torch.tensor([True, False, True])
VALUES = [
    A,
    B,
    (),
    (A,),
    [A, B],
    {"a": A, 3: [B, None]},
    Pair(A, None),
    {"deep": ({"x": (A, B)}, Pair(A.double(), B))},
    torch.arange(5, dtype=torch.uint8),
    torch.tensor(2.5),
    torch.zeros(0, 4),
    (torch.zeros(0, 4), torch.ones(3, dtype=torch.bfloat16), torch.tensor(7)),
    torch.zeros((1,) * 9),
]


def same(one, other):
    structure, leaves = flatten(one)
    its, others = flatten(other)
    return structure == its and all(
        a.dtype == b.dtype and a.shape == b.shape and a.equal(b) for a, b in zip(leaves, others, strict=True)
    )


def as_received(value):
    """What the transport delivers: one new tensor of all bytes, or of the single tensor's type."""
    packed = pack_value(value)
    if isinstance(packed, torch.Tensor):
        return packed.clone()
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in packed])


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_a_value_is_put_together_as_it_was(value):
    structure, leaves = flatten(value)
    assert num_leaves(structure) == len(leaves)
    again = unflatten(structure, leaves)
    assert type(again) is type(value) and same(again, value)


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_a_value_arrives_as_it_was_sent(value):
    arrived = unpack_value(as_received(value))
    assert type(arrived) is type(value) and same(arrived, value)
    assert all(at_boundary(leaf) is leaf for leaf in flatten(arrived)[1])


def test_what_arrives_together_can_be_written_apart():
    first, second = unpack_value(as_received((A, A)))
    before = second._version
    first.mul_(2.0)
    assert second.equal(A) and second._version == before


def test_a_single_tensor_travels_as_itself():
    assert pack_value(A) is A


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((A, 3), "3 of type int"),
        ({"a": "text"}, "str"),
        ({(1, 2): A}, r"the key \(1, 2\)"),
        ({True: A}, "the key True"),
        (object(), "object"),
    ],
)
def test_what_holds_something_else_is_refused(value, words):
    with pytest.raises(UsageError, match=words):
        flatten(value)


def test_a_value_that_is_nested_too_deeply_is_refused():
    value = A
    for _ in range(40):
        value = [value]
    with pytest.raises(UsageError, match="more than 32 containers"):
        flatten(value)


def test_a_class_that_no_other_process_finds_is_refused():
    class Local(NamedTuple):
        x: torch.Tensor

    with pytest.raises(UsageError, match="define it at the top of the script or of a module"):
        flatten(Local(A))


def test_values_of_too_many_tensors_are_refused():
    with pytest.raises(UsageError, match="too large to be described"):
        pack_value({f"a name that is rather long, number {index}": A for index in range(20_000)})


def frame_of(text, payload=b"", magic=b"ELWV", length=None):
    head = magic + (len(text) if length is None else length).to_bytes(4, "little") + text
    return torch.frombuffer(bytearray(head + bytes(-len(head) % 64) + payload), dtype=torch.uint8)


@pytest.mark.parametrize(
    "frame",
    [
        torch.zeros(3, dtype=torch.uint8),
        frame_of(b'["tensor",[[7,[1]]]]', bytes(64), magic=b"ELWX"),
        frame_of(b'["tensor",[[7,[1]]]]', bytes(64), length=1 << 30),
        frame_of(b'["tensor",[[7,[1]]]]'),
        frame_of(b'["tensor",[[7,[17]]]]', bytes(64)),
        frame_of(b'["tensor",[[99,[1]]]]', bytes(64)),
        frame_of(b'["tensor",[[7,[-1]]]]', bytes(64)),
        frame_of(b'["tensor",[[7,[4294967296,4294967296]]]]', bytes(64)),
        frame_of(b'["tensor",[]]'),
        frame_of(b'["none",[[7,[1]]]]', bytes(64)),
        frame_of(b'[["set",["tensor"]],[[7,[1]]]]', bytes(64)),
        frame_of(b'[["dict",["a"],["tensor","tensor"]],[[7,[1]],[7,[1]]]]', bytes(128)),
        frame_of(b'[["named","os:system",["tensor"]],[[7,[1]]]]', bytes(64)),
        frame_of(b'[["named","nowhere:Pair",["tensor"]],[[7,[1]]]]', bytes(64)),
        frame_of(f'[["named","{__name__}:Pair",["tensor"]],[[7,[1]]]]'.encode(), bytes(64)),
        frame_of(b"[" * 5000),
        frame_of(b'[["tuple",' * 40 + b'"none"' + b"]]" * 40),
        frame_of(b"not json"),
    ],
)
def test_a_frame_that_contradicts_itself_is_refused(frame):
    with pytest.raises(FrameError):
        unpack_value(frame)


def test_the_first_value_fixes_what_a_boundary_carries():
    signatures = Signatures(lambda boundary: f"boundary {boundary} has", CPU)
    signatures.check(0, True, *flatten({"x": A}))
    signatures.check(0, True, *flatten({"x": A + 1}))
    signatures.check(0, False, *flatten([A]))
    for changed in ({"x": A.double()}, {"x": A[:1]}, {"y": A}, A):
        with pytest.raises(UsageError, match="boundary 0 has .* in the first micro-batch here"):
            signatures.check(0, True, *flatten(changed))
    with pytest.raises(UsageError, match=r"dict\('x': float32 \[2, 3\]\)"):
        signatures.check(0, True, *flatten(Pair(A, None)))


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (A.to_sparse(), "to_dense"),
        (A.to(torch.complex64), "view_as_real"),
        (A.to("meta"), "on meta: this worker computes on cpu"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_tensors_that_cannot_travel_are_refused(leaf, words, is_first):
    signatures = Signatures(str, CPU)
    if not is_first:
        signatures.check(0, True, *flatten(A))
    with pytest.raises(UsageError, match=words):
        signatures.check(0, True, *flatten(leaf))


def test_what_travels_lies_where_the_worker_computes():
    signatures = Signatures(str, torch.device("meta"))
    signatures.check(0, True, *flatten(A.to("meta")))
    with pytest.raises(UsageError, match=r"on cpu: this worker computes on meta. Make it where the layer's input is"):
        signatures.check(1, True, *flatten(A))


@pytest.mark.filterwarnings("ignore")  # torch's own about quantized tensors
def test_quantized_tensors_cannot_travel_and_float8_tensors_can():
    with pytest.raises(UsageError, match="dequantize"):
        Signatures(str, CPU).check(0, True, *flatten(torch.quantize_per_tensor(A, 0.1, 0, torch.qint8)))
    Signatures(str, CPU).check(0, True, *flatten(A.to(torch.float8_e5m2)))
