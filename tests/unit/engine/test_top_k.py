"""The codec ``topk``: what is kept, exact bytes, gradients at the forward's places, and bytes that cannot be."""

import math

import pytest
import torch

from elaswave.engine.boundaries.codecs import (
    decode_tensor,
    encode_at,
    encode_tensor,
    is_codable,
    largest,
    needs_places,
    places_of,
)
from elaswave.errors import FrameError
from elaswave.fences import ROW_ELEMENTS, coded_bytes, head_bytes, kept_places_bytes, places_bytes, values_bytes

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    found = encode_tensor(tensor, codec)
    assert found is not None
    return found


def test_ties_go_to_the_lowest_index_and_the_sign_does_not_count() -> None:
    values = torch.tensor([[0.0, -3.0, 3.0, -0.0, 3.0, 1.0], [0.0, 0.0, 2.0, -0.0, 0.0, 0.0]])
    assert largest(values, 2).nonzero().tolist() == [[0, 1], [0, 2], [1, 0], [1, 2]]
    assert largest(values, 5)[1].tolist() == [True, True, True, True, True, False]
    assert largest(torch.tensor([[1.0, math.nan, math.inf, 2.0]]), 2).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ["topk10", "topk100", "topk100-own", "topk2"])
@pytest.mark.parametrize("shape", [(3, 5, 64), (2, ROW_ELEMENTS), (7, 300)])
def test_the_largest_come_back_rounded_and_the_rest_is_zero(
    codec: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = numbers(*shape, dtype=dtype)
    if not is_codable(tensor, codec):
        assert codec == "topk2" and dtype.itemsize == 2
        return
    found = coded(tensor, codec)
    assert len(found) == coded_bytes(codec, shape, dtype.itemsize)
    back = decode_tensor(found)
    assert (back.dtype, back.shape, back.is_contiguous()) == (dtype, tensor.shape, True)
    kept = back != 0
    ratio = int(codec.removeprefix("topk").removesuffix("-own"))
    rows = tensor.reshape(-1).split(ROW_ELEMENTS)
    assert [int(row.sum()) for row in kept.reshape(-1).split(ROW_ELEMENTS)] == [-(-len(row) // ratio) for row in rows]
    assert back[kept].equal(tensor[kept].to(torch.bfloat16).to(dtype))
    for row, mask in zip(rows, kept.reshape(-1).split(ROW_ELEMENTS), strict=True):
        assert row[mask].abs().min() >= row[~mask].abs().max()


def test_the_bytes_with_a_bitmap_and_with_indices() -> None:
    """The format, byte by byte."""
    values = torch.zeros(40)
    values[[3, 17, 39]] = torch.tensor([2.0, -4.0, 1.0])
    found = coded(values, "topk10").tolist()
    assert found[:8] == [4, 7, 1, 0, 40, 0, 0, 0]  # codec, float32, dimensions, 0, size
    assert found[8:10] == [10, 0]  # ratio
    assert found[10:18] == [0, 0, 0, 0x40, 0x80, 0xC0, 0x80, 0x3F]  # 0 at place 0, 2, -4, 1 in bfloat16
    assert found[18:] == [1 | 8, 0, 2, 0, 128]  # a bit for each element
    values = torch.zeros(600)
    values[[2, 599]] = torch.tensor([2.0, -4.0])
    found = coded(values, "topk300-own").tolist()
    assert found[:10] == [5, 7, 1, 0, 600 & 255, 600 >> 8, 0, 0, 300 & 255, 300 >> 8]
    assert found[10:] == [0, 0x40, 0x80, 0xC0, 2, 0, 599 & 255, 599 >> 8]


@pytest.mark.parametrize("codec", ["topk4", "topk100"])
def test_a_gradient_at_the_forwards_places_takes_the_numbers_alone(codec: str) -> None:
    tensor, gradient = numbers(5, 500), numbers(5, 500, seed=1)
    places = places_of(coded(tensor, codec))
    assert places is not None and len(places.bytes_) == places_bytes(places.ratio, 2500)
    assert kept_places_bytes(codec, 2500) == len(places.bytes_)
    found = encode_at(gradient, places)
    assert found is not None and needs_places(found) and not needs_places(coded(tensor, codec))
    assert len(found) == head_bytes(2) + values_bytes(places.ratio, 2500)
    kept = decode_tensor(coded(tensor, codec)) != 0
    assert decode_tensor(found, places).equal(torch.where(kept, gradient.bfloat16().float(), 0.0))
    other = places_of(coded(numbers(5, 500, seed=2), codec))
    assert places.equal(places_of(coded(tensor, codec))) and not places.equal(other) and not places.equal(None)


def test_with_its_own_places_nothing_is_kept_for_the_gradient() -> None:
    tensor = numbers(3000)
    assert places_of(coded(tensor, "topk10-own")) is None and places_of(coded(tensor, "int8")) is None
    assert kept_places_bytes("topk10-own", 3000) == kept_places_bytes("int8", 3000) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_has_no_bytes_even_where_it_would_not_be_kept(value: float) -> None:
    places = places_of(coded(torch.arange(3000.0), "topk10"))
    assert places is not None
    gradient = numbers(3000)
    gradient[0] = value
    assert encode_at(gradient, places) is None


def test_places_that_cannot_be_are_refused() -> None:
    gradient = numbers(600)
    many, few = (coded(numbers(600), codec) for codec in ("topk10", "topk300"))
    at_many, at_few = places_of(many), places_of(few)
    assert at_many is not None and at_few is not None
    found = encode_at(gradient, at_many)
    assert found is not None
    with pytest.raises(FrameError, match="needs the places of an activation of ratio 10; none are known"):
        decode_tensor(found)
    with pytest.raises(FrameError, match="of ratio 10; those known are of ratio 300"):
        decode_tensor(found, at_few)
    for bad in (many.clone(), few.clone()):
        bad[-1] ^= 255
        with pytest.raises(FrameError, match="places of a coded tensor do not"):
            decode_tensor(bad)
    swapped = few.clone()
    swapped[-4:] = torch.cat([few[-2:], few[-4:-2]])
    with pytest.raises(FrameError, match="do not ascend below 600"):
        decode_tensor(swapped)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 8, 9])
def test_heads_that_cannot_be_are_refused(at: int) -> None:
    good = coded(numbers(2000), "topk10")
    for value in (0, 1, 7, 200, 255):
        bad = good.clone()
        if int(bad[at]) != value:
            bad[at] = value
            with pytest.raises(FrameError, match="coded tensor|coded gradient"):
                decode_tensor(bad)
    with pytest.raises(FrameError, match="begin with"):
        decode_tensor(good[:9])
