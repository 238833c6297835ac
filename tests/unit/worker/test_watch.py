"""What a worker's steps are said to have taken."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from elaswave.engine.activity import Activity
from elaswave.faults.injection import NoProbe
from elaswave.observability.trace import TracePart, TraceRecorder, build_trace
from elaswave.types import Gauges
from elaswave.worker.control import StepWatch


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


def test_a_devices_gauges_are_counters_in_the_trace_once_a_step(clock: Clock, tmp_path: Path) -> None:
    told = iter([Gauges(memory_used_bytes=7, memory_total_bytes=9, utilization=0.5), None, Gauges(allocated_bytes=3)])
    watch = a_watch()
    watch._trace, watch._gauges = TraceRecorder(0), lambda: next(told)
    for phase in ("run", "vote", "apply", "vote", "vote"):
        watch.enter(phase)
        clock.now_s += 1.0
        watch.leave(phase)
    path = watch._trace.dump(tmp_path)
    assert path is not None
    events = list(build_trace([msgspec.json.decode(path.read_bytes(), type=TracePart)]))
    counters = [(event["name"], event["ts"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters == [
        ("memory_used_bytes", 2e6, {"value": 7}),
        ("utilization", 2e6, {"value": 0.5}),
        ("allocated_bytes", 5e6, {"value": 3}),
    ]


def test_without_a_trace_a_device_is_not_asked(clock: Clock) -> None:
    watch = a_watch()
    watch._gauges = lambda: pytest.fail("it was asked")
    watch.enter("vote")
    watch.leave("vote")
