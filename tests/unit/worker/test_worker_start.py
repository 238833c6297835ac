"""A worker before its first step and at its end, also when another is lost before it has heard of the start."""

from types import SimpleNamespace

import pytest

from elaswave.blocks.placement import place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.channel.messages.worker import Exit, Start, Stop
from elaswave.config.load import load_config
from elaswave.errors import FencedOffError, InterruptedWaitError, WaitTimeoutError
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.messages import FencedOff, Prepare
from elaswave.protocol.step.ballot import Request
from elaswave.protocol.step.due_work import WorkBetweenSteps
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.worker import process as worker_module
from elaswave.worker import shard_writer
from elaswave.worker.control import Mailbox
from elaswave.worker.links import TransportLinks
from elaswave.worker.process import Worker
from elaswave.worker.shard_writer import ShardDisk

PREPARE = Prepare(term=2, generation=2, members=(0, 2), lost=(1,), reason="worker 1 was killed")
START = Start(addresses={0: "unix:/0", 2: "unix:/2"})


def mailbox(*messages: object) -> Mailbox:
    transport = SimpleNamespace(address="unix:/0", interrupt=lambda reason, generation: None)
    box = Mailbox(0, transport)  # type: ignore[arg-type]
    for message in messages:
        box.receive(message)  # type: ignore[arg-type]
    return box


class Client:
    """A connection to a coordinator that has been gone for so long."""

    def __init__(self, disconnected_s: float = 0.0) -> None:
        self.disconnected_s = disconnected_s


class StartedMachine:
    """Takes note of what a driver tells a machine; after its start it has nothing to do but to end.

    Args:
        is_done: whether it has said already that it has made all its steps.
    """

    def __init__(self, *, is_done: bool = False) -> None:
        self.is_started = self.is_done = is_done
        self.is_paused = self.is_unsound = self.is_released = self.wants_links = False
        self.fenced_off: str | None = None
        self.snapshot: list[object] = []

    is_at_rest = WorkerMachine.is_at_rest

    def resume(self) -> None:
        """It waits for a message."""

    def look_at_sent(self) -> None:
        """It has sent nothing."""

    def start(self) -> None:
        """It begins, and ends."""
        self.is_started = self.is_done = True

    def on_message(self, message: object) -> None:
        """Takes note."""
        self.snapshot.append((self.is_started, message))
        if isinstance(message, FencedOff):
            self.fenced_off = message.reason


def worker_with(box: Mailbox, client: Client, machine: object) -> Worker:
    worker = Worker.__new__(Worker)
    worker._mailbox, worker._client = box, client  # type: ignore[assignment]
    worker._must_end = False
    worker._config = load_config(None, ["elastic.restart_s=0"])
    worker._links = SimpleNamespace(addresses={}, is_dialling=False, is_fetching=False, hand_over=lambda: None)  # type: ignore[assignment]
    worker._transport = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
    worker._trace = SimpleNamespace(dump=lambda folder: None)  # type: ignore[assignment]
    worker._setup = SimpleNamespace(run_dir=None, worker=0, sites=None)  # type: ignore[assignment]
    worker.machine = machine  # type: ignore[assignment]
    return worker


def test_a_question_before_the_start_reaches_the_machine_and_the_start_its_links():
    machine = StartedMachine()
    worker = worker_with(mailbox(PREPARE, START, Exit()), Client(), machine)
    worker.train()
    assert machine.snapshot == [(False, PREPARE)]
    assert worker._links.addresses == START.addresses


def test_a_machine_keeps_what_it_is_asked_before_its_start():
    machine: WorkerMachine = WorkerMachine.__new__(WorkerMachine)
    machine.is_started, machine._early, machine._life, machine.num_lives = False, [], None, 0
    taken = []
    machine.on_message(PREPARE)
    machine.train = lambda: iter(())  # type: ignore[assignment, method-assign]
    machine.member = SimpleNamespace(handle=taken.append)  # type: ignore[assignment]
    assert taken == []
    machine.start()
    assert taken == [PREPARE]
    machine.start()
    assert taken == [PREPARE]


def test_a_worker_that_is_not_wanted_any_more():
    fenced_off = FencedOff(term=1, generation=2, reason="it hung")
    with pytest.raises(FencedOffError, match="it hung"):
        worker_with(mailbox(PREPARE, fenced_off), Client(), StartedMachine()).train()
    with pytest.raises(FencedOffError, match="the job has ended before it began"):
        worker_with(mailbox(Exit()), Client(), StartedMachine()).train()


def test_a_job_that_ends_while_a_worker_waits_for_a_decision():
    machine = StartedMachine()
    machine.is_started = True
    worker = worker_with(mailbox(Exit()), Client(), machine)
    worker._watch = SimpleNamespace(recovering=lambda: None)  # type: ignore[assignment]
    with pytest.raises(FencedOffError, match="the job has ended$"):
        worker.train()


class Patient(Client):
    """A connection of which the worker asks again and again; at the third time the messages come that it waits for.

    Args:
        box: takes the messages.
        messages: that come.
    """

    def __init__(self, box: Mailbox, *messages: object) -> None:
        self._box, self._messages = box, messages
        self.times = 0

    @property
    def disconnected_s(self) -> float:
        self.times += 1
        if self.times == 3:
            for message in self._messages:
                self._box.receive(message)  # type: ignore[arg-type]
        return 119.0

    @disconnected_s.setter
    def disconnected_s(self, value: float) -> None:
        pass


@pytest.mark.parametrize("is_done", [False, True])
def test_a_decision_and_the_end_are_waited_for_as_long_as_there_is_a_coordinator(is_done, monkeypatch):
    """It may commit and verify checkpoints meanwhile, which takes longer than any constant."""
    monkeypatch.setattr(worker_module, "TURN_S", 0.0)

    def started(box: Mailbox, client: Client) -> Worker:
        worker = worker_with(box, client, StartedMachine(is_done=is_done))
        worker.machine.is_started = True
        worker._watch = SimpleNamespace(recovering=lambda: None)  # type: ignore[assignment]
        return worker

    what = "all steps are made, and the job has not been ended" if is_done else "it has not been decided how to go on"
    with pytest.raises(WaitTimeoutError, match=f"{what}, and no coordinator has answered for 121 s"):
        started(mailbox(), Client(121.0)).train()
    box = mailbox()
    client = Patient(box, Exit())
    if is_done:
        started(box, client).train()
    else:
        with pytest.raises(FencedOffError, match="the job has ended$"):
            started(box, client).train()
    assert client.times == 3


def test_the_start_is_waited_for_as_long_as_there_is_a_coordinator(monkeypatch):
    monkeypatch.setattr(worker_module, "TURN_S", 0.0)
    with pytest.raises(
        WaitTimeoutError, match="the start has not been given, and no coordinator has answered for 121 s"
    ):
        worker_with(mailbox(PREPARE), Client(121.0), StartedMachine()).train()

    box = mailbox()
    client = Patient(box, START, Exit())
    worker = worker_with(box, client, StartedMachine())
    worker.train()
    assert worker._links.addresses == START.addresses
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

    def unreached(self, peer: int) -> str:
        """Nothing shows that they do not answer."""
        return ""


@pytest.mark.parametrize("disconnected_s", [0.0, 121.0])
def test_links_are_waited_for_as_long_as_there_is_a_coordinator(disconnected_s):
    slow, activity, client = Slow(), mailbox().activity, Client(disconnected_s)
    links = TransportLinks(0, (), slow, activity, lambda: None, client)  # type: ignore[arg-type]
    links.addresses = {peer: f"unix:/{peer}" for peer in range(4)}
    layout = make_layout(widths=[4], layers_per_stage=[1], num_microbatches=4)
    if disconnected_s:
        with pytest.raises(WaitTimeoutError, match="no link yet, and no coordinator has answered for 121 s"):
            links.connect(layout, place_blocks(layout.with_followers(0), (), scatter_width=EVERYBODY))
    else:
        links.connect(layout, place_blocks(layout.with_followers(0), (), scatter_width=EVERYBODY))
        assert slow.asked == [[1, 2, 3], [2, 3], [3]]
        assert activity.doing[:3] == ("link", False, (3,))


def test_a_start_that_does_not_name_a_lost_worker_is_no_error_of_ours():
    links = TransportLinks(0, (), SimpleNamespace(peers={2}), mailbox().activity, lambda: None)  # type: ignore[arg-type]
    links.addresses = START.addresses
    layout = make_layout(widths=[2, 1], layers_per_stage=[1, 1], num_microbatches=2)
    with pytest.raises(InterruptedWaitError, match=r"the start does not name workers \[1\]"):
        links.connect(layout, place_blocks(layout.with_followers(0), (), scatter_width=EVERYBODY))


def test_checkpoints_by_time_are_asked_for_by_the_lowest_member_and_then_by_the_next_one(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(shard_writer, "time", SimpleNamespace(monotonic=lambda: now_s))
    writer = SimpleNamespace(is_busy=False)
    box = mailbox()
    machine: WorkerMachine = WorkerMachine.__new__(WorkerMachine)
    machine.outbox = SimpleNamespace(request=lambda: box.request)  # type: ignore[assignment]
    machine.disk = ShardDisk(writer, None, 30.0)  # type: ignore[arg-type]
    machine.between = between = WorkBetweenSteps.__new__(WorkBetweenSteps)
    between.terms = SimpleNamespace(eval_every=0, num_steps=50, checkpoint_every=0)  # type: ignore[assignment]
    between.disk, between._due_work = machine.disk, []
    machine.worker, machine.members, machine._asks_pause = 1, (0, 1, 2), False
    now_s = 131.0
    assert machine._request() is Request.NONE
    machine.members = (1, 2)  # the one that would have asked is lost
    assert machine._request() is Request.CHECKPOINT
    writer.is_busy = True
    assert machine._request() is Request.NONE
    writer.is_busy = False
    for request, step in ((Request.CHECKPOINT, 7), (Request.NONE, 8), (Request.STOP, 9)):
        between.note(step, request)
    assert between._due_work == [("checkpoint", 7), ("checkpoint", 9)]
    assert machine._request() is Request.NONE  # the clock has begun anew
    box.receive(Stop())
    assert machine._request() is Request.STOP
    box = mailbox()
    machine.disk, now_s = ShardDisk(writer, None, 0.0), 1e9  # type: ignore[arg-type]
    assert machine._request() is Request.NONE
