"""How blocks come to new holders: what travels in one attempt, in which order, and what that costs a step at most."""

from types import SimpleNamespace

import numpy as np
import pytest

from elaswave.blocks.placement import Placement, ReplicaRole, block_keys, make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.state_moves.target_placement import target_placement
from elaswave.protocol.step.ballot import expected_residency, holder_key, key_sums, residency_of
from elaswave.protocol.step.blocks import (
    CopyBudget,
    PlannedChange,
    followed_by,
    next_placement,
    num_in_place,
    refilled,
    towards,
)
from elaswave.protocol.step.ledger import HeldCopies

BLOCKS = make_blocks([40, 40], 10)
LAYOUT = make_layout(widths=[2, 2], layers_per_stage=[1, 1], num_microbatches=4)
BOUNDS = (10, 1000)


def exchanged():
    """Each worker owns blocks of the other stage, followed there."""
    here = place_blocks(LAYOUT.with_followers(1), BLOCKS, scatter_width=EVERYBODY)
    swap = {0: 2, 1: 3, 2: 0, 3: 1}
    return here, Placement.of(
        tuple(swap[owner] for owner in here.owner),
        tuple(tuple(swap[worker] for worker in followers) for followers in here.followers),
    )


def copies(before, after):
    return [
        (block, worker)
        for block in range(len(before.owner))
        for worker in after.holders(block)
        if worker not in before.holders(block)
    ]


def test_copies_towards_a_target_keep_to_the_budget_and_come_from_all_owners():
    here, target = exchanged()
    after = towards(here, target, BLOCKS, 20)
    assert after.owner == here.owner
    sent, received = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    for block, worker in copies(here, after):
        sent[here.owner[block]] += 10
        received[worker] += 10
        assert worker in target.holders(block)
    assert max(*sent.values(), *received.values()) == 20
    assert min(sent.values()) > 0, "all owners send at the same time"


def test_one_receiver_of_all_owners_gets_no_more_than_the_budget():
    here = place_blocks(LAYOUT.with_followers(0), BLOCKS, scatter_width=EVERYBODY)
    target = Placement.of((3,) * len(BLOCKS), ((),) * len(BLOCKS))
    assert [worker for _, worker in copies(here, towards(here, target, BLOCKS, 20))] == [3, 3]


def test_at_least_one_copy_travels_however_large_it_is():
    here, target = exchanged()
    assert len(copies(here, towards(here, target, BLOCKS, 1))) == 1


def test_rounds_come_to_all_holders_of_the_target_and_then_to_an_end():
    here, target = exchanged()
    placement, rounds = here, 0
    while (after := towards(placement, target, BLOCKS, 20)) != placement:
        placement, rounds = after, rounds + 1
    assert 2 <= rounds <= 8
    assert all(set(target.holders(block)) <= set(placement.holders(block)) for block in range(len(BLOCKS)))


def test_missing_followers_come_first():
    here, target = exchanged()
    lacking = Placement.of(here.owner, ((), *here.followers[1:]))
    after = next_placement(BLOCKS, LAYOUT.with_followers(1), lacking, target, 1000, 1000, scatter_width=EVERYBODY)
    assert [block for block, _ in copies(lacking, after)] == [0], "nothing else travels"
    after = next_placement(BLOCKS, LAYOUT.with_followers(1), here, target, 1000, 20, scatter_width=EVERYBODY)
    assert copies(here, after) and after == towards(here, target, BLOCKS, 20)
    assert next_placement(BLOCKS, LAYOUT.with_followers(1), here, None, 1000, 20, scatter_width=EVERYBODY) == here


def test_how_far_a_move_has_come():
    here, target = exchanged()
    total = 2 * len(BLOCKS)
    assert num_in_place(here, target) == (0, total)
    assert num_in_place(towards(here, target, BLOCKS, 20), target) == (8, total)
    assert num_in_place(towards(here, target, BLOCKS, 1000), target) == (total, total)


def test_all_that_a_target_asks_for_follow_until_it_is_in_force():
    here, target = exchanged()
    after = followed_by(here, target)
    assert after.owner == here.owner
    for block in range(len(BLOCKS)):
        assert set(after.holders(block)) == {*here.holders(block), *target.holders(block)}
        assert len(set(after.holders(block))) == len(after.holders(block)) == 4
    assert sorted(copies(here, after)) == sorted(copies(here, towards(here, target, BLOCKS, 1000)))


@pytest.mark.parametrize("is_complete", [False, True])
def test_the_second_residency_sum_proves_all_of_the_target_and_nothing_less(is_complete):
    here, target = exchanged()
    placement = towards(here, target, BLOCKS, 1000 if is_complete else 20)
    total = 0
    for worker in range(4):
        held = np.array([block for block in range(len(BLOCKS)) if worker in placement.holders(block)], np.int64)
        total += residency_of(worker, key_sums(held, target.roles(worker)[held], len(BLOCKS)), 6)
    assert (total % 2**64 == expected_residency(target, 7)) is is_complete


@pytest.mark.parametrize(("worker", "role"), [(2, ReplicaRole.OWNER), (3, ReplicaRole.FOLLOWER), (0, None)])
def test_roles_in_that_sum_are_those_of_the_target(worker, role):
    here, target = exchanged()
    assert here.holders(0) == (0, 1) and target.holders(0) == (2, 3)
    planned = PlannedChange(worker, SimpleNamespace(move_elements=10), None)
    planned.moving = SimpleNamespace(placement=target)
    held = HeldCopies({0: SimpleNamespace(role=ReplicaRole.FOLLOWER)}, 6)
    right = 0 if role is None else int(block_keys(len(BLOCKS))[0]) * holder_key(worker, role, 6)
    assert planned.residency(held) == right % 2**64


def votes(budget, durations, *, copied):
    for duration_us in durations:
        budget = budget.after(duration_us, copied=copied, bounds=BOUNDS)
    return budget


def test_the_budget_follows_from_what_votes_say_of_durations():
    budget = CopyBudget(100)
    assert votes(budget, [500] * 9, copied=True).elements == 100, "it is not known what is usual"
    budget = votes(budget, [1000] * 3, copied=False)
    assert votes(budget, [5000] * 2, copied=True).elements == 100, "too few votes to judge by"
    assert votes(budget, [1050] * 3, copied=True).elements == 125
    assert votes(budget, [1051] * 3, copied=True).elements == 50
    for duration_us, bound in ((5000, 10), (1000, 1000)):
        assert votes(budget, [duration_us] * 60, copied=True).elements == bound
    assert len({CopyBudget(*each).hash for each in ((1,), (2,), (1, (3,)), (1, (4,)), (1, (), (3,)))}) == 5


def test_single_disturbed_steps_do_not_change_the_budget():
    budget = votes(CopyBudget(100), [1000, 9000, 1000, 1000, 8000], copied=False)
    calm = votes(budget, [1000] * 9, copied=True)
    assert votes(budget, [1000, 7000, 1000, 1000, 9000, 1000, 1000, 6000, 1000], copied=True).elements == calm.elements
    assert votes(budget, [1000] + [2000] * 2, copied=True).elements == 50, "but most of the newest votes do"


def test_a_budget_that_was_cut_is_judged_by_votes_after_the_cut():
    budget = votes(CopyBudget(100), [1000], copied=False)
    budget = votes(budget, [3000] * 3, copied=True)
    assert budget.elements == 50
    assert votes(budget, [1000] * 2, copied=True).elements == 50
    assert votes(budget, [1000] * 3, copied=True).elements == 62


def test_what_is_usual_follows_the_newest_steps():
    budget = votes(CopyBudget(100), [1000] * 5 + [2000] * 3, copied=False)
    assert votes(budget, [2000] * 3, copied=True).elements == 125


def test_the_coordinator_knows_to_what_the_members_come_by_refilling():
    here = place_blocks(LAYOUT.with_followers(1), BLOCKS, scatter_width=EVERYBODY)
    lacking = Placement.of(here.owner, ((),) * len(BLOCKS))
    placement, target = lacking, target_placement(LAYOUT.with_followers(1), BLOCKS, here, scatter_width=EVERYBODY)
    for _ in range(20):
        placement = next_placement(BLOCKS, LAYOUT.with_followers(1), placement, None, 20, 20, scatter_width=EVERYBODY)
    assert placement == refilled(BLOCKS, LAYOUT.with_followers(1), lacking, 20, scatter_width=EVERYBODY)
    assert all(len(followers) == 1 for followers in placement.followers)
    assert target == here
