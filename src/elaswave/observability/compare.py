"""Whether two runs are the same computation, and if not, where they first part. Pure.

They are exactly if their losses and state digests are equal; everything else (layout, timings, recoveries) may differ.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from elaswave.config_format import FORMAT_KEY
from elaswave.observability.result import JsonFloat, RunResult


class StepDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first step whose losses differ."""

    step: int
    losses: tuple[JsonFloat, JsonFloat]
    """Both losses, exact."""


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first tensor, in the order of ``digests.json``, whose digests differ."""

    name: str
    """"<slot>.<tensor>"."""
    digests: tuple[str | None, str | None]
    """None where the run has no such tensor."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What two runs have in common."""

    same: bool
    """Whether they are the same computation."""
    summary: str
    """One line for people."""
    steps: tuple[int, int]
    state_digests: tuple[str, str]
    first_differing_step: StepDifference | None
    first_differing_tensor: TensorDifference | None
    num_differing_tensors: int | None
    """None if the runs have different numbers of steps, or one has no digests per tensor."""
    differing_config: dict[str, tuple[Any, Any]]
    """Keys of the configuration, such as "layout.stages", with both values; null where unset."""


def compare_results(
    a: RunResult, b: RunResult, tensors_a: Mapping[str, str] | None, tensors_b: Mapping[str, str] | None
) -> Comparison:
    """Compares two runs.

    Args:
        a, b: their results.
        tensors_a, tensors_b: their digests per tensor and slot, if they have them.
    """
    first_step = None
    # By their shortest digits: equal exactly if the bits are, 0.0 and -0.0 told apart, "nan" equal to itself.
    for step, losses in enumerate(zip(a.losses, b.losses, strict=False), start=1):
        if repr(losses[0]) != repr(losses[1]):
            first_step = StepDifference(step=step, losses=losses)
            break
    first_tensor, num_tensors = None, None
    equal_states = a.state_digest == b.state_digest
    if not equal_states and a.steps == b.steps and tensors_a is not None and tensors_b is not None:
        names = [*tensors_a, *(name for name in tensors_b if name not in tensors_a)]
        differing = [name for name in names if tensors_a.get(name) != tensors_b.get(name)]
        num_tensors = len(differing)
        if differing:
            name = differing[0]
            first_tensor = TensorDifference(name=name, digests=(tensors_a.get(name), tensors_b.get(name)))
    same = a.steps == b.steps and first_step is None and equal_states
    return Comparison(
        same=same,
        summary=_summary(a, b, first_step, first_tensor, same=same),
        steps=(a.steps, b.steps),
        state_digests=(a.state_digest, b.state_digest),
        first_differing_step=first_step,
        first_differing_tensor=first_tensor,
        num_differing_tensors=0 if same else num_tensors,
        differing_config=_differing_config(a.config, b.config),
    )


def _summary(
    a: RunResult, b: RunResult, first_step: StepDifference | None, first_tensor: TensorDifference | None, *, same: bool
) -> str:
    if same:
        return f"same computation: {a.steps} steps with equal losses and equal state"
    parts = []
    if a.steps != b.steps:
        parts.append(f"different number of steps, {a.steps} and {b.steps}")
    if first_step is not None:
        parts.append(f"the losses differ first at step {first_step.step}")
    elif a.steps != b.steps:
        parts.append(f"the losses of the first {min(a.steps, b.steps)} steps are equal")
    else:
        parts.append("the losses are equal but the states differ")
    if first_tensor is not None:
        parts.append(f"the first differing tensor is {first_tensor.name}")
    return "different computations: " + "; ".join(parts)


def _differing_config(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Finds the dotted keys that differ, with both values."""
    flat_a, flat_b = (_flatten({name: keys for name, keys in each.items() if name != FORMAT_KEY}) for each in (a, b))
    return {
        key: (flat_a.get(key), flat_b.get(key))
        for key in [*flat_a, *(key for key in flat_b if key not in flat_a)]
        if flat_a.get(key) != flat_b.get(key)
    }


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
