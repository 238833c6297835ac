"""How blocks come to new holders while training runs: pure functions that every worker computes with the same result.

Missing followers come first. Then, towards the placement that a planned change leads to, those that will hold a block
follow it: each gets a base copy, and from the same step on the gradients. Once all of them hold what they will, and the
change is in force, the copies that it does not need are dropped (docs/protocol.md, rules M).
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from elaswave.blocks.placement import Block, Placement, ReplicaRole, roles_of
from elaswave.hashing import key64
from elaswave.planning.search.recovery import choose_followers
from elaswave.protocol.messages import LayoutChange
from elaswave.protocol.step.ballot import Verdict, expected_residency, residency_of
from elaswave.protocol.step.engine import Copy, Engine, JobTerms
from elaswave.types import Layout, struct_hash

SLOWDOWN_MAX = 1.05
"""Copies travel at a rate at which a step takes at most so much longer than one without them."""
NUM_USUAL, NUM_JUDGED = 5, 3
"""The newest votes without and with copies of which the medians are compared: one step that something else has
disturbed decides nothing."""


class CopyBudget(NamedTuple):
    """Bounds what may travel in an attempt towards a planned placement. Follows from the votes since the newest
    decision or change of layout, so all members have the same."""

    elements: int
    """The most that one owner sends, and one worker receives."""
    usual_us: tuple[int, ...] = ()
    """Durations of the newest attempts in which nothing has travelled."""
    copying_us: tuple[int, ...] = ()
    """Of the newest in which copies have, since the budget was last cut."""

    @property
    def hash(self) -> int:
        """Hashes it to 62 bits."""
        return _budget_hash(self)

    def after(self, duration_us: int, *, copied: bool, bounds: tuple[int, int]) -> "CopyBudget":
        """Makes the budget that follows from a vote.

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


class PlannedChange:
    """Follows the change of layout that is under way, as one worker sees it.

    It is *held* once it has come and its links are there, and told in every ballot; *moving* once a vote has shown that
    all hold it, while blocks move to those that will hold them; *coming* from the vote that has proven all copies in
    their places until that step's GATHER, with which it is in force. Each of these follows from a vote alone, so no
    worker can be ahead of another.

    Args:
        worker: its id.
        terms: what is known of the job.
        engine: makes room for the layers that come.
    """

    def __init__(self, worker: int, terms: JobTerms, engine: Engine[Any]) -> None:
        self._worker, self._terms, self._engine = worker, terms, engine
        self.held: LayoutChange | None = None
        """Told in every ballot until it is adopted (M2)."""
        self.hash = 0
        """Of the held change, 62 bits; 0 for none."""
        self.moving: LayoutChange | None = None
        """The one that all members have adopted (M4)."""
        self.coming: LayoutChange | None = None
        """The one that has come into force with the vote of the step in hand, until its GATHER (M5)."""
        self.budget = CopyBudget(terms.move_elements)
        """How much may travel in the next attempt."""

    def hold(self, change: LayoutChange) -> None:
        """Holds a planned change, whose links are there, until it is adopted (W8)."""
        self.held = change
        content = (struct_hash(change.layout), struct_hash(change.execution), struct_hash(change.placement))
        self.hash = key64("change", change.number, *content) >> 2

    def forget(self) -> None:
        """Forgets all changes (M7); of one that is in force the decision knows."""
        self.held, self.hash = None, 0
        self.moving = self.coming = None
        self._engine.forget_layout()

    def restart_budget(self) -> None:
        """Begins to measure anew what may travel: the layout is another one, or members have seen different votes."""
        self.budget = CopyBudget(self._terms.move_elements)

    def learn(self, verdict: Verdict, step: int, *, copied: bool) -> None:
        """Takes over what a vote says of the change.

        Args:
            step: that the vote was on.
            copied: whether base copies have travelled in its attempt.
        """
        if self.adopts(verdict):
            self.moving, self.held, self.hash = self.held, None, 0
        if self.arrives(verdict, step, copied=copied):
            self.coming, self.moving = self.moving, None

    def adopts(self, verdict: Verdict) -> bool:
        """Says whether a vote adopts the held change: all hold it (M3)."""
        assert verdict.change in (0, self.hash), "a vote for a planned change that this worker does not hold"
        return verdict.change != 0

    def arrives(self, verdict: Verdict, step: int, *, copied: bool) -> bool:
        """Says whether the adopted change comes into force with a vote: its copies are proven in their places, and none
        has travelled in this attempt (M5). Arguments as of `learn`."""
        if self.moving is None or not verdict.commits or copied:
            return False
        return verdict.next_residency == expected_residency(self.moving.placement, step)

    def residency(self, copies: Mapping[int, Copy]) -> int:
        """Makes the second residency sum of the ballot: of the copies that are in their places under the change."""
        change = self.moving or self.held
        if change is None:
            return 0
        versions = ((block, copy.version) for block, copy in copies.items())
        return residency_of(held_keys(self._worker, change.placement, self._terms.blocks, versions), self._worker)

    def num_in_place(self, placement: Placement) -> tuple[int, int]:
        """Counts the copies that are in their places under the adopted change, and those that will be; (0, 0) without
        one.

        Args:
            placement: in force.
        """
        return (0, 0) if self.moving is None else num_in_place(placement, self.moving.placement)


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
    """Chooses the placement that the next vote brings into force.

    Args:
        blocks: of the model.
        layout, placement: in force.
        target: the placement that an adopted change leads to; None: there is none.
        num_followers: copies wanted beside the owner.
        refill_elements: the most that one owner sends, and one worker receives, to make up for missing followers.
        move_elements: the same towards the target.
        scatter_width: over how many replica peers the first followers of an owner's blocks are spread.
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
    """Adds some of the holders that a target has in addition to a placement, as followers.

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
    """Counts the copies that a target asks for and that are there, and those that it asks for."""
    found = total = 0
    for block in range(len(target.owner)):
        wanted = target.holders(block)
        total += len(wanted)
        found += len(set(wanted).intersection(placement.holders(block)))
    return found, total


def followed_by(placement: Placement, target: Placement) -> Placement:
    """Adds the holders that a target has in addition to the present roles, as followers: the placement once all copies
    are in their places, before the target comes into force.

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
    """Lists (block, role, version) of what a worker holds of a target, for the second residency sum.

    Args:
        worker: its id.
        target: where blocks will be.
        blocks: of the model.
        versions: (block, version) of its copies.
    """
    roles = _roles_of(worker, target, tuple(blocks))
    return [(block, roles[block], version) for block, version in versions if block in roles]


@functools.lru_cache(maxsize=4096)
def _roles_of(worker: int, placement: Placement, blocks: tuple[Block, ...]) -> dict[int, ReplicaRole]:
    return roles_of(worker, placement, blocks)


def refilled(
    blocks: tuple[Block, ...],
    layout: Layout,
    placement: Placement,
    num_followers: int,
    max_elements: int,
    scatter_width: int,
) -> Placement:
    """Finds the placement to which the members come by making up for all missing followers, step by step.

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
