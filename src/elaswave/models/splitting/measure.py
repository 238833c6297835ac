"""What only a real run of a network's operators shows: aliases, strides, what has a gradient; and seconds."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from elaswave.errors import UsageError
from elaswave.models.splitting.backward import functions_in, nodes_of
from elaswave.models.splitting.inputs import leaves_of
from elaswave.models.splitting.program import GETITEM, Op, Ref, execute, filled, function_of, last_uses
from elaswave.models.splitting.trace import Traced, cloned_constant

_BUDGET_S = 8.0
_RUNS_MAX, _RUNS_MIN = 5, 2
_META = torch.device("meta")


@dataclass
class ValueFacts:
    """What is known of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    num_bytes: int
    storage: int
    parent: int | None = None
    """The value that it is a view of, or the same as; None: it has memory of its own."""
    gradient: list[tuple[int, bool]] = field(default_factory=list)
    """From which operator on (its place) it has a gradient or not, in order."""
    gradient_stride: tuple[int, ...] | None = None
    """Of the gradient that reaches it; None: none does."""

    def has_gradient(self, place: int) -> bool:
        """Tells whether it has a gradient before the operator at a place runs."""
        return next((has for since, has in reversed(self.gradient) if since < place), False)

    @property
    def permutation(self) -> tuple[int, ...] | None:
        """The order of dimensions in which it lies densely in memory; None: it does not."""
        return _dense_order(self.shape, self.stride)

    @property
    def gradient_permutation(self) -> tuple[int, ...] | None:
        """The same of its gradient; None also where none flows."""
        return None if self.gradient_stride is None else _dense_order(self.shape, self.gradient_stride)


def _dense_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != expected:
            return None
        expected *= shape[dim]
    return order


@dataclass
class OperatorRun:
    """Of one run of all operators.

    Args:
        values: by value; without those that are several tensors.
        several: values that are several tensors, with the value that they are views of.
        seconds: by operator: forward, backward; zeros until they are measured.
        flops: by operator, forward, as formulas have it.
        functions: how often each `autograd.Function` that is not torch's stands in the graph.
    """

    values: dict[int, ValueFacts]
    several: dict[int, int | None]
    seconds: list[tuple[float, float]]
    flops: list[int]
    functions: Counter[type | str] = field(default_factory=Counter)


def state_values(traced: Traced, model: nn.Module) -> dict[int, torch.Tensor]:
    """Maps values to the tensors of a network; buffers are copies."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found: dict[int, torch.Tensor] = {}
    for value, state in traced.state.items():
        if state.kind == "parameter":
            found[value] = parameters[state.name]
        elif state.kind == "buffer":
            found[value] = buffers[state.name].detach().clone()
        else:
            found[value] = cloned_constant(traced.constants[state.name])
    return found


def input_values(traced: Traced, inputs: Any) -> dict[int, torch.Tensor]:
    """Copies a micro-batch's inputs, by value."""
    leaves = [leaf.detach().clone(memory_format=torch.contiguous_format) for _, leaf in leaves_of(inputs)]
    return dict(zip(traced.inputs, leaves, strict=True))


def run_operators(traced: Traced, model: nn.Module, example_inputs: Any) -> OperatorRun:
    """Runs all operators, forward and backward; takes no times.

    Args:
        traced: the network.
        model: with its values.
        example_inputs: of a micro-batch.
    Raises:
        UsageError: an operator writes a buffer or draws and says nothing of it, or has a gradient that is sparse.
    """
    return _Run(traced, state_values(traced, model) | input_values(traced, example_inputs)).facts()


def operator_seconds(traced: Traced, model: nn.Module, example_inputs: Any) -> list[tuple[float, float]]:
    """Measures seconds by operator, forward and backward: the least of a few runs; takes arguments as `measure`
    does."""
    start_s = time.perf_counter()
    runs: list[list[tuple[float, float]]] = []
    while len(runs) < _RUNS_MIN or (len(runs) < _RUNS_MAX and time.perf_counter() - start_s < _BUDGET_S):
        runs.append(_timed(traced, state_values(traced, model) | input_values(traced, example_inputs)))
    return [(min(run[place][0] for run in runs), min(run[place][1] for run in runs)) for place in range(len(runs[0]))]


class _Run:
    """One run in which everything stays in memory, so that what shares memory shows.

    Args:
        traced: the network.
        values: of state and inputs.
    """

    def __init__(self, traced: Traced, values: dict[int, Any]) -> None:
        self._traced, self._values = traced, values
        self._facts = OperatorRun({}, {}, [], [])
        self._buffers = {value: values[value].clone() for value in values if not values[value].requires_grad}
        self._places: dict[int, int] = {}
        """By number of a node of autograd, the place of the operator that has made it."""
        self._sparse: list[int] = []
        """Values whose gradient is sparse."""

    def facts(self) -> OperatorRun:
        facts, values = self._facts, self._values
        for value, tensor in values.items():
            facts.values[value] = _facts_of(tensor, -1)
        for place, op in enumerate(self._traced.ops):
            facts.flops.append(_flops_of(op, values))
            first, drawn = _sequence(), torch.get_rng_state()
            with _failure_named(op):
                execute([op], values, ((),))
            self._places.update(dict.fromkeys(range(first, _sequence()), place))
            if not op.draws and not torch.equal(drawn, torch.get_rng_state()):
                _refuse_silent_draws(op)
            self._note(place, op)
            self._refuse_silent_writes(op)
        facts.seconds = [(0.0, 0.0)] * len(self._traced.ops)
        self._note_gradients()
        return facts

    def _note_gradients(self) -> None:
        """Notes how gradients lie in memory: kernels that add may round by it."""
        known, values = self._facts.values, self._values
        for value in known:
            if values[value].requires_grad and values[value].grad_fn is not None:
                values[value].register_hook(lambda gradient, value=value: self._note_gradient(value, gradient))
        ends = [values[value] for value in self._traced.ends if values[value].requires_grad]
        self._facts.functions = functions_in(ends)
        wanted = {value: values[value] for value in self._traced.state if values[value].requires_grad}
        if ends and wanted:
            began: list[int] = []
            hooks = [
                node.register_prehook(lambda gradients, place=place: began.append(place))
                for node in nodes_of(ends) if (place := self._places.get(node._sequence_nr())) is not None
            ]  # fmt: skip
            try:
                gradients = [torch.ones_like(end) for end in ends]
                found = torch.autograd.grad(ends, list(wanted.values()), gradients, allow_unused=True)
                for value, gradient in zip(wanted, found):
                    if gradient is not None and gradient.layout is not torch.strided:
                        self._sparse.append(value)
            except Exception as error:
                self._refuse_sparse()
                raise self._backward_failed(error, began) from error
            finally:
                for hook in hooks:
                    hook.remove()
            self._refuse_sparse()

    def _note_gradient(self, value: int, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            self._sparse.append(value)
        else:
            self._facts.values[value].gradient_stride = tuple(gradient.stride())

    def _refuse_sparse(self) -> None:
        for value in self._sparse:
            user = next(op for op in reversed(self._traced.ops) if value in op.values)
            state = self._traced.state.get(value)
            raise UsageError(
                f"{user.target} at {user.source} makes a sparse gradient of "
                f"{'what it is given' if state is None else state.name}: look vectors up with sparse=False, sums of "
                "gradients are dense"
            )

    def _backward_failed(self, error: Exception, began: Sequence[int]) -> UsageError:
        """Tells what a backward has raised, with the operator whose gradient it was at."""
        op = self._traced.ops[began[-1]] if began else None
        where = "" if op is None else f" at {op.target} of {op.source}"
        return UsageError(
            f"the backward of the network fails{where} ({type(error).__name__}: {_first_line(error)}). It would fail "
            "without elaswave too: what an operator needs for its gradient must not be written in place after it "
            "(assign a new tensor: self.count = self.count + 1)"
        )

    def _note(self, place: int, op: Op) -> None:
        facts, made = self._facts.values, self._values[op.out]
        given = [value for value in op.values if value in facts]
        if isinstance(made, torch.Tensor):
            facts[op.out] = _facts_of(made, place)
            if op.target == GETITEM and isinstance(op.args[0], Ref):
                given = [value for value in [self._facts.several.get(op.args[0].value)] if value is not None]
            facts[op.out].parent = self._parent(facts[op.out].storage, given)
        elif isinstance(made, tuple | list):
            storages = [_storage(each) for each in made if isinstance(each, torch.Tensor)]
            parents = [parent for each in storages if (parent := self._parent(each, given)) is not None]
            self._facts.several[op.out] = parents[0] if parents else None
        for value in op.writes:
            storage = facts[value].storage
            for other, each in facts.items():
                if each.storage == storage and isinstance(tensor := self._values[other], torch.Tensor):
                    each.gradient.append((place, tensor.requires_grad))

    def _parent(self, storage: int, given: Sequence[int]) -> int | None:
        return next((value for value in given if self._facts.values[value].storage == storage), None)

    def _refuse_silent_writes(self, op: Op) -> None:
        """Whatever the schema says, the bits of buffers and inputs tell."""
        known = self._facts.values
        storages = {known[value].storage for value in op.writes}
        for value in self._buffers:
            if known[value].storage in storages:
                self._buffers[value] = self._values[value].detach().clone()
        for value in op.values:
            before = self._buffers.get(value)
            if before is not None and not _same_bits(self._values[value].detach(), before):
                state = self._traced.state.get(value)
                what = "an input" if state is None else f"{state.kind} {state.name}"
                raise UsageError(
                    f"operator {op.target} at {op.source} writes {what} in place, and its schema says nothing of it: "
                    "where it may run cannot be told. Write it with another operator, or give the layers by hand"
                )


@contextmanager
def _failure_named(op: Op) -> Iterator[None]:
    """Turns what an operator raises into an error that names its line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the network fails with the example inputs: {op.target} at {op.source} raises {type(error).__name__}: "
            f"{_first_line(error)}. Give inputs of the shapes and types that the network takes"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].partition(" Hint:")[0].rstrip(".")


def _facts_of(tensor: torch.Tensor, place: int) -> ValueFacts:
    return ValueFacts(
        tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), tensor.nbytes, _storage(tensor),
        gradient=[(place, tensor.requires_grad)],
    )  # fmt: skip


def _refuse_silent_draws(op: Op) -> None:
    raise UsageError(
        f"operator {op.target} at {op.source} draws random numbers and does not say so, so that they would depend on "
        "the cuts: give torch.library.custom_op tags=(torch.Tag.nondeterministic_seeded,)"
    )


def _flops_of(op: Op, values: Mapping[int, Any]) -> int:
    """Counts the operations of a forward without numbers: so no processor's choice of kernels shows. It is 0 for an
    operator that cannot run like that."""
    given = {value: pytree.tree_map_only(torch.Tensor, _without_numbers, values[value]) for value in op.values}
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter, op.context.entered(_META):
            function_of(op.target)(*filled(op.args, given, _META), **filled(dict(op.kwargs), given, _META))
    except Exception:
        return 0
    return int(counter.get_total_flops())


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8)))


def _timed(traced: Traced, values: dict[int, Any]) -> list[tuple[float, float]]:
    """Measures the seconds of one run, forward and backward, by operator."""
    outputs = traced.ends
    released = last_uses(traced.ops, {*outputs, *values})
    wanted = [value for value in values.values() if value.requires_grad]
    forward, places = [], {}
    first = _sequence()
    for place, op in enumerate(traced.ops):
        start_s = time.perf_counter()
        execute([op], values, ((),))
        forward.append(time.perf_counter() - start_s)
        last = _sequence()
        places.update(dict.fromkeys(range(first, last), place))
        first = last
        for value in released[place]:
            del values[value]
    ends = [values[value] for value in outputs if values[value].requires_grad]
    backward = [0.0] * len(traced.ops)
    if ends and wanted:
        with _clocked(ends, places, backward):
            torch.autograd.grad(ends, wanted, [torch.ones_like(each) for each in ends], allow_unused=True)
    return list(zip(forward, backward, strict=True))


def _sequence() -> int:
    """Tells the number of the node of autograd that is made next."""
    return int(torch._C._autograd._get_sequence_nr())


class _clocked:
    """Adds the time of each node of a backward to the operator that has made the node.

    Args:
        ends: where the backward begins.
        places: operators by number of node.
        seconds: by operator.
    """

    def __init__(self, ends: Sequence[torch.Tensor], places: Mapping[int, int], seconds: list[float]) -> None:
        self._hooks = []
        self._seconds = seconds
        self._start_s = 0.0
        for node in nodes_of(ends):
            place = places.get(node._sequence_nr())
            if place is not None and node.name() != "torch::autograd::AccumulateGrad":
                self._hooks.append(node.register_prehook(self._begin))
                self._hooks.append(node.register_hook(lambda *given, place=place: self._end(place)))

    def _begin(self, gradients: Any) -> None:
        self._start_s = time.perf_counter()

    def _end(self, place: int) -> None:
        self._seconds[place] += time.perf_counter() - self._start_s

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
