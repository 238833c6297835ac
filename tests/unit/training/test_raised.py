"""Texts of exceptions: they can always be sent, whatever a person's code says in them."""

import msgspec
import pytest

from elaswave.training.raised import CHARACTERS_MAX, readable, said, traceback_of


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad \udcff name"), "ValueError: bad \\udcff name"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Silent(), "Silent: (its message cannot be had: __str__ raises RuntimeError)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_was_raised_can_be_said_and_sent(error: BaseException, words: str) -> None:
    assert said(error) == words
    text = traceback_of(raised(error))
    assert text.startswith("Traceback") and type(error).__name__ in text and "test_raised.py" in text
    msgspec.msgpack.encode([said(error), text])


def test_the_middle_of_a_long_text_is_left_out() -> None:
    error = raised(ValueError("begin" + "x" * 3_000_000 + "end"))
    assert len(said(error)) <= CHARACTERS_MAX
    assert said(error).startswith("ValueError: beginxxx") and said(error).endswith("xxxend")
    assert " characters left out ..." in said(error)
    assert "test_raised.py" in traceback_of(error) and len(traceback_of(error)) <= CHARACTERS_MAX
    assert len(readable("\udcff" * CHARACTERS_MAX)) <= CHARACTERS_MAX
    assert readable("a\nb") == "a\nb"
