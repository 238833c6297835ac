"""What a planner chooses between, built worker by worker, timed and weighed against a horizon. Pure.

In the order in which a plan is made: what it may do (`Options`), who is left of the job and what they hold
(`Survivors`), candidates and who judges them (`Candidate`, `Judge`), and what a plan says of itself. A
candidate is worth what it gets done until the next event is to be expected, the time to move its state included. One
that cannot do as much as the best one so far is not timed to the end: its step counts as infinitely long.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent, EventKind, worker_power
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.costs.schedules import SCHEDULES, Schedule
from elaswave.planning.frequency import check_power, common_levels
from elaswave.planning.plan import Allocation, StateTransfer
from elaswave.planning.programs.prediction import EXACT_ACTIONS, Estimate, time_within_memory
from elaswave.planning.search.shapes import Shape, build
from elaswave.planning.state_moves.transfers import Sources, needed_transfers

Axis = Literal["dataflow", "graph", "frequency", "randomness"]
AXES: frozenset[Axis] = frozenset({"dataflow", "graph", "frequency", "randomness"})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a plan may do."""

    axes: frozenset[Axis] = AXES
    horizon_s: float | None = None
    """Expected time until the next event; None means as public failure rates say for so many workers."""
    move_workers: bool = True
    """Whether workers may change stage."""
    share_layers: bool = True
    """Whether neighbouring stages may share layers."""
    mix_depths: bool = True
    """Whether pipelines of different depth may run side by side, if workers may change stage."""
    leave_out: bool = True
    """Whether workers may be left without work, as spares that hold copies: slow ones, or those that make a layout
    uneven."""
    schedules: tuple[Schedule, ...] | None = None
    """To choose from; None means the job's own and ``zero-bubble-h2``."""
    followers: int = DEFAULT_FOLLOWERS
    """Live copies of every block."""
    exact_actions: int = EXACT_ACTIONS
    """Candidates of at most so many actions are timed exactly, in jobs of at most `EXACT_WORKERS` workers."""
    pause_s: float = RecoveryTimes().recover_s
    """Predicted pause after a loss, where no state has to be fetched."""
    join_pause_s: float = RecoveryTimes().join_s
    """The same where workers join or leave, for their new generation."""
    move_pause_s: float = RecoveryTimes().move_s
    """And for a change of layout whose blocks have been copied in the background."""
    copy_share: float = RecoveryTimes().copy_share
    """Of the links' bandwidth that such copies take."""

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: with every field that cannot be.
        """
        problems = [
            f"{name} is {sorted(set(given) - set(known))}, needed: of {', '.join(sorted(known))}"
            for name, given, known in (
                ("axes", self.axes, AXES),
                ("schedules", self.schedules or (), SCHEDULES),
            )
            if not set(given) <= set(known)
        ]
        if self.schedules == ():
            problems.append("schedules are none, needed: at least one, or None for the job's own and zero-bubble-h2")
        if self.horizon_s is not None and not 0 < self.horizon_s < float("inf"):
            problems.append(f"horizon_s is {self.horizon_s}, needed: above 0 and finite")
        if not 0 < self.copy_share < 1:
            problems.append(f"copy_share is {self.copy_share}, needed: above 0 and below 1")
        problems += [
            f"{name} is {value}, needed: finite and at least 0"
            for name in ("followers", "exact_actions", "pause_s", "join_pause_s", "move_pause_s")
            if not 0 <= (value := getattr(self, name)) < float("inf")
        ]
        if problems:
            raise ValueError("options of a plan are impossible: " + "; ".join(problems))

    def pause_of(self, kind: EventKind, *, moves: bool) -> float:
        """Predicts the pause where no state has to be fetched.

        Args:
            kind: of the event.
            moves: whether blocks go to other workers, so that a change of layout follows.
        """
        pause_s = moves * self.move_pause_s
        if kind == "slowed":
            return pause_s
        return pause_s + (self.pause_s if kind == "lost" else self.join_pause_s)

    def horizon(self, num_workers: int) -> float:
        """Computes the expected seconds until the next event of so many workers."""
        return RecoveryTimes(horizon_s=self.horizon_s).horizon(num_workers)


class Survivors(NamedTuple):
    """Workers by position in the cluster; arrays have one entry for each of them."""

    gone: np.ndarray
    """Ids of those that the event takes away."""
    start: np.ndarray
    """First layer that each has had; start = stop for those without one."""
    stop: np.ndarray
    levels: np.ndarray
    """Frequency level that each has had, -1 without one."""
    stages: list[np.ndarray]
    """Positions of the workers of each stage, ascending; a pipeline's of another depth belong to the nearest stage."""
    free: np.ndarray
    """Positions of those in no stage."""

    @property
    def held(self) -> np.ndarray:
        """int64 [workers of the cluster, 2]: layers [start, stop) that each has held."""
        return np.stack([self.start, self.stop], axis=1)


def survivors_of(cluster: Cluster, before: Allocation, event: ClusterEvent) -> Survivors:
    """Finds who is left, and what they have had.

    Args:
        cluster: after the event.
        before: the allocation before it.
        event: what happened.
    """
    ids = cluster.ids
    num_workers = len(ids)
    gone = np.array(event.workers if event.kind in ("lost", "drained") else (), dtype=np.int64)
    starts, stops, levels = np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64), np.full(num_workers, -1)
    chains = sorted(before.chains, key=lambda chain: -len(chain.stages))
    middles = np.array([(share.start + share.stop) / 2 for share in chains[0].stages])
    members: list[list[np.ndarray]] = [[] for _ in middles]
    available = np.ones(num_workers, dtype=bool)
    still = np.minimum(np.searchsorted(ids, gone), num_workers - 1)
    available[still[ids[still] == gone]] = False
    for chain in chains:
        for share in chain.stages:
            where = np.searchsorted(ids, share.workers)
            there = np.minimum(where, num_workers - 1)
            left = (ids[there] == share.workers) & available[there]
            own = there[left]
            available[own] = False
            starts[own], stops[own], levels[own] = share.start, share.stop, share.levels[left]
            nearest = int(np.argmin(np.abs(middles - (share.start + share.stop) / 2)))
            members[nearest].append(own)
    stages = [np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0] for parts in members]
    return Survivors(gone, starts, stops, levels, stages, np.flatnonzero(available))


def start_levels(cluster: Cluster, before: np.ndarray, *, may_change: bool) -> np.ndarray:
    """Levels before any is chosen: common ones; where none may be chosen workers keep theirs, if power permits.

    Args:
        cluster: the workers.
        before: level of each, -1 without one.
        may_change: whether levels are chosen later.
    """
    all_workers = np.arange(cluster.num_workers)
    common = common_levels(cluster, all_workers)
    if may_change:
        return common
    kept = np.where(before >= 0, before, common)
    draw = float(worker_power(cluster, all_workers, kept)[0].sum())
    return kept if cluster.power_limit_w is None or draw <= cluster.power_limit_w * (1 + 1e-9) else common


SLACK = 1e-6
"""Relative: steps that are longer than the best one by less are timed exactly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """An allocation and what it brings."""

    allocation: Allocation
    origin: str
    step_s: float
    """Infinite if it is known to do less until the horizon than another candidate."""
    found: Estimate
    where: np.ndarray
    """Positions of its workers in the cluster, in the order of `found`."""
    transfers: tuple[StateTransfer, ...] = ()
    transfer_s: float = 0.0

    def done_until(self, horizon_s: float) -> float:
        """Computes the steps until the horizon, if training stood still while state moves."""
        return max(0.0, horizon_s - self.transfer_s) / self.step_s if self.step_s else float("inf")


class Judge:
    """Makes candidates of shapes and allocations, one after the other.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        before: the allocation before the event.
        left: who is left of it.
        levels: frequency level of every worker of the cluster.
        options: of the planner.
        exact_actions: steps of at most so many actions are timed exactly.
    """

    def __init__(
        self, cluster: Cluster, costs: Costs, before: Allocation, left: Survivors, levels: np.ndarray,
        options: Options, exact_actions: int,
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._costs = costs
        self._left = left
        self._levels = levels
        self._options = options
        self._exact_actions = exact_actions
        self.sources = Sources.of(costs, before, left.start, left.stop)
        self.horizon_s = options.horizon(cluster.num_workers)
        self.failure: InfeasiblePlan | None = None
        """Why something could not be: the last of what a plan cannot do without, or the first of other candidates."""
        self._most_done = 0.0
        """By any candidate so far, until the horizon."""

    def of_shape(self, shape: Shape, schedule: Schedule) -> Candidate | None:
        """Makes a candidate of a shape; returns None if it does not keep to the limits of memory and power."""
        try:
            allocation = build(
                self._cluster,
                self._costs,
                shape,
                schedule,
                self._levels,
                by_speed="dataflow" in self._options.axes,
                followers=self._options.followers,
            )
            return self.of_allocation(allocation, shape.origin, np.concatenate(shape.members))
        except InfeasiblePlan as failure:
            self.failure = self.failure or failure
            return None

    def of_allocation(self, allocation: Allocation, origin: str, where: np.ndarray | None = None) -> Candidate:
        """Makes a candidate of an allocation.

        Args:
            allocation: who does how much.
            origin: how it came about.
            where: positions of its workers in the cluster, in order, if they are known.
        Raises:
            InfeasiblePlan: it takes more memory or power than there is.
        """
        if where is None:
            where = self._cluster.index_of(
                np.concatenate([share.workers for chain in allocation.chains for share in chain.stages])
            )
        transfers, seconds = needed_transfers(
            self._cluster,
            self._costs,
            allocation,
            where,
            self._left.start,
            self._left.stop,
            sources=self.sources,
            followers=self._options.followers,
        )
        step_s, found = self.timed(allocation, where, within_s=self._worth_s(seconds))
        check_power(self._cluster, found.peak_power_w)
        candidate = Candidate(
            allocation=allocation,
            origin=origin,
            step_s=step_s,
            found=found,
            where=where,
            transfers=transfers,
            transfer_s=seconds,
        )
        self._most_done = max(self._most_done, candidate.done_until(self.horizon_s))
        return candidate

    def _worth_s(self, transfer_s: float) -> float:
        """Steps that take longer than this, after so many seconds of moving state, need not be timed exactly: less
        would be done until the horizon than by a candidate that is known."""
        if not 0 < self._most_done < float("inf"):
            return float("inf")
        return max(0.0, self.horizon_s - transfer_s) / self._most_done * (1 + SLACK)

    def timed(
        self,
        allocation: Allocation,
        where: np.ndarray,
        *,
        within_s: float = float("inf"),
        known: Estimate | None = None,
    ) -> tuple[float, Estimate]:
        """Computes the seconds of a step, with fewer micro-batches in flight where memory is short, and what else it
        takes.

        Args:
            allocation, where: as of `of_allocation`.
            within_s: steps that are not shorter count as infinitely long.
            known: of the same chains, under another schedule.
        Raises:
            InfeasiblePlan: it does not fit into memory.
        """
        timed = time_within_memory(
            self._cluster,
            self._costs,
            allocation,
            followers=self._options.followers,
            exact_actions=self._exact_actions,
            where=where,
            within_s=within_s,
            known=known,
        )
        # Remembered steps are told though they are longer: what is chosen must not depend on what was asked before.
        return timed.step_s if timed.step_s < within_s else float("inf"), timed.found


NOTHING_MOVED = (
    "draws keyed by (run seed, step, micro-batch, layer, purpose), samples by (data seed, step, micro-batch): "
    "nothing to move"
)
"""Of the randomness axis, for which no plan moves anything. Other systems must carry generator states along when a
micro-batch or a layer changes its worker, or lose them with it. Here a draw is keyed by what it is for
(`elaswave.hashing`, `elaswave.devices.interface`), and the samples of a micro-batch by its number
(`elaswave.data.samples`), so every plan leaves the draws as they are, for nothing."""


def contributions_of(
    axes: Collection[str], tuned: Candidate, best: Candidate, staying: Candidate | None, even_s: float | None
) -> Mapping[str, str]:
    """Axis -> what it brought, or "off".

    Args:
        axes: that a plan may use.
        tuned: the candidate that was chosen, at the levels that were chosen.
        best: the same at the levels of before.
        staying: all workers where they are; None if that is impossible.
        even_s: seconds of a step of `staying` in closed form if micro-batches were not dealt by speed; None without it.
    """
    brought: dict[str, str] = dict.fromkeys(sorted(AXES), "off")
    if "randomness" in axes:
        brought["randomness"] = NOTHING_MOVED
    if staying is None or even_s is None:
        forced = "rerouting alone does not fit into memory"
        brought["dataflow"] = forced if "dataflow" in axes else "off"
        brought["graph"] = f"{best.origin}: {forced}" if "graph" in axes else "off"
    else:
        if "dataflow" in axes:
            brought["dataflow"] = f"micro-batches by speed: {_change(even_s, staying.found.step_s)}"
        if "graph" in axes:
            brought["graph"] = f"{best.origin}: {_change(staying.step_s, best.step_s)}"
    if "frequency" in axes:
        power = f", {tuned.found.power_w:.0f} W instead of {best.found.power_w:.0f} W"
        same = tuned is best or not best.found.power_w
        brought["frequency"] = f"{_change(best.step_s, tuned.step_s)}{'' if same else power}"
    return brought


def reason_of(tuned: Candidate, staying: Candidate | None) -> str:
    """Writes the reason in one line; takes arguments as `contributions_of` does."""
    found = tuned.found
    share = found.pace_s / tuned.step_s if tuned.step_s else 1.0
    compared = "rerouting alone does not fit" if staying is None else (
        f"rerouting alone: {_shown(staying.step_s)}"
    )  # fmt: skip
    return (
        f"{tuned.origin}, {tuned.allocation.schedule}: {_shown(tuned.step_s)} per step ({compared}); worker "
        f"{found.bottleneck_worker} of stage {found.bottleneck_stage} computes for {100 * share:.0f} % of it"
    )


def _change(before_s: float, after_s: float) -> str:
    if abs(before_s - after_s) <= 1e-9 * before_s:
        return "nothing to gain"
    return f"{_shown(before_s)} to {_shown(after_s)} per step ({100 * (after_s / before_s - 1):+.1f} %)"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"
