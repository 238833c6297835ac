"""Traces: bounded recording, merging, and what viewers need."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trace_format import validate_trace

from elaswave.errors import RunFolderError
from elaswave.observability.trace import (
    ACTION,
    PHASE,
    Span,
    TracePart,
    TraceRecorder,
    Transfer,
    build_trace,
    merge_traces,
    part_path,
)

TAG = (1, 7, 0, 3, 0)


def record_a_step(run_dir: Path) -> None:
    """Worker 0 runs 0F0 and sends to worker 1, which waits, runs 1F0 and reduces."""
    sender = TraceRecorder(0, stage=0)
    sender.add("0F0", ACTION, 1_000_100_000, 1_000_200_000, {"step": 7})
    sender.transfer(sent=True, peer=1, num_bytes=4096, start_ns=1_000_200_500, end_ns=1_000_230_000, tag=TAG)
    sender.add("RUN", PHASE, 1_000_090_000, 1_000_400_000)
    receiver = TraceRecorder(1, stage=1)
    receiver.transfer(sent=False, peer=0, num_bytes=4096, start_ns=1_000_095_000, end_ns=1_000_240_000, tag=TAG)
    receiver.add("1F0", ACTION, 1_000_250_000, 1_000_300_000)
    receiver.add("RUN", PHASE, 1_000_091_000, 1_000_400_000)
    receiver.add("REDUCE", PHASE, 1_000_400_000, 1_000_500_000)
    assert sender.dump(run_dir) == part_path(run_dir, 0)
    assert receiver.dump(run_dir) == part_path(run_dir, 1)


def test_the_parts_are_merged_into_one_valid_trace(tmp_path: Path) -> None:
    record_a_step(tmp_path)
    assert (tmp_path / "trace-worker-1.json.part").exists()
    assert merge_traces(tmp_path) == tmp_path / "trace.json"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    document = json.loads((tmp_path / "trace.json").read_text())
    validate_trace(document)
    events = document["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["stage 0, worker 0", "stage 1, worker 1"]
    action = next(e for e in events if e["name"] == "0F0")
    assert action == {
        "name": "0F0",
        "cat": "action",
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 10.0,
        "dur": 100.0,
        "args": {"step": 7},
    }
    transfer = next(e for e in events if e["ph"] == "b" and e["pid"] == 0)
    assert transfer["args"] == {"peer": 1, "bytes": 4096, "tag": list(TAG)}
    assert {e["name"] for e in events if e["ph"] in "be"} == {"send to 1", "receive from 0"}


def test_an_arrow_leads_from_the_sending_action_to_the_one_that_went_on(tmp_path: Path) -> None:
    record_a_step(tmp_path)
    trace = merge_traces(tmp_path)
    events = json.loads(trace.read_text())["traceEvents"]
    spans = {e["name"]: e for e in events if e["ph"] == "X" and e["name"] != "RUN"}
    begin, end = (next(e for e in events if e["ph"] == kind) for kind in "sf")
    assert begin["id"] == end["id"]
    assert (begin["pid"], end["pid"], end["bp"]) == (0, 1, "e")
    assert spans["0F0"]["ts"] <= begin["ts"] < spans["0F0"]["ts"] + spans["0F0"]["dur"]
    assert spans["1F0"]["ts"] <= end["ts"] < spans["1F0"]["ts"] + spans["1F0"]["dur"]


@pytest.mark.parametrize(
    ("arrival_ns", "span"),
    [
        (15, "1F0"),  # before anything: the first to begin
        (25, "1F1"),  # during an action: the next action
        (35, "1F1"),  # while the worker waits for it
        (45, "1F1"),  # the last action runs: that one
        (70, "REDUCE"),  # inside a phase without spans of its own after it
        (95, "VOTE"),  # between two phases: the next
        (120, None),  # after everything
    ],
)
def test_where_an_arrow_ends(arrival_ns: int, span: str | None) -> None:
    spans = [
        Span("RUN", PHASE, 10, 60),
        Span("wait", "wait", 30, 40),
        Span("1F0", ACTION, 20, 30),
        Span("1F1", ACTION, 40, 50),
        Span("REDUCE", PHASE, 60, 90),
        Span("VOTE", PHASE, 100, 110),
    ]
    receive = Transfer(sent=False, peer=0, num_bytes=1, start_ns=0, end_ns=arrival_ns, tag=TAG)
    send = Transfer(sent=True, peer=1, num_bytes=1, start_ns=3, end_ns=9, tag=TAG)
    events = list(
        build_trace(
            [
                TracePart(worker=0, stage=None, num_dropped=0, spans=[Span("0F0", ACTION, 0, 2)], transfers=[send]),
                TracePart(worker=1, stage=None, num_dropped=0, spans=spans, transfers=[receive]),
            ]
        )
    )
    ends = [event["ts"] * 1000 for event in events if event["ph"] == "f"]
    if span is None:
        assert ends == []
    else:
        innermost = max(
            (s for s in spans if s.name != "wait" and s.start_ns <= ends[0] < s.end_ns), key=lambda s: s.start_ns
        )
        assert innermost.name == span
    validate_trace({"traceEvents": events})


def test_a_recorder_that_is_off_keeps_and_writes_nothing(tmp_path: Path) -> None:
    recorder = TraceRecorder(0, enabled=False)
    recorder.add("0F0", ACTION, 0, 1)
    recorder.transfer(sent=True, peer=1, num_bytes=1, start_ns=0, end_ns=1, tag=TAG)
    assert recorder.dump(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert merge_traces(tmp_path) is None


def test_a_recorder_is_bounded_and_the_trace_says_what_it_left_out(tmp_path: Path) -> None:
    recorder = TraceRecorder(5, max_events=2)
    recorder.add("0F0", ACTION, 0, 1)
    recorder.transfer(sent=True, peer=1, num_bytes=1, start_ns=0, end_ns=1, tag=TAG)
    recorder.add("0B0", ACTION, 2, 3)
    recorder.transfer(sent=True, peer=1, num_bytes=1, start_ns=2, end_ns=3, tag=TAG)
    assert recorder.num_dropped == 2
    recorder.dump(tmp_path)
    document = json.loads(merge_traces(tmp_path).read_text())
    assert document["otherData"] == {"damaged_parts": [], "dropped_events": {"5": 2}}
    assert len([event for event in document["traceEvents"] if event["ph"] in "Xb"]) == 2


def test_a_damaged_part_is_left_out_and_named(tmp_path: Path) -> None:
    record_a_step(tmp_path)
    part = part_path(tmp_path, 1)
    part.write_bytes(part.read_bytes()[:-9])
    document = json.loads(merge_traces(tmp_path).read_text())
    validate_trace(document)
    assert document["otherData"]["damaged_parts"] == ["trace-worker-1.json.part"]
    assert {event["pid"] for event in document["traceEvents"]} == {0}


def test_dumping_into_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    recorder = TraceRecorder(0)
    recorder.add("0F0", ACTION, 0, 1)
    with pytest.raises(RunFolderError, match="cannot write"):
        recorder.dump(tmp_path / "missing")


times = st.integers(0, 200)
intervals = st.tuples(times, times).map(sorted)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(intervals, st.sampled_from([ACTION, PHASE])), max_size=8),
            st.lists(st.tuples(st.booleans(), st.integers(0, 3), intervals, st.integers(0, 2)), max_size=8),
        ),
        max_size=4,
    )
)
def test_whatever_was_recorded_the_trace_is_valid(workers: list[Any]) -> None:
    parts = [
        TracePart(
            worker=worker,
            stage=worker // 2,
            num_dropped=0,
            spans=[Span("x", category, start, end) for (start, end), category in spans],
            transfers=[
                Transfer(sent=sent, peer=peer, num_bytes=1, start_ns=start, end_ns=end, tag=(tag,))
                for sent, peer, (start, end), tag in transfers
            ],
        )
        for worker, (spans, transfers) in enumerate(workers)
    ]
    validate_trace({"traceEvents": list(build_trace(parts))})


EVENT = {"name": "n", "ph": "X", "ts": 1, "dur": 1, "pid": 0, "tid": 0}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "needs a list of events under 'traceEvents'"),
        ({"traceEvents": [{**EVENT, "ph": "Q"}]}, r"traceEvents\[0\]: unknown kind of event 'Q'"),
        ({"traceEvents": [EVENT, {"name": "n", "ph": "X", "ts": 1, "pid": 0}]}, r"\[1\]: .*lacks tid, dur"),
        ({"traceEvents": [{**EVENT, "dur": -1}]}, "a time is negative"),
        ({"traceEvents": [{**EVENT, "ph": "b"}]}, "lacks id, cat"),
        ({"traceEvents": [{**EVENT, "ph": "f", "id": 1, "cat": "flow"}]}, "flow 1 ends before it begins"),
        ({"traceEvents": [{**EVENT, "ph": "b", "id": 1, "cat": "send"}]}, "send 1 begins but does not end"),
    ],
)
def test_the_validator_finds_what_viewers_would_choke_on(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_trace(document)
