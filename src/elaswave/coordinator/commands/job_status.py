"""What a coordinator knows of its job at one instant, as `elaswave ctl RUN status` shows it. No IO."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elaswave.blocks.placement import WantedFollowers
from elaswave.channel.messages.operator import (
    CheckpointStatus,
    CopiesStatus,
    JobStatus,
    RecoveryStatus,
    StageStatus,
    WorkerStatus,
)
from elaswave.channel.messages.worker import Heartbeat
from elaswave.config.cluster import base_level
from elaswave.config.schema import Config
from elaswave.config.values import SAMPLES_PER_S, TOKENS_PER_S
from elaswave.coordinator.planning.run_planner import RunPlanner
from elaswave.coordinator.records.checkpoints import Checkpoints
from elaswave.coordinator.records.run_state import RunState
from elaswave.job.plan import RunPlan
from elaswave.observability.result import to_json_float
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.step.activity import action_kind
from elaswave.types import ACTION_NAMES, ExecutionParameters, Layout

PACE_STEPS = 10
"""Rate and pace are means of so many steps."""
RECOVERIES_MAX = 20
"""Of recoveries the newest are told one by one."""


class JobParts(NamedTuple):
    """What a coordinator's process knows its job by."""

    plan: RunPlan
    core: Coordinator
    state: RunState
    checkpoints: Checkpoints
    planner: RunPlanner

    @property
    def config(self) -> Config:
        """Of the run."""
        return self.plan.config


class LastHeartbeat(NamedTuple):
    """The newest heartbeat of a worker."""

    at_s: float
    message: Heartbeat


def job_status(
    job: JobParts, heartbeats: Mapping[int, LastHeartbeat], under_way: Sequence[str], now_s: float
) -> JobStatus:
    """Describes the job as it is now.

    Args:
        heard: by worker.
        under_way: what is planned or asked for, in words.
        now_s: monotonic time.
    """
    core, state = job.core, job.state
    in_force = core.in_force()
    layout, execution = in_force.layout, in_force.execution
    step_s = _pace_s(state)
    unit, per_step = _work(job, layout)
    predicted_s = state.generations[-1].predicted_step_s if state.generations else None
    pace_s = step_s or predicted_s
    total_steps = job.config.run.steps
    return JobStatus(
        state=core.state.value,
        step=state.last_step,
        total_steps=total_steps,
        loss=to_json_float(state.losses[-1]) if state.losses else None,
        rate=None if step_s is None else per_step / step_s,
        rate_unit=unit,
        step_s=step_s,
        predicted_step_s=predicted_s,
        left_s=None if pace_s is None else pace_s * (total_steps - state.last_step),
        layout=layout.describe(),
        stages=[StageStatus(layers=(stage.start, stage.stop), workers=stage.workers) for stage in layout.stages],
        num_microbatches=layout.num_microbatches,
        generation=core.generation,
        term=core.term,
        workers=_workers(job, layout, execution, heartbeats, now_s),
        copies=_copies(job, heartbeats),
        num_recoveries=sum(recovery.is_failure for recovery in state.recoveries),
        recoveries=[
            RecoveryStatus(
                kind=recovery.kind,
                worker=recovery.worker,
                step=recovery.step,
                generation=recovery.generation,
                outcome=recovery.outcome,
                total_s=recovery.total_s,
            )
            for recovery in state.recoveries[-RECOVERIES_MAX:]
        ],
        checkpoints=[
            CheckpointStatus(step=record.step, path=record.path, num_bytes=record.num_bytes)
            for record in job.checkpoints.records
        ],
        writing=job.checkpoints.unsettled,
        under_way=list(under_way),
    )


def _pace_s(state: RunState) -> float | None:
    """Computes the seconds of a step, in the mean of the last ones; None before there are two."""
    last = state.last_step
    first = max(state.first_step, last - PACE_STEPS)
    begin_s, end_s = state.finished_s.get(first), state.finished_s.get(last)
    if begin_s is None or end_s is None or last == first or end_s <= begin_s:
        return None
    return (end_s - begin_s) / (last - first)


def _work(job: JobParts, layout: Layout) -> tuple[str, float]:
    """Returns the unit in which throughput is counted, and how much of it a step is."""
    num_samples = layout.num_microbatches * job.config.batch.microbatch_size
    tokens = job.plan.tokens_per_sample
    return (SAMPLES_PER_S, num_samples) if tokens is None else (TOKENS_PER_S, num_samples * tokens)


def _workers(
    job: JobParts, layout: Layout, execution: ExecutionParameters, heartbeats: Mapping[int, LastHeartbeat], now_s: float
) -> list[WorkerStatus]:
    loads: dict[int, int] = {}
    for route in layout.routes:
        for hop in route:
            loads[hop.worker] = loads.get(hop.worker, 0) + 1
    stages = {worker: index for index, stage in enumerate(layout.stages) for worker in stage.workers}
    level, gauges = base_level(job.config), job.planner.measurements.gauges(job.core.members)
    found = []
    for worker in job.core.members:
        stage = stages.get(worker)
        held = heartbeats.get(worker)
        heartbeat = None if held is None else held.message
        found.append(
            WorkerStatus(
                worker=worker,
                role="trains" if loads.get(worker) else "idle",
                stage=stage,
                layers=None if stage is None else (layout.stages[stage].start, layout.stages[stage].stop),
                num_microbatches=loads.get(worker, 0),
                speed=job.planner.measurements.speed_of(worker),
                level=execution.levels.get(worker, level),
                step=None if heartbeat is None else heartbeat.step,
                doing=None if heartbeat is None else _doing(heartbeat),
                waiting_on=() if heartbeat is None else heartbeat.waiting_on,
                last_heartbeat_s=None if held is None else max(0.0, now_s - held.at_s),
                num_owned_blocks=None if heartbeat is None else heartbeat.num_owned,
                num_followed_blocks=None if heartbeat is None else heartbeat.num_followed,
                device=gauges.get(worker),
            )
        )
    return found


def _doing(heartbeat: Heartbeat) -> str:
    names: Mapping[str, str] = ACTION_NAMES  # type: ignore[assignment]
    return names.get(action_kind(heartbeat.label), heartbeat.label)


def _copies(job: JobParts, heartbeats: Mapping[int, LastHeartbeat]) -> CopiesStatus:
    members, blocks, in_force = job.core.members, job.plan.blocks, job.core.in_force()
    wanted, owner = WantedFollowers(in_force.layout), in_force.placement.owner
    known = [heartbeats[worker].message for worker in members if worker in heartbeats]
    return CopiesStatus(
        num_blocks=len(blocks),
        num_wanted=sum(wanted.of(block.layer, owner[block.id]).number for block in blocks),
        num_held=sum(each.num_followed for each in known) if len(known) == len(members) else None,
    )
