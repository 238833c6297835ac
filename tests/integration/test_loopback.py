"""Jobs on the loopback device, which has an accelerator's rules: the same bits as on the host, whatever is lost."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Job, run_job

from elaswave.observability.events import TimingsMeasured, read_events
from elaswave.observability.run_folder import EVENTS_FILE

STEPS = {"run.steps": 8, "optimizer.schedule": "constant"}
NO_CLIPPING = {"optimizer.grad_clip": 0.0}
"""Norms are added in another order on devices than on the host."""
LOOPBACK = {"device.kind": "loopback"}
ONE = {"layout.stages": 1, "layout.replicas": 1}
FOUR = {"layout.stages": 2, "layout.replicas": 2}

MODELS: dict[str, dict[str, Any]] = {
    "float32": {"model.dropout": 0.1},
    "bfloat16": {"model.family": "llama", "model.dtype": "bfloat16", "elastic.accumulator_bits": 48},
}


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """The training of each model by one worker on the host, made when it is first asked for."""

    @functools.cache
    def job_of(model: str) -> Job:
        return run_job(tmp_path_factory.mktemp("host"), MODELS[model] | STEPS | NO_CLIPPING | ONE)

    return job_of


@pytest.mark.parametrize(
    ("model", "settings", "faults"),
    [
        ("float32", FOUR, ["kill:3@4:backward"]),
        pytest.param(
            "bfloat16",
            {"layout.widths": [1, 2], "layout.schedule": "zero-bubble-h2"},
            [],
            marks=pytest.mark.slow,
        ),
        pytest.param("float32", ONE, [], marks=pytest.mark.slow),
        pytest.param("float32", FOUR, ["kill:0@3:forward", "join@5"], marks=pytest.mark.slow),
        pytest.param("float32", FOUR, ["kill:2@5:reduce", "drain:1@6"], marks=pytest.mark.slow),
        pytest.param("float32", FOUR, ["kill:1@4:vote", "kill:2@6:gather"], marks=pytest.mark.slow),
        pytest.param("bfloat16", FOUR, ["kill:3@4:apply+2"], marks=pytest.mark.slow),
        pytest.param("float32", FOUR, ["kill:0@4:apply+1"], marks=pytest.mark.slow),
        pytest.param("bfloat16", {"layout.widths": [2, 1, 2], "model.recompute": True}, [], marks=pytest.mark.slow),
    ],
)
def test_a_device_apart_from_the_host_computes_the_same(
    on_the_host: Callable[[str], Job], model: str, settings: dict[str, Any], faults: list[str], tmp_path: Path
) -> None:
    job = run_job(tmp_path, MODELS[model] | STEPS | NO_CLIPPING | LOOPBACK | settings, faults=faults)
    assert job.computation == on_the_host(model).computation
    lost = [each for each in job.result.recoveries if each.kind == "lost"]  # the others came or left
    assert len(lost) == sum(fault.startswith("kill") for fault in faults)


@pytest.mark.slow
def test_with_clipping_the_layout_does_not_show_and_a_run_goes_on_on_the_other_device(tmp_path: Path) -> None:
    settings = MODELS["float32"] | STEPS | {"optimizer.grad_clip": 0.5, "run.checkpoint_every": 4}
    alone = run_job(tmp_path / "alone", settings | LOOPBACK | ONE)
    assert run_job(tmp_path / "four", settings | LOOPBACK | FOUR).computation == alone.computation
    (tmp_path / "four" / "result.json").unlink()
    longer = settings | {"run.steps": 10}
    resumed = run_job(tmp_path / "four", longer | {"layout.stages": 1, "layout.replicas": 2}, resume=True)
    assert len(resumed.result.losses) == 10 and resumed.result.losses[:8] == alone.result.losses


@pytest.mark.slow
def test_what_devices_tell_of_themselves_is_in_the_events(tmp_path: Path) -> None:
    run_job(tmp_path / "device", LOOPBACK | ONE | {"run.steps": 6})
    run_job(tmp_path / "host", ONE | {"run.steps": 6})
    told = {name: [each for each in read_events(tmp_path / name / EVENTS_FILE) if isinstance(each, TimingsMeasured)]
            for name in ("device", "host")}  # fmt: skip
    assert told["device"] and told["host"]
    for event in told["device"]:
        gauges = event.devices[0]
        assert gauges.memory_used_bytes and gauges.memory_total_bytes and gauges.utilization is None
    assert not any(event.devices for event in told["host"])
