"""What workers report becomes records of the run, and what becomes of checkpoints is told to them."""

from collections.abc import Callable
from typing import Any

from elaswave.channel.messages.agent import CheckpointCommitted
from elaswave.channel.messages.worker import (
    EvaluationReport,
    Finished,
    Ready,
    Settled,
    ShardFailed,
    ShardWritten,
    StepReport,
)
from elaswave.control.recorder import RunRecorder
from elaswave.control.recovery_reports import RecoveryReports
from elaswave.control.server import ControlServer
from elaswave.errors import StateError
from elaswave.protocol.coordinator import Coordinator


class Publishing:
    """Passes reports to the records of one run.

    Args:
        core: the machine.
        recorder: of the run.
        recoveries: are published with the steps that complete them.
        server: has the connections.
        stepped: called with the report of each step that is published.
        recorded: called whenever more is known that may end the job.
        failed: called with what the records cannot agree with.
    """

    def __init__(
        self,
        core: Coordinator,
        recorder: RunRecorder,
        recoveries: RecoveryReports,
        server: ControlServer[Any],
        *,
        stepped: Callable[[StepReport], None],
        recorded: Callable[[], None],
        failed: Callable[[StateError], None],
    ) -> None:
        self.environment = ""
        """What a member computes with, for people."""
        self._core = core
        self._recorder = recorder
        self._recoveries = recoveries
        self._server = server
        self._stepped = stepped
        self._recorded = recorded
        self._failed = failed

    def publish(
        self,
        message: Ready | StepReport | EvaluationReport | ShardWritten | ShardFailed | Finished,
        now_s: float,
    ) -> None:
        """A worker has reported.

        Args:
            message: what arrives in this turn.
            now_s: monotonic time.
        """
        try:
            if isinstance(message, Ready):
                self.environment = message.environment
                self._recorder.ready(message)
            elif isinstance(message, StepReport):
                # By its own clock: a worker tells only how long ago it was.
                finished_s = now_s - self._server.age_s - message.ago_s
                self._recoveries.committed(message, finished_s)
                if self._recorder.step(message, finished_s):
                    self._stepped(message)
            elif isinstance(message, EvaluationReport):
                self._recorder.evaluation(message)
            elif isinstance(message, ShardWritten | ShardFailed):
                self._recorder.checkpoints.part(message)
                step = message.standing.step if isinstance(message, ShardWritten) else message.step
                if self._recorder.is_settled(step):
                    self._server.send(message.worker, Settled(step=step))
            else:
                self._recorder.finish(message)
            self.tell_settled()
            self._recorded()
        except StateError as error:
            self._failed(error)

    def committed(self, message: CheckpointCommitted) -> None:
        """The committer has answered."""
        try:
            self._recorder.checkpoints.committed(message.number, message.error, again=message.again)
            self.tell_settled()
            self._recorded()
        except StateError as error:
            self._failed(error)

    def tick(self, now_s: float) -> None:
        """Time has passed: a checkpoint may be given up by now."""
        has_given_up = self._recorder.checkpoints.tick(now_s)
        self.tell_settled()
        if has_given_up:
            self._recorded()

    def give_up_missing_parts(self) -> None:
        """With a word to the workers."""
        self._recorder.checkpoints.end()
        self.tell_settled()

    def tell_settled(self) -> None:
        """Checkpoints are durable or given up: no worker need say again what became of its parts."""
        steps, self._recorder.settled[:] = tuple(self._recorder.settled), []
        for step in steps:
            self._server.send_all(self._core.members, Settled(step=step))
