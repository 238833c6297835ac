"""When a durable checkpoint is complete, and when it never will be. No IO.

Every worker writes the blocks that it owns, in the background, while training goes on; a new generation may begin
meanwhile. All copies of a block are equal after a step, so it does not matter in which generation, or by whom, a piece
was written: a checkpoint is complete as soon as every piece is there, and of a piece that is there twice the first one
counts. It is given up as soon as every member has said what became of its part and pieces are still missing: their
owner was lost before it had written them, or could not write. If the survivors of a loss are still at the checkpoint's
step, the decision lets all of them write again, and only what they say from then on tells that it is given up.

A complete checkpoint is *committed*: another process makes it durable, which takes a while. Until the answer nothing
more is needed of its parts, whatever is decided meanwhile, and it is not given up.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

from elaswave.protocol.messages import Decision

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Complete(NamedTuple, Generic[K, V]):
    """Every piece of a checkpoint is written."""

    step: int
    pieces: dict[K, V]
    """Each once."""
    files: dict[tuple[int, int], int]
    """(worker, generation) of the parts that were written -> their bytes, pieces that are not used included."""


class GivenUp(NamedTuple):
    """A checkpoint will never be complete."""

    step: int
    worker: int | None
    """The first worker that could not write; None if a worker was lost before it had written."""
    reason: str


class _Pending(Generic[K, V]):
    """A checkpoint that is being written."""

    def __init__(self) -> None:
        self.pieces: dict[K, V] = {}
        self.size = 0
        self.files: dict[tuple[int, int], int] = {}
        self.received: dict[int, int] = {}
        """Worker -> the newest generation of which it has said what became of its part."""
        self.failures: dict[int, str] = {}
        self.from_generation = 0
        """Members that were heard in older generations write again."""


class Shards(Generic[K, V]):
    """The checkpoints that are being written.

    Args:
        size: of all pieces of a step's checkpoint together.
        size_of: of one piece.
        members: of the first generation.
    """

    def __init__(self, size: Callable[[int], int], size_of: Callable[[V], int], members: Collection[int]) -> None:
        self._size = size
        self._size_of = size_of
        self._members = set(members)
        self._pending: dict[int, _Pending[K, V]] = {}
        self._committing: set[int] = set()
        self._is_held = False
        """Whether none counts as complete until the next decision."""
        self._settled: set[int] = set()
        self._rollbacks: list[tuple[int, int]] = []
        """(generation, step): parts of later steps that are of an older generation are void."""

    @property
    def pending(self) -> list[int]:
        """Steps of checkpoints that have begun and are neither being committed nor settled, ascending."""
        return sorted(self._pending)

    @property
    def num_committing(self) -> int:
        """How many are being committed."""
        return len(self._committing)

    def is_committing(self, step: int) -> bool:
        """Tells whether a step's checkpoint is being committed."""
        return step in self._committing

    def is_settled(self, step: int) -> bool:
        """Tells whether nothing more has to be said of a step's checkpoint."""
        return step in self._settled

    def is_void(self, step: int, generation: int) -> bool:
        """Tells whether all members have gone back behind a step after a part of it was begun in this generation."""
        return any(generation < newer and step > kept for newer, kept in self._rollbacks)

    def hold(self) -> None:
        """The newest checkpoint has been found that the job may go back to: until that is decided none is complete. One
        of a later step would be of steps that the decision makes void."""
        self._is_held = True

    def commit(self, step: int) -> None:
        """A complete checkpoint is being committed, until it is settled."""
        self._committing.add(step)
        self._pending.pop(step, None)

    def settle(self, step: int) -> None:
        """A step's checkpoint is durable or given up."""
        self._committing.discard(step)
        self._settled.add(step)
        self._pending.pop(step, None)

    def written(
        self, step: int, generation: int, worker: int, pieces: Mapping[K, V], num_bytes: int
    ) -> "Complete[K, V] | GivenUp | None":
        """A worker has written its part.

        Args:
            step: of the checkpoint.
            generation: in which the worker began to write.
            pieces: what it wrote.
            num_bytes: of its file.
        Returns:
            What became of the checkpoint; None if it is still to be waited for, or this part is of no use any more.
        """
        pending = self._take(step, generation, worker)
        if pending is None:
            return None
        pending.files[worker, generation] = num_bytes
        for key, piece in pieces.items():
            if key not in pending.pieces:
                pending.pieces[key] = piece
                pending.size += self._size_of(piece)
        pending.failures.pop(worker, None)
        return self.judge(step)

    def failed(self, step: int, generation: int, worker: int, reason: str) -> "Complete[K, V] | GivenUp | None":
        """A worker could not write its part. Arguments and result are as of `written`."""
        pending = self._take(step, generation, worker)
        if pending is None:
            return None
        pending.failures[worker] = reason
        return self.judge(step)

    def _take(self, step: int, generation: int, worker: int) -> _Pending[K, V] | None:
        if step in self._settled or step in self._committing or self.is_void(step, generation):
            return None
        pending = self._pending.setdefault(step, _Pending())
        pending.received[worker] = max(generation, pending.received.get(worker, 0))
        return pending

    def judge(self, step: int) -> "Complete[K, V] | GivenUp | None":
        """Decides what becomes of a pending checkpoint by what is known now."""
        pending = self._pending[step]
        if pending.pieces and pending.size == self._size(step):
            return None if self._is_held else Complete(step, pending.pieces, pending.files)
        if any(pending.received.get(worker, -1) < pending.from_generation for worker in self._members):
            return None
        if pending.failures:
            worker, reason = next(iter(pending.failures.items()))
            return GivenUp(step, worker, reason)
        return GivenUp(step, None, "a worker was lost before it had written its part")

    def follow(self, decision: Decision) -> "list[Complete[K, V] | GivenUp]":
        """Survivors go on with a decision of the coordinator's. Result as of `decided`."""
        again = decision.resume_step - 1 if decision.checkpoint else None
        return self.decided(
            decision.generation, decision.members, again=again, rollback=decision.rollback, joined=decision.joined
        )

    def decided(
        self,
        generation: int,
        members: Collection[int],
        *,
        again: int | None,
        rollback: int | None,
        joined: Collection[int] = (),
    ) -> "list[Complete[K, V] | GivenUp]":
        """Survivors go on with a decision.

        Args:
            generation: of the decision.
            members: of this generation.
            again: the step whose checkpoint all members write again, because they are still at it.
            rollback: the step that all members go back to.
            joined: members that have no part in what was begun before.
        Returns:
            What became of checkpoints that waited for those who were lost.
        """
        self._members = set(members)
        for pending in self._pending.values():
            pending.received.update(dict.fromkeys(joined, generation - 1))  # of what is written again they have a part
        self._is_held = False
        if rollback is not None:
            self._rollbacks.append((generation, rollback))
            self._settled = {step for step in self._settled if step <= rollback}
            for step in [step for step in self._pending if step > rollback]:
                del self._pending[step]
            self.settle(rollback)  # it is durable, whether or not this coordinator has heard of its commit
        if again is not None and again not in self._committing:
            self._settled.discard(again)
            pending = self._pending.setdefault(again, _Pending())
            pending.from_generation = generation
            pending.failures.clear()
        return [found for step in self.pending if (found := self.judge(step)) is not None]

    def end(self) -> list[GivenUp]:
        """All members have made their last step and said what became of their parts: whatever is missing now will
        never come. Those that are being committed lack nothing."""
        return [GivenUp(step, None, "a worker was lost before it had written its part") for step in self.pending]
