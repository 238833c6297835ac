"""What is printed: broken at a terminal's width, with nothing of others that it would obey (`elaswave.visible`).

A stream may take no more: on a closed terminal (EIO), after its reader has ended (EPIPE) and on a full disk (ENOSPC).
Work that has been asked for does not end because of it. A text is broken between words, never inside a command to copy
or a number with its unit. No state here.
"""

import contextlib
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from elaswave.visible import visible, visible_lines

_HELD = "\x00"
"""Stands for a space at which no line may end."""
_WHOLE = re.compile(r"`[^`]*`|\belaswave (?:bench|compare|demo|export|inspect|plan|simulate|train)\b[^;,]*")
"""Commands: in backticks, or from the program's name to where the sentence goes on."""
_QUANTITY = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|days|B|KiB|MiB|GiB|tokens/s|samples/s|%)\b)")


def lead_elsewhere(stream: TextIO, path: Path | None) -> bool:
    """Points a stream whose output is not taken at a file.

    What the stream still holds is dropped: it would fail again at exit.

    Args:
        stream: with a descriptor of its own.
        path: appended to; None, or one that cannot be opened, means nowhere.
    Returns:
        Whether that could be done: False if the stream has no descriptor.
    """
    try:
        descriptor = stream.fileno()
    except OSError:
        return False
    _point(descriptor, Path(os.devnull))
    with contextlib.suppress(OSError):
        stream.flush()
    if path is not None:
        with contextlib.suppress(OSError):
            _point(descriptor, path)
    return True


def _point(descriptor: int, path: Path) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(opened, descriptor)
    os.close(opened)


def open_closed_streams() -> None:
    """Points the standard streams that this process was started without (``>&-``) nowhere.

    Else the next file that is opened gets the descriptor of one, and what is printed.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))


def say(*lines: str, err: bool = False, file: TextIO | None = None, nl: bool = True) -> None:
    """Prints what a command has found. Every command prints with this.

    Args:
        lines: of text, or of JSON, which stays what it is.
        err: on standard error.
        file: there instead.
        nl: with a line end.
    """
    import click  # late: other processes of a job show nothing themselves

    click.echo(visible_lines(lines), err=err, file=file, nl=nl)


def say_json(document: object, enc_hook: Callable[[Any], Any] | None = None) -> None:
    """Prints one indented JSON document on standard output.

    Args:
        document: what msgspec encodes.
        enc_hook: as of ``msgspec.json.encode``.
    """
    say(msgspec.json.format(msgspec.json.encode(document, enc_hook=enc_hook), indent=2).decode())


def printable(text: str, stream: TextIO) -> str:
    """Returns a text as a stream takes it: visible, and with "?" for every character that the stream's encoding
    lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return visible(text).encode(encoding, "replace").decode(encoding)


class VisibleLines(logging.Formatter):
    """Lines of a log, in which reasons and names of others stand."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record, with its traceback."""
        return visible(super().format(record))


def say_error(text: str) -> None:
    """Prints on standard error, where that is still possible."""
    try:
        print(visible(text), file=sys.stderr, flush=True)
    except OSError:
        lead_elsewhere(sys.stderr, None)


def wrap(text: str, width: int) -> list[str]:
    """Breaks a text between words, continued lines indented by two more than the first.

    A word or a command that is wider than the terminal stands on a line of its own, whole: terminals that break it
    themselves copy it as one line.

    Args:
        text: one paragraph; spaces before its first word are kept.
        width: columns of the terminal.
    """
    held = _WHOLE.sub(lambda match: match[0].replace(" ", _HELD), text)
    held = _QUANTITY.sub(_HELD, held)
    indent = held[: len(held) - len(held.lstrip(" "))]
    lines = textwrap.wrap(
        held.lstrip(" "),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_HELD, " ") for line in lines]
