"""A layer whose forward and backward another process computes: `Foreign`, and the kinds of those of a model."""

import json
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from elaswave.errors import UsageError
from elaswave.models.admission import without_values
from elaswave.models.foreign.connection import SERVER
from elaswave.models.foreign.part import (
    TIMEOUT_MAX_S,
    BatchPosition,
    ForeignPart,
    Service,
    check_types,
    same_float_bits,
)
from elaswave.models.foreign.server import ADAPTERS, Array
from elaswave.models.layers import Layer, check_wait, describe, draw_key


class Foreign(nn.Module):
    """A layer that a server computes, in another process and with other software (docs/foreign.md).

    Its parameters are ordinary ones of this module: sums, optimizer, copies, checkpoints and exports are elaswave's. A
    server is asked for their names, shapes and first values when the layer is made. Each worker that holds the layer
    starts a server of its own, which ends with it.

    Args:
        part: ``FILE.py:NAME`` or ``MODULE:NAME`` of what is served; goes with `software`.
        software: of the adapter that serves it: ``"torch"``, ``"jax"`` or ``"numpy"``.
        python: the interpreter that has this software; None: the one that runs here.
        options: keyword arguments for NAME, which can be written as JSON.
        command: instead of all these, the command of a server of one's own; ``{pid}`` in a word of it becomes the
            process id of the worker.
        parameters: first values by name, instead of the server's.
        seed: that the server makes first values of.
        input_shape, output_shape: of one sample, without the first dimension, of layers that take and return one
            tensor; what comes is compared with them.
        timeout_s: how long an answer may take, at most 110; a later one is the worker's loss.
        start_timeout_s: the same for the first answers of a server, which loads its software and compiles.
        duplicate: a second server computes everything too, and a difference of one bit is the worker's loss.
    Raises:
        UsageError: the arguments cannot be used.
        ForeignError: the server does not answer as it should.
        ForeignPartError: the part raised when its first values were made.
    """

    def __init__(
        self,
        part: str | None = None,
        *,
        software: str | None = None,
        python: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        command: Sequence[str] | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
        seed: int = 0,
        input_shape: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        timeout_s: float = 60.0,
        start_timeout_s: float = 100.0,
        duplicate: bool = False,
    ) -> None:
        super().__init__()
        words = _command(part, software, python, options, command)
        for option, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= TIMEOUT_MAX_S:
                raise UsageError(f"{option} = {seconds!r}, needed: seconds, more than 0, at most {TIMEOUT_MAX_S:g}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise UsageError(f"seed = {seed!r}, needed: a whole number from 0 to 2^63 - 1")
        self.input_shape = _sizes("input_shape", input_shape)
        self.output_shape = _sizes("output_shape", output_shape)
        service = Service(words, part or " ".join(words), float(timeout_s), float(start_timeout_s), bool(duplicate))
        with torch.device("cpu"):  # a build for shapes asks a server too
            asking = ForeignPart(service._replace(duplicate=False))
            try:
                about = asking.begin(lambda: None)
                values = (
                    asking.initial(seed) if parameters is None else _given(service.name, parameters, about.parameters)
                )
            finally:
                asking.close()
        self.kind: str = about.kind
        """Software, versions, part and processor of its server; every worker's must be of this kind."""
        self._part = ForeignPart(service, self.kind)
        is_meta = torch.empty(0).device.type == "meta"
        self._names = tuple(values)
        for name, value in values.items():
            _register(self, service.name, name, nn.Parameter(value.to("meta") if is_meta else value.detach().clone()))

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts servers of its own."""
        return {**self.__dict__, "_part": ForeignPart(self._part.service, self.kind)}

    def extra_repr(self) -> str:
        """Returns what ``repr`` shows between the brackets."""
        return f"{' '.join(self._part.service.command)}, {self.kind}"

    def pids(self) -> list[int]:
        """Process ids of the servers that run for this copy of the layer."""
        return self._part.pids

    def found_kind(self) -> str:
        """Asks for the kind of the server that is started here, whatever it should be; the server is ended again.

        Raises:
            ForeignError: it does not answer as it should.
        """
        asking = ForeignPart(self._part.service._replace(duplicate=False))
        try:
            return asking.begin(check_wait).kind
        finally:
            asking.close()

    def forward(self, value: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """Asks the server; a tuple of tensors becomes several arguments of the part."""
        inputs = value if isinstance(value, tuple) else (value,)
        if not inputs or not all(isinstance(each, torch.Tensor) for each in inputs):
            raise UsageError(
                f"the foreign part {self._part.service.name} is given {describe(value)}, needed: a tensor, or a tuple "
                "of tensors; take other trees apart in the layer before"
            )
        check_types(f"the foreign part {self._part.service.name} is given", inputs)
        self._check_shape("is given", self.input_shape, inputs)
        if self.output_shape is not None and not inputs[0].dim():
            raise UsageError(
                f"the foreign part {self._part.service.name} is given a tensor without dimensions, needed: the samples "
                "as its first one, because output_shape is of one sample"
            )
        if inputs[0].is_meta:
            if self.output_shape is None:
                raise UsageError(
                    f"what the foreign part {self._part.service.name} returns is asked for without values: give its "
                    "output_shape"
                )
            return torch.empty((inputs[0].shape[0], *self.output_shape), dtype=inputs[0].dtype, device="meta")
        is_one: list[bool] = []
        parameters = [self.get_parameter(name) for name in self._names]
        check_types(f"the foreign part {self._part.service.name} has as a parameter", parameters)
        outputs = _Remote.apply(self, is_one, len(inputs), *inputs, *parameters)
        self._check_shape("has returned", self.output_shape, outputs)
        return outputs[0] if is_one[0] else outputs

    def _check_shape(self, what: str, shape: tuple[int, ...] | None, tensors: Sequence[torch.Tensor]) -> None:
        if shape is not None and (len(tensors) != 1 or not tensors[0].dim() or tuple(tensors[0].shape[1:]) != shape):
            found = ", ".join(str(list(each.shape)) for each in tensors)
            raise UsageError(
                f"the foreign part {self._part.service.name} {what} {found}, needed: one tensor of shape "
                f"[samples, {', '.join(map(str, shape))}]"
            )


class _Remote(torch.autograd.Function):
    """Forward and backward by a server."""

    @staticmethod
    def forward(
        ctx: Any, layer: Foreign, is_one: list[bool], num_inputs: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        inputs, parameters = tensors[:num_inputs], tensors[num_inputs:]
        output = None
        if layer.output_shape is not None:
            output = Array("int64", (inputs[0].shape[0], *layer.output_shape), b"")  # the widest type
        found = layer._part.forward(parameters, inputs, _place(), check_wait, output)
        is_one.append(found.is_one)
        ctx.layer, ctx.num_inputs, ctx.known = layer, num_inputs, None
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(each for each in found.tensors if not each.is_floating_point()))
        return found.tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        inputs, parameters = tensors[: ctx.num_inputs], tensors[ctx.num_inputs :]
        reached = [gradient for gradient in gradients if gradient.is_floating_point()]
        # A backward in two halves asks twice, once for the input's gradient and once for the parameters'.
        if ctx.known is None or not all(map(same_float_bits, ctx.known[0], reached)):
            made = ctx.layer._part.backward(parameters, inputs, reached, _place(), check_wait)
            ctx.known = (reached, made)
        found = iter(ctx.known[1])
        return (None, None, None, *(next(found) if each.is_floating_point() else None for each in tensors))


def _place() -> BatchPosition:
    key = draw_key()
    return BatchPosition() if key is None else BatchPosition(*key[-2:])


def _command(
    part: str | None,
    software: str | None,
    python: str | Path | None,
    options: Mapping[str, Any] | None,
    command: Sequence[str] | None,
) -> tuple[str, ...]:
    """Makes the words that start a server.

    Raises:
        UsageError: the arguments contradict each other, or are none.
    """
    if command is not None:
        if part is not None or software is not None or python is not None or options is not None:
            raise UsageError(
                "a Foreign has a command of its own, or part, software, python and options: give one of both"
            )
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise UsageError(f"command = {command!r}, needed: the words of a command, as a list")
        return tuple(command)
    if not isinstance(part, str) or not all(part.rpartition(":")[::2]):
        raise UsageError(f"part = {part!r}, needed: FILE.py:NAME or MODULE:NAME of what is served")
    if not isinstance(software, str) or software not in ADAPTERS:
        raise UsageError(f"software = {software!r}, needed: one of {', '.join(sorted(ADAPTERS))}, or a command")
    where, _, name = part.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise UsageError(f"part = {part!r}: there is no file {where}; give its path from where the script runs")
        where = str(Path(where).absolute())
    try:
        text = json.dumps(dict(options or {}), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise UsageError(f"options = {options!r} cannot be written as JSON: {error}") from error
    interpreter = sys.executable if python is None else os.fspath(python)
    return (
        interpreter, "-I", str(SERVER), "--software", software, "--options", text, "--parent", "{pid}",
        f"{where}:{name}",
    )  # fmt: skip


def _given(
    part: str, values: Mapping[str, torch.Tensor], wanted: Sequence[tuple[str, str, list[int]]]
) -> dict[str, torch.Tensor]:
    """Checks the first values of a script, and returns them in the server's order.

    Raises:
        UsageError: they are not those that the part has.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"parameters of the foreign part {part} are {describe(values)}, needed: tensors by name")
    found = {name: _seen(value) for name, value in values.items()}
    needed = {name: (kind, shape) for name, kind, shape in wanted}
    problems = [
        f"{name} is {_shown(found.get(name))}, needed: {_shown(needed.get(name))}"
        for name in sorted(found.keys() | needed.keys())
        if found.get(name) != needed.get(name)
    ]
    if problems:
        raise UsageError(f"parameters of the foreign part {part}: {'; '.join(problems)}")
    return {name: values[name] for name in needed}


def _seen(value: object) -> tuple[str, list[int]] | str:
    """Tells the type and shape of a tensor that travels; else what the value is, for errors."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__module__}.{type(value).__qualname__}, no tensor of torch"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    return str(value.dtype).removeprefix("torch."), list(value.shape)


def _shown(parameter: tuple[str, list[int]] | str | None) -> str:
    if parameter is None or isinstance(parameter, str):
        return parameter or "none"
    return f"{parameter[0]} of shape {parameter[1]}"


def _sizes(option: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Checks the sizes of one sample, and returns them.

    Raises:
        UsageError: they are none.
    """
    if sizes is None:
        return None
    try:
        found = tuple(map(operator.index, sizes))
    except TypeError:
        found = (-1,)
    if min(found, default=0) < 0:
        raise UsageError(f"{option} = {sizes!r}, needed: the sizes of one sample, such as (64,)")
    return found


def _register(module: nn.Module, part: str, name: str, parameter: nn.Parameter) -> None:
    """Gives a module a parameter whose name may have dots, as names of torch's modules have."""
    *path, last = name.split(".")
    try:
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, parameter)
    except (AttributeError, KeyError) as error:
        raise UsageError(
            f"the foreign part {part} has a parameter called {name!r}, which cannot be the name of one here: {error}"
        ) from error


def foreign_in(layer: str, module: nn.Module) -> dict[str, Foreign]:
    """Finds the foreign parts of a layer, by where they are: the layer's name, or a path within it.

    Args:
        layer: its name.
        module: built.
    """
    return {
        f"{layer}.{path}" if path else layer: each for path, each in module.named_modules() if isinstance(each, Foreign)
    }


def kind_line(where: str, kind: str) -> str:
    """Formats the kind of a foreign part as a run's configuration keeps it."""
    return f"{where}: {kind}"


def kinds_here(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Lists the lines of a model as its servers are in this process, whatever they should be.

    Raises:
        ForeignError: a server does not answer as it should.
    """
    return tuple(
        kind_line(where, part.found_kind())
        for layer in layers
        for where, part in foreign_in(layer.name, without_values(layer)).items()
    )


def check_kinds(layer: str, module: nn.Module, pinned: Sequence[str]) -> None:
    """Refuses a layer whose foreign parts are of another kind than the run was begun with.

    Args:
        layer: its name.
        module: built.
        pinned: lines of the run's configuration; none where a run has no foreign part.
    Raises:
        UsageError: names the part, and both kinds.
    """
    known = dict(line.split(": ", 1) for line in pinned)
    for where, part in foreign_in(layer, module).items() if known else ():
        if known.get(where) != part.kind:
            raise UsageError(
                f"the foreign part {where} is served by {part.kind} here, and the run was begun with "
                f"{known.get(where, 'none there')}: install the same software here, with the same code of the part, or "
                "begin another run"
            )
