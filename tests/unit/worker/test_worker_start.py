"""A worker before its first step: what it does when somebody is lost before it has heard of the start."""

from types import SimpleNamespace

import pytest

from elaswave.config.load import load_config
from elaswave.errors import FencedError, InterruptedWaitError, WaitTimeoutError
from elaswave.planning.layout import make_layout
from elaswave.protocol.messages import Fenced, Prepare
from elaswave.state.placement import place_blocks
from elaswave.worker import process as worker_module
from elaswave.worker.messages import Exit, Start, Stop
from elaswave.worker.process import Mailbox, Worker, _wait_for_start
from elaswave.worker.step import StepResult
from elaswave.worker.vote import Request

PREPARE = Prepare(term=2, epoch=2, members=(0, 2), lost=(1,), reason="worker 1 was killed")
START = Start(addresses={0: "unix:/0", 2: "unix:/2"})


def mailbox(*messages: object) -> Mailbox:
    transport = SimpleNamespace(address="unix:/0", interrupt=lambda reason, epoch: None)
    box = Mailbox(0, transport)  # type: ignore[arg-type]
    for message in messages:
        box.receive(message)  # type: ignore[arg-type]
    return box


class Client:
    """A connection to a coordinator that has been gone for so long."""

    def __init__(self, disconnected_s: float = 0.0) -> None:
        self.disconnected_s = disconnected_s


def test_a_question_before_the_start_is_kept():
    box = mailbox(PREPARE, START)
    assert _wait_for_start(box, Client()) == START.addresses
    assert box.urgent
    assert box.next(0.0) == PREPARE


def test_a_worker_that_is_not_wanted_any_more():
    with pytest.raises(FencedError, match="it hung"):
        _wait_for_start(mailbox(PREPARE, Fenced(term=1, epoch=2, reason="it hung")), Client())
    with pytest.raises(FencedError, match="the job has ended before it began"):
        _wait_for_start(mailbox(Exit()), Client())


def test_the_start_is_waited_for_as_long_as_there_is_a_coordinator(monkeypatch):
    monkeypatch.setattr(worker_module, "START_TURN_S", 0.0)
    with pytest.raises(
        WaitTimeoutError, match="the start has not been given, and no coordinator has answered for 121 s"
    ):
        _wait_for_start(mailbox(PREPARE), Client(121.0))

    class Patient(Client):
        """Asked for the third time, it has brought the start."""

        times = 0

        @property
        def disconnected_s(self) -> float:
            self.times += 1
            if self.times == 3:
                box.receive(START)
            return 119.0

        @disconnected_s.setter
        def disconnected_s(self, value: float) -> None:
            pass

    box = mailbox()
    client = Patient()
    assert _wait_for_start(box, client) == START.addresses
    assert client.times == 3
    assert box.activity.doing[:2] == ("start", False)


class Slow:
    """A transport whose peers answer when they have time: one more at each call."""

    def __init__(self) -> None:
        self.peers: set[int] = set()
        self.asked: list[list[int]] = []

    def connect(self, addresses: dict[int, str], timeout_s: float) -> None:
        self.asked.append(sorted(addresses))
        self.peers.add(min(addresses))
        if len(addresses) > 1:
            raise WaitTimeoutError("worker 0 has no link yet")


@pytest.mark.parametrize("disconnected_s", [0.0, 121.0])
def test_links_are_waited_for_as_long_as_there_is_a_coordinator(disconnected_s):
    worker = Worker.__new__(Worker)
    worker._worker, worker._is_ready = 0, False
    worker._addresses = {peer: f"unix:/{peer}" for peer in range(4)}
    worker._transport = slow = Slow()  # type: ignore[assignment]
    worker._mailbox = mailbox()
    worker._client = Client(disconnected_s)  # type: ignore[assignment]
    layout = make_layout(widths=[4], layers_per_stage=[1], num_microbatches=4)
    if disconnected_s:
        with pytest.raises(WaitTimeoutError, match="no link yet, and no coordinator has answered for 121 s"):
            worker._make_links(layout, place_blocks(layout, (), num_followers=0))
    else:
        worker._make_links(layout, place_blocks(layout, (), num_followers=0))
        assert slow.asked == [[1, 2, 3], [2, 3], [3]]
        assert worker._mailbox.activity.doing[:3] == ("link", False, (3,))


def test_a_start_that_does_not_name_a_lost_worker_is_no_error_of_ours():
    worker = Worker.__new__(Worker)
    worker._worker = 0
    worker._addresses = START.addresses
    worker._transport = SimpleNamespace(peers={2})  # type: ignore[assignment]
    layout = make_layout(widths=[2, 1], layers_per_stage=[1, 1], num_microbatches=2)
    with pytest.raises(InterruptedWaitError, match=r"the start does not name workers \[1\]"):
        worker._make_links(layout, place_blocks(layout, (), num_followers=0))


def test_checkpoints_by_time_are_asked_for_by_the_lowest_member_and_then_by_the_next_one(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    worker = Worker.__new__(Worker)
    worker._config = load_config(None, ["run.checkpoint_every_s=30"])
    worker._mailbox = mailbox()
    worker._writer = SimpleNamespace(is_busy=False)  # type: ignore[assignment]
    worker._duties, worker._checkpoint_at_s = [], 100.0
    worker._worker, worker._members = 1, (0, 1, 2)
    now_s = 131.0
    assert worker._request() is Request.NONE
    worker._members = (1, 2)  # the one that would have asked is lost
    assert worker._request() is Request.CHECKPOINT
    worker._writer = SimpleNamespace(is_busy=True)  # type: ignore[assignment]
    assert worker._request() is Request.NONE
    worker._writer = SimpleNamespace(is_busy=False)  # type: ignore[assignment]
    for request, step in ((Request.CHECKPOINT, 7), (Request.NONE, 8), (Request.STOP, 9)):
        worker._note_duties(StepResult(step, 1, 2.0, 1.0, 1e-3, None, request, ()))
    assert worker._duties == [("checkpoint", 7), ("checkpoint", 9)]
    assert worker._request() is Request.NONE  # the clock has begun anew
    worker._mailbox.receive(Stop())
    assert worker._request() is Request.STOP
    worker._config = load_config(None, ["run.checkpoint_every_s=0"])
    worker._mailbox, now_s = mailbox(), 1e9
    assert worker._request() is Request.NONE


def test_a_job_that_is_never_ended_is_told_as_that(monkeypatch):
    monkeypatch.setattr(worker_module, "EXIT_TIMEOUT_S", 0.0)
    worker = Worker.__new__(Worker)
    worker._worker, worker._members, worker._step = 0, (0, 1), 5
    worker._config = load_config(None, [])
    worker._mailbox = mailbox(Stop())
    worker._client = SimpleNamespace(send=lambda message: None)  # type: ignore[assignment]
    worker._writer = SimpleNamespace(finish=lambda check: None)  # type: ignore[assignment]
    worker._member = SimpleNamespace(epoch=1)  # type: ignore[assignment]
    worker._transport = SimpleNamespace(bytes_sent={})  # type: ignore[assignment]
    store = SimpleNamespace(digest_parts=lambda role: {}, optimizer_bytes=lambda: 0)
    progress = SimpleNamespace(num_updates=4, grids=SimpleNamespace(exponents=(), calibrated=True))
    worker.engine = SimpleNamespace(  # type: ignore[assignment]
        store=store, progress=progress, placement=SimpleNamespace(followers=())
    )
    with pytest.raises(WaitTimeoutError, match="all steps are made, and the coordinator has not ended the job for 0 s"):
        worker._finish(stopped=False)
