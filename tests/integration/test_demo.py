"""``elaswave demo``: two runs, four faults, one computation; small here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.integration.jobs import SMALL, as_toml, nothing_left
from tests.integration.waits import WaitsFor, log_of

from elaswave.cli.demo import DISTURBED, UNDISTURBED, Join, curve_lines, draw_faults, fault_line, joins_of
from elaswave.cli.main import cli
from elaswave.config.schema import Config
from elaswave.errors import ConfigError
from elaswave.faults.injection import FaultRecord, parse_faults
from elaswave.observability.result import GenerationRecord, RunResult, read_result
from elaswave.protocol.step.engine import PHASES
from elaswave.types import Hop, Layout, Stage

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-c", "import sys; from elaswave.cli.main import main; sys.exit(main())", "demo")
TIMEOUT_S = 200.0
STEPS = 26


def arguments(run_dir: Path, **changes: Any) -> list[str]:
    values = {**SMALL, "run.steps": STEPS, "layout.widths": [2, 3], **changes}
    settings = (text for key, value in values.items() for text in ("--set", f"{key}={as_toml(value)}"))
    return ["--run-dir", str(run_dir), *settings]


def run(tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *more], cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip


@pytest.mark.slow
def test_both_runs_are_one_computation(tmp_path: Path) -> None:
    with nothing_left():
        done = run(tmp_path, *arguments(tmp_path / "demo"), "--seed", "5", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    results = {name: read_result(tmp_path / "demo" / name) for name in (UNDISTURBED, DISTURBED)}
    assert document["same"] is True
    assert document["faults"] == draw_faults(5, 5, STEPS)
    assert len(document["struck"]) == len(document["recoveries"]) == 3
    assert document["losses"][UNDISTURBED] == document["losses"][DISTURBED] == results[DISTURBED].losses
    assert len(set(document["state_digests"].values())) == 1
    assert results[UNDISTURBED].recoveries == []
    assert {recovery.worker for recovery in results[DISTURBED].recoveries} == {
        record["worker"] for record in document["struck"]
    }
    assert f"same computation: {STEPS} steps with equal losses and equal state" in done.stderr
    assert done.stderr.count("\nloss, ") == 2
    assert done.stderr.count("going on after") == 3 + 1, "a line for each when it happens, and the table"
    assert "\x1b" not in done.stderr


@pytest.mark.slow
def test_a_worker_that_joins_in_a_lost_ones_place_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import elaswave.cli.demo as demo
    import elaswave.launcher.launcher as launcher

    train = launcher.train

    def slowly(config: Config, folder: Path, **more: Any) -> RunResult:
        probe = WaitsFor(log_of(folder), "worker 3 has joined") if folder.name == DISTURBED else None
        return train(config, folder, probe=probe, **more)

    monkeypatch.setattr(launcher, "train", slowly)
    monkeypatch.setattr(demo, "draw_faults", lambda *_: ["kill:1@4:vote"])
    given = arguments(tmp_path / "demo", **{"run.steps": 60, "layout.widths": [3], "elastic.respawn": True})
    with nothing_left():
        done = CliRunner().invoke(cli, ["demo", *given])
    assert done.exit_code == 0, done.output
    assert "worker 3 has joined before step " in done.output
    assert "J one joins" in done.output
    assert "1 worker lost, 1 joined in their places, no step lost, no restart, and not one bit differs" in done.output


def test_who_has_joined_is_told_by_the_layouts() -> None:
    def record(first_step: int, workers: tuple[int, ...], idle: tuple[int, ...] = ()) -> GenerationRecord:
        routes = tuple((Hop(workers[index % len(workers)], 0, 0, 4),) for index in range(4))
        layout = Layout(stages=(Stage(start=0, stop=4, workers=workers),), routes=routes, idle=idle)
        return GenerationRecord(generation=1, layout=layout, reason="", first_step=first_step)

    records = [record(1, (0, 1)), record(4, (0,)), record(7, (0,), (2,)), record(9, (0, 2)), record(12, (0, 2), (3,))]
    joins = joins_of(records)
    assert joins == [
        Join(worker=2, first_step=7, computes_from=9),
        Join(worker=3, first_step=12, computes_from=None),
    ]
    assert fault_line([], 12, 12, joins) == "      J    J"


def test_runs_that_differ_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run has other data: then curves and verdict say so, and the exit code does."""
    import elaswave.cli.demo as demo

    train = demo._train

    def other(config: Any, folder: Path, faults: Any, **more: Any) -> Any:
        if folder.name == DISTURBED:
            config = demo.load_config(None, [f"{key}={as_toml(value)}" for key, value in small.items()])
        return train(config, folder, (), **more)

    small = {**SMALL, "run.steps": 8, "run.seed": 2}
    monkeypatch.setattr(demo, "_train", other)
    given = arguments(tmp_path / "demo", **{"run.steps": 8, "layout.widths": [3]})
    with nothing_left():
        done = CliRunner().invoke(cli, ["demo", *given])
    assert done.exit_code == 1
    assert "different computations: the losses differ first at step 1" in done.output
    assert "not one bit" not in done.output


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_drawn_apart_and_leave_two_workers(seed: int) -> None:
    faults = parse_faults(draw_faults(seed, 8, 60), seed=1, workers=range(8), num_steps=60)
    steps = [fault.step for fault in faults]
    assert [fault.kind for fault in faults] == ["kill", "kill", "hang", "kill"]
    assert len({fault.worker for fault in faults}) == len({fault.phase for fault in faults}) == 4
    assert all(after - before >= 4 for before, after in zip(steps, steps[1:]))
    assert {fault.phase for fault in faults} <= set(PHASES)
    assert draw_faults(seed, 8, 60) == draw_faults(seed, 8, 60) != draw_faults(seed + 1, 8, 60)
    assert len(draw_faults(seed, 3, 60)) == 1


@pytest.mark.parametrize(
    ("num_workers", "num_steps", "problem"),
    [(2, 60, "2 workers are too few to lose one"), (8, 22, "22 steps are too few for 4 faults; give at least 23")],
)
def test_too_few_workers_or_steps_are_bad_input(num_workers: int, num_steps: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        draw_faults(1, num_workers, num_steps)
    assert draw_faults(1, 8, 23)


def test_curves() -> None:
    assert curve_lines([4.0, 3.0, 2.0, 1.0], 10, 2) == ["█▃", "██▆▁"]
    assert curve_lines([4.0, 3.0, 2.0, 1.0], 2, 1) == ["█▁"]
    assert curve_lines([float("nan"), 1.0], 5, 2) == ["", " ▁"]
    assert curve_lines([float("nan")], 5, 1) == [" "]
    assert set("".join(curve_lines([3.0, 2.0, 1.0], 5, 3, ascii_only=True))) <= set(" :#")


def test_faults_stand_under_their_steps() -> None:
    def record(spec: str, step: int) -> FaultRecord:
        return FaultRecord(
            position=0, fault=spec, worker=1, step=step, attempt=1, phase="vote", action=0, time_s=0.0
        )  # fmt: skip

    assert fault_line([record("kill:1@1", 1), record("hang:1@4", 4)], 4, 10) == "K  H"
    assert fault_line([record("kill:1@4", 4)], 4, 2) == " K"
