"""Every wait of the launcher has a bound, which time in which the launcher was stopped itself does not count for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.errors import LaunchError, UsageError
from elaswave.launcher.forkserver.machine import COORDINATOR
from elaswave.launcher.forkserver.messages import Unprepared
from elaswave.launcher.processes import KILLED_S_MAX, STILL_S_MAX, STOPPED_S_MAX, LauncherWaits, await_prepared
from elaswave.observability.processes import ProcessFacts

BEGIN_S = 100.0


def forkserver(state: str, cpu_s: float = 1.0) -> ProcessFacts:
    return ProcessFacts(state=state, parent=1, cpu_s=cpu_s, start_ticks=0)


def waited(waits: LauncherWaits, facts: Callable[[float], ProcessFacts | None], bound_s: float) -> tuple[float, str]:
    """After how many seconds something is overdue, and what is told; at most twice a bound."""
    now_s = BEGIN_S
    while now_s < BEGIN_S + 2 * bound_s:
        now_s += 0.25
        told = waits.overdue(partial(facts, now_s), now_s)
        if told is not None:
            return now_s - BEGIN_S, told
    return now_s - BEGIN_S, ""


@pytest.mark.parametrize(("state", "bound_s"), [("T", STOPPED_S_MAX), ("t", STILL_S_MAX), ("S", STILL_S_MAX)])
def test_a_template_that_does_not_fork_is_waited_for_as_long_as_it_gets_on(state: str, bound_s: float) -> None:
    waits = LauncherWaits()
    waits.for_forks((0, 1), BEGIN_S)
    waits.for_forks((COORDINATOR,), BEGIN_S)
    waits.forked(0)
    passed_s, told = waited(waits, lambda now_s: forkserver(state), bound_s)
    assert bound_s < passed_s < bound_s + 1.0
    assert told.startswith("the forkserver does not fork the coordinator, worker 1: it has used no processor")
    assert told.endswith(" and is stopped") == (state == "T")
    waits = LauncherWaits()
    waits.for_forks((0, 1), BEGIN_S)
    slow = waited(waits, lambda now_s: forkserver(state, 0.01 * (now_s // (bound_s / 2))), bound_s)
    assert slow[1] == ""


def test_a_template_that_has_nothing_to_fork_may_stand_still_and_one_that_has_ended_is_another_matter() -> None:
    looks: list[float] = []

    def stopped(now_s: float) -> ProcessFacts:
        looks.append(now_s)
        return forkserver("T")

    waits = LauncherWaits()
    assert waited(waits, stopped, STOPPED_S_MAX)[1] == ""
    waits.for_forks((0,), BEGIN_S)
    assert waited(waits, lambda now_s: None, STOPPED_S_MAX)[1] == ""
    waits.forked(0)
    assert waited(waits, stopped, STOPPED_S_MAX)[1] == ""
    assert not looks, "the launcher does this many times a second, and each look reads /proc"


def test_a_commit_that_does_not_end_is_not_waited_for_for_ever() -> None:
    waits = LauncherWaits()
    waits.for_commit(BEGIN_S)
    passed_s, told = waited(waits, lambda now_s: forkserver("S"), KILLED_S_MAX)
    assert KILLED_S_MAX < passed_s < KILLED_S_MAX + 1.0 and waits.is_for_commit
    assert "no other one can be started: the process that was committing a checkpoint was to be killed" in told
    waits.commit_ended()
    assert waits.overdue(lambda: forkserver("S"), 1e6) is None


def test_a_coordinator_that_cannot_be_killed_is_not_waited_for_for_ever() -> None:
    waits = LauncherWaits()
    for again_s in (0.0, 5.0, 10.0):
        waits.for_killed_coordinator(BEGIN_S + again_s)
    passed_s, told = waited(waits, lambda now_s: forkserver("S"), KILLED_S_MAX)
    assert KILLED_S_MAX < passed_s < KILLED_S_MAX + 1.0
    assert "the coordinator does not answer, and has not ended within 60 s after it was to be killed" in told
    waits.coordinator_ended()
    assert waits.overdue(lambda: forkserver("S"), 1e6) is None


def test_time_in_which_the_launcher_was_stopped_itself_does_not_count() -> None:
    waits = LauncherWaits()
    waits.for_forks((0,), BEGIN_S)
    waits.for_commit(BEGIN_S)
    waits.for_killed_coordinator(BEGIN_S)
    assert waits.overdue(lambda: forkserver("T"), BEGIN_S + 3600.0) is None


@pytest.mark.parametrize(
    ("said", "error", "told"),
    [
        ([Unprepared(text="the model has no layers", is_usage=True)], UsageError, "^the model has no layers$"),
        ([Unprepared(text="no libtorch")], LaunchError, "no libtorch"),
        ([], LaunchError, "it ended with status 1"),
    ],
)
def test_what_a_template_says_last_is_the_reason_why_it_has_ended(
    said: list[Unprepared], error: type[Exception], told: str
) -> None:
    """It ends as soon as it has said that, at any instant of the launcher's look."""
    come: list[Unprepared] = []

    def end() -> str | None:
        come.extend(said)
        return "ended with status 1"

    processes: Any = SimpleNamespace(
        selector=SimpleNamespace(select=lambda timeout_s: []),
        receive_from_forkserver=lambda: list(come),
        forkserver_end=end,
        forkserver_facts=lambda: None,
    )
    with pytest.raises(error, match=told):
        await_prepared(processes, Path("forkserver.log"), lambda: None)
