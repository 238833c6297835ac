"""The documentation as a site: it is built without a warning, and its reference is whole."""

import re
import subprocess
from pathlib import Path

import pytest

import elaswave

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts/site", "--to", tmp_path / "site"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.parent.relative_to(tmp_path / "site").as_posix() for path in tmp_path.rglob("index.html")}
    assert {".", "tutorial", "ARCHITECTURE", "benchmarks", "examples", "own-models/tied", "reference/python"} <= pages
    reference = (tmp_path / "site/reference/python/index.html").read_text()
    assert "values by dotted key" in reference, "made from docstrings"
    commands = (tmp_path / "site/reference/commands/index.html").read_text()
    assert "elaswave simulate" in commands and "python -m verify protocol" in commands
    first = (tmp_path / "site/index.html").read_text()
    assert 'href="tutorial/"' in first and "docs/tutorial" not in first, "links are the site's"


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference/python.md").read_text(), re.M)
    assert {name.rpartition(".")[2] for name in named} >= set(elaswave.__all__) - {"__version__"}
