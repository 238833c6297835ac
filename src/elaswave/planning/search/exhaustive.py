"""Every layout of whole layers of a small job, ranked in closed form: any number of stages, workers of any speed. Pure.

Workers of one speed and memory are alike, so a stage is told by how many it has of each kind; a layout of one chain is
a row of such stages and the layers between them. All of them are scored at once; the best become shapes, in which
workers stay with the layers that they hold as far as possible.
"""

from collections.abc import Sequence
from itertools import combinations, product
from math import comb, prod
from typing import NamedTuple

import numpy as np

from elaswave.planning.costs.layers import Costs, MemoryModel, fitting, num_copies
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import Schedule, splits_backwards
from elaswave.planning.programs.shared_layers import cuts_of
from elaswave.planning.search.apportionment import apportion
from elaswave.planning.search.shapes import Shape

WORKERS_MAX = 12
"""Jobs of at most so many workers are looked at."""
FEW = 2
"""Micro-batches per worker up to which they are few."""
LAYOUTS_MAX = 200_000
"""Numbers of stages with more layouts than this are left out."""


class _Kinds(NamedTuple):
    """Workers that are alike."""

    positions: list[np.ndarray]
    """In the cluster, of each kind."""
    speed: np.ndarray
    memory_bytes: np.ndarray

    @property
    def counts(self) -> list[int]:
        """Workers of each kind."""
        return [len(own) for own in self.positions]


class _Mixes(NamedTuple):
    """All that a stage may consist of; arrays have one entry for each number of workers of each kind."""

    seconds: np.ndarray
    """Until the last worker has done its micro-batches, of a second each on a worker of speed 1."""
    speed: np.ndarray
    """Mean of those that have micro-batches."""
    width: np.ndarray
    memory_bytes: np.ndarray
    """Of the worker that has least."""
    is_uniform: np.ndarray
    """Whether all are equally fast."""
    most: np.ndarray
    """Micro-batches of the worker that has most."""


class Ranked(NamedTuple):
    """A layout and its seconds in closed form."""

    seconds: float
    shape: Shape
    is_regular: bool
    """Micro-batches meet the same workers in every round."""
    least_s: float
    """Seconds that it takes at least, which with few micro-batches is nearer."""


def all_shapes(
    cluster: Cluster,
    costs: Costs,
    workers: np.ndarray,
    held: np.ndarray,
    num_microbatches: int,
    schedule: Schedule,
    *,
    followers: int,
    most: int,
    stages: Sequence[np.ndarray] | None = None,
) -> list[Ranked]:
    """Finds the best layouts of one chain of whole layers.

    Args:
        cluster: of the workers.
        costs: of the layers.
        workers: positions of those that have a place.
        held: int64 [workers of the cluster, 2]: layers [start, stop) that each has held.
        num_microbatches: of the step.
        schedule: of the job.
        followers: live copies of every block, for memory.
        most: how many are wanted. A quarter as many regular ones, faster than the closed form says, come on top, and
            as many of those that take the least at least, where micro-batches are few.
        stages: positions of each stage's workers if they may not change stage; then only layers are divided.
    Returns:
        The fastest first, then the regular ones and the others; empty where there are too many workers to look at all.
    """
    if len(workers) > WORKERS_MAX:
        return []
    kinds = _kinds_of(cluster, workers)
    mixes = _mixes_of(kinds, num_microbatches)
    ranked: list[Ranked] = []
    numbers = range(1, min(costs.num_layers, len(workers)) + 1) if stages is None else [len(stages)]
    for num_stages in numbers:
        number = comb(costs.num_layers - 1, num_stages - 1)
        if stages is None:
            number *= prod(comb(count + num_stages - 1, num_stages - 1) for count in kinds.counts)
        if not 0 < number <= LAYOUTS_MAX:
            continue
        bounds = _divisions(costs.num_layers, num_stages)
        codes = _stages_of(kinds.counts, num_stages) if stages is None else _codes_of(kinds, stages)
        seconds, least_s = _scored(costs, mixes, codes, bounds, schedule, num_copies(followers, len(workers)))
        is_regular = _are_regular(mixes, codes, num_microbatches)
        regular = np.argsort(np.where(is_regular[:, None], seconds, np.inf), axis=None, kind="stable")
        chosen = [np.argsort(seconds, axis=None, kind="stable")[:most], regular[: most // 4]]
        if num_microbatches <= FEW * len(workers):
            chosen.append(np.argsort(least_s, axis=None, kind="stable")[: most // 4])
        best = np.unique(np.concatenate(chosen))
        for index in best[np.isfinite(seconds.ravel()[best])].tolist():
            row, column = divmod(index, len(bounds))
            limits = bounds[column].tolist()
            shape = Shape(
                members=_members(kinds, codes[row].tolist(), limits, held) if stages is None else tuple(stages),
                cuts=cuts_of(limits, num_microbatches),
                num_microbatches=num_microbatches,
                origin=f"{num_stages} stage{'s' * (num_stages > 1)} of whole layers",
            )
            ranked.append(
                Ranked(float(seconds[row, column]), shape, bool(is_regular[row]), float(least_s[row, column]))
            )
    ranked.sort(key=lambda each: each.seconds)
    found = ranked[:most]
    more = [each for each in ranked if each.is_regular][: most // 4]
    if num_microbatches <= FEW * len(workers):
        more += sorted(ranked, key=lambda each: each.least_s)[: most // 4]
    known = {id(each) for each in found}
    for each in more:
        if id(each) not in known:
            known.add(id(each))
            found.append(each)
    return found


def _kinds_of(cluster: Cluster, workers: np.ndarray) -> _Kinds:
    features = np.stack([-cluster.speed[workers], -cluster.memory_bytes[workers]], axis=1)
    values, kind = np.unique(features, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    return _Kinds([workers[kind == index] for index in range(len(values))], -values[:, 0], -values[:, 1])


def _mixes_of(kinds: _Kinds, num_microbatches: int) -> _Mixes:
    """Tabulates the mixes in the order of codes: the number of the first kind's workers counts most."""
    numbers = list(product(*(range(count + 1) for count in kinds.counts)))
    seconds, speed, memory_bytes = np.full(len(numbers), np.inf), np.ones(len(numbers)), np.zeros(len(numbers))
    is_uniform, most = np.ones(len(numbers), dtype=bool), np.zeros(len(numbers))
    for code, own in enumerate(numbers):
        if sum(own):
            speeds = np.repeat(kinds.speed, own)
            counts = apportion(num_microbatches, 1.0 / speeds)
            seconds[code] = float(np.max(counts / speeds))
            speed[code], most[code] = float(speeds[counts > 0].mean()), float(counts.max())
            is_uniform[code] = bool(speeds[0] == speeds[-1])
            memory_bytes[code] = float(kinds.memory_bytes[np.array(own) > 0].min())
    width = np.array([sum(own) for own in numbers])
    return _Mixes(seconds, speed, width, memory_bytes, is_uniform, most)


def _stages_of(counts: Sequence[int], num_stages: int) -> np.ndarray:
    """Codes of the stages of every way to divide the workers of each kind, none left without any: [ways, stages]."""
    codes: np.ndarray = np.zeros((1, num_stages), dtype=np.int64)
    widths: np.ndarray = np.zeros((1, num_stages), dtype=np.int64)
    for count in counts:
        # Bars between stars: every way to put so many alike workers into the stages.
        bars = _choices(count + num_stages - 1, num_stages - 1)
        ends = np.concatenate(
            [np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), count + num_stages - 1)], axis=1
        )
        own = np.diff(ends, axis=1) - 1
        codes = (codes[:, None] * (count + 1) + own[None]).reshape(-1, num_stages)
        widths = (widths[:, None] + own[None]).reshape(-1, num_stages)
    return np.asarray(codes[widths.min(axis=1) > 0])


def _codes_of(kinds: _Kinds, stages: Sequence[np.ndarray]) -> np.ndarray:
    """Codes of given stages: [1, stages]."""
    codes: np.ndarray = np.zeros((1, len(stages)), dtype=np.int64)
    for own, count in zip(kinds.positions, kinds.counts, strict=True):
        codes = codes * (count + 1) + [int(np.isin(stage, own).sum()) for stage in stages]
    return codes


def _are_regular(mixes: _Mixes, stages: np.ndarray, num_microbatches: int) -> np.ndarray:
    """Tells whether the stages of each row have workers alike, and widths that divide each other and the
    micro-batches."""
    width = mixes.width[stages]
    small, large = np.minimum(width[:, 1:], width[:, :-1]), np.maximum(width[:, 1:], width[:, :-1])
    is_even = np.all(num_microbatches % width == 0, axis=1) & np.all(large % small == 0, axis=1)
    return np.asarray(is_even & np.all(mixes.is_uniform[stages], axis=1))


def _divisions(num_layers: int, num_stages: int) -> np.ndarray:
    """Lists all boundaries between so many stages: [ways, stages + 1]."""
    inner = _choices(num_layers - 1, num_stages - 1) + 1
    ends = np.zeros((len(inner), 1), dtype=np.int64)
    return np.concatenate([ends, inner, ends + num_layers], axis=1)


def _choices(number: int, chosen: int) -> np.ndarray:
    """Lists all ascending choices of so many numbers below a number: [ways, chosen]."""
    found = list(combinations(range(number), chosen))
    return np.array(found, dtype=np.int64).reshape(len(found), chosen)


def _scored(
    costs: Costs, mixes: _Mixes, stages: np.ndarray, bounds: np.ndarray, schedule: Schedule, copies: int
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the seconds of a step of each layout, [ways to divide workers, ways to divide layers]; they are infinite
    where memory lacks.

    The closed form of `elaswave.planning.costs.step_time.bound`, without links, where memory is short not below what
    waiting for micro-batches takes; and what a step takes at least: a worker waits for its first input and does all its
    work, or all but its weight gradients before the last gradient goes back; and a micro-batch goes there and back as
    far as a stage, whose weight gradient follows.
    """
    forward, first, second = (
        np.diff(costs.prefix[f"{name}_s"][bounds], axis=1) for name in ("forward", "input_gradient", "weight_gradient")
    )
    is_split = splits_backwards(schedule)
    ways = np.maximum(0.0, forward + first - second) if is_split else forward + first + second
    if not is_split:
        first, second = first + second, np.zeros_like(second)
    through = forward + first
    total, full, slowest, latest, least, there, back, together = (
        np.zeros((len(stages), len(bounds))) for _ in range(8)
    )
    for stage in range(stages.shape[1]):
        code = stages[:, stage, None]
        speed, rounds = mixes.speed[code], mixes.seconds[code]
        way, longer, rest = ways[:, stage] / speed, through[:, stage] / speed, second[:, stage]
        busy = (through + second)[:, stage] * rounds
        total += way
        full += longer
        np.maximum(slowest, busy - way, out=slowest)
        np.maximum(latest, through[:, stage] * rounds - longer + rest / speed, out=latest)
        returns = rest / speed if stage == 0 else back
        ends = there + through[:, stage] * rounds + np.maximum(rest * rounds, returns)
        np.maximum(least, ends, out=least)
        together += ends
        there = there + forward[:, stage] / speed
        back = returns + first[:, stage] / speed
    for stage in reversed(range(stages.shape[1])):
        speed = mixes.speed[stages[:, stage, None]]
        there = there + first[:, stage] / speed
        np.maximum(least, there + second[:, stage] / speed, out=least)
    seconds = total + slowest
    if is_split:
        seconds = np.maximum(seconds, full + latest)
    overheads_s = _overheads_s(costs, mixes.width[stages], bounds)
    waiting_s = _waiting_s(costs, mixes, stages, bounds, copies)
    fits, seconds = np.isfinite(waiting_s), np.maximum(seconds, waiting_s)
    least += 1e-6 * together  # of those that take equally long at least, where most stages end early
    return np.where(fits, seconds + overheads_s, np.inf), np.where(fits, least + overheads_s, np.inf)


def _overheads_s(costs: Costs, widths: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """`Costs.overhead_s` of each layout: [ways to divide workers, ways to divide layers]."""
    if costs.end_link is None:
        return np.full((len(widths), len(bounds)), costs.step_overhead_s)
    sums = np.diff(costs.prefix["accumulator_bytes"])[bounds[:, :-1]]
    travels = sums + np.diff(costs.prefix["parameter_bytes"][bounds], axis=1)
    most = np.zeros((len(widths), len(bounds)))
    for stage in range(widths.shape[1]):
        np.maximum(most, (1 - 1 / widths[:, stage, None]) * travels[:, stage], out=most)
    link = costs.end_link
    seconds = np.where(most > 0, link.latency_s + most / link.bandwidth_bytes_per_s, 0.0)
    return np.asarray(costs.step_overhead_s + seconds)


def _waiting_s(costs: Costs, mixes: _Mixes, stages: np.ndarray, bounds: np.ndarray, copies: int) -> np.ndarray:
    """Computes the seconds of each layout by the stage whose workers wait longest for micro-batches to come back, as
    `elaswave.planning.costs.step_time.bound.limited_s` does; they are infinite if some worker has no room for its
    layers and one of them."""
    waiting_s = np.zeros((len(stages), len(bounds)))
    models = [MemoryModel.of_width(costs, max(1, width), copies) for width in range(int(mixes.width.max()) + 1)]
    if max(model.most_bytes(int(mixes.most.max())) for model in models) <= float(mixes.memory_bytes[1:].min()):
        return waiting_s
    busy = costs.prefix["busy_s"]
    for stage in range(stages.shape[1]):
        code, start, stop = stages[:, stage], bounds[:, stage], bounds[:, stage + 1]
        room, most, width = mixes.memory_bytes[code, None], mixes.most[code, None], mixes.width[code]
        fixed = np.stack([model.fixed_bytes(start, stop) for model in models])[width]
        fits = fitting(room - fixed, models[0].activation_bytes(start, stop)[None])
        rounds = np.where(fits < most, most / np.maximum(fits, 1), 0.0)
        rounds = np.where(fits < 1, np.inf, rounds)
        np.maximum(waiting_s, rounds * (busy[-1] - busy[start]), out=waiting_s)
    return waiting_s


def _members(kinds: _Kinds, codes: Sequence[int], bounds: Sequence[int], held: np.ndarray) -> tuple[np.ndarray, ...]:
    """Chooses workers for stages: of each kind those first that hold most of the stage's layers already."""
    pools = [own.tolist() for own in kinds.positions]
    members: list[np.ndarray] = []
    for stage, code in enumerate(codes):
        start, stop = bounds[stage], bounds[stage + 1]
        own: list[int] = []
        for pool, count in reversed(list(zip(pools, kinds.counts, strict=True))):
            code, number = divmod(code, count + 1)
            pool.sort(key=lambda worker: min(stop, held[worker, 1]) - max(start, held[worker, 0]))
            own += pool[len(pool) - number :]
            del pool[len(pool) - number :]
        members.append(np.sort(np.array(own, dtype=np.int64)))
    return tuple(members)
