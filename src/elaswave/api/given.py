"""What a script gives, as it is taken or refused: its model as a list of layers, data that processes may share.

A module that the script has made keeps its values and is never computed with: every process that holds its layer
computes with a copy of it. What the engine cannot train yet is refused here, all of it at once.

What a dataset or a collate function holds, and processes must not share (sockets, pipes, connections), is refused too:
each process of a job would get what another one has asked for. Objects are walked: attributes, items, closures, and the
globals that a function names. Nothing is asked of them but `fileno`, and no more than a bound of them are looked at,
those near the root first.
"""

import collections
import contextlib
import dis
import functools
import inspect
import logging
import os
import stat
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from fcntl import F_GETFL, fcntl
from itertools import islice
from typing import Any

import numpy as np
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
from elaswave.protocol.step.ballot import AUX_LOSS
from elaswave.state.flat import model_shapes

_LAYERS_MAX = 1024
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
OBJECTS_MAX = 100_000
"""That are looked at, in all: some tenths of a second."""
ITEMS_MAX = 1_000
"""Of one container or object."""
_LEAVES = (
    str, bytes, bytearray, int, float, complex, type, types.ModuleType, torch.Tensor, np.ndarray, np.generic,
    logging.Logger, logging.Handler,
)  # fmt: skip
"""What holds no connection for samples; what a logger writes to is no data."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN = __name__.partition(".")[0]
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_CALLED = ("__getitem__", "__getitems__", "__len__", "__call__")
"""Methods whose closures and globals count."""


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
    """Counts the parameters of a layer; one that it uses several times counts once."""
    found = {layer.ties.get(name, layer.full_name(name)): each.numel() for name, each in module.named_parameters()}
    return sum(found.values())


def dtype_name(dtype: torch.dtype) -> str:
    """Names a type as the configuration calls it."""
    return _DTYPES[dtype]


def _named(model: Any) -> list[tuple[str, nn.Module | Layer]]:
    """Lists the layers of a model, with the names that ``nn.Sequential`` would give them.

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
    """Makes all layers, those of instances with their ties, and lists what is wrong with how they are put together.

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
    """Makes every layer's module for its shapes.

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
    """Lists what functions have not made themselves."""
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
    """Lists what of a layer cannot be trained, by its full names."""
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


def refuse_connections(parts: Mapping[str, Any]) -> None:
    """Refuses data that holds what processes must not share.

    Args:
        parts: datasets and functions, by the names that a person knows them by.
    Raises:
        UsageError: names where the first such object is held, what it is, and what to do.
    """
    for path, value in held(parts):
        what = _shared(value)
        if what is not None:
            raise UsageError(
                f"{path} is {what}: all processes of the job would share it, and each would get what another one has "
                "asked for. Let each process make its own when it first needs it (in __getitem__, kept in a dictionary "
                "under os.getpid()), and close this one, or set it to None, before train()"
            )


@contextlib.contextmanager
def without_new_connections(parts: Mapping[str, Any]) -> Iterator[None]:
    """Closes what data has connected to meanwhile, where an attribute was missing or None before, and sets that back.

    The script's process draws a few samples too; a dataset that connects when the first one is asked for would hold
    what the processes of the next job must not share.

    Args:
        parts: as of `refuse_connections`.
    """
    before = [
        (value, {name: inner is None for name, inner in _dictionary(value).items()})
        for _, value in held(parts)
        if _is_own(type(value).__module__) and not isinstance(value, threading.local)
    ]
    try:
        yield
    finally:
        for holder, names in before:
            for name, value in list(_dictionary(holder).items()):
                if names.get(name, True) and any(_shared(inner) for _, inner in held({name: value})):
                    _put_back(holder, name, is_missing=name not in names)
                    with contextlib.suppress(Exception):  # it may have no such method, or be of another thread
                        value.close()


def _put_back(holder: Any, name: str, *, is_missing: bool) -> None:
    if is_missing:
        del _dictionary(holder)[name]
    else:
        _dictionary(holder)[name] = None


def held(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields all that can be reached from objects, each once, the nearest first, with the way to it:
    ``dataset.files[3]``.

    Args:
        parts: the objects by name.
    """
    seen: dict[int, Any] = {}  # keeps what it has seen alive: ids of the living are different
    streams = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    waiting = collections.deque(parts.items())
    for _ in range(OBJECTS_MAX):
        if not waiting:
            return
        path, value = waiting.popleft()
        # Of the standard streams each process of a job has its own.
        if value is None or id(value) in seen or id(value) in streams or issubclass(type(value), _LEAVES):
            continue
        seen[id(value)] = value
        yield path, value
        room = min(ITEMS_MAX, OBJECTS_MAX - len(waiting))
        waiting.extend((path + step, inner) for step, inner in islice(_inside(value), room))


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object holds, and the step that leads there. Methods of its own are not called."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, item in list(dict.items(value)):
            if key != os.getpid():  # what is kept for this process alone, no other one will use
                yield f"[{key!r:.60}]", item
    elif issubclass(kind, list | tuple | set | frozenset | collections.deque):
        base = next(base for base in (list, tuple, set, frozenset, collections.deque) if issubclass(kind, base))
        yield from ((f"[{index}]", item) for index, item in enumerate(islice(base.__iter__(value), ITEMS_MAX)))
    elif issubclass(kind, types.FunctionType):
        yield from _in_function(value)
    elif issubclass(kind, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif issubclass(kind, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif issubclass(kind, types.GeneratorType):
        yield from ((f".{name}", local) for name, local in inspect.getgeneratorlocals(value).items())
    yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes in an object's dictionary and slots; of a person's own classes also those that the class has."""
    yield from ((f".{name}", inner) for name, inner in list(_dictionary(value).items()))
    for base in type(value).__mro__:
        is_own, has_slots = _is_own(base.__module__), "__slots__" in vars(base)
        for name, inner in list(vars(base).items()) if is_own or has_slots else ():
            if isinstance(inner, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # a slot that is not set
                    yield f".{name}", inner.__get__(value, type(value))
            elif is_own and (name in _CALLED or not isinstance(inner, _METHODS)):
                yield f".{name}", inner


def _dictionary(value: Any) -> dict[str, Any]:
    try:
        if issubclass(type(value), threading.local):  # which has one for each thread
            return dict(value.__dict__)
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if issubclass(type(found), dict) else {}


def _in_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield f"'s {name}", cell.cell_contents
        except ValueError:  # not set yet
            continue
    for default in (function.__defaults__ or ()) + tuple((function.__kwdefaults__ or {}).values()):
        yield "'s default", default
    if _is_own(function.__module__):
        for name in _globals_of(code):
            if name in function.__globals__:
                yield f"'s {name}", function.__globals__[name]


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Globals that a function's code names, also in functions that it defines."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


@functools.cache
def _is_own(module: str | None) -> bool:
    """Tells whether a person has written a module: it is the script, or lies beside no library."""
    if not isinstance(module, str) or module.partition(".")[0] == _OWN:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    is_of_library = not isinstance(file, str) or file.startswith(_LIBRARIES) or "-packages/" in file
    return module == "__main__" or not is_of_library


def _shared(value: Any) -> str | None:
    """Tells what an object is that processes must not share; None for all others."""
    kind = type(value)
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is not None and issubclass(kind, sqlite3.Connection | sqlite3.Cursor):
        return _of_sqlite(value)
    if str(kind.__module__).partition(".")[0] == "h5py":
        mode = getattr(getattr(value, "file", None), "mode", "r")
        return None if mode == "r" else f"an HDF5 file that is open for writing (mode {mode!r})"
    descriptor = _descriptor(value)
    return None if descriptor is None else _of_descriptor(descriptor, kind)


def _of_sqlite(value: Any) -> str | None:
    connection = getattr(value, "connection", value)  # a cursor has one
    try:
        is_in_memory = not any(row[2] for row in connection.execute("PRAGMA database_list"))
    except Exception as error:  # closed, or of another thread
        is_in_memory = "closed" in str(error)
    return None if is_in_memory else "an open connection to a database of sqlite"


def _descriptor(value: Any) -> int | None:
    """Returns what `fileno` gives, beyond the standard streams."""
    if not hasattr(type(value), "fileno"):
        return None
    try:
        descriptor = value.fileno()
    except Exception:  # nothing is open
        return None
    return descriptor if type(descriptor) is int and descriptor > 2 else None


def _of_descriptor(descriptor: int, kind: type) -> str | None:
    try:
        mode, flags = os.fstat(descriptor).st_mode, fcntl(descriptor, F_GETFL)
    except OSError:
        return None
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if stat.S_ISSOCK(mode):
        return f"an open socket ({name})"
    if stat.S_ISFIFO(mode):
        return f"an open pipe ({name})"
    if stat.S_ISREG(mode) and flags & os.O_ACCMODE == os.O_RDWR:
        return f"a file that is open for reading and writing ({name})"
    if not stat.S_IFMT(mode):  # what epoll, eventfd and the like have opened
        return f"an open descriptor of the kernel's ({name})"
    return None
