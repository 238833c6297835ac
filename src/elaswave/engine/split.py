"""A layer's backward in two halves with the bits of the whole: first the input's gradient, later the weights'.

Earlier stages wait for the first half only; the second one fills gaps. The autograd graph is cut at its *branchings*,
the nodes on the way from output to input from which parameters branch off (a linear map, a norm). The first half runs
the way to the input and notes which gradient reached each branching; the second one goes on from there, into the
parameters alone. So nothing is computed twice, and each kernel sees what it would have seen in one go.

Kernels that are asked for fewer results at once could still round otherwise, and a graph may have no such cut (a
parameter that is used twice). Therefore `is_exact` compares both ways bit for bit, on the first micro-batch of each
layer, and where they differ the caller computes the whole in the first half and keeps the weights' gradients.

Source: Zero Bubble Pipeline Parallelism (Qi et al. 2024), section 2; the cut as in torch.distributed.pipelining.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from elaswave.models.layers import gradients_along

Gradients = list[torch.Tensor | None]


class _Branching(NamedTuple):
    """A node on the way to the input, and what branches off there."""

    node: Node
    parameters: tuple[int, ...]
    """Positions of parameters, each of which belongs to no other branching."""


class WeightHalf:
    """What the second half still has to do.

    Args:
        parameters: of the layer.
        branchings: where to go on.
        gradients: that reached each of them.
        way: all nodes on the way from output to input.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        branchings: Sequence[_Branching],
        gradients: Sequence[tuple[torch.Tensor | None, ...]],
        way: set[Node],
    ) -> None:
        self._parameters = parameters
        self._branchings = branchings
        self._gradients = gradients
        self._way = way

    def run(self) -> Gradients:
        """Computes the parameters' gradients, None for one that no gradient reaches. It is to be called once."""
        found: Gradients = [None] * len(self._parameters)
        for branching, gradients in zip(self._branchings, self._gradients, strict=True):
            there = [(index, gradient) for index, gradient in enumerate(gradients) if gradient is not None]
            if not there:
                continue
            with gradients_along(self._way, along=False):
                parts = torch.autograd.grad(
                    [GradientEdge(branching.node, index) for index, _ in there],
                    [self._parameters[index] for index in branching.parameters],
                    [gradient for _, gradient in there],
                    allow_unused=True,
                )
            for index, part in zip(branching.parameters, parts, strict=True):
                found[index] = part
        return found


def input_half(
    output: torch.Tensor,
    value: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor | None, WeightHalf] | None:
    """Runs the first half of a backward.

    Args:
        output: of the layer, with its graph.
        value: the layer's input, a leaf that requires a gradient.
        parameters: of the layer.
        gradient: of the output.
    Returns:
        The input's gradient (None: none flows) and the second half; None if the graph cannot be cut.
    """
    cut = _cut(output, value, parameters)
    if cut is None:
        return None
    branchings, way = cut
    noted: dict[Node, tuple[torch.Tensor | None, ...]] = {}

    def note(node: Node, gradients: tuple[torch.Tensor | None, ...]) -> None:
        noted[node] = gradients

    hooks = [
        branching.node.register_prehook(lambda gradients, node=branching.node: note(node, gradients))
        for branching in branchings
    ]
    try:
        with gradients_along(way, along=True):
            (result,) = torch.autograd.grad(output, [value], gradient, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return result, WeightHalf(parameters, branchings, [noted.get(each.node, ()) for each in branchings], way)


def is_exact(
    output: torch.Tensor,
    value: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    whole: Sequence[torch.Tensor | None],
) -> bool | None:
    """Tells whether both halves give the whole's bits. Uses up the graph.

    Args:
        output, value, parameters, gradient: as for `input_half`.
        whole: gradients of the parameters and, last, of the input, from one backward in which the graph was retained.
    Returns:
        None if it cannot be told, since something is not finite.
    """
    if not all(part is None or bool(part.isfinite().all()) for part in whole):
        return None
    halves = input_half(output, value, parameters, gradient)
    if halves is None:
        return False
    return all(map(_same_bits, [*halves[1].run(), halves[0]], whole))


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


def _cut(
    output: torch.Tensor, value: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> tuple[list[_Branching], set[Node]] | None:
    """Finds the branchings of a graph and all nodes on the way to the input; None if it has no such cut."""
    root = output.grad_fn
    if root is None:
        return None
    target = get_gradient_edge(value).node
    leaves = {
        get_gradient_edge(parameter).node: index
        for index, parameter in enumerate(parameters)
        if parameter.requires_grad
    }
    order = _children_first(root)
    way: set[Node] = set()
    reached: dict[Node, frozenset[int]] = {}
    """Of nodes off the way: the parameters behind them."""
    branchings = []
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        sideways: frozenset[int] = frozenset().union(*(reached.get(child, ()) for child in children))
        if node is target or any(child in way for child in children):
            way.add(node)
            if sideways:
                branchings.append(_Branching(node, tuple(sorted(sideways))))
        else:
            reached[node] = sideways | {leaves[node]} if node in leaves else sideways
    owned = [index for branching in branchings for index in branching.parameters]
    if root not in way or len(owned) != len(set(owned)):
        return None
    return branchings, way


def _children_first(root: Node) -> list[Node]:
    """Lists all nodes of a graph, each after those that it hands gradients to."""
    order: list[Node] = []
    seen = {root}
    stack = [(root, iter(root.next_functions))]
    while stack:
        node, children = stack[-1]
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            order.append(node)
            stack.pop()
    return order
