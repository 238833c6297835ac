"""What is to be done between two steps: what is due, what of it is still to be done, and how a worker does it. No IO.

A worker asks what is due after the step that it has committed. A coordinator that decides how survivors go on asks what
was due after the step that they go on from, less what it knows to be done. Both must come to the same.

Nothing may be told of the state between two steps (an evaluation, a checkpoint) while copies of it are wrong: before
the first such work all workers compare their copies, and each looks at its own memory again before it tells (K4).
"""

from collections.abc import Container
from typing import Generic, Literal, NamedTuple, Protocol

from elaswave.protocol.events import PendingWork
from elaswave.protocol.step.activity import WRITE
from elaswave.protocol.step.ballot import Request
from elaswave.protocol.step.engine import C, Pause, Ports
from elaswave.protocol.step.execution import Life
from elaswave.protocol.step.soundness import CopyChecks

WorkItem = tuple[Literal["evaluate", "checkpoint"], int]
"""What is to be done between two steps, and the committed step that it is of."""
_TOLD = {"evaluate": "an evaluation", "checkpoint": "a checkpoint"}
"""What each duty tells of the state."""


class DueWorkTerms(Protocol):
    """Says what of a job decides it: `elaswave.protocol.step.engine.JobTerms` or the ``[run]`` table of a
    configuration."""

    @property
    def eval_every(self) -> int:
        """An evaluation after every so many steps; 0 for none."""

    @property
    def checkpoint_every(self) -> int:
        """A durable checkpoint after every so many steps; 0 for none but the one after the last step."""


class DueWork(NamedTuple):
    """What is due after a step."""

    evaluation: bool
    checkpoint: bool


def due_after(step: int, num_steps: int, terms: DueWorkTerms, *, asked: bool) -> DueWork:
    """Finds what is due after a committed step.

    Args:
        step: counted from 1; nothing but what was asked for is due after step 0.
        num_steps: of the job.
        terms: of the job.
        asked: whether its vote asked for a durable checkpoint, or for the end.
    """
    evaluation = step > 0 and terms.eval_every > 0 and step % terms.eval_every == 0
    regular = step > 0 and terms.checkpoint_every > 0 and step % terms.checkpoint_every == 0
    return DueWork(evaluation, asked or step == num_steps or regular)


def pending_after(
    step: int,
    num_steps: int,
    terms: DueWorkTerms,
    *,
    asked: bool,
    first_step: int,
    evaluated: Container[int],
    written: Container[int],
    published: int,
) -> PendingWork:
    """Finds what of a committed step is still to be done.

    Args:
        step, num_steps, terms, asked: as of `due_after`.
        first_step: that this job began with; what was due before it was another job's.
        evaluated: steps whose evaluation is known.
        written: steps whose checkpoint is durable.
        published: the newest step whose loss is known.
    """
    due = due_after(step, num_steps, terms, asked=asked)
    is_ours = step >= first_step
    return PendingWork(
        evaluate=due.evaluation and is_ours and step not in evaluated,
        checkpoint=due.checkpoint and is_ours and step not in written,
        published=published,
    )


class WorkBetweenSteps(Generic[C]):
    """Does what committed steps of one worker have left to be done before the next one.

    Args:
        ports: what the worker stands on.
        checks: looks at the copies before anything is told of them.
    """

    def __init__(self, ports: Ports[C], checks: CopyChecks[C]) -> None:
        self.terms, self.observer, self.outbox, self.disk = ports.terms, ports.observer, ports.outbox, ports.disk
        self.worker, self.checks, self.execution = ports.worker, checks, checks.execution
        self._due_work: list[WorkItem] = []
        """In order; one is removed once it is done, so that one that is interrupted is still to be done."""

    def note(self, step: int, request: Request) -> None:
        """Notes what a committed step leaves to be done before the next one.

        Args:
            step: the committed one.
            request: what its vote has asked for.
        """
        due = due_after(step, self.terms.num_steps, self.terms, asked=request.value >= Request.CHECKPOINT.value)
        if due.evaluation:
            self._due_work.append(("evaluate", step))
        if due.checkpoint:
            self._note_checkpoint(step)

    def forget(self) -> None:
        """Forgets all that was noted: a decision says what of it is still to be done."""
        self._due_work = []

    def note_decided(self, step: int, *, evaluate: bool, checkpoint: bool) -> None:
        """Notes what a decision leaves to be done of its step."""
        if evaluate:
            self._due_work.append(("evaluate", step))
        if checkpoint:
            self._note_checkpoint(step)

    def _note_checkpoint(self, step: int) -> None:
        self._due_work.append(("checkpoint", step))
        self.disk.restart_clock()

    def do(self, last_step: int, reporter: int) -> Life[str]:
        """Does all that is noted, in order.

        Args:
            last_step: the newest committed one.
            reporter: the worker that tells of evaluations.
        Returns:
            Why copies are wrong, and the rest is not done (K4); nothing if all is done.
        """
        if self._due_work:
            kind, step = self._due_work[0]
            if wrong := (yield from self.checks.compare_at_rest(step)):
                return f"{_TOLD[kind]} after step {step} was refused: {wrong}"
        while self._due_work:
            kind, step = self._due_work[0]
            if not (yield from (self._evaluate(step, reporter) if kind == "evaluate" else self._write(step))):
                return self.refusal(_TOLD[kind], last_step)
            self._due_work.pop(0)
        return ""

    def _evaluate(self, step: int, reporter: int) -> Life[bool]:
        yield from self.execution.run_evaluation(step)
        if not self.checks.is_sound():
            return False
        means = yield from self.execution.evaluation_means()
        if self.worker == reporter:
            report = self.outbox.evaluated(step, means.loss, means.by_name(self.terms.metrics))
            self.outbox.send(report, durable=True)
        return True

    def _write(self, step: int) -> Life[bool]:
        if self.disk.is_busy:
            self.observer.doing(WRITE, computing=False)
        yield Pause.DISK
        self.observer.doing("checkpoint", computing=True)
        if not self.checks.is_sound():
            return False
        self.disk.write(step)
        return True

    def refusal(self, what: str, last_step: int) -> str:
        """Says why something was not told: this worker's memory has changed."""
        return f"{what} after step {last_step} was refused: {self.checks.describe_changes()}"
