"""The toy vote, the counterpart of ``worker.vote``: what a worker brings, and what it must come to."""

from functools import lru_cache
from typing import NamedTuple

import msgspec

from elaswave.sim.protocol.job import MASK
from elaswave.state.placement import Placement


class Vote(NamedTuple):
    """The merged certificates: sums first, then maxima."""

    num_voters: int
    coverage: int
    residency: int
    next_residency: int
    agreement: int
    norm: int
    losses: tuple[int, ...]
    layout: int
    negative_layout: int
    change: int
    """Hash of the planned change that everybody holds, or of one that somebody holds; 0 for none."""
    negative_change: int
    maximum: int
    request: int = 0
    """1 if somebody asks for a durable checkpoint of the step."""

    def merge(self, other: "Vote") -> "Vote":
        """Both together; free of order."""
        return Vote(
            self.num_voters + other.num_voters,
            (self.coverage + other.coverage) & MASK,
            (self.residency + other.residency) & MASK,
            (self.next_residency + other.next_residency) & MASK,
            (self.agreement + other.agreement) & MASK,
            (self.norm + other.norm) & MASK,
            tuple([a + b for a, b in zip(self.losses, other.losses)]),
            max(self.layout, other.layout),
            max(self.negative_layout, other.negative_layout),
            max(self.change, other.change),
            max(self.negative_change, other.negative_change),
            max(self.maximum, other.maximum),
            max(self.request, other.request),
        )

    @property
    def is_changed_by_all(self) -> bool:
        """Whether everybody holds the same planned change."""
        return self.change == -self.negative_change != 0


def encode_vote(vote: Vote) -> bytes:
    """The vector of an evidence."""
    return msgspec.msgpack.encode(vote)


def decode_vote(vector: bytes) -> Vote:
    """The inverse of `encode_vote`."""
    return msgspec.msgpack.decode(vector, type=Vote)


def residency_key(block: int, owned: bool, worker: int, version: int) -> int:
    """What holding a block contributes to the residency sums."""
    return hash((block, int(owned), worker, version))


@lru_cache(maxsize=50_000)
def expected_residency(placement: Placement, version: int) -> int:
    """What the residency sums must come to."""
    total = 0
    for block, owner in enumerate(placement.owner):
        total += residency_key(block, True, owner, version)
        for follower in placement.followers[block]:
            total += residency_key(block, False, follower, version)
    return total & MASK
