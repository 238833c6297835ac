"""A script's dataset as samples of a run."""

import pytest
import torch
from torch.utils.data import default_collate

from elaswave.errors import DataError
from elaswave.training.dataset import DatasetSamples

SQUARES = [(torch.tensor([float(number)]), number * number) for number in range(9)]


def test_samples_are_put_together_in_the_order_asked_for() -> None:
    samples = DatasetSamples(SQUARES, default_collate, SQUARES[:2])
    assert (samples.num_samples("train"), samples.num_samples("validation")) == (9, 2)
    inputs, targets = samples.batch([3, 0], "train")
    assert inputs.tolist() == [[3.0], [0.0]] and targets.tolist() == [9, 0]
    assert samples.batch([1], "validation")[1].tolist() == [1]


@pytest.mark.parametrize(
    ("collate", "seen"),
    [(torch.utils.data.default_convert, "a list of 3 values"), (lambda samples: 1.0, "of type float")],
)
def test_what_is_no_pair_of_inputs_and_targets_is_refused(collate, seen) -> None:
    with pytest.raises(DataError, match=f"a micro-batch is {seen}, needed: inputs and targets"):
        DatasetSamples(SQUARES, collate).batch([1, 2, 3], "train")
