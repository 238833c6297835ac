"""The blocks of one worker: which copies it holds, under which placement, and how they travel in a step.

REDUCE brings partial sums to the owner of a block and its mean gradient to the followers; GATHER and deliveries bring
parameters to those that run a layer and hold no copy of its blocks; re-replication brings whole copies to new holders.
Who sends what to whom is decided in `elaswave.protocol.step.traffic`, and when in `elaswave.protocol.step.loop`.

A copy that is on its way in does not count: it is in `arriving` until a vote has passed with it, so a report that is
asked for before says nothing of it (W6). No torch, IO, clocks or threads.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic

from elaswave.blocks.placement import Placement, ReplicaRole, roles_of
from elaswave.errors import StateError
from elaswave.protocol.messages import Decision, LayoutChange
from elaswave.protocol.step.engine import C, FrameKind, Key, Pause
from elaswave.protocol.step.execution import Execution, Life
from elaswave.protocol.step.ledger import Held
from elaswave.protocol.step.moves import next_placement
from elaswave.protocol.step.traffic import Shipment, Traffic, agreement_hash, deliveries_of, traffic_of
from elaswave.types import Layout


class WorkerBlocks(Generic[C]):
    """Holds the copies of one worker, and sends and receives what they need.

    Args:
        execution: names the frames, and has the layout.
        placement: in force.
        copies: that the worker holds at the last committed step, by block.
    """

    traffic_of: Callable[..., Traffic] = staticmethod(traffic_of)

    def __init__(self, execution: Execution[C], placement: Placement, copies: Mapping[int, C]) -> None:
        self.execution = execution
        self.worker, self.terms, self.engine = execution.worker, execution.terms, execution.engine
        self.links, self.observer = execution.links, execution.observer
        self.copies: dict[int, C] = dict(copies)
        """The copies held at the last committed step, by block; ascending."""
        self.arriving: dict[int, C] = {}
        """Base copies on their way in: they count once a vote has passed with them."""
        self.placement = placement
        """In force."""
        self._routed: tuple[Layout, Placement, Placement] | None = None
        """Layout, placement and next placement of which `traffic` is."""
        self._is_complete = False
        """Whether what `traffic` is of has been found to lack no follower. Of no placement by itself: `next_placement`
        gives the same object once more when the same copy is lost again, while the traffic is that of its refill."""
        self.use_placement(placement)

    # ------------------------------------------------------------------------------------------------------ placement

    def use_placement(self, voting: Placement) -> None:
        """Takes the placement under which the next attempt votes, and finds who sends what to whom under it."""
        self.voting = voting
        before, self._routed = self._routed, (self.execution.layout, self.placement, voting)
        if before is None or any(old is not new for old, new in zip(before, self._routed, strict=True)):
            layout = self.execution.layout
            self._is_complete = False
            self.agreement_hash = agreement_hash(layout, voting)
            self.traffic: Traffic = self.traffic_of(self.worker, self.terms.blocks, layout, self.placement, voting)

    @property
    def voting_copies(self) -> dict[int, C]:
        """Joins the copies that count and those that have come for this vote, by block; ascending."""
        return dict(sorted({**self.copies, **self.arriving}.items())) if self.arriving else self.copies

    def count_arriving(self) -> None:
        """Makes copies that have come count; they are not sent again: the next attempt's gradients are for them."""
        self.copies, self.arriving = self.voting_copies, {}
        self.placement = self.voting

    def take_placement(self, placement: Placement) -> None:
        """Brings a placement into force. Copies that it does not need are dropped: APPLY spares itself their update
        (M6)."""
        self.placement, holders = placement, placement.holders
        self.copies = {block: copy for block, copy in self.copies.items() if self.worker in holders(block)}
        self._take_roles()

    def _take_roles(self) -> None:
        owners = self.placement.owner
        for block, copy in self.copies.items():
            copy.role = ReplicaRole.OWNER if owners[block] == self.worker else ReplicaRole.FOLLOWER

    def take_decided(self, decision: Decision) -> None:
        """Brings a decision's placement into force, which asks for nothing that is not held here.

        Raises:
            StateError: it does.
        """
        placement, base = decision.placement, decision.resume_step - 1
        roles = roles_of(self.worker, placement, self.terms.blocks)
        if missing := sorted(roles.keys() - self.copies.keys()):
            raise StateError(
                f"generation {decision.generation} counts on blocks {missing} of worker {self.worker}, not held here"
            )
        for block, role in roles.items():
            copy = self.copies[block]
            copy.role = role
            if copy.version != base:
                raise StateError(f"block {block} of worker {self.worker} is of step {copy.version}, not {base}")
        self.copies = {block: self.copies[block] for block in roles}
        self.placement = placement

    def take_loaded(self, copies: Mapping[int, C], placement: Placement) -> None:
        """Replaces all copies by those of a checkpoint."""
        self.copies, self.arriving = dict(sorted(copies.items())), {}
        self.placement = placement

    def held(self) -> dict[int, Held]:
        """Lists the copies at the last committed step, for a report (W6)."""
        return {block: Held(copy.role is ReplicaRole.OWNER, copy.version) for block, copy in self.copies.items()}

    # ------------------------------------------------------------------------------------------------ re-replication

    def replicate(self, moving: LayoutChange | None, num_elements: int, num_updates: int) -> None:
        """Begins to give blocks new holders: followers where some are missing (W6), then those that a change asks for
        (M4). Their base copies travel while the step runs.

        Every worker comes to the same placement by itself; the vote compares its hash, and with it the copies count.

        Args:
            moving: the change that all members have adopted.
            num_elements: the most that may travel for it in this attempt.
            num_updates: that training has made.
        """
        self.arriving = {}
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
            terms.num_followers,
            terms.copy_elements,
            num_elements,
            terms.scatter_width,
        )
        if voting == self.placement:
            voting = self.placement
        self.use_placement(voting)
        self._is_complete = target is None and voting is self.placement
        key = self.execution.key
        for block, peer in self.traffic.copies_out:
            self.links.send(key(FrameKind.BASE_COPY, block, 0, peer), self.engine.state(self.copies[block]))
        for block, owner in self.traffic.copies_in:
            copy = self.arriving[block] = self.engine.empty_copy(block, num_updates)
            self.links.post(key(FrameKind.BASE_COPY, block, 0, owner), self.engine.state_slot(copy))

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
        """REDUCE: makes every held block's mean gradient complete, and every new base copy."""
        self.observer.point("reduce")
        self.observer.doing("reduce", computing=False)
        key, receive, traffic = self.execution.key, self.execution.receive, self.traffic
        peers: dict[int, list[int]] = {}
        for shipment in traffic.partials_in:
            peers.setdefault(shipment.layer, []).append(shipment.peer)
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
        for copy in self.arriving.values():
            copy.version = self.execution.step - 1

    # ------------------------------------------------------------------------------------------- GATHER and deliveries

    def gather(self) -> Life[None]:
        """GATHER: brings new parameters to those that run a layer and hold no copy of its blocks."""
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
        self.engine.publish(copy for copy in self.copies.values() if copy.block.layer in units)
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
