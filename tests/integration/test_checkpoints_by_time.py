"""Checkpoints that a vote asks for, with real processes: the worker that asks is killed around its vote."""

from pathlib import Path

import pytest
from tests.integration.jobs import run_job

from elaswave.observability.events import CheckpointWritten, read_events
from elaswave.state.checkpoint import find_newest_checkpoint


@pytest.mark.parametrize("phase", ["vote", "apply"])
def test_a_checkpoint_by_time_survives_the_worker_that_asks_for_it(tmp_path: Path, phase: str) -> None:
    # So short that the very first vote asks for a checkpoint, and long runs of steps are never without one.
    settings = {"run.steps": 5, "run.checkpoint_every_s": 1e-3, "run.keep_checkpoints": 9}
    job = run_job(tmp_path / "run", settings, faults=(f"kill:0@1:{phase}",))
    events = read_events(job.run_dir / "events.jsonl")
    written = [event.checkpoint.step for event in events if isinstance(event, CheckpointWritten)]
    assert written[0] == 1 and written[-1] == 5
    assert written == sorted(set(written)), "none is written twice"
    search = find_newest_checkpoint(job.run_dir)
    assert search.newest is not None and search.newest.step == 5 and search.skipped == ()
    undisturbed = run_job(tmp_path / "twin", {"run.steps": 5, "run.checkpoint_every_s": 0})
    assert job.computation == undisturbed.computation
    assert [record.step for record in undisturbed.result.checkpoints] == [5]
