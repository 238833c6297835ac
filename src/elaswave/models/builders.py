"""What the function of a `Layer` may make: a module of its own at every call.

Layers are built where they are held, so a tensor that two builds share is one where both layers run in one process, and
two where they do not. That is found out by calling each function under ``torch.device("meta")``, for the shapes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elaswave.errors import UsageError
from elaswave.models.layers import Layer


def problems_with_layer_fields(layer: Layer) -> list[str]:
    """What of a `Layer` is not of the type or form that it must have."""
    name: Any
    build: Any
    ties: Any
    name, build, ties = layer.name, layer.build, layer.ties  # of any type, as a script gives them
    if not isinstance(name, str):
        return [f"a layer is called {name!r}, of type {type(name).__name__}, needed: a text"]
    problems = []
    if not _is_name(name):
        problems.append(
            f"a layer is called {name!r}, needed: a name of printable characters without '/', '\\' and empty "
            "parts between dots, such as 'block.3'"
        )
    if isinstance(build, nn.Module):
        problems.append(
            f"layer {name!r} has the module {type(build).__name__} as its build, needed: a function that "
            f"makes one. Put the module itself into the list, or write elaswave.Layer({name!r}, lambda: ...)"
        )
    elif not callable(build):
        problems.append(
            f"layer {name!r} has a build of type {type(build).__name__}, needed: a function that makes its module"
        )
    if not isinstance(ties, Mapping):
        problems.append(
            f"layer {name!r} has ties of type {type(ties).__name__}, needed: a dictionary from its own "
            "parameters to those of other layers, such as {'weight': 'embedding.weight'}"
        )
    elif wrong := [item for item in ties.items() if not all(isinstance(each, str) for each in item)]:
        problems.append(f"layer {name!r} has the tie {wrong[0]!r}, needed: names of two parameters")
    return problems


def _is_name(name: str) -> bool:
    """Whether a layer may be called so: its name is part of names of tensors, and of files that are exported."""
    return name.isprintable() and not set(name) & set("/\\") and all(name.split("."))


def build_for_shapes(layer: Layer) -> nn.Module:
    """Builds a layer under ``torch.device("meta")``: without memory, and without random draws.

    Raises:
        UsageError: the function raises, or makes something else than a module.
    """
    try:
        with torch.device("meta"):
            module = layer.build()
    except Exception as error:
        raise UsageError(
            f"layer {layer.name} cannot be built for its shapes: its build raised {type(error).__name__}: {error}. "
            "elaswave also calls it under torch.device('meta'), where tensors have shapes and no values: take numbers "
            "(.item(), .tolist()) from plain Python instead, or make those tensors with device='cpu'; or give the "
            "layer as a module that is built already"
        ) from error
    check_is_module(layer, module)
    return module


def check_is_module(layer: Layer, module: object) -> None:
    """Refuses what a build returns and is no module.

    Raises:
        UsageError: names layer and type.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"the build of layer {layer.name} returned {module!r:.80} of type {type(module).__name__}, needed: an "
            "nn.Module"
        )


def problems_with_captured(
    builders: Sequence[tuple[Layer, nn.Module]], instances: Mapping[str, nn.Module]
) -> list[str]:
    """What functions have not made themselves: parameters that are trained, or modules with buffers, that are in two
    builds of one layer or of two.

    Args:
        builders: layers that are built by functions, and what each has made; it is called a second time.
        instances: the modules of other layers, by name.
    """
    owners = {key: f"layer {name} has" for name, module in instances.items() for key in _with_state(module)}
    problems = []
    kept = []  # so that no id is used twice
    for layer, module in builders:
        again = build_for_shapes(layer)
        kept.append(again)
        for build in (module, again):
            found = _with_state(build)
            shared = [key for key in found if key in owners]
            if shared:
                problems.append(
                    f"the build of layer {layer.name} did not make its {found[shared[0]]} itself: "
                    f"{owners[shared[0]]} the same object. Make every module and trained parameter inside of build; to "
                    "share a parameter use Layer(ties=...), or give the layers as modules instead of functions"
                )
                break
            owners.update(dict.fromkeys(found, f"another build of layer {layer.name} has returned"))
    return problems


def _with_state(module: nn.Module) -> dict[int, str]:
    """Names of what two layers must not have in common, by ``id``: parameters that are trained, and modules that have
    buffers. An activation may be shared, and so may a parameter that nothing writes."""
    trained = {id(each): f"parameter {name}" for name, each in module.named_parameters() if each.requires_grad}
    return trained | {
        id(part): f"module {name or type(part).__name__}" for name, part in module.named_modules() if part._buffers
    }
