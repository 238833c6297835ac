"""Processes that get no processor: of the lowest class, on one core that others keep busy."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

NUM_BUSY = 5


class BusyCore(NamedTuple):
    """A core, and those who keep it busy."""

    core: int
    processes: list["subprocess.Popen[bytes]"]

    def rest(self) -> None:
        """It is free from now on; the processes are still there."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)


@contextlib.contextmanager
def busy_core() -> Iterator[BusyCore]:
    """Skips the test where the kernel does not say how long processes wait."""
    counts = Path("/proc/self/schedstat")
    if not counts.exists() or len(counts.read_text().split()) != 3:
        pytest.skip("this kernel does not count how long processes wait for a processor")
    core = min(os.sched_getaffinity(0))
    loop = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE) for _ in range(NUM_BUSY)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield BusyCore(core, processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def starve(pid: int, core: int) -> None:
    """From now on a process runs only when nobody else wants that core."""
    for thread in _threads(pid):
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(thread, [core])


def feed(pid: int) -> None:
    """Takes that back; without privileges only the core, where others are."""
    for thread in _threads(pid):
        os.sched_setaffinity(thread, os.sched_getaffinity(0))
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
