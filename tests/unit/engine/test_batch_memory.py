"""Micro-batches in anonymous memory: what is put there is found there, and nothing is left."""

import os
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from elaswave.engine.batches import from_memory, to_memory


class Pair(NamedTuple):
    first: Any
    second: Any


def passed_on(value: Any) -> Any:
    descriptor = to_memory(value)
    try:
        return from_memory(descriptor)
    finally:
        os.close(descriptor)


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("elaswave-batch" in line for line in file)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5), (2, 3, 4)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).mul(9).to(dtype)
    found, same = passed_on((tensor, tensor))
    assert found.dtype == dtype and found.shape == shape and torch.equal(found, tensor) and torch.equal(same, tensor)
    assert found.numel() == 0 or found.data_ptr() % 64 == 0


def test_structures_and_strides() -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    value = (OrderedDict(a=base.transpose(0, 2), b=[base[:, 1], base[::2]]), Pair(base.requires_grad_(), 3))
    inputs, pair = passed_on(value)
    assert isinstance(inputs, OrderedDict) and isinstance(pair, Pair) and pair.second == 3
    assert torch.equal(inputs["a"], base.detach().transpose(0, 2)) and inputs["a"].is_contiguous()
    assert torch.equal(inputs["b"][0], base.detach()[:, 1]) and torch.equal(inputs["b"][1], base.detach()[::2])
    assert not pair.first.requires_grad


def test_the_memory_is_the_receivers_own_and_goes_with_its_tensors() -> None:
    before, descriptors = mappings(), os.listdir("/proc/self/fd")
    found = passed_on([torch.zeros(1000), torch.ones(3)])
    assert os.listdir("/proc/self/fd") == descriptors
    found[0].add_(1)
    rest = found[1]
    assert mappings() == before + 1
    del found
    assert mappings() == before + 1 and rest.tolist() == [1, 1, 1]
    del rest
    assert mappings() == before


def test_what_cannot_be_pickled_leaves_nothing() -> None:
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(Exception, match="[Pp]ickle"):
        to_memory((torch.zeros(3), lambda: None))
    with pytest.raises(RuntimeError):
        to_memory((torch.zeros(3).to_sparse(), None))
    assert os.listdir("/proc/self/fd") == descriptors
