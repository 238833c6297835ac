"""A worker before its first step: what it does when somebody is lost before it has heard of the start."""

from types import SimpleNamespace

import pytest

from elaswave.control.core.messages import Fenced, Prepare
from elaswave.errors import FencedError, InterruptedWaitError, WaitTimeoutError
from elaswave.planning.layout import make_layout
from elaswave.runtime import worker as worker_module
from elaswave.runtime.messages import Exit, Start
from elaswave.runtime.worker import Mailbox, Worker, _wait_for_start
from elaswave.state.placement import place_blocks

PREPARE = Prepare(term=2, epoch=2, members=(0, 2), lost=(1,), reason="worker 1 was killed")
START = Start(addresses={0: "unix:/0", 2: "unix:/2"})


def mailbox(*messages: object) -> Mailbox:
    transport = SimpleNamespace(address="unix:/0", interrupt=lambda reason, epoch: None)
    box = Mailbox(0, transport)  # type: ignore[arg-type]
    for message in messages:
        box.receive(message)  # type: ignore[arg-type]
    return box


def test_a_question_before_the_start_is_kept():
    box = mailbox(PREPARE, START)
    assert _wait_for_start(box) == START.addresses
    assert box.urgent
    assert box.next(0.0) == PREPARE


def test_a_worker_that_is_not_wanted_any_more():
    with pytest.raises(FencedError, match="it hung"):
        _wait_for_start(mailbox(PREPARE, Fenced(term=1, epoch=2, reason="it hung")))
    with pytest.raises(FencedError, match="the job has ended before it began"):
        _wait_for_start(mailbox(Exit()))


def test_the_start_is_waited_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(worker_module, "START_TIMEOUT_S", 0.0)
    with pytest.raises(WaitTimeoutError, match="the coordinator has said nothing"):
        _wait_for_start(mailbox(PREPARE))


def test_a_start_that_does_not_name_a_lost_worker_is_no_error_of_ours():
    worker = Worker.__new__(Worker)
    worker._worker = 0
    worker._addresses = START.addresses
    worker._transport = SimpleNamespace(peers={2})  # type: ignore[assignment]
    layout = make_layout(widths=[2, 1], layers_per_stage=[1, 1], num_microbatches=2)
    with pytest.raises(InterruptedWaitError, match=r"the start does not name workers \[1\]"):
        worker._make_links(layout, place_blocks(layout, (), num_followers=0))
