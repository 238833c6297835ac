"""Values at the boundaries of a model with fences: which of their tensors are coded, and with which bytes.

A tensor is coded where it passes a fence, and stays coded, as bytes, until a layer is given it: so what is sent, what
is kept to be sent again, and what the next layer of the same worker is given all come from the same bytes. A layer that
hands a tensor on as it was given it hands its bytes on: at the next fence it is not coded again. Whether it does is
found by comparing bits, not memory, since what shares memory could depend on who runs a layer.

Under ``topk`` a gradient has the places of the tensor that it is the gradient of, as that stands coded at the
boundary: either side of it keeps these (`Masks`) until the gradient comes, and bytes without places go no further than
tensors with the same places do.

Codecs run between layers, never inside: a layer that is run again, and the determinism check, see decoded tensors only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from elaswave.engine.boundaries.codecs import (
    Places,
    decode_tensor,
    encode_at,
    encode_tensor,
    is_codable,
    needs_places,
    places_of,
)
from elaswave.engine.checks.values import at_boundary, flatten, is_differentiable, unflatten
from elaswave.errors import FrameError
from elaswave.fences import Codec, codec_in_force, top_k_of

Direction = Literal["forward", "backward"]


class CodedValue(NamedTuple):
    """A value at a boundary of which some tensors are coded."""

    value: Any
    """With the bytes in the place of those tensors."""
    places: torch.Tensor
    """Theirs among the leaves: int64, ascending."""


class Masks(NamedTuple):
    """What a layer keeps of the boundaries beside it for the gradients there."""

    before: Mapping[int, Places]
    """By position among the tensors of the boundary that have a gradient."""
    behind: Mapping[int, Places]


NO_MASKS = Masks({}, {})


class _Known(NamedTuple):
    """A tensor that a layer was given, and its bytes."""

    coded: torch.Tensor
    decoded: torch.Tensor
    places: Places | None = None
    """Without which the bytes mean nothing."""


class Fences:
    """The fences of a model, on one worker.

    Args:
        codecs: by position of the layer before each fence; ``none`` is no codec.
    """

    def __init__(self, codecs: Mapping[int, Codec]) -> None:
        self._asked = codecs
        self.use_ratios({})
        self.bypassed: Counter[tuple[int, Direction]] = Counter()
        """Tensors that have passed a fence as they were, since they were not finite; by boundary."""

    def use_ratios(self, ratios: Mapping[int, int]) -> None:
        """From now on adaptive fences have these ratios.

        Args:
            ratios: by boundary; the largest for those that are not in it.
        """
        in_force = {boundary: codec_in_force(codec, ratios.get(boundary)) for boundary, codec in self._asked.items()}
        self._codecs = {boundary: codec for boundary, codec in in_force.items() if codec != "none"}

    def opened(self, value: Any) -> Any:
        """Makes what a layer, or the loss, is given of a value at the boundary before it.

        Raises:
            FrameError: the value was received, and its bytes contradict themselves.
        """
        if not isinstance(value, CodedValue):
            return value
        structure, leaves = flatten(value.value)
        for place in _places(value, len(leaves)):
            leaves[place] = at_boundary(decode_tensor(leaves[place]))
        return unflatten(structure, leaves)

    def closed(self, boundary: int, value: Any, before: Any, given: Sequence[torch.Tensor]) -> Any:
        """Makes of what a layer has returned what stands at the boundary behind the layer.

        Args:
            boundary: the layer's position.
            value: that it has returned.
            before: what stood at the boundary before it.
            given: the leaves that it was given of that.
        """
        known: list[_Known] = []
        if isinstance(before, CodedValue):
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
        return CodedValue(unflatten(structure, leaves), torch.tensor([*found])) if found else value

    def masks(self, before: Any, behind: Any) -> Masks:
        """Finds what has to be kept of the values beside a layer until the backward has passed it."""
        if not isinstance(before, CodedValue) and not isinstance(behind, CodedValue):
            return NO_MASKS
        return Masks(_places_kept(before), _places_kept(behind))

    def opened_gradients(self, gradients: Sequence[torch.Tensor], masks: Masks) -> list[torch.Tensor]:
        """Gradients for a layer's backward of those at the boundary behind it. Bytes are coded: no gradient is whole.

        Args:
            gradients: those at the boundary.
            masks: the layer's.
        Raises:
            FrameError: they were received, and bytes contradict themselves.
        """
        return [
            decode_tensor(each, masks.behind.get(index)) if each.dtype == torch.uint8 else each
            for index, each in enumerate(gradients)
        ]

    def closed_gradients(
        self,
        boundary: int,
        gradients: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        masks: Masks,
    ) -> list[torch.Tensor]:
        """Makes of what a layer's backward has brought what stands at the boundary before the layer.

        Args:
            boundary: position of the layer before that boundary.
            gradients: of the layer's inputs.
            before: what stood at the boundary behind it.
            given: what its backward was given of that.
            masks: the layer's.
        """
        known = [
            _Known(coded, decoded, masks.behind[index] if needs_places(coded) else None)
            for index, (coded, decoded) in enumerate(zip(before, given, strict=True))
            if coded.dtype == torch.uint8
        ]
        if not known and boundary not in self._codecs:
            return list(gradients)
        coded = (
            self._coded(boundary, "backward", each, known, masks.before.get(index))
            for index, each in enumerate(gradients)
        )
        return [each if bytes_ is None else bytes_ for each, bytes_ in zip(gradients, coded, strict=True)]

    def _coded(
        self,
        boundary: int,
        direction: Direction,
        leaf: torch.Tensor,
        known: Sequence[_Known],
        places: Places | None = None,
    ) -> torch.Tensor | None:
        """Finds the bytes with which a tensor passes a boundary; None: it passes as it is.

        Args:
            places: where those numbers lie that were kept of what a gradient belongs to, if it stands coded there.
        """
        for each in known:
            if _same_bits(leaf, each.decoded) and (each.places is None or each.places.equal(places)):
                return each.coded
        codec = self._codecs.get(boundary)
        if codec is None or not is_codable(leaf, codec):
            return None
        found = encode_tensor(leaf, codec) if places is None or top_k_of(codec) is None else encode_at(leaf, places)
        if found is None:
            self.bypassed[boundary, direction] += 1
        return found


def _places_kept(value: Any) -> dict[int, Places]:
    """Finds the places that are kept, by position among the tensors of a value that have a gradient."""
    if not isinstance(value, CodedValue):
        return {}
    _, leaves = flatten(value.value)
    coded = set(_places(value, len(leaves)))
    found, index = {}, 0
    for place, leaf in enumerate(leaves):
        if place in coded:
            if (places := places_of(leaf)) is not None:
                found[index] = places
            index += 1
        else:
            index += is_differentiable(leaf)
    return found


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


def _places(value: CodedValue, num_leaves: int) -> list[int]:
    places = value.places
    found: list[int] = places.tolist() if isinstance(places, torch.Tensor) and places.dtype == torch.int64 else []
    if not found or not all(0 <= place < num_leaves for place in found):
        raise FrameError(f"a value of {num_leaves} tensors says that those at {found} are coded")
    return found
