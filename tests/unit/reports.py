"""Messages with the fewest values that make sense."""

from elaswave.blocks.placement import Placement
from elaswave.channel.messages.worker import StepReport
from elaswave.protocol.messages import Decision
from elaswave.types import Layout, Stage


def report_of(step: int, *, generation: int = 1, checkpoint: int = 0) -> StepReport:
    """A committed step."""
    return StepReport(
        worker=0,
        generation=generation,
        step=step,
        attempt=1,
        loss=1.0,
        norm=1.0,
        learning_rate=0.1,
        duration_s=1.0,
        phases_s={},
        vector=b"",
        change=0,
        checkpoint=checkpoint,
        retries=[],
    )


def decision_of(generation: int, *, rollback: int | None = None) -> Decision:
    """A decision of one member."""
    return Decision(
        term=1,
        generation=generation,
        members=(0,),
        lost=(),
        evidence=None,
        resume_step=1 if rollback is None else rollback + 1,
        resume_attempt=1,
        layout=Layout(stages=(Stage(start=0, stop=1, workers=(0,)),), routes=()),
        placement=Placement.of(owners=(), followers=()),
        deliver=(),
        rollback=rollback,
        evaluate=False,
        checkpoint=False,
        published=0,
        promoted=0,
        reason="",
    )
