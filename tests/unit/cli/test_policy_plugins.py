"""The policies of examples/policies in every command that plans, and the errors of those that are broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from elaswave.cli.main import main
from elaswave.config import policy_code

FOLDER = Path(__file__).parents[3] / "examples" / "policies"
SMALL = ["--workers", "8", "--stages", "2", "--model", "gpt2-small", "--device", "a100", "--microbatches", "3"]
CLUSTERS = [pytest.param(SMALL, id="small"), pytest.param([], id="default", marks=pytest.mark.slow)]
PUBLISHED = [
    "bamboo:plan",
    "varuna:plan",
    "ft_hsdp:plan",
    "ft_hsdp:plan_batch_kept",
    "dynatrain:plan",
    "trainmover:plan",
]


def named(policy: str) -> str:
    file, _, function = policy.partition(":")
    return f"{FOLDER / file}.py:{function}"


def document(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def compared(capsys: Any, *arguments: str) -> dict[str, dict[str, Any]]:
    options = [option for policy in PUBLISHED for option in ("--policy", named(policy))]
    entries = document(capsys, "compare", *arguments, "--policies", "torchft", *options)["policies"]
    assert [entry["policy"] for entry in entries] == ["torchft", *map(named, PUBLISHED)]
    return dict(zip(["torchft", *PUBLISHED], entries, strict=True))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_published_policies_are_compared(capsys: Any, cluster: list[str]) -> None:
    found = compared(capsys, *cluster, "--lose", "1")
    assert all(entry["feasible"] and 0 < entry["capacity_fraction"] < 1.5 for entry in found.values())
    assert {name for name, entry in found.items() if not entry["keeps_batch"]} == {"torchft", "ft_hsdp:plan"}
    pauses = {name: entry["pause_s"] for name, entry in found.items()}
    assert pauses["varuna:plan"] == 300.0 and pauses["ft_hsdp:plan"] == 180.0 == pauses["ft_hsdp:plan_batch_kept"]
    assert pauses["dynatrain:plan"] == 2.0 and pauses["trainmover:plan"] == 21.1
    assert pauses["bamboo:plan"] == (0.0 if not cluster else 20.0)  # of 8 workers one is above 5 %


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_published_policies_plan_and_live_through_weeks(capsys: Any, cluster: list[str]) -> None:
    for policy in PUBLISHED:
        after = document(capsys, "plan", *cluster, "--lose", "1", "--policy", named(policy))["after"]
        assert policy.startswith(after["policy"].removesuffix("_batch_kept")) and after["reason"]
    options = [option for policy in PUBLISHED for option in ("--policy", named(policy))]
    lived = document(capsys, "simulate", *cluster, "--days", "1", "--rate", "0.05", *options)["policies"]
    assert [entry["policy"] for entry in lived] == [*map(named, PUBLISHED)]
    assert all(0 < entry["summary"]["goodput"]["mean"] <= 1 for entry in lived)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def plan(*_): return 1 / 0", "raised ZeroDivisionError: division by zero ("),
        ("def plan(*_): raise SystemExit(7)", "raised SystemExit: 7 ("),
        ("def plan(*_):\n    while True: pass", "has not planned within 0.2 s; it is not asked again"),
        ("def plan(*_): return None", "returned NoneType, needed: elaswave.planning.plan.Plan"),
        ("def plan(): return None", "raised TypeError: "),
        (
            "from elaswave.planning.plan import Allocation, Plan\n"
            "def plan(*_): return Plan(policy='p', allocation=Allocation(chains=3, schedule='x'), predicted_step_s=1.0,"
            " predicted_pause_s=0.0)",
            "returned an allocation that cannot be: ",
        ),
    ],
)
def test_a_policy_that_is_broken_ends_with_an_error(
    body: str, message: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_code, "TIMEOUT_S", 0.2)
    assert message in refused(tmp_path, capsys, "plan", body)


@pytest.mark.parametrize("command", ["compare", "simulate", "train"])
def test_so_it_does_in_every_command(command: str, capsys: Any, tmp_path: Path) -> None:
    body = "def plan(*_): return 1 / 0" if command != "train" else "1 / 0"
    what = "raised ZeroDivisionError" if command != "train" else "loading it fails: ZeroDivisionError"
    assert what in refused(tmp_path, capsys, command, body)
    assert not (tmp_path / "run").exists()


def refused(tmp_path: Path, capsys: Any, command: str, body: str) -> str:
    """The error with which a command refuses a policy, on one line."""
    (tmp_path / "broken.py").write_text(body)
    more = {"simulate": [*SMALL, "--days", "30", "--rate", "0.05"], "train": ["--run-dir", str(tmp_path / "run")]}
    assert main([command, *more.get(command, SMALL), "--policy", f"{tmp_path / 'broken.py'}:plan"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "broken.py:plan" in error
    return error


def test_a_policy_is_given_once(capsys: Any) -> None:
    assert main(["train", "--policy", "oobleck_aligned", "--set", "elastic.policy=torchft"]) == 2
    assert "--policy sets elastic.policy, and so does --set; give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["torchft", "some.module:plan"])
def test_train_records_the_policy_in_the_configuration(policy: str, capsys: Any) -> None:
    assert main(["train", "--policy", policy, "--print-config"]) == 0
    assert f'policy = "{policy}"' in capsys.readouterr().out
