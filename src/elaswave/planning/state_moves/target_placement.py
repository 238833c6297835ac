"""Where the blocks should be under a layout, reached from where they are with few copies. Pure.

`place_blocks` deals all blocks anew. A running job has them somewhere already: here whoever holds a block keeps it,
unless balance or the rules of `place_blocks` want it elsewhere. Three rules say when they do, and a placement that
keeps all of them is its own target:

1. The owner of a block is a worker that runs its unit; it owns at most one block (the largest of those that the same
   workers run) more than any other of those workers.
2. One follower is in another domain than the owner, if there is one, and runs the unit, if it can; further ones are in
   domains without a copy and run the unit, while there are any (`elaswave.blocks.domains`). Where all of a stage shall
   follow (`elaswave.blocks.placement.WantedFollowers`), those do that hold the block already, and one elsewhere: the
   others get their copies once the change is in force.
3. One follower is a replica peer of the owner (`elaswave.blocks.replica_peers`), and its replica peers share its blocks
   evenly. Each further one is the same worker for all blocks of an owner that have the same followers so far.

Who is whose replica peer follows from where the blocks are, so that few must move. How many replica peers each worker
should have, the *scatter width*, is `smallest_scatter_width`. When a worker dies, each of its s replica peers takes
over 1/s of what it owned: of the sums that it received, the parameters that it sent, the updates that it made; and
about 1/s of the copies that it held is made anew on each. The smallest s for which that is hardly felt is the best: the
share of pairs of workers whose loss at one instant loses state grows as s. For losses one after the other s does not
matter: s workers are then fatal, but for 1/s of the time, since s of them make the missing copies.

Deliberately absent: when and from whom copies are made.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from elaswave.blocks.domains import domains_of, realms_of
from elaswave.blocks.placement import (
    Block,
    FollowerChooser,
    Placement,
    Wanted,
    WantedFollowers,
    holders_of_layers,
    replica_peers_under,
)
from elaswave.planning.costs.layers import Costs, MemoryModel
from elaswave.types import Layout, Stage

DEFAULT_SCATTER_WIDTH = 2
"""Where nothing is known of what a step takes: the blocks of a worker lie with its two neighbours in a ring."""
LOAD_MAX = 0.02
"""Of a step: so much longer it may become by what one replica peer takes over."""


def smallest_scatter_width(
    costs: Costs,
    stages: Sequence[Stage],
    *,
    followers: int,
    memory_bytes: float,
    step_s: float | None = None,
) -> int:
    """Finds the smallest number of replica peers whose share of a lost worker's load fits.

    Args:
        costs: of the layers, and of what a step takes beside its actions.
        stages: of the job.
        followers: live copies of every block beside its owner's.
        memory_bytes: of a worker.
        step_s: seconds of a step; None where it, or what it takes beside its actions, is not known: then
            `DEFAULT_SCATTER_WIDTH` or more.
    Returns:
        At least 1, and at most the width of the widest stage - 1, or `DEFAULT_SCATTER_WIDTH`.
    """
    most = max(DEFAULT_SCATTER_WIDTH, max(stage.width for stage in stages) - 1)
    if step_s is None:
        width = DEFAULT_SCATTER_WIDTH
    else:
        # All of it is taken to follow from what a worker owns: too much rather than too little.
        width = next((s for s in range(1, most) if costs.overhead_s(stages) / s <= LOAD_MAX * step_s), most)
    memory = MemoryModel.of_stages(costs, stages, followers)
    for stage in stages:
        parts = memory.parts(stage.start, stage.stop, 1)  # with fewer in flight a worker waits, but runs
        while width < most and parts.total + parts.state / width > memory_bytes:
            width += 1
    return width


_TRIES_MAX = 32
"""Placements that are tried for one that stays; two or three are usual."""


def target_placement(
    layout: Layout,
    blocks: Sequence[Block],
    placement: Placement,
    *,
    scatter_width: int,
    excluded: Collection[int] = (),
) -> Placement:
    """Finds the placement to move to under a layout: balanced as by `place_blocks`, with few copies that are not there
    yet.

    An owner stays if it runs the unit and is not above the others. Otherwise a holder that runs the unit is promoted
    where balance allows it, and the former owner follows where the rules allow it.

    Args:
        layout: who runs which layer; only the workers of its stages hold anything.
        blocks: of the whole model, as `make_blocks` returns them.
        placement: who holds them now, also workers that are in no stage.
        scatter_width: over how many replica peers the first followers of an owner's blocks are spread.
        excluded: workers that shall hold nothing, though they may be in a stage.
    Returns:
        A placement with one entry per block. Followers that stay keep their order, new ones come after them.
    Raises:
        ValueError: a placement of other blocks, a block of a unit that the layout lacks, or that
            only excluded workers run.
    """
    if not len(placement.owner) == len(placement.followers) == len(blocks):
        raise ValueError(
            f"the placement has {len(placement.owner)} owners and {len(placement.followers)} entries of followers for "
            f"{len(blocks)} blocks: take both from the same model"
        )
    found = [_nearest(layout, blocks, placement, scatter_width, excluded)]
    # Without followers there are no replica peers, hence nothing that a placement does not show.
    while any(stage.num_followers for stage in layout.stages) and len(found) < _TRIES_MAX:
        after = _nearest(layout, blocks, found[-1], scatter_width, excluded)
        if after in found:
            cycle = found[found.index(after) :]
            # Wherever in the cycle a search begins, it ends at the same one: that one is its own target.
            return min(cycle, key=lambda each: (each.owner, each.followers))
        found.append(after)
    return found[-1]


def _nearest(
    layout: Layout,
    blocks: Sequence[Block],
    placement: Placement,
    scatter_width: int,
    excluded: Collection[int],
) -> Placement:
    """Finds a placement that keeps the rules. Its arguments are as those of `target_placement`.

    What it returns does not show all that it was chosen by: replica peers that follow nothing, and which of several
    followers is the replica peer. So it may want another placement than the one that it has returned before.
    """
    out = frozenset(excluded)
    workers = tuple(worker for worker in layout.active if worker not in out)
    known = frozenset(workers)
    domains = domains_of(layout, out)
    wanted = WantedFollowers(layout, out, domains)
    groups = _groups(layout, blocks, workers, wanted)
    owners = _deal_owners(groups, placement)
    most = max((group.num_followers for group in groups), default=0)
    if most == 0:
        return Placement.of(tuple(owners), ((),) * len(blocks))
    options = [
        tuple(worker for worker in (*followers, former) if worker in known and worker != owner)
        for followers, former, owner in zip(placement.followers, placement.owner, owners, strict=True)
    ]
    num_owned = Counter((group, owners[block.id]) for group in groups for block in group.blocks)
    replica_peers = replica_peers_under(
        layout,
        scatter_width,
        excluded=out,
        copies=zip(owners, options, strict=True),
        # A replica peer that follows nothing is forgotten: to break pairs then would go on and on.
        firm=any(num_owned[group, worker] < scatter_width for group in groups for worker in group.members),
    )
    chooser = FollowerChooser(workers, replica_peers, scatter_width, domains, realms=realms_of(layout))
    targets = [
        wanted.before_refill(block.layer, owner, placement.holders(block.id))
        for block, owner in zip(blocks, owners, strict=True)
    ]
    followers = _Followers(chooser, owners, options, targets)
    # What owners hold is noted before any follower is chosen, since those go to whoever holds least.
    for group in groups:
        followers.note_owners(group)
    # In all groups first what may stay, then what is new: new ones even out what those leave uneven.
    for num_chosen in range(most):
        for group in groups:
            followers.keep(group, num_chosen)
        for group in groups:
            followers.complete(group, num_chosen)
    return Placement.of(tuple(owners), followers.in_order())


class _Group:
    """The blocks that the same workers run.

    Args:
        members: those workers, ascending.
        num_followers: of each block.
    """

    def __init__(self, members: tuple[int, ...], num_followers: int) -> None:
        self.members = members
        self.num_followers = num_followers
        self.inside = frozenset(members)
        self.blocks: list[Block] = []
        self.largest = 0
        # Rule 2: followers are inside as far as the unit has other workers.
        self.followers_inside = min(num_followers, len(members) - 1)


def _groups(layout: Layout, blocks: Sequence[Block], workers: Sequence[int], wanted: WantedFollowers) -> list[_Group]:
    """Groups the blocks by the workers that run them, in the order of their first blocks."""
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
                groups[members] = _Group(members, max(wanted.of(block.layer, worker).number for worker in members))
            group = of_unit[block.layer] = groups[members]
        group.blocks.append(block)
        group.largest = max(group.largest, block.num_elements)
    return list(groups.values())


def _deal_owners(groups: Sequence[_Group], placement: Placement) -> list[int]:
    """Chooses the owner of each block by rule 1. A block that is held by none of the right workers goes to the least
    loaded."""
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
        # Entries whose load has changed since are not taken out of a heap, but passed over when they come up.
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
            # The reversed bits of an owner's positions all differ, so blocks, which have no order, are never compared.
            entries.sort()
            for *_, block in entries:
                self._note_holders(block)

    def _note_holders(self, block: Block) -> None:
        owner = self._owners[block.id]
        for worker in self._placement.holders(block.id):
            if worker != owner and worker in self._group.inside:
                self._held[owner, worker].append(block)

    def owns_any(self, worker: int) -> bool:
        """Tells whether a worker owns a block of the group; drops the entries of those that it no longer owns."""
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


class _Followers:
    """The followers of each block by rules 2 and 3, one kind after the other: holders that may stay, then new ones.

    Args:
        chooser: has counted nothing yet.
        owners: of each block.
        options: the workers that hold each block already, most welcome first.
        wanted: what each block shall have.
    """

    def __init__(
        self,
        chooser: FollowerChooser,
        owners: Sequence[int],
        options: Sequence[tuple[int, ...]],
        wanted: Sequence[Wanted],
    ) -> None:
        self._chooser, self._owners, self._options, self._wanted = chooser, owners, options, wanted
        self._chosen = [each.whole for each in wanted]
        self._followed: dict[tuple[_Group, int], Counter[int]] = defaultdict(Counter)

    def note_owners(self, group: _Group) -> None:
        """Takes note of what the owners hold."""
        for block in group.blocks:
            self._chooser.count(group.members, (self._owners[block.id],), block.num_elements)

    def in_order(self) -> tuple[tuple[int, ...], ...]:
        """Lists the followers of each block: those that stay in their order, then the others."""
        return tuple(
            (
                *(worker for worker in options if worker in chosen),
                *(worker for worker in chosen if worker not in options),
            )
            for options, chosen in zip(self._options, self._chosen, strict=True)
        )

    def keep(self, group: _Group, num_chosen: int) -> None:
        """Gives the blocks of a group one more follower where one that fits holds them.

        Args:
            group: of blocks.
            num_chosen: followers that each of its blocks has by now.
        """
        lacking = self._lacking(group, num_chosen)
        further = [block for block in lacking if not self._takes_replica_peer(block)]
        self._keep_replica_peers(group, [block for block in lacking if self._takes_replica_peer(block)])
        self._keep_further(group, further)

    def _takes_replica_peer(self, block: Block) -> bool:
        """Tells whether a block's next follower is to be a replica peer of its owner: the first one that is chosen,
        unless there is one among those of the whole stage."""
        chosen, whole = self._chosen[block.id], self._wanted[block.id].whole
        if chosen and whole:
            return chosen == whole and self._chooser.lacks_replica_peer(self._owners[block.id], chosen)
        return not chosen

    def _lacking(self, group: _Group, num_chosen: int) -> list[Block]:
        """Lists the blocks of a group that have no more than so many followers, and shall have more."""
        return [
            block for block in group.blocks if len(self._chosen[block.id]) <= num_chosen < self._wanted[block.id].number
        ]

    def _keep_replica_peers(self, group: _Group, blocks: Sequence[Block]) -> None:
        of_owner: dict[tuple[int, tuple[int, ...]], list[tuple[list[int], Block]]] = defaultdict(list)
        for block in blocks:
            owner, chosen = self._owners[block.id], self._chosen[block.id]
            fitting = self._chooser.candidates(group.members, owner, chosen)
            if not fitting:  # it is alone at its site, which copies do not leave
                continue
            of_owner[owner, chosen].append(([worker for worker in self._options[block.id] if worker in fitting], block))
        for (owner, chosen), entries in of_owner.items():
            for options, block in sorted(entries, key=lambda entry: len(entry[0])):  # who has a choice, chooses last
                full = self._full(group, owner, chosen, len(entries))
                staying = next((worker for worker in options if worker not in full), None)
                if staying is not None:
                    self._take(group, block, staying)

    def _full(self, group: _Group, owner: int, chosen: tuple[int, ...], num_blocks: int) -> frozenset[int]:
        """Finds the replica peers that follow their share of an owner's blocks of a group."""
        share = -(-num_blocks // len(self._chooser.candidates(group.members, owner, chosen)))
        return frozenset(worker for worker, count in self._followed[group, owner].items() if count >= share)

    def _keep_further(self, group: _Group, blocks: Sequence[Block]) -> None:
        alike: dict[tuple[int, tuple[int, ...]], list[Block]] = defaultdict(list)
        for block in blocks:
            alike[self._owners[block.id], tuple(sorted(self._chosen[block.id]))].append(block)
        for (owner, chosen), those in alike.items():
            fitting = self._chooser.candidates(group.members, owner, chosen)
            votes = Counter(worker for block in those for worker in self._options[block.id] if worker in fitting)
            fixed = self._chooser.fixed(group.members, owner, chosen)
            # Rule 3: one worker for all of them, so that few sets of workers hold a block together.
            if fixed in fitting or votes:
                staying = fixed if fixed in fitting else votes.most_common(1)[0][0]  # of equals that of the first block
                self._chooser.fix(group.members, owner, chosen, staying)
                for block in those:
                    if staying in self._options[block.id]:
                        self._take(group, block, staying)

    def complete(self, group: _Group, num_chosen: int) -> None:
        """Chooses a new follower for each block of a group that has no more than `num_chosen`."""
        num_blocks = Counter(self._owners[block.id] for block in group.blocks)
        for block in self._lacking(group, num_chosen):
            chosen, owner = self._chosen[block.id], self._owners[block.id]
            if not self._chooser.candidates(group.members, owner, chosen):
                continue
            # Only replica peers have to share the blocks of an owner evenly (rule 3).
            is_first = self._takes_replica_peer(block)
            full = self._full(group, owner, chosen, num_blocks[owner]) if is_first else frozenset()
            follower = self._chooser.choose(group.members, owner, chosen, block.num_elements, full)
            assert follower is not None
            self._followed[group, owner][follower] += 1
            self._chosen[block.id] += (follower,)

    def _take(self, group: _Group, block: Block, follower: int) -> None:
        owner = self._owners[block.id]
        self._chooser.note(owner, follower, block.num_elements, num_firsts=self._takes_replica_peer(block))
        self._followed[group, owner][follower] += 1
        self._chosen[block.id] += (follower,)
