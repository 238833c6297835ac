"""Which losses a placement survives, against trying all of them."""

from itertools import combinations

import msgspec
import pytest

from elaswave.blocks.domains import hosts_of
from elaswave.blocks.placement import Placement, make_blocks, place_blocks
from elaswave.blocks.survival import alone_on, survival_of
from elaswave.planning.programs.layout import make_layout

LAYOUT = make_layout(widths=[4, 4], layers_per_stage=[1, 1], num_microbatches=4)
PAIR = make_layout(widths=[2], layers_per_stage=[1], num_microbatches=2)
BLOCKS = make_blocks([40, 40], 1)


def loses(placement, lost):
    return any(set(placement.holders(block)) <= set(lost) for block in range(len(placement.owner)))


@pytest.mark.parametrize(("num_followers", "width"), [(0, 1), (1, 1), (1, 2), (1, 9), (2, 2)])
def test_as_many_sets_are_fatal_as_trying_all_finds(num_followers, width):
    placement = place_blocks(LAYOUT.with_followers(num_followers), BLOCKS, scatter_width=width)
    survival = survival_of(placement, LAYOUT)
    assert survival.num_copies == num_followers + 1
    assert not any(loses(placement, lost) for lost in combinations(range(8), num_followers))
    sets = list(combinations(range(8), num_followers + 1))
    assert survival.num_fatal == sum(loses(placement, lost) for lost in sets)
    assert survival.share == 1 - survival.num_fatal / len(sets)


def test_few_partners_leave_more_pairs_than_many():
    shares = [
        survival_of(place_blocks(LAYOUT.with_followers(1), BLOCKS, scatter_width=width), LAYOUT).num_fatal
        for width in (1, 2, 3)
    ]
    assert shares == [4, 8, 12], "of 28"


def test_in_words():
    def words(num_followers, scatter_width):
        layout = LAYOUT.with_followers(num_followers)
        return survival_of(place_blocks(layout, BLOCKS, scatter_width=scatter_width), layout).describe()

    assert words(num_followers=1, scatter_width=2) == (
        "survives the loss of any worker, and at one instant of 71.4 % of the pairs (8 of 28 hold all copies of some "
        "block)"
    )
    assert "any 2 workers, and at one instant of 85.7 % of the sets of three" in words(num_followers=2, scatter_width=2)
    assert "% of the sets of 4 (" in words(num_followers=3, scatter_width=1)
    assert words(num_followers=0, scatter_width=2) == "survives no loss of 8 of 8 workers: these hold some block alone"
    both = survival_of(Placement.of((0,), ((1,),)), PAIR)
    assert both.describe() == "survives the loss of any worker; there are 2"
    assert survival_of(Placement.of((), ()), PAIR) is None


def test_hosts():
    """Of two hosts with a worker of each stage, one is survived until something speaks against it."""
    layout = make_layout(widths=[2, 2], layers_per_stage=[1, 1], num_microbatches=2, hosts={"a": 2, "b": 2})
    placement = place_blocks(layout.with_followers(1), BLOCKS, scatter_width=2)
    survival = survival_of(placement, layout)
    assert (survival.num_hosts, survival.fatal_hosts) == (2, {})
    assert survival.describe().endswith("; it survives the loss of any one of 2 hosts")

    unlabelled = msgspec.structs.replace(layout, domains=())
    careless = place_blocks(unlabelled.with_followers(1), BLOCKS, scatter_width=2)
    by_trying = {host for host, members in hosts_of(layout).items() if loses(careless, members)}
    careless_layout = make_layout(widths=[2, 2], layers_per_stage=[1, 1], num_microbatches=2)
    together = msgspec.structs.replace(careless_layout, domains=((0, "a"), (1, "a"), (2, "b"), (3, "b")))
    fatal = survival_of(careless, together).fatal_hosts
    assert set(fatal) == {"a", "b"}
    assert fatal["a"] == "40 of 80 blocks have all copies there"
    assert by_trying == set(survival_of(careless, layout).fatal_hosts)
    assert "hosts" not in survival_of(careless, unlabelled).describe()

    problems = survival_of(placement, layout, lambda lost: "too few are left" if 0 in lost else None)
    assert problems.describe_domains() == "survives the loss of 1 of 2 hosts (host a: too few are left)"


def test_blocks_that_are_on_one_host():
    hosts = {"a": (0, 2), "b": (1, 3)}
    placement = Placement.of((0, 0, 1, 3), ((2,), (1,), (), (1,)))
    assert alone_on(placement, hosts) == {"a": 1, "b": 2}
