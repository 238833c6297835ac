"""The parts of a cut network as modules: each holds the tensors that it uses, and runs its operators."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from elaswave.errors import UsageError
from elaswave.models.admission import CopyOf
from elaswave.models.layers import Layer, batch
from elaswave.models.splitting.cut import DependencyGraph
from elaswave.models.splitting.inputs import leaves_of
from elaswave.models.splitting.program import Op, Ref, execute, last_uses
from elaswave.models.splitting.trace import StateTensor, cloned_constant


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
        """Converts a tensor to the form in which it is sent."""
        if self.gradient_permutation is not None:
            tensor = _Laid.apply(tensor, self.gradient_permutation)
        if self.permutation is not None:
            tensor = tensor.permute(self.permutation)
        return torch.view_as_real(tensor.resolve_conj()) if self.is_complex else tensor

    def unpacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a tensor to the form in which the operators know it."""
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
        """Returns the value."""
        ctx.permutation = permutation
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the gradient with other strides."""
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
    state: tuple[tuple[int, StateTensor], ...]
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


class TracedLayer(nn.Module):
    """A layer made of operators.

    Args:
        programs: in training and in evaluation.
        tensors: parameters and buffers by dotted name; what stands under several names is one tensor.
        persistent: names of buffers that are state.
        uses: name in the module, of a further use of a parameter -> name of the parameter, in the module too. A use has
            a Parameter of its own, on the same memory, so that its gradient is by itself.
    """

    def __init__(
        self,
        programs: tuple[Program, Program],
        tensors: Mapping[str, torch.Tensor],
        persistent: set[str],
        uses: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._elaswave_programs = programs
        self._elaswave_uses = dict(uses)
        for name, tensor in tensors.items():
            path, _, key = name.rpartition(".")
            owner = _container(self, path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(key, tensor)
            else:
                owner.register_buffer(key, tensor, persistent=name in persistent)
        self._add_uses()

    def _add_uses(self) -> None:
        for name, parameter in self._elaswave_uses.items():
            path, _, key = name.rpartition(".")
            values = self.get_parameter(parameter).detach()
            _container(self, path).register_parameter(key, nn.Parameter(values))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out further uses: copies, and what travels, have each parameter once."""
        modules = {name: each for name, each in self._modules.items() if not name.startswith(_USE)}
        return self.__dict__ | {"_modules": modules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Does the inverse of `__getstate__`."""
        super().__setstate__(state)
        self._add_uses()

    def extra_repr(self) -> str:
        """Returns what ``repr`` shows between the brackets."""
        train = self._elaswave_programs[0]
        return f"{len(train.ops)} operators, {len(train.received)} values in, {len(train.sent)} out"

    def forward(self, argument: Any) -> Any:
        """Maps what the part before has returned to what the next one is given."""
        program = self._elaswave_programs[0 if self.training else 1]
        return program.run(argument, {value: self._tensor(state) for value, state in program.state})

    def _tensor(self, state: StateTensor) -> torch.Tensor:
        path, _, key = state.name.rpartition(".")
        owner = self.get_submodule(path)
        found: torch.Tensor | None = owner._parameters.get(key)
        found = owner._buffers.get(key) if found is None else found
        assert found is not None, state.name
        return found


_USE = "_use"
"""Begins the names of further uses."""


def _container(module: nn.Module, path: str) -> nn.Module:
    for name in filter(None, path.split(".")):
        if name not in module._modules:
            module.add_module(name, nn.Module())
        found = module._modules[name]
        assert found is not None
        module = found
    return module


class SplitMode(NamedTuple):
    """What `make_layers` needs of one mode."""

    flow: DependencyGraph
    bounds: Sequence[tuple[int, int]]
    out_tree: Any


def program_of(made: SplitMode, index: int, example: Sequence[tuple[str, torch.Tensor]]) -> Program:
    """Makes what a part runs in one mode.

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
    """Makes the tree of what the network returns, with `Ref` for its tensors."""
    if isinstance(tree, dict):
        return {key: _outputs(each, outputs) for key, each in tree.items() if _outputs(each, outputs) is not None}
    if isinstance(tree, tuple | list):
        return type(tree)(_outputs(each, outputs) for each in tree)
    return outputs[tree] if isinstance(tree, int) else tree


def _crossed(flow: DependencyGraph, place: int) -> tuple[Crossed, ...]:
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

    def __init__(self, flow: DependencyGraph, start: int, stop: int, received: set[int], wanted: set[int]) -> None:
        self._flow, self._received = flow, received
        self._places: set[int] = set()
        waiting = set(wanted)
        for place in reversed(range(start, stop)):
            op = flow.traced.ops[place]
            if place not in flow.free and (op.has_effect or op.out in waiting):
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


def make_layers(model: nn.Module, train: SplitMode, evaluation: SplitMode, example_inputs: Any) -> list[Layer]:
    """Makes the parts as layers, whose tensors keep the names that they have in the network.

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
    states = [{each for _, each in (*one.state, *other.state)} for one, other in programs]
    for name in train.flow.written_buffers():
        assert sum(StateTensor("buffer", name) in each for each in states) <= 1, f"parts share {name}"
    layers = []
    for index, (one, other) in enumerate(programs):
        found = _Tensors(naming, index)
        named = found.named(one, is_training=True), found.named(other, is_training=False)
        if index == 0:
            unused = naming.unused({each.name for state in states for each in state})
            found.tensors.update(unused)
            found.persistent.update(unused)
        part = TracedLayer(named, naming.in_order(found.tensors), found.persistent, found.uses)
        name = f"part{index}"
        layers.append(
            Layer(name, CopyOf(part, name), ties=found.ties, keeps_names=True, only_reads=frozenset(found.only_reads))
        )
    return layers


class _Tensors:
    """The tensors of one part.

    Args:
        naming: of the network; parts are made in their order.
        part: its number.
    """

    def __init__(self, naming: "_Naming", part: int) -> None:
        self._naming, self._part = naming, part
        self.tensors: dict[str, torch.Tensor] = {}
        """By name in the part."""
        self.persistent: set[str] = set()
        """Names of those that are state."""
        self.uses: dict[str, str] = {}
        """As `Part` has them."""
        self.ties: dict[str, str] = {}
        self.only_reads: set[str] = set()
        """Names of trained parameters that bring no gradient here."""
        self._names: dict[tuple[int, int], str] = {}
        """By tensor and use, the name in the part."""

    def named(self, program: Program, *, is_training: bool) -> Program:
        """Makes a program with the names of this part instead of the network's; training comes first."""
        state = tuple((value, StateTensor(each.kind, self._name(each, is_training))) for value, each in program.state)
        return replace(program, state=state)

    def _name(self, state: StateTensor, is_training: bool) -> str:
        if state.kind == "constant":
            self.tensors.setdefault(state.name, self._naming.constant(state.name))
            return state.name
        tensor = self._naming.tensor(state.name)
        first = next((name for (key, _), name in self._names.items() if key == id(tensor)), None)
        if first is not None and not is_training:
            return first
        known = self._names.get((id(tensor), state.use))
        if known is None:
            known = self._first(tensor, state.name, is_training) if first is None else self._further(state, first)
            self._names[id(tensor), state.use] = known
        return known

    def _first(self, tensor: torch.Tensor, name: str, is_training: bool) -> str:
        """In the first part that uses a tensor it has all of its names."""
        own = self._naming.names_of(tensor)
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if self._naming.is_home(tensor, self._part):
            self.tensors.update(dict.fromkeys(own, tensor))
            self.persistent.update(own)
            found = own[0]
        else:
            found = f"_part{self._part}.{name}"
            self.tensors[found] = nn.Parameter(tensor.detach()) if is_trained else tensor.detach()
            self.ties.update({found: own[0]} if is_trained else {})  # else a constant here: nothing writes it
        if is_trained and not is_training:
            self.only_reads.add(found)
        return found

    def _further(self, state: StateTensor, first: str) -> str:
        name = f"{_USE}{state.use}.{state.name}"
        self.uses[name], self.ties[name] = first, self._naming.names_of(self._naming.tensor(state.name))[0]
        return name


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

    def constant(self, name: str) -> torch.Tensor:
        """Makes a copy of it."""
        return cloned_constant(self._constants[name])

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a parameter or buffer."""
        return self._tensors[name]

    def names_of(self, tensor: torch.Tensor) -> list[str]:
        """Lists all names of a parameter or buffer."""
        return self._names[id(tensor)]

    def is_home(self, tensor: torch.Tensor, part: int) -> bool:
        """Tells whether a part, asked in order, is the first that uses a tensor."""
        return self._home.setdefault(id(tensor), part) == part

    def in_order(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sorts tensors in the network's order, so that a tensor of several names has the same first one."""
        order = {name: place for place, name in enumerate(self._tensors)}
        return dict(sorted(tensors.items(), key=lambda item: order.get(item[0], len(order))))

    def unused(self, used: set[str]) -> dict[str, torch.Tensor]:
        """Finds the tensors of the network that no part uses: as they are, for ever."""
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
