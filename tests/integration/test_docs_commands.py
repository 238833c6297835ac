"""The commands on the pages and the example configurations work as they stand there, and print what stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave.cli.main import EXIT_SUCCESS, main

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 580

EXPECTED: dict[str, dict[str, int]] = {
    "README.md": {"same computation: 60 steps": 1, "same computation: 36 steps": 3},
    "docs/command-line.md": {
        "same computation: 12 steps": 3,
        "\n2x2\n": 1,
        "different computations: the losses differ first at step 1": 1,
        "\nexit code 1\n": 1,
    },
    "docs/own-models.md": {"same computation: 40 steps": 1, "lost in": 1},
    "docs/own-models/fences.md": {"same computation: 6 steps": 1, "lost in backward of step 5 (exit)": 1},
    "docs/tutorial.md": {
        "lost in backward of step 20": 1,
        "lost in vote of step 40": 1,
        "lost in": 3,
        "finished 400 steps": 1,
    },
    "docs/checkpoints.md": {"same computation: 12 steps": 1, "\nmodel optimizer\n": 1, "\n53 tensors\n": 1},
    "docs/planning.md": {
        "<- bottleneck": 4,
        "\nrecycle_normalized\n": 1,
        "a step is predicted to take": 1,
        "goodput": 1,
    },
    "docs/policies.md": {"lost in backward of step 5 (exit)": 1, "goodput": 1},
    "docs/devices.md": {"lost in backward of step 8 (exit)": 1, "finished 24 steps": 1},
    "docs/failures.md": {"lost in gather of step 17 (exit)": 1, "step 150/150": 1},
    "examples/README.md": {"finished 8 steps": 1, "configuration for transformers": 1},
}
"""How often a text occurs in what the commands of a page print."""


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", (ROOT / page).read_text(), re.M | re.S)
    return [block for _, tag, block in found if tag == language]


def run_shell(commands: str, folder: Path) -> str:
    """What commands print, in a shell that ends at the first one that fails; ``elaswave`` and ``verify`` are
    this checkout's."""
    (folder / "examples").symlink_to(ROOT / "examples")
    command = folder / "bin" / "elaswave"
    command.parent.mkdir()
    program = "import sys; from elaswave.cli.main import main; sys.exit(main())"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{program}" "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def settled(text: str) -> list[str]:
    """The lines of an output without what depends on the machine: digests, times, losses, who noticed first."""
    return [
        re.sub(r", going on after .*|[0-9a-f]{16}|[0-9.]+ ms|^ [0-9.]+|exit|link|\s", "", line)
        for line in text.splitlines()
    ]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("page", EXPECTED)
def test_the_commands_of_a_page(page: str, tmp_path: Path) -> None:
    commands = [block for block in blocks(page, "sh") if "pip install" not in block]
    for code in blocks(page, "python"):
        if file := re.match(r"# (\w+\.py)\n", code):
            (tmp_path / file[1]).write_text(code)
    output = run_shell("".join(commands), tmp_path)
    assert {text: output.count(text) for text in EXPECTED[page]} == EXPECTED[page]
    printed = settled(output)
    for block in blocks(page, "text"):
        assert [line for line in settled(block) if line not in printed] == []


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_an_example_trains(example: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["train", str(example), "--run-dir", str(tmp_path / "run"), "--set", "run.steps=2"])
    assert code == EXIT_SUCCESS
    assert "finished 2 steps" in capfd.readouterr().out
