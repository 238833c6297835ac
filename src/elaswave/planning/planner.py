"""ElasWave's own planner: dataflow, graph, frequency and randomness together, after any event. Pure.

Candidates are shapes of the job, from leaving everything as it is (the lost workers' micro-batches go to the others of
their stage) over moving layers and workers to sharing layers between neighbours, each under each schedule that may be
chosen, of all workers or of all but some (`elaswave.planning.teams`); in small jobs every layout of whole layers
(`elaswave.planning.exhaustive`); pipelines of several depths and speeds (`elaswave.planning.pipelines`); and the
baselines' plans. All are scored in closed form, the best are built and timed exactly where that is
quick, and the one is taken that gets most done until the next event is to be expected, the time to move state included.
Since leaving everything as it is and the baselines are among those timed, a plan is never slower than they are.

Source: ElasWave (arXiv 2510.00606). Differs: workers change stage, neighbours share layers, cuts are spread over
several layers, pipelines of several depths run side by side, workers may be left out, schedules and baselines are
candidates, migration is weighed against a horizon.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster, ClusterEvent, worker_speeds
from elaswave.costs.schedules import IN_FLIGHT, Schedule, splits_backwards
from elaswave.costs.step_time.bound import StageTable
from elaswave.errors import InfeasiblePlan
from elaswave.planning.apportionment import apportion
from elaswave.planning.exhaustive import WORKERS_MAX, all_shapes
from elaswave.planning.frequency import check_power, choose_levels, common_levels
from elaswave.planning.memory_limits import MemoryBudget
from elaswave.planning.options import AXES, Options
from elaswave.planning.partition import choose_widths
from elaswave.planning.pipelines import Crew, mixed_pipelines, ranges_of
from elaswave.planning.plan import Allocation, Plan, Planner, StateTransfer, at_levels
from elaswave.planning.prediction import EXACT_WORKERS, Estimate, estimate, time_within_memory
from elaswave.planning.randomness import KEYS
from elaswave.planning.shapes import (
    Shape,
    balanced_widths,
    build,
    move_workers,
    score,
    shared_layers,
    whole_layers,
)
from elaswave.planning.shared_layers import Cut
from elaswave.planning.teams import Team, smaller_teams
from elaswave.planning.transfers import Sources, needed_transfers, shared_links

FINALISTS = 8
"""Candidates that are built worker by worker and timed, beside leaving everything as it is and the baselines'."""
FINALISTS_OF_SMALLER = 3
"""The same of workers without those that are left out."""
FINALISTS_AT_SCALE = 2
"""The same where candidates are judged by the closed form alone."""
MIXES = 2
"""Mixes of pipelines of several depths, which are chosen apart."""
WHOLE = 16
"""Layouts of whole layers of a small job, chosen apart, under the schedule that holds most in flight; a quarter as many
under others."""
WHOLE_ALIKE = 4
"""The same where all workers are alike: there the closed form is nearer to exact times."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """An allocation and what it brings."""

    allocation: Allocation
    origin: str
    step_s: float
    found: Estimate
    where: np.ndarray
    """Positions of its workers in the cluster, in the order of `found`."""
    transfers: tuple[StateTransfer, ...] = ()
    transfer_s: float = 0.0

    def done_until(self, horizon_s: float) -> float:
        """Steps until the horizon, if training stood still while state moves."""
        return max(0.0, horizon_s - self.transfer_s) / self.step_s if self.step_s else float("inf")


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
        baselines: planners whose allocations are candidates too, if they keep the batch.
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
        self._gone = np.array(event.workers if event.kind in ("lost", "drained") else (), dtype=np.int64)
        if cluster.num_workers == 0:
            raise InfeasiblePlan("workers: none is left, at least 1 is needed; start from the last durable checkpoint")
        self._exact = options.exact_actions if cluster.num_workers <= EXACT_WORKERS else 0
        self._old_start, self._old_stop, self._old_levels, self._stages, self._free = self._survivors()
        self._sources = Sources.of(costs, allocation, self._old_start, self._old_stop)
        self._levels = self._start_levels()
        self._teams = self._find_teams()
        self._horizon_s = options.horizon(cluster.num_workers)
        self._schedules = options.schedules or tuple(dict.fromkeys((allocation.schedule, "zero-bubble-h2")))
        self._failure: InfeasiblePlan | None = None

    # ------------------------------------------------------------------------------------------------ what there is

    def _survivors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray], np.ndarray]:
        """Layers and level that each worker has had, the workers of each stage that are left, and those in no stage."""
        ids = self._cluster.ids
        num_workers = len(ids)
        starts, stops, levels = (
            np.zeros(num_workers, np.int64),
            np.zeros(num_workers, np.int64),
            np.full(num_workers, -1),
        )
        absent = self._gone
        chains = sorted(self._before.chains, key=lambda chain: -len(chain.stages))
        middles = np.array([(share.start + share.stop) / 2 for share in chains[0].stages])
        members: list[list[np.ndarray]] = [[] for _ in middles]
        available = np.ones(num_workers, dtype=bool)
        available[np.searchsorted(ids, absent)[np.isin(absent, ids)]] = False
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
        return starts, stops, levels, stages, np.flatnonzero(available)

    def _start_levels(self) -> np.ndarray:
        """Levels before the frequency axis: common ones; without that axis workers keep theirs, if power permits."""
        cluster, all_workers = self._cluster, np.arange(self._cluster.num_workers)
        common = common_levels(cluster, all_workers)
        if "frequency" in self._options.axes:
            return common
        kept = np.where(self._old_levels >= 0, self._old_levels, common)
        draw = float(worker_speeds(cluster, all_workers, kept)[1].sum())
        return kept if cluster.power_limit_w is None or draw <= cluster.power_limit_w * (1 + 1e-9) else common

    def _find_teams(self) -> list[Team]:
        """All workers, and what is left without some, if that may be."""
        whole = Team(self._stages, self._free)
        if "graph" not in self._options.axes or not self._options.leave_out:
            return [whole]
        return [whole, *smaller_teams(whole, self._cluster.speed, one_by_one=bool(self._exact))]

    # -------------------------------------------------------------------------------------------------- candidates

    def run(self) -> Plan:
        """The plan."""
        stay = self._stay(self._teams[0])
        staying = self._pipelines_stay() if len(self._before.chains) > 1 else None
        candidates = [] if staying is None else [staying]
        is_free = staying is None or "graph" in self._options.axes
        one_chain = self._judge(stay, self._before.schedule) if stay is not None and is_free else None
        if one_chain is not None:
            candidates.append(one_chain)
            staying = staying or one_chain
        for team in self._teams:
            own = stay if not team.num_left_out else self._stay(team)
            candidates += self._finalists(team, own)
        candidates += self._whole_shapes(stay) + self._mixed() + self._from_baselines()
        if not candidates:
            assert self._failure is not None
            raise self._failure
        best = max(candidates, key=lambda each: (round(each.done_until(self._horizon_s), 9), each is staying))
        best = self._with_less_in_flight(best)
        tuned = self._tune(best)
        return self._plan(tuned, best, staying, stay)

    def _with_less_in_flight(self, best: _Candidate) -> _Candidate:
        """The same with half the activations, if that is no slower."""
        if best.allocation.schedule != "zero-bubble-h2" or self._options.schedules:
            return best
        allocation = replace(best.allocation, schedule="zero-bubble")
        step_s, found = self._timed(allocation, best.where)
        if step_s > best.step_s * (1 + 1e-9):
            return best
        return replace(best, allocation=allocation, step_s=step_s, found=found)

    def _pipelines_stay(self) -> _Candidate | None:
        """Every chain goes on by itself; None if one cannot: it has lost a stage, or does not fit."""
        chains = []
        for chain in self._before.chains:
            shares = []
            for share in chain.stages:
                left = share.workers[np.isin(share.workers, self._cluster.ids)]
                left = left[~np.isin(left, self._gone)]
                if not len(left):
                    return None
                where = self._cluster.index_of(left)
                speeds = worker_speeds(self._cluster, where, self._levels[where])[0]
                by_speed = "dataflow" in self._options.axes
                counts = apportion(chain.num_microbatches, 1.0 / speeds if by_speed else np.ones(len(left)))
                shares.append(replace(share, workers=left, num_microbatches=counts, levels=self._levels[where]))
            chains.append(replace(chain, stages=tuple(shares)))
        try:
            return self._judged(replace(self._before, chains=tuple(chains)), "rerouting")
        except InfeasiblePlan as failure:
            self._failure = failure
            return None

    def _stay(self, team: Team) -> Shape | None:
        """All workers stay where they are, in one chain, without stages that have lost all theirs; None if
        impossible."""
        kept = tuple(own for own in team.stages if len(own)) or (team.free,)
        chains = self._before.chains
        if len(kept) == len(team.stages) and len(chains) == 1:
            origin = "rerouting" + team.shown
            return Shape(members=kept, cuts=chains[0].cuts, num_microbatches=self._num_microbatches, origin=origin)
        try:
            cuts = self._whole(kept, self._budget(kept, self._before.schedule, short=True))
        except InfeasiblePlan as failure:
            self._failure = failure
            return None
        number = f"{len(kept)} stage{'s' * (len(kept) > 1)}"
        origin = f"{number} instead of {len(team.stages)}" if len(chains) == 1 else "one chain of stages"
        return Shape(members=kept, cuts=cuts, num_microbatches=self._num_microbatches, origin=origin + team.shown)

    def _finalists(self, team: Team, stay: Shape | None) -> list[_Candidate]:
        """The most promising shapes of a team, as candidates."""
        most = FINALISTS_AT_SCALE
        if self._exact:
            most = FINALISTS_OF_SMALLER if team.num_left_out else FINALISTS
        elif team.num_left_out:
            most = 1
        found: list[_Candidate] = []
        for shape, schedule in self._shapes(team, stay):
            if len(found) >= most:
                break
            if candidate := self._judge(shape, schedule):
                found.append(candidate)
        return found

    def _shapes(self, team: Team, stay: Shape | None) -> list[tuple[Shape, Schedule]]:
        """What the graph axis offers, and other schedules, the most promising first."""
        ranked: list[tuple[float, int, Shape, Schedule]] = []
        groups: list[tuple[tuple[np.ndarray, ...], str]] = []
        may_move = bool(self._exact) or not team.num_left_out  # planning for many workers has to be quick
        if "graph" in self._options.axes:
            if stay is not None:
                groups.append((stay.members, ""))
            if self._options.move_workers and may_move:
                groups += self._with_moves(team)
        # Where memory permits, split backwards with much in flight are never slower than anything else.
        schedules = sorted(self._schedules, key=lambda schedule: -IN_FLIGHT.get(schedule, 0))
        if "zero-bubble-h2" in schedules:  # which is tried with less in flight, too, where memory is short
            schedules = [schedule for schedule in schedules if schedule != "zero-bubble"]
        for schedule in schedules:
            is_first = not team.num_left_out and schedule == self._before.schedule
            offers = [] if stay is None or is_first else [stay]
            offers += self._only_workers(stay, team) if may_move else []
            permitted = True
            for members, moves in groups:
                budget = self._budget(members, schedule)
                offers += self._cut_anew(members, moves, budget, team)
                if budget.was_short:
                    permitted = False
                    if schedule == "zero-bubble-h2":  # half of what it wants in flight is worth having, too
                        offers += self._cut_anew(members, moves, self._budget(members, "zero-bubble"), team)
                    offers += self._cut_anew(members, moves, self._budget(members, schedule, short=True), team)
            for shape in offers:
                seconds = score(self._cluster, self._costs, shape, schedule)
                # Regular pipelines do better than the closed form says next to shared layers: they are always timed.
                is_kept = not team.num_left_out and stay is not None and shape.cuts is stay.cuts
                first = 0.0 if self._exact and is_kept else seconds
                ranked.append((first, len(ranked), shape, schedule))
            if splits_backwards(schedule) and permitted and groups:
                break
        return [(shape, schedule) for _, _, shape, schedule in sorted(ranked, key=lambda entry: entry[:2])]

    def _whole_shapes(self, stay: Shape | None) -> list[_Candidate]:
        """The best layouts of whole layers of a small job."""
        options, team = self._options, self._teams[0]
        if "graph" not in options.axes or team.num_workers > WORKERS_MAX:
            return []
        stages = None if options.move_workers else stay.members if stay is not None else tuple(team.stages)
        held = np.stack([self._old_start, self._old_stop], axis=1)
        everybody = np.concatenate([*team.stages, team.free] if stages is None else stages)
        found = []
        schedules = sorted(self._schedules, key=lambda schedule: -IN_FLIGHT.get(schedule, 0))
        alike = bool(np.ptp(self._cluster.speed) == 0 and np.ptp(self._cluster.memory_bytes) == 0)
        number = WHOLE_ALIKE if alike else WHOLE
        for most, schedule in zip((number, *(number // 4,) * len(schedules)), schedules):
            ranked = all_shapes(
                self._cluster, self._costs, everybody, held, self._num_microbatches, schedule,
                followers=options.followers, most=most, stages=stages,
            )  # fmt: skip
            found += [self._judge(each.shape, schedule) for each in ranked]
        return [each for each in found if each is not None]

    def _only_workers(self, stay: Shape | None, team: Team) -> list[Shape]:
        """Shapes in which only workers move: where a worker is missed least, and evenly."""
        if stay is None or len(stay.members) < len(team.stages) or "graph" not in self._options.axes:
            return []
        if not self._options.move_workers:
            return []
        table = StageTable.of(stay.held(self._costs.num_layers), stay.cuts, self._num_microbatches, self._costs)
        shapes: list[Shape] = []
        for seconds in (table.work, np.ones(len(team.stages))):
            widths = choose_widths(seconds, team.num_workers, self._num_microbatches, stay.widths.tolist())
            if widths is None or np.array_equal(widths, stay.widths):
                continue
            moved = int(np.maximum(0, widths - stay.widths).sum())
            members = move_workers(self._cluster, team.stages, team.free, widths)
            origin = f"moving {moved} worker{'s' * (moved > 1)} into other stages{team.shown}"
            shapes.append(replace(stay, members=members, origin=origin))
        return shapes

    def _with_moves(self, team: Team) -> list[tuple[tuple[np.ndarray, ...], str]]:
        """Stages with other workers in them, and what was moved."""
        found = []
        stages, total = team.stages, team.num_workers
        if total < len(stages):
            return []
        for widths in balanced_widths(self._cluster, self._costs, stages, total, self._num_microbatches):
            members = move_workers(self._cluster, stages, team.free, widths)
            # A stage either gives workers or gets some.
            moved = sum(max(0, len(now) - len(was)) for now, was in zip(members, stages, strict=True))
            if moved:
                found.append((members, f"{moved} worker{'s' * (moved > 1)} into other stages"))
        return found

    def _cut_anew(self, members: tuple[np.ndarray, ...], moves: str, budget: MemoryBudget, team: Team) -> list[Shape]:
        """Shapes with these stages: whole layers, shared layers, shared layers spread over several."""
        cuts: list[tuple[tuple[Cut, ...], str]] = []
        try:
            cuts.append((self._whole(members, budget), "layers"))
        except InfeasiblePlan as failure:
            self._failure = failure
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
                origin="moving " + " and ".join(filter(None, [moves, what])) + team.shown,
            )
            for own, what in cuts
        ]

    def _budget(self, members: Sequence[np.ndarray], schedule: Schedule, *, short: bool = False) -> MemoryBudget:
        return MemoryBudget(
            self._cluster,
            self._costs,
            members,
            self._num_microbatches,
            schedule,
            self._options.followers,
            short=short,
        )

    def _whole(self, members: Sequence[np.ndarray], budget: MemoryBudget) -> tuple[Cut, ...]:
        return whole_layers(self._cluster, self._costs, members, self._num_microbatches, budget)

    def _mixed(self) -> list[_Candidate]:
        """Pipelines of several depths, where candidates are timed exactly."""
        options = self._options
        if not (self._exact and "graph" in options.axes and options.move_workers and options.mix_depths):
            return []
        found = []
        crew = Crew(
            usual=ranges_of(max(self._before.chains, key=lambda chain: len(chain.stages))),
            members=self._stages,
            free=self._free,
            held=np.stack([self._old_start, self._old_stop], axis=1),
            levels=self._levels,
        )
        for allocation, origin in mixed_pipelines(
            self._cluster,
            self._costs,
            crew,
            self._num_microbatches,
            max(self._schedules, key=lambda schedule: IN_FLIGHT.get(schedule, 0)),
            followers=options.followers,
            most=MIXES,
            leave_out=options.leave_out,
        ):
            try:
                found.append(self._judged(allocation, origin))
            except InfeasiblePlan as failure:
                self._failure = self._failure or failure
        return found

    def _from_baselines(self) -> list[_Candidate]:
        """The baselines' allocations, judged like our own."""
        found = []
        for baseline in self._baselines:
            try:
                theirs = baseline(self._cluster, self._costs, self._before, self._event)
                if theirs.allocation.num_microbatches == self._num_microbatches:
                    found.append(self._judged(theirs.allocation, f"as {theirs.policy} does"))
            except InfeasiblePlan as failure:
                self._failure = self._failure or failure
        return found

    def _judge(self, shape: Shape, schedule: Schedule) -> _Candidate | None:
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
            return self._judged(allocation, shape.origin, np.concatenate(shape.members))
        except InfeasiblePlan as failure:
            self._failure = self._failure or failure
            return None

    def _judged(self, allocation: Allocation, origin: str, where: np.ndarray | None = None) -> _Candidate:
        """An allocation as a candidate.

        Raises:
            InfeasiblePlan: it takes more memory or power than there is.
        """
        if where is None:
            where = self._cluster.index_of(
                np.concatenate([share.workers for chain in allocation.chains for share in chain.stages])
            )
        step_s, found = self._timed(allocation, where)
        check_power(self._cluster, found.peak_power_w)
        transfers, seconds = needed_transfers(
            self._cluster,
            self._costs,
            allocation,
            where,
            self._old_start,
            self._old_stop,
            sources=self._sources,
            followers=self._options.followers,
        )
        return _Candidate(
            allocation=allocation,
            origin=origin,
            step_s=step_s,
            found=found,
            where=where,
            transfers=transfers,
            transfer_s=seconds,
        )

    def _timed(self, allocation: Allocation, where: np.ndarray) -> tuple[float, Estimate]:
        """Seconds of a step, with fewer micro-batches in flight where memory is short, and what else it takes.

        Raises:
            InfeasiblePlan: it does not fit into memory.
        """
        timed = time_within_memory(
            self._cluster,
            self._costs,
            allocation,
            followers=self._options.followers,
            exact_actions=self._exact,
            where=where,
        )
        return timed.step_s, timed.found

    # --------------------------------------------------------------------------------------------------- frequency

    def _tune(self, best: _Candidate) -> _Candidate:
        """The candidate at other frequency levels, if that helps."""
        cluster, options = self._cluster, self._options
        if "frequency" not in options.axes or all(len(device.levels) == 1 for device in cluster.devices):
            return best
        where = best.where
        levels = np.concatenate([share.levels for chain in best.allocation.chains for share in chain.stages])
        level_speed = worker_speeds(cluster, where, levels)[0] / cluster.speed[where]
        loads = best.found.busy_s * level_speed
        limit = cluster.power_limit_w
        tuned = []
        floors: tuple[float, ...] = (0.0,)
        if options.goal == "fastest":  # slack below the base level saves power, but seldom leaves the step as it is
            floors = (1.0, 0.0) if self._exact else (1.0,)
        for floor in floors:
            pace = None if options.goal == "fastest" else best.found.pace_s
            chosen = choose_levels(
                loads, cluster.device[where], cluster.devices, power_limit_w=limit, pace_s=pace, least_speed=floor
            )
            allocation = at_levels(best.allocation, chosen)
            step_s, found = self._timed(allocation, where)
            tuned.append(replace(best, allocation=allocation, found=found, step_s=step_s))
        bound = best.step_s * (1 + 1e-9)
        helping = [each for each in tuned if each.step_s <= bound]
        if options.goal == "fastest":
            return min([best, *helping], key=lambda each: (round(each.step_s / bound, 9), each.found.power_w))
        return min([best, *helping], key=lambda each: each.found.energy_j)

    # ------------------------------------------------------------------------------------------------------- the plan

    def _plan(self, tuned: _Candidate, best: _Candidate, staying: _Candidate | None, stay: Shape | None) -> Plan:
        order = np.argsort(tuned.found.workers, kind="stable")
        # A layer that nobody has computed with has to be fetched before training goes on.
        has_all = bool(np.all(self._sources.holders > 0))
        interim_s = self._interim_s(staying) if tuned.transfers and has_all and staying is not None else None
        fetch_s = tuned.transfer_s if tuned.transfers and interim_s is None else 0.0
        return Plan(
            policy="elaswave",
            allocation=tuned.allocation,
            predicted_step_s=tuned.step_s,
            predicted_pause_s=self._options.pause_of(
                self._event.kind, self._cluster.num_workers, moves=bool(tuned.transfers)
            )
            + fetch_s,
            # The step in hand is done again: half of one on average.
            lost_work_s=0.5 * tuned.step_s if self._event.kind == "lost" else 0.0,
            transfers=tuned.transfers,
            copy_s=0.0 if interim_s is None else tuned.transfer_s / self._options.copy_share,
            interim_step_s=interim_s,
            memory_bytes=tuned.found.memory_bytes[order],
            power_w=tuned.found.power_w,
            contributions=self._contributions(tuned, best, staying, stay),
            reason=self._reason(tuned, staying),
        )

    def _interim_s(self, staying: _Candidate) -> float:
        """Seconds of a step of the workers where they are while state is copied in the background."""
        cluster, costs = shared_links(self._cluster, self._costs, self._options.copy_share)
        timed = time_within_memory(
            cluster,
            costs,
            staying.allocation,
            followers=self._options.followers,
            exact_actions=self._exact,
            where=staying.where,
        )
        return timed.step_s

    def _contributions(
        self, tuned: _Candidate, best: _Candidate, staying: _Candidate | None, stay: Shape | None
    ) -> Mapping[str, str]:
        axes = self._options.axes
        brought: dict[str, str] = dict.fromkeys(sorted(AXES), "off")
        if "randomness" in axes:
            brought["randomness"] = KEYS.describe()
        if staying is None:
            forced = "rerouting alone does not fit into memory"
            brought["dataflow"] = forced if "dataflow" in axes else "off"
            brought["graph"] = f"{best.origin}: {forced}" if "graph" in axes else "off"
        else:
            if "dataflow" in axes:
                before = staying.found.step_s
                speeds = self._cluster.speed
                if stay is not None and len(self._before.chains) == 1 and float(speeds.min()) < float(speeds.max()):
                    even = build(self._cluster, self._costs, stay, self._before.schedule, self._levels, by_speed=False)
                    before = estimate(self._cluster, self._costs, even).step_s
                brought["dataflow"] = f"micro-batches by speed: {_change(before, staying.found.step_s)}"
            if "graph" in axes:
                brought["graph"] = f"{best.origin}: {_change(staying.step_s, best.step_s)}"
        if "frequency" in axes:
            power = f", {tuned.found.power_w:.0f} W instead of {best.found.power_w:.0f} W"
            same = tuned is best or not best.found.power_w
            brought["frequency"] = f"{_change(best.step_s, tuned.step_s)}{'' if same else power}"
        return brought

    def _reason(self, tuned: _Candidate, staying: _Candidate | None) -> str:
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
