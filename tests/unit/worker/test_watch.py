"""What a worker's steps are said to have taken."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.observability.trace import TraceRecorder
from elaswave.worker.activity import Activity
from elaswave.worker.probe import NoProbe
from elaswave.worker.watch import StepWatch


class Clock:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(self.now_s * 1e9))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def a_watch() -> StepWatch:
    mailbox: Any = SimpleNamespace(
        activity=Activity(), registration=SimpleNamespace(address="here"), registers_as=lambda registration: None
    )
    watch = StepWatch(NoProbe(), mailbox, TraceRecorder(0, enabled=False))
    machine: Any = SimpleNamespace(attempt=1, step=3, registration=lambda address: address)
    watch.machine = machine
    return watch


@pytest.mark.parametrize("ended_by", ["recovering", "moved"])
def test_an_interrupted_phase_counts_until_it_was_interrupted(clock: Clock, ended_by: str) -> None:
    watch = a_watch()
    watch.began()
    watch.enter("run")
    watch.waited_for_data(2.0)
    clock.now_s += 3.0
    getattr(watch, ended_by)()
    clock.now_s += 10.0
    watch.recovering()
    watch.moved()
    watch.machine.attempt = 2
    watch.began()
    watch.enter("run")
    clock.now_s += 1.0
    watch.leave("run")
    watch.moved()
    assert watch.phases_s == {"run": pytest.approx(4.0), "data": 2.0}


def test_a_new_step_counts_anew(clock: Clock) -> None:
    watch = a_watch()
    watch.began()
    watch.enter("run")
    clock.now_s += 3.0
    watch.leave("run")
    watch.began()
    assert watch.phases_s == {}
