"""Oobleck: a pipeline that has lost workers goes on as a shorter one, from a set of pipeline templates.

Jang, Yang, Zhang, Jin, Chowdhury: Oobleck: Resilient Distributed Training of Large Models Using Pipeline Templates,
SOSP 2023 (arXiv 2309.08125). What of it is modelled, and how:

- *Pipeline templates* (section 4.1): one for every number of nodes from n0, the fewest whose memory holds the model.
  A node is a worker here, and each stage runs on one: S = n, the end of the paper's search that its published runtime
  uses too. Layers are split over a template's stages so that the slowest is as fast as possible; the paper minimizes
  T1 + T2 + T3, which differs only where several splits share the slowest stage. Each template is split by itself, as in
  the paper and its published generator (github.com/SymbioticLab/Oobleck, csrc/planning/pipeline_template.cpp).
  ``aligned=True``, the policy ``oobleck_aligned``: stages of one template neither enclose nor lie inside stages of
  another, since only such pipelines can be one layout of this engine; a pipeline so short that it has no such template
  is treated as one below n0. docs/simulation.md says what that costs.
- *f + 1 replicas*: at least ``num_faults + 1`` pipelines are kept while workers for them are there; that any f losses
  leave a copy of every layer follows. If all copies of a layer are lost, the job begins again from a checkpoint.
- *Reconfiguration* (section 5): a pipeline that has lost workers is instantiated again from the template of the
  workers it has left. If those are fewer than n0, it borrows from the pipelines that have most to spare; if none has,
  its workers go to the others (merging).
- *Batch distribution* (section 4.2.2): micro-batches over pipelines such that the slowest is as fast as possible, with
  the time of a pipeline linear in its micro-batches. The paper gives pipelines of one template the same number; here
  they may differ by one, which is faster.
- *Copying layers*: a worker that gets layers it did not hold is sent them, parameters and optimizer state, while
  training stands.

Simplified: workers that come, or are left over, first fill pipelines that are short (shortest first), then make new
ones, then lengthen others by one each, so that no worker idles (the paper's guarantee); the paper generates all
combinations anew. All of that happens in the background. Which pipeline a worker of many equal ones is in is told by
its place among its stage's ids. Half a step is lost to a failure. A straggler is put out if that is faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs, MemoryModel
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan, StateTransfer
from elaswave.planning.policy import full_restart
from elaswave.planning.policy.policy_parts import (
    balanced_ranges,
    chain_of,
    copy_s,
    fallback_plan,
    gone_from,
    is_in,
    make_plan,
    unused,
)
from elaswave.planning.policy.replication import Replication
from elaswave.planning.search.apportionment import apportion_pipelines, evenly
from elaswave.planning.search.pipelines import Ranges, linear_s, ranges_of
from elaswave.planning.search.templates import template_beside

NAME = "oobleck"
REPLICATION = Replication(
    unit="stages",
    what="each pipeline holds the whole state once, so every holder of a layer holds all of it",
    source="Oobleck (arXiv 2309.08125), abstract: f + 1 pipeline replicas tolerate any f simultaneous failures, by "
    "model states that are replicated across them",
)


def plan_oobleck(
    cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent, *, times: RecoveryTimes | None = None,
    num_faults: int = 1, aligned: bool = False, name: str = NAME,
) -> Plan:  # fmt: skip
    """Instantiates pipelines again from templates.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        allocation: before the event; chains of equal pipelines.
        event: what happened.
        times: of recovery; see `RecoveryTimes`.
        num_faults: losses at once that are to be survived: the paper's f.
        aligned: only templates that can be one layout of this engine; see the module.
        name: of the policy.
    Raises:
        InfeasiblePlan: too few workers are left for a pipeline, or memory.
    """
    times = times or RecoveryTimes()
    if event.kind == "slowed" and event.speed < 1:
        return _slowed(cluster, costs, allocation, event, times, num_faults, aligned, name)
    fleet = _Fleet(cluster, costs, allocation, aligned=aligned)
    gone = gone_from(event)
    fleet.drop(gone)
    if not fleet.covers_model():
        restarted = full_restart.restart(cluster, costs, allocation, times, planned=event.kind == "drained")
        return fallback_plan(restarted, name, "all copies of a layer are lost")
    fleet.mend()
    fleet.take_in(unused(cluster, allocation).tolist(), num_faults + 1)
    after, transfers = fleet.allocation(), fleet.transfers()
    if event.kind == "lost":
        pause_s = times.recover_s + copy_s(cluster, costs, allocation, transfers)
    else:
        pause_s = times.join_s
    depths = ", ".join(f"{count} x {depth}" for depth, count in sorted(fleet.depths().items(), reverse=True))
    return make_plan(
        name,
        cluster,
        costs,
        after,
        pause_s=pause_s,
        lost_steps=0.5 if event.kind == "lost" and len(gone) else 0.0,
        transfers=transfers,
        reason=f"pipelines x workers of each: {depths}"
        + ("" if fleet.num_pipelines > num_faults else f"; fewer than f + 1 = {num_faults + 1} are left")
        + ("; stages lie inside one another: predicted, this engine cannot run it" if is_nested(after) else ""),
    )


def is_nested(allocation: Allocation) -> bool:
    """Tells whether a stage of one pipeline lies inside a stage of another, so that they are no layout of this
    engine."""
    keys = sorted({(stage.start, stage.stop) for chain in allocation.chains for stage in chain.stages})
    return any(before[1] > after[1] for before, after in pairwise(keys))


def _slowed(
    cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent, times: RecoveryTimes, num_faults: int,
    aligned: bool, name: str,
) -> Plan:  # fmt: skip
    """All pipelines wait for a straggler, or its pipeline goes on without it, whichever is faster."""
    now = make_plan(
        name, cluster, costs, allocation, pause_s=0.0, lost_steps=0.0, reason="all pipelines wait for the straggler"
    )
    loss = ClusterEvent(kind="drained", workers=event.workers)
    try:
        without = plan_oobleck(
            cluster.without(event.workers), costs, allocation, loss, times=times, num_faults=num_faults,
            aligned=aligned, name=name,
        )  # fmt: skip
    except InfeasiblePlan:
        return now
    if without.predicted_step_s >= now.predicted_step_s or without.predicted_pause_s >= times.restart_s:
        return now
    return replace(without, reason=f"put out as slow: {without.reason}")


@dataclass
class _Pipeline:
    """One pipeline that is not like most: its workers in the order of their layers."""

    workers: list[int]


class _Fleet:
    """All pipelines: those of the most common depth as columns of ids, the others one by one."""

    def __init__(self, cluster: Cluster, costs: Costs, allocation: Allocation, *, aligned: bool) -> None:
        self._cluster, self._costs, self._before = cluster, costs, allocation
        self._aligned = aligned
        self._num_microbatches = allocation.num_microbatches
        self._memory = MemoryModel.of_width(costs, 1, copies=1)
        usual = max(
            allocation.chains, key=lambda chain: (sum(stage.width for stage in chain.stages), len(chain.stages))
        )
        self.depth = len(usual.stages)
        self._ranges: dict[int, Ranges] = {}
        for chain in allocation.chains:
            self._ranges.setdefault(len(chain.stages), ranges_of(chain))
        self._ranges[self.depth] = ranges_of(usual)
        number = min(stage.width for stage in usual.stages)
        self._columns = [stage.workers[:number] for stage in usual.stages]
        self._odd: list[_Pipeline] = []
        self._spare: list[int] = []
        for chain in allocation.chains:
            width = number if chain is usual else min(stage.width for stage in chain.stages)
            if chain is not usual:
                for row in range(width):
                    self._odd.append(_Pipeline([int(stage.workers[row]) for stage in chain.stages]))
            for stage in chain.stages:
                self._spare += stage.workers[width:].tolist()

    @property
    def num_pipelines(self) -> int:
        return len(self._columns[0]) + len(self._odd)

    def depths(self) -> dict[int, int]:
        """Maps workers of a pipeline to the number of such pipelines."""
        found = {self.depth: len(self._columns[0])} if len(self._columns[0]) else {}
        for pipeline in self._odd:
            found[len(pipeline.workers)] = found.get(len(pipeline.workers), 0) + 1
        return found

    def drop(self, gone: np.ndarray) -> None:
        """Takes out workers; the pipelines that lose one are no longer like the others."""
        lost = set(gone.tolist())
        rows = [is_in(column, gone) for column in self._columns]
        broken = np.unique(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.int64)
        for row in broken.tolist():
            left = [int(column[row]) for column in self._columns]
            self._odd.append(_Pipeline([worker for worker in left if worker not in lost]))
        if len(broken):
            stays = np.ones(len(self._columns[0]), dtype=bool)
            stays[broken] = False
            self._columns = [column[stays] for column in self._columns]
        for pipeline in self._odd:
            pipeline.workers = [worker for worker in pipeline.workers if worker not in lost]
        self._odd = [pipeline for pipeline in self._odd if pipeline.workers]
        self._spare = [worker for worker in self._spare if worker not in lost]

    def covers_model(self) -> bool:
        """Tells whether a worker is left that holds each layer."""
        if len(self._columns[0]):
            return True
        held = self._held([worker for pipeline in self._odd for worker in pipeline.workers] + self._spare)
        layers = np.zeros(self._costs.num_layers, dtype=bool)
        for start, stop in held.values():
            layers[start:stop] = True
        return bool(layers.all())

    def mend(self) -> None:
        """Lengthens pipelines that are too short to hold the model, or takes them apart (section 5)."""
        for pipeline in sorted(self._odd, key=lambda each: -len(each.workers)):
            while pipeline.workers and not self._can_have(len(pipeline.workers)):
                lenders = [each for each in self._odd if each is not pipeline and self._can_have(len(each.workers) - 1)]
                if lenders:
                    lender = max(lenders, key=lambda each: len(each.workers))
                elif len(self._columns[0]) and self._can_have(self.depth - 1):
                    lender = self._single_out()
                else:
                    self._spare += pipeline.workers
                    pipeline.workers = []
                    break
                pipeline.workers.append(lender.workers.pop())
        self._odd = [pipeline for pipeline in self._odd if pipeline.workers]

    def take_in(self, workers: Sequence[int], fewest_pipelines: int) -> None:
        """Finds a place for workers without one.

        Raises:
            InfeasiblePlan: all workers together are too few for one pipeline.
        """
        spare = sorted({*self._spare, *workers})
        self._spare = []
        if not self.num_pipelines:
            self._ranges.clear()  # no pipeline is left beside which a template would have to fit
            if len(spare) < (shortest := self._fewest_workers()):
                raise InfeasiblePlan(
                    f"oobleck: a pipeline needs {shortest} workers to hold the model, but {len(spare)} are left: "
                    f"{shortest - len(spare)} too few"
                )
            number = min(len(spare), self.depth)
            self._template(number)  # first of all: aligned ones have to fit beside it
            self._odd.append(_Pipeline(spare[:number]))
            spare = spare[number:]
        while spare and (short := [each for each in self._longer() if len(each.workers) < self.depth]):
            self._insert(min(short, key=lambda each: len(each.workers)), spare.pop(0))
        while len(spare) >= self._new_pipeline(fewest_pipelines):
            number = self._new_pipeline(fewest_pipelines)
            self._odd.append(_Pipeline(spare[:number]))
            spare = spare[number:]
        while spare:
            if len(self._columns[0]) and self._can_have(self.depth + 1):
                target = self._single_out()
            elif able := self._longer():
                target = min(able, key=lambda each: len(each.workers))
            else:
                break  # no pipeline can use another worker
            self._insert(target, spare.pop(0))

    def _longer(self) -> list[_Pipeline]:
        """Lists those of the unusual pipelines that can have another worker."""
        return [each for each in self._odd if self._can_have(len(each.workers) + 1)]

    def _new_pipeline(self, fewest_pipelines: int) -> int:
        """Counts the workers of the next new pipeline: as few as can be while there are too few pipelines."""
        if self.num_pipelines < fewest_pipelines:
            return next(depth for depth in range(1, self.depth + 1) if depth == self.depth or self._can_have(depth))
        return self.depth

    def allocation(self) -> Allocation:
        """Pipelines of one depth become one chain; micro-batches as section 4.2.2 deals them."""
        by_depth: dict[int, list[np.ndarray]] = {}
        for depth in sorted(self.depths(), reverse=True):
            rows = [each.workers for each in self._odd if len(each.workers) == depth]
            columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)] if rows else []
            if depth == self.depth and len(self._columns[0]):
                columns = [
                    np.concatenate([usual, own]) for usual, own in zip(self._columns, columns, strict=True)
                ] if columns else self._columns  # fmt: skip
            by_depth[depth] = [np.sort(column) for column in columns]
        numbers = [len(columns[0]) for columns in by_depth.values()]
        times = [linear_s(self._costs, self._template(depth), self._before.schedule) for depth in by_depth]
        totals = apportion_pipelines(self._num_microbatches, numbers, times)
        chains = tuple(
            chain_of(self._cluster, self._template(depth), columns, evenly(total, number))
            for (depth, columns), total, number in zip(by_depth.items(), totals, numbers, strict=True)
            if total  # more pipelines than micro-batches: workers of the slowest ones are spare
        )
        return Allocation(chains=chains, schedule=self._before.schedule)

    def transfers(self) -> tuple[StateTransfer, ...]:
        """Lists what workers have to be sent: the layers of their new stage that they did not hold."""
        held = self._held([worker for pipeline in self._odd for worker in pipeline.workers])
        lacking: dict[tuple[int, int], list[int]] = {}
        for pipeline in self._odd:
            for worker, (start, stop) in zip(pipeline.workers, self._template(len(pipeline.workers)), strict=True):
                for missing in _difference((start, stop), held.get(worker)):
                    lacking.setdefault(missing, []).append(worker)
        return tuple(
            StateTransfer(
                start=start,
                stop=stop,
                workers=tuple(sorted(workers)),
                num_bytes=len(workers) * self._memory.sent_bytes(start, stop),
            )
            for (start, stop), workers in sorted(lacking.items())
        )

    def _single_out(self) -> _Pipeline:
        """Takes the last of the usual pipelines as one of its own."""
        pipeline = _Pipeline([int(column[-1]) for column in self._columns])
        self._columns = [column[:-1] for column in self._columns]
        self._odd.append(pipeline)
        return pipeline

    def _insert(self, pipeline: _Pipeline, worker: int) -> None:
        """Adds a worker at the place where the others have to be sent least."""
        ranges = self._template(len(pipeline.workers) + 1)
        held = self._held(pipeline.workers)
        best: tuple[float, int] | None = None
        for place in range(len(pipeline.workers) + 1):
            order = [*pipeline.workers[:place], -1, *pipeline.workers[place:]]
            sent = sum(
                self._memory.sent_bytes(*missing)
                for member, layers in zip(order, ranges, strict=True)
                if member >= 0
                for missing in _difference(layers, held.get(member))
            )
            if best is None or sent < best[0]:
                best = (sent, place)
        assert best is not None
        pipeline.workers.insert(best[1], worker)

    def _held(self, workers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Finds the layers that these workers held before; those that are new are left out."""
        wanted = np.array(sorted(workers), dtype=np.int64)
        return {
            int(stage.workers[position]): (stage.start, stage.stop)
            for chain in self._before.chains
            for stage in chain.stages
            for position in is_in(stage.workers, wanted).tolist()
        }

    def _can_have(self, depth: int) -> bool:
        """Tells whether a pipeline of so many workers holds the model, and can run beside the others if it has to."""
        if depth in self._ranges and depth >= self.depth:
            return True
        return self._fewest_workers() <= depth <= self._costs.num_layers and self._find_template(depth) is not None

    def _find_template(self, depth: int) -> Ranges | None:
        if depth not in self._ranges:
            others = frozenset(
                layers for ranges in (self._ranges.values() if self._aligned else ()) for layers in ranges
            )  # fmt: skip
            found = template_beside(self._costs, (1.0,) * depth, others)
            if found is None:
                return None
            self._ranges[depth] = found.ranges
        return self._ranges[depth]

    def _template(self, depth: int) -> Ranges:
        found = self._find_template(depth)
        assert found is not None, depth
        return found

    def _fewest_workers(self) -> int:
        """Computes n0: stages of the shortest pipeline whose workers' memory holds the model and what is in flight."""
        room = float(self._cluster.memory_bytes.min())
        model = MemoryModel.of_width(self._costs, max(1, self.num_pipelines), copies=2)
        depth = self.depth
        while depth > 1 and all(
            model.parts(start, stop, min(depth - 1, self._num_microbatches)).total <= room
            for start, stop in _balanced(self._costs, depth - 1)
        ):
            depth -= 1
        return depth


def _difference(wanted: tuple[int, int], held: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Finds the layers wanted that are not held, as ranges."""
    if held is None:
        return [wanted]
    (start, stop), (first, last) = wanted, held
    parts = [(start, min(stop, first)), (max(start, last), stop)]
    return [part for part in parts if part[0] < part[1]] if first < stop and start < last else [wanted]


@lru_cache(maxsize=256)
def _balanced(costs: Costs, depth: int) -> Ranges:
    """Makes the template of this depth by itself."""
    return balanced_ranges(costs, depth)
