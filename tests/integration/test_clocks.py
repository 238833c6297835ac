"""Processes whose clocks show different times: nothing that a run tells depends on them."""

import time
from pathlib import Path

import pytest
from tests.integration.jobs import run_job

from elaswave.coordinator import driver
from elaswave.coordinator.job_spec import CoordinatorSetup
from elaswave.coordinator.records import recoveries
from elaswave.launcher import supervisors
from elaswave.observability.processes import clock_here


@pytest.mark.slow
def test_each_coordinator_may_have_another_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hosts that were started weeks apart: ahead of the workers' clock the first one, behind it the second."""
    run, here, real = supervisors.run_coordinator, clock_here(), time.monotonic
    offsets_s = iter((1e6, -1e6))

    def run_elsewhere(setup: CoordinatorSetup) -> int:
        """In the coordinator's process."""
        offset_s = offset_of[len(setup.coordinator_ends_s)]
        monkeypatch.setattr(time, "monotonic", lambda: real() + offset_s)
        for module in (driver, recoveries):
            monkeypatch.setattr(module, "clock_here", lambda: f"{here} {offset_s:+g}")
        # What the agent beside it knows is by the clock of their host.
        ends_s = tuple(at_s + offset_s for at_s in setup.coordinator_ends_s)
        job = setup.job._replace(started_s=setup.job.started_s + offset_s)
        return run(setup._replace(job=job, coordinator_ends_s=ends_s))

    offset_of = list(offsets_s)
    monkeypatch.setattr(supervisors, "run_coordinator", run_elsewhere)
    settings = {"run.steps": 16}
    begun_s = time.monotonic()
    job = run_job(tmp_path / "run", settings, faults=["kill:1@3", "kill:coordinator@8", "kill:2@12:backward"])
    lasted_s = time.monotonic() - begun_s
    result = job.result
    assert sorted(recovery.kind for recovery in result.recoveries) == ["coordinator", "lost", "lost"]
    for recovery in result.recoveries:
        parts_s = (recovery.total_s, recovery.agree_s, recovery.redo_s, recovery.plan_s)
        assert all(0 <= part_s < lasted_s for part_s in parts_s), recovery
        assert recovery.kind != "lost" or recovery.detect_s is None, "a fault's time stamp is by the workers' clock"
