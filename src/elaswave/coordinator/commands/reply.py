"""What was decided about an operator's request so far, as the coordinator's parts say it to each other."""

from collections.abc import Callable
from typing import NamedTuple

from elaswave.channel.messages.operator import Decided


class Reply(NamedTuple):
    """See `elaswave.channel.messages.operator.Answer`, which it becomes."""

    decided: Decided
    reason: str
    step: int | None = None
    layout: str | None = None
    workers: tuple[int, ...] = ()
    predicted_step_s: float | None = None
    present_step_s: float | None = None
    follow: "Callable[[], Reply | None] | None" = None
    """Asked now and then for the next reply; None: this is the last one."""


def refusal(reason: str) -> Reply:
    """Nothing is done."""
    return Reply("refused", reason)
