"""What remains after a loss: who runs what, who owns what, and where new copies go. Pure.

`survivor_layout` and `promote` lie on the critical path of a recovery. They move as little as possible: a survivor
keeps its stage and its micro-batches, a block stays where a valid copy of it is. `choose_followers` makes up for the
lost copies afterwards, round by round, while training goes on. Every survivor computes all of this by itself, so
everything is a deterministic function of its arguments.

Deliberately absent: rebalancing of layers among stages that all have a survivor. That is a planned change.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heapreplace
from math import lcm

import msgspec

from elaswave.blocks.domains import domains_of, realms_of
from elaswave.blocks.placement import (
    Block,
    FollowerChooser,
    Placement,
    WantedFollowers,
    holders_of_layers,
    replica_peers_under,
)
from elaswave.planning.programs.layout import exact_prefix
from elaswave.planning.search.partition import split_within
from elaswave.types import WHOLE_STAGE, Hop, Layout, Stage


def survivor_layout(layout: Layout, lost: Collection[int], layer_costs: Sequence[float] | None = None) -> Layout:
    """Makes the layout without the lost workers; survivors stay in their stage and keep their micro-batches.

    A stage that has lost all its workers is dissolved: its layers go to the remaining stages beside it, cut so that the
    slowest of those (cost of its layers over its width) is as fast as possible; among equal cuts so that the fewest
    (worker, layer) pairs move, then to the later stage. All other boundaries stay, and stages are numbered anew.
    Micro-batches of lost workers go one by one to the survivor of the stage with the fewest, then the lowest id.
    Idle survivors stay idle; only where no worker of a stage is left do they become one stage of all layers.

    Args:
        layout: any valid layout; neighbouring stages may share layers.
        lost: ids of the workers to take out; those that are not in the layout do not matter.
        layer_costs: of each layer, at least 0, in any unit; None means that all cost the same.
    Returns:
        A valid layout of the same layers and micro-batches.
    Raises:
        ValueError: no worker is left, or the costs are not one finite non-negative number per layer.
    """
    gone = frozenset(lost)
    survivors = [tuple(worker for worker in stage.workers if worker not in gone) for stage in layout.stages]
    idle = tuple(worker for worker in layout.idle if worker not in gone)
    kept = [index for index, workers in enumerate(survivors) if workers]
    if not kept and not idle:
        raise ValueError(
            f"all workers of the layout are lost ({_show(layout.workers)}): no worker can go on; start the job "
            "again from its last durable checkpoint"
        )
    if layer_costs is not None and len(layer_costs) != layout.num_layers:
        raise ValueError(f"{len(layer_costs)} layer costs are given for {layout.num_layers} layers: give one for each")
    if not kept:
        return _of_idle(layout, idle)
    ranges = [(layout.stages[index].start, layout.stages[index].stop) for index in kept]
    workers = [survivors[index] for index in kept]
    if len(kept) < len(survivors):
        # Whole numbers: all survivors must find the same cuts, ties included.
        prefix = exact_prefix([1] * layout.num_layers if layer_costs is None else layer_costs)
        ranges = _close_gaps(ranges, [len(members) for members in workers], prefix)
    stages = tuple(
        msgspec.structs.replace(layout.stages[index], start=start, stop=stop, workers=members)
        for index, (start, stop), members in zip(kept, ranges, workers, strict=True)
    )
    return Layout(
        stages=stages,
        routes=_reroute(layout, kept, stages, gone),
        shared=layout.shared,
        idle=idle,
        # By these the copies that are made anew are kept on different hosts (D2, D5).
        domains=tuple(entry for entry in layout.domains if entry[0] not in gone),
        copies=layout.copies,
    )


def set_idle(layout: Layout, workers: Collection[int]) -> Layout:
    """Makes the layout in which some workers run nothing, as if they were lost, but stay members. Where no other worker
    of a stage is left, the idle ones become one stage of all layers.

    Args:
        layout: any valid layout.
        workers: ids; of those that are idle already none is put to work.
    Raises:
        ValueError: no other worker is left.
    """
    others = survivor_layout(layout, workers)
    idle = set(layout.workers).difference(others.active)
    return msgspec.structs.replace(others, idle=tuple(sorted(idle)), domains=layout.domains)


def put_to_work(layout: Layout, worker: int) -> Layout:
    """Makes the layout in which an idle worker works in the last of the narrowest stages; micro-batches are dealt in
    turn."""
    narrowest = min(reversed(range(len(layout.stages))), key=lambda index: layout.stages[index].width)
    stages = tuple(
        msgspec.structs.replace(stage, workers=tuple(sorted((*stage.workers, worker)))) if index == narrowest else stage
        for index, stage in enumerate(layout.stages)
    )
    routes = tuple(
        tuple(
            Hop(stages[hop.stage].workers[microbatch % stages[hop.stage].width], hop.stage, hop.start, hop.stop)
            if hop.stage == narrowest
            else hop
            for hop in route
        )
        for microbatch, route in enumerate(layout.routes)
    )
    idle = tuple(other for other in layout.idle if other != worker)
    return msgspec.structs.replace(layout, stages=stages, routes=routes, idle=idle)


def _of_idle(layout: Layout, idle: tuple[int, ...]) -> Layout:
    """Makes one stage of all layers, of the workers that were idle; they take the micro-batches in turn."""
    numbers = [stage.num_followers for stage in layout.stages]
    most = WHOLE_STAGE if WHOLE_STAGE in numbers else max(numbers)
    stage = Stage(start=0, stop=layout.num_layers, workers=idle, num_followers=most)
    routes = tuple(
        (Hop(idle[microbatch % len(idle)], 0, 0, layout.num_layers),) for microbatch in range(layout.num_microbatches)
    )
    domains = tuple(entry for entry in layout.domains if entry[0] in idle)
    return Layout(stages=(stage,), routes=routes, shared=layout.shared, domains=domains, copies=layout.copies)


def _close_gaps(
    ranges: Sequence[tuple[int, int]], widths: Sequence[int], prefix: Sequence[int]
) -> list[tuple[int, int]]:
    """Extends the layer ranges of the remaining stages over the layers that no remaining stage holds.

    Args:
        ranges: of the remaining stages before, ascending; neighbours may overlap or leave a gap.
        widths: workers of each of them.
        prefix: cost of the layers before each one, and of all of them.
    """
    bounds = [list(bounds) for bounds in ranges]
    # Layers at either end have one remaining neighbour only: there is nothing to choose.
    bounds[0][0], bounds[-1][1] = 0, len(prefix) - 1
    first = 0
    while first < len(bounds):
        last = first  # of a run of stages with a gap between each two: their cuts depend on each other
        while last + 1 < len(bounds) and bounds[last][1] < bounds[last + 1][0]:
            last += 1
        if first < last:
            run = slice(first, last + 1)
            for index, cut in enumerate(_best_cuts(bounds[run], widths[run], prefix), start=first):
                bounds[index][1] = bounds[index + 1][0] = cut
        first = last + 1
    return [(start, stop) for start, stop in bounds]


def _best_cuts(bounds: Sequence[Sequence[int]], widths: Sequence[int], prefix: Sequence[int]) -> tuple[int, ...]:
    """Finds where to cut each gap between stages: smallest slowest stage, then fewest (worker, layer) pairs moved, then
    earliest."""
    # Whole numbers instead of quotients: ties are ties on every survivor.
    common = lcm(*widths)
    gaps = [range(before[1], after[0] + 1) for before, after in zip(bounds, bounds[1:])]
    found = split_within(
        [(bounds[0][0],), *gaps],
        bounds[-1][1],
        lambda stage, start, stop: (prefix[stop] - prefix[start]) * (common // widths[stage]),
        # What a stage has already counts too, but it is the same for all cuts.
        lambda stage, start, stop: widths[stage] * (stop - start),
    )
    return found[1:-1]


def _reroute(
    layout: Layout, kept: Sequence[int], stages: Sequence[Stage], gone: frozenset[int]
) -> tuple[tuple[Hop, ...], ...]:
    """Makes the routes over the remaining stages; a hop keeps its worker where that one is left.

    Args:
        layout: before the loss.
        kept: index that each remaining stage had.
        stages: the remaining stages.
        gone: lost workers.
    """
    # The range of a stage is all that limits where a route may be cut: between two remaining stages it is cut where
    # the old route left the first one, moved into what the two can run.
    limits = [(after.start, before.stop) for before, after in zip(stages, stages[1:])]
    limits.append((layout.num_layers, layout.num_layers))
    pieces: list[list[tuple[int | None, int, int, int]]] = []  # worker, stage, start, stop
    load: Counter[int] = Counter()
    for route in layout.routes:
        piece: list[tuple[int | None, int, int, int]] = []
        following = start = reached = 0
        for index, old_index in enumerate(kept):
            worker = None
            # Passes over hops of stages that are gone; their layers go to the stages beside them.
            while following < len(route) and route[following].stage <= old_index:
                hop = route[following]
                reached = hop.stop
                if hop.stage == old_index and hop.worker not in gone:
                    worker = hop.worker
                following += 1
            lowest, highest = limits[index]
            stop = min(max(reached, lowest), highest)
            if start < stop:
                piece.append((worker, index, start, stop))
                if worker is not None:
                    load[worker] += 1
                start = stop
        pieces.append(piece)

    # Only now, when all that stays has been counted: the rest goes to those that have least in all.
    heaps = [[(load[worker], worker) for worker in stage.workers] for stage in stages]
    for heap in heaps:
        heapify(heap)
    routes = []
    for piece in pieces:
        hops = []
        for worker, index, start, stop in piece:
            if worker is None:
                carried, worker = heaps[index][0]
                heapreplace(heaps[index], (carried + 1, worker))
            hops.append(Hop(worker, index, start, stop))
        routes.append(tuple(hops))
    return tuple(routes)


class Promotion(msgspec.Struct, frozen=True):
    """A placement of what is left, and what was done to get there."""

    placement: Placement
    """Owners with a valid copy, and the other valid copies as followers."""
    promoted: tuple[int, ...]
    """Ids of the blocks whose owner changed, ascending."""
    orphans: tuple[int, ...]
    """Ids of the blocks without any valid copy, ascending. Their owner in the placement is the old one, without a
    valid copy: only a durable checkpoint can bring them back."""


def promote(
    placement: Placement, blocks: Sequence[Block], layout: Layout, valid: Callable[[int, int], bool]
) -> Promotion:
    """Gives every block an owner among those who hold a valid copy; nothing is moved.

    An owner with a valid copy stays. Otherwise a follower with one takes over: preferably a worker of the block's
    stage, then the one that owns the fewest elements so far, then the lowest id. Followers without one are dropped.

    Args:
        placement: before the loss.
        blocks: of the whole model, as `make_blocks` returns them.
        layout: who runs which layer from now on.
        valid: whether (block id, worker) are a live worker and its copy of the block is current.
    """
    members = [frozenset(workers) for workers in holders_of_layers(layout)]
    owned: Counter[int] = Counter()
    owners = list(placement.owner)
    followers = list(placement.followers)
    headless: list[Block] = []
    for block in blocks:
        index = block.id
        copies = followers[index]
        # Most blocks have nothing to drop: their followers are not built anew.
        for follower in copies:
            if not valid(index, follower):
                followers[index] = tuple(other for other in copies if other != follower and valid(index, other))
                break
        owner = owners[index]
        if valid(index, owner):
            owned[owner] += block.stop - block.start
        else:
            headless.append(block)

    promoted, orphans = [], []
    # After all owners that stay: whom a block gets depends on what each one owns in all.
    for block in headless:
        index = block.id
        copies = followers[index]
        if not copies:
            orphans.append(index)
            continue
        stage = members[block.layer]
        owner = min(copies, key=lambda worker: (worker not in stage, owned[worker], worker))
        owned[owner] += block.stop - block.start
        owners[index] = owner
        followers[index] = tuple(worker for worker in copies if worker != owner)
        promoted.append(index)
    return Promotion(Placement.of(tuple(owners), tuple(followers)), tuple(sorted(promoted)), tuple(sorted(orphans)))


def without_surplus(placement: Placement, blocks: Sequence[Block], layout: Layout) -> Placement:
    """Drops followers where a layout asks for fewer than there are, as when memory has become short; a decision that
    does not count on them has their memory given back.

    Args:
        placement: of live copies.
        blocks: of the whole model.
        layout: who runs which layer, and where, and how many followers each stage asks for.
    Returns:
        The placement with the followers that stay in their order: those that run the unit before others, of them those
        in another domain than the owner.
    """
    wanted, members = WantedFollowers(layout, holders=layout.workers), holders_of_layers(layout)
    domains = domains_of(layout, holders=layout.idle)
    followers = list(placement.followers)
    for block in blocks:
        owner, copies = placement.owner[block.id], followers[block.id]
        whole, number = wanted.of(block.layer, owner)
        if len(copies) > number and not whole:
            inside = [worker for worker in copies if worker in members[block.layer]]
            ranked = [*inside, *(worker for worker in copies if worker not in inside)]
            if domains:
                here = [worker for worker in ranked if domains[0][worker] == domains[0][owner]]
                ranked = [*(worker for worker in ranked if worker not in here), *here]
            kept = ranked[:number]
            followers[block.id] = tuple(worker for worker in copies if worker in kept)
    return Placement.of(placement.owner, tuple(followers))


def choose_followers(
    placement: Placement,
    blocks: Sequence[Block],
    layout: Layout,
    *,
    max_elements: int,
    scatter_width: int,
    urgent: bool = False,
) -> Placement:
    """Chooses the next placement on the way back to full redundancy: one more follower for some of the blocks that lack
    one.

    A block lacks one also if it has as many as are wanted, but all copies are in one domain and there are others, as
    when a move to another placement ends half-way. Blocks with the fewest followers come first. Whom a block gets is
    decided as in `place_blocks`, among the replica peers that its owner has by now; who has lost some finds others that
    have. It is never an idle worker, though an idle one may hold blocks, which count. A block waits for a later round
    when its owner, or every worker of the best kind, has no room left in this one. Some block always gets a follower if
    one is lacking, however large it is, so repeated rounds come to an end.

    Args:
        placement: owners and followers, all of them workers of the layout (as after `promote`).
        blocks: of the whole model, as `make_blocks` returns them.
        layout: who runs which layer, and where, and how many followers each stage asks for. Where copies stay inside a
            site, those of other sites do not count.
        max_elements: the most that one owner sends, and that one worker receives, in this round.
        scatter_width: over how many replica peers the first followers of an owner's blocks are spread.
        urgent: where all of a stage shall follow, leave out the blocks that any worker follows.
    Returns:
        The placement with new followers appended; an equal one if nothing is lacking.
    Raises:
        ValueError: a holder that is not in the layout.
    """
    workers, active = layout.workers, frozenset(layout.active)
    known = set(workers)
    alike = _alike(placement, blocks)
    # Idle workers that hold copies count here, as after a move that ended half-way.
    domains = domains_of(layout, holders=set(layout.idle) & {each for _, held in alike for each in held})
    realms = realms_of(layout)
    active_in: dict[str | None, set[int]] = defaultdict(set)
    for worker in active:
        active_in[realms.get(worker)].add(worker)
    several = {realm for realm, those in active_in.items() if domains and len({domains[0][each] for each in those}) > 1}
    wanted_followers = WantedFollowers(layout, domains=domains, holders=workers)  # idle ones that hold a copy count
    lacking = []
    for (unit, holders), those in alike.items():
        if not known.issuperset(holders):
            raise ValueError(
                f"block {those[0].id} is held by workers {_show(holders)}, but the layout has only {_show(workers)}: "
                "promote the copies that are left before choosing new ones"
            )
        realm = realms.get(holders[0])
        near = [worker for worker in holders if realms.get(worker) == realm] if realms else holders
        whole, wanted = wanted_followers.of(unit, holders[0])
        lacks_some = len(near) <= 1 if urgent else len(near) <= wanted or not set(whole).issubset(holders)
        if lacks_some if whole else len(near) <= wanted:
            # There may be nobody left who could hold one more.
            lacking += [] if active_in[realm].issubset(holders) else those
        # D5: enough copies, but one host has all of them.
        elif wanted and realm in several and len({domains[0][worker] for worker in near}) == 1:
            lacking += those
    if not lacking:
        return placement

    members_of_layer = holders_of_layers(layout)
    copies = zip(placement.owner, placement.followers, strict=True)
    # Firm: copies only come here and none goes, so a pair that was broken would go on sharing blocks.
    replica_peers = replica_peers_under(layout, scatter_width, copies=copies, firm=True)
    chooser = FollowerChooser(workers, replica_peers, scatter_width, domains, layout.idle, realms)
    for (layer, holders), those in alike.items():
        chooser.count(members_of_layer[layer], holders, sum(block.num_elements for block in those), len(those))
    followers = list(placement.followers)
    sent, received = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
    anything = False
    for block in sorted(lacking, key=lambda block: (len(followers[block.id]), block.id)):
        owner, size = placement.owner[block.id], block.num_elements
        # The first block passes whatever its size, else one that is larger than the limit would wait for ever.
        if anything and sent[owner] + size > max_elements:
            continue
        full = {worker for worker in workers if received[worker] + size > max_elements} if anything else set()
        whole, chosen = wanted_followers.of(block.layer, owner).whole, followers[block.id]
        missing = wanted_followers.by_domain(owner, chosen, [worker for worker in whole if worker not in chosen])
        if missing:
            follower = next((worker for worker in missing if worker not in full), None)
        else:
            follower = chooser.choose(members_of_layer[block.layer], owner, followers[block.id], size, full)
        if follower is None:
            continue
        anything = True
        sent[owner] += size
        received[follower] += size
        followers[block.id] += (follower,)
    return Placement.of(placement.owner, tuple(followers))


def _alike(placement: Placement, blocks: Sequence[Block]) -> dict[tuple[int, tuple[int, ...]], list[Block]]:
    """Groups the blocks by layer and holders, in the order of the first ones: there are many, but few kinds of them."""
    owners, followers = placement.owner, placement.followers
    alike: dict[tuple[int, int, tuple[int, ...]], list[Block]] = {}
    for block in blocks:
        alike.setdefault((block.layer, owners[block.id], followers[block.id]), []).append(block)
    return {(layer, (owner, *others)): those for (layer, owner, others), those in alike.items()}


def _show(workers: Collection[int]) -> str:
    return ", ".join(map(str, workers))
