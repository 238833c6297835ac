"""What the coordinator knows of how long things take in the running job: the planner's costs, kept current.

Workers tell medians of their actions now and then (`Timings`), and one of them with every step how long its phases
took. `elaswave.costs.profiled` makes costs of it. On emulated devices the analytic costs are the truth, and only
what a step costs beside its actions is measured.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import msgspec

from elaswave.config.devices import cluster_of, device_of, emulated_costs, estimated_costs
from elaswave.config.schema import Config
from elaswave.costs.layers import Costs
from elaswave.costs.profiled import ActionTiming, CostMeter
from elaswave.worker.messages import StepReport, Timings

_KEPT_STEPS = 16
SLOW_SPEED = 0.85
"""A worker nearer to the others' speed counts as equally fast: processes on one machine differ by chance."""


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
        self._speeds = cluster_of(config).speed.tolist()
        self._levels = device_of(config).levels
        self._waiting: dict[int, Timings] = {}
        """Of a round in which some workers have not reported."""
        self._overheads_s: deque[float] = deque(maxlen=_KEPT_STEPS)

    def add(self, timings: Timings, num_members: int) -> list[ActionTiming]:
        """A worker tells how long its actions take. What all say in one round is one report.

        Args:
            timings: of one worker.
            num_members: workers that are there.
        Returns:
            The report of a round that has ended by this, else nothing.
        """
        ended = self._end_round() if timings.worker in self._waiting else []
        if timings.actions and timings.actions[-1].stop <= self._analytic.num_layers:
            self._waiting[timings.worker] = timings
        return self._end_round() if len(self._waiting) >= num_members else ended

    def _end_round(self) -> list[ActionTiming]:
        speeds = {worker: self._speeds[worker] for worker in self._waiting}
        actions = [
            msgspec.structs.replace(action, level_speed=self._levels[timings.level].speed)
            for timings in self._waiting.values()
            for action in timings.actions
        ]
        self._waiting.clear()
        self._meter.add(actions, speeds=speeds)
        return actions

    def add_step(self, report: StepReport) -> None:
        """A step has been committed: what it cost beside its actions.

        The reporter's RUN must span the step, as it does in the first stage: elsewhere a worker waits in REDUCE for
        others that still compute. One that was interrupted and begun again counts more time in its phases than it has
        taken since, and says nothing.
        """
        run_s = report.phases_s.get("run", 0.0)
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
        """Speeds of the workers that are clearly slower than others with the same layers, relative to what the
        configuration says of them; on emulated devices that is the truth."""
        if self._is_emulated:
            return {}
        return {worker: speed for worker, speed in self._meter.speeds().items() if speed < SLOW_SPEED}

    def known_or_estimated(self) -> Costs:
        """The planner's costs; before anything is measured those that follow from the layers' sizes."""
        return self.costs() or self._analytic
