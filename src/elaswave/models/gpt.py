"""GPT as a list of layers: learned positions, LayerNorm before each part, GELU, dropout.

Source: GPT-2 (Radford et al. 2019). Differs in that the output matrix is not tied to the token embedding, so that
embedding and head can live on different workers, and that it uses the exact GELU (0.20 ms against 0.67 ms for the
tanh approximation on one core, forward and backward of 512 x 512). transformers' ``GPT2LMHeadModel`` computes the same
with ``tie_word_embeddings=False`` and ``activation_function="gelu"``, under the names that `huggingface_name` gives.
Shape suffixes are explained in ``layers.py``.
"""

import functools
import re

import torch
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

LAYER_NORM_EPS = 1e-5
"""torch's default; ``layer_norm_epsilon`` in transformers."""

_HUGGINGFACE_MODULES = {
    "embedding.token": "transformer.wte",
    "embedding.position": "transformer.wpe",
    "head.norm": "transformer.ln_f",
    "head.output": "lm_head",
}
_HUGGINGFACE_IN_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_MATRICES_IN_BLOCK = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")


def gpt2_name(name: str) -> tuple[str, bool]:
    """Finds the place of a parameter in transformers' ``GPT2LMHeadModel``.

    Args:
        name: full name here, such as ``block.3.attention.qkv.weight``.
    Returns:
        The name there, ``transformer.h.3.attn.c_attn.weight``, and whether the matrix is transposed there: GPT-2's
        matrices are [in, out].
    Raises:
        ValueError: no parameter of a GPT has this name.
    """
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"block\.(\d+)\.(.+)", module)
    place = _HUGGINGFACE_MODULES.get(module) if match is None else _HUGGINGFACE_IN_BLOCK.get(match[2])
    if place is None or kind not in ("weight", "bias"):
        raise ValueError(
            f"no parameter of a GPT is named {name!r}: expected, for example, block.0.attention.qkv.weight"
        )
    if match is None:
        return f"{place}.{kind}", False
    return f"transformer.h.{match[1]}.{place}.{kind}", kind == "weight" and match[2] in _MATRICES_IN_BLOCK


class GPTEmbedding(nn.Module):
    """Token and position embeddings, added."""

    def __init__(self, vocab_size: int, hidden_size: int, context_length: int, dropout: float) -> None:
        super().__init__()
        self.token = Embedding(vocab_size, hidden_size)
        self.position = Embedding(context_length, hidden_size)
        self.dropout = Dropout(dropout)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Maps int64 tokens [B, T] to activations [B, T, C]."""
        check_sequence(tokens_BT, self.position.num_embeddings)
        x_BTC: torch.Tensor = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        return self.dropout(x_BTC)


class GPTAttention(nn.Module):
    """Causal self-attention; queries, keys and values come from one matrix."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(hidden_size, 3 * hidden_size, bias=True)
        self.output = Linear(hidden_size, hidden_size, bias=True, std=residual_std)
        self.attend = CausalAttention(dropout)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        B, T, C = x_BTC.shape
        q_BTHD, k_BTHD, v_BTHD = self.qkv(x_BTC).view(B, T, 3, self.num_heads, C // self.num_heads).unbind(2)
        return self.output(self.attend(q_BTHD, k_BTHD, v_BTHD))


class GPTMLP(nn.Module):
    """Two matrices with a GELU between them; intermediate size 4 C."""

    def __init__(self, hidden_size: int, residual_std: float) -> None:
        super().__init__()
        self.up = Linear(hidden_size, 4 * hidden_size, bias=True)
        self.activation = nn.GELU()
        self.down = Linear(4 * hidden_size, hidden_size, bias=True, std=residual_std)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        return self.down(self.activation(self.up(x_BTC)))


class GPTBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the stream."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS)
        self.attention = GPTAttention(hidden_size, num_heads, dropout, residual_std)
        self.mlp_norm = nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS)
        self.mlp = GPTMLP(hidden_size, residual_std)
        self.dropout = Dropout(dropout)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC)))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))


class GPTHead(nn.Module):
    """Final LayerNorm and the map to logits."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS)
        self.output = Linear(hidden_size, vocab_size, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, C] to logits [B, T, V]."""
        return self.output(self.norm(x_BTC))


def gpt(
    *, vocab_size: int, num_layers: int, hidden_size: int, num_heads: int, context_length: int, dropout: float
) -> ModelSpec:
    """Makes a GPT of ``num_layers + 2`` layers: ``embedding``, ``block.0`` ..., ``head``.

    Initial values are GPT-2's: normal(0, 0.02), matrices that write to the stream scaled by 1/sqrt(2 * num_layers),
    biases zero.

    Args:
        vocab_size: number of different tokens.
        num_layers: number of blocks.
        hidden_size: of the activations; a multiple of num_heads.
        num_heads: attention heads.
        context_length: most positions of a sequence.
        dropout: probability, in [0, 1), used on embeddings, attention weights and what each part adds to the stream.
    Raises:
        ConfigError: impossible sizes, all of them listed.
    """
    check_sizes(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        context_length=context_length,
        dropout=dropout,
    )
    residual_std = INIT_STD / (2 * num_layers) ** 0.5
    block = functools.partial(GPTBlock, hidden_size, num_heads, dropout, residual_std)
    return ModelSpec(
        layers=(
            Layer("embedding", functools.partial(GPTEmbedding, vocab_size, hidden_size, context_length, dropout)),
            *(Layer(f"block.{index}", block) for index in range(num_layers)),
            Layer("head", functools.partial(GPTHead, vocab_size, hidden_size)),
        ),
        loss=token_loss,
    )
