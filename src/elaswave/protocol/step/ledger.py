"""What one worker knows about commits, and what it must do about a decision. No IO.

The worker's numerics (sums, optimizer) are elsewhere; this is the order in which things may happen, as methods that
refuse any other order. It enforces rules W1, W2 and W5 of ``docs/protocol.md``: after `promise` nothing more is learned
until a decision; parameters are written only after the own vote; evidence is the whole vote; blocks carry versions, so
a commit applies exactly what is still old.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import compress
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from elaswave.blocks.placement import ReplicaRole
from elaswave.hashing import MASK64
from elaswave.protocol.messages import BlockReplicas, Decision, Evidence, Progress, Report
from elaswave.protocol.step.ballot import key_sums, residency_of
from elaswave.protocol.step.engine import C
from elaswave.protocol.step.salvage import Partial

if TYPE_CHECKING:
    import numpy.typing as npt


class LedgerError(Exception):
    """Something happened in an order that the protocol forbids: a bug of ours, or a decision that cannot be right."""


class HeldCopies(Mapping[int, C]):
    """The copies that a worker holds, by block, ascending. What the machine knows of them stands beside them, so that
    all of them are proven, compared and moved on together, however many they are. Which copies there are never changes:
    where some come or go, another table takes the place of this one.

    Args:
        copies: by block, in their roles.
        version: of all of them.
    """

    def __init__(self, copies: Mapping[int, C] = MappingProxyType({}), version: int = -1) -> None:
        self._copies: dict[int, C] = dict(sorted(copies.items()))
        self.all: list[C] = [*self._copies.values()]
        """In the order of the columns."""
        self.blocks: npt.NDArray[np.int64] = np.array([*self._copies], np.int64)
        """Ids, ascending."""
        self.roles: npt.NDArray[np.uint8] = np.array([copy.role for copy in self.all], np.uint8)
        """Of each, its `ReplicaRole`; changed only by `take_roles`."""
        self.version = version
        """The last step that was applied to all of them,"""
        self.other_versions: dict[int, int] = {}
        """but for these, by block: of some while APPLY is under way, and where it was interrupted."""
        self._owned: list[C] | None = None
        self._key_sums: tuple[int, ...] | None = None

    def __getitem__(self, block: int) -> C:
        return self._copies[block]

    def __iter__(self) -> Iterator[int]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def owned(self) -> list[C]:
        """Those that this worker owns."""
        if self._owned is None:
            self._owned = self.where(self.roles == ReplicaRole.OWNER)
        return self._owned

    @property
    def versions(self) -> list[int]:
        """The last step that was applied to each."""
        return [self.other_versions.get(block, self.version) for block in self._copies]

    def not_at(self, step: int) -> list[C]:
        """Lists copies to which another step was applied last."""
        if not self.other_versions:
            return [] if self.version == step else self.all
        return [copy for copy, version in zip(self.all, self.versions, strict=True) if version != step]

    def where(self, chosen: "npt.NDArray[np.bool_]") -> list[C]:
        """Lists some copies.

        Args:
            chosen: whether it is one of them, of each.
        """
        return self.all if chosen.all() else [*compress(self.all, chosen.tolist())]

    def only(self, chosen: "npt.NDArray[np.bool_]") -> "HeldCopies[C]":
        """Makes the table of some copies; argument as of `where`."""
        return self if chosen.all() else self._made_of(self.where(chosen), self.other_versions)

    def with_others(self, others: "HeldCopies[C]") -> "HeldCopies[C]":
        """Makes the table of these copies and others, all at one version, of which this one has none."""
        versions = {} if others.version == self.version else dict.fromkeys(others, others.version)
        return self._made_of([*self.all, *others.all], self.other_versions | versions)

    def _made_of(self, copies: Sequence[C], other_versions: Mapping[int, int]) -> "HeldCopies[C]":
        made = HeldCopies({copy.block.id: copy for copy in copies}, self.version)
        made.other_versions = {block: version for block, version in other_versions.items() if block in made}
        return made

    def take_roles(self, roles: "npt.NDArray[np.uint8]") -> None:
        """Takes over a role of each copy."""
        for place in np.flatnonzero(roles != self.roles).tolist():
            self.all[place].role = ReplicaRole(roles[place])
        self.roles, self._owned, self._key_sums = roles, None, None

    def residency(self, worker: int, num_blocks: int) -> int:
        """Computes what its worker brings to the residency sum.

        Args:
            worker: its id.
            num_blocks: of the model.
        """
        if self._key_sums is None:
            self._key_sums = key_sums(self.blocks, self.roles, num_blocks)
        found = residency_of(worker, self._key_sums, self.version)
        for block, version in self.other_versions.items():
            sums = key_sums(np.array([block]), np.array([self._copies[block].role]), num_blocks)
            found += residency_of(worker, sums, version) - residency_of(worker, sums, self.version)
        return found & MASK64

    def replicas(self) -> BlockReplicas:
        """Says what is held, for a report (W6)."""
        owned = self.roles == ReplicaRole.OWNER
        return BlockReplicas(blocks=[*self._copies], owned=owned.tolist(), versions=self.versions)


class CatchUp(Enum):
    """What a worker must do to its state before it goes on after a decision."""

    NOTHING = "nothing"
    APPLY = "apply"
    """Apply the evidence's step to every block that is still at the version before it."""
    ADOPT_GRIDS = "adopt grids"
    """The evidence asked for another attempt: take over its grids."""
    JOIN = "join"
    """It has had no state: take over where training stands."""
    ROLL_BACK = "roll back"
    """Forget the state and load the decision's checkpoint."""


class Ledger:
    """Keeps the commit state of one worker, and refuses any other order than the protocol's.

    Args:
        worker: its id.
        base_step: the step that all its state has behind it.
        is_fresh: whether it has no state yet: it joins a job that runs.
    """

    def __init__(self, worker: int, base_step: int, *, is_fresh: bool = False) -> None:
        self.worker = worker
        self.is_fresh = is_fresh
        """Whether it has yet to take a first decision."""
        self._joined_at: tuple[int, int] | None = None
        """The vote, held without this worker, that its first decision went on from."""
        self.step = base_step
        """The step in flight; the base step itself between steps."""
        self.attempt = 0
        self.prepared = False
        self.evidence: Evidence | None = None
        self.parameters_step = base_step
        self.promised_generation: int | None = None
        self.decided_generation = 0
        self.change = 0
        """Number of the planned change of layout that is in force here."""
        self.checkpoint = 0
        """The newest committed step whose vote asked for a durable checkpoint; 0 for none since the start."""

    def begin(self, step: int, attempt: int) -> None:
        """Starts a new attempt."""
        self._refuse_if_promised("begin an attempt")
        if (step, attempt) <= (self.step, self.attempt):
            raise LedgerError(f"attempt {attempt} of step {step} after attempt {self.attempt} of step {self.step}")
        self.step, self.attempt, self.prepared = step, attempt, False

    def prepare(self) -> None:
        """Notes that every gradient of the step in flight is here: the worker may vote."""
        self._refuse_if_promised("prepare")
        self.prepared = True

    def learn(
        self, vector: bytes, *, commits: bool, change: int | None = None, asks_checkpoint: bool = False
    ) -> Evidence:
        """Takes the own vote, which is complete.

        Args:
            vector: the whole merged vote.
            commits: whether it commits the step.
            change: number of the planned change that all workers held in it, and that is in force from now on.
            asks_checkpoint: whether it commits the step and a ballot asked in it for a durable checkpoint.
        """
        self._refuse_if_promised("learn a vote")
        if not self.prepared:
            raise LedgerError(f"a vote on step {self.step} was learned by a worker that was not prepared")
        if change is not None:
            if not commits or change <= self.change:
                raise LedgerError(
                    f"change {change} of the layout after change {self.change}, by a vote on step {self.step} that "
                    f"{'commits' if commits else 'does not commit'}"
                )
            self.change = change
        if asks_checkpoint:
            if not commits:
                raise LedgerError(f"a checkpoint of step {self.step} is asked for by a vote that does not commit it")
            self.checkpoint = self.step
        # Change and checkpoint as they stand, whichever vote brought them: who reads this one may have missed that.
        self.evidence = Evidence(
            step=self.step,
            attempt=self.attempt,
            commits=commits,
            vector=vector,
            change=self.change,
            checkpoint=self.checkpoint,
        )
        return self.evidence

    def may_write_parameters(self, step: int) -> bool:
        """Says whether new parameters of a step may be written: only after the own vote (or a decision) has passed."""
        return self.evidence is not None and self.evidence.commits and self.evidence.step == step

    def gathered(self, step: int) -> None:
        """Notes that all parameters of the worker's layers are those of a step."""
        self.parameters_step = step

    def promise(
        self,
        generation: int,
        held: BlockReplicas,
        layers: tuple[int, int],
        partial: Partial | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Makes the report of a generation. From now on nothing is learned or begun until `accept`.

        Args:
            generation: that is asked for.
            held: its copies.
            layers: as of `Report`.
            partial, progress: as of `Report`; of progress one that has no state yet says nothing.
        """
        if self.promised_generation is not None and generation <= self.promised_generation:
            raise LedgerError(f"asked to promise generation {generation} after {self.promised_generation}")
        self.promised_generation = generation
        return Report(
            worker=self.worker,
            generation=generation,
            evidence=self.evidence,
            step=self.step,
            attempt=self.attempt,
            prepared=self.prepared,
            parameters_step=self.parameters_step,
            layers=layers,
            copies=held,
            decided=self.decided_generation,
            partial=partial,
            progress=None if self.is_fresh else progress,
        )

    def accept(self, decision: Decision) -> CatchUp:
        """Takes a decision; the caller must do what is returned, and then go on with the decision's step.

        Raises:
            LedgerError: the decision is not the answer to the promise, or asks for what this worker cannot do.
        """
        if self.promised_generation != decision.generation:
            raise LedgerError(
                f"a decision of generation {decision.generation} after a promise of {self.promised_generation}"
            )
        self.promised_generation = None
        # Before anything is taken over: it compares the decision with what was known.
        catch_up = self._catch_up(decision)
        self.decided_generation = decision.generation
        self.change = decision.change
        base = decision.resume_step - 1
        self.step, self.attempt, self.prepared = base, 0, False
        # As if this worker had tried the attempt before: another loss must not lead back to a number that was used.
        if decision.resume_attempt > 1:
            self.step, self.attempt = decision.resume_step, decision.resume_attempt - 1
        self.is_fresh = False
        if decision.rollback is not None:
            # Votes after the checkpoint would commit, as the newest evidence, steps that are undone.
            self.evidence, self.checkpoint, self._joined_at = None, 0, None
        elif decision.evidence is not None:
            self.evidence, self.checkpoint = decision.evidence, decision.evidence.checkpoint
        return catch_up

    def _catch_up(self, decision: Decision) -> CatchUp:
        if decision.rollback is not None:
            return CatchUp.ROLL_BACK
        theirs, ours = decision.evidence, self.evidence
        if self.is_fresh:
            self._joined_at = None if theirs is None else theirs.order
            return CatchUp.JOIN
        if ours is not None and ours.order == self._joined_at and (theirs is None or theirs.order == self._joined_at):
            return CatchUp.NOTHING  # it has nothing that could be behind that vote
        if theirs is None or (ours is not None and ours.order >= theirs.order):
            if ours is not None and (theirs is None or ours.order > theirs.order):
                raise LedgerError(
                    f"the decision of generation {decision.generation} is older than the vote that we know"
                )
            # The vote was known, but what it asks for may have been interrupted: doing it again does no harm.
            if ours is None:
                return CatchUp.NOTHING
            return CatchUp.APPLY if ours.commits else CatchUp.ADOPT_GRIDS
        # A vote needs every ballot, so one that it has not learned can only be of the attempt that it voted in.
        if (self.step, self.attempt, self.prepared) != (theirs.step, theirs.attempt, True):
            raise LedgerError(
                f"the decision commits attempt {theirs.attempt} of step {theirs.step}, but this worker was in attempt "
                f"{self.attempt} of step {self.step}, {'prepared' if self.prepared else 'not prepared'}"
            )
        return CatchUp.APPLY if theirs.commits else CatchUp.ADOPT_GRIDS

    def _refuse_if_promised(self, what: str) -> None:
        if self.promised_generation is not None:
            raise LedgerError(f"cannot {what}: generation {self.promised_generation} is promised and not decided")
