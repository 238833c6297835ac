"""The machine's links over a transport: keys become tags and handles, waits move bytes and say for whom is waited.

A single tensor travels as itself, with type and shape in the transport's header. A tree of tensors is one run of bytes:
a description (structure, types and shapes, as JSON), then the tensors, each at a multiple of 64 bytes. Single tensors
of bytes, of no dimension or of many travel in this way too, so that a frame of uint8 is always one of these. A receiver
needs to know nothing beforehand; it checks every number of a description before it uses it.

Peers may be at other sites, over links that are emulated or paced (`SiteLinks`). Where a member is stands in its label
(`elaswave.blocks.domains`), which comes with each layout. Of a worker of which nothing is known yet, such as one that
is about to join, the site follows from its number.
"""

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, Protocol

import msgspec
import torch

from elaswave.blocks.placement import Block, Placement
from elaswave.channel.messages.worker import FromWorker, Unreached
from elaswave.config.cluster import Sites, configured_sites
from elaswave.config.schema import Config
from elaswave.devices.interface import HOST, Device, Mark, wait_for
from elaswave.engine.activity import Activity
from elaswave.engine.checks.values import MAX_DEPTH, NOTHING, TENSOR, Structure, flatten, num_leaves, unflatten
from elaswave.errors import FrameError, InterruptedWaitError, UsageError, WaitTimeoutError
from elaswave.planning.programs.layout import peers_of
from elaswave.protocol.step.activity import FIRST_S, LINK
from elaswave.protocol.step.engine import FrameKind, Key, Pause, Wait
from elaswave.protocol.step.traffic import doubling_partners
from elaswave.transport.emulated import EmulatedLinks, EmulatedPath, PacedLinks
from elaswave.transport.interface import DTYPES, MAX_NDIM, Handle, Tag, Transport
from elaswave.types import Layout

_ALIGN = 64
_MAGIC = b"ELWV"
_PREFIX = struct.Struct("<4sI")
_MAX_DESCRIPTION_BYTES = 1 << 20
_MAX_DIMS = 64


class _Description(msgspec.Struct, frozen=True, array_like=True):
    structure: Any
    leaves: list[tuple[int, list[int]]]
    """Code of the type and shape of each tensor."""


def pack_value(value: Any) -> torch.Tensor | list[torch.Tensor]:
    """Packs what the transport sends for a value, whose tensors are contiguous.

    Raises:
        UsageError: its description is too long.
    """
    if isinstance(value, torch.Tensor) and value.dtype != torch.uint8 and 0 < value.dim() <= MAX_NDIM:
        return value
    structure, leaves = flatten(value)
    code_of = {dtype: code for code, dtype in enumerate(DTYPES)}
    text = msgspec.json.encode(_Description(structure, [(code_of[leaf.dtype], list(leaf.shape)) for leaf in leaves]))
    if len(text) > _MAX_DESCRIPTION_BYTES:
        raise UsageError(f"a value of {len(leaves)} tensors is too large to be described: hand on fewer tensors")
    head = _PREFIX.pack(_MAGIC, len(text)) + text
    # A bytearray: torch warns of memory that cannot be written.
    parts = [torch.frombuffer(bytearray(head + bytes(-len(head) % _ALIGN)), dtype=torch.uint8)]
    for leaf in leaves:
        parts.append(leaf)
        if gap := -leaf.nbytes % _ALIGN:
            parts.append(torch.zeros(gap, dtype=torch.uint8))
    return parts


def unpack_value(frame: torch.Tensor) -> Any:
    """Unpacks the value that a received frame holds. Its tensors lie in the frame's memory, each with its own version.

    Raises:
        FrameError: the frame contradicts itself.
    """
    if frame.dtype != torch.uint8:
        return frame
    description, offset = _describe(frame)
    storage, leaves = frame.untyped_storage(), []
    for code, shape in description.leaves:
        dtype = DTYPES[code]
        # Not a view: all views of a tensor have one count of writes.
        leaf = torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload]
        leaves.append(leaf)
        offset += leaf.nbytes + -leaf.nbytes % _ALIGN
    try:
        return unflatten(_as_tuples(description.structure), leaves)
    except (UsageError, TypeError, ValueError) as error:
        raise FrameError(f"a frame describes a value that cannot be: {error}") from error


def _describe(frame: torch.Tensor) -> tuple[_Description, int]:
    """Reads the checked description in a frame, and finds where its tensors begin."""
    size = len(frame)
    if size < _PREFIX.size:
        raise FrameError(f"a frame of {size} bytes is too short for a value")
    magic, length = _PREFIX.unpack(bytes(frame[: _PREFIX.size].numpy()))
    start = _PREFIX.size + length + -(_PREFIX.size + length) % _ALIGN
    if magic != _MAGIC or length > _MAX_DESCRIPTION_BYTES or start > size:
        raise FrameError(f"a frame of {size} bytes begins with {magic!r} and a description of {length} bytes")
    try:
        text = bytes(frame[_PREFIX.size : _PREFIX.size + length].numpy())
        description = msgspec.json.decode(text, type=_Description)
        structure = _as_tuples(description.structure)
        if num_leaves(structure) != len(description.leaves):
            raise ValueError(f"{num_leaves(structure)} places for {len(description.leaves)} tensors")
        end = start + sum(_num_bytes(code, shape) for code, shape in description.leaves)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"a frame describes a value that cannot be: {error}") from error
    if end != size:
        raise FrameError(f"a frame of {size} bytes describes a value of {end}")
    return description, start


def _num_bytes(code: int, shape: Sequence[int]) -> int:
    """Computes the bytes of a tensor with its gap.

    Raises:
        ValueError: there is no such tensor.
    """
    if not 0 <= code < len(DTYPES) or len(shape) > _MAX_DIMS or any(size < 0 for size in shape):
        raise ValueError(f"a tensor of type {code} and shape {shape}")
    num_bytes = prod(shape) * DTYPES[code].itemsize
    return num_bytes + -num_bytes % _ALIGN


def _as_tuples(structure: Any, depth: int = 0) -> Structure:
    """Turns a structure as JSON has it into one as `flatten` makes it.

    Raises:
        ValueError: it is none.
    """
    if structure in (TENSOR, NOTHING):
        return structure
    if not isinstance(structure, list | tuple) or depth > MAX_DEPTH:
        raise ValueError(f"{structure!r} is no structure")
    match list(structure):
        case ["tuple" | "list" as kind, [*parts]]:
            head: tuple[Any, ...] = (kind,)
        case ["dict", [*keys], [*parts]] if len(keys) == len(parts) and {type(key) for key in keys} <= {str, int}:
            head = ("dict", tuple(keys))
        case ["named", str() as name, [*parts]]:
            head = ("named", name)
        case _:
            raise ValueError(f"{structure!r} is no structure")
    return (*head, tuple(_as_tuples(part, depth + 1) for part in parts))


WAIT_TIMEOUT_S = FIRST_S + 600.0
"""Bound of every wait on a peer while no byte moves. A peer's death ends a wait at once; this is for a peer that is
alive and silent."""
LINK_TURN_S = 10.0
"""How long links are waited for before it is checked whether the coordinator is still there."""
UNREACHED_TURN_S = 5.0
"""Between two times that it is said which wanted peers do not answer."""
FULL_MESH_WORKERS = 128
"""Up to this many members, each is linked to every other from the start, so that no recovery has to dial."""

_WORDS = (FrameKind.VOTE, FrameKind.DIAGNOSIS, FrameKind.EVALUATION_LOSS)
"""Kinds whose payload is a sequence of whole numbers."""
_VALUES = (FrameKind.ACTIVATION, FrameKind.GRADIENT, FrameKind.EVALUATION)
"""Kinds whose payload is a tensor or a tree of tensors."""


NO_COORDINATOR_S = 120.0
"""Bound of waiting without a coordinator: for the start, for links, for a decision, for the end of the job. While there
is one it watches all that are waited for, and bounds the wait: by what it sees of them, not by a constant."""


class WorkerClient(Protocol):
    """The connection to the coordinator; outlives coordinators."""

    def send(self, message: FromWorker, durable: bool = False) -> object:
        """Sends a message; thread-safe. A durable one is repeated until a coordinator has handled it."""
        ...

    @property
    def disconnected_s(self) -> float:
        """Seconds without a coordinator that answers; 0 while there is one."""
        ...


def check_coordinator(client: WorkerClient, waited_for: str) -> None:
    """Ends a wait whose end only a coordinator can see to, if there is none.

    Raises:
        WaitTimeoutError: there has been none for `NO_COORDINATOR_S`.
    """
    gone_s = client.disconnected_s
    if gone_s > NO_COORDINATOR_S:
        raise WaitTimeoutError(f"{waited_for}, and no coordinator has answered for {gone_s:.0f} s")


class TransportLinks:
    """See `elaswave.protocol.step.engine.Links` for what its methods promise.

    Args:
        worker: its id.
        blocks: of the model.
        transport: moves the bytes.
        activity: told for whom this worker waits.
        check: at a moment: moves bytes, and raises InterruptedWaitError if the generation is over.
        client: told now and then of peers that do not answer at their addresses, see `unreached`; where there is no
            coordinator that could end a wait for links, that ends. None: nobody.
        device: where frames come from and go to. Of one that is not the host they travel by way of host memory: a
            frame leaves once its copy is there, and `take` brings one that has come to the device.
    """

    def __init__(
        self,
        worker: int,
        blocks: Sequence[Block],
        transport: Transport,
        activity: Activity,
        check: Callable[[], None],
        client: WorkerClient | None = None,
        device: Device = HOST,
    ) -> None:
        self.worker = worker
        self.transport = transport
        self.addresses: dict[int, str] = {}
        """Where the data planes of all workers listen that were heard of."""
        self.is_linked = False
        """Whether the first links have been made."""
        self._wanted: frozenset[int] = frozenset()
        """Peers to which links are made in the background."""
        self.edit_s = 0.0
        """Seconds that the newest move to a generation took, with the links made since."""
        self.connected_s = time.monotonic()
        """When the newest links were there."""
        self._blocks = blocks
        self._activity = activity
        self.check = check
        self._client = client
        self._unreached_at_s = 0.0
        """When it was told of them, or looked whether there were any."""
        self._receives: dict[Key, Handle] = {}
        self._sends: list[Handle] = []
        self._device = device
        self._fetching: deque[tuple[Mark, Key, Any]] = deque()
        """Frames whose bytes are on their way from the device, in the order in which they are to be sent."""
        self._rooms: dict[Key, list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
        """By frame that is to come: host memory, and where that is to be brought."""

    def connect(self, layout: Layout, placement: Placement) -> None:
        """Makes the links that a layout and a placement need (all of them in a small job).

        Raises:
            InterruptedWaitError: a new generation is about to begin.
            WaitTimeoutError: there is no coordinator any more.
        """
        begin_s = time.monotonic()
        peers = self.needed(layout, placement)
        missing = peers - self.transport.peers
        if unknown := missing - self.addresses.keys():
            # It was lost before this worker heard of the start; the coordinator is about to ask for a report.
            raise InterruptedWaitError(f"the start does not name workers {sorted(unknown)}")
        while missing:
            self._activity.wait_on(self._activity.label if self.is_linked else LINK, tuple(sorted(missing)))
            try:
                self.transport.connect({peer: self.addresses[peer] for peer in missing}, LINK_TURN_S)
            except WaitTimeoutError as error:
                # Whether such a peer is lost is for the coordinator to decide.
                if unreached := self._unreached(missing):
                    self._say_unreached(unreached)
                if self._client is not None:
                    check_coordinator(self._client, str(error))
            missing = peers - self.transport.peers
        self.is_linked = True
        self.connected_s = time.monotonic()
        self.edit_s += self.connected_s - begin_s

    def needed(self, layout: Layout, placement: Placement) -> set[int]:
        """Finds the peers with which this worker exchanges frames under a layout and a placement; in a small job these
        are all peers."""
        if len(layout.workers) <= FULL_MESH_WORKERS:
            return set(layout.workers) - {self.worker}
        peers = peers_of(layout, placement, self._blocks)[self.worker]
        # The all-reduce of the vote goes to these, who may be in any stage.
        return peers | doubling_partners(layout.workers, self.worker)

    def want(self, addresses: Mapping[int, str]) -> None:
        """Makes links to these peers in the background, without ever blocking, and gives up others that are not there.

        Args:
            addresses: peer -> where its data plane listens; of all that are wanted from now on.
        """
        self.addresses = {**self.addresses, **addresses}
        self._wanted = frozenset(addresses) - {self.worker}
        self.transport.want(addresses)

    def has(self, peer: int) -> bool:
        """Tells whether there is a link to a peer."""
        return peer in self.transport.peers

    @property
    def broken(self) -> tuple[int, str] | None:
        """A peer whose link has ended in this generation though frames of it were sent there, and how it ended
        (W11)."""
        return self.transport.broken

    @property
    def is_dialling(self) -> bool:
        """Whether a link that is wanted is not there."""
        return not self._wanted <= self.transport.peers

    def look_at_unreached(self) -> None:
        """Says now and then which peers that are wanted do not answer."""
        now_s = time.monotonic()
        if now_s - self._unreached_at_s >= UNREACHED_TURN_S:
            self._unreached_at_s = now_s
            if unreached := self._unreached(self._wanted - self.transport.peers):
                self._say_unreached(unreached)

    def _say_unreached(self, peers: Mapping[int, str]) -> None:
        if self._client is not None:
            self._client.send(Unreached(worker=self.worker, peers=dict(peers)))

    def _unreached(self, peers: Iterable[int]) -> dict[int, str]:
        """Peers that this worker dials and that do not answer -> where it dials, and what it sees there."""
        seen = {peer: self.transport.unreached(peer) for peer in sorted(peers) if peer > self.worker}
        return {peer: f"at {self.addresses[peer]}: {text}" for peer, text in seen.items() if text}

    def edit(self, generation: int, members: tuple[int, ...]) -> None:
        """Moves the data plane to a newer generation."""
        begin_s = time.monotonic()
        self._receives.clear()
        self._sends.clear()  # what was pending failed with its generation
        # What is still on its way from the device would be stamped with the new generation (W3).
        self._fetching.clear()
        self._rooms.clear()
        self.transport.advance_generation(generation, members)
        self.edit_s = time.monotonic() - begin_s

    def post(self, key: Key, slot: Any) -> None:
        """Names the memory in which a frame arrives."""
        if not self._device.is_host:
            slot = [slot] if isinstance(slot, torch.Tensor) else slot
            self._rooms[key] = [(self._device.room(_like_all(parts)), parts) for parts in _alike(slot)]
            slot = [room for room, _ in self._rooms[key]]
        self._receives[key] = self.transport.recv(key.peer, _tag(key), slot)

    def send(self, key: Key, payload: Any) -> None:
        """Begins to send a frame."""
        if key.kind in _WORDS:
            payload = torch.tensor(payload, dtype=torch.int64)
        elif not self._device.is_host:
            payload = self._fetched(payload, is_value=key.kind in _VALUES)
        if key.kind in _VALUES:
            payload = pack_value(payload)
        # Words need no copy from the device, but do not overtake frames that were sent before.
        if self._device.is_host or (key.kind in _WORDS and not self._fetching):
            self._sends.append(self.transport.send(key.peer, _tag(key), payload))
        else:
            self._fetching.append((self._device.mark(), key, payload))

    @property
    def is_fetching(self) -> bool:
        """Whether frames are on their way from the device."""
        return bool(self._fetching)

    def hand_over(self) -> None:
        """Begins to send the frames whose bytes have come from the device. Does not block."""
        while self._fetching and self._fetching[0][0].has_passed():
            _, key, payload = self._fetching.popleft()
            self._sends.append(self.transport.send(key.peer, _tag(key), payload))

    def take(self, key: Key) -> Any:
        """Takes a frame that is here."""
        result = self._receives.pop(key).result
        if rooms := self._rooms.pop(key, None):
            for room, parts in rooms:
                if len(parts) == 1:
                    self._device.bring_into(room, parts[0])
                else:
                    brought = self._device.bring(room).split([part.numel() for part in parts])
                    torch._foreach_copy_(parts, brought)
            return None
        if result is None:
            return None
        if key.kind in _VALUES:
            return self._brought(unpack_value(result), has_count=key.kind is FrameKind.GRADIENT)
        return result.tolist() if key.kind in _WORDS else result

    def _fetched(self, payload: Any, *, is_value: bool) -> Any:
        """Begins to copy a payload to host memory. Of what is only a run of bytes, tensors that follow each other are
        laid side by side before: blocks are many, and each copy has its price."""
        if is_value or isinstance(payload, torch.Tensor):
            structure, leaves = flatten(payload)
            return unflatten(structure, list(map(self._device.fetch, leaves)))
        runs = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in _alike(payload)]
        return list(map(self._device.fetch, runs))

    def _brought(self, value: Any, *, has_count: bool) -> Any:
        """Brings a value that has come onto the device; the count beside gradients, which the host works with, stays
        here."""
        if self._device.is_host:
            return value
        structure, leaves = flatten(value)
        stays = [has_count and leaf.dtype == torch.int64 for leaf in leaves]
        brought = [leaf if here else self._device.bring(leaf) for leaf, here in zip(leaves, stays, strict=True)]
        return unflatten(structure, brought)

    # ------------------------------------------------------------------------------------------------- for the driver

    def wait(self, wait: Wait) -> None:
        """Waits for what the machine waits for; the disk is the driver's.

        Raises:
            InterruptedWaitError, PeerLostError, WaitTimeoutError: as of `Transport.wait`.
        """
        if wait is Pause.MOMENT:
            self.check()
        elif wait is Pause.SENT:
            self._fetch_all()
            self._wait(self._sends)
            self._sends.clear()
        elif not isinstance(wait, Pause):
            self._wait([self._handle(key) for key in wait])

    def _handle(self, key: Key) -> Handle:
        handle = self._receives.get(key)
        if handle is None:
            handle = self._receives[key] = self.transport.recv(key.peer, _tag(key))
        return handle

    def _fetch_all(self) -> None:
        """Waits until every frame has come from the device: that depends on nobody else."""
        while self._fetching:
            wait_for(self._fetching[0][0], self.check)
            self.hand_over()

    def _wait(self, handles: Sequence[Handle]) -> None:
        self._fetch_all()  # others may wait for these before they send what is waited for here
        doing = self._activity.doing
        if any(not handle.done for handle in handles):
            self._activity.wait_for(handles)
        while True:
            moved_bytes = self.transport.moved_bytes
            try:
                self.transport.wait(handles, WAIT_TIMEOUT_S)
                break
            except WaitTimeoutError:
                # A slow link is no silent peer: while bytes move, the bound begins anew.
                if self.transport.moved_bytes == moved_bytes:
                    raise
        if doing.computing and not self._activity.doing.computing:
            self._activity.compute(doing.label)


def _tag(key: Key) -> Tag:
    return Tag(key.kind, key.step, key.attempt, key.a, key.b)


def _alike(parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups flat tensors of a frame: those of one type and place that follow each other are together."""
    return [list(some) for _, some in groupby(parts, key=lambda part: (part.dtype, part.device))]


def _like_all(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Makes something of the type of flat tensors, and as large as all of them; it is without content."""
    if len(parts) == 1:
        return parts[0]
    return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device="meta")


class SiteLinks:
    """See the module.

    Args:
        sites: of the run.
        worker: whose links they are.
    """

    def __init__(self, sites: Sites, worker: int) -> None:
        self.emulated = None if sites.are_real else EmulatedLinks(self._path_to)
        self.paced = PacedLinks(self._path_to) if sites.are_real else None
        self._sites = sites
        self._worker = worker
        self._labels: Mapping[int, str] = {}

    def use_layout(self, layout: Layout) -> None:
        """Members are where their labels say."""
        self._labels = layout.domain_of

    def slow_down(self, factor: float) -> None:
        """Leaves every link to another site this share of its rate.

        Args:
            factor: above 0; 1 ends it.
        """
        for links in (self.emulated, self.paced):
            if links is not None:
                links.slow_down(factor)

    @property
    def has_frames(self) -> bool:
        """Whether a frame stands on an emulated link: somebody has to let time pass."""
        return self.emulated is not None and self.emulated.has_frames

    def part(self, site: str, until_s: float) -> bool:
        """From now on nothing goes between a site and the others.

        Args:
            site: its name.
            until_s: monotonic time at which that ends.
        Returns:
            Whether this worker is there.
        """
        away = self._sites.network.sites.index(site)

        def is_cut(there: int) -> bool:
            return (there == away) != (self._here == away)

        assert self.emulated is not None, "a real link cannot be cut"
        self.emulated.part(is_cut, until_s)
        return self._here == away

    @property
    def _here(self) -> int:
        return self._sites.site_of(self._worker, self._labels)

    def _path_to(self, peer: int) -> EmulatedPath | None:
        if peer == self._worker:
            return None
        there = self._sites.site_of(peer, self._labels)
        link = self._sites.network.link(self._here, there)
        return EmulatedPath(there, link.latency_s, link.bandwidth_bytes_per_s)


def site_links(config: Config, worker: int) -> SiteLinks | None:
    """Makes the links of a worker; returns None if all are at one place."""
    sites = configured_sites(config)
    return None if sites is None else SiteLinks(sites, worker)
