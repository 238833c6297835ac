"""The one validator of programs: complete, on the route's workers, free of deadlock, bounded in memory. Pure.

Written against the definition of a program, not against the compiler, so that it judges programs of any origin.
Its error shows the programs as a grid, one row per worker, with the bad cells between ``>`` and ``<``.

- *Complete*: every hop of every route has its forward, and its backward either whole (B) or in both halves (I, W),
  exactly once, on the hop's worker, and nothing else is in any program.
- *Free of deadlock*: if workers run their programs in order and wait for inputs, all of them come to their end.
  A forward needs the forward of the hop before it; B and I need their own forward and the B or I of the hop after
  it; W needs its own I. Sends never block.
- *Bounded*: a forward's activations stay until its B or W.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from elaswave.errors import InvalidProgramError
from elaswave.types import ACTION_NAMES, Action, Kind, Layout, Program

MAX_ROWS = 24
"""Workers shown in an error's grid."""
MAX_COLUMNS = 13
"""Actions shown per worker in an error's grid."""
MAX_FAULTS = 8
"""Faults spelled out in an error."""


class _Fault(NamedTuple):
    """What is wrong at one cell of the grid."""

    worker: int
    position: int
    """Index in the worker's program; its length if something is missing from it."""
    text: str


def validate_programs(
    layout: Layout,
    programs: Mapping[int, Program],
    *,
    max_in_flight: Mapping[int, int] | None = None,
    forward_only: bool = False,
) -> None:
    """Proves that programs run every hop of a layout's routes exactly once and come to their end.

    Args:
        layout: well formed (see `validate_layout`).
        programs: of all workers; a worker without actions may be left out.
        max_in_flight: for each worker the most micro-batches whose activations it may hold at once; None means no
            bound.
        forward_only: backwards are not expected, but refused.
    Raises:
        InvalidProgramError: with the faults and the grid.
    """
    where = _where_everything_belongs(layout, forward_only)
    faults = list(_misplaced(layout, programs, where))
    faults += _missing(programs, where, forward_only)
    if max_in_flight is not None and not forward_only:
        faults += _too_many_in_flight(programs, max_in_flight)
    if not faults:
        faults += _deadlock(layout, programs, where)
    if faults:
        raise InvalidProgramError(_report(programs, faults))


def _where_everything_belongs(layout: Layout, forward_only: bool) -> dict[Action, int]:
    """Maps every action that may occur at all to its worker."""
    kinds: tuple[Kind, ...] = ("F",) if forward_only else ("F", "B", "I", "W")
    return {
        Action(hop.stage, kind, microbatch): hop.worker
        for microbatch, route in enumerate(layout.routes)
        for hop in route
        for kind in kinds
    }


def _misplaced(layout: Layout, programs: Mapping[int, Program], where: Mapping[Action, int]) -> Iterator[_Fault]:
    """Actions that belong to no route, to another worker, or that are there twice."""
    workers = set(layout.workers)
    for worker, program in sorted(programs.items()):
        if worker not in workers:
            yield _Fault(worker, 0, "is not a worker of the layout, but has a program")
            continue
        first_at: dict[Action, int] = {}
        for position, action in enumerate(program):
            belongs_to = where.get(action)
            if belongs_to is None:
                yield _Fault(worker, position, f"{action} belongs to no route of the layout")
            elif belongs_to != worker:
                yield _Fault(worker, position, f"{action} belongs to worker {belongs_to}")
            elif action in first_at:
                yield _Fault(worker, position, f"{action} is there already, at position {first_at[action]}")
            else:
                first_at[action] = position
            whole = Action(action.stage, "B", action.microbatch)
            if action.kind in ("I", "W") and whole in first_at:
                yield _Fault(worker, position, f"{action} repeats a part of {whole}, at position {first_at[whole]}")
            if action.kind == "B":
                for half in (Action(action.stage, kind, action.microbatch) for kind in ("I", "W")):
                    if half in first_at:
                        yield _Fault(worker, position, f"{action} repeats {half}, at position {first_at[half]}")


def _missing(programs: Mapping[int, Program], where: Mapping[Action, int], forward_only: bool) -> Iterator[_Fault]:
    """Forwards and backwards of hops that their worker's program lacks."""
    there = {worker: set(program) for worker, program in programs.items()}
    for action, worker in where.items():
        if action.kind != "F":
            continue
        own = there.get(worker, set())
        end = len(programs.get(worker, ()))
        if action not in own:
            yield _Fault(worker, end, f"{action} ({ACTION_NAMES['F']}) is missing")
        if forward_only:
            continue
        whole, first, second = (Action(action.stage, kind, action.microbatch) for kind in ("B", "I", "W"))
        if whole in own:
            continue
        if first not in own and second not in own:
            yield _Fault(worker, end, f"{whole} ({ACTION_NAMES['B']}) is missing")
        elif first not in own:
            yield _Fault(worker, end, f"{first} ({ACTION_NAMES['I']}) is missing beside {second}")
        elif second not in own:
            yield _Fault(worker, end, f"{second} ({ACTION_NAMES['W']}) is missing beside {first}")


def _too_many_in_flight(programs: Mapping[int, Program], max_in_flight: Mapping[int, int]) -> Iterator[_Fault]:
    """Finds the first forward of each worker that begins while it holds as much as it may."""
    for worker, program in sorted(programs.items()):
        bound = max_in_flight.get(worker, 0)
        held = 0
        for position, action in enumerate(program):
            if action.kind == "F":
                held += 1
            elif action.kind in ("B", "W"):
                held -= 1
            if held > bound:
                yield _Fault(worker, position, f"{action} is micro-batch number {held} in flight, at most {bound} fit")
                break


def _deadlock(layout: Layout, programs: Mapping[int, Program], where: Mapping[Action, int]) -> Iterator[_Fault]:
    """Runs the programs without clock: each worker goes on until an input is missing, until no worker can go on."""
    done: set[Action] = set()
    position = dict.fromkeys(programs, 0)
    waiting: dict[Action, list[int]] = defaultdict(list)
    runnable = sorted(programs)
    before, after = _neighbours(layout)

    def missing_input(action: Action) -> Action | None:
        stage, microbatch = action.stage, action.microbatch
        own_forward = Action(stage, "F", microbatch)
        if action.kind == "F":
            source = before[stage, microbatch]
            forward = None if source is None else Action(source, "F", microbatch)
            return forward if forward is not None and forward not in done else None
        if action.kind == "W":
            half = Action(stage, "I", microbatch)
            return half if half not in done else None
        if own_forward not in done:
            return own_forward
        source = after[stage, microbatch]
        if source is None:
            return None
        # The two ways to make a gradient are waited for under one name, that of the whole backward.
        gradient = Action(source, "B", microbatch)
        return gradient if gradient not in done else None

    while runnable:
        worker = runnable.pop()
        program = programs[worker]
        while position[worker] < len(program):
            action = program[position[worker]]
            needed = missing_input(action)
            if needed is not None:
                waiting[needed].append(worker)
                break
            position[worker] += 1
            done.add(action)
            runnable += waiting.pop(action, ())
            if action.kind == "I":
                gradient = Action(action.stage, "B", action.microbatch)
                done.add(gradient)
                runnable += waiting.pop(gradient, ())
    for needed, stuck in sorted(waiting.items(), key=lambda item: item[1]):
        for worker in stuck:
            action = programs[worker][position[worker]]
            source_worker = where[needed]
            current = programs[source_worker][position[source_worker]]
            reason = (
                "which comes later in the same program"
                if source_worker == worker
                else f"but worker {source_worker} is stuck before it, at {current}"
            )
            yield _Fault(worker, position[worker], f"deadlock: {action} waits for {needed}, {reason}")


def _neighbours(
    layout: Layout,
) -> tuple[dict[tuple[int, int], int | None], dict[tuple[int, int], int | None]]:
    """Finds the stages before and after each (stage, micro-batch) on its route, None at the ends."""
    before: dict[tuple[int, int], int | None] = {}
    after: dict[tuple[int, int], int | None] = {}
    for microbatch, route in enumerate(layout.routes):
        stages = [None, *(hop.stage for hop in route), None]
        for index, hop in enumerate(route):
            before[hop.stage, microbatch] = stages[index]
            after[hop.stage, microbatch] = stages[index + 2]
    return before, after


def _report(programs: Mapping[int, Program], faults: list[_Fault]) -> str:
    faults = sorted(faults, key=lambda fault: (fault.position, fault.worker))
    lines = [f"worker {fault.worker}, position {fault.position}: {fault.text}" for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"... and {len(faults) - MAX_FAULTS} more")
    return "\n".join(["the programs cannot run:", *lines, "", *_grid(programs, faults)])


def _grid(programs: Mapping[int, Program], faults: list[_Fault]) -> Iterator[str]:
    """Shows the part of the programs around the first fault, bad cells marked."""
    bad = {(fault.worker, fault.position) for fault in faults}
    focus = faults[0]
    rows = sorted({*programs, *(fault.worker for fault in faults)})
    first_row = max(0, min(rows.index(focus.worker) - MAX_ROWS // 2, len(rows) - MAX_ROWS))
    shown_rows = rows[first_row : first_row + MAX_ROWS]
    num_columns = max(max(len(program) for program in programs.values()) if programs else 0, focus.position + 1)
    first_column = max(0, min(focus.position - MAX_COLUMNS // 2, num_columns - MAX_COLUMNS))
    columns = range(first_column, min(num_columns, first_column + MAX_COLUMNS))

    def cell(worker: int, column: int) -> str:
        program = programs.get(worker, ())
        text = str(program[column]) if column < len(program) else ""
        return f">{text or '?'}<" if (worker, column) in bad else f" {text} "

    table = [["position", *(f" {column} " for column in columns)]]
    table += [[f"worker {worker}", *(cell(worker, column) for column in columns)] for worker in shown_rows]
    widths = [max(len(line[index]) for line in table) for index in range(len(table[0]))]
    for line in table:
        yield " ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip()
    left_out = len(rows) - len(shown_rows)
    if left_out:
        yield f"({left_out} more workers)"
    if len(columns) < num_columns:
        yield f"(positions {columns.start} to {columns.stop - 1} of {num_columns})"
