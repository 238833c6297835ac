"""Blocks and who holds them: the only place where it is decided where state lives. Pure: no torch, no IO.

A block is a fixed-size run of one layer's flat storage, the unit of ownership, replication, transfer and
verification. Its owner updates and serves it; its followers hold live copies and apply the same updates. The blocks
of a layer are dealt over all workers of the stage (interleaved), so a layer that changes stage moves in disjoint
worker-to-worker transfers. The followers of one owner are spread over a few replica peers
(`elaswave.blocks.replica_peers`): so many share its work when it dies, and two workers that die together have taken all
copies of a block with them only if they are replica peers.

Block boundaries depend on the model alone, the placement also on the layout: every worker computes both by itself.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from elaswave.blocks.domains import Domains, domains_of, realms_of
from elaswave.blocks.replica_peers import ReplicaPeers, choose_replica_peers
from elaswave.hashing import MASK64, key64, mix_words
from elaswave.types import WHOLE_STAGE, Layout

if TYPE_CHECKING:
    import numpy.typing as npt

DEFAULT_BLOCK_SIZE = 16384
"""Elements of a block: 64 KiB in float32."""
_LARGEST_DEFAULT_BLOCK_SIZE = 4 * DEFAULT_BLOCK_SIZE
"""A block's gradient, master and optimizer state just fit a core's own cache."""
_ENOUGH_BLOCKS = 128
MOVE_BYTES_MIN, MOVE_BYTES_MAX = 1 << 20, 1 << 28
"""Bounds of what a worker sends in a step while blocks move, where it follows from what is measured."""
SLOWDOWN_MAX = 1.05
"""Copies travel at a rate at which a step takes at most so much longer than one without them."""
_MANY_BLOCKS = 1 << 18
"""The coordinator looks at every block when a worker is lost: at so many for half a second."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """The run [start, stop) of one unit's flat storage."""

    id: int
    """Position among all blocks of the model, layer by layer."""
    layer: int
    """Its unit: a layer, or one of `Layout.shared` beyond the last layer."""
    start: int
    """First element."""
    stop: int
    """One past the last element."""

    @property
    def num_elements(self) -> int:
        """Length of the run, padding included."""
        return self.stop - self.start


@functools.lru_cache(maxsize=64)
def block_keys(num_blocks: int) -> "npt.NDArray[np.uint64]":
    """Makes random 64-bit numbers, one for each block and the same everywhere: what a block counts in sums that tell
    sets of blocks apart. They are odd, so that a block which lacks, or is there twice, is never lost modulo 2**64.

    Returns:
        [num_blocks], read-only.
    """
    keys = mix_words(np.arange(num_blocks, dtype=np.uint64) + np.uint64(key64("block"))) | np.uint64(1)
    keys.flags.writeable = False
    return keys


class ReplicaRole(IntEnum):
    """What a worker is to a block."""

    OWNER = 1
    FOLLOWER = 2


NO_ROLE = 0
"""Stands in arrays of roles where a worker does not hold the block."""


class Placement(msgspec.Struct, frozen=True, dict=True):
    """Block -> (owner, followers), as few *holder groups*: the blocks of a stage fall into some that share owner and
    followers, so what is summed, sent and compared by group does not grow with the number of followers."""

    groups: tuple[tuple[int, ...], ...]
    """Holders of some blocks: the owner, then the followers as they were chosen. Each once, by its first block."""
    group_of: bytes
    """Index in `groups` of each block: 2 bytes each, little-endian (4, where there are more than 65,536 groups)."""

    @classmethod
    def of(cls, owners: Iterable[int], followers: Iterable[tuple[int, ...]]) -> "Placement":
        """Makes the placement in which block b has these holders.

        Args:
            owners: of each block.
            followers: of each block.
        """
        index: dict[tuple[int, ...], int] = {}
        group_of = [index.setdefault((owner, *others), len(index)) for owner, others in zip(owners, followers)]
        return cls(tuple(index), np.array(group_of, _dtype(len(index))).tobytes())

    @functools.cached_property
    def group_indices(self) -> "npt.NDArray[np.unsignedinteger[Any]]":
        """Index in `groups` of each block, [number of blocks]; read-only."""
        return np.frombuffer(self.group_of, _dtype(len(self.groups)))

    @functools.cached_property
    def owner(self) -> tuple[int, ...]:
        """``owner[b]`` is the worker that updates block b and serves it."""
        return tuple(group[0] for group in map(self.groups.__getitem__, self.group_indices.tolist()))

    @functools.cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """``followers[b]`` are the workers that hold a live copy of block b."""
        followers = [group[1:] for group in self.groups]
        return tuple(map(followers.__getitem__, self.group_indices.tolist()))

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.group_indices)

    def holders(self, block: int) -> tuple[int, ...]:
        """Lists owner and followers of a block."""
        return self.groups[self.group_indices[block]]

    def holds(self, worker: int) -> bool:
        """Tells whether a worker holds any block."""
        return any(worker in group for group in self.groups)

    def by_group(self, values: Iterable[int], dtype: str = "i8") -> "npt.NDArray[Any]":
        """Deals numbers, one of each group, to the blocks of the groups, [number of blocks]."""
        return np.array([*values], dtype)[self.group_indices]

    def roles(self, worker: int) -> "npt.NDArray[np.uint8]":
        """Finds what a worker is to each block: its `ReplicaRole`, or `NO_ROLE`."""
        return self.by_group((_role_in(group, worker) for group in self.groups), "u1")

    @functools.cached_property
    def key_sums(self) -> tuple[tuple[int, ReplicaRole, int], ...]:
        """Each holder in each of its roles, and the sum of the `block_keys` of the blocks that it holds so."""
        of_group = np.zeros(len(self.groups), np.uint64)
        np.add.at(of_group, self.group_indices, block_keys(self.num_blocks))
        sums: dict[tuple[int, ReplicaRole], int] = defaultdict(int)
        for group, value in zip(self.groups, of_group.tolist()):
            for worker in group:
                sums[worker, ReplicaRole(_role_in(group, worker))] += value
        return tuple((worker, role, value & MASK64) for (worker, role), value in sums.items())


def _role_in(group: tuple[int, ...], worker: int) -> int:
    if worker not in group:
        return NO_ROLE
    return ReplicaRole.OWNER if group[0] == worker else ReplicaRole.FOLLOWER


def _dtype(num_groups: int) -> str:
    return "<u2" if num_groups <= 1 << 16 else "<u4"


def default_block_size(num_elements: int) -> int:
    """Computes the block size of a model of which none was asked for.

    Small blocks are dealt out evenly; large ones cost less, since all that is done per block is done less often (an
    update takes 1.5 instead of 2.4 ms per million parameters). So: as large as leaves enough blocks to deal out, and
    as fits a core's cache. Models of more than 17 billion elements have larger ones, so that their number is bounded.

    Args:
        num_elements: of all layers' flat storage.
    """
    size = DEFAULT_BLOCK_SIZE
    while size < _LARGEST_DEFAULT_BLOCK_SIZE and num_elements >= 2 * size * _ENOUGH_BLOCKS:
        size *= 2
    while num_elements > size * _MANY_BLOCKS:
        size *= 2
    return size


def make_blocks(layer_sizes: Sequence[int], block_size: int = DEFAULT_BLOCK_SIZE) -> tuple[Block, ...]:
    """Cuts every layer into blocks.

    Args:
        layer_sizes: elements of each layer's flat storage; a layer without parameters has 0 and gets no block.
        block_size: elements of a block; the last one of a layer may be shorter.
    Returns:
        The blocks of all layers, numbered from 0 in layer order.
    Raises:
        ValueError: block_size < 1 or a negative layer size.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: a block needs at least 1 element")
    blocks: list[Block] = []
    for layer, size in enumerate(layer_sizes):
        if size < 0:
            raise ValueError(f"layer {layer} has a size of {size} elements: sizes cannot be negative")
        for start in range(0, size, block_size):
            blocks.append(Block(len(blocks), layer, start, min(start + block_size, size)))
    return tuple(blocks)


@functools.lru_cache(maxsize=4096)
def holders_of_layers(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Lists for each layer the workers, ascending, that run it: of its stage, or of both stages that share it; then for
    each shared unit those that run a layer which uses it."""
    workers: list[set[int]] = [set() for _ in range(layout.num_layers)]
    for stage in layout.stages:
        for layer in range(stage.start, stage.stop):
            workers[layer].update(stage.workers)
    workers += [set().union(*(workers[layer] for layer in users)) for users in layout.shared]
    return tuple(tuple(sorted(members)) for members in workers)


class Wanted(NamedTuple):
    """The followers that the blocks of an owner shall have."""

    whole: tuple[int, ...]
    """Those that follow since they run the unit, where all of its stage do, in a ring that starts after the owner."""
    number: int
    """How many there shall be in all."""


class WantedFollowers:
    """Tells how many followers the blocks of each unit and owner shall have, and which of them in any case.

    So many as the stages of a layout ask for (`Stage.num_followers`): of a unit that several stages hold, the most.
    Where all of a stage follow, one outside follows too if the owner has nobody beside it, or if all of them are in one
    domain and others are elsewhere (D1). Numbers are clamped to the workers that there are (where copies stay inside,
    at the owner's site).

    Args:
        layout: who runs which layer, and where.
        excluded: workers that hold nothing.
        domains: by what copies are kept apart; None: as they are among the workers of the layout's stages.
        holders: all that may hold blocks; None: the workers of the layout's stages.
    """

    def __init__(
        self,
        layout: Layout,
        excluded: Collection[int] = (),
        domains: Domains | None = None,
        holders: Collection[int] | None = None,
    ) -> None:
        out = frozenset(excluded)
        self._members = [tuple(each for each in group if each not in out) for group in holders_of_layers(layout)]
        self._numbers = _numbers_of_units(layout)
        self._domains = domains_of(layout, out) if domains is None else domains
        self._realms = realms_of(layout)
        self._workers = [worker for worker in (layout.active if holders is None else holders) if worker not in out]
        self._found: dict[tuple[tuple[int, ...], int, int], Wanted] = {}

    def of(self, unit: int, owner: int) -> Wanted:
        """Returns what an owner's blocks of a unit shall have."""
        members, number = self._members[unit], self._numbers[unit]
        wanted = self._found.get((members, number, owner))
        if wanted is None:
            wanted = self._found[members, number, owner] = self._of(members, number, owner)
        return wanted

    def before_refill(self, unit: int, owner: int, holders: Container[int]) -> Wanted:
        """Returns what a block shall have when a change comes into force, which waits for its copies: of a whole stage
        those that hold it already, and one in another domain (D2). The others get theirs afterwards.

        Args:
            unit: of the block.
            owner: of the block, under the change.
            holders: of the block, before the change.
        """
        whole, number = self.of(unit, owner)
        there = tuple(worker for worker in whole if worker in holders)
        if missing := self.by_domain(owner, there, [worker for worker in whole if worker not in there]):
            if not there or self._shares_domain(owner, there) and not self._shares_domain(owner, missing[:1]):
                there += (missing[0],)
        return Wanted(there, number - len(whole) + len(there))

    def by_domain(self, owner: int, followers: Sequence[int], others: Sequence[int]) -> Sequence[int]:
        """Sorts workers that do not hold an owner's block: those in domains without a copy come first."""
        if not self._domains:
            return others
        used = {self._domains[0][worker] for worker in (owner, *followers)}
        return sorted(others, key=lambda worker: self._domains[0][worker] in used)

    def _shares_domain(self, owner: int, followers: Sequence[int]) -> bool:
        return bool(self._domains) and len({self._domains[0][worker] for worker in (owner, *followers)}) == 1

    def _of(self, members: tuple[int, ...], number: int, owner: int) -> Wanted:
        here = self._realms.get(owner)
        near = [worker for worker in self._workers if worker != owner and self._realms.get(worker) == here]
        if number != WHOLE_STAGE:
            return Wanted((), min(number, len(near)))
        inside = [worker for worker in members if worker in near]
        whole = tuple(sorted(inside, key=lambda worker: (worker < owner, worker)))
        return Wanted(whole, len(whole) + self._needs_one_outside(owner, inside, near))

    def _needs_one_outside(self, owner: int, inside: Sequence[int], near: Sequence[int]) -> bool:
        outside = set(near).difference(inside)
        if not (inside and outside):
            return bool(outside)
        return self._shares_domain(owner, inside) and any(
            not self._shares_domain(owner, (worker,)) for worker in outside
        )


@functools.lru_cache(maxsize=4096)
def _numbers_of_units(layout: Layout) -> tuple[int, ...]:
    """Lists the number of followers that the stages of each unit ask for."""
    asked: list[set[int]] = [set() for _ in range(layout.num_layers)]
    for stage in layout.stages:
        for layer in range(stage.start, stage.stop):
            asked[layer].add(stage.num_followers)
    if (least := min(set().union(*asked))) < WHOLE_STAGE:
        raise ValueError(f"num_followers of a stage is {least}: it cannot be negative, but for WHOLE_STAGE (-1)")
    asked += [set().union(*(asked[layer] for layer in users)) for users in layout.shared]
    return tuple(WHOLE_STAGE if WHOLE_STAGE in numbers else max(numbers, default=0) for numbers in asked)


def place_blocks(layout: Layout, blocks: Sequence[Block], *, scatter_width: int) -> Placement:
    """Deals blocks to owners and followers, balanced by elements; a pure function of its arguments.

    Owners: the worker of the block's stage that owns the fewest elements so far (ties in turn). As many followers as
    `WantedFollowers` says, the others than those of the whole stage as `FollowerChooser` has them. Idle workers get
    nothing.

    Args:
        layout: who runs which layer, and where, and how many followers each stage asks for.
        blocks: of the whole model, as `make_blocks` returns them.
        scatter_width: over how many replica peers the first followers of an owner's blocks are spread.
    Returns:
        A placement with one entry per block; followers in the order in which they were chosen.
    Raises:
        ValueError: scatter_width < 1, or a block of a layer that the layout lacks.
    """
    workers = layout.active
    members_of_layer = holders_of_layers(layout)
    owners = _deal_owners(members_of_layer, blocks)
    replica_peers = replica_peers_under(layout, scatter_width)
    realms = realms_of(layout)
    chooser = FollowerChooser(workers, replica_peers, scatter_width, domains_of(layout), realms=realms)
    wanted_followers = WantedFollowers(layout)
    for block, owner in zip(blocks, owners):
        # Before the first follower is chosen: it is to be one that holds little, what it owns included.
        chooser.count(members_of_layer[block.layer], (owner,), block.num_elements)
    followers = []
    for block, owner in zip(blocks, owners):
        chosen, number = wanted_followers.of(block.layer, owner)
        for _ in range(number - len(chosen)):
            follower = chooser.choose(members_of_layer[block.layer], owner, chosen, block.num_elements)
            assert follower is not None
            chosen += (follower,)
        followers.append(chosen)
    return Placement.of(tuple(owners), tuple(followers))


def replica_peers_under(
    layout: Layout,
    scatter_width: int,
    *,
    excluded: Collection[int] = (),
    copies: Iterable[tuple[int, tuple[int, ...]]] = (),
    firm: bool = False,
) -> ReplicaPeers:
    """Chooses the replica peers of the workers of a layout's stages; those that run a layer, or a shared unit, are a
    group.

    Args:
        layout: who runs which layer, and where.
        excluded: workers that hold nothing.
        copies: (owner, followers) of each block that shall stay where it is, as far as possible.
        scatter_width, firm: as of `choose_replica_peers`.
    Raises:
        ValueError: scatter_width < 1.
    """
    out = frozenset(excluded)
    members = [
        tuple(worker for worker in group if worker not in out) for group in dict.fromkeys(holders_of_layers(layout))
    ]
    kin: dict[int, set[int]] = defaultdict(set)
    for group in members:
        for worker in group:
            kin[worker].update(group)
    domains, realms = domains_of(layout, out), realms_of(layout)
    hosts = domains[0] if domains else None

    def fits(owner: int, follower: int) -> bool:
        # As in `choose_replica_peers`: one that it would drop must not stand for others in `_cover`.
        if owner not in kin or follower not in kin or realms.get(owner) != realms.get(follower):
            return False
        if hosts is not None:
            return hosts[owner] != hosts[follower]
        return follower in kin[owner] or len(kin[owner]) == 1

    # Many blocks have the same holders: each kind of them is looked at once.
    kept = _cover(
        (owner, [worker for worker in followers if fits(owner, worker)], num_blocks)
        for (owner, followers), num_blocks in Counter(copies).items()
    )
    found: ReplicaPeers = {}
    for realm in dict.fromkeys(realms.get(worker) for group in members for worker in group):
        # Site by site: copies inside a site never leave it.
        inside = [tuple(worker for worker in group if realms.get(worker) == realm) for group in members]
        found |= choose_replica_peers(
            [group for group in inside if group], scatter_width, hosts=hosts, kept=kept, firm=firm
        )
    return found


def _cover(copies: Iterable[tuple[int, Collection[int], int]]) -> dict[int, list[int]]:
    """Chooses as few followers of each owner as hold all of its blocks that have any, those of most blocks first.

    With several followers for each block it is one of them: the others follow from it (`FollowerChooser`).

    Args:
        copies: owner, followers and number of the blocks that these hold, in the order of their first blocks.
    """
    of_owner: dict[int, list[tuple[Collection[int], int]]] = defaultdict(list)
    for owner, followers, num_blocks in copies:
        of_owner[owner].append((followers, num_blocks))
    found: dict[int, list[int]] = {}
    for owner, left in of_owner.items():
        chosen = found[owner] = []
        while counts := _counts(left):
            ((most, _),) = counts.most_common(1)  # of equals that of the first block
            chosen.append(most)
            left = [(followers, num_blocks) for followers, num_blocks in left if most not in followers]
    return found


def _counts(copies: Iterable[tuple[Collection[int], int]]) -> Counter[int]:
    """Counts how many blocks each worker follows."""
    counts = Counter[int]()
    for followers, num_blocks in copies:
        for worker in followers:
            counts[worker] += num_blocks
    return counts


def _deal_owners(members_of_layer: Sequence[tuple[int, ...]], blocks: Sequence[Block]) -> list[int]:
    """Chooses the least loaded worker of each block's stage; ties go to the one that has waited longest."""
    load: dict[int, int] = {}
    last_turn: dict[int, int] = {}
    owners = []
    for turn, block in enumerate(blocks, start=1):
        if not (0 <= block.layer < len(members_of_layer) and members_of_layer[block.layer]):
            raise ValueError(
                f"block {block.id} is of layer {block.layer}, but the layout has {len(members_of_layer)} layers: "
                "make layout and blocks from the same model"
            )
        owner = min(members_of_layer[block.layer], key=lambda w: (load.get(w, 0), last_turn.get(w, 0), w))
        load[owner] = load.get(owner, 0) + block.num_elements
        last_turn[owner] = turn
        owners.append(owner)
    return owners


class FollowerChooser:
    """Chooses followers one by one and keeps count of what each worker holds and follows.

    One follower of a block is a replica peer of its owner; among several that fit the one that follows the owner in the
    fewest blocks, then the one that holds the fewest elements. Replica peers are of the block's stage where all workers
    are on one host and the stage has another worker. Each further follower is one fixed worker for an owner and the
    followers so far: with two followers there are not many more sets of three that hold a block than an owner has
    replica peers. It is in a domain without a copy, of the block's stage, and no other replica peer, as far as there
    are such workers, in this order.

    Args:
        workers: all that may hold blocks, ascending.
        replica_peers: of each worker that may be chosen; an owner that has none chooses among all.
        scatter_width: so many of an owner's replica peers are chosen for the blocks of one stage; it may have more for
            those of another that runs the same layers.
        domains: by what copies are kept apart, level by level, see `elaswave.blocks.domains`.
        excluded: those among the workers that are never chosen.
        realms: worker -> the site that its blocks' followers do not leave; empty: there is none.
    """

    def __init__(
        self,
        workers: Sequence[int],
        replica_peers: ReplicaPeers,
        scatter_width: int,
        domains: Domains = (),
        excluded: Collection[int] = (),
        realms: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._workers = workers
        self._realms = realms
        self._ordered = replica_peers
        self._replica_peers = {worker: frozenset(others) for worker, others in replica_peers.items()}
        self._width = scatter_width
        self._excluded = frozenset(excluded)
        self._domains = domains
        self._one_host = not domains or len({domains[0][each] for each in workers if each not in self._excluded}) <= 1
        self._held = dict.fromkeys(workers, 0)
        self._num_fixed = dict.fromkeys(workers, 0)
        self._followed = {owner: dict.fromkeys(workers, 0) for owner in workers}
        self._further: dict[tuple[tuple[int, ...], int, frozenset[int]], int] = {}
        self._candidates: dict[tuple[tuple[int, ...], int, tuple[int, ...]], tuple[int, ...]] = {}

    def count(self, members: tuple[int, ...], holders: Sequence[int], num_elements: int, num_blocks: int = 1) -> None:
        """Takes note of blocks that are already held by an owner, given first, and followers.

        Args:
            members: workers of the blocks' stage.
            holders: of each of them.
            num_elements: of all of them.
            num_blocks: how many there are.
        """
        owner, *followers = holders
        self._held[owner] += num_elements
        # One follower counts as the first one; others are further ones, though they may be replica peers too.
        replica_peer = next((worker for worker in followers if worker in self._replica_peers.get(owner, ())), None)
        for follower in followers:
            self.note(owner, follower, num_elements, num_firsts=num_blocks * (follower == replica_peer))
        if replica_peer is not None:
            chosen = frozenset((replica_peer,))
            for worker in followers:
                if worker != replica_peer:
                    self.fix(members, owner, chosen, worker)
                    chosen |= {worker}

    def note(self, owner: int, follower: int, num_elements: int, *, num_firsts: int) -> None:
        """Takes note that a worker follows blocks of an owner, so many as the replica peer that these are to have."""
        self._followed[owner][follower] += num_firsts
        self._held[follower] += num_elements

    def fix(self, members: tuple[int, ...], owner: int, chosen: Collection[int], follower: int) -> None:
        """Notes who is the next follower of an owner's blocks that have these followers, unless that is known."""
        key = members, owner, frozenset(chosen)
        if key not in self._further:
            self._further[key] = follower
            self._num_fixed[follower] += 1

    def fixed(self, members: tuple[int, ...], owner: int, chosen: Collection[int]) -> int | None:
        """Returns who is noted as the next follower of an owner's blocks that have these followers."""
        return self._further.get((members, owner, frozenset(chosen)))

    def choose(
        self,
        members: tuple[int, ...],
        owner: int,
        chosen: tuple[int, ...],
        num_elements: int,
        full: Container[int] = (),
    ) -> int | None:
        """Chooses the next follower of a block, and takes note of it.

        Args:
            members: workers of the block's stage.
            owner: of the block.
            chosen: its followers so far.
            num_elements: of the block.
            full: workers that may not be chosen.
        Returns:
            None if all workers of the best kind are full, or if all workers that may be chosen hold the block.
        """
        candidates = self.candidates(members, owner, chosen)
        further = bool(chosen) and not self.lacks_replica_peer(owner, chosen)
        if further:
            fixed = self.fixed(members, owner, chosen)
            # Any other choice would make one more set of workers that can lose a block together.
            if fixed in candidates:
                candidates = (fixed,)
        if full:
            candidates = tuple(worker for worker in candidates if worker not in full)
        if not candidates:
            return None
        followed, held = self._followed[owner], self._held
        if further:
            # A pair of replica peers is a set of two that can lose state already.
            replica_peers = self._replica_peers.get(owner, ())
            follower = min(
                candidates, key=lambda worker: (worker in replica_peers, self._num_fixed[worker], held[worker])
            )
            self.fix(members, owner, chosen, follower)
        else:
            fewest = min(map(followed.__getitem__, candidates))
            follower = min((worker for worker in candidates if followed[worker] == fewest), key=held.__getitem__)
        self.note(owner, follower, num_elements, num_firsts=not further)
        return follower

    def lacks_replica_peer(self, owner: int, chosen: Collection[int]) -> bool:
        """Tells whether none of a block's followers is a replica peer of its owner, though it has replica peers."""
        replica_peers = self._replica_peers.get(owner, frozenset())
        return bool(replica_peers) and replica_peers.isdisjoint(chosen)

    def candidates(self, members: tuple[int, ...], owner: int, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Lists the workers of the best kind that is there for the next follower, in a ring that starts after the
        owner.

        Args:
            members, owner, chosen: as of `choose`.
        """
        key = (members, owner, chosen)
        candidates = self._candidates.get(key)
        if candidates is None:
            candidates = self._candidates[key] = tuple(self._fitting(members, owner, chosen))
        return candidates

    def _fitting(self, members: tuple[int, ...], owner: int, chosen: tuple[int, ...]) -> Sequence[int]:
        after_owner = self._workers.index(owner) + 1
        # Each owner looks from its own place on, so that ties do not all go to the lowest ids.
        ring = (*self._workers[after_owner:], *self._workers[: after_owner - 1])
        in_stage = frozenset(members)
        here = self._realms.get(owner)
        free = [
            worker
            for worker in ring
            if worker not in chosen and worker not in self._excluded and self._realms.get(worker) == here
        ]
        if lacks_replica_peer := self.lacks_replica_peer(owner, chosen):
            free = [worker for worker in free if worker in self._replica_peers[owner]]
        else:
            # The domain comes before the stage (D2).
            free = self._apart(free, (owner, *chosen))
        inside = [worker for worker in free if worker in in_stage]
        outside = [worker for worker in free if worker not in in_stage]
        if lacks_replica_peer:
            fitting = inside if inside and self._one_host else free
            # Those that are kept stand first; beyond the width they are of other groups of the owner.
            first = sorted(fitting, key=self._ordered[owner].index)[: self._width]
            fitting = [worker for worker in fitting if worker in first]
        else:
            fitting = inside or outside  # one inside needs no parameters from the owner
        return self._apart(fitting, (owner, *chosen))

    def _apart(self, workers: list[int], holders: Sequence[int]) -> list[int]:
        """Selects those in domains without a copy, by the coarsest level at which there are any; all if there are
        none."""
        for domain in self._domains:
            used = {domain[holder] for holder in holders}
            if elsewhere := [worker for worker in workers if domain[worker] not in used]:
                return elsewhere
        return workers


def roles_of(worker: int, placement: Placement, blocks: Sequence[Block]) -> dict[int, ReplicaRole]:
    """Lists which blocks a worker holds under a placement, and as what."""
    known = (None, *ReplicaRole)
    roles = zip(blocks, map(known.__getitem__, placement.roles(worker).tolist()))
    return {block.id: role for block, role in roles if role is not None}
