"""Checkpoints of real processes: those that a vote asks for, and what a run can go on from."""

from pathlib import Path

import pytest
from tests.integration.jobs import QuietReporter, run_job

from elaswave.checkpoints.checkpoint import find_newest_checkpoint
from elaswave.errors import DataError
from elaswave.observability.events import CheckpointWritten, read_events


@pytest.mark.parametrize("phase", [pytest.param("vote", marks=pytest.mark.slow), "apply"])
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
    undisturbed = run_job(tmp_path / "reference", {"run.steps": 5, "run.checkpoint_every_s": 0})
    assert job.computation == undisturbed.computation
    assert [record.step for record in undisturbed.result.checkpoints] == [5]


@pytest.mark.slow
def test_a_run_goes_on_from_older_checkpoints_but_not_with_other_data(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"All happy families are alike. " * 100)
    run_dir, settings = tmp_path / "run", {"data.source": str(text), "optimizer.schedule": "constant"}
    steps = {"run.checkpoint_every": 2, "run.keep_checkpoints": 2}
    run_job(run_dir, {**settings, **steps, "run.steps": 6})
    content = text.read_bytes()
    text.write_bytes(content.replace(b"happy", b"sorry"))
    with pytest.raises(DataError, match="is not the data that this run was trained on: it still has 3000 bytes"):
        run_job(run_dir, {**settings, "run.steps": 7}, resume=True)
    text.write_bytes(content)
    # A later checkpoint that is damaged, though its size is right, neither is used nor pushes out new ones.
    shard = next((run_dir / "checkpoints" / "step-00000006").glob("*.distcp"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    reporter = QuietReporter()
    late = {**settings, "run.checkpoint_every": 1, "run.keep_checkpoints": 1, "run.steps": 5}
    job = run_job(run_dir, late, resume=True, reporter=reporter)
    assert any("checkpoint step-00000006 is not used" in message for message in reporter.messages)
    assert sorted(path.name for path in run_dir.glob("checkpoints/*")) == ["step-00000005", "step-00000006.damaged"]
    assert job.computation == run_job(tmp_path / "reference", {**settings, "run.steps": 5}).computation
