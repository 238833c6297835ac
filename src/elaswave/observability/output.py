"""Output that is taken no more: a closed terminal (EIO), an ended reader (EPIPE), a full disk (ENOSPC).

Work that has been asked for does not end because of it. No state here.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO


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


def say_error(text: str) -> None:
    """Prints on standard error, where that is still possible."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        lead_elsewhere(sys.stderr, None)
