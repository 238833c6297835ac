"""What can be seen of a simulated run. Checkers and counters listen here, and know nothing of how things are done."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from elaswave.blocks.placement import Placement
from elaswave.protocol.events import PlanRecovery
from elaswave.protocol.membership.effects import AnyRecord, MembershipRecord
from elaswave.protocol.messages import CoreToWorker, Decision, Evidence
from elaswave.types import Layout
from verify.simulator.job import BlockState, Exponents
from verify.simulator.messages import CheckpointSettled


class Observer:
    """What can be seen of a run. Every call may be ignored."""

    def began(self, worker: int, generation: int, step: int, attempt: int, placement: Placement) -> None:
        """A worker begins an attempt under a placement."""

    def offered(self, worker: int, generation: int, step: int, number: int, term: int) -> None:
        """A planned change of its generation has come to a worker, which is at a step, from the coordinator of a
        term."""

    def holds(self, worker: int, generation: int, step: int, number: int, term: int) -> None:
        """A worker begins an attempt; the newest planned change that it holds, has adopted or has in force, and the
        newest term of which it has heard."""

    def computed(self, worker: int, generation: int, step: int, attempt: int, layer: int, microbatch: int) -> None:
        """A worker has added a layer's gradient for a micro-batch to its sums."""

    def coded(self, worker: int, step: int, layer: int, microbatch: int, ratio: int) -> None:
        """What a worker is about to add to its sums was computed with this ratio of an adaptive fence."""

    def kept(self, worker: int, generation: int, step: int, attempt: int, layer: int, microbatch: int) -> None:
        """A worker begins an attempt with a layer's gradient for a micro-batch from an earlier one in its sums."""

    def used_parameter(self, worker: int, step: int, block: int, value: int) -> None:
        """A worker computes a step with a parameter."""

    def consumed(
        self, worker: int, generation: int, step: int, attempt: int, frame: tuple[int, int, int], sender_is_member: bool
    ) -> None:
        """A worker in (generation, step, attempt) uses a frame of (generation, step, attempt)."""

    def learned(
        self, worker: int, generation: int, step: int, attempt: int, commits: bool, vector: bytes, grid: Exponents
    ) -> None:
        """A worker learns the result of a vote; ``grid`` is the one that follows from it."""

    def placed(self, worker: int, placement: Placement) -> None:
        """A worker has learned of a vote that brings a placement into force."""

    def adopted(self, worker: int) -> None:
        """A worker has learned that all members hold a planned change: blocks move from now on."""

    def switched(self, worker: int, generation: int, step: int, layout: Layout, placement: Placement) -> None:
        """A planned change has come into force for a worker, with the vote of a step; it has dropped the copies that
        the change does not need."""

    def applied(self, worker: int, block: int, step: int, state: BlockState) -> None:
        """A worker has applied a step to its copy of a block."""

    def loaded(self, worker: int, block: int, step: int, state: BlockState) -> None:
        """A worker has a copy of a block from elsewhere: a durable checkpoint or another worker."""

    def installed(self, worker: int, decision: Decision, versions: Iterable[int], grid: Exponents) -> None:
        """A worker has carried out a decision; versions of its copies."""

    def received(self, term: int, generation: int, evidence: Evidence) -> None:
        """A coordinator is told of a vote that was held in a generation."""

    def asked_planner(self, term: int, question: PlanRecovery) -> None:
        """A coordinator asks how the members go on."""

    def decided(self, decision: Decision) -> None:
        """A coordinator has persisted a decision."""

    def published(self, step: int, losses: tuple[float, ...]) -> None:
        """A coordinator has published the losses of a step."""

    def wrote(self, worker: int, step: int, blocks: Collection[int]) -> None:
        """A worker has written its part of a step's durable checkpoint."""

    def checkpointed(self, step: int, states: Mapping[int, BlockState], grid: Exponents) -> None:
        """A coordinator has made a durable checkpoint."""

    def committing(self, step: int) -> None:
        """A coordinator asks for a complete checkpoint to be made durable, which takes a while."""

    def given_up(self, step: int, members: Collection[int]) -> None:
        """A coordinator with these members has given up a step's durable checkpoint, and said so."""

    def claimed(self, term: int) -> None:
        """With candidates: the store has carried out a claim, which makes this the term."""

    def persisted(self, writer: int, number: int, record: AnyRecord) -> None:
        """With candidates: a record stands in the store, a coordinator's write of that number."""

    def spoke(self, writer: int, message: CoreToWorker | CheckpointSettled, durable: Sequence[AnyRecord]) -> None:
        """With candidates: a coordinator sends a message while these records stand in the store."""

    def sent(self, worker: int, history: Sequence[bytes]) -> None:
        """With candidates: a message of a coordinator that knows these entries has come to a worker."""

    def went_back(self, term: int, standing: Sequence[tuple[int, int, AnyRecord]], gone: Sequence[AnyRecord]) -> None:
        """With candidates: the store was put back to an older copy.

        Args:
            term: that stands there.
            standing: what it has: writer, number of its write, and record, as in `persisted`.
            gone: records that it had.
        """

    def gone_back(self, seen: str) -> None:
        """With candidates: a coordinator ends the job because the store has gone back."""

    def lease_lost(self, writer: int) -> None:
        """With candidates: a coordinator has learned that another one has taken over."""

    def wrote_down(self, record: MembershipRecord) -> None:
        """A coordinator has made durable what was done about workers, joiners or hosts."""

    def held_for_lost(self, worker: int, detected_by: str) -> None:
        """A coordinator goes on without a worker."""

    def killed(self, worker: int) -> None:
        """A coordinator has the process of a worker killed, which lives."""

    def stopping(self, members: Collection[int], leaving: Collection[int]) -> None:
        """A coordinator asks for the end of the job, since too few of these members would stay."""

    def expects(self, joiners: Collection[int], members: Collection[int]) -> None:
        """A coordinator waits for these joiners, and has these members."""

    def given(self, worker: int, incarnation: int) -> None:
        """With agents: a coordinator has made durable by whom a joiner is started."""

    def forked(self, worker: int, incarnation: int) -> None:
        """With agents: an agent starts a joiner."""

    def waits(self, incarnation: int, alone: int, idle: int) -> None:
        """With agents: an agent goes on without a coordinator.

        Args:
            incarnation: of the agent.
            alone: how long it has had none.
            idle: how long none of its workers has committed a step.
        """

    def orphaned(self, incarnation: int, alone: int, idle: int) -> None:
        """With agents: an agent ends its workers and itself, since it has no coordinator; as `waits`."""

    def flipped(self, worker: int, block: int) -> None:
        """A bit has flipped in a worker's copy of a block."""

    def slipped(self, worker: int, block: int) -> None:
        """A worker's copy of a block is being updated wrongly."""

    def gone(self, worker: int) -> None:
        """A worker has ended."""

    def finished(self, members: Sequence[int], states: dict[int, dict[int, tuple[bool, int, BlockState]]]) -> None:
        """All members have made all steps: worker -> block -> (owned, version, state)."""

    def ended(self, reason: str, members: Sequence[int], lost: Sequence[int], orphans: Sequence[int]) -> None:
        """The job was given up by a coordinator with these members.

        Args:
            reason: what it says.
            members: of its generation.
            lost: workers that were struck by a fault and then held for lost.
            orphans: blocks that it says are lost.
        """

    def stopped(self, outcome: str, now: int) -> None:
        """The simulation is over: ``finished``, ``ended`` or ``stuck``."""


_CALLS = [name for name in vars(Observer) if not name.startswith("_")]


def together(observers: Sequence[Observer]) -> Observer:
    """One observer that passes every call on to those of the given ones that do something with it."""
    all_of_them = Observer()
    for name, places in _listeners(tuple(map(type, observers))):
        setattr(all_of_them, name, _call_all([getattr(observers[place], name) for place in places]))
    return all_of_them


@cache
def _listeners(kinds: tuple[type[Observer], ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """For each call the places of those observers that do something with it; calls that none listens to are not in it.

    Args:
        kinds: classes of the observers.
    """
    found = []
    for name in _CALLS:
        ignored = getattr(Observer, name)
        places = tuple(place for place, kind in enumerate(kinds) if getattr(kind, name) is not ignored)
        if places:
            found.append((name, places))
    return tuple(found)


def _call_all(listeners: Sequence[Callable[..., None]]) -> Callable[..., None]:
    if len(listeners) == 1:
        return listeners[0]
    if len(listeners) == 2:
        first, second = listeners

        def call_both(*arguments: Any) -> None:
            first(*arguments)
            second(*arguments)

        return call_both

    def call(*arguments: Any) -> None:
        for listener in listeners:
            listener(*arguments)

    return call
