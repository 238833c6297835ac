"""`compare`, `plan` and `simulate` about losses that take all copies of some state."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.test_planning_commands import document, output

from elaswave.cli.main import main

JOB = ("--workers", "8", "--stages", "2", "--model", "gpt2-small", "--device", "h100")


def test_every_policy_is_compared_by_what_it_survives(capsys: Any) -> None:
    found = document(capsys, "compare", *JOB, "--policies", "elaswave,torchft,full_restart")
    ours, torchft, restart = (entry["start"] for entry in found["policies"])
    assert ours["survives"] == "survives any 3 of a stage; no whole host"
    assert ours["survival"]["workers"] == [1, 1, 1]
    assert torchft["survives"] == "survives any three workers; no whole host"  # 4 groups, one host of 8
    assert restart["survival"]["workers"] == [0]
    text = output(capsys, "compare", *JOB, "--policies", "full_restart")
    assert "full_restart survives no loss of single workers; no whole host" in text


def test_a_plan_says_what_the_job_survives(capsys: Any) -> None:
    found = document(capsys, "plan", *JOB, "--policy", "recycle", "--lose", "0")
    assert found["before"]["survives"] == "survives any three workers; no whole host"
    text = " ".join(output(capsys, "plan", *JOB).split())
    assert "it survives any 3 of a stage; no whole host copies: auto: all of a stage follow its blocks, since" in text
    assert found["before"]["copies"] is None  # recycle has no blocks


def test_a_plan_says_why_not_all_of_a_stage_follow(capsys: Any) -> None:
    """Of a model whose state takes more than a quarter of the memory."""
    found = document(capsys, "plan", "--model", "llama-2-7b", "--device", "a100", "--workers", "32", "--stages", "4",
                     "--recompute", "--lose", "0")["before"]  # fmt: skip
    assert found["copies"].startswith("auto: 5 of 7 ")
    assert found["copies"].endswith(" of a worker's 72.0 GiB, of which 25% may be taken")
    assert found["survives"].startswith("survives any 5 workers; ")
    assert found["survival"]["any_workers"] == 5


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
    assert usual["rollbacks"] == {"copies": 1}
    assert usual["lost_training_s"] == pytest.approx(600, rel=0.01)  # a checkpoint each 1,200 s
    assert life("--checkpoint-interval", "800")["lost_training_s"] == pytest.approx(200, rel=0.02)
    assert life("--followers", "2")["num_rollbacks"] == 1  # both are in the stage
    assert life("--followers", "3")["num_rollbacks"] == 0  # the fourth copy is in the other one
    assert life("--followers", "auto") == usual
    shown = output(capsys, "simulate", *job[:-1], "recycle")
    assert "went back to a checkpoint 1 times (1 for want of copies, 0 for want of workers)" in " ".join(shown.split())


def test_a_simulation_says_what_copies_there_are_and_what_they_survive(capsys: Any, trace: str) -> None:
    job = ("simulate", "--trace", trace, "--stages", "2", "--model", "gpt2-small", "--device", "h100")
    text = " ".join(output(capsys, *job, "--policy", "elaswave").split())
    assert "elaswave's copies: auto: all of a stage follow its blocks, since their copies take" in text
    assert "; at the beginning it survives any 2 of a stage; 90 % of triples; any whole host" in text
    few = json.loads(output(capsys, *job, "--policy", "elaswave", "--followers", "1", "--json"))
    assert few["copies"].startswith("each block has 1 follower beside its owner, as asked for; at the beginning it ")
    assert json.loads(output(capsys, *job, "--policy", "recycle", "--json"))["copies"] is None
    short = json.loads(output(capsys, *job, "--policy", "elaswave", "--copies-memory", "1e-9", "--json"))
    assert short["copies"].startswith("auto: 1 of 2 others of a stage follow its blocks, since copies of all of it")


def test_followers_are_a_number_or_auto(capsys: Any) -> None:
    assert main(["simulate", "--followers", "some"]) == 2
    assert "'some' is neither a number of at least 0 nor auto" in capsys.readouterr().err
