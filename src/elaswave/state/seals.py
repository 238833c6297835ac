"""Hashes of what lies in a worker's memory, and seals: hashes that were taken as it was written.

A worker compares what lies there with its seals before every vote. So it finds a bit that has flipped since the write
by itself, whatever others hold, and before anything counts that was computed with it. What was written wrongly has a
seal that fits; that copies differ is for the vote to find.

Sealed are the *working copies* (the flat storage of the units that a worker runs, which RUN reads), the masters that
lie elsewhere (in bfloat16, after re-replication, and of units that the worker does not run), and what no step writes:
frozen parameters and buffers that are not persistent. Optimizer slots have no seals.

`run_hash` is multilinear hashing: every 64-bit word times an odd 64-bit key of its position, summed modulo 2**64. One
changed word always changes the sum; it costs some 0.2 ms per million float32, so it can guard every step. `row_hashes`
has those of all blocks of a unit, `tensor_hash` that of a tensor of any length and type.

On a device many blocks are hashed at once, and their squares added; the numbers stay there until they are read
together. Blocks are laid side by side, so that the number of launches does not grow with that of blocks: for norms
those of one length, for hashes all, with zeros behind the shorter ones. A block's number depends on its own elements
only, however many others are beside it: hashes are sums of integers, and squares are added in a fixed tree, which
rounds the same in every grouping and on every device. (The host's `elaswave.state.sums.square_sum` has another order,
so the norm of a CPU's run has other bits.)
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from elaswave.blocks.placement import Block
from elaswave.checkpoints.format import MASTER
from elaswave.devices.interface import HOST, Device, read_tensors
from elaswave.hashing import MASK64, key64, mix_words
from elaswave.state.flat import FlatLayer, FlatUnit, HeldBlock

_WORD_BYTES = 8
_ROW_WORDS = 1 << 13
"""Words of a row of a long tensor: with their keys they stay in a core's own cache."""


def position_keys(length: int) -> np.ndarray:
    """Computes what `run_hash` multiplies words by, int64 [length]; those of a long run begin with those of a short
    one."""
    # Rounded up to a power of two, so that few arrays serve all lengths.
    return _keys_of(max(_ROW_WORDS, 1 << max(0, length - 1).bit_length()))[:length]


@functools.lru_cache(maxsize=8)
def _keys_of(length: int) -> np.ndarray:
    positions = np.arange(length, dtype=np.uint64)
    return (mix_words(positions + np.uint64(key64("run_hash"))) | np.uint64(1)).view(np.int64)


def run_hash(run: torch.Tensor) -> int:
    """Computes a 64-bit hash of a tensor's bits, shape [length]; length at most that of a block."""
    words = _words64(run)
    return int(np.einsum("i,i", words, position_keys(len(words)))) & MASK64


def row_hashes(flat: torch.Tensor, length: int) -> list[int]:
    """Computes `run_hash` of each run of so many elements of a tensor, the last one perhaps shorter.

    Args:
        flat: contiguous, shape [size].
        length: elements of a run; a multiple of 8 bytes, if there are several.
    """
    whole = len(flat) // length * length
    found = _sums(_words64(flat[:whole]).reshape(whole // length, -1)) if whole else []
    return found + ([run_hash(flat[whole:])] if whole < len(flat) else [])


def tensor_hash(values: torch.Tensor) -> int:
    """Computes a 64-bit hash of the bits of a tensor of any length and type, in the order of its elements."""
    words = _words64(values.detach().contiguous().reshape(-1).cpu())
    whole = len(words) // _ROW_WORDS * _ROW_WORDS
    rows = _sums(words[:whole].reshape(-1, _ROW_WORDS)) + _sums(words[whole:][None])
    return _sums(np.array(rows, dtype=np.uint64).view(np.int64)[None])[0]


def _sums(rows: np.ndarray) -> list[int]:
    return [value & MASK64 for value in np.einsum("ij,j->i", rows, position_keys(rows.shape[1])).tolist()]


def _words64(run: torch.Tensor) -> np.ndarray:
    """Returns the bits of a contiguous tensor in the host's memory, as 64-bit words; zeros fill the last one."""
    content = run.view(torch.uint8).numpy()
    if rest := len(content) % _WORD_BYTES:
        content = np.pad(content, (0, _WORD_BYTES - rest))
    return content.view(np.int64)


_TOGETHER_ELEMENTS = 1 << 23
"""Most elements that are laid side by side: 64 MiB of words."""
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Found(NamedTuple):
    """One number per run, on the device."""

    numbers: torch.Tensor
    """[runs], in an order of their own: a device that is told the places of each would be waited for."""
    places: list[int]
    """Of which run each is."""

    def in_order(self, numbers: torch.Tensor) -> list[Any]:
        """Returns the numbers, once they are in host memory, in the order of the runs."""
        ordered: list[Any] = [None] * len(self.places)
        for place, number in zip(self.places, numbers.tolist(), strict=True):
            ordered[place] = number
        return ordered


def prepare_hashes(most_bytes: int, place: torch.device) -> None:
    """Makes the keys of all runs that are not longer: they come from the host, and no later hash waits for them."""
    _keys(-(-most_bytes // _WORD_BYTES), torch.empty(0, device=place).device)


def run_hashes(runs: Sequence[torch.Tensor]) -> Found:
    """Computes `elaswave.state.seals.run_hash` of each run, as int64, modulo 2**64.

    Args:
        runs: [length] each, of any lengths and types, at least one, on one device.
    """
    found: list[torch.Tensor] = []
    places: list[int] = []
    for some, words in _padded(runs):
        found.append(words.mul_(_keys(words.shape[1], words.device)).sum(1))
        places += some
    return Found(found[0] if len(found) == 1 else torch.cat(found), places)


def _padded(runs: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Runs as rows of words, with zeros behind those that are shorter, which no hash sees; and the places of these
    runs. Longest first, so that few zeros are needed."""
    part = _BY_SIZE[min(run.itemsize for run in runs)]  # copied by one launch if all have one type
    places = sorted(range(len(runs)), key=lambda place: -runs[place].nbytes)
    while places:
        length = -(-runs[places[0]].nbytes // _WORD_BYTES)
        some = places[: max(1, _TOGETHER_ELEMENTS // max(1, length))]
        del places[: len(some)]
        rows = torch.zeros(len(some), length, dtype=torch.int64, device=runs[some[0]].device)
        content = [runs[place].view(part) for place in some]
        room = length * _WORD_BYTES // part.itemsize
        sizes = [size for values in content for size in (len(values), room - len(values))]
        torch._foreach_copy_(rows.view(-1).view(part).split(sizes)[::2], content)
        yield some, rows


def queued_tensor_hash(values: torch.Tensor) -> torch.Tensor:
    """Computes a hash of the bits of a tensor of any length and type, int64 modulo 2**64, that stays on its device."""
    content = values.detach().contiguous().reshape(-1).view(torch.uint8)
    short = -len(content) % (_ROW_WORDS * _WORD_BYTES)
    whole = len(content) - len(content) % (_ROW_WORDS * _WORD_BYTES)
    rows = [_row_sums(content[:whole].reshape(-1, _ROW_WORDS * _WORD_BYTES))] if whole else []
    rows += [_row_sums(content[whole:][None])] if short else []
    sums = torch.cat(rows) if rows else torch.zeros(1, dtype=torch.int64, device=values.device)
    return (sums * _keys(len(sums), sums.device)).sum()


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    rest = rows.shape[1] * rows.itemsize % _WORD_BYTES
    if rest:
        rows = torch.nn.functional.pad(rows, (0, (_WORD_BYTES - rest) // rows.itemsize))
    words = rows.view(torch.int64)
    return (words * _keys(words.shape[1], words.device)).sum(1)


def square_sums(runs: Sequence[torch.Tensor]) -> Found:
    """Computes sums of squares in float64; not finite where a run is not.

    Args:
        runs: [length] each, of one type, at least one, on one device.
    """
    found: list[torch.Tensor] = []
    places: list[int] = []
    for some, rows in _side_by_side(runs):
        wide = rows.to(torch.float64)
        found.append(_tree_sum(wide.mul_(wide)))
        places += some
    return Found(torch.cat(found), places)


def _tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """Computes the sum of each row: its halves are added element by element until one is left; an odd last one waits
    for the next round."""
    while (length := rows.shape[1]) > 1:
        half = length // 2
        added = rows[:, :half] + rows[:, half : 2 * half]
        rows = torch.cat([added, rows[:, 2 * half :]], 1) if length % 2 else added
    return rows[:, 0] if rows.shape[1] else rows.new_zeros(rows.shape[0])


def _side_by_side(runs: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Runs of equal length as the rows of matrices, and the places of these runs."""
    by_length: dict[int, list[int]] = {}
    for place, run in enumerate(runs):
        by_length.setdefault(len(run), []).append(place)
    for length, places in by_length.items():
        at_once = max(1, _TOGETHER_ELEMENTS // max(1, length))
        for first in range(0, len(places), at_once):
            some = places[first : first + at_once]
            yield some, torch.stack([runs[place] for place in some])


_KNOWN_KEYS: dict[torch.device, torch.Tensor] = {}


def _keys(length: int, device: torch.device) -> torch.Tensor:
    """Returns the keys of positions on a device; those of the longest run begin with those of all others."""
    longest = _KNOWN_KEYS.get(device)
    if longest is None or len(longest) < length:
        longest = _KNOWN_KEYS[device] = torch.from_numpy(position_keys(length).copy()).to(device)
    return longest[:length]


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
        self._row_elements = {unit: of_unit[0].num_elements for unit, of_unit in self._of_unit.items()}
        """By unit; all its blocks are as long as the first one, but for the last."""
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
        # The newest seal may still be on the device. It moves and is not taken anew, so that a change since then shows.
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
        """Tells whether tensors are what those of these names were when their layer was made."""
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
        # By identity: another copy of the same block has no seal yet.
        self._masters = {block: kept for block, kept in self._masters.items() if apart.get(block) is kept[0]}
        for block, copy in apart.items():  # one that has just come is from now on what the vote compares
            self._masters.setdefault(block, (copy, masters[block]))
        seals = {block: seal for block, (_, seal) in self._masters.items()}
        # Seals go before what lies there now: what has changed since is a finding of its own, and accuses no peer (K1).
        self.working, self.masters = working | self._working, masters | seals
        held = {copy.block.id for copy in copies}.difference(masters)
        self.masters.update((block, self.working[block]) for block in held)
        in_use, changed = _unlike(self._working, working), _unlike(seals, masters)
        return in_use, changed + [each for each in in_use if each.place in held]

    def broken_constants(self, units: Mapping[int, FlatLayer | FlatUnit]) -> dict[int, list[Broken]]:
        """Finds by layer what no step writes and is not as it was when the layer was made."""
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
        """Computes the hashes of the working copies, by block, and of some runs."""
        here = [(block, unit.flat) for index, unit in units.items() for block in self._of_unit.get(index, [])]
        if self._device.is_host:
            working = [
                value
                for index, unit in units.items()
                if index in self._row_elements
                for value in row_hashes(unit.flat, self._row_elements[index])
            ]
            return dict(zip((block.id for block, _ in here), working, strict=True)), list(map(run_hash, runs))
        every = [*(flat[block.start : block.stop] for block, flat in here), *runs]
        found = self._read([run_hashes(every)] if every else [])
        values = found[0] if found else []
        return dict(zip((block.id for block, _ in here), values, strict=False)), values[len(here) :]

    def _read(self, wanted: Sequence[Found]) -> list[list[int]]:
        """Reads numbers of the device, by one wait; with them the seals that it has made meanwhile."""
        # What was written and is not hashed yet goes along: it is to be compared with its new seal.
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
    """Tells whether a copy's master is part of a working copy: layers of float32 compute with the masters
    themselves."""
    unit = units.get(copy.block.layer)
    if unit is None:
        return False
    return unit.flat.data_ptr() + copy.block.start * unit.flat.itemsize == copy.slots[MASTER].data_ptr()
