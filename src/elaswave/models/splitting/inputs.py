"""The inputs of a micro-batch: how a network is called with them, and which can be example inputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from elaswave.errors import UsageError


def call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tells how a network is called with a micro-batch's inputs: a dictionary by keywords, a tuple or list one by
    one."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any], like: Any) -> Any:
    """Does the inverse of `call_of`.

    Args:
        args, kwargs: of a call.
        like: inputs that are put together in the same way.
    """
    if isinstance(like, Mapping):
        return dict(kwargs)
    return list(args) if isinstance(like, list) else tuple(args) if isinstance(like, tuple) else args[0]


def leaves_of(inputs: Any) -> list[tuple[str, torch.Tensor]]:
    """Lists the tensors of a micro-batch's inputs with their places, in the order of the call."""
    found = []
    args, kwargs = call_of(inputs)
    for path, leaf in pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))[0]:
        if not isinstance(leaf, torch.Tensor):
            raise UsageError(
                f"the inputs hold {leaf!r:.80} of type {type(leaf).__name__} at {pytree.keystr(path)}: a micro-batch "
                "is made of tensors. Set what is no tensor in the network (its configuration, say)"
            )
        found.append((pytree.keystr(path[1:]), leaf))
    return found


def refuse_inputs(example_inputs: Any) -> None:
    """Refuses example inputs that no micro-batch can have.

    Raises:
        UsageError: says what they hold.
    """
    if isinstance(example_inputs, Mapping) and not all(isinstance(name, str) for name in example_inputs):
        raise UsageError(
            f"the keys of example_inputs are {list(example_inputs)!r:.80}, needed: names of the forward's arguments"
        )
    leaves = leaves_of(example_inputs)
    if not leaves:
        raise UsageError(
            f"example_inputs is {example_inputs!r:.80}, which holds no tensor; needed: the inputs of a micro-batch, a "
            "tensor, a tuple or list (arguments of the forward), or a dictionary (its keywords)"
        )
    for place, leaf in leaves:
        what = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        if leaf.layout is not torch.strided or leaf.device.type != "cpu":
            raise UsageError(
                f"the example input {what} at {place} is of layout {leaf.layout} on {leaf.device}; needed: a dense "
                "tensor on the CPU, as collate makes it"
            )
        if not leaf.numel():
            raise UsageError(
                f"the example input {what} at {place} has no elements; needed: a micro-batch of the size that training "
                "has"
            )
