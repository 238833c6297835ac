"""Where to cut a flat list of operators, and what crosses a cut.

Every value that is made before a cut and used after it crosses once. Of values that share memory the one crosses that
they are all taken from, and the views are taken anew behind the cut, so that aliases and strides stay as they were.
What depends on inputs of whole numbers and on constants alone (masks, positions, rotary tables) is *free*: every part
computes it for itself from the inputs.

The parts are found by a dynamic programme over all places: the slowest part is as fast as it can be. The time of a part
is what its operators take forward and backward, and what it takes to move the bytes at its two ends, values and their
gradients. Operators count by their products and bytes, not by measured seconds: so the cuts are the same whenever and
wherever a script runs.
"""

import bisect
import difflib
import os
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from elaswave.errors import UsageError
from elaswave.models.splitting.measure import OperatorRun
from elaswave.models.splitting.program import AUX_LOSS, GETITEM, Op, Ref
from elaswave.models.splitting.trace import Traced

FLOPS_PER_S, BYTES_PER_S, LAUNCH_S = 5e10, 1e10, 5e-6
"""Of a core of a usual processor: floating-point operations, bytes that an operator reads and writes, and what each
operator takes at least. Only their proportions matter, and that to a link."""
_LOOK_UP = ("aten.embedding.", "aten.index.", "aten.index_select.", "aten.gather.")
"""Operators that read as much as they make of what they are given."""


class Crossing(NamedTuple):
    """What crosses a cut."""

    values: tuple[int, ...]
    num_bytes: int
    """Of the values and of gradients for those of floating-point numbers."""


def has_gradients(dtype: torch.dtype) -> bool:
    """Tells whether numbers of a type can have gradients."""
    return dtype.is_floating_point or dtype.is_complex


class DependencyGraph:
    """What depends on what in a network.

    Args:
        traced: its operators.
        facts: of a run of them.
        changing: names of buffers that the network writes in the other mode.
    """

    def __init__(self, traced: Traced, facts: OperatorRun, changing: Set[str] = frozenset()) -> None:
        self.traced, self.facts, self._changing = traced, facts, changing
        self.maker = {op.out: place for place, op in enumerate(traced.ops)}
        """By value, the place of the operator that makes it."""
        self.outputs = [each.value for each in traced.outputs if isinstance(each, Ref)]
        self._uses: dict[int, list[int]] = {}
        for place, op in enumerate(traced.ops):
            for value in op.values:
                self._uses.setdefault(value, []).append(place)
        # As if they were used behind the last operator: they cross every cut that comes after they were made.
        for value in self.outputs:
            self._uses.setdefault(value, []).append(len(traced.ops))
        self.written = {facts.values[value].storage for op in traced.ops for value in op.writes}
        """Memory that some operator writes."""
        self.free = self._free_places()
        """Places of operators that depend on whole numbers and constants alone."""
        self._last_use = {value: places[-1] for value, places in self._uses.items()}

    def _free_places(self) -> set[int]:
        """Finds the places of operators that depend on inputs of whole numbers and on constants, and write nothing
        else."""
        traced, facts = self.traced, self.facts
        values = {value for value in traced.inputs if not has_gradients(facts.values[value].dtype)}
        values |= {
            value for value, state in traced.state.items()
            if state.kind != "parameter" and facts.values[value].storage not in self.written
            and state.name not in self._changing
        }  # fmt: skip
        spoiled: set[int] = set()
        while True:
            known, places = set(values), set()
            for place, op in enumerate(traced.ops):
                is_free = known.issuperset(op.values) and not self._storages(op) & spoiled
                # Draws and auxiliary losses would come once for every part.
                is_free = is_free and not op.draws and op.target != AUX_LOSS
                if is_free:
                    known.add(op.out)
                    places.add(place)
            # What is not free may write memory that free operators read: those are not free either, and so on.
            more = {
                facts.values[value].storage
                for place, op in enumerate(traced.ops) if place not in places for value in op.writes
            } - spoiled  # fmt: skip
            if not more:
                return places
            spoiled |= more

    def _storages(self, op: Op) -> set[int]:
        known = self.facts.values
        return {known[value].storage for value in (*op.values, op.out) if value in known}

    def is_free(self, value: int) -> bool:
        """Tells whether every part can compute it for itself."""
        place = self.maker.get(value)
        return value not in self.traced.state and (place is None or place in self.free)

    def path(self, value: int) -> list[int]:
        """Lists the values from the one that has memory of its own to this view of it."""
        found = [value]
        while (parent := self.parent(found[-1])) is not None:
            found.append(parent)
        return found[::-1]

    def parent(self, value: int) -> int | None:
        """Finds the value that it is taken from as a view."""
        if value in self.facts.several:
            return self.facts.several[value]
        place = self.maker.get(value)
        if place is None:
            return None
        op = self.traced.ops[place]
        if op.target == GETITEM and self.facts.several.get(op.args[0].value) is not None:
            return int(op.args[0].value)
        facts = self.facts.values.get(value)  # an auxiliary loss that is told makes nothing
        return None if facts is None else facts.parent

    def made_by(self, place: int) -> list[int]:
        """Lists the tensors that an operator makes: one, or those that are taken out of several."""
        ops, known = self.traced.ops, self.facts.values
        out = ops[place].out
        if out in known:
            return [out]
        return [op.out for op in ops[place + 1 :] if op.target == GETITEM and Ref(out) in op.args[:1]]

    def live(self, place: int) -> list[int]:
        """Lists the values that are made before a place, used at or after it, and not free."""
        ops = self.traced.ops
        return [
            op.out for before, op in enumerate(ops[:place])
            if before not in self.free and self._last_use.get(op.out, -1) >= place
        ]  # fmt: skip

    def crossing(self, place: int) -> Crossing | None:
        """Tells what crosses a cut before the operator at a place; None: there can be no cut."""
        return self._crossing(place, self.live(place))

    def crossings(self) -> list[Crossing | None]:
        """Lists `crossing` of every place from 0 to the number of operators."""
        ops = self.traced.ops
        alive: list[int] = []
        found = []
        for place in range(len(ops) + 1):
            alive = [value for value in alive if self._last_use.get(value, -1) >= place]
            found.append(self._crossing(place, alive))
            if place < len(ops) and place not in self.free:
                alive.append(ops[place].out)
        return found

    def _crossing(self, place: int, live: Sequence[int]) -> Crossing | None:
        groups: dict[int, list[list[int]]] = {}
        for value in live:
            path = self.path(value)
            groups.setdefault(path[0], []).append(path)
        carried = []
        for root, paths in groups.items():
            # Inputs and state every part has itself: only views of them have to be taken again.
            one = self._carried(paths) if root in self.maker else root
            if one is None or not all(self._can_be_taken_again(path[-1], one) for path in paths):
                return None
            carried += [one] if root in self.maker else []
        known = self.facts.values
        sizes = [known[one].num_bytes * (2 if has_gradients(known[one].dtype) else 1) for one in carried]
        return Crossing(tuple(sorted(carried)), sum(sizes))

    def _carried(self, paths: Sequence[Sequence[int]]) -> int | None:
        """Finds the value that crosses for values that share memory: the last one that all of them are taken from, so
        that gradients of both sides meet where they meet in the network; one that is dense, since strides must be
        kept."""
        common = os.path.commonprefix([list(path) for path in paths])
        for value in reversed(common):
            if value not in self.facts.several and self.facts.values[value].permutation is not None:
                return int(value)
        return None

    def _can_be_taken_again(self, value: int, root: int) -> bool:
        """Tells whether the operators from a root to its view need nothing else that would have to cross."""
        while value != root:
            parent = self.parent(value)
            assert parent is not None
            others = set(self.traced.ops[self.maker[value]].values) - {parent}
            if not all(self.is_free(other) for other in others):
                return False
            value = parent
        return True

    def closed_spans(self) -> list[tuple[int, int, str]]:
        """Places [first use, last use] of the buffers of each module that writes any, and the name of one: no cut may
        come between them."""
        places: dict[str, list[int]] = {}
        names: dict[str, str] = {}
        by_storage = self._uses_by_storage()
        for value, state in self.traced.state.items():
            storage = self.facts.values[value].storage
            if storage in self.written and state.kind != "parameter":
                module = state.name.rpartition(".")[0]
                places.setdefault(module, []).extend(by_storage[storage])
                names[module] = state.name
        last = len(self.traced.ops) - 1
        return [(min(found), min(max(found), last), names[module]) for module, found in places.items()]

    def _uses_by_storage(self) -> dict[int, list[int]]:
        """Places of the operators that are given some memory, itself or a view of it."""
        found: dict[int, list[int]] = {}
        for value, facts in self.facts.values.items():
            found.setdefault(facts.storage, []).extend(self._uses.get(value, ()))
        return found

    def buffer_spans(self) -> dict[str, tuple[int, int]]:
        """Places of the first and the last use of each persistent buffer that is used."""
        uses = self._uses_by_storage()
        last = len(self.traced.ops) - 1
        spans = {
            state.name: uses[self.facts.values[value].storage]
            for value, state in self.traced.state.items() if state.kind == "buffer"
        }  # fmt: skip
        return {name: (min(found), min(max(found), last)) for name, found in spans.items() if found}

    def written_buffers(self) -> set[str]:
        """Names the persistent buffers that some operator writes."""
        return {
            state.name for value, state in self.traced.state.items()
            if state.kind == "buffer" and self.facts.values[value].storage in self.written
        }  # fmt: skip


class CutCosts(NamedTuple):
    """What the cuts are decided by."""

    compute_s: npt.NDArray[np.float64]
    """By operator, forward and backward."""
    cross_s: npt.NDArray[np.float64]
    """By place [0, number of operators]: what a cut there adds to each of the parts beside it; infinite: no cut."""

    def part_s(self, start: int, stop: int) -> float:
        """Computes the time of a part."""
        return float(self.compute_s[start:stop].sum() + self.cross_s[start] + self.cross_s[stop])


def counted_s(flow: DependencyGraph, place: int) -> float:
    """Computes what the operator at a place takes forward and backward, by what can be counted: the same in every
    process and on every machine, where measured seconds are not. A backward makes the gradient of each tensor that has
    one, and a product takes as long for the gradient of each factor as it took itself."""
    op, known = flow.traced.ops[place], flow.facts.values
    given = [known[value] for value in dict.fromkeys(op.values) if value in known]
    made = [known[value] for value in flow.made_by(place)]
    out = sum(each.num_bytes for each in made if each.parent is None)
    num_gradients = sum(each.has_gradient(place) for each in given) if op.context.grad else 0
    if not out and not op.writes and not flow.facts.flops[place]:  # a view
        return LAUNCH_S
    looked_up = op.target.startswith(_LOOK_UP)
    moved = out + (out if looked_up else sum(each.num_bytes for each in given))
    gradients = sum(each.num_bytes for each in given if each.has_gradient(place)) if num_gradients else 0
    num_products = flow.facts.flops[place] * (1 + min(num_gradients, 2))
    return (
        LAUNCH_S * (2 if num_gradients else 1)
        + num_products / FLOPS_PER_S
        + (moved + gradients + (moved if num_gradients else 0)) / BYTES_PER_S
    )


def costs_of(flow: DependencyGraph, there: Sequence[int | None], link_bytes_per_s: float) -> CutCosts:
    """Computes the costs of a network.

    Args:
        flow: of its operators.
        there: of `places_in_evaluation`.
        link_bytes_per_s: between two parts.
    """
    cross = np.array([np.inf if found is None else found.num_bytes / link_bytes_per_s for found in flow.crossings()])
    cross[[place is None for place in there]] = np.inf
    # Beginning and end are no cuts: nothing is sent there.
    cross[0] = cross[-1] = 0.0
    for first, last, _ in flow.closed_spans():
        cross[first + 1 : last + 1] = np.inf
    compute = [counted_s(flow, place) for place in range(len(flow.traced.ops))]
    return CutCosts(np.array(compute, dtype=np.float64), cross)


def balanced_cuts(costs: CutCosts, num_parts: int) -> tuple[int, ...] | None:
    """Finds the places before which to cut, so that the slowest part is as fast as it can be.

    Args:
        costs: of the network.
        num_parts: at least 1.
    Returns:
        num_parts - 1 places in order; None: it cannot be cut into so many.
    """
    num_ops = len(costs.compute_s)
    before = np.concatenate([[0.0], np.cumsum(costs.compute_s)])
    at = [place for place in range(num_ops + 1) if np.isfinite(costs.cross_s[place])]
    start_s = before[at] - costs.cross_s[at]  # a part [i, j) takes stop_s[j] - start_s[i]
    stop_s = before[at] + costs.cross_s[at]
    slowest = np.where(np.arange(len(at)) == 0, 0.0, np.inf)
    choices = []
    for _ in range(num_parts):
        after, choice = np.full(len(at), np.inf), np.zeros(len(at), dtype=np.int64)
        for stop in range(1, len(at)):
            candidates = np.maximum(slowest[:stop], stop_s[stop] - start_s[:stop])
            choice[stop] = int(candidates.argmin())
            after[stop] = candidates[choice[stop]]
        slowest = after
        choices.append(choice)
    if not np.isfinite(slowest[-1]):
        return None
    cuts, stop = [], len(at) - 1
    for choice in reversed(choices):
        stop = int(choice[stop])
        cuts.append(at[stop])
    return tuple(reversed(cuts[:-1]))


def problem_with_cuts(
    flow: DependencyGraph, there: Sequence[int | None], costs: CutCosts, num_parts: int
) -> UsageError:
    """Tells why a network cannot be cut into so many parts."""
    can = int(np.isfinite(costs.cross_s[1:-1]).sum()) + 1
    spans = flow.closed_spans()
    shared = [f"{name} ({flow.traced.ops[last].source})" for first, last, name in spans if last > first + 1]
    because = ""
    if shared:
        because = (
            f" Parts would share mutable state: the forward uses the same buffer at several places, and writes it: "
            f"{', '.join(sorted(shared)[:3])}. Give each use a module of its own, or freeze it (eval() of that module)."
        )
    if None in there[1:-1]:
        first = flow.traced.ops[there.index(None, 1)]
        because += (
            f" {sum(place is None for place in there[1:-1])} places are none since evaluation (model.eval()) uses in "
            f"another order what training writes, the first before {first.target} at {first.source}."
        )
    return UsageError(
        f"the network of {len(flow.traced.ops)} operators can be cut into at most {can} parts, and num_parts is "
        f"{num_parts}.{because} Otherwise give a smaller num_parts"
    )


def bounds_of(cuts: Sequence[int], num_ops: int) -> list[tuple[int, int]]:
    """Lists the parts [start, stop) that cuts make."""
    ends = [0, *cuts, num_ops]
    return list(zip(ends, ends[1:]))


def places_in_evaluation(train: DependencyGraph, evaluation: DependencyGraph) -> list[int | None]:
    """Finds where evaluation is cut when training is cut before the operator at a place: behind the last operator that
    both have before the cut, or as near to it as evaluation can be cut. A buffer that training writes is used by the
    same part in evaluation.

    Args:
        train, evaluation: the network in both modes.
    Returns:
        By place of training, the one in evaluation; None: evaluation cannot be cut where training would be.
    """
    num_ops = len(evaluation.traced.ops)
    spans = evaluation.closed_spans()
    allowed = [
        place for place, crossing in enumerate(evaluation.crossings())
        if crossing is not None and not any(first < place <= last for first, last, _ in spans)
    ]  # fmt: skip
    ours, theirs = train.buffer_spans(), evaluation.buffer_spans()
    shared = [(ours[name], theirs[name]) for name in ours.keys() & theirs.keys() & train.written_buffers()]
    found: list[int | None] = []
    for cut, place in enumerate(_matching_places(train.traced, evaluation.traced)):
        least = max((their_last + 1 for (_, last), (_, their_last) in shared if last < cut), default=0)
        most = min((their_first for (first, _), (their_first, _) in shared if first >= cut), default=num_ops)
        can = [each for each in allowed if least <= each <= most]
        later = [each for each in can if each >= place]  # what training has computed by then is there in evaluation too
        found.append(later[0] if later else can[-1] if can else None)
    return found


def _matching_places(train: Traced, evaluation: Traced) -> list[int]:
    """Finds, by place in training, the place behind the last operator that both modules have before it."""
    ours, theirs = (
        [(op.target, op.source, module) for op, module in zip(traced.ops, traced.modules)]
        for traced in (train, evaluation)
    )
    # autojunk would pass over what occurs often, as the same few operators do in a long network.
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    pairs = [(block.a + index, block.b + index) for block in blocks for index in range(block.size)]
    firsts = [a for a, _ in pairs]
    found = []
    for cut in range(len(ours) + 1):
        at = bisect.bisect_left(firsts, cut)
        found.append(pairs[at - 1][1] + 1 if at else 0)
    return found
