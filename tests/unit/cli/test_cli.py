"""The command line: verbs, options, exit codes, and what stands on which stream."""

import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tests.signals import hearing_signals

from elaswave import __version__
from elaswave.cli import main as main_module
from elaswave.cli.main import COMMANDS, cli, main
from elaswave.config.load import load_config
from elaswave.config.policy_code import policies
from elaswave.errors import CheckpointError, ConfigError, DataError, ElaswaveError, StoppedBySignalError, WorkerError
from elaswave.faults.injection import SUPPORTED
from elaswave.launcher import launcher as launcher_module
from elaswave.observability.run_folder import saved_config


class Launcher:
    """Stands where `elaswave.launcher.launcher.train` does, to see what it is given and to end as it may end."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.action: Callable[[], None] = lambda: None

    def train(self, config: object, run_dir: object, **options: object) -> dict[str, Any]:
        self.calls.append({"config": config, "run_dir": run_dir, **options})
        self.action()
        return {"steps": 1, "losses": [5.5], "state_digest": "ab"}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launcher:
    stand_in = Launcher()
    monkeypatch.setattr(launcher_module, "train", stand_in.train)
    monkeypatch.chdir(tmp_path)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "7")
    return stand_in


def test_every_verb_can_be_imported_and_explains_itself() -> None:
    for verb in COMMANDS:
        result = CliRunner().invoke(cli, [verb, "--help"])
        assert result.exit_code == 0, result.output
        assert result.output.startswith(f"Usage: cli {verb}")
    listing = CliRunner().invoke(cli, ["--help"]).output
    assert all(f"\n  {verb} " in listing for verb in COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["train", "--print-config"]])
def test_what_computes_nothing_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from elaswave.cli.main import main; code = main(); assert 'torch' not in sys.modules; exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elaswave"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"elaswave {__version__}\n")
    done = subprocess.run([*command, "train", "--set", "x"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --set x: expected")


def test_printed_configuration_is_complete_and_touches_nothing(launcher: Launcher, capsys: Any, tmp_path: Path) -> None:
    assert main(["train", "--print-config", "--workers", "3", "--run-dir", "r"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["layout"]["widths"] == [3]
    (tmp_path / "c.toml").write_text(printed)
    assert load_config(tmp_path / "c.toml") == load_config(workers=3)
    assert main(["train", "--print-config", "c.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(load_config(workers=3).to_dict()))
    assert not (tmp_path / "r").exists() and not launcher.calls


def test_train_hands_over_to_the_launcher(launcher: Launcher, capsys: Any, tmp_path: Path) -> None:
    assert main(["train", "--set", "run.steps=3", "--run-dir", "r", "--profile"]) == 0
    (call,) = launcher.calls
    assert call["config"] == load_config(None, ["run.steps=3"])
    assert call["run_dir"] == tmp_path / "r"
    assert (call["resume"], call["profile"]) == (False, True)
    assert saved_config(tmp_path / "r") == call["config"]
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"


def test_the_default_run_folder_is_new_each_time(launcher: Launcher, tmp_path: Path) -> None:
    assert main(["train"]) == main(["train"]) == 0
    folders = sorted((tmp_path / "runs").iterdir())
    assert folders == sorted(call["run_dir"] for call in launcher.calls)
    assert len(folders) == 2


def test_json_is_the_only_thing_on_standard_output(launcher: Launcher, capsys: Any) -> None:
    launcher.action = lambda: launcher.calls[-1]["reporter"].message("hello")
    assert main(["train", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"steps": 1, "losses": [5.5], "state_digest": "ab"}
    assert "hello" in err
    assert main(["train"]) == 0
    assert "hello" in capsys.readouterr().out


def test_a_second_run_in_a_folder_needs_a_decision(launcher: Launcher, capsys: Any) -> None:
    assert main(["train", "--run-dir", "r"]) == 0
    assert main(["train", "--run-dir", "r"]) == 2
    assert "holds a run already; add --resume" in capsys.readouterr().err
    assert main(["train", "--run-dir", "r", "--overwrite", "--set", "run.seed=2"]) == 0
    assert main(["train", "--run-dir", "r", "--resume"]) == 0
    assert [call["config"].run.seed for call in launcher.calls] == [1, 2, 2]
    assert [call["resume"] for call in launcher.calls] == [False, False, True]


def test_resume_starts_from_the_saved_configuration(launcher: Launcher) -> None:
    assert main(["train", "--run-dir", "r", "--set", "model.hidden_size=64", "--set", "layout.widths=[1,3]"]) == 0
    assert main(["train", "--run-dir", "r", "--resume", "--workers", "2", "--set", "run.steps=9"]) == 0
    config = launcher.calls[-1]["config"]
    assert (config.model.hidden_size, config.run.steps, config.widths) == (64, 9, (1, 1))
    assert main(["train", "--run-dir", "r", "--resume"]) == 0
    assert launcher.calls[-1]["config"].widths == (1, 1)


def test_the_folder_of_a_failed_run_can_be_resumed(launcher: Launcher) -> None:
    def fail() -> None:
        raise ElaswaveError("no")

    launcher.action = fail
    assert main(["train", "--run-dir", "r"]) == 1
    launcher.action = lambda: None
    assert main(["train", "--run-dir", "r", "--resume"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--resume"], "--resume needs --run-dir"),
        (["train", "--resume", "--overwrite", "--run-dir", "r"], "give one of them"),
        (["train", "--resume", "--run-dir", "r"], "holds no run that could be resumed"),
        (["train", "--workers", "0"], "Invalid value for '--workers'"),
        (["train", "--workers", "many"], "Invalid value for '--workers'"),
        (["train", "--nope"], "No such option"),
        (["train", "a.toml", "b.toml"], "unexpected extra argument"),
        (["train", "none.toml"], "none.toml: cannot be read: No such file"),
        (["train", "--set", "model.hidden_size=x"], 'model.hidden_size: got "x", expected a whole number'),
        (["train", "--set", "layout.widths=[9]"], "wider than batch.num_microbatches"),
        (["train", "--workers", "3", "--set", "layout.widths=[1,3]"], "--workers: 3 is given, but"),
        (["train", "--run-dir", "/proc/elaswave"], "cannot write /proc/elaswave"),
        (["train", "--run-dir", "/dev/null"], "/dev/null is a file"),
        (["nope"], "No such command"),
        (["inspect", "nowhere"], "nowhere"),
        ([], "Usage: elaswave"),
    ],
)
def test_bad_input_ends_with_2_and_says_why(
    launcher: Launcher, capsys: Any, arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == "" and "Traceback" not in err
    assert not launcher.calls


def test_several_problems_are_listed_one_to_a_line(capsys: Any) -> None:
    assert main(["train", "--set", "model.hidden_size=0", "--set", "run.steps=0", "--set", "a.b=1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: 3 problems:"
    assert [line.split(":")[0] for line in lines[1:]] == ["  a", "  model.hidden_size", "  run.steps"]


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (ConfigError(["a: bad"]), 2, "error: a: bad\n"),
        (DataError("x.txt: too short"), 2, "error: x.txt: too short\n"),
        (CheckpointError("damaged"), 1, "error: damaged\n"),
        (ElaswaveError("anything"), 1, "error: anything\n"),
        (WorkerError(2, "out of memory at step 3"), 1, "error: worker 2: out of memory at step 3\n"),
        (
            WorkerError(2, "ValueError at step 3", "Traceback (most recent call last):\nValueError: x\n"),
            1,
            "Traceback (most recent call last):\nValueError: x\nerror: worker 2: ValueError at step 3\n",
        ),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (
            StoppedBySignalError(signal.SIGTERM, "stopped by SIGTERM after step 3"),
            143,
            "stopped by SIGTERM after step 3\n",
        ),
        (StoppedBySignalError(signal.SIGINT, "stopped by SIGINT"), 130, "stopped by SIGINT\n"),
        (SystemExit(143), 143, ""),
        (SystemExit(None), 0, ""),
        (SystemExit("words"), 1, "words\n"),
        (click.ClickException("clicked"), 1, "Error: clicked\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_ending_has_its_exit_code(
    launcher: Launcher, capsys: Any, error: BaseException, code: int, stderr: str
) -> None:
    def end() -> None:
        raise error

    launcher.action = end
    assert main(["train"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", stderr)


def test_an_error_is_one_json_document_too(launcher: Launcher, capsys: Any) -> None:
    assert main(["train", "--json", "--set", "model.hidden_size=0", "--set", "run.steps=0"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["error"], document["exit_code"], len(document["problems"])) == ("ConfigError", 2, 2)
    assert err.startswith("error: 2 problems")
    assert main(["train", "--json", "--nope"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_our_own_bugs_show_their_traceback(launcher: Launcher) -> None:
    def bug() -> None:
        raise AssertionError("ours")

    launcher.action = bug
    with pytest.raises(AssertionError, match="ours"):
        main(["train"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_ending_signal_unwinds(launcher: Launcher, number: int, tmp_path: Path) -> None:
    launcher.action = lambda: signal.raise_signal(number)
    with hearing_signals():
        assert main(["train", "--run-dir", "r"]) == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    launcher.action = lambda: None
    assert main(["train", "--run-dir", "r", "--overwrite"]) == 0


def test_an_ignored_signal_stays_ignored(launcher: Launcher) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launcher.action = lambda: signal.raise_signal(signal.SIGHUP)
        assert main(["train"]) == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_the_command_may_run_in_another_thread(launcher: Launcher) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["train"])))
    thread.start()
    thread.join(60)
    assert codes == [0]


def test_the_arguments_of_the_process_are_the_default(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(main_module.sys, "argv", ["elaswave", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"elaswave {__version__}\n"


# ------------------------------------------------------------------------------------------------- what a person reads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'; did you mean train?"),
        (["zzz"], "No such command 'zzz'; there are demo, train"),
    ],
)
def test_an_unknown_command_gets_a_suggestion(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_usage_names_the_commands_as_they_are_typed(capsys: Any) -> None:
    assert main(["inspect", "nowhere", "--nope"]) == 2
    assert "Usage: elaswave inspect [OPTIONS] RUN\n" in capsys.readouterr().err


def test_help_fits_80_columns_and_says_what_there_is(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = {}
    for command in [*([verb] for verb in COMMANDS), ["inspect", "diff"], []]:
        assert main([*command, "--help"]) == 0
        texts[" ".join(command)] = text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 79
    for command in ("plan", "simulate", "compare"):
        assert all(name in texts[command].split("Options:")[1] for name in policies())
    assert "_ELASWAVE_COMPLETE=bash_source" in texts[""]
    words = texts["train"].split("--fault KIND")[1]
    assert all(kind in words for kind in SUPPORTED)


def test_commands_can_be_completed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("_ELASWAVE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "elaswave tr")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert main([]) == 0
    assert capsys.readouterr().out == "plain,train\n"


def test_losing_one_worker_is_the_default_of_all(capsys: Any) -> None:
    for command in ("plan", "compare"):
        assert main([command, "--help"]) == 0
        assert "lost.  [default: 1;" in " ".join(capsys.readouterr().out.split()).replace("lost. ", "lost.  ")


def test_errors_wrap_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    arguments = ["train", "--set", "model.hidden_size=0", "--set", "run.steps=0"]
    assert main(arguments) == 2
    plain = capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(arguments) == 2
    wrapped = capsys.readouterr().err
    assert wrapped.split() == plain.split() and len(wrapped.splitlines()) > len(plain.splitlines())
    assert max(map(len, wrapped.splitlines())) <= 40


def test_too_many_open_files_are_no_bug_of_ours(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    def too_many() -> None:
        raise OSError(24, "Too many open files")

    launcher.action = too_many
    assert main(["train"]) == 1
    assert (
        "error: too many files are open (Too many open files): raise the limit (ulimit -n)" in capsys.readouterr().err
    )


def test_an_error_of_the_system_that_nobody_explains_is_a_bug_of_ours(launcher: Launcher) -> None:
    def missing() -> None:
        raise FileNotFoundError(2, "No such file or directory", "x")

    launcher.action = missing
    with pytest.raises(FileNotFoundError):
        main(["train"])


def test_libraries_are_told_before_they_are_loaded(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert main(["train"]) == 0
    cache = tmp_path.resolve() / "elaswave" / "compiled"
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCHINDUCTOR_CACHE_DIR"]) == ("1", str(cache))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert main(["train"]) == 0
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine", "a person's own stays"


@pytest.mark.parametrize("arguments", [["train", "--run-dir", "\udce9"], ["inspect", "a\udcff"], ["run", "\udce9.py"]])
def test_an_argument_that_is_no_text_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "is no UTF-8 text, which the files of a run could not hold: rename" in capsys.readouterr().err


def test_a_scripts_own_arguments_may_be_anything(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import sys; sys.exit(7 if sys.argv[1] == '\\udce9' else 1)")
    assert main(["run", str(script), "\udce9"]) == 7
