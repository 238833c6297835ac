"""The death watch: a process's end is seen, however it ends, and never while it lives."""

import os
import signal
import threading

import pytest

from elaswave.system.processes import NUM_SLOTS, DeathWatch

WAIT_S = 20.0


def _fork_worker(watch: DeathWatch, worker: int) -> tuple[int, int]:
    """A process that lives until the returned descriptor is closed or it is killed."""
    ready_read, ready_write = os.pipe()
    hold_read, hold_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hold_write)
            watch.live(worker)
            os.write(ready_write, b"x")
            os.read(hold_read, 1)
        finally:
            os._exit(0)
    os.close(hold_read)
    os.close(ready_write)
    assert os.read(ready_read, 1) == b"x"
    os.close(ready_read)
    return pid, hold_write


def _wait_in_thread(watch: DeathWatch, worker: int) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(watch.wait(worker)), daemon=True)
    thread.start()
    return thread, answers


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_an_end_is_seen(how: str) -> None:
    watch = DeathWatch()
    if not watch.works:
        pytest.skip("this C library has no robust mutexes")
    pid, hold = _fork_worker(watch, 7)
    thread, answers = _wait_in_thread(watch, 7)
    thread.join(0.05)
    assert answers == [] and not watch.has_ended(7)  # it lives
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
    os.close(hold)
    os.waitpid(pid, 0)
    thread.join(WAIT_S)
    assert answers == [True] and watch.has_ended(7)


def test_an_end_that_nobody_waits_for_is_seen_and_then_by_who_waits() -> None:
    watch = DeathWatch()
    if not watch.works:
        pytest.skip("this C library has no robust mutexes")
    assert not watch.has_ended(7)
    pid, hold = _fork_worker(watch, 7)
    assert not watch.has_ended(7)
    _end(pid, hold)
    assert watch.has_ended(7) and watch.has_ended(7)
    thread, answers = _wait_in_thread(watch, 7)
    thread.join(WAIT_S)
    assert answers == [True]


def test_a_second_watcher_sees_the_end_too() -> None:
    """A coordinator that takes over learns of workers that died under the one before it."""
    watch = DeathWatch()
    if not watch.works:
        pytest.skip("this C library has no robust mutexes")
    pid, hold = _fork_worker(watch, 0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(hold)
    first = os.fork()
    if first == 0:
        os._exit(0 if watch.wait(0) else 1)
    assert os.waitpid(first, 0)[1] == 0
    thread, answers = _wait_in_thread(watch, 0)
    thread.join(WAIT_S)
    assert answers == [True]


def _end(pid: int, hold: int) -> None:
    os.close(hold)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_slot_is_taken_again_after_its_owners_end(is_watched: bool) -> None:
    """By a worker that nobody had thought of when the memory was made."""
    watch = DeathWatch()
    if not watch.works:
        pytest.skip("this C library has no robust mutexes")
    first, second = 5, 5 + 3 * NUM_SLOTS
    _end(*_fork_worker(watch, first))
    if is_watched:
        assert watch.wait(first)
    pid, hold = _fork_worker(watch, second)
    thread, answers = _wait_in_thread(watch, second)
    assert watch.wait(first) is False  # its end can no longer be told here, nor is it mistaken for the other one
    thread.join(0.05)
    assert answers == []
    _end(pid, hold)
    thread.join(WAIT_S)
    assert answers == [True]


def test_a_slot_whose_owner_lives_is_not_taken() -> None:
    watch = DeathWatch()
    if not watch.works:
        pytest.skip("this C library has no robust mutexes")
    pid, hold = _fork_worker(watch, 2)
    other = _fork_worker(watch, 2 + NUM_SLOTS)
    assert watch.wait(2 + NUM_SLOTS) is False
    _end(*other)
    thread, answers = _wait_in_thread(watch, 2)
    _end(pid, hold)
    thread.join(WAIT_S)
    assert answers == [True]


def test_who_never_lived_is_not_dead() -> None:
    assert DeathWatch().wait(0) is False


def test_without_robust_mutexes_nothing_is_told() -> None:
    watch = DeathWatch()
    watch.works = False
    watch.live(0)
    assert watch.wait(0) is False
