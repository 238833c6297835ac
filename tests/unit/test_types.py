"""Hashes of structs: equal for equal content, in every process, whatever order a dict was filled in."""

from elaswave.planning.layout import make_layout
from elaswave.protocol.messages import ExecutionParameters
from elaswave.types import struct_hash


def test_equal_content_has_an_equal_hash():
    one = make_layout(widths=[2, 1], layers_per_stage=[1, 1], num_microbatches=2)
    other = make_layout(widths=[1, 2], layers_per_stage=[1, 1], num_microbatches=2)
    assert struct_hash(one) == struct_hash(one) != struct_hash(other)
    assert 0 <= struct_hash(one) < 2**62


def test_dicts_by_number_are_hashed_in_the_order_of_their_keys():
    assert struct_hash(ExecutionParameters(levels={3: 1, 20: 2})) == struct_hash(
        ExecutionParameters(levels={20: 2, 3: 1})
    )
    assert struct_hash(ExecutionParameters(levels={3: 1})) != struct_hash(ExecutionParameters(levels={3: 2}))
