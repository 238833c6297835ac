"""Compiles a layout into one program per worker, by list scheduling in virtual time. Pure and deterministic.

Every hop of every route is a forward and a backward action with a modelled duration. A worker that is free starts the
lowest micro-batch's forward if it has one ready and may hold another micro-batch's activations, else the lowest ready
backward. Programs only fix the order: real workers run each action as soon as its input is there. Durations are those
of balanced stages without transfers, or whatever the caller says that actions and transfers take.

``1f1b`` bounds the micro-batches in flight by what full throughput needs (`in_flight_bounds`). Where all stages are
equally wide this is the textbook's order: warm-up, one forward one backward, cool-down. ``gpipe`` has no bound, and
a worker begins backwards only after all its forwards.

Forwards go first because then a bounded worker strictly alternates in the steady state. Preferring backwards, as the
textbook is often told, lets them bunch up behind a stage of another width, and the worker starves afterwards: on
widths [1, 3] and [2, 1, 2] with 96 micro-batches such steps take 34 and 22 % longer than the bottleneck's work, but 2
and 1 % with forwards first and the same bounds (all in virtual time).

``zero-bubble`` splits backwards: the gradient of the input (I), which earlier stages wait for, comes first; that of the
weights (W) fills gaps. A W is begun when there is nothing else to do, or when no forward fits before it has freed its
place: a micro-batch is held until its W. Every worker may hold what the fullest one holds under ``1f1b`` (the paper's
ZB-H1, for equal widths). Two preferences and ``1f1b`` with each backward split in place are tried in
virtual time, and the best is taken, so that in virtual time ``zero-bubble`` is never slower than ``1f1b``.

``zero-bubble-h2`` is the same with twice as many micro-batches in flight (about the paper's ZB-H2), and tries the
orders of ``zero-bubble`` too. Equal stages gain nothing by it here: a step is a barrier, so the last stage begins after
a whole way of forwards whatever is in flight. Stages of unequal width or time do: what waits evens out what arrives
unevenly.

Always free of deadlock: the last stage can always go on, so everything in flight before it ends sooner or later,
and its place is free again.

What was compiled is remembered by what it was compiled from, without the workers' ids: a planner asks for the same
pipeline again and again, under one name or another, and after one event as after the one before.

Source: 1F1B as PipeDream-Flush (Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training), GPipe
(Huang et al. 2019), zero-bubble as Qi et al. 2024 (Zero Bubble Pipeline Parallelism, section 3: a greedy order that
fills bubbles with W under a memory limit). All know only stages of one width with one route per pipeline; ours takes
any routes.
"""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from elaswave.planning.costs.schedules import (
    Schedule,
    bounds_of_part,
    check_schedule,
    independent_pipelines,
    splits_backwards,
)
from elaswave.planning.costs.step_time.exact import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Durations,
    StepGraph,
    TransferSeconds,
    run_in_order,
)
from elaswave.types import Layout, Program


def compile_programs(
    layout: Layout,
    schedule: Schedule,
    *,
    forward_only: bool = False,
    max_in_flight: Mapping[int, int] | None = None,
    durations: Durations | None = None,
    transfer_s: TransferSeconds | None = None,
    only: int | None = None,
    begins_s: Mapping[int, float] | None = None,
) -> dict[int, Program]:
    """Compiles one program per worker that together run every hop of every route forward and backward.

    Args:
        layout: stages and routes.
        schedule: one of `SCHEDULES`.
        forward_only: leave out the backwards (evaluation); nothing is in flight then.
        max_in_flight: bounds of schedules other than ``gpipe`` instead of those of `in_flight_bounds`: less memory for
            less throughput, or more for more.
        durations: seconds of every action; None means that a forward takes as long as its stage is wide, and a backward
            twice as long, which is right where layers are balanced over stages.
        transfer_s: seconds of every transfer; None means that none takes time. Needs durations.
        only: a worker whose program is wanted; the others' may be left out, which takes less time.
        begins_s: worker -> seconds before which it begins nothing, since its step before lasts so long. The best order
            is then the one whose slowest worker takes the least time from its own beginning. Needs durations.
    Returns:
        For every worker of the layout its actions in order; empty for one that no route passes.
    Raises:
        ValueError: an unknown schedule, a worker of a stage without a bound of at least 1 (max_in_flight), a duration
            that is negative or not finite, or transfers or beginnings without durations.
    """
    if begins_s is not None and durations is None:
        raise ValueError("seconds at which workers begin are given, but none of actions: give durations as well")
    programs: dict[int, Program] = dict.fromkeys(layout.workers, ())
    for part, numbers in independent_pipelines(layout):
        if only is not None and only not in part.workers:
            continue
        bounds = _bounds(part, schedule, max_in_flight, forward_only=forward_only)
        # Whole ticks: times that are equal on paper are ties, and rounding errors order nothing.
        flow = StepGraph(part, durations, transfer_s, ticks=True, numbers=numbers)
        begins = [] if begins_s is None else [round(begins_s[worker] * flow.scale) for worker in flow.workers]
        limits = _limits(part, flow, schedule, bounds, forward_only=forward_only)
        compiled = _compile(flow, schedule, limits, begins, forward_only=forward_only)
        assert compiled is not None  # it may take as long as it wants
        programs.update(flow.decode(compiled))
    return programs


def compiled_step_s(
    layout: Layout,
    schedule: Schedule,
    durations: Durations,
    *,
    max_in_flight: Mapping[int, int] | None = None,
    transfer_s: TransferSeconds | None = None,
    within_s: float = float("inf"),
) -> float:
    """Computes the seconds of a step whose programs are compiled by the durations that it takes.

    The same to the last bit as `compile_programs` and `elaswave.planning.costs.step_time.exact.time_programs`, without
    the programs themselves.

    Args:
        layout, schedule, max_in_flight, durations, transfer_s: as of `compile_programs`.
        within_s: steps that are not shorter need not be timed.
    Returns:
        Infinity, or the seconds, where they are not below `within_s`.
    Raises:
        ValueError: as `compile_programs`.
    """
    parts = independent_pipelines(layout)
    longest = 0.0
    for part, _ in parts:
        flow = StepGraph(part, durations, transfer_s)
        bounds = _bounds(part, schedule, max_in_flight, forward_only=False)
        limits = _limits(part, flow, schedule, bounds)
        key = (schedule, limits, flow.digest)
        seconds = _TIMES.get(key)
        if seconds is None:
            # A compilation was broken off at this bound or a larger one before.
            if within_s <= (_AT_LEAST.get(key) or 0.0):
                return float("inf")
            whole = flow.in_ticks()
            # Ticks are rounded: no step that is a little shorter than the bound may be broken off.
            within = within_s * whole.scale * (1 + _SLACK)
            programs = _compile(whole, schedule, limits, [], forward_only=False, within=within)
            if programs is None:
                _AT_LEAST.put(key, within_s)
                return float("inf")
            # Ordered by ticks, but timed by the durations themselves: the bits of `time_programs`.
            seconds = run_in_order(flow, programs).makespan
            _TIMES.put(key, seconds)
        longest = max(longest, seconds)
    return longest


def _bounds(
    part: Layout, schedule: Schedule, max_in_flight: Mapping[int, int] | None, *, forward_only: bool
) -> Mapping[int, int]:
    """Computes the most micro-batches that each worker of a part may hold."""
    check_schedule(schedule)
    if max_in_flight is not None and schedule != "gpipe" and not forward_only:
        if too_low := [worker for worker in part.active if max_in_flight.get(worker, 0) < 1]:
            raise ValueError(f"max_in_flight of workers {too_low} is missing or below 1: nothing could ever begin")
        return max_in_flight
    return bounds_of_part(part, "gpipe" if forward_only else schedule)


Limits = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""The most that each worker of a flow may hold open, and from forward to the end of the backward, once or several
times."""


def _limits(
    part: Layout, flow: StepGraph, schedule: Schedule, bounds: Mapping[int, int], *, forward_only: bool = False
) -> Limits:
    held = tuple(bounds[worker] for worker in flow.workers)
    # Without backwards nothing is in flight, and no limit but the given one holds.
    if forward_only or not splits_backwards(schedule):
        return held, (held,)
    open_ = _at_most(held, bounds_of_part(part, "1f1b"), flow)
    fewer = _at_most(held, bounds_of_part(part, "zero-bubble"), flow)
    return open_, (fewer, held) if fewer != held else (held,)


def _compile(
    flow: StepGraph, schedule: Schedule, limits: Limits, begins: Sequence[int], *,
    forward_only: bool, within: float | None = None,
) -> list[list[int]] | None:  # fmt: skip
    """Compiles the programs of one part, as codes; returns None if they take as long as `within`."""
    open_, tried = limits
    key = (schedule, forward_only, open_, tried, tuple(begins), flow.digest)
    known = _PROGRAMS.get(key)
    if known is None:
        if splits_backwards(schedule) and not forward_only:
            known = _zero_bubble(flow, open_, tried, begins, within)
        else:
            kinds = (FORWARD,) if forward_only else _WHOLE
            waits = schedule == "gpipe"
            known = _Compiler(
                flow, tried[0], kinds=kinds, waits_for_forwards=waits, begins=begins, limit=within
            ).run()  # fmt: skip
        # What was broken off is not remembered: the key does not say at which bound.
        if known is not None:
            _PROGRAMS.put(key, known)
    return known


def _at_most(held: Sequence[int], bounds: Mapping[int, int], flow: StepGraph) -> tuple[int, ...]:
    return tuple(min(most, bounds[worker]) for most, worker in zip(held, flow.workers, strict=True))


def _zero_bubble(
    flow: StepGraph, open_: Sequence[int], tried: Sequence[Sequence[int]], begins: Sequence[int], within: float | None
) -> list[list[int]] | None:
    """Finds the best of several orders with split backwards.

    Args:
        flow: the work.
        open_: the most micro-batches that each worker may hold until their I, as under ``1f1b``.
        tried: the most that it may hold until their W, one or several times.
        begins: of each worker, or empty; see `_Compiler`.
        within: orders that take as long are of no use; None means that none is.
    """
    # That bound is for workers that all begin at 0.
    least = 0.0 if begins else _least_ticks(flow)
    if within is not None and least >= within:
        return None
    # The first one to beat is `1f1b` itself, so that splitting never makes a step longer.
    whole = _Compiler(flow, open_, begins=begins).run()
    assert whole is not None  # it has no limit
    halved = [[half for code in own for half in _halves(code)] for own in whole]
    ends = [own[-1] for own in run_in_order(flow, halved, begins or None).ends]
    best: list[list[int]] | None = halved
    shortest = _longest_since(ends, begins)
    if within is not None and shortest >= within:
        best, shortest = None, within
    # With few micro-batches open, alternating starves no worker; with as many open as fit, forwards must give way.
    for held in tried:
        for limits, prefers_backward in ((open_, False), (held, True)):
            # No order can be shorter.
            if shortest <= least:
                return best
            compiler = _Compiler(
                flow, held, open_=limits, kinds=_SPLIT, prefers_backward=prefers_backward, begins=begins, limit=shortest
            )  # fmt: skip
            found = compiler.run()
            if found is not None:
                best, shortest = found, _longest_since(compiler.ends, begins)
    return best


def _least_ticks(flow: StepGraph) -> float:
    """Computes what no order of split backwards gets below: a worker waits for its first input, does all its work, or
    all but its weight gradients before the last gradient goes back to the beginning of its route; and a micro-batch
    goes there and back to each of its hops, whose weight gradient follows."""
    num_workers, seconds = len(flow.workers), flow.seconds
    alone, weights = [0.0] * num_workers, [0.0] * num_workers
    arrives, returns = [float("inf")] * num_workers, [float("inf")] * num_workers
    there = back = 0.0
    heads: list[float] = []
    for node, worker in enumerate(flow.worker):
        code = 4 * node
        if flow.is_first[node]:
            there, back = 0.0, seconds[code + WEIGHT]
        else:
            there += seconds[code - 4 + FORWARD] + flow.sends_forward[node - 1]
            back += seconds[code - 4 + INPUT] + flow.sends_back[node]
        heads.append(there)
        alone[worker] += seconds[code + FORWARD] + seconds[code + INPUT]
        weights[worker] += seconds[code + WEIGHT]
        arrives[worker], returns[worker] = min(arrives[worker], there), min(returns[worker], back)
    longest = 0.0
    for node in reversed(range(len(flow.worker))):
        code = 4 * node
        if flow.is_last[node]:
            there = heads[node] + seconds[code + FORWARD]
        there += seconds[code + INPUT]
        longest = max(longest, there + seconds[code + WEIGHT])
        there += flow.sends_back[node]
    every = zip(arrives, alone, weights, returns, strict=True)
    return max([longest, *(first + work + max(weight, last) for first, work, weight, last in every if work or weight)])


def _longest_since(ends: Sequence[float], begins: Sequence[float]) -> float:
    """Computes the time from a worker's own beginning to its end, of the worker for which that is longest."""
    return max(end - begin for end, begin in zip(ends, begins or [0] * len(ends), strict=True))


def _halves(code: int) -> tuple[int, ...]:
    return (code + INPUT - BACKWARD, code + WEIGHT - BACKWARD) if code & 3 == BACKWARD else (code,)


_Value = TypeVar("_Value")


class _Memo(Generic[_Value]):
    """The last answers to so many questions. Answers are not changed by those who get them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: dict[Hashable, _Value] = {}

    def get(self, key: Hashable) -> _Value | None:
        """Returns the answer, if it is known."""
        found = self._known.pop(key, None)
        if found is not None:
            self._known[key] = found  # now the youngest
        return found

    def put(self, key: Hashable, value: _Value) -> None:
        """Remembers an answer, and forgets the one that was asked for longest ago."""
        self._known[key] = value
        if len(self._known) > self._size:
            del self._known[next(iter(self._known))]


_PROGRAMS: _Memo[list[list[int]]] = _Memo(128)
"""A pipeline of 20,000 actions takes about a megabyte."""
_TIMES: _Memo[float] = _Memo(8192)
_AT_LEAST: _Memo[float] = _Memo(8192)
"""What steps take at least whose time was not wanted more exactly."""
_SLACK = 1e-6
"""Relative; more than the rounding of durations to ticks makes."""


_WHOLE, _SPLIT = (FORWARD, BACKWARD), (FORWARD, INPUT, WEIGHT)
"""Kinds of actions with whole backwards, and with I and W instead of B."""


class _Compiler:
    """List scheduling: repeatedly moves to the next time at which an action ends and starts what is free to start.

    Args:
        flow: the work.
        held: the most micro-batches that each worker may hold, from forward to the end of the backward.
        open_: with split backwards, the most from forward to I; None means as many as `held`.
        kinds: of actions: forwards alone, with whole backwards, or with split ones.
        prefers_backward: a backward, or an I, comes before a forward if both could start.
        waits_for_forwards: a worker begins no backward before all its forwards.
        begins: when each worker begins, in the flow's unit; empty means at 0.
        limit: a worker that takes as long from its beginning makes the order useless; None means that none is.
    """

    def __init__(
        self,
        flow: StepGraph,
        held: Sequence[int],
        *,
        open_: Sequence[int] | None = None,
        kinds: tuple[int, ...] = _WHOLE,
        prefers_backward: bool = False,
        waits_for_forwards: bool = False,
        begins: Sequence[int] = (),
        limit: float | None = None,
    ) -> None:
        self._flow = flow
        self._held_bounds = held
        self._open_bounds = held if open_ is None else open_
        self._kinds = kinds
        self._split = INPUT in kinds
        self._prefers_backward = prefers_backward
        self._waits_for_forwards = waits_for_forwards
        self._forward_only = kinds == (FORWARD,)
        self.now: float = 0
        """Virtual time; after `run` that of the whole step."""
        num_workers = len(flow.workers)
        self.ends: list[float] = [0] * num_workers
        """When each worker ends its last action; after `run`."""
        self._busy = [False] * num_workers
        self._held, self._open = [0] * num_workers, [0] * num_workers
        self._forwards_left = [0] * num_workers
        for worker in flow.worker:
            self._forwards_left[worker] += 1
        self._latest = [float("inf")] * num_workers if limit is None else self._latest_starts(limit, begins)
        """When each worker has to begin its next action to end before the limit."""
        self._is_late = False
        # Ready nodes of each worker, lowest first: by micro-batch, then by position in the route.
        self._forwards: list[list[int]] = [[] for _ in range(num_workers)]
        self._backwards: list[list[int]] = [[] for _ in range(num_workers)]
        self._weights: list[list[int]] = [[] for _ in range(num_workers)]
        self._programs: list[list[int]] = [[] for _ in range(num_workers)]
        self._events: list[tuple[float, int, int]] = []
        """(time, 0, code) at which an action ends, (time, 1, code) at which the input of an action arrives, (time, 2,
        worker) at which a worker begins."""
        for worker, begin in enumerate(begins):
            if begin:
                self._busy[worker] = True
                self._events.append((begin, 2, worker))
        heapq.heapify(self._events)

    def _latest_starts(self, limit: float, begins: Sequence[int]) -> list[float]:
        flow = self._flow
        latest = [limit + begin for begin in begins] or [limit] * len(flow.workers)
        for node, worker in enumerate(flow.worker):
            latest[worker] -= sum(flow.seconds[4 * node + kind] for kind in self._kinds)
        return latest

    def run(self) -> list[list[int]] | None:
        """Schedules everything and returns the programs; None if they would take as long as the limit.

        One loop with everything in local names: planning spends most of its time in it.
        """
        flow, events = self._flow, self._events
        worker_of, is_first, is_last = flow.worker, flow.is_first, flow.is_last
        sends_forward, sends_back = flow.sends_forward, flow.sends_back
        forwards, backwards, busy, ends = self._forwards, self._backwards, self._busy, self.ends
        start, push, pop = self._start, heapq.heappush, heapq.heappop
        for node in flow.first_nodes:
            forwards[worker_of[node]].append(node)
        for worker in range(len(flow.workers)):
            if not busy[worker]:
                start(worker, 0)
        now: float = 0
        while events:
            if self._is_late:
                return None
            now = events[0][0]
            # Everything that ends now is taken in before anything starts, so that the order depends on
            # times alone. Workers then start in ascending order.
            touched = []
            while events and events[0][0] == now:
                _, what, code = pop(events)
                if what == 2:
                    busy[code] = False
                    touched.append(code)
                    continue
                node, kind = code >> 2, code & 3
                worker = worker_of[node]
                touched.append(worker)
                if what:
                    push((backwards if kind else forwards)[worker], node)
                    continue
                busy[worker] = False
                ends[worker] = now
                # What has waited for this action is made ready.
                if kind == FORWARD:
                    if is_last[node]:
                        if not self._forward_only:
                            push(backwards[worker], node)
                        continue
                    target, delay, ready = node + 1, sends_forward[node], forwards
                elif kind == WEIGHT or is_first[node]:
                    continue
                else:
                    target, delay, ready = node - 1, sends_back[node], backwards
                # Without a delay the input is there in this very instant, and may be begun with what ends now.
                if delay:
                    push(events, (now + delay, 1, 4 * target + (kind != FORWARD)))
                else:
                    push(ready[worker_of[target]], target)
                    touched.append(worker_of[target])
            for worker in touched if len(touched) == 1 else sorted(set(touched)):
                if not busy[worker]:
                    start(worker, now)
        self.now = now
        assert sum(map(len, self._programs)) == len(flow.worker) * (
            1 if self._forward_only else 3 if self._split else 2
        )
        return self._programs

    def _start(self, worker: int, now: float) -> None:
        """Lets a free worker begin something, if there is anything that it may begin."""
        forwards, backwards = self._forwards[worker], self._backwards[worker]
        if (
            forwards
            and not (backwards and self._prefers_backward)
            and self._held[worker] < self._held_bounds[worker]
            and self._open[worker] < self._open_bounds[worker]
        ):
            node = heapq.heappop(forwards)
            self._held[worker] += 1
            self._open[worker] += 1
            self._forwards_left[worker] -= 1
            kind = FORWARD
        elif backwards and not (self._waits_for_forwards and self._forwards_left[worker]):
            node = heapq.heappop(backwards)
            self._open[worker] -= 1
            if self._split:
                heapq.heappush(self._weights[worker], node)
                kind = INPUT
            else:
                self._held[worker] -= 1
                kind = BACKWARD
        elif self._weights[worker]:
            node = heapq.heappop(self._weights[worker])
            self._held[worker] -= 1
            kind = WEIGHT
        else:
            return
        code = 4 * node + kind
        seconds = self._flow.seconds[code]
        if now >= self._latest[worker]:
            self._is_late = True
        self._latest[worker] += seconds
        self._busy[worker] = True
        self._programs[worker].append(code)
        heapq.heappush(self._events, (now + seconds, 0, code))
