"""Is this process one that computes the job's bits, and is this layer one that can be computed again?

Three questions are answered once, and cost nothing later:

- *The environment*: a fixed list of operators, computed on fixed numbers. Another processor, library or kernel shows in
  a hash. The first vote compares them, and every later one those of workers that are new.
- *Twice*: a layer's first micro-batch runs a second time, with parameters, inputs and gradients at other addresses. A
  layer that gives other bits is refused: it would give other bits on another worker too.
- *The probe*: a layer with made-up parameters, inputs and gradients, all drawn from its shapes alone. Its hash is the
  same in every process at every time, so whoever holds the layer later can be compared with whoever held it first.

Nothing is left behind: parameters are as before, buffers are put back before every run of a layer
(`elaswave.state.flat`), and every draw of the engine is seeded anew.

What a run's optimizer makes of made-up numbers, as one more operator of the environment
(`elaswave.engine.checks.determinism_check`).

A built-in optimizer is the code of this release, one of a script's own is not: in another process it may be another
version, or round otherwise. So the first vote compares it, and every later one that of workers that are new.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from elaswave.blocks.placement import Block, ReplicaRole
from elaswave.checkpoints.format import MASTER
from elaswave.devices.interface import HOST, Device
from elaswave.engine.blueprint import Blueprint
from elaswave.engine.checks.values import (
    WRITES_NOW,
    aligned_clone,
    flatten,
    is_differentiable,
    refuse_written_gradient,
    refuse_written_parameter,
    same_bits,
    unflatten,
)
from elaswave.engine.in_flight import Again, Done, LayerInputs, LayerRun, Reached
from elaswave.errors import ForeignError, ForeignPartError, InterruptedWaitError, UsageError
from elaswave.hashing import key64
from elaswave.models.layers import linear
from elaswave.protocol.step.ballot import Environment
from elaswave.state.flat import HeldBlock

_HASH_BITS = 62
"""So that a hash and its negative are both signed 64-bit integers."""
_SHIFT = 17 * 64
"""Between the addresses of a tensor and its copy, within a page; a multiple of the alignment of all boundaries."""


def hash_tensors(tensors: Iterable[torch.Tensor | None]) -> int:
    """Computes a hash of types, shapes and bits, 62 bits."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if tensor is None:
            found.update(b"none")
            continue
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else None
        found.update(b"" if bits is None else bits.cpu().numpy().data)
    return int.from_bytes(found.digest(), "little") >> (64 - _HASH_BITS)


# ------------------------------------------------------------------------------------------------------ the environment


class _Source:
    """Numbers that an operator is tried on, from a generator of their own on the host.

    Args:
        name: of the operator.
        device: that runs it.
    """

    def __init__(self, name: str, device: Device) -> None:
        self.place = device.place
        self.generator = torch.Generator().manual_seed(key64("determinism_hash", name) & 0xFFFFFFFF)
        self.own_generator = self.generator
        """Of the device."""
        if device.place.type != "cpu":
            self.own_generator = torch.Generator(device.place).manual_seed(key64("determinism_hash", name) & 0xFFFFFFFF)
        self.drawn: list[torch.Tensor] = []

    def __call__(self, *shape: int) -> torch.Tensor:
        """Draws a tensor of a shape, whose gradient is looked at too."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        self.drawn.append(drawn.to(self.place).requires_grad_(True))
        return self.drawn[-1]


def _operators() -> dict[str, Callable[[_Source], torch.Tensor]]:
    """Maps names to functions of a source of numbers; the result of each is run backward too if it has a graph."""
    return {
        "matmul": lambda draw: draw(64, 192) @ draw(192, 96),
        "matmul-bfloat16": lambda draw: draw(64, 192).bfloat16() @ draw(192, 96).bfloat16(),
        "linear": lambda draw: linear(draw(64, 192), draw(96, 192), draw(96)),
        "bmm": lambda draw: torch.bmm(draw(6, 33, 40), draw(6, 40, 33)),
        "attention": lambda draw: F.scaled_dot_product_attention(
            draw(2, 4, 48, 32), draw(2, 4, 48, 32), draw(2, 4, 48, 32), is_causal=True
        ),
        "convolution": lambda draw: F.conv2d(draw(4, 6, 17, 17), draw(8, 6, 3, 3), draw(8), padding=1),
        "layer-norm": lambda draw: F.layer_norm(draw(48, 100), (100,), draw(100), draw(100)),
        "batch-norm": lambda draw: F.batch_norm(draw(8, 6, 9, 9), None, None, draw(6), draw(6), training=True),
        "softmax": lambda draw: draw(48, 100).softmax(-1),
        "cross-entropy": lambda draw: F.cross_entropy(draw(48, 100), torch.arange(48, device=draw.place) % 100),
        "embedding": lambda draw: F.embedding(torch.arange(400, device=draw.place) % 37, draw(37, 24)),
        "gelu": lambda draw: F.gelu(draw(1000)),
        "exp": lambda draw: (draw(1000) / 4).exp(),
        "tanh": lambda draw: draw(1000).tanh(),
        "sine": lambda draw: draw(1000).sin() + draw(1000).cos(),
        "logarithm": lambda draw: (draw(1000).abs() + 0.1).log(),
        "power": lambda draw: (draw(1000).abs() + 0.1).pow(1.7).rsqrt(),
        "sum": lambda draw: draw(40, 1001).sum(0) + draw(1001, 40).sum(1)[0] + draw(5000).sum(),
        "square-sum": lambda draw: draw(16384).double().square().sum(),
        "random": _random,
        "adamw": _adamw,
    }


def _random(draw: _Source) -> torch.Tensor:
    source, place = draw.own_generator, draw.place
    words = torch.empty(100, dtype=torch.int64, device=place).random_(-(2**63), None, generator=source)
    drawn = [
        torch.rand(500, generator=source, dtype=torch.float32, device=place),
        torch.empty(500, dtype=torch.float32, device=place).bernoulli_(0.3, generator=source),
    ]
    # Halves of words: a double does not hold all 64 bits.
    return torch.cat([draw(500), *drawn, words.view(torch.int32).double()])


def _adamw(draw: _Source) -> torch.Tensor:
    master, gradient, average, square = (draw(1056).detach() for _ in range(4))
    torch._fused_adamw_(
        [master],
        [gradient],
        [average],
        # A second moment is not negative; its root would be NaN.
        [square.abs_()],
        [],
        [torch.tensor(3.0, dtype=torch.float32, device=master.device)],
        amsgrad=False,
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )
    return torch.cat([master, average, square])


@functools.lru_cache(maxsize=4)
def environment(device: Device = HOST) -> Environment:
    """Finds what this process computes with; it is computed once."""
    text = f"torch {torch.__version__}, {device.name}"
    return Environment(text, {name: _run_operator(name, function, device) for name, function in _operators().items()})


def changed_operator(known: Environment, key: int, device: Device = HOST) -> str | None:
    """Runs one operator once more, and names it if it has other bits.

    Args:
        known: what the operators made before.
        key: chooses the operator.
        device: that computes.
    """
    operators = _operators()
    name = sorted(operators)[key % len(operators)]
    return None if _run_operator(name, operators[name], device) == known.operators[name] else name


def _run_operator(name: str, function: Callable[[_Source], torch.Tensor], device: Device) -> int:
    draw = _Source(name, device)
    with torch.enable_grad():
        result = function(draw)
        gradients: Sequence[torch.Tensor | None] = ()
        if result.requires_grad:
            inputs = list(draw.drawn)
            gradient = torch.randn(result.shape, generator=draw.generator, dtype=torch.float32).to(result)
            gradients = torch.autograd.grad(result, inputs, gradient, allow_unused=True)
    return hash_tensors([result, *gradients])


# ------------------------------------------------------------------------------------------------------ twice and probe


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a copy at another place within its page."""
    return aligned_clone(tensor.detach(), shift=_SHIFT)


def made_up(tensor: torch.Tensor, key: int) -> torch.Tensor:
    """Makes a tensor of the same type and shape: floating-point numbers drawn from a key, whole numbers 0, booleans
    True."""
    if not tensor.is_floating_point():
        return torch.ones_like(tensor) if tensor.dtype == torch.bool else torch.zeros_like(tensor)
    source = torch.Generator().manual_seed(key & 0xFFFFFFFF)
    return torch.randn(tensor.shape, generator=source, dtype=torch.float32).mul_(0.25).to(tensor)


@contextmanager
def with_parameters(
    module: nn.Module | None, make: Callable[[str, torch.Tensor], torch.Tensor]
) -> Iterator[Callable[[], str | None]]:
    """Has other values, or the same elsewhere, in a module's parameters for a while.

    Args:
        module: of the layer; None: there is none.
        make: (name, values of a parameter) -> what takes their place; it lets the values be.
    Yields:
        Tells the name of a parameter that does not have the bits of its first place any more, if there is one.
    """
    parameters = [] if module is None else list(module.named_parameters())
    values = [parameter.data for _, parameter in parameters]

    def changed() -> str | None:
        pairs = zip(parameters, values, strict=True)
        return next((name for (name, parameter), value in pairs if not same_bits(parameter, value)), None)

    try:
        for name, parameter in parameters:
            # Only the data are exchanged: the objects stay, as guards of parameters ask.
            parameter.data = make(name, parameter.data)
        yield changed
    finally:
        for (_, parameter), value in zip(parameters, values, strict=True):
            parameter.data = value


def made_up_tree(value: Any) -> Any:
    """Makes up a value of the same structure, types and shapes."""
    structure, leaves = flatten(value)
    return unflatten(structure, [made_up(leaf, key64("determinism_hash", place)) for place, leaf in enumerate(leaves)])


def check_again(
    who: str, module: nn.Module | None, names: Sequence[str], done: Done, again: Again, *, lends: bool = False
) -> None:
    """Has a layer or the loss run once more on the same numbers elsewhere in memory, and refuses other bits.

    What it is lent for this, parameters, inputs and gradients, is compared afterwards with what it was lent.

    Args:
        who: the layer, or the loss.
        module: of it, if it is one.
        names: of its parameters that are trained.
        done: its first run, forward and backward.
        again: runs it as it was run then, and leaves nothing behind.
        lends: whether `again` lends it the very inputs that it is called with, and not copies.
    Raises:
        UsageError: the second run has other bits, or has written what it was lent.
    """
    run, found = done.run, done.found
    given = remade(done.given, elsewhere)
    reached = done.reached._replace(gradients=list(map(elsewhere, done.reached.gradients)))
    with with_parameters(module, lambda name, values: elsewhere(values)) as changed:
        second, its = again(given, reached)
        written = changed()
    places = [f"output {place}" if len(run.leaves) > 1 else "its output" for place in range(len(run.leaves))]
    places += ["an auxiliary loss"] * len(run.aux_losses)
    places += [f"the gradient of {name}" for name in names]
    first = [*run.leaves, *run.aux_losses, *found]
    places += ["the gradient of its input"] * (len(first) - len(places))
    check_equal(who, places, first, [*second.leaves, *second.aux_losses, *its])
    if written is not None:
        refuse_written_parameter(who, written)
    # Copies of its input a layer may write; what it is lent itself it may not.
    if lends and not all(map(same_bits, given.leaves, done.given.leaves)):
        raise UsageError(WRITES_NOW.format(who=who))
    if not all(map(same_bits, reached.gradients, done.reached.gradients)):
        refuse_written_gradient(who)


def determinism_hash_of(module: nn.Module, built: int, done: Done, from_scratch: Again) -> tuple[int, bool]:
    """Computes what a layer is known by to those that run it elsewhere, or later.

    Args:
        module: of the layer.
        built: of the values that it was built with, the same in every process.
        done: its first run here, for the shapes.
        from_scratch: runs it in a way that does not depend on where training stands.
    Returns:
        A hash of shapes, types, built values and, unless the layer cannot be run on made-up numbers, of all bits, in
        [1, 2**62); and whether it is one of bits.
    """
    given, run = done.given, done.run
    shapes = f"{[(leaf.dtype, list(leaf.shape)) for leaf in (*given.leaves, *run.leaves)]} {run.structure}"
    bits = _probe(module, given, run, from_scratch)
    return key64("determinism_hash", shapes, bits, built) >> 2 or 1, bits != 0


def _probe(module: nn.Module, given: LayerInputs, run: LayerRun, from_scratch: Again) -> int:
    """Computes a hash of what a layer makes of made-up numbers; 0 for a layer that does not take such numbers."""

    def numbers(kind: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [made_up(tensor, key64("determinism_hash", kind, place)) for place, tensor in enumerate(tensors)]

    inputs = iter(numbers("input", given.leaves))
    reached = Reached(numbers("gradient", filter(is_differentiable, run.leaves)), None)
    with with_parameters(module, lambda name, values: made_up(values, key64("determinism_hash", name))):
        try:
            made, gradients = from_scratch(remade(given, lambda leaf: next(inputs)), reached)
        except InterruptedWaitError:  # the layer is left, and proved anew when it is run again
            raise
        except ForeignError as error:
            if not isinstance(error, ForeignPartError):
                raise  # nothing was found out
            return 0
        except (Exception, SystemExit):  # a layer may refuse made-up numbers; its shapes are still compared
            return 0
        # 0 is taken: it says that the layer does not take made-up numbers.
        return hash_tensors([*made.leaves, *gradients]) or 1


def remade(given: LayerInputs, make: Callable[[torch.Tensor], torch.Tensor]) -> LayerInputs:
    """Makes other tensors of which gradients are wanted as before."""
    return given._replace(leaves=[make(leaf.detach()).requires_grad_(leaf.requires_grad) for leaf in given.leaves])


def check_equal(
    who: str, names: Sequence[str], first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]
) -> None:
    """Refuses a layer or a loss whose second run has other bits.

    Args:
        who: the layer, or the loss.
        names: of what is compared.
        first, second: of both runs.
    Raises:
        UsageError: names the first difference, and what to do.
    """
    for name, one, other in zip(names, first, second, strict=True):
        if not (same_bits(one, other) if one is not None and other is not None else one is other):
            _refuse_other_bits(who, f"{name} differs{_by(one, other)}")


def check_hashes(who: str, names: Sequence[str], first: Sequence[torch.Tensor | None], second: Sequence[int]) -> None:
    """Checks the same as `check_equal` where only the hashes of the second run are left.

    Raises:
        UsageError: names the first difference, and what to do.
    """
    for name, one, other in zip(names, first, second, strict=True):
        if hash_tensors([one]) != other:
            _refuse_other_bits(who, f"{name} differs")


def _refuse_other_bits(who: str, what: str) -> NoReturn:
    raise UsageError(
        f"{who} is not deterministic: run twice on the same micro-batch, with its memory at other addresses, {what}. "
        "It must keep nothing between calls, draw from the generators of torch, numpy and random only, and use kernels "
        "that do not depend on addresses: products of fewer than 4 rows may (raise batch.microbatch_size), and so may "
        "operations that add with scatter"
    )


def _by(one: torch.Tensor | None, other: torch.Tensor | None) -> str:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return ""
    difference = (one.detach().double() - other.detach().double()).abs()
    return f" in {int((difference > 0).sum())} of {difference.numel()} elements, by up to {float(difference.max()):.2g}"


UPDATE = "update"
"""Name of the operator."""


def environment_of(blueprint: Blueprint, device: Device = HOST) -> Environment:
    """Finds what this process computes with, the optimizer of a run included."""
    found = environment(device)
    return found._replace(operators={**found.operators, UPDATE: update_hash(blueprint, device)})


def update_hash(blueprint: Blueprint, device: Device = HOST) -> int:
    """Computes a hash of the first update of the first block of each kind of layer; 0 for an optimizer that does not
    take made-up numbers. Nothing is left behind: the updater is a new one, and so is what is updated."""
    found: list[torch.Tensor] = []
    try:
        updater = blueprint.optimizer.updater()
        # As in a step: what is kept once moves on before blocks are updated.
        updater.committed(1, 1.0, updates=True)
        for block in _one_of_each_kind(blueprint):
            copy = _made_up_copy(blueprint, block, device)
            gradient = made_up(
                torch.empty(copy.num_elements, device=device.place), key64(UPDATE, "gradient", block.layer)
            )
            updater.update([copy], [gradient], 1)
            found += [copy.slots[name] for name in sorted(copy.slots)]
    except Exception:
        return 0
    return hash_tensors(found) or 1


def _one_of_each_kind(blueprint: Blueprint) -> Iterator[Block]:
    kinds = set()
    for block in blueprint.blocks:
        shape = blueprint.shapes[block.layer]
        kind = tuple((slot.shape, slot.decays, slot.group, slot.states, slot.scalars) for slot in shape.tensors)
        if block.start == 0 and not shape.is_buffers and kind not in kinds:
            kinds.add(kind)
            yield block


def _made_up_copy(blueprint: Blueprint, block: Block, device: Device) -> HeldBlock:
    """Makes a block with values that do not depend on the run; states of the optimizer are not negative."""
    copy = HeldBlock(block, ReplicaRole.OWNER, blueprint.shapes[block.layer], {})
    for name in blueprint.state.slots_of((segment.slot for segment in copy.segments), 0):
        values = made_up(torch.empty(copy.num_elements, device=device.place), key64(UPDATE, name, block.layer))
        copy.slots[name] = values if name == MASTER else values.abs_()
    return copy
