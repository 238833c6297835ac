"""ElasWave's own planner: dataflow, graph, frequency and randomness together, after any event. Pure.

Candidates are shapes of the job, from leaving everything as it is (the lost workers' micro-batches go to the others of
their stage) over moving layers and workers to sharing layers between neighbours, each under each schedule that may be
chosen, of all workers or of all but some (`elaswave.planning.search.pipelines`); the same in some stages fewer or more
than before; in small jobs every layout of whole layers (`elaswave.planning.search.exhaustive`); pipelines of several
depths and speeds (`elaswave.planning.search.pipelines`); and the baselines' plans. All are scored in closed form, the
best are built and timed exactly where that is quick, and the one is taken that gets most done until the next event is
to be expected, the time to move state included. Since leaving everything as it is and the baselines are among those
timed, a plan is never slower than they are.

Source: ElasWave (arXiv 2510.00606). Differs: workers change stage, neighbours share layers, cuts are spread over
several layers, pipelines of several depths run side by side, workers may be left out, schedules and baselines are
candidates, migration is weighed against a horizon.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent, worker_speeds
from elaswave.planning.costs.schedules import IN_FLIGHT, Schedule, splits_backwards
from elaswave.planning.costs.step_time.bound import StageTable
from elaswave.planning.frequency import choose_levels
from elaswave.planning.plan import Allocation, Plan, Planner, at_levels
from elaswave.planning.programs.prediction import EXACT_WORKERS, estimate, time_within_memory
from elaswave.planning.programs.shared_layers import Cut
from elaswave.planning.search.apportionment import apportion
from elaswave.planning.search.candidates import (
    SLACK,
    Candidate,
    Judge,
    Options,
    contributions_of,
    reason_of,
    start_levels,
    survivors_of,
)
from elaswave.planning.search.exhaustive import WORKERS_MAX, all_shapes
from elaswave.planning.search.memory_limits import MemoryBudget
from elaswave.planning.search.partition import choose_widths
from elaswave.planning.search.pipelines import (
    LONGER,
    SHORTER,
    PipelineWorkers,
    WorkerSubset,
    mixed_pipelines,
    ranges_of,
    smaller_subsets,
)
from elaswave.planning.search.shapes import (
    Shape,
    balanced_widths,
    build,
    move_workers,
    score,
    shared_layers,
    whole_layers,
)
from elaswave.planning.state_moves.transfers import shared_links

FINALISTS = 8
"""Candidates that are built worker by worker and timed, beside leaving everything as it is and the baselines'."""
FINALISTS_OF_SMALLER = 3
"""The same of workers without those that are left out."""
FINALISTS_OF_OTHER_DEPTHS = 6
"""The same of all workers in another number of stages than before."""
FINALISTS_AT_SCALE = 2
"""The same where candidates are judged by the closed form alone."""
MIXES = 2
"""Mixes of pipelines of several depths, which are chosen apart."""
WHOLE = 16
"""Layouts of whole layers of a small job, chosen apart, under the schedule that holds most in flight; a quarter as many
under others."""
WHOLE_ALIKE = 4
"""The same where all workers are alike: there the closed form is nearer to exact times."""
HOLDING_LESS: Mapping[Schedule, tuple[Schedule, ...]] = {
    "zero-bubble-h2": ("zero-bubble", "1f1b"),
    "zero-bubble": ("1f1b",),
}
"""Schedules that hold less: where memory is short, cuts that leave room for what they hold are worth having."""


def plan(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    event: ClusterEvent,
    *,
    options: Options | None = None,
    baselines: Sequence[Planner] = (),
) -> Plan:
    """Plans what to do after an event.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        allocation: before the event.
        event: what happened.
        options: what may be done; None means everything.
        baselines: planners whose allocations are candidates too, if they keep the batch, whatever the axes are; levels
            are theirs only with the axis of frequency.
    Raises:
        InfeasiblePlan: names the violated limit and by how much.
        ValueError: options that cannot be.
    """
    return _Planning(cluster, costs, allocation, event, options or Options(), baselines).run()


class _Planning:
    """One plan in the making."""

    def __init__(
        self,
        cluster: Cluster,
        costs: Costs,
        allocation: Allocation,
        event: ClusterEvent,
        options: Options,
        baselines: Sequence[Planner],
    ) -> None:
        self._cluster = cluster
        self._costs = costs
        self._before = allocation
        self._event = event
        self._options = options
        self._baselines = baselines
        self._num_microbatches = allocation.num_microbatches
        if cluster.num_workers == 0:
            raise InfeasiblePlan("workers: none is left, at least 1 is needed; start from the last durable checkpoint")
        # Larger jobs are judged by the closed form alone: planning for many workers has to be quick.
        self._exact = options.exact_actions if cluster.num_workers <= EXACT_WORKERS else 0
        self._left = left = survivors_of(cluster, allocation, event)
        self._levels = start_levels(cluster, left.levels, may_change="frequency" in options.axes)
        self._judge = Judge(cluster, costs, allocation, left, self._levels, options, self._exact)
        self._subsets = self._find_subsets()
        self._schedules = options.schedules or tuple(dict.fromkeys((allocation.schedule, "zero-bubble-h2")))

    # ------------------------------------------------------------------------------------------------ what there is

    def _find_subsets(self) -> list[WorkerSubset]:
        """Lists all workers, and what is left without some, if that may be."""
        whole = WorkerSubset(self._left.stages, self._left.free)
        if "graph" not in self._options.axes or not self._options.leave_out:
            return [whole]
        return [whole, *smaller_subsets(whole, self._cluster.speed, one_by_one=bool(self._exact))]

    # -------------------------------------------------------------------------------------------------- candidates

    def run(self) -> Plan:
        """Makes the plan."""
        stay = self._stay(self._subsets[0])
        staying = self._pipelines_stay(self._before.schedule) if len(self._before.chains) > 1 else None
        candidates = [] if staying is None else [staying]
        # Without the graph axis pipelines that can go on as they are stay so: one chain of all workers moves layers.
        if len(self._before.chains) > 1 and "graph" not in self._options.axes:
            others = [each for each in self._schedules if each != self._before.schedule]
            candidates += [each for each in map(self._pipelines_stay, others) if each is not None]
            stay = None if candidates else stay
        one_chain = self._judge.of_shape(stay, self._before.schedule) if stay is not None else None
        if one_chain is not None:
            candidates.append(one_chain)
            staying = staying or one_chain
        # Mixed pipelines are often the best. Once they are known, others that cannot be faster are not timed.
        mixed = self._mixed()
        for subset in self._subsets:
            own = stay if not subset.num_left_out else self._stay(subset)
            candidates += self._finalists(self._shapes(subset, own), self._most(subset))
        candidates += self._finalists(self._of_other_depths(), FINALISTS_OF_OTHER_DEPTHS)
        candidates += self._whole_shapes(stay) + mixed + self._from_baselines()
        if not candidates:
            assert self._judge.failure is not None
            raise self._judge.failure
        # Rounded, so that rounding errors decide nothing. Among equals the workers stay where they are: nothing moves.
        best = max(candidates, key=lambda each: (round(each.done_until(self._judge.horizon_s), 9), each is staying))
        best = self._with_less_in_flight(best)
        tuned = self._tune(best)
        return self._plan(tuned, best, staying, stay)

    def _with_less_in_flight(self, best: Candidate) -> Candidate:
        """Returns the same candidate with half the activations, if that is no slower."""
        # Who names schedules has chosen among these.
        if best.allocation.schedule != "zero-bubble-h2" or self._options.schedules:
            return best
        allocation = replace(best.allocation, schedule="zero-bubble")
        # `timed` tells infinity of steps that are not shorter than the bound, and one that is as long is wanted.
        within_s = best.step_s * (1 + SLACK)
        step_s, found = self._judge.timed(allocation, best.where, within_s=within_s, known=best.found)
        if step_s > best.step_s * (1 + 1e-9):
            return best
        return replace(best, allocation=allocation, step_s=step_s, found=found)

    def _pipelines_stay(self, schedule: Schedule) -> Candidate | None:
        """Every chain goes on by itself; None if one cannot: it has lost a stage, or does not fit."""
        chains = []
        for chain in self._before.chains:
            shares = []
            for share in chain.stages:
                left = share.workers[np.isin(share.workers, self._cluster.ids)]
                # The event may take away workers that the cluster still has.
                left = left[~np.isin(left, self._left.gone)]
                if not len(left):
                    return None
                where = self._cluster.index_of(left)
                speeds = worker_speeds(self._cluster, where, self._levels[where])
                by_speed = "dataflow" in self._options.axes
                counts = apportion(chain.num_microbatches, 1.0 / speeds if by_speed else np.ones(len(left)))
                shares.append(replace(share, workers=left, num_microbatches=counts, levels=self._levels[where]))
            chains.append(replace(chain, stages=tuple(shares)))
        try:
            return self._judge.of_allocation(Allocation(chains=tuple(chains), schedule=schedule), "rerouting")
        except InfeasiblePlan as failure:
            # In the place of any other reason: staying is what a plan cannot do without (`Judge.failure`).
            self._judge.failure = failure
            return None

    def _stay(self, subset: WorkerSubset) -> Shape | None:
        """All workers stay where they are, in one chain, without stages that have lost all theirs; None if
        impossible."""
        # Where no stage has a worker left, those in no stage go on.
        kept = tuple(own for own in subset.stages if len(own)) or (subset.free,)
        chains = self._before.chains
        if len(kept) == len(subset.stages) and len(chains) == 1:
            origin = "rerouting" + subset.shown
            return Shape(members=kept, cuts=chains[0].cuts, num_microbatches=self._num_microbatches, origin=origin)
        try:
            # One micro-batch in flight is enough here: to go on slowly is better than no plan.
            cuts = self._whole(kept, self._budget(kept, self._before.schedule, at_most=1))
        except InfeasiblePlan as failure:
            self._judge.failure = failure
            return None
        number = f"{len(kept)} stage{'s' * (len(kept) > 1)}"
        origin = f"{number} instead of {len(subset.stages)}" if len(chains) == 1 else "one chain of stages"
        return Shape(members=kept, cuts=cuts, num_microbatches=self._num_microbatches, origin=origin + subset.shown)

    def _most(self, subset: WorkerSubset) -> int:
        """Candidates of a team."""
        if self._exact:
            return FINALISTS_OF_SMALLER if subset.num_left_out else FINALISTS
        return 1 if subset.num_left_out else FINALISTS_AT_SCALE

    def _finalists(self, ranked: Iterable[tuple[Shape, Schedule]], most: int) -> list[Candidate]:
        """Makes candidates of the first shapes that can be."""
        found: list[Candidate] = []
        for shape, schedule in ranked:
            if len(found) >= most:
                break
            if candidate := self._judge.of_shape(shape, schedule):
                found.append(candidate)
        return found

    def _shapes(self, subset: WorkerSubset, stay: Shape | None) -> list[tuple[Shape, Schedule]]:
        """Lists what the graph axis offers, and other schedules, the most promising first."""
        groups: list[tuple[tuple[np.ndarray, ...], str]] = []
        may_move = bool(self._exact) or not subset.num_left_out  # planning for many workers has to be quick
        if "graph" in self._options.axes:
            if stay is not None:
                groups.append((stay.members, ""))
            if self._options.move_workers and may_move:
                groups += self._with_moves(subset)
        return self._ranked(subset, stay, groups, may_move=may_move)

    def _ranked(
        self,
        subset: WorkerSubset,
        stay: Shape | None,
        groups: Sequence[tuple[tuple[np.ndarray, ...], str]],
        *,
        may_move: bool,
    ) -> list[tuple[Shape, Schedule]]:
        """Shapes with these stages, and that in which all stay, under the schedules that may be chosen."""
        ranked: list[tuple[float, int, Shape, Schedule]] = []
        # Where memory permits, split backwards with much in flight are never slower than anything else.
        schedules = sorted(self._schedules, key=lambda schedule: -IN_FLIGHT.get(schedule, 0))
        if "zero-bubble-h2" in schedules:  # which is tried with less in flight, too, where memory is short
            schedules = [schedule for schedule in schedules if schedule != "zero-bubble"]
        for schedule in schedules:
            # `run` has judged this shape under the job's own schedule already.
            is_first = not subset.num_left_out and schedule == self._before.schedule
            offers = [] if stay is None or is_first else [stay]
            offers += self._only_workers(stay, subset) if may_move else []
            permitted = True
            for members, moves in groups:
                budget = self._budget(members, schedule)
                offers += self._cut_anew(members, moves, budget, subset)
                # Memory has bent these cuts: also offer those that hold less, and the schedules that do.
                if budget.was_short:
                    permitted = False
                    known = [shape.cuts for shape in offers if shape.members is members]
                    for each in self._budgets_of_less(members, schedule):
                        more = self._cut_anew(members, moves, each, subset)
                        offers += [shape for shape in more if shape.cuts not in known]
                        known += [shape.cuts for shape in more]
            for shape in offers:
                seconds = score(self._cluster, self._costs, shape, schedule)
                # Regular pipelines do better than the closed form says next to shared layers: they are always timed.
                is_kept = not subset.num_left_out and stay is not None and shape.cuts is stay.cuts
                first = 0.0 if self._exact and is_kept else seconds
                ranked.append((first, len(ranked), shape, schedule))
            # This one has had all the memory that it wants, so none that follows can be faster.
            if splits_backwards(schedule) and permitted and groups:
                break
        return [(shape, schedule) for _, _, shape, schedule in sorted(ranked, key=lambda entry: entry[:2])]

    def _whole_shapes(self, stay: Shape | None) -> list[Candidate]:
        """Finds the best layouts of whole layers of a small job."""
        options, subset = self._options, self._subsets[0]
        if "graph" not in options.axes or subset.num_workers > WORKERS_MAX:
            return []
        stages = None if options.move_workers else stay.members if stay is not None else tuple(subset.stages)
        held = self._left.held
        everybody = np.concatenate([*subset.stages, subset.free] if stages is None else stages)
        found = []
        schedules = sorted(self._schedules, key=lambda schedule: -IN_FLIGHT.get(schedule, 0))
        alike = bool(np.ptp(self._cluster.speed) == 0 and np.ptp(self._cluster.memory_bytes) == 0)
        number = WHOLE_ALIKE if alike else WHOLE
        for most, schedule in zip((number, *(number // 4,) * len(schedules)), schedules):
            ranked = all_shapes(
                self._cluster, self._costs, everybody, held, self._num_microbatches, schedule,
                followers=options.followers, most=most, stages=stages,
            )  # fmt: skip
            found += [self._judge.of_shape(each.shape, schedule) for each in ranked]
        return [each for each in found if each is not None]

    def _only_workers(self, stay: Shape | None, subset: WorkerSubset) -> list[Shape]:
        """Shapes in which only workers move: where a worker is missed least, and evenly."""
        if stay is None or len(stay.members) < len(subset.stages) or "graph" not in self._options.axes:
            return []
        if not self._options.move_workers:
            return []
        table = StageTable.of(stay.held(self._costs.num_layers), stay.cuts, self._num_microbatches, self._costs)
        shapes: list[Shape] = []
        for seconds in (table.work, np.ones(len(subset.stages))):
            widths = choose_widths(seconds, subset.num_workers, self._num_microbatches, stay.widths.tolist())
            if widths is None or np.array_equal(widths, stay.widths):
                continue
            moved = int(np.maximum(0, widths - stay.widths).sum())
            members = move_workers(self._cluster, subset.stages, subset.free, widths)
            origin = f"moving {moved} worker{'s' * (moved > 1)} into other stages{subset.shown}"
            shapes.append(replace(stay, members=members, origin=origin))
        return shapes

    def _with_moves(self, subset: WorkerSubset) -> list[tuple[tuple[np.ndarray, ...], str]]:
        """Stages with other workers in them, and what was moved."""
        found = []
        stages, total = subset.stages, subset.num_workers
        if total < len(stages):
            return []
        for widths in balanced_widths(self._cluster, self._costs, stages, total, self._num_microbatches):
            members = move_workers(self._cluster, stages, subset.free, widths)
            # A stage either gives workers or gets some.
            moved = sum(max(0, len(now) - len(was)) for now, was in zip(members, stages, strict=True))
            if moved:
                found.append((members, f"{moved} worker{'s' * (moved > 1)} into other stages"))
        return found

    def _of_other_depths(self) -> list[tuple[Shape, Schedule]]:
        """Lists shapes of all workers in some stages fewer or more, in the order of the layers that they have held,
        where candidates are timed exactly; the most promising come first."""
        if not (self._exact and "graph" in self._options.axes and self._options.move_workers):
            return []
        subset, held = self._subsets[0], self._left.held
        usual, total = len(subset.stages), subset.num_workers
        everybody = np.concatenate([*subset.stages, subset.free])
        order = everybody[np.argsort(held[everybody].sum(axis=1), kind="stable")]
        groups = []
        for depth in range(max(1, usual - SHORTER), min(usual + LONGER, self._costs.num_layers, total) + 1):
            if depth == usual:
                continue
            even = np.array_split(order, depth)
            for widths in balanced_widths(self._cluster, self._costs, even, total, self._num_microbatches):
                members = tuple(map(np.sort, np.split(order, np.cumsum(widths)[:-1])))
                groups.append((members, f"workers into {depth} stage{'s' * (depth > 1)}"))
        return self._ranked(subset, None, groups, may_move=True)

    def _cut_anew(
        self, members: tuple[np.ndarray, ...], moves: str, budget: MemoryBudget, subset: WorkerSubset
    ) -> list[Shape]:
        """Shapes with these stages: whole layers, shared layers, shared layers spread over several."""
        cuts: list[tuple[tuple[Cut, ...], str]] = []
        try:
            cuts.append((self._whole(members, budget), "layers"))
        except InfeasiblePlan as failure:
            self._judge.failure = failure
            # Where whole layers do not fit, shared ones may, unless stages outnumber layers.
            if len(members) > self._costs.num_layers:
                return []
        if self._options.share_layers:
            for widen in (False, True):
                shared = shared_layers(self._cluster, self._costs, members, self._num_microbatches, budget, widen=widen)
                if shared is not None and shared not in [known for known, _ in cuts]:
                    cuts.append((shared, "layers, boundary layers shared"))
        return [
            Shape(
                members=members,
                cuts=own,
                num_microbatches=self._num_microbatches,
                origin="moving " + " and ".join(filter(None, [moves, what])) + subset.shown,
            )
            for own, what in cuts
        ]

    def _budgets_of_less(self, members: Sequence[np.ndarray], schedule: Schedule) -> list[MemoryBudget]:
        """Budgets for less than is wanted in flight: what else makes full use of equal stages, and one micro-batch."""
        less = [self._budget(members, each) for each in HOLDING_LESS.get(schedule, ())]
        return [*less, self._budget(members, schedule, at_most=1)]

    def _budget(self, members: Sequence[np.ndarray], schedule: Schedule, *, at_most: int | None = None) -> MemoryBudget:
        return MemoryBudget(
            self._cluster,
            self._costs,
            members,
            self._num_microbatches,
            schedule,
            self._options.followers,
            at_most=at_most,
        )

    def _whole(self, members: Sequence[np.ndarray], budget: MemoryBudget) -> tuple[Cut, ...]:
        return whole_layers(self._cluster, self._costs, members, self._num_microbatches, budget)

    def _mixed(self) -> list[Candidate]:
        """Pipelines of several depths, where candidates are timed exactly."""
        options = self._options
        if not (self._exact and "graph" in options.axes and options.move_workers and options.mix_depths):
            return []
        found = []
        # Only the schedule that holds most in flight is tried: `run` tries half of it for whatever is the best.
        pipeline_workers = PipelineWorkers(
            usual=ranges_of(max(self._before.chains, key=lambda chain: len(chain.stages))),
            members=self._left.stages,
            free=self._left.free,
            held=self._left.held,
            levels=self._levels,
        )
        for allocation, origin in mixed_pipelines(
            self._cluster,
            self._costs,
            pipeline_workers,
            self._num_microbatches,
            max(self._schedules, key=lambda schedule: IN_FLIGHT.get(schedule, 0)),
            followers=options.followers,
            most=MIXES,
            leave_out=options.leave_out,
            by_speed="dataflow" in options.axes,
        ):
            try:
                found.append(self._judge.of_allocation(allocation, origin))
            except InfeasiblePlan as failure:
                self._judge.failure = self._judge.failure or failure
        return found

    def _from_baselines(self) -> list[Candidate]:
        """Judges the baselines' allocations like our own; where levels may not be chosen, at those of our own."""
        found = []
        for baseline in self._baselines:
            try:
                theirs = baseline(self._cluster, self._costs, self._before, self._event)
                allocation = theirs.allocation
                # Some baselines drop micro-batches: their steps would be of another batch.
                if allocation.num_microbatches != self._num_microbatches:
                    continue
                if "frequency" not in self._options.axes:
                    shares = [share for chain in allocation.chains for share in chain.stages]
                    where = self._cluster.index_of(np.concatenate([share.workers for share in shares]))
                    allocation = at_levels(allocation, self._levels[where])
                found.append(self._judge.of_allocation(allocation, f"as {theirs.policy} does"))
            except InfeasiblePlan as failure:
                self._judge.failure = self._judge.failure or failure
        return found

    # --------------------------------------------------------------------------------------------------- frequency

    def _tune(self, best: Candidate) -> Candidate:
        """Returns the candidate at other frequency levels, if that helps."""
        cluster = self._cluster
        if "frequency" not in self._options.axes or all(len(device.levels) == 1 for device in cluster.devices):
            return best
        where = best.where
        levels = np.concatenate([share.levels for chain in best.allocation.chains for share in chain.stages])
        level_speed = worker_speeds(cluster, where, levels) / cluster.speed[where]
        # What each is busy at the base level, whatever levels the candidate has.
        loads = best.found.busy_s * level_speed
        tuned, bound = [best], best.step_s * (1 + 1e-9)
        # Slack below the base level saves power, but seldom leaves the step as it is.
        for floor in (1.0, 0.0) if self._exact else (1.0,):
            chosen = choose_levels(
                loads, cluster.device[where], cluster.devices, power_limit_w=cluster.power_limit_w, least_speed=floor
            )
            if np.array_equal(chosen, levels):
                continue
            allocation = at_levels(best.allocation, chosen)
            step_s, found = self._judge.timed(allocation, where)
            if step_s <= bound:
                tuned.append(replace(best, allocation=allocation, found=found, step_s=step_s))
        # Among steps that are equally long the one that draws least.
        return min(tuned, key=lambda each: (round(each.step_s / bound, 9), each.found.power_w))

    # ------------------------------------------------------------------------------------------------------- the plan

    def _plan(self, tuned: Candidate, best: Candidate, staying: Candidate | None, stay: Shape | None) -> Plan:
        # The estimate lists workers chain by chain, the plan by id.
        order = np.argsort(tuned.found.workers, kind="stable")
        # A layer that nobody has computed with has to be fetched before training goes on.
        has_all = bool(np.all(self._judge.sources.holders > 0))
        interim_s = self._interim_s(staying) if tuned.transfers and has_all and staying is not None else None
        fetch_s = tuned.transfer_s if tuned.transfers and interim_s is None else 0.0
        return Plan(
            policy="elaswave",
            allocation=tuned.allocation,
            predicted_step_s=tuned.step_s,
            predicted_pause_s=self._options.pause_of(self._event.kind, moves=bool(tuned.transfers)) + fetch_s,
            # The step in hand is done again: half of one on average.
            lost_work_s=0.5 * tuned.step_s if self._event.kind == "lost" else 0.0,
            transfers=tuned.transfers,
            copy_s=0.0 if interim_s is None else tuned.transfer_s / self._options.copy_share,
            interim_step_s=interim_s,
            memory_bytes=tuned.found.memory_bytes[order],
            power_w=tuned.found.power_w,
            contributions=contributions_of(
                self._options.axes, tuned, best, staying, None if staying is None else self._even_s(staying, stay)
            ),
            reason=reason_of(tuned, staying),
        )

    def _even_s(self, staying: Candidate, stay: Shape | None) -> float:
        """Computes the seconds of a step of the workers where they are if micro-batches were not dealt by speed."""
        speeds = self._cluster.speed
        if "dataflow" not in self._options.axes or stay is None or len(self._before.chains) > 1:
            return staying.found.step_s
        if float(speeds.min()) == float(speeds.max()):
            return staying.found.step_s
        even = build(self._cluster, self._costs, stay, self._before.schedule, self._levels, by_speed=False)
        return estimate(self._cluster, self._costs, even, where=np.concatenate(stay.members)).step_s

    def _interim_s(self, staying: Candidate) -> float:
        """Computes the seconds of a step of the workers where they are while state is copied in the background."""
        cluster, costs = shared_links(self._cluster, self._costs, self._options.copy_share)
        timed = time_within_memory(
            cluster,
            costs,
            staying.allocation,
            followers=self._options.followers,
            exact_actions=self._exact,
            where=staying.where,
            known=staying.found,
        )
        return timed.step_s
