"""Publishes recoveries: a line on the terminal, then an entry among the records of the run."""

from collections.abc import Sequence

from elaswave.channel.messages.worker import StepReport
from elaswave.control.recorder import RunRecorder
from elaswave.control.recoveries import RecoveryLog
from elaswave.control.terminal import Terminal
from elaswave.observability.result import Recovery
from elaswave.protocol.events import NewEpoch, Suspected
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

    def restore(self, decisions: Sequence[Decision], undecided: NewEpoch | None, now_s: float) -> None:
        """Takes over recoveries that earlier coordinators have begun.

        Args:
            decisions: all that there were; of some it was not seen, or not entered, that training went on.
            undecided: the epoch that still waits for one.
            now_s: monotonic time.
        """
        for decision in decisions:
            unreported, joined, left = self._state.unreported(decision)
            if unreported or joined or left:
                suspicions = tuple(Suspected(worker, "exit", decision.reason) for worker in unreported)
                layout = self._state.layout_before(decision.epoch)
                self.log.new_epoch(NewEpoch(decision.epoch, suspicions, joined, left), layout, now_s)
                self.log.decided(decision, now_s, 0.0)
                self.log.resumed(now_s)
        if undecided is not None:
            self.new_epoch(undecided, now_s)

    def new_epoch(self, effect: NewEpoch, now_s: float) -> None:
        """Workers were lost under the present layout, or members have joined or left."""
        self.log.new_epoch(effect, self._state.layout, now_s)

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

    def coordinator_found(self, now_s: float, epoch: int) -> None:
        """All members have found this coordinator: says, once, that it follows others."""
        ends_s, self._coordinator_ends_s = self._coordinator_ends_s, ()
        for ended_s in ends_s:
            step = min(self._state.last_step + 1, self._num_steps)
            recovery = self.log.restarted(ended_s, now_s, step, epoch)
            self._recorder.recovered(recovery)
            self._terminal.say(
                f"the coordinator was lost in step {recovery.step}: a new one took over after "
                f"{recovery.total_s * 1e3:.0f} ms, training went on meanwhile"
            )
