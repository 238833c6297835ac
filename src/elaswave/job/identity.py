"""What workers of one run have in common, beside their bits, as hashes that can be compared. No torch."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

import msgspec

from elaswave._version import __version__
from elaswave.data.fingerprint import data_hash
from elaswave.hashing import key64
from elaswave.job.plan import RunPlan
from elaswave.protocol.membership.admissions import libraries


class Identity(NamedTuple):
    """Of one process; equal in all that may be workers of one run."""

    libraries: str
    config_hash: int
    """Of all values that are set."""
    model_hash: int
    """Of the tensors of model and optimizer."""
    data_hash: int


def identity_of(plan: RunPlan, data_facts: Mapping[str, object]) -> Identity:
    """What this process would train.

    Args:
        plan: of the run, as this process has made it.
        data_facts: what is known of the data here, see `elaswave.data.fingerprint.data_hash`.
    """
    versions = {"elaswave": __version__, "Python": platform.python_version()}
    versions |= {name: version(name) for name in ("numpy", "torch")}  # as installed: the coordinator loads no torch
    return Identity(libraries(versions), _hash(plan.config.to_dict()), _hash(plan.state), data_hash(data_facts))


def _hash(value: object) -> int:
    return key64(msgspec.json.encode(value, order="deterministic").decode()) >> 2
