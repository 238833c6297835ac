"""The blocks of one worker: which copies it holds, how they travel in a step, and how they come to new holders.

`WorkerBlocks` holds and moves them. REDUCE brings partial sums to the owner of a block and its mean gradient to the
followers; GATHER and deliveries bring parameters to those that run a layer and hold no copy of its blocks;
re-replication brings whole copies to new holders. Who sends what to whom is decided in
`elaswave.protocol.step.traffic`, and when in `elaswave.protocol.step.loop`. A copy that is on its way in does not
count: it is in `arriving` until a vote has passed with it, so a report that is asked for before says nothing of it
(W6).

`PlannedChange` and the functions behind it say which copies are due. They are pure, so all workers come to the same
result. Missing followers come first. Then, towards the placement that a planned change leads to, those that will hold a
block follow it: each gets a base copy, and from the same step on the gradients. Once all of them hold what they will,
and the change is in force, the copies that it does not need are dropped (docs/protocol.md, rules M).

No torch, IO, clocks or threads.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_not
from statistics import median_low
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np

from elaswave.blocks.placement import NO_ROLE, SLOWDOWN_MAX, Block, Placement, block_keys
from elaswave.errors import StateError
from elaswave.hashing import key64
from elaswave.planning.search.recovery import choose_followers
from elaswave.protocol.messages import BlockReplicas, Decision, LayoutChange
from elaswave.protocol.step.ballot import Verdict, expected_residency, key_sums, residency_of
from elaswave.protocol.step.engine import C, Engine, FrameKind, JobTerms, Key, Pause
from elaswave.protocol.step.execution import Execution, Life
from elaswave.protocol.step.ledger import HeldCopies
from elaswave.protocol.step.traffic import Shipment, Traffic, agreement_hash, deliveries_of, traffic_of
from elaswave.types import Layout, struct_hash

if TYPE_CHECKING:
    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]

NUM_USUAL, NUM_JUDGED = 5, 3
"""The newest votes without and with copies of which the medians are compared: one step that something else has
disturbed decides nothing."""


class Weighed(NamedTuple, Generic[C]):
    """What of one worker is compared with others under a placement, and how often each counts. Two kinds of it; of
    each, [number]."""

    copies: Sequence[C]
    """Those that have others."""
    blocks: "npt.NDArray[np.int64]"
    """Of these."""
    block_keys: "Words"
    weights: "Words"
    """As many times as there are followers if it is the owner's, -1 if it is one of theirs."""
    read_blocks: Sequence[int]
    """Blocks of which it computes with the parameters, or serves them, and others do."""
    read: "npt.NDArray[np.int64]"
    """The same."""
    read_keys: "Words"
    read_weights: "Words"


class WorkerBlocks(Generic[C]):
    """Holds the copies of one worker, and sends and receives what they need.

    Args:
        execution: names the frames, and has the layout.
        placement: in force.
        copies: that the worker holds at the last committed step.
    """

    traffic_of: Callable[..., Traffic] = staticmethod(traffic_of)

    def __init__(self, execution: Execution[C], placement: Placement, copies: HeldCopies[C]) -> None:
        self.execution = execution
        self.worker, self.terms, self.engine = execution.worker, execution.terms, execution.engine
        self.links, self.observer = execution.links, execution.observer
        self.copies = copies
        """The copies held at the last committed step."""
        self.arriving = HeldCopies[C]()
        """Base copies on their way in: they count once a vote has passed with them."""
        self.placement = placement
        """In force."""
        self._routed: tuple[Layout, Placement, Placement] | None = None
        """Layout, placement and next placement of which `traffic` is."""
        self._is_complete = False
        """Whether what `traffic` is of has been found to lack no follower. Of no placement by itself: `next_placement`
        gives the same object once more when the same copy is lost again, while the traffic is that of its refill."""
        self._weighed: tuple[object, object, object, Weighed[C]] | None = None
        """Copies, placement and traffic, and what is weighed of them."""
        self.use_placement(placement)

    # ------------------------------------------------------------------------------------------------------ placement

    def use_placement(self, voting: Placement) -> None:
        """Takes the placement under which the next attempt votes, and finds who sends what to whom under it."""
        self.voting = voting
        before, self._routed = self._routed, (self.execution.layout, self.placement, voting)
        # By identity: equality looks at every block. An equal one that is another object costs work, no more.
        if before is None or any(map(is_not, before, self._routed)):
            layout = self.execution.layout
            self._is_complete = False
            self.agreement_hash = agreement_hash(layout, voting)
            self.traffic: Traffic = self.traffic_of(self.worker, self.terms.blocks, layout, self.placement, voting)

    @property
    def voting_copies(self) -> HeldCopies[C]:
        """Joins the copies that count and those that have come for this vote."""
        return self.copies.with_others(self.arriving) if self.arriving else self.copies

    def count_arriving(self) -> None:
        """Makes copies that have come count; they are not sent again: the next attempt's gradients are for them."""
        if self.arriving:
            self.copies, self.arriving = self.voting_copies, HeldCopies()
        self.placement = self.voting

    def take_placement(self, placement: Placement) -> None:
        """Brings a placement into force. Copies that it does not need are dropped: APPLY spares itself their update
        (M6)."""
        self.placement = placement
        self.copies = self.copies.only(placement.roles(self.worker)[self.copies.blocks] != NO_ROLE)
        self._take_roles()

    def _take_roles(self) -> None:
        self.copies.take_roles(self.placement.roles(self.worker)[self.copies.blocks])

    def take_decided(self, decision: Decision) -> None:
        """Brings a decision's placement into force, which asks for nothing that is not held here.

        Raises:
            StateError: it does.
        """
        placement, base = decision.placement, decision.resume_step - 1
        roles = placement.roles(self.worker)
        if missing := sorted({*np.flatnonzero(roles).tolist()}.difference(self.copies)):
            raise StateError(
                f"generation {decision.generation} counts on blocks {missing} of worker {self.worker}, not held here"
            )
        # The decision does not count on the others; copies that are known to be wrong are among them (K3).
        copies = self.copies.only(roles[self.copies.blocks] != NO_ROLE)
        if behind := copies.not_at(base):
            block = behind[0].block.id
            version = copies.other_versions.get(block, copies.version)
            raise StateError(f"block {block} of worker {self.worker} is of step {version}, not {base}")
        copies.take_roles(roles[copies.blocks])
        self.copies, self.placement = copies, placement

    def forget(self) -> None:
        """Gives up all copies: a checkpoint's are about to take their place."""
        self.copies, self.arriving, self._weighed = HeldCopies(), HeldCopies(), None

    def take_loaded(self, copies: HeldCopies[C], placement: Placement) -> None:
        """Takes the copies of a checkpoint in the place of those that were forgotten."""
        self.copies, self.placement = copies, placement

    def weighed(self, held: HeldCopies[C]) -> Weighed[C]:
        """Finds what is compared with others in a vote, under its placement.

        Args:
            held: the copies.
        """
        known, voting, traffic = self._weighed, self.voting, self.traffic
        # By identity: the same from step to step, but where copies come or go.
        if known is None or any(map(is_not, known, (held, voting, traffic))):
            weights = voting.by_group(self._weight_in(group) for group in voting.groups)[held.blocks]
            compared, keys = weights != 0, block_keys(voting.num_blocks)
            blocks, read = held.blocks[compared], np.array([*traffic.read], np.int64)
            found = Weighed(
                held.where(compared),
                blocks,
                keys[blocks],
                weights[compared].view(np.uint64),
                [*traffic.read],
                read,
                keys[read],
                np.array([*traffic.read.values()], np.int64).view(np.uint64),
            )
            self._weighed = known = (held, voting, traffic, found)
        return known[3]

    def _weight_in(self, group: tuple[int, ...]) -> int:
        return len(group) - 1 if group[0] == self.worker or len(group) == 1 else -1

    def held(self) -> BlockReplicas:
        """Says which copies are held at the last committed step, for a report (W6)."""
        return self.copies.replicas()

    # ------------------------------------------------------------------------------------------------ re-replication

    def replicate(self, moving: LayoutChange | None, num_elements: int, num_updates: int) -> None:
        """Begins to give blocks new holders: followers where some are missing (W6), then those that a change asks for
        (M4), then what fills whole stages up. Their base copies travel while the step runs.

        Every worker comes to the same placement by itself; the vote compares its hash, and with it the copies count.

        Args:
            moving: the change that all members have adopted.
            num_elements: the most that may travel in this attempt for what is not urgent.
            num_updates: that training has made.
        """
        # A base copy counts only with the vote of its own attempt; without that it travels again (W6).
        if self.arriving:
            self.arriving = HeldCopies()
        target = None
        if moving is not None:
            target = moving.placement
            self.engine.prepare_layout(moving.layout)
        elif self._is_complete:
            return
        terms = self.terms
        voting = next_placement(
            terms.blocks,
            self.execution.layout,
            self.placement,
            target,
            terms.copy_elements,
            num_elements,
            terms.scatter_width,
        )
        # One object where nothing is to be copied: `use_placement` and `_is_complete` go by identity.
        if voting == self.placement:
            voting = self.placement
        self.use_placement(voting)
        self._is_complete = target is None and voting is self.placement
        key = self.execution.key
        for block, peer in self.traffic.copies_out:
            self.links.send(key(FrameKind.BASE_COPY, block, 0, peer), self.engine.state(self.copies[block]))
        if arriving := self.traffic.copies_in:
            self.arriving = HeldCopies({block: self.engine.empty_copy(block, num_updates) for block, _ in arriving})
        for block, owner in arriving:
            self.links.post(key(FrameKind.BASE_COPY, block, 0, owner), self.engine.state_slot(self.arriving[block]))

    # --------------------------------------------------------------------------------------------------------- REDUCE

    def post_receives(self) -> None:
        """Names the memory of all that REDUCE receives, so that frames that arrive early land where they belong.

        Parameters are not among it: until the own vote has passed, none may be written (W2).
        """
        key = self.execution.key
        for shipment in self.traffic.partials_in:
            slot = self.engine.partial_sums_slot(*shipment)
            self.links.post(key(FrameKind.PARTIAL_SUM, shipment.layer, 0, shipment.peer), slot)
        for shipment in self.traffic.reduced_in:
            slot = self.engine.gradients_slot(self._copies_of(shipment.blocks))
            self.links.post(key(FrameKind.REDUCED, shipment.layer, 0, shipment.peer), slot)

    def _copies_of(self, blocks: Iterable[int]) -> list[C]:
        return [self.arriving[block] if block in self.arriving else self.copies[block] for block in blocks]

    def send_partials(self, layer: int) -> None:
        """Sends this worker's complete partial sums of a layer to the owners of its blocks."""
        self.observer.point("reduce")
        for shipment in self.traffic.partials_out.get(layer, ()):
            payload = self.engine.partial_sums(layer, shipment.blocks)
            self.links.send(self.execution.key(FrameKind.PARTIAL_SUM, layer, 0, shipment.peer), payload)

    def reduce(self) -> Life[None]:
        """Carries out REDUCE: makes every held block's mean gradient complete, and every new base copy."""
        self.observer.point("reduce")
        self.observer.doing("reduce", computing=False)
        key, receive, traffic = self.execution.key, self.execution.receive, self.traffic
        peers: dict[int, list[int]] = {}
        for shipment in traffic.partials_in:
            peers.setdefault(shipment.layer, []).append(shipment.peer)
        # What is owned comes first: followers wait for it, and two workers may follow each other.
        for layer, blocks in traffic.owned.items():
            senders = peers.get(layer, [])
            yield from receive([key(FrameKind.PARTIAL_SUM, layer, 0, peer) for peer in senders])
            self.engine.reduce(layer, [self.copies[block] for block in blocks], senders)
            for shipment in traffic.reduced_out.get(layer, ()):
                payload = self.engine.gradients(self._copies_of(shipment.blocks))
                self.links.send(key(FrameKind.REDUCED, layer, 0, shipment.peer), payload)
        yield from receive(
            [key(FrameKind.REDUCED, shipment.layer, 0, shipment.peer) for shipment in traffic.reduced_in]
        )
        yield from receive([key(FrameKind.BASE_COPY, block, 0, owner) for block, owner in traffic.copies_in])
        # Not before their states are here: the residency sum proves versions.
        self.arriving.version = self.execution.step - 1

    # ------------------------------------------------------------------------------------------- GATHER and deliveries

    def gather(self) -> Life[None]:
        """Carries out GATHER: brings new parameters to those that run a layer and hold no copy of its blocks."""
        self.observer.point("gather")
        for index, (layer, peer, blocks) in enumerate(self.traffic.parameters_out):
            if index:
                self.observer.point("gather")
            payload = self.engine.parameters_of([self.copies[block] for block in blocks])
            self.links.send(self.execution.key(FrameKind.PARAMETERS, layer, 0, peer), payload)
        yield from self._receive_parameters(self.post_parameters(FrameKind.PARAMETERS, self.traffic.parameters_in))
        yield Pause.SENT

    def deliver(self, decision: Decision, new: frozenset[int]) -> Life[int]:
        """Sends and receives the parameters that a decision asks for (W5).

        Args:
            new: the layers that are new here, yet without values.
        Returns:
            Bytes of those layers that came from others.
        """
        if not decision.deliver:
            return 0
        incoming = []
        for owner, shipment in deliveries_of(self.terms.blocks, decision.placement, decision.deliver):
            if owner == self.worker:
                payload = self.engine.parameters_of([self.copies[block] for block in shipment.blocks])
                self.links.send(self.execution.key(FrameKind.DELIVERY, shipment.layer, 0, shipment.peer), payload)
            elif shipment.peer == self.worker:
                incoming.append(shipment._replace(peer=owner))
        posted = self.post_parameters(FrameKind.DELIVERY, incoming)
        # Of what is sent here only: elsewhere a change of memory must stay to be found, with sums that were kept.
        units = {unit for worker, unit in decision.deliver if worker == self.worker}
        self.engine.publish(copy for copy in self.copies.all if copy.block.layer in units)
        yield from self._receive_parameters(posted)
        yield Pause.SENT
        return self.engine.parameter_bytes(
            block for shipment in incoming if shipment.layer in new for block in shipment.blocks
        )

    def post_parameters(self, kind: FrameKind, shipments: Iterable[Shipment]) -> dict[Key, Shipment]:
        """Names the memory in which parameters arrive: that of the layers themselves, which RUN reads."""
        posted = {self.execution.key(kind, shipment.layer, 0, shipment.peer): shipment for shipment in shipments}
        for key, (layer, _, blocks) in posted.items():
            self.links.post(key, self.engine.parameters_slot(layer, blocks))
        return posted

    def _receive_parameters(self, posted: Mapping[Key, Shipment]) -> Life[None]:
        yield from self.execution.receive([*posted])
        for layer, _, blocks in posted.values():
            self.engine.parameters_arrived(layer, blocks)


# ----------------------------------------------------------------------------------------------------- what is due


class CopyBudget(NamedTuple):
    """Bounds what may travel in an attempt towards a planned placement. Follows from the votes since the newest
    decision or change of layout, so all members have the same."""

    elements: int
    """The most that one owner sends, and one worker receives."""
    usual_us: tuple[int, ...] = ()
    """Durations of the newest attempts in which nothing has travelled."""
    copying_us: tuple[int, ...] = ()
    """Of the newest in which copies have, since the budget was last cut."""

    @property
    def hash(self) -> int:
        """Hashes it to 62 bits."""
        return _budget_hash(self)

    def after(self, duration_us: int, *, copied: bool, bounds: tuple[int, int]) -> "CopyBudget":
        """Makes the budget that follows from a vote.

        Args:
            duration_us: of the attempt, as the vote says it.
            copied: whether base copies have travelled in it.
            bounds: the least and the most elements.
        """
        if not copied:
            return self._replace(usual_us=(*self.usual_us, duration_us)[-NUM_USUAL:])
        copying = (*self.copying_us, duration_us)[-NUM_JUDGED:]
        if not self.usual_us or len(copying) < NUM_JUDGED:
            return self._replace(copying_us=copying)
        least, most = bounds
        if median_low(copying) > SLOWDOWN_MAX * median_low(self.usual_us):
            # What was measured with more copies says nothing about fewer.
            return self._replace(elements=max(least, self.elements // 2), copying_us=())
        return self._replace(elements=min(most, self.elements * 5 // 4), copying_us=copying)


class PlannedChange:
    """Follows the change of layout that is under way, as one worker sees it.

    It is *held* once it has come and its links are there, and told in every ballot; *moving* once a vote has shown that
    all hold it, while blocks move to those that will hold them; *coming* from the vote that has proven all copies in
    their places until that step's GATHER, with which it is in force. Each of these follows from a vote alone, so no
    worker can be ahead of another.

    Args:
        worker: its id.
        terms: what is known of the job.
        engine: makes room for the layers that come.
    """

    def __init__(self, worker: int, terms: JobTerms, engine: Engine[Any]) -> None:
        self._worker, self._terms, self._engine = worker, terms, engine
        self.held: LayoutChange | None = None
        """Told in every ballot until it is adopted (M2)."""
        self.hash = 0
        """Of the held change, 62 bits; 0 for none."""
        self.moving: LayoutChange | None = None
        """The one that all members have adopted (M4)."""
        self.coming: LayoutChange | None = None
        """The one that has come into force with the vote of the step in hand, until its GATHER (M5)."""
        self.budget = CopyBudget(terms.move_elements)
        """How much may travel in the next attempt."""

    def hold(self, change: LayoutChange) -> None:
        """Holds a planned change, whose links are there, until it is adopted (W8)."""
        self.held = change
        content = (struct_hash(change.layout), struct_hash(change.execution), struct_hash(change.placement))
        # Without the term: members may hold one change from coordinators that followed each other.
        self.hash = key64("change", change.number, *content) >> 2

    def forget(self) -> None:
        """Forgets all changes (M7); of one that is in force the decision knows."""
        self.held, self.hash = None, 0
        self.moving = self.coming = None
        self._engine.forget_layout()

    def restart_budget(self) -> None:
        """Begins to measure anew what may travel: the layout is another one, or members have seen different votes."""
        self.budget = CopyBudget(self._terms.move_elements)

    def learn(self, verdict: Verdict, step: int, *, copied: bool) -> None:
        """Takes over what a vote says of the change.

        Args:
            step: that the vote was on.
            copied: whether base copies have travelled in its attempt.
        """
        if self.adopts(verdict):
            self.moving, self.held, self.hash = self.held, None, 0
        # Perhaps with the vote that adopts it: ballots tell also of a held change which copies are in their places.
        if self.arrives(verdict, step, copied=copied):
            self.coming, self.moving = self.moving, None

    def adopts(self, verdict: Verdict) -> bool:
        """Says whether a vote adopts the held change: all hold it (M3)."""
        assert verdict.change in (0, self.hash), "a vote for a planned change that this worker does not hold"
        return verdict.change != 0

    def arrives(self, verdict: Verdict, step: int, *, copied: bool) -> bool:
        """Says whether the adopted change comes into force with a vote: its copies are proven in their places, and none
        has travelled in this attempt (M5). Arguments as of `learn`."""
        if self.moving is None or not verdict.commits or copied:
            return False
        return verdict.next_residency == expected_residency(self.moving.placement, step)

    def residency(self, copies: HeldCopies[Any]) -> int:
        """Makes the second residency sum of the ballot: of the copies that are in their places under the change, in the
        roles that they will have."""
        change = self.moving or self.held
        if change is None:
            return 0
        roles = change.placement.roles(self._worker)
        # A worker that votes has all of its copies at the step before.
        return residency_of(self._worker, key_sums(copies.blocks, roles[copies.blocks], len(roles)), copies.version)

    def num_in_place(self, placement: Placement) -> tuple[int, int]:
        """Counts the copies that are in their places under the adopted change, and those that will be; (0, 0) without
        one.

        Args:
            placement: in force.
        """
        return (0, 0) if self.moving is None else num_in_place(placement, self.moving.placement)


@functools.lru_cache(maxsize=64)
def _budget_hash(budget: CopyBudget) -> int:
    return key64("budget", budget.elements, len(budget.usual_us), *budget.usual_us, *budget.copying_us) >> 2


@functools.lru_cache(maxsize=4096)
def next_placement(
    blocks: tuple[Block, ...],
    layout: Layout,
    placement: Placement,
    target: Placement | None,
    refill_elements: int,
    move_elements: int,
    scatter_width: int,
) -> Placement:
    """Chooses the placement that the next vote brings into force.

    Args:
        blocks: of the model.
        layout, placement: in force.
        target: the placement that an adopted change leads to; None: there is none.
        refill_elements: the most that one owner sends, and one worker receives, to make up for followers that are
            missing, or, of a stage of which all are to follow, where nobody follows.
        move_elements: the same towards the target, and then until all of such a stage follow.
        scatter_width: over how many replica peers the first followers of an owner's blocks are spread.
    Returns:
        An equal placement if there is nothing to copy.
    """
    urgent_elements = max(refill_elements, move_elements)
    safe = choose_followers(
        placement, blocks, layout, max_elements=urgent_elements, scatter_width=scatter_width, urgent=True
    )
    # Redundancy first (M4): while a block lacks a follower, nothing travels towards the target.
    if safe != placement:
        return safe
    if target is not None:
        return towards(placement, target, blocks, move_elements)
    return choose_followers(placement, blocks, layout, max_elements=move_elements, scatter_width=scatter_width)


def towards(placement: Placement, target: Placement, blocks: Sequence[Block], max_elements: int) -> Placement:
    """Adds some of the holders that a target has in addition to a placement, as followers.

    At least one copy travels if any is missing, however large it is.

    Args:
        placement: in force.
        target: where blocks will be.
        blocks: of the model.
        max_elements: the most that one owner sends, and that one worker receives.
    """
    followers = list(placement.followers)
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    # First what no worker would hold that stays: those that leave hand over first what only they hold.
    leaves = [set(placement.holders(block.id)).isdisjoint(target.holders(block.id)) for block in blocks]
    for block in sorted(blocks, key=lambda block: not leaves[block.id]):
        index, size = block.id, block.num_elements
        owner, here = placement.owner[index], placement.holders(index)
        for worker in target.holders(index):
            if worker in here:
                continue
            after = sent.get(owner, 0) + size, received.get(worker, 0) + size
            if sent and max(after) > max_elements:
                continue
            sent[owner], received[worker] = after
            # Nothing is taken from a holder before the target is in force: a loss may still make the change void (M7).
            followers[index] += (worker,)
    return Placement.of(placement.owner, tuple(followers))


def num_in_place(placement: Placement, target: Placement) -> tuple[int, int]:
    """Counts the copies that a target asks for and that are there, and those that it asks for."""
    found = total = 0
    for block in range(len(target.owner)):
        wanted = target.holders(block)
        total += len(wanted)
        found += len(set(wanted).intersection(placement.holders(block)))
    return found, total


def followed_by(placement: Placement, target: Placement) -> Placement:
    """Adds the holders that a target has in addition to the present roles, as followers: the placement once all copies
    are in their places, before the target comes into force.

    Args:
        placement: in force.
        target: where blocks will be.
    """
    followers = tuple(
        (*here, *(worker for worker in target.holders(block) if worker != owner and worker not in here))
        for block, (owner, here) in enumerate(zip(placement.owner, placement.followers, strict=True))
    )
    return Placement.of(placement.owner, followers)


def refilled(
    blocks: tuple[Block, ...],
    layout: Layout,
    placement: Placement,
    max_elements: int,
    scatter_width: int,
) -> Placement:
    """Finds the placement to which the members come by making up for all missing followers, step by step, before they
    turn to a change.

    Arguments as of `next_placement`.
    """
    while True:
        after = choose_followers(
            placement, blocks, layout, max_elements=max_elements, scatter_width=scatter_width, urgent=True
        )
        if after == placement:
            return placement
        placement = after
