"""GPT and Llama as lists of layers: numbers against plain formulations, initial values, names, refusals, bits."""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from elaswave.blocks.shapes import all_tensors
from elaswave.errors import ConfigError
from elaswave.models.layers import ModelSpec, build_layer
from elaswave.models.llama import RMS_NORM_EPS, default_intermediate_size, huggingface_llama_name, rotary_tables
from elaswave.state.flat import model_shapes
from elaswave.training.definition import FAMILY_OPTIONS, MODELS, build_model

SIZES = {"vocab_size": 50, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "context_length": 16, "dropout": 0.0}


def small(family: str, **changes: float | None) -> ModelSpec:
    options = {"num_kv_heads": 2, "intermediate_size": 48} if family == "llama" else {}
    return build_model(family, **{**SIZES, **options, **changes})  # type: ignore[arg-type]


def parameters(model: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every parameter under its full name, in the layers' order."""
    return {
        f"{spec.name}.{name}": parameter.detach()
        for index, spec in enumerate(model.layers)
        for name, parameter in build_layer(spec, seed, index).named_parameters()
    }


def logits(model: ModelSpec, tokens_BT: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's output with the given parameters."""
    x = tokens_BT
    for spec in model.layers:
        own = {name.removeprefix(f"{spec.name}."): v for name, v in values.items() if name.startswith(f"{spec.name}.")}
        x = torch.func.functional_call(spec.build(), own, (x,))
    return x


def perturbed(model: ModelSpec) -> dict[str, torch.Tensor]:
    """Parameters without symmetries: no zero bias, no norm of ones, weights large enough for attention to matter."""
    torch.default_generator.manual_seed(1)
    return {name: value + 0.1 * torch.randn_like(value) for name, value in parameters(model).items()}


def tokens(batch: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(2))


def attend(q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
    B, T, H, D = q_BTHD.shape
    scores_BHTS = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD) / math.sqrt(D)
    scores_BHTS = scores_BHTS.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhts,bshd->bthd", scores_BHTS.softmax(-1), v_BTHD).reshape(B, T, H * D)


def plain_gpt(w: dict[str, torch.Tensor], tokens_BT: torch.Tensor, num_layers: int, num_heads: int) -> torch.Tensor:
    """GPT-2's formulas, written straight down."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    B, T = tokens_BT.shape
    x = w["embedding.token.weight"][tokens_BT] + w["embedding.position.weight"][torch.arange(T)]
    for index in range(num_layers):
        name = f"block.{index}"
        qkv = linear(norm(x, f"{name}.attention_norm"), f"{name}.attention.qkv")
        q, k, v = (part.reshape(B, T, num_heads, -1) for part in qkv.chunk(3, -1))
        x = x + linear(attend(q, k, v), f"{name}.attention.output")
        hidden = linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.up")
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, f"{name}.mlp.down")
    return norm(x, "head.norm") @ w["head.output.weight"].T


def plain_llama(
    w: dict[str, torch.Tensor], tokens_BT: torch.Tensor, num_layers: int, num_heads: int, theta: float = 10_000.0
) -> torch.Tensor:
    """Llama's formulas: rotation as complex numbers, repeated key/value heads."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + RMS_NORM_EPS).sqrt() * w[f"{name}.weight"]

    def rotated(x_BTHD: torch.Tensor) -> torch.Tensor:
        half = x_BTHD.shape[-1] // 2
        frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles_TD = torch.outer(torch.arange(x_BTHD.shape[1], dtype=torch.float64), frequencies)
        pairs = torch.complex(x_BTHD[..., :half].double(), x_BTHD[..., half:].double())
        pairs = pairs * torch.polar(torch.ones_like(angles_TD), angles_TD)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1).to(x_BTHD.dtype)

    B, T = tokens_BT.shape
    x = w["embedding.token.weight"][tokens_BT]
    D = x.shape[-1] // num_heads
    for index in range(num_layers):
        name = f"block.{index}"
        h = norm(x, f"{name}.attention_norm")
        q, k, v = ((h @ w[f"{name}.attention.{m}.weight"].T).reshape(B, T, -1, D) for m in ("wq", "wk", "wv"))
        k, v = (part.repeat_interleave(num_heads // part.shape[2], 2) for part in (k, v))
        x = x + attend(rotated(q), rotated(k), v) @ w[f"{name}.attention.wo.weight"].T
        h = norm(x, f"{name}.feed_forward_norm")
        gate, up = (h @ w[f"{name}.feed_forward.{m}.weight"].T for m in ("w1", "w3"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{name}.feed_forward.w2.weight"].T
    return norm(x, "head.norm") @ w["head.output.weight"].T


PLAIN: dict[str, Callable[..., torch.Tensor]] = {"gpt": plain_gpt, "llama": plain_llama}


@pytest.mark.parametrize("length", [16, 5])
@pytest.mark.parametrize("family", sorted(MODELS))
def test_logits_and_gradients_against_a_plain_formulation_in_float64(family: str, length: int):
    model = small(family)
    values = perturbed(model)
    x_BT, y_BT = tokens(length=length), tokens(length=length).roll(-1, 1)

    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    found = logits(model, x_BT, leaves)
    loss = model.loss(found, y_BT)
    gradients = torch.autograd.grad(loss, list(leaves.values()))

    exact_leaves = {name: value.double().requires_grad_() for name, value in values.items()}
    expected = PLAIN[family](exact_leaves, x_BT, 2, 4)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), y_BT.flatten())
    expected_gradients = torch.autograd.grad(expected_loss, list(exact_leaves.values()))

    assert found.shape == (3, length, 50) and found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert float(loss.detach()) == pytest.approx(float(expected_loss.detach()), rel=1e-6)
    for name, gradient, exact in zip(leaves, gradients, expected_gradients):
        error = float((gradient.double() - exact).abs().max())
        assert error <= 2e-5 * max(float(exact.abs().max()), 1e-3), name


def test_llama_with_other_bases_of_the_rotation():
    model = small("llama", rope_theta=500.0)
    values = perturbed(model)
    expected = plain_llama({name: value.double() for name, value in values.items()}, tokens(), 2, 4, theta=500.0)
    torch.testing.assert_close(logits(model, tokens(), values).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", sorted(MODELS))
def test_no_position_sees_a_later_one(family: str):
    model = small(family)
    values = perturbed(model)
    x_BT = tokens()
    changed = x_BT.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = logits(model, x_BT, values), logits(model, changed, values)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_rotary_tables_turn_by_the_angle_of_the_position():
    cos_T1D, sin_T1D = rotary_tables(8, 4, 100.0)
    assert cos_T1D.shape == sin_T1D.shape == (8, 1, 4) and cos_T1D.dtype == torch.float32
    assert float(cos_T1D[3, 0, 1]) == pytest.approx(math.cos(3 * 100.0**-0.5))
    assert float(sin_T1D[3, 0, 1]) == pytest.approx(-math.sin(3 * 100.0**-0.5))
    assert float(sin_T1D[3, 0, 3]) == pytest.approx(math.sin(3 * 100.0**-0.5))


@pytest.mark.parametrize("family", sorted(MODELS))
class TestLayers:
    def test_names(self, family: str):
        model = small(family)
        assert [spec.name for spec in model.layers] == ["embedding", "block.0", "block.1", "head"]

    def test_initial_values_do_not_depend_on_order_or_history(self, family: str):
        model = small(family)
        forwards = parameters(model, seed=3)
        for index in reversed(range(len(model.layers))):
            torch.default_generator.manual_seed(index)
            torch.randn(index + 1)
            spec = model.layers[index]
            for name, value in build_layer(spec, 3, index).named_parameters():
                assert torch.equal(value, forwards[f"{spec.name}.{name}"]), name

    def test_initial_values_depend_on_seed_and_layer(self, family: str):
        one, other = parameters(small(family), seed=3), parameters(small(family), seed=4)
        matrices = [name for name, value in one.items() if value.dim() == 2]
        assert all(not torch.equal(one[name], other[name]) for name in matrices)
        first = [name for name in matrices if name.startswith("block.0.")]
        assert all(not torch.equal(one[name], one[name.replace("block.0", "block.1")]) for name in first)

    def test_initial_values_are_gpt2s(self, family: str):
        values = parameters(small(family, hidden_size=256, num_layers=8, vocab_size=512, intermediate_size=512))
        residual = ("attention.output", "mlp.down") if family == "gpt" else ("attention.wo", "feed_forward.w2")
        for name, value in values.items():
            if value.dim() == 1:
                assert value.unique().tolist() == ([1.0] if name.endswith("norm.weight") else [0.0]), name
            else:
                std = 0.02 / 4 if any(part in name for part in residual) else 0.02
                assert float(value.std()) == pytest.approx(std, rel=0.05), name
                assert abs(float(value.mean())) < std / 20, name

    def test_the_meta_device_gives_the_same_parameters_without_memory_or_draws(self, family: str):
        torch.default_generator.manual_seed(0)
        state = torch.default_generator.get_state()
        for spec in small(family).layers:
            with torch.device("meta"):
                module = spec.build()
            real = dict(spec.build().named_parameters())
            torch.default_generator.set_state(state)
            with torch.device("meta"):
                spec.build()
            assert torch.equal(torch.default_generator.get_state(), state)
            assert {name: p.shape for name, p in module.named_parameters()} == {n: p.shape for n, p in real.items()}
            assert all(parameter.device.type == "meta" for parameter in module.parameters())

    def test_only_matrices_decay(self, family: str):
        for slot in all_tensors(model_shapes(small(family))):
            assert slot.decays == (len(slot.shape) == 2)

    def test_repeated_calls_with_one_seed_give_the_same_bits_and_nothing_is_kept(self, family: str):
        model = small(family, dropout=0.3)
        for index, spec in enumerate(model.layers):
            layer = build_layer(spec, 0, index)
            buffers = [buffer.clone() for buffer in layer.buffers()]
            x = tokens() if index == 0 else torch.randn(3, 16, 32).requires_grad_()
            wanted = [*layer.parameters(), *([x] if index else [])]
            results = []
            for between in (0, 7):
                layer(x)  # another micro-batch in between, with other draws
                torch.randn(between + 1)
                torch.default_generator.manual_seed(5)
                out = layer(x)
                results.append((out.detach(), *torch.autograd.grad(out.square().sum(), wanted)))
            assert all(torch.equal(a, b) for a, b in zip(*results)), spec.name
            assert all(torch.equal(a, b) for a, b in zip(buffers, layer.buffers()))

    def test_dropout_changes_training_and_leaves_evaluation_alone(self, family: str):
        model, without = small(family, dropout=0.3), small(family)
        torch.default_generator.manual_seed(9)
        for index, (spec, plain) in enumerate(zip(model.layers[:-1], without.layers)):
            layer, reference = build_layer(spec, 0, index), build_layer(plain, 0, index)
            x = tokens() if index == 0 else torch.randn(3, 16, 32)
            assert not torch.equal(layer(x), layer(x))
            torch.testing.assert_close(layer.eval()(x), reference(x))

    def test_bfloat16_parameters_compute_in_bfloat16_with_a_float32_loss(self, family: str):
        model = small(family, dropout=0.1)
        values = perturbed(model)
        expected = logits(small(family), tokens(), values)
        x = tokens()
        for index, spec in enumerate(model.layers):
            layer = build_layer(spec, 0, index)
            for name, parameter in layer.named_parameters():  # what the engine does: buffers stay as they are
                parameter.data = values[f"{spec.name}.{name}"].bfloat16()
            out = layer(x)
            assert out.dtype == torch.bfloat16
            gradients = torch.autograd.grad(out.float().sum(), list(layer.parameters()))
            assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
            x = layer.eval()(x).detach()
        torch.testing.assert_close(x.float(), expected, rtol=0.1, atol=0.1)
        assert model.loss(x, tokens()).dtype == torch.float32

    def test_too_long_a_sequence(self, family: str):
        layer = small(family).layers[0].build()
        with pytest.raises(ValueError, match="17 tokens does not fit model.context_length, 16"):
            layer(tokens(length=17))

    def test_all_impossible_sizes_are_listed(self, family: str):
        with pytest.raises(ConfigError) as caught:
            small(family, vocab_size=0, hidden_size=30, context_length=-1, dropout=1.0, num_layers=0)
        for key in ("data.vocab_size: 0", "model.hidden_size: 30", "model.context_length: -1", "model.dropout: 1.0"):
            assert any(problem.startswith(key) for problem in caught.value.problems), key
        assert any(problem.startswith("model.num_layers: 0 is below 1") for problem in caught.value.problems)
        with pytest.raises(ConfigError, match="model.num_heads: 0 is below 1"):
            small(family, num_heads=0)


def moved(tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """A copy that starts at an address equal to offset_bytes modulo 4096."""
    num_bytes = tensor.numel() * tensor.element_size()
    buffer = torch.empty(num_bytes + 2 * 4096, dtype=torch.uint8)
    start = -buffer.data_ptr() % 4096 + offset_bytes
    return buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(MODELS))
def test_bits_do_not_depend_on_where_parameters_and_activations_lie(family: str, dtype: torch.dtype):
    model = small(family, dropout=0.2, hidden_size=96, context_length=33, num_heads=6, num_kv_heads=3)
    torch.default_generator.manual_seed(3)
    values = {name: value.to(dtype) for name, value in perturbed(model).items()}
    activations, gradient = torch.randn(2, 33, 96, dtype=dtype), torch.randn(2, 33, 96, dtype=dtype)
    for index, spec in enumerate(model.layers[:-1]):
        results = []
        for offset in (0, 64, 704):
            layer = build_layer(spec, 0, index)
            for position, (name, parameter) in enumerate(layer.named_parameters()):
                parameter.data = moved(values[f"{spec.name}.{name}"], offset * (position + 1) % 4096)
            x = tokens(2, 33) if index == 0 else moved(activations, offset).requires_grad_()
            torch.default_generator.manual_seed(4)
            out = layer(x)
            wanted = [*layer.parameters(), *([x] if index else [])]
            results.append((out.detach(), *torch.autograd.grad(out, wanted, moved(gradient, offset))))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other)), spec.name


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_gpu_uses_the_same_dropout_and_computes_nearly_the_same(family: str):
    model = small(family, dropout=0.2)
    torch.default_generator.manual_seed(3)
    for index, spec in enumerate(model.layers):
        x = tokens() if index == 0 else torch.randn(3, 16, 32)
        outputs = []
        for device in ("cpu", "cuda"):
            layer = build_layer(spec, 0, index).to(device)
            torch.default_generator.manual_seed(4)
            outputs.append(layer(x.to(device)).detach().cpu())
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


IN_ANOTHER_PROCESS = """
import sys, hashlib
from elaswave.models.layers import build_layer
from elaswave.training.definition import build_model
for family in sys.argv[1:]:
    model = build_model(family, vocab_size=50, num_layers=2, hidden_size=32, num_heads=4, context_length=16,
                        dropout=0.0, num_kv_heads=2, intermediate_size=48)
    values = b"".join(p.detach().numpy().tobytes() for p in build_layer(model.layers[2], 11, 2).parameters())
    print(family, hashlib.sha256(values).hexdigest())
"""


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, str]:
    """Hashes of a layer's values by family, as another process has built it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, *MODELS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize("family", sorted(MODELS))
def test_another_process_that_builds_one_layer_alone_gets_the_same_values(family: str, elsewhere: dict[str, str]):
    layer = build_layer(small(family).layers[2], 11, 2)
    own = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in layer.parameters())).hexdigest()
    assert elsewhere[family] == own


class TestLlamaSizes:
    def test_problems_of_its_own_are_listed(self):
        with pytest.raises(ConfigError) as caught:
            small("llama", num_kv_heads=3, intermediate_size=0, rope_theta=0.0, hidden_size=12)
        text = "\n".join(caught.value.problems)
        assert "model.num_heads: 4 is no multiple of model.num_kv_heads, 3" in text
        assert "model.hidden_size: heads of 3 elements cannot be rotated" in text
        assert "model.intermediate_size: 0 is below 1" in text
        assert "model.rope_theta: 0.0 is not a positive number" in text
        with pytest.raises(ConfigError, match="model.num_kv_heads: 0 is below 1"):
            small("llama", num_kv_heads=0)

    def test_defaults(self):
        assert default_intermediate_size(128) == 352
        assert default_intermediate_size(4096) == 10944
        values = parameters(small("llama", num_kv_heads=None, intermediate_size=None))
        assert values["block.0.attention.wk.weight"].shape == (32, 32)
        assert values["block.0.feed_forward.w1.weight"].shape == (96, 32)

    def test_grouped_queries_shrink_keys_and_values(self):
        values = parameters(small("llama", num_kv_heads=1))
        assert values["block.0.attention.wk.weight"].shape == values["block.0.attention.wv.weight"].shape == (8, 32)


class TestHuggingfaceNames:
    def test_every_parameter_has_its_own(self):
        names = [huggingface_llama_name(name) for name in parameters(small("llama"))]
        assert len(set(names)) == len(names)
        assert huggingface_llama_name("block.13.attention.wq.weight") == "model.layers.13.self_attn.q_proj.weight"
        assert huggingface_llama_name("embedding.token.weight") == "model.embed_tokens.weight"
        assert huggingface_llama_name("head.output.weight") == "lm_head.weight"

    @pytest.mark.parametrize("name", ["block.x.attention.wq.weight", "block.0.mlp.up.weight", "", "lm_head.weight"])
    def test_unknown_names_are_refused(self, name: str):
        with pytest.raises(ValueError, match="no parameter of a Llama is named"):
            huggingface_llama_name(name)

    def test_transformers_computes_the_same_logits(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            rms_norm_eps=RMS_NORM_EPS,
            tie_word_embeddings=False,
            attention_bias=False,
            mlp_bias=False,
        )
        theirs = transformers.LlamaForCausalLM(config).eval()
        model = small("llama")
        values = perturbed(model)
        theirs.load_state_dict({huggingface_llama_name(name): value for name, value in values.items()})
        with torch.no_grad():
            expected = theirs(tokens()).logits
        torch.testing.assert_close(logits(model, tokens(), values), expected, rtol=1e-4, atol=1e-5)


class TestRegistry:
    def test_options_of_other_families_are_ignored(self):
        model = build_model("gpt", **SIZES, num_kv_heads=2, intermediate_size=None, rope_theta=1e4)  # type: ignore[arg-type]
        assert len(model.layers) == 4

    def test_every_family_has_its_options_listed(self):
        assert MODELS.keys() == FAMILY_OPTIONS.keys()

    def test_an_unknown_family(self):
        with pytest.raises(ConfigError, match="model.family: 'mamba' is not known, choose one of gpt, llama"):
            build_model("mamba", **SIZES)  # type: ignore[arg-type]

    def test_an_option_of_no_family(self):
        with pytest.raises(TypeError, match="no model family has the option kv_heads"):
            build_model("gpt", **SIZES, kv_heads=1)  # type: ignore[arg-type]
