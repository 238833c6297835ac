"""What processes hold is read from the kernel, and growth is told from what a process needs to get ready."""

import os
import threading
from pathlib import Path

from elaswave.faults.growth import SAMPLES_MIN, GrowthWatch, Held, growth_of, held_by
from elaswave.observability.processes import described, write_processes


def test_this_process_holds_what_it_holds(tmp_path: Path) -> None:
    before = held_by(os.getpid())
    assert before is not None and before.threads >= 1 and before.memory_bytes > 1 << 20
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    with open(tmp_path / "file", "w"):
        after = held_by(os.getpid())
    over.set()
    thread.join()
    assert after is not None
    assert (after.threads - before.threads, after.descriptors - before.descriptors) == (1, 1)


def test_a_process_that_has_ended_holds_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert held_by(pid) is None, "it is not reaped yet"
    os.waitpid(pid, 0)
    assert held_by(pid) is None


def test_what_a_process_takes_in_the_beginning_is_no_growth() -> None:
    ready = [Held(number, number, number) for number in range(25)]
    steady = [*ready, *[Held(30, 31, 32)] * 75]
    assert growth_of("x", steady)[1:] == (Held(30, 31, 32), Held(30, 31, 32))
    leaking = [Held(3, 5 + number, 100 * number) for number in range(100)]
    found = growth_of("x", leaking)
    assert (found.threads, found.descriptors, found.memory_bytes) == (0, 50, 5000)


def test_a_watch_says_nothing_of_processes_that_it_has_hardly_seen(tmp_path: Path) -> None:
    watch = GrowthWatch(tmp_path)
    watch.look()  # there is no job yet
    write_processes(tmp_path, [described("launcher", 0, os.getpid())])
    for _ in range(SAMPLES_MIN - 1):
        watch.look()
    assert watch.growth() == []
    watch.look()
    assert [each.name for each in watch.growth()] == ["launcher 0"]
