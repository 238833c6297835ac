"""What is printed: in which no text of others is obeyed (`elaswave.visible`), and of which some is taken no more.

That is so on a closed terminal (EIO), after its reader has ended (EPIPE) and on a full disk (ENOSPC). Work that has
been asked for does not end because of it. No state here.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from elaswave.visible import visible, visible_lines


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
    """A text as a stream takes it: visible, and with "?" for every character that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return visible(text).encode(encoding, "replace").decode(encoding)


class VisibleLines(logging.Formatter):
    """Lines of a log, in which reasons and names of others stand."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, with its traceback."""
        return visible(super().format(record))


def say_error(text: str) -> None:
    """Prints on standard error, where that is still possible."""
    try:
        print(visible(text), file=sys.stderr, flush=True)
    except OSError:
        lead_elsewhere(sys.stderr, None)
