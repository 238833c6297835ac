"""Keys and hashes that do not depend on where or when they are computed.

Every random draw, every permutation and every entry of the vote's certificate is keyed by what it stands for (run
seed, step, micro-batch, layer, purpose), never by rank or history. This file holds the one mixing function behind
all of them, for a number and for an array of them. Pure Python, no torch: the planner and the protocol use it too.

Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), whose output bits all depend on all input bits.
"""

import functools
import hashlib
from typing import Any, TypeVar

MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_FEW_WORDS = 24
_Words = TypeVar("_Words", bound=Any)


def mix64(value: int) -> int:
    """Maps 64-bit integers by a bijection that scatters every input bit over all output bits.

    Args:
        value: any integer; only its low 64 bits count.
    Returns:
        An integer in [0, 2**64).
    """
    z = value & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def mix_words(words: _Words) -> _Words:
    """Does the same as `mix64`, in place, with each number of a numpy array of uint64."""
    if len(words) < _FEW_WORDS:  # a call of numpy takes as long as two or three of `mix64`
        words[:] = [mix64(word) for word in words.tolist()]
        return words
    for shift, factor in _ROUNDS:
        words ^= words >> shift
        words *= factor
    words ^= words >> 31
    return words


def key64(*parts: int | str) -> int:
    """Computes a 64-bit key for a tuple of integers and strings, such as ``key64(seed, step, microbatch, layer,
    "forward")``.

    Args:
        parts: what the key stands for; order matters, and ("ab",) differs from ("a", "b").
    Returns:
        An integer in [0, 2**64); its low 32 bits alone are as well mixed as the whole (torch's CPU generator
        uses only those).
    """
    z = len(parts)
    for part in parts:
        # `mix64`, written out: a vote asks for thousands of keys.
        z = z + _GOLDEN + (part if isinstance(part, int) else text64(part)) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        z ^= z >> 31
    return z


@functools.lru_cache(maxsize=4096)  # purposes and names, the same ones again and again
def text64(text: str) -> int:
    """Computes a 64-bit hash of a string, the same in every process (unlike ``hash``)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def signed64(value: int) -> int:
    """Reads the same 64 bits as a signed integer, for int64 tensors whose sums wrap."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value
