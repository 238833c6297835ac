"""A whole host, or most of a stage, is killed: several workers at one instant, in real processes."""

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


def test_three_of_a_stage_are_lost_at_one_instant_and_it_is_one_event(tmp_path, undisturbed):
    settings = {
        "run.steps": STEPS,
        "layout.widths": [4],
        "elastic.num_followers": 3,
        "elastic.respawn": False,
        "elastic.max_failures_per_hour": 1,
    }
    job = run_job(tmp_path / "run", settings, faults=["kill:1+0+3@3:backward"])
    assert (job.result.losses, job.digests) == (undisturbed.result.losses, undisturbed.digests)
    lost = [recovery for recovery in job.result.recoveries if recovery.kind == "lost"]
    assert {recovery.worker for recovery in lost} == {0, 1, 3} and len(lost) == 3
    assert {recovery.outcome for recovery in lost} == {"retried"}, "no return to a checkpoint"
    assert len({recovery.generation for recovery in lost}) == 1, "one decision"
    assert {recovery.step for recovery in lost} == {3}
