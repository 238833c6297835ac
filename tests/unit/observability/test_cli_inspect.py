"""``elaswave inspect`` and ``elaswave inspect diff``: what they print, and how they exit."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from tests.unit.observability.samples import LOSSES, RECOVERY, make_result, write_events

from elaswave.cli.inspect import inspect_group, render_summary
from elaswave.cli.main import main
from elaswave.errors import RunFolderError
from elaswave.observability import events as events_module
from elaswave.observability.events import ErrorRaised, Evaluated, EventLog, Recovered, RunFinished, StepSkipped
from elaswave.observability.result import write_digests, write_result
from elaswave.observability.summary import summarize_run


def inspect(*args: object, columns: int = 120) -> Result:
    return CliRunner().invoke(inspect_group, [str(arg) for arg in args], env={"COLUMNS": str(columns)})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    folder.mkdir()
    write_events(folder)
    write_result(folder, make_result(recoveries=[RECOVERY]))
    return folder


ADVICE = "give the folder of a run, the one named by --run-dir\n"

WIDE = """\
run RUN: finished, 6 of 6 steps

loss first 5.6000, last 3.9000, lowest 3.9000 at step 6
█▆▄▂▃▁
validation loss last 4.5000 at step 5, 1 evaluations

layout 2x2, generation 0, from step 1: as configured

stage  workers  layers  parameters  names
    0      0 1  0 to 2     429,000  embedding to block.1
    1      2 3  3 to 5     429,000  block.2 to head

worker  stage  micro-batches                  owns               follows  optimizer  peak memory
     0      0              4  214,500 in 14 blocks  214,500 in 14 blocks    5.0 MiB    200.0 MiB
     1      0              4  214,500 in 14 blocks  214,500 in 14 blocks    5.0 MiB    200.0 MiB
     2      1              4  214,500 in 14 blocks  214,500 in 14 blocks    5.0 MiB    200.0 MiB
     3      1              4  214,500 in 14 blocks  214,500 in 14 blocks    5.0 MiB    200.0 MiB

step mean 250.0 ms, median 250.0 ms, slowest 250.0 ms, over 3 steps
phases of a step, mean: run 200.0 ms, reduce 30.0 ms, vote 10.0 ms, apply 5.0 ms, gather 5.0 ms
15,234 tokens/s, start-up 900.0 ms, whole run 2.80 s

event  worker  step  phase     detected by  outcome     total
lost        3     4  backward  exit         retried  211.0 ms

checkpoint after step  folder                        size      took
                    5  checkpoints/step-00000005  3.0 MiB  250.0 ms

state digest 00ff00ff00ff00ff00ff00ff00ff00ff
"""

NARROW = """\
run RUN: finished, 6 of 6 steps

loss first 5.6000, last 3.9000, lowest
  3.9000 at step 6
@*=.-_
validation loss last 4.5000 at step 5, 1
  evaluations

layout 2x2, generation 0, from step 1:
  as configured

stage 0; workers 0 1; layers 0 to 2;
  parameters 429,000; names embedding to
  block.1
stage 1; workers 2 3; layers 3 to 5;
  parameters 429,000; names block.2 to
  head

worker 0; stage 0; micro-batches 4; owns
  214,500 in 14 blocks; follows 214,500
  in 14 blocks; optimizer 5.0 MiB; peak
  memory 200.0 MiB
worker 1; stage 0; micro-batches 4; owns
  214,500 in 14 blocks; follows 214,500
  in 14 blocks; optimizer 5.0 MiB; peak
  memory 200.0 MiB
worker 2; stage 1; micro-batches 4; owns
  214,500 in 14 blocks; follows 214,500
  in 14 blocks; optimizer 5.0 MiB; peak
  memory 200.0 MiB
worker 3; stage 1; micro-batches 4; owns
  214,500 in 14 blocks; follows 214,500
  in 14 blocks; optimizer 5.0 MiB; peak
  memory 200.0 MiB

step mean 250.0 ms, median 250.0 ms,
  slowest 250.0 ms, over 3 steps
phases of a step, mean: run 200.0 ms,
  reduce 30.0 ms, vote 10.0 ms, apply
  5.0 ms, gather 5.0 ms
15,234 tokens/s, start-up 900.0 ms,
  whole run 2.80 s

event lost; worker 3; step 4; phase
  backward; detected by exit; outcome
  retried; total 211.0 ms

checkpoint after step 5; folder
  checkpoints/step-00000005; size
  3.0 MiB; took 250.0 ms

state digest 00ff00ff00ff00ff00ff00ff00ff00ff
"""


def test_a_wide_terminal_gets_tables(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    run.rename(run.parent / "RUN")
    result = inspect("RUN")
    assert (result.exit_code, result.output) == (0, WIDE)


def test_a_narrow_terminal_gets_paragraphs_and_nothing_is_cut_off(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    (run.parent / "a").rename(run.parent / "RUN")
    lines = render_summary(summarize_run(Path("RUN")), 40, ascii_only=True)
    assert "\n".join(lines) + "\n" == NARROW
    assert all(line.isascii() and len(line) <= 40 for line in lines[:-1])


def test_a_run_that_is_still_going_on(tmp_path: Path) -> None:
    path = write_events(tmp_path, [5.0, "nan", 3.0])
    with EventLog(path) as log:
        log.write(StepSkipped(step=2, reason="loss of micro-batch 1 is nan"))
        log.write(Recovered(recovery=RECOVERY))
        log.write(Evaluated(step=3, loss="inf"))
    with path.open("a") as file:
        file.write('{"kind":"st')
    result = inspect(tmp_path, columns=400)
    assert result.exit_code == 0
    assert "unfinished, 3 of 6 steps (still running, or ended without a word; last event at 20" in result.output
    assert "loss first 5.0000, last 3.0000, lowest 3.0000 at step 3\n█×▁\n" in result.output
    assert "validation loss last inf at step 3" in result.output
    assert "step 2 skipped: loss of micro-batch 1 is nan" in result.output
    assert "backward" in result.output and "state digest" not in result.output


def test_a_run_that_has_failed_without_a_single_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(RunFinished(outcome="failed", steps=0, duration_s=0.5))
    assert inspect(tmp_path, columns=400).output == f"run {tmp_path}: failed, 0 steps\n\nwhole run 0.0 ms\n"


def test_inspect_json_is_one_document(run: Path) -> None:
    for arguments in [(run, "--json"), ("--json", run)]:
        result = inspect(*arguments)
        assert result.exit_code == 0
        document = json.loads(result.stdout)
        assert (document["status"], document["steps"], document["layout"]) == ("finished", 6, "2x2")
        assert document["losses"]["6"] == 3.9


def test_diff_of_the_same_computation(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "b"
    other.mkdir()
    write_result(other, make_result(config={"layout": {"stages": 1}}))
    result = inspect("diff", run, other)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.output == (
        "same computation: 6 steps with equal losses and equal state\nstate digest 00ff00ff00ff00ff00ff00ff00ff00ff\n"
    )
    for arguments in [("diff", run, other, "--json"), ("--json", "diff", run, other)]:
        document = json.loads(inspect(*arguments).stdout)
        assert document["same"] is True
        assert document["differing_config"]["layout.replicas"] == [2, None]


def test_diff_names_the_first_step_and_tensor_that_differ(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "b"
    other.mkdir()
    losses = [*LOSSES[:2], 4.699999999999999, *LOSSES[3:]]
    write_result(other, make_result(losses=losses, state_digest="ab", config={"run": {"seed": 2}}))
    write_digests(run, {"master.embedding.weight": "aa", "master.head.weight": "bb"})
    write_digests(other, {"master.embedding.weight": "aa", "master.head.weight": "b0"})
    result = inspect("diff", run, other, columns=200)
    assert result.exit_code == 1
    assert result.output.replace(str(run), "A").replace(str(other), "B") == (
        "different computations: the losses differ first at step 3; "
        "the first differing tensor is master.head.weight\n"
        "\nloss of step 3:\n  4.7  A\n  4.699999999999999  B\n"
        "\nstate digest:\n  00ff00ff00ff00ff00ff00ff00ff00ff  A\n  ab  B\n"
        "\ndigest of master.head.weight:\n  bb  A\n  b0  B\n"
        "1 tensors differ\n"
        "\nconfiguration:\n"
        'model.family: "gpt" against unset\nmodel.num_layers: 4 against unset\nmodel.hidden_size: 128 against unset\n'
        'model.dtype: "float32" against unset\nlayout.stages: 2 against unset\nlayout.replicas: 2 against unset\n'
        "run.steps: 6 against unset\nrun.seed: 1 against 2\n"
    )
    document = json.loads(inspect("diff", run, other, "--json").stdout)
    assert document["first_differing_step"] == {"step": 3, "losses": [4.7, 4.699999999999999]}
    assert document["first_differing_tensor"] == {"name": "master.head.weight", "digests": ["bb", "b0"]}


def test_diff_of_states_whose_tensors_cannot_be_told(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "b"
    other.mkdir()
    write_result(other, make_result(state_digest="ab"))
    result = inspect("diff", run, other)
    assert result.exit_code == 1
    assert "cannot be told: one of the runs has no digests.json" in result.output
    for folder in (run, other):
        write_digests(folder, {"master.head.weight": "bb"})
    result = inspect("diff", run, other)
    assert result.exit_code == 1
    assert "no tensor differs: the data cursor or the grids" in result.output


def test_diff_of_different_numbers_of_steps(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "b"
    other.mkdir()
    write_result(other, make_result(losses=LOSSES[:4], state_digest="ab"))
    result = inspect("diff", run, other)
    assert result.exit_code == 1
    assert "different number of steps, 6 and 4; the losses of the first 4 steps are equal" in result.output


def test_what_cannot_be_compared_is_an_error_of_the_user(run: Path, tmp_path: Path) -> None:
    running = tmp_path / "running"
    running.mkdir()
    write_events(running)
    for other, message in [(running, "has no result.json"), (tmp_path / "x", "no such folder"), (tmp_path, "is not")]:
        result = inspect("diff", run, other)
        assert isinstance(result.exception, RunFolderError)
        assert message in str(result.exception)
        assert result.stdout == ""
    assert isinstance(inspect(tmp_path).exception, RunFolderError)


def test_the_exit_codes_of_the_whole_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "b"
    other.mkdir()
    write_result(other, make_result(losses=LOSSES[:4]))
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "a"]) == 0
    assert main(["inspect", "diff", "a", "a"]) == 0
    assert main(["inspect", "diff", "a", "b"]) == 1
    capsys.readouterr()
    assert main(["inspect", "diff", "a", "missing"]) == 2
    assert capsys.readouterr() == ("", "error: missing: no such folder; " + ADVICE)
    assert main(["inspect", "-h"]) == 0
    assert "elaswave inspect diff RUN_A RUN_B" in capsys.readouterr().out


def test_many_notes_are_cut_short(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for step in range(1, 31):
            log.write(StepSkipped(step=step, reason="loss is nan"))
        log.write(ErrorRaised(message="worker 1: out of memory"))
    lines = inspect(tmp_path, columns=400).output.splitlines()
    assert lines[-3:] == [
        "step 20 skipped: loss is nan",
        "10 more skipped or repeated steps; --json lists all",
        "error: worker 1: out of memory",
    ]


def test_a_run_folder_called_like_a_subcommand(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    run.rename(run.parent / "run")
    assert inspect("run").exit_code == 0
    (run.parent / "run").rename(run.parent / "diff")
    assert inspect("./diff").exit_code == 0
    assert inspect("diff", "diff", "diff").exit_code == 0


@pytest.mark.parametrize("arguments", [["diff", "a"], ["a", "b"], ["diff"], ["a", "--yaml"], ["--json"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = inspect(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_help_shows_both_spellings() -> None:
    for arguments in [["--help"], ["a", "--help"]]:
        output = inspect(*arguments).output
        assert "elaswave inspect RUN " in output and "elaswave inspect diff RUN_A RUN_B" in output


def test_looking_needs_no_torch(run: Path) -> None:
    """It takes seconds to import, and a user who looks into a run wants to see something at once."""
    program = "import sys; from elaswave.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, "inspect", str(run)], check=True, capture_output=True, timeout=60)
