"""What of a step that a loss has interrupted is kept, and what runs again: pure functions of reports and layout.

Sums are exact, so it does not matter in which attempt a micro-batch was added, nor where. A survivor tells in its
report what it has of the step (`Partial`): what was added to its sums, by unit, use and micro-batch; the losses that it
has computed; and the micro-batches that are on their way through its layers (`InFlightMicrobatch`). The decision says
what of that each member keeps, so that nothing counts twice; the rest is emptied. From this, and from the layout, every
worker computes what is left to do of each micro-batch at each of its hops (`Todo`). An ordinary attempt is the case in
which nothing is kept. The numbers S1, S2, ... are those of ``docs/protocol.md``.

The loss is a layer of its own here, one past the last: it is computed by a forward, and counts once.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from elaswave.types import Hop, Layout


class AccumulatedUnits(msgspec.Struct, frozen=True, array_like=True):
    """Adjacent units to which the same micro-batches were added."""

    start: int
    stop: int
    use: int
    """Which of the uses of a shared unit; 0 for a layer."""
    # Text: an integer of a message has 64 bits, and a step may have more micro-batches.
    microbatches: str
    """One bit each, as a hexadecimal number."""


class InFlightMicrobatch(msgspec.Struct, frozen=True, array_like=True):
    """A micro-batch on its way through the layers [start, stop) of one hop.

    Without a `backward`, what layers [start, forward) need for it is here, and the output of the last of them. With
    one, what layers [start, backward) need is here, and the gradient that they wait for.
    """

    microbatch: int
    start: int
    stop: int
    forward: int
    """One past the last layer that has run forward; the loss counts as a layer."""
    backward: int | None = None
    """The lowest layer that has run backward; `stop` if none has."""


class Partial(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has of a step, in its report; and what it keeps of that, in a decision."""

    worker: int
    step: int
    root: int
    """The attempt that began with empty sums; later ones went on from what they kept."""
    num_microbatches: int
    """Of the step."""
    can_be_kept: bool
    """Whether the sums are exact, all finite, and to be kept at all (S5)."""
    rows: tuple[AccumulatedUnits, ...] = ()
    """What was added to its sums; in a decision, of the layers that are kept."""
    losses: str = "0"
    """Micro-batches whose losses it has, as in `AccumulatedUnits`."""
    in_flight: tuple[InFlightMicrobatch, ...] = ()


class Keep(NamedTuple):
    """What a worker's engine keeps when an attempt begins, and what is not to be added again."""

    layers: frozenset[int]
    """Whose sums stay as they are; those of shared units stay with the layers that have added to them."""
    losses: int
    """Micro-batches whose losses stay, one bit each."""
    in_flight: Mapping[int, InFlightMicrobatch]
    """By micro-batch."""
    covered: tuple[int, ...]
    """By layer, the loss last: the micro-batches that some worker has kept, one bit each."""


class Todo(NamedTuple):
    """What is left to be done of a micro-batch at one hop."""

    forward: bool
    """Its layers run forward, as far as they have not."""
    keeps: bool
    """The backward will need what the forward makes."""
    takes_input: bool
    """It comes from the hop before."""
    sends_output: bool
    """To the hop after; without `forward`, the one that is kept."""
    backward: bool
    """Its layers run backward, as far as they have not; those that are covered pass the gradient on without adding."""
    takes_gradient: bool
    """It comes from the hop after."""
    sends_gradient: bool
    """To the hop before; without `backward`, the one that is kept."""

    def includes(self, kind: str) -> bool:
        """Tells whether an action of this kind is to be done."""
        if kind == "F":
            return self.forward or self.sends_output
        # The gradient that is handed on is made before W.
        return self.backward or (self.sends_gradient and kind != "W")

    def runs(self, kind: str) -> bool:
        """Tells whether an action of this kind computes anything."""
        return self.forward if kind == "F" else self.backward


class Salvage(NamedTuple):
    """What is kept of a step."""

    kept: tuple[Partial, ...]
    num_recomputed: int
    """Micro-batches of which a layer that had run, as far as is known, runs again (S6)."""


# ------------------------------------------------------------------------------------------------------- micro-batches


def encode_rows(masks: Mapping[tuple[int, int], int]) -> tuple[AccumulatedUnits, ...]:
    """Encodes a table as rows.

    Args:
        masks: (unit, use) -> micro-batches, one bit each.
    """
    rows: list[AccumulatedUnits] = []
    # By use first, so that adjacent layers follow each other and become one row.
    for (unit, use), mask in sorted(masks.items(), key=lambda item: (item[0][1], item[0][0])):
        last = rows[-1] if rows else None
        text = f"{mask:x}"
        if mask == 0:
            continue
        if last is not None and (last.stop, last.use, last.microbatches) == (unit, use, text):
            rows[-1] = AccumulatedUnits(last.start, unit + 1, use, text)
        else:
            rows.append(AccumulatedUnits(unit, unit + 1, use, text))
    return tuple(rows)


def decode_rows(rows: Iterable[AccumulatedUnits]) -> dict[tuple[int, int], int]:
    """Does the inverse of `encode_rows`."""
    return {(unit, row.use): int(row.microbatches, 16) for row in rows for unit in range(row.start, row.stop)}


def numbers_in(mask: int) -> Iterator[int]:
    """Yields the numbers of the bits that are set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def mask_of(numbers: Iterable[int]) -> int:
    """Does the inverse of `numbers_in`."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def _end_of(hop: Hop | InFlightMicrobatch, num_layers: int) -> int:
    """Returns one past the last layer that a hop runs forward, the loss included."""
    return hop.stop + (hop.stop == num_layers)


# ---------------------------------------------------------------------------------------------------- what is kept (S3)


def salvage(
    partials: Sequence[Partial],
    here: Mapping[int, range],
    layout: Layout,
    step: int,
    newest_vote: tuple[int, int] | None,
    before: Layout,
) -> Salvage:
    """Finds what of a step all members keep.

    Args:
        partials: of the members' reports.
        here: by worker, the layers that it had when it reported.
        layout: to go on with.
        step: that is tried next.
        newest_vote: step and attempt of the newest vote; None: there was none.
        before: the layout that was in force.
    """
    valid = [
        partial
        for partial in partials
        if partial.step == step
        and partial.num_microbatches == layout.num_microbatches
        and (newest_vote is None or newest_vote < (partial.step, partial.root))  # it has changed the grids since
    ]
    # What cannot be kept has run all the same, so it counts as run again (S6).
    kept = _kept([partial for partial in valid if partial.can_be_kept], here, layout)
    return Salvage(kept, _num_recomputed(valid, kept, layout, before))


def _kept(partials: Sequence[Partial], here: Mapping[int, range], layout: Layout) -> tuple[Partial, ...]:
    num_layers = layout.num_layers
    held = {partial.worker: _held_layers(layout, partial.worker, here[partial.worker]) for partial in partials}
    tables = {partial.worker: decode_rows(partial.rows) for partial in partials}
    taken = [0] * (num_layers + 1)
    layers: dict[int, dict[int, int]] = {partial.worker: {} for partial in partials}
    candidates = [
        (-mask.bit_count(), worker, unit, mask)
        for worker, table in tables.items()
        for (unit, _), mask in table.items()
        if unit in held[worker]
    ]
    # Of sums that overlap the one with the most micro-batches is kept.
    for _, worker, layer, mask in sorted(candidates):
        # Whole or not at all (S3): no micro-batch can be taken out of a sum.
        if not taken[layer] & mask:
            taken[layer] |= mask
            layers[worker][layer] = mask
    for worker, table in tables.items():
        _drop_entangled(layers[worker], table, layout)
    # Counted anew: entangled layers have been taken out.
    covered = [0] * (num_layers + 1)
    for masks in layers.values():
        for layer, mask in masks.items():
            covered[layer] |= mask
    # Losses are not summed up, each has a slot: where two workers have the same ones, they are dealt out one by one.
    losses = {}
    for partial in partials:
        losses[partial.worker] = int(partial.losses, 16) & ~covered[num_layers]
        covered[num_layers] |= losses[partial.worker]
    found = [
        Partial(
            worker=partial.worker,
            step=partial.step,
            root=partial.root,
            num_microbatches=partial.num_microbatches,
            can_be_kept=True,
            rows=encode_rows({(layer, 0): mask for layer, mask in layers[partial.worker].items()}),
            losses=f"{losses[partial.worker]:x}",
            in_flight=tuple(
                microbatch_in_flight
                for microbatch_in_flight in partial.in_flight
                if _can_go_on(microbatch_in_flight, partial.worker, here[partial.worker], layout, covered)
            ),
        )
        for partial in partials
    ]
    return tuple(partial for partial in found if partial.rows or partial.in_flight or partial.losses != "0")


def _held_layers(layout: Layout, worker: int, here: range) -> range:
    """Finds the layers that a worker has, and still has under a layout."""
    layers = layout.layers_of(worker)
    return range(max(here.start, layers.start), min(here.stop, layers.stop))


def _drop_entangled(layers: dict[int, int], table: Mapping[tuple[int, int], int], layout: Layout) -> None:
    """Takes out layers whose part of a shared unit's sum cannot be told from that of a layer that is not kept.

    Args:
        layers: layer -> micro-batches, to be kept so far.
        table: all that was added.
    """
    changed = True
    while changed:
        changed = False
        for unit, users in enumerate(layout.shared, start=layout.num_layers):
            # All uses are in one sum: it stays only if each layer stays that has added to it, with all of that.
            parts = [(layer, table.get((unit, use), 0)) for use, layer in enumerate(users)]
            if any(layers.get(layer, 0) != mask for layer, mask in parts):
                dropped = [layers.pop(layer) for layer in dict.fromkeys(users) if layer in layers]
                # A layer that goes may use other shared units, whose sums cannot stay then.
                changed = changed or bool(dropped)


def _can_go_on(
    microbatch_in_flight: InFlightMicrobatch, worker: int, here: range, layout: Layout, covered: Sequence[int]
) -> bool:
    """Tells whether a micro-batch goes on where it is: its hop is the same, and what it would not do again is
    covered."""
    number, num_layers = microbatch_in_flight.microbatch, layout.num_layers
    if (
        Hop(worker, _stage_of_hop(layout, number, worker), microbatch_in_flight.start, microbatch_in_flight.stop)
        not in layout.routes[number]
    ):
        return False
    if not here.start <= microbatch_in_flight.start < microbatch_in_flight.stop <= here.stop:
        return False
    # These layers do not run backward again: what they have added must be in sums that are kept.
    done = range(
        0 if microbatch_in_flight.backward is None else microbatch_in_flight.backward,
        0 if microbatch_in_flight.backward is None else microbatch_in_flight.stop,
    )
    if any(not covered[layer] >> number & 1 for layer in done):
        return False
    has_loss = microbatch_in_flight.backward is not None or microbatch_in_flight.forward > num_layers
    return not (microbatch_in_flight.stop == num_layers and has_loss and not covered[num_layers] >> number & 1)


def _stage_of_hop(layout: Layout, microbatch: int, worker: int) -> int:
    return next((hop.stage for hop in layout.routes[microbatch] if hop.worker == worker), -1)


def keep_of(worker: int, kept: Sequence[Partial], layout: Layout, lowest_trained: int) -> Keep | None:
    """Finds what one worker's engine keeps; returns None if no worker keeps anything.

    Args:
        kept: of the decision.
        layout: of the decision.
        lowest_trained: no gradient goes to layers below it.
    """
    if not kept:
        return None
    own = next((partial for partial in kept if partial.worker == worker), None)
    # Without anything of its own it must still not add what others have kept.
    if own is None:
        return Keep(frozenset(), 0, {}, covered_by(kept, layout.num_layers))
    todos = todos_of(layout, tuple(kept), lowest_trained)
    # What no action needs any more would only take memory until the commit.
    needed = {
        number
        for number, route in enumerate(layout.routes)
        for hop in route
        if hop.worker == worker and (hop.stage, number) in todos
    }
    return Keep(
        frozenset(layer for layer, _ in decode_rows(own.rows)),
        int(own.losses, 16),
        {
            microbatch_in_flight.microbatch: microbatch_in_flight
            for microbatch_in_flight in own.in_flight
            if microbatch_in_flight.microbatch in needed
        },
        covered_by(kept, layout.num_layers),
    )


def covered_by(kept: Iterable[Partial], num_layers: int) -> tuple[int, ...]:
    """Collects by layer, the loss last, the micro-batches that some worker has kept."""
    covered = [0] * (num_layers + 1)
    for partial in kept:
        for (layer, _), mask in decode_rows(partial.rows).items():
            covered[layer] |= mask
        covered[num_layers] |= int(partial.losses, 16)
    return tuple(covered)


# ---------------------------------------------------------------------------------------------- what is left to be done


@functools.lru_cache(maxsize=256)
def todos_of(layout: Layout, kept: tuple[Partial, ...], lowest_trained: int) -> Mapping[tuple[int, int], Todo]:
    """Maps (stage, micro-batch) to what is left to be done there; hops with nothing to do are not in it.

    Args:
        layout: in force.
        kept: what workers keep of the step.
        lowest_trained: no gradient goes to layers below it.
    """
    covered = covered_by(kept, layout.num_layers)
    in_flight = {
        (partial.worker, microbatch_in_flight.microbatch): microbatch_in_flight
        for partial in kept
        for microbatch_in_flight in partial.in_flight
    }
    found = {}
    for number, route in enumerate(layout.routes):
        missing = frozenset(layer for layer, mask in enumerate(covered) if not mask >> number & 1)
        if missing:
            own = [in_flight.get((hop.worker, number)) for hop in route]
            for hop, todo in zip(route, _todos(route, own, missing, layout.num_layers, lowest_trained), strict=True):
                if any(todo):
                    found[hop.stage, number] = todo
    return found


def _todos(
    route: Sequence[Hop],
    in_flight: Sequence[InFlightMicrobatch | None],
    missing: frozenset[int],
    num_layers: int,
    lowest_trained: int,
) -> list[Todo]:
    """Finds what is left of one micro-batch, hop by hop.

    Args:
        in_flight: of its hops; None where nothing is kept.
        missing: layers, the loss among them, that are not covered.
    """
    # From the front: whether a gradient is wanted follows from the layers before.
    backwards = []
    is_wanted = False  # the gradient, by the hop before
    for index, (hop, microbatch_in_flight) in enumerate(zip(route, in_flight, strict=True)):
        resume_point = None if microbatch_in_flight is None else microbatch_in_flight.backward
        # A backward that has come to the first layer of the hop has made the gradient, which only has to be sent.
        runs = not missing.isdisjoint(range(hop.start, hop.stop)) or (is_wanted and resume_point != hop.start)
        takes = runs and resume_point is None and hop.stop > lowest_trained and index + 1 < len(route)
        backwards.append((runs, takes, is_wanted))
        is_wanted = takes
    # Then from the back: whether an output is wanted follows from what runs behind it.
    todos = []
    is_wanted = False  # the output, by the hop after
    for index, (hop, microbatch_in_flight) in reversed(list(enumerate(zip(route, in_flight, strict=True)))):
        runs, takes, sends = backwards[index]
        end = _end_of(hop, num_layers)
        resume_point = None if microbatch_in_flight is None else microbatch_in_flight.backward
        # A forward's output is gone once its backward has begun: if it is wanted again, the hop runs from its input.
        reached = (
            hop.start if microbatch_in_flight is None or resume_point is not None else microbatch_in_flight.forward
        )
        keeps = runs and resume_point is None
        is_loss_missing = hop.stop == num_layers and num_layers in missing
        forward = reached < end and (keeps or is_wanted or is_loss_missing)
        takes_input = forward and reached == hop.start and index > 0
        todos.append(Todo(forward, keeps, takes_input, is_wanted, runs, takes, sends))
        is_wanted = takes_input
    return todos[::-1]


# ------------------------------------------------------------------------------------------------ what runs again (S6)


def _num_recomputed(partials: Sequence[Partial], kept: tuple[Partial, ...], layout: Layout, before: Layout) -> int:
    """Counts how many micro-batches run again in part, as far as survivors know.

    A layer is known to have run forward if a survivor says so, or has what was made behind it. A hop of a lost worker
    is taken to have run if all that it needs was there.
    """
    todos = todos_of(layout, kept, 0)
    ran = _reached(partials, before)
    in_flight = {
        (partial.worker, microbatch_in_flight.microbatch): microbatch_in_flight
        for partial in kept
        for microbatch_in_flight in partial.in_flight
    }
    num_again = 0
    for number, route in enumerate(layout.routes):
        for hop in route:
            todo = todos.get((hop.stage, number))
            if todo is None or not todo.forward:
                continue
            microbatch_in_flight = in_flight.get((hop.worker, number))
            start = (
                hop.start
                if microbatch_in_flight is None or microbatch_in_flight.backward is not None
                else microbatch_in_flight.forward
            )
            if start < ran[number]:
                num_again += 1
                break
    return num_again


def _reached(partials: Sequence[Partial], before: Layout) -> list[int]:
    """Finds by micro-batch one past the last layer that is known to have run forward."""
    num_layers = before.num_layers
    reached = [0] * before.num_microbatches
    known: set[tuple[int, int]] = set()

    def note(number: int, layer: int) -> None:
        reached[number] = max(reached[number], layer)

    for partial in partials:
        for (layer, _), mask in decode_rows(partial.rows).items():
            for number in numbers_in(mask):
                note(number, min(layer + 1, num_layers))
        for number in numbers_in(int(partial.losses, 16)):
            note(number, num_layers + 1)
        for microbatch_in_flight in partial.in_flight:
            note(
                microbatch_in_flight.microbatch,
                microbatch_in_flight.forward if microbatch_in_flight.backward is None else microbatch_in_flight.stop,
            )
        # A survivor has told all that it has run: nothing is guessed of its hops.
        known.update((partial.worker, number) for number in range(before.num_microbatches))
    for number, route in enumerate(before.routes):
        for hop in route:
            # Its input had been sent; of a first hop, which is sent none, nobody knows whether it had begun.
            if reached[number] == hop.start > 0 and (hop.worker, number) not in known:
                note(number, hop.stop)
    return reached
