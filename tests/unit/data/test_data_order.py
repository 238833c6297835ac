"""The page on the order of the data: its program takes the samples that training takes."""

import re
from pathlib import Path
from typing import Any

import pytest

from elaswave.data.sampler import Sampler
from elaswave.data.sources import open_source

PAGE = Path(__file__).parents[3] / "docs" / "data-order.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's program defines."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
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
