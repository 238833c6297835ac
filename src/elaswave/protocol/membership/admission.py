"""May this worker join? What it says of itself is compared with what the workers had in common that began. No IO.

A joiner that would compute other bits, or train something else, is refused before it disturbs anybody. What stands
here cannot tell a joiner with another key: that one does not get a connection (`elaswave.transport.handshake`).
"""

from collections.abc import Mapping, Sequence

import msgspec

from elaswave.protocol.environment import ENVIRONMENT, read
from elaswave.protocol.messages import Joining


class Founders(msgspec.Struct, frozen=True, kw_only=True, tag="founders"):
    """What all workers of a job have in common. Made durable once, with the first committed step, so that a joiner is
    compared with the workers that began, however many have come and gone since."""

    protocol: int
    libraries: str
    environment: str
    """Of one of them, for people; empty where bits are not compared."""
    config_hash: int
    model_hash: int
    data_hash: int
    foreign: tuple[str, ...] = ()
    """``LAYER: KIND`` of each foreign part."""
    canaries: dict[int, int]
    """That all have agreed on in the first vote, by place."""


def libraries(versions: Mapping[str, str]) -> str:
    """Versions of libraries as they are compared, and as people read them: "numpy 2.1.0, torch 2.7.0".

    Args:
        versions: by name.
    """
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def canaries_in(vector: Sequence[int], *, num_layers: int, num_tensors: int, num_buffers: int) -> Mapping[int, int]:
    """The canaries that all voters agree on; empty where bits are not compared.

    They stand before what a vote says of tensors, which is its end, see `elaswave.protocol.step.ballot.VoteShape`.

    Args:
        vector: of a merged vote.
        num_layers, num_tensors, num_buffers: of the model.
    """
    stop = len(vector) - num_tensors - 2 * num_buffers
    return read(vector[stop - 2 * (1 + num_layers) : stop]).known


def admission_problem(joining: Joining, founders: Founders, layer_names: Sequence[str]) -> str | None:
    """Why a worker may not join.

    Args:
        joining: what it says of itself.
        founders: what it must have in common with the others.
        layer_names: of the model, by layer.
    Returns:
        One line with everything that differs, and what to do; None if it may join.
    """
    problems = []
    if joining.protocol != founders.protocol:
        problems.append(
            f"it speaks protocol {joining.protocol} and the job {founders.protocol}: install the job's elaswave"
        )
    if joining.libraries != founders.libraries:
        problems.append(f"it has {joining.libraries}, and the job {founders.libraries}: install the same versions")
    if joining.config_hash != founders.config_hash:
        problems.append("its configuration is another one: start it with the config.toml of the run's folder")
    if joining.model_hash != founders.model_hash:
        problems.append("its model or optimizer has other tensors: give it the script that the run was started with")
    if joining.data_hash != founders.data_hash:
        problems.append("its data are others: give it the files that the run trains on")
    if joining.foreign != founders.foreign:
        problems += _other_parts(joining.foreign, founders.foreign)
    elif joining.model_hash == founders.model_hash:  # else its layers are others anyway
        problems += _other_bits(joining, founders, layer_names)
    return "; ".join(problems) or None


def _other_parts(there: Sequence[str], here: Sequence[str]) -> list[str]:
    found, needed = (dict(line.partition(": ")[::2] for line in lines) for lines in (there, here))
    return [
        f"its foreign part {name} is served by {found.get(name, 'nothing')}, and the job's by "
        f"{needed.get(name, 'nothing')}: install the same software, with the same code of the part"
        for name in sorted(found.keys() | needed.keys())
        if found.get(name) != needed.get(name)
    ] or ["its foreign parts stand in another order than the job's"]


def _other_bits(joining: Joining, founders: Founders, layer_names: Sequence[str]) -> list[str]:
    known = founders.canaries
    differing = sorted(place for place, value in joining.canaries.items() if known.get(place, value) != value)
    if known and not joining.canaries:
        return ["it does not say what bits it computes, and the job compares them: set elastic.verify=true"]
    if ENVIRONMENT in differing:
        return [
            f"it computes other bits: it has {joining.environment}, and the job {founders.environment}. All machines "
            "of a job need processors of one kind and the same libraries"
        ]
    layers = ", ".join(layer_names[place - ENVIRONMENT - 1] for place in differing)
    if layers:
        return [
            f"layers of the same kind as {layers} give other bits there, forward or backward, or begin with other "
            "values: a layer must give the same bits in every process, and its code must be the job's"
        ]
    return []
