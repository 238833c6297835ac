"""Texts that somebody else has made, as a terminal may show them. Pure.

A terminal obeys what it is sent: a name, a worker's last line or an exception of another host may move the cursor,
clear what stood before, set the title, or write from right to left so that a command reads as another one. Every text
that is shown passes here; line ends and tabs stay. `tests/unit/project/test_visible.py` finds what is printed
beside it.
"""

import re
from collections.abc import Iterable

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line end, DEL, C1
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"  # what sets the direction, or ends a line
    "\ud800-\udfff]"  # bytes of a name that are no text: no stream takes them
)


class Styled(str):
    """A line with codes of our own, in which what others have made is visible already."""

    __slots__ = ()


def visible(text: str) -> str:
    """A text with the number of each character that a terminal would obey in its place, as ``\\u001b``.

    JSON stays the JSON that it was: there such a character stands in a string only, where this is how it is written.
    """
    return text if isinstance(text, Styled) or text.isprintable() else _OBEYED.sub(_number_of, text)


def visible_lines(lines: Iterable[str]) -> str:
    """Joins lines, some of which may be `Styled`, as one text."""
    return "\n".join(map(visible, lines))


def _number_of(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
