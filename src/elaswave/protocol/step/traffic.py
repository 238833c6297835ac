"""Who sends which blocks of which unit to whom: pure functions of layout and placement, which every worker computes.

A *unit* is a layer, or what layers share (`Layout.shared`); the names of fields say layer, since most units are.
REDUCE: each worker that holds a unit to run it (those of its stage, or of all stages that share it) sends its partial
sums of each block to the block's owner, and the owner sends the mean gradient to the block's followers. GATHER: the
owner sends new parameters to those workers that run the layer and hold no copy of the block. Re-replication: the owner
sends the whole state to a new follower. Delivery: the same as GATHER, for the layers that a decision names. VOTE:
recursive doubling over all workers.

No numbers here, and nothing about when: that is `protocol.step`.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from elaswave.blocks.placement import Block, Placement, holders_of_layers
from elaswave.hashing import key64
from elaswave.types import Hop, Layout, struct_hash


class Shipment(NamedTuple):
    """One frame: blocks of a layer, ascending, to or from a peer."""

    layer: int
    peer: int
    blocks: tuple[int, ...]


class Traffic(NamedTuple):
    """The block traffic of one worker in a step."""

    owned: Mapping[int, tuple[int, ...]]
    """Unit -> blocks that it owns, in the order in which backward finishes units: layers descending, a shared unit
    after the lowest layer that uses it."""
    partials_out: Mapping[int, tuple[Shipment, ...]]
    """Layer -> frames with its partial sums, one to each owner."""
    partials_in: tuple[Shipment, ...]
    reduced_out: Mapping[int, tuple[Shipment, ...]]
    """Layer -> frames with mean gradients, one to each follower."""
    reduced_in: tuple[Shipment, ...]
    parameters_out: tuple[Shipment, ...]
    parameters_in: tuple[Shipment, ...]
    copies_out: tuple[tuple[int, int], ...]
    """(block, new follower): whole states."""
    copies_in: tuple[tuple[int, int], ...]
    """(block, owner)."""
    changed: frozenset[int]
    """Blocks, of all workers, whose followers the vote changes."""
    read: Mapping[int, int]
    """Block of which its owner and others compute with the parameters, or the owner serves them -> what this worker's
    hash of them counts in the vote: as many times as there are others if it is the owner, -1 if it is one of them."""


_Flow = dict[tuple[int, int], list[int]]
"""(layer, peer) -> blocks."""


@functools.lru_cache(maxsize=4096)
def traffic_of(
    worker: int, blocks: tuple[Block, ...], layout: Layout, placement: Placement, voting: Placement
) -> Traffic:
    """Finds the traffic of one worker.

    Args:
        worker: its id.
        blocks: of the model.
        layout: who runs what.
        placement: in force.
        voting: the placement that the step's vote brings into force; its new followers get copies.
    """
    members = holders_of_layers(layout)
    owned: dict[int, list[int]] = {}
    partials_out: _Flow = {}
    partials_in: _Flow = {}
    reduced_out: _Flow = {}
    reduced_in: _Flow = {}
    parameters_out: _Flow = {}
    parameters_in: _Flow = {}
    copies_out: list[tuple[int, int]] = []
    copies_in: list[tuple[int, int]] = []
    changed = []
    read: dict[int, int] = {}
    for block in blocks:
        index, layer = block.id, block.layer
        # By the voting placement: a new follower gets the gradient of the step that its base copy travels in (W6).
        owner, followers, before = voting.owner[index], voting.followers[index], placement.followers[index]
        new = [follower for follower in followers if follower not in before]
        # Of all blocks, not of this worker's alone: all must say alike whether copies have travelled (M5).
        if before != followers:
            changed.append(index)
        num_others = len(members[layer]) - (owner in members[layer])
        if num_others and (owner == worker or worker in members[layer]):
            read[index] = num_others if owner == worker else -1
        if owner == worker:
            owned.setdefault(layer, []).append(index)
            for peer in members[layer]:
                if peer != owner:
                    partials_in.setdefault((layer, peer), []).append(index)
                    # A follower makes the new parameters itself, in APPLY.
                    if peer not in followers:
                        parameters_out.setdefault((layer, peer), []).append(index)
            for peer in followers:
                reduced_out.setdefault((layer, peer), []).append(index)
            copies_out += [(index, peer) for peer in new]
            continue
        if worker in members[layer]:
            partials_out.setdefault((layer, owner), []).append(index)
            if worker not in followers:
                parameters_in.setdefault((layer, owner), []).append(index)
        if worker in followers:
            reduced_in.setdefault((layer, owner), []).append(index)
            if worker in new:
                copies_in.append((index, owner))
    return Traffic(
        owned={unit: tuple(owned[unit]) for unit in sorted(owned, key=lambda unit: _finished_at(unit, layout))},
        partials_out=_by_layer(partials_out),
        partials_in=_shipments(partials_in),
        reduced_out=_by_layer(reduced_out),
        reduced_in=_shipments(reduced_in),
        parameters_out=_shipments(parameters_out),
        parameters_in=_shipments(parameters_in),
        copies_out=tuple(copies_out),
        copies_in=tuple(copies_in),
        changed=frozenset(changed),
        read=read,
    )


def _finished_at(unit: int, layout: Layout) -> tuple[int, int]:
    first = layout.num_layers
    return (-unit if unit < first else -min(layout.shared[unit - first]), unit)


def _shipments(flow: _Flow) -> tuple[Shipment, ...]:
    return tuple(Shipment(layer, peer, tuple(blocks)) for (layer, peer), blocks in flow.items())


def _by_layer(flow: _Flow) -> dict[int, tuple[Shipment, ...]]:
    result: dict[int, tuple[Shipment, ...]] = {}
    for shipment in _shipments(flow):
        result[shipment.layer] = (*result.get(shipment.layer, ()), shipment)
    return result


@functools.lru_cache(maxsize=4096)
def deliveries_of(
    blocks: tuple[Block, ...], placement: Placement, deliver: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, Shipment], ...]:
    """Finds what travels for a decision's deliveries.

    Args:
        blocks: of the model.
        placement: of the decision.
        deliver: (worker, unit) whose parameters are asked for; a worker has those of blocks that it holds.
    Returns:
        (owner, its frame to a worker).
    """
    found = []
    for worker, layer in deliver:
        by_owner: dict[int, list[int]] = {}
        for block in blocks:
            if block.layer == layer and worker not in placement.holders(block.id):
                by_owner.setdefault(placement.owner[block.id], []).append(block.id)
        found += [(owner, Shipment(layer, worker, tuple(ids))) for owner, ids in by_owner.items()]
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def agreement_hash(layout: Layout, placement: Placement) -> int:
    """Hashes what all workers must hold in a vote to 62 bits: the layout, and the placement that it brings into
    force."""
    return key64(struct_hash(layout), struct_hash(placement)) >> 2


@functools.lru_cache(maxsize=4096)
def doubling(workers: tuple[int, ...], worker: int) -> tuple[int | None, int | None, tuple[int, ...]]:
    """Finds who exchanges with whom in an all-reduce by recursive doubling.

    The largest power of two takes part; every worker beyond it lends its value to a neighbour, which helps it out with
    the result.

    Args:
        workers: all that take part, in the order that all of them use.
        worker: one of them.
    Returns:
        The helper of this worker (then it does nothing else), the worker that lends to this one, and the partners of
        this one, in order.
    """
    rank = workers.index(worker)
    num_active = 1 << (len(workers).bit_length() - 1)
    num_lenders = len(workers) - num_active
    # The first workers are pairs: one lends, and the other one takes part for both.
    if rank < 2 * num_lenders:
        if rank % 2 == 0:
            return workers[rank + 1], None, ()
        lender, place = workers[rank - 1], rank // 2
    else:
        lender, place = None, rank - num_lenders
    places = [place ^ (1 << turn) for turn in range(num_active.bit_length() - 1)]
    return None, lender, tuple(workers[2 * at + 1 if at < num_lenders else at + num_lenders] for at in places)


def doubling_partners(workers: tuple[int, ...], worker: int) -> set[int]:
    """Names the workers that a worker needs links to for the all-reduce."""
    helper, lender, partners = doubling(workers, worker)
    return {peer for peer in (helper, lender, *partners) if peer is not None}


class LocalHop(NamedTuple):
    """A worker's hop of one micro-batch, with the hops beside it."""

    layers: range
    stage: int
    before: Hop | None
    """None: it begins here."""
    after: Hop | None
    """None: it ends here."""


@functools.lru_cache(maxsize=4096)
def local_hops_of(worker: int, layout: Layout) -> Mapping[tuple[int, int], LocalHop]:
    """Maps (stage, micro-batch) to what a worker has to do with it."""
    parts = {}
    for microbatch, route in enumerate(layout.routes):
        for place, hop in enumerate(route):
            if hop.worker == worker:
                before = route[place - 1] if place else None
                after = route[place + 1] if place + 1 < len(route) else None
                parts[hop.stage, microbatch] = LocalHop(range(hop.start, hop.stop), hop.stage, before, after)
    return parts


@functools.lru_cache(maxsize=4096)
def units_by_layer(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Lists for each layer the units that its backward adds to: itself, and each shared one as often as it uses it."""
    units = [[layer] for layer in range(layout.num_layers)]
    for unit, users in enumerate(layout.shared, start=layout.num_layers):
        for layer in users:
            units[layer].append(unit)
    return tuple(map(tuple, units))
