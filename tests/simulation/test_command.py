"""``python -m verify protocol``."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.signals import hear_signals

from elaswave.cli.main import main
from verify.__main__ import COMMANDS, PROGRAM, verify
from verify.commands import protocol
from verify.simulator.run import Build
from verify.simulator.schedule import parse_schedule
from verify.simulator.search import SPACES


def bench(*arguments: str) -> int:
    return main(["protocol", *arguments], program=verify, name=PROGRAM)


def test_seeds(capsys):
    assert bench("--schedules", "60", "--seed", "5", "--processes", "1") == 0
    out = capsys.readouterr().out
    assert "seeded" in out
    assert "60 schedules, no violation" in out
    assert "jobs finished" in out


def test_the_lines_that_schedules_run_are_counted(capsys):
    assert bench("--coverage", "--schedules", "3") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {row[-1] for row in rows} >= {"membership", "detection", "coordinator", "step", "protocol/"}
    shares = {row[-1]: float(row[0]) for row in rows}
    assert 50.0 < shares["protocol/"] < 100.0 and shares["membership"] > 20.0
    assert [row[0] for row in rows[:-1]] == sorted((row[0] for row in rows[:-1]), key=float)


@pytest.mark.slow
def test_several_processes_find_the_same(capsys):
    summaries = []
    for processes in ("1", "2"):
        assert bench("--schedules", "300", "--processes", processes, "--json") == 0
        summaries.append(json.loads(capsys.readouterr().out)["searched"])
    assert summaries[0] == summaries[1]
    assert summaries[0]["seeded"]["schedules"] == 300


@pytest.mark.slow
def test_a_space(capsys, monkeypatch):
    small = SPACES["4-workers-2-kills"]._replace(
        job=SPACES["4-workers-2-kills"].job._replace(widths=(1, 1), num_microbatches=1, steps=1, retry_step=0)
    )
    monkeypatch.setitem(SPACES, "4-workers-2-kills", small)
    assert bench("--space", "4-workers-2-kills", "--processes", "1", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["failure"] is None
    assert document["searched"]["4-workers-2-kills"]["schedules"] > 100


def test_a_mutant_is_found_and_shortened(capsys):
    assert bench("--mutant", "switch-again", "--schedules", "250", "--processes", "1") == 0
    out = capsys.readouterr().out
    assert "violation: LedgerError: change 1 of the layout after change 1" in out
    command = out.splitlines()[-1].strip()
    assert command.startswith("python -m verify protocol --mutant switch-again --replay ")
    # The command that is printed shows the violation, and without the bug there is none.
    arguments = shlex.split(command)[4:]
    assert bench(*arguments) == 1
    out = capsys.readouterr().out
    assert out.startswith("schedule: ")
    assert out.splitlines()[-1].startswith("violation: ")
    assert bench(*arguments[2:]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "finished; no violation"


def test_a_mutant_that_is_not_found_is_a_failure(capsys):
    assert bench("--mutant", "no-terms", "--schedules", "1", "--processes", "1") == 1
    assert "the mutant no-terms was not found" in capsys.readouterr().out


@pytest.mark.slow
def test_a_violation_in_the_product_ends_with_its_seed(capsys, monkeypatch):
    from verify.planted_bugs.mutants import MUTANTS

    broken: Build = MUTANTS["ignore-evidence"].build
    monkeypatch.setattr(protocol, "PRODUCT", broken)
    assert bench("--schedules", "250", "--processes", "1", "--json") == 1
    failure = json.loads(capsys.readouterr().out)["failure"]
    assert failure["violation"]
    parse_schedule(failure["shortest"])
    assert bench("--schedules", "250", "--processes", "1") == 1
    assert f"python -m verify protocol --replay {failure['seed']}" in capsys.readouterr().out


def test_replays(capsys):
    assert bench("--replay", "3", "--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["violation"] is None
    assert document["instants"] > 50
    assert "coordinator of term 1 starts" in captured.err
    assert bench("--replay", "widths=2,1 kill:0@8 kill:1@8 kill:2@8") == 0
    assert "ended: " in capsys.readouterr().out


def test_the_commands_name_themselves_as_they_are_typed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        assert main([command, "--help"], program=verify, name=PROGRAM) == 0
        text = capsys.readouterr().out
        assert f"Usage: python -m verify {command} [OPTIONS]\n" in text
        assert max(map(len, text.splitlines())) <= 79
    assert main(["protcol"], program=verify, name=PROGRAM) == 2
    assert "No such command 'protcol'; did you mean protocol?" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--replay", "nonsense"], ["--mutant", "none"], ["--space", "all"]])
def test_bad_input(wrong, capsys):
    assert bench(*wrong) == 2
    assert "Error:" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- its ends

ENDLESS = """
import time
from elaswave.cli.main import main
from verify.__main__ import verify
from verify.commands import protocol
protocol._seed_tasks = lambda seed, schedules, mutant: [(time.sleep, 3600.0)] * 4
if __name__ == "__main__":
    raise SystemExit(main(["protocol", "--processes", "2"], program=verify))
"""
"""Schedules that would take hours."""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def pool_of(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_at_work(pid: int) -> bool:
    """Whether a process of the pool ignores Ctrl-C, which is the first thing that it does, and sleeps in its task."""
    status = Path(f"/proc/{pid}/status").read_text()
    (ignored,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_command_alone_ends_it_and_its_processes(number, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = [sys.executable, str(tmp_path / "endless.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=hear_signals)
    try:
        wait_for(lambda: len(pool_of(process.pid)) == 2 and all(map(is_at_work, pool_of(process.pid))))
        children = pool_of(process.pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert "Traceback" not in errors
        wait_for(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))
    finally:
        process.kill()
        process.wait()
