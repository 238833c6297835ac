"""Llama as a list of layers: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Source: Llama 2 (Touvron et al. 2023). Rotary positions pair element i of a head with element i + D/2, as Hugging
Face's transformers do (the paper's code pairs neighbours), so that weights load there unchanged under the names that
`huggingface_name` gives. Dropout, which Llama does not have, sits where GPT has it, off when it is 0. Shape suffixes
are explained in ``layers.py``.
"""

import functools
import re

import torch
import torch.nn.functional as F
from torch import nn

from elaswave.models.layers import (
    INIT_STD,
    CausalAttention,
    Dropout,
    Embedding,
    Layer,
    Linear,
    ModelSpec,
    check_sequence,
    check_sizes,
    token_loss,
)

RMS_NORM_EPS = 1e-5
"""Llama 2's; ``rms_norm_eps`` in transformers."""

_HUGGINGFACE_FIXED = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_HUGGINGFACE_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}


def huggingface_llama_name(name: str) -> str:
    """Finds the name of a parameter in transformers' ``LlamaForCausalLM``.

    Args:
        name: full name here, such as ``block.3.attention.wq.weight``.
    Returns:
        The name there, ``model.layers.3.self_attn.q_proj.weight``.
    Raises:
        ValueError: no parameter of a Llama has this name.
    """
    if name in _HUGGINGFACE_FIXED:
        return _HUGGINGFACE_FIXED[name]
    match = re.fullmatch(r"block\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _HUGGINGFACE_IN_BLOCK:
        raise ValueError(
            f"no parameter of a Llama is named {name!r}: expected, for example, block.0.attention.wq.weight"
        )
    return f"model.layers.{match[1]}.{_HUGGINGFACE_IN_BLOCK[match[2]]}"


def rotary_tables(num_positions: int, head_width: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of the rotation angles, computed in float64 and rounded once.

    Args:
        num_positions: positions 0 to num_positions - 1.
        head_width: D, even.
        theta: base of the frequencies, ``theta ** (-2 i / D)`` for pair i.
    Returns:
        float32 [T, 1, D] each: ``cos`` repeated for both halves, and ``-sin`` for the first half, ``sin`` for the
        second.
    """
    frequencies = theta ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), -1).to(torch.float32).unsqueeze(1),
        torch.cat((-sin, sin), -1).to(torch.float32).unsqueeze(1),
    )


def rotate(x_BTHD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotates each head by its position, in float32, and rounds to the dtype of x.

    Source: RoFormer (Su et al. 2021), with the halves of a head as pairs.
    """
    D = x_BTHD.shape[-1]
    swapped = x_BTHD.roll(D // 2, -1)
    return torch.addcmul(x_BTHD * cos_T1D, swapped, sin_T1D).to(x_BTHD.dtype)


class LlamaEmbedding(nn.Module):
    """Token embedding; positions enter in the attention."""

    def __init__(self, vocab_size: int, hidden_size: int, context_length: int, dropout: float) -> None:
        super().__init__()
        self.context_length = context_length
        self.token = Embedding(vocab_size, hidden_size)
        self.dropout = Dropout(dropout)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Maps int64 tokens [B, T] to activations [B, T, C]."""
        check_sequence(tokens_BT, self.context_length)
        return self.dropout(self.token(tokens_BT))


class LlamaAttention(nn.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        context_length: int,
        dropout: float,
        rope_theta: float,
        residual_std: float,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_width = hidden_size // num_heads
        self.wq = Linear(hidden_size, hidden_size, bias=False)
        self.wk = Linear(hidden_size, num_kv_heads * self.head_width, bias=False)
        self.wv = Linear(hidden_size, num_kv_heads * self.head_width, bias=False)
        self.wo = Linear(hidden_size, hidden_size, bias=False, std=residual_std)
        self.attend = CausalAttention(dropout)
        cos_T1D, sin_T1D = rotary_tables(context_length, self.head_width, rope_theta)
        self.cos_T1D: torch.Tensor
        self.sin_T1D: torch.Tensor
        self.register_buffer("cos_T1D", cos_T1D, persistent=False)
        self.register_buffer("sin_T1D", sin_T1D, persistent=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        B, T, _ = x_BTC.shape
        cos_T1D, sin_T1D = self.cos_T1D[:T], self.sin_T1D[:T]
        q_BTHD = rotate(self.wq(x_BTC).view(B, T, self.num_heads, self.head_width), cos_T1D, sin_T1D)
        k_BTKD = rotate(self.wk(x_BTC).view(B, T, self.num_kv_heads, self.head_width), cos_T1D, sin_T1D)
        v_BTKD = self.wv(x_BTC).view(B, T, self.num_kv_heads, self.head_width)
        return self.wo(self.attend(q_BTHD, k_BTKD, v_BTKD))


class LlamaFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): a product of two maps, one of them through a SiLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, residual_std: float) -> None:
        super().__init__()
        self.w1 = Linear(hidden_size, intermediate_size, bias=False)
        self.w2 = Linear(intermediate_size, hidden_size, bias=False, std=residual_std)
        self.w3 = Linear(hidden_size, intermediate_size, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        return self.w2(F.silu(self.w1(x_BTC)) * self.w3(x_BTC))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm and added to the stream."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        context_length: int,
        dropout: float,
        intermediate_size: int,
        rope_theta: float,
        residual_std: float,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps=RMS_NORM_EPS)
        self.attention = LlamaAttention(
            hidden_size, num_heads, num_kv_heads, context_length, dropout, rope_theta, residual_std
        )
        self.feed_forward_norm = nn.RMSNorm(hidden_size, eps=RMS_NORM_EPS)
        self.feed_forward = LlamaFeedForward(hidden_size, intermediate_size, residual_std)
        self.dropout = Dropout(dropout)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC)))
        return x_BTC + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTC)))


class LlamaHead(nn.Module):
    """Final RMSNorm and the map to logits."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=RMS_NORM_EPS)
        self.output = Linear(hidden_size, vocab_size, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, C] to logits [B, T, V]."""
        return self.output(self.norm(x_BTC))


def default_intermediate_size(hidden_size: int) -> int:
    """Llama's rule: two thirds of 4 C, rounded up to a multiple of 32."""
    return -(-8 * hidden_size // 3 // 32) * 32


def llama(
    *,
    vocab_size: int,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    context_length: int,
    dropout: float,
    intermediate_size: int | None = None,
    rope_theta: float = 10_000.0,
) -> ModelSpec:
    """Makes a Llama of ``num_layers + 2`` layers: ``embedding``, ``block.0`` ..., ``head``.

    Initial values as in `elaswave.models.gpt.gpt`; norms start at one.

    Args:
        vocab_size: number of different tokens.
        num_layers: number of blocks.
        hidden_size: of the activations; a multiple of 2 * num_heads.
        num_heads: query heads; a multiple of num_kv_heads.
        num_kv_heads: key/value heads; None for as many as query heads.
        context_length: most positions of a sequence.
        dropout: probability, in [0, 1), used on embeddings, attention weights and what each part adds to the stream.
        intermediate_size: of the feed-forward part; None for `default_intermediate_size`.
        rope_theta: base of the rotary frequencies.
    Raises:
        ConfigError: impossible sizes, all of them listed.
    """
    problems = []
    if num_kv_heads is None:
        num_kv_heads = num_heads
    elif num_kv_heads < 1:
        problems.append(f"model.num_kv_heads: {num_kv_heads} is below 1")
    elif num_heads % num_kv_heads:
        problems.append(f"model.num_heads: {num_heads} is no multiple of model.num_kv_heads, {num_kv_heads}")
    if num_heads >= 1 and hidden_size % num_heads == 0 and (hidden_size // num_heads) % 2:
        problems.append(
            f"model.hidden_size: heads of {hidden_size // num_heads} elements cannot be rotated, they need an even "
            "number"
        )
    if intermediate_size is not None and intermediate_size < 1:
        problems.append(f"model.intermediate_size: {intermediate_size} is below 1")
    if not 0 < rope_theta < float("inf"):
        problems.append(f"model.rope_theta: {rope_theta} is not a positive number")
    check_sizes(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        context_length=context_length,
        dropout=dropout,
        problems=problems,
    )
    block = functools.partial(
        LlamaBlock,
        hidden_size,
        num_heads,
        num_kv_heads,
        context_length,
        dropout,
        default_intermediate_size(hidden_size) if intermediate_size is None else intermediate_size,
        rope_theta,
        INIT_STD / (2 * num_layers) ** 0.5,
    )
    return ModelSpec(
        layers=(
            Layer("embedding", functools.partial(LlamaEmbedding, vocab_size, hidden_size, context_length, dropout)),
            *(Layer(f"block.{index}", block) for index in range(num_layers)),
            Layer("head", functools.partial(LlamaHead, vocab_size, hidden_size)),
        ),
        loss=token_loss,
    )
