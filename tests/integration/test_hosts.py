"""A whole host is killed: all of its workers at one instant, in real processes."""

import pytest
from tests.integration.jobs import run_job

STEPS = 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_job(tmp_path_factory.mktemp("undisturbed") / "run", {"run.steps": STEPS})


@pytest.mark.parametrize(
    ("widths", "hosts", "fault"),
    [
        ([2, 2], ["a", "b"], "kill-host:a@3:backward"),
        pytest.param([2, 1], ["a=1", "b=2"], "kill-host:b@3:apply", marks=pytest.mark.slow),
        ([1, 1, 1], ["r/a", "r/b", "s/a"], "kill-host:r@2:vote"),
    ],
)
def test_a_host_is_lost_and_nothing_with_it(tmp_path, undisturbed, widths, hosts, fault):
    settings = {
        "run.steps": STEPS,
        "layout.widths": widths,
        "elastic.hosts": hosts,
        "elastic.respawn": False,
    }
    job = run_job(tmp_path / "run", settings, faults=[fault])
    assert (job.result.losses, job.digests) == (undisturbed.result.losses, undisturbed.digests)
    assert len([recovery for recovery in job.result.recoveries if recovery.kind == "lost"]) == 2
    said = "\n".join(job.messages)
    assert "the job survives the loss of any one of" in said
    assert "all copies are on one host" in said
    assert "the only one that is left" in said
