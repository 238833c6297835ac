"""Presets and the costs that are described from them: published sizes, textbook counts, clear errors."""

import itertools

import msgspec
import pytest

from elaswave.config.presets import catalog
from elaswave.planning.costs.analytic import (
    LayerWork,
    analytic_costs,
    analytic_shares,
    layer_work,
    preset_cluster,
)
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.presets import DevicePreset, ModelShape, frequency_levels
from elaswave.types import Stage

DEVICES, LINKS, MODELS = catalog()
SEVEN = MODELS["llama-2-7b"]
A100 = DEVICES["a100"]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-34b", 33_743_970_304),
        ("llama-2-70b", 68_976_648_192),
        # Released with the embedding as its head; ours is a matrix of its own.
        ("gpt2-small", 124_439_808 + 50257 * 768),
        ("gpt2-medium", 354_823_168 + 50257 * 1024),
        ("gpt2-large", 774_030_080 + 50257 * 1280),
        ("gpt2-xl", 1_557_611_200 + 50257 * 1600),
    ],
)
def test_sizes_are_the_published_ones(name: str, published: int) -> None:
    assert MODELS[name].num_parameters == published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_heads": 3}, "must divide each other"),
        ({"num_kv_heads": 5}, "must divide"),
    ],
)
def test_impossible_shapes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(SEVEN, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"efficiency": 0.0}, "efficiency is 0.0"),
        ({"devices_per_node": 0}, "both must be above 0"),
        ({"memory_bandwidth_bytes_per_s": 0.0}, "both must be above 0"),
    ],
)
def test_impossible_device_presets(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(A100, **changes)


def test_power_rises_faster_than_the_clock() -> None:
    low, base, high = frequency_levels((0.8, 1.0, 1.1), idle_w=50.0, base_w=300.0)
    assert base.power_w == 300
    assert low.power_w == pytest.approx(50 + 250 * 0.8 * 0.9**2, abs=0.1)
    assert high.power_w == pytest.approx(50 + 250 * 1.1 * 1.05**2, abs=0.1)
    (lowest,) = frequency_levels((0.1,), idle_w=0.0, base_w=100.0)
    assert lowest.power_w == pytest.approx(100 * 0.1 * 0.8**2, abs=0.1)


def total(work: tuple[LayerWork, ...], field: str) -> float:
    return sum(getattr(layer, field) for layer in work)


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_six_per_parameter_and_token_and_attention(name: str) -> None:
    shape = MODELS[name]
    work = layer_work(shape, microbatch_size=2)
    assert len(work) == shape.num_layers + 2
    flops = sum(total(work, f"{part}_flops") for part in ("forward", "input_gradient", "weight_gradient"))
    tokens = 2 * shape.context_length
    in_products = shape.num_parameters - shape.embedding_parameters
    attention = 3 * 2 * tokens * shape.context_length * shape.hidden_size * shape.num_layers
    assert flops == pytest.approx(6 * tokens * in_products + attention, rel=2e-3)  # norms and biases are no products
    assert total(work, "num_parameters") == shape.num_parameters


def test_activations_of_a_gpt_block_are_those_of_the_literature() -> None:
    shape = MODELS["gpt2-xl"]
    block = layer_work(shape, microbatch_size=4)[1]
    # Korthikanti et al. 2022, equation 2: 34 bytes per token and element of the hidden size, of which 3 are masks of
    # dropout (not used here) and 1 more of the attention's; flash attention keeps no scores. 32 without the masks.
    assert block.activation_bytes == 4 * 1024 * shape.hidden_size * 32


def test_running_again_keeps_the_input_only() -> None:
    kept, again = (layer_work(SEVEN, recompute=recompute)[1] for recompute in (False, True))
    assert again.activation_bytes == again.boundary_bytes < kept.activation_bytes / 10
    assert again.input_gradient_flops == kept.input_gradient_flops + kept.forward_flops
    assert again.forward_flops == kept.forward_flops


def test_costs_scale_as_they_should() -> None:
    base = analytic_costs(SEVEN, A100)
    assert base.num_layers == 34
    half = analytic_costs(SEVEN, A100, efficiency=A100.efficiency / 2)
    twice = analytic_costs(SEVEN, A100, microbatch_size=2)
    for index in range(1, 34):
        assert half.layers[index].forward_s == pytest.approx(2 * base.layers[index].forward_s)
        assert twice.layers[index].input_gradient_s == pytest.approx(2 * base.layers[index].input_gradient_s)
        assert twice.layers[index].activation_bytes == 2 * base.layers[index].activation_bytes
        assert twice.layers[index].parameter_bytes == base.layers[index].parameter_bytes
    # 6.7e9 parameters, 6 operations each, 4096 tokens, 312e12 at 52 %: about a second, and attention on top.
    assert 0.95 < base.prefix["busy_s"][-1] < 1.25
    assert 0 < base.layers[0].forward_s < base.layers[1].forward_s / 20
    assert base.layers[0].input_gradient_s == 0


def test_bytes_of_a_parameter() -> None:
    for consistency, bits, accumulator_bytes in (("bitwise", 64, 8), ("bitwise", 48, 6), ("scaled", 64, 4)):
        costs = analytic_costs(SEVEN, A100, consistency=consistency, accumulator_bits=bits)
        assert costs.between("parameter_bytes", 0, 34) == 2 * SEVEN.num_parameters
        assert costs.between("optimizer_bytes", 0, 34) == 12 * SEVEN.num_parameters
        assert costs.between("accumulator_bytes", 0, 34) == accumulator_bytes * SEVEN.num_parameters


def test_what_a_step_costs_beside_its_actions_falls_with_stages_and_bandwidth() -> None:
    slow, fast = NetworkLink(bandwidth_bytes_per_s=1e9), NetworkLink(bandwidth_bytes_per_s=1e10)
    costs = analytic_costs(SEVEN, A100, between_nodes=slow)

    def stages(number: int, width: int) -> list[Stage]:
        bounds = [round(34 * stage / number) for stage in range(number + 1)]
        return [Stage(start=a, stop=b, workers=tuple(range(width))) for a, b in itertools.pairwise(bounds)]

    few, many = costs.overhead_s(stages(2, 4)), costs.overhead_s(stages(8, 4))
    assert few > many > 0
    assert analytic_costs(SEVEN, A100, between_nodes=fast).overhead_s(stages(2, 4)) == pytest.approx(few / 10)
    pair = analytic_costs(SEVEN, A100, between_nodes=slow, tensor_parallel=2)
    assert pair.overhead_s(stages(2, 4)) == pytest.approx(few / 2)
    # Of 4 workers each sends and fetches three quarters: sums of the stage's first layer, its parameters.
    own = costs.layers[0].accumulator_bytes + costs.between("parameter_bytes", 0, 17)
    other = costs.layers[17].accumulator_bytes + costs.between("parameter_bytes", 17, 34)
    assert few == pytest.approx(max(own, other) * 3 / 4 / 1e9)
    assert costs.overhead_s(stages(2, 8)) == pytest.approx(few * 7 / 6)
    assert costs.overhead_s(stages(2, 1)) == 0


def test_several_devices_per_worker_share_the_work_and_pay_for_it() -> None:
    one, two = (analytic_costs(SEVEN, A100, tensor_parallel=count) for count in (1, 2))
    share = one.layers[1].forward_s / 2
    # 2 all-reduces of 2 steps, each half of 32 MiB over NVLink's 300 GB/s
    assert two.layers[1].forward_s == pytest.approx(share + 4 * (3.4e-6 + 4096 * 4096 / 300e9))
    assert two.layers[-1].forward_s == pytest.approx(one.layers[-1].forward_s / 2)
    cluster = preset_cluster(12, A100, tensor_parallel=2)
    assert cluster.node.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert cluster.devices[0].name == "2 x a100"
    assert cluster.memory_bytes[0] == pytest.approx(0.9 * 160 * 2**30)
    assert cluster.devices[0].levels[-1].power_w == 800
    assert cluster.between_nodes.bandwidth_bytes_per_s == 50e9


def test_a_described_cluster() -> None:
    cluster = preset_cluster(20, DEVICES["ascend-910b"], power_limit_w=5000.0, usable_memory=1.0)
    assert (cluster.num_workers, cluster.node[-1], cluster.power_limit_w) == (20, 2, 5000.0)
    assert cluster.memory_bytes.tolist() == [64 * 2.0**30] * 20
    assert cluster.within_node == LINKS["hccs"].link
    assert preset_cluster(3, A100).power_limit_w == pytest.approx(3 * 400)
    assert preset_cluster(3, A100, power_limit_w=None).power_limit_w is None
    slow = NetworkLink(bandwidth_bytes_per_s=1e9)
    assert preset_cluster(2, A100, within_node=slow, between_nodes=slow, workers_per_node=1).node.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"consistency": "loose"}, "consistency is 'loose'"),
        ({"accumulator_bits": 32}, "accumulator_bits is 32, needed: one of 64, 48"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"efficiency": 1.5}, "efficiency is 1.5"),
        ({"microbatch_size": 0}, "microbatch_size is 0"),
    ],
)
def test_impossible_descriptions_of_costs(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        analytic_costs(SEVEN, A100, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel": 9}, "9 devices per worker"),
        ({"usable_memory": 0.0}, "usable_memory is 0.0"),
        ({"power_limit_w": -1.0}, "power_limit_w is -1.0"),
    ],
)
def test_impossible_descriptions_of_clusters(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset_cluster(4, A100, **arguments)  # type: ignore[arg-type]


def test_presets_survive_json() -> None:
    for struct, presets in ((ModelShape, MODELS), (DevicePreset, DEVICES)):
        for preset in presets.values():
            assert msgspec.json.decode(msgspec.json.encode(preset), type=struct) == preset


def test_shares_have_the_proportions_of_costs_and_bytes_of_their_own() -> None:
    shares = analytic_shares(SEVEN, microbatch_size=2, optimizer_bytes=8)
    costs = analytic_costs(SEVEN, A100, microbatch_size=2)
    for field in ("forward_s", "input_gradient_s", "weight_gradient_s"):
        ratios = [getattr(a, field) / getattr(b, field) for a, b in zip(shares.layers[1:], costs.layers[1:])]
        assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert shares.between("parameter_bytes", 0, 34) == 4 * SEVEN.num_parameters
    assert shares.between("optimizer_bytes", 0, 34) == 8 * SEVEN.num_parameters
    assert shares.layers[1].boundary_bytes == 2 * costs.layers[1].boundary_bytes
    assert shares.layers[0].forward_s > 0
    with pytest.raises(ValueError, match="consistency is 'loose'"):
        analytic_shares(SEVEN, microbatch_size=1, consistency="loose")
