"""Tables for people: columns where they fit, paragraphs where not, and nothing that is copied from them is broken."""

import sys

import pytest

from elaswave.cli.tables import format_bytes, render_table, terminal_width

HEADER = ["checkpoint", "folder", "took"]
ROWS = [["5", "checkpoints/step-00000005", "250.0 ms"], ["10", "checkpoints/step-00000010", "-"]]


def test_columns_are_as_wide_as_their_content_and_numbers_end_in_line() -> None:
    assert render_table(HEADER, ROWS, 80) == [
        "checkpoint  folder                         took",
        "         5  checkpoints/step-00000005  250.0 ms",
        "        10  checkpoints/step-00000010         -",
    ]


def test_a_table_that_is_one_column_too_wide_becomes_paragraphs() -> None:
    lines = render_table(HEADER, ROWS, 80)
    width = max(map(len, lines))
    assert render_table(HEADER, ROWS, width) == lines
    assert render_table(HEADER, ROWS, width - 1) == [
        "checkpoint 5; folder",
        "  checkpoints/step-00000005; took 250.0 ms",
        "checkpoint 10; folder",
        "  checkpoints/step-00000010",
    ]


def test_a_path_is_never_broken() -> None:
    path = "/" + "long/" * 30 + "run"
    for width in (20, 80, 300):
        assert any(path in line for line in render_table(["folder", "size"], [[path, "3"]], width))


def test_a_table_that_does_not_fit_leaves_out_what_is_unknown() -> None:
    assert render_table(["name", "size"], [["one", "-"], ["two", "3"]], 5) == ["name", "  one", "name", "  two;"] + [
        "  size",
        "  3",
    ]


def test_what_looks_like_markup_is_printed_as_it_is() -> None:
    assert render_table(["[bold]name"], [["[red]x[/red]"], [":smile:"]], 80) == [
        "[bold]name",
        "[red]x[/red]",
        ":smile:",
    ]


def test_wide_characters_do_not_shift_columns() -> None:
    lines = render_table(["a", "b"], [["\u6f22\u5b57", "x"], ["ab", "y"]], 80)
    assert lines == ["a     b", "\u6f22\u5b57  x", "ab    y"]


def test_a_terminal_gets_its_header_set_off_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = render_table(HEADER, ROWS, 80)
    assert not any("\x1b" in line for line in plain)
    styled = render_table(HEADER, ROWS, 80, is_styled=True)
    assert styled[0].startswith("\x1b[1m") and styled[1:] == plain[1:]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert render_table(HEADER, ROWS, 80) == styled


def test_the_width_is_that_of_the_terminal_less_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal_width() == 79
    monkeypatch.setenv("COLUMNS", "3")
    assert terminal_width() == 20


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes_for_people(num_bytes: int | None, text: str) -> None:
    assert format_bytes(num_bytes) == text
