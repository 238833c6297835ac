"""Values that layers and the loss are given and return: what can travel, and that nobody writes what it was only lent.

A value is a tensor, or a tree of tensors in tuples, named tuples, lists, dictionaries, None. It is taken apart into its
*structure* and its *leaves*, the tensors. A structure is plain data, nested tuples, so that it can be compared, named
and sent. Our own few containers rather than `torch.utils._pytree`: what travels to another process must be rebuilt
there from its description alone, without running code that a frame names.

A layer or the loss is lent its inputs, its parameters and the gradients that come to it. All of it is memory that
somebody reads again: the layer before in its backward, copies of the parameters, another attempt of the step. By which
look a write is found:

- *by bits*, at a layer's first micro-batch in each process, in training and in evaluation, and wherever a run is done
  again (`elaswave.engine.checks.determinism_check.check_again`): all that was lent is compared with what it was.
- *by sums*, at every run, from before a forward until after its backward: inputs, what `elaswave.batch` returns, and
  targets. The words of a tensor are added up, in some parts. It costs a thousandth of what a layer computes.
- *by versions*, at every run, after forward and backward: what torch counts of writes in place, of parameters and
  inputs, and whether a parameter is still the same object at the same place.

Writes to parameters past torch's counting (`.data`, numpy) that begin later show in the vote's hash of what workers
compute with. Nothing here decides what is lent: see `elaswave.engine.compute`.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from elaswave.devices.interface import Reading, Readings
from elaswave.errors import UsageError
from elaswave.models.admission import why_not_computed
from elaswave.models.layers import describe

Structure = Any
"""`TENSOR`, `NOTHING`, or a tuple: ("tuple" or "list", parts), ("dict", keys, parts), ("named", class, parts)."""
TENSOR: Structure = "tensor"
NOTHING: Structure = "none"

MAX_DEPTH = 32
"""Most containers within each other."""


def at_boundary(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if it is contiguous and 64-byte aligned, else such a copy.

    Kernels round differently on other strides and alignments.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % 64 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def flatten(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """Takes a value apart into its structure and leaves.

    Raises:
        UsageError: it holds something else than tensors, or too many containers within each other.
    """
    if isinstance(value, torch.Tensor):
        return TENSOR, [value]
    leaves: list[torch.Tensor] = []
    return _take_apart(value, leaves, 0), leaves


def _take_apart(value: Any, leaves: list[torch.Tensor], depth: int) -> Structure:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return TENSOR
    if value is None:
        return NOTHING
    if depth == MAX_DEPTH:
        raise UsageError(f"a value has more than {MAX_DEPTH} containers within each other: return a flatter one")

    def parts(values: Any) -> tuple[Structure, ...]:
        return tuple(_take_apart(part, leaves, depth + 1) for part in values)

    kind = type(value)
    # These very types: the receiver would make the base class of a subclass.
    if kind is tuple or kind is list:
        return (kind.__name__, parts(value))
    if kind is dict:
        if strange := [key for key in value if type(key) not in (str, int)]:
            raise UsageError(f"a dictionary has the key {strange[0]!r}: only texts and whole numbers travel as keys")
        return ("dict", tuple(value), parts(value.values()))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ("named", _name_of(kind), parts(value))
    raise UsageError(
        f"a value holds {describe(value)}: only tensors travel, in tuples, named tuples, lists and dictionaries. Make "
        "a tensor of it, or a dictionary of an object's tensors"
    )


def unflatten(structure: Structure, leaves: Sequence[torch.Tensor]) -> Any:
    """Does the inverse of `flatten`."""
    if structure == TENSOR:
        return leaves[0]
    return _put_together(structure, iter(leaves))


def _put_together(structure: Structure, leaves: Iterator[torch.Tensor]) -> Any:
    if structure == TENSOR:
        return next(leaves)
    if structure == NOTHING:
        return None
    values = [_put_together(part, leaves) for part in structure[-1]]
    if structure[0] == "list":
        return values
    if structure[0] == "dict":
        return dict(zip(structure[1], values, strict=True))
    return tuple(values) if structure[0] == "tuple" else _class_of(structure[1])._make(values)


def num_leaves(structure: Structure) -> int:
    """Counts the tensors that a structure has."""
    if structure in (TENSOR, NOTHING):
        return int(structure == TENSOR)
    return sum(map(num_leaves, structure[-1]))


def _name_of(kind: Any) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        if _class_of(name) is kind:
            return name
    except UsageError:
        pass
    raise UsageError(
        f"a value is a named tuple of the class {name}, which other processes cannot find: define it at the top of the "
        "script or of a module, under its own name, or return a dictionary"
    )


@functools.lru_cache(maxsize=256)
def _class_of(name: str) -> Any:
    """Finds a class of named tuples that this process has imported; nothing is imported for it.

    Raises:
        UsageError: there is none of this name.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make")):
        raise UsageError(f"no class of named tuples is called {name} in this process")
    return found


class Signature(NamedTuple):
    """What stays the same from micro-batch to micro-batch."""

    structure: Structure
    leaves: tuple[tuple[torch.dtype, torch.Size], ...]

    def __str__(self) -> str:
        return _text_of(self.structure, iter(self.leaves))


def _text_of(structure: Structure, leaves: Iterator[tuple[torch.dtype, torch.Size]]) -> str:
    if structure == TENSOR:
        dtype, shape = next(leaves)
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    if structure == NOTHING:
        return "None"
    parts = [_text_of(part, leaves) for part in structure[-1]]
    if structure[0] == "dict":
        parts = [f"{key!r}: {part}" for key, part in zip(structure[1], parts, strict=True)]
    return f"{structure[1] if structure[0] == 'named' else structure[0]}({', '.join(parts)})"


class Signatures:
    """What travels at each boundary; the first value that is seen there fixes it.

    Args:
        name_of: names a boundary, for errors.
        place: of the worker's device, where all that travels lies.
    """

    def __init__(self, name_of: Callable[[int], str], place: torch.device) -> None:
        self._name_of = name_of
        self._place = place
        self._known: dict[tuple[int, bool], Signature] = {}

    @property
    def known(self) -> Mapping[tuple[int, bool], Signature]:
        """By boundary, and whether in training."""
        return self._known

    def check(self, boundary: int, train: bool, structure: Structure, leaves: Sequence[torch.Tensor]) -> None:
        """Refuses a value that cannot travel, or is not like the first one.

        Args:
            boundary: layer that has returned it; -1 for the inputs of the model.
            train: whether in training; evaluation may have other sizes.
            structure, leaves: of the value.
        Raises:
            UsageError: says what was seen and what was needed.
        """
        for leaf in leaves:
            if problem := _why_not(leaf, self._place):
                raise UsageError(f"{self._name_of(boundary)} {describe(leaf)} {problem}")
        found = Signature(structure, tuple((leaf.dtype, leaf.shape) for leaf in leaves))
        known = self._known.setdefault((boundary, train), found)
        if found != known:
            raise UsageError(
                f"{self._name_of(boundary)} {found}, but {known} in the first micro-batch here: structure, shapes and "
                "types must stay the same. Pad to one size, or leave incomplete batches out"
            )


def _why_not(leaf: torch.Tensor, place: torch.device) -> str:
    """Tells why a tensor cannot travel between layers on a device, or returns an empty text."""
    if leaf.layout is not torch.strided:
        return f"of layout {leaf.layout}: make it dense with .to_dense()"
    if leaf.is_inference():
        return "that torch.inference_mode() has made, with which others cannot compute: use torch.no_grad()"
    if leaf.is_quantized:
        return f"that is {why_not_computed(leaf)}"
    if leaf.is_complex():
        return "of complex numbers: hand it on with torch.view_as_real"
    if leaf.device != place:
        return (
            f"on {leaf.device}: this worker computes on {place}. Make it where the layer's input is (device=x.device)"
        )
    return ""


def tensors_of(*values: Any) -> list[torch.Tensor]:
    """Lists the tensors of some values, whatever containers they stand in; the model's own, and a dataset's."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            found += tensors_of(*value.values())
        elif isinstance(value, tuple | list):
            found += tensors_of(*value)
    return found


def is_differentiable(leaf: torch.Tensor) -> bool:
    """Tells whether a gradient of it travels back."""
    return leaf.is_floating_point()


def check_dense(who: str, names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuses sparse gradients.

    Args:
        who: layer, for errors.
        names: of its parameters.
        gradients: of them, in their order; more may follow.
    Raises:
        UsageError: names the first one.
    """
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError(
                f"{who} makes a sparse gradient of {names[index]}: look vectors up with sparse=False, sums of "
                "gradients are dense"
            )


_PARTS = 16
"""Of a tensor, each with a sum of its own, so that a sum sees most changes of order too."""
_WORD_BYTES = 8
_PAGE_BYTES = 4096
_BOUNDARY_BYTES = 64
_ORDINARY = (torch.float32, torch.bfloat16, torch.int64)
_version, _place = attrgetter("_version"), torch.Tensor.data_ptr


def sums_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Sums up the words of a tensor, in parts, modulo 2**64; int64, where it lies. Nothing is waited for."""
    part_bytes, shape = _PARTS * _WORD_BYTES, tensor.shape
    is_even = shape and not (shape[-1] * tensor.itemsize % _WORD_BYTES or tensor.nbytes % part_bytes)
    # torch views only what begins at a whole word as words.
    is_even = is_even and not tensor.storage_offset() * tensor.itemsize % _WORD_BYTES
    if is_even and tensor.dtype in _ORDINARY and tensor.is_contiguous():  # in half of the time
        return [tensor.detach().view(torch.int64).view(_PARTS, -1).sum(1)]
    if tensor.storage_offset() * tensor.itemsize % _WORD_BYTES:
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    # Conjugated and negated lazily, a tensor has other numbers in its memory, and torch gives no view of the bytes.
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = flat.numel() // part_bytes * part_bytes
    found = [flat[:size].view(torch.int64).view(_PARTS, -1).sum(1)] if size else []
    return found if size == flat.numel() else [*found, flat[size:].sum()]


class WatchedTensors:
    """Tensors that are lent, as they were.

    Args:
        tensors: that are lent.
        by_sums: whether their content is looked at too, and not only torch's count of writes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, by_sums: bool) -> None:
        # Tensors of inference mode have no count of writes, sparse ones no run of words.
        self._tensors = [each for each in tensors if not each.is_inference() and each.layout is torch.strided]
        self._versions = [*map(_version, self._tensors)]
        self._sums = self._summed() if by_sums else None

    def _summed(self) -> list[torch.Tensor]:
        return [part for tensor in self._tensors for part in sums_of(tensor)]

    @property
    def is_counted(self) -> bool:
        """Whether torch has counted a write."""
        return [*map(_version, self._tensors)] != self._versions

    def differs(self, *, waits: bool = True) -> bool | torch.Tensor:
        """Tells whether one was written; for who does not wait for the device, returns a number there that is 0 if none
        was."""
        if self.is_counted or self._sums is None:
            return self.is_counted
        before, now = self._sums, self._summed()
        if [part.shape for part in before] != [part.shape for part in now]:
            return True
        if waits:
            return not all(map(torch.equal, before, now))
        return torch.stack([(one != other).sum() for one, other in zip(before, now, strict=True)]).sum()


class Watching:
    """Refuses what was written; at once on the host, before the vote on a device.

    Args:
        readings: of the device.
        by_sums: as of `Watched`.
    """

    def __init__(self, readings: Readings, *, by_sums: bool) -> None:
        self._readings, self._by_sums = readings, by_sums
        self._late: list[tuple[Reading, tuple[int, int], Callable[[], str]]] = []
        self.at = (0, 0)
        """Micro-batch and layer that are being computed."""

    def watch(self, *values: Any) -> WatchedTensors:
        """Looks at the tensors of some values, whatever containers they stand in."""
        return self.watch_tensors(tensors_of(*values))

    def watch_tensors(self, tensors: Sequence[torch.Tensor]) -> WatchedTensors:
        """Looks at tensors."""
        return WatchedTensors(tensors, by_sums=self._by_sums)

    def expect(self, watched: WatchedTensors, message: Callable[[], str]) -> None:
        """Refuses them if they were written.

        Raises:
            UsageError: has the message.
        """
        found = watched.differs(waits=self._readings.are_known_at_once)
        if isinstance(found, torch.Tensor):
            self._late.append((self._readings.note(found), self.at, message))
        elif found:
            raise UsageError(message())

    def late(self) -> tuple[tuple[int, int], str] | None:
        """Returns micro-batch and layer, and message, of the first refusal that was not known when it was expected;
        waits for the device."""
        late, self._late = self._late, []
        return next(((at, message()) for reading, at, message in late if reading.value), None)


class Lent(NamedTuple):
    """What a run of a layer or the loss is called with."""

    leaves: list[torch.Tensor]
    """Of its input, or copies that it may write."""
    watched: WatchedTensors
    are_copies: bool


def aligned_clone(tensor: torch.Tensor, *, shift: int = 0) -> torch.Tensor:
    """Makes a copy, in the same graph, that lies as far into a page as the tensor, aligned to 64 bytes as every
    boundary is.

    Args:
        tensor: of any strides; they are kept where they leave no gap, as `torch.clone` does.
        shift: by how many bytes further into the page.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    # Tells size and strides of a clone without memory for one.
    like = torch.empty_like(tensor, device="meta")
    room = torch.empty(like.nbytes + _PAGE_BYTES, dtype=torch.uint8, device=tensor.device)
    start = (tensor.data_ptr() + shift - room.data_ptr()) % _PAGE_BYTES
    start += -(room.data_ptr() + start) % _BOUNDARY_BYTES
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(room.untyped_storage(), start // tensor.itemsize, like.shape, like.stride())
    return copy.copy_(tensor)


class Lending:
    """Lends layers and the loss of a worker their inputs: the very tensors that others read too, or copies of them to
    those that write them. Which do is found out at their first micro-batch here, in training and in evaluation.

    Args:
        who: names a layer, or the loss.
        watching: looks after what is lent.
    """

    def __init__(self, who: Callable[[int], str], watching: Watching) -> None:
        self._who, self._watching = who, watching
        self._writes: dict[tuple[int, bool], bool] = {}
        """By layer (or loss), and whether in training."""

    def lends(self, index: int) -> bool:
        """Tells whether a layer is lent its very input in training."""
        return self._writes.get((index, True)) is False

    def lend(self, index: int, leaves: Sequence[torch.Tensor], *, train: bool) -> Lent:
        """Lends a layer its input for one run.

        Args:
            index: of the layer.
            leaves: of its input.
            train: whether in training.
        """
        # As long as it is not known whether a layer writes its input, it gets copies as those do that write.
        if self._writes.get((index, train)) is False:
            # Other objects, so that nobody can make a leaf of them that wants a gradient.
            own = [leaf if leaf.requires_grad else leaf.detach() for leaf in leaves]
            return Lent(own, self._watching.watch_tensors(leaves), are_copies=False)
        # Each at its leaf's place within a page: a run that is done again elsewhere has its copies elsewhere too.
        copies = [aligned_clone(leaf) for leaf in leaves]
        return Lent(copies, WatchedTensors(copies, by_sums=False), are_copies=True)

    def look(self, index: int, leaves: Sequence[torch.Tensor], lent: Lent, *, train: bool, is_over: bool) -> bool:
        """Looks for writes after a forward, and after a backward.

        Args:
            index, leaves, train: as they were given to `lend`.
            lent: what it has answered.
            is_over: nothing that could write follows.
        Returns:
            Whether the layer writes its input, which were copies.
        Raises:
            UsageError: it has written an input that it was lent itself.
        """
        if not lent.are_copies:
            # The sums are made once, at the end: they cost, and the count tells of most writes before.
            if is_over or lent.watched.is_counted:
                self._watching.expect(lent.watched, lambda: WRITES_NOW.format(who=self._who(index)))
            return False
        known = self._writes.get((index, train))
        if known:
            return True
        wrote = lent.watched.is_counted or not all(map(same_bits, leaves, lent.leaves))
        # That a layer does not write its input is known only when its backward is over as well.
        if wrote or (is_over and known is None):
            self._writes[index, train] = wrote
        return wrote


class Guarded:
    """Parameters of a module as they are from one update to the next: each the same object, at the same place, with as
    many writes as before.

    Args:
        module: a layer, or the loss.
        buffers: whether buffers are looked at too, but for those of batch normalisation.
    """

    def __init__(self, module: nn.Module, *, buffers: bool = False) -> None:
        self.module = module
        found = []
        for path, owner in module.named_modules():
            of_owner = (
                [owner._parameters]
                if isinstance(owner, _NormBase) or not buffers
                else [owner._parameters, owner._buffers]
            )
            found += [
                (f"{path}.{key}" if path else key, where, key, tensor, *_state(tensor))
                for where in of_owner
                for key, tensor in where.items()
                if tensor is not None
            ]
        self._found = found
        self._tensors = [tensor for _, _, _, tensor, _, _ in found]
        self._states = [*map(_place, self._tensors)], [*map(_version, self._tensors)]
        by_owner: dict[int, tuple[Callable[[str], Any], list[str], list[torch.Tensor]]] = {}
        for _, where, key, tensor, _, _ in found:
            _, keys, tensors = by_owner.setdefault(id(where), (where.get, [], []))
            keys.append(key)
            tensors.append(tensor)
        self._by_owner = [*by_owner.values()]

    def written(self, *, elsewhere: bool = False) -> str | None:
        """Finds the name of the first that is not as it was.

        Args:
            elsewhere: their values lie at other places for a while.
        """
        places, versions = self._states
        # After each run of each layer: a few calls, however many there are.
        if (
            [*map(_version, self._tensors)] == versions
            and (elsewhere or [*map(_place, self._tensors)] == places)
            and all(all(map(is_, map(get, keys), tensors)) for get, keys, tensors in self._by_owner)
        ):
            return None
        for name, where, key, tensor, place, version in self._found:
            if where.get(key) is not tensor or tensor._version != version:
                return name
            if tensor.data_ptr() != place and not elsewhere:
                return name
        return None


class Unwritten:
    """Compares the parameters of a layer before and after a forward.

    Args:
        module: of the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [(name, each, *_state(each), each.detach().clone()) for name, each in module.named_parameters()]

    def check(self, who: str) -> None:
        """Refuses a forward that has written parameters, or put others in their place.

        Args:
            who: the layer, for errors.
        Raises:
            UsageError: names the first one.
        """
        now = dict(self._module.named_parameters())
        for name, parameter, place, version, values in self._before:
            found = now.pop(name, None)
            # Not the bits alone: a clamp may write what was there, at first. Not the version alone: .data has its own.
            is_same = found is parameter and _state(parameter) == (place, version) and same_bits(parameter, values)
            if not is_same:
                refuse_written_parameter(f"the forward of {who}", name)
        for name in now:
            refuse_written_parameter(f"the forward of {who}", name)


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two tensors have the same shape, type and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # As bytes: as numbers a NaN differs from itself, and -0 does not differ from 0.
    first, second = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return bool(torch.equal(first, second))


def refuse_written_parameter(what: str, name: str) -> NoReturn:
    """A parameter was written.

    Args:
        what: the forward or backward of a layer.
        name: of the parameter.
    """
    raise UsageError(
        f"{what} writes its parameter {name}: parameters change in updates only, so that every copy has the same bits. "
        "Compute with a changed copy, or make it a buffer, which a layer's forward may write"
    )


WRITES_NOW = (
    "{who} writes its input now, but did not in its first micro-batch: write to a copy. (A layer that writes its input "
    "from its first micro-batch on gets copies of it)"
)


def refuse_writing_loss(name: str) -> NoReturn:
    """The loss has written what it has as a module."""
    raise UsageError(
        f"the loss writes its {name}: every worker has a loss of its own, so what it keeps from one micro-batch to the "
        "next depends on the layout. Make what is kept a buffer of a layer, or compute the loss without it"
    )


def refuse_written_gradient(who: str) -> NoReturn:
    """A gradient was written."""
    raise UsageError(
        f"the backward of {who} writes the gradient that it is given, which others read too: torch.autograd.Function "
        "forbids it. Work on a copy (gradient = gradient.clone())"
    )
