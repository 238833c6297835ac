"""What every worker of a run derives from its configuration and its training: the model, and all of `RunPlan`.

What only a real build and a layer's first micro-batch show: other parameters than those described, a weight that is
not the layer's own, a checkpoint that cannot be run again here, a gradient that is sparse.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node

from elaswave.blocks.shapes import LayerShape, StateShapes, with_states
from elaswave.checkpoints.format import EMA, MASTER
from elaswave.config.schema import Config
from elaswave.data.samples import Sampler
from elaswave.errors import UsageError
from elaswave.job.plan import RunPlan, sampler_of
from elaswave.models.admission import CopyOf, check_is_module, check_not_meta, check_sizes_known
from elaswave.models.foreign.layer import check_kinds
from elaswave.models.layers import Layer, ModelSpec, build_layer, describe
from elaswave.state.flat import FlatLayer, FlatUnit, model_shapes, persistent_buffers
from elaswave.training.definition import Samples, Training, builtin_training
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
    """Lists what a layer has, by name in its module."""
    shape = shapes[index]
    found = {slot.name: _kind("trained", slot.shape) for slot in shape.tensors}
    found |= {layer.full_name(use.name): _kind("trained", shapes[use.unit].tensors[0].shape) for use in shape.shared}
    found |= {tensor.name: _kind("frozen", tensor.shape, tensor.dtype) for tensor in shape.frozen}
    buffers = () if shape.buffers is None else shapes[shape.buffers].tensors
    found |= {slot.name: _kind("buffer", slot.shape, slot.dtype) for slot in buffers}
    return {layer.own_name(name): kind for name, kind in found.items()}


def _built(module: nn.Module) -> dict[str, str]:
    """Does the same as `_described`, but of a module that is there."""
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
    """Finds the leaves of a graph that are no own ones.

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


def _nodes(roots: Iterable[Node | None]) -> Iterator[Node]:
    """Lists all nodes of a graph, once each."""
    seen: set[Node] = set()
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions if child is not None]


class Blueprint(RunPlan):
    """Everything about a run that follows from its configuration and what is trained.

    Args:
        config: with its layout resolved.
        training: what is trained; None: what the configuration describes.
    Raises:
        UsageError: nothing of the model is trained.
    """

    def __init__(self, config: Config, training: Training | None = None) -> None:
        self.training = training = training or builtin_training(config)
        layers = training.model.layers
        every = model_shapes(training.model)
        shapes = tuple(shape for shape in every if not shape.is_buffers)
        buffers = every[len(shapes) :]  # the last units; no optimizer knows of them
        self.optimizer = optimizer = training.make_optimizer(shapes)
        names = tuple(layer.name for layer in layers)
        averages = (EMA,) if config.optimizer.ema_decay else ()
        # What is there before the first update comes first: what comes with it is added at the end.
        slots = (MASTER, *averages, *optimizer.slots)
        shapes = with_states(optimizer.shapes(shapes), averages) + buffers
        self.frozen: Mapping[str, torch.Tensor] = {}
        """Values of frozen parameters that are not as built, by full name; see `elaswave.engine.materialise`."""
        super().__init__(config, StateShapes(names, shapes, slots, optimizer.late))
        if self.state.lowest_trained == len(names):
            raise UsageError(
                "no parameter of the model requires a gradient, so there is nothing to train: call requires_grad_() on "
                "what is to be trained, or use Trainer.evaluate"
            )

    @property
    def model(self) -> ModelSpec:
        """Layers and loss."""
        return self.training.model

    @property
    def dtype(self) -> torch.dtype:
        """What forward and backward compute in."""
        return self.training.dtype

    def build(self, index: int) -> nn.Module:
        """Builds a layer's module with its initial values.

        Args:
            index: its position in the model.
        Raises:
            UsageError: it cannot be built, is another one than for its shapes, or has foreign parts of another kind
                than the run was begun with.
        """
        layer = self.model.layers[index]
        module = build_as_described(layer, self.config.run.seed, index, self.shapes)
        check_kinds(layer.name, module, self.config.model.foreign)
        return module

    def flat_layer(
        self,
        index: int,
        units: Mapping[int, FlatUnit],
        module: nn.Module | None = None,
        place: torch.device | None = None,
    ) -> FlatLayer:
        """Makes a layer, as `FlatLayer` makes it.

        Args:
            index: its position in the model.
            units: the shared units that are here.
            module: built before; None: it is built.
            place: where it computes; None: in the host's memory.
        """
        return FlatLayer(
            self.model.layers[index],
            self.shapes[index],
            self.dtype,
            units=units,
            module=self.build(index) if module is None else module,
            frozen=self.frozen,
            place=place,
        )

    def open_samples(self, cache_dir: Path) -> Samples:
        """Opens the data of the run.

        Args:
            cache_dir: where generated text is kept.
        """
        return self.training.open_samples(cache_dir)

    def sampler(self, samples: Samples) -> Sampler:
        """Makes the sampler, which tells which samples make up which micro-batch of training."""
        return sampler_of(self.config, samples.num_samples("train"), samples.sources)
