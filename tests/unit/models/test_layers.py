"""The parts that models share: initial values, dropout, attention, the kernel of linear layers."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave.hashing import key64
from elaswave.models import layers
from elaswave.models.admission import build_for_shapes
from elaswave.models.layers import (
    CausalAttention,
    Dropout,
    Embedding,
    Layer,
    Linear,
    check_sequence,
    dropout_noise,
    token_loss,
)


def seed(value: int) -> None:
    torch.default_generator.manual_seed(value)


def test_token_loss_is_the_mean_negative_log_probability_in_float32():
    seed(1)
    logits_BTV = torch.randn(2, 5, 7)
    targets_BT = torch.randint(7, (2, 5))
    expected = 0.0
    for b, t in itertools.product(range(2), range(5)):
        row = logits_BTV[b, t].double()
        expected -= float(row[targets_BT[b, t]] - row.exp().sum().log()) / 10
    loss = token_loss(logits_BTV, targets_BT)
    assert loss.shape == () and loss.dtype == torch.float32
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert token_loss(logits_BTV.bfloat16(), targets_BT).dtype == torch.float32


def test_too_long_a_sequence_is_refused():
    check_sequence(torch.zeros(2, 8, dtype=torch.int64), 8)
    with pytest.raises(ValueError, match=r"9 tokens does not fit model.context_length, 8"):
        check_sequence(torch.zeros(2, 9, dtype=torch.int64), 8)


def test_initial_values_have_the_asked_for_spread_and_zero_biases():
    seed(2)
    linear = Linear(300, 200, bias=True, std=0.005)
    assert float(linear.weight.detach().std()) == pytest.approx(0.005, rel=0.02)
    assert not linear.bias.detach().any()
    assert float(Embedding(200, 300).weight.detach().std()) == pytest.approx(0.02, rel=0.02)


class TestDropout:
    @given(st.integers(1, 200_000), st.floats(0, 0.99))
    def test_share_and_scale(self, num_elements: int, probability: float):
        seed(num_elements)
        noise = dropout_noise(torch.Size((num_elements,)), probability, torch.float32)
        dropped = round(probability * 65536) / 65536
        assert set(noise.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - dropped)))}
        share = float((noise == 0).double().mean())
        # Six deviations, and what a few elements more or less make where next to none or all are dropped.
        bound = 6 * math.sqrt(dropped * (1 - dropped) / num_elements) + 12 / num_elements
        assert abs(share - dropped) <= bound

    def test_each_of_four_neighbours_is_dropped_equally_often_and_independently(self):
        seed(3)
        dropped_N4 = dropout_noise(torch.Size((100_000, 4)), 0.25, torch.float32) == 0
        together_44 = dropped_N4.double().T @ dropped_N4.double() / 100_000
        expected_44 = torch.full((4, 4), 0.25**2, dtype=torch.float64).fill_diagonal_(0.25)
        assert (together_44 - expected_44).abs().max() < 0.01

    def test_draws_from_the_default_generator_only_and_repeats_with_its_seed(self):
        x = torch.ones(1000)
        layer = Dropout(0.5)
        seed(4)
        first = layer(x)
        second = layer(x)
        seed(4)
        assert torch.equal(layer(x), first)
        assert not torch.equal(first, second)

    def test_is_the_identity_in_evaluation_and_at_zero_without_a_draw(self):
        x = torch.ones(10)
        seed(5)
        state = torch.default_generator.get_state()
        assert Dropout(0.0)(x) is x
        assert Dropout(0.5).eval()(x) is x
        assert torch.equal(torch.default_generator.get_state(), state)

    def test_gradient_passes_where_the_value_passed(self):
        x = torch.ones(1000, requires_grad=True)
        y = Dropout(0.3)(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, y.detach())

    def test_next_to_one_keeps_something_and_stays_finite(self):
        seed(6)
        noise = dropout_noise(torch.Size((1 << 18,)), 0.9999999, torch.float32)
        assert noise.isfinite().all() and noise.any()

    def test_bfloat16_and_odd_shapes(self):
        noise = dropout_noise(torch.Size((3, 5, 7)), 0.5, torch.bfloat16)
        assert noise.dtype == torch.bfloat16 and noise.shape == (3, 5, 7)
        assert set(noise.unique().tolist()) <= {0.0, 2.0}

    def test_says_its_probability(self):
        assert repr(Dropout(0.25)) == "Dropout(probability=0.25)"


def plain_attention(q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor) -> torch.Tensor:
    """Attention position by position and head by head, in the textbook's words."""
    B, T, H, D = q_BTHD.shape
    group = H // k_BTKD.shape[2]
    out_BTHD = torch.zeros_like(q_BTHD)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        scores = k_BTKD[b, : t + 1, h // group] @ q_BTHD[b, t, h] / math.sqrt(D)
        out_BTHD[b, t, h] = scores.softmax(0) @ v_BTKD[b, : t + 1, h // group]
    return out_BTHD.reshape(B, T, H * D)


class TestAttention:
    @pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
    @pytest.mark.parametrize("path", ["fused", "written out"])
    def test_against_the_plain_formulation(self, num_kv_heads: int, path: str, monkeypatch: pytest.MonkeyPatch):
        seed(7)
        q_BTHD = torch.randn(2, 5, 6, 4)
        k_BTKD, v_BTKD = torch.randn(2, 2, 5, num_kv_heads, 4).unbind(0)
        attention = CausalAttention(0.0 if path == "fused" else 0.5)
        if path == "written out":  # the path with dropout, with a mask of ones
            monkeypatch.setattr(attention.dropout, "forward", lambda x: x)
        found = attention(q_BTHD, k_BTKD, v_BTKD)
        assert found.is_contiguous()
        torch.testing.assert_close(found, plain_attention(q_BTHD, k_BTKD, v_BTKD), rtol=1e-5, atol=1e-6)

    def test_dropout_zeroes_weights_and_keeps_the_mean(self):
        seed(8)
        # With values of one the output of a head is the sum of its weights: 1 without dropout.
        q_BTHD, k_BTHD, v_BTHD = torch.randn(64, 16, 4, 8), torch.randn(64, 16, 4, 8), torch.ones(64, 16, 4, 8)
        out = CausalAttention(0.2)(q_BTHD, k_BTHD, v_BTHD)
        assert float(out.mean()) == pytest.approx(1, abs=0.02)
        first_BH = out.view(64, 16, 4, 8)[:, 0, :, 0]  # position 0 has a single weight: dropped or scaled
        kept = first_BH != 0
        torch.testing.assert_close(first_BH[kept], torch.full((int(kept.sum()),), 1.25), rtol=1e-4, atol=0)
        assert 0.1 < 1 - float(kept.double().mean()) < 0.3

    def test_evaluation_draws_nothing(self):
        q = torch.randn(1, 4, 2, 4)
        attention = CausalAttention(0.5).eval()
        assert torch.equal(attention(q, q, q), attention(q, q, q))


def at_address(tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """A copy that starts at an address equal to offset_bytes modulo 4096."""
    buffer = torch.empty(tensor.numel() * 4 + 3 * 4096, dtype=torch.uint8)
    start = -buffer.data_ptr() % 4096 + offset_bytes
    copy = buffer[start : start + tensor.numel() * 4].view(torch.float32).view(tensor.shape)
    return copy.copy_(tensor)


class TestLinearKernel:
    @pytest.mark.parametrize("use_onednn", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("shape", [(7, 33), (2, 5, 33), (1, 1, 33), (2, 3, 4, 33)])
    def test_products_and_gradients_against_float64(
        self, shape: tuple[int, ...], bias: bool, use_onednn: bool, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(layers, "USE_ONEDNN", use_onednn)
        seed(9)
        inputs = [torch.randn(shape), torch.randn(17, 33)] + ([torch.randn(17)] if bias else [])
        gradient = torch.randn(*shape[:-1], 17)
        results = []
        for dtype, function in ((torch.float32, layers.linear), (torch.float64, F.linear)):
            leaves = [value.to(dtype).requires_grad_() for value in inputs]
            out = function(*leaves, *([] if bias else [None]))
            results.append((out.detach(), *torch.autograd.grad(out, leaves, gradient.to(dtype))))
        for found, expected in zip(*results):
            assert found.dtype == torch.float32 and found.is_contiguous()
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)

    def test_only_what_is_asked_for_is_computed(self):
        x, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(layers.linear(x, weight, None).sum(), weight)
        torch.testing.assert_close(gradient, x.sum(0).expand(3, 8))
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(layers.linear(x, weight.detach(), None).sum(), x)
        torch.testing.assert_close(gradient, weight.detach().sum(0).expand(4, 8))

    @pytest.mark.parametrize("rows", [1, 2, 3, 4, 33, 512])
    @pytest.mark.parametrize("sizes", [(128, 384), (96, 40), (33, 7)])
    def test_bits_do_not_depend_on_addresses(self, rows: int, sizes: tuple[int, int]):
        seed(10)
        values = torch.randn(rows, sizes[0]), torch.randn(sizes[1], sizes[0]), torch.randn(sizes[1])
        gradient = torch.randn(rows, sizes[1])
        found = []
        for offsets in ((0, 0, 0), (64, 128, 1024 + 64), (192, 0, 64), (64, 64, 64)):
            leaves = [at_address(value, offset).requires_grad_() for value, offset in zip(values, offsets)]
            out = layers.linear(*leaves)
            found.append((out.detach(), *torch.autograd.grad(out, leaves, at_address(gradient, offsets[0]))))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other))

    def test_torch_without_onednn_is_served(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert layers._find_onednn() is None
        monkeypatch.setattr(layers, "_ONEDNN_LINEAR", None)
        x, weight = torch.randn(4, 8), torch.randn(3, 8)
        assert torch.equal(layers.linear(x, weight, None), F.linear(x, weight))

    def test_bfloat16_is_torchs_own(self):
        x, weight = torch.randn(4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
        assert torch.equal(layers.linear(x, weight, None), F.linear(x, weight))


def test_seeds_of_layers_differ_in_their_low_bits():
    keys = {key64(seed_value, index, "init") & 0xFFFFFFFF for seed_value in range(50) for index in range(50)}
    assert len(keys) == 2500


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def test_a_build_for_shapes_draws_nothing_from_a_normal_distribution():
    """Of a tensor without memory that would draw nothing either, but torch loads its compiler for it."""

    def build():
        named = torch.nn.Embedding(4, 3)
        torch.nn.init.normal_(named.weight, std=0.5)
        named.weight.data.normal_(0.0, 0.5)
        assert named.weight.device.type == "meta"
        return named

    with Operators() as seen:
        module = build_for_shapes(Layer("embedding", build))
    assert module.weight.shape == (4, 3)
    assert seen.names and "aten::normal_" not in seen.names
    with Operators() as seen:
        assert torch.nn.Embedding(4, 3).weight.std() > 0
    assert "aten::normal_" in seen.names
