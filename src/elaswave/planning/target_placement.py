"""Where the blocks should be under a layout, reached from where they are with few copies. Pure.

`place_blocks` deals all blocks anew. A running job has them somewhere already: here whoever holds a block keeps it,
unless balance or the rules of `place_blocks` want it elsewhere. Three rules say when they do, and a placement that
keeps all of them is its own target:

1. The owner of a block is a worker that runs its unit; it owns at most one block (the largest of those that the same
   workers run) more than any other of those workers.
2. One follower is another worker that runs the unit, if there is one; further ones do not run it, while there are any.
3. Of the followers of one owner none has more than its share, so that a lost owner's blocks are everywhere.

Deliberately absent: when and from whom copies are made, and hosts (all workers are on one).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from elaswave.state.placement import Block, FollowerChooser, Placement, holders_of_layers
from elaswave.types import Layout


def target_placement(
    layout: Layout,
    blocks: Sequence[Block],
    placement: Placement,
    *,
    num_followers: int,
    excluded: Collection[int] = (),
) -> Placement:
    """The placement to move to under a layout: balanced as by `place_blocks`, with few copies that are not there yet.

    An owner stays if it runs the unit and is not above the others. Otherwise a holder that runs the unit is promoted
    where balance allows it, and the former owner follows where the rules allow it.

    Args:
        layout: who runs which layer; only the workers of its stages hold anything.
        blocks: of the whole model, as `make_blocks` returns them.
        placement: who holds them now, also workers that are in no stage.
        num_followers: copies beside the owner; clamped to the number of workers that may hold any, minus one.
        excluded: workers that shall hold nothing, though they may be in a stage.
    Returns:
        A placement with one entry per block. Followers that stay keep their order, new ones come after them.
    Raises:
        ValueError: num_followers < 0, a placement of other blocks, a block of a unit that the layout lacks, or that
            only excluded workers run.
    """
    if num_followers < 0:
        raise ValueError(f"num_followers is {num_followers}: it cannot be negative (0 means no copies)")
    if not len(placement.owner) == len(placement.followers) == len(blocks):
        raise ValueError(
            f"the placement has {len(placement.owner)} owners and {len(placement.followers)} entries of followers for "
            f"{len(blocks)} blocks: take both from the same model"
        )
    out = frozenset(excluded)
    workers = tuple(worker for worker in layout.active if worker not in out)
    groups = _groups(layout, blocks, workers, min(num_followers, len(workers) - 1))
    owners = _deal_owners(groups, placement)
    return Placement(tuple(owners), _choose_followers(groups, blocks, placement, owners, workers))


class _Group:
    """The blocks that the same workers run.

    Args:
        members: those workers, ascending.
        num_workers: that may hold anything.
        num_followers: of each block.
    """

    def __init__(self, members: tuple[int, ...], num_workers: int, num_followers: int) -> None:
        self.members = members
        self.inside = frozenset(members)
        self.blocks: list[Block] = []
        self.largest = 0
        self.num_outside = num_workers - len(members)
        self.followers_outside = max(0, min(self.num_outside, num_followers - (len(members) > 1)))
        self.followers_inside = num_followers - self.followers_outside

    def shares(self, num_blocks: int) -> tuple[int, int]:
        """How many of an owner's blocks one worker follows at most, inside and outside of the members.

        The smallest number with which each block finds its followers, in whatever order they are chosen: those that
        follow a block already are left out, and the others cannot all have so many.
        """
        inside, outside = self.followers_inside, self.followers_outside
        return (
            -(-num_blocks * inside // (len(self.members) - inside)) if inside else 0,
            -(-num_blocks * outside // (self.num_outside - outside + 1)) if outside else 0,
        )


def _groups(layout: Layout, blocks: Sequence[Block], workers: Sequence[int], num_followers: int) -> list[_Group]:
    """The blocks by the workers that run them, in the order of their first blocks."""
    members_of_unit = holders_of_layers(layout)
    allowed = frozenset(workers)
    groups: dict[tuple[int, ...], _Group] = {}
    of_unit: dict[int, _Group] = {}
    for block in blocks:
        group = of_unit.get(block.layer)
        if group is None:
            if not 0 <= block.layer < len(members_of_unit):
                raise ValueError(
                    f"block {block.id} is of layer {block.layer}, but the layout has {len(members_of_unit)} layers: "
                    "make layout and blocks from the same model"
                )
            members = tuple(worker for worker in members_of_unit[block.layer] if worker in allowed)
            if not members:
                those = ", ".join(map(str, members_of_unit[block.layer]))
                raise ValueError(
                    f"all workers that run layer {block.layer} are excluded ({those}): plan a layout without them first"
                )
            if members not in groups:
                groups[members] = _Group(members, len(workers), num_followers)
            group = of_unit[block.layer] = groups[members]
        group.blocks.append(block)
        group.largest = max(group.largest, block.num_elements)
    return list(groups.values())


def _deal_owners(groups: Sequence[_Group], placement: Placement) -> list[int]:
    """The owner of each block by rule 1. A block that is held by none of the right workers goes to the least loaded."""
    owners = list(placement.owner)
    load = {worker: 0 for group in groups for worker in group.members}
    for group in groups:
        for block in group.blocks:
            if owners[block.id] in group.inside:
                load[owners[block.id]] += block.num_elements
    for group in groups:
        for block in group.blocks:
            if owners[block.id] not in group.inside:
                holders = [worker for worker in placement.followers[block.id] if worker in group.inside]
                owner = min(sorted(holders) or group.members, key=load.__getitem__)  # the lowest id of several
                owners[block.id] = owner
                load[owner] += block.num_elements
    # Workers may run blocks of several groups (of a shared layer): levelling one group can unbalance another. Each
    # move makes the loads more equal, so this ends.
    while any(_level(group, placement, owners, load) for group in groups):
        pass
    return owners


def _level(group: _Group, placement: Placement, owners: list[int], load: dict[int, int]) -> bool:
    """Moves blocks of a group from the most to the least loaded of its workers until they differ by one block at most.

    Returns:
        Whether any block was moved.
    """
    loads = [load[worker] for worker in group.members]
    if max(loads) - min(loads) <= group.largest:
        return False
    surplus = _Surplus(group, placement, owners)
    low = [(load[worker], worker) for worker in group.members]
    high = [(-load[worker], worker) for worker in group.members]
    heapify(low)
    heapify(high)
    anything = False
    while high:
        while low[0][0] != load[low[0][1]]:
            heappop(low)
        most, giver = high[0]
        if -most != load[giver] or not surplus.owns_any(giver):
            heappop(high)
            continue
        taker = low[0][1]
        if load[giver] - load[taker] <= group.largest:
            break
        block = surplus.move(giver, taker)
        load[giver] -= block.num_elements
        load[taker] += block.num_elements
        for worker in (giver, taker):
            heappush(low, (load[worker], worker))
            heappush(high, (-load[worker], worker))
        anything = True
    return anything


class _Surplus:
    """Which blocks of a group each of its workers can give away, cheapest last.

    Blocks without a new copy come first: those that the taker holds, then those that lack a copy inside anyway; of
    those the largest, spread over all that the worker owns, so that their layers' copies have different sources.
    """

    def __init__(self, group: _Group, placement: Placement, owners: list[int]) -> None:
        self._group, self._placement, self._owners = group, placement, owners
        self._owned: dict[int, list[tuple[bool, int, int, Block]]] = defaultdict(list)
        self._held: dict[tuple[int, int], list[Block]] = defaultdict(list)
        position: Counter[int] = Counter()
        for block in group.blocks:
            owner = owners[block.id]
            holders = [worker for worker in placement.holders(block.id) if worker in group.inside]
            lacks = len(holders) <= group.followers_inside
            self._owned[owner].append((lacks, block.num_elements, -_reversed_bits(position[owner]), block))
            position[owner] += 1
        for entries in self._owned.values():
            entries.sort()
            for *_, block in entries:
                self._note_holders(block)

    def _note_holders(self, block: Block) -> None:
        owner = self._owners[block.id]
        for worker in self._placement.holders(block.id):
            if worker != owner and worker in self._group.inside:
                self._held[owner, worker].append(block)

    def owns_any(self, worker: int) -> bool:
        """Whether a worker owns a block of the group; drops the entries of those that it no longer owns."""
        entries = self._owned[worker]
        while entries and self._owners[entries[-1][-1].id] != worker:
            entries.pop()
        return bool(entries)

    def move(self, giver: int, taker: int) -> Block:
        """Makes the taker the owner of one of the giver's blocks."""
        held = self._held[giver, taker]
        while held and self._owners[held[-1].id] != giver:
            held.pop()
        block = held.pop() if held else self._owned[giver].pop()[-1]
        self._owners[block.id] = taker
        # To be given away again only where workers of several groups have to be levelled.
        self._owned[taker].append((False, block.num_elements, 0, block))
        self._note_holders(block)
        return block


def _reversed_bits(number: int) -> int:
    """Any first few of 0, 1, 2, ... in the order of this are spread over all of them."""
    return int(f"{number:032b}"[::-1], 2)


def _choose_followers(
    groups: Sequence[_Group],
    blocks: Sequence[Block],
    placement: Placement,
    owners: Sequence[int],
    workers: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """The followers of each block by rules 2 and 3: holders that may stay, then new ones as `place_blocks` has them."""
    allowed = frozenset(workers)
    followers: list[tuple[int, ...]] = [()] * len(blocks)
    group_of: dict[int, _Group] = {}
    shares: dict[tuple[_Group, int], tuple[int, int]] = {}
    followed: dict[tuple[_Group, int], Counter[int]] = {}
    for group in groups:
        for owner, num_blocks in Counter(owners[block.id] for block in group.blocks).items():
            shares[group, owner] = group.shares(num_blocks)
            followed[group, owner] = Counter()
        options = {}
        for block in group.blocks:
            group_of[block.id] = group
            holders = (*placement.followers[block.id], placement.owner[block.id])
            options[block.id] = [worker for worker in holders if worker in allowed and worker != owners[block.id]]
        for index in sorted(options, key=lambda index: len(options[index])):  # who has a choice, chooses last
            key = (group, owners[index])
            followers[index] = _that_stay(group, options[index], followed[key], shares[key])
    chooser = FollowerChooser(workers, None)
    for block, owner, kept in zip(blocks, owners, followers):
        chooser.count((owner, *kept), block.num_elements)
    num_groups = Counter(owner for _, owner in shares)
    for block, owner in zip(blocks, owners):
        group = group_of[block.id]
        chosen = followers[block.id]
        for _ in range(group.followers_inside + group.followers_outside - len(chosen)):
            counts = followed[group, owner]
            # The chooser takes whom fewest of the owner's blocks have as follower: only where these are of several
            # groups may that be one that has its share of this group.
            full = _full(group, counts, shares[group, owner]) if num_groups[owner] > 1 else ()
            follower = chooser.choose(group.members, owner, chosen, block.num_elements, full)
            assert follower is not None
            counts[follower] += 1
            chosen += (follower,)
        followers[block.id] = chosen
    return tuple(followers)


def _full(group: _Group, followed: Counter[int], shares: tuple[int, int]) -> frozenset[int]:
    """Who follows as many of an owner's blocks of a group as it may."""
    return frozenset(worker for worker, count in followed.items() if count >= shares[worker not in group.inside])


def _that_stay(
    group: _Group, options: Sequence[int], followed: Counter[int], shares: tuple[int, int]
) -> tuple[int, ...]:
    """Which holders of a block remain its followers, and takes note of them.

    Args:
        group: of the block.
        options: those that hold it beside its owner, most welcome first.
        followed: how many of the owner's blocks of the group each worker follows.
        shares: how many it may follow, inside and outside of the group's members.
    """
    room = [group.followers_inside, group.followers_outside]
    staying = set()
    for worker in sorted(options, key=lambda worker: followed[worker]):
        outside = worker not in group.inside
        if room[outside] and followed[worker] < shares[outside]:
            room[outside] -= 1
            followed[worker] += 1
            staying.add(worker)
    return tuple(worker for worker in options if worker in staying)
