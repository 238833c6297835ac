"""Programs from a layout and its execution parameters: what every process of a job compiles alike. Pure.

The parameters carry the seconds of layers and the speeds of workers by which a plan's programs were compiled, so that
no process needs the costs, the cluster or the planner.
"""

from collections.abc import Mapping

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.schedules import Schedule, bounds_within
from elaswave.planning.costs.step_time.exact import Durations, TransferSeconds, durations_of, time_programs
from elaswave.planning.programs.programs import compile_programs, compiled_step_s
from elaswave.types import ExecutionParameters, Layout, Program


def execution_of(
    costs: Costs,
    speeds: Mapping[int, float],
    *,
    schedule: str = "",
    levels: Mapping[int, int] | None = None,
    in_flight: Mapping[int, int] | None = None,
) -> ExecutionParameters:
    """Collects what all workers must know to compile the same programs by the same durations.

    Args:
        costs: of the layers.
        speeds: worker -> speed, that of its frequency level included.
        schedule: empty for the configured one.
        levels: worker -> index of its frequency level.
        in_flight: worker -> the most micro-batches it may hold at once, where memory is short.
    """
    return ExecutionParameters(
        schedule=schedule,
        levels=dict(levels or {}),
        layer_s=costs.layer_s,
        speeds={worker: speed for worker, speed in speeds.items() if speed != 1.0},
        in_flight=dict(in_flight or {}),
    )


def programs_of(
    layout: Layout,
    execution: ExecutionParameters,
    configured: Schedule,
    *,
    forward_only: bool = False,
    only: int | None = None,
) -> dict[int, Program]:
    """Compiles the programs of all workers, the same in every process.

    Args:
        layout: in force.
        execution: beside it.
        configured: the schedule where the execution parameters name none.
        forward_only: those of an evaluation.
        only: a worker whose program is wanted; the others' may be left out.
    """
    schedule, limits, durations = compiled_by(layout, execution, configured)
    if forward_only:
        limits = None
    return compile_programs(
        layout, schedule, forward_only=forward_only, max_in_flight=limits, durations=durations, only=only
    )


def compiled_by(
    layout: Layout, execution: ExecutionParameters, configured: Schedule
) -> tuple[Schedule, dict[int, int] | None, Durations | None]:
    """Returns by what `programs_of` compiles: schedule, bounds of micro-batches in flight, durations of actions."""
    schedule: Schedule = execution.schedule or configured  # type: ignore[assignment]  # checked by compile_programs
    limits = bounds_within(layout, schedule, execution.in_flight) if execution.in_flight else None
    if not execution.layer_s:
        return schedule, limits, None
    speeds = execution.speeds
    return schedule, limits, durations_of(execution.layer_s, lambda worker: speeds.get(worker, 1.0))


def timed_step_s(
    layout: Layout,
    schedule: Schedule,
    durations: Durations,
    *,
    known: Durations | None,
    max_in_flight: Mapping[int, int] | None = None,
    transfer_s: TransferSeconds | None = None,
    within_s: float = float("inf"),
) -> float:
    """Computes the seconds of a step: its programs, compiled and timed.

    Args:
        layout: whose programs.
        schedule: of the job.
        durations: seconds of every action.
        known: those that the programs are compiled by; None as of `compile_programs`.
        max_in_flight, transfer_s: as of `compile_programs`.
        within_s: as of `compiled_step_s`, which this is where `known` is `durations`.
    """
    if known is durations:
        return compiled_step_s(
            layout, schedule, durations, max_in_flight=max_in_flight, transfer_s=transfer_s, within_s=within_s
        )
    programs = compile_programs(layout, schedule, max_in_flight=max_in_flight, durations=known, transfer_s=transfer_s)
    return time_programs(layout, programs, durations, transfer_s).step_s
