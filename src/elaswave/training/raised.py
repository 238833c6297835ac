"""What a person's code has raised, as texts that can be sent and shown: however long they are, whatever they hold, and
also where an exception cannot say what it is."""

import os
import traceback
from pathlib import Path

CHARACTERS_MAX = 15_000
"""Of one text. Two of them fit into a loader's answer, also where each character takes four bytes."""
_CAUSES_MAX = 32
_OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
_CALL_OF_A_MODULE = f"{os.sep}torch{os.sep}nn{os.sep}modules{os.sep}module.py"


def said(error: BaseException) -> str:
    """Returns type and message of an exception."""
    try:
        text = str(error)
    except BaseException as own:  # its own __str__
        text = f"(its message cannot be had: __str__ raises {type(own).__name__})"
    return readable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def traceback_of(error: BaseException) -> str:
    """Returns the traceback of an exception, with those of its causes, ending with its message. It begins where a
    person's code does: the calls that led there are left out, unless there is nothing else."""
    try:
        told = traceback.TracebackException.from_exception(error)
        _from_own_code_on(told)
        return readable("".join(told.format()))
    except Exception:  # of what an exception says of itself
        return readable("".join(traceback.format_tb(error.__traceback__)) + said(error) + "\n")


def _from_own_code_on(told: traceback.TracebackException) -> None:
    for part in (told, *_causes(told)):
        files = [frame.filename for frame in part.stack]
        first = next((at for at, file in enumerate(files) if not file.startswith(_OURS)), len(files))
        inside = next((at for at in range(first, len(files)) if not files[at].endswith(_CALL_OF_A_MODULE)), len(files))
        if first == inside < len(files) and _TORCH in files[first]:
            # What our own code has asked of torch, unless torch has called a person's: a hook, a scheduler's function.
            theirs = (at for at in range(first, len(files)) if not files[at].startswith(_OURS))
            inside = next((at for at in theirs if _TORCH not in files[at]), len(files))
        if inside < len(files):
            part.stack = traceback.StackSummary.from_list(list(part.stack)[inside:])


def _causes(told: traceback.TracebackException) -> list[traceback.TracebackException]:
    found: list[traceback.TracebackException] = []
    below = told.__cause__ or told.__context__
    while below is not None and len(found) < _CAUSES_MAX:
        found.append(below)
        below = below.__cause__ or below.__context__
    return found


def readable(text: str) -> str:
    """Makes a text that can be encoded, and is not too long: lone surrogates are written as escapes, the middle of a
    text of more than `CHARACTERS_MAX` is left out."""
    return _cut(_cut(text).encode("utf-8", "backslashreplace").decode())


def _cut(text: str) -> str:
    if len(text) <= CHARACTERS_MAX:
        return text
    half = CHARACTERS_MAX // 2 - 50  # with room for what stands between
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
