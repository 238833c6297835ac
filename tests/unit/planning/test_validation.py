"""The validator: every kind of planted mistake is caught, and the error shows where it is."""

import re

import pytest
from tests.programs import parse_programs

from elaswave.errors import InvalidProgramError
from elaswave.planning.costs.schedules import in_flight_bounds
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.validation import MAX_COLUMNS, MAX_ROWS, validate_programs
from elaswave.types import Hop, Layout, Stage

LAYOUT = make_layout(widths=[1, 2], layers_per_stage=[1, 1], num_microbatches=3)
GOOD = """
worker 0: 0F0 0F1 0F2 0B0 0B1 0B2
worker 1: 1F0 1B0 1F2 1B2
worker 2: 1F1 1B1
"""


def error_of(text, layout=LAYOUT, **arguments):
    with pytest.raises(InvalidProgramError) as caught:
        validate_programs(layout, parse_programs(text), **arguments)
    return str(caught.value)


def test_a_good_program_passes():
    validate_programs(LAYOUT, parse_programs(GOOD))
    validate_programs(LAYOUT, parse_programs(GOOD), max_in_flight={0: 3, 1: 1, 2: 1})


def test_split_backwards_pass():
    split = """
    worker 0: 0F0 0F1 0F2 0I0 0I1 0B2 0W1 0W0
    worker 1: 1F0 1I0 1F2 1W0 1I2 1W2
    worker 2: 1F1 1B1
    """
    validate_programs(LAYOUT, parse_programs(split))
    # Until its weight gradient is there, a micro-batch keeps its activations.
    validate_programs(LAYOUT, parse_programs(split), max_in_flight={0: 3, 1: 2, 2: 1})
    assert "1F2 is micro-batch number 2 in flight" in error_of(split, max_in_flight={0: 3, 1: 1, 2: 1})


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        pytest.param("0B1 ", "", ["worker 0, position 5: 0B1 (backward) is missing"], id="dropped backward"),
        pytest.param("1F2 ", "", ["worker 1, position 3: 1F2 (forward) is missing"], id="dropped forward"),
        pytest.param("\nworker 2: 1F1 1B1", "", ["worker 2, position 0: 1F1 (forward) is missing"], id="dropped all"),
        pytest.param(" 1B2", "", ["worker 1, position 3: 1B2 (backward) is missing"], id="dropped last"),
        pytest.param("1B2", "1I2", ["worker 1, position 4: 1W2 (weight gradient) is missing beside 1I2"], id="half"),
        pytest.param("1B2", "1W2", ["worker 1, position 4: 1I2 (input gradient) is missing beside 1W2"], id="2nd half"),
        pytest.param("0B1", "0B1 0B1", ["worker 0, position 5: 0B1 is there already, at position 4"], id="twice"),
        pytest.param("1B2", "1B2 1F0", ["worker 1, position 4: 1F0 is there already, at position 0"], id="again"),
        pytest.param("1B2", "1B2 1W2", ["worker 1, position 4: 1W2 repeats a part of 1B2"], id="whole and half"),
        pytest.param("1B2", "1I2 1B2", ["worker 1, position 4: 1B2 repeats 1I2"], id="half and whole"),
        pytest.param("2: 1F1", "2: 1F1 1F2", ["worker 2, position 1: 1F2 belongs to worker 1"], id="wrong worker"),
        pytest.param("0F2", "0F3", ["worker 0, position 2: 0F3 belongs to no route", "0F2 (forward) is missing"],
                     id="no such micro-batch"),
        pytest.param("0F2", "2F2", ["worker 0, position 2: 2F2 belongs to no route"], id="no such stage"),
        pytest.param("worker 2", "worker 5: 1F1\nworker 2",
                     ["worker 5, position 0: is not a worker of the layout"], id="no such worker"),
        pytest.param("1F2 1B2", "1B2 1F2", ["worker 1, position 2: deadlock: 1B2 waits for 1F2, which comes later in "
                     "the same program"], id="backward before forward"),
        pytest.param("1B2", "1W2 1I2", ["worker 1, position 3: deadlock: 1W2 waits for 1I2, which comes later"],
                     id="halves swapped"),
        pytest.param("0F1 0F2 0B0 0B1", "0F2 0B1 0F1 0B0", ["deadlock: 0B1 waits for 0F1, which comes later"],
                     id="swapped over"),
    ],
)  # fmt: skip
def test_planted_mistakes_are_caught(old, new, faults):
    assert GOOD.count(old) == 1
    message = error_of(GOOD.replace(old, new, 1))
    for fault in faults:
        assert fault in message
    assert re.search(r">\S+<", message)


def test_a_deadlock_between_workers_names_who_waits_for_whom():
    layout = make_layout(widths=[1, 1], layers_per_stage=[1, 1], num_microbatches=2)
    message = error_of("worker 0: 0F0 0B0 0F1 0B1\nworker 1: 1F0 1F1 1B0 1B1", layout)
    assert message == "\n".join(
        [
            "the programs cannot run:",
            "worker 0, position 1: deadlock: 0B0 waits for 1B0, but worker 1 is stuck before it, at 1F1",
            "worker 1, position 1: deadlock: 1F1 waits for 0F1, but worker 0 is stuck before it, at 0B0",
            "",
            "position  0     1     2     3",
            "worker 0  0F0  >0B0<  0F1   0B1",
            "worker 1  1F0  >1F1<  1B0   1B1",
        ]
    )


def test_the_grid_marks_what_is_missing_behind_the_end():
    message = error_of(GOOD.replace(" 1B1", ""))
    assert message.splitlines()[-4:] == [
        "position  0     1     2     3     4     5",
        "worker 0  0F0   0F1   0F2   0B0   0B1   0B2",
        "worker 1  1F0   1B0   1F2   1B2",
        "worker 2  1F1  >?<",
    ]


def test_too_many_in_flight():
    bounds = {0: 2, 1: 1, 2: 1}
    message = error_of(GOOD, max_in_flight=bounds)
    assert "worker 0, position 2: 0F2 is micro-batch number 3 in flight, at most 2 fit" in message
    assert ">0F2<" in message
    assert "at most 0 fit" in error_of(GOOD, max_in_flight={})


def test_forward_only_programs_have_no_backwards():
    forwards = "worker 0: 0F0 0F1 0F2\nworker 1: 1F0 1F2\nworker 2: 1F1"
    validate_programs(LAYOUT, parse_programs(forwards), forward_only=True, max_in_flight={})
    assert "0B0 (backward) is missing" in error_of(forwards)
    assert "0B0 belongs to no route" in error_of(GOOD, forward_only=True)
    assert "1F1 (forward) is missing" in error_of(forwards.replace(" 1F1", ""), forward_only=True)


def test_a_large_error_shows_only_the_neighbourhood():
    layout = make_layout(widths=[10] * 4, layers_per_stage=[1] * 4, num_microbatches=200)
    programs = compile_programs(layout, "1f1b")
    validate_programs(layout, programs, max_in_flight=in_flight_bounds(layout, "1f1b"))
    wrong = programs[25][20]
    programs[25] = (*programs[25][:20], *programs[25][21:])
    with pytest.raises(InvalidProgramError) as caught:
        validate_programs(layout, programs)
    lines = str(caught.value).splitlines()
    assert f"{wrong} (" in lines[1]
    assert lines[-2:] == ["(16 more workers)", "(positions 27 to 39 of 40)"]
    grid = lines[lines.index("") + 1 : -2]
    assert len(grid) == 1 + MAX_ROWS
    assert all(len(line.split()) <= 2 + MAX_COLUMNS for line in grid)
    assert sum(">?<" in line for line in grid) == 1
    assert next(line for line in grid if ">?<" in line).startswith("worker 25")


def test_many_faults_are_counted():
    message = error_of("")
    assert "... and 4 more" in message
    assert message.count(" is missing") == 8


def test_routes_may_leave_out_a_stage_and_share_a_layer():
    layout = Layout(
        stages=(
            Stage(start=0, stop=2, workers=(3,)),
            Stage(start=1, stop=3, workers=(5,)),
            Stage(start=2, stop=4, workers=(8,)),
        ),
        routes=((Hop(3, 0, 0, 2), Hop(8, 2, 2, 4)), (Hop(3, 0, 0, 1), Hop(5, 1, 1, 3), Hop(8, 2, 3, 4))),
    )
    programs = compile_programs(layout, "1f1b")
    validate_programs(layout, programs, max_in_flight=in_flight_bounds(layout, "1f1b"))
    assert {str(action) for action in programs[5]} == {"1F1", "1B1"}
    message = error_of("worker 3: 0F0 0B0 0F1 0B1\nworker 5: 1F1 1B1\nworker 8: 2F1 2B1 2F0 2B0", layout)
    assert "2F1 waits for 1F1, but worker 5 is stuck before it, at 1F1" in message
