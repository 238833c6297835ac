"""Seals: hashes of what lies in a worker's memory, taken as it was written.

A worker compares what lies there with its seals before every vote. So it finds a bit that has flipped since the write
by itself, whatever others hold, and before anything counts that was computed with it. What was written wrongly has a
seal that fits; that copies differ is for the vote to find.

Sealed are the *working copies* (the flat storage of the units that a worker runs, which RUN reads), the masters that
lie elsewhere (in bfloat16, after re-replication, and of units that the worker does not run), and what no step writes:
frozen parameters and buffers that are not persistent. Optimizer slots have no seals.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from elaswave.blocks.placement import Block
from elaswave.checkpoints.format import MASTER
from elaswave.devices.host import HOST
from elaswave.devices.interface import Device, read_tensors
from elaswave.hashing import MASK64
from elaswave.state.buffers import HeldBlock
from elaswave.state.flat import FlatLayer, FlatUnit
from elaswave.state.hashes import (
    Found,
    prepare_hashes,
    queued_tensor_hash,
    row_hashes,
    run_hash,
    run_hashes,
    tensor_hash,
)

_Place = int | HeldBlock
"""A block whose working copy is meant, or a copy whose master is."""


class Broken(NamedTuple):
    """Memory that is not as it was written."""

    place: int | str
    """A block; or the name of a tensor that no step writes."""
    was: int
    """Its seal."""
    now: int


class Seals:
    """The seals of one worker.

    Args:
        blocks: of the model.
        device: where the state is.
        move: called while the device is waited for.
    """

    def __init__(self, blocks: Sequence[Block], device: Device = HOST, move: Callable[[], None] = lambda: None) -> None:
        self._blocks = blocks
        self._device = device
        self._move = move
        self._of_unit: dict[int, list[Block]] = {}
        for block in blocks:
            self._of_unit.setdefault(block.layer, []).append(block)
        if blocks and not device.is_host:
            prepare_hashes(max(block.num_elements for block in blocks) * torch.float32.itemsize, device.place)
        self._working: dict[int, int] = {}
        self._masters: dict[int, tuple[HeldBlock, int]] = {}
        """By block; of a copy that is no more the seal says nothing."""
        self._constants: dict[int, dict[str, int]] = {}
        """By layer and name."""
        self._awaited: set[int] = set()
        """Blocks of which the working copies are being received: they are not yet what will be sealed."""
        self.given_up: list[Broken] = []
        """Working copies that had changed, and that are here no more."""
        self._unread: list[tuple[list[_Place], Found]] = []
        """Hashes that the device has made, and that nobody has read."""
        self._unsealed: list[tuple[_Place, torch.Tensor]] = []
        """Written on a device, and not yet hashed there."""
        self.working: Mapping[int, int] = {}
        """By block, the seals of the working copies when `broken` was asked last; of what had none, its hash."""
        self.masters: dict[int, int] = {}
        """The same of the masters of copies."""

    # ----------------------------------------------------------------------------------------------------- writing

    def await_frames(self, blocks: Iterable[int]) -> None:
        """Frames may land in these working copies from now on. If some do and the wait is interrupted, that is no
        change of memory; all is received again before anything is computed with it, or the unit goes."""
        self._awaited.update(blocks)

    def written(self, places: Sequence[_Place], runs: Sequence[torch.Tensor]) -> None:
        """Something has been written: takes its seals; on a device with those of what else is written, by `queue`.

        Args:
            places: what.
            runs: what lies there now.
        """
        self._awaited.difference_update(place for place in places if isinstance(place, int))
        if self._device.is_host:
            for place, run in zip(places, runs, strict=True):
                self._put(place, run_hash(run))
        else:
            self._unsealed += zip(places, runs, strict=True)

    def queue(self) -> None:
        """On a device, queues the seals of all that has been written there: a few launches, however many blocks there
        are. They are not waited for."""
        if self._unsealed:
            places, runs = zip(*self._unsealed, strict=True)
            self._unsealed.clear()
            self._unread.append(([*places], run_hashes(runs)))

    def written_all(self, units: Mapping[int, FlatLayer | FlatUnit], copies: Iterable[HeldBlock]) -> None:
        """All of a worker's state has been loaded, or made."""
        self._working, self._masters, self._constants, self._unread, self._unsealed = {}, {}, {}, [], []
        self._awaited.clear()
        self.constants(units)
        apart = [copy for copy in copies if not is_working(copy, units)]
        self.written(apart, [copy.slots[MASTER] for copy in apart])
        for unit, flat in units.items():
            parts = [flat.flat[block.start : block.stop] for block in self._of_unit.get(unit, [])]
            self.written([block.id for block in self._of_unit.get(unit, [])], parts)
        self.queue()

    def constants(self, units: Mapping[int, FlatLayer | FlatUnit]) -> None:
        """Takes the seals of what no step writes, of layers that have just been made; those of others go."""
        self._constants = {layer: known for layer, known in self._constants.items() if layer in units}
        for index, layer in units.items():
            if isinstance(layer, FlatLayer) and index not in self._constants:
                constants = dict(layer.constants())
                found = self._of_tensors(list(constants.values()))
                self._constants[index] = dict(zip(constants, found, strict=True))

    def move_out(self, copy: HeldBlock) -> None:
        """A master that was part of a working copy gets memory of its own; its seal goes with it."""
        self._read([])
        if (seal := self._working.get(copy.block.id)) is not None:
            self._put(copy, seal)

    def drop(self, units: Mapping[int, FlatLayer | FlatUnit]) -> None:
        """These units are about to go. What has changed in them is to be told all the same: what was computed with it
        may be kept (S3)."""
        working, _ = self._hashes(units, [])
        whole = {block: now for block, now in working.items() if block not in self._awaited}
        self.given_up += _unlike({block: self._working.get(block, now) for block, now in whole.items()}, whole)
        self._awaited.difference_update(working)
        for unit in units:
            for block in self._of_unit.get(unit, []):
                self._working.pop(block.id, None)

    def begin(self) -> None:
        """Nothing is kept that was computed before."""
        self.given_up.clear()

    def fit(self, layer: int, constants: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Whether tensors are what those of these names were when their layer was made."""
        found = self._of_tensors([values for _, values in constants])
        return found == [self._constants[layer][name] for name, _ in constants]

    def _put(self, place: _Place, seal: int) -> None:
        if isinstance(place, HeldBlock):
            self._masters[place.block.id] = (place, seal)
        else:
            self._working[place] = seal

    # --------------------------------------------------------------------------------------------------- comparing

    def broken(
        self, units: Mapping[int, FlatLayer | FlatUnit], copies: Collection[HeldBlock]
    ) -> tuple[list[Broken], list[Broken]]:
        """Hashes all that is sealed, and masters that have no seal yet.

        Args:
            units: that are here.
            copies: that are held, or have just come.
        Returns:
            Working copies that are not as they were written, and masters.
        """
        apart = {copy.block.id: copy for copy in copies if not is_working(copy, units)}
        working, of_masters = self._hashes(units, [copy.slots[MASTER] for copy in apart.values()])
        masters = dict(zip(apart, of_masters, strict=True))
        self._masters = {block: kept for block, kept in self._masters.items() if apart.get(block) is kept[0]}
        for block, copy in apart.items():  # one that has just come is from now on what the vote compares
            self._masters.setdefault(block, (copy, masters[block]))
        seals = {block: seal for block, (_, seal) in self._masters.items()}
        self.working, self.masters = working | self._working, masters | seals
        held = {copy.block.id for copy in copies}.difference(masters)
        self.masters.update((block, self.working[block]) for block in held)
        in_use, changed = _unlike(self._working, working), _unlike(seals, masters)
        return in_use, changed + [each for each in in_use if each.place in held]

    def broken_constants(self, units: Mapping[int, FlatLayer | FlatUnit]) -> dict[int, list[Broken]]:
        """By layer, what no step writes and is not as it was when the layer was made."""
        places, values = [], []
        for index, seals in self._constants.items():
            layer = units[index]
            assert isinstance(layer, FlatLayer)
            in_use = [(layer.spec.full_name(name), tensor) for name, tensor in layer.buffers.in_use]
            for name, tensor in (*layer.constants(), *in_use):
                places.append((index, name, seals[name]))
                values.append(tensor)
        found: dict[int, list[Broken]] = {}
        for (index, name, seal), now in zip(places, self._of_tensors(values), strict=True):
            if now != seal:
                found.setdefault(index, []).append(Broken(name, seal, now))
        return found

    def _of_tensors(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        if self._device.is_host or not tensors:
            return list(map(tensor_hash, tensors))
        queued = torch.stack(list(map(queued_tensor_hash, tensors)))
        return [value & MASK64 for value in read_tensors(self._device, [queued], self._move)[0].tolist()]

    def _hashes(
        self, units: Mapping[int, FlatLayer | FlatUnit], runs: Sequence[torch.Tensor]
    ) -> tuple[dict[int, int], list[int]]:
        """Of the working copies, by block, and of some runs."""
        here = [(block, unit.flat) for index, unit in units.items() for block in self._of_unit.get(index, [])]
        if self._device.is_host:
            working = [
                value
                for index, unit in units.items()
                if index in self._of_unit
                for value in row_hashes(unit.flat, self._of_unit[index][0].num_elements)
            ]
            return dict(zip((block.id for block, _ in here), working, strict=True)), list(map(run_hash, runs))
        every = [*(flat[block.start : block.stop] for block, flat in here), *runs]
        found = self._read([run_hashes(every)] if every else [])
        values = found[0] if found else []
        return dict(zip((block.id for block, _ in here), values, strict=False)), values[len(here) :]

    def _read(self, wanted: Sequence[Found]) -> list[list[int]]:
        """Numbers of the device, by one wait; with them the seals that it has made meanwhile."""
        self.queue()
        asked = [*(found for _, found in self._unread), *wanted]
        if not asked:
            return []
        numbers = read_tensors(self._device, [torch.cat([found.numbers for found in asked])], self._move)[0]
        values = [
            [value & MASK64 for value in found.in_order(part)]
            for found, part in zip(asked, numbers.split([len(found.places) for found in asked]), strict=True)
        ]
        for (places, _), seals in zip(self._unread, values, strict=False):
            for place, seal in zip(places, seals, strict=True):
                self._put(place, seal)
        self._unread, fresh = [], values[len(self._unread) :]
        return fresh


def _unlike(seals: Mapping[int, int], now: Mapping[int, int]) -> list[Broken]:
    return [Broken(block, seal, now[block]) for block, seal in seals.items() if now[block] != seal]


def is_working(copy: HeldBlock, units: Mapping[int, FlatLayer | FlatUnit]) -> bool:
    """Whether a copy's master is part of a working copy: layers of float32 compute with the masters themselves."""
    unit = units.get(copy.block.layer)
    if unit is None:
        return False
    return unit.flat.data_ptr() + copy.block.start * unit.flat.itemsize == copy.slots[MASTER].data_ptr()
