"""The event log: one line per event, readable while it grows, tolerant of a torn end."""

import json
import os
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.observability.samples import LAYOUT, write_events

from elaswave.errors import RunFolderError
from elaswave.observability import events as events_module
from elaswave.observability.events import (
    KINDS,
    CheckpointWritten,
    ErrorRaised,
    Evaluated,
    EventLog,
    EventsLost,
    RunFinished,
    RunStarted,
    StepCommitted,
    StepSkipped,
    read_events,
)
from elaswave.observability.result import CheckpointRecord


def step(number: int, loss: float = 4.0) -> StepCommitted:
    return StepCommitted(
        step=number, generation=0, attempt=0, loss=loss, grad_norm=1.0, lr=1e-3, tokens_per_s=1e4, duration_s=0.1
    )


def test_every_line_carries_kind_time_and_elapsed_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100.0, 101.5])
    times = SimpleNamespace(now=lambda zone: datetime(2026, 11, 20, 12, 57, 1, 250000, tzinfo=zone))
    monkeypatch.setattr(events_module, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(events_module, "datetime", times)
    log = EventLog(tmp_path / "events.jsonl")
    log.write(step(1))
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {
        "kind": "step",
        "time": "2026-11-20T12:57:01.250000Z",
        "elapsed_s": 1.5,
        "step": 1,
        "generation": 0,
        "attempt": 0,
        "loss": 4.0,
        "grad_norm": 1.0,
        "lr": 0.001,
        "tokens_per_s": 10000.0,
        "duration_s": 0.1,
        "samples_per_s": None,
        "metrics": {},
        "finished_s": 0.0,
        "phases_s": {},
        "retries": [],
    }
    log.close()


def test_events_are_readable_while_the_log_is_open(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(1, 4):
        log.write(step(number))
        assert [event.step for event in read_events(log.path)] == list(range(1, number + 1))
    log.close()


def test_every_kind_reads_back_as_it_was_written(tmp_path: Path) -> None:
    write_events(tmp_path)
    checkpoint = CheckpointRecord(step=5, path="checkpoints/step-5", num_bytes=10, duration_s=0.5)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(CheckpointWritten(checkpoint=checkpoint))
        log.write(Evaluated(step=5, loss=4.5))
        log.write(StepSkipped(step=6, reason="loss is nan", microbatch=3, layer="block.1"))
        log.write(ErrorRaised(message="worker 2: out of memory", worker=2, step=6, traceback="..."))
        log.write(RunFinished(outcome="failed", steps=6, duration_s=1.0, reason="out of memory"))
    events = read_events(tmp_path / "events.jsonl")
    assert [type(event).__struct_config__.tag for event in events] == [
        *["run_started", "layout"],
        *["step"] * 6,
        *["checkpoint", "evaluation", "skipped", "error", "run_finished"],
    ]
    assert events[1].layout == LAYOUT
    assert events[8].checkpoint == checkpoint
    earlier = (tmp_path / "events.jsonl").read_text().replace('"generation"', '"epoch"')
    assert '"epoch"' in earlier
    (tmp_path / "events.jsonl").write_text(earlier)
    assert read_events(tmp_path / "events.jsonl") == events, "as an earlier release has written it"


def test_the_kinds_are_those_that_the_documentation_names() -> None:
    assert set(KINDS) == {
        *["run_started", "layout", "step", "checkpoint", "evaluation", "recovery", "skipped", "error"],
        *["run_finished", "timings", "step_time", "step_time_predicted", "events_lost"],
    }


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_numbers_that_are_not_finite_become_strings(tmp_path: Path, value: float, text: str) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(step(1, value))
        log.write(Evaluated(step=1, loss=value))
        log.write(RunStarted(version="0.1", total_steps=3, first_step=2, losses=[value]))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [lines[0]["loss"], lines[1]["loss"], lines[2]["losses"]] == [text, text, [text]]
    assert read_events(tmp_path / "events.jsonl")[0].loss == text


@given(cut=st.integers(0, 400))
def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    with EventLog(path) as log:
        for number in range(1, 4):
            log.write(step(number, 4.0 + number / 7))
    whole = path.read_bytes()
    os.truncate(path, max(0, len(whole) - cut))
    complete = whole[: len(whole) - cut].count(b"\n") if cut <= len(whole) else 0
    assert [event.step for event in read_events(path)] == list(range(1, complete + 1))
    with EventLog(path) as log:
        log.write(step(9))
    assert [event.step for event in read_events(path)] == [*range(1, complete + 1), 9]


def test_a_torn_line_longer_than_one_read_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"future"}\n' + b"x" * 200_000)
    EventLog(path).close()
    assert path.read_bytes() == b'{"kind":"future"}\n'


def test_kinds_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(step(1))
    with path.open("a") as file:
        file.write('{"kind":"eclipse","time":"t","elapsed_s":0,"size":3}\n')
    with EventLog(path) as log:
        log.write(step(2))
    assert [event.step for event in read_events(path)] == [1, 2]


@pytest.mark.parametrize("line", ['{"kind":"step","step":"one"}', "garbage", "", '{"step":1}', "\udcff"])
def test_a_damaged_line_in_the_middle_is_named_and_the_others_are_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(step(1))
    with path.open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    with EventLog(path) as log:
        log.write(step(2))
    first, lost, last = read_events(path)
    assert [first.step, last.step] == [1, 2]  # type: ignore[union-attr]
    assert isinstance(lost, EventsLost) and lost.num_events == 1 and lost.time == first.time
    assert lost.reason.startswith("events.jsonl, line 2, is damaged: ")


def test_a_log_that_cannot_be_opened_is_opened_once_it_can(tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(RunFolderError, match="cannot write"):
        EventLog(tmp_path / "later" / "events.jsonl")
    with EventLog(tmp_path / "later" / "events.jsonl", on_trouble=told.append) as log:
        log.write(step(1))
        assert log.num_lost == 1 and "No such file or directory): training goes on" in told[0]
        (tmp_path / "later").mkdir()
        log.write(step(2))
    lost, kept = read_events(tmp_path / "later" / "events.jsonl")
    assert isinstance(lost, EventsLost) and lost.num_events == 1
    assert isinstance(kept, StepCommitted) and kept.step == 2


def test_a_missing_log_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot read .*No such file"):
        read_events(tmp_path / "events.jsonl")


def test_a_log_that_cannot_be_opened_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot write .*No such file.*--run-dir"):
        EventLog(tmp_path / "missing" / "events.jsonl")


def test_a_closed_log_refuses_events_and_closing_twice_is_fine(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log.close()
    with pytest.raises(RunFolderError, match="cannot append"):
        log.write(step(1))


def test_a_full_disk_is_told_once_and_the_log_says_what_it_lacks(tmp_path: Path) -> None:
    path, told = tmp_path / "events.jsonl", []
    log = EventLog(path, on_trouble=told.append)
    log.write(step(1))
    file = log._fd
    with open("/dev/full", "wb") as full:
        log._fd = full.fileno()
        log.write(step(2))
        log.write(step(3))
        assert log.num_lost == 2
        log._fd = file
    assert told == [
        f"{path} cannot be written (No space left on device): training goes on, and the log will say what it lacks "
        "once it can be written again"
    ]
    log.write(step(4))
    log.write(step(5))
    log.close()
    assert told[1:] == [f"{path} can be written again; it lacks 2 events"] and log.num_lost == 0
    events = read_events(path)
    assert [event.step for event in events if isinstance(event, StepCommitted)] == [1, 4, 5]
    (lost,) = [event for event in events if isinstance(event, EventsLost)]
    assert (events.index(lost), lost.num_events, lost.reason) == (1, 2, "No space left on device")
    assert events[0].time < lost.since < lost.time


def test_half_a_line_that_the_disk_did_not_take_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, on_trouble=lambda text: None)
    log.write(step(1))
    write, room = os.write, [40]

    def write_some(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken, room[0] = room[0], 0
        return write(fd, bytes(data)[:taken])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        log.write(step(2))
    assert len(path.read_bytes().splitlines()) == 1
    log.write(step(3))
    assert [type(event) for event in read_events(path)] == [StepCommitted, EventsLost, StepCommitted]
