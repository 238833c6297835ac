"""What a job is made of, and what is told when the system refuses it: folders, processes, descriptors, output."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.integration.jobs import QuietReporter, nothing_left, small_config

from elaswave.errors import LaunchError, RecoveryError, UsageError
from elaswave.launcher import launcher, local_job
from elaswave.launcher.resources import JobFolder, sweep_dead
from elaswave.system import processes
from elaswave.system.processes import GROWTH, needed_descriptors, provide_descriptors

HOLD = "from elaswave.launcher.resources import JobFolder; f = JobFolder(); print(f.path, flush=True); input()"
TINY = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.context_length=8", "run.steps=2"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folders_of_dead_launchers_are_swept_and_no_others(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    others = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    try:
        dead, alive = (Path(other.stdout.readline().strip()) for other in others if other.stdout is not None)
        (dead / "control.sock").touch()
        older = temporary / "elaswave-of-an-older-version"
        older.mkdir()
        assert sweep_dead() == []
        others[0].send_signal(signal.SIGKILL)
        others[0].wait()
        own = JobFolder()
        assert sweep_dead() == [dead]
        assert alive.is_dir() and older.is_dir() and own.path.is_dir()
        own.close()
        assert not own.path.exists()
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_a_temporary_folder_that_takes_nothing(temporary: Path) -> None:
    tempfile.tempdir = str(temporary / "gone")
    with pytest.raises(LaunchError, match=r"can be made in .*gone: No such file or directory; make room there, or set"):
        JobFolder()


def test_the_limit_of_open_files_is_raised_as_far_as_a_job_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (20, 4096)}
    monkeypatch.setattr(processes.resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(processes.resource, "setrlimit", lambda which, to: limits.update(now=to))
    provide_descriptors(8)
    assert limits["now"] == (needed_descriptors(8 + GROWTH), 4096), "others may join"
    provide_descriptors(2)
    assert limits["now"] == (needed_descriptors(8 + GROWTH), 4096), "it never sinks"
    provide_descriptors(2000)
    assert limits["now"] == (4096, 4096), "as far as the system permits"
    limits["now"] = (10, 10)
    with pytest.raises(
        UsageError, match=r"8 workers needs up to 64 open files .* limit here is 10 \(ulimit -n\): raise"
    ):
        provide_descriptors(8)
    for unlimited in ((resource.RLIM_INFINITY,) * 2, (20, resource.RLIM_INFINITY)):
        limits["now"] = unlimited
        provide_descriptors(8)
        assert limits["now"][0] in (resource.RLIM_INFINITY, needed_descriptors(8 + GROWTH))


def test_a_start_that_lasts_is_told_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_job, "STARTING_S", 0.1)
    reporter = QuietReporter()
    launcher.train(small_config({"run.steps": 1}), tmp_path, reporter=reporter)
    told = [text for text in reporter.messages if "workers are starting, and making the first step: " in text]
    assert told and all(text.endswith(" s so far") for text in told)


@pytest.mark.parametrize(("refused", "who"), [(0, "the forkserver"), (1, "the coordinator"), (2, "worker 1")])
def test_a_process_that_the_system_refuses_ends_the_job_with_a_clear_error(
    refused: int, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, forks = os.fork, []

    def fork_or_fail() -> int:
        forks.append(1)
        if len(forks) > refused:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(processes.os, "fork", fork_or_fail)
    with nothing_left(), pytest.raises(LaunchError) as raised:
        launcher.train(small_config(), tmp_path, reporter=QuietReporter())
    assert str(raised.value).startswith(
        f"the process of {who} cannot be started: Resource temporarily unavailable (EAGAIN); raise the limit"
    )


def test_a_control_folder_that_was_deleted_is_never_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second journal would know nothing of what the job has decided."""
    on_exit = local_job.LocalJob._on_coordinator_exit

    def delete_first(job: local_job.LocalJob, text: str, at_s: float) -> None:
        for file in job._place.folder.iterdir():
            file.unlink()
        job._place.folder.rmdir()
        on_exit(job, text, at_s)

    monkeypatch.setattr(local_job.LocalJob, "_on_coordinator_exit", delete_first)
    with nothing_left(), pytest.raises(RecoveryError) as raised:
        launcher.train(
            small_config({"run.steps": 400}),
            tmp_path,
            reporter=QuietReporter(),
            before_effect=lambda effect: os.kill(os.getpid(), signal.SIGKILL),
        )
    assert "the coordinator is lost, and so is its journal: " in str(raised.value)
    assert " was removed while the job ran; " in str(raised.value)
    assert str(raised.value).endswith("it has no checkpoint, so it can only begin again (--overwrite)")


def run(arguments: list[str], redirection: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, "-m", "elaswave", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def train_arguments(folder: Path) -> list[str]:
    settings = [*TINY, "layout.widths=[2]"]
    return ["train", "--run-dir", str(folder / "run"), *(word for pair in settings for word in ("--set", pair))]


@pytest.mark.parametrize("arguments", [["train", "--print-config"], ["train", "--set", "a.b=1", "--json"]])
def test_output_that_is_not_taken_is_told_without_a_traceback(arguments: list[str], tmp_path: Path) -> None:
    done = run(arguments, "> /dev/full", tmp_path)
    assert done.returncode == 1
    assert "error: standard output cannot be written (No space left on device): make room for it" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_job_without_standard_output_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = run(train_arguments(tmp_path), ">&-", folder)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert os.listdir(folder) == [], "not even an empty folder of torch's"


def test_too_few_descriptors_are_told_before_anything_starts(tmp_path: Path) -> None:
    command = ["bash", "-c", 'ulimit -n 10; exec "$@"', "bash", sys.executable, "-m", "elaswave"]
    few = subprocess.run([*command, *train_arguments(tmp_path)], capture_output=True, text=True, timeout=240)
    assert few.returncode == 2
    assert "a job of 2 workers needs up to 52 open files in a process, and the limit here is 10" in few.stderr
    assert "Traceback" not in few.stderr
