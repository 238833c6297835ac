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

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.policy.replication import WHOLE, ReplicaSet, Replication
from elaswave.planning.programs.prediction import stages_of, step_s
from elaswave.planning.state_moves.placed_blocks import PlacedBlocks, Placing
from elaswave.planning.state_moves.transfers import Sources, receiving_s, shared_links


class HeldState(Protocol):
    """The copies of a job over time; times are the scenario's, in seconds."""

    def begin(self, plan: Plan, there: Cluster) -> None:
        """All workers hold what a plan says: at the start, and after a checkpoint was loaded."""
        ...

    def lose(self, now_s: float, workers: Collection[int]) -> bool:
        """Takes workers away without notice; whether something has no holder left then."""
        ...

    def adopt(self, now_s: float, plan: Plan, there: Cluster, copied_s: float) -> None:
        """A plan comes into force: state travels to those whom it wants to hold it, until `copied_s` at least."""
        ...


class HeldBlocks:
    """Blocks with owner and followers, as the engine places and refills them.

    Args:
        costs: of the layers.
        link: what copies have of one.
        placing: how many followers there are, how they are chosen, and made again.
    """

    def __init__(self, costs: Costs, link: NetworkLink, placing: Placing) -> None:
        self._state_bytes = costs.prefix["optimizer_bytes"]
        self._link, self._placing = link, placing
        self._placed: PlacedBlocks | None = None
        self._gone: dict[int, float] = {}
        """Lost workers -> when their copies have been made again."""
        self._next: tuple[float, Allocation, Cluster] | None = None
        """The layout that copies travel to, and when all are there."""
        self._step_s = 0.0

    def begin(self, plan: Plan, there: Cluster) -> None:
        """Does what `HeldState` says: all blocks are placed afresh."""
        self._placed, self._gone, self._next = PlacedBlocks.of(plan.allocation, there, self._placing), {}, None
        self._step_s = plan.predicted_step_s

    def lose(self, now_s: float, workers: Collection[int]) -> bool:
        """Does what `HeldState` says."""
        placed = self._settled(now_s)
        if placed.lost_with((*self._gone, *workers)):
            return True
        for worker in workers:
            if (seconds := self._refill_s(placed, worker)) > 0:
                self._gone[worker] = now_s + seconds
        return False

    def adopt(self, now_s: float, plan: Plan, there: Cluster, copied_s: float) -> None:
        """Does what `HeldState` says: missing followers are made first, then copies travel to where the plan wants
        them."""
        self._step_s = plan.predicted_step_s
        begins_s = max((now_s, *self._gone.values()))
        longest_s = max(copies_s(plan, self._link).values(), default=0.0)
        self._next = (max(begins_s + longest_s, copied_s), plan.allocation, there)

    def _settled(self, now_s: float) -> PlacedBlocks:
        """Finds who holds blocks by now."""
        placed = self._placed
        assert placed is not None, "no job has begun"
        back = [worker for worker, at_s in self._gone.items() if at_s <= now_s]
        for worker in back:
            del self._gone[worker]
        if self._next is not None and self._next[0] <= now_s:
            _, allocation, there = self._next
            placed, self._next = placed.moved_to(allocation, there), None
        elif back:
            placed = placed.without(back)
        self._placed = placed
        return placed

    def _refill_s(self, placed: PlacedBlocks, worker: int) -> float:
        """Computes the seconds until the copies that a worker had are elsewhere; returns 0 if it held none.

        It owned a share of its layers' state, and followed as much for each follower that a block has. Those who hold
        the other copies send them, each over its own link. A copy counts with the commit of the step in which it
        travels, so it takes a step at least.
        """
        owned = sum(
            float(self._state_bytes[layers.stop] - self._state_bytes[layers.start]) / width
            for layers, width in placed.shares(worker)
        )
        if not owned:
            return 0.0
        sent = owned * (1 + self._placing.followers) / placed.num_senders(worker)
        most = self._placing.refill_bytes_per_step
        num_steps = 1 if most is None else ceil(sent / most)
        return max(self._link.transfer_s(sent), num_steps * self._step_s)


class HeldWhole:
    """State of which each worker holds all that its stage, or its group, has.

    Args:
        link: that copies travel over.
        copies: who holds what, of an allocation and of the workers of it that do not hold theirs yet.
    """

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

    def adopt(self, now_s: float, plan: Plan, there: Cluster, copied_s: float) -> None:
        """Does what `HeldState` says."""
        self._allocation = plan.allocation
        if not plan.from_checkpoint:
            for worker, seconds in copies_s(plan, self._link).items():
                self._arriving[worker] = max(now_s + seconds, copied_s)


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
