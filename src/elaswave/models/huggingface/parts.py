"""The layers that a transformers model is split into: its own classes, called with one tensor.

Nothing of an architecture is written again here. A block is the library's own class, as a subclass that takes the
hidden states alone: mask, positions and rotary tables follow from the micro-batch's inputs (`elaswave.batch`) and the
configuration, so every stage computes them by itself and none of them is sent. There is no key/value cache.

The architectures that are known, by the ``model_type`` of their config.json, and the layers that each is made of.

A layer is called as transformers calls that module, so that every tensor has transformers' own name: in checkpoints, in
exports, in ``result.state_dict()`` and for parameter groups.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elaswave.errors import UsageError
from elaswave.models.layers import aux_loss, batch

_INPUTS = ("input_ids", "attention_mask", "position_ids")


def type_and_shape(tensor: torch.Tensor) -> str:
    """Describes the type and shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def outside(name: str, numbers: torch.Tensor, size: int) -> str:
    """Tells what is wrong with numbers that no table has.

    Args:
        name: of the numbers.
        numbers: some of them too large or too small.
        size: of the table.
    """
    return (
        f"{name} of this micro-batch hold numbers from {int(numbers.min())} to {int(numbers.max())}, needed: 0 to "
        f"{size - 1}, what this model's configuration has; make the tokens with the tokenizer of this model"
    )


class _Inputs:
    """The inputs of a micro-batch: a tensor of token numbers, or a dictionary of `_INPUTS`."""

    __slots__ = ("attention_mask", "input_ids", "position_ids")

    def __init__(self, inputs: Any) -> None:
        named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
        unknown = [name for name in named if name not in _INPUTS and named[name] is not None]
        if unknown or not isinstance(named.get("input_ids"), torch.Tensor):
            found = f"a dictionary with {', '.join(map(repr, named))}" if isinstance(inputs, Mapping) else type(inputs)
            raise UsageError(
                f"the inputs of a micro-batch are {found}, needed: a tensor of token numbers [samples, tokens], or a "
                f"dictionary with 'input_ids' and, if need be, 'attention_mask' and 'position_ids'; the labels are the "
                "targets. Leave the rest out in the dataset or in collate"
            )
        self.input_ids: torch.Tensor = named["input_ids"]
        self.attention_mask: torch.Tensor | None = named.get("attention_mask")
        self.position_ids: torch.Tensor | None = named.get("position_ids")
        self._refuse_shapes()

    def _refuse_shapes(self) -> None:
        ids, mask, positions = self.input_ids, self.attention_mask, self.position_ids
        if ids.dim() != 2 or ids.dtype not in (torch.long, torch.int32):
            raise UsageError(
                f"input_ids is {type_and_shape(ids)}, needed: whole numbers (int64) [samples, tokens]; make them so "
                "in the "
                "dataset or in collate"
            )
        if mask is not None and mask.dim() != 4 and mask.shape != ids.shape:
            raise UsageError(
                f"attention_mask is {type_and_shape(mask)}, needed: 1 or 0 for each token of input_ids, "
                f"{list(ids.shape)}; "
                "or a mask of four dimensions as transformers makes it"
            )
        if positions is not None and (positions.dim() != 2 or positions.shape not in (ids.shape, (1, ids.shape[1]))):
            raise UsageError(
                f"position_ids is {type_and_shape(positions)}, needed: the place of each token of input_ids, "
                f"{list(ids.shape)} or [1, {ids.shape[1]}]"
            )

    def positions(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the place of each token: what the inputs say, or 0, 1, 2, ... as transformers counts."""
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)


class Tokens(nn.Embedding):
    """The table of token vectors; the first layer.

    Args:
        context_length: most positions of a sequence.
    """

    def __init__(self, num_tokens: int, width: int, padding: int | None, context_length: int) -> None:
        super().__init__(num_tokens, width, padding)
        self.context_length = context_length

    def forward(self, inputs: Any) -> torch.Tensor:
        """Maps the inputs of a micro-batch to hidden states [samples, tokens, width]."""
        input_ids = _Inputs(inputs).input_ids
        if input_ids.shape[-1] > self.context_length:
            raise ValueError(
                f"a sequence of {input_ids.shape[-1]} tokens does not fit the {self.context_length} positions of this "
                "model (max_position_embeddings in its config.json): shorten the samples"
            )
        try:
            return super().forward(input_ids)
        except IndexError as error:
            raise UsageError(outside("input_ids", input_ids, self.num_embeddings)) from error


class LearnedPositions(nn.Embedding):
    """Adds a vector for each place, as GPT-2 does, and drops some of the sum.

    Args:
        dropout: probability of an element to be dropped in training.
    """

    def __init__(self, num_positions: int, width: int, dropout: float) -> None:
        super().__init__(num_positions, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states to hidden states."""
        positions = _Inputs(batch()).positions(hidden)
        try:
            return self.drop(hidden + super().forward(positions))
        except IndexError as error:
            raise UsageError(outside("position_ids", positions, self.num_embeddings)) from error


def causal_mask(config: Any, given: _Inputs, hidden: torch.Tensor, *, slides: bool) -> Any:
    """Makes the mask of one block, with transformers' own function; None where the kernel's own causal one is enough.

    Args:
        config: of the model.
        given: the micro-batch's inputs.
        hidden: hidden states.
        slides: only the ``sliding_window`` latest tokens are seen.
    """
    from transformers import masking_utils

    make = masking_utils.create_sliding_window_causal_mask if slides else masking_utils.create_causal_mask
    arguments: dict[str, Any] = {
        "config": config,
        "attention_mask": given.attention_mask,
        "past_key_values": None,
        "position_ids": given.positions(hidden),
    }
    names = _parameters(make)
    arguments["inputs_embeds" if "inputs_embeds" in names else "input_embeds"] = hidden
    if "cache_position" in names:  # the older of the releases that are supported
        arguments["cache_position"] = torch.arange(hidden.shape[1], device=hidden.device)
    return make(**arguments)


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@functools.cache
def rotary_block(block: type[nn.Module], rotary: Callable[..., nn.Module]) -> type[nn.Module]:
    """Makes a decoder layer with rotary positions into a layer of one argument.

    Args:
        block: transformers' class, of (config, index).
        rotary: transformers' class of the tables, of (config).
    """

    class Block(block):  # type: ignore[misc, valid-type]
        """The class with the tables that transformers keeps in the model around it. They are made with the block,
        from the configuration: tables that were only allocated would be zeros."""

        def __init__(self, config: Any, index: int, *, slides: bool) -> None:
            super().__init__(config, index)
            self.rotary_emb = rotary(config=config)
            self._config, self._slides = config, slides

        def forward(self, value: Any) -> Any:
            """Maps hidden states to hidden states; with the routers' sums, if balance is asked for."""
            hidden = value if isinstance(value, torch.Tensor) else value[0]
            given = _Inputs(batch())
            positions = given.positions(hidden)
            arguments = {
                "attention_mask": causal_mask(self._config, given, hidden, slides=self._slides),
                "position_ids": positions,
                "position_embeddings": self.rotary_emb(hidden, position_ids=positions),
                "use_cache": False,
            }
            if not balances(self._config):
                return _hidden(super().forward(hidden, **arguments))
            with _Routed(self) as routed:
                out = _hidden(super().forward(hidden, **arguments))
            return out, balanced(value, routed.scores, given, self._config)

    return _named_as(Block, block)


def balances(config: Any) -> bool:
    """Tells whether the routers of a mixture of experts are to spread tokens evenly: ``output_router_logits``."""
    return bool(getattr(config, "output_router_logits", False)) and bool(config.router_aux_loss_coef)


class _Routed:
    """While inside, keeps what the router of a block gives; a block without one has none."""

    def __init__(self, block: nn.Module) -> None:
        self._gate = getattr(block.mlp, "gate", None)
        self.scores: torch.Tensor | None = None
        """[tokens, experts], as transformers records it."""

    def __enter__(self) -> "_Routed":
        self._handle = None if self._gate is None else self._gate.register_forward_hook(self._keep)
        return self

    def _keep(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.scores = outputs[0]

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            self._handle.remove()


def balanced(value: Any, scores: torch.Tensor | None, given: _Inputs, config: Any) -> torch.Tensor:
    """Computes the sums that the balance loss is made of, over the blocks so far, float32 [3, experts]: how often each
    expert was chosen, its probabilities, and the number of tokens.

    The loss is a product of means over all blocks, so that no block can compute its share; the sums travel instead.
    Source: Switch Transformer (Fedus et al. 2021, eqs. 4 to 6), as transformers' ``load_balancing_loss_func`` has it.

    Args:
        value: what the block was given.
        scores: of its router, [tokens, experts]; None: it has none.
        given: the micro-batch's inputs; what is masked does not count.
        config: of the model.
    """
    before = torch.zeros(3, config.num_experts) if isinstance(value, torch.Tensor) else value[1]
    if scores is None:
        return before
    if isinstance(value, torch.Tensor):
        before = before.to(scores.device)
    probabilities = scores.softmax(-1).float()
    chosen = F.one_hot(probabilities.topk(config.num_experts_per_tok).indices, probabilities.shape[1]).sum(1).float()
    weights = torch.ones(len(scores), 1, device=scores.device)
    if given.attention_mask is not None:
        weights = given.attention_mask.reshape(-1, 1).float()
    sums = [(chosen * weights).sum(0), (probabilities * weights).sum(0), weights.sum().expand(probabilities.shape[1])]
    return before + torch.stack(sums)


@functools.cache
def balancing_norm(norm: type[nn.Module]) -> type[nn.Module]:
    """Makes the last norm, which adds the balance loss of all routers to the micro-batch's.

    Args:
        norm: transformers' class.
    """

    class Norm(norm):  # type: ignore[misc, valid-type]
        """The class, for hidden states and the routers' sums."""

        def __init__(self, config: Any) -> None:
            super().__init__(config.hidden_size, eps=config.rms_norm_eps)
            self._factor = config.router_aux_loss_coef * config.num_experts

        def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            """Maps hidden states and sums to hidden states."""
            hidden, (chosen, probabilities, num_tokens) = value
            num_tokens = num_tokens.clamp(min=1)  # without any there is no loss
            aux_loss(self._factor * (chosen / num_tokens * probabilities / num_tokens).sum())
            return _hidden(super().forward(hidden))

    return _named_as(Norm, norm)


@functools.cache
def plain_block(block: type[nn.Module]) -> type[nn.Module]:
    """Makes a decoder layer without positions of its own into a layer of one argument, as `rotary_block` does."""

    class Block(block):  # type: ignore[misc, valid-type]
        """The class, for one argument."""

        def __init__(self, config: Any, index: int) -> None:
            super().__init__(config, layer_idx=index)
            self._config = config

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            """Maps hidden states to hidden states."""
            given = _Inputs(batch())
            mask = causal_mask(self._config, given, hidden, slides=False)
            return _hidden(super().forward(hidden, attention_mask=mask, use_cache=False))

    return _named_as(Block, block)


def _named_as(made: type[nn.Module], block: type[nn.Module]) -> type[nn.Module]:
    """Errors and ``repr`` say transformers' name."""
    made.__name__ = made.__qualname__ = block.__name__
    return made


def _hidden(out: Any) -> torch.Tensor:
    """Takes the hidden states from what a block returns: they are all of it, in some releases the first of a tuple."""
    hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return hidden


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
        """Finds one of transformers' classes.

        Args:
            ending: of its name, after the architecture's: "DecoderLayer".
        """
        module, prefix = self.name
        return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), prefix + ending)


HEAD = "lm_head"


def _rotary(family: Family, config: Any) -> dict[str, Callable[[], nn.Module]]:
    """Lists how to make token table, blocks with rotary positions, RMS norm, head."""
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
    """Tells whether a block sees the latest tokens only: each block by its type, or all if there is a window."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return bool(types[index] == "sliding_attention")
    return getattr(config, "sliding_window", None) is not None


def _gpt2(family: Family, config: Any) -> dict[str, Callable[[], nn.Module]]:
    """Lists how to make token table, learned positions, blocks, layer norm, head."""
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
    """Finds how the model of a configuration is split.

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
    """Makes the error for an architecture that is not in `FAMILIES`.

    Args:
        model_type: its name.
        where: it was seen.
    """
    return UsageError(
        f"{where} is of the architecture {model_type!r}, needed: one that elaswave.hf splits, "
        f"{', '.join(sorted(FAMILIES))}. {BY_HAND}"
    )
