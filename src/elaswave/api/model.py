"""The model of a script as the engine takes it: a list of named layers, each built where it is held.

A module that the script has made keeps its values and is never computed with: every process that holds its layer
computes with a copy of it. What the engine cannot train yet is refused here, all of it at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elaswave.errors import UsageError
from elaswave.models.admission import (
    CopyOf,
    check_hooks,
    check_module,
    check_not_meta,
    check_sizes_known,
    problems_with_captured,
    problems_with_layer_fields,
    problems_with_shared_buffers,
    put_in_training,
    refuse_overlap,
    ties_of,
    without_values,
)
from elaswave.models.foreign.layer import foreign_in, kind_line
from elaswave.models.layers import Layer, ModelSpec
from elaswave.protocol.step.scores import AUX_LOSS
from elaswave.state.flat import model_shapes

_LAYERS_MAX = 1024
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class OwnModelSpec:
    """A script's model, checked.

    Args:
        model: an ``nn.Sequential``, or a list of modules and `Layer`.
        loss, metrics: of the last layer's output and the targets.
    Raises:
        UsageError: lists everything that is wrong with it.
    """

    def __init__(self, model: Any, loss: Any, metrics: Any = None) -> None:
        layers, problems = _layers_of(_named(model))
        if not callable(loss):
            problems.append(f"the loss is of type {type(loss).__name__}, needed: a function of outputs and targets")
        problems += _problems_with_metrics(metrics or {})
        self.spec = ModelSpec(layers=layers, loss=loss, metrics=metrics or {})
        modules = _modules(layers, problems)
        for layer, module in zip(layers, modules, strict=True):
            problems += _problems_with_layer(layer, module)
        problems += _problems_with_builders(layers, modules)
        parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
        if not parameters:
            problems.append("no parameter of the model requires a gradient, so there is nothing to train")
        elif len(dtypes) > 1:
            problems.append(
                f"the parameters to be trained are of the types {' and '.join(dtypes)}, needed: one type for all layers"
            )
        _refuse(problems)
        model_shapes(self.spec)  # says what cannot be tied or kept
        self.dtype = parameters[0].dtype
        """That all layers compute in."""
        self.layer_parameters = tuple(map(_num_parameters, layers, modules))
        """Number of parameters of each layer."""
        self.foreign = tuple(
            kind_line(where, part.kind)
            for layer, module in zip(layers, modules, strict=True)
            for where, part in foreign_in(layer.name, module).items()
        )
        """Kinds of foreign parts."""


def _num_parameters(layer: Layer, module: nn.Module) -> int:
    """Of a layer; one that it uses several times counts once."""
    found = {layer.ties.get(name, layer.full_name(name)): each.numel() for name, each in module.named_parameters()}
    return sum(found.values())


def dtype_name(dtype: torch.dtype) -> str:
    """A type as the configuration calls it."""
    return _DTYPES[dtype]


def _named(model: Any) -> list[tuple[str, nn.Module | Layer]]:
    """The layers of a model, with the names that ``nn.Sequential`` would give them.

    Raises:
        UsageError: it is no model.
    """
    if isinstance(model, nn.Sequential):
        _check_container(model)
        named: list[tuple[str, Any]] = list(model._modules.items())  # named_children() leaves out repeated modules
    elif isinstance(model, Sequence) and not isinstance(model, str):
        named = [(each.name if isinstance(each, Layer) else str(index), each) for index, each in enumerate(model)]
    else:
        raise UsageError(
            f"model is of type {type(model).__name__}, needed: an nn.Sequential, or a list of nn.Module and "
            "elaswave.Layer. Cut a model into the layers that run one after the other"
        )
    wrong = [f"layer {name} is {each!r}"[:200] for name, each in named if not isinstance(each, nn.Module | Layer)]
    if wrong:
        raise UsageError(f"a layer is an instance of nn.Module or an elaswave.Layer, but {'; '.join(wrong)}")
    if not 1 <= len(named) <= _LAYERS_MAX:
        raise UsageError(f"the model has {len(named)} layers, needed: 1 to {_LAYERS_MAX}")
    return named


def _layers_of(named: Sequence[tuple[str, nn.Module | Layer]]) -> tuple[tuple[Layer, ...], list[str]]:
    """All layers, those of instances with their ties, and what is wrong with how they are put together.

    Raises:
        UsageError: layers that cannot be looked at further.
    """
    instances = {name: each for name, each in named if isinstance(each, nn.Module)}
    _refuse([problem for _, each in named if isinstance(each, Layer) for problem in problems_with_layer_fields(each)])
    for name, each in instances.items():
        check_sizes_known(name, each)
    put_in_training(instances)
    ties = ties_of(instances)
    layers = tuple(
        each if isinstance(each, Layer) else Layer(name, CopyOf(each, name), ties=ties.get(name, {}))
        for name, each in named
    )
    return layers, [*problems_with_shared_buffers(instances), *_problems_with_names(layers)]


def _check_container(model: nn.Sequential) -> None:
    """Refuses a container that does more than to call its layers one after the other: only they are trained.

    Raises:
        UsageError: names what it does.
    """
    kind = type(model)
    own = [name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]
    hooks = [model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks]
    if (kind.forward, kind.__call__) != (nn.Sequential.forward, nn.Sequential.__call__) or "forward" in vars(model):
        found, instead = "a forward of its own", "the parts of its forward as layers in a list"
    elif own:
        found, instead = f"{', '.join(own)} of its own", "it to one of the layers"
    elif any(hooks):
        found, instead = "forward or backward hooks", "them to its layers, or write what they do as a layer"
    else:
        return
    raise UsageError(
        f"model is a {kind.__name__} with {found}, which would be left out: an nn.Sequential is taken for the list of "
        f"its layers. Give {instead}; a list with the whole model in it, [model], is one layer"
    )


def _refuse(problems: Sequence[str]) -> None:
    """Refuses a model that cannot be trained.

    Args:
        problems: all that was found; none if it can.
    Raises:
        UsageError: there is a problem; it names all of them.
    """
    if problems:
        raise UsageError("the model cannot be trained: " + "; ".join(problems))


def _modules(layers: Sequence[Layer], problems: list[str]) -> list[nn.Module]:
    """Every layer's module for its shapes.

    Args:
        layers: of the model.
        problems: found so far.
    Raises:
        UsageError: some cannot be built: these and all other problems.
    """
    modules, failed = [], []
    for layer in layers:
        try:
            modules.append(without_values(layer))
        except UsageError as error:
            failed.append(error)
    if failed:
        raise UsageError(f"the model cannot be trained: {'; '.join([*problems, *map(str, failed)])}") from failed[0]
    return modules


def _problems_with_builders(layers: Sequence[Layer], modules: Sequence[nn.Module]) -> list[str]:
    """What functions have not made themselves."""
    both = list(zip(layers, modules, strict=True))
    problems = problems_with_captured(
        [(layer, module) for layer, module in both if not isinstance(layer.build, CopyOf)],
        {layer.name: module for layer, module in both if isinstance(layer.build, CopyOf)},
    )
    trained = {
        id(parameter): (layer.full_name(name), parameter)
        for layer, module in both
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not parameter.is_meta and not layer.is_further_use(name)
    }
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for full, parameter in trained.values():
        try:
            refuse_overlap(full, parameter, spans)
        except UsageError as error:
            problems.append(str(error))
    return problems


def _problems_with_names(layers: Sequence[Layer]) -> list[str]:
    names = [layer.name for layer in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems = [f"two layers are called {name!r}; give each a name of its own" for name in twice]
    problems += [
        f"two layers are called {name!r} and {other!r}: names of tensors could not be told apart"
        for name in sorted(set(names))
        for other in sorted(set(names))
        if other.startswith(f"{name}.")
    ]
    return problems


def _problems_with_metrics(metrics: Any) -> list[str]:
    if not isinstance(metrics, Mapping):
        return [f"metrics are of type {type(metrics).__name__}, needed: a dictionary of functions by name"]
    problems = [
        f"the metric {name!r} is of type {type(metric).__name__}, needed: a function of outputs and targets"
        for name, metric in metrics.items()
        if not isinstance(name, str) or not callable(metric)
    ]
    for taken, what in ((AUX_LOSS, "what auxiliary losses add to the loss is"), ("loss", "the loss is")):
        if taken in metrics:
            problems.append(f"a metric is called {taken}, as {what}; rename it")
    return problems


def _problems_with_layer(layer: Layer, module: nn.Module) -> list[str]:
    """What of a layer cannot be trained, by its full names."""
    try:
        check_module(layer.name, module)
        check_hooks(layer.name, module)
        if isinstance(layer.build, CopyOf):
            check_not_meta(layer.name, module)
            layer.build.check()
        problems = []
    except UsageError as error:
        problems = [str(error)]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _DTYPES:
            problems.append(f"{layer.full_name(name)} is of type {parameter.dtype}, needed: float32 or bfloat16")
    return problems
