"""Real commands struck from outside by signals, as a person would: one in CI, a minute of them among the slow tests."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from verify.__main__ import verify
from verify.chaos.external_faults import ExternalFaults
from verify.chaos.outside import Strike
from verify.chaos.trial import RUN_FOLDER, run_command

TIMEOUT_S = 240.0
PR_GET_CHILD_SUBREAPER = 37
SMALL = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.context_length=8", "run.steps=20"]


def takes_orphans() -> bool:
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


@pytest.mark.slow
def test_a_worker_and_the_coordinator_are_killed_at_once_by_hand(tmp_path: Path) -> None:
    run_dir = tmp_path / "job" / RUN_FOLDER
    external_faults = ExternalFaults(run_dir, [Strike("kill", ("1", "coordinator"), "checkpoint", 16, 2, None)])
    settings = [*SMALL, "run.checkpoint_every=4", "run.keep_checkpoints=2", "layout.widths=[3]"]
    arguments = ["train", "--run-dir", str(run_dir), *(word for pair in settings for word in ("--set", pair))]
    with subprocess.Popen(["sleep", "600"]) as of_an_earlier_test:
        ending = run_command(tmp_path / "job", arguments, TIMEOUT_S, external_faults, os.environ)
        assert of_an_earlier_test.poll() is None
        of_an_earlier_test.kill()
    assert (ending.exit_code, ending.error, ending.hung_s) == (0, None, None)
    assert {each.victim for each in external_faults.struck} == {"1", "coordinator"}
    assert ending.left_behind == ending.bad_checkpoints == external_faults.left == []
    assert ending.result is not None and ending.result.steps == 20
    assert {each.worker for each in ending.recoveries if each.kind == "lost"} == {1}
    assert not takes_orphans(), "orphans of later tests would stay zombies of this process"


@pytest.mark.slow
def test_a_committer_is_killed_and_the_template_stopped_for_a_while_by_hand(tmp_path: Path) -> None:
    """Neither is needed for steps: one checkpoint is committed again, another one later."""
    run_dir = tmp_path / "job" / RUN_FOLDER
    committer = Strike("kill", ("committer",), "checkpoint", 2, 0, None)
    template = Strike("stop", ("forkserver",), "step", 8, 0, 900)
    external_faults = ExternalFaults(run_dir, [committer, template])
    settings = [*SMALL, "run.checkpoint_every=2", "run.keep_checkpoints=9", "layout.widths=[2]"]
    arguments = ["train", "--run-dir", str(run_dir), *(word for pair in settings for word in ("--set", pair))]
    ending = run_command(tmp_path / "job", arguments, TIMEOUT_S, external_faults, os.environ)
    assert (ending.exit_code, ending.error, ending.hung_s) == (0, None, None)
    assert [each.victim for each in external_faults.struck] == ["committer", "forkserver"]
    assert ending.left_behind == ending.bad_checkpoints == external_faults.left == []
    assert ending.num_checkpoints == 10, "a committer that was lost once costs no checkpoint"
    assert ending.result is not None and ending.result.steps == 20 and ending.recoveries == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_kills_from_outside(tmp_path: Path) -> None:
    arguments = ["chaos", "--outside", "--minutes", "1", "--seed", "5", "--run-dir", str(tmp_path / "jobs")]
    done = CliRunner().invoke(verify, arguments)
    assert done.exit_code == 0, done.output
    assert "same bits" in done.output
