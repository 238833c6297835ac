"""The number that a written configuration carries, and what is read without it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from elaswave.config.load import build_config, load_config
from elaswave.config.schema import SECTIONS
from elaswave.config_format import FORMAT, format_problem, upgraded
from elaswave.errors import ConfigError

OLD = '[model]\nfamily = "llama"\nwidth = 64\nhidden_size = 96\n\n[run]\nsteps = 9\n'


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


def test_a_new_run_refuses_an_old_file_with_both_new_names(tmp_path: Path) -> None:
    path = write(tmp_path, OLD)
    (problem,) = problems_of(path)
    assert problem == (
        f"{path}: model.width and model.hidden_size without format = 2: what was model.width is now "
        "model.hidden_size; what was model.hidden_size is now model.intermediate_size. Check both names and write "
        "format = 2 above the first section"
    )


@pytest.mark.parametrize("key", ["width", "hidden_size"])
def test_one_of_the_two_keys_is_enough_to_refuse_a_file(tmp_path: Path, key: str) -> None:
    (problem,) = problems_of(write(tmp_path, f'[model]\nfamily = "llama"\n{key} = 64\n'))
    assert f"model.{key} without format = 2" in problem
    assert "is now model.hidden_size" in problem and "is now model.intermediate_size" in problem


def test_the_other_problems_of_an_old_file_are_listed_too_under_the_names_of_today(tmp_path: Path) -> None:
    problems = problems_of(write(tmp_path, "[model]\nwidth = 0\nnum_heads = 0\n"))
    assert [problem.split(": ")[-2:][0] for problem in problems][1:] == ["model.hidden_size", "model.num_heads"]


def test_a_file_without_these_keys_means_the_same_in_both_formats(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nsteps = 9\n")
    assert load_config(path) == load_config(path, reads_old_format=True) == load_config(None, ["run.steps=9"])


def test_the_old_reading_is_there_for_runs_of_that_time(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, OLD), reads_old_format=True)
    assert (config.model.hidden_size, config.model.intermediate_size, config.run.steps) == (64, 96, 9)
    new = write(tmp_path, config.to_toml())
    assert load_config(new) == load_config(new, reads_old_format=True) == config


@pytest.mark.parametrize("number", ["1", "3", '"2"', "true"])
def test_another_number_is_refused(tmp_path: Path, number: str) -> None:
    path = write(tmp_path, f"format = {number}\n[run]\nsteps = 9\n")
    for reads_old_format in (False, True):
        (problem,) = problems_of(path, reads_old_format=reads_old_format)
        assert problem.startswith(f"{path}: format: got ")
        assert problem.endswith("but this version of elaswave reads format = 2")
    with pytest.raises(ConfigError, match="format: got 3"):
        build_config({"format": 3})


def test_the_old_key_of_the_hidden_size_is_answered_with_the_new_one(tmp_path: Path) -> None:
    expected = ("model.width: unknown key; it is called model.hidden_size now",)
    assert problems_of(None, ("model.width=64",)) == expected
    assert problems_of(write(tmp_path, "format = 2\n[model]\nwidth = 64\n")) == expected
    assert problems_of(None, ("width=64",))[0].endswith("such as --set model.hidden_size=64")
    (problem,) = problems_of(write(tmp_path, "width = 64\n"))
    assert problem == "width: unknown section; did you mean model.hidden_size?"


def test_the_number_is_no_key_for_the_command_line() -> None:
    assert problems_of(None, ("format=2",))[0].startswith("--set format=2: expected section.key=value")


def test_upgrading_keeps_all_that_it_does_not_rename() -> None:
    old = {"model": {"width": 1, "hidden_size": 2, "dropout": 0.5}, "run": {"width": 3}, "odd": 4}
    new = {
        "format": 2,
        "model": {"hidden_size": 1, "intermediate_size": 2, "dropout": 0.5},
        "run": {"width": 3},
        "odd": 4,
    }
    assert upgraded(old) == new
    assert upgraded(new) == new
    assert format_problem(new) is None and format_problem({}) is None
    assert "format" not in SECTIONS
