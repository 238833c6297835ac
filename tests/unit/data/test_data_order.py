"""The page on the order of the data: its program takes the samples that training takes."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elaswave.data.samples import MixedSampler, Sampler, Source, open_source, sample_order
from elaswave.training.dataset import DatasetSamples

PAGE = Path(__file__).parents[3] / "docs" / "data-order.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's program defines."""
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
    assert "elaswave" not in re.sub(r'"""[^"]*"""', "", program)
    names: dict[str, Any] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("num_tokens", [60, 397, 5000])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_the_pages_program_takes_the_samples_of_training(
    page: dict[str, Any], tmp_path: Path, num_tokens: int, seed: int
) -> None:
    tokens = bytes(value * 37 % 251 for value in range(num_tokens))
    path = tmp_path / "text.txt"
    path.write_bytes(tokens)
    source = open_source(str(path), vocab_size=None, context_length=7, validation_fraction=0.13, cache_dir=tmp_path)
    sampler = Sampler(seed, source.num_samples("train"), 3, 5)
    for step in (1, 2, 3, 40, 1000):  # several passes over the shorter ones
        for index in range(5):
            inputs, targets = page["microbatch"](
                tokens,
                step,
                index,
                seed=seed,
                context_length=7,
                microbatch_size=3,
                num_microbatches=5,
                validation_fraction=0.13,
            )
            expected = source.batch(sampler.microbatch(step, index), "train")
            assert (inputs, targets) == (expected[0].tolist(), expected[1].tolist())


def test_the_pages_example(page: dict[str, Any]) -> None:
    found = [page["sample_at"](position, 1000, 1, 0) for position in range(4)]
    (named,) = re.findall(r"the first four samples of a run are (.+)\.$", PAGE.read_text(), re.M)
    assert [int(number) for number in re.findall(r"\d+", named)] == found == Sampler(1, 1000, 4, 1).microbatch(1, 0)


class Augmented:
    """Draws from all three generators for each sample, a number of times that depends on the sample."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(index % 5 + 1).sum() + random.random() + float(np.random.rand(index % 3 + 1).sum())
        return torch.stack([torch.tensor(float(index)), noise]), index


def noisy_collate(rows: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(rows)
    return inputs + torch.rand(()), targets


@pytest.mark.parametrize("step, index", [(1, 0), (4, 2), (30, 4)])
def test_the_page_makes_own_micro_batches_in_plain_pytorch(page: dict[str, Any], step: int, index: int) -> None:
    samples, sampler = DatasetSamples(Augmented(), noisy_collate).seeded(5), Sampler(5, 37, 3, 5)
    torch.manual_seed(step)  # what was drawn before does not matter
    inputs, targets = samples.batch(sampler.draws(step, index), "train")
    expected = page["own_microbatch"](
        Augmented(), step, index, seed=5, size=3, num_microbatches=5, collate=noisy_collate
    )
    assert torch.equal(inputs, expected[0]) and torch.equal(targets, expected[1])
    assert targets.tolist() == page["sample_order"](5, 37, step, index, 3, 5) == sample_order(5, 37, step, index, 3, 5)


def test_the_page_mixes_datasets(page: dict[str, Any]) -> None:
    sources = [Source("a", 10, 0.7), Source("b", 7, 0.2), Source("c", 5, 0.1)]
    start = {"a": 0, "b": 10, "c": 17}
    sampler = MixedSampler(9, sources, 4, 3)
    found = [sample for step in range(1, 20) for index in range(3) for sample in sampler.microbatch(step, index)]
    named = [page["mixed_draw"](number, sources, 9) for number in range(len(found))]
    assert found == [start[name] + sample for name, sample in named]
