"""What commands print tables with: columns as wide as their content, and numbers as people read them.

Output is text without drawn frames, so that it reads well in logs, pipes and screen readers; a table that is wider than
the terminal is printed as one short paragraph per row instead, so nothing is cut off and no path is broken.
"""

import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elaswave.observability.wrapping import wrap
from elaswave.visible import Styled, visible

_FALLBACK_WIDTH = 100
"""Columns when the output is no terminal and COLUMNS is not set."""
_ANY_WIDTH = 1 << 20
"""Columns of a terminal on which every table fits."""


def terminal_width() -> int:
    """Columns to use: those of the terminal, or COLUMNS, less one so that no terminal wraps."""
    return max(20, shutil.get_terminal_size((_FALLBACK_WIDTH + 1, 24)).columns - 1)


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, is_styled: bool | None = None
) -> list[str]:
    """A table as lines of text: columns if they fit, else one paragraph per row.

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
    """A size for people, in powers of 1024; "-" if unknown."""
    if num_bytes is None:
        return "-"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_seconds(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
