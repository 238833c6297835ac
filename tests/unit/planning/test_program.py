"""Actions and programs print and parse."""

import re

import msgspec
import pytest

from elaswave.planning.program import KIND_NAMES, Action, parse_action, parse_programs, print_programs


def test_an_action_prints_as_stage_kind_microbatch_and_parses_back():
    assert str(Action(2, "F", 0)) == "2F0"
    for kind in KIND_NAMES:
        action = Action(12, kind, 345)
        assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "2F0 ", "-1F0", "2F-1", "2F0B", "٢F0", "2F0\n"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not an action")):
        parse_action(text)


def test_programs_print_one_worker_per_line_and_parse_back():
    programs = {
        10: (Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)),
        0: (Action(0, "F", 0), Action(0, "B", 0)),
        3: (),
    }
    text = print_programs(programs)
    assert text == "worker 0: 0F0 0B0\nworker 3:\nworker 10: 1F0 1I0 1W0\n"
    assert parse_programs(text) == programs
    assert parse_programs("\n  worker 0:  0F0   0B0  \n\n") == {0: programs[0]}
    assert parse_programs("") == {}
    assert print_programs({}) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker 0: 0F0\nworker 1 1F0", "line 2, 'worker 1 1F0', is not a program"),
        ("worker x: 0F0", "line 1, 'worker x: 0F0', is not a program"),
        ("worker 0: 0F0\nworker 0: 0B0", "line 2: worker 0 has a program already"),
        ("\nworker 0: 0F0 0G0", "line 2: '0G0' is not an action"),
    ],
)
def test_what_is_no_program_is_refused_with_its_line(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_programs(text)


def test_actions_travel_as_short_arrays():
    assert msgspec.json.encode(Action(2, "F", 7)) == b'[2,"F",7]'
    assert msgspec.json.decode(b'[2,"F",7]', type=Action) == Action(2, "F", 7)
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'X'"):
        msgspec.json.decode(b'[2,"X",7]', type=Action)
