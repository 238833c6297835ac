"""Allocations of small jobs made better step by step: a bounded local search with exact times. Pure.

Layouts are chosen in closed form, which divides micro-batches and layers as evenly as it can. Where there are few, the
exact step may be shorter otherwise: the worker that ends last has a micro-batch less, the first and the last stage,
which wait for others, have other layers. From each of several allocations the search goes to a neighbour
(`elaswave.planning.search.neighbours`) with a shorter step until there is none. Neighbours that a lower bound rules out
are not timed, and none is timed twice.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import splits_backwards
from elaswave.planning.plan import Allocation, Chain, StageShare, num_actions
from elaswave.planning.programs.prediction import stages_of, step_s
from elaswave.planning.programs.shared_layers import Cut
from elaswave.planning.search.memory_limits import memory_limits
from elaswave.planning.search.neighbours import Neighbourhood

STARTS = 30
"""Allocations from which a search starts."""
ACTIONS_MAX = 45_000
"""Of all steps that a search times together; `ACTIONS_OF_ANY` come on top for each."""
ACTIONS_OF_ANY = 100
"""A step takes as long to time as so many actions, however few it has."""
_LESS = 1 - 1e-9
"""A step that is not shorter by more than rounding is no better."""


class _Hops(NamedTuple):
    """A stage's seconds of a micro-batch on a worker of speed 1, the shortest, and of all of them together."""

    forward: float
    back: float
    """Gradient of the input, and of the weights unless backwards are split."""
    weights: float
    all_ways: float
    """Of all micro-batches: forward and back."""
    all_weights: float


class LocalSearch:
    """Goes from allocations to better ones.

    Args:
        cluster: of the workers.
        costs: of the layers.
        steps: which there are.
        followers: live copies of every block, for memory.
    """

    def __init__(self, cluster: Cluster, costs: Costs, steps: Neighbourhood, *, followers: int) -> None:
        self._cluster = cluster
        self._costs = costs
        self._steps = steps
        self._followers = followers
        rooms = zip(cluster.ids.tolist(), cluster.memory_bytes.tolist(), strict=True)
        self._kinds = {worker: (steps.speeds[worker], steps.levels[worker], room) for worker, room in rooms}
        self._prefix = [costs.prefix[f"{name}_s"].tolist() for name in ("forward", "input_gradient", "weight_gradient")]
        self._known: set[Hashable] = set()
        self._actions_left = ACTIONS_MAX

    def starts(self, ranked: Sequence[Allocation]) -> list[int]:
        """From which allocations to start, by index: the best ones of every number of stages, in turns.

        Args:
            ranked: all that there are, the best first.
        """
        known: set[Hashable] = set()
        numbers: Counter[tuple[int, ...]] = Counter()
        turns = []
        for index, allocation in enumerate(ranked):
            key, depths = self._key(allocation), tuple(sorted(len(chain.stages) for chain in allocation.chains))
            if key not in known:
                known.add(key)
                turns.append((numbers[depths], index))
                numbers[depths] += 1
        return [index for _, index in sorted(turns)[:STARTS]]

    def improved(self, allocation: Allocation, seconds: float) -> tuple[Allocation, float]:
        """An allocation than which no neighbour is better, or the best one when the search's bound is reached.

        Args:
            allocation: to start from.
            seconds: of its step.
        Returns:
            The allocation and the seconds of its step.
        """
        self._known.add(self._key(allocation))
        while self._actions_left > 0:
            offers: list[tuple[float, int, Allocation]] = []
            for other in self._steps.of(allocation):
                least_s = self.least_s(other)
                if least_s < seconds * _LESS:
                    offers.append((least_s, len(offers), other))
            for _, _, other in sorted(offers, key=lambda each: each[:2]):
                found_s = self._timed_s(other, seconds * _LESS)
                if found_s < seconds * _LESS:
                    allocation, seconds = other, found_s
                    break
            else:
                break
        return allocation, seconds

    def _timed_s(self, allocation: Allocation, within_s: float) -> float:
        """Seconds of a step; infinite if it is not shorter than that, is known or cannot be."""
        key = self._key(allocation)
        if key in self._known or self._actions_left <= 0:
            return float("inf")
        self._known.add(key)
        self._actions_left -= num_actions(allocation) + ACTIONS_OF_ANY
        try:
            limits = memory_limits(self._cluster, self._costs, allocation, followers=self._followers)
            bounds = None if limits is None else limits.as_mapping()
            return step_s(self._cluster, self._costs, allocation, "exact", max_in_flight=bounds, within_s=within_s)
        except (InfeasiblePlan, ValueError):  # it does not fit, or its chains are no layout together
            return float("inf")

    def _key(self, allocation: Allocation) -> Hashable:
        """The same for allocations that differ in which of alike workers has what."""
        chains = []
        for chain in allocation.chains:
            stages = []
            for share in chain.stages:
                own = zip(share.workers.tolist(), share.num_microbatches.tolist(), strict=True)
                alike = sorted((self._kinds[worker], number) for worker, number in own)
                stages.append((share.start, share.stop, tuple(alike)))
            chains.append((tuple(stages), tuple(tuple(sorted(cut.items())) for cut in chain.cuts)))
        return allocation.schedule, allocation.spares_slow, tuple(sorted(chains))

    def least_s(self, allocation: Allocation) -> float:
        """Seconds that no order of a step's actions gets below.

        As `elaswave.planning.costs.step_time.bound.least_s`, but nearer where micro-batches are few, and quick for few
        workers.
        """
        is_split = splits_backwards(allocation.schedule)
        longest = max(self._chain_s(chain, is_split=is_split) for chain in allocation.chains)
        return longest + self._costs.overhead_s(stages_of(allocation))

    def _chain_s(self, chain: Chain, *, is_split: bool) -> float:
        """A worker waits for its first input and does all its work, or all but its weight gradients before the last
        gradient goes back to the first stage, whose weight gradient follows; and a micro-batch goes there and back to
        each stage, whose weight gradient follows."""
        number = chain.num_microbatches
        ends: list[Cut] = [{0: number}, *chain.cuts, {self._costs.num_layers: number}]
        there = back = first_weights = longest = 0.0
        ways: list[tuple[float, float]] = []
        for share, (starts, stops) in zip(chain.stages, pairwise(ends), strict=True):
            hops = self._hops(starts, stops, number, is_split=is_split)
            rounds, capacity, fastest = self._paces(share)
            weights = hops.weights / fastest
            if not ways:
                first_weights = weights
            way = max((hops.forward + hops.back) * rounds, hops.all_ways / capacity)
            whole = max(
                (hops.forward + hops.back + hops.weights) * rounds, (hops.all_ways + hops.all_weights) / capacity
            )
            longest = max(longest, there + max(whole, way + max(hops.weights * rounds, back + first_weights)))
            there, back = there + hops.forward / fastest, back + hops.back / fastest
            ways.append((hops.back / fastest, weights))
        for back_s, weights in reversed(ways):
            there += back_s
            longest = max(longest, there + weights)
        return longest

    def _hops(self, starts: Cut, stops: Cut, number: int, *, is_split: bool) -> _Hops:
        """Of a stage whose micro-batches start and stop at these layers."""
        first, last = max(starts), min(stops)
        forward, back, weights = (max(0.0, own[last] - own[first]) for own in self._prefix)
        if len(starts) == len(stops) == 1:
            all_forward, all_back, all_weights = number * forward, number * back, number * weights
        else:
            all_forward, all_back, all_weights = (
                sum(own[layer] * n for layer, n in stops.items()) - sum(own[layer] * n for layer, n in starts.items())
                for own in self._prefix
            )
        if not is_split:
            back, weights = back + weights, 0.0
            all_back, all_weights = all_back + all_weights, 0.0
        return _Hops(forward, back, weights, all_forward + all_back, all_weights)

    def _paces(self, share: StageShare) -> tuple[float, float, float]:
        """Of workers with micro-batches: the most over speed, all speeds together, and the highest."""
        rounds = capacity = fastest = 0.0
        for worker, count in zip(share.workers.tolist(), share.num_microbatches.tolist(), strict=True):
            if count:
                speed = self._steps.speeds[worker]
                rounds, capacity, fastest = max(rounds, count / speed), capacity + speed, max(fastest, speed)
        return rounds, capacity, fastest
