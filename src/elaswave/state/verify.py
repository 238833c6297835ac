"""Hashes of tensor contents: cheap ones for every step's vote, position-keyed ones for the state digest.

`run_hash` is multilinear hashing: every 32-bit word times an odd 64-bit key of its position, summed modulo 2**64. One
changed word always changes the sum; it costs some 0.7 ms per million elements, so it can guard every step.

`tensor_digest` mixes every element with its position in its tensor, and adds: the digest of a tensor is the sum of the
digests of its parts (`elaswave.state.digests`), wherever they are cut and whichever worker holds them.
"""

import functools

import numpy as np
import torch

from elaswave.hashing import MASK64, key64

_CHUNK = 1 << 15


@functools.lru_cache(maxsize=8)
def position_keys(length: int) -> np.ndarray:
    """What `run_hash` multiplies words by, int64 [length]."""
    positions = np.arange(length, dtype=np.uint64)
    return (_mix(positions + np.uint64(key64("run_hash"))) | np.uint64(1)).view(np.int64)


def run_hash(run: torch.Tensor) -> int:
    """A 64-bit hash of a float32 tensor's bits, shape [length]; length at most that of a block."""
    words = run.view(torch.int32).numpy()
    return int(np.einsum("i,i", words, position_keys(len(words)))) & MASK64


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
