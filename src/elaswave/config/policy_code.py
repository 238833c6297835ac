"""Recovery policies: by name, of this package and of others that register theirs by an entry point; or a person's own
code, ``module:function`` or ``path/to/file.py:function``.

A person's code may do anything: it is loaded here, called in a thread of its own, within a bound, and what it returns
is checked (`elaswave.planning.plan.checked`). Whatever is wrong with it becomes one `UsageError` that names the policy.
"""

import ctypes
import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import cache, update_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any

from elaswave.errors import InfeasiblePlan, UsageError
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.plan import Allocation, Plan, Planner, checked
from elaswave.planning.policy.policies import TimedPlanner, make_policies

POLICIES_GROUP = "elaswave.policies"
"""Of entry points: each names a mapping of policies by name (`elaswave.planning.policy.policies.TimedPlanner`)."""
TIMEOUT_S = 60.0
"""For one plan of a person's policy in `plan`, `compare` and `simulate`."""


def is_code(name: str) -> bool:
    """Tells whether a policy's name says where its code is."""
    return ":" in name


@cache
def other_policies() -> Mapping[str, TimedPlanner]:
    """Policies that other packages have registered, by name.

    Raises:
        UsageError: one of them cannot be loaded; names it.
    """
    return registered(POLICIES_GROUP)


@cache
def policies() -> Mapping[str, Planner]:
    """Returns all policies, with `RecoveryTimes`' defaults."""
    return make_policies(others=other_policies())


def registered(group: str) -> Mapping[str, Any]:
    """Finds what other packages have registered by entry points, each of which names a mapping by name.

    Args:
        group: of the entry points.
    Raises:
        UsageError: one of them cannot be loaded; names it.
    """
    from importlib.metadata import entry_points  # late: it takes longer than all of a coordinator's planning code

    found: dict[str, Any] = {}
    for entry in sorted(entry_points(group=group)):
        try:
            found |= entry.load()
        except Exception as error:  # whatever another package's code raises
            raise UsageError(f"what {entry.value} registers as {group} cannot be loaded: {_told(error)}") from error
    return found


def find_policy(name: str, known: Mapping[str, Planner] | None = None, *, timeout_s: float | None = None) -> Planner:
    """Finds the policy that a person asks for.

    Args:
        name: one of those that are known, or where a function is (`elaswave.planning.plan.Planner` is what it has to
            be).
        known: by name; None means `policies`.
        timeout_s: for one plan of a person's own; None means `TIMEOUT_S`.
    Returns:
        A planner. A person's own raises `UsageError` for whatever goes wrong in it but `InfeasiblePlan`.
    Raises:
        UsageError: there is none, or the code cannot be loaded.
    """
    if not is_code(name):
        return _named(name, policies() if known is None else known)
    where, _, function = name.rpartition(":")
    planner = getattr(_load(where, name), function, None)
    if planner is None:
        raise UsageError(f"policy {name}: {where} has no function {function!r}")
    if not callable(planner):
        raise UsageError(f"policy {name}: {function!r} in {where} is of type {type(planner).__name__}, no function")
    return _Bounded(planner, name, TIMEOUT_S if timeout_s is None else timeout_s)


def _named(name: str, known: Mapping[str, Planner]) -> Planner:
    if name not in known:
        raise UsageError(
            f"unknown policy {name!r}: choose one of {', '.join(known)}, or name your own as module:function or "
            "path/to/file.py:function"
        )
    return known[name]


def _load(where: str, name: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"policy {name}: there is no file {path}")
        spec = importlib.util.spec_from_file_location(f"elaswave_policy_{path.stem}", path)
        assert spec is not None and spec.loader is not None  # the name ends with .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    except UsageError:
        raise
    except Exception as error:  # whatever a person's code raises
        raise UsageError(f"policy {name}: loading it fails: {type(error).__name__}: {error}") from error
    return module


class _Over(BaseException):
    """Raised in the thread of a policy that has been given up."""


class _Bounded:
    """A person's planner: each call in a thread, within a bound, its plan checked.

    A call that exceeds the bound is ended where it is Python that runs; code below Python that does not return goes on
    beside. Such a policy is not asked again: each further answer would keep the caller waiting as long.
    """

    def __init__(self, planner: Planner, name: str, timeout_s: float) -> None:
        update_wrapper(self, planner)  # also what it declares
        self._planner, self._name, self._timeout_s = planner, name, timeout_s
        self._given_up = ""

    def __call__(self, cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
        """Does the same as that of `Planner`.

        Raises:
            InfeasiblePlan: the policy's answer.
            UsageError: it raises anything else, returns what is no plan, or exceeds the bound.
        """
        if self._given_up:
            raise UsageError(self._given_up)
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append(self._planner(cluster, costs, allocation, event))
            except _Over:
                pass
            except BaseException as error:  # also an exit: the caller goes on
                outcome.append(error)

        thread = threading.Thread(target=work, name=f"policy {self._name}", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not outcome:
            _end(thread)
            self._given_up = f"policy {self._name} has not planned within {self._timeout_s:g} s; it is not asked again"
            raise UsageError(self._given_up)
        (found,) = outcome
        if isinstance(found, InfeasiblePlan):
            raise found
        if isinstance(found, BaseException):
            raise UsageError(f"policy {self._name} raised {_told(found)}") from found
        return checked(found, self._name, cluster)


def _end(thread: threading.Thread) -> None:
    """Has a thread raise `_Over` before its next step in Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Over))


def _told(error: BaseException) -> str:
    """Describes an exception with the line that has raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
