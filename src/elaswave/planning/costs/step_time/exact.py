"""How long a step takes: programs timed exactly as the executor runs them, and durations from costs. Pure.

Every worker runs its program in order and begins each action as soon as its input is there; transfers overlap with
computing. That is all an executor does, so a time follows from the programs and the durations alone: no events are
needed, each worker is simply run until it lacks an input. Links that are shared, and so make transfers wait for each
other, are the simulator's concern (``elaswave.planning.costs.step_time.contended``), as is drawing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from elaswave.planning.costs.step_time.work import Durations, StepGraph, TransferSeconds, run_in_order
from elaswave.types import Layout, Program


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """When each action of a step begins and ends, in seconds from the step's beginning."""

    layout: Layout
    programs: Mapping[int, Program]
    start_s: Mapping[int, list[float]]
    """Worker -> one entry per action of its program."""
    end_s: Mapping[int, list[float]]

    @cached_property
    def step_s(self) -> float:
        """Until the last action ends. What a step costs beside its actions is not in it."""
        return max((ends[-1] for ends in self.end_s.values() if ends), default=0.0)

    @cached_property
    def busy_s(self) -> dict[int, float]:
        """Worker -> seconds in which it computes."""
        return {worker: sum(self.end_s[worker]) - sum(starts) for worker, starts in self.start_s.items()}

    @cached_property
    def bubble_fractions(self) -> dict[int, float]:
        """Worker -> share of the step in which it does not compute."""
        return {worker: self._bubble([worker]) for worker in self.start_s}

    @cached_property
    def stage_bubble_fractions(self) -> list[float]:
        """For each stage the share of its workers' time in which they do not compute."""
        return [self._bubble(stage.workers) for stage in self.layout.stages]

    def _bubble(self, workers: list[int] | tuple[int, ...]) -> float:
        if self.step_s == 0:
            return 0.0
        return 1.0 - sum(self.busy_s[worker] for worker in workers) / (len(workers) * self.step_s)


def time_programs(
    layout: Layout,
    programs: Mapping[int, Program],
    durations: Durations,
    transfer_s: TransferSeconds | None = None,
) -> Timeline:
    """Times a step.

    Args:
        layout: whose routes the programs run.
        programs: of all workers, valid (see `elaswave.planning.programs.validation`).
        durations: seconds of every action.
        transfer_s: seconds of every transfer; None means that they take no time.
    Raises:
        InvalidProgramError: an action of no route, or programs that wait for each other for ever.
        ValueError: a duration that is negative or not finite.
    """
    flow = StepGraph(layout, durations, transfer_s)
    times = run_in_order(flow, flow.encode(programs))
    return Timeline(
        layout=layout,
        programs=programs,
        start_s=dict(zip(flow.workers, times.starts, strict=True)),
        end_s=dict(zip(flow.workers, times.ends, strict=True)),
    )
