"""Which modules can be trained: what would be lost in silence is refused by name before the first step."""

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from elaswave.errors import UsageError

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
    """What is special in a tensor of a type that only few operators take, and what to do; empty for any other. Its bits
    could neither be hashed nor copied as those of others are."""
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
    """The first parameter with a gradient hook, if there is one."""
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
