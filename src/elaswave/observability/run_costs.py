"""What a run folder tells the planner: the layout in force, costs as measured, workers and their speeds.

Works on a run that is still going on. Timings of actions are taken from the log's ``timings``; a run too short to have
any has at least steps: then the layers' shares are the analytic ones, and their seconds such that a step takes as long
as it did. The job's clock is wall time: on a machine with fewer cores than workers, waiting for a core counts as work.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from elaswave.config.cluster import (
    REAL_LINK,
    base_level,
    cluster_of,
    element_bytes,
    emulated_costs,
    estimated_costs,
    own_bytes,
    state_bytes,
)
from elaswave.config.schema import Config
from elaswave.config.values import OWN
from elaswave.errors import RunFolderError
from elaswave.observability.events import (
    AnyEvent,
    LayoutChosen,
    RunStarted,
    StepCommitted,
    TimingsMeasured,
    read_events,
)
from elaswave.observability.result import check_run_folder
from elaswave.observability.run_folder import EVENTS_FILE, saved_config
from elaswave.observability.summary import NUM_WARM_UP_STEPS
from elaswave.planning.costs.layers import Costs, sum_bytes
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.profiled import CostMeter, prediction_error
from elaswave.planning.costs.schedules import Schedule, bounds_within
from elaswave.planning.costs.step_time.exact import Durations, durations_of
from elaswave.planning.programs.execution import timed_step_s
from elaswave.types import Layout


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """A job as a planner sees it."""

    config: Config
    layout: Layout
    """In force by the log's last word."""
    costs: Costs
    cluster: Cluster
    """The layout's workers, with their speeds as measured."""
    num_reports: int
    """Timings that the costs rest on; 0 if they are the description, scaled to the steps."""
    step_s: tuple[float, ...]
    """Steps that were run under the layout, the first ones left out."""
    schedule: Schedule
    """In force: another than the configured one where a change of layout has brought it."""
    levels: dict[int, int]
    """Worker -> index of the frequency level at which it runs."""
    in_flight: dict[int, int]
    """Worker -> the most micro-batches that it may hold; empty where the schedule alone says so."""
    knows_durations: bool
    """Whether the run's programs are compiled by seconds of layers: those of emulated devices and of planned layouts;
    else layers are taken to be balanced over stages."""

    @property
    def tokens_per_microbatch(self) -> int:
        """Of the run; samples of a script's own model."""
        size = self.config.batch.microbatch_size
        return size if self.counts_samples else size * self.config.model.context_length

    @property
    def counts_samples(self) -> bool:
        """Whether samples are counted, not tokens."""
        return self.config.model.family == OWN

    @property
    def predicted_step_s(self) -> float:
        """What the costs say that a step of the layout takes, in the order in which it is executed."""
        durations = durations_of(self.costs.layer_s, self.cluster.speed_of(self.levels))
        run_s = _run_s(self.layout, self.schedule, durations, self.in_flight, knows_durations=self.knows_durations)
        return run_s + self.costs.overhead_s(self.layout.stages)

    @property
    def prediction_error(self) -> float | None:
        """How far that is off the steps that were run, as a share of them; None if there were none."""
        return prediction_error(self.predicted_step_s, self.step_s) if self.step_s else None


def read_run_costs(run_dir: Path) -> RunCosts:
    """Reads a run folder.

    Args:
        run_dir: of a run, finished or not.
    Raises:
        RunFolderError: not a run folder, a damaged file in it, or a run that has not got as far as its fourth step.
    """
    check_run_folder(run_dir)
    events = read_events(run_dir / EVENTS_FILE)
    return run_costs(saved_config(run_dir), events, name=str(run_dir))


def run_costs(config: Config, events: Sequence[AnyEvent], *, name: str = "the run") -> RunCosts:
    """Computes what a run's log tells. The function is pure.

    Args:
        config: of the run, resolved.
        events: its log, in order.
        name: of the run, for messages.
    Raises:
        RunFolderError: a run that has not got as far as its fourth step.
    """
    starts = [index for index, event in enumerate(events) if isinstance(event, RunStarted)]
    latest = events[starts[-1] :] if starts else events
    chosen = next((event for event in reversed(latest) if isinstance(event, LayoutChosen)), None)
    steps = [event for event in latest if isinstance(event, StepCommitted)][NUM_WARM_UP_STEPS:]
    if chosen is None or not steps:
        raise RunFolderError(
            f"{name} has not run {NUM_WARM_UP_STEPS + 1} steps yet, so nothing is known of its costs; wait, or "
            "describe a cluster with --model and --device"
        )
    layout = chosen.layout
    cluster = _cluster(config, layout, {})
    known = dict(zip(cluster.ids.tolist(), cluster.speed.tolist()))
    meter = CostMeter(_analytic_of_run(config, chosen))
    reports = [event for event in latest if isinstance(event, TimingsMeasured)]
    # The first steps of a process are slower; they count only where there is nothing else.
    for event in [event for event in reports if event.step > NUM_WARM_UP_STEPS] or reports:
        meter.add(event.timings, speeds=known)
    for step in steps:
        run_s = step.phases_s.get("run", 0.0)
        # Of a worker that runs the whole step, as those of the first stage do; others wait for them in REDUCE.
        if step.attempt == 1 and step.duration_s / 2 < run_s <= step.duration_s:
            meter.add_step(step.duration_s, run_s)
    since = [step for step in steps if step.generation == chosen.generation and step.step >= chosen.first_step]
    current = [step.duration_s for step in since if step.attempt == 1]
    schedule: Schedule = chosen.schedule or config.layout.schedule  # type: ignore[assignment]
    levels = dict.fromkeys(layout.workers, base_level(config)) | chosen.levels
    knows_durations = config.device.kind == "emulated" or chosen.change > 0
    if meter.num_reports:
        cluster = _cluster(config, layout, meter.speeds())
        costs = meter.costs()
        if config.device.kind == "emulated":
            # The analytic costs are the truth there, by construction; only what surrounds the actions is real.
            # They are those of the run's own small model, whatever the layout.
            costs = msgspec.structs.replace(emulated_costs(config), step_overhead_s=costs.step_overhead_s)
        else:
            measured_s = costs.step_overhead_s
            costs = msgspec.structs.replace(costs, end_link=REAL_LINK).measured_at(layout.stages, measured_s)
    else:
        analytic = _analytic_of_run(config, chosen)
        durations = durations_of(analytic.layer_s, cluster.speed_of(levels))
        run_s = _run_s(layout, schedule, durations, chosen.in_flight, knows_durations=knows_durations)
        costs = _scaled(analytic, run_s, [step.duration_s for step in steps])
    return RunCosts(
        config=config,
        layout=layout,
        costs=costs,
        cluster=cluster,
        num_reports=meter.num_reports,
        step_s=tuple(current),
        schedule=schedule,
        levels=levels,
        in_flight=chosen.in_flight,
        knows_durations=knows_durations,
    )


def _analytic_of_run(config: Config, chosen: LayoutChosen) -> Costs:
    """Computes the bytes and shares of seconds of the run's layers; parameters as the log counts them."""
    size = element_bytes(config)
    if config.model.family == OWN:
        costs = estimated_costs(config, chosen.layer_parameters)
    else:
        costs = own_bytes(config)
    counted = chosen.layer_parameters or [round(layer.parameter_bytes / size) for layer in costs.layers]
    layers = tuple(
        msgspec.structs.replace(
            layer,
            parameter_bytes=float(number * size),
            accumulator_bytes=float(number * sum_bytes(config.elastic.consistency, config.elastic.accumulator_bits)),
            optimizer_bytes=float(number * state_bytes(config)),
        )
        for layer, number in zip(costs.layers, counted, strict=True)
    )
    return msgspec.structs.replace(costs, layers=layers)


def _cluster(config: Config, layout: Layout, measured: dict[int, float]) -> Cluster:
    cluster = cluster_of(config, layout.workers, layout.domain_of)
    slowed = np.array([measured.get(worker, 1.0) for worker in layout.workers])
    return replace(cluster, speed=cluster.speed * slowed)


def _run_s(
    layout: Layout, schedule: Schedule, durations: Durations, in_flight: Mapping[int, int], *, knows_durations: bool
) -> float:
    known = durations if knows_durations else None
    return timed_step_s(
        layout, schedule, durations, known=known, max_in_flight=bounds_within(layout, schedule, in_flight)
    )


def _scaled(analytic: Costs, run_s: float, step_s: Sequence[float]) -> Costs:
    """Scales analytic costs so that a step takes as long as it did: nothing is known of what surrounds its actions."""
    factor = statistics.median(step_s) / run_s
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_s=layer.forward_s * factor,
            input_gradient_s=layer.input_gradient_s * factor,
            weight_gradient_s=layer.weight_gradient_s * factor,
        )
        for layer in analytic.layers
    )
    return Costs(layers=layers, source=f"{analytic.source}, scaled to the median of {len(step_s)} measured steps")
