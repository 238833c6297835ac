"""Which copies of the state are wrong, as all workers find it together after a vote that was refused. No IO.

Two kinds of evidence tell. A worker's own *seals* say that its memory is not as it was written: that copy is wrong,
whatever others hold. Where copies differ though each is as it was written, owner and followers are the voters: of three
two win; of two none can be told to be right, and only a checkpoint from before the difference can be trusted. Working
copies are compared with what the owner serves and never counted, since GATHER has given all of them the owner's value.

`CopyChecks` looks: for the ballot, after a refused vote, and before a worker tells anything of the state between two
steps (K4). A wrong copy counts as lost: a new generation promotes a right one, sends all parameters again, and goes
back to a checkpoint if there is none. Constants are no blocks: whoever has lost theirs is sent another worker's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np

from elaswave.blocks.placement import Placement, holders_of_layers
from elaswave.errors import StateError, VoteError
from elaswave.hashing import MASK64, signed64
from elaswave.protocol.step.activity import COMPARE
from elaswave.protocol.step.ballot import add_words, agreement_keys
from elaswave.protocol.step.blocks import Weighed, WorkerBlocks
from elaswave.protocol.step.engine import C, Change, FrameKind, MemoryKind, Pause
from elaswave.protocol.step.execution import Life
from elaswave.protocol.step.ledger import HeldCopies, Ledger

if TYPE_CHECKING:
    from elaswave.protocol.step.blocks import Words

STATE_SAMPLE_PERIOD = 16
"""The optimizer's states of each block are compared between its copies once in this many steps."""
MAX_CHANGES = 3
"""A worker whose memory changes this often within `CHANGES_STEPS` ends itself: it would do so again."""
CHANGES_STEPS = 100
MAX_COMPARED = 1024
"""Blocks whose copies are compared one by one; others that differ are found again in the next vote."""
MAX_REPORTED = 128
"""Changes that a worker tells of; it knows all of its own."""
_NUM_WORDS = len(Change._fields)


class ReplicaMismatch(NamedTuple):
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
    """What has been found; the same for all workers, but for changes beyond `MAX_REPORTED`."""

    changes: tuple[tuple[int, Change], ...] = ()
    """With the worker in whose memory it is."""
    differences: tuple[ReplicaMismatch, ...] = ()
    wrong: frozenset[tuple[int, int]] = frozenset()
    """(block, worker) of held copies that are wrong, or that cannot be told to be right."""

    @property
    def needs_copies(self) -> bool:
        """Says whether blocks are to be promoted or parameters to be sent again: a new generation does it. A wrong
        gradient, or a copy that has only just come, is gone with the attempt."""
        has_changed = any(change.memory in (MemoryKind.WORKING, MemoryKind.COPY) for _, change in self.changes)
        return has_changed or bool(self.wrong) or any(each.what == "parameters" for each in self.differences)

    @property
    def of_code(self) -> Mapping[int, tuple[int, ...]]:
        """Maps blocks that have changed on several workers at once to these: no memory does that."""
        workers: dict[int, set[int]] = {}
        for worker, change in self.changes:
            if change.memory in (MemoryKind.WORKING, MemoryKind.COPY):
                workers.setdefault(change.place, set()).add(worker)
        return {block: tuple(sorted(those)) for block, those in sorted(workers.items()) if len(those) > 1}

    def sources(self, holders: Sequence[Sequence[int]]) -> list[tuple[int, int, int | None]]:
        """Lists (layer, worker, who sends it its constants) of all that could not be made anew; None: nobody else has
        them.

        Args:
            holders: by layer, the workers that run it, ascending.
        """
        lacking = sorted({(each.place, worker) for worker, each in self.changes if each.memory is MemoryKind.CONSTANT})
        return [
            (layer, worker, next((other for other in holders[layer] if (layer, other) not in lacking), None))
            for layer, worker in lacking
        ]


def words_of(changes: Sequence[Change]) -> list[int]:
    """Encodes what one worker tells of its changes as whole numbers, always as many."""
    words = [word for change in changes[:MAX_REPORTED] for word in change]
    return words + [0] * (_NUM_WORDS * MAX_REPORTED - len(words))


def changes_in(words: Sequence[int]) -> list[Change]:
    """Decodes what `words_of` has encoded; hashes as they were told."""
    rows = [words[first : first + _NUM_WORDS] for first in range(0, len(words), _NUM_WORDS)]
    # No kind is 0: rows of zeros are those that were not needed.
    return [Change(MemoryKind(memory), index, was, now) for memory, index, was, now in rows if memory]


def judge_copies(
    placement: Placement, changes: Iterable[tuple[int, Change]], differences: Sequence[ReplicaMismatch]
) -> Soundness:
    """Finds which copies are wrong.

    Args:
        placement: in force: who has only just been given a copy is no voter.
        changes: of all workers.
        differences: between copies as they were written: what has changed in memory since may still say what it was.
    """
    changes = tuple(changes)
    wrong = {(change.place, worker) for worker, change in changes if change.memory is MemoryKind.COPY}
    for each in differences:
        # Gradients are made anew and parameters sent again: only a wrong state costs its holder the copy.
        if each.what == "state":
            holders = placement.holders(each.block)
            voters = {w: each.hashes[w] for w in holders if w in each.hashes}
            wrong |= {(each.block, worker) for worker in _outvoted(voters)}
    return Soundness(changes, tuple(differences), frozenset(wrong))


def _outvoted(voters: Mapping[int, int]) -> Collection[int]:
    """Names those that differ from more than half of all; all, where no such half agrees."""
    counts: dict[int, list[int]] = {}
    for worker, value in voters.items():
        counts.setdefault(value, []).append(worker)
    if len(counts) <= 1:
        return ()
    most = max(counts.values(), key=len)
    return set(voters) - (set(most) if 2 * len(most) > len(voters) else set())


def describe_mismatches(
    placement: Placement,
    changes: Sequence[tuple[int, Change]],
    differences: Sequence[ReplicaMismatch],
    layer_name: Callable[[Change], str],
) -> list[str]:
    """Makes clauses for people.

    Args:
        placement, changes, differences: as of `judge_copies`.
        layer_name: of the layer that a change is of.
    """
    masters = {(worker, change.place) for worker, change in changes if change.memory is MemoryKind.COPY}
    # Layers of float32 compute with the master itself: a change of that memory is found twice, and told once.
    told = [
        (worker, change)
        for worker, change in changes
        if change.memory is not MemoryKind.WORKING or (worker, change.place) not in masters
    ]
    clauses = [describe_change(worker, change, layer_name(change)) for worker, change in told]
    return clauses + [_describe_difference(placement, each) for each in differences]


def describe_change(worker: int, change: Change, layer: str) -> str:
    """Makes a clause for people.

    Args:
        layer: name of the layer that it is of.
    """
    what, have = {
        MemoryKind.WORKING: (f"the parameters of block {change.place} (layer {layer})", "have"),
        MemoryKind.COPY: (f"the master of block {change.place} (layer {layer})", "has"),
    }.get(change.memory, (f"frozen parameters, or buffers that are not persistent, of layer {layer}", "have"))
    they, were = ("it", "was") if have == "has" else ("they", "were")
    now = "; they are made anew" if change.memory is MemoryKind.MENDED else ""
    return (
        f"on worker {worker} {what} {have} changed in memory since {they} {were} written, from {_hex(change.was)} to "
        f"{_hex(change.now)}{now}"
    )


def _describe_difference(placement: Placement, each: ReplicaMismatch) -> str:
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


class Compared(NamedTuple):
    """The hashes of what one worker compares with others."""

    of: Weighed[Any]
    gradients: "Words"
    states: "Words"
    parameters: "Words"
    keys: "tuple[Words, Words]"
    """Of each copy, and of each block that is read; times their weights those of all workers add up to 0 where they are
    equal."""

    @property
    def sum(self) -> int:
        """Their sum, modulo 2**64."""
        of, (copies, read) = self.of, self.keys
        return int(of.weights @ copies) + int(of.read_weights @ read) & MASK64

    def by_block(self, num_blocks: int) -> list[int]:
        """Lists the sums of each block, signed."""
        of, found = self.of, np.zeros(num_blocks, np.uint64)
        found[of.blocks] += of.weights * self.keys[0]
        found[of.read] += of.read_weights * self.keys[1]
        by_block: list[int] = found.view(np.int64).tolist()
        return by_block

    def hashes(self, block: int) -> list[int]:
        """Lists the hashes of a block's gradient, state and parameters, signed; 0 stands for nothing."""
        held, read = self.of.blocks == block, self.of.read == block
        found = (self.gradients[held], self.states[held], self.parameters[read])
        # So a hash that is 0 is told as 1.
        return [sum(signed64(value or 1) for value in hashes.tolist()) for hashes in found]


class CopyChecks(Generic[C]):
    """Looks whether one worker's memory is as it was written, and whether its copies are those of the others.

    Args:
        blocks: the copies.
        ledger: learns that the parameters here cannot be trusted.
    """

    def __init__(self, blocks: WorkerBlocks[C], ledger: Ledger) -> None:
        self.blocks, self.execution, self.ledger = blocks, blocks.execution, ledger
        self.worker, self.terms, self.engine = blocks.worker, blocks.terms, blocks.engine
        self.links, self.observer = blocks.links, blocks.observer
        self.changes: Sequence[Change] = ()
        """In this worker's memory, as they were found for the newest ballot."""
        self.wrong: frozenset[tuple[int, int]] = frozenset()
        """(block, worker) of copies that are known to be wrong; until a decision."""
        self.proven: int | None = None
        """Where copies are wrong, until a decision: the newest step of which a checkpoint can be trusted."""
        self.loaded_step = ledger.step
        """The newest step at which all state was read from a checkpoint, or made from the seed."""
        self._changed_at: list[int] = []
        """Steps of the newest votes, or looks, that have found changes in this worker's memory."""
        self._unsound_at: list[int] = []
        """The step that was refused for wrong copies last, as often as it was."""

    # ------------------------------------------------------------------------------------------------- for the ballot

    def look(self, held: HeldCopies[C]) -> None:
        """Finds what has changed in this worker's memory; the ballot says how much.

        Args:
            held: the copies.
        """
        self.changes = self.engine.changes(held.all, given_up=True)

    def compared(self, held: HeldCopies[C], *, at_rest: bool = False) -> Compared:
        """Hashes gradient and state of the copies that have others, and the parameters that this worker computes with
        or serves.

        Args:
            held: the copies.
            at_rest: between two steps: there are no gradients, and of the optimizer's states none is left out.
        """
        step, attempt, engine = self.execution.step, self.execution.attempt, self.engine
        of, changed = self.blocks.weighed(held), self.blocks.traffic.changed
        states = np.array(engine.master_hashes(of.copies), np.uint64)
        gradients = np.array([0] * len(states) if at_rest else engine.gradient_hashes(of.copies), np.uint64)
        # All holders of a block must sample it in the same step: `changed` is of all workers. A copy that has just come
        # is in it, since nothing has compared its states yet.
        is_sampled = (of.blocks + step) % STATE_SAMPLE_PERIOD == 0
        if at_rest or changed:
            is_sampled |= at_rest or np.isin(of.blocks, [*changed])
        sampled = np.flatnonzero(is_sampled)
        if len(sampled):
            of_states = engine.state_hashes([of.copies[place] for place in sampled.tolist()])
            states[sampled] += np.array(of_states, np.uint64)
        parameters = np.array(engine.parameter_hashes(of.read_blocks, held), np.uint64)
        keys = (
            agreement_keys("copy", of.block_keys, step, attempt, gradients, states),
            agreement_keys("parameters", of.read_keys, step, attempt, parameters),
        )
        return Compared(of, gradients, states, parameters, keys)

    # ---------------------------------------------------------------------------------------------- between two steps

    def is_sound(self) -> bool:
        """Looks outside of a vote whether nothing has changed in this worker's memory since it was written. If
        something has, a new generation must make it good.

        Raises:
            StateError: it changes again and again, or is of what only others have now.
        """
        copies = self.blocks.copies.all
        # What had changed in layers that were given up is for the next ballot, if sums are kept that have read it (K5).
        self.changes = self.engine.changes(copies, given_up=False) if self.terms.verify else ()
        self.note_changes()
        # Another worker sends constants only after a refused vote, of which it knows that they are lacking (K6).
        if any(change.memory is MemoryKind.CONSTANT for change in self.changes):
            raise StateError(f"{self.describe_changes()}: they cannot be made anew here")
        if self.changes:
            self._count_changes()
        return not self.changes

    def compare_at_rest(self, step: int) -> Life[str]:
        """Compares all copies of the state between two steps, before anything is told of it (K4).

        Args:
            step: the committed one that they are of.
        Returns:
            What is wrong; nothing if all is well.
        Raises:
            StateError: as of `is_sound`.
            VoteError: as of `note_unsound`.
        """
        if not self.terms.verify:
            return ""
        # No attempt has the number 0, so no vote or diagnosis has frames of these names (W3).
        self.execution.step, self.execution.attempt = step, 0
        self.observer.doing(COMPARE, computing=True)
        yield Pause.MOMENT
        # Own memory first: `differing` goes by the hashes of this look. If it ends here, the others wait for frames of
        # this worker until the new generation interrupts them.
        if not self.is_sound():
            return self.describe_changes()
        self.observer.doing(COMPARE, computing=False)
        differences = yield from self.differing(at_rest=True)
        placement = self.blocks.placement
        found = judge_copies(placement, (), differences)
        self.note_unsound(found)
        # The others need what was sent for the same finding, and this worker may be about to end.
        yield Pause.SENT
        if not found.needs_copies:
            return ""
        return "; ".join(describe_mismatches(placement, (), differences, self.layer_of_change)[:MAX_CHANGES])

    # ------------------------------------------------------------------------------------------- after a refused vote

    def differing(self, *, at_rest: bool = False) -> Life[list[ReplicaMismatch]]:
        """Finds which copies differ, with the hashes of all workers, which must all ask at the same time.

        Args:
            at_rest: as of `compared`.
        """
        # What was arriving when an attempt ended is nothing.
        own = self.compared(self.blocks.copies if at_rest else self.blocks.voting_copies, at_rest=at_rest)
        # Copies at rest are nearly always equal: one number says so, before numbers are told for every block.
        if at_rest:
            if not any((yield from self._sum([signed64(own.sum)], part=10))):
                return []  # as a vote finds it
        # What is asked next follows from merged sums, so all workers ask for the same.
        total = yield from self._sum(own.by_block(len(self.terms.blocks)), part=2)
        blocks = [block for block, difference in enumerate(total) if difference][:MAX_COMPARED]
        if not blocks:
            return []
        workers = self.execution.layout.workers
        row = len(WHAT) * len(workers)
        hashes = [0] * (row * len(blocks))
        # Each worker fills its own column, so that the sum is the table of all.
        for index, block in enumerate(blocks):
            for kind, value in enumerate(own.hashes(block)):
                hashes[row * index + kind * len(workers) + workers.index(self.worker)] = value
        total = yield from self._sum(hashes, part=9)
        found = []
        for index, block in enumerate(blocks):
            for kind, what in enumerate(WHAT):
                values = total[row * index + kind * len(workers) :]
                those = {worker: value for worker, value in zip(workers, values, strict=False) if value}
                if len(set(those.values())) > 1:
                    found.append(ReplicaMismatch(block, what, those))
        return found

    def changes_of_all(self) -> Life[list[tuple[int, Change]]]:
        """Tells all workers what has changed in whose memory, as it was found for the newest ballot."""
        workers = self.execution.layout.workers
        own = list(map(signed64, words_of(self.changes)))
        words = [0] * (len(own) * len(workers))
        place = len(own) * workers.index(self.worker)
        words[place : place + len(own)] = own
        total = yield from self._sum(words, part=8)
        found = [changes_in(total[len(own) * index : len(own) * (index + 1)]) for index in range(len(workers))]
        return [(worker, change) for worker, those in zip(workers, found, strict=True) for change in those]

    def _sum(self, values: list[int], part: int) -> Life[Sequence[int]]:
        # The part tells frames of one attempt apart: `elaswave.protocol.step.diagnosis` must use other numbers.
        return (yield from self.execution.all_reduce(FrameKind.DIAGNOSIS, values, add_words, part))

    def refuse_code(self, found: Soundness) -> None:
        """Refuses to go on where several workers have found one and the same block changed: code has written it.

        Raises:
            VoteError: it has.
        """
        for block, workers in found.of_code.items():
            layer = self.terms.layer_name(self.execution.layout.layer_of(self.terms.blocks[block].layer))
            step = self.execution.step
            raise VoteError(
                f"step {step} cannot be committed: parameters or buffers of layer {layer} (in block {block}) were "
                f"written on workers {list(workers)} at once, and not by the optimizer. A forward, a backward or a "
                "hook must not write them, nor `.data` or a numpy array that shares their memory. The state of step "
                f"{step - 1} is unchanged"
            )

    def note_changes(self) -> None:
        """Takes down, for the next report, what has changed in this worker's memory."""
        found = judge_copies(self.blocks.placement, [(self.worker, each) for each in self.changes], ())
        self._note_wrong(found)

    def note_unsound(self, found: Soundness) -> None:
        """Takes down, for the next report, which copies are wrong.

        Raises:
            StateError: this worker's memory changes again and again.
            VoteError: copies are wrong again and again, though they were made good.
        """
        self._note_wrong(found)
        if self.changes:
            self._count_changes()
        if found.needs_copies:
            step = self.execution.step
            # Across generations: `StepLoop.run_step` counts rejections anew in each of them.
            self._unsound_at = [at for at in self._unsound_at if at == step] + [step]
            if len(self._unsound_at) > MAX_CHANGES * len(self.execution.layout.workers):
                raise VoteError(f"step {step} cannot be committed: copies are wrong again and again")

    def _note_wrong(self, found: Soundness) -> None:
        if not found.needs_copies:
            return
        self.wrong |= found.wrong
        # The parameters of all members are sent again (K3): no report may say that they are here.
        self.ledger.parameters_step = -1
        # What was read in this attempt was written after the vote before, which has proven what was there then.
        since = STATE_SAMPLE_PERIOD + 1 if any(each.what == "state" for each in found.differences) else 2
        proven = max(self.loaded_step, self.execution.step - since)
        self.proven = proven if self.proven is None else min(proven, self.proven)

    def forget_wrong(self) -> None:
        """Forgets which copies were wrong: a decision makes them good."""
        self.wrong, self.proven = frozenset(), None

    def _count_changes(self) -> None:
        step = self.execution.step
        self._changed_at = [at for at in self._changed_at if step - at < CHANGES_STEPS] + [step]
        if len(self._changed_at) >= MAX_CHANGES:
            raise StateError(
                f"the memory of worker {self.worker} has changed {MAX_CHANGES} times within {CHANGES_STEPS} steps, by "
                f"itself or by code that writes parameters or buffers: {self.describe_changes()}. Look at the hardware "
                "of its machine"
            )

    def describe_changes(self) -> str:
        """Says what has changed in this worker's memory, for people."""
        changes = [(self.worker, change) for change in self.changes]
        return "; ".join(describe_mismatches(self.blocks.placement, changes, (), self.layer_of_change)[:MAX_CHANGES])

    def layer_of_change(self, change: Change) -> str:
        """Names the layer that a change is of."""
        is_block = change.memory in (MemoryKind.WORKING, MemoryKind.COPY)
        unit = self.terms.blocks[change.place].layer if is_block else change.place
        return self.terms.layer_name(self.execution.layout.layer_of(unit))

    def fetch_constants(self, found: Soundness) -> Life[None]:
        """Gets constants, where they are lost and cannot be made again, from another worker that has them.

        Raises:
            StateError: no other worker has this one's.
        """
        key = self.execution.key
        missing = []
        # All begin to send before anybody waits: two workers may each lack what the other one has.
        for layer, worker, source in found.sources(holders_of_layers(self.execution.layout)):
            if self.worker == source:
                self.links.send(key(FrameKind.CONSTANTS, layer, 0, worker), self.engine.constants(layer))
            elif self.worker == worker:
                missing.append((layer, source))
        for layer, source in missing:
            if source is not None:
                frame = key(FrameKind.CONSTANTS, layer, 0, source)
                self.links.post(frame, self.engine.constants_slot(layer))
                yield from self.execution.receive([frame])
            if source is None or not self.engine.take_constants(layer):
                raise StateError(
                    f"{self.describe_changes()}: they cannot be made anew here, and no other worker has them"
                )
        yield Pause.SENT
