"""What a script defines travels by value, and its tracebacks still show the script's lines."""

import pickle
import traceback

import pytest
import torch
from torch import nn

from elaswave.launcher.forkserver.fresh import dumps


def test_a_traceback_shows_the_line_in_the_file_of_the_function() -> None:
    def breaks() -> None:
        raise OSError("no such image")

    again = pickle.loads(dumps(breaks))
    assert again is not breaks and again.__code__.co_filename == __file__
    with pytest.raises(OSError) as caught:
        again()
    assert 'raise OSError("no such image")' in "".join(traceback.format_exception(caught.value))


def test_code_within_code_keeps_its_file_too() -> None:
    class Made:
        def several(self) -> list[int]:
            return sorted([2, 1], key=lambda each: -each)

    again = pickle.loads(dumps(Made))
    inner = [each for each in again.several.__code__.co_consts if hasattr(each, "co_filename")]
    assert [each.co_filename for each in inner] == [__file__] and again().several() == [2, 1]


def test_what_cannot_be_pickled_raises() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        dumps(each for each in "ab")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float32])
def test_tensors_of_any_floating_point_travel_with_their_bits(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -2.0, 0.5]).to(dtype)
    for each in (values, nn.Parameter(values, requires_grad=False), values.view(3, 1)):
        (back,) = pickle.loads(dumps([each]))
        assert type(back) is type(each) and (back.dtype, back.shape) == (dtype, each.shape)
        assert torch.equal(back.view(torch.uint8), each.view(torch.uint8))
