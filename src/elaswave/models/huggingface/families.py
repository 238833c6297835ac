"""The architectures that are known, by the ``model_type`` of their config.json, and the layers that each is made of.

A layer is called as transformers calls that module, so that every tensor has transformers' own name: in checkpoints, in
exports, in ``result.state_dict()`` and for parameter groups.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from elaswave.errors import UsageError
from elaswave.models.huggingface.parts import (
    LearnedPositions,
    Tokens,
    balances,
    balancing_norm,
    plain_block,
    rotary_block,
)

BY_HAND = (
    "To bring it by hand give elaswave.Trainer a list of layers: its embedding, each of its blocks, its head; "
    "docs/own-models/huggingface.md shows one"
)


Pieces = list[tuple[str, tuple[int, ...]]]
"""What a tensor is in files: names and shapes of tensors whose elements, one behind the other, are its elements."""


def _as_it_is(name: str, shape: Sequence[int]) -> Pieces:
    return [(name, tuple(shape))]


@dataclass(frozen=True)
class Family:
    """How an architecture is split.

    Args:
        name: of transformers' module and classes: ("llama", "Llama").
        causal: transformers' class of the whole model.
        parts: config -> for each layer its name and a function that makes it.
        base: of the names of tensors, which some checkpoints leave out.
        embedding: name of the table that the head may be tied to.
        pieces: (name of a parameter, its shape) -> what it is in files.
    """

    name: tuple[str, str]
    causal: str
    parts: Callable[["Family", Any], dict[str, Callable[[], nn.Module]]]
    base: str
    embedding: str
    pieces: Callable[[str, Sequence[int]], Pieces] = _as_it_is

    def kind(self, ending: str) -> Any:
        """One of transformers' classes.

        Args:
            ending: of its name, after the architecture's: "DecoderLayer".
        """
        module, prefix = self.name
        return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), prefix + ending)


HEAD = "lm_head"


def _rotary(family: Family, config: Any) -> dict[str, Callable[[], nn.Module]]:
    """Token table, blocks with rotary positions, RMS norm, head."""
    width, padding = config.hidden_size, getattr(config, "pad_token_id", None)

    def block(index: int) -> Callable[[], nn.Module]:
        kind = rotary_block(family.kind("DecoderLayer"), family.kind("RotaryEmbedding"))
        return lambda: kind(config, index, slides=_slides(config, index))

    def norm() -> nn.Module:
        if balances(config):
            return balancing_norm(family.kind("RMSNorm"))(config)
        return family.kind("RMSNorm")(width, eps=config.rms_norm_eps)

    return {
        "model.embed_tokens": lambda: Tokens(config.vocab_size, width, padding, config.max_position_embeddings),
        **{f"model.layers.{index}": block(index) for index in range(config.num_hidden_layers)},
        "model.norm": norm,
        HEAD: lambda: nn.Linear(width, config.vocab_size, bias=False),
    }


def _slides(config: Any, index: int) -> bool:
    """Whether a block sees the latest tokens only: each block by its type, or all if there is a window."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return bool(types[index] == "sliding_attention")
    return getattr(config, "sliding_window", None) is not None


def _gpt2(family: Family, config: Any) -> dict[str, Callable[[], nn.Module]]:
    """Token table, learned positions, blocks, layer norm, head."""
    width = config.hidden_size

    def block(index: int) -> Callable[[], nn.Module]:
        return lambda: plain_block(family.kind("Block"))(config, index)

    return {
        "transformer.wte": lambda: Tokens(config.vocab_size, width, None, config.max_position_embeddings),
        "transformer.wpe": lambda: LearnedPositions(config.max_position_embeddings, width, config.embd_pdrop),
        **{f"transformer.h.{index}": block(index) for index in range(config.num_hidden_layers)},
        "transformer.ln_f": lambda: nn.LayerNorm(width, eps=config.layer_norm_epsilon),
        HEAD: lambda: nn.Linear(width, config.vocab_size, bias=False),
    }


def _experts(block: str, gate: str, up: str, down: str) -> Callable[[str, Sequence[int]], Pieces]:
    """transformers keeps the experts of a block in two tensors, and files have three for each of them.

    Args:
        block, gate, up, down: names in files.
    """

    def pieces(name: str, shape: Sequence[int]) -> Pieces:
        where, _, last = name.rpartition(".")
        place = where.removesuffix(".experts").removesuffix(".mlp") + f".{block}"
        if last == "gate_up_proj":
            half = (shape[1] // 2, shape[2])
            return [
                (f"{place}.experts.{expert}.{each}.weight", half) for expert in range(shape[0]) for each in (gate, up)
            ]
        if last == "down_proj":
            return [(f"{place}.experts.{expert}.{down}.weight", tuple(shape[1:])) for expert in range(shape[0])]
        return _as_it_is(name.replace(".mlp.gate.", f".{block}.gate."), shape)

    return pieces


def _decoder(module: str, prefix: str, pieces: Callable[[str, Sequence[int]], Pieces] = _as_it_is) -> Family:
    return Family((module, prefix), f"{prefix}ForCausalLM", _rotary, "model.", "model.embed_tokens.weight", pieces)


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(("gpt2", "GPT2"), "GPT2LMHeadModel", _gpt2, "transformer.", "transformer.wte.weight"),
    "llama": _decoder("llama", "Llama"),
    "mistral": _decoder("mistral", "Mistral"),
    "qwen2": _decoder("qwen2", "Qwen2"),
    "qwen3": _decoder("qwen3", "Qwen3"),
    "qwen3_moe": _decoder("qwen3_moe", "Qwen3Moe", _experts("mlp", "gate_proj", "up_proj", "down_proj")),
    "mixtral": _decoder("mixtral", "Mixtral", _experts("block_sparse_moe", "w1", "w3", "w2")),
}
"""By ``model_type``."""


def family_of(config: Any) -> Family:
    """How the model of a configuration is split.

    Raises:
        UsageError: the architecture is not known, or is one for another task, or has something that is not carried;
            names it.
    """
    kind = getattr(config, "model_type", None)
    family = FAMILIES.get(str(kind))
    if family is None:
        raise unknown_architecture(str(kind), f"a {type(config).__name__}")
    others = [name for name in getattr(config, "architectures", None) or () if name != family.causal]
    if others:
        raise UsageError(
            f"the configuration is of a {others[0]}, needed: {family.causal}, which predicts the next token. Load that "
            f"class with from_pretrained and write it with save_pretrained. {BY_HAND}"
        )
    for key, what in (
        ("quantization_config", "quantized weights"),
        ("add_cross_attention", "cross-attention"),
        ("transformers_weights", "weights of another file than model.safetensors"),
    ):
        if getattr(config, key, None):
            raise UsageError(f"the configuration asks for {what} ({key}), which elaswave.hf does not carry. {BY_HAND}")
    return family


def unknown_architecture(model_type: str, where: str) -> UsageError:
    """The error for an architecture that is not in `FAMILIES`.

    Args:
        model_type: its name.
        where: it was seen.
    """
    return UsageError(
        f"{where} is of the architecture {model_type!r}, needed: one that elaswave.hf splits, "
        f"{', '.join(sorted(FAMILIES))}. {BY_HAND}"
    )
