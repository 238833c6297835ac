"""Orphans are ended and reaped; one that no signal ends is not waited for."""

import os
import signal
import subprocess

import pytest

from elaswave.control import parent_death
from elaswave.control.parent_death import end_orphan


def test_an_orphan_is_killed_and_reaped() -> None:
    child = subprocess.Popen(["sleep", "600"])
    end_orphan(child.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    child.returncode = -signal.SIGKILL  # it is reaped: Popen must not look for it
    end_orphan(child.pid)  # no child of this process: nothing is done


def test_an_orphan_that_waits_for_a_disk_that_is_gone_is_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (0, 0))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(parent_death, "ORPHAN_S_MAX", 0.02)
    end_orphan(4711)
    assert killed == [(4711, signal.SIGKILL)]
