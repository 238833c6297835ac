"""How blocks come to new holders while training runs: pure functions that every worker computes with the same result.

Missing followers come first. Then, towards the placement that a planned change leads to, those that will hold a block
follow it: each gets a base copy, and from the same step on the gradients. Once all of them hold what they will, and the
change is in force, the copies that it does not need are dropped (docs/protocol.md, rules M).
"""

import functools
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import NamedTuple

from elaswave.blocks.placement import Block, Placement, Role, roles_of
from elaswave.hashing import key64
from elaswave.planning.search.recovery import choose_followers
from elaswave.types import Layout

SLOWDOWN_MAX = 1.05
"""Copies travel at a rate at which a step takes at most so much longer than one without them."""
NUM_USUAL, NUM_JUDGED = 5, 3
"""The newest votes without and with copies of which the medians are compared: one step that something else has
disturbed decides nothing."""


class CopyBudget(NamedTuple):
    """How much may travel in an attempt towards a planned placement. Follows from the votes since the newest decision
    or change of layout, so all members have the same."""

    elements: int
    """The most that one owner sends, and one worker receives."""
    usual_us: tuple[int, ...] = ()
    """Durations of the newest attempts in which nothing has travelled."""
    copying_us: tuple[int, ...] = ()
    """Of the newest in which copies have, since the budget was last cut."""

    @property
    def hash(self) -> int:
        """62 bits."""
        return _budget_hash(self)

    def after(self, duration_us: int, *, copied: bool, bounds: tuple[int, int]) -> "CopyBudget":
        """The budget after a vote.

        Args:
            duration_us: of the attempt, as the vote says it.
            copied: whether base copies have travelled in it.
            bounds: the least and the most elements.
        """
        if not copied:
            return self._replace(usual_us=(*self.usual_us, duration_us)[-NUM_USUAL:])
        copying = (*self.copying_us, duration_us)[-NUM_JUDGED:]
        if not self.usual_us or len(copying) < NUM_JUDGED:
            return self._replace(copying_us=copying)
        least, most = bounds
        if median_low(copying) > SLOWDOWN_MAX * median_low(self.usual_us):
            # What was measured with more copies says nothing about fewer.
            return self._replace(elements=max(least, self.elements // 2), copying_us=())
        return self._replace(elements=min(most, self.elements * 5 // 4), copying_us=copying)


@functools.lru_cache(maxsize=64)
def _budget_hash(budget: CopyBudget) -> int:
    return key64("budget", budget.elements, len(budget.usual_us), *budget.usual_us, *budget.copying_us) >> 2


@functools.lru_cache(maxsize=4096)
def next_placement(
    blocks: tuple[Block, ...],
    layout: Layout,
    placement: Placement,
    target: Placement | None,
    num_followers: int,
    refill_elements: int,
    move_elements: int,
    scatter_width: int,
) -> Placement:
    """The placement that the next vote brings into force.

    Args:
        blocks: of the model.
        layout, placement: in force.
        target: the placement that an adopted change leads to; None: there is none.
        num_followers: copies wanted beside the owner.
        refill_elements: the most that one owner sends, and one worker receives, to make up for missing followers.
        move_elements: the same towards the target.
        scatter_width: over how many partners the first followers of an owner's blocks are spread.
    Returns:
        An equal placement if there is nothing to copy.
    """
    complete = choose_followers(
        placement,
        blocks,
        layout,
        num_followers=num_followers,
        max_elements=refill_elements,
        scatter_width=scatter_width,
    )
    if complete != placement or target is None:
        return complete
    return towards(placement, target, blocks, move_elements)


def towards(placement: Placement, target: Placement, blocks: Sequence[Block], max_elements: int) -> Placement:
    """A placement with some of the holders that a target has in addition, as followers.

    At least one copy travels if any is missing, however large it is.

    Args:
        placement: in force.
        target: where blocks will be.
        blocks: of the model.
        max_elements: the most that one owner sends, and that one worker receives.
    """
    followers = list(placement.followers)
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for block in blocks:
        index, size = block.id, block.num_elements
        owner, here = placement.owner[index], placement.holders(index)
        for worker in target.holders(index):
            if worker in here:
                continue
            after = sent.get(owner, 0) + size, received.get(worker, 0) + size
            if sent and max(after) > max_elements:
                continue
            sent[owner], received[worker] = after
            followers[index] += (worker,)
    return Placement(placement.owner, tuple(followers))


def num_in_place(placement: Placement, target: Placement) -> tuple[int, int]:
    """How many of the copies that a target asks for are there, and how many it asks for."""
    found = total = 0
    for block in range(len(target.owner)):
        wanted = target.holders(block)
        total += len(wanted)
        found += len(set(wanted).intersection(placement.holders(block)))
    return found, total


def followed_by(placement: Placement, target: Placement) -> Placement:
    """Present roles, with the holders that a target has in addition as followers: the placement once all copies are in
    their places, before the target comes into force.

    Args:
        placement: in force.
        target: where blocks will be.
    """
    followers = tuple(
        (*here, *(worker for worker in target.holders(block) if worker != owner and worker not in here))
        for block, (owner, here) in enumerate(zip(placement.owner, placement.followers, strict=True))
    )
    return Placement(placement.owner, followers)


def held_keys(
    worker: int, target: Placement, blocks: Sequence[Block], versions: Iterable[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """(block, role, version) of what a worker holds of a target, for the second residency sum.

    Args:
        worker: its id.
        target: where blocks will be.
        blocks: of the model.
        versions: (block, version) of its copies.
    """
    roles = _roles_of(worker, target, tuple(blocks))
    return [(block, roles[block], version) for block, version in versions if block in roles]


@functools.lru_cache(maxsize=4096)
def _roles_of(worker: int, placement: Placement, blocks: tuple[Block, ...]) -> dict[int, Role]:
    return roles_of(worker, placement, blocks)


def refilled(
    blocks: tuple[Block, ...],
    layout: Layout,
    placement: Placement,
    num_followers: int,
    max_elements: int,
    scatter_width: int,
) -> Placement:
    """The placement to which the members come by making up for all missing followers, step by step.

    Arguments as of `next_placement`.
    """
    while True:
        after = choose_followers(
            placement,
            blocks,
            layout,
            num_followers=num_followers,
            max_elements=max_elements,
            scatter_width=scatter_width,
        )
        if after == placement:
            return placement
        placement = after
