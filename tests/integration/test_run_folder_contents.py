"""What real runs leave in their folders: results, logs and traces that agree with each other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.signals import hear_signals
from tests.trace_format import validate_trace

from elaswave.observability.events import Event, RunFinished, RunStarted, StepCommitted, read_events
from elaswave.observability.result import read_digests, read_result
from elaswave.observability.summary import summarize_run

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
TINY = [
    *["model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.context_length=16"],
    *["batch.microbatch_size=4", "batch.num_microbatches=4", "optimizer.schedule=constant"],
]


def elaswave(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from elaswave.cli.main import main; sys.exit(main())", *arguments]


def train(run_dir: Path, *arguments: str, **settings: Any) -> list[str]:
    pairs = [*TINY, *(f"run.{key}={value}" for key, value in settings.items())]
    return elaswave("train", "--run-dir", str(run_dir), *arguments, *(x for pair in pairs for x in ("--set", pair)))


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def kinds(events: list[Any]) -> list[str]:
    return [type(event).__struct_config__.tag for event in events]


def test_the_files_of_a_complete_run_agree(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run(train(folder, "--json", "--profile", steps=6, eval_every=3, checkpoint_every=4))
    assert done.returncode == 0, done.stderr
    assert "step 1/6" in done.stderr and "finished 6 steps" in done.stderr
    assert done.stdout == (folder / "result.json").read_text()

    result = read_result(folder)
    digests = read_digests(folder)
    assert digests is not None
    assert {name.partition(".")[0] for name in digests} == {"master", "exp_avg", "exp_avg_sq"}
    assert result.val_steps == [3, 6]
    assert [point.step for point in result.checkpoints] == [4, 6]
    assert all((folder / point.path).is_dir() for point in result.checkpoints)
    assert result.memory.keys() == {0, 1, 2, 3}

    events: list[Event] = list(read_events(folder / "events.jsonl"))
    assert kinds(events)[:2] == ["run_started", "layout"] and kinds(events)[-1] == "run_finished"
    assert [event.loss for event in events if isinstance(event, StepCommitted)] == result.losses
    assert kinds(events).count("evaluation") == kinds(events).count("checkpoint") == 2

    trace = json.loads((folder / "trace.json").read_text())
    validate_trace(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == {0, 1, 2, 3}
    names = {span["name"] for span in spans}
    assert names >= {"RUN", "REDUCE", "VOTE", "APPLY", "GATHER"}
    assert names >= {f"{stage}{kind}{microbatch}" for stage in "01" for kind in "FB" for microbatch in range(4)}
    sent = sum(event["ph"] == "b" and event["cat"] == "send" for event in trace["traceEvents"])
    received = sum(event["ph"] == "b" and event["cat"] == "receive" for event in trace["traceEvents"])
    assert sent == received > 0

    summary = summarize_run(folder)
    assert summary.status == "finished"
    assert sum(stage.num_parameters or 0 for stage in summary.stages) == sum(
        worker.holdings.num_owned_parameters for worker in summary.workers if worker.holdings is not None
    )


def run_until_terminated(command: list[str], folder: Path, steps: int) -> None:
    """Starts a run, looks at it as soon as it has made some steps, and ends it with SIGTERM."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_signals,
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (folder / "events.jsonl").exists() or summarize_run(folder).steps < steps:
            assert process.poll() is None and time.monotonic() < deadline, "no step within the time"
            time.sleep(0.02)
        assert summarize_run(folder).status == "unfinished"
        assert run(elaswave("inspect", str(folder))).returncode == 0
        assert run(elaswave("inspect", "diff", str(folder), str(folder))).returncode == 2
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, errors


@pytest.mark.slow
def test_an_interrupted_run_is_told_as_such_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    warm_up = ("--set", "optimizer.warmup_steps=3")
    run_until_terminated(train(folder, "--profile", *warm_up, steps=100_000), folder, steps=5)
    summary = summarize_run(folder)
    assert (summary.status, summary.checkpoints[-1].step) == ("interrupted", summary.steps)
    assert not (folder / "result.json").exists()
    assert list(folder.glob("*.part")) == []
    validate_trace(json.loads((folder / "trace.json").read_text()))

    steps = summary.steps + 3
    resumed = run(train(folder, "--resume", "--workers", "1", *warm_up, steps=steps))
    assert resumed.returncode == 0, resumed.stderr
    assert run(train(whole, *warm_up, steps=steps)).returncode == 0
    done = run(elaswave("inspect", "diff", str(folder), str(whole)))
    assert (done.returncode, done.stdout.startswith("same computation")) == (0, True), done.stdout
    events = read_events(folder / "events.jsonl")
    assert sum(isinstance(event, RunStarted) for event in events) == 2
    assert [event.outcome for event in events if isinstance(event, RunFinished)] == ["interrupted", "finished"]

    # A run that goes on once more has no result again until its new end, and bad input changes nothing.
    assert run(train(folder, "--resume", "--workers", "1", *warm_up, steps=0)).returncode == 2
    assert (folder / "result.json").exists()
    run_until_terminated(train(folder, "--resume", *warm_up, steps=100_000), folder, steps=steps + 3)
    assert not (folder / "result.json").exists() and not (folder / "digests.json").exists()
