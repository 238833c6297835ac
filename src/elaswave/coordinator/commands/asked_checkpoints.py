"""Checkpoints that a person asks for: from the request to the vote that asks all workers, to the durable files.

The workers are told "a step later than this one", and ask in their votes until one that has asked commits such a step.
So it may be said twice, late, and by a successor, and still makes one checkpoint. Those who ask at the same time get
the same one; while one is being written, the next waits, so that training never waits for the disk because of it.
"""

from collections.abc import Callable
from typing import NamedTuple

from elaswave.channel.messages.worker import StepReport, TakeCheckpoint
from elaswave.coordinator.commands.job_status import JobParts
from elaswave.coordinator.commands.reply import Reply
from elaswave.protocol.messages import Decision


class CommittedStep(NamedTuple):
    """A committed step. Of two places the later one is the larger, also after a return to a checkpoint."""

    generation: int
    step: int


class CheckpointCommands:
    """The checkpoints of one job that were asked for.

    Args:
        job: what is known of it.
        tell: sends a message to all members.
    """

    def __init__(self, job: JobParts, tell: Callable[[TakeCheckpoint], object]) -> None:
        self._job = job
        self._tell = tell
        self._at = CommittedStep(job.core.generation, job.state.last_step)
        """The newest committed step that is known."""
        self._taken = CommittedStep(0, 0)
        """The newest one whose vote has asked for a checkpoint, as far as this coordinator has heard."""
        self._is_wanted = False
        """Whether the workers are still to be told, once the one before is written."""
        self._published: TakeCheckpoint | None = None
        """What they have been told, until a vote has answered it."""
        self._back = CommittedStep(0, 0)
        """The newest return to a checkpoint: what was committed in older generations, of later steps, is void."""

    @property
    def under_way(self) -> list[str]:
        """In words."""
        if self._published is not None:
            return [f"a checkpoint of a step after step {self._published.after} is asked for"]
        return ["a checkpoint is asked for; the one before it is still being written"] if self._is_wanted else []

    def ask(self, *, wait: bool) -> Reply:
        """Somebody wants one.

        Args:
            wait: whether the last reply is to come when it is durable.
        """
        asked_at = self._at
        self._is_wanted = True
        self.turn()
        when = "as soon as the checkpoint before it is written" if self._is_wanted else "in their next votes"
        reason = f"the newest committed step is {asked_at.step}; the workers ask for a checkpoint {when}"
        return Reply("asked", reason, follow=lambda: self._until_taken(asked_at, wait=wait))

    def _until_taken(self, asked_at: CommittedStep, *, wait: bool) -> Reply | None:
        taken = self._taken
        if taken <= asked_at:
            return None
        reason = f"the vote of step {taken.step} has asked all workers for it; they write it while training goes on"
        follow = (lambda: self._until_settled(taken)) if wait else None
        return Reply("taken", reason, step=taken.step, follow=follow)

    def _until_settled(self, taken: CommittedStep) -> Reply | None:
        step, checkpoints = taken.step, self._job.checkpoints
        if self._is_void(taken):
            return Reply("failed", f"the job has gone back to the checkpoint of step {self._back.step}", step=step)
        if not checkpoints.is_settled(step):
            return None
        record = next((each for each in checkpoints.records if each.step == step), None)
        if record is None:
            return Reply(
                "failed", f"the checkpoint of step {step} was given up, the job's terminal says why", step=step
            )
        return Reply("written", f"{record.path} is durable", step=step)

    def _is_void(self, place: CommittedStep) -> bool:
        return place.generation < self._back.generation and place.step > self._back.step

    # --------------------------------------------------------------------------------------------- what happens

    def turn(self) -> None:
        """Tells the workers what is wanted, unless a checkpoint is still being written."""
        taken = self._taken
        is_writing = taken.step > 0 and not self._is_void(taken) and not self._job.checkpoints.is_settled(taken.step)
        if self._is_wanted and not is_writing:
            self._is_wanted = False
            self._published = TakeCheckpoint(generation=self._at.generation, after=self._at.step)
            self._tell(self._published)

    def committed(self, report: StepReport) -> None:
        """A member reports a step; may be said again."""
        place = CommittedStep(report.generation, report.step)
        self._at = max(self._at, place)
        if report.checkpoint == report.step and place > self._taken:
            self._taken = place
            if self._published is not None and place > CommittedStep(self._published.generation, self._published.after):
                self._published = None

    def decided(self, decision: Decision) -> None:
        """Survivors go on: what was told may have reached only those who are gone."""
        if decision.rollback is not None:
            self._at = self._back = CommittedStep(decision.generation, decision.rollback)
        if self._published is not None:
            self._published = None
            self._is_wanted = True
            self.turn()

    @property
    def published(self) -> TakeCheckpoint | None:
        """What a worker is told that has connected again."""
        return self._published
