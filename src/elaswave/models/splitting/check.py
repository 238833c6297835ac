"""Whether a cut network computes the bits of the network itself, and if not, which operator is the first to differ."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave.models.admission import without_values
from elaswave.models.layers import Call, Layer, inside
from elaswave.models.splitting.attributes import attributes_kept
from elaswave.models.splitting.inputs import call_of
from elaswave.models.splitting.parts import Program, TracedLayer
from elaswave.models.splitting.program import RUNNING, Op

_SEED = 20
_SCALES = (-16.0, 1 / 64)
"""Of further inputs to compare with."""
_KEY = (_SEED, 0, 0)
"""Of draws in evaluation: the cuts must not show in them."""


class PassResult(NamedTuple):
    """What one forward and backward gives."""

    outputs: list[torch.Tensor]
    """Auxiliary losses last."""
    gradients: dict[str, list[torch.Tensor | None]]
    """By name in the network; of parts, one for each use of a parameter."""
    buffers: dict[str, torch.Tensor]


class Difference(NamedTuple):
    """Where a cut network differs from the network."""

    what: str
    """The first output, gradient or buffer."""
    operator: str
    """The first operator whose bits the network itself never makes, and its line; empty: none was found."""
    users: str
    """Without such an operator: those that the output, gradient or buffer comes from."""
    is_of_trace: bool = False
    """Whether the trace differs before it is cut."""

    def __str__(self) -> str:
        where = f"; the first operator that differs is {self.operator}" if self.operator else ""
        if not where and self.users:
            where = f"; no operator by itself makes other bits, it comes from {self.users}"
        return f"{self.what} has other bits than in the network itself{where}"


def scales_of(model: nn.Module, example_inputs: Any) -> Iterator[tuple[Any, PassResult]]:
    """Yields the example inputs, and the same with floating-point numbers of other sizes and signs, as far as the
    network computes finite numbers of them: what a backward does may not show where all numbers are small, or large.

    Args:
        model: in training.
        example_inputs: of a micro-batch.
    Returns:
        Inputs, and what the network makes of them.
    """
    yield example_inputs, _of_model(model, example_inputs)
    if not any(leaf.is_floating_point() for leaf in tensors_in(example_inputs)):
        return
    for scale in _SCALES:
        inputs = pytree.tree_map(functools.partial(_scaled, scale), example_inputs)
        try:
            found = _of_model(model, inputs)
        except Exception:
            continue  # a network may refuse such inputs
        values = [*found.outputs, *(each for gradients in found.gradients.values() for each in gradients)]
        if all(bool(each.isfinite().all()) for each in values if each is not None):
            yield inputs, found


def _scaled(scale: float, leaf: Any) -> Any:
    return leaf * scale if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def difference(
    model: nn.Module,
    layers: Sequence[Layer],
    whole: Sequence[Layer],
    example_inputs: Any,
    expected: PassResult | None = None,
) -> Difference | None:
    """Compares one forward and backward of the layers with the network's, bit for bit, dropout included.

    The gradients of a parameter's uses are added exactly, and not by autograd: they are compared with the network's one
    as far as it can be rounded.

    Args:
        model: in training.
        layers: its parts.
        whole: the traced network as one part.
        example_inputs: of a micro-batch.
        expected: what the network makes of them, if it has been computed.
    """

    def own() -> PassResult:
        return _of_model(model, example_inputs)

    def traced(parts: Sequence[Layer]) -> PassResult:
        return _of_parts([layer.build() for layer in parts], parts, example_inputs)

    expected = expected or own()
    coarsest = _coarsest(whole)
    what = _first_difference(expected, traced(layers), coarsest)
    if what is None:
        return None
    # While it is traced, a network may choose other operators: then only those of the trace can be compared.
    is_trace_equal = _first_difference(expected, traced(whole), coarsest) is None
    known = _Bits()
    with known:
        traced(whole) if is_trace_equal else own()
    strange = _Bits(known.seen)
    with strange:
        traced(layers)
    return Difference(what, strange.first, _users(what, whole), not is_trace_equal)


def difference_in_evaluation(layers: Sequence[Layer], whole: Sequence[Layer], example_inputs: Any) -> Difference | None:
    """Compares what the layers return in evaluation with what the traced network as one part does, bit for bit. With
    the network itself it is not compared: some kernels are others in a trace.

    Args:
        layers: its parts.
        whole: the traced network as one part.
        example_inputs: of a micro-batch.
    """

    def run(parts: Sequence[Layer]) -> PassResult:
        batch, value = cloned_inputs(example_inputs), cloned_inputs(example_inputs)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_SEED)
            for layer in parts:
                part = layer.build().eval()
                with inside(Call(lambda: batch, _KEY)):
                    value = part(pytree.tree_map(_at_boundary, value))
        return PassResult(tensors_in(value), {}, {})

    expected = run(whole)
    what = _first_difference(expected, run(layers), 0.0)
    if what is None:
        return None
    known = _Bits()
    with known:
        run(whole)
    strange = _Bits(known.seen)
    with strange:
        run(layers)
    return Difference(f"{what} in evaluation", strange.first, "")


def _users(what: str, whole: Sequence[Layer]) -> str:
    """Names the operators of the traced network that use a parameter or buffer, with their lines."""
    (layer,), program = whole, _program_of(whole)
    values = {value for value, state in program.state if what.endswith(f" {layer.ties.get(state.name, state.name)}")}
    users = [f"{op.target} at {op.source}" for op in program.ops if values & set(op.values)]
    return ", ".join(users[:3])


def _program_of(whole: Sequence[Layer]) -> Program:
    (part,) = map(without_values, whole)
    assert isinstance(part, TracedLayer)
    return part._elaswave_programs[0]


def _coarsest(whole: Sequence[Layer]) -> float:
    """Finds the relative size of a rounding in which autograd may add a network's gradients; 0: that of their type."""
    types = [op.context.autocast[1] for op in _program_of(whole).ops if op.context.autocast is not None]
    return max((torch.finfo(each).eps for each in types if each is not None), default=0.0)


def _first_difference(one: PassResult, other: PassResult, coarsest: float) -> str | None:
    """Finds the first thing that differs between a network's outcome and that of parts.

    Args:
        coarsest: of `_coarsest`.
    """
    for index, (ours, theirs) in enumerate(zip(one.outputs, other.outputs, strict=True)):
        if not _same_bits(ours, theirs):
            return f"output {index}"
    for name, (whole,) in one.gradients.items():
        terms = other.gradients.get(name, [whole])
        if not (_same_bits(whole, terms[0]) if len(terms) == 1 else _adds_up(whole, terms, coarsest)):
            return f"the gradient of {name}"
    for name, value in one.buffers.items():
        if name in other.buffers and not _same_bits(value, other.buffers[name]):
            return f"buffer {name}"
    return None


def _adds_up(whole: torch.Tensor | None, terms: Sequence[torch.Tensor | None], coarsest: float) -> bool:
    """Tells whether a gradient is the sum of terms, whatever the order in which it was rounded."""
    found = [each.double() for each in terms if each is not None]
    if whole is None or not found:
        return not any(bool(each.any()) for each in (whole, *found) if each is not None)
    rounding = max(coarsest, torch.finfo(whole.dtype).eps) * len(found)
    exact, bound = torch.stack(found).sum(0), torch.stack(found).abs().sum(0) * rounding
    return not bool(((whole.double() - exact).abs() > bound).any())


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    zeros = [each for each in (a, b) if each is not None]
    if len(zeros) == 1:
        return not bool(zeros[0].any())
    if a is None or b is None:
        return True
    return bits_of(a) == bits_of(b)


def bits_of(tensor: torch.Tensor) -> bytes:
    """Computes a hash of type, shape and content."""
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    head = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.blake2b(head + content, digest_size=16).digest()


def cloned_inputs(inputs: Any) -> Any:
    """Copies a micro-batch's inputs for one call, which may write them."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs)


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    """Lists the tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _gradients_of(
    outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> Any:
    ends = [(output, each) for output, each in zip(outputs, given, strict=True) if output.requires_grad]
    if not ends or not wanted:
        return [None] * len(wanted)
    roots, gradients = zip(*ends, strict=True)
    return torch.autograd.grad(roots, wanted, gradients, allow_unused=True)


def _loss_gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes the gradients of some scalar: any values will do, as long as both sides get the same."""
    source = torch.Generator().manual_seed(_SEED)
    return [
        torch.randn(each.shape, generator=source).to(each.dtype) / max(each.numel(), 1)
        for each in outputs if each.is_floating_point()
    ]  # fmt: skip


def _of_model(model: nn.Module, inputs: Any) -> PassResult:
    with attributes_kept(model), buffers_kept(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        args, kwargs = call_of(cloned_inputs(inputs))
        call = Call(lambda: cloned_inputs(inputs))
        with inside(call):
            returned = model(*args, **kwargs)
        outputs = [*tensors_in(returned), *call.aux_losses]
        floats = [each for each in outputs if each.is_floating_point()]
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        found = _gradients_of(floats, list(named.values()), _loss_gradients(outputs))
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        gradients = {name: [gradient] for name, gradient in zip(named, found, strict=True)}
        return PassResult([each.detach() for each in outputs], gradients, buffers)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Lends the network copies of its buffers for a while."""
    before = [(owner, key, buffer) for owner in model.modules() for key, buffer in owner._buffers.items()]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in before if buffer is not None}
    try:
        for owner, key, buffer in before:
            owner._buffers[key] = copies.get(id(buffer))
        yield
    finally:
        for owner, key, buffer in before:
            owner._buffers[key] = buffer


def _of_parts(parts: Sequence[nn.Module], layers: Sequence[Layer], inputs: Any) -> PassResult:
    """Runs the parts as the engine runs layers: every boundary is contiguous, and a graph of its own."""
    batch = cloned_inputs(inputs)
    gradients: dict[str, list[torch.Tensor | None]] = {}
    buffers: dict[str, torch.Tensor] = {}
    runs = []
    value: Any = cloned_inputs(inputs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        for index, part in enumerate(parts):
            given = [_at_boundary(leaf) for leaf in tensors_in(value)]
            for leaf in given:
                leaf.requires_grad_(index > 0 and leaf.is_floating_point())
            copies = iter([leaf.clone() for leaf in given])  # a part may write what it is given
            argument = pytree.tree_map(lambda leaf, copies=copies: next(copies), value)
            call = Call(lambda: batch)
            with buffers_kept(part), inside(call):
                value = part(argument)
                buffers.update((name, each.detach().clone()) for name, each in part.named_buffers())
            outputs = tensors_in(value)
            runs.append((part, layers[index], given, outputs, call.aux_losses))
            value = pytree.tree_map(lambda leaf: leaf if leaf is None else leaf.detach(), value)
    told = [each for *_, aux_losses in runs for each in aux_losses]
    reached = _loss_gradients([*outputs, *told])
    of_aux_losses = [reached.pop() for _ in told]  # the last one first
    for part, layer, given, made, aux_losses in reversed(runs):
        named = [(name, each) for name, each in part.named_parameters() if each.requires_grad]
        inner = [leaf for leaf in given if leaf.requires_grad]
        floats = [leaf for leaf in made if leaf.is_floating_point()]
        last = [of_aux_losses.pop(0) for _ in aux_losses][::-1]
        found = _gradients_of(
            [*floats, *aux_losses],
            [*(each for _, each in named), *inner],
            [_at_boundary(each) for each in (*reached, *last)],
        )
        for (name, _), gradient in zip(named, found):
            gradients.setdefault(layer.ties.get(name, layer.full_name(name)), []).append(gradient)
        reached = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(inner, found[len(named) :], strict=True)
        ]
    return PassResult([each.detach() for each in (*outputs, *told)], gradients, buffers)


def _at_boundary(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().clone(memory_format=torch.contiguous_format)


class _Bits(TorchDispatchMode):
    """Watches what every kernel makes.

    Args:
        known: hashes of what another run has made; None: they are collected.
    """

    def __init__(self, known: set[bytes] | None = None) -> None:
        super().__init__()
        self.seen: set[bytes] = set()
        self.first = ""
        """The first operator that has made something else."""
        self._known = known
        self._by_sequence: dict[int, Op] = {}
        """By number of a node of autograd, the operator that has made it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if RUNNING.op is not None:  # the node is made before its kernel runs
            self._by_sequence[int(torch._C._autograd._get_sequence_nr()) - 1] = RUNNING.op
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made) if "empty" not in func.name() else ():  # holds anything
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                continue
            bits = bits_of(leaf)
            if self._known is None:
                self.seen.add(bits)
            elif not self.first and bits not in self._known and leaf.numel() > 1:
                self.first = self._named(func)
        return made

    def _named(self, func: Any) -> str:
        node: Any = torch._C._current_autograd_node()  # None in a forward, whatever the stubs say
        if node is None:
            return "" if RUNNING.op is None else f"{RUNNING.op.target} at {RUNNING.op.source}"
        op = self._by_sequence.get(node._sequence_nr())
        return "" if op is None else f"the backward ({func}) of {op.target} at {op.source}"
