"""How long real processes wait for a processor, as their kernel says."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.starving import busy_core, starve

from elaswave.observability.processes import ProcessorWaits, facts_of

LOOPS = "print(flush=True)\nwhile True: pass"
SLEEPS = "import time\nprint(flush=True)\ntime.sleep(600)"
LOOPS_BESIDE = (
    "import threading, time\n"
    "def loop():\n"
    "    while True: pass\n"
    "threading.Thread(target=loop, daemon=True).start()\nprint(flush=True)\ntime.sleep(600)"
)
LOOK_S = 0.1
NUM_LOOKS = 5
"""A wait shows while it lasts, or once it has ended: of a look between the end of one and the next, little does."""


@contextlib.contextmanager
def python(code: str) -> Iterator[int]:
    """The process id of an interpreter that has written a line."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def share(waits: ProcessorWaits, begun_s: float) -> float:
    """Share of the time since the last look in which a process has waited."""
    waited_s, now_s = 0.0, begun_s
    for _ in range(NUM_LOOKS):
        time.sleep(LOOK_S)
        now_s = time.monotonic()
        waited_s += waits.look(now_s)
    return waited_s / (now_s - begun_s)


def look_at(pid: int) -> float:
    now_s = time.monotonic()
    return share(ProcessorWaits(pid, now_s), now_s)


@pytest.mark.slow  # the share that the kernel gives depends on what else runs
def test_who_could_run_and_does_not_waits():
    with busy_core() as busy, python(LOOPS) as pid:
        starve(pid, busy.core)
        assert look_at(pid) > 0.5


@pytest.mark.slow  # the share that the kernel gives depends on what else runs
def test_a_thread_beside_the_first_one_counts_too():
    with busy_core() as busy, python(LOOPS_BESIDE) as pid:
        starve(pid, busy.core)
        assert look_at(pid) > 0.5


def test_who_sleeps_does_not_wait_on_however_busy_a_core():
    with busy_core() as busy, python(SLEEPS) as pid:
        while (facts := facts_of(pid)) is not None and facts.state != "S":
            time.sleep(0.01)  # it has still to get to its sleep, and would not soon without a processor
        starve(pid, busy.core)
        assert look_at(pid) == 0.0


def test_who_is_stopped_does_not_wait_though_it_would_run():
    with busy_core() as busy, python(LOOPS) as pid:
        os.sched_setaffinity(pid, [busy.core])
        os.kill(pid, signal.SIGSTOP)
        while (facts := facts_of(pid)) is not None and facts.state != "T":
            time.sleep(0.01)  # it has to run for that
        assert look_at(pid) == 0.0


def test_of_who_has_ended_nothing_is_said():
    with python(LOOPS) as pid:
        waits = ProcessorWaits(pid, time.monotonic())
    assert waits.look(time.monotonic() + 1.0) == 0.0
