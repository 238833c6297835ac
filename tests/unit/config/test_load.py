"""Reading a configuration from files and --set, and which source wins."""

import tomllib
from pathlib import Path

import pytest

from elaswave.config.load import load_config
from elaswave.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def problems_of(*args: object, **kwargs: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)  # type: ignore[arg-type]
    return caught.value.problems


def test_set_is_stronger_than_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "format = 2\n[model]\nhidden_size = 64\nnum_layers = 2\n")
    config = load_config(path, ["model.hidden_size=32", "model.hidden_size=96", "run.steps = 7"])
    assert (config.model.hidden_size, config.model.num_layers, config.run.steps) == (96, 2, 7)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("model.family=llama", "model.family", "llama"),
        ('model.family="llama"', "model.family", "llama"),
        ("model.recompute=true", "model.recompute", True),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", (0.8, 0.9)),
        ("layout.widths=[1,3]", "layout.widths", (1, 3)),
        ("data.source=/a b/=c.txt", "data.source", "/a b/=c.txt"),
        ("model.dropout=0", "model.dropout", 0.0),
    ],
)
def test_the_value_of_set_is_toml_or_else_a_string(override: str, key: str, value: object) -> None:
    assert load_config(None, [override]).flat()[key] == value


@pytest.mark.parametrize("override", ["model", "model=3", "model.hidden_size", ".hidden_size=3", "model.=3", "=", ""])
def test_a_malformed_set_is_named(override: str) -> None:
    (problem,) = problems_of(None, [override])
    assert problem == f"--set {override}: expected section.key=value, such as --set optimizer.lr=1e-3"


def test_a_set_without_its_section_is_answered_with_it() -> None:
    (problem,) = problems_of(None, ["hidden_size=3"])
    assert problem.endswith("such as --set model.hidden_size=3")


def test_set_cannot_smuggle_in_more_keys() -> None:
    (problem,) = problems_of(None, ["model.hidden_size=3\nx = 4"])
    assert problem.startswith("model.hidden_size: got")


def test_a_deeper_key_is_unknown() -> None:
    (problem,) = problems_of(None, ["model.hidden_size.x=3"])
    assert problem == "model.hidden_size.x: unknown key; did you mean model.hidden_size?"


def test_problems_of_all_sources_come_together(tmp_path: Path) -> None:
    path = write(tmp_path, "format = 2\ncolour = 1\n[model]\nhidden_size = 0\n")
    assert len(problems_of(path, ["run.steps=0", "nonsense"], 0)) == 5


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nhidden_size = 64\nhidden_size 3\n")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}, line 3: this is not TOML: ")
    path = write(tmp_path, "[model]\nhidden_size = [1,\n")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}, ")
    path = write(tmp_path, "[model]\nhidden_size = 1\nhidden_size = 2\n")
    (problem,) = problems_of(path)
    assert ", line 3: this is not TOML: Cannot overwrite a value" in problem


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"# \xff\n")
    assert problems_of(path) == (f"{path}: byte 2 is not UTF-8; a configuration is a text file",)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    (problem,) = problems_of(missing)
    assert problem == f"{missing}: cannot be read: No such file or directory; give the path of a TOML file"
    (problem,) = problems_of(tmp_path)
    assert "cannot be read: Is a directory" in problem


def test_a_path_does_not_depend_on_where_the_command_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(None, ["data.source=book.txt"]).data.source == str(tmp_path / "book.txt")
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config(None, ["data.source=~/book.txt"]).data.source == "/home/me/book.txt"
    assert load_config().data.source == "python-docs"


def test_the_printed_configuration_reads_back(tmp_path: Path) -> None:
    config = load_config(None, ["model.family=llama", "model.num_kv_heads=2", "optimizer.eps=1e-22"], 3)
    path = write(tmp_path, config.to_toml())
    assert load_config(path) == config
    assert load_config(path, workers=3) == config
    assert "intermediate_size" not in config.to_toml()


def test_a_layout_in_one_form_replaces_one_in_the_other(tmp_path: Path) -> None:
    path = write(tmp_path, "[layout]\nwidths = [2, 2]\nlayers = [5, 1]\n")
    config = load_config(path, ["layout.stages=1", "layout.replicas=1"])
    assert (config.widths, config.layers_per_stage) == ((1,), (6,))
    path = write(tmp_path, "[layout]\nstages = 2\nreplicas = 4\n")
    assert load_config(path, ["layout.widths=[1,3]"]).widths == (1, 3)
    assert load_config(path, ["layout.stages=1"]).widths == (4,)


def test_both_forms_in_one_source_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "[layout]\nwidths = [2, 2]\nstages = 2\n")
    assert "given beside layout.widths" in problems_of(path)[0]
    assert "given beside layout.widths" in problems_of(None, ["layout.widths=[2,2]", "layout.stages=2"])[0]


def test_a_layout_of_the_file_must_fit_the_workers(tmp_path: Path) -> None:
    path = write(tmp_path, "[layout]\nwidths = [2, 2]\n")
    assert problems_of(path, (), 3)[0].startswith("--workers: 3 is given")


def test_the_base_takes_the_place_of_the_defaults() -> None:
    base = load_config(None, ["model.hidden_size=64", "layout.widths=[1,3]", "layout.layers=[5,1]", "run.steps=9"])
    assert load_config(base=base) == base
    config = load_config(None, ["run.steps=20"], base=base)
    assert (config.model.hidden_size, config.run.steps, config.widths, config.layers_per_stage) == (
        64,
        20,
        (1, 3),
        (5, 1),
    )


def test_workers_and_a_new_form_replace_the_layout_of_the_base() -> None:
    base = load_config(None, ["layout.widths=[1,3]", "layout.layers=[5,1]"])
    assert load_config(workers=1, base=base).layers_per_stage == (6,)
    assert load_config(workers=6, base=base).widths == (3, 3)
    assert load_config(None, ["layout.stages=2", "layout.replicas=1"], base=base).widths == (1, 1)
    assert load_config(None, ["layout.schedule=gpipe"], base=base).widths == (1, 3)


def test_a_section_that_is_no_table_is_named_whatever_is_laid_over_it(tmp_path: Path) -> None:
    path = write(tmp_path, "model = 3\nlayout = 4\n")
    assert problems_of(path, ["model.hidden_size=64", "layout.stages=1"]) == (
        "model: got 3, expected a table of keys, [model]",
        "layout: got 4, expected a table of keys, [layout]",
    )


def test_printed_toml_is_toml() -> None:
    document = tomllib.loads(load_config().to_toml())
    assert document["layout"] == {"widths": [2, 2], "layers": [3, 3], "schedule": "1f1b"}
