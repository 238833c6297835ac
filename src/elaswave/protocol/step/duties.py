"""What is to be done between two steps, and what of it is still to be done. Pure functions of the step.

The worker machine asks what is due after the step that it has committed. A coordinator that decides how survivors go on
asks what was due after the step that they go on from, less what it knows to be done. Both must come to the same.
"""

from collections.abc import Container
from typing import NamedTuple, Protocol

from elaswave.protocol.events import PendingWork


class DutyTerms(Protocol):
    """What of a job decides it: `elaswave.protocol.step.engine.JobTerms` or the ``[run]`` table of a configuration."""

    @property
    def eval_every(self) -> int:
        """An evaluation after every so many steps; 0 for none."""

    @property
    def checkpoint_every(self) -> int:
        """A durable checkpoint after every so many steps; 0 for none but the one after the last step."""


class Due(NamedTuple):
    """What is due after a step."""

    evaluation: bool
    checkpoint: bool


def due_after(step: int, num_steps: int, terms: DutyTerms, *, asked: bool) -> Due:
    """What is due after a committed step.

    Args:
        step: counted from 1; nothing but what was asked for is due after step 0.
        num_steps: of the job.
        terms: of the job.
        asked: whether its vote asked for a durable checkpoint, or for the end.
    """
    evaluation = step > 0 and terms.eval_every > 0 and step % terms.eval_every == 0
    regular = step > 0 and terms.checkpoint_every > 0 and step % terms.checkpoint_every == 0
    return Due(evaluation, asked or step == num_steps or regular)


def pending_after(
    step: int,
    num_steps: int,
    terms: DutyTerms,
    *,
    asked: bool,
    first_step: int,
    evaluated: Container[int],
    written: Container[int],
    published: int,
) -> PendingWork:
    """What of a committed step is still to be done.

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
