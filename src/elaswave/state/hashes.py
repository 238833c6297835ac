"""Hashes of tensor contents: cheap ones for every step's vote, position-keyed ones for the state digest.

`run_hash` is multilinear hashing: every 64-bit word times an odd 64-bit key of its position, summed modulo 2**64. One
changed word always changes the sum; it costs some 0.2 ms per million float32, so it can guard every step. `row_hashes`
has those of all blocks of a unit, `tensor_hash` that of a tensor of any length and type.

`tensor_digest` mixes every element with its position in its tensor, and adds: the digest of a tensor is the sum of the
digests of its parts (`elaswave.coordinator.records.run_state`), wherever they are cut and whichever worker holds them.

Hashes and norms of blocks on a device, many at once: the numbers stay there until they are read together.

Blocks are laid side by side, so that the number of launches does not grow with that of blocks: for norms those of one
length, for hashes all, with zeros behind the shorter ones. The numbers are put into the order of the blocks by the
host, once they are read there (`Found`). A block's number depends on its own elements only, however many others are
beside it: hashes are sums of integers, and squares are added in a fixed tree, element by element, which rounds the same
in every grouping and on every device. (The host's `elaswave.state.sums.square_sum` has another order, so the norm of a
CPU's run has other bits.)
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from elaswave.hashing import MASK64, key64

_CHUNK = 1 << 15
_WORD_BYTES = 8
_ROW_WORDS = 1 << 13
"""Words of a row of a long tensor: with their keys they stay in a core's own cache."""


def position_keys(length: int) -> np.ndarray:
    """What `run_hash` multiplies words by, int64 [length]; those of a long run begin with those of a short one."""
    return _keys_of(max(_ROW_WORDS, 1 << max(0, length - 1).bit_length()))[:length]


@functools.lru_cache(maxsize=8)
def _keys_of(length: int) -> np.ndarray:
    positions = np.arange(length, dtype=np.uint64)
    return (_mix(positions + np.uint64(key64("run_hash"))) | np.uint64(1)).view(np.int64)


def run_hash(run: torch.Tensor) -> int:
    """A 64-bit hash of a tensor's bits, shape [length]; length at most that of a block."""
    words = _words64(run)
    return int(np.einsum("i,i", words, position_keys(len(words)))) & MASK64


def row_hashes(flat: torch.Tensor, length: int) -> list[int]:
    """`run_hash` of each run of so many elements of a tensor, the last one perhaps shorter.

    Args:
        flat: contiguous, shape [size].
        length: elements of a run; a multiple of 8 bytes, if there are several.
    """
    whole = len(flat) // length * length
    found = _sums(_words64(flat[:whole]).reshape(whole // length, -1)) if whole else []
    return found + ([run_hash(flat[whole:])] if whole < len(flat) else [])


def tensor_hash(values: torch.Tensor) -> int:
    """A 64-bit hash of the bits of a tensor of any length and type, in the order of its elements."""
    words = _words64(values.detach().contiguous().reshape(-1).cpu())
    whole = len(words) // _ROW_WORDS * _ROW_WORDS
    rows = _sums(words[:whole].reshape(-1, _ROW_WORDS)) + _sums(words[whole:][None])
    return _sums(np.array(rows, dtype=np.uint64).view(np.int64)[None])[0]


def _sums(rows: np.ndarray) -> list[int]:
    return [value & MASK64 for value in np.einsum("ij,j->i", rows, position_keys(rows.shape[1])).tolist()]


def _words64(run: torch.Tensor) -> np.ndarray:
    """The bits of a contiguous tensor in the host's memory, as 64-bit words; zeros fill the last one."""
    content = run.view(torch.uint8).numpy()
    if rest := len(content) % _WORD_BYTES:
        content = np.pad(content, (0, _WORD_BYTES - rest))
    return content.view(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """`elaswave.hashing.mix64` on an array of uint64, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values


def _words(values: torch.Tensor) -> np.ndarray:
    """The bits of a tensor as unsigned integers of up to 32 bits."""
    words = {1: torch.uint8, 2: torch.int16}.get(values.dtype.itemsize, torch.int32)
    numbers = values.detach().contiguous().view(words).cpu().numpy()
    return numbers.view(f"u{numbers.itemsize}")


def tensor_digest(slot: str, tensor: str, start: int, values: torch.Tensor) -> int:
    """The digest of elements [start, start + len(values)) of a flattened tensor; digests of parts are added.

    Args:
        slot: which of the tensor's states, such as "master" or "exp_avg".
        tensor: full name of the tensor.
        start: position of the first value.
        values: of any element type, shape [length]; float32 for what lies in flat storage.
    Returns:
        An integer in [0, 2**64).
    """
    key = key64("digest", slot, tensor)
    bits = _words(values)
    start = start * len(bits) // max(1, len(values))
    total = 0
    for first in range(0, len(bits), _CHUNK):
        words = bits[first : first + _CHUNK].astype(np.uint64)
        keys = np.arange(start + first, start + first + len(words), dtype=np.uint64)
        keys += np.uint64(key)
        words += _mix(keys)
        total += int(_mix(words).sum(dtype=np.uint64))
    return total & MASK64


"""Words of a row of a long tensor."""
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
        """The numbers, once they are in host memory, in the order of the runs."""
        ordered: list[Any] = [None] * len(self.places)
        for place, number in zip(self.places, numbers.tolist(), strict=True):
            ordered[place] = number
        return ordered


def prepare_hashes(most_bytes: int, place: torch.device) -> None:
    """Makes the keys of all runs that are not longer: they come from the host, and no later hash waits for them."""
    _keys(-(-most_bytes // _WORD_BYTES), torch.empty(0, device=place).device)


def run_hashes(runs: Sequence[torch.Tensor]) -> Found:
    """`elaswave.state.hashes.run_hash` of each run, as int64, modulo 2**64.

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
    """A hash of the bits of a tensor of any length and type, int64 modulo 2**64, that stays on its device."""
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
    """Sums of squares in float64; not finite where a run is not.

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
    """Sum of each row: its halves are added element by element until one is left; an odd last one waits for the next
    round."""
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
    """The keys of positions on a device; those of the longest run begin with those of all others."""
    longest = _KNOWN_KEYS.get(device)
    if longest is None or len(longest) < length:
        longest = _KNOWN_KEYS[device] = torch.from_numpy(position_keys(length).copy()).to(device)
    return longest[:length]
