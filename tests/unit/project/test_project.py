"""The project's own files: what an installation may bring along, and what people and machines call."""

import os
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from elaswave.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_only_tried_releases_of_torch_are_admitted() -> None:
    assert "torch>=2.9,<2.14" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == ">=3.11"


def test_no_extra_asks_for_torch_itself() -> None:
    """A bare "torch" in an extra would look like permission for any release."""
    extras = PROJECT["optional-dependencies"]
    assert sorted(extras) == ["bench", "docs", "gpu", "hf", "plots", "test", "tokenize"]
    assert not [name for names in extras.values() for name in names if name.startswith(("torch>", "torch<", "torch="))]
    assert not [name for names in extras.values() for name in names if name == "torch"]


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and len(text.splitlines()) > 190


@pytest.mark.parametrize("script", ["scripts/test", "scripts/fuzz", "scripts/lint", "scripts/site", ".ci/run"])
def test_scripts_can_be_called(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in path.read_text()


def test_there_is_one_file_per_verb() -> None:
    for verb, place in COMMANDS.items():
        assert place.startswith((f"elaswave.cli.{verb}:", f"elaswave.cli.whatif.{verb}:"))


def test_an_installation_brings_the_data_files_along(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    package = ROOT / "src" / "elaswave"
    wanted = {f"elaswave/presets/{name}.toml" for name in ("devices", "links", "models")} | {"elaswave/py.typed"}
    assert wanted == {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()
                      and path.suffix not in (".py", ".pyc")}  # fmt: skip
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wanted <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"elaswave", "elaswave_rivals"}, (
        "what tries it out stays in the checkout"
    )
