"""The parts of a cut network as modules: each holds the tensors that it uses, and runs its operators."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from elaswave.errors import UsageError
from elaswave.models.calls import batch
from elaswave.models.instances import CopyOf
from elaswave.models.layers import Layer
from elaswave.splitting.cut import Flow
from elaswave.splitting.inputs import leaves_of
from elaswave.splitting.program import Op, Ref, execute, last_uses
from elaswave.splitting.trace import State, copy_of


class Crossed(NamedTuple):
    """A value as it crosses a cut: dense, contiguous and real."""

    value: int
    permutation: tuple[int, ...] | None
    """Order of dimensions in which it lies contiguously; None: its own."""
    has_gradient: bool
    """Whether one flows in the network as a whole; else it is cut off here, since kernels may look at that."""
    gradient_permutation: tuple[int, ...] | None
    """Order of dimensions in which its gradient lies in the network as a whole; None: as the value does."""
    is_complex: bool = False
    """Whether its numbers are complex: they cross as pairs of real ones."""

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """As it is sent."""
        if self.gradient_permutation is not None:
            tensor = _Laid.apply(tensor, self.gradient_permutation)
        if self.permutation is not None:
            tensor = tensor.permute(self.permutation)
        return torch.view_as_real(tensor.resolve_conj()) if self.is_complex else tensor

    def unpacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the operators know it."""
        if not self.has_gradient:
            tensor = tensor.detach()
        if self.is_complex:
            tensor = torch.view_as_complex(tensor)
        if self.permutation is None:
            return tensor
        return tensor.permute(_inverse(self.permutation))


def _inverse(permutation: Sequence[int]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)


class _Laid(torch.autograd.Function):
    """A value as it is, whose gradient is laid out in memory in a given order of dimensions."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, permutation: Sequence[int]) -> torch.Tensor:
        """The value."""
        ctx.permutation = permutation
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient with other strides."""
        return gradient.permute(ctx.permutation).contiguous().permute(_inverse(ctx.permutation)), None


class Input(NamedTuple):
    """A tensor of the micro-batch's inputs."""

    value: int
    position: int
    """In the order of `leaves_of`."""


@dataclass(frozen=True)
class Program:
    """What one part runs in one mode.

    Args:
        ops: its operators.
        released: by operator, values that nothing needs after it.
        inputs: that it needs of the micro-batch.
        expected: name, shape and type of each tensor of the micro-batch's inputs.
        received, sent: what crosses the cuts before and behind it; nothing before the first one.
        state: tensors of the network: value, name in the module.
        result: what the network returns, in the last part: a tree of values; else None.
        is_first: whether it is given the inputs themselves.
    """

    ops: tuple[Op, ...]
    released: tuple[tuple[int, ...], ...]
    inputs: tuple[Input, ...]
    expected: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    received: tuple[Crossed, ...]
    sent: tuple[Crossed, ...]
    state: tuple[tuple[int, State], ...]
    result: Any
    is_first: bool

    def __deepcopy__(self, memo: Any) -> "Program":
        return self  # nothing changes it

    def run(self, argument: Any, state: Mapping[int, torch.Tensor]) -> Any:
        """Runs the part.

        Args:
            argument: the inputs of the micro-batch, or what the part before has returned.
            state: the tensors of the network by value.
        """
        values: dict[int, Any] = dict(state)
        if self.is_first or self.inputs:
            values.update(self._inputs(argument if self.is_first else batch()))
        if not self.is_first:
            tensors = (argument,) if isinstance(argument, torch.Tensor) else argument
            values.update(
                (each.value, each.unpacked(tensor)) for each, tensor in zip(self.received, tensors, strict=True)
            )
        execute(self.ops, values, self.released)
        if self.result is not None:
            return _filled(self.result, values)
        sent = tuple(each.packed(values[each.value]) for each in self.sent)
        return sent[0] if len(sent) == 1 else sent

    def _inputs(self, inputs: Any) -> Iterator[tuple[int, torch.Tensor]]:
        leaves = leaves_of(inputs)
        found = [(name, tuple(leaf.shape), leaf.dtype) for name, leaf in leaves]
        if found != list(self.expected):
            raise UsageError(
                f"the inputs of this micro-batch are {_listed(found)}, but the network was traced with "
                f"{_listed(self.expected)}: shapes and types must stay the same. Pad to one size, or call "
                "elaswave.split with example inputs of the size that batch.microbatch_size makes"
            )
        return ((each.value, leaves[each.position][1]) for each in self.inputs)


def _listed(inputs: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}" for name, shape, dtype in inputs)


def _filled(tree: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(tree, Ref):
        return values[tree.value]
    if isinstance(tree, dict):
        return {key: _filled(each, values) for key, each in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_filled(each, values) for each in tree)
    return tree


class Part(nn.Module):
    """A layer made of operators.

    Args:
        programs: in training and in evaluation.
        tensors: parameters and buffers by dotted name; what stands under several names is one tensor.
        persistent: names of buffers that are state.
    """

    def __init__(
        self, programs: tuple[Program, Program], tensors: Mapping[str, torch.Tensor], persistent: set[str]
    ) -> None:
        super().__init__()
        self._elaswave_programs = programs
        for name, tensor in tensors.items():
            path, _, key = name.rpartition(".")
            owner = _container(self, path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(key, tensor)
            else:
                owner.register_buffer(key, tensor, persistent=name in persistent)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        train = self._elaswave_programs[0]
        return f"{len(train.ops)} operators, {len(train.received)} values in, {len(train.sent)} out"

    def forward(self, argument: Any) -> Any:
        """What the part before has returned, to what the next one is given."""
        program = self._elaswave_programs[0 if self.training else 1]
        return program.run(argument, {value: self._tensor(state) for value, state in program.state})

    def _tensor(self, state: State) -> torch.Tensor:
        path, _, key = state.name.rpartition(".")
        owner = self.get_submodule(path)
        found: torch.Tensor | None = owner._parameters.get(key)
        found = owner._buffers.get(key) if found is None else found
        assert found is not None, state.name
        return found


def _container(module: nn.Module, path: str) -> nn.Module:
    for name in filter(None, path.split(".")):
        if name not in module._modules:
            module.add_module(name, nn.Module())
        found = module._modules[name]
        assert found is not None
        module = found
    return module


class Made(NamedTuple):
    """What `make_layers` needs of one mode."""

    flow: Flow
    bounds: Sequence[tuple[int, int]]
    out_tree: Any


def program_of(made: Made, index: int, example: Sequence[tuple[str, torch.Tensor]]) -> Program:
    """What a part runs in one mode.

    Args:
        made: the mode.
        index: of the part.
        example: the inputs' tensors.
    """
    flow, (start, stop) = made.flow, made.bounds[index]
    is_last = index == len(made.bounds) - 1
    received = _crossed(flow, start) if index else ()
    sent = () if is_last else _crossed(flow, stop)
    wanted = set(flow.outputs) if is_last else {each.value for each in sent}
    places = _Needed(flow, start, stop, {each.value for each in received}, wanted).places
    ops = tuple(flow.traced.ops[place] for place in places)
    used = {value for op in ops for value in op.values} | wanted
    state = tuple((value, each) for value, each in flow.traced.state.items() if value in used)
    positions = {value: position for position, value in enumerate(flow.traced.inputs)}
    inputs = tuple(Input(value, positions[value]) for value in sorted(used & positions.keys()))
    return Program(
        ops=ops,
        released=last_uses(ops, wanted),
        inputs=inputs,
        expected=tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in example),
        received=received,
        sent=sent,
        state=state,
        result=_outputs(made.out_tree, flow.traced.outputs) if is_last else None,
        is_first=index == 0,
    )


def _outputs(tree: Any, outputs: Sequence[Any]) -> Any:
    """The tree of what the network returns, with `Ref` for its tensors."""
    if isinstance(tree, dict):
        return {key: _outputs(each, outputs) for key, each in tree.items() if _outputs(each, outputs) is not None}
    if isinstance(tree, tuple | list):
        return type(tree)(_outputs(each, outputs) for each in tree)
    return outputs[tree] if isinstance(tree, int) else tree


def _crossed(flow: Flow, place: int) -> tuple[Crossed, ...]:
    crossing = flow.crossing(place)
    assert crossing is not None
    found = []
    for value in crossing.values:
        facts = flow.facts.values[value]
        order = facts.permutation
        is_plain = order == tuple(range(len(facts.shape)))
        theirs = facts.gradient_permutation
        found.append(
            Crossed(
                value, None if is_plain else order, facts.has_gradient(place), None if theirs == order else theirs,
                facts.dtype.is_complex,
            )
        )  # fmt: skip
    return tuple(found)


class _Needed:
    """The operators that a part runs: its own, views of what it receives, and what is free.

    Args:
        flow: of the network.
        start, stop: the part.
        received: values that cross the cut before it.
        wanted: values that it must make.
    """

    def __init__(self, flow: Flow, start: int, stop: int, received: set[int], wanted: set[int]) -> None:
        self._flow, self._received = flow, received
        self._places: set[int] = set()
        waiting = set(wanted)
        for place in reversed(range(start, stop)):
            op = flow.traced.ops[place]
            if place not in flow.free and (op.writes or op.draws or op.out in waiting):
                self._places.add(place)
                waiting.update(op.values)
        self._stop = stop
        for value in waiting:
            self._add(value)

    @property
    def places(self) -> list[int]:
        """In order."""
        return sorted(self._places)

    def _add(self, value: int) -> None:
        """Adds what makes a value, where nothing does yet."""
        flow = self._flow
        place = flow.maker.get(value)
        if place is None or place in self._places or value in self._received:
            return
        self._places.add(place)
        for each in flow.traced.ops[place].values:
            self._add(each)
        if place in flow.free and value in flow.facts.values:
            self._add_writers(flow.facts.values[value].storage)

    def _add_writers(self, storage: int) -> None:
        """Free memory may be written after it was made."""
        flow = self._flow
        for place in flow.free:
            op = flow.traced.ops[place]
            if place < self._stop and place not in self._places and any(
                flow.facts.values[value].storage == storage for value in op.writes
            ):  # fmt: skip
                self._places.add(place)
                for each in op.values:
                    self._add(each)


def make_layers(model: nn.Module, train: Made, evaluation: Made, example_inputs: Any) -> list[Layer]:
    """The parts as layers, whose tensors keep the names that they have in the network.

    Args:
        model: the network.
        train, evaluation: both modes, cut at the same places.
        example_inputs: of a micro-batch.
    """
    example = leaves_of(example_inputs)
    programs = [
        (program_of(train, index, example), program_of(evaluation, index, example))
        for index in range(len(train.bounds))
    ]
    naming = _Naming(model, {**train.flow.traced.constants, **evaluation.flow.traced.constants})
    states = [list(dict.fromkeys(each for _, each in (*one.state, *other.state))) for one, other in programs]
    for name in train.flow.written_buffers():
        assert sum(State("buffer", name) in each for each in states) <= 1, f"parts share {name}"
    layers = []
    for index, (one, other) in enumerate(programs):
        tensors, persistent, ties, names = naming.tensors_of(index, states[index])
        if index == 0:
            unused = naming.unused({each.name for state in states for each in state})
            tensors.update(unused)
            persistent.update(unused)
        part = Part((_named(one, names), _named(other, names)), naming.in_order(tensors), persistent)
        name = f"part{index}"
        layers.append(Layer(name, CopyOf(part, name), ties=ties, keeps_names=True))
    return layers


def _named(program: Program, names: Mapping[str, str]) -> Program:
    return replace(program, state=tuple((value, State(each.kind, names[each.name])) for value, each in program.state))


class _Naming:
    """Which part has which tensors under which names. The first part that uses one has it under all of its names, and
    what the network has and does not use is in the first part.

    Args:
        model: the network.
        constants: further tensors by name.
    """

    def __init__(self, model: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
        self._constants = constants
        self._names: dict[int, list[str]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        persistent = model.state_dict(keep_vars=True).keys()
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
        ):  # fmt: skip
            if name in persistent or isinstance(tensor, nn.Parameter):
                self._names.setdefault(id(tensor), []).append(name)
                self._tensors[name] = tensor
        self._home: dict[int, int] = {}

    def tensors_of(
        self, part: int, state: Sequence[State]
    ) -> tuple[dict[str, torch.Tensor], set[str], dict[str, str], dict[str, str]]:
        """The tensors of a part, to be called in order: by name in it, which of them are state, ties, and the name in
        the part of each name in the network."""
        tensors: dict[str, torch.Tensor] = {}
        persistent: set[str] = set()
        ties: dict[str, str] = {}
        names: dict[str, str] = {}
        for each in state:
            if each.kind == "constant":
                tensors[each.name] = copy_of(self._constants[each.name])
                names[each.name] = each.name
                continue
            tensor = self._tensors[each.name]
            if self._home.setdefault(id(tensor), part) == part:
                own = self._names[id(tensor)]
                tensors.update(dict.fromkeys(own, tensor))
                names[each.name] = own[0]
                persistent.update(own)
                continue
            names[each.name] = again = f"_part{part}.{each.name}"
            if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
                tensors[again] = tensor.detach()  # a constant here: nothing writes it
            else:
                tensors[again] = tensor
                ties[again] = self._names[id(tensor)][0]
        return tensors, persistent, ties, names

    def in_order(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """In the network's order, so that a tensor of several names has the same first one."""
        order = {name: place for place, name in enumerate(self._tensors)}
        return dict(sorted(tensors.items(), key=lambda item: order.get(item[0], len(order))))

    def unused(self, used: set[str]) -> dict[str, torch.Tensor]:
        """Tensors of the network that no part uses: as they are, for ever."""
        ids = {id(self._tensors[name]) for name in used if name in self._tensors}
        found: dict[int, torch.Tensor] = {}
        for tensor in self._tensors.values():
            if id(tensor) not in ids:
                is_parameter = isinstance(tensor, nn.Parameter)
                found.setdefault(id(tensor), nn.Parameter(tensor.detach(), False) if is_parameter else tensor)
        return {name: found[id(tensor)] for name, tensor in self._tensors.items() if id(tensor) in found}


@contextmanager
def in_mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Puts a network into training or evaluation for a while; what was in evaluation while training stays so."""
    modes = {part: part.training for part in model.modules()}
    try:
        if not train:
            model.eval()
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
