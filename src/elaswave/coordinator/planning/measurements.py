"""What the coordinator knows of how long things take in the running job: the planner's costs, kept current.

Workers tell medians of their actions now and then (`Timings`), and one of them with every step how long its phases
took. `elaswave.planning.costs.profiled` makes costs of it. On emulated devices the analytic costs are the truth; what a
step costs beside its actions is measured, and how fast workers are. `elaswave.coordinator.planning.stragglers` judges
the speeds.
"""

from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

import msgspec

from elaswave.channel.messages.worker import StepReport, Timings
from elaswave.config.devices import device_of, emulated_costs, estimated_costs, planned_speeds, speed_of
from elaswave.config.schema import Config
from elaswave.coordinator.planning.stragglers import Shift, Stragglers
from elaswave.devices.gauges import Gauges
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.profiled import ActionTiming, CostMeter
from elaswave.types import ExecutionParameters

_KEPT_STEPS = 16
DATA_WAITS_SHARE = 0.05
"""Of a worker's time that it may wait for its data before a person is told."""
DATA_WAITS_REPORTS = 2
"""Reports of a worker, one after the other, that must say so."""


class Measurements:
    """Times measured in one job.

    Args:
        config: of the run, resolved.
        layer_parameters: number of parameters of each layer.
    """

    def __init__(self, config: Config, layer_parameters: Sequence[int] = ()) -> None:
        self._is_emulated = config.device.kind == "emulated"
        self._analytic = emulated_costs(config) if self._is_emulated else estimated_costs(config, layer_parameters)
        self._meter = CostMeter(self._analytic)
        self.stragglers = Stragglers()
        self.shift: Shift | None = None
        """Workers whose speed is another one by the newest round, until the planner has been asked."""
        self._config = config
        self._levels = device_of(config).levels
        self._waiting: dict[int, Timings] = {}
        """Of a round in which some workers have not reported."""
        self._longest_run_s = 0.0
        """Of all workers in the newest round."""
        self._overheads_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._gauges: dict[int, Gauges] = {}

    def add(self, timings: Timings, members: Collection[int]) -> list[ActionTiming]:
        """A worker tells how long its actions take. What all say in one round is one report.

        Args:
            timings: of one worker.
            members: workers that are there.
        Returns:
            The report of a round that has ended by this, else nothing.
        """
        if timings.device is not None:
            self._gauges[timings.worker] = timings.device
        ended = self._end_round(members) if timings.worker in self._waiting else []
        if not timings.actions or timings.actions[-1].stop <= self._analytic.num_layers:
            self._waiting[timings.worker] = timings
        return self._end_round(members) if self._waiting.keys() >= set(members) else ended

    def _end_round(self, members: Collection[int]) -> list[ActionTiming]:
        known = self.stragglers.speeds
        speeds = {worker: speed_of(self._config, worker) * known.get(worker, 1.0) for worker in self._waiting}
        actions = [
            msgspec.structs.replace(action, level_speed=self._levels[timings.level].speed)
            for timings in self._waiting.values()
            for action in timings.actions
        ]
        self._longest_run_s = max(timings.run_s for timings in self._waiting.values())
        self._waiting.clear()
        if not actions:
            return []
        self._meter.add(actions, speeds=speeds)
        ratios = self._meter.relative_speeds(actions, speeds)
        self.shift = self.stragglers.observe(ratios, members) or self.shift
        return actions

    def gauges(self, members: Collection[int]) -> dict[int, Gauges]:
        """What devices have told of themselves last, by worker; those that tell nothing are not there.

        Args:
            members: whose devices are of interest.
        """
        return {worker: self._gauges[worker] for worker in sorted(members) if worker in self._gauges}

    def add_step(self, report: StepReport) -> None:
        """A step has been committed: what it cost beside its actions.

        Actions end with the longest RUN of all workers: others wait in REDUCE for those that still compute. Until
        the workers have told theirs, the reporter's counts where it spans the step, as it does in the first stage. A
        step that was interrupted and begun again counts more time in its phases than it has taken since, and says
        nothing.
        """
        run_s = max(report.phases_s.get("run", 0.0), self._longest_run_s)
        if report.attempt == 1 and report.duration_s / 2 < run_s <= report.duration_s:
            self._overheads_s.append(report.duration_s - run_s)

    @property
    def step_overhead_s(self) -> float:
        """Of a step beside its actions; 0 before any was measured."""
        return median(self._overheads_s) if self._overheads_s else 0.0

    def costs(self) -> Costs | None:
        """The planner's costs; None on a real device before all workers have reported."""
        costs = self._analytic
        if not self._is_emulated:
            if not self._meter.num_reports:
                return None
            costs = self._meter.costs()
        return msgspec.structs.replace(costs, step_overhead_s=self.step_overhead_s)

    def speeds(self) -> dict[int, float]:
        """Speeds of the workers that have turned out to be slower, or faster, than the configuration says, relative to
        that."""
        return self.stragglers.speeds

    def plan_with(self, execution: ExecutionParameters) -> None:
        """Counts with the speeds that a layout was planned with.

        Args:
            execution: beside the layout.
        """
        self.stragglers.plan_with(planned_speeds(self._config, execution))

    def speed_of(self, worker: int) -> float:
        """The speed of a worker that plans count with, at the base level."""
        return speed_of(self._config, worker) * self.stragglers.speeds.get(worker, 1.0)

    def known_or_estimated(self) -> Costs:
        """The planner's costs; before anything is measured those that follow from the layers' sizes."""
        return self.costs() or self._analytic


class DataWaits:
    """What the workers of a run say of their waiting for data."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """By worker: its newest reports that said so, in a row."""
        self._is_reported = False

    def add(self, timings: Timings) -> str | None:
        """Takes what one worker tells of a few of its steps.

        Returns:
            What a person is to be told, once in the run.
        """
        share = timings.data_wait_s / timings.elapsed_s if timings.elapsed_s > 0 else 0.0
        count = self._counts.get(timings.worker, 0) + 1 if share > DATA_WAITS_SHARE else 0
        self._counts[timings.worker] = count
        if self._is_reported or count < DATA_WAITS_REPORTS:
            return None
        self._is_reported = True
        return (
            f"worker {timings.worker} has spent {share:.0%} of the last {timings.elapsed_s:.1f} s waiting for its "
            "data: let loaders make it ahead (loaders=2, or more of them), or make a sample less work"
        )
