"""What the forkserver is started with, and what launcher and forkserver say to each other. Loads no torch.

A message lies in their socket as a length, then msgpack.

An agent hears of steps from its coordinator. While it has none, `CommitCount` tells whether its workers get on (rule
H12). The memory is an anonymous mapping inherited through fork, as that of `elaswave.system.processes.DeathWatch`.
"""

import ctypes
import mmap
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from elaswave.blocks.shapes import StateShapes
from elaswave.channel.messages.worker import Message
from elaswave.data.fingerprint import Finding
from elaswave.faults.injection import Probe
from elaswave.job.plan import StartingPoint
from elaswave.job.script import ReadFile
from elaswave.job.setup import JobSetup
from elaswave.protocol.membership.effects import SpawnJoiner
from elaswave.transport.handshake import Secrets

_T = TypeVar("_T")
_LENGTH = struct.Struct("<Q")


class CommitCount:
    """One number that every worker adds to. Made before any worker is forked.

    Two workers that add at once may count as one: what matters is that the number changes.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._count = ctypes.c_int64.from_buffer(self._memory)

    def add(self) -> None:
        """Counts a step that a worker has committed."""
        self._count.value += 1

    @property
    def value(self) -> int:
        """Changes whenever a worker commits a step."""
        return self._count.value


class ForkServerSetup(NamedTuple):
    """What the forkserver and the workers are started with."""

    job: JobSetup
    keys: Secrets
    """Of those who take part, see `elaswave.job.keys.KeyRole`."""
    job_keys: Secrets
    """The job's; none where no coordinator is started."""
    commits: CommitCount | None
    """None where the agent that shares it never waits for another host's coordinator."""
    probe: Probe | None
    suffix: str
    """Of the names of files of which every host has its own in the run's folder."""
    training: Any = None
    """An `elaswave.training.definition.Training`: what is trained; None: what the configuration describes."""
    read_files: tuple[ReadFile, ...] = ()
    """Of a person's code: what it has open for reading, of which each process needs a place of its own."""
    not_taken: Sequence[str] = ()
    """What a fresh interpreter has not taken over of the script's modules; grows while modules are imported."""
    frozen: Any = None
    """Frozen parameters that the checkpoint has otherwise than they are built, by full name; the forkserver reads them
    before it forks workers."""


class SpawnWorkers(Message, frozen=True, kw_only=True):
    """Fork these workers, with which the job begins."""

    workers: tuple[int, ...]
    checkpoint: StartingPoint | None
    """None: they begin from the seed."""


class SpawnCoordinator(Message, frozen=True, kw_only=True):
    """Fork a coordinator; see `elaswave.coordinator.job_spec.CoordinatorSetup`."""

    num_samples: int
    """Of a data pass."""
    checkpoint: StartingPoint | None
    coordinator_ends_s: tuple[float, ...]


class KillWorkers(Message, frozen=True, kw_only=True):
    """Kill these workers, or the `elaswave.launcher.forkserver.machine.COORDINATOR`, as far as they live."""

    workers: tuple[int, ...]


class CommitShards(Message, frozen=True, kw_only=True):
    """Commit a checkpoint, in a process of its own."""

    number: int
    """Of the request; a repetition has the same one."""
    request: bytes
    """A `CommitRequest`."""


class AbandonCommits(Message, frozen=True, kw_only=True):
    """The coordinator that asked for commits has ended: they are to be broken off."""


class TakeKeys(Message, frozen=True, kw_only=True):
    """The job's key is changed: who is forked from now on goes by these; the answer is a `KeysHeld`."""

    keys: tuple[bytes, ...]
    """Of workers."""
    job_keys: tuple[bytes, ...]
    """Of coordinators; none where no coordinator is started."""
    retired: tuple[bytes, ...]
    """Job's keys that were changed."""


class KeysHeld(Message, frozen=True, kw_only=True):
    """Who is forked from now on goes by new keys."""

    ring: bytes
    """The `elaswave.transport.handshake.Secrets.name` of those of workers."""


class Prepared(Message, frozen=True, kw_only=True):
    """The forkserver has loaded torch and built the model: workers can be forked."""

    state: StateShapes
    given: dict[str, str] = {}
    """What else a script gives; see `elaswave.training.given`."""
    findings: list[Finding] = []
    """Of a script's data and loss; see `elaswave.launcher.forkserver.loaders`."""
    not_taken: list[str] = []
    """What the script has set in modules, and a fresh interpreter cannot take over."""


class Unprepared(Message, frozen=True, kw_only=True):
    """It cannot: what has happened, in one line; the rest stands in its log."""

    text: str
    is_usage: bool = False
    """Whether it is a `UsageError`, whose text says all."""


class Spawned(Message, frozen=True, kw_only=True):
    """A process has been forked."""

    child: int
    """A worker's id, or `COMMITTER` or `COORDINATOR` of `elaswave.launcher.forkserver.machine`."""
    pid: int


class LoaderSpawned(Message, frozen=True, kw_only=True):
    """A loader of a worker has been forked."""

    worker: int
    number: int
    pid: int


class LoaderGone(Message, frozen=True, kw_only=True):
    """A loader has ended, and is reaped."""

    worker: int
    number: int
    status: int = 0
    """As `os.waitpid` gives it."""


class SpawnRefused(Message, frozen=True, kw_only=True):
    """The system refuses a process."""

    child: int
    """As of `Spawned`; of a loader, its worker."""
    text: str


class ChildGone(Message, frozen=True, kw_only=True):
    """A forked process has ended, and is reaped."""

    child: int
    """A worker's id, or `COORDINATOR`."""
    status: int
    """As `os.waitpid` gives it."""
    at_s: float
    """Monotonic time."""


class CommitDone(Message, frozen=True, kw_only=True):
    """What became of a commit."""

    number: int
    error: str | None
    """None: the checkpoint is durable."""
    again: bool = False
    """Whether it is worth another try."""


ToForkServer = SpawnWorkers | SpawnJoiner | SpawnCoordinator | KillWorkers | CommitShards | AbandonCommits | TakeKeys
FromForkServer = (
    Prepared | Unprepared | Spawned | LoaderSpawned | LoaderGone | SpawnRefused | ChildGone | CommitDone | KeysHeld
)


def pack_message(message: ToForkServer | FromForkServer) -> bytes:
    """Encodes a message as it lies in the socket."""
    return framed(msgspec.msgpack.encode(message))


def framed(payload: bytes) -> bytes:
    """Frames bytes as they lie in the socket."""
    return _LENGTH.pack(len(payload)) + payload


def read_framed(link: socket.socket) -> bytearray:
    """Reads the first bytes that come; waits for them.

    Raises:
        EOFError: the other side has closed the socket.
    """
    (length,) = _LENGTH.unpack(_read(link, _LENGTH.size))
    return _read(link, length)


def _read(link: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        received = link.recv_into(rest)
        if not received:
            raise EOFError(f"the socket was closed, and {len(rest)} of {num_bytes} bytes have not come")
        rest = rest[received:]
    return data


class Unpacker(Generic[_T]):
    """Messages from the bytes of a socket, however they are cut.

    Args:
        receives: union of the messages' types.
    """

    def __init__(self, receives: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(receives)
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[_T]:
        """Yields the messages that are whole with these bytes."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            stop = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < stop:
                return
            payload = bytes(self._data[_LENGTH.size : stop])
            del self._data[:stop]
            yield self._decoder.decode(payload)
