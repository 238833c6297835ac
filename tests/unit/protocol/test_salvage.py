"""What of an interrupted step is kept, and what runs again: the pure functions of `elaswave.protocol.step.salvage`."""

import itertools

import msgspec
import pytest

from elaswave.planning.programs.layout import make_layout
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.validation import validate_programs
from elaswave.planning.search.recovery import survivor_layout
from elaswave.protocol.step.salvage import (
    InFlightMicrobatch,
    Partial,
    Salvage,
    Todo,
    covered_by,
    decode_rows,
    encode_rows,
    keep_of,
    mask_of,
    numbers_in,
    salvage,
    todos_of,
)
from elaswave.types import Layout

N = 8
LAYOUT = make_layout(widths=[2, 2], layers_per_stage=[2, 2], num_microbatches=N)
"""Stage 0: layers 0 and 1 on workers 0 and 1; stage 1: layers 2 and 3 on workers 2 and 3. The loss is layer 4."""
WITHOUT_3 = survivor_layout(LAYOUT, [3])
EVEN, ODD = mask_of(range(0, N, 2)), mask_of(range(1, N, 2))
HERE = {0: range(2), 1: range(2), 2: range(2, 4), 3: range(2, 4)}


def partial(worker: int, added: dict[tuple[int, int], int], **fields: object) -> Partial:
    values: dict[str, object] = {"step": 5, "root": 1, "num_microbatches": N, "can_be_kept": True}
    return Partial(worker=worker, rows=encode_rows(added), **(values | fields))  # type: ignore[arg-type]


def saved(*partials: Partial, layout: Layout = WITHOUT_3, vote: tuple[int, int] | None = (4, 1)) -> Salvage:
    return salvage(partials, HERE, layout, 5, vote, LAYOUT)


def all_of(mask: int) -> dict[int, int]:
    return {2: mask, 3: mask}


# ------------------------------------------------------------------------------------------------------------ encoding


def test_rows_of_adjacent_units_with_the_same_microbatches_are_one():
    table = {(0, 0): 5, (1, 0): 5, (2, 0): 7, (4, 0): 7, (4, 1): 7, (5, 0): 0}
    rows = encode_rows(table)
    assert [(row.start, row.stop, row.use) for row in rows] == [(0, 2, 0), (2, 3, 0), (4, 5, 0), (4, 5, 1)]
    assert decode_rows(rows) == {key: mask for key, mask in table.items() if mask}
    large = {(0, 0): 1 << 999 | 1}
    message = partial(0, large, in_flight=(InFlightMicrobatch(3, 0, 2, 1), InFlightMicrobatch(4, 0, 2, 2, 1)))
    assert msgspec.json.decode(msgspec.json.encode(message), type=Partial) == message
    assert list(numbers_in(large[0, 0])) == [0, 999] and mask_of([999, 0]) == large[0, 0]


# ------------------------------------------------------------------------------------------------------- what is kept


def test_survivors_keep_what_they_have_added_and_the_rest_runs_again():
    """Worker 3 had run the odd micro-batches behind worker 1."""
    first = [partial(worker, {(0, 0): mask, (1, 0): mask}) for worker, mask in ((0, EVEN), (1, ODD))]
    second = partial(2, {(2, 0): EVEN, (3, 0): EVEN}, losses=f"{EVEN:x}")
    found = saved(*first, second)
    assert found.kept == (*first, second)
    assert covered_by(found.kept, 4) == (EVEN | ODD, EVEN | ODD, EVEN, EVEN, EVEN)
    assert found.num_recomputed == N // 2
    todos = todos_of(WITHOUT_3, found.kept, 0)
    assert set(todos) == {(stage, number) for stage in (0, 1) for number in numbers_in(ODD)}
    # Stage 0 has let its inputs go when the gradients came back: it runs forward once more, and no backward.
    assert todos[0, 1] == Todo(True, False, False, True, False, False, False)
    assert todos[1, 1] == Todo(True, True, True, False, True, False, False)


def test_an_outputs_is_sent_again_while_its_gradient_has_not_come_back():
    """Worker 1 has run micro-batch 1 forward, and the lost worker 3 may have run it."""
    found = saved(partial(1, {}, in_flight=(InFlightMicrobatch(1, 0, 2, 2),)))
    todos = todos_of(WITHOUT_3, found.kept, 0)
    assert todos[0, 1] == Todo(False, True, False, True, True, True, False)
    assert todos[1, 1] == Todo(True, True, True, False, True, False, True)
    assert found.num_recomputed == 1
    keep = keep_of(1, found.kept, WITHOUT_3, 0)
    assert keep is not None and keep.in_flight == {1: InFlightMicrobatch(1, 0, 2, 2)}


def test_a_gradient_that_is_kept_is_sent_again():
    """Worker 0 has lost nothing of micro-batch 0 but the gradient that was on its way to it."""
    first = partial(0, {}, in_flight=(InFlightMicrobatch(0, 0, 2, 2),))
    second = partial(2, {(2, 0): 1, (3, 0): 1}, losses="1", in_flight=(InFlightMicrobatch(0, 2, 4, 4, 2),))
    found = saved(first, second)
    todos = todos_of(WITHOUT_3, found.kept, 0)
    assert todos[0, 0] == Todo(False, True, False, False, True, True, False)
    assert todos[1, 0] == Todo(False, False, False, False, False, False, True)
    assert todos[1, 0].includes("B") and todos[1, 0].includes("I") and not todos[1, 0].includes("W")
    assert found.num_recomputed == 0


def test_a_gradient_that_is_gone_is_made_again_by_covered_layers():
    first = partial(0, {}, in_flight=(InFlightMicrobatch(0, 0, 2, 2),))
    second = partial(2, {(2, 0): 1, (3, 0): 1}, losses="1")
    todos = todos_of(WITHOUT_3, saved(first, second).kept, 0)
    assert todos[0, 0] == Todo(False, True, False, True, True, True, False)
    assert todos[1, 0] == Todo(True, True, True, False, True, False, True)


@pytest.mark.parametrize(
    ("microbatch_in_flight", "added", "todo"),
    [
        (InFlightMicrobatch(0, 0, 2, 1), {}, Todo(True, True, False, True, True, True, False)),
        (InFlightMicrobatch(0, 0, 2, 2, 1), {(1, 0): 1}, Todo(False, False, False, False, True, False, False)),
        # What it says of layer 1 is not covered: nothing of it can be used.
        (InFlightMicrobatch(0, 0, 2, 2, 1), {}, Todo(True, True, False, True, True, True, False)),
        # Another hop than that of the layout.
        (InFlightMicrobatch(0, 0, 1, 1), {}, Todo(True, True, False, True, True, True, False)),
    ],
)
def test_an_action_that_was_interrupted_goes_on(
    microbatch_in_flight: InFlightMicrobatch, added: dict[tuple[int, int], int], todo: Todo
) -> None:
    second = partial(2, {(2, 0): 1, (3, 0): 1} if added else {}, losses="1" if added else "0")
    found = saved(partial(0, added, in_flight=(microbatch_in_flight,)), second)
    assert todos_of(WITHOUT_3, found.kept, 0)[0, 0] == todo


def test_a_loss_that_is_missing_runs_its_way_again_without_a_backward():
    layers = {(layer, 0): 1 for layer in (2, 3)}
    found = saved(
        partial(0, {(0, 0): 1, (1, 0): 1}), partial(2, layers, in_flight=(InFlightMicrobatch(0, 2, 4, 4, 2),))
    )
    todos = todos_of(WITHOUT_3, found.kept, 0)
    assert todos[0, 0] == Todo(True, False, False, True, False, False, False)
    assert todos[1, 0] == Todo(True, False, True, False, False, False, False)


def test_no_gradient_is_waited_for_below_the_lowest_layer_that_is_trained():
    second = partial(2, {(2, 0): 1, (3, 0): 1}, losses="1")
    todos = todos_of(WITHOUT_3, saved(second).kept, 2)
    assert todos[0, 0] == Todo(True, True, False, False, True, False, False)
    assert (1, 0) not in todos


def test_without_anything_kept_everything_runs():
    assert keep_of(0, (), WITHOUT_3, 0) is None
    todos = todos_of(WITHOUT_3, (), 0)
    assert len(todos) == 2 * N
    assert {todos[0, number] for number in range(N)} == {Todo(True, True, False, True, True, True, False)}
    assert {todos[1, number] for number in range(N)} == {Todo(True, True, True, False, True, False, True)}


@pytest.mark.parametrize(
    ("changes", "vote"),
    [
        ({"step": 4}, (4, 1)),
        ({"num_microbatches": N + 1}, (4, 1)),
        ({"can_be_kept": False}, (4, 1)),
        ({}, (5, 1)),  # a vote has changed the grids since
        ({"root": 2}, (5, 2)),
    ],
)
def test_from_scratch(changes: dict[str, object], vote: tuple[int, int]) -> None:
    own = partial(2, {(2, 0): EVEN, (3, 0): EVEN}, losses=f"{EVEN:x}")
    assert saved(own).kept == (own,)
    assert saved(msgspec.structs.replace(own, **changes), vote=vote).kept == ()


def test_what_cannot_be_kept_still_counts_as_run():
    own = partial(2, {(2, 0): EVEN, (3, 0): EVEN}, losses=f"{EVEN:x}", can_be_kept=False)
    assert saved(own) == Salvage((), N // 2)


def test_sums_made_after_a_vote_are_kept():
    own = partial(2, {(2, 0): EVEN, (3, 0): EVEN}, root=2)
    assert saved(own, vote=(5, 1)).kept == (own,)


def test_nothing_counts_twice():
    """Worker 3 is still there, and both have added micro-batches 2 and 4 to layer 2, in different attempts."""
    own, other = partial(2, {(2, 0): EVEN, (3, 0): EVEN}), partial(3, {(2, 0): 0b10100, (3, 0): 0b1000})
    found = saved(own, other, layout=LAYOUT)
    assert [decode_rows(each.rows) for each in found.kept] == [{(2, 0): EVEN, (3, 0): EVEN}, {(3, 0): 0b1000}]
    losses = saved(partial(2, {}, losses="7"), partial(3, {}, losses="e"), layout=LAYOUT).kept
    assert [each.losses for each in losses] == ["7", "8"]


def test_only_layers_that_it_still_has_are_kept():
    """Stage 1 is gone with workers 2 and 3: its layers are new to the others."""
    layout = survivor_layout(LAYOUT, [2, 3])
    own = partial(0, {(0, 0): EVEN, (1, 0): EVEN, (2, 0): 1}, in_flight=(InFlightMicrobatch(2, 0, 2, 2),))
    kept = saved(own, layout=layout).kept
    assert [decode_rows(each.rows) for each in kept] == [{(0, 0): EVEN, (1, 0): EVEN}]
    assert kept[0].in_flight == ()  # its hop has four layers now
    moved = msgspec.structs.replace(
        layout, stages=(msgspec.structs.replace(layout.stages[0], workers=(1,)),), idle=(0,)
    )
    routes = tuple(tuple(msgspec.structs.replace(hop, worker=1) for hop in route) for route in layout.routes)
    assert saved(own, layout=msgspec.structs.replace(moved, routes=routes)).kept == ()


def test_a_shared_units_sum_is_kept_with_all_of_its_parts_or_not_at_all():
    """Layers 0 and 3 are tied; worker 2 had both, and goes on with the last two layers."""
    before = make_layout(widths=[3], layers_per_stage=[4], num_microbatches=N, shared=((0, 3),))
    after = msgspec.structs.replace(LAYOUT, shared=((0, 3),))
    table = {(layer, 0): 1 for layer in range(4)} | {(4, 0): 1, (4, 1): 1}
    kept = salvage([partial(2, table)], {2: range(4)}, after, 5, None, before).kept
    assert [decode_rows(each.rows) for each in kept] == [{(2, 0): 1}]
    own = {(2, 0): 1, (3, 0): 1, (4, 1): 1}
    kept = salvage([partial(2, own)], {2: range(4)}, after, 5, None, before).kept
    assert [decode_rows(each.rows) for each in kept] == [{(2, 0): 1, (3, 0): 1}]


# ------------------------------------------------------------------------------------------------- all states of a pair

_FIRST = [
    ({}, ()),
    ({}, (InFlightMicrobatch(0, 0, 2, 1),)),
    ({}, (InFlightMicrobatch(0, 0, 2, 2),)),
    ({(1, 0): 1}, (InFlightMicrobatch(0, 0, 2, 2, 1),)),
    ({(1, 0): 1}, ()),
    ({(0, 0): 1, (1, 0): 1}, ()),
]
_SECOND = [
    ({}, "0", ()),
    ({}, "0", (InFlightMicrobatch(0, 2, 4, 3),)),
    ({}, "0", (InFlightMicrobatch(0, 2, 4, 4),)),
    ({}, "1", (InFlightMicrobatch(0, 2, 4, 5),)),
    ({(3, 0): 1}, "1", (InFlightMicrobatch(0, 2, 4, 4, 3),)),
    ({(3, 0): 1}, "1", ()),
    ({(2, 0): 1, (3, 0): 1}, "1", (InFlightMicrobatch(0, 2, 4, 4, 2),)),
    ({(2, 0): 1, (3, 0): 1}, "1", ()),
    ({(2, 0): 1, (3, 0): 1}, "0", ()),
]


@pytest.mark.parametrize(("first", "second"), [*itertools.product(_FIRST, _SECOND)])
def test_what_one_hop_takes_the_other_sends_and_all_is_covered_in_the_end(first, second):
    kept = saved(
        partial(0, first[0], in_flight=first[1]), partial(2, second[0], losses=second[1], in_flight=second[2])
    ).kept
    todos = todos_of(WITHOUT_3, kept, 0)
    none = Todo(*[False] * 7)
    before, after = todos.get((0, 0), none), todos.get((1, 0), none)
    assert before.sends_output is after.takes_input
    assert after.sends_gradient is before.takes_gradient
    covered = covered_by(kept, 4)
    for hop, todo in ((range(2), before), (range(2, 4), after)):
        is_done = all(covered[layer] & 1 for layer in hop)
        assert todo.backward or is_done
    assert after.forward or covered[4] & 1
    if all(mask & 1 for mask in covered):
        assert before == after == none


def test_programs_without_what_is_done_have_no_deadlock():
    """They are parts of valid programs, so what is left in them waits for nothing that comes later."""
    programs = compile_programs(WITHOUT_3, "1f1b")
    validate_programs(WITHOUT_3, programs)
    found = saved(partial(2, {(2, 0): EVEN, (3, 0): EVEN}, losses=f"{EVEN:x}"))
    todos = todos_of(WITHOUT_3, found.kept, 0)
    left = {
        worker: [a for a in program if (todo := todos.get((a.stage, a.microbatch))) and todo.includes(a.kind)]
        for worker, program in programs.items()
    }
    assert sum(map(len, left.values())) == 2 * 2 * N  # stage 1 must make the gradients of stage 0 again
