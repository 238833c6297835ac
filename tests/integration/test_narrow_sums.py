"""Sums of 48 bits in whole jobs: neither layout nor loss shows, the width does."""

from pathlib import Path

import pytest
from tests.integration.jobs import run_job

NARROW = {"elastic.accumulator_bits": 48, "model.dropout": 0.0, "run.steps": 3}


@pytest.mark.slow
def test_neither_layout_nor_kill_shows_but_the_width_does(tmp_path: Path) -> None:
    one, killed = (
        run_job(tmp_path / str(len(widths)), NARROW | {"layout.widths": widths}, faults=faults)
        for widths, faults in (([1], []), ([2, 2], ["kill:1@2:backward+1"]))
    )
    assert killed.result.recoveries
    assert killed.computation == one.computation
    wide = run_job(tmp_path / "wide", NARROW | {"layout.widths": [1], "elastic.accumulator_bits": 64})
    assert wide.result.state_digest != one.result.state_digest


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then", "tried_again"), [(64, 48, True), (48, 64, False)])
def test_a_resumed_run_may_have_another_width(first: int, then: int, tried_again: bool, tmp_path: Path) -> None:
    """The grids of the checkpoint are too fine for 48 bits: one more attempt, on those that its gradients ask for."""
    settings = NARROW | {"optimizer.schedule": "constant"}
    found = []
    for widths in ([1], [1, 2]):
        folder = tmp_path / str(len(widths))
        for bits, steps in ((first, 2), (then, 4)):
            changes = {"elastic.accumulator_bits": bits, "layout.widths": widths, "run.steps": steps}
            job = run_job(folder, settings | changes, resume=steps > 2)
        found.append(job.computation)
        retried = [line for line in (folder / "events.jsonl").read_text().splitlines() if "could overflow" in line]
        assert bool(retried) is tried_again
    assert found[0] == found[1]
