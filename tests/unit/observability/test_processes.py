"""`processes.json` and the looks into ``/proc``: the very process that is meant, and no other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from elaswave.observability import processes
from elaswave.observability.processes import (
    PROCESSES_FILE,
    facts_of,
    lives,
    process_entry,
    read_processes,
    remove_processes,
    signal_process,
    write_processes,
)
from elaswave.system import processes as job_processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_the_file_names_the_living(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    assert read_processes(tmp_path) == []
    here, there = process_entry("launcher", 0, os.getpid()), process_entry("worker", 3, sleeper.pid)
    write_processes(tmp_path, [here, there])
    assert read_processes(tmp_path) == [here, there]
    sleeper.kill()
    sleeper.wait()
    assert read_processes(tmp_path) == [here]
    remove_processes(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_signal_never_hits_another_process_with_the_same_id(sleeper: subprocess.Popen[bytes]) -> None:
    meant = process_entry("worker", 0, sleeper.pid)
    another = msgspec.structs.replace(meant, start_ticks=meant.start_ticks - 1)
    assert not signal_process(another, signal.SIGKILL)
    assert sleeper.poll() is None
    assert signal_process(meant, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    facts = facts_of(sleeper.pid)
    assert facts is not None and facts.state == "T" and facts.is_stopped and facts.parent == os.getpid()
    assert signal_process(meant, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not lives(meant), "it has ended, though it has not been reaped"
    sleeper.wait()
    assert facts_of(sleeper.pid) is None
    assert not signal_process(meant, signal.SIGKILL)


def test_time_that_a_process_uses_is_seen() -> None:
    before = facts_of(os.getpid())
    assert before is not None
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    after = facts_of(os.getpid())
    assert after is not None and after.cpu_s > before.cpu_s
    assert after.start_ticks == before.start_ticks


def test_a_file_that_cannot_be_written_does_not_stay_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_processes(tmp_path, [process_entry("launcher", 0, os.getpid())])

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(processes.os, "replace", full)
    write_processes(tmp_path, [])
    assert not (tmp_path / PROCESSES_FILE).exists()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("inherited", "expected"), [("0", 500), ("-100", 500), ("499", 500), ("700", 700)])
def test_a_worker_raises_its_score_and_never_lowers_it(
    inherited: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text(inherited + "\n")
    monkeypatch.setattr(job_processes, "_SCORE_FILE", file)
    job_processes.offer_to_kernel()
    assert int(file.read_text()) == expected


def test_without_the_kernels_file_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_processes, "_SCORE_FILE", tmp_path / "no" / "such")
    job_processes.offer_to_kernel()
