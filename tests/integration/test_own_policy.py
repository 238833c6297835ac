"""`elaswave train --policy file.py:function`: the layout of a person's own planner is in force after a kill."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import SMALL, Job, run_job

from elaswave.observability.run_folder import EVENTS_FILE

FLAT = """
from elaswave.planning.policy.policy_parts import make_plan, rectangle

def plan(cluster, costs, allocation, event):
    flat = rectangle(
        cluster, costs, num_stages=1, num_microbatches=allocation.num_microbatches, schedule=allocation.schedule
    )
    return make_plan("flat", cluster, costs, flat, pause_s=1.0, lost_steps=0.0, reason="one stage of all workers")
"""
"""Every worker runs the whole model, which no layout of survivors does."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("reference") / "run", SMALL)


def killed(tmp_path: Path, body: str, more: Mapping[str, Any] = {}) -> Job:
    (tmp_path / "own.py").write_text(body)
    settings = SMALL | {"elastic.policy": f'"{tmp_path / "own.py"}:plan"'} | more
    return run_job(tmp_path / "run", settings, faults=["kill:1@5:backward"])


@pytest.mark.slow
def test_the_policys_layout_is_in_force_and_the_bits_stay(tmp_path: Path, reference: Job) -> None:
    job = killed(tmp_path, FLAT)
    assert job.computation == reference.computation
    before, after = job.result.generations
    assert {len(route) for route in before.layout.routes} == {2}
    assert {len(route) for route in after.layout.routes} == {1}
    assert {hop.worker for route in after.layout.routes for hop in route} == {0, 2, 3}
    assert f"{tmp_path / 'own.py'}:plan: one stage of all workers" in after.reason
    assert job.result.config["elastic"]["policy"] == f"{tmp_path / 'own.py'}:plan"


@pytest.mark.slow
def test_one_that_raises_leaves_the_survivors_where_they_are_and_says_so(tmp_path: Path, reference: Job) -> None:
    job = killed(tmp_path, "def plan(*_): raise KeyError('no such thing')")
    assert job.computation == reference.computation
    _, after = job.result.generations
    assert {len(route) for route in after.layout.routes} == {2}
    what = f"policy {tmp_path / 'own.py'}:plan raised KeyError: 'no such thing'"
    assert what in after.reason and "survivors keep their stages" in after.reason
    assert what in (job.run_dir / EVENTS_FILE).read_text()
    assert any(what in message for message in job.messages)


@pytest.mark.slow
def test_it_plans_for_the_worker_that_joins_in_place_of_the_lost_one(tmp_path: Path) -> None:
    more = {"elastic.respawn": True, "elastic.rebalance": True, "run.steps": 120}
    undisturbed = run_job(tmp_path / "undisturbed", SMALL | more)
    job = killed(tmp_path, FLAT, more)
    assert job.computation == undisturbed.computation
    last = job.result.generations[-1]
    assert last.layout.workers == (0, 2, 3, 4) and {len(route) for route in last.layout.routes} == {1}
    assert f"{tmp_path / 'own.py'}:plan: one stage of all workers" in last.reason
