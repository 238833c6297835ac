"""A notice to a worker: heard once, beside whatever the main thread does."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

from elaswave.system.processes import hear_notices, hold_notices, holding_notices, leave_signals_to_launcher


class Child:
    """A process that holds notices, and hears them when it is told to. Its main thread waits for a lock meanwhile."""

    def __init__(self, *, is_struck_at_once: bool = False) -> None:
        self._said, say = os.pipe()
        hears, self._tell = os.pipe()
        with holding_notices():  # the child never leaves it
            self.pid = os.fork()
            if self.pid == 0:
                self._live(say, hears, is_struck_at_once=is_struck_at_once)
        os.close(say)
        os.close(hears)
        self._lines = os.fdopen(self._said)

    def _live(self, say: int, hears: int, *, is_struck_at_once: bool) -> NoReturn:
        try:
            os.close(self._tell)  # so that the parent's end is the end
            if is_struck_at_once:
                os.read(hears, 1)
            leave_signals_to_launcher()
            hold_notices()
            os.write(say, b"holds\n")
            os.read(hears, 1)
            held = threading.Lock()
            held.acquire()
            hear_notices(lambda: os.write(say, b"notice\n"))
            os.write(say, b"hears\n")
            while os.read(hears, 1):
                os.write(say, b"goes on\n")
            os._exit(0)
        finally:
            os._exit(1)

    def said(self) -> str:
        """The next line; the suite's bound on a test bounds it."""
        return self._lines.readline().strip()

    def tell(self) -> None:
        os.write(self._tell, b".")

    def end(self) -> int:
        os.close(self._tell)
        self._lines.close()
        return os.waitpid(self.pid, 0)[1]


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    assert child.said() == "holds"
    yield child
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # a test has seen to its end
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


def test_a_notice_is_told_once_and_the_process_goes_on(child: Child) -> None:
    child.tell()
    assert child.said() == "hears"
    os.kill(child.pid, signal.SIGTERM)
    assert child.said() == "notice"
    os.kill(child.pid, signal.SIGTERM)
    child.tell()
    assert child.said() == "goes on"
    assert child.end() == 0


def test_a_notice_that_comes_before_anybody_hears_is_not_lost(child: Child) -> None:
    os.kill(child.pid, signal.SIGTERM)
    child.tell()
    assert sorted([child.said(), child.said()]) == ["hears", "notice"]
    assert child.end() == 0


def test_a_notice_is_not_lost_that_comes_to_a_process_as_soon_as_it_is_forked() -> None:
    child = Child(is_struck_at_once=True)
    os.kill(child.pid, signal.SIGTERM)
    child.tell()
    assert child.said() == "holds"
    child.tell()
    assert sorted([child.said(), child.said()]) == ["hears", "notice"]
    assert child.end() == 0


def test_who_forks_hears_signals_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with holding_notices():
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_are_still_the_launchers(child: Child, number: signal.Signals) -> None:
    child.tell()
    assert child.said() == "hears"
    os.kill(child.pid, number)
    child.tell()
    assert child.said() == "goes on"
    assert child.end() == 0
