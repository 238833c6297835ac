"""Texts of exceptions: they can always be sent, whatever a person's code says in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from elaswave.training import raised as raised_module
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


def test_a_traceback_begins_where_a_persons_code_does() -> None:
    """Not with the calls of ours, and of torch's modules, that led there; torch's own frames behind stay."""

    class Wrong(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value.view(7)

    own, linear = ours(Wrong(), torch.zeros(2)), ours(nn.Linear(3, 3), torch.zeros(2))
    assert own.splitlines()[1].endswith("in forward") and "test_raised.py" in own.splitlines()[1]
    assert "_call_impl" not in own and "first_layer_call" not in own and own.rstrip().endswith("size 2")
    assert "linear.py" in linear.splitlines()[1] and "first_layer_call" not in linear


def test_what_our_own_code_asks_of_torch_wrongly_keeps_its_frames() -> None:
    assert "in first_layer_call" in ours(nn.functional.dropout, torch.zeros(2), p=2.0)


def test_what_torch_calls_for_us_begins_a_traceback_too() -> None:
    """A hook in a backward, a function of a scheduler."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in a hook")

    value = torch.ones(2, requires_grad=True)
    (total := (value * 2).sum()).register_hook(hook)
    told = ours(torch.autograd.grad, total, [value]).splitlines()
    assert told[1].endswith("in hook") and "test_raised.py" in told[1]


def ours(call: Callable[..., Any], *values: Any, **options: Any) -> str:
    """The traceback of a call from a file of ours, which is none of a person's."""
    code = "def first_layer_call(call, *values, **options):\n    call(*values, **options)"
    names: dict[str, Any] = {}
    exec(compile(code, str(Path(raised_module.__file__).parent / "pretended.py"), "exec"), names)
    try:
        names["first_layer_call"](call, *values, **options)
    except Exception as error:
        assert error.__traceback__ is not None
        return traceback_of(error.with_traceback(error.__traceback__.tb_next))
    raise AssertionError("nothing was raised")
