"""What a person at an agent's terminal, and a script's callback, hear of the job."""

import time

from elaswave.channel.messages.agent import ShowEvaluation, ShowStep, ShowText, StepLosses
from elaswave.config.own import SAMPLES_PER_S, TOKENS_PER_S
from elaswave.config.schema import Config
from elaswave.control.step_calls import StepCalls
from elaswave.job.role import Post
from elaswave.observability.progress import Reporter

STARTING_S = 10.0
"""Between two lines about a start that lasts."""


class Shown:
    """Of one agent.

    Args:
        reporter: shows progress.
        calls: of a script's callback.
        config: with its layout resolved.
        post: how the agent takes part.
        started_s: monotonic time at which the command began.
    """

    def __init__(self, reporter: Reporter, calls: StepCalls, config: Config, post: Post, started_s: float) -> None:
        self._reporter, self._calls = reporter, calls
        self._config, self._post = config, post
        self._started_s = started_s
        self._has_stepped = False
        self._say_at_s = STARTING_S
        """Seconds after the beginning at which the terminal hears again of a start that lasts."""

    def heard(self, message: ShowStep | StepLosses | ShowEvaluation | ShowText) -> None:
        """The coordinator has something to show."""
        if isinstance(message, ShowStep):
            self._has_stepped = True
            self._reporter.step(
                message.step,
                message.total_steps,
                message.loss,
                message.rate,
                message.data_pass,
                message.epoch,
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
        """Until the first step has been made, says now and then that the job is at it: a large model takes its time.

        Args:
            has_workers: whether this agent was asked for workers.
        """
        waited_s = time.monotonic() - self._started_s
        if not self._has_stepped and waited_s >= self._say_at_s:
            self._say_at_s = waited_s + STARTING_S
            what = f"{sum(self._config.widths)} workers are starting, and making the first step"
            if self._post.job and not has_workers:
                what = f"{self._post.node} waits until it is to start workers; the job begins with "
                what += f"{self._config.control.hosts} hosts"
            self._reporter.message(f"{what}: {waited_s:.0f} s so far")
