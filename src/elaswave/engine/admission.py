"""What only a real build and a layer's first micro-batch show: other parameters than those described, a weight that is
not the layer's own, a checkpoint that cannot be run again here, a gradient that is sparse.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node

from elaswave.blocks.shapes import LayerShape
from elaswave.errors import UsageError
from elaswave.models.admission import check_not_meta, check_sizes_known
from elaswave.models.builders import check_is_module
from elaswave.models.calls import describe
from elaswave.models.instances import CopyOf
from elaswave.models.layers import Layer, build_layer
from elaswave.state.buffers import persistent_buffers
from elaswave.training.raised import said


def build_as_described(layer: Layer, seed: int, index: int, shapes: Sequence[LayerShape]) -> nn.Module:
    """Builds a layer, and compares it with what it was for its shapes.

    Args:
        layer: to be built.
        seed: of the run.
        index: its position in the model.
        shapes: of all units.
    Raises:
        UsageError: it cannot be built, or has other parameters or persistent buffers than it had under
            ``torch.device("meta")``.
    """
    try:
        module = build_layer(layer, seed, index)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"layer {layer.name} cannot be built: {said(error)}") from error
    check_is_module(layer, module)
    if isinstance(layer.build, CopyOf):  # a copy of what was described
        return module
    check_sizes_known(layer.name, module)
    check_not_meta(layer.name, module)
    described, built = _described(layer, index, shapes), _built(module)
    for name in (*described, *built):
        if described.get(name) != built.get(name):
            raise UsageError(
                f"the build of layer {layer.name} made {built.get(name, 'nothing')} as {name}, and under "
                f"torch.device('meta') {described.get(name, 'nothing')}: it must make parameters and persistent "
                "buffers of the same names and shapes whenever it is called"
            )
    return module


def _described(layer: Layer, index: int, shapes: Sequence[LayerShape]) -> dict[str, str]:
    """What a layer has, by name in its module."""
    shape = shapes[index]
    found = {slot.name: _kind("trained", slot.shape) for slot in shape.tensors}
    found |= {layer.full_name(use.name): _kind("trained", shapes[use.unit].tensors[0].shape) for use in shape.shared}
    found |= {tensor.name: _kind("frozen", tensor.shape, tensor.dtype) for tensor in shape.frozen}
    buffers = () if shape.buffers is None else shapes[shape.buffers].tensors
    found |= {slot.name: _kind("buffer", slot.shape, slot.dtype) for slot in buffers}
    return {layer.own_name(name): kind for name, kind in found.items()}


def _built(module: nn.Module) -> dict[str, str]:
    """As `_described`, of a module that is there."""
    found = {
        name: _kind("trained", each.shape) if each.requires_grad else _kind("frozen", each.shape, each.dtype)
        for name, each in module.named_parameters()
    }
    return found | {name: _kind("buffer", each.shape, each.dtype) for name, each in persistent_buffers(module).items()}


def _kind(kind: str, shape: Sequence[int], dtype: object = "") -> str:
    what = "a persistent buffer" if kind == "buffer" else f"a {kind} parameter"
    of_type = f" of type {str(dtype).removeprefix('torch.')}" if dtype else ""
    return f"{what} of shape {list(shape)}{of_type}"


def leaves_of_others(who: str, outputs: Iterable[torch.Tensor], own: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves of a graph that are no own ones.

    Args:
        who: layer or loss, for errors.
        outputs: with their graphs.
        own: parameters of the layer, and its inputs.
    Raises:
        UsageError: the graph does not show all of its leaves.
    """
    outputs = list(outputs)
    known = {id(tensor) for tensor in own}
    leaves = [output for output in outputs if output.grad_fn is None and output.requires_grad]
    for node in _nodes(output.grad_fn for output in outputs):
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise UsageError(
                f"{who} uses torch.utils.checkpoint with use_reentrant=True, which hides parameters from its graph: "
                "pass use_reentrant=False, or recompute the whole layer with Layer(recompute=True)"
            )
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves.append(variable)
    return [leaf for leaf in leaves if id(leaf) not in known]


def refuse_leaf(who: str, leaf: torch.Tensor, others: Mapping[int, str]) -> NoReturn:
    """A graph leaves its layer.

    Args:
        who: layer or loss.
        leaf: that it reaches.
        others: names of other parameters of this worker, by ``id``.
    """
    name = others.get(id(leaf), f"{describe(leaf)} that requires a gradient")
    raise UsageError(
        f"{who} reaches {name}, which is not its own: its gradient would be lost. Tie a parameter with "
        "Layer(ties=...), or hand the tensor on from layer to layer"
    )


def check_dense(who: str, names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuses sparse gradients.

    Args:
        who: layer, for errors.
        names: of its parameters.
        gradients: of them, in their order; more may follow.
    Raises:
        UsageError: names the first one.
    """
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError(
                f"{who} makes a sparse gradient of {names[index]}: look vectors up with sparse=False, sums of "
                "gradients are dense"
            )


def _nodes(roots: Iterable[Node | None]) -> Iterator[Node]:
    """All nodes of a graph, once each."""
    seen: set[Node] = set()
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions if child is not None]
