"""Tiny random models of transformers' architectures, and plain loops that train them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from elaswave.models.layers import Call, Layer, inside

VOCABULARY, WIDTH, POSITIONS = 97, 16, 32

_ROTARY = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    },
    "llama": {**_ROTARY, "tie_word_embeddings": False},
    "mistral": {**_ROTARY, "sliding_window": 5},
    "qwen2": {
        **_ROTARY,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {**_ROTARY, "tie_word_embeddings": True, "head_dim": 8},
    "qwen3_moe": {
        **_ROTARY,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [1],
    },
    "mixtral": {**_ROTARY, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Arguments of the configuration, by architecture."""


def config_of(family: str, **changes: Any) -> Any:
    """A tiny configuration without dropout."""
    from transformers import AutoConfig

    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    return AutoConfig.for_model(family, **{**CONFIGS[family], **off, **changes})


def original(config: Any, seed: int = 3) -> Any:
    """transformers' own model with random weights, in training mode; norms and biases are random too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Writes a model as users have them."""
    model.save_pretrained(folder, **options)
    return folder


def call(layers: Sequence[Layer], inputs: Any) -> Any:
    """What the layers make of a micro-batch's inputs, one after the other, as a worker calls them."""
    value = inputs
    with inside(Call(lambda: inputs)):
        for layer in layers:
            value = layer.build()(value)
    return value


def tokens(num_samples: int, length: int = 12, seed: int = 5) -> torch.Tensor:
    """Token numbers [num_samples, length]."""
    return torch.randint(VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(seed))


def edit_json(path: Path, **changes: Any) -> None:
    """Changes keys of a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def microbatch_losses(model: Any, batches: Sequence[Any]) -> torch.Tensor:
    """transformers' own loss of each micro-batch of a step, from labels that are not shifted."""
    return torch.stack([model(**inputs, labels=labels).loss for inputs, labels in batches])


def save_tokenizer(folder: Path, text: str) -> None:
    """A byte-level tokenizer of at most `VOCABULARY` tokens for a text, as transformers writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
