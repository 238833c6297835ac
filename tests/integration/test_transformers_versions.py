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
LOWER, UPPER = re.fullmatch(r"transformers>=(5\.\d+),<5\.(\d+)", ALLOWED).groups()
NEWEST = f"5.{int(UPPER) - 1}"
TESTS = (
    "tests/unit/models/test_hugging_face.py",
    "tests/unit/api/test_export_folder.py",
    "tests/integration/test_hugging_face.py",
    "tests/integration/test_fine_tuning.py",
)
INSTALL_S, TESTS_S = 600, 1500


def test_the_page_names_the_range() -> None:
    page = (ROOT / "docs" / "own-models" / "huggingface.md").read_text()
    assert f"transformers from {LOWER} to {NEWEST}" in page
    assert f'"{ALLOWED}",' in (ROOT / "pyproject.toml").read_text(), "the tests' extra has the same"


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + TESTS_S)
@pytest.mark.parametrize(("wanted", "minor"), [(f"transformers=={LOWER}", LOWER), (ALLOWED, NEWEST)])
def test_both_ends_pass_the_tests(wanted: str, minor: str, tmp_path: Path) -> None:
    """In a folder that stands before the installed packages; torch is the one that is installed."""
    install = ("-m", "pip", "install", "--quiet", "--no-compile", "--target", str(tmp_path / "packages"), wanted)
    subprocess.run([sys.executable, *install], check=True, timeout=INSTALL_S)
    assert not (tmp_path / "packages" / "torch").exists()
    paths = os.pathsep.join([str(ROOT / "src"), str(tmp_path / "packages")])
    environment = {**os.environ, "PYTHONPATH": paths}
    which = "import transformers; print(transformers.__version__, transformers.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", which], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    version, place = found.stdout.split()
    assert version.startswith(f"{minor}.") and Path(place).is_relative_to(tmp_path), "the end itself is tried"
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TESTS_S,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout[-5000:]
