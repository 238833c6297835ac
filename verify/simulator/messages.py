"""Frames between simulated workers, and what they tell the coordinator beside the core's own messages."""

from typing import Any, NamedTuple

from elaswave.protocol.messages import Evidence
from verify.simulator.job import BlockState, Exponents


class SimFrame(NamedTuple):
    """What travels between workers."""

    generation: int
    step: int
    attempt: int
    value: Any


class SimReady(NamedTuple):
    """A worker begins to train."""

    worker: int


class StepDone(NamedTuple):
    """A worker has a committed step behind it; with its vote."""

    worker: int
    generation: int
    evidence: Evidence


class Shard(NamedTuple):
    """A worker's owned blocks for the durable checkpoint of a step."""

    worker: int
    generation: int
    step: int
    grid: Exponents
    states: dict[int, BlockState]


class FinishedReport(NamedTuple):
    """A worker has made its last step: block -> (owned, version, state)."""

    worker: int
    generation: int
    step: int
    stopped: bool
    """Whether it has ended before the job's last step, because a vote asked for that."""
    states: dict[int, tuple[bool, int, BlockState]]


class PeerLost(NamedTuple):
    """A worker's link to a peer has closed."""

    worker: int
    generation: int
    peer: int


class CheckpointSettled(NamedTuple):
    """A coordinator says that a step's durable checkpoint is complete, or given up."""

    step: int


class StopTold(NamedTuple):
    """A coordinator asks a worker for the end of the job."""


class Notice(NamedTuple):
    """A worker has had a notice that its machine is taken away; said on every connection."""

    worker: int
    left_s: float
