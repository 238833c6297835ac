"""The table of the copies that a worker holds: roles and versions beside them, and what they count in the vote."""

from types import SimpleNamespace

import numpy as np

from elaswave.blocks.placement import ReplicaRole, block_keys
from elaswave.protocol.step.ballot import holder_key
from elaswave.protocol.step.ledger import HeldCopies

OWNER, FOLLOWER = ReplicaRole
NUM_BLOCKS = 6


def table(roles, version=4):
    return HeldCopies(
        {block: SimpleNamespace(block=SimpleNamespace(id=block), role=roles[block]) for block in roles}, version
    )


def counted(held, worker=3):
    """What a table should bring to the residency sum, copy by copy."""
    keys = block_keys(NUM_BLOCKS).tolist()
    copies = zip(held, held.all, held.versions, strict=True)
    return sum(keys[block] * holder_key(worker, copy.role, at) for block, copy, at in copies) % 2**64


def test_copies_are_ascending_with_their_roles_and_versions():
    held = table({5: OWNER, 1: FOLLOWER, 4: OWNER})
    assert ([*held], held.blocks.tolist(), held.roles.tolist(), held.versions) == (
        [1, 4, 5],
        [1, 4, 5],
        [2, 1, 1],
        [4] * 3,
    )
    assert [copy.block.id for copy in held.owned] == [4, 5]
    replicas = held.replicas()
    assert (replicas.blocks, replicas.owned, replicas.versions) == ([1, 4, 5], [False, True, True], [4, 4, 4])


def test_what_they_count_follows_roles_and_each_version():
    held = table({5: OWNER, 1: FOLLOWER, 4: OWNER})
    sums = {held.residency(3, NUM_BLOCKS)}
    held.other_versions[4] = 5
    assert held.versions == [4, 5, 4] and held.residency(3, NUM_BLOCKS) == counted(held)
    sums.add(held.residency(3, NUM_BLOCKS))
    held.take_roles(np.array([2, 2, 1], np.uint8))
    assert [copy.role for copy in held.all] == [FOLLOWER, FOLLOWER, OWNER] and [*held.owned] == held.all[2:]
    assert held.residency(3, NUM_BLOCKS) == counted(held)
    assert len(sums | {held.residency(3, NUM_BLOCKS), held.residency(2, NUM_BLOCKS), HeldCopies().residency(3, 6)}) == 5


def test_copies_that_are_behind_are_found():
    held = table({1: OWNER, 4: OWNER})
    assert (held.not_at(4), held.not_at(5)) == ([], held.all)
    held.other_versions[1] = 5
    assert ([*held.not_at(5)], [*held.not_at(4)]) == (held.all[1:], held.all[:1])


def test_a_table_of_some_of_them_and_one_with_others_keep_their_versions():
    held = table({1: OWNER, 4: OWNER, 5: FOLLOWER})
    held.other_versions[4] = 5
    some = held.only(np.array([False, True, True]))
    assert ([*some], some.versions) == ([4, 5], [5, 4])
    assert held.only(np.array([True] * 3)) is held
    joined = held.with_others(table({0: FOLLOWER, 2: FOLLOWER}, version=3))
    assert ([*joined], joined.versions) == ([0, 1, 2, 4, 5], [3, 4, 3, 5, 4])
    assert joined.residency(3, NUM_BLOCKS) == counted(joined)
