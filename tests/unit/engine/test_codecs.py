"""The codecs of fences: sizes, exact bytes, rounding, what is refused, and bytes that contradict themselves."""

import math

import pytest
import torch

from elaswave.engine.boundaries.codecs import decode_tensor, encode_tensor, is_codable
from elaswave.engine.checks.determinism_check import elsewhere
from elaswave.errors import FrameError
from elaswave.fences import GROUP_ELEMENTS, coded_bytes

CODECS = ("bf16", "int8", "int4")
ALL = (*CODECS, "topk10", "topk40-own")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    found = encode_tensor(tensor, codec)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 41)])
def test_a_tensor_comes_back_with_its_type_and_shape_from_as_many_bytes_as_said(
    codec: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = numbers(*shape, dtype=dtype)
    if not is_codable(tensor, codec):
        assert codec == "bf16" and dtype.itemsize == 2
        return
    found = coded(tensor, codec)
    assert len(found) == coded_bytes(codec, shape, dtype.itemsize) < tensor.nbytes
    back = decode_tensor(found)
    assert (back.dtype, back.shape, back.is_contiguous()) == (dtype, tensor.shape, True)
    error = (back.double() - tensor.double()).abs()
    largest = tensor.double().abs().max()
    # Half a scale, which may be 2**-7 larger than the largest magnitude over the largest whole number.
    bound = {"bf16": largest * 2**-8, "int8": largest / 127 * 0.51, "int4": largest / 7 * 0.51}[codec]
    assert 0 < error.max() <= bound + largest * torch.finfo(dtype).eps  # and what the type itself rounds


def test_the_bytes_of_each_codec() -> None:
    """The format, byte by byte: ties to even, scales rounded up, halves of a group in halves of bytes."""
    values = torch.zeros(65)
    values[:5] = torch.tensor([127.0, 0.5, 1.5, -2.5, -126.5])
    values[64] = 1.0
    found = coded(values, "int8").tolist()
    assert found[:8] == [2, 7, 1, 0, 65, 0, 0, 0]  # codec, float32, dimensions, 0, size
    one = 0x3F80  # bfloat16 of 1
    above = int(torch.tensor([1 / 127]).view(torch.int32)) >> 16  # of 1 / 127, without the bits that do not fit
    assert found[8:12] == [one & 255, one >> 8, (above + 1) & 255, (above + 1) >> 8]
    assert found[12:18] == [127, 0, 2, 254, 130, 0]  # 130 is -126
    assert found[76] == 126 and set(found[77:]) == {0} and len(found) == 12 + 2 * GROUP_ELEMENTS

    values = torch.zeros(64)
    values[:3], values[32:34] = torch.tensor([7.0, -7.0, 2.5]), torch.tensor([3.5, -1.0])
    found = coded(values, "int4").tolist()
    assert found[:10] == [3, 7, 1, 0, 64, 0, 0, 0, one & 255, one >> 8]
    assert found[10:14] == [15 | 12 << 4, 1 | 7 << 4, 10 | 8 << 4, 8 | 8 << 4]
    assert len(found) == 10 + 32

    found = coded(torch.tensor([1.0, -0.0, 1.00390625, 1.01171875]).repeat(3), "bf16").tolist()
    assert found[:8] == [1, 7, 1, 0, 12, 0, 0, 0]
    assert found[8:16] == [0x80, 0x3F, 0, 0x80, 0x80, 0x3F, 0x82, 0x3F]  # ties to even


@pytest.mark.parametrize("codec", ALL)
def test_equal_numbers_give_equal_bytes_wherever_they_lie(codec: str) -> None:
    tensor = numbers(9, 77)
    assert coded(tensor, codec).equal(coded(elsewhere(tensor), codec))
    shifted = torch.empty(9 * 77 + 1)[1:].view(9, 77).copy_(tensor)
    assert coded(tensor, codec).equal(coded(shifted, codec))
    assert decode_tensor(coded(tensor, codec)).equal(decode_tensor(elsewhere(coded(tensor, codec))))


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_bytes(codec: str, value: float) -> None:
    tensor = numbers(4, 64)
    tensor[2, 5] = value
    assert encode_tensor(tensor, codec) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_large_numbers_stay_finite(codec: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for share in (1.0, 0.985, 0.97):
        tensor = torch.full((2, 64), largest * share, dtype=dtype)
        if is_codable(tensor, codec):
            found = encode_tensor(tensor, codec)
            assert found is None or bool(decode_tensor(found).isfinite().all())
            assert (found is None) == (share > 0.98 or dtype is torch.float64)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_group_of_zeros_and_one_whose_scale_would_be_subnormal_are_zeros(codec: str) -> None:
    tensor = torch.zeros(3, 64)
    tensor[1] = 5e-38
    tensor[2] = 1.0
    back = decode_tensor(coded(tensor, codec))
    assert back[:2].eq(0).all() and (back[2] > 0.99).all()


def test_what_a_codec_would_not_make_smaller_is_not_codable() -> None:
    assert is_codable(numbers(64), "int8") and not is_codable(numbers(12), "int8")
    assert not is_codable(torch.zeros(64, dtype=torch.int64), "int8")
    assert not is_codable(torch.zeros(64, dtype=torch.bool), "int4")
    assert not is_codable(numbers(64), "none")
    assert is_codable(torch.tensor(1.0, dtype=torch.float64), "bf16")
    assert decode_tensor(coded(torch.tensor(1.5, dtype=torch.float64), "bf16")).equal(
        torch.tensor(1.5, dtype=torch.float64)
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda good: good[:-1],
        lambda good: good[:3],
        lambda good: torch.cat([good, good[:1]]),
        lambda good: torch.cat([torch.tensor([0], dtype=torch.uint8), good[1:]]),
        lambda good: torch.cat([torch.tensor([9], dtype=torch.uint8), good[1:]]),
        lambda good: torch.cat([good[:1], torch.tensor([4], dtype=torch.uint8), good[2:]]),
        lambda good: torch.cat([good[:1], torch.tensor([99], dtype=torch.uint8), good[2:]]),
        lambda good: torch.cat([good[:2], torch.tensor([255], dtype=torch.uint8), good[3:]]),
        lambda good: torch.cat([good[:3], torch.tensor([1], dtype=torch.uint8), good[4:]]),
        lambda good: good.float(),
        lambda good: good[None],
    ],
)
def test_bytes_that_contradict_themselves_are_refused(change) -> None:
    good = coded(numbers(2, 64), "int8")
    with pytest.raises(FrameError, match="of a coded tensor begin with"):
        decode_tensor(change(good))
