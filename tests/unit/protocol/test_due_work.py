"""What is due after a step, and what of it is still to be done when survivors go on from it."""

from typing import NamedTuple

import pytest

from elaswave.protocol.events import PendingWork
from elaswave.protocol.step.due_work import DueWork, due_after, pending_after


class Terms(NamedTuple):
    eval_every: int = 0
    checkpoint_every: int = 0


@pytest.mark.parametrize(
    ("step", "terms", "asked", "due"),
    [
        (4, Terms(), False, DueWork(evaluation=False, checkpoint=False)),
        (4, Terms(2, 3), False, DueWork(evaluation=True, checkpoint=False)),
        (6, Terms(4, 3), False, DueWork(evaluation=False, checkpoint=True)),
        (4, Terms(), True, DueWork(evaluation=False, checkpoint=True)),
        (9, Terms(), False, DueWork(evaluation=False, checkpoint=True)),
        (0, Terms(1, 1), False, DueWork(evaluation=False, checkpoint=False)),
    ],
)
def test_what_is_due(step, terms, asked, due):
    assert due_after(step, 9, terms, asked=asked) == due


@pytest.mark.parametrize(
    ("first_step", "evaluated", "written", "pending"),
    [
        (1, (), (), PendingWork(evaluate=True, checkpoint=True, published=3)),
        (1, (4,), (2,), PendingWork(evaluate=False, checkpoint=True, published=3)),
        (4, (2,), (4,), PendingWork(evaluate=True, checkpoint=False, published=3)),
        (5, (), (), PendingWork(evaluate=False, checkpoint=False, published=3)),
    ],
)
def test_what_is_known_to_be_done_or_was_another_jobs_is_not_pending(first_step, evaluated, written, pending):
    found = pending_after(
        4, 9, Terms(2, 2), asked=False, first_step=first_step, evaluated=evaluated, written=written, published=3
    )
    assert found == pending
