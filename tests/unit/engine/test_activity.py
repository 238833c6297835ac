"""What a worker says it is doing, and for whom it waits."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from tests.memory_transport import MemoryNetwork
from tests.starving import busy_core, feed, starve

from elaswave.engine.activity import STIR_S, Activity, work_cpu_s
from elaswave.protocol.step.engine import FrameKind, Key
from elaswave.transport.interface import Tag
from elaswave.worker.links import TransportLinks


@pytest.fixture
def transports():
    network = MemoryNetwork()
    made = [network.transport(worker) for worker in range(3)]
    for transport in made:
        transport.connect({other: made[other].address for other in range(3)}, timeout_s=10.0)
    yield made
    for transport in made:
        transport.close()


def test_waiting_for_transfers_names_the_peers_of_those_that_have_not_ended(transports):
    activity = Activity()
    activity.compute("gather")
    handles = [transports[0].recv(peer, Tag(1, 1, 1, index, 0)) for index, peer in enumerate((2, 1, 2))]
    activity.wait_for(handles)
    assert activity.doing[:3] == ("gather", False, (1, 2))
    transports[1].send(0, Tag(1, 1, 1, 1, 0), torch.zeros(3))
    transports[0].wait(handles[1], 10.0)
    activity.wait_for(handles)
    assert activity.doing[:3] == ("gather", False, (2,))
    activity.wait_for([])
    assert activity.doing[:3] == ("gather", False, ())


def test_while_it_starts_the_use_of_the_processor_is_the_progress():
    cpu_s = 0.0
    activity = Activity(cpu_clock=lambda: cpu_s)
    begun_s = activity.doing.since_s
    assert activity.snapshot() == activity.doing
    assert activity.doing[:2] == ("start", True)
    cpu_s = STIR_S / 2
    assert activity.snapshot().since_s == begun_s, "so little may be the clock's own doing"
    cpu_s = STIR_S
    stirred_s = activity.snapshot().since_s
    assert stirred_s > begun_s
    assert activity.snapshot().since_s == stirred_s, "it stands still"
    activity.wait("start")
    cpu_s = 10.0
    assert activity.snapshot() == activity.doing, "a worker that waits has nothing to get on with"


def test_the_clock_counts_other_threads_and_what_the_process_has_started_but_not_who_asks():
    before_s = work_cpu_s()
    while time.thread_time() < 2 * STIR_S:
        pass
    code = "import time\nwhile time.process_time() < 0.3: pass"
    with subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])"]
    ):
        deadline_s = time.monotonic() + 60.0
        while work_cpu_s() < before_s + 0.3:
            assert time.monotonic() < deadline_s, "a grandchild's time counts"
            time.sleep(0.01)
    before_s = work_cpu_s()
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=burn)
    thread.start()
    while work_cpu_s() < before_s + 0.1:
        time.sleep(0.01)
    stop.set()
    thread.join()


def test_each_kind_is_run_for_the_first_time_once_and_again_when_layers_are_new():
    activity = Activity(lambda: 0.0)

    def is_first(label: str) -> bool:
        activity.compute(label)
        return activity.snapshot().is_first

    assert is_first("0F0") and is_first("0F1"), "none has run to its end"
    activity.has_run()
    assert not is_first("0F2") and is_first("1F0") and is_first("0B0") and is_first("apply") and is_first("data")
    activity.has_run()
    assert not is_first("data")
    assert not is_first("foreign"), "it bounds its wait itself"
    with activity.building():
        assert activity.snapshot()[:2] == ("recover", True) and activity.snapshot().is_first
    assert is_first("0F3")


def test_to_wait_on_for_the_same_peers_is_one_wait():
    activity = Activity()
    activity.wait_on("link", (1, 2))
    doing = activity.doing
    activity.wait_on("link", (1, 2))
    assert activity.doing is doing
    activity.wait_on("link", (2,))
    assert activity.doing[:3] == ("link", False, (2,))


class Waited(Exception):
    """Raised instead of waiting."""


def wait_key(peer, index=0):
    return Key(FrameKind.REDUCED, 1, 1, index, 0, peer)


@pytest.mark.parametrize("phase", ["reduce", "gather"])
def test_a_wait_says_whose_frames_are_lacking(transports, phase, monkeypatch):
    activity = Activity()
    links = TransportLinks(0, (), transports[0], activity, lambda: None)
    activity.wait(phase)
    slot = torch.zeros(3)
    links.post(wait_key(1), [slot])
    transports[1].send(0, Tag(FrameKind.REDUCED, 1, 1, 0, 0), torch.ones(3))
    links.wait((wait_key(1),))
    assert slot.tolist() == [1.0, 1.0, 1.0]
    assert activity.doing[:3] == (phase, False, ())

    def wait(handles, timeout_s):
        raise Waited

    monkeypatch.setattr(transports[0], "wait", wait)
    with pytest.raises(Waited):
        links.wait((wait_key(2), wait_key(1, 1)))
    assert activity.doing[:3] == (phase, False, (1, 2))


def test_a_worker_that_has_waited_for_its_input_computes_again(transports):
    activity = Activity()
    links = TransportLinks(0, (), transports[0], activity, lambda: None)
    activity.compute("0F1")
    transports[1].send(0, Tag(FrameKind.VOTE, 1, 1, 0, 2), torch.tensor([3, -4]))
    key = Key(FrameKind.VOTE, 1, 1, 0, 2, 1)
    links.wait((key,))
    assert activity.doing[:2] == ("0F1", True)
    assert links.take(key) == [3, -4]


TELLS = """
import sys, threading
from elaswave.engine.activity import Activity

def loop():
    while True: pass

activity = Activity()
activity.compute("0F0")
threading.Thread(target=loop, daemon=True).start()
for line in sys.stdin:
    if line == "next\\n":
        activity.compute("1F0")
    print(activity.snapshot().starved_s, flush=True)
"""


def test_a_heartbeat_tells_how_long_an_action_has_waited_for_a_processor():
    command = [sys.executable, "-c", TELLS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(line: str) -> float:
            process.stdin.write(line)
            process.stdin.flush()
            return float(process.stdout.readline())

        try:
            assert ask("\n") == 0.0
            with busy_core() as busy:
                starve(process.pid, busy.core)
                time.sleep(0.5)
                busy.rest()  # or the answer would take as long
                starved_s = ask("\n")
                feed(process.pid)
            assert starved_s > 0.2
            assert ask("\n") >= starved_s
            assert ask("next\n") == 0.0
        finally:
            process.kill()


def test_what_a_worker_did_before_goes_on_from_anew():
    """So that neither a wait for a foreign part nor what it interrupts is taken for one long action."""
    activity = Activity(lambda: 0.0)
    activity.compute("2F0")
    before = activity.doing
    with pytest.raises(ValueError), activity.during("foreign"):
        assert activity.doing[:3] == ("foreign", True, ())
        raise ValueError
    assert activity.doing[:3] == before[:3] and activity.doing is not before
    activity.wait("recover", (1,))
    before = activity.doing
    with activity.during("foreign"):
        pass
    assert activity.doing is before
