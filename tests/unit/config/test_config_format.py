"""The number that a written configuration carries: a person may leave it out, what a run has saved has it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from elaswave.config.load import build_config, load_config
from elaswave.config.schema import SECTIONS
from elaswave.config_format import FORMAT
from elaswave.errors import ConfigError

OLD = '[model]\nfamily = "llama"\nwidth = 64\nhidden_size = 96\n\n[run]\nsteps = 9\n'
"""As a run of before there was a number has saved it."""


def write(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text)
    return path


def problems_of(path: Path | None, overrides: tuple[str, ...] = (), **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, **options)
    return caught.value.problems


def test_what_is_written_carries_the_number() -> None:
    config = load_config()
    assert tomllib.loads(config.to_toml())["format"] == config.to_dict()["format"] == FORMAT == 2
    assert config.to_toml().startswith("format = 2\n\n[model]\n")
    assert "format" not in SECTIONS


def test_a_persons_file_may_leave_it_out(tmp_path: Path) -> None:
    text = '[model]\nfamily = "llama"\nhidden_size = 64\nintermediate_size = 96\n'
    without = load_config(write(tmp_path, text))
    assert (
        without
        == load_config(write(tmp_path, f"format = 2\n{text}"))
        == load_config(write(tmp_path, without.to_toml()))
    )
    assert (without.model.hidden_size, without.model.intermediate_size) == (64, 96)


def test_what_an_older_version_has_saved_is_refused_with_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, OLD)
    assert problems_of(path, is_saved=True) == (
        f"{path}: format: missing: an older version of elaswave has saved this, but this version of elaswave reads "
        "format = 2",
    )
    # Given to a new run it is refused too: it holds a key that there is no more.
    assert problems_of(path)[0].startswith("model.width: unknown key; ")


@pytest.mark.parametrize("number", ["1", "3", '"2"', "true"])
def test_another_number_is_refused(tmp_path: Path, number: str) -> None:
    path = write(tmp_path, f"format = {number}\n[run]\nsteps = 9\nno_such = 1\n")
    for is_saved in (False, True):
        (problem,) = problems_of(path, is_saved=is_saved)
        assert problem.startswith(f"{path}: format: got ")
        assert problem.endswith("but this version of elaswave reads format = 2")
    with pytest.raises(ConfigError, match="format: got 3"):
        build_config({"format": 3})


def test_the_number_is_no_key_for_the_command_line() -> None:
    assert problems_of(None, ("format=2",))[0].startswith("--set format=2: expected section.key=value")
