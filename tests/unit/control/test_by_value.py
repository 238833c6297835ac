"""What a script defines travels by value, and its tracebacks still show the script's lines."""

import pickle
import traceback

import pytest

from elaswave.control.by_value import dumps


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
