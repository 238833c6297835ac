"""Blocks and who holds them: the only place where it is decided where state lives. Pure: no torch, no IO.

A block is a fixed-size run of one layer's flat storage, the unit of ownership, replication, transfer and
verification. Its owner updates and serves it; its followers hold live copies and apply the same updates. The blocks
of a layer are dealt over all workers of the stage (interleaved), so a layer that changes stage moves in disjoint
worker-to-worker transfers; the followers of one owner are spread over many workers (declustered), so that what it
owned is already everywhere when it dies.

Block boundaries depend on the model alone, the placement also on the layout: every worker computes both by itself.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from enum import IntEnum

import msgspec

from elaswave.types import Layout

DEFAULT_BLOCK_SIZE = 16384
"""Elements of a block: 64 KiB in float32."""
_LARGEST_DEFAULT_BLOCK_SIZE = 4 * DEFAULT_BLOCK_SIZE
"""A block's gradient, master and optimizer state just fit a core's own cache."""
_ENOUGH_BLOCKS = 128


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


class Placement(msgspec.Struct, frozen=True):
    """Block -> (owner, followers)."""

    owner: tuple[int, ...]
    """``owner[b]`` is the worker that updates block b and serves it."""
    followers: tuple[tuple[int, ...], ...]
    """``followers[b]`` are the workers that hold a live copy of block b."""

    def holders(self, block: int) -> tuple[int, ...]:
        """Owner and followers of a block."""
        return (self.owner[block], *self.followers[block])

    def holds(self, worker: int) -> bool:
        """Whether a worker holds any block."""
        return worker in self.owner or any(worker in others for others in self.followers)


class Role(IntEnum):
    """What a worker is to a block."""

    OWNER = 1
    FOLLOWER = 2


def default_block_size(num_elements: int) -> int:
    """The block size of a model of which none was asked for.

    Small blocks are dealt out evenly; large ones cost less, since all that is done per block is done less often (an
    update takes 1.5 instead of 2.4 ms per million parameters). So: as large as leaves enough blocks to deal out.

    Args:
        num_elements: of all layers' flat storage.
    """
    size = DEFAULT_BLOCK_SIZE
    while size < _LARGEST_DEFAULT_BLOCK_SIZE and num_elements >= 2 * size * _ENOUGH_BLOCKS:
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


def holders_of_layers(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """For each layer the workers, ascending, that run it: of its stage, or of both stages that share it; then for each
    shared unit those that run a layer which uses it."""
    workers: list[set[int]] = [set() for _ in range(layout.num_layers)]
    for stage in layout.stages:
        for layer in range(stage.start, stage.stop):
            workers[layer].update(stage.workers)
    workers += [set().union(*(workers[layer] for layer in users)) for users in layout.shared]
    return tuple(tuple(sorted(members)) for members in workers)


def place_blocks(
    layout: Layout, blocks: Sequence[Block], *, num_followers: int, hosts: Mapping[int, str] | None = None
) -> Placement:
    """Deals blocks to owners and followers, balanced by elements; a pure function of its arguments.

    Owners: the worker of the block's stage that owns the fewest elements so far (ties in turn). The first follower
    is another worker of the stage if there is one, further ones are outside of it; where the preferred kind of
    worker has run out, any other. Among equally fitting workers those on hosts that hold no copy yet come first,
    then those that follow the owner in the fewest blocks, then those that hold the fewest elements. Idle workers get
    nothing.

    Args:
        layout: who runs which layer.
        blocks: of the whole model, as `make_blocks` returns them.
        num_followers: copies beside the owner; clamped to the number of workers of stages minus one.
        hosts: the host of each worker; None means that all are on one, as in every job so far: the launcher starts
            workers on its own machine only.
    Returns:
        A placement with one entry per block; followers in the order in which they were chosen.
    Raises:
        ValueError: num_followers < 0, a worker without a host, or a block of a layer that the layout lacks.
    """
    workers = layout.active
    if num_followers < 0:
        raise ValueError(f"num_followers is {num_followers}: it cannot be negative (0 means no copies)")
    if hosts is not None and (missing := [worker for worker in workers if worker not in hosts]):
        raise ValueError(f"no host is given for workers {missing}: name one for every worker of the layout, or none")
    members_of_layer = holders_of_layers(layout)
    owners = _deal_owners(members_of_layer, blocks)
    chooser = FollowerChooser(workers, hosts)
    for block, owner in zip(blocks, owners):
        chooser.count((owner,), block.num_elements)
    followers = []
    for block, owner in zip(blocks, owners):
        chosen: tuple[int, ...] = ()
        for _ in range(min(num_followers, len(workers) - 1)):
            follower = chooser.choose(members_of_layer[block.layer], owner, chosen, block.num_elements)
            assert follower is not None
            chosen += (follower,)
        followers.append(chosen)
    return Placement(tuple(owners), tuple(followers))


def _deal_owners(members_of_layer: Sequence[tuple[int, ...]], blocks: Sequence[Block]) -> list[int]:
    """The least loaded worker of each block's stage; ties go to the one that has waited longest."""
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

    Args:
        workers: all that may hold blocks, ascending.
        hosts: the host of each worker; None means that all are on one.
        excluded: those among the workers that are never chosen.
    """

    def __init__(self, workers: Sequence[int], hosts: Mapping[int, str] | None, excluded: Collection[int] = ()) -> None:
        self._workers = workers
        self._excluded = frozenset(excluded)
        self._hosts = hosts if hosts is not None else dict.fromkeys(workers, "")
        self._held = dict.fromkeys(workers, 0)
        self._followed = {owner: dict.fromkeys(workers, 0) for owner in workers}
        self._candidates: dict[tuple[tuple[int, ...], int, tuple[int, ...]], tuple[int, ...]] = {}

    def count(self, holders: Sequence[int], num_elements: int) -> None:
        """Takes note of a block that is already held by an owner, given first, and followers."""
        followed = self._followed[holders[0]]
        for follower in holders[1:]:
            followed[follower] += 1
        for worker in holders:
            self._held[worker] += num_elements

    def choose(
        self,
        members: tuple[int, ...],
        owner: int,
        chosen: tuple[int, ...],
        num_elements: int,
        full: Container[int] = (),
    ) -> int | None:
        """The next follower of a block, and takes note of it.

        Args:
            members: workers of the block's stage.
            owner: of the block.
            chosen: its followers so far.
            num_elements: of the block.
            full: workers that may not be chosen.
        Returns:
            None if all workers of the best kind are full, or if all workers that may be chosen hold the block.
        """
        key = (members, owner, chosen)
        candidates = self._candidates.get(key)
        if candidates is None:
            candidates = self._candidates[key] = tuple(self._fitting(members, owner, chosen))
        followed, held = self._followed[owner], self._held
        if full:
            candidates = tuple(worker for worker in candidates if worker not in full)
        if not candidates:
            return None
        fewest = min(map(followed.__getitem__, candidates))
        follower = min((worker for worker in candidates if followed[worker] == fewest), key=held.__getitem__)
        followed[follower] += 1
        held[follower] += num_elements
        return follower

    def _fitting(self, members: tuple[int, ...], owner: int, chosen: tuple[int, ...]) -> Iterator[int]:
        """The workers of the best kind that is there, in a ring that starts after the owner."""
        after_owner = self._workers.index(owner) + 1
        ring = (*self._workers[after_owner:], *self._workers[: after_owner - 1])
        in_stage = frozenset(members)
        free = [worker for worker in ring if worker not in chosen and worker not in self._excluded]
        inside = [worker for worker in free if worker in in_stage]
        outside = [worker for worker in free if worker not in in_stage]
        has_inside = any(worker in in_stage for worker in chosen)
        fitting = (outside or inside) if has_inside else (inside or outside)
        used_hosts = {self._hosts[worker] for worker in (owner, *chosen)}
        elsewhere = [worker for worker in fitting if self._hosts[worker] not in used_hosts]
        yield from elsewhere or fitting


def roles_of(worker: int, placement: Placement, blocks: Sequence[Block]) -> dict[int, Role]:
    """Which blocks a worker holds under a placement, and as what."""
    roles: dict[int, Role] = {}
    for block in blocks:
        if placement.owner[block.id] == worker:
            roles[block.id] = Role.OWNER
        elif worker in placement.followers[block.id]:
            roles[block.id] = Role.FOLLOWER
    return roles
