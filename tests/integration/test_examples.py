"""Each script in ``examples`` trains, learns, and has the same bits under any layout and when workers are killed."""

import re
from pathlib import Path

import pytest
from tests.integration.scripts import ROOT, RUN, run

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SHORT = ("--set", "run.steps=6", "--set", "batch.num_microbatches=5", "--set", "batch.microbatch_size=4")
"""Five micro-batches divide by no number of workers."""
TWO_KILLS = ("--fault", "kill:2@2:backward", "--fault", "kill:random@5:any")
TIMEOUT_S = 300


def train(folder: Path, example: str, *options: str) -> tuple[str, str]:
    """Runs an example.

    Returns:
        Its last line with losses and state, and all that it printed.
    """
    done = run(folder, *RUN, *options, str(ROOT / "examples" / example), timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = re.findall(r"^loss [\d.]+ to [\d.]+, state [0-9a-f]{16}$", done.stdout, re.M)
    return line, done.stdout


# What they show is in quick tests of the rules: auxiliary losses, buffers, trees, loaders, checkpoints.
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_survives_two_kills(example: str, tmp_path: Path) -> None:
    calm, _ = train(tmp_path, example, *SHORT, "--workers", "1")
    struck, output = train(tmp_path, example, *SHORT, "--workers", "4", *TWO_KILLS)
    assert struck == calm
    assert output.count("lost in") == 2, output


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_in_full_under_other_layouts(example: str, tmp_path: Path) -> None:
    calm, output = train(tmp_path, example)
    first, last = (float(number) for number in re.findall(r"[\d.]+", calm)[:2])
    assert last < 0.9 * first, "it learns"
    assert "lost in" not in output
    assert train(tmp_path, example, "--set", "layout.widths=[1,3]", *TWO_KILLS)[0] == calm
    assert train(tmp_path, example, "--set", "layout.widths=[1,1,1]", "--fault", "kill:1@7:backward")[0] == calm


def test_the_examples_are_listed() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    for example in EXAMPLES:
        assert f"]({example})" in page
        assert f"examples/{example}\n" in (ROOT / "examples" / example).read_text()
    assert len(EXAMPLES) == 9
