"""A person's own recovery policy: how it is found, recorded, bounded and checked."""

import importlib.metadata
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from elaswave.config.load import build_config, load_config
from elaswave.config.policy_code import POLICIES_GROUP, find_policy, policies, registered
from elaswave.errors import ConfigError, InfeasiblePlan, UsageError
from elaswave.planning.costs.machines import ClusterEvent
from elaswave.planning.plan import Allocation, Chain, Plan, StageShare
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.policy.replication import Replication

ARGUMENTS: Any = (
    SimpleNamespace(index_of=lambda workers: workers),
    None,
    None,
    ClusterEvent(kind="lost", workers=(3,)),
)


def good_plan(**changes: Any) -> Plan:
    share = StageShare(
        start=0, stop=2, workers=np.array([0]), num_microbatches=np.array([4]), levels=np.array([0])
    )  # fmt: skip
    chain = Chain(stages=(share,), num_microbatches=4, cuts=())
    values: dict[str, Any] = {"predicted_step_s": 1.0, "predicted_pause_s": 0.0} | changes
    return Plan(policy="own", allocation=Allocation(chains=(chain,), schedule="1f1b"), **values)


def policy_of(tmp_path: Path, body: str, timeout_s: float = 5.0) -> Any:
    (tmp_path / "own.py").write_text(body)
    return find_policy(f"{tmp_path / 'own.py'}:plan", timeout_s=timeout_s)


def test_a_name_is_a_built_in_policy():
    assert find_policy("oobleck") is policies()["oobleck"]
    with pytest.raises(UsageError, match="unknown policy 'elastic': choose one of elaswave, recycle"):
        find_policy("elastic")


class Entry(NamedTuple):
    """An entry point of another package."""

    value: str
    loaded: Any

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_other_packages_register_policies(monkeypatch: pytest.MonkeyPatch):
    entries = [Entry("one:POLICIES", {"first": 1}), Entry("two:POLICIES", {"second": 2})]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == POLICIES_GROUP else [])
    assert registered(POLICIES_GROUP) == {"first": 1, "second": 2}
    assert registered("elaswave.other") == {}
    entries.append(Entry("three:POLICIES", ImportError("no module named three")))
    with pytest.raises(
        UsageError, match="what three:POLICIES registers as elaswave.policies cannot be loaded: ImportE"
    ):
        registered(POLICIES_GROUP)


def test_a_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_own_policies.py").write_text("def plan(*_): raise KeyError('called')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="policy my_own_policies:plan raised KeyError: 'called'"):
        find_policy("my_own_policies:plan")(*ARGUMENTS)
    sys.modules.pop("my_own_policies")


def test_an_answer_that_there_is_no_plan_is_one(tmp_path: Path):
    own = policy_of(
        tmp_path, "from elaswave.errors import InfeasiblePlan\ndef plan(*_): raise InfeasiblePlan('too few workers')"
    )
    with pytest.raises(InfeasiblePlan, match="too few workers"):
        own(*ARGUMENTS)


def test_a_policy_that_loops_is_ended_and_not_asked_again(tmp_path: Path):
    own = policy_of(tmp_path, "def plan(*_):\n    while True:\n        pass", 0.05)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"own.py:plan has not planned within 0.05 s; it is not asked again"):
            own(*ARGUMENTS)
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("policy ")]:
        thread.join(10.0)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predicted_step_s": 0.0}, "predicts steps of 0.0 s, needed: above 0"),
        ({"predicted_step_s": float("nan")}, "predicts steps of nan s"),
        ({"predicted_pause_s": -1.0}, "predicts a pause of -1.0 s, needed: at least 0"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    changes: dict[str, float], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = policy_of(tmp_path, "def plan(*_): return FOUND")
    module = sys.modules["elaswave_policy_own"]
    module.FOUND = good_plan()  # type: ignore[attr-defined]
    assert own(*ARGUMENTS) is module.FOUND  # type: ignore[attr-defined]
    module.FOUND = good_plan(**changes)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=message):
        own(*ARGUMENTS)


def test_what_a_policy_declares_is_known_of_the_bounded_one(tmp_path: Path):
    body = (
        "from elaswave.planning.policy.policy_metadata import replicates\n"
        "from elaswave.planning.policy.replication import Replication\n"
        "@replicates(Replication(unit='nothing', what='nothing', source='me'))\n"
        "def plan(*_): pass"
    )
    own = policy_of(tmp_path, body)
    assert policy_metadata_of(own).replication == Replication(unit="nothing", what="nothing", source="me")
    assert policy_metadata_of(policy_of(tmp_path, "def plan(*_): pass")).replication.unit == "stages"
    assert policy_metadata_of(policies()["torchft"]).replication.unit == "groups"


def test_the_configuration_records_where_the_code_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(overrides=['elastic.policy="policies/own.py:plan"'])
    assert config.elastic.policy == f"{tmp_path}/policies/own.py:plan"
    assert config.elastic.policy_is_code and config.elastic.respawns
    assert load_config(base=config).elastic.policy == config.elastic.policy
    assert load_config(overrides=["elastic.policy=some.module:plan"]).elastic.policy == "some.module:plan"


@pytest.mark.parametrize("policy", ["nobody", "module:", ":plan", "file.py:a b", ""])
def test_a_policy_that_is_neither_a_name_nor_code_is_refused(policy: str):
    with pytest.raises(
        ConfigError, match='expected one of "elaswave", .* or a function of your own as "module:function"'
    ):
        build_config({"elastic": {"policy": policy}})


def test_every_named_policy_that_can_run_here_can_be_configured():
    runs_here = {name: policy_metadata_of(planner).runs_here for name, planner in policies().items()}
    for name in (name for name, runs in runs_here.items() if runs):
        config = build_config({"elastic": {"policy": name}})
        assert config.elastic.policy == name and not config.elastic.policy_is_code
    for name in (name for name, runs in runs_here.items() if not runs):
        with pytest.raises(ConfigError, match="recycle_normalized.*oobleck_aligned"):
            build_config({"elastic": {"policy": name}})
