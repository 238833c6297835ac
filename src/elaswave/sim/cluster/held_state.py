"""Who holds which state in a simulated job, as losses take copies and time makes them again.

`elaswave.planning.policy.replication` says what one instant's losses take under one allocation. Here that is followed
through time: a worker that is lost counts as gone until its copies have been made again elsewhere, one that joins or
changes stage counts only once it has been sent what it will hold. So a second loss soon after a first one can be fatal
though each of them alone would not be.

Work is done only where state could be lost at all: a single loss among complete copies costs a few look-ups.

State that travels in the background in a simulated job, and what training does until it is there. Pure.

Every policy's copies are treated alike. Until they have arrived the layout of before counts: after a loss what the
policy's plan says of the workers that are left (`Plan.interim_step_s`), after a join or a change of speed the step of
before. Copies take `RecoveryTimes.copy_share` of the links' bandwidth, and training has the rest. Copies for which
training stands still are in a plan's pause.
"""

from collections.abc import Callable, Collection
from math import ceil
from typing import NamedTuple, Protocol

import numpy as np

from elaswave.blocks.placement import MOVE_BYTES_MAX, MOVE_BYTES_MIN, SLOWDOWN_MAX
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.policy.replication import WHOLE, LayerRange, ReplicaSet, Replication
from elaswave.planning.programs.prediction import stages_of, step_s
from elaswave.planning.state_moves.placed_blocks import PlacedBlocks, Placing
from elaswave.planning.state_moves.transfers import Sources, receiving_s, shared_links
from elaswave.types import WHOLE_STAGE


class HeldState(Protocol):
    """The copies of a job over time; times are the scenario's, in seconds."""

    def begin(self, plan: Plan, there: Cluster) -> None:
        """All workers hold what a plan says: at the start, and after a checkpoint was loaded."""
        ...

    def lose(self, now_s: float, workers: Collection[int]) -> bool:
        """Takes workers away without notice; whether something has no holder left then."""
        ...

    def adopt(self, now_s: float, plan: Plan, there: Cluster, copied_s: float) -> float:
        """A plan is to come into force: state travels to those whom it wants to hold it, until `copied_s` at least.
        Returns when it is in force."""
        ...

    @property
    def filled_s(self) -> float:
        """When all copies are there that are sent once a plan is in force."""
        ...

    @property
    def slower(self) -> float:
        """Share by which a step takes longer until then."""
        ...

    @property
    def state_share(self) -> np.ndarray | float:
        """Share of each layer's state that one of those who run it holds."""
        ...


class _Filling(NamedTuple):
    """Layers of which a worker holds the fewest copies that safety needs, and is sent the others."""

    worker: int
    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    from_s: float
    """When the layout came into force that gave them to it."""
    seconds: float
    """That it takes to send the others."""


class HeldBlocks:
    """Blocks with owner and followers, as the engine places, moves and refills them.

    A layout comes into force when its copies have come; of a stage that all of its workers follow those do that safety
    needs: a worker that was sent layers holds what it owns of them, and what it is the first follower of. It is sent
    the others behind that, as fast as leaves a step at most `SLOWDOWN_MAX` times as long. After a loss nothing has to
    be made again in such a stage.

    Args:
        costs: of the layers.
        link: what copies have of one, at most.
        placing: how many followers there are, how they are chosen, and made again.
    """

    def __init__(self, costs: Costs, link: NetworkLink, placing: Placing) -> None:
        self._costs, self._state_bytes = costs, costs.prefix["optimizer_bytes"]
        self._link, self._placing = link, placing
        self._placed: PlacedBlocks | None = None
        self._gone: dict[int, float] = {}
        """Lost workers -> when their copies have been made again."""
        self._next: tuple[float, Allocation, Cluster] | None = None
        """The layout that copies travel to, and when the fewest are there."""
        self._filling: list[_Filling] = []
        self._step_s = 0.0
        self._bytes_per_step = 0.0
        """The budget of copies."""
        self.filled_s = 0.0
        """When all copies are there."""
        self.slower = 0.0
        """Share by which a step takes longer until then."""

    def begin(self, plan: Plan, there: Cluster) -> None:
        """Does what `HeldState` says: all blocks are placed afresh."""
        self._placed, self._gone, self._next = self._placed_by(plan, there), {}, None
        self._filling, self.filled_s = [], 0.0
        self._set_budget(plan, there)

    def lose(self, now_s: float, workers: Collection[int]) -> bool:
        """Does what `HeldState` says."""
        placed = self._settled(now_s)
        few = [each[:3] for each in self._filling if each.from_s <= now_s]
        if placed.lost_with((*self._gone, *workers), few):
            return True
        for worker in workers:
            if any(placed.shares(worker)):
                self._gone[worker] = now_s + self._refill_s(placed, worker, few)
        return False

    def adopt(self, now_s: float, plan: Plan, there: Cluster, copied_s: float) -> float:
        """Does what `HeldState` says: missing followers are made first, then copies travel to where the plan wants
        them."""
        self._set_budget(plan, there)
        begins_s = max((now_s, *self._gone.values()))
        longest_s = max(copies_s(plan, self._link).values(), default=0.0)
        further = self._further_copies(self._placed_by(plan, there), plan)
        before_s = max((seconds for layers, _, seconds in further if layers.followers != WHOLE_STAGE), default=0.0)
        at_s = max(begins_s + longest_s, copied_s) + before_s
        self._next = (at_s, plan.allocation, there)
        waiting = [each._replace(from_s=max(each.from_s, at_s)) for each in self._filling if each.from_s > now_s]
        self._filling = [each for each in self._filling if each.from_s <= now_s] + waiting
        for layers, worker, seconds in further:
            if layers.followers == WHOLE_STAGE:
                self._filling.append(_Filling(worker, layers.start, layers.stop, at_s, seconds))
        self.filled_s = max((each.from_s + each.seconds for each in self._filling), default=0.0)
        return at_s

    @property
    def state_share(self) -> np.ndarray:
        """Does what `HeldState` says."""
        assert self._placed is not None, "no job has begun"
        return self._placed.state_share

    def _placed_by(self, plan: Plan, there: Cluster) -> PlacedBlocks:
        return PlacedBlocks.of(plan.allocation, there, self._placing, self._costs)

    def _set_budget(self, plan: Plan, there: Cluster) -> None:
        """Finds what a worker sends of copies in a step, and how much longer a step takes for it."""
        self._step_s = step_s = plan.predicted_step_s
        most, link = self._placing.refill_bytes_per_step, there.between_nodes.bandwidth_bytes_per_s
        num_bytes = min(self._link.bandwidth_bytes_per_s * step_s, MOVE_BYTES_MAX if most is None else most)
        self.slower = _slower_by(there, self._costs, plan.allocation, num_bytes / step_s / link) / step_s
        while self.slower > SLOWDOWN_MAX - 1 and num_bytes > MOVE_BYTES_MIN:
            num_bytes /= 2
            self.slower = _slower_by(there, self._costs, plan.allocation, num_bytes / step_s / link) / step_s
        self._bytes_per_step = num_bytes

    def _sending_s(self, num_bytes: float) -> float:
        """Computes the seconds until so much has been sent. A copy counts with the commit of the step in which it
        travels, so it takes a step at least."""
        num_steps = max(1, ceil(num_bytes / self._bytes_per_step))
        return max(self._link.transfer_s(num_bytes), num_steps * self._step_s)

    def _further_copies(self, coming: PlacedBlocks, plan: Plan) -> list[tuple[LayerRange, int, float]]:
        """Lists the layers of which a plan sends workers fewer copies than they will hold, the worker, and the seconds
        until it has been sent the others."""
        sent = max(DEFAULT_FOLLOWERS, self._placing.planned_followers)
        lacking: list[tuple[LayerRange, set[int]]] = []
        received: dict[int, float] = {}
        longest_s = 0.0
        for layers in coming.ranges:
            further, width = coming.num_followers(layers) - sent, len(layers.members)
            workers = {
                worker
                for transfer in plan.transfers
                if transfer.start < layers.stop and layers.start < transfer.stop
                for worker in transfer.workers
            }
            if further <= 0 or not workers:
                continue
            state_bytes = float(self._state_bytes[layers.stop] - self._state_bytes[layers.start])
            each = state_bytes * min(further, width) / width
            for worker in workers:
                received[worker] = received.get(worker, 0.0) + each
            # Those that have all copies send; where nobody has, all do.
            senders = len(set(layers.members.tolist()) - workers) or width
            longest_s = max(longest_s, self._sending_s(each * len(workers) / senders))
            lacking.append((layers, workers))
        return [
            (layers, worker, max(longest_s, self._sending_s(received[worker])))
            for layers, workers in lacking
            for worker in sorted(workers)
        ]

    def _settled(self, now_s: float) -> PlacedBlocks:
        """Finds who holds blocks by now."""
        placed = self._placed
        assert placed is not None, "no job has begun"
        self._filling = [each for each in self._filling if now_s < each.from_s + each.seconds]
        back = [worker for worker, at_s in self._gone.items() if at_s <= now_s]
        for worker in back:
            del self._gone[worker]
        if self._next is not None and self._next[0] <= now_s:
            _, allocation, there = self._next
            placed, self._next = placed.moved_to(allocation, there, self._costs), None
        elif back:
            placed = placed.without(back)
        self._placed = placed
        return placed

    def _refill_s(self, placed: PlacedBlocks, worker: int, few: Collection[tuple[int, int, int]]) -> float:
        """Computes the seconds until the copies that a worker had are elsewhere; returns 0 if none have to be made.

        It owned a share of its layers' state, and followed as much for each follower that a block has. Those who hold
        the other copies send them, each over its own link. Where all of a stage follow, the others hold them already,
        unless all of these are still being filled up.
        """
        missing = 0.0
        for layers in placed.shares(worker):
            number = placed.num_followers(layers)
            if layers.followers == WHOLE_STAGE:
                absent = {each for each, start, stop in few if start < layers.stop and layers.start < stop}
                if not absent.union(self._gone, (worker,)).issuperset(layers.members.tolist()):
                    continue
                number = 1
            state_bytes = float(self._state_bytes[layers.stop] - self._state_bytes[layers.start])
            missing += state_bytes / len(layers.members) * (1 + number)
        return self._sending_s(missing / placed.num_senders(worker)) if missing else 0.0


class HeldWhole:
    """State of which each worker holds all that its stage, or its group, has.

    Args:
        link: that copies travel over.
        copies: who holds what, of an allocation and of the workers of it that do not hold theirs yet.
    """

    filled_s = slower = 0.0
    state_share = 1.0

    def __init__(self, link: NetworkLink, copies: Callable[[Allocation, Collection[int]], ReplicaSet]) -> None:
        self._link, self._copies = link, copies
        self._allocation: Allocation | None = None
        self._arriving: dict[int, float] = {}
        """Workers that are being sent their state -> when they hold it."""

    def begin(self, plan: Plan, there: Cluster) -> None:
        """Does what `HeldState` says."""
        self._allocation, self._arriving = plan.allocation, {}

    def lose(self, now_s: float, workers: Collection[int]) -> bool:
        """Does what `HeldState` says."""
        assert self._allocation is not None, "no job has begun"
        self._arriving = {worker: at_s for worker, at_s in self._arriving.items() if at_s > now_s}
        return self._copies(self._allocation, self._arriving).lost_with(workers)

    def adopt(self, now_s: float, plan: Plan, there: Cluster, copied_s: float) -> float:
        """Does what `HeldState` says."""
        self._allocation = plan.allocation
        if not plan.from_checkpoint:
            for worker, seconds in copies_s(plan, self._link).items():
                self._arriving[worker] = max(now_s + seconds, copied_s)
        return copied_s


def copies_s(plan: Plan, link: NetworkLink) -> dict[int, float]:
    """Computes the seconds until each worker has what a plan sends it, over its own link."""
    received: dict[int, float] = {}
    for transfer in plan.transfers:
        for worker in transfer.workers:
            received[worker] = received.get(worker, 0.0) + transfer.num_bytes / len(transfer.workers)
    return {worker: link.transfer_s(num_bytes) for worker, num_bytes in received.items()}


def held_state(replication: Replication, costs: Costs, link: NetworkLink, placing: Placing) -> HeldState:
    """Makes the copies of a policy's job; takes arguments as `HeldBlocks` does."""
    if replication.unit == "blocks":
        return HeldBlocks(costs, link, placing)
    return HeldWhole(link, WHOLE[replication.unit])


class BackgroundTransfer(NamedTuple):
    """On their way."""

    seconds: float
    """Until all are there."""
    step_s: float
    """Of training meanwhile."""
    num_microbatches: int
    """Of such a step."""
    power_w: float
    """That it draws."""


def background_transfer_of(
    cluster: Cluster, costs: Costs, before: Plan, plan: Plan, event: ClusterEvent, times: RecoveryTimes
) -> BackgroundTransfer | None:
    """Finds what a plan has copied in the background; returns None if it is nothing.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        before: in force until then.
        plan: made after the event.
        event: what happened.
        times: of recovery.
    """
    if plan.interim_step_s is not None:
        number = plan.allocation.num_microbatches
        return BackgroundTransfer(plan.copy_s, plan.interim_step_s, number, plan.power_w)
    # Baselines copy for those that come while the others go on; after a loss training stands still for it, and those
    # that begin again read a checkpoint.
    if not plan.transfers or event.kind not in ("joined", "slowed") or plan.predicted_pause_s >= times.restart_s:
        return None
    sources = Sources.of_stages(costs, stages_of(before.allocation))
    link = cluster.between_nodes
    seconds = max(receiving_s(link, plan.transfers), sources.sending_s(link, costs, plan.transfers)) / times.copy_share
    added_s = _slower_by(cluster, costs, before.allocation, times.copy_share)
    return BackgroundTransfer(
        seconds, before.predicted_step_s + added_s, before.allocation.num_microbatches, before.power_w
    )


def _slower_by(cluster: Cluster, costs: Costs, allocation: Allocation, share: float) -> float:
    """Computes the seconds that a step takes longer, in closed form, while copies take a share of the links."""
    slower, with_less = shared_links(cluster, costs, share)
    return step_s(slower, with_less, allocation, "bound") - step_s(cluster, costs, allocation, "bound")
