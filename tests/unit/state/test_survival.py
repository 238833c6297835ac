"""Which losses a placement survives, against trying all of them."""

from itertools import combinations

import pytest

from elaswave.planning.layout import make_layout
from elaswave.state.placement import Placement, make_blocks, place_blocks
from elaswave.state.survival import survival_of

LAYOUT = make_layout(widths=[4, 4], layers_per_stage=[1, 1], num_microbatches=4)
BLOCKS = make_blocks([40, 40], 1)


def loses(placement, lost):
    return any(set(placement.holders(block)) <= set(lost) for block in range(len(placement.owner)))


@pytest.mark.parametrize(("num_followers", "width"), [(0, 1), (1, 1), (1, 2), (1, 9), (2, 2)])
def test_as_many_sets_are_fatal_as_trying_all_finds(num_followers, width):
    placement = place_blocks(LAYOUT, BLOCKS, num_followers=num_followers, scatter_width=width)
    survival = survival_of(placement, LAYOUT.workers)
    assert survival.num_copies == num_followers + 1
    assert not any(loses(placement, lost) for lost in combinations(range(8), num_followers))
    sets = list(combinations(range(8), num_followers + 1))
    assert survival.num_fatal == sum(loses(placement, lost) for lost in sets)
    assert survival.share == 1 - survival.num_fatal / len(sets)


def test_few_partners_leave_more_pairs_than_many():
    shares = [
        survival_of(place_blocks(LAYOUT, BLOCKS, num_followers=1, scatter_width=width), LAYOUT.workers).num_fatal
        for width in (1, 2, 3)
    ]
    assert shares == [4, 8, 12], "of 28"


def test_in_words():
    def words(**arguments):
        return survival_of(place_blocks(LAYOUT, BLOCKS, **arguments), LAYOUT.workers).describe()

    assert words(num_followers=1, scatter_width=2) == (
        "survives the loss of any worker, and at one instant of 71.4 % of the pairs (8 of 28 hold all copies of some "
        "block)"
    )
    assert "any 2 workers, and at one instant of 71.4 % of the sets of three" in words(num_followers=2, scatter_width=2)
    assert "% of the sets of 4 (" in words(num_followers=3, scatter_width=1)
    assert words(num_followers=0, scatter_width=2) == "survives no loss of 8 of 8 workers: these hold some block alone"
    both = survival_of(Placement((0,), ((1,),)), (0, 1))
    assert both.describe() == "survives the loss of any worker; there are 2"
    assert survival_of(Placement((), ()), (0, 1)) is None
