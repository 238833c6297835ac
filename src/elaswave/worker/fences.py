"""Values at the boundaries of a model with fences: which of their tensors are coded, and with which bytes.

A tensor is coded where it passes a fence, and stays coded, as bytes, until a layer is given it: so what is sent, what
is kept to be sent again, and what the next layer of the same worker is given all come from the same bytes. A layer that
hands a tensor on as it was given it hands its bytes on: at the next fence it is not coded again. Whether it does is
found by comparing bits, not memory, since what shares memory could depend on who runs a layer.

Codecs run between layers, never inside: a layer that is run again, and the canary, see decoded tensors only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from elaswave.errors import FrameError
from elaswave.fences import Codec
from elaswave.worker.codecs import decode, encode, is_codable
from elaswave.worker.values import at_boundary, flatten, unflatten

Direction = Literal["forward", "backward"]


class Fenced(NamedTuple):
    """A value at a boundary of which some tensors are coded."""

    value: Any
    """With the bytes in the place of those tensors."""
    places: torch.Tensor
    """Theirs among the leaves: int64, ascending."""


class _Known(NamedTuple):
    """A tensor that a layer was given, and its bytes."""

    coded: torch.Tensor
    decoded: torch.Tensor


class Fences:
    """The fences of a model, on one worker.

    Args:
        codecs: by position of the layer before each fence; ``none`` is no codec.
    """

    def __init__(self, codecs: Mapping[int, Codec]) -> None:
        self._codecs = {boundary: codec for boundary, codec in codecs.items() if codec != "none"}
        self.bypassed: Counter[tuple[int, Direction]] = Counter()
        """Tensors that have passed a fence as they were, since they were not finite; by boundary."""

    def opened(self, value: Any) -> Any:
        """What a layer, or the loss, is given of a value at the boundary before it.

        Raises:
            FrameError: the value was received, and its bytes contradict themselves.
        """
        if not isinstance(value, Fenced):
            return value
        structure, leaves = flatten(value.value)
        for place in _places(value, len(leaves)):
            leaves[place] = at_boundary(decode(leaves[place]))
        return unflatten(structure, leaves)

    def closed(self, boundary: int, value: Any, before: Any, given: Sequence[torch.Tensor]) -> Any:
        """What a layer has returned, as it stands at the boundary behind the layer.

        Args:
            boundary: the layer's position.
            value: that it has returned.
            before: what stood at the boundary before it.
            given: the leaves that it was given of that.
        """
        known: list[_Known] = []
        if isinstance(before, Fenced):
            _, coded = flatten(before.value)
            known = [_Known(coded[place], given[place]) for place in before.places.tolist()]
        if not known and boundary not in self._codecs:
            return value
        structure, leaves = flatten(value)
        found = {}
        for place, leaf in enumerate(leaves):
            bytes_ = self._coded(boundary, "forward", leaf, known)
            if bytes_ is not None:
                found[place] = leaves[place] = bytes_
        return Fenced(unflatten(structure, leaves), torch.tensor([*found])) if found else value

    def opened_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients for a layer's backward of those at the boundary behind it. Bytes are coded: no gradient is whole.

        Raises:
            FrameError: they were received, and bytes contradict themselves.
        """
        return [decode(each) if each.dtype == torch.uint8 else each for each in gradients]

    def closed_gradients(
        self,
        boundary: int,
        gradients: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """What a layer's backward has brought, as it stands at the boundary before the layer.

        Args:
            boundary: position of the layer before that boundary.
            gradients: of the layer's inputs.
            before: what stood at the boundary behind it.
            given: what its backward was given of that.
        """
        known = [_Known(*pair) for pair in zip(before, given, strict=True) if pair[0].dtype == torch.uint8]
        if not known and boundary not in self._codecs:
            return list(gradients)
        coded = (self._coded(boundary, "backward", each, known) for each in gradients)
        return [each if bytes_ is None else bytes_ for each, bytes_ in zip(gradients, coded, strict=True)]

    def _coded(
        self, boundary: int, direction: Direction, leaf: torch.Tensor, known: Sequence[_Known]
    ) -> torch.Tensor | None:
        """The bytes with which a tensor passes a boundary; None: it passes as it is."""
        for each in known:
            if _same_bits(leaf, each.decoded):
                return each.coded
        codec = self._codecs.get(boundary)
        if codec is None or not is_codable(leaf, codec):
            return None
        found = encode(leaf, codec)
        if found is None:
            self.bypassed[boundary, direction] += 1
        return found


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


def _places(value: Fenced, num_leaves: int) -> list[int]:
    places = value.places
    found: list[int] = places.tolist() if isinstance(places, torch.Tensor) and places.dtype == torch.int64 else []
    if not found or not all(0 <= place < num_leaves for place in found):
        raise FrameError(f"a value of {num_leaves} tensors says that those at {found} are coded")
    return found
