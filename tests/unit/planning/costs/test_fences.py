"""Fences as they are written, the sizes of what is coded, and what a model with fences costs."""

import pytest

from elaswave.config.presets import catalog
from elaswave.fences import changing, codecs_at, coded_bytes, fence_of, fence_problems
from elaswave.planning.costs.analytic import analytic_costs
from elaswave.planning.costs.layers import Costs, LayerCosts, fenced_costs

NAMES = ("embedding", "block.0", "block.1", "head")
MODEL, DEVICE = catalog().models["gpt2-small"], catalog().devices["a100"]


def test_a_fence_is_a_layer_and_a_codec() -> None:
    assert fence_of("block.0:int8") == ("block.0", "int8")
    assert fence_of("a:b:bf16") == ("a:b", "bf16")
    assert str(fence_of("a:b:bf16")) == "a:b:bf16"
    assert codecs_at(["block.1:int4", "embedding:none"], NAMES) == {0: "none", 2: "int4"}


@pytest.mark.parametrize(
    "text",
    ["int8", ":int8", "block.0:int3", "block.0", "", "a:topk", "a:topk1", "a:topk1001", "a:topk010", "a:topk9-its"],
)
def test_what_is_no_fence_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="is no fence: needed is LAYER:CODEC with one of none, bf16, int8, int4, topkR, topkR-own and"
    ):
        fence_of(text)


def test_every_problem_of_fences_is_named() -> None:
    fences = ["block.2:int8", "head:int8", "block.0:int8", "block.0:int4"]
    assert fence_problems(fences, NAMES) == [
        '"block.2:int8": the model has no layer block.2; a fence stands behind one of embedding, block.0, block.1',
        '"head:int8": head is the last layer, and a fence stands between two layers',
        '"block.0:int4": there is "block.0:int8" already; a boundary has one fence',
    ]
    with pytest.raises(ValueError, match="no layer block.2.*last layer"):
        codecs_at(fences, NAMES)
    assert fence_problems(["x:int8"], ["only"]) == [
        '"x:int8": the model has no layer x; a fence stands behind one of none'
    ]
    many = [f"l{index}" for index in range(40)]
    assert "l0, l1, l2, l3, ..., l36, l37, l38" in fence_problems(["x:int8"], many)[0]


def test_none_changes_nothing_and_order_does_not_count() -> None:
    assert changing(["b:int8", "a:none", "a.0:bf16"]) == changing(["a.0:bf16", "b:int8"]) == ("a.0:bf16", "b:int8")


@pytest.mark.parametrize(
    ("codec", "shape", "element_bytes", "expected"),
    [
        ("none", (8, 64, 128), 4, 8 * 64 * 128 * 4),
        ("bf16", (8, 64, 128), 4, 16 + 8 * 64 * 128 * 2),
        ("int8", (8, 64, 128), 4, 16 + 1024 * 66),
        ("int4", (8, 64, 128), 4, 16 + 1024 * 34),
        ("int4", (65,), 4, 8 + 2 * 34),
        ("bf16", (8, 64, 128), 2, 8 * 64 * 128 * 2),
        ("int8", (8,), 4, 32),
        ("topk10", (2, 1024), 4, 12 + 2 + 2 * (103 * 2 + 128)),
        ("topk100", (2, 1024), 4, 12 + 2 + 2 * (11 * 2 + 11 * 2)),
        ("topk100-own", (1025,), 4, 8 + 2 + 11 * 4 + 2 + 1),
        ("int8", (0, 5), 4, 0),
        ("bf16", (), 8, 6),
    ],
)
def test_sizes_are_known_from_the_shape(codec: str, shape: tuple[int, ...], element_bytes: int, expected: int) -> None:
    assert coded_bytes(codec, shape, element_bytes) == expected


def layer(boundary_bytes: float) -> LayerCosts:
    return LayerCosts(
        forward_s=1.0, input_gradient_s=2.0, weight_gradient_s=3.0, parameter_bytes=1.0, accumulator_bytes=1.0,
        optimizer_bytes=1.0, activation_bytes=5000.0, boundary_bytes=boundary_bytes,
    )  # fmt: skip


def test_costs_know_the_smaller_bytes_what_is_kept_and_what_a_codec_moves() -> None:
    plain = Costs(layers=(layer(4096.0), layer(4096.0), layer(0.0)))
    costs = fenced_costs(plain, {1: "int8"}, element_bytes=4, memory_bandwidth_bytes_per_s=1e6)
    coded = coded_bytes("int8", (1024,), 4)
    before, behind = costs.layers[1:]
    moving_s = (4096 + coded) / 1e6
    assert costs.layers[0] == plain.layers[0]
    assert (before.boundary_bytes, before.activation_bytes) == (coded, 5000 + coded)
    assert before.forward_s == behind.forward_s == pytest.approx(1 + moving_s)
    assert before.input_gradient_s == behind.input_gradient_s == pytest.approx(2 + moving_s)
    assert before.weight_gradient_s == 3 and behind.boundary_bytes == 0
    measured = fenced_costs(plain, {1: "int8"}, element_bytes=4)
    assert measured.layers[1].forward_s == 1 and measured.layers[1].boundary_bytes == coded
    assert fenced_costs(plain, {0: "none"}, element_bytes=4) == plain


@pytest.mark.parametrize(("codec", "places"), [("topk10", 128), ("topk10-own", 0)])
def test_places_that_are_kept_for_gradients_take_memory_on_either_side(codec: str, places: int) -> None:
    plain = Costs(layers=(layer(4096.0), layer(4096.0), layer(0.0)))
    costs = fenced_costs(plain, {1: codec}, element_bytes=4)
    coded = coded_bytes(codec, (1024,), 4)
    assert costs.layers[1].activation_bytes == 5000 + coded + places
    assert costs.layers[2].activation_bytes == 5000 + places


def test_a_described_models_boundaries_are_smaller_at_its_fences() -> None:
    plain, fenced = (analytic_costs(MODEL, DEVICE, fences=fences) for fences in ((), ["block.5:int4"]))
    ratios = [b.boundary_bytes / a.boundary_bytes for a, b in zip(plain.layers[:-1], fenced.layers[:-1], strict=True)]
    assert ratios[6] == pytest.approx(4.25 / 16, rel=1e-4) and {*ratios[:6], *ratios[7:]} == {1.0}
    assert "fences block.5:int4" in fenced.source and fenced.layers[7].forward_s > plain.layers[7].forward_s
    with pytest.raises(ValueError, match="no layer block.12"):
        analytic_costs(MODEL, DEVICE, fences=["block.12:int4"])
