"""What `fault_free.py` trains: the built-in GPT, or transformers' GPT-2, each as ours and as a plain program has it."""

import functools
from typing import Any, Protocol

import torch
from harness import SIZES, configuration
from torch import nn

from elaswave.config.schema import Config
from elaswave.config.values import OwnModel
from elaswave.engine.blueprint import Blueprint
from elaswave.models.layers import build_layer
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer


class Task(Protocol):
    """A model with its data."""

    def configuration(self, *settings: str) -> Config:
        """The resolved configuration with ``section.key=value`` settings."""

    def training(self, config: Config) -> Training | None:
        """What our side trains; None: what the configuration describes."""

    def tokens(self, config: Config) -> int:
        """Of a micro-batch."""

    def part(self, run: Blueprint, layers: range) -> nn.Module:
        """The plain program's module of some layers, with the initial values of ours."""

    def loss(self, run: Blueprint, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The plain program's mean loss of a micro-batch."""


class BuiltIn:
    """A model that is configured; plain programs use our layers.

    Args:
        settings: that differ from the default recipe.
    """

    def __init__(self, *settings: str) -> None:
        self._settings = settings

    def configuration(self, *settings: str) -> Config:
        """See `Task`."""
        return configuration(*self._settings, *settings)

    def training(self, config: Config) -> None:
        """See `Task`."""

    def tokens(self, config: Config) -> int:
        """See `Task`."""
        return config.batch.microbatch_size * config.model.context_length

    def part(self, run: Blueprint, layers: range) -> nn.Module:
        """See `Task`."""
        return nn.Sequential(*(build_layer(run.model.layers[index], run.config.run.seed, index) for index in layers))

    def loss(self, run: Blueprint, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See `Task`."""
        loss = run.model.loss(output, targets)
        assert isinstance(loss, torch.Tensor)
        return loss


class Sequences:
    """Random tokens; the labels are the tokens, not shifted."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._vocab_size, self._length = vocab_size, length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._vocab_size, (self._length,), generator=generator)
        return tokens, tokens


class Transformers:
    """transformers' GPT-2 with the width of the 124 M model and fewer layers; plain programs use transformers alone.

    The head is not tied and dropout is off, so that torch's pipeline trains the same model.

    Args:
        num_layers, width, num_heads, vocab_size, length: of the model and its sequences.
    """

    def __init__(self, num_layers: int, width: int, num_heads: int, vocab_size: int, length: int) -> None:
        self._sizes: dict[str, Any] = {
            "vocab_size": vocab_size,
            "n_layer": num_layers,
            "n_embd": width,
            "n_head": num_heads,
            "n_positions": length,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        self._length = length

    @functools.cached_property
    def _config(self) -> Any:
        from transformers import GPT2Config

        off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2Config(**self._sizes, **off, tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False)

    @functools.cached_property
    def _layers(self) -> Any:
        import elaswave

        return elaswave.hf(self._config, dtype="float32")

    def configuration(self, *settings: str) -> Config:
        """See `Task`."""
        from elaswave.api.given import OwnModelSpec

        spec = OwnModelSpec(self._layers, self._layers.loss)
        own = OwnModel(spec.layer_parameters, "float32", has_optimizer=False, grad_clip=0.0)
        return configuration("batch.num_microbatches=4", "batch.microbatch_size=1", *settings, own=own)

    def training(self, config: Config) -> Training:
        """See `Task`."""
        from elaswave.api.given import OwnModelSpec
        from elaswave.training.dataset import DatasetSamples

        return Training(
            model=OwnModelSpec(self._layers, self._layers.loss).spec,
            dtype=torch.float32,
            make_optimizer=lambda shapes: ConfiguredOptimizer(config.optimizer, config.run.steps),
            open_samples=lambda folder: DatasetSamples(Sequences(self._config.vocab_size, self._length)),
        )

    def tokens(self, config: Config) -> int:
        """See `Task`."""
        return config.batch.microbatch_size * self._length

    def part(self, run: Blueprint, layers: range) -> nn.Module:
        """See `Task`; of all layers, transformers' own model."""
        from transformers import GPT2LMHeadModel

        whole = GPT2LMHeadModel(self._config)
        module: nn.Module = _Whole(whole) if len(layers) == len(run.model.layers) else _Part(whole, run, layers)
        values = {}
        for index in layers:
            layer = run.model.layers[index]
            for name, parameter in build_layer(layer, run.config.run.seed, index).named_parameters():
                values[f"{layer.name}.{name}"] = parameter
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
        return module

    def loss(self, run: Blueprint, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See `Task`; as transformers' ``labels=``."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(output, targets, self._config.vocab_size)


class _Whole(nn.Module):
    """Tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits


class _Part(nn.Module):
    """Some of the model's own modules, one after the other; a causal mask is all that a block needs."""

    def __init__(self, model: Any, run: Blueprint, layers: range) -> None:
        super().__init__()
        names = [run.model.layers[index].name for index in layers]
        self.parts = nn.ModuleDict({name.replace(".", "/"): model.get_submodule(name) for name in names})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for name, part in self.parts.items():
            if name == "transformer/wpe":
                values = values + part(torch.arange(values.shape[1]).unsqueeze(0))
            else:
                values = part(values)
                values = values[0] if isinstance(values, tuple) else values
        return values


TASKS: dict[str, Task] = {
    **{size: BuiltIn(*SIZES[size]) for size in SIZES},
    "gpt2": Transformers(2, 768, 12, 4096, 1024),
    "gpt2-tiny": Transformers(2, 64, 4, 128, 32),
}
"""By size."""
