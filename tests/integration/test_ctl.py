"""`elaswave ctl` against real jobs: what it says, what becomes of it, and who can talk to whom."""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import SMALL, as_toml, run_job

from elaswave.channel.messages.operator import AskStatus, JobStatus, StatusAnswer
from elaswave.cli.main import main
from elaswave.cli.operator_client import OperatorClient
from elaswave.errors import ControlError
from elaswave.job.keys import KeyRole, write_role_key
from elaswave.observability.events import LayoutChosen, read_events
from elaswave.observability.processes import read_processes, signal_process
from elaswave.observability.result import read_result
from elaswave.observability.run_folder import CONTROL_FILE

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
"""Bound for whatever must happen."""
FOREVER = 100_000
"""Steps of a job that ends because it is told to."""


@contextlib.contextmanager
def job(run_dir: Path, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A job in a process of its own, killed at the end if it has not ended by then."""
    values = {**SMALL, "layout.widths": "[1,2]", **{name.replace("__", "."): value for name, value in settings.items()}}
    code = "import sys; from elaswave.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", "--run-dir", str(run_dir)]
    command += [part for key, value in values.items() for part in ("--set", f"{key}={as_toml(value)}")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def status_of(client: OperatorClient) -> JobStatus:
    (answer,) = client.ask(lambda request: AskStatus(request=request), PATIENCE_S)
    assert isinstance(answer, StatusAnswer)
    return answer.status


def until_step(run_dir: Path, process: subprocess.Popen[str], step: int) -> None:
    """Waits until a job has committed a step."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (run_dir / CONTROL_FILE).exists():
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.01)
    with OperatorClient(run_dir) as client:
        while status_of(client).step < step:
            assert process.poll() is None and time.monotonic() < deadline_s
            client.wait(0.02)


def ctl(run_dir: Path, *arguments: str) -> int:
    return main(["ctl", str(run_dir), *arguments, "--timeout", str(PATIENCE_S)])


def test_status_checkpoint_and_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    with job(run_dir, run__steps=FOREVER) as process, job(other, run__steps=FOREVER, layout__widths="[1,1]") as second:
        until_step(run_dir, process, 2)
        assert stat.S_IMODE((run_dir / CONTROL_FILE).stat().st_mode) == 0o600
        assert ctl(run_dir, "status", "--json") == 0
        status = json.loads(capsys.readouterr().out)
        assert (status["state"], status["layout"], status["generation"], status["term"]) == ("training", "[1,2]", 1, 1)
        assert status["step"] >= 2 and status["total_steps"] == FOREVER and status["loss"] > 0
        assert status["rate"] > 0 and status["left_s"] > 0 and status["under_way"] == []
        assert [worker["stage"] for worker in status["workers"]] == [0, 1, 1]
        assert all(worker["last_heartbeat_s"] < PATIENCE_S for worker in status["workers"])
        copies = status["copies"]
        assert copies["num_wanted"] == copies["num_held"] == sum(w["num_owned_blocks"] for w in status["workers"])
        until_step(other, second, 1)
        assert ctl(run_dir, "status") == 0
        assert ctl(other, "status") == 0
        text = capsys.readouterr().out
        assert "layout [1,2], 5 micro-batches" in text and "layout 2x1, 5 micro-batches" in text

        assert ctl(run_dir, "checkpoint", "--wait", "--json") == 0
        written = json.loads(capsys.readouterr().out)
        assert written["decided"] == "written"
        assert (run_dir / "checkpoints" / f"step-{written['step']:08d}" / "manifest.json").exists()
        assert ctl(run_dir, "checkpoint") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("asked: ") and lines[1].startswith("taken (step ")

        keys = Path(json.loads((run_dir / CONTROL_FILE).read_text())["key_file"]).parent
        reading = write_role_key(keys, KeyRole.READING)
        assert main(["ctl", "--key", str(reading), str(run_dir), "status"]) == 0
        assert "layout [1,2]" in capsys.readouterr().out
        assert main(["ctl", "--key", str(reading), str(run_dir), "stop"]) == 1
        assert "refused: a reading key may ask for the status alone" in capsys.readouterr().err

        assert ctl(run_dir, "drain", "7") == 1
        assert "refused: " in capsys.readouterr().err

        steering = write_role_key(keys, KeyRole.STEERING)
        assert main(["ctl", "--key", str(steering), str(run_dir), "stop", "--wait"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("stopping: ") and lines[1].startswith("stopped: stopped after step ")
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + signal.SIGTERM, errors
        last = int(lines[1].rsplit(" ", 1)[1])
        assert f"its newest checkpoint is of step {last}" in errors
        assert not (run_dir / CONTROL_FILE).exists()
        assert ctl(run_dir, "status", "--json") == 1
        assert "no job runs in" in json.loads(capsys.readouterr().out)["message"]
        with OperatorClient(other) as client:
            assert status_of(client).step >= 1, "the other job has gone on"


@pytest.mark.slow
def test_a_person_who_asks_changes_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, steps = tmp_path / "run", 60
    with job(run_dir, run__steps=steps) as process:
        until_step(run_dir, process, 0)  # so early that it is asked for before the last step, however fast the machine
        assert ctl(run_dir, "checkpoint") == 0
        assert ctl(run_dir, "status", "--watch", "--interval", "0.1", "--json") == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()[2:]]
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
    assert lines[-1] == {"outcome": "finished", "reason": ""}
    seen = [line["step"] for line in lines[:-1]]
    assert seen == sorted(seen) and len(seen) >= 1
    undisturbed = run_job(tmp_path / "reference", {"layout.widths": "[1,2]", "run.steps": steps})
    result = read_result(run_dir)
    assert (result.losses, result.state_digest) == undisturbed.computation[:2]


@pytest.mark.slow
def test_layers_and_workers_move_and_no_bit_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    with job(run_dir, run__steps=FOREVER, optimizer__schedule="constant") as process:
        until_step(run_dir, process, 1)
        assert ctl(run_dir, "migrate", "--layers", "1,3") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].startswith("planned: as asked for: 1+3 layers on 1+2 workers")
        assert lines[2].startswith("in force (step ") and lines[2].endswith("changed to 1+3 layers on 1+2 workers")
        assert ctl(run_dir, "migrate", "--layers", "2,2", "--widths", "2,1", "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["decided"], answer["layout"]) == ("in force", "[2,1]")
        with OperatorClient(run_dir) as client:
            status = status_of(client)
            while status.copies.num_held != status.copies.num_wanted:  # surplus copies are dropped a vote later
                assert status.step < FOREVER
                client.wait(0.02)
                status = status_of(client)
        assert [(stage.layers, stage.workers) for stage in status.stages] == [((0, 2), (0, 2)), ((2, 4), (1,))]
        assert ctl(run_dir, "migrate", "--layers", "3,5") == 1
        assert "--layers adds up to 8, but the model has 4 layers" in capsys.readouterr().err
        assert ctl(run_dir, "migrate", "--layers", "two") == ctl(run_dir, "migrate") == 2
        assert ctl(run_dir, "migrate", "--layers", "1,1,2", "--widths", "1,1,1") == 0
        assert ctl(run_dir, "stop", "--wait", "--json") == 0
        _, errors = process.communicate(timeout=PATIENCE_S)
    steps = int(re.findall(r"newest checkpoint is of step (\d+)", errors)[0])
    settings = {"layout.widths": "[1,2]", "run.steps": steps, "optimizer.schedule": "constant"}
    resumed = run_job(run_dir, settings, resume=True)
    undisturbed = run_job(tmp_path / "reference", settings)
    assert resumed.computation == undisturbed.computation
    layouts = [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, LayoutChosen)]
    assert [len(event.layout.stages) for event in layouts[:4]] == [2, 2, 2, 3]


def test_a_worker_joins_and_another_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    with job(run_dir, run__steps=FOREVER) as process:
        until_step(run_dir, process, 2)
        assert ctl(run_dir, "join", "--json") == 0
        joined = json.loads(capsys.readouterr().out)
        assert joined["decided"] == "joined" and "worker 3 is a member" in joined["reason"]
        assert ctl(run_dir, "drain", "0") == 0
        assert "drained: worker 0 is no member of generation" in capsys.readouterr().out
        with OperatorClient(run_dir) as client:
            assert [worker.worker for worker in status_of(client).workers] == [1, 2, 3]
        assert ctl(run_dir, "drain", "0") == 1
        assert "worker 0 is no member; the members are 1, 2, 3" in capsys.readouterr().err
        assert ctl(run_dir, "stop", "--wait") == 0


@pytest.mark.slow
def test_a_join_is_answered_although_the_joiner_hangs_before_it_is_a_member(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code = "import sys; from elaswave.cli.main import main; sys.exit(main())"
    with job(run_dir, run__steps=FOREVER) as process:
        until_step(run_dir, process, 2)
        with subprocess.Popen(
            [sys.executable, "-c", code, "ctl", str(run_dir), "join", "--json", "--timeout", str(PATIENCE_S)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as asking:
            deadline_s = time.monotonic() + PATIENCE_S
            while not (joiners := [each for each in read_processes(run_dir) if (each.role, each.id) == ("worker", 3)]):
                assert time.monotonic() < deadline_s, "no joiner is started"
                time.sleep(0.002)
            assert signal_process(joiners[0], signal.SIGSTOP)
            said, complaint = asking.communicate(timeout=PATIENCE_S)
        assert asking.returncode == 1, complaint
        answer = json.loads(said)
        assert answer["decided"] == "failed" and answer["reason"].startswith("worker 3 is not admitted: ")
        assert re.search(r"(no processor time|heard of it) for \d+ s", answer["reason"])
        assert ctl(run_dir, "stop", "--wait") == 0


@pytest.mark.slow
def test_a_better_layout_is_found_when_a_person_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    emulated = {"device.kind": "emulated", "device.model": "gpt2-small", "device.name": "a100"}
    uneven = {"model.num_layers": 12, "layout.layers": "[2,12]", "elastic.block_size": 4096}
    with job(run_dir, run__steps=FOREVER, **emulated, **uneven) as process:
        until_step(run_dir, process, 1)
        assert ctl(run_dir, "rebalance", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["decided"] == "in force" and found["predicted_step_s"] < found["present_step_s"]
        assert ctl(run_dir, "rebalance", "--json") == 0
        kept = json.loads(capsys.readouterr().out)
        assert kept["decided"] == "kept", kept


def test_a_coordinator_that_is_replaced_and_a_launcher_that_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with job(run_dir, run__steps=FOREVER) as process, contextlib.ExitStack() as stack:
        until_step(run_dir, process, 2)
        client = stack.enter_context(OperatorClient(run_dir))
        before = status_of(client)
        (coordinator,) = (each for each in read_processes(run_dir) if each.role == "coordinator")
        assert signal_process(coordinator, signal.SIGKILL)
        deadline_s = time.monotonic() + PATIENCE_S
        while (after := status_of(client)).num_recoveries == 0:  # over the same client, as a command that is waiting
            assert time.monotonic() < deadline_s
            client.wait(0.02)
        assert (before.term, after.term, after.recoveries[0].kind) == (1, 2, "coordinator")
        (worker,) = (each for each in read_processes(run_dir) if (each.role, each.id) == ("worker", 2))
        assert signal_process(worker, signal.SIGKILL)
        assert ctl(run_dir, "checkpoint", "--wait") == 0, "whether the loss is noticed before or after"
        assert "written (step " in capsys.readouterr().out

        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        with pytest.raises(ControlError, match="the job has ended meanwhile: .*is stale, its launcher"):
            deadline_s = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline_s:
                status_of(client)
        assert ctl(run_dir, "stop") == 1
        assert "control.json is stale" in capsys.readouterr().err
        assert (run_dir / CONTROL_FILE).exists()
