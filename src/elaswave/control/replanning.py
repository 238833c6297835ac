"""How the coordinator asks the planners: a loss becomes an event, a plan becomes a layout of exactly the members.

ElasWave's survivors go on at once with the interim layout of `elaswave.planning.recovery`, for which nothing is
planned; what its planner then finds (layers that migrate, workers that change stage, shared layers, another schedule,
other frequencies) follows as a planned change. A rival's plan is installed by the recovery itself.

Workers without micro-batches stay where they were, so that they go on holding blocks and voting.
"""

import copy
import dataclasses
import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from elaswave.config.devices import cluster_of, device_of, emulated_costs
from elaswave.config.schema import Config
from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster, ClusterEvent
from elaswave.costs.recovery_times import RecoveryTimes
from elaswave.costs.schedules import Schedule
from elaswave.costs.step_time.exact import time_programs
from elaswave.costs.step_time.work import Durations, durations_of
from elaswave.errors import InfeasiblePlan
from elaswave.planning.execution import execution_of, programs_of
from elaswave.planning.layout import validate_layout
from elaswave.planning.memory_limits import layout_limits
from elaswave.planning.options import AXES, Options
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.planner import plan as elaswave_plan
from elaswave.planning.policies import ROLL_BACK, make_policies
from elaswave.planning.prediction import levels_of
from elaswave.planning.recovery import survivor_layout
from elaswave.planning.routes import allocation_of, make_routes
from elaswave.types import ExecutionParameters, Hop, Layout, Stage

ELASWAVE = "elaswave"
GAIN_MIN = {"emulated": 0.005, "cpu": 0.03}
"""A layout is changed only for a step that is predicted to be shorter by this share: predictions are as exact as costs
are known."""

_log = logging.getLogger("elaswave.control")


class Replanned(NamedTuple):
    """A layout for the members, and what it is expected to bring."""

    layout: Layout
    execution: ExecutionParameters
    reason: str
    predicted_step_s: float


def planners_of(config: Config) -> dict[str, Planner]:
    """All policies as a run asks them: with its pauses, its followers, and what its devices can do.

    Args:
        config: of the run, resolved.
    """
    policies = dict(
        make_policies(RecoveryTimes(restart_s=config.elastic.restart_s, horizon_s=config.elastic.horizon_s))
    )
    rivals = tuple(each for name, each in policies.items() if name not in (ELASWAVE, "torchft"))
    policies[ELASWAVE] = partial(_elaswave, config=config, rivals=rivals)
    return policies


def _elaswave(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    event: ClusterEvent,
    *,
    config: Config,
    rivals: tuple[Planner, ...],
) -> Plan:
    is_emulated = config.device.kind == "emulated"
    options = Options(
        axes=AXES if config.device.frequency != "none" else AXES - {"frequency"},
        horizon_s=config.elastic.horizon_s,
        followers=config.elastic.num_followers,
        # What a backward costs in two halves is not known of a real device before it has run any.
        schedules=None if is_emulated else (allocation.schedule,),
    )
    return elaswave_plan(cluster, costs, allocation, event, options=options, rivals=rivals if is_emulated else ())


class Replanner:
    """Asks the run's policy.

    Args:
        config: of the run, resolved.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.policy = config.elastic.policy
        self._cluster = cluster_of(config)
        self._device = device_of(config)
        self._policies = planners_of(config)

    def at(self, speeds: Mapping[int, float]) -> "Replanner":
        """The same, for workers that have turned out to be slower than configured.

        Args:
            speeds: worker -> its speed relative to what the configuration says; 1 for those that are not in it.
        """
        if not speeds:
            return self
        other = copy.copy(self)
        slowed = [speeds.get(worker, 1.0) for worker in self._cluster.ids.tolist()]
        other._cluster = dataclasses.replace(self._cluster, speed=self._cluster.speed * np.array(slowed))
        return other

    @property
    def restarts(self) -> bool:
        """Whether every loss leads back to the last durable checkpoint."""
        return self.policy in ROLL_BACK

    def predict(self, layout: Layout, execution: ExecutionParameters, costs: Costs) -> float:
        """Seconds of a step: the very programs that the workers run, timed.

        Args:
            layout, execution: in force.
            costs: of the layers.
        """
        programs = programs_of(layout, execution, self._config.layout.schedule)
        durations = self._durations(layout.workers, execution.levels, costs)
        return time_programs(layout, programs, durations).step_s + costs.step_overhead_s

    def within_memory(self, layout: Layout, execution: ExecutionParameters) -> ExecutionParameters:
        """The execution with what emulated devices have room for under another layout, as far as it fits at all.

        Args:
            layout: from now on.
            execution: before.
        """
        if self._config.device.kind != "emulated":
            return execution
        schedule: Schedule = execution.schedule or self._config.layout.schedule  # type: ignore[assignment]
        limits = layout_limits(
            self._cluster,
            emulated_costs(self._config),
            layout,
            schedule,
            followers=self._config.elastic.num_followers,
            must_fit=False,
        )
        return msgspec.structs.replace(execution, in_flight=limits)

    def rival(self, layout: Layout, execution: ExecutionParameters, lost: Collection[int], costs: Costs) -> Replanned:
        """What the run's policy, a rival's, does after a loss.

        Falls back to the survivors' interim layout where the policy has no plan (a replica group is all that was left),
        or fails: the reason says so.

        Args:
            layout, execution: in force before the loss.
            lost: the workers.
            costs: of the layers.
        """
        interim = survivor_layout(layout, lost)
        try:
            plan = self._ask(self.policy, layout, execution, lost, costs)
            return self._replanned(plan, interim, execution, costs)
        except Exception as error:  # whatever is wrong with a rival must not end a job that can go on
            is_answer = isinstance(error, InfeasiblePlan | ValueError)
            _log.warning("%s has no plan: %s", self.policy, error, exc_info=not is_answer)
            reason = f"{self.policy} has no plan ({error}): survivors keep their stages"
            execution = self.within_memory(interim, execution)
            return Replanned(interim, execution, reason, self.predict(interim, execution, costs))

    def improve(
        self, before: Layout, present: Layout, execution: ExecutionParameters, lost: Collection[int], costs: Costs
    ) -> tuple[float, Replanned | None]:
        """What ElasWave's planner makes of a loss that survivors have dealt with for the moment.

        Args:
            before: the layout that the loss struck.
            present: the survivors'.
            execution: in force.
            lost: the workers.
            costs: of the layers.
        Returns:
            The predicted step of the present layout, and a better one if there is any.
        """
        now_s = self.predict(present, execution, costs)
        if not set(lost) & set(before.workers):
            return now_s, None
        try:
            plan = self._ask(ELASWAVE, before, execution, lost, costs)
            found = self._replanned(plan, present, execution, costs)
        except (InfeasiblePlan, ValueError) as error:
            _log.warning("no better layout is planned: %s", error)
            return now_s, None
        better = found.predicted_step_s < now_s * (1 - GAIN_MIN[self._config.device.kind])
        return now_s, found if better else None

    def _ask(
        self, policy: str, layout: Layout, execution: ExecutionParameters, lost: Collection[int], costs: Costs
    ) -> Plan:
        gone = set(lost) & set(layout.workers)
        absent = [int(worker) for worker in self._cluster.ids if worker not in layout.workers or worker in gone]
        schedule: Schedule = execution.schedule or self._config.layout.schedule  # type: ignore[assignment]
        levels = {worker: execution.levels.get(worker, self._device.base_level) for worker in layout.workers}
        if policy != ELASWAVE:
            layout = without_idle(layout)  # what is idle is out of the rivals' sight until somebody joins
        allocation = allocation_of(layout, schedule, levels)
        event = ClusterEvent(kind="lost", workers=tuple(sorted(gone)))
        return self._policies[policy](self._cluster.without(absent), costs, allocation, event)

    def _replanned(self, plan: Plan, present: Layout, execution: ExecutionParameters, costs: Costs) -> Replanned:
        """A plan as a layout of the present members."""
        allocation = plan.allocation
        same_batch = allocation.num_microbatches == present.num_microbatches
        # Micro-batches that stay with their workers are no faster for it, and now and then much slower: they meet in
        # another order than in pipelines made anew.
        layouts = [make_routes(allocation, costs, self._cluster)]
        if same_batch:
            layouts.insert(0, make_routes(allocation, costs, self._cluster, previous=present))
        base = self._device.base_level
        levels = {worker: level for worker, level in levels_of(allocation).items() if level != base}
        execution = execution_of(costs, self._speeds(levels), schedule=allocation.schedule, levels=levels)
        found = []
        for layout in (with_idle(each, present) for each in layouts):
            own = self.within_memory(layout, execution)
            found.append((self.predict(layout, own, costs), layout, own))
        seconds, layout, execution = min(found, key=lambda each: each[0])
        validate_layout(layout)
        return Replanned(layout, execution, f"{plan.policy}: {plan.reason}", seconds)

    def _speeds(self, levels: Mapping[int, int]) -> dict[int, float]:
        base = self._device.base_level
        return {
            worker: speed * self._device.levels[levels.get(worker, base)].speed
            for worker, speed in enumerate(self._cluster.speed.tolist())
        }

    def _durations(self, workers: Collection[int], levels: Mapping[int, int], costs: Costs) -> Durations:
        known = {worker: levels.get(worker, self._device.base_level) for worker in workers}
        return durations_of(costs.layer_s, self._cluster.speed_of(known))


def without_idle(layout: Layout) -> Layout:
    """A layout without the workers that no route passes; stages that nobody is left in stay out, too."""
    busy = {hop.worker for route in layout.routes for hop in route}
    members = [tuple(worker for worker in stage.workers if worker in busy) for stage in layout.stages]
    numbers = {stage: number for number, stage in enumerate(index for index, each in enumerate(members) if each)}
    stages = tuple(
        Stage(start=layout.stages[stage].start, stop=layout.stages[stage].stop, workers=members[stage])
        for stage in numbers
    )
    routes = tuple(
        tuple(Hop(hop.worker, numbers[hop.stage], hop.start, hop.stop) for hop in route) for route in layout.routes
    )
    return Layout(stages=stages, routes=routes)


def with_idle(layout: Layout, present: Layout) -> Layout:
    """A layout with the workers that it has nothing for: they join the stage that is nearest to where they were.

    Args:
        layout: as planned.
        present: of all members.
    """
    idle = sorted(set(present.workers) - set(layout.workers))
    if not idle:
        return layout
    middles = np.array([(stage.start + stage.stop) / 2 for stage in layout.stages])
    members = [list(stage.workers) for stage in layout.stages]
    for worker in idle:
        stage = present.stages[present.stage_of(worker)]
        members[int(np.argmin(abs(middles - (stage.start + stage.stop) / 2)))].append(worker)
    stages = tuple(
        Stage(start=stage.start, stop=stage.stop, workers=tuple(sorted(workers)))
        for stage, workers in zip(layout.stages, members, strict=True)
    )
    return Layout(stages=stages, routes=layout.routes)
