"""All workers of a stage hold its state, as is the default: groups of losses at one instant, joins that fill up later.

Real processes and real kills; no bit differs from the undisturbed job.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Calm, Job, run_job, small_config
from tests.integration.waits import WaitsFor, log_of

from elaswave.engine.blueprint import Blueprint
from elaswave.errors import RecoveryError
from elaswave.types import WHOLE_STAGE

AUTO: dict[str, Any] = {"elastic.num_followers": "auto"}


def _lost(job: Job) -> set[int | None]:
    return {recovery.worker for recovery in job.result.recoveries if recovery.kind == "lost"}


@pytest.mark.parametrize(
    ("widths", "fault", "lost"),
    [
        ("[4]", "kill:0+1+2@6:backward", {0, 1, 2}),
        pytest.param("[4]", "kill:1+2+3@6:vote", {1, 2, 3}, marks=pytest.mark.slow),
        pytest.param("[3,2]", "kill:0+2+4@6:gather", {0, 2, 4}, marks=pytest.mark.slow),
        pytest.param("[3,2]", "kill:0+1+3@6:apply", {0, 1, 3}, marks=pytest.mark.slow),
    ],
)
def test_all_but_one_of_a_stage_are_lost_at_one_instant(
    tmp_path: Path, calm: Calm, widths: str, fault: str, lost: set[int]
) -> None:
    job = run_job(tmp_path, {**AUTO, "layout.widths": widths}, faults=[fault])
    assert job.computation == calm({}).computation
    assert _lost(job) == lost
    assert all(recovery.outcome != "rolled_back" for recovery in job.result.recoveries)
    assert sum(recovery.critical_bytes for recovery in job.result.recoveries) == 0, "all that is needed is there"


def test_with_one_follower_the_same_group_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="elastic.num_followers = 1 survives any 1 .* and auto all of a stage"):
        run_job(tmp_path, {"layout.widths": "[4]"}, faults=["kill:0+1+2@6:backward"])


def test_a_joiner_fills_up_and_then_stands_in_for_all_others(tmp_path: Path, calm: Calm) -> None:
    """It works as soon as it has what it owns; some steps later all others can go."""
    job = run_job(
        tmp_path,
        {**AUTO, "layout.widths": "[3]", "run.steps": 40},
        probe=WaitsFor(log_of(tmp_path), "worker 3 has joined", step=8),
        faults=["kill:1@4", "join@8", "kill:0+2@34"],
    )
    assert job.computation == calm({"run.steps": 40}).computation
    assert _lost(job) == {0, 1, 2}
    assert job.result.generations[-1].layout.workers == (3,)


def test_where_memory_is_short_a_stage_has_as_many_copies_as_fit(tmp_path: Path, calm: Calm) -> None:
    """42,000 parameters of 16 bytes: 0.67 MB for a whole copy, of which four workers share one each."""
    settings = {**AUTO, "layout.widths": "[4]", "elastic.copies_memory": 0.25}
    numbers = []
    for memory in (1 << 30, 1_500_000, 1_000):
        found = small_config({**settings, "elastic.worker_memory_bytes": memory})
        numbers += [stage.num_followers for stage in Blueprint(found).layout.stages]
    assert numbers[0] == WHOLE_STAGE and numbers[1] == 2 and numbers[2] == 1
    job = run_job(tmp_path, {**settings, "elastic.worker_memory_bytes": 1_500_000}, faults=["kill:1+3@6:backward"])
    assert job.computation == calm({}).computation
