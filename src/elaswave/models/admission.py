"""Layers as a script gives them, and what is refused of them by name before the first step.

Modules that exist already: each worker gets a copy of what it runs (`CopyOf`), and the instance stays as it was. The
instances live in the process that forks the workers. A copy shares the memory of frozen parameters with it, so that a
frozen base is there once for all workers of a machine; the Parameters on that memory are its own.

The function of a `Layer` makes a module of its own at every call. Layers are built where they are held, so a tensor
that two builds share is one where both layers run in one process, and two where they do not. That is found out by
calling each function under ``torch.device("meta")``, for the shapes.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from elaswave.errors import UsageError
from elaswave.models.layers import Layer

_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")  # by name: importing them takes half a second


def check_module(layer: str, module: nn.Module) -> None:
    """Refuses a layer that cannot be trained as it stands.

    Args:
        layer: its name.
        module: built, also on the meta device.
    Raises:
        UsageError: names the layer, the module or parameter, and what to do.
    """
    for path, part in module.named_modules():
        where = f"layer {layer}" + (f", module {path}," if path else "")
        if isinstance(part, DistributedDataParallel | DataParallel) or type(part).__name__ in _SHARDED:
            raise UsageError(
                f"{where} is wrapped in {type(part).__name__}: hand in the plain module, elaswave divides the work "
                "itself"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(where, part)
    check_sizes_known(layer, module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if problem := why_not_computed(tensor):
            raise UsageError(f"{name} of layer {layer} is {problem}")
    for name, parameter in module.named_parameters():
        _check_parameter(f"parameter {name} of layer {layer}", parameter)


def why_not_computed(tensor: torch.Tensor) -> str:
    """Tells what is special in a tensor of a type that only few operators take, and what to do; empty for any other.
    Its bits could neither be hashed nor copied as those of others are."""
    if tensor.is_quantized:
        return f"quantized ({str(tensor.dtype).removeprefix('torch.')}): use tensor.dequantize()"
    if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return (
            f"{dtype}: keep it in float32, bfloat16 or float16, or its bits in torch.uint8 (tensor.view(torch.uint8)), "
            f"and make {dtype} of it where it is used"
        )
    return ""


def check_sizes_known(layer: str, module: nn.Module) -> None:
    """Refuses a module that waits for its first input to know its shapes.

    Raises:
        UsageError: names layer and tensor.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} of layer {layer} has no shape yet, as in nn.LazyLinear: give all sizes, or run the model once "
                "before it is handed in"
            )


def check_not_meta(layer: str, module: nn.Module) -> None:
    """Refuses a module whose tensors have no values.

    Args:
        layer: its name.
        module: as it is to be computed with.
    Raises:
        UsageError: names the first one.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{name} of layer {layer} is on the meta device, so it has no values: make it on the CPU, or give the "
                "layer as elaswave.Layer(name, build)"
            )


def check_hooks(layer: str, module: nn.Module) -> None:
    """Refuses hooks on parameters: backwards in halves, or run again, would call them another number of times.

    Raises:
        UsageError: names layer and parameter.
    """
    name = hooked_parameter(module)
    if name is not None:
        raise UsageError(
            f"parameter {name} of layer {layer} has a gradient hook: remove it, and change the gradient in the "
            "layer itself, with a torch.autograd.Function say"
        )


def hooked_parameter(module: nn.Module) -> str | None:
    """Finds the first parameter with a gradient hook, if there is one."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return name
    return None


def _check_embedding(where: str, part: nn.Embedding | nn.EmbeddingBag) -> None:
    if part.sparse:
        raise UsageError(f"{where} makes sparse gradients: pass sparse=False, sums of gradients are dense")
    if part.max_norm is not None:
        raise UsageError(
            f"{where} has max_norm={part.max_norm}, so its forward writes its weight: every copy of the weight must "
            "change by updates only. Leave max_norm out, and scale the vectors that were looked up in the forward"
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype not in _COMPUTED and parameter.requires_grad:
        dtype = str(parameter.dtype).removeprefix("torch.")
        instead = "convert the module with .float()"
        if parameter.is_complex():
            instead = "keep real and imaginary parts in a float32 parameter, use torch.view_as_complex in the forward"
        raise UsageError(f"{name} is {dtype}: master weights are float32, {instead}")
    if not parameter.is_contiguous():
        raise UsageError(
            f"{name} has strides {parameter.stride()}, as channels_last makes them: convert the module with "
            ".to(memory_format=torch.contiguous_format); a layer may still compute in channels_last inside"
        )


def problems_with_layer_fields(layer: Layer) -> list[str]:
    """Lists what of a `Layer` is not of the type or form that it must have."""
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
    """Tells whether a layer may be called so: its name is part of names of tensors, and of files that are exported."""
    return name.isprintable() and not set(name) & set("/\\") and all(name.split("."))


_DRAWS = frozenset({nn.init.normal_, torch.Tensor.normal_})
"""Where a tensor has no memory there is nothing to draw, but torch would load its compiler for it, for a second."""


class _WithoutDraws(TorchFunctionMode):
    """Leaves tensors without memory as they are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function in _DRAWS:
            tensor = args[0] if args else named["tensor"]
            if tensor.device.type == "meta":
                return tensor
        return function(*args, **named)


def build_for_shapes(layer: Layer) -> nn.Module:
    """Builds a layer under ``torch.device("meta")``: without memory, and without random draws.

    Raises:
        UsageError: the function raises, or makes something else than a module.
    """
    try:
        with torch.device("meta"), _WithoutDraws():
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
    """Lists what functions have not made themselves: parameters that are trained, or modules with buffers, that are in
    two builds of one layer or of two.

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
    """Maps ``id`` to the name of each thing that two layers must not have in common: parameters that are trained, and
    modules that have buffers. An activation may be shared, and so may a parameter that nothing writes."""
    trained = {id(each): f"parameter {name}" for name, each in module.named_parameters() if each.requires_grad}
    return trained | {
        id(part): f"module {name or type(part).__name__}" for name, part in module.named_modules() if part._buffers
    }


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
        """Makes the copy; under ``torch.device("meta")`` it makes one without memory.

        Raises:
            UsageError: the module holds something that cannot be copied.
        """
        memo: dict[int, Any] = {}
        is_meta = torch.empty(0).device.type == "meta"
        for parameter in self.module.parameters():
            if is_meta:
                memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            elif not parameter.requires_grad:
                memo[id(parameter)] = _on_same_memory(parameter)
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


def _on_same_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Makes another frozen Parameter on the memory of one. Whoever holds a copy gives its Parameters other values, or
    moves them to its device, which must show neither in the instance nor in other copies."""
    values = parameter.data
    if type(values) is not torch.Tensor:  # a wrapper around tensors, of which only its own class makes another
        return nn.Parameter(values, requires_grad=False)
    made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), values, False)
    made.__dict__.update(parameter.__dict__)
    return made


def without_values(layer: Layer) -> nn.Module:
    """Makes a layer's module for its shapes, types and names: built without memory, or the instance itself.

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
    """Finds the ties of layers that share a Parameter: layer -> its parameter -> full name in the first layer that has
    it.

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
