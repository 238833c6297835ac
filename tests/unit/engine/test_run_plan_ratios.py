"""What a run's plan chooses for adaptive fences, and that decisions leave it alone while planned changes do not."""

import msgspec
import pytest
from tests.unit.config.test_sites import AT_SITES

from elaswave.config.load import load_config
from elaswave.engine.blueprint import Blueprint
from elaswave.errors import ConfigError

FENCES = 'model.fences=["block.0:adatopk50", "block.2:adatopk50", "block.1:int8"]'
APART = [*AT_SITES, "sites.rate=0.0001", "layout.widths=[1, 1, 1]", "layout.layers=[2, 2, 2]"]
PLACES = 'sites.of_workers=["oregon", "tokyo", "london"]'


def plan(*settings: str) -> Blueprint:
    return Blueprint(load_config(None, [FENCES, *settings]))


def test_at_one_place_the_largest_ratio_is_in_force() -> None:
    assert plan().execution.ratios == {1: 50, 3: 50}
    assert plan("model.fences=[]").execution.ratios == {}


def test_links_decide_and_a_boundary_inside_of_a_stage_is_not_coded() -> None:
    ratios = plan(*APART, PLACES).execution.ratios
    assert ratios[3] == 50 and 1 < ratios[1] < 50  # 366 Mbit/s behind the second stage, 523 behind the first
    assert plan(*APART, PLACES, "layout.layers=[3, 1, 2]").execution.ratios == {1: 1, 3: 50}


def test_a_given_list_leaves_nothing_to_choose() -> None:
    given = plan(*APART, PLACES, 'model.fence_ratios=["1:block.0:9", "1:block.2:9"]')
    assert given.execution.ratios == {} and [each.ratio for each in given.model.fence_ratios] == [9, 9]
    with pytest.raises(ConfigError, match='model.fence_ratios: "1:block.1:9": there is no fence block.1:adatopkR'):
        plan('model.fence_ratios=["1:block.1:9"]')


def test_another_layout_has_other_ratios() -> None:
    blueprint = plan(*APART, PLACES)
    moved = msgspec.structs.replace(blueprint.config.layout, layers=(1, 3, 2))
    other = Blueprint(msgspec.structs.replace(blueprint.config, layout=moved))
    assert blueprint.ratios_of(other.layout) == other.execution.ratios != blueprint.execution.ratios
