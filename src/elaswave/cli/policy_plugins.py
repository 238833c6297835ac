"""Policies by name, or from a person's own code: ``module:function`` or ``path/to/file.py:function``."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster, ClusterEvent
from elaswave.errors import UsageError
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.policies import POLICIES, policy_named


def find_policy(name: str, policies: Mapping[str, Planner] = POLICIES) -> Planner:
    """The policy that a person asks for.

    Args:
        name: one of `policies`, or where a function is (`elaswave.planning.plan.Planner` is what it has to be).
        policies: by name.
    Raises:
        UsageError: there is none, or the code cannot be loaded.
    """
    if ":" not in name:
        return policy_named(name, policies)
    where, _, function = name.rpartition(":")
    module = _load(where, name)
    planner = getattr(module, function, None)
    if not callable(planner):
        raise UsageError(f"--policy {name}: {where} has no function {function!r}")
    return _checked(planner, name)


def _load(where: str, name: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"--policy {name}: there is no file {path}")
        spec = importlib.util.spec_from_file_location(f"elaswave_policy_{path.stem}", path)
        assert spec is not None and spec.loader is not None  # the name ends with .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    except UsageError:
        raise
    except Exception as error:  # whatever a person's code raises
        raise UsageError(f"--policy {name}: loading it fails: {type(error).__name__}: {error}") from error
    return module


def _checked(planner: Any, name: str) -> Planner:
    """The planner, what it returns being looked at: a mistake is named where it was made."""

    @wraps(planner)
    def plan(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
        found = planner(cluster, costs, allocation, event)
        if not isinstance(found, Plan):
            raise UsageError(f"--policy {name} returned {type(found).__name__}, needed: elaswave.planning.plan.Plan")
        try:
            found.allocation.check()
            cluster.index_of(found.allocation.workers)
        except (ValueError, KeyError) as error:
            raise UsageError(f"--policy {name} returned an allocation that cannot be: {error}") from error
        if not 0 < found.predicted_step_s < float("inf"):
            raise UsageError(f"--policy {name} predicts steps of {found.predicted_step_s} s, needed: above 0")
        return found

    return plan
