"""Allocations that differ from one in a single step: what `elaswave.planning.search.local_search` goes through. Pure.

- A micro-batch goes from one worker of a stage to another one, or from one pipeline to another.
- Micro-batches are cut a layer earlier or later: one of them, or all that are cut at a layer, or all.
- A worker goes to another stage, or comes from outside, or two of different speeds change places; micro-batches of such
  stages are dealt anew, by speed.

Where neighbouring stages share layers, these are also shared anew, as suits micro-batches and workers, with stages
equally busy or such that they end together. Where workers of a stage that shares layers have several speeds, each step
comes in two ways: its layers dealt by speed, and so that the slow ones are spared. Workers of one speed are alike: of
steps that differ in nothing else there is one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.schedules import splits_backwards
from elaswave.planning.plan import Allocation, Chain, StageShare
from elaswave.planning.programs.shared_layers import Cut, held_ranges, loads_with_waits, share_layers, widen_cuts
from elaswave.planning.search.apportionment import apportion

Place = tuple[int, int]
"""A chain and one of its stages, by index."""


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """Which single steps there are."""

    costs: Costs
    """Of the layers."""
    speeds: Mapping[int, float]
    """Of every worker of the cluster, those without a place included, at its level."""
    levels: Mapping[int, int]
    """Index of the frequency level of each of them."""
    move_workers: bool = True
    """Whether workers may change stage."""
    share_layers: bool = True
    """Whether neighbouring stages may share layers."""

    def of(self, allocation: Allocation) -> Iterator[Allocation]:
        """All allocations that are a step away."""
        if self._has_slow_sharing(allocation):
            yield replace(allocation, spares_slow=not allocation.spares_slow)
        for other in self._otherwise(allocation):
            for spares_slow in (False, True) if self._has_slow_sharing(other) else (False,):
                yield replace(other, spares_slow=spares_slow)

    def _has_slow_sharing(self, allocation: Allocation) -> bool:
        """Whether workers of different speeds share the layers of a boundary."""
        for chain in allocation.chains:
            for boundary, cut in enumerate(chain.cuts):
                if len(cut) > 1:
                    for share in chain.stages[boundary : boundary + 2]:
                        if len({self.speeds[worker] for worker in share.workers.tolist()}) > 1:
                            return True
        return False

    def _otherwise(self, allocation: Allocation) -> Iterator[Allocation]:
        """All allocations that are a step away in who does how much."""
        split = splits_backwards(allocation.schedule)
        for index, chain in enumerate(allocation.chains):
            for other in (*self._divided_otherwise(chain, split), *self._cut_elsewhere(chain)):
                yield _with_chains(allocation, {index: other})
        for one, other_one in permutations(range(len(allocation.chains)), 2):
            gives, takes = allocation.chains[one], allocation.chains[other_one]
            if gives.num_microbatches > 1:
                yield _with_chains(allocation, {one: self._resized(gives, -1), other_one: self._resized(takes, 1)})
        if self.move_workers:
            yield from self._with_workers_moved(allocation)

    def _divided_otherwise(self, chain: Chain, split: bool) -> Iterator[Chain]:
        """A worker has a micro-batch less and another one of its stage one more."""
        for index, share in enumerate(chain.stages):
            numbers = share.num_microbatches.tolist()
            kinds = [(self.speeds[worker], number) for worker, number in zip(share.workers.tolist(), numbers)]
            known = set()
            for giver, taker in permutations(range(share.width), 2):
                gives, takes = kinds[giver], kinds[taker]
                is_swap = gives == (takes[0], takes[1] + 1)
                if not gives[1] or is_swap or (gives, takes) in known:
                    continue
                known.add((gives, takes))
                counts = share.num_microbatches.copy()
                counts[[giver, taker]] += [-1, 1]
                divided = _with_stages(chain, {index: replace(share, num_microbatches=counts)})
                yield divided
                yield from self._shared_anew(divided, split)

    def _shared_anew(self, chain: Chain, split: bool) -> Iterator[Chain]:
        """A chain that shares layers, with shared layers that suit its workers' micro-batches."""
        if all(len(cut) == 1 for cut in chain.cuts):
            return
        speeds = [np.array([self.speeds[worker] for worker in share.workers.tolist()]) for share in chain.stages]
        seconds, number = self.costs.prefix["busy_s"], chain.num_microbatches
        way = float(self.costs.prefix["forward_s"][-1] / seconds[-1]) if split and seconds[-1] else 1.0
        offers: list[tuple[dict[int, int], ...]] = []
        for loads in (np.array([own.sum() for own in speeds]), loads_with_waits(speeds, number, way)):
            cuts = share_layers(seconds, loads, number)
            if cuts is None:  # more stages than layers
                return
            wider = widen_cuts(seconds, cuts, [share.num_microbatches for share in chain.stages], speeds)
            offers += [cuts, wider]
        for each in (own for index, own in enumerate(offers) if own not in offers[:index]):
            held = zip(chain.stages, held_ranges(each, chain.stages[-1].stop), strict=True)
            stages = tuple(replace(share, start=start, stop=stop) for share, (start, stop) in held)
            yield replace(chain, stages=stages, cuts=each)

    def _cut_elsewhere(self, chain: Chain) -> Iterator[Chain]:
        """Micro-batches are cut a layer earlier or later, or all of a boundary at one layer."""
        for boundary, cut in enumerate(chain.cuts):
            offers: list[Cut] = []
            for way in (-1, 1):
                for layer, number in cut.items():
                    for moved in {1, number} if self.share_layers else {number}:
                        offers.append({**cut, layer: number - moved, layer + way: cut.get(layer + way, 0) + moved})
                if len(cut) > 1:
                    offers.append({layer + way: number for layer, number in cut.items()})
                    offers.append({(min if way < 0 else max)(cut): chain.num_microbatches})
            for offer in offers:
                found = _with_cut(chain, boundary, {layer: offer[layer] for layer in sorted(offer) if offer[layer]})
                if found is not None:
                    yield found

    def _resized(self, chain: Chain, more: int) -> Chain:
        """The chain with a micro-batch more or less: of the worker of each stage that ends first with it, or last."""
        stages, cuts = [], []
        for share in chain.stages:
            counts = share.num_microbatches.copy()
            speeds = np.array([self.speeds[worker] for worker in share.workers.tolist()])
            counts[int(np.argmin((counts + 1) / speeds) if more > 0 else np.argmax(counts / speeds))] += more
            stages.append(replace(share, num_microbatches=counts))
        for cut in chain.cuts:
            most = max(cut, key=lambda layer: cut[layer])
            cuts.append({layer: n for layer, n in {**cut, most: cut[most] + more}.items() if n})
        return Chain(stages=tuple(stages), cuts=tuple(cuts), num_microbatches=chain.num_microbatches + more)

    def _with_workers_moved(self, allocation: Allocation) -> Iterator[Allocation]:
        split = splits_backwards(allocation.schedule)
        places = [(index, stage) for index, chain in enumerate(allocation.chains) for stage in range(len(chain.stages))]
        own = {place: allocation.chains[place[0]].stages[place[1]].workers.tolist() for place in places}
        for one, other in combinations(places, 2):
            for members, others in self._exchanges(own[one], own[other]):
                moved = self._with_workers(allocation, {one: members, other: others})
                yield moved
                for index in {one[0], other[0]}:
                    for anew in self._shared_anew(moved.chains[index], split):
                        yield _with_chains(moved, {index: anew})
        outside = self._one_of_each(sorted(self.speeds.keys() - set(allocation.workers.tolist())))
        for place in places:
            for speed, worker in outside.items():
                yield self._with_workers(allocation, {place: [*own[place], worker]})
                for slower_speed, slower in self._one_of_each(own[place]).items():
                    if slower_speed < speed:
                        remaining = [each for each in own[place] if each != slower]
                        yield self._with_workers(allocation, {place: [*remaining, worker]})

    def _exchanges(self, own: Sequence[int], others: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Workers of two stages of which one has changed stage, or two of different speeds have changed places."""
        nobody: list[tuple[float, list[int]]] = [(0.0, [])]
        mine, theirs = (
            nobody + [(speed, [worker]) for speed, worker in self._one_of_each(each).items()] for each in (own, others)
        )
        for gives, given in mine:
            for takes, taken in theirs:
                members = [worker for worker in own if worker not in given] + taken
                remaining = [worker for worker in others if worker not in taken] + given
                if gives != takes and members and remaining:
                    yield members, remaining

    def _one_of_each(self, workers: Sequence[int]) -> dict[float, int]:
        """Speed -> the first worker that has it."""
        return {self.speeds[worker]: worker for worker in reversed(workers)}

    def _with_workers(self, allocation: Allocation, workers: Mapping[Place, Sequence[int]]) -> Allocation:
        """Stages with other workers, and micro-batches dealt to them by speed."""
        chains = dict(enumerate(allocation.chains))
        for (index, stage), members in workers.items():
            own = sorted(members)
            share = replace(
                chains[index].stages[stage],
                workers=np.array(own, dtype=np.int64),
                num_microbatches=apportion(
                    chains[index].num_microbatches, 1.0 / np.array([self.speeds[worker] for worker in own])
                ),
                levels=np.array([self.levels[worker] for worker in own], dtype=np.int64),
            )
            chains[index] = _with_stages(chains[index], {stage: share})
        return _with_chains(allocation, chains)


def _with_chains(allocation: Allocation, chains: Mapping[int, Chain]) -> Allocation:
    return replace(allocation, chains=tuple(chains.get(index, own) for index, own in enumerate(allocation.chains)))


def _with_stages(chain: Chain, stages: Mapping[int, StageShare]) -> Chain:
    return replace(chain, stages=tuple(stages.get(index, own) for index, own in enumerate(chain.stages)))


def _with_cut(chain: Chain, boundary: int, cut: Cut) -> Chain | None:
    """The chain with another cut; None if some stage would have no layer of some micro-batch."""
    number, before, after = chain.num_microbatches, chain.stages[boundary], chain.stages[boundary + 1]
    first = chain.cuts[boundary - 1] if boundary else {before.start: number}
    last = chain.cuts[boundary + 1] if boundary + 1 < len(chain.cuts) else {after.stop: number}
    for starts, stops in ((first, cut), (cut, last)):
        start, stop = max(starts), min(stops)
        if start > stop or (start == stop and starts[start] + stops[stop] > number):
            return None
    stages = {boundary: replace(before, stop=max(cut)), boundary + 1: replace(after, start=min(cut))}
    cuts = (*chain.cuts[:boundary], cut, *chain.cuts[boundary + 1 :])
    return replace(_with_stages(chain, stages), cuts=cuts)
