"""Whole families cut by `elaswave.split`: the bits of the network, and equal bits in any layout."""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.crew import locked
from tests.integration.crew import train as crew_train
from tests.integration.own import computation, train
from tests.integration.scripts import ROOT
from tests.integration.test_split import LAYOUTS
from torch import nn

import elaswave
from elaswave.api.given import OwnModelSpec
from elaswave.config.schema import OptimizerConfig
from elaswave.training.dataset import DatasetSamples
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer

pytestmark = pytest.mark.slow

sys.path.append(str(ROOT / "examples"))  # where scripts find each other
resnet101, unet = importlib.import_module("resnet101"), importlib.import_module("unet")

ROWS, LENGTH, VOCABULARY = 4, 8, 48
SIZES = {"vocab_size": VOCABULARY, "use_cache": False}
LLAMA = SIZES | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


class UNet(nn.Module):
    """The layers of ``examples/unet.py`` as one network."""

    def __init__(self) -> None:
        super().__init__()
        size = unet.CHANNELS
        self.enter, self.leave = unet.Enter(), unet.Leave()
        self.down, self.up = (
            nn.Sequential(unet.Down(size), unet.Down(2 * size)),
            nn.Sequential(unet.Up(4 * size), unet.Up(2 * size)),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.leave(self.up(self.down(self.enter(pictures))))
        return result


def of_transformers(name: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**sizes))  # attention is the library's "sdpa"
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "resnet101": lambda: resnet101.ResNet(resnet101.BLOCKS, 4, 5),
    "unet": UNet,
    "gpt2": lambda: of_transformers("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, **SIZES),
    "llama": lambda: of_transformers("LlamaForCausalLM", **LLAMA),
    "qwen3": lambda: of_transformers("Qwen3ForCausalLM", head_dim=8, tie_word_embeddings=True, **LLAMA),
    "t5": lambda: of_transformers(
        "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **SIZES
    ),
}


class Samples:
    """What a family takes, and targets for `loss`."""

    def __init__(self, family: str) -> None:
        self.family = family

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        if self.family in ("resnet101", "unet"):
            return torch.randn(1, 16, 16, generator=generator), torch.tensor(index % 2)
        inputs = {"input_ids": torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)}
        if self.family == "t5":
            inputs["decoder_input_ids"] = inputs["input_ids"].flip(0)
        return inputs, torch.tensor(index % 2)


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Any number that depends on all of what a network returns."""
    values = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs.values())
    means = [value.flatten(1).square().mean(1) for value in values]
    return torch.stack([((each - targets) ** 2).mean() for each in means]).sum()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_same_bits_in_any_layout(family: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model, dataset = FAMILIES[family](), Samples(family)
    example, _ = torch.utils.data.default_collate([dataset[index] for index in range(ROWS)])
    layers = elaswave.split(model, example, 4)  # compares with the network
    samples = DatasetSamples(dataset, torch.utils.data.default_collate, dataset).seeded(0)
    samples.batch = locked(samples.batch)  # it seeds the generator that layers of other threads draw from
    training = Training(
        model=OwnModelSpec(layers, loss).spec,
        dtype=torch.float32,
        make_optimizer=lambda shapes: ConfiguredOptimizer(OptimizerConfig(lr=0.01), 4),
        open_samples=lambda folder: samples,
    )
    settings = {"model.num_layers": 2, "batch.microbatch_size": ROWS, "optimizer.grad_clip": 0.5}
    found = {name: crew_train(layout, tmp_path, settings, steps=2, model=training) for name, layout in LAYOUTS.items()}
    alone = found["1x1"]
    for name, each in found.items():
        assert (each.losses, each.digests) == (alone.losses, alone.digests), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "unet"])
def test_a_family_survives_two_kills(family: str, tmp_path: Path) -> None:
    """Real processes, three workers; ResNet-101 and T5 are examples, which are killed in their tests."""
    torch.manual_seed(2)
    model, dataset = FAMILIES[family](), Samples(family)
    example, _ = torch.utils.data.default_collate([dataset[index] for index in range(ROWS)])
    layers = elaswave.split(model, example, 4)

    def run(folder: str, faults: tuple[str, ...] = ()) -> elaswave.Result:
        changes = {"batch.microbatch_size": ROWS, "layout.widths": [1, 2], "elastic.block_size": 256}
        return train(tmp_path / folder, changes, model=layers, loss=loss, dataset=dataset, faults=faults)

    calm, struck = run("calm"), run("struck", ("kill:1@2:backward", "kill:2@5:any"))
    assert computation(struck) == computation(calm)
    assert len(struck.recoveries) == 2


@pytest.mark.timeout(600)
def test_resnet101_in_four_parts_is_as_good_as_the_best_cuts() -> None:
    torch.manual_seed(2)
    model = resnet101.ResNet(resnet101.BLOCKS, 64, 10)
    start_s = time.perf_counter()
    layers = elaswave.split(model, torch.randn(2, 1, 32, 32), 4)
    took_s = time.perf_counter() - start_s
    costs = layers.network.costs
    places = [place for place in range(len(costs.cross_s)) if np.isfinite(costs.cross_s[place])]
    before = np.concatenate([[0.0], np.cumsum(costs.compute_s)])
    part = before[None, :] - before[:, None] + costs.cross_s[:, None] + costs.cross_s[None, :]
    best = np.inf  # every triple of places
    for first in places[1:-1]:
        for second in places[1:-1]:
            if second > first:
                later = [third for third in places[1:-1] if third > second]
                if later:
                    rest = np.maximum(part[second, later], part[later, -1])
                    best = min(best, float(np.maximum(rest, max(part[0, first], part[first, second])).min()))
    print(
        f"{len(layers.graph)} operators, {len(places)} places, slowest part {max(layers.part_s):.4f} s, "
        f"best {best:.4f} s, split in {took_s:.1f} s"
    )
    assert max(layers.part_s) <= 1.05 * best
