"""What a worker says of a moment is how long ago it was, or how long it is until then, whenever it says so."""

import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.reports import report_of

from elaswave.channel.messages.worker import Leaving, LinkLost, StepReport
from elaswave.protocol.step.ballot import Request
from elaswave.protocol.step.engine import Committed
from elaswave.worker.control import ControlOutbox, Mailbox


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=5000.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    return now


def test_a_report_that_is_said_late_says_so(now: SimpleNamespace) -> None:
    said: list[Any] = []
    outbox: Any = ControlOutbox.__new__(ControlOutbox)
    outbox._client = SimpleNamespace(send=lambda message, durable=False: said.append((message, durable)))
    outbox._finished_s = {7: 4990.0, 8: 5000.0}
    outbox.send(report_of(8), durable=True)
    outbox.send(report_of(7), durable=True)
    now.s += 60.0  # another member was lost that should have told of it
    outbox.send(report_of(7), durable=True)
    lost = LinkLost(worker=0, peer=1, generation=1, detail="")
    outbox.send(lost)
    assert [getattr(message, "ago_s", None) for message, _ in said] == [0.0, 10.0, 70.0, None]
    assert said[-1] == (lost, False)


def test_a_step_has_taken_the_time_until_it_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the report takes to be made: else a step seems to have begun before the loss that it follows."""
    clock = count(5000.0)  # a second between any two looks at it
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    said: list[StepReport] = []
    outbox: Any = ControlOutbox.__new__(ControlOutbox)
    outbox._client = SimpleNamespace(send=said.append)
    outbox._finished_s, outbox._runs_s = {}, []
    outbox._mailbox = SimpleNamespace(on_commit=lambda: None)
    outbox._watch = SimpleNamespace(step_began_s=4990.0, phases_s={})
    engine = SimpleNamespace(updater=SimpleNamespace(learning_rate=0.1))
    monkeypatch.setattr(ControlOutbox, "_engine", engine)
    outbox._report_timings = lambda step: time.monotonic()
    member = SimpleNamespace(generation=1)
    terms = SimpleNamespace(layer_name=str)
    outbox.machine = SimpleNamespace(worker=2, member=member, terms=terms, move_progress=(0, 0))
    evidence = SimpleNamespace(vector=b"", change=0, checkpoint=0)
    outbox.send(outbox.committed(Committed(8, 1, 1.0, 1.0, None, Request.NONE, evidence)))  # type: ignore[arg-type]
    (report,) = said
    now_s = next(clock) - 1.0
    assert now_s - report.ago_s - report.duration_s == 4990.0 and report.ago_s > 0


def test_how_long_a_worker_stays_is_said_anew_on_every_connection(now: SimpleNamespace) -> None:
    mailbox = Mailbox(3, SimpleNamespace(address="unix:/3"))  # type: ignore[arg-type]
    assert mailbox.leaving_within(30.0) == Leaving(worker=3, left_s=30.0)
    left_s = []
    for _ in range(3):
        now.s += 12.0
        left_s += [fact.left_s for fact in mailbox.standing()]
    assert left_s == [18.0, 6.0, 0.0]
