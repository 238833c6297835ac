"""Values that travel between layers: a tensor, or a tree of tensors in tuples, named tuples, lists, dictionaries, None.

A tree is taken apart into its *structure* and its *leaves*, the tensors. A structure is plain data, nested tuples, so
that it can be compared, named and sent. Our own few containers rather than `torch.utils._pytree`: what travels to
another process must be rebuilt there from its description alone, without running code that a frame names.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

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
    """The tensor itself if it is contiguous and 64-byte aligned, else such a copy.

    Kernels round differently on other strides and alignments.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % 64 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def flatten(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """Structure and leaves of a value.

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
    """The inverse of `flatten`."""
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
    """How many tensors a structure has."""
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
    """A class of named tuples that this process has imported; nothing is imported for it.

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
    """Why a tensor cannot travel between layers on a device, or an empty text."""
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
    """The tensors of some values, whatever containers they stand in; the model's own, and a dataset's."""
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
    """Whether a gradient of it travels back."""
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
