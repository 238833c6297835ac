"""docs/protocol.md says what the code does."""

from pathlib import Path

import pytest

from verify.page import fill
from verify.planted_bugs.lifetimes import LIFETIME_MUTANTS
from verify.planted_bugs.mutants import MUTANTS
from verify.simulator.schedule import KINDS
from verify.simulator.search import SPACES

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_page_is_up_to_date():
    text = PAGE.read_text()
    assert fill(text) == text, "write it anew: scripts/protocol-page"
    assert "not shown by its example" not in text


def test_the_page_names_everything():
    text = PAGE.read_text()
    for name in (*KINDS, *SPACES, *MUTANTS, *LIFETIME_MUTANTS):
        assert name in text


def test_unknown_sections_are_refused():
    assert fill("nothing to fill") == "nothing to fill"
    with pytest.raises(KeyError, match="dragons"):
        fill("<!-- from the code: dragons -->\n<!-- until here -->")
