"""What ElasWave's planner may do, and what it is for. Pure values."""

from dataclasses import dataclass
from typing import Literal

from elaswave.planning.costs.machines import EventKind
from elaswave.planning.costs.memory import DEFAULT_FOLLOWERS
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.costs.schedules import SCHEDULES, Schedule
from elaswave.planning.frequency import GOALS, Goal
from elaswave.planning.programs.prediction import EXACT_ACTIONS

Axis = Literal["dataflow", "graph", "frequency", "randomness"]
AXES: frozenset[Axis] = frozenset({"dataflow", "graph", "frequency", "randomness"})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a plan may do and what it is for."""

    axes: frozenset[Axis] = AXES
    horizon_s: float | None = None
    """Expected time until the next event; None means as public failure rates say for so many workers."""
    goal: Goal = "fastest"
    move_workers: bool = True
    """Whether workers may change stage."""
    share_layers: bool = True
    """Whether neighbouring stages may share layers."""
    mix_depths: bool = True
    """Whether pipelines of different depth may run side by side, if workers may change stage."""
    leave_out: bool = True
    """Whether workers may be left without work, as spares that hold copies: slow ones, or those that make a layout
    uneven."""
    local_search: bool = True
    """Whether plans of small jobs are made better step by step with exact times, which takes some 0.4 s. A running job,
    whose layout would change again and again (docs/planning.md), and a simulation, which plans for thousands of events,
    do without."""
    schedules: tuple[Schedule, ...] | None = None
    """To choose from; None means the job's own and ``zero-bubble-h2``."""
    followers: int = DEFAULT_FOLLOWERS
    """Live copies of every block."""
    exact_actions: int = EXACT_ACTIONS
    """Candidates of at most so many actions are timed exactly, in jobs of at most `EXACT_WORKERS` workers."""
    pause_s: float = RecoveryTimes().recover_s
    """Predicted pause after a loss, where no state has to be fetched."""
    join_pause_s: float = RecoveryTimes().join_s
    """The same where workers join or leave, for their new generation."""
    move_pause_s: float = RecoveryTimes().move_s
    """And for a change of layout whose blocks have been copied in the background."""
    copy_share: float = RecoveryTimes().copy_share
    """Of the links' bandwidth that such copies take."""

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: with every field that cannot be.
        """
        problems = [
            f"{name} is {sorted(set(given) - set(known))}, needed: of {', '.join(sorted(known))}"
            for name, given, known in (
                ("axes", self.axes, AXES),
                ("goal", [self.goal], GOALS),
                ("schedules", self.schedules or (), SCHEDULES),
            )
            if not set(given) <= set(known)
        ]
        if self.schedules == ():
            problems.append("schedules are none, needed: at least one, or None for the job's own and zero-bubble-h2")
        if self.horizon_s is not None and not 0 < self.horizon_s < float("inf"):
            problems.append(f"horizon_s is {self.horizon_s}, needed: above 0 and finite")
        if not 0 < self.copy_share < 1:
            problems.append(f"copy_share is {self.copy_share}, needed: above 0 and below 1")
        problems += [
            f"{name} is {value}, needed: finite and at least 0"
            for name in ("followers", "exact_actions", "pause_s", "join_pause_s", "move_pause_s")
            if not 0 <= (value := getattr(self, name)) < float("inf")
        ]
        if problems:
            raise ValueError("options of a plan are impossible: " + "; ".join(problems))

    def pause_of(self, kind: EventKind, *, moves: bool) -> float:
        """Predicted pause where no state has to be fetched.

        Args:
            kind: of the event.
            moves: whether blocks go to other workers, so that a change of layout follows.
        """
        pause_s = moves * self.move_pause_s
        if kind == "slowed":
            return pause_s
        return pause_s + (self.pause_s if kind == "lost" else self.join_pause_s)

    def horizon(self, num_workers: int) -> float:
        """Expected seconds until the next event of so many workers."""
        return RecoveryTimes(horizon_s=self.horizon_s).horizon(num_workers)
