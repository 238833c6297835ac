"""Hashes of structs, equal for equal content in every process; actions as text and as JSON."""

import msgspec
import pytest
from tests.programs import parse_action

from elaswave.planning.programs.layout import make_layout
from elaswave.types import ACTION_NAMES, Action, ExecutionParameters, Layout, struct_hash


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


def test_a_layout_without_idle_workers_is_written_as_ever():
    layout = make_layout(widths=[2], layers_per_stage=[1], num_microbatches=2)
    assert b"idle" not in msgspec.json.encode(layout)
    joined = msgspec.structs.replace(layout, idle=(7,))
    assert struct_hash(joined) != struct_hash(layout) == struct_hash(msgspec.structs.replace(joined, idle=()))
    assert msgspec.json.decode(msgspec.json.encode(joined), type=Layout) == joined


def test_idle_workers_are_members_without_layers():
    layout = make_layout(widths=[1, 2], layers_per_stage=[1, 2], num_microbatches=2)
    layout = msgspec.structs.replace(layout, idle=(3, 7))
    assert (layout.workers, layout.active) == ((0, 1, 2, 3, 7), (0, 1, 2))
    assert [layout.layers_of(worker) for worker in (0, 2, 7)] == [range(1), range(1, 3), range(0)]
    assert layout.describe() == "[1,2]+2"
    assert msgspec.structs.replace(layout, idle=()).describe() == "[1,2]"
    with pytest.raises(KeyError):
        layout.stage_of(7)
    with pytest.raises(KeyError):
        layout.layers_of(8)
