"""What workers report becomes records of the run, recoveries too, with a line on the terminal; and what becomes of
checkpoints is told to them."""

from collections.abc import Callable, Sequence
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
from elaswave.channel.server import ControlServer
from elaswave.coordinator.records.recorder import RunRecorder
from elaswave.coordinator.records.recoveries import RecoveryLog
from elaswave.coordinator.records.terminal import Terminal
from elaswave.errors import StateError
from elaswave.observability.result import Recovery
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import NewGeneration, Suspected
from elaswave.protocol.messages import Decision


class RecoveryReports:
    """What is said of the recoveries of one run.

    Args:
        log: collects what a report needs.
        recorder: of the run.
        terminal: what is shown.
        num_steps: of the run.
        coordinator_ends_s: monotonic times at which coordinators have ended of which no one has told yet.
    """

    def __init__(
        self,
        log: RecoveryLog,
        recorder: RunRecorder,
        terminal: Terminal,
        *,
        num_steps: int,
        coordinator_ends_s: Sequence[float],
    ) -> None:
        self.log = log
        self._recorder = recorder
        self._state = recorder.state
        self._terminal = terminal
        self._num_steps = num_steps
        self._coordinator_ends_s = tuple(coordinator_ends_s)

    def restore(self, decisions: Sequence[Decision], undecided: NewGeneration | None, now_s: float) -> None:
        """Takes over recoveries that earlier coordinators have begun.

        Args:
            decisions: all that there were; of some it was not seen, or not entered, that training went on.
            undecided: the generation that still waits for one.
            now_s: monotonic time.
        """
        for decision in decisions:
            unreported, joined, left = self._state.unreported(decision)
            if unreported or joined or left:
                suspicions = tuple(Suspected(worker, "exit", decision.reason) for worker in unreported)
                layout = self._state.layout_before(decision.generation)
                self.log.new_generation(NewGeneration(decision.generation, suspicions, joined, left), layout, now_s)
                self.log.decided(decision, now_s, 0.0)
                self.log.resumed(now_s)
        if undecided is not None:
            self.new_generation(undecided, now_s)

    def new_generation(self, effect: NewGeneration, now_s: float) -> None:
        """Workers were lost under the present layout, or members have joined or left."""
        self.log.new_generation(effect, self._state.layout, now_s)

    def resumed(self, now_s: float) -> None:
        """Every member computes again."""
        self._publish(self.log.resumed(now_s))

    def committed(self, report: StepReport, finished_s: float) -> None:
        """A step is done; to be called before it is published, as its line shows the new layout."""
        self._publish(self.log.committed(report, finished_s))

    def flush(self) -> None:
        """The job ends."""
        self._publish(self.log.flush())

    def _publish(self, recoveries: Sequence[Recovery]) -> None:
        for recovery in recoveries:
            # The line first: a coordinator that dies in between leaves a successor that says it again.
            self._terminal.say(self.log.describe(recovery))
            self._recorder.recovered(recovery)

    def coordinator_found(self, now_s: float, generation: int) -> None:
        """All members have found this coordinator: says, once, that it follows others."""
        ends_s, self._coordinator_ends_s = self._coordinator_ends_s, ()
        for ended_s in ends_s:
            step = min(self._state.last_step + 1, self._num_steps)
            recovery = self.log.restarted(ended_s, now_s, step, generation)
            self._recorder.recovered(recovery)
            self._terminal.say(
                f"the coordinator was lost in step {recovery.step}: a new one took over after "
                f"{recovery.total_s * 1e3:.0f} ms, training went on meanwhile"
            )


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
