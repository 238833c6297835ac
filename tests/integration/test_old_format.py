"""A run of before configurations carried the number of their format: resumed to the same bits, read, refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.integration.jobs import SMALL, as_toml
from tests.old_runs import in_format_1

from elaswave.observability.result import read_digests, read_result

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = SMALL | {
    "model.family": "llama",
    "model.intermediate_size": 48,
    "layout.widths": [1, 2],
    "run.checkpoint_every": 2,
}


def elaswave(*arguments: str | Path, code: int = 0) -> str:
    """Runs the command; what it prints, errors last."""
    done = subprocess.run(
        [sys.executable, "-m", "elaswave", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_an_old_run_is_resumed_to_the_same_bits_and_read_but_not_repeated(tmp_path: Path) -> None:
    settings = [argument for key, value in SETTINGS.items() for argument in ("--set", f"{key}={as_toml(value)}")]
    whole, old = tmp_path / "whole", tmp_path / "old"
    elaswave("train", *settings, "--run-dir", whole, "--set", "run.steps=6")
    elaswave("train", *settings, "--run-dir", old, "--set", "run.steps=4")
    assert '"format": 2' in (old / "checkpoints" / "step-00000004" / "meta.json").read_text()
    in_format_1(old)
    assert '"format"' not in (old / "checkpoints" / "step-00000004" / "meta.json").read_text()
    assert json.loads((old / "result.json").read_text())["config"]["model"]["hidden_size"] == 48

    assert "4 of 4 steps" in elaswave("inspect", old)
    differing = json.loads(elaswave("inspect", "diff", old, whole, "--json", code=1))["differing_config"]
    assert differing.keys() == {"run.steps"}
    export = json.loads(elaswave("export", old, "--json"))
    with safe_open(export["output"], "pt") as file:
        config = json.loads(file.metadata()["config"])
    assert (config["format"], config["model"]["hidden_size"], config["model"]["intermediate_size"]) == (2, 32, 48)
    written = json.loads(Path(export["config_file"]).read_text())
    assert (written["hidden_size"], written["intermediate_size"]) == (32, 48)

    refusal = elaswave("train", old / "config.toml", "--run-dir", tmp_path / "again", code=2)
    assert "model.width is now model.hidden_size" in refusal and "is now model.intermediate_size" in refusal
    assert not (tmp_path / "again").exists()

    elaswave("train", old / "config.toml", "--resume", "--run-dir", old, "--set", "run.steps=6")
    assert (old / "config.toml").read_text().startswith("format = 2\n")
    assert read_result(old).losses == read_result(whole).losses
    assert read_digests(old) == read_digests(whole)
    assert elaswave("inspect", "diff", old, whole).startswith("same computation")
