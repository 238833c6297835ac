"""The commands on the page about the command line work as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280


@pytest.mark.slow
def test_the_examples_of_the_command_line_page(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "elaswave"
    command.parent.mkdir()
    program = "import sys; from elaswave.cli.main import main; sys.exit(main())"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{program}" "$@"\n')
    command.chmod(0o755)
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "command-line.md").read_text(), re.M | re.S)
    environment = {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", "".join(blocks)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same computation: 12 steps") == 3
    assert "\n2x2\n" in done.stdout
    assert "different computations: the losses differ first at step 1" in done.stdout
    assert "\nexit code 1\n" in done.stdout
