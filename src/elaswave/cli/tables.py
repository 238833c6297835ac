"""What commands show beside texts: tables, numbers as people read them, and how far a long calculation is.

Output is text without drawn frames, so that it reads well in logs, pipes and screen readers; a table that is wider than
the terminal is printed as one short paragraph per row instead, so nothing is cut off and no path is broken. How far a
calculation is goes to standard error: on a terminal one line is written anew; elsewhere a line comes now and then. What
is short shows nothing.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elaswave.observability.output import wrap
from elaswave.visible import Styled, visible

_FALLBACK_WIDTH = 100
"""Columns when the output is no terminal and COLUMNS is not set."""
_ANY_WIDTH = 1 << 20
"""Columns of a terminal on which every table fits."""
_TERMINAL_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 5.0
_QUIET_S = 2.0


def terminal_width() -> int:
    """Columns to use: those of the terminal, or COLUMNS, less one so that no terminal wraps."""
    return max(20, shutil.get_terminal_size((_FALLBACK_WIDTH + 1, 24)).columns - 1)


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, is_styled: bool | None = None
) -> list[str]:
    """Formats a table as lines of text: columns if they fit, else one paragraph per row.

    Args:
        header: name of each column.
        rows: the cells; a column of numbers is aligned to the right.
        width: columns of the terminal.
        is_styled: set off the header, with the codes of a terminal; None: where standard output is one.
    Returns:
        The lines, none wider than ``width`` unless a single word is.
    """
    header, rows = [visible(name) for name in header], [[visible(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, name in enumerate(header):
        is_number = all(row[column][:1] in "0123456789-" for row in rows)
        table.add_column(Text(name), justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    if is_styled is None:
        is_styled = sys.stdout.isatty()
    console = Console(width=width, force_terminal=is_styled, color_system="auto" if is_styled else None)
    if console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum <= width:
        with console.capture() as captured:
            console.print(table)
        return [Styled(line.rstrip()) for line in captured.get().splitlines()]
    lines: list[str] = []
    for row in rows:
        cells = [f"{name} {cell}" for name, cell in zip(header, row, strict=True) if cell != "-"]
        lines += wrap("; ".join(cells), width)
    return lines


def format_bytes(num_bytes: int | None) -> str:
    """Formats a size for people, in powers of 1024; "-" if unknown."""
    if num_bytes is None:
        return "-"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_seconds(seconds: float) -> str:
    """Formats a duration for people."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


class Waiting:
    """How far one calculation is.

    Args:
        what: what is done, in a few words.
        stream: where to; standard error if None.
        clock: monotonic seconds.
    """

    def __init__(self, what: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began_s = clock()
        self._next_s = self._began_s + _QUIET_S
        self._is_terminal = self._stream.isatty()
        self._shown = False

    def at(self, done: float, detail: str = "") -> None:
        """Shows how far it is, if it is time to; cheap enough for an inner loop.

        Args:
            done: share of the work that is done, 0 to 1.
            detail: what else there is to say.
        """
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (_TERMINAL_INTERVAL_S if self._is_terminal else _LINE_INTERVAL_S)
        self._shown = True
        left = f", about {_duration((now_s - self._began_s) * (1 - done) / done)} left" if done > 0 else ""
        text = visible(f"{self._what}: {100 * done:.3g} %{left}{', ' if detail else ''}{detail}")
        self._write(f"\r\033[K{text}" if self._is_terminal else f"{text}\n")

    def close(self) -> None:
        """Clears the line on a terminal."""
        if self._shown and self._is_terminal:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _duration(seconds: float) -> str:
    for unit, size in (("years", 365 * 86400.0), ("days", 86400.0), ("hours", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
