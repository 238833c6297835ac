"""Modules that exist already as layers: each worker gets a copy of what it runs, and the instance stays as it was.

The instances live in the process that forks the workers. A copy shares the memory of frozen parameters with it, so
that a frozen base is there once for all workers of a machine.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elaswave.errors import UsageError
from elaswave.models.builders import build_for_shapes
from elaswave.models.layers import Layer


@dataclass(frozen=True)
class CopyOf:
    """Builds a layer as a copy of a module, its values and modes included.

    Args:
        module: of the script; nothing changes it.
        name: of the layer, for errors.
    """

    module: nn.Module
    name: str = ""

    def __call__(self) -> nn.Module:
        """The copy; under ``torch.device("meta")`` one without memory.

        Raises:
            UsageError: the module holds something that cannot be copied.
        """
        memo: dict[int, Any] = {}
        is_meta = torch.empty(0).device.type == "meta"
        for parameter in self.module.parameters():
            if is_meta:
                memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            elif not parameter.requires_grad:
                memo[id(parameter)] = parameter
        for buffer in self.module.buffers() if is_meta else ():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        try:
            return copy.deepcopy(self.module, memo)
        except Exception as error:
            raise self._not_copied(error) from error

    def check(self) -> None:
        """Copies it but for parameters and buffers, to see whether it can be done.

        Raises:
            UsageError: the module holds something that cannot be copied.
        """
        try:
            copy.deepcopy(self.module, {id(each): each for each in (*self.module.parameters(), *self.module.buffers())})
        except Exception as error:
            raise self._not_copied(error) from error

    def _not_copied(self, error: Exception) -> UsageError:
        return UsageError(
            f"layer {self.name} ({type(self.module).__name__}) cannot be copied: {error}. Give it as "
            f"elaswave.Layer({self.name!r}, build), with a function that builds it"
        )


def without_values(layer: Layer) -> nn.Module:
    """A layer's module for its shapes, types and names: built without memory, or the instance itself.

    Raises:
        UsageError: it cannot be built.
    """
    if isinstance(layer.build, CopyOf):
        return layer.build.module
    return build_for_shapes(layer)


def put_in_training(instances: Mapping[str, nn.Module]) -> None:
    """Puts a model of which no part is in training mode into it as a whole, as trainers do (``from_pretrained`` returns
    models in evaluation mode). Where any part is, submodules in evaluation mode stay so."""
    if not any(part.training for module in instances.values() for part in module.modules()):
        for module in instances.values():
            module.train()


def ties_of(instances: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
    """The ties of layers that share a Parameter: layer -> its parameter -> full name in the first layer that has it.

    Args:
        instances: the modules of layers, by name, in their order.
    Raises:
        UsageError: two Parameters on the same memory; names both.
    """
    first: dict[int, str] = {}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    ties: dict[str, dict[str, str]] = {}
    for layer, module in instances.items():
        for name, parameter in module.named_parameters():
            full = f"{layer}.{name}"
            owner = first.setdefault(id(parameter), full)
            if owner == full:
                refuse_overlap(full, parameter, spans)
            else:
                ties.setdefault(layer, {})[name] = owner
    return ties


def problems_with_shared_buffers(instances: Mapping[str, nn.Module]) -> list[str]:
    """Names persistent buffers of one module that stands in two layers: each layer's running statistics are its own.

    Args:
        instances: the modules of layers, by name.
    """
    first: dict[int, str] = {}
    problems = []
    for layer, module in instances.items():
        found = {
            id(buffer): ".".join(filter(None, (layer, path, key)))
            for path, part in module.named_modules()
            for key, buffer in part._buffers.items()
            if buffer is not None and key not in part._non_persistent_buffers_set
        }
        shared = [(first[key], name) for key, name in found.items() if key in first]
        if shared:
            problems.append(
                f"layer {layer} has its buffer {shared[0][1]} in common with {shared[0][0]}: running statistics of one "
                "module in two layers cannot be kept. Give each layer a module of its own, put both uses into one "
                "layer, or register the buffer with persistent=False if it is a constant"
            )
        for key, name in found.items():
            first.setdefault(key, name)
    return problems


def refuse_overlap(full: str, parameter: torch.Tensor, spans: dict[int, list[tuple[int, int, str]]]) -> None:
    """Refuses two Parameters on the same memory, which would be untied silently.

    Args:
        full: name of the parameter.
        parameter: with its storage, also on the meta device.
        spans: what earlier ones cover of their storages; the parameter is added.
    Raises:
        UsageError: names both.
    """
    if parameter.numel() == 0:
        return
    start = int(parameter.storage_offset())
    stop = start + 1 + sum(int((size - 1) * step) for size, step in zip(parameter.shape, parameter.stride()))
    others = spans.setdefault(parameter.untyped_storage()._cdata, [])
    for first, last, other in others:
        if start < last and first < stop:
            raise UsageError(
                f"parameters {other} and {full} are different views of the same memory: a tied tensor must be the same "
                "Parameter object, in one shape. Use one Parameter, and change its shape in the forward"
            )
    others.append((start, stop, full))
