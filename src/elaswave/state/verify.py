"""Hashes of tensor contents: cheap ones for every step's vote, position-keyed ones for the state digest.

`run_hash` is multilinear hashing: every 64-bit word times an odd 64-bit key of its position, summed modulo 2**64. One
changed word always changes the sum; it costs some 0.2 ms per million float32, so it can guard every step. `row_hashes`
has those of all blocks of a unit, `tensor_hash` that of a tensor of any length and type.

`tensor_digest` mixes every element with its position in its tensor, and adds: the digest of a tensor is the sum of the
digests of its parts (`elaswave.state.digests`), wherever they are cut and whichever worker holds them.
"""

import functools

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
