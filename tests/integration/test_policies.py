"""Every policy in real jobs: baselines go on as they plan, ElasWave changes its layout later, and the bits stay."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Job, run_job
from tests.integration.waits import HeldUntil

from elaswave.config.cluster import cpu_under_quota
from elaswave.errors import FrequencyError
from elaswave.observability.events import LayoutChosen, StepCommitted, StepTimeMeasured, StepTimePredicted, read_events
from elaswave.observability.run_folder import EVENTS_FILE
from elaswave.worker.frequency import CGROUP_ROOT, CgroupFrequency

EMULATED = {
    "device.kind": '"emulated"',
    "device.model": '"gpt2-small"',
    "device.name": '"a100"',
    "device.time_scale": 10.0,
    "model.num_layers": 12,
    "model.hidden_size": 16,
    "model.context_length": 8,
    "batch.num_microbatches": 6,
    "batch.microbatch_size": 1,
    "layout.stages": 2,
    "layout.replicas": 3,
    "run.steps": 12,
    "elastic.restart_s": 0.2,
    "elastic.rebalance": True,
}
"""A step takes 0.2 s, long enough for a plan to be made in the next ones."""


SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The undisturbed run."""
    return run_job(tmp_path_factory.mktemp("reference") / "run", EMULATED)


def layouts(job: Job) -> list[LayoutChosen]:
    return [event for event in read_events(job.run_dir / EVENTS_FILE) if isinstance(event, LayoutChosen)]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=SLOW)
        for name in (
            "recycle_rerouting",
            "oobleck_aligned",
            "recycle_normalized",
            "torchft_batch_kept",
            "full_restart",
        )
    ],
)
def test_a_baseline_that_keeps_the_batch_keeps_the_bits(tmp_path: Path, reference: Job, policy: str) -> None:
    settings = EMULATED | {"elastic.policy": f'"{policy}"', "run.checkpoint_every": 2}
    job = run_job(tmp_path / "run", settings, faults=["kill:1@5:backward", "kill:5@8:gather"])
    assert job.computation == reference.computation
    assert [record.generation for record in job.result.generations] == [1, 2, 3]
    assert all(record.reason for record in job.result.generations)
    expected = "starts over" if policy == "full_restart" else policy
    assert all(expected in record.reason for record in job.result.generations[1:])
    if policy == "torchft_batch_kept":  # whole groups have left
        assert {len(route) for route in job.result.generations[1].layout.routes} == {2}
        busy = {hop.worker for route in job.result.generations[1].layout.routes for hop in route}
        assert len(busy) == 4 and set(job.result.generations[1].layout.workers) == {0, 2, 3, 4, 5}


@SLOW
def test_a_full_restart_without_a_checkpoint_begins_again(tmp_path: Path, reference: Job) -> None:
    job = run_job(tmp_path / "run", EMULATED | {"elastic.policy": '"full_restart"'}, faults=["kill:1@5:vote"])
    assert job.computation == reference.computation
    assert [record.first_step for record in job.result.generations] == [1, 1]


@SLOW
def test_spares_take_the_places_of_lost_workers_in_a_full_restart(tmp_path: Path, reference: Job) -> None:
    settings = EMULATED | {"elastic.policy": '"full_restart_spares"', "run.checkpoint_every": 2, "run.steps": 40}
    job = run_job(tmp_path / "run", settings, faults=["join@1", "join@1", "kill:1@32:backward"])
    whole = run_job(tmp_path / "whole", EMULATED | {"run.steps": 40})
    assert job.computation == whole.computation
    *_, before, after = (record.layout for record in job.result.generations)
    assert before.idle == (6, 7), "workers that have joined stand by"
    busy = {hop.worker for route in after.routes for hop in route}
    assert len(busy) == 6 and 1 not in busy and busy & {6, 7}, "and are used when all begin again"
    assert after.num_microbatches == 6


@pytest.mark.slow
def test_torchfts_batch_shrinks(tmp_path: Path, reference: Job) -> None:
    job = run_job(tmp_path / "run", EMULATED | {"elastic.policy": '"torchft"'}, faults=["kill:1@5:backward"])
    before, after = (record.layout for record in job.result.generations)
    assert (before.num_microbatches, after.num_microbatches) == (6, 4)
    assert job.result.losses[:4] == reference.result.losses[:4]
    assert job.result.losses[4:] != reference.result.losses[4:]
    assert len(job.result.losses) == 12


@pytest.mark.slow
def test_steps_that_are_repeated_with_a_smaller_batch_have_other_losses(tmp_path: Path, reference: Job) -> None:
    """Without copies a loss leads back to the checkpoint of step 4, and step 5 is repeated by the groups that are left:
    in the log and in the result stands what it has come to the second time."""
    settings = EMULATED | {"elastic.policy": '"torchft"', "elastic.num_followers": 0, "run.checkpoint_every": 2}
    is_durable = (tmp_path / "run" / "checkpoints" / "step-00000004").exists
    job = run_job(tmp_path / "run", settings, faults=["kill:1@6:backward"], probe=HeldUntil(1, 6, is_durable))
    assert [record.first_step for record in job.result.generations] == [1, 5]
    assert job.result.losses[:4] == reference.result.losses[:4]
    assert job.result.losses[4] != reference.result.losses[4]
    committed = [event for event in read_events(job.run_dir / EVENTS_FILE) if isinstance(event, StepCommitted)]
    assert {event.step: event.loss for event in committed} == dict(enumerate(job.result.losses, start=1))
    tokens = {event.step: round(event.tokens_per_s * event.duration_s) for event in committed}
    assert list(tokens.values()) == [6 * 8] * 4 + [4 * 8] * 8


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(["kill:1@3:backward"], marks=pytest.mark.slow),
        pytest.param(["kill:1@2:forward", "kill:4@7:gather"], marks=pytest.mark.slow),
        pytest.param(["kill:4@2:vote", "kill:coordinator@4", "kill:2@7:apply+1"], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_elaswave_changes_the_layout_afterwards(tmp_path: Path, reference: Job, faults: list[str]) -> None:
    job = run_job(tmp_path / "run", EMULATED, faults=faults)
    assert job.computation == reference.computation
    changes = [event for event in layouts(job) if event.change]
    assert changes, "no change was planned"
    for event in changes:
        assert event.predicted_step_s is not None and event.reason.startswith("elaswave: ")
    recovered = job.result.recoveries
    assert all(recovery.critical_bytes == 0 for recovery in recovered)


@pytest.mark.slow
def test_every_layout_says_what_was_predicted_and_what_it_took(tmp_path: Path) -> None:
    job = run_job(tmp_path / "run", EMULATED | {"run.steps": 24}, faults=["kill:1@8:backward"])
    events = read_events(job.run_dir / EVENTS_FILE)
    measured = [event for event in events if isinstance(event, StepTimeMeasured)]
    assert len(measured) >= 2 and measured[0].num_steps >= 4
    told: set[tuple[int, int]] = set()  # predictions are in the log before what they are about
    for event in events:
        if isinstance(event, StepTimePredicted | LayoutChosen) and event.predicted_step_s is not None:
            told.add((event.generation, event.change))
        elif isinstance(event, StepTimeMeasured) and event.predicted_step_s is not None:
            assert (event.generation, event.change) in told
    first, last = job.result.generations[0], job.result.generations[-1]
    for record in (first, last):
        assert record.predicted_step_s is not None and record.measured_step_s is not None
        assert record.schedule in ("1f1b", "zero-bubble", "zero-bubble-h2")
        # No pace is asserted: this machine may be busy. An emulated step cannot be shorter than its actions.
        assert record.measured_step_s > 0.5 * record.predicted_step_s


@pytest.mark.slow
def test_without_rebalancing_the_interim_layout_stays(tmp_path: Path, reference: Job) -> None:
    job = run_job(tmp_path / "run", EMULATED | {"elastic.rebalance": False}, faults=["kill:1@3:backward"])
    assert job.computation == reference.computation
    assert [(record.generation, record.change) for record in job.result.generations] == [(1, 0), (2, 0)]


@pytest.mark.slow
def test_frequency_levels_do_not_show_in_the_bits(tmp_path: Path, reference: Job) -> None:
    settings = EMULATED | {"device.name": '"ascend-910b"', "device.frequency": '"emulated"'}
    job = run_job(tmp_path / "run", settings, faults=["kill:1@3:backward"])
    assert job.computation == reference.computation


def _need_groups() -> None:
    try:
        CgroupFrequency(os.getpid(), f"elaswave-test-{os.getpid()}").close()
    except FrequencyError as error:
        pytest.skip(f"no writable CPU controller here: {error}")


def _own_quota() -> float:
    """Share of a core that the group of this process may use."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next((path for _, controllers, path in lines if "cpu" in controllers.split(",")), None)
    if path is None:  # version 2
        quota, period = (CGROUP_ROOT / lines[0][2].lstrip("/") / "cpu.max").read_text().split()
        return int(quota) / int(period)
    controllers = next(each for _, each, own in lines if own == path and "cpu" in each.split(","))
    folder = CGROUP_ROOT / controllers / path.lstrip("/")
    return int((folder / "cpu.cfs_quota_us").read_text()) / int((folder / "cpu.cfs_period_us").read_text())


@pytest.mark.slow
def test_quotas_are_in_force_from_the_start_and_a_lost_workers_share_goes_to_the_others(tmp_path: Path) -> None:
    _need_groups()

    class Looks:
        def reached(self, phase: str, index: int, engine: Any) -> None:
            if phase == "vote":
                (tmp_path / f"quota-{engine.worker}-{engine.step}").write_text(str(_own_quota()))

    settings = {"device.frequency": '"cgroup"', "device.quota": 0.4, "elastic.rebalance": True, "run.steps": 30}
    reference = run_job(tmp_path / "reference", {"run.steps": 30})
    faults = ["kill:1@3:backward", "slow:3@5:0.5"]
    job = run_job(tmp_path / "run", settings, probe=Looks(), faults=faults)
    assert job.computation == reference.computation
    quotas = {name: float((tmp_path / f"quota-{name}").read_text()) for name in ("0-1", "1-1", "2-2", "3-2")}
    assert set(quotas.values()) == {0.4}
    last = [event for event in layouts(job) if event.first_step <= 30][-1]
    assert last.change and last.levels, last.reason
    levels = cpu_under_quota(0.4).levels
    for worker in (0, 2, 3):
        share = float((tmp_path / f"quota-{worker}-30").read_text())
        left = 0.5 if worker == 3 else 1.0  # of a quota, the fault takes a part
        assert share == pytest.approx(left * 0.4 * levels[last.levels.get(worker, 0)].speed, abs=1e-4)


def test_workers_get_groups_of_their_own_and_leave_none_behind(tmp_path: Path) -> None:
    _need_groups()

    class Looks:
        def reached(self, phase: str, index: int, engine: Any) -> None:
            if phase == "vote" and engine.step == 2:
                (tmp_path / f"group-{engine.worker}").write_text(Path("/proc/self/cgroup").read_text())

    before = set(CGROUP_ROOT.glob("**/elaswave-*"))
    job = run_job(
        tmp_path / "run", {"device.frequency": '"cgroup"', "run.steps": 5}, probe=Looks(), faults=["kill:1@3:backward"]
    )
    groups = [path.read_text() for path in sorted(tmp_path.glob("group-*"))]
    assert len(groups) == 4 and all(f"-worker-{worker}" in text for worker, text in enumerate(groups))
    assert len(job.result.losses) == 5
    assert set(CGROUP_ROOT.glob("**/elaswave-*")) <= before
