"""Orphans are ended and reaped; one that no signal ends is not waited for."""

import os
import signal
import subprocess

import pytest

from elaswave.system import processes
from elaswave.system.processes import end_group, end_orphan


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
    monkeypatch.setattr(processes, "ORPHAN_S_MAX", 0.02)
    end_orphan(4711)
    assert killed == [(4711, signal.SIGKILL)]


def test_what_is_left_of_a_group_is_killed_and_reaped_and_nothing_else() -> None:
    members = [subprocess.Popen(["sleep", "600"], process_group=0)]
    group = members[0].pid
    members.append(subprocess.Popen(["sleep", "600"], process_group=group))
    other = subprocess.Popen(["sleep", "600"])
    assert end_group(group, 60.0)
    for member in members:
        with pytest.raises(ChildProcessError):
            os.waitpid(member.pid, os.WNOHANG)
        member.returncode = -signal.SIGKILL  # it is reaped
    assert other.poll() is None
    assert end_group(group, 60.0), "none is left"
    assert end_group(other.pid, 60.0), "no group of its own"
    other.kill()
    other.wait()


def test_a_group_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (0, 0))
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    assert not end_group(4711, 0.0)
    assert killed == [4711]
