"""What a planner chooses between, built worker by worker, timed and weighed against a horizon. Pure.

A candidate is worth what it gets done until the next event is to be expected, the time to move its state included.
Candidates that cannot do as much as the best one so far are not timed to the end: their steps count as infinitely long.
"""

from dataclasses import dataclass

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.frequency import check_power
from elaswave.planning.plan import Allocation, StateTransfer
from elaswave.planning.programs.prediction import Estimate, time_within_memory
from elaswave.planning.search.options import Options
from elaswave.planning.search.shapes import Shape, build
from elaswave.planning.search.survivors import Survivors
from elaswave.planning.state_moves.transfers import Sources, needed_transfers

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
        """Steps until the horizon, if training stood still while state moves."""
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
        """A shape as a candidate; None if it does not keep to the limits of memory and power."""
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
        """An allocation as a candidate.

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
        """Seconds of a step, with fewer micro-batches in flight where memory is short, and what else it takes.

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
