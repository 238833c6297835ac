"""What the coordinator knows of how long things take in the running job: the planner's costs, kept current.

Workers tell medians of their actions now and then (`Timings`), and one of them with every step how long its phases
took. `elaswave.planning.costs.profiled` makes costs of it. On emulated devices the analytic costs are the truth; what a
step costs beside its actions is measured, and how fast workers are. `elaswave.coordinator.planning.measurements` judges
the speeds.

When workers count as slower or faster than the plans think: a policy that noise does not move. Pure: no clocks.

Every round of timings gives each worker's speed relative to the one that plans count with. What all have in common is
the machine's doing, or the costs', and is taken out. A worker has *shifted* once its speed is off by more than
`Hysteresis.deviation`, to the same side, in `Hysteresis.rounds` of its reports in a row. From then on plans count with
the median of those reports; a speed within the deviation of the configured one is that one again.

A slow worker that a plan leaves without any work cannot be measured. It is *tried again*: after `TRIAL_ROUNDS` rounds
plans count with its configured speed, and if it is still slow it is found out as any other. Each trial that fails
doubles the rounds until the next one. After `TRIALS_MAX` that have failed one after the other, and once it is without
work again, it is *hopeless*: what it gives, a few copies, others can give.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_high, median_low
from typing import NamedTuple

import msgspec

from elaswave.channel.messages.worker import StepReport, Timings
from elaswave.config.cluster import device_of, emulated_costs, estimated_costs, planned_speeds, speed_of
from elaswave.config.schema import Config
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.profiled import ActionTiming, CostMeter
from elaswave.types import ExecutionParameters, Gauges

TRIAL_ROUNDS = 16
"""Of the others, until a worker without work is tried again for the first time."""
TRIALS_MAX = 3
"""Trials in a row that must fail before a worker is hopeless: with the rounds between them some eight minutes."""


class Hysteresis(NamedTuple):
    """What is more than noise."""

    deviation: float
    """The share by which a speed must be off: with 0.1 it is below 0.9 times the speed that plans count with, or above
    1 / 0.9 times it."""
    rounds: int
    """Reports of the worker in a row that must say so."""


HYSTERESIS = Hysteresis(0.15, 4)
"""In ten minutes on two cores with four to eight times as much work as they could do, workers were off by more than
0.15 in 35 of 467 reports, at worst by a factor of 1.9, and never in more than two in a row."""


class Shift(NamedTuple):
    """Workers whose speed is another one than plans have counted with."""

    workers: tuple[int, ...]
    """Ascending."""
    reason: str
    """One line for people."""


class Stragglers:
    """The speeds that plans count with.

    Args:
        hysteresis: what is more than noise.
    """

    def __init__(self, hysteresis: Hysteresis = HYSTERESIS) -> None:
        self._hysteresis = hysteresis
        self._speeds: dict[int, float] = {}
        self._ratios: dict[int, float] = {}
        """Newest measured speed of each worker over the one that plans count with."""
        self._streaks: dict[int, list[float]] = {}
        """Ratios in a row that are off to the same side."""
        self._unmeasured: dict[int, int] = {}
        """Rounds for which a worker with another speed than configured has had no work."""
        self._trials: dict[int, int] = {}
        """Rounds without work after which a worker is tried again."""
        self._steady: dict[int, int] = {}
        """Reports in a row by which a worker is as fast as configured, of those that were tried again."""

    @property
    def speeds(self) -> dict[int, float]:
        """Worker -> the speed that plans count with, relative to the configured one; 1 for those that are not in it."""
        return dict(self._speeds)

    @property
    def hopeless(self) -> tuple[int, ...]:
        """Workers without work that were still slow whenever they were tried again, ascending."""
        failed = TRIAL_ROUNDS << TRIALS_MAX
        return tuple(sorted(worker for worker in self._unmeasured if self._trials.get(worker, 0) >= failed))

    def plan_with(self, speeds: Mapping[int, float]) -> None:
        """Counts with other speeds from now on: those that the layout in force was planned with.

        Args:
            speeds: worker -> speed, as `speeds`.
        """
        self._speeds = {worker: speed for worker, speed in speeds.items() if abs(speed - 1.0) > 1e-9}
        self._ratios.clear()
        self._streaks.clear()

    def observe(self, ratios: Mapping[int, float], members: Collection[int]) -> Shift | None:
        """Takes in one round.

        Args:
            ratios: of each worker that was measured in it: its speed over the one that plans count with, above 0.
            members: of the job; what is known of others is forgotten.
        Returns:
            Who has shifted by this round; None if nobody has.
        """
        self._forget(members)
        if not ratios:
            return None
        self._ratios.update(ratios)
        common = _common(self._ratios.values())
        shifted = {}
        for worker, ratio in ratios.items():
            self._unmeasured.pop(worker, None)
            found = self._take(worker, ratio / common)
            if found is not None:
                shifted[worker] = found
        reasons = []
        for worker, speed in sorted(shifted.items()):
            before = self._speeds.get(worker, 1.0)
            self._count_with(worker, speed)
            reasons.append(f"worker {worker} computes at {speed:.2f} of its speed, not {before:.2f}")
        tried = self._due_trials(ratios)
        for worker in tried:
            reasons.append(f"worker {worker}, without work at {self._speeds[worker]:.2f} of its speed, is tried again")
            self._count_with(worker, 1.0)
        return Shift(tuple(sorted({*shifted, *tried})), "; ".join(reasons)) if reasons else None

    def _take(self, worker: int, ratio: float) -> float | None:
        """Takes a report of one worker and returns its new speed if by this it has shifted."""
        least = 1.0 - self._hysteresis.deviation
        streak = self._streaks.setdefault(worker, [])
        if streak and (streak[0] < 1.0) is not (ratio < 1.0):
            streak.clear()
        if least <= ratio <= 1.0 / least:
            streak.clear()
            self._note_steady(worker)
            return None
        self._steady.pop(worker, None)
        streak.append(ratio)
        if len(streak) < self._hysteresis.rounds:
            return None
        speed = self._speeds.get(worker, 1.0) * median(streak)
        return 1.0 if least <= speed <= 1.0 / least else speed

    def _note_steady(self, worker: int) -> None:
        """A worker that was tried again is as fast as plans think: after some such reports its trial has not failed."""
        if worker in self._trials and worker not in self._speeds:
            self._steady[worker] = self._steady.get(worker, 0) + 1
            if self._steady[worker] >= self._hysteresis.rounds:
                del self._steady[worker], self._trials[worker]

    def _count_with(self, worker: int, speed: float) -> None:
        if worker in self._ratios:
            self._ratios[worker] *= self._speeds.get(worker, 1.0) / speed
        if speed == 1.0:
            self._speeds.pop(worker, None)
        else:
            self._speeds[worker] = speed
        self._streaks.pop(worker, None)
        self._unmeasured.pop(worker, None)

    def _due_trials(self, ratios: Mapping[int, float]) -> list[int]:
        """Lists workers without work whose trial is due after another round of the others."""
        due = []
        for worker in sorted(set(self._speeds) - set(ratios)):
            rounds = self._unmeasured[worker] = self._unmeasured.get(worker, 0) + 1
            wanted = self._trials.get(worker, TRIAL_ROUNDS)
            if rounds >= wanted:
                self._trials[worker] = 2 * wanted
                due.append(worker)
        return due

    def _forget(self, members: Collection[int]) -> None:
        for known in (self._speeds, self._ratios, self._streaks, self._unmeasured, self._trials, self._steady):
            for worker in [worker for worker in known if worker not in members]:
                del known[worker]


def _common(ratios: Collection[float]) -> float:
    """Computes the factor by which the workers are off together: nearest to 1 between their two middles."""
    low, high = median_low(ratios), median_high(ratios)
    return min(max(1.0, low), high)


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
        """Returns what devices have told of themselves last, by worker; those that tell nothing are not there.

        Args:
            members: whose devices are of interest.
        """
        return {worker: self._gauges[worker] for worker in sorted(members) if worker in self._gauges}

    def add_step(self, report: StepReport) -> None:
        """Notes that a step has been committed, and what it cost beside its actions.

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
        """Returns the planner's costs; None on a real device before all workers have reported."""
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
        """Returns the speed of a worker that plans count with, at the base level."""
        return speed_of(self._config, worker) * self.stragglers.speeds.get(worker, 1.0)

    def known_or_estimated(self) -> Costs:
        """Returns the planner's costs; before anything is measured those that follow from the layers' sizes."""
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
