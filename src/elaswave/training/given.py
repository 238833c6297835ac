"""What a script gives to a run, as texts that its checkpoints keep: a resumed run says what is another one by then.

Names and shapes of tensors and samples of the data are compared elsewhere, and refused; here is what a checkpoint's
numbers cannot show: options of the optimizer and its scheduler with their values, and a hash each of what a layer, the
loss and a metric do. Values of tensors are left out, for a run goes on with those of the checkpoint.
`elaswave.data.fingerprint.script_differences` compares them. No files here.
"""

import functools
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from elaswave.config.values import plain
from elaswave.data.fingerprint import PYTHON
from elaswave.hashing import key64
from elaswave.models.admission import CopyOf
from elaswave.training.definition import Training

_ITEMS_MAX, _SHOWN_MAX = 10_000, 100
_FOLLOWS = ("base_lrs", "_last_lr", "_step_count", "_get_lr_called_within_step", "_is_initial", "last_generation")
"""In the state of a new scheduler: what follows from the optimizer's options, or is no option."""
_LIBRARIES = ("torch", "numpy", "builtins", "collections", "functools", "typing", "abc")
"""Modules whose classes are known by their names."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def given_by(training: Training) -> dict[str, str]:
    """Describes what a script gives, by name.

    Args:
        training: of the script. What its optimizer is made with, `elaswave.training.torch_optimizer` says.
    """
    model = training.model
    layers = {f"layer {layer.name}": hash_of_code(layer.build) for layer in model.layers}
    metrics = {f"metric {name}": hash_of_code(metric) for name, metric in model.metrics.items()}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {PYTHON: version, "loss": hash_of_code(model.loss)} | layers | metrics


def options_given(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """Describes the options of a new optimizer and its scheduler, by name.

    Args:
        optimizer: as it was made.
        scheduler: of it, which has set its first options; None: there is none.
    """
    given = {"optimizer": type(optimizer).__qualname__}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        given |= {f"optimizer.groups[{number}].{name}": _shown(value) for name, value in options.items()}
    if scheduler is not None:
        given["lr_scheduler"] = type(scheduler).__qualname__
        state = {name: value for name, value in scheduler.state_dict().items() if name not in _FOLLOWS}
        given |= {f"lr_scheduler.{name}": _shown(value) for name, value in state.items()}
        given["a function of lr_scheduler"] = hash_of_code(
            [
                value
                for name, value in sorted(vars(scheduler).items())
                if name.endswith("_lambdas") or name == "scale_fn"
            ]
        )
    return given


def _shown(value: object) -> str:
    text = repr(plain(value))
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}... ({key64(text):016x})"


def hash_of_code(value: Any) -> str:
    """Computes a hash of what a callable does: its code, what it has captured, its settings; values of tensors are left
    out.

    The same in each process with one version of Python, wherever objects are in memory.
    """
    found = hashlib.blake2b(digest_size=8)
    for text in _Description().of(value):
        found.update(text.encode("utf-8", "backslashreplace") + b"\0")
    return found.hexdigest()


class _Description:
    """Of objects: texts that say what they are made of, each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []
        """So that none of them is gone, and another at its place."""

    def of(self, value: Any) -> Iterator[str]:
        """Yields texts of an object and of all that it is made of."""
        if isinstance(value, np.generic):
            value = plain(value)
        if isinstance(value, _PLAIN):
            yield repr(value)
            return
        number = self._seen.setdefault(id(value), len(self._seen))
        if number < len(self._kept):
            yield f"#{number}"
            return
        self._kept.append(value)
        if isinstance(value, types.CodeType):
            yield from self._code(value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.MethodType):
            yield from self._each((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            yield from self._each((value.func, value.args, value.keywords))
        elif isinstance(value, set | frozenset):
            yield repr(sorted(map(repr, value)))
        elif isinstance(value, Mapping):
            yield from self._mapping(value)
        elif isinstance(value, tuple | list):
            yield f"{len(value)}"
            yield from self._each(value if len(value) <= _ITEMS_MAX else ())
        elif isinstance(value, type):
            yield from self._class(value)
        else:
            yield from self._object(value)

    def _each(self, values: Any) -> Iterator[str]:
        for value in values:
            yield from self.of(value)

    def _mapping(self, values: Mapping[Any, Any]) -> Iterator[str]:
        yield f"{len(values)}"
        for key in sorted(values, key=repr) if len(values) <= _ITEMS_MAX else ():
            yield repr(key) if isinstance(key, _PLAIN) else type(key).__qualname__
            yield from self.of(values[key])

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield from self._each((code.co_names, code.co_varnames, code.co_freevars, code.co_consts))

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield function.__qualname__
        yield from self._each((function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                yield from self.of(cell.cell_contents)
            except ValueError:
                yield "an empty cell"
        for name in function.__code__.co_names:
            used = function.__globals__.get(name)
            is_near = getattr(used, "__module__", None) == function.__module__
            if isinstance(used, _PLAIN) or (is_near and isinstance(used, types.FunctionType | type)):
                yield from self.of(used)

    def _class(self, kind: type) -> Iterator[str]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            return
        yield from self._each(kind.__bases__)
        for name, value in sorted(vars(kind).items()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                yield from self.of(function)
            elif isinstance(value, _PLAIN) and not name.startswith("__"):
                yield f"{name} {value!r}"

    def _object(self, value: Any) -> Iterator[str]:
        yield from self.of(type(value))
        if isinstance(value, torch.Tensor | np.ndarray):
            yield f"{value.dtype} {list(value.shape)}"
            return
        if isinstance(value, CopyOf):
            value = value.module
            yield from self.of(type(value))
        attributes = getattr(value, "__dict__", {})
        for name in sorted(name for name in attributes if isinstance(name, str) and not name.startswith("_")):
            if not (isinstance(value, nn.Module) and name == "training"):
                yield name
                yield from self.of(attributes[name])
        if isinstance(value, nn.Module):
            for name, child in value.named_children():
                yield name
                yield from self.of(child)
