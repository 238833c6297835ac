"""What only the graph of a layer's first micro-batch shows: a weight that is not the layer's own, a checkpoint that
cannot be run again here, a gradient that is sparse.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.autograd.graph import Node

from elaswave.errors import UsageError
from elaswave.models.calls import describe


def check_graph(
    who: str, outputs: Iterable[torch.Tensor], own: Iterable[torch.Tensor], others: Mapping[int, str]
) -> None:
    """Refuses a graph that leaves its layer.

    Args:
        who: layer or loss, for errors.
        outputs: with their graphs.
        own: parameters of the layer, and its inputs.
        others: names of other parameters of this worker, by ``id``.
    Raises:
        UsageError: names what is wrong.
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
    for leaf in leaves:
        if id(leaf) not in known:
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
