"""`compare`, `plan` and `simulate` about losses that take all copies of some state."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.test_planning_commands import document, output

JOB = ("--workers", "8", "--stages", "2", "--model", "gpt2-small", "--device", "h100")


def test_every_policy_is_compared_by_what_it_survives(capsys: Any) -> None:
    found = document(capsys, "compare", *JOB, "--policies", "elaswave,torchft,full_restart")
    ours, torchft, restart = (entry["start"] for entry in found["policies"])
    assert ours["survives"].startswith("survives any one worker; ")
    assert ours["survival"]["workers"][0] == 1 > ours["survival"]["workers"][1]
    assert torchft["survives"] == "survives any three workers; no whole host"  # 4 groups, one host of 8
    assert restart["survival"]["workers"] == [0]
    text = output(capsys, "compare", *JOB, "--policies", "full_restart")
    assert "full_restart survives no loss of single workers; no whole host" in text


def test_a_plan_says_what_the_job_survives(capsys: Any) -> None:
    found = document(capsys, "plan", *JOB, "--policy", "recycle", "--lose", "0")
    assert found["before"]["survives"] == "survives any three workers; no whole host"
    assert "it survives any one worker; " in " ".join(output(capsys, "plan", *JOB).split())


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Six nodes, of which a whole stage is lost at one instant after 1,800 s."""
    path = tmp_path / "trace.csv"
    lines = [f"0,add,node{index}" for index in range(6)]
    lines += [f"1800000,remove,node{index}" for index in range(3)]
    path.write_text("\n".join([*lines, "7200000,remove,node5"]))
    return str(path)


def test_followers_and_checkpoints_are_options_of_a_simulation(capsys: Any, trace: str) -> None:
    job = ("--trace", trace, "--stages", "2", "--model", "gpt2-small", "--device", "h100", "--policy", "elaswave")

    def life(*more: str) -> dict[str, Any]:
        (found,) = json.loads(output(capsys, "simulate", *job, "--json", *more))["scenarios"]
        return found

    usual = life()
    assert usual["num_rollbacks"] == usual["num_pauses"]["rollback"] == 1
    assert usual["lost_training_s"] == pytest.approx(600, rel=0.01)  # a checkpoint each 1,200 s
    assert life("--checkpoint-interval", "800")["lost_training_s"] == pytest.approx(200, rel=0.02)
    assert life("--followers", "2")["num_rollbacks"] == 0  # the third copy is in the other stage
    shown = output(capsys, "simulate", *job[:-1], "recycle")
    assert "went back to a checkpoint 1 times" in " ".join(shown.split())
