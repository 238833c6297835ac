"""What workers must have in common so that they compute the same bits, as the vote compares it.

A *canary* is a 62-bit hash in one place of every ballot: place 0 for what a process computes with (processor, library,
kernels), place 1 + l for what layer l makes of made-up numbers (`elaswave.engine.checks.determinism_check`). A worker
tells its own and those that it knows from earlier votes, as max(h) and max(-h); all agree exactly if the two add to 0.
So a worker that is new, or a layer on a worker that has not held it before, is compared with all that have ever voted.
No IO here.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from elaswave.hashing import key64

ENVIRONMENT = 0
"""Place of what a process computes with; layers follow."""

NO_HASH = -(1 << 63)
"""Less than any hash of 62 bits, and than its negative."""
TEXT_WORDS = 16
"""Whole numbers in which a worker describes itself when environments differ."""
_WORD_BYTES = 7
"""Of text in each of them: every value is below 2**63."""


class Environment(NamedTuple):
    """What a process computes with."""

    text: str
    """For people."""
    operators: Mapping[str, int]
    """62-bit hash of the results of each operator of a fixed list, the same list in every process of a release."""

    @property
    def determinism_hash(self) -> int:
        """Of all operators."""
        return key64(*(part for item in sorted(self.operators.items()) for part in item)) >> 2


Pair = tuple[int, int]
"""max(h) and max(-h)."""


def pairs_of(known: Mapping[int, int], own: Mapping[int, int]) -> dict[int, Pair]:
    """What a worker tells.

    Args:
        known: canaries of earlier votes, by place.
        own: its own ones.
    """
    pairs = {place: (value, -value) for place, value in known.items()}
    for place, value in own.items():
        top, bottom = pairs.get(place, (value, -value))
        pairs[place] = (max(top, value), max(bottom, -value))
    return pairs


def flat(pairs: Mapping[int, Pair], num_places: int) -> list[int]:
    """Pairs of all places as they stand among the maxima of a vote."""
    return [value for place in range(num_places) for value in pairs.get(place, (NO_HASH, NO_HASH))]


class VotedHashes(NamedTuple):
    """What a vote says of them."""

    known: Mapping[int, int]
    """By place, of those that all agree on."""
    differing: tuple[int, ...]
    """Places at which workers differ."""


def read_votes(maxima: Iterable[int]) -> VotedHashes:
    """The inverse of `flat`, after a vote."""
    values = list(maxima)
    pairs = [(place, top, bottom) for place, (top, bottom) in enumerate(zip(values[::2], values[1::2], strict=True))]
    told = [(place, top, bottom) for place, top, bottom in pairs if top != NO_HASH]
    return VotedHashes(
        {place: top for place, top, bottom in told if top == -bottom},
        tuple(place for place, top, bottom in told if top != -bottom),
    )


def text_words(text: str) -> list[int]:
    """The beginning of a text as whole numbers below 2**63."""
    data = text.encode()[: TEXT_WORDS * _WORD_BYTES].ljust(TEXT_WORDS * _WORD_BYTES, b"\0")
    return [int.from_bytes(data[start : start + _WORD_BYTES], "little") for start in range(0, len(data), _WORD_BYTES)]


def words_text(words: Iterable[int]) -> str:
    """The inverse of `text_words`."""
    data = b"".join(word.to_bytes(_WORD_BYTES, "little") for word in words)
    return data.rstrip(b"\0").decode(errors="replace")
