"""Hashes of structs, equal for equal content in every process; actions as text and as JSON."""

import msgspec
import pytest
from tests.programs import parse_action

from elaswave.planning.layout import make_layout
from elaswave.types import ACTION_NAMES, Action, ExecutionParameters, struct_hash


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


def test_an_action_prints_as_stage_kind_microbatch():
    assert str(Action(2, "F", 0)) == "2F0"
    for kind in ACTION_NAMES:
        assert parse_action(str(Action(12, kind, 345))) == Action(12, kind, 345)


def test_actions_travel_as_short_arrays():
    assert msgspec.json.encode(Action(2, "F", 7)) == b'[2,"F",7]'
    assert msgspec.json.decode(b'[2,"F",7]', type=Action) == Action(2, "F", 7)
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'X'"):
        msgspec.json.decode(b'[2,"X",7]', type=Action)
