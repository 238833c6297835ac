"""Which copies of the state are wrong, as all workers find it together after a vote that was refused. Pure.

Two kinds of evidence tell. A worker's own *seals* say that its memory is not as it was written: that copy is wrong,
whatever others hold. Where copies differ though each is as it was written, owner and followers are the voters: of three
two win; of two none can be told to be right, and only a checkpoint from before the difference can be trusted. Working
copies are compared with what the owner serves and never counted, since GATHER has given all of them the owner's value.

A wrong copy counts as lost: a new epoch promotes a right one, sends all parameters again, and goes back to a checkpoint
if there is none. Constants are no blocks: whoever has lost theirs is sent another worker's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from elaswave.blocks.placement import Placement
from elaswave.protocol.step.engine import Change, Memory

MAX_TOLD = 128
"""Changes that a worker tells of; it knows all of its own."""
_NUM_WORDS = len(Change._fields)


class Difference(NamedTuple):
    """Copies of a block that are not equal."""

    block: int
    what: str
    """One of `WHAT`."""
    hashes: Mapping[int, int]
    """By worker."""


WHAT = ("gradient", "state", "parameters")
"""What is compared of a block: between owner and followers, and the parameters between those that run its layer and
its owner."""


class Soundness(NamedTuple):
    """What has been found; the same for all workers, but for changes beyond `MAX_TOLD`."""

    changes: tuple[tuple[int, Change], ...] = ()
    """With the worker in whose memory it is."""
    differences: tuple[Difference, ...] = ()
    wrong: frozenset[tuple[int, int]] = frozenset()
    """(block, worker) of held copies that are wrong, or that cannot be told to be right."""

    @property
    def needs_copies(self) -> bool:
        """Whether blocks are to be promoted or parameters to be sent again: a new epoch does it. A wrong gradient, or a
        copy that has only just come, is gone with the attempt."""
        has_changed = any(change.memory in (Memory.WORKING, Memory.COPY) for _, change in self.changes)
        return has_changed or bool(self.wrong) or any(each.what == "parameters" for each in self.differences)

    @property
    def of_code(self) -> Mapping[int, tuple[int, ...]]:
        """Blocks that have changed on several workers at once -> these: no memory does that."""
        workers: dict[int, set[int]] = {}
        for worker, change in self.changes:
            if change.memory in (Memory.WORKING, Memory.COPY):
                workers.setdefault(change.place, set()).add(worker)
        return {block: tuple(sorted(those)) for block, those in sorted(workers.items()) if len(those) > 1}

    def sources(self, holders: Sequence[Sequence[int]]) -> list[tuple[int, int, int | None]]:
        """(layer, worker, who sends it its constants) of all that could not be made anew; None: nobody else has them.

        Args:
            holders: by layer, the workers that run it, ascending.
        """
        lacking = sorted({(each.place, worker) for worker, each in self.changes if each.memory is Memory.CONSTANT})
        return [
            (layer, worker, next((other for other in holders[layer] if (layer, other) not in lacking), None))
            for layer, worker in lacking
        ]


def words_of(changes: Sequence[Change]) -> list[int]:
    """What one worker tells of its changes, as whole numbers, always as many."""
    words = [word for change in changes[:MAX_TOLD] for word in change]
    return words + [0] * (_NUM_WORDS * MAX_TOLD - len(words))


def changes_in(words: Sequence[int]) -> list[Change]:
    """The inverse of `words_of`; hashes as they were told."""
    rows = [words[first : first + _NUM_WORDS] for first in range(0, len(words), _NUM_WORDS)]
    return [Change(Memory(memory), index, was, now) for memory, index, was, now in rows if memory]


def judge_copies(
    placement: Placement, changes: Iterable[tuple[int, Change]], differences: Sequence[Difference]
) -> Soundness:
    """Which copies are wrong.

    Args:
        placement: in force: who has only just been given a copy is no voter.
        changes: of all workers.
        differences: between copies as they were written: what has changed in memory since may still say what it was.
    """
    changes = tuple(changes)
    wrong = {(change.place, worker) for worker, change in changes if change.memory is Memory.COPY}
    for each in differences:
        if each.what == "state":
            holders = placement.holders(each.block)
            voters = {w: each.hashes[w] for w in holders if w in each.hashes}
            wrong |= {(each.block, worker) for worker in _outvoted(voters)}
    return Soundness(changes, tuple(differences), frozenset(wrong))


def _outvoted(voters: Mapping[int, int]) -> Collection[int]:
    """Those that differ from more than half of all; all, where no such half agrees."""
    counts: dict[int, list[int]] = {}
    for worker, value in voters.items():
        counts.setdefault(value, []).append(worker)
    if len(counts) <= 1:
        return ()
    most = max(counts.values(), key=len)
    return set(voters) - (set(most) if 2 * len(most) > len(voters) else set())


def describe(
    placement: Placement,
    changes: Sequence[tuple[int, Change]],
    differences: Sequence[Difference],
    layer_name: Callable[[Change], str],
) -> list[str]:
    """Clauses for people.

    Args:
        placement, changes, differences: as of `judge_copies`.
        layer_name: of the layer that a change is of.
    """
    masters = {(worker, change.place) for worker, change in changes if change.memory is Memory.COPY}
    told = [
        (worker, change)
        for worker, change in changes
        if change.memory is not Memory.WORKING or (worker, change.place) not in masters
    ]
    clauses = [describe_change(worker, change, layer_name(change)) for worker, change in told]
    return clauses + [_describe_difference(placement, each) for each in differences]


def describe_change(worker: int, change: Change, layer: str) -> str:
    """A clause for people.

    Args:
        layer: name of the layer that it is of.
    """
    what, have = {
        Memory.WORKING: (f"the parameters of block {change.place} (layer {layer})", "have"),
        Memory.COPY: (f"the master of block {change.place} (layer {layer})", "has"),
    }.get(change.memory, (f"frozen parameters, or buffers that are not persistent, of layer {layer}", "have"))
    they, were = ("it", "was") if have == "has" else ("they", "were")
    now = "; they are made anew" if change.memory is Memory.MENDED else ""
    return (
        f"on worker {worker} {what} {have} changed in memory since {they} {were} written, from {_hex(change.was)} to "
        f"{_hex(change.now)}{now}"
    )


def _describe_difference(placement: Placement, each: Difference) -> str:
    owner, followers = placement.owner[each.block], list(placement.followers[each.block])
    hashes = ", ".join(f"worker {worker}: {_hex(value)}" for worker, value in sorted(each.hashes.items()))
    if each.what == "parameters":
        others = sorted(worker for worker, value in each.hashes.items() if value != each.hashes.get(owner))
        return (
            f"block {each.block} differs between its owner, worker {owner}, and the parameters that workers {others} "
            f"compute with ({hashes})"
        )
    return (
        f"block {each.block} differs between its owner, worker {owner}, and its followers, workers {followers}, in its "
        f"{each.what} ({hashes})"
    )


def _hex(value: int) -> str:
    return f"{value & (1 << 64) - 1:016x}"
