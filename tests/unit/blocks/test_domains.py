"""Failure domains: how stages are dealt over them, at which level copies are kept apart."""

from collections import Counter

import msgspec
import pytest

from elaswave.blocks.domains import deal_over_hosts, domains_of, hosts_of, label_members
from elaswave.blocks.placement import FollowerChooser, make_blocks, place_blocks
from elaswave.planning.programs.layout import make_layout


def layout_of(widths, labels=None, **values):
    layout = make_layout(widths=widths, layers_per_stage=[1] * len(widths), num_microbatches=max(widths))
    domains = () if labels is None else tuple(enumerate(labels))
    return msgspec.structs.replace(layout, domains=domains, **values)


@pytest.mark.parametrize(
    ("widths", "hosts", "expected"),
    [
        ([2, 2], {"a": 2, "b": 2}, "ab ab"),
        ([2, 2], {"a": 3, "b": 1}, "ab aa"),
        ([3, 3], {"a": 2, "b": 2, "c": 2}, "abc abc"),
        ([2, 2, 2], {"a": 2, "b": 2, "c": 2}, "ab cb ca"),
        ([1, 1, 1, 1], {"a": 2, "b": 2}, "a a b b"),
        ([4], {"a": 4}, "aaaa"),
    ],
)
def test_stages_are_dealt_over_hosts(widths, hosts, expected):
    dealt = deal_over_hosts(widths, hosts)
    assert [worker for worker, _ in dealt] == list(range(sum(widths)))
    names = iter(host for _, host in dealt)
    assert [Counter(next(names) for _ in range(width)) for width in widths] == list(map(Counter, expected.split()))


def test_stages_are_dealt_over_racks_first():
    hosts = {"r/a": 2, "r/b": 2, "s/a": 2, "s/b": 2}
    stages = [host for _, host in deal_over_hosts([2, 2, 2, 2], hosts)]
    assert all(one[0] != other[0] for one, other in zip(stages[::2], stages[1::2], strict=True))


def test_more_workers_than_room_are_refused():
    with pytest.raises(ValueError, match="there is room for 3 workers, but the stages have 4"):
        deal_over_hosts([2, 2], {"a": 2, "b": 1})


@pytest.mark.parametrize("labels", [None, ["", "", "", ""], ["a", "a", "a", "a"], ["a", "b", "c", "d"]])
def test_one_host_and_a_host_for_each_are_nothing_to_keep_apart(labels):
    assert domains_of(layout_of([2, 2], labels)) == ()


def test_what_holds_nothing_does_not_count():
    layout = layout_of([2, 1], ["a", "a", "b"])
    assert domains_of(layout)
    assert domains_of(layout, excluded=(2,)) == ()
    assert domains_of(layout_of([1, 1], ["a", "b"], idle=(2,))) == ()


def test_copies_are_in_two_racks_where_there_are_two():
    racks = ["r/a", "r/b", "s/a", "s/b"] * 2
    layout = layout_of([4, 4], racks)
    assert [level[1] for level in domains_of(layout)] == ["r", "r/b"]
    blocks = make_blocks([64, 64], 1)
    placement = place_blocks(layout.with_followers(2), blocks, scatter_width=2)
    for block in blocks:
        hosts = [racks[worker] for worker in placement.holders(block.id)]
        assert hosts[0][0] != hosts[1][0], "the first copy is in another rack"
        assert len(set(hosts)) == 3, "the second one at least on a host of its own"


def test_a_domain_without_a_copy_comes_before_the_stage():
    """The one host without a copy is that of a worker inside of the stage, where a second copy does not belong."""
    layout = layout_of([3, 2], ["a", "b", "c", "a", "b"])
    chooser = FollowerChooser(layout.workers, {0: (1,)}, 1, domains_of(layout))
    assert not chooser.lacks_replica_peer(0, (1,)), "it is about a second copy"
    assert chooser.candidates((0, 1, 2), 0, (1,)) == (2,)


def test_labels_of_members_and_hosts():
    layout = layout_of([1, 1], idle=(5,))
    assert label_members(layout, {}) == label_members(layout, {9: "a"}) == ()
    assert label_members(layout, {5: "b", 9: "a"}) == ((0, ""), (1, ""), (5, "b"))
    labelled = msgspec.structs.replace(layout, domains=label_members(layout, {0: "b", 5: "b"}))
    assert hosts_of(labelled) == {"b": (0, 5), "": (1,)}
