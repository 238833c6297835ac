"""How the coordinator asks the planners: a loss becomes an event, a plan becomes a layout of exactly the members.

ElasWave's survivors go on at once with the interim layout of `elaswave.planning.search.recovery`, for which nothing is
planned; what its planner then finds (layers that migrate, workers that change stage, shared layers, another schedule,
other frequencies) follows as a planned change. Another policy's plan is installed by the recovery itself.

A policy may be a person's own code (`elaswave.config.policy_code`). It is asked after losses, joins, leaves and changes
of speed; each of its plans is bounded in time and must prove that this job can run it. Where there is none, the
survivors keep their stages, as under every policy.

Workers without micro-batches stay where they were, so that they go on holding blocks and voting.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType

import msgspec
import numpy as np

from elaswave.config.cluster import cluster_of, device_of, emulated_costs, power_limit_w
from elaswave.config.policy_code import find_policy, other_policies
from elaswave.config.schema import Config
from elaswave.errors import InfeasiblePlan, UsageError
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.costs.schedules import Schedule, bounds_within
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.policy.policies import ELASWAVE as METADATA
from elaswave.planning.policy.policies import TimedPlanner, make_policies
from elaswave.planning.policy.policy_metadata import declares, policy_metadata_of
from elaswave.planning.programs.execution import compiled_by, programs_of
from elaswave.planning.programs.layout import JobModel, RunningLayout, to_layout, without_idle
from elaswave.planning.programs.routes import allocation_of
from elaswave.planning.programs.shared_layers import cuts_of
from elaswave.planning.programs.validation import validate_programs
from elaswave.planning.search.candidates import AXES, Options
from elaswave.planning.search.planner import plan as elaswave_plan
from elaswave.planning.search.recovery import put_to_work, set_idle, survivor_layout
from elaswave.planning.search.shapes import Shape, build
from elaswave.types import ExecutionParameters, Layout, Stage

ELASWAVE = "elaswave"
GAIN_MIN = {"emulated": 0.005, "cpu": 0.03, "loopback": 0.03, "cuda": 0.03}
"""A layout is changed only for a step that is predicted to be shorter by this share: predictions are as exact as costs
are known."""

_log = logging.getLogger("elaswave.coordinator")


POLICY_TIMEOUT_S = 5.0
"""For one plan of a person's own policy: survivors wait for it after a loss."""


def planners_of(config: Config, others: Mapping[str, TimedPlanner]) -> dict[str, Planner]:
    """Policies as a run asks them: with its pauses, its followers, and what its devices can do.

    Args:
        config: of the run, resolved.
        others: of other packages.
    """
    times = RecoveryTimes(restart_s=config.elastic.restart_s, horizon_s=config.elastic.horizon_s)
    policies = dict(make_policies(times, others=others))
    baselines = tuple(each for each in policies.values() if policy_metadata_of(each).is_candidate)
    policies[ELASWAVE] = declares(METADATA)(partial(_elaswave, config=config, baselines=baselines))
    return policies


def _elaswave(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    event: ClusterEvent,
    *,
    config: Config,
    baselines: tuple[Planner, ...],
) -> Plan:
    is_emulated = config.device.kind == "emulated"
    options = Options(
        axes=AXES if config.device.frequency != "none" else AXES - {"frequency"},
        horizon_s=config.elastic.horizon_s,
        followers=config.elastic.planned_followers,
        # What a backward costs in two halves is not known of a real device before it has run any.
        schedules=None if is_emulated else (allocation.schedule,),
    )
    return elaswave_plan(cluster, costs, allocation, event, options=options, baselines=baselines if is_emulated else ())


class Replanner:
    """Asks the run's policy.

    Args:
        config: of the run, resolved.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.policy = config.elastic.policy
        self._job = JobModel(
            cluster_of(config),
            config.layout.schedule,
            config.elastic.planned_followers,
            emulated_costs(config) if config.device.kind == "emulated" else None,
        )
        self._device = device_of(config)
        # Looking for other packages' policies takes time in which a job starts: those of whom nobody asks are left out.
        asks_others = self.policy != ELASWAVE or config.device.kind == "emulated"
        self._policies = planners_of(config, other_policies() if asks_others else {})
        self.is_own = config.elastic.policy_is_code
        """Whether the policy is a person's own code."""
        if self.is_own:
            self._policies[self.policy] = _own_policy(self.policy)

    def at(self, speeds: Mapping[int, float]) -> "Replanner":
        """Returns the same replanner, for workers that have turned out to be slower than configured.

        Args:
            speeds: worker -> its speed relative to what the configuration says; 1 for those that are not in it.
        """
        if not speeds:
            return self
        other = copy.copy(self)
        cluster = self._knowing(speeds).cluster
        slowed = [speeds.get(worker, 1.0) for worker in cluster.ids.tolist()]
        other._job = self._job._replace(cluster=dataclasses.replace(cluster, speed=cluster.speed * np.array(slowed)))
        return other

    def _knowing(self, workers: Collection[int], labels: Mapping[int, str] = MappingProxyType({})) -> JobModel:
        """Returns the job with these workers, also those that have joined since it began: they are as configured.

        Args:
            workers: ids.
            labels: where they run.
        """
        new = sorted(set(workers).difference(self._job.cluster.ids.tolist()))
        if new:
            cluster = self._job.cluster.joined_by(cluster_of(self._config, new, labels))
            self._job = self._job._replace(cluster=cluster)
        return self._job

    @property
    def restarts(self) -> bool:
        """Whether every loss leads back to the last durable checkpoint."""
        return policy_metadata_of(self._policies[self.policy]).rolls_back

    def predict(self, layout: Layout, execution: ExecutionParameters, costs: Costs) -> float:
        """Predicts the seconds of a step: the very programs that the workers run, timed.

        Args:
            layout, execution: in force.
            costs: of the layers.
        """
        return self._knowing(layout.workers, layout.domain_of).step_s(layout, execution, costs)

    def within_memory(self, layout: Layout, execution: ExecutionParameters) -> ExecutionParameters:
        """Returns the execution with what emulated devices have room for under another layout, as far as it fits at
        all.

        Args:
            layout: from now on.
            execution: before.
        """
        return self._knowing(layout.workers, layout.domain_of).within_memory(layout, execution)

    def baseline(
        self, layout: Layout, execution: ExecutionParameters, lost: Collection[int], costs: Costs
    ) -> RunningLayout:
        """Plans what the run's policy, a baseline's or a person's own, does after a loss.

        Falls back to the survivors' interim layout where the policy has no plan (a replica group is all that was left),
        fails, takes too long, or plans what cannot run: the reason says so.

        Args:
            layout, execution: in force before the loss.
            lost: the workers.
            costs: of the layers.
        """
        interim = survivor_layout(layout, lost)
        try:
            plan = self._ask_after_loss(self.policy, layout, execution, lost, costs)
            return self._replanned(plan, interim, costs)
        except Exception as error:  # whatever is wrong with a policy must not end a job that can go on
            is_answer = isinstance(error, InfeasiblePlan | ValueError | UsageError)
            _log.warning("%s has no plan: %s", self.policy, error, exc_info=not is_answer)
            reason = f"{self._without_plan(error)}: survivors keep their stages"
            execution = self.within_memory(interim, execution)
            return RunningLayout(interim, execution, self.predict(interim, execution, costs), reason)

    def improve(
        self, before: Layout, present: Layout, execution: ExecutionParameters, lost: Collection[int], costs: Costs
    ) -> tuple[float, RunningLayout | None]:
        """Finds what ElasWave's planner makes of a loss that survivors have dealt with for the moment.

        Args:
            before: the layout that the loss struck.
            present: the survivors'.
            execution: in force.
            lost: the workers.
            costs: of the layers.
        Returns:
            The predicted step of the present layout, and a better one if there is any.
        """
        if not set(lost) & set(before.workers):
            return self.predict(present, execution, costs), None
        return self._better(
            lambda: self._ask_after_loss(ELASWAVE, before, execution, lost, costs), present, execution, costs
        )

    def rebalance(
        self, present: Layout, execution: ExecutionParameters, shifted: Collection[int], costs: Costs
    ) -> tuple[float, RunningLayout | None]:
        """Finds what ElasWave's planner, or a person's own, makes of workers that have become slower or faster.

        Args:
            present: the layout in force.
            execution: in force.
            shifted: the workers; their speeds now are those that this replanner knows (`at`).
            costs: of the layers.
        Returns:
            The predicted step of the present layout, and a better one if there is any.
        """
        workers = tuple(sorted(shifted))
        slowed = ClusterEvent(kind="slowed", workers=workers)  # the cluster has their speeds
        if self.is_own:  # which may go by the event's
            cluster = self._knowing(present.workers, present.domain_of).cluster
            slowed = msgspec.structs.replace(slowed, speed=float(cluster.speed[cluster.index_of(workers)].min()))
        return self._better(
            lambda: self._ask(self._asked, present, execution, slowed, costs), present, execution, costs
        )

    def look(self, present: Layout, execution: ExecutionParameters, costs: Costs) -> tuple[float, RunningLayout]:
        """Finds what ElasWave's planner would make of the workers as they are, whether it is better or not.

        Args:
            present, execution: in force.
            costs: of the layers.
        Returns:
            The predicted step of the present layout, and the best layout that was found.
        Raises:
            InfeasiblePlan, ValueError: the planner finds none.
        """
        now_s = self.predict(present, execution, costs)
        nothing_new = ClusterEvent(kind="slowed", workers=present.workers)  # the cluster has their speeds
        plan = self._ask(ELASWAVE, present, execution, nothing_new, costs)
        return now_s, self._replanned(plan, present, costs)

    @property
    def gain_min(self) -> float:
        """The share by which a step must be predicted to be shorter for a change of the layout."""
        return GAIN_MIN[self._config.device.kind]

    def with_stages(
        self, stages: Sequence[Stage], present: Layout, execution: ExecutionParameters, costs: Costs
    ) -> RunningLayout:
        """Makes a layout with given stages: micro-batches are divided by the workers' speeds.

        Args:
            stages: of members, all layers in them.
            present, execution: in force.
            costs: of the layers.
        Raises:
            InfeasiblePlan: they have no room for it.
            ValueError: they cannot be one layout.
        """
        job = self._knowing(present.workers, present.domain_of)
        cluster = job.cluster
        levels = [execution.levels.get(worker, cluster.base_level(worker)) for worker in cluster.ids.tolist()]
        shape = Shape(
            members=tuple(np.sort(cluster.index_of(stage.workers)) for stage in stages),
            cuts=cuts_of([0, *(stage.stop for stage in stages)], present.num_microbatches),
            num_microbatches=present.num_microbatches,
            origin="as asked for",
        )
        schedule: Schedule = execution.schedule or self._config.layout.schedule  # type: ignore[assignment]
        allocation = build(
            cluster, costs, shape, schedule, np.array(levels), followers=self._config.elastic.planned_followers
        )
        return to_layout(allocation, job, costs, present)._replace(reason="as asked for")

    def for_members(
        self, present: Layout, execution: ExecutionParameters, leaving: Collection[int], costs: Costs
    ) -> RunningLayout:
        """Makes a layout in which members that are to leave are idle, or else one in which idle members work.

        Where the policy's planner has none, others take over what leaving workers do, and idle ones widen stages, or
        stand by where the policy keeps spares.

        Args:
            present: the layout in force.
            execution: in force.
            leaving: members that are to leave.
            costs: of the layers.
        """
        going = tuple(sorted(set(leaving) & set(present.active)))
        new = tuple(worker for worker in present.idle if worker not in leaving)
        if policy_metadata_of(self._policies[self.policy]).num_spares and not going:
            reason = f"workers {_named(new)} stand by until a loss"
            return RunningLayout(present, execution, self.predict(present, execution, costs), reason)
        interim = set_idle(present, leaving) if going else reduce(put_to_work, new, present)
        staying = survivor_layout(interim if going else present, leaving) if leaving else present
        event = ClusterEvent(kind="drained", workers=going) if going else ClusterEvent(kind="joined", workers=new)
        try:
            if not (self.policy == ELASWAVE or self.is_own) or not self._config.elastic.rebalance:
                raise InfeasiblePlan("no better layout is looked for in this run")
            before = survivor_layout(present, set(leaving) - set(going))
            found = self._replanned(self._ask(self._asked, before, execution, event, costs), staying, costs)
        except (InfeasiblePlan, ValueError, UsageError) as error:
            _log.warning("no layout is planned for other members: %s", error)
            execution = self.within_memory(interim, execution)
            what = f"workers {_named(going)} are to leave" if going else f"workers {_named(new)} have joined"
            if self.is_own and self._config.elastic.rebalance:
                what += f"; {self._without_plan(error)}"
            return RunningLayout(interim, execution, self.predict(interim, execution, costs), what)
        idle = tuple(sorted({*found.layout.idle, *(set(present.workers) & set(leaving))}))
        return found._replace(layout=msgspec.structs.replace(found.layout, idle=idle))

    @property
    def _asked(self) -> str:
        """The policy that plans while training goes on."""
        return self.policy if self.is_own else ELASWAVE

    def _without_plan(self, error: Exception) -> str:
        return f"{self.policy} has no plan ({error})"

    def _better(
        self, ask: Callable[[], Plan], present: Layout, execution: ExecutionParameters, costs: Costs
    ) -> tuple[float, RunningLayout | None]:
        """Returns the predicted step of the present layout, and what the planner has found, if that is better."""
        now_s = self.predict(present, execution, costs)
        try:
            found = self._replanned(ask(), present, costs)
        except (InfeasiblePlan, ValueError, UsageError) as error:
            _log.warning("no better layout is planned: %s", error)
            return now_s, None
        better = found.predicted_step_s < now_s * (1 - self.gain_min)
        return now_s, found if better else None

    def _ask_after_loss(
        self, policy: str, layout: Layout, execution: ExecutionParameters, lost: Collection[int], costs: Costs
    ) -> Plan:
        gone = tuple(sorted(set(lost) & set(layout.workers)))
        return self._ask(policy, layout, execution, ClusterEvent(kind="lost", workers=gone), costs)

    def _ask(
        self, policy: str, layout: Layout, execution: ExecutionParameters, event: ClusterEvent, costs: Costs
    ) -> Plan:
        there = set(layout.workers) - set(event.workers if event.kind in ("lost", "drained") else ())
        known = self._knowing(layout.workers, layout.domain_of).cluster
        absent = [int(worker) for worker in known.ids if worker not in there]
        limit_w = power_limit_w(self._config, len(layout.workers))
        cluster = dataclasses.replace(known.without(absent), power_limit_w=limit_w)
        schedule: Schedule = execution.schedule or self._config.layout.schedule  # type: ignore[assignment]
        levels = {worker: execution.levels.get(worker, self._device.base_level) for worker in layout.workers}
        if policy != ELASWAVE:
            layout = without_idle(layout)  # baselines do not see idle workers until one joins
        allocation = allocation_of(layout, schedule, levels)
        return self._policies[policy](cluster, costs, allocation, event)

    def _replanned(self, plan: Plan, present: Layout, costs: Costs) -> RunningLayout:
        """Turns a plan into a layout of the present members.

        Raises:
            UsageError: a person's own policy has planned what this job cannot run.
            InfeasiblePlan, ValueError: as of `to_layout`.
        """
        if not self.is_own:
            found = to_layout(plan.allocation, self._knowing(present.workers, present.domain_of), costs, present)
            return found._replace(reason=f"{plan.policy}: {plan.reason}")
        try:
            found = to_layout(plan.allocation, self._knowing(present.workers, present.domain_of), costs, present)
            self._check_runs(found, present)
        except Exception as error:  # columns of any kind may be in it
            raise UsageError(f"policy {self.policy} has planned what this job cannot run: {error}") from error
        return found._replace(reason=f"{self.policy}: {plan.reason}")

    def _check_runs(self, found: RunningLayout, present: Layout) -> None:
        """Proves that the members can run a layout, and that it keeps the batch, on which the bits depend.

        Raises:
            InfeasiblePlan: it does not keep the batch, or workers hold more than they have memory for.
            InvalidProgramError: its programs do not come to their end.
        """
        before, after = present.num_microbatches, found.layout.num_microbatches
        if before != after:
            raise InfeasiblePlan(f"it runs {after} micro-batches in a step, needed: all {before}")
        configured = self._config.layout.schedule
        schedule, _, _ = compiled_by(found.layout, found.execution, configured)
        bounds = bounds_within(found.layout, schedule, found.execution.in_flight)
        validate_programs(found.layout, programs_of(found.layout, found.execution, configured), max_in_flight=bounds)


def _own_policy(name: str) -> Planner:
    """Finds a person's policy. One that cannot be loaded (any more) has no plan: the job that names it goes on."""
    try:
        return find_policy(name, timeout_s=POLICY_TIMEOUT_S)
    except UsageError as problem:
        message = str(problem)

    def absent(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
        raise UsageError(message)

    return absent


def _named(workers: Collection[int]) -> str:
    return ", ".join(map(str, workers))
