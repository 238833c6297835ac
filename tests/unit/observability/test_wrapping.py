"""Text for a terminal: where lines may end."""

import pytest

from elaswave.observability.output import wrap


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("", 10, []),
        ("one two three", 9, ["one two", "  three"]),
        ("  one two three", 9, ["  one two", "    three"]),
        ("see /a/path/that/is/long now", 10, ["see", "  /a/path/that/is/long", "  now"]),
        ("it took 332 ms and 4 GiB", 12, ["it took", "  332 ms and", "  4 GiB"]),
        ("use `elaswave train --resume` then", 16, ["use", "  `elaswave train --resume`", "  then"]),
        ("again: elaswave inspect diff a b; or not", 20, ["again:", "  elaswave inspect diff a b;", "  or not"]),
        ("what elaswave made of it", 15, ["what elaswave", "  made of it"]),
        ("wrap-around of micro-batches", 12, ["wrap-around", "  of", "  micro-batches"]),
    ],
)
def test_lines_end_between_words(text: str, width: int, lines: list[str]) -> None:
    assert wrap(text, width) == lines
