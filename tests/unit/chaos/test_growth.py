"""What processes hold is read from the kernel, and growth is told from what a process needs to get ready."""

import os
import threading
from pathlib import Path

from elaswave.observability.processes import process_entry, write_processes
from verify.chaos.bench import judge_growth
from verify.chaos.cases import GOOD, Judgement
from verify.chaos.growth import SAMPLES_MIN, Growth, GrowthWatch, Held, growth_of, held_by


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
    ready = [(4, Held(number, number, number)) for number in range(25)]
    steady = growth_of("x", [*ready, *[(4, Held(30, 31, 32))] * 75])
    assert steady == ("x", Held(30, 31, 32), Held(30, 31, 32)) and not steady.is_large
    leaking = growth_of("x", [(4, Held(3, 5 + number, 100 * number)) for number in range(100)])
    assert leaking is not None and leaking.is_large
    assert (leaking.threads, leaking.descriptors, leaking.memory_bytes) == (0, 37, 3750)
    assert str(leaking).startswith("x: 3 -> 3 threads, 42 -> 79 descriptors")


def test_links_to_more_workers_are_no_growth() -> None:
    sizes = [1, 4, 12, 4] * 20
    same = growth_of("x", [(size, Held(size, 10 * size, size)) for size in sizes])
    assert same == ("x", Held(4, 40, 4), Held(4, 40, 4))
    assert growth_of("x", [(number, Held(1, 1, 1)) for number in range(80)]) is None, "never as many workers again"


def test_a_job_that_ends_well_is_judged_by_its_growth_too() -> None:
    verdict = Judgement("same bits", "")
    flat, leak = (Growth("coordinator 0", Held(2, 9, 1), Held(2, 9 + more, 1)) for more in (1, 5))
    assert judge_growth([flat], verdict) == ("same bits", "no growth of coordinator 0")
    assert judge_growth([flat, leak], verdict).outcome == "grown" and "grown" not in GOOD
    assert judge_growth([], verdict).detail == "too short to judge growth"


def test_a_watch_says_nothing_of_processes_that_it_has_hardly_seen(tmp_path: Path) -> None:
    watch = GrowthWatch(tmp_path)
    watch.look()  # there is no job yet
    write_processes(tmp_path, [process_entry("launcher", 0, os.getpid())])
    for _ in range(3 * SAMPLES_MIN):
        watch.look()
    assert watch.growth() == []
    for _ in range(SAMPLES_MIN):
        watch.look()
    assert [each.name for each in watch.growth()] == ["launcher 0"]
