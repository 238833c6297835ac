"""What a person's code has raised, as texts that can be sent and shown: however long they are, whatever they hold, and
also where an exception cannot say what it is."""

import traceback

CHARACTERS_MAX = 15_000
"""Of one text. Two of them fit into a loader's answer, also where each character takes four bytes."""


def said(error: BaseException) -> str:
    """Type and message of an exception."""
    try:
        text = str(error)
    except BaseException as own:  # its own __str__
        text = f"(its message cannot be had: __str__ raises {type(own).__name__})"
    return readable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception, with those of its causes, ending with its message."""
    try:
        return readable("".join(traceback.format_exception(error)))
    except Exception:  # of what an exception says of itself
        return readable("".join(traceback.format_tb(error.__traceback__)) + said(error) + "\n")


def readable(text: str) -> str:
    """A text that can be encoded, and is not too long: lone surrogates are written as escapes, the middle of a text of
    more than `CHARACTERS_MAX` is left out."""
    return _cut(_cut(text).encode("utf-8", "backslashreplace").decode())


def _cut(text: str) -> str:
    if len(text) <= CHARACTERS_MAX:
        return text
    half = CHARACTERS_MAX // 2 - 50  # with room for what stands between
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
