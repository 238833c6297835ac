"""The table of attacks in docs/security.md: each test that it names is there, and each suite of attacks is in it."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.security

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_the_page_names_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not function or function in functions


def test_every_suite_of_attacks_is_in_the_table() -> None:
    suites = {f"tests/security/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    named = {name.partition("::")[0] for name in NAMED}
    assert suites - named == {f"tests/security/{Path(__file__).name}"}


def test_every_row_of_the_table_names_its_test() -> None:
    table = PAGE.partition("## Attacks, promises, tests")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10 and all("`tests/" in row.rsplit("|", 2)[1] for row in rows)
