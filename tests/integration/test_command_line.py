"""``elaswave train`` as a process of its own: bad input, signals, and two jobs at a time.

Every command runs in a session of its own with a temporary folder of its own, so that whatever it leaves is seen.
"""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.jobs import SMALL, as_toml, nothing_left, run_job
from tests.signals import hear_signals

from elaswave.cli.main import main
from elaswave.observability.result import RunResult, read_digests, read_result

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
COMMAND = (sys.executable, "-c", "import sys; from elaswave.cli.main import main; sys.exit(main())", "train")


def settings_of(**changes: Any) -> list[str]:
    """``--set`` arguments of the small model; underscores for dots: ``run__steps=3``."""
    values = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    return [argument for key, value in values.items() for argument in ("--set", f"{key}={as_toml(value)}")]


def start(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts a command in a session and with a temporary folder of its own."""
    temporary.mkdir()
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=temporary.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_signals,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Ends whatever is left of a command."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@contextlib.contextmanager
def started(temporary: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that is running; when the context is left, it must have ended and have left nothing."""
    process = start(temporary, *arguments)
    try:
        yield process
        process.communicate(timeout=TIMEOUT_S)
        assert processes_of_session(process.pid) == []
        assert os.listdir(temporary) == []
    finally:
        end(process)


def processes_of_session(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _parent, _group, of_session = stat.read_text().rpartition(") ")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def ended(temporary: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs a command to its end: exit code, standard output, standard error."""
    with started(temporary, *arguments) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output, errors


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ended_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As `ended`, in this process, which has torch already: what a command says does not depend on where it runs."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with nothing_left():
            code = main(["train", *arguments])
        return code, *capfd.readouterr()

    return run


def wait_for_step(run_dir: Path, step: int) -> None:
    """Waits until a run's log says that a step has been committed."""
    deadline = time.monotonic() + TIMEOUT_S
    events = run_dir / "events.jsonl"
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if f'"step":{step},' in events.read_text().replace(" ", ""):
                return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached: {events.read_text() if events.exists() else 'no log'}")


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"run__stpes": 3}, ["run.stpes: unknown key; did you mean run.steps?"]),
        ({"run__steps": '"many"'}, ['run.steps: got "many", expected a whole number']),
        ({"layout__widths": [1, 9]}, ["9"]),
        ({"layout__stages": 5, "layout__replicas": 1}, ["5", "4"]),
        ({"layout__widths": [2, 2], "layout__layers": [2, 1]}, ["layout.layers"]),
        ({"data__source": "no-such-file.txt"}, ["no-such-file.txt: no such file"]),
        ({"data__source": "short.txt"}, ["short.txt", "one sample needs 17"]),
        ({"data__source": "big.bin", "data__vocab_size": 10}, ["big.bin: token 12 at position 3 is outside the"]),
    ],
    ids=["unknown key", "wrong type", "wide stage", "stages", "layers", "no file", "short", "vocabulary"],
)
def test_bad_input_is_refused_with_exit_code_2(
    changes: dict[str, Any], expected: list[str], tmp_path: Path, ended_here: Run
) -> None:
    (tmp_path / "short.txt").write_bytes(b"short")
    (tmp_path / "big.bin").write_bytes(b"".join(n.to_bytes(2, "little") for n in [1, 2, 3, 12] + [4] * 200))
    code, output, errors = ended_here("--run-dir", "run", "--json", *settings_of(**changes))
    assert code == 2, errors
    assert "Traceback" not in errors
    assert errors.startswith("error: ")
    assert all(text in errors for text in expected), errors
    assert msgspec.json.decode(output)["exit_code"] == 2
    assert not (tmp_path / "run" / "result.json").exists()


def test_every_problem_is_listed(tmp_path: Path) -> None:
    changes = {"run__stpes": 3, "model__hidden_size": 33, "optimizer__lr": '"high"'}
    code, _, errors = ended(tmp_path / "t", *settings_of(**changes))
    assert code == 2
    assert errors.startswith("error: 3 problems:")
    for key in ("run.stpes", "model.num_heads", "optimizer.lr"):
        assert key in errors


def test_run_folders_that_cannot_be_used_are_refused(tmp_path: Path, ended_here: Run) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, _, errors = ended_here("--run-dir", "file/run", *settings_of())
    assert (code, "Traceback" in errors) == (2, False)
    assert "cannot write" in errors and "choose another --run-dir" in errors

    short = settings_of(run__steps=2)
    code, _, errors = ended_here("--run-dir", "run", *short)
    assert code == 0, errors
    before = (tmp_path / "run" / "result.json").read_bytes()

    code, _, errors = ended_here("--run-dir", "run", *short)
    assert (code, "Traceback" in errors) == (2, False)
    assert "holds a run already; add --resume to go on with it, --overwrite to replace it" in errors

    code, _, errors = ended_here("--run-dir", "run", "--resume", *settings_of(model__hidden_size=64))
    assert (code, "Traceback" in errors) == (2, False)
    assert "model.hidden_size is 32 there and 64 here" in errors
    assert (tmp_path / "run" / "result.json").read_bytes() == before

    saved = (tmp_path / "run" / "config.toml").read_bytes()
    edited = re.sub(rb"(?m)^lr = .*$", b"lr = 0.5", saved)
    (tmp_path / "run" / "config.toml").write_bytes(edited)
    code, _, errors = ended_here("--run-dir", "run", "--resume")
    assert (code, "Traceback" in errors) == (2, False)
    assert "is of another computation" in errors and "here. Ask for its values" in errors
    assert re.search(r"optimizer\.lr is 0\.\d+ there and 0\.5 here", errors)
    assert (tmp_path / "run" / "config.toml").read_bytes() == edited != saved
    (tmp_path / "run" / "config.toml").write_bytes(saved)

    code, _, errors = ended_here("--run-dir", "run", "--resume", "--set", "run.steps=1")
    assert (code, "Traceback" in errors) == (2, False)
    assert "has 2 steps already, and run.steps = 1 asks for fewer: there is nothing to do" in errors
    assert (tmp_path / "run" / "result.json").read_bytes() == before
    assert (tmp_path / "run" / "config.toml").read_bytes() == saved

    code, _, errors = ended_here("--run-dir", "run", "--overwrite", *settings_of(run__steps=3))
    assert code == 0, errors
    assert read_result(tmp_path / "run").steps == 3


# --------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    "number, code, to_all",
    [
        pytest.param(signal.SIGINT, 130, True, id="Ctrl-C"),  # a terminal sends it to all processes
        pytest.param(signal.SIGTERM, 143, False, id="SIGTERM"),
        pytest.param(signal.SIGHUP, 129, True, id="a closed terminal", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 138, True, id="a scheduler's signal to all", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, 140, False, id="SIGUSR2", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, False, id="SIGINT to the command", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, True, id="SIGTERM to all", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_job_between_two_steps(
    number: signal.Signals, code: int, to_all: bool, tmp_path: Path, ended_here: Run
) -> None:
    run_dir = tmp_path / "run"
    endless = settings_of(run__steps=10**6, optimizer__schedule="constant")
    with started(tmp_path / "t", "--run-dir", str(run_dir), "--json", *endless) as process:
        wait_for_step(run_dir, 3)
        if to_all and number == signal.SIGUSR1:  # workers are not in the group of a terminal
            for pid in processes_of_session(process.pid):
                os.kill(pid, number)
        else:
            os.killpg(process.pid, number) if to_all else os.kill(process.pid, number)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert msgspec.json.decode(output)["exit_code"] == code
    last = msgspec.json.decode((run_dir / "events.jsonl").read_text().splitlines()[-1])
    assert last["outcome"] == "interrupted"
    checkpoints = sorted(path.name for path in run_dir.glob("checkpoints/*"))
    assert checkpoints == [f"step-{last['steps']:08d}"]
    assert (
        f"stopped after step {last['steps']}; its newest checkpoint is of step {last['steps']}, to go on from there: "
        f"elaswave train --resume --run-dir {run_dir}\n"
    ) in errors
    if to_all:
        return
    steps = last["steps"] + 3
    code, _, errors = ended_here("--run-dir", str(run_dir), "--resume", "--set", f"run.steps={steps}", "--workers", "1")
    assert code == 0, errors
    settings = {"run.steps": steps, "optimizer.schedule": "constant", "layout.widths": [1, 1]}
    assert same(run_dir, run_job(tmp_path / "whole", settings).run_dir)


def same(one: Path, other: Path) -> bool:
    """Whether two run folders hold the same computation."""

    def computation(result: RunResult) -> tuple[Any, ...]:
        return result.losses, result.state_digest

    return computation(read_result(one)) == computation(read_result(other)) and read_digests(one) == read_digests(other)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(tmp_path / "t", "--run-dir", str(run_dir), "--json", *settings_of(run__steps=10**6)) as process:
        wait_for_step(run_dir, 2)
        for pid in processes_of_session(process.pid):
            if pid != process.pid:
                os.kill(pid, signal.SIGSTOP)  # no worker can answer the first signal any more
        os.kill(process.pid, signal.SIGTERM)
        wait_for_text(process, "SIGTERM: ending after this step")
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    assert (
        "stopped at once by a second signal; it has no checkpoint, so it can only begin again (--overwrite)" in errors
    )


@pytest.mark.slow
def test_impatient_signals_leave_nothing_behind(tmp_path: Path) -> None:
    """Ten of them, as fast as a person can, while the job ends; `started` sees what is left."""
    run_dir = tmp_path / "run"
    with started(tmp_path / "t", "--run-dir", str(run_dir), *settings_of(run__steps=10**6)) as process:
        wait_for_step(run_dir, 2)
        for _ in range(10):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGINT)
            time.sleep(0.04)  # the fault is that fast
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


def test_training_goes_on_without_its_terminal(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--run-dir", str(run_dir), *settings_of(run__steps=70, layout__widths=[1])],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # As under nohup: what is ignored stays ignored.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    try:
        os.close(theirs)
        wait_for_step(run_dir, 3)
        os.close(ours)
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        end(process)
    assert read_result(run_dir).steps == 70
    lines = (run_dir / "logs" / "terminal.log").read_text().splitlines()
    assert lines[0].startswith("output is not taken any more (")
    assert any(line.startswith("finished 70 steps in ") for line in lines)


def wait_for_text(process: subprocess.Popen[str], text: str) -> None:
    """Reads a command's standard error until it says something."""
    assert process.stderr is not None
    deadline = time.monotonic() + TIMEOUT_S
    seen = ""
    while text not in seen:
        readable, _, _ = select.select([process.stderr], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(process.stderr.fileno(), 1 << 16).decode() if readable else ""
        assert chunk, seen
        seen += chunk


def test_workers_end_when_the_command_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(tmp_path / "t", "--run-dir", str(run_dir), *settings_of(run__steps=10**6))
    try:
        wait_for_step(run_dir, 2)
        assert len(processes_of_session(process.pid)) >= 5
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while processes_of_session(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert processes_of_session(process.pid) == []
    finally:
        end(process)


# ------------------------------------------------------------------------------------------------------- two jobs


@pytest.mark.slow
def test_two_jobs_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(tmp_path / f"t{seed}", "--run-dir", str(folder), *settings_of(run__seed=seed)))
            for seed, folder in enumerate(folders, start=1)
        ]
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
    for seed, folder in enumerate(folders, start=1):
        assert same(folder, run_job(tmp_path / f"alone-{seed}", {"run.seed": seed, "layout.widths": [1]}).run_dir)
