"""Where each tensor lies inside its unit's one-dimensional storage. No torch: the coordinator reads it too.

A *unit* of state is a layer, with the parameters that it trains alone; or a parameter that layers share; or the
persistent buffers of one layer. Units are numbered: first the layers, then what they share, then buffers.
Blocks, sums, verification and checkpoints all see a unit as one flat run of elements. Offsets depend on the model
alone, never on the layout, the number of workers or the compute dtype, so that block boundaries (and with them every
hash and every partial norm) are the same wherever a layer lives.

Grids and norms as arithmetic: which power of two a tensor's gradients are added on, and sums that have no order.

`elaswave.state.sums` explains grids and adds tensors on them; what follows from the largest gradient of a step, and the
exact sum of the squares of all owners, is decided in the vote and stands here. Pure: no torch, no IO.
"""

import math
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

ALIGNMENT_ELEMENTS = 32
"""Every parameter starts at a multiple of this: 64 bytes in bfloat16, 128 in float32. CPU kernels round some
products differently when rows start elsewhere, so the alignment is part of what keeps bits equal."""


WHOLE_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
"""Element types of buffers of whole numbers, with the bytes of an element: each byte is one element of flat storage,
0.0 to 255.0, so that sums and means of equal numbers are exact in float32."""


class TensorSlot(NamedTuple):
    """One trained parameter or persistent buffer of the model and its place in its unit's flat storage."""

    id: int
    """Position among all tensors of the model."""
    name: str
    """Full name, such as ``block.0.attention.qkv.weight``."""
    layer: int
    """Its unit."""
    shape: tuple[int, ...]
    offset: int
    """First element in the unit's flat storage."""
    numel: int
    """Elements of flat storage: `width` for each value."""
    decays: bool
    """Whether weight decay applies, by the usual rule: matrices and embeddings decay, biases and norms do not."""
    group: int = 0
    """The optimizer's parameter group that it is in."""
    states: tuple[str, ...] | None = None
    """Its float32 states, "master" among them; None: all that the run has."""
    scalars: tuple[tuple[str, str], ...] = ()
    """Name and element type of the states that it has once, not per element."""
    dtype: str = "float32"
    """Element type in checkpoints and exports: of parameters that of the masters, of buffers their own."""
    is_buffer: bool = False

    def has(self, slot: str) -> bool:
        """Tells whether the tensor has one of the run's float32 states."""
        return self.states is None or slot in self.states

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers, one byte in each element of flat storage."""
        return self.dtype in WHOLE_BYTES

    @property
    def width(self) -> int:
        """Elements of flat storage that a value takes."""
        return WHOLE_BYTES.get(self.dtype, 1)

    @property
    def num_values(self) -> int:
        """Elements of the tensor."""
        return self.numel // self.width

    @property
    def added_shape(self) -> tuple[int, ...]:
        """Shape of what each micro-batch adds: a gradient of the tensor's shape, or a buffer's elements of storage."""
        return (self.numel,) if self.is_buffer else self.shape

    @property
    def stop(self) -> int:
        """One past the last element in the flat storage."""
        return self.offset + self.numel


class FrozenTensor(NamedTuple):
    """A parameter that is not trained. Each holder makes it itself, so it has no place in flat storage."""

    name: str
    """Full name."""
    layer: int
    shape: tuple[int, ...]
    dtype: str


class SharedUse(NamedTuple):
    """A parameter of a layer that is one tensor with parameters of other layers."""

    name: str
    """In the layer's module."""
    unit: int
    use: int
    """Its number among the uses of the unit."""


class LayerShape(NamedTuple):
    """The tensors of one unit and the length of its flat storage."""

    layer: int
    """Number of the unit; that of the layer, if it is one."""
    tensors: tuple[TensorSlot, ...]
    size: int
    """Elements of the flat storage, padding included."""
    users: tuple[int, ...] = ()
    """The layers that use it, one entry for each use and first the one that has its initial values; () for a layer."""
    shared: tuple[SharedUse, ...] = ()
    """Of a layer: its parameters that lie in units of their own."""
    buffers: int | None = None
    """Of a layer: the unit of its persistent buffers; None: it has none."""
    frozen: tuple[FrozenTensor, ...] = ()
    """Of a layer: its parameters that are not trained, but for those that an earlier layer has under another name."""
    num_idle: int = 0
    """Uses that bring no gradient."""

    @property
    def num_uses(self) -> int:
        """How often each micro-batch adds to the unit."""
        return max(1, len(self.users))

    @property
    def num_terms(self) -> int:
        """How many of them may be other than zero, so that grids leave headroom for them."""
        return max(1, self.num_uses - self.num_idle)

    @property
    def is_buffers(self) -> bool:
        """Whether it holds the buffers of a layer."""
        return bool(self.tensors) and self.tensors[0].is_buffer

    @property
    def is_trained(self) -> bool:
        """Of a layer: whether it has a parameter that is trained."""
        return bool(self.tensors or self.shared)


class StoredState(NamedTuple):
    """One state of one tensor, as a checkpoint holds it."""

    slot: str
    tensor: str
    """Its full name."""
    shape: tuple[int, ...]
    dtype: str
    """Element type, as `elaswave.checkpoints.format` names it."""


class StateShapes(NamedTuple):
    """What a model and its optimizer keep, as far as it does not take torch to say it."""

    layer_names: tuple[str, ...]
    layers: tuple[LayerShape, ...]
    """All units."""
    slots: tuple[str, ...]
    """Float32 states of elements: the master weights first, then those of the optimizer. A tensor has some of them."""
    late: tuple[str, ...] = ()
    """Those of `slots`, and of the scalar states, that come into being with the first update."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layer_names)

    @property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """The layers that use each unit beyond the layers, see `elaswave.types.Layout.shared`."""
        return tuple(shape.users for shape in self.layers[self.num_layers :])

    @property
    def lowest_trained(self) -> int:
        """The first layer with a parameter that is trained; the number of layers if there is none."""
        trained = (index for index, shape in enumerate(self.layers[: self.num_layers]) if shape.is_trained)
        return next(trained, self.num_layers)

    def num_parameters(self, layer: int) -> int:
        """Parameters of a layer; a shared one is counted where it has its name, a frozen one as well."""
        own = sum(slot.numel for slot in self.layers[layer].tensors)
        shared = sum(
            slot.numel
            for shape in self.layers[self.num_layers :]
            if shape.users[0] == layer and not shape.is_buffers
            for slot in shape.tensors
        )
        return own + shared + sum(math.prod(tensor.shape) for tensor in self.layers[layer].frozen)

    @property
    def frozen(self) -> tuple[FrozenTensor, ...]:
        """All parameters that are not trained."""
        return tuple(tensor for shape in self.layers for tensor in shape.frozen)

    def slots_of(self, tensors: Iterable[TensorSlot], num_updates: int) -> tuple[str, ...]:
        """Lists the float32 states of a run of elements.

        Args:
            tensors: that have elements in it.
            num_updates: that have been made.
        Returns:
            Their names, in the order of `slots`.
        """
        tensors = tuple(tensors)
        there = (slot for slot in self.slots if num_updates or slot not in self.late)
        return tuple(slot for slot in there if any(tensor.has(slot) for tensor in tensors))

    def stored(self, num_updates: int) -> Iterator[StoredState]:
        """Lists all states that a checkpoint holds after so many updates."""
        for tensor in all_tensors(self.layers):
            for slot in self.slots_of((tensor,), num_updates):
                yield StoredState(slot, tensor.name, tensor.shape, tensor.dtype)
            for name, dtype in tensor.scalars:
                if num_updates or name not in self.late:
                    yield StoredState(name, tensor.name, (), dtype)
        for frozen in self.frozen:
            yield StoredState(self.slots[0], frozen.name, frozen.shape, frozen.dtype)


def align(num_elements: int) -> int:
    """Computes the next multiple of `ALIGNMENT_ELEMENTS`."""
    return -(-num_elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


class Segment(NamedTuple):
    """The part of one tensor that lies in a run [start, stop) of a unit's flat storage."""

    slot: TensorSlot
    start: int
    """First element, counted from the beginning of the run."""
    stop: int
    """One past the last element, counted from the beginning of the run."""
    tensor_start: int
    """First element, counted from the beginning of the flattened tensor; in flat storage's elements."""

    @property
    def first_value(self) -> int:
        """The same in the tensor's own elements; blocks are cut at multiples of every width."""
        return self.tensor_start // self.slot.width

    @property
    def num_values(self) -> int:
        """How many of the tensor's own elements there are."""
        return (self.stop - self.start) // self.slot.width


def segments(shape: LayerShape, start: int, stop: int) -> Iterator[Segment]:
    """Lists the tensors' parts inside [start, stop), padding left out, in order."""
    tensors = shape.tensors
    for index in range(bisect_right(tensors, start, key=_stop), len(tensors)):
        slot = tensors[index]
        if slot.offset >= stop:
            return
        first, last = max(slot.offset, start), min(slot.stop, stop)
        if first < last:
            yield Segment(slot, first - start, last - start, first - slot.offset)


def _stop(slot: TensorSlot) -> int:
    return slot.stop


def with_states(shapes: tuple[LayerShape, ...], states: tuple[str, ...]) -> tuple[LayerShape, ...]:
    """Makes shapes of the same tensors with more states."""
    return tuple(
        shape._replace(
            tensors=tuple(
                slot if slot.states is None else slot._replace(states=(*slot.states, *states)) for slot in shape.tensors
            )
        )
        for shape in shapes
    )


def all_tensors(shapes: Sequence[LayerShape]) -> tuple[TensorSlot, ...]:
    """Lists every tensor of the model, in the order of `TensorSlot.id`."""
    return tuple(slot for shape in shapes for slot in shape.tensors)


class GridRule(NamedTuple):
    """How the bits of a sum are used."""

    sum_bits: int
    """Of the magnitude of a sum that fits: one of the word's bits is the sign, and one is spare."""
    headroom_bits: int
    """The largest gradient may grow by this factor (as a power of two) from one step to the next before a retry."""
    bits_below_maximum: int
    """The most bits of resolution below a tensor's largest gradient."""


WIDE_BITS = 64
"""Width of a sum, if nothing else is said."""
GRID_RULES = MappingProxyType({WIDE_BITS: GridRule(62, 16, 43), 48: GridRule(46, 10, 33)})
"""By the width of a sum in bits (``elastic.accumulator_bits``)."""
MIN_EXPONENT, MAX_EXPONENT = -90, 200
"""Grids are clamped to these; float32 reaches from 2**-149 to 2**128."""
FEWEST_BITS = 24
"""Bits that a tensor's largest gradient must have on its grid, else the step is tried again: as many as float32 has."""
INITIAL_EXPONENT = 40
"""Grid of the first attempt of the first step, which is made only to measure (see `elaswave.protocol.step.ballot`)."""


def magnitude_bits(maximum: float) -> int:
    """Computes the smallest x with ``maximum < 2**x``, for a positive finite maximum."""
    return math.frexp(maximum)[1]


def next_exponent(maximum: float, exponent: int, num_microbatches: int, width: int = WIDE_BITS) -> int:
    """Computes the grid exponent of the next step.

    Args:
        maximum: largest absolute gradient of the tensor in any micro-batch of this step, finite.
        exponent: this step's exponent, kept where the maximum is 0.
        num_microbatches: terms of each sum, at least 1.
        width: of a sum, in bits.
    """
    if maximum == 0.0:
        return exponent
    rule = GRID_RULES[width]
    bits = min(rule.bits_below_maximum, rule.sum_bits - rule.headroom_bits - count_bits(num_microbatches))
    return max(MIN_EXPONENT, min(MAX_EXPONENT, bits - magnitude_bits(maximum)))


def count_bits(count: int) -> int:
    """Computes the smallest x with ``count <= 2**x``."""
    return (count - 1).bit_length()


def could_overflow(maximum: float, exponent: int, num_microbatches: int, width: int = WIDE_BITS) -> bool:
    """Tells whether the sum of num_microbatches values up to maximum could leave the range of signed words of that
    width."""
    num_bits = magnitude_bits(maximum) + exponent + count_bits(num_microbatches)
    return maximum > 0.0 and num_bits > GRID_RULES[width].sum_bits


def is_too_coarse(maximum: float, exponent: int) -> bool:
    """Tells whether a grid leaves the largest gradient, if there is any, fewer bits than float32 would."""
    return maximum > 0.0 and magnitude_bits(maximum) + exponent < FEWEST_BITS


NORM_LIMBS = 21
_LIMB_BITS = 32
_NORM_SHIFT = 320
_DIGITS, _HALF_DIGITS = 53, 27
"""Of a float64, in binary."""
_MANY_SUMS = 256
_LIMBS = struct.Struct(f"<{NORM_LIMBS}I")
_ALL_LIMBS = (1 << _LIMB_BITS * NORM_LIMBS) - 1


def norm_limbs(square_sums: Sequence[float]) -> list[int]:
    """Computes an exact sum of finite non-negative float64 values as 32-bit limbs, least significant first.

    Limbs of several workers may be added in any order (as int64, without carrying) before `norm_from_limbs`.

    Args:
        square_sums: sums of squares of float32 values, so multiples of 2**-298.
    """
    total = sum(map(_fixed_point, square_sums)) if len(square_sums) < _MANY_SUMS else _sum_of_many(square_sums)
    return list(_LIMBS.unpack((total & _ALL_LIMBS).to_bytes(_LIMBS.size, "little")))


def _fixed_point(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return (numerator << _NORM_SHIFT) // denominator


def _sum_of_many(values: Sequence[float]) -> int:
    """Computes the same sum exponent by exponent: Python's numbers of any length are made once for each of these."""
    fractions, exponents = np.frexp(np.asarray(values, np.float64))
    digits = np.ldexp(fractions, _DIGITS).astype(np.int64)
    total, lowest = 0, int(exponents.min())
    high, low = np.zeros((2, int(exponents.max()) - lowest + 1), np.int64)
    # In two halves, sums of which do not leave 64 bits.
    np.add.at(high, exponents - lowest, digits >> _HALF_DIGITS)
    np.add.at(low, exponents - lowest, digits & (1 << _HALF_DIGITS) - 1)
    for exponent, (upper, lower) in enumerate(zip(high.tolist(), low.tolist(), strict=True), lowest):
        shift = exponent - _DIGITS + _NORM_SHIFT
        digits_of_all = (upper << _HALF_DIGITS) + lower
        total += digits_of_all << shift if shift >= 0 else digits_of_all >> -shift
    return total


def norm_from_limbs(limbs: Sequence[int]) -> float:
    """Computes the square root of what `norm_limbs` (added over workers) holds."""
    total = sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(limbs) if limb)
    return math.sqrt(total / (1 << _NORM_SHIFT))
