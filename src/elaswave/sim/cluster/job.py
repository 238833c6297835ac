"""Weeks of a training job on a cluster whose machines fail, slow down and come back, in virtual time.

Between two changes nothing happens: the job does micro-batches at the rate that its plan predicts. So time advances
from change to change, and a week of 100,000 workers is some hundreds of plans, each by the policy's own planner. Every
policy meets the same scenario, from the same start, measured against the same fault-free job.

Definitions, with symbols, are in docs/simulation.md. In short: T is the scenario's duration, M the micro-batches of a
step, rho = M / step the fault-free job's rate on all machines. *Goodput* is the micro-batches that were committed and
not lost again, over rho x T. T is the sum of its parts: useful + lost work + pauses + waiting + slower.

State is lost where losses take all copies of something (`elaswave.sim.cluster.held_state`): then the job goes back to
its last durable checkpoint.

Approximated: steps are not told apart. A failure that interrupts one loses half of it, for every policy: the engine
tries such a step again as a whole. A step's time is as the policies' plans predict it, timed exactly for small jobs,
the closed form for large ones. A change during a pause can only prolong it. State that moves in the background takes a
share of the links from training, and until it is there the layout of before counts (`elaswave.sim.cluster.held_state`).
Machines are all of one kind.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs, MemoryModel
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.plan import Plan, Planner
from elaswave.planning.policy.full_restart import num_pipelines
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.policy.policy_parts import make_plan, rectangle
from elaswave.planning.state_moves.placed_blocks import Placing, num_blocks
from elaswave.sim.cluster.failures import ClusterChange, Scenario
from elaswave.sim.cluster.held_state import BackgroundTransfer, background_transfer_of, held_state
from elaswave.sim.cluster.outcome import PolicyOutcome, Sample


def simulate(
    scenario: Scenario,
    machines: Cluster,
    costs: Costs,
    policy: str,
    planner: Planner,
    *,
    num_stages: int,
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    pauses: RecoveryTimes | None = None,
    placing: Placing | None = None,
    fault_free_step_s: float | None = None,
    free_copies: bool = False,
    progress: Callable[[float], None] = lambda done: None,
) -> PolicyOutcome:
    """Lets a job live through a scenario.

    Args:
        scenario: who is there at the beginning and what happens.
        machines: a cluster of the machines meant; the device and memory of its first worker, and its links, are
            everyone's, and so is a worker's share of its power limit.
        costs: of the model's layers.
        policy: its name.
        planner: the policy; what it declares says what it keeps and how it begins.
        num_stages: of the job's pipelines at the beginning, and whenever it begins again.
        num_microbatches: of a step.
        schedule: of the job at the beginning.
        pauses: times of standing still; None means `RecoveryTimes`' defaults.
        placing: followers of blocks, where the policy has blocks; None means `Placing`'s defaults. The scenario's racks
            are known to it, unless it knows no hosts.
        fault_free_step_s: of the fault-free job that goodput is measured by, where it is shorter than of the job at the
            beginning: then no policy gains by what could have been had without a failure. `undisturbed_step_s` has the
            shortest that any policy is known to make.
        free_copies: copies of whole stages take no memory, and are not sent: a bound, which nothing can have. Else a
            policy pays for every copy that it is credited with.
        progress: told after every change what share of the scenario is behind.
    Raises:
        InfeasiblePlan: not even all workers that are ever there at once can train this model.
    """
    pauses = pauses or RecoveryTimes()
    placing = replace(placing or Placing(), racks=scenario.racks)
    if policy_metadata_of(planner).replication.unit in ("stages", "groups") and not free_copies:
        costs = msgspec.structs.replace(costs, whole_copies=True)

    def begin(cluster: Cluster, num_spares: int) -> Plan:
        allocation = rectangle(
            cluster,
            costs,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            most=num_pipelines(cluster.num_workers, num_stages, num_spares),
        )
        return make_plan(policy, cluster, costs, allocation, pause_s=0.0, lost_steps=0.0, reason="begins")

    job = _SimulatedJob(scenario, machines, costs, planner, begin, pauses, fault_free_step_s, placing)
    for change in scenario.changes:
        job.advance(change.at_s)
        job.meet(change)
        progress(min(1.0, change.at_s / scenario.duration_s))
    job.advance(scenario.duration_s)
    return job.outcome()


class _SimulatedJob:
    """A job at one instant, and its accounts.

    Args:
        begin: the plan with which a job begins: equal pipelines, with workers left over for so many spares. Raises
            InfeasiblePlan: too few workers, or too little memory.
        scenario, machines, costs, planner, pauses, fault_free_step_s, placing: as of `simulate`.
    """

    def __init__(
        self, scenario: Scenario, machines: Cluster, costs: Costs, planner: Planner,
        begin: Callable[[Cluster, int], Plan], pauses: RecoveryTimes, fault_free_step_s: float | None, placing: Placing,
    ) -> None:  # fmt: skip
        self._scenario, self._costs, self._planner, self._pauses = scenario, costs, planner, pauses
        self._begin = begin
        self._metadata = policy_metadata_of(planner)
        replication = self._metadata.replication
        link = machines.between_nodes
        shared = msgspec.structs.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * pauses.copy_share)
        self._held = held_state(replication, costs, shared, placing)
        most = scenario.num_workers_max
        limit_w = machines.power_limit_w
        self._machines = replace(
            machines.take(np.array([0])),
            power_limit_w=None if limit_w is None else limit_w / machines.num_workers * most,
        )
        self._idle_w = machines.devices[int(machines.device[0])].idle_power_w
        all_workers = self._cluster(range(most), [0] * most)
        undisturbed = begin(all_workers, 0)
        self._policy = undisturbed.policy
        step_s = min(undisturbed.predicted_step_s, fault_free_step_s or float("inf"))
        self._undisturbed_step_s = step_s
        self._rho = undisturbed.allocation.num_microbatches / step_s
        self._most = most
        rolls_back = self._metadata.rolls_back or replication.unit == "nothing"
        interval_s = pauses.checkpoint_interval_s if rolls_back else pauses.backup_interval_s
        self._checkpoint_every_s = interval_s + pauses.checkpoint_stall_s

        self._now_s = 0.0
        self._paused_until_s = 0.0
        self._cause = ""
        self._copies: BackgroundTransfer | None = None
        """That were begun last."""
        self._copied_s = 0.0
        """When they and all before them are there."""
        self._plan: Plan | None = None
        """None while too few workers are there."""
        self._since_checkpoint_s = 0.0
        self._unsaved = 0.0
        """Micro-batches since the last durable checkpoint."""
        self._unsaved_s = 0.0
        """Seconds of training on them."""
        self._done = 0.0
        """Micro-batches, those that were lost again included."""
        self._lost = 0.0
        self._lost_s = 0.0
        self._waiting_s = 0.0
        self._worker_s = 0.0
        self._energy_j = 0.0
        self._migrated_bytes = 0.0
        self._pauses_s: defaultdict[str, float] = defaultdict(float)
        self._num_pauses: defaultdict[str, int] = defaultdict(int)
        self._rollbacks: defaultdict[str, int] = defaultdict(int)
        self._timeline: list[Sample] = []
        self._there = self._cluster(scenario.initial, scenario.nodes)
        self._try_to_start(first=True)
        self._sample()

    def advance(self, to_s: float) -> None:
        """Lets time pass without a change."""
        if self._now_s < self._paused_until_s:
            until_s = min(to_s, self._paused_until_s)
            self._pauses_s[self._cause] += until_s - self._now_s
            self._pass(until_s - self._now_s, self._idle_w * self._there.num_workers)
            if until_s < to_s:
                self._sample()
        for until_s in sorted((self._copied_s, self._held.filled_s)):
            if self._now_s < until_s < to_s:
                self._train(until_s)
                self._sample()
        self._train(to_s)

    def _train(self, to_s: float) -> None:
        """Lets time pass without a pause under one layout, or waiting for workers."""
        seconds = to_s - self._now_s
        if seconds <= 0:
            return
        if self._plan is None:
            self._waiting_s += seconds
            self._pass(seconds, self._idle_w * self._there.num_workers)
            return
        stalled = self._pauses.checkpoint_stall_s / self._checkpoint_every_s
        rate = self._rate() * (1 - stalled)
        self._pauses_s["checkpoint"] += seconds * stalled
        self._done += rate * seconds
        reached_s = self._since_checkpoint_s + seconds
        if reached_s >= self._checkpoint_every_s:
            self._num_pauses["checkpoint"] += int(reached_s // self._checkpoint_every_s)
            self._since_checkpoint_s = reached_s % self._checkpoint_every_s
            self._unsaved = rate * self._since_checkpoint_s
            self._unsaved_s = (1 - stalled) * self._since_checkpoint_s
        else:
            self._since_checkpoint_s = reached_s
            self._unsaved += rate * seconds
            self._unsaved_s += (1 - stalled) * seconds
        idle = self._there.num_workers - sum(
            stage.width for chain in self._plan.allocation.chains for stage in chain.stages
        )
        power_w = self._plan.power_w if (copies := self._copying) is None else copies.power_w
        self._pass(seconds, power_w + idle * self._idle_w)

    def meet(self, change: ClusterChange) -> None:
        """Takes a change into the cluster and lets the policy plan."""
        event = self._apply(change)
        if event is None:
            return
        if self._plan is None:
            self._try_to_start()
        else:
            self._replan(self._plan, event)
        self._sample()

    def outcome(self) -> PolicyOutcome:
        """Returns the accounts, closed."""
        duration_s = self._scenario.duration_s
        useful_s = (self._done - self._lost) / self._rho
        lost_work_s = self._lost / self._rho
        paused_s = sum(self._pauses_s.values())
        unproductive_s = paused_s + self._waiting_s + self._lost_s
        return PolicyOutcome(
            policy=self._policy,
            source=self._scenario.source,
            duration_s=duration_s,
            goodput=useful_s / duration_s if duration_s else 0.0,
            ettr=max(0.0, 1 - unproductive_s / duration_s) if duration_s else 0.0,
            availability=self._worker_s / (self._most * duration_s) if duration_s else 0.0,
            useful_s=useful_s,
            lost_work_s=lost_work_s,
            lost_training_s=self._lost_s,
            pauses_s=dict(sorted(self._pauses_s.items())),
            num_pauses=dict(sorted(self._num_pauses.items())),
            num_rollbacks=sum(self._rollbacks.values()),
            rollbacks=dict(sorted(self._rollbacks.items())),
            waiting_s=self._waiting_s,
            slower_s=duration_s - useful_s - lost_work_s - paused_s - self._waiting_s,
            migrated_bytes=self._migrated_bytes,
            energy_j=self._energy_j,
            num_events=self._scenario.counts,
            undisturbed_step_s=self._undisturbed_step_s,
            timeline=tuple(self._timeline),
        )

    def _cluster(self, workers: Iterable[int], nodes: Iterable[int]) -> Cluster:
        ids = np.fromiter(workers, dtype=np.int64)
        one = self._machines
        return Cluster(
            ids=ids,
            node=np.fromiter(nodes, dtype=np.int64),
            speed=np.ones(len(ids)),
            memory_bytes=np.full(len(ids), one.memory_bytes[0]),
            device=np.full(len(ids), one.device[0]),
            devices=one.devices,
            within_node=one.within_node,
            between_nodes=one.between_nodes,
            power_limit_w=one.power_limit_w,
        )

    def _try_to_start(self, *, first: bool = False) -> None:
        """Begins, or begins again, if the workers suffice; those that are left over join at once."""
        self._copied_s = self._now_s
        try:
            self._plan = self._begin(self._there, self._metadata.num_spares)
        except InfeasiblePlan:
            self._plan = None
            return
        if self._metadata.own_steps:
            nothing = ClusterEvent(kind="slowed", workers=(int(self._there.ids[0]),))
            self._plan = self._planner(self._there, self._costs, self._plan.allocation, nothing)
        self._since_checkpoint_s = 0.0
        if not first and self._done > 0:
            self._pause("restart", self._pauses.restart_s)
        extra = np.setdiff1d(self._there.ids, self._plan.allocation.workers, assume_unique=True)
        if len(extra):
            joined = ClusterEvent(kind="joined", workers=tuple(extra.tolist()))
            # A policy that can do nothing with them leaves them idle.
            with suppress(InfeasiblePlan):
                self._plan = self._planner(self._there, self._costs, self._plan.allocation, joined)
        self._held.begin(self._plan, self._there)

    def _replan(self, before: Plan, event: ClusterEvent) -> None:
        was_paused = self._now_s < self._paused_until_s
        state_lost = event.kind == "lost" and self._held.lose(self._now_s, event.workers)
        try:
            plan = self._planner(self._there, self._costs, before.allocation, event)
        except InfeasiblePlan:
            # The workers that are left cannot go on: begin again from the last checkpoint, as soon as that is possible.
            self._plan = None
            self._try_to_start()
            # Where state was lost, and those that are left can begin again, they lacked copies and nothing else.
            self._go_back("copies" if state_lost and self._plan is not None else "workers")
            return
        self._plan = plan
        if state_lost and not plan.from_checkpoint:
            self._load(plan)
            return
        copies = background_transfer_of(self._there, self._costs, before, plan, event, self._pauses)
        if copies is not None:
            self._copies, self._copied_s = copies, max(self._copied_s, self._now_s) + copies.seconds
        elif plan.from_checkpoint:
            self._copied_s = self._now_s
        self._migrated_bytes += sum(transfer.num_bytes for transfer in plan.transfers)
        if plan.from_checkpoint:
            self._go_back("copies" if state_lost and self._metadata.replication.unit != "nothing" else "policy")
            self._held.begin(plan, self._there)
        else:
            in_force_s = self._held.adopt(self._now_s, plan, self._there, max(self._now_s, self._copied_s))
            if copies is not None:
                self._copied_s = max(self._copied_s, in_force_s)
            if plan.lost_work_s > 0 and not was_paused:
                half = before.allocation.num_microbatches / 2
                self._lose(min(self._unsaved, half), min(self._unsaved_s, before.predicted_step_s / 2))
        if plan.predicted_pause_s > 0:
            self._pause(event.kind, plan.predicted_pause_s)

    def _load(self, plan: Plan) -> None:
        """Goes back to the last durable checkpoint with the workers that a plan uses."""
        self._go_back("copies")
        self._copied_s = self._now_s
        self._held.begin(plan, self._there)
        stages = [stage for chain in plan.allocation.chains for stage in chain.stages]
        memory = MemoryModel(self._costs, self._held.state_share)
        loaded = [memory.sent_bytes(stage.start, stage.stop) for stage in stages]
        self._migrated_bytes += sum(each * stage.width for each, stage in zip(loaded, stages, strict=True))
        seconds = self._pauses.restart_s
        if self._metadata.replication.rolls_back_in_place:
            agreed = self._pauses.at(self._there.num_workers, num_blocks(self._costs))
            seconds = agreed.recover_s + self._pauses.load_s(max(loaded))
        self._pause("rollback", seconds)

    def _go_back(self, cause: str) -> None:
        """Loses everything since the last durable checkpoint, for a cause of `PolicyOutcome.rollbacks`."""
        self._rollbacks[cause] += 1
        self._lose(self._unsaved, self._unsaved_s)
        self._since_checkpoint_s = 0.0

    def _lose(self, num_microbatches: float, seconds: float) -> None:
        self._lost += num_microbatches
        self._unsaved -= num_microbatches
        self._lost_s += seconds
        self._unsaved_s -= seconds

    def _pause(self, cause: str, seconds: float) -> None:
        self._num_pauses[cause] += 1
        if self._now_s + seconds >= self._paused_until_s:
            self._paused_until_s, self._cause = self._now_s + seconds, cause

    def _apply(self, change: ClusterChange) -> ClusterEvent | None:
        """Changes the cluster; None where the event is about no worker that is there."""
        event, there = change.event, self._there
        if event.kind == "joined":
            more = self._cluster(event.workers, change.nodes)
            order = np.argsort(np.concatenate([there.ids, more.ids]), kind="stable")

            def both(name: str) -> np.ndarray:
                return np.concatenate([getattr(there, name), getattr(more, name)])[order]

            self._there = replace(
                there,
                ids=both("ids"),
                node=both("node"),
                speed=both("speed"),
                memory_bytes=both("memory_bytes"),
                device=both("device"),
            )
            return event
        present = tuple(worker for worker in event.workers if _has(there.ids, worker))
        if not present:
            return None
        event = msgspec.structs.replace(event, workers=present)
        where = there.index_of(present)
        if event.kind == "slowed":
            speed = there.speed.copy()
            speed[where] = event.speed
            self._there = replace(there, speed=speed)
            return event
        stays = np.ones(there.num_workers, dtype=bool)
        stays[where] = False
        self._there = there.take(stays)
        return event

    @property
    def _copying(self) -> BackgroundTransfer | None:
        """Those on their way, which the plan's layout waits for."""
        return self._copies if self._now_s < self._copied_s else None

    def _rate(self) -> float:
        """Micro-batches per second."""
        if self._plan is None or self._now_s < self._paused_until_s:
            return 0.0
        if (copies := self._copying) is not None:
            return copies.num_microbatches / copies.step_s
        slower = self._held.slower if self._now_s < self._held.filled_s else 0.0
        return self._plan.allocation.num_microbatches / self._plan.predicted_step_s / (1 + slower)

    def _pass(self, seconds: float, power_w: float) -> None:
        self._now_s += seconds
        self._worker_s += seconds * self._there.num_workers
        self._energy_j += seconds * power_w

    def _sample(self) -> None:
        throughput = self._rate() / self._rho
        self._timeline.append(Sample(at_s=self._now_s, num_workers=self._there.num_workers, throughput=throughput))


def _has(ids: np.ndarray, worker: int) -> bool:
    index = int(np.searchsorted(ids, worker))
    return index < len(ids) and int(ids[index]) == worker
