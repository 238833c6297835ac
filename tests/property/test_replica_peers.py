"""Graphs of replica peers of arbitrary groups, hosts and former replica peers."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave.blocks.replica_peers import choose_replica_peers, replica_peer_pairs


@st.composite
def cases(draw):
    """Groups that may overlap, hosts or none, replica peers of before that need not fit."""
    num_workers = draw(st.integers(1, 14))
    workers = draw(st.permutations(range(num_workers)))
    cuts = sorted(draw(st.sets(st.integers(0, num_workers), max_size=4)) | {0, num_workers})
    groups = [sorted(workers[start:stop]) for start, stop in pairwise(cuts) if start < stop]
    if draw(st.booleans()):
        groups.append(sorted({*groups[0], *groups[-1]}))
    hosts = None
    if draw(st.booleans()):
        hosts = dict(enumerate(draw(st.lists(st.integers(0, 3), min_size=num_workers, max_size=num_workers))))
    kept = draw(
        st.dictionaries(st.integers(0, num_workers), st.lists(st.integers(0, num_workers), max_size=4, unique=True))
    )
    return groups, draw(st.integers(1, 5)), hosts, kept


def as_sets(replica_peers):
    """Without the order."""
    return {worker: set(others) for worker, others in replica_peers.items()}


@given(cases(), st.booleans())
def test_rules(case, firm):
    groups, width, hosts, kept = case
    replica_peers = choose_replica_peers(groups, width, hosts=hosts, kept=kept, firm=firm)
    again = choose_replica_peers(groups, width, hosts=hosts, kept=replica_peers, firm=True)
    assert as_sets(again) == as_sets(replica_peers), "who has its replica peers, keeps them"
    fresh = choose_replica_peers(groups, width, hosts=hosts)
    assert as_sets(choose_replica_peers(groups, width, hosts=hosts, kept=fresh, firm=firm)) == as_sets(fresh)
    workers = sorted({worker for group in groups for worker in group})
    assert list(replica_peers) == workers
    several = hosts is not None and len({hosts[worker] for worker in workers}) > 1
    for worker, others in replica_peers.items():
        assert worker not in others
        assert len(set(others)) == len(others)
        wide = [set(group) for group in groups if worker in group and len(group) > 1]
        if several:
            elsewhere = [other for other in workers if hosts[other] != hosts[worker]]
            assert set(others) <= set(elsewhere), "another host before the same stage"
            assert len(others) >= min(width, len(elsewhere))
        elif wide:
            assert set(others) <= set.union(*wide)
            for group in wide:
                assert len(group.intersection(others)) >= min(width, len(group) - 1)
        else:
            assert len(others) == min(width, len(workers) - 1)


@given(st.integers(2, 40), st.integers(1, 6))
def test_in_one_group_everybody_has_and_is_the_same_number_of_partners(num_workers, width):
    replica_peers = choose_replica_peers([range(num_workers)], width)
    width = min(width, num_workers - 1)
    assert {len(others) for others in replica_peers.values()} == {width}
    chosen = Counter(other for others in replica_peers.values() for other in others)
    assert set(chosen.values()) == {width}
    odd = num_workers * width % 2
    assert len(replica_peer_pairs(replica_peers)) == (num_workers * width + 3 * odd) // 2, (
        "hardly more than n x s / 2 pairs"
    )


@given(st.integers(6, 40), st.sampled_from((2, 4)), st.data())
def test_a_loss_makes_half_as_many_pairs_as_it_ends_and_a_newcomer_ends_half_as_many_as_it_makes(count, width, data):
    before = choose_replica_peers([range(count)], width)
    lost = data.draw(st.integers(0, count - 1))
    left = [worker for worker in range(count) if worker != lost]
    after = choose_replica_peers([left], width, kept=before)
    ended, made = changes(before, after)
    assert ended == width
    assert made <= width // 2, "fewer where all are replica peers already"
    joined = choose_replica_peers([[*left, count]], width, kept=after)
    if len(left) > width + 1:
        assert changes(after, joined) == (width // 2, width)


def changes(before, after):
    """How many pairs are no longer replica peers, and how many have become such."""
    old, new = replica_peer_pairs(before), replica_peer_pairs(after)
    return len(old - new), len(new - old)


def test_a_newcomer_ends_no_pair_where_partners_are_firm():
    before = choose_replica_peers([range(6)], 2)
    after = choose_replica_peers([range(7)], 2, kept=before, firm=True)
    assert changes(before, after) == (0, 2)


def test_partners_of_before_stay():
    before = {0: (3, 2), 1: (4, 5), 2: (0, 5), 3: (0, 4), 4: (1, 3), 5: (1, 2)}
    assert as_sets(choose_replica_peers([range(6)], 2, kept=before)) == as_sets(before)
    one_gone = {worker: [other for other in others if other != 3] for worker, others in before.items() if worker != 3}
    after = choose_replica_peers([[0, 1, 2, 4, 5]], 2, kept=one_gone)
    assert changes(before, after) == (2, 1), "0 and 4 have lost one each, and find each other"
    assert 4 in after[0]


def test_neighbours_of_a_ring():
    assert choose_replica_peers([range(4), range(4, 8)], 2)[0] == (1, 3)
    assert replica_peer_pairs(choose_replica_peers([range(6)], 1)) == {(0, 1), (2, 3), (4, 5)}
    assert replica_peer_pairs(choose_replica_peers([range(5)], 1)) == {(0, 1), (2, 3), (2, 4), (3, 4)}
    assert replica_peer_pairs(choose_replica_peers([[0], [1], [2]], 2)) == {(0, 1), (0, 2), (1, 2)}
    alone = choose_replica_peers([[0], range(1, 5)], 2)
    assert alone[0] == (4, 1), "alone in its stage it finds others, and they do not follow suit"
    assert all(0 not in others for others in alone.values())


@pytest.mark.parametrize(
    ("groups", "width", "num_pairs"),
    [
        ([range(stage, 96, 8) for stage in range(8)], 2, 12),  # a worker of each stage on each host
        ([range(first, first + 8) for first in range(0, 96, 8)], 4, 6),  # a stage is a host
        ([range(first, first + 32) for first in range(0, 96, 32)], 4, 6),  # a stage is four hosts
    ],
)
def test_few_pairs_of_hosts_are_fatal(groups, width, num_pairs):
    hosts = {worker: worker // 8 for worker in range(96)}
    replica_peers = choose_replica_peers(groups, width, hosts=hosts)
    pairs = {frozenset((hosts[one], hosts[other])) for one, other in replica_peer_pairs(replica_peers)}
    assert len(pairs) == num_pairs, "of 66"
    assert len(replica_peer_pairs(replica_peers)) == 96 * width // 2


def test_many_workers():
    groups = [range(first, first + 1250) for first in range(0, 10000, 1250)]
    hosts = {worker: worker // 8 for worker in range(10000)}
    assert len(replica_peer_pairs(choose_replica_peers(groups, 2, hosts=hosts))) == 10000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "the scatter width is 0"),
        ({"width": 1, "hosts": {0: "a"}}, r"no host is given for workers \[1\]"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_replica_peers([[0, 1]], **arguments)
