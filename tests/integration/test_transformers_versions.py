"""Both ends of the range of transformers that pyproject.toml allows: logits, losses, equal bits and round trips."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.integration.scripts import ROOT

ALLOWED = next(
    each
    for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hf"]
    if each.startswith("transformers")
)
OLDEST = re.sub(r">=([\d.]+),.*", r"==\1", ALLOWED)
TESTS = (
    "tests/unit/models/test_hugging_face.py",
    "tests/unit/state/test_export_folder.py",
    "tests/integration/test_hugging_face.py",
    "tests/integration/test_fine_tuning.py",
)
INSTALL_S, TESTS_S = 300, 1500


def test_the_page_names_the_range() -> None:
    lower, upper = re.fullmatch(r"transformers>=([\d.]+),<5\.(\d+)", ALLOWED).groups()
    page = (ROOT / "docs" / "own-models" / "huggingface.md").read_text()
    assert f"transformers from {lower} to 5.{int(upper) - 1}" in page
    assert f'"{ALLOWED}",' in (ROOT / "pyproject.toml").read_text(), "the tests' extra has the same"


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + TESTS_S)
@pytest.mark.parametrize("wanted", [OLDEST, ALLOWED])
def test_both_ends_pass_the_tests(wanted: str, tmp_path: Path) -> None:
    """In a folder that stands before the installed packages; torch is the one that is installed."""
    install = ("-m", "pip", "install", "--quiet", "--target", str(tmp_path / "packages"), wanted)
    subprocess.run([sys.executable, *install], check=True, timeout=INSTALL_S)
    assert not (tmp_path / "packages" / "torch").exists()
    paths = os.pathsep.join([str(ROOT / "src"), str(tmp_path / "packages")])
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=TESTS_S,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout[-5000:]
