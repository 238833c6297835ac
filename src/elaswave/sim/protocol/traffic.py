"""Who sends what to whom in a step of the toy job: computed once per layout and placements, as in the real engine."""

from functools import lru_cache
from typing import NamedTuple

from elaswave.planning.programs import compile_programs
from elaswave.planning.recovery import choose_followers
from elaswave.sim.protocol.job import Job, model_of
from elaswave.state.placement import Placement
from elaswave.types import Layout, Program, struct_hash


class HopPlan(NamedTuple):
    """A worker's part of one micro-batch."""

    layers: range
    before: int | None
    """Worker of the hop before; None for the first."""
    after: int | None
    """Worker of the hop after; None for the last."""


class WorkerPlan(NamedTuple):
    """What one worker computes, sends and receives in a step."""

    program: Program
    hops: dict[int, HopPlan]
    """By micro-batch; a worker has at most one hop of each."""
    layers: range
    blocks: tuple[int, ...]
    """Of its layers."""
    owned: tuple[int, ...]
    partials_out: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(layer, owner, blocks)."""
    partials_in: tuple[tuple[int, int, tuple[int, ...]], ...]
    reduced_out: tuple[tuple[int, int, tuple[int, ...]], ...]
    reduced_in: tuple[tuple[int, int, tuple[int, ...]], ...]
    parameters_out: tuple[tuple[int, int, tuple[int, ...]], ...]
    parameters_in: tuple[tuple[int, int, tuple[int, ...]], ...]
    fills_out: tuple[tuple[int, int], ...]
    """(block, new follower)."""
    fills_in: tuple[tuple[int, int], ...]
    """(block, owner)."""
    drops: tuple[int, ...]
    """Blocks that it holds now and no more once the vote has passed."""
    weights: tuple[tuple[int, int], ...]
    """(block, weight) of the copies that take part in the agreement; the weights of equal copies add up to zero."""
    helper: int | None
    lender: int | None
    partners: tuple[int, ...]


class Traffic(NamedTuple):
    """One step under a layout, a placement, and the placement that its vote brings into force."""

    voting: Placement
    workers: dict[int, WorkerPlan]
    layout_hash: int
    """Of the layout and the next placement, as the vote compares it."""
    coverage: int
    """What the coverage sums must come to."""


@lru_cache(maxsize=50_000)
def traffic_of(job: Job, layout: Layout, placement: Placement, step: int) -> Traffic:
    """The traffic of a step; the next placement is chosen here, as every worker does by itself."""
    return traffic_between(job, layout, placement, next_placement(job, layout, placement, step))


@lru_cache(maxsize=50_000)
def swapped_traffic(job: Job, layout: Layout, placement: Placement, step: int) -> Traffic:
    """The same, but a follower is replaced in one vote; for the mutants, because it is wrong."""
    voting = next_placement(job, layout, placement, step)
    if step == job.move_step and len(voting.followers[0]) > len(placement.followers[0]) >= job.num_followers:
        voting = _with_followers(voting, 0, voting.followers[0][1:])
    return traffic_between(job, layout, placement, voting)


def next_placement(job: Job, layout: Layout, placement: Placement, step: int) -> Placement:
    """The placement that the vote of a step brings into force: lacking followers are refilled, one may be replaced.

    A replacement takes two votes: the first adds the new copy, the second drops the old one. So whoever has not
    learned of the first vote still finds the old copy among the survivors.
    """
    if job.move_step and step in (job.move_step, job.move_step + 1) and placement.followers[0]:
        followers = placement.followers[0]
        if step == job.move_step:
            free = [worker for worker in layout.workers if worker not in placement.holders(0)]
            if free and len(followers) == job.num_followers:
                return _with_followers(placement, 0, (*followers, free[0]))
        elif len(followers) > job.num_followers:
            return _with_followers(placement, 0, followers[1:])
    return choose_followers(
        placement,
        model_of(job).blocks,
        layout,
        num_followers=job.num_followers,
        max_elements=job.blocks_per_round,
    )


def common_placement(placement: Placement, other: Placement) -> Placement:
    """The followers that two placements have in common; for a mutant."""
    followers = tuple(
        tuple(worker for worker in ours if worker in theirs)
        for ours, theirs in zip(placement.followers, other.followers, strict=True)
    )
    return Placement(placement.owner, followers)


def _with_followers(placement: Placement, block: int, followers: tuple[int, ...]) -> Placement:
    changed = list(placement.followers)
    changed[block] = followers
    return Placement(placement.owner, tuple(changed))


@lru_cache(maxsize=50_000)
def traffic_between(job: Job, layout: Layout, placement: Placement, voting: Placement) -> Traffic:
    """The traffic of a step under a placement whose vote brings another one into force."""
    model = model_of(job)
    programs = compile_programs(layout, "1f1b")
    plans = {
        worker: _worker_plan(job, layout, placement, voting, worker, programs[worker]) for worker in layout.workers
    }
    coverage = 0
    for layer in range(len(model.blocks_of_layer)):
        for microbatch in range(job.num_microbatches):
            coverage += coverage_key(layer, microbatch)
    layout_hash = hash((struct_hash(layout), struct_hash(voting)))
    return Traffic(voting, plans, layout_hash, coverage)


def coverage_key(layer: int, microbatch: int) -> int:
    """What running a layer for a micro-batch contributes to the coverage sum."""
    return hash((71, layer, microbatch))


def _worker_plan(
    job: Job, layout: Layout, placement: Placement, voting: Placement, worker: int, program: Program
) -> WorkerPlan:
    model = model_of(job)
    stage = layout.stages[layout.stage_of(worker)]
    hops = {}
    for microbatch, route in enumerate(layout.routes):
        for place, hop in enumerate(route):
            if hop.worker == worker:
                before = route[place - 1].worker if place else None
                after = route[place + 1].worker if place + 1 < len(route) else None
                hops[microbatch] = HopPlan(range(hop.start, hop.stop), before, after)
    partials_out: _Flow = {}
    partials_in: _Flow = {}
    reduced_out: _Flow = {}
    reduced_in: _Flow = {}
    parameters_out: _Flow = {}
    parameters_in: _Flow = {}
    fills_out, fills_in, drops, weights, owned = [], [], [], [], []
    for block in model.blocks:
        index, layer = block.id, block.layer
        owner = voting.owner[index]
        members = next(s.workers for s in layout.stages if s.start <= layer < s.stop)
        followers = set(voting.followers[index]) | set(placement.followers[index])
        if worker == owner:
            owned.append(index)
            for peer in members:
                if peer != owner:
                    partials_in.setdefault((layer, peer), []).append(index)
                    if peer not in voting.followers[index]:
                        parameters_out.setdefault((layer, peer), []).append(index)
            for peer in sorted(followers):
                reduced_out.setdefault((layer, peer), []).append(index)
            fills_out += [(index, peer) for peer in voting.followers[index] if peer not in placement.followers[index]]
            weights.append((index, len(followers)))
        else:
            if worker in members:
                partials_out.setdefault((layer, owner), []).append(index)
                if worker not in voting.followers[index]:
                    parameters_in.setdefault((layer, owner), []).append(index)
            if worker in followers:
                reduced_in.setdefault((layer, owner), []).append(index)
                weights.append((index, -1))
                if worker not in placement.followers[index]:
                    fills_in.append((index, owner))
                if worker not in voting.followers[index]:
                    drops.append(index)
    helper, lender, partners = doubling(layout.workers, worker)
    layers = range(stage.start, stage.stop)
    return WorkerPlan(
        program=program,
        hops=hops,
        layers=layers,
        blocks=tuple(block for layer in layers for block in model.blocks_of_layer[layer]),
        owned=tuple(owned),
        partials_out=_frozen(partials_out),
        partials_in=_frozen(partials_in),
        reduced_out=_frozen(reduced_out),
        reduced_in=_frozen(reduced_in),
        parameters_out=_frozen(parameters_out),
        parameters_in=_frozen(parameters_in),
        fills_out=tuple(fills_out),
        fills_in=tuple(fills_in),
        drops=tuple(drops),
        weights=tuple(weights),
        helper=helper,
        lender=lender,
        partners=partners,
    )


_Flow = dict[tuple[int, int], list[int]]
"""(layer, peer) -> blocks."""


def _frozen(flow: _Flow) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    return tuple((layer, peer, tuple(blocks)) for (layer, peer), blocks in flow.items())


def doubling(workers: tuple[int, ...], worker: int) -> tuple[int | None, int | None, tuple[int, ...]]:
    """Who exchanges with whom in the vote's recursive doubling, as in ``transport.group``: helper, lender, partners."""
    rank = workers.index(worker)
    num_active = 1 << (len(workers).bit_length() - 1)
    num_lenders = len(workers) - num_active
    if rank < 2 * num_lenders:
        if rank % 2 == 0:
            return workers[rank + 1], None, ()
        lender, place = workers[rank - 1], rank // 2
    else:
        lender, place = None, rank - num_lenders
    places = [place ^ (1 << turn) for turn in range(num_active.bit_length() - 1)]
    return None, lender, tuple(workers[2 * at + 1 if at < num_lenders else at + num_lenders] for at in places)
