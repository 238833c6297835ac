"""The compiler: textbook orders, full throughput on stages of unequal width, bounded memory."""

import re

import pytest
from msgspec.structs import replace
from tests.programs import parse_programs, print_programs

from elaswave.planning.costs.schedules import in_flight_bounds
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.validation import validate_programs
from elaswave.types import Action, Hop, Layout

BACKWARD_COST = 2
"""Modelled duration of a backward relative to its forward: two products per weight matrix instead of one."""


def layout_of(widths, num_microbatches):
    return make_layout(widths=widths, layers_per_stage=[1] * len(widths), num_microbatches=num_microbatches)


def step_time(layout, programs):
    """Virtual time of a step in which every worker runs its program in order, each action as soon as it can.

    Layers are balanced over stages: a forward takes as long as its stage is wide. Written apart from the compiler.
    """
    end = {}
    clock = dict.fromkeys(programs, 0)
    position = dict.fromkeys(programs, 0)
    last_stage = len(layout.stages) - 1
    remaining = sum(map(len, programs.values()))
    while remaining:
        before = remaining
        for worker, program in programs.items():
            while position[worker] < len(program):
                stage, kind, microbatch = (action := program[position[worker]]).stage, action.kind, action.microbatch
                if kind == "F":
                    needed = (stage - 1, "F", microbatch) if stage else None
                else:
                    needed = (stage, "F", microbatch) if stage == last_stage else (stage + 1, "B", microbatch)
                if needed is not None and needed not in end:
                    break
                duration = layout.stages[stage].width * (1 if kind == "F" else BACKWARD_COST)
                clock[worker] = end[stage, kind, microbatch] = max(clock[worker], end.get(needed, 0)) + duration
                position[worker] += 1
                remaining -= 1
        assert remaining < before, "deadlock"
    return max(clock.values())


def shortest_step(widths, num_microbatches):
    """A step cannot be shorter: one worker's work, after the first input has come and before the last has gone on."""
    longest = 0
    for stage, width in enumerate(widths):
        before = sum(widths[:stage])
        work = -(-num_microbatches // width) * width
        longest = max(longest, (1 + BACKWARD_COST) * (before + work))
    return longest


def peak_in_flight(program):
    held = peak = 0
    for action in program:
        held += {"F": 1, "B": -1}[action.kind]
        peak = max(peak, held)
    return peak


TRANSCRIPTS = {
    ("1f1b", (1, 1), 4): """
        worker 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        worker 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """,
    ("gpipe", (1, 1), 3): """
        worker 0: 0F0 0F1 0F2 0B0 0B1 0B2
        worker 1: 1F0 1F1 1F2 1B0 1B1 1B2
    """,
    ("1f1b", (2, 2), 8): """
        worker 0: 0F0 0F2 0B0 0F4 0B2 0F6 0B4 0B6
        worker 1: 0F1 0F3 0B1 0F5 0B3 0F7 0B5 0B7
        worker 2: 1F0 1B0 1F2 1B2 1F4 1B4 1F6 1B6
        worker 3: 1F1 1B1 1F3 1B3 1F5 1B5 1F7 1B7
    """,
    ("1f1b", (1, 3), 6): """
        worker 0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        worker 1: 1F0 1B0 1F3 1B3
        worker 2: 1F1 1B1 1F4 1B4
        worker 3: 1F2 1B2 1F5 1B5
    """,
    ("1f1b", (3, 1), 6): """
        worker 0: 0F0 0F3 0B0 0B3
        worker 1: 0F1 0F4 0B1 0B4
        worker 2: 0F2 0F5 0B2 0B5
        worker 3: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5
    """,
    ("1f1b", (1, 1), 1): """
        worker 0: 0F0 0B0
        worker 1: 1F0 1B0
    """,
}


@pytest.mark.parametrize(("schedule", "widths", "num_microbatches"), TRANSCRIPTS)
def test_transcripts(schedule, widths, num_microbatches):
    programs = compile_programs(layout_of(widths, num_microbatches), schedule)
    expected = parse_programs(TRANSCRIPTS[schedule, widths, num_microbatches])
    assert print_programs(programs) == print_programs(expected)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5, 16])
def test_equal_widths_give_the_textbook_order(num_stages, width, rounds):
    layout = layout_of([width] * num_stages, width * rounds)
    programs = compile_programs(layout, "1f1b")
    for worker, program in programs.items():
        stage = layout.stage_of(worker)
        own = range(worker % width, width * rounds, width)
        warm_up = min(num_stages - stage - 1, rounds)
        textbook = [Action(stage, "F", microbatch) for microbatch in own[:warm_up]]
        for index in range(rounds - warm_up):
            textbook.append(Action(stage, "F", own[index + warm_up]))
            textbook.append(Action(stage, "B", own[index]))
        textbook += [Action(stage, "B", microbatch) for microbatch in own[rounds - warm_up :]]
        assert program == tuple(textbook)


@pytest.mark.parametrize(
    ("widths", "bounds"),
    [
        ([4], [1]),
        ([1, 1, 1, 1], [4, 3, 2, 1]),
        ([2, 2], [2, 1]),
        ([1, 3], [4, 1]),
        ([3, 1], [2, 1]),
        ([2, 1, 2], [3, 3, 1]),
        ([1, 2, 1], [5, 2, 1]),
        ([1, 2, 3], [7, 3, 1]),
        ([12, 11, 12, 12], [5, 4, 2, 1]),
    ],
)
def test_bounds(widths, bounds):
    layout = layout_of(widths, 96)
    expected = {worker: bounds[layout.stage_of(worker)] for worker in layout.workers}
    assert in_flight_bounds(layout, "1f1b") == expected
    assert set(in_flight_bounds(layout, "gpipe").values()) == {-(-96 // width) for width in widths} | {
        96 // width for width in widths
    }


def test_bounds_never_exceed_what_a_worker_is_given():
    assert in_flight_bounds(layout_of([1, 1, 1, 1], 2), "1f1b") == {0: 2, 1: 2, 2: 2, 3: 1}


WIDTHS = [[1, 3], [3, 1], [2, 1, 2], [1, 2, 1], [3, 2], [2, 3], [1, 2, 3], [3, 2, 1], [2, 3, 5], [1, 4], [12, 11, 12]]


@pytest.mark.parametrize("widths", [*WIDTHS, [4], [2, 2], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_microbatches", [12, 30])
def test_programs_are_valid_within_their_bounds(widths, schedule, num_microbatches):
    layout = layout_of(widths, num_microbatches)
    programs = compile_programs(layout, schedule)
    bounds = in_flight_bounds(layout, schedule)
    validate_programs(layout, programs, max_in_flight=bounds)
    assert all(peak_in_flight(program) <= bounds[worker] for worker, program in programs.items())
    assert compile_programs(layout, schedule) == programs


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_unequal_widths_reach_full_throughput(widths):
    """The time per micro-batch in the steady state is the bottleneck's work, not a per cent more."""
    repeat = 1
    for width in widths:
        repeat *= width
    fewer, more = 2 * repeat, 4 * repeat
    times = {}
    for num_microbatches in (fewer, more):
        layout = layout_of(widths, num_microbatches)
        times[num_microbatches] = step_time(layout, compile_programs(layout, "1f1b"))
    assert times[more] - times[fewer] == (1 + BACKWARD_COST) * (more - fewer)
    # Warm-up and cool-down add no more than one round trip.
    assert times[more] <= shortest_step(widths, more) + (1 + BACKWARD_COST) * sum(widths)


@pytest.mark.parametrize("widths", [[2, 2], [3, 3, 3], [1, 1, 1, 1], [3, 1], [4, 1]], ids=str)
def test_these_steps_cannot_be_shorter(widths):
    layout = layout_of(widths, 24)
    assert step_time(layout, compile_programs(layout, "1f1b")) == shortest_step(widths, 24)


def test_rounding_the_bound_only_once_would_starve_a_stage():
    """Little's law over the whole pipeline, ceil(sum of following widths / own), allows [1, 2, 1] only 4 in flight."""
    layout = layout_of([1, 2, 1], 96)
    once = {0: 4, 1: 2, 2: 2, 3: 1}
    tighter = compile_programs(layout, "1f1b", max_in_flight=once)
    validate_programs(layout, tighter, max_in_flight=once)
    ours = step_time(layout, compile_programs(layout, "1f1b"))
    assert ours == shortest_step([1, 2, 1], 96)
    assert step_time(layout, tighter) > 1.2 * ours


def test_memory_can_be_bounded_further():
    layout = layout_of([1, 1, 1], 6)
    one = dict.fromkeys(layout.workers, 1)
    programs = compile_programs(layout, "1f1b", max_in_flight=one)
    validate_programs(layout, programs, max_in_flight=one)
    assert str(programs[0][:4]) == str(parse_programs("worker 0: 0F0 0B0 0F1 0B1")[0])
    with pytest.raises(ValueError, match=re.escape("max_in_flight of workers [1, 2] is missing or below 1")):
        compile_programs(layout, "1f1b", max_in_flight={0: 1, 1: 0})


def test_forward_only_leaves_out_the_backwards():
    layout = layout_of([1, 2], 4)
    programs = compile_programs(layout, "1f1b", forward_only=True)
    assert programs == parse_programs("worker 0: 0F0 0F1 0F2 0F3\nworker 1: 1F0 1F2\nworker 2: 1F1 1F3")
    assert compile_programs(layout, "gpipe", forward_only=True) == programs
    validate_programs(layout, programs, forward_only=True)


def test_a_worker_without_a_route_has_an_empty_program():
    layout = layout_of([2], 2)
    rerouted = Layout(stages=layout.stages, routes=((Hop(1, 0, 0, 1),), (Hop(1, 0, 0, 1),)))
    for schedule in ("1f1b", "gpipe"):
        programs = compile_programs(rerouted, schedule)
        assert programs[0] == ()
        validate_programs(rerouted, programs, max_in_flight=in_flight_bounds(rerouted, schedule))


def test_an_unknown_schedule_is_refused():
    layout = layout_of([1], 1)
    with pytest.raises(ValueError, match="unknown schedule 'zb': choose one of 1f1b, gpipe"):
        compile_programs(layout, "zb")
    with pytest.raises(ValueError, match="unknown schedule"):
        compile_programs(layout, "zb", forward_only=True)
    with pytest.raises(ValueError, match="unknown schedule"):
        in_flight_bounds(layout, "zb")


def test_an_idle_member_has_an_empty_program_and_needs_no_bound():
    layout = layout_of([1, 1], 2)
    joined = replace(layout, idle=(5,))
    programs = compile_programs(joined, "1f1b", max_in_flight={0: 1, 1: 1})
    validate_programs(joined, programs, max_in_flight={0: 1, 1: 1})
    assert programs == compile_programs(layout, "1f1b", max_in_flight={0: 1, 1: 1}) | {5: ()}
