"""Ratios of adaptive fences: how they are written, which are in force in a step, and how the list grows."""

import pytest

from elaswave.fences import (
    FenceRatio,
    adaptive,
    codec_in_force,
    coded_bytes,
    fence_ratio_of,
    ratio_problems,
    ratios_at,
    top_k_of,
    with_ratios,
)

LIST = [FenceRatio(1, "a:b", 10), FenceRatio(1, "c", 100), FenceRatio(7, "a:b", 1)]


def test_a_ratio_is_a_step_a_layer_and_a_number() -> None:
    assert [fence_ratio_of(str(each)) for each in LIST] == LIST
    assert str(LIST[0]) == "1:a:b:10"


def test_an_adaptive_codec_is_topk_at_its_ratio_or_none() -> None:
    assert codec_in_force("adatopk100", 7) == "topk7" and codec_in_force("adatopk100", 1) == "none"
    assert codec_in_force("adatopk100", None) == codec_in_force("adatopk100", 500) == "topk100"
    assert codec_in_force("int8", 7) == "int8" and codec_in_force("topk9-own", 3) == "topk9-own"
    assert str(top_k_of("adatopk100")) == "adatopk100"
    assert adaptive({0: "int8", 3: "adatopk50", 4: "topk50"}) == {3: 50}
    assert coded_bytes("adatopk50", (5000,), 4) == coded_bytes("topk50", (5000,), 4)


def test_the_newest_ratio_up_to_a_step_is_in_force() -> None:
    assert ratios_at(LIST, 0) == {}
    assert ratios_at(LIST, 6) == {"a:b": 10, "c": 100}
    assert ratios_at(LIST, 7) == {"a:b": 1, "c": 100}


def test_the_list_grows_by_what_changes_and_forgets_what_a_run_has_gone_back_from() -> None:
    grown = with_ratios(LIST, 9, {"a:b": 1, "c": 50})
    assert grown == [*LIST, FenceRatio(9, "c", 50)]
    assert with_ratios(grown, 9, {"c": 50}) == grown
    assert with_ratios(grown, 5, {"a:b": 10, "c": 20}) == [*LIST[:2], FenceRatio(5, "c", 20)]
    assert with_ratios([], 1, {}) == []


@pytest.mark.parametrize(
    ("ratios", "problem"),
    [
        (["1:x:5"], '"1:x:5": there is no fence x:adatopkR'),
        (["1:b:5"], '"1:b:5": there is no fence b:adatopkR'),
        (["1:a:51"], '"1:a:51": the fence a:adatopk50 has ratios up to 50'),
        (["5:a:5", "4:a:6"], '"4:a:6": steps must not fall, and 5 is before it'),
    ],
)
def test_ratios_that_cannot_be_are_named(ratios: list[str], problem: str) -> None:
    assert ratio_problems(ratios, ["a:adatopk50", "b:topk50"]) == [problem]
    assert ratio_problems(["1:a:50", "1:a:1", "9:a:2"], ["a:adatopk50"]) == []
