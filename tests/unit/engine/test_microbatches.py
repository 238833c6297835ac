"""Micro-batches in use: fetched once, kept for their backward if a layer has asked for them."""

import pytest
import torch

from elaswave.engine.batches import Microbatches
from elaswave.errors import UsageError


@pytest.fixture
def fetched():
    return []


@pytest.fixture
def microbatches(fetched):
    def fetch(train):
        def one(step, microbatch):
            fetched.append((step, microbatch, train))
            return {"tokens": torch.full((2,), microbatch)}, torch.zeros(1)

        return one

    return Microbatches(fetch(True), fetch(False))


def test_one_that_nobody_asks_for_goes_after_its_forward(microbatches, fetched):
    for _ in range(2):
        microbatches.get(1, 0, train=True)
        microbatches.get(1, 0, train=True)
        microbatches.release(1, 0, train=True, is_over=False)
    assert fetched == [(1, 0, True)] * 2


def test_one_that_a_layer_asks_for_stays_until_its_backward(microbatches, fetched):
    first = microbatches.inputs(1, 0, train=True)
    microbatches.release(1, 0, train=True, is_over=False)
    assert microbatches.inputs(1, 0, train=True) is first
    microbatches.release(1, 0, train=True, is_over=True)
    assert microbatches.inputs(1, 0, train=True) is not first
    microbatches.clear()
    microbatches.inputs(1, 0, train=False)
    assert fetched == [(1, 0, True), (1, 0, True), (1, 0, False)]


def test_one_that_a_layer_has_written_to_is_refused(microbatches):
    microbatches.inputs(1, 0, train=True)["tokens"].add_(1)
    with pytest.raises(UsageError, match="write to a copy"):
        microbatches.inputs(1, 0, train=True)


def test_a_layer_draws_the_same_whether_its_batch_was_here_or_not():
    """A dataset seeds the generators that the layer is about to draw from."""

    def fetch(step, microbatch):
        torch.manual_seed(1)
        return torch.ones(2), torch.zeros(1)

    microbatches = Microbatches(fetch, fetch)
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        microbatches.inputs(1, 0, train=True)
        drawn.append(torch.rand(3))
    assert drawn[0].equal(drawn[1])
