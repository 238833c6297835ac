"""What a person at an agent's terminal, and a script's callback, hear of the job.

Whether an agent has been asked to stop, by whom, and what is to end: the job, or this host's part in it.

A signal may come at any moment: it changes one attribute.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from elaswave.channel.messages.agent import ShowEvaluation, ShowStep, ShowText, StepLosses
from elaswave.config.schema import Config
from elaswave.config.values import SAMPLES_PER_S, TOKENS_PER_S
from elaswave.errors import StoppedBySignalError
from elaswave.job.setup import AgentRole
from elaswave.observability.progress import Reporter
from elaswave.system.processes import STOP_SIGNALS

STARTING_S = 10.0
"""Between two lines about a start that lasts."""


class StepCalls:
    """Calls back for committed steps.

    A coordinator may die before it has told of a step, and its successor tells of later ones: those wait until the
    missing one has been told of too.

    Args:
        call: takes step, loss and metrics.
    """

    def __init__(self, call: Callable[[int, float, Mapping[str, float]], None]) -> None:
        self.last_step = 0
        """The newest step that was called for, or that the job began after."""
        self.error: Exception | None = None
        """What a call has raised; nothing is called any more."""
        self._call = call
        self._waiting: dict[int, tuple[float, Mapping[str, float]]] = {}

    def begin(self, step: int) -> None:
        """The job begins after this step."""
        self.last_step = step

    def published(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """A step was committed; may be said again, and before a step that came before it."""
        if step <= self.last_step or self.error is not None:
            return
        self._waiting[step] = loss, metrics
        while self.last_step + 1 in self._waiting:
            self.last_step += 1
            try:
                self._call(self.last_step, *self._waiting.pop(self.last_step))
            except Exception as error:
                self.error = error
                return

    def finish(self, losses: Sequence[float], metrics: Mapping[str, Sequence[float]]) -> None:
        """Calls back for steps that no coordinator has told of.

        Args:
            losses: of every step from the first one.
            metrics: of the same steps by name.
        """
        for step, loss in enumerate(losses, 1):
            self.published(step, loss, {name: values[step - 1] for name, values in metrics.items()})

    def raise_error(self) -> None:
        """Raises what a call has raised, if one has: the job has ended because of it."""
        if self.error is not None:
            raise self.error


class TerminalView:
    """Of one agent.

    Args:
        reporter: shows progress.
        calls: of a script's callback.
        config: with its layout resolved.
        agent_role: how the agent takes part.
        started_s: monotonic time at which the command began.
    """

    def __init__(
        self, reporter: Reporter, calls: StepCalls, config: Config, agent_role: AgentRole, started_s: float
    ) -> None:
        self._reporter, self._calls = reporter, calls
        self._config, self._agent_role = config, agent_role
        self._started_s = started_s
        self._has_stepped = False
        self._say_at_s = STARTING_S
        """Seconds after the beginning at which the terminal hears again of a start that lasts."""

    def received(self, message: ShowStep | StepLosses | ShowEvaluation | ShowText) -> None:
        """The coordinator has something to show."""
        if isinstance(message, ShowStep):
            self._has_stepped = True
            self._reporter.step(
                message.step,
                message.total_steps,
                message.loss,
                message.rate,
                message.data_pass,
                message.generation,
                message.layout_name,
                SAMPLES_PER_S if message.counts_samples else TOKENS_PER_S,
            )
            self._calls.published(message.step, message.loss, message.metrics)
        elif isinstance(message, StepLosses):
            for step, (loss, metrics) in enumerate(zip(message.losses, message.metrics), message.first_step):
                self._calls.published(step, loss, metrics)
        elif isinstance(message, ShowEvaluation):
            self._reporter.evaluation(message.step, message.loss)
        else:
            (self._reporter.error if message.is_error else self._reporter.message)(message.text)

    def starting(self, *, has_workers: bool) -> None:
        """Says now and then, until the first step has been made, that the job is at it: a large model takes its time.

        Args:
            has_workers: whether this agent was asked for workers.
        """
        waited_s = time.monotonic() - self._started_s
        if not self._has_stepped and waited_s >= self._say_at_s:
            self._say_at_s = waited_s + STARTING_S
            what = f"{sum(self._config.widths)} workers are starting, and making the first step"
            if self._agent_role.job and not has_workers:
                what = f"{self._agent_role.node} waits until it is to start workers; the job begins with "
                what += f"{self._config.control.hosts} hosts"
            self._reporter.message(f"{what}: {waited_s:.0f} s so far")


STOP_GRACE_S = 300.0
"""After the first signal, how long the step in hand and its checkpoint may take."""


class StopRequest:
    """What an agent was asked.

    Args:
        leave_s: how long this host's workers may take to leave after a notice; None: a notice ends the job.
    """

    def __init__(self, leave_s: float | None) -> None:
        self.signal: int | None = None
        """The first one; None: there was none."""
        self._cause = ""
        """Why the coordinator wants the end, if it was not a signal."""
        self._leave_s = leave_s
        self._is_over = False
        """Whether a second one has come."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for a clean end; another one ends at once, unless it is SIGHUP, which a terminal that
        closes may send twice, itself and by its shell.

        Raises:
            StoppedBySignalError: it is another one.
        """
        if self.signal is not None and number == signal.SIGHUP:
            return
        if self._is_over:
            return  # it unwinds already, and must not be interrupted in that
        if self.signal is not None:
            self._is_over = True
            raise StoppedBySignalError(number, "stopped at once by a second signal")
        self.signal = number

    def by_coordinator(self, cause: str) -> None:
        """The coordinator wants the job to end."""
        if self.signal is None:
            self.signal, self._cause = signal.SIGTERM, cause

    @property
    def is_leaving(self) -> bool:
        """Whether this host's workers leave, and the job goes on."""
        return self.signal is not None and self._leave_s is not None and not self._cause

    @property
    def grace_s(self) -> float:
        """How long the end that was asked for may take: a notice's time is this host's, not that of a job's stop."""
        return self._leave_s if self._leave_s is not None and self.is_leaving else STOP_GRACE_S

    @property
    def name(self) -> str:
        """Of what has asked, for people."""
        return self._cause or ("a callback has failed" if self.signal is None else STOP_SIGNALS[self.signal])
