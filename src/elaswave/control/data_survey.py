"""What a person's own samples are like, found out in a process of its own: their code may start threads, open files or
hang, and the template, which forks workers after it, must have none of that.

The process tells one finding after the other. Those that have come when the time is over count.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from elaswave.control.forking import fork
from elaswave.control.read_files import ReadFile, apart
from elaswave.data.fingerprint import SampleHash
from elaswave.errors import LaunchError

NUM_HASHES = 32
"""Samples that are hashed."""
SURVEY_S_MAX = 5.0


def survey(open_samples: Callable[[], Any], log: Path, read_files: Sequence[ReadFile] = ()) -> list[SampleHash]:
    """Hashes of some samples, by which a resumed run knows its data again; none where the system lets no process begin.

    Args:
        open_samples: gives the data, an `elaswave.training.dataset.DatasetSamples`; called in the other process.
        log: takes the output of that process.
        read_files: that it opens anew.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        body = apart(read_files, lambda: _tell(open_samples, theirs))
        child = fork("the survey of the data", log, body, let_go=lambda: os.close(ours))
    except LaunchError:
        os.close(ours)
        return []
    finally:
        os.close(theirs)
    try:
        said = _read_until(ours, time.monotonic() + SURVEY_S_MAX)
    finally:
        os.close(ours)
        os.kill(child.pid, signal.SIGKILL)  # it may hang
        child.reap()
    whole, _, _ = said.rpartition(b"\n")
    return [msgspec.json.decode(line, type=SampleHash) for line in whole.splitlines()]


def _read_until(descriptor: int, deadline_s: float) -> bytes:
    """What comes before the end, or before a time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    said = b""
    while poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
        data = os.read(descriptor, 1 << 16)
        if not data:
            break
        said += data
    return said


def _tell(open_samples: Callable[[], Any], descriptor: int) -> int:
    for each in open_samples().hashes(NUM_HASHES):
        os.write(descriptor, msgspec.json.encode(each) + b"\n")
    return 0
