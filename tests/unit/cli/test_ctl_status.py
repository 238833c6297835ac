"""What `elaswave ctl RUN status` prints, for people and for programs."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from elaswave.channel.messages.operator import (
    CheckpointStatus,
    CopiesStatus,
    JobOver,
    JobStatus,
    RecoveryStatus,
    StageStatus,
    WorkerStatus,
)
from elaswave.cli.ctl import StatusDisplay, ctl_group, render_status
from elaswave.types import Gauges

RUN = Path("runs/a")
WORKER = WorkerStatus(
    worker=0,
    role="trains",
    stage=0,
    layers=(0, 3),
    num_microbatches=4,
    speed=0.5,
    level=0,
    step=8,
    doing="input gradient",
    waiting_on=(1,),
    last_heartbeat_s=0.14,
    num_owned_blocks=14,
    num_followed_blocks=15,
)
IDLE = WorkerStatus(
    worker=1,
    role="idle",
    stage=None,
    layers=None,
    num_microbatches=0,
    speed=1.0,
    level=0,
    step=None,
    doing=None,
    waiting_on=(),
    last_heartbeat_s=None,
    num_owned_blocks=None,
    num_followed_blocks=None,
)
STATUS = JobStatus(
    state="training",
    step=7,
    total_steps=300,
    loss=4.25,
    rate=1234.5,
    rate_unit="tokens/s",
    step_s=0.5,
    predicted_step_s=0.25,
    left_s=3999.6,
    layout="1x1+1",
    stages=[StageStatus(layers=(0, 3), workers=(0,))],
    num_microbatches=4,
    generation=2,
    term=3,
    workers=[WORKER, IDLE],
    copies=CopiesStatus(num_blocks=29, num_wanted=29, num_held=30),
    num_recoveries=1,
    recoveries=[RecoveryStatus(kind="lost", worker=2, step=5, generation=2, outcome="retried", total_s=0.031)],
    checkpoints=[CheckpointStatus(step=4, path="checkpoints/step-00000004", num_bytes=10)],
    writing=[6],
    under_way=["change 3 to 2+1 layers on 1+1 workers: as asked for"],
)


def test_a_job_as_lines() -> None:
    assert render_status(STATUS, RUN, 100, is_styled=False) == [
        "run folder runs/a",
        "step 7/300  loss 4.2500  1,234 tokens/s",
        "a step takes 500.0 ms, predicted 250.0 ms, about 1:06:40 left",
        "layout 1x1+1, 4 micro-batches, generation 2, coordinator 3, training",
        "",
        "worker  stage  layers  micro-batches  speed  owned  followed  step  doing                      heard",
        "     0  0      0 to 2              4   0.50     14        15     8  input gradient, waits  0.1 s ago",
        "     1  idle        -              0   1.00      -         -     -  -                              -",
        "",
        "29 blocks; live copies beside their owners: 29 of 29",
        "checkpoints: step 4; being written: step 6",
        "1 recovery",
        "  worker 2 lost in step 5, generation 2, retried, 31.0 ms",
        "under way: change 3 to 2+1 layers on 1+1 workers: as asked for",
    ]


def test_a_job_that_is_only_starting() -> None:
    young = replace(
        STATUS,
        state="starting",
        step=0,
        loss=None,
        rate=None,
        step_s=None,
        predicted_step_s=None,
        left_s=None,
        copies=CopiesStatus(num_blocks=29, num_wanted=29, num_held=None),
        num_recoveries=0,
        recoveries=[],
        checkpoints=[],
        writing=[],
        under_way=[],
    )
    lines = render_status(young, RUN, 100, is_styled=False)
    assert lines[1:3] == ["step 0/300", "a step not measured yet, not predicted yet"]
    assert lines[-4:] == [
        "29 blocks; live copies beside their owners: not known yet of 29",
        "checkpoints: none yet",
        "0 recoveries",
        "under way: nothing",
    ]


def test_one_status_after_the_other_without_a_terminal() -> None:
    stream = io.StringIO()
    with StatusDisplay(RUN, stream, as_json=True) as display:
        display.show(STATUS)
        display.show(replace(STATUS, loss="nan"))
        display.over(JobOver(outcome="stopped", reason="stopped after step 9"))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("loss") for line in lines] == [4.25, "nan", None]
    assert lines[-1] == {"outcome": "stopped", "reason": "stopped after step 9"}
    stream = io.StringIO()
    with StatusDisplay(RUN, stream, as_json=False) as display:
        display.show(STATUS)
        display.over(JobOver(outcome="finished", reason=""))
    assert stream.getvalue().splitlines()[-1] == "the job is over: finished" and "\033" not in stream.getvalue()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["migrate"], "give --layers, --widths, or both"),
        (["migrate", "--layers", "2,x"], "'2,x' is no list of whole numbers with commas between them"),
        (["migrate", "--widths", "0,3"], "has a number below 1"),
        (["drain"], "Missing argument 'WORKER'"),
        (["join", "0"], "0 is not in the range x>=1"),
        (["status", "--timeout", "0"], "0.0 is not in the range x>0"),
        (["halt"], "No such command 'halt'"),
    ],
)
def test_bad_input_is_answered_without_a_job(tmp_path: Path, arguments: list[str], problem: str) -> None:
    done = CliRunner().invoke(ctl_group, [str(tmp_path), *arguments])
    assert (done.exit_code, problem in done.output) == (2, True), done.output


def test_devices_that_tell_of_themselves_have_a_column() -> None:
    gauges = Gauges(
        memory_used_bytes=41_250_000_000, memory_total_bytes=80_000_000_000, utilization=0.97, power_w=412.5
    )
    status = replace(
        STATUS, workers=[replace(WORKER, device=gauges), IDLE, replace(WORKER, device=Gauges(power_w=9.0))]
    )
    lines = render_status(status, RUN, 200, is_styled=False)
    assert any(line.rstrip().endswith("device") for line in lines)
    assert any("41.2/80.0 GB, 97%, 412 W" in line for line in lines)
    assert any(line.rstrip().endswith("9 W") for line in lines)
    assert not any("GB" in line or "device" in line for line in render_status(STATUS, RUN, 200, is_styled=False))
