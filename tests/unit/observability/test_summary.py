"""What a run folder tells, with and without a result."""

from pathlib import Path

import pytest
from tests.unit.observability.samples import LAYOUT, LOSSES, RECOVERY, make_result, write_events

from elaswave.cli.inspect import render_summary
from elaswave.errors import RunFolderError
from elaswave.observability.events import (
    CheckpointWritten,
    ErrorRaised,
    Evaluated,
    EventLog,
    Recovered,
    RunFinished,
    RunStarted,
    StepCommitted,
    StepSkipped,
)
from elaswave.observability.result import CheckpointRecord, write_result
from elaswave.observability.summary import Retry, build_summary, summarize_run


def test_a_running_run_is_told_from_its_events(tmp_path: Path) -> None:
    path = write_events(tmp_path, LOSSES[:5])
    checkpoint = CheckpointRecord(step=5, path="checkpoints/step-5", num_bytes=10, duration_s=0.5)
    with EventLog(path) as log:
        log.write(Evaluated(step=5, loss=4.5))
        log.write(CheckpointWritten(checkpoint=checkpoint))
        log.write(Recovered(recovery=RECOVERY))
    with path.open("a") as file:
        file.write('{"kind":"step","time":"20')  # being written at this moment
    summary = summarize_run(tmp_path)
    assert (summary.status, summary.steps, summary.total_steps) == ("unfinished", 5, 6)
    assert summary.losses == dict(enumerate(LOSSES[:5], start=1))
    assert summary.val_losses == {5: 4.5}
    assert summary.layout == "2x2"
    assert [(stage.start, stage.stop, stage.workers) for stage in summary.stages] == [(0, 3, [0, 1]), (3, 6, [2, 3])]
    assert summary.stages[0].layer_names == ["embedding", "block.0", "block.1"]
    assert [stage.num_parameters for stage in summary.stages] == [429000, 429000]
    assert [worker.num_microbatches for worker in summary.workers] == [4, 4, 4, 4]
    assert summary.workers[3].holdings is not None and summary.workers[3].peak_bytes is None
    assert summary.timings is not None
    assert (summary.timings.num_steps, summary.timings.mean_s, summary.timings.slowest_s) == (2, 0.25, 0.25)
    assert summary.timings.phases_s["reduce"] == pytest.approx(0.03)
    assert summary.throughput_tokens_per_s == pytest.approx(16384.0)
    assert (summary.recoveries, summary.checkpoints) == ([RECOVERY], [checkpoint])
    assert summary.state_digest is None and summary.last_event_time is not None


def test_it_is_told_who_plans() -> None:
    started = RunStarted(version="0.1", total_steps=6, config={"elastic": {"policy": "/p/own.py:plan"}})
    summary = build_summary("RUN", None, [started])
    assert summary.policy == "/p/own.py:plan"
    assert "0 of 6 steps; planned by /p/own.py:plan" in render_summary(summary, 200)[0]
    started = RunStarted(version="0.1", total_steps=6, config={"elastic": {"policy": "elaswave"}})
    named = build_summary("RUN", None, [started])
    assert "planned by" not in render_summary(named, 200)[0]


def test_a_finished_run_is_told_from_its_result_too(tmp_path: Path) -> None:
    write_events(tmp_path)
    result = make_result()
    write_result(tmp_path, result)
    summary = summarize_run(tmp_path)
    assert (summary.status, summary.steps, summary.total_steps) == ("finished", 6, 6)
    assert summary.throughput_tokens_per_s == result.throughput_tokens_per_s
    assert summary.workers[0].optimizer_bytes == 5 << 20
    assert summary.workers[0].holdings is not None
    assert summary.val_losses == {5: 4.5}
    assert summary.state_digest == result.state_digest


def test_a_result_without_a_log_is_enough(tmp_path: Path) -> None:
    write_result(tmp_path, make_result())
    summary = summarize_run(tmp_path)
    assert (summary.status, summary.timings, summary.total_steps) == ("finished", None, None)
    assert summary.stages[0].layer_names == [] and summary.stages[0].num_parameters is None


def test_a_log_without_steps_is_enough(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").close()
    summary = summarize_run(tmp_path)
    assert (summary.status, summary.steps, summary.losses, summary.duration_s) == ("unfinished", 0, {}, None)


@pytest.mark.parametrize("outcome", ["failed", "interrupted"])
def test_a_run_that_ended_early_says_so(tmp_path: Path, outcome: str) -> None:
    path = write_events(tmp_path, LOSSES[:2])
    with EventLog(path) as log:
        log.write(StepSkipped(step=3, reason="loss of micro-batch 1 is nan"))
        log.write(ErrorRaised(message="worker 2: out of memory", worker=2))
        log.write(RunFinished(outcome=outcome, steps=3, duration_s=1.0))
    summary = summarize_run(tmp_path)
    assert (summary.status, summary.steps, summary.losses[3]) == (outcome, 3, "nan")
    assert [event.message for event in summary.errors] == ["worker 2: out of memory"]
    assert [event.step for event in summary.skipped] == [3]


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = write_events(tmp_path, [5.0, 4.0, 3.0])
    with EventLog(path) as log:
        log.write(Evaluated(step=2, loss=4.2))
        log.write(Evaluated(step=3, loss=4.1))
        log.write(ErrorRaised(message="lost power"))
        log.write(RunStarted(version="0.1", total_steps=6, first_step=3, losses=[5.0, 4.0]))
    summary = summarize_run(tmp_path)
    assert summary.losses == {1: 5.0, 2: 4.0}
    assert summary.val_losses == {2: 4.2}
    assert (summary.errors, summary.generations) == ([], [])
    write_events(tmp_path, [2.5], first_step=3)
    summary = summarize_run(tmp_path)
    assert summary.losses == {1: 5.0, 2: 4.0, 3: 2.5}
    assert summary.generations[-1].layout == LAYOUT
    assert summary.timings is None


def test_repeated_and_skipped_steps_are_told_once(tmp_path: Path) -> None:
    step = StepCommitted(
        step=3,
        generation=0,
        attempt=2,
        loss="nan",
        grad_norm="inf",
        lr=0.1,
        tokens_per_s=1.0,
        duration_s=1.0,
        retries=["a grid was too fine"],
    )
    started = RunStarted(version="0.1", total_steps=6)
    for _ in range(2):  # the second process repeats what the first did
        with EventLog(tmp_path / "events.jsonl") as log:
            log.write(started)
            log.write(StepSkipped(step=3, reason="loss is nan"))
            log.write(step)
            log.write(CheckpointWritten(checkpoint=make_result().checkpoints[0]))
    summary = summarize_run(tmp_path)
    assert summary.retries == [Retry(step=3, reason="a grid was too fine")]
    assert [event.step for event in summary.skipped] == [3]
    assert summary.losses == {3: "nan"}
    assert summary.checkpoints == make_result().checkpoints


def test_a_run_in_another_folder_that_carried_its_losses_over() -> None:
    events = [RunStarted(version="0.1", total_steps=6, first_step=3, losses=[5.0, 4.0])]
    assert build_summary("run", None, events).losses == {1: 5.0, 2: 4.0}


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        summarize_run(tmp_path)
