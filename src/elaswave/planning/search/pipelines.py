"""Pipelines of several depths and speeds beside each other: what a planner may make of workers that are no rectangle.

With few micro-batches per pipeline a stage cannot share out a lost worker's part evenly: one worker gets one
micro-batch more, which is much. Then it may be better to let most pipelines go on as they are, and to make of all other
workers pipelines that are a stage longer or shorter, or to leave some out. Deeper ones also need less memory per
worker, so that more fits in flight. Workers of unequal speed are dealt to pipelines in the order of their speed, so
that few pipelines have slow ones; such a pipeline's layers are split by the speeds of its workers, and it runs fewer
micro-batches.

Mixes are ranked by what a pipeline of each kind would take by itself; the best ones get real
stages (`elaswave.planning.search.templates`) and micro-batches (`apportion_pipelines`), and one pipeline of each kind
is compiled and timed. Pure.

Source: Oobleck (Jang et al., SOSP 2023, arXiv 2309.08125, section 4), whose templates these are. Differs: chosen by
the time of the step, after every event, among all that the workers can be made into; Oobleck mends what is broken.

Which workers are to have work: all of them, or all but some. Pure.

A slow worker can cost more than it brings, since whole micro-batches and layers fit its speed badly; and a number of
workers that is no multiple of the stages' can make a layout so uneven that one worker less is better. Those who are
left out stay members of a run: they hold copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs, MemoryModel, num_copies
from elaswave.planning.costs.machines import Cluster, worker_speeds
from elaswave.planning.costs.schedules import Schedule, splits_backwards
from elaswave.planning.costs.step_time.bound import pipeline_line
from elaswave.planning.plan import Allocation, Chain, StageShare
from elaswave.planning.programs.prediction import fidelity_for, stages_of, step_s
from elaswave.planning.search.apportionment import apportion, apportion_pipelines
from elaswave.planning.search.memory_limits import memory_limits
from elaswave.planning.search.templates import PipelineTemplate, template_beside, template_of_few

SMALLER_SUBSETS = 4
"""Up to so many workers are left out one by one, and up to so many classes of slow ones."""


class WorkerSubset(NamedTuple):
    """Workers that are to have work, by position in the cluster."""

    stages: list[np.ndarray]
    """Those of each stage."""
    free: np.ndarray
    """Those in no stage."""
    num_left_out: int = 0

    @property
    def num_workers(self) -> int:
        """All together."""
        return sum(map(len, self.stages)) + len(self.free)

    @property
    def shown(self) -> str:
        """For the end of a plan's reason."""
        return f", {self.num_left_out} left out" if self.num_left_out else ""


def smaller_subsets(whole: WorkerSubset, speed: np.ndarray, *, one_by_one: bool) -> list[WorkerSubset]:
    """Lists what is left without some: slow ones first, then those of the widest stages.

    Args:
        whole: all workers.
        speed: of all workers of the cluster.
        one_by_one: else only a team without any slow worker is asked for.
    """
    is_slow = speed < float(np.median(speed)) * (1 - 1e-9)
    num_slow = int(is_slow.sum())
    if not one_by_one:
        return [_staying(whole, ~is_slow, num_slow)] if 0 < num_slow < whole.num_workers else []
    slow = np.sort(speed[is_slow])
    classes = np.flatnonzero(np.diff(np.append(slow, np.inf))) + 1
    # The last number leaves as many as fill all stages equally.
    numbers = {*range(1, min(SMALLER_SUBSETS, max(1, num_slow)) + 1), *classes[:SMALLER_SUBSETS].tolist(), num_slow,
               whole.num_workers % len(whole.stages)}  # fmt: skip
    order = in_order(whole.stages, whole.free, speed)
    subsets = []
    for number in sorted(numbers):
        if 0 < number < whole.num_workers:
            stays = np.ones(len(speed), dtype=bool)
            stays[order[-number:]] = False
            subsets.append(_staying(whole, stays, number))
    return subsets


def _staying(whole: WorkerSubset, stays: np.ndarray, num_left_out: int) -> WorkerSubset:
    return WorkerSubset([own[stays[own]] for own in whole.stages], whole.free[stays[whole.free]], num_left_out)


def in_order(members: Sequence[np.ndarray], free: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """Orders the positions of workers, those last that are left out first: slow ones, those that hold nothing, those of
    the widest stages.

    Args:
        members: of each stage.
        free: those in no stage.
        speeds: of all workers of the cluster.
    """
    workers = np.concatenate([*members, free])
    # Only wide stages have high ranks: whoever is left out by rank makes the widths more equal.
    ranks = np.concatenate([*(np.arange(len(own)) for own in members), np.arange(len(free))])
    is_empty = np.arange(len(workers)) >= len(workers) - len(free)
    return np.asarray(workers[np.lexsort((ranks, is_empty, -speeds[workers]))])


Ranges = tuple[tuple[int, int], ...]
"""Layers [start, stop) of each stage."""
SHORTER, LONGER = 2, 3
"""A pipeline may have so many stages fewer, or more, than those before; one more where workers are left over."""
ANY_DEPTH = 12
"""Jobs of at most so many workers are made into pipelines of any depth."""
KINDS_MAX = 6
"""Mixes of more kinds of pipelines are left out."""
_SLACK = 1e-6
"""Relative; differences of rounding."""
_RANKED_WITHIN = 1e-4
"""Relative: how exactly mixes are ranked."""
RANKED, RANKED_SMALL = 16, 40
"""Mixes that get real stages; in jobs of at most `ANY_DEPTH` workers whose speeds differ."""


class _Mix(NamedTuple):
    """Pipelines by the speeds of their workers, fastest first: speeds, and number of such pipelines."""

    groups: tuple[tuple[tuple[float, ...], int], ...]

    @property
    def num_workers(self) -> int:
        """In all pipelines."""
        return sum(len(speeds) * number for speeds, number in self.groups)

    def __str__(self) -> str:
        numbers: dict[int, int] = {}
        for speeds, number in self.groups:
            numbers[len(speeds)] = numbers.get(len(speeds), 0) + number
        return ", ".join(f"{number} x {depth}" for depth, number in numbers.items())


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineWorkers:
    """Who is left of a job, by position in the cluster, and what they hold."""

    usual: Ranges
    """Layers of the stages of before."""
    members: Sequence[np.ndarray]
    """Of each of these stages, ascending."""
    free: np.ndarray
    """Those in no stage."""
    held: np.ndarray
    """int64 [workers of the cluster, 2]: layers [start, stop) that each has held."""
    levels: np.ndarray
    """Frequency level of every worker of the cluster."""


def mixed_pipelines(
    cluster: Cluster,
    costs: Costs,
    pipeline_workers: PipelineWorkers,
    num_microbatches: int,
    schedule: Schedule,
    *,
    followers: int,
    most: int,
    leave_out: bool = True,
    by_speed: bool = True,
) -> list[tuple[Allocation, str]]:
    """Finds the best mixes.

    Args:
        cluster: after the event.
        costs: of the layers.
        pipeline_workers: all of its workers.
        num_microbatches: of the step.
        schedule: of the job.
        followers: live copies of every block, for memory.
        most: how many are wanted.
        leave_out: whether workers may be left without a place.
        by_speed: whether faster workers may run more micro-batches than others in pipelines of the same depth.
    Returns:
        Allocations, the fastest first, and how they came about; none if nothing fits.
    """
    speeds = worker_speeds(cluster, np.arange(cluster.num_workers), pipeline_workers.levels)
    order = in_order(pipeline_workers.members, pipeline_workers.free, speeds)
    ideal = _Ideal(cluster, costs, schedule, followers)
    mixes = _mixes(pipeline_workers, speeds[order].tolist(), costs.num_layers, leave_out=leave_out)
    found: list[tuple[float, Allocation, str]] = []
    fresh = template_beside(costs, (1.0,) * len(pipeline_workers.usual), frozenset())
    # The stages of before cost no moves; where they are no longer balanced, balanced ones are tried too.
    starts = (
        [pipeline_workers.usual]
        if fresh is None or fresh.ranges == pipeline_workers.usual
        else [pipeline_workers.usual, fresh.ranges]
    )
    is_even = bool(np.all(speeds[order] == speeds[order[0]]))
    ranked = RANKED if is_even or len(order) > ANY_DEPTH else RANKED_SMALL
    for mix in sorted(mixes, key=lambda each: ideal.step_s(each, num_microbatches))[:ranked]:
        for usual in starts:
            placing = _Placing(cluster, costs, pipeline_workers, usual, speeds, order[: mix.num_workers])
            for allocation in placing.allocations(mix, num_microbatches, schedule):
                if not by_speed and not is_dealt_evenly(allocation):
                    continue
                # What is no better than the last one that is kept need not be timed to its end.
                within_s = found[-1][0] if len(found) == most else float("inf")
                try:
                    seconds = _one_of_each_s(cluster, costs, allocation, followers, within_s)
                except InfeasiblePlan:
                    continue
                found = sorted([*found, (seconds, allocation, str(mix))], key=lambda each: each[0])[:most]
    return [(_joined(allocation), f"pipelines x workers of each: {mix}") for _, allocation, mix in found]


def is_dealt_evenly(allocation: Allocation) -> bool:
    """Tells whether all workers of a stage run equally many micro-batches, but for one, whatever their speeds: those of
    the same stage of pipelines of one depth, too."""
    counts: dict[tuple[int, int], list[int]] = {}
    for chain in allocation.chains:
        for index, share in enumerate(chain.stages):
            counts.setdefault((len(chain.stages), index), []).extend(share.num_microbatches.tolist())
    return all(max(own) - min(own) <= 1 for own in counts.values())


def _mixes(
    pipeline_workers: PipelineWorkers, speeds: Sequence[float], num_layers: int, *, leave_out: bool
) -> list[_Mix]:
    """Pipelines of the usual depth beside others of one depth or two, or of any two depths.

    Args:
        pipeline_workers: how it was before.
        speeds: of its workers, descending.
        num_layers: of the model.
        leave_out: whether workers may be left over.
    """
    usual = len(pipeline_workers.usual)
    numbers = [len(speeds)]
    if leave_out:  # also without the slow ones, class by class
        slower = [index for index in range(1, len(speeds)) if speeds[index] < speeds[index - 1]]
        # Without the slowest class, the two slowest, the three slowest.
        numbers += slower[:-4:-1]
    found: dict[_Mix, None] = {}
    for number in numbers:
        deals = [*_beside_usual(pipeline_workers, number, num_layers)]
        if leave_out:
            deals += _of_two_depths(usual, number, num_layers)
        for counts in deals:
            # The first depth of a list gets the fastest workers, so both orders are mixes of their own.
            for depths in (counts, counts[::-1]):
                mix = _dealt(depths, speeds, usual)
                if len(mix.groups) <= KINDS_MAX:
                    found[mix] = None
    return list(found)


def _dealt(depths: Sequence[tuple[int, int]], speeds: Sequence[float], usual: int) -> _Mix:
    """Pipelines of these depths, the first one made of the fastest workers; those of the usual depth come first."""
    groups: dict[tuple[float, ...], int] = {}
    at = 0
    for depth, number in depths:
        alike = speeds[at + depth * number - 1] == speeds[at] if number else False
        for _ in range(1 if alike else number):
            own = tuple(speeds[at : at + depth])
            groups[own] = groups.get(own, 0) + (number if alike else 1)
            at += depth * (number if alike else 1)
    return _Mix(tuple(sorted(groups.items(), key=lambda group: (len(group[0]) != usual, -group[1], group[0]))))


def _beside_usual(pipeline_workers: PipelineWorkers, number: int, num_layers: int) -> Iterator[list[tuple[int, int]]]:
    """Yields lists of (depth, number of pipelines): all workers have a place, some pipelines are as before."""
    # Each pipeline of before needs a worker of every stage.
    depth, whole = len(pipeline_workers.usual), min(map(len, pipeline_workers.members))
    for kept in range(whole, -1, -1):
        rest = number - kept * depth
        for other in range(max(1, depth - SHORTER), min(depth + LONGER, num_layers) + 1):
            shorter, longer = (rest // other) - rest % other, rest % other
            # The longer ones have a stage more than `other`, and a stage needs a layer.
            if shorter < 0 or rest < other or (longer and other == num_layers):
                continue
            counts = {depth: kept}
            for key, more in ((other, shorter), (other + 1, longer)):
                counts[key] = counts.get(key, 0) + more
            yield [(key, count) for key, count in counts.items() if count]


def _of_two_depths(usual: int, number: int, num_layers: int) -> Iterator[list[tuple[int, int]]]:
    """Yields lists of (depth, number of pipelines): as many of the shorter depth as the others leave workers for."""
    low, high = (1, number) if number <= ANY_DEPTH else (max(1, usual - SHORTER), usual + LONGER + 1)
    for longer in range(low, min(high, num_layers, number) + 1):
        for count in range(1, number // longer + 1):
            left = number - count * longer
            for shorter in range(low, longer):
                if left >= shorter:
                    yield [(longer, count), (shorter, left // shorter)]
        yield [(longer, number // longer)]


class _Ideal:
    """Pipelines whose stages are as even as whole layers permit, whoever runs beside them: for ranking."""

    def __init__(self, cluster: Cluster, costs: Costs, schedule: Schedule, followers: int) -> None:
        self._costs = costs
        self._seconds = [
            float(costs.prefix[f"{name}_s"][-1]) for name in ("forward", "input_gradient", "weight_gradient")
        ]
        self._memory_bytes = cluster.memory_bytes.min(keepdims=True)
        self._num_workers = cluster.num_workers
        self._copies = num_copies(followers, cluster.num_workers)
        self._schedule: Schedule = schedule
        self._lines: dict[tuple[float, ...], tuple[float, float]] = {}

    def linear(self, speeds: tuple[float, ...]) -> tuple[float, float]:
        """A pipeline with m micro-batches takes first + m x second seconds; infinitely long if it does not fit."""
        if speeds not in self._lines:
            self._lines[speeds] = self._linear(speeds)
        return self._lines[speeds]

    def _linear(self, speeds: tuple[float, ...]) -> tuple[float, float]:
        # A stage is a depth-th of all layers, which are held by as many workers as there are pipelines.
        depth = len(speeds)
        model = MemoryModel.of_width(self._costs, self._num_workers / depth, self._copies)
        fits = float(model.most_in_flight(0, self._costs.num_layers, self._memory_bytes * depth)[0])
        if fits < 1:
            return float("inf"), float("inf")
        forward, first, second = (seconds / sum(speeds) for seconds in self._seconds)
        fixed_s, pace_s = pipeline_line(
            ((forward, first, second),) * depth, split=splits_backwards(self._schedule) and fits >= depth
        )
        return fixed_s, pace_s * self._unevenness(depth)

    def _unevenness(self, depth: int) -> float:
        """Computes how much longer than the mean the slowest of so many stages takes, since layers are whole."""
        even = template_beside(self._costs, (1.0,) * depth, frozenset())
        busy = self._costs.prefix["busy_s"]
        if even is None or not busy[-1]:
            return 1.0
        return max(float(busy[stop] - busy[start]) for start, stop in even.ranges) * depth / float(busy[-1])

    def step_s(self, mix: _Mix, num_microbatches: int) -> float:
        """Computes the seconds of a step of a mix whose pipelines run whole micro-batches, if all layers sent as much
        at the end of a step."""
        kinds = [(number, *self.linear(speeds)) for speeds, number in mix.groups]
        kinds = [kind for kind in kinds if np.isfinite(kind[1])]
        if not kinds:
            return float("inf")
        low, high = 0.0, min(fixed + -(-num_microbatches // number) * pace for number, fixed, pace in kinds)
        while high - low > _RANKED_WITHIN * high:
            middle = (low + high) / 2
            done = sum(number * int((middle - fixed) / pace) for number, fixed, pace in kinds if middle > fixed)
            low, high = (low, middle) if done >= num_microbatches else (middle, high)
        shortest, pipelines = min(len(speeds) for speeds, _ in mix.groups), sum(number for _, number in mix.groups)
        return high + self._end_s(shortest, pipelines)

    def _end_s(self, depth: int, holders: int) -> float:
        """Computes the seconds beside the actions, of a pipeline's stage, all of whose layers so many workers hold."""
        link = self._costs.end_link
        if link is None or holders < 2:
            return 0.0
        sums, parameters = (float(self._costs.prefix[name][-1]) for name in ("accumulator_bytes", "parameter_bytes"))
        travels = sums / self._costs.num_layers + parameters / depth
        return link.transfer_s(travels * (1 - 1 / holders))


class _Placing:
    """What becomes of a mix.

    Args:
        cluster, costs, pipeline_workers: as of `mixed_pipelines`.
        usual: layers of the stages of pipelines of the usual depth.
        speeds: of all workers of the cluster.
        workers: positions of those that get a place.
    """

    def __init__(
        self,
        cluster: Cluster,
        costs: Costs,
        pipeline_workers: PipelineWorkers,
        usual: Ranges,
        speeds: np.ndarray,
        workers: np.ndarray,
    ) -> None:
        self._cluster = cluster
        self._costs = costs
        self._pipeline_workers = pipeline_workers
        self._usual = usual
        self._speeds = speeds
        self._is_used = np.zeros(cluster.num_workers, dtype=bool)
        self._is_used[workers] = True

    def allocations(self, mix: _Mix, num_microbatches: int, schedule: Schedule) -> Iterator[Allocation]:
        """Yields a mix with real stages, workers and micro-batches: with even stages, and with those that suit as few
        micro-batches as each pipeline gets, if those are others, of all pipelines or, which takes less memory, of one
        kind; yields nothing if its pipelines cannot be one layout."""
        templates = self._templates(mix)
        if templates is None:
            return
        totals = self._totals(mix, templates, num_microbatches, schedule)
        yield self._allocation(mix, templates, totals, schedule)
        known, kinds = [templates], range(len(templates))
        for changed in (kinds, *((kind,) for kind in kinds)):
            for_few = self._templates_of_few(mix, templates, totals, schedule, changed)
            if for_few not in known:
                known.append(for_few)
                own = self._totals(mix, for_few, num_microbatches, schedule)
                yield self._allocation(mix, for_few, own, schedule)

    def _totals(
        self, mix: _Mix, templates: Sequence[PipelineTemplate], num_microbatches: int, schedule: Schedule
    ) -> list[int]:
        times = [linear_s(self._costs, each.ranges, schedule, each.speeds) for each in templates]
        return apportion_pipelines(num_microbatches, [number for _, number in mix.groups], times)

    def _templates_of_few(
        self,
        mix: _Mix,
        templates: Sequence[PipelineTemplate],
        totals: Sequence[int],
        schedule: Schedule,
        changed: Sequence[int],
    ) -> list[PipelineTemplate]:
        """Stages of these groups' pipelines by the number of their micro-batches, one group after the other."""
        found = list(templates)
        for index in changed:
            (speeds, number), total = mix.groups[index], totals[index]
            others = {layers for other, each in enumerate(found) if other != index for layers in each.ranges}
            most = -(-total // number)
            if most:
                found[index] = (
                    template_of_few(
                        self._costs, speeds, frozenset(others), most, split=splits_backwards(schedule)
                    )
                    or found[index]
                )  # fmt: skip
        return found

    def _allocation(
        self, mix: _Mix, templates: Sequence[PipelineTemplate], totals: Sequence[int], schedule: Schedule
    ) -> Allocation:
        columns = self._columns(mix, templates)
        chains, levels = [], self._pipeline_workers.levels
        for (_, number), template, own, total in zip(mix.groups, templates, columns, totals, strict=True):
            if not total:
                continue
            counts = apportion(total, np.ones(number))
            shares = tuple(
                StageShare(
                    start=start,
                    stop=stop,
                    workers=self._cluster.ids[where],
                    num_microbatches=counts,
                    levels=levels[where],
                )
                for (start, stop), where in zip(template.ranges, own, strict=True)
            )
            cuts = tuple({start: total} for start, _ in template.ranges[1:])
            chains.append(Chain(stages=shares, num_microbatches=total, cuts=cuts))
        return Allocation(chains=tuple(chains), schedule=schedule)

    def _templates(self, mix: _Mix) -> list[PipelineTemplate] | None:
        """Stages of each group's pipelines; those of pipelines like before are given."""
        found: dict[tuple[float, ...], PipelineTemplate] = {}
        taken: set[tuple[int, int]] = set()
        # Pipelines like before come first: their stages are given, and all others must fit beside them.
        for speeds, _ in sorted(mix.groups, key=lambda group: (not self._is_usual(group[0]), -group[1])):
            template = template_beside(self._costs, speeds, frozenset(taken))
            if self._is_usual(speeds) and not taken:
                template = PipelineTemplate(self._usual, speeds)
            if template is None:
                return None
            found[speeds] = template
            taken.update(template.ranges)
        return [found[speeds] for speeds, _ in mix.groups]

    def _is_usual(self, speeds: tuple[float, ...]) -> bool:
        return len(speeds) == len(self._usual) and speeds[0] == speeds[-1]

    def _columns(self, mix: _Mix, templates: Sequence[PipelineTemplate]) -> list[list[np.ndarray]]:
        """Chooses the positions of each group's workers, stage by stage: workers that held early layers get early ones
        again.

        Pipelines of the usual depth keep their workers as long as there are enough in every stage.
        """
        held = self._pipeline_workers.held
        columns: list[list[list[int]]] = [[[] for _ in template.ranges] for template in templates]
        pools: dict[float, list[int]] = {}
        for worker in self._pipeline_workers.free[self._is_used[self._pipeline_workers.free]].tolist():
            pools.setdefault(float(self._speeds[worker]), []).append(worker)
        same = next((index for index, (speeds, _) in enumerate(mix.groups) if self._is_usual(speeds)), None)
        fit = [own[self._is_used[own]] for own in self._pipeline_workers.members]
        kept = 0
        if same is not None:
            alike = [own[self._speeds[own] == mix.groups[same][0][0]] for own in fit]
            kept = min(mix.groups[same][1], *map(len, alike))
        for stage, own in enumerate(fit):
            stays: list[int] = []
            if same is not None and kept:
                start, stop = templates[same].ranges[stage]
                lacks = (held[alike[stage], 0] > start) | (held[alike[stage], 1] < stop)
                # Those that hold all layers of the stage come first: they fetch nothing.
                stays = alike[stage][np.argsort(lacks, kind="stable")][:kept].tolist()
                columns[same][stage] = stays
            for worker in np.setdiff1d(own, stays).tolist():
                pools.setdefault(float(self._speeds[worker]), []).append(worker)
        places: dict[float, list[tuple[int, int, int]]] = {}
        for group, ((_, number), template) in enumerate(zip(mix.groups, templates, strict=True)):
            for stage, ((start, stop), speed) in enumerate(zip(template.ranges, template.speeds, strict=True)):
                lacking = number - len(columns[group][stage])
                places.setdefault(speed, []).extend([(start + stop, group, stage)] * lacking)
        for speed, wanted in places.items():
            pool = sorted(pools.get(speed, ()), key=lambda worker: (int(held[worker].sum()), worker))
            for worker, (_, group, stage) in zip(pool, sorted(wanted), strict=True):
                columns[group][stage].append(worker)
        return [[np.sort(np.array(own, dtype=np.int64)) for own in stages] for stages in columns]


def _joined(allocation: Allocation) -> Allocation:
    """Pipelines of a single stage as one chain: whatever their workers' speeds, a layout has one such stage, whose
    workers take its micro-batches in any order."""
    single = [chain for chain in allocation.chains if len(chain.stages) == 1]
    if len(single) < 2:
        return allocation
    shares = [chain.stages[0] for chain in single]
    workers = np.concatenate([share.workers for share in shares])
    order = np.argsort(workers)
    share = replace(
        shares[0],
        workers=workers[order],
        num_microbatches=np.concatenate([share.num_microbatches for share in shares])[order],
        levels=np.concatenate([share.levels for share in shares])[order],
    )
    one = replace(single[0], stages=(share,), num_microbatches=sum(chain.num_microbatches for chain in single))
    chains = [one if chain is single[0] else chain for chain in allocation.chains if chain not in single[1:]]
    return replace(allocation, chains=tuple(chains))


def _one_of_each_s(cluster: Cluster, costs: Costs, allocation: Allocation, followers: int, within_s: float) -> float:
    """Computes the seconds of a step by the slowest pipeline: one of each depth, with the most micro-batches, within
    the memory there is. Returns infinity, or the seconds, where they are not below `within_s`."""
    limits = memory_limits(cluster, costs, allocation, followers=followers)
    bounds = None if limits is None else limits.as_mapping()
    slowest, overhead_s = 0.0, costs.overhead_s(stages_of(allocation))
    for chain in allocation.chains:
        # `apportion` gives what is left over to the first ones: the first pipeline has most.
        most = int(chain.stages[0].num_microbatches[0])
        stages = tuple(
            replace(
                share, workers=share.workers[:1], num_microbatches=share.num_microbatches[:1], levels=share.levels[:1]
            )
            for share in chain.stages
        )
        one = replace(chain, stages=stages, num_microbatches=most, cuts=tuple({min(cut): most} for cut in chain.cuts))
        alone = replace(allocation, chains=(one,))
        own_s = costs.overhead_s(stages)
        # `step_s` adds what these stages alone take beside their actions; the whole allocation's counts instead.
        within_alone_s = (within_s - overhead_s) * (1 + _SLACK) + own_s
        alone_s = step_s(
            cluster, costs, alone, fidelity_for(alone), max_in_flight=bounds, within_s=within_alone_s
        )  # fmt: skip
        slowest = max(slowest, alone_s - own_s)
        if slowest == float("inf"):
            break
    return slowest + overhead_s


def linear_s(
    costs: Costs, ranges: Ranges, schedule: Schedule, speeds: Sequence[float] | None = None
) -> tuple[float, float]:
    """Computes the seconds of a pipeline beside its micro-batches, and of each of them at the slowest stage.

    Args:
        costs: of the layers.
        ranges: of the stages.
        schedule: of the pipeline.
        speeds: of each stage's worker; None means 1.
    """
    fields = ("forward_s", "input_gradient_s", "weight_gradient_s")
    stages = [
        tuple(costs.between(field, start, stop) / speed for field in fields)
        for (start, stop), speed in zip(ranges, speeds or (1.0,) * len(ranges), strict=True)
    ]
    return pipeline_line(stages, split=splits_backwards(schedule))  # type: ignore[arg-type]  # three fields each


def ranges_of(chain: Chain) -> Ranges:
    """Lists the layers that each stage runs, shared ones counted where most micro-batches run them."""
    bounds = [0, *(max(sorted(cut), key=lambda layer: cut[layer]) for cut in chain.cuts), chain.stages[-1].stop]
    return tuple(pairwise(bounds))
