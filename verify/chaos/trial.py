"""One training job in a process of its own, bounded in time, and what it leaves behind.

The job runs in a fork of this process, so that the libraries are loaded once for many jobs. While it runs, the kernel
gives orphans to this process: whatever a job leaves running is found, named and ended.
"""

import contextlib
import faulthandler
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from elaswave.checkpoints.checkpoint import find_newest_checkpoint, verify_checkpoint
from elaswave.config.schema import Config
from elaswave.engine.blueprint import Blueprint
from elaswave.errors import CheckpointError
from elaswave.faults.injection import Fault, read_fault_records
from elaswave.launcher.launcher import train
from elaswave.observability.events import CheckpointWritten, Recovered, read_events
from elaswave.observability.processes import PROCESSES_FILE, facts_of
from elaswave.observability.progress import make_reporter
from elaswave.observability.result import read_digests, read_result
from elaswave.observability.run_folder import EVENTS_FILE, FAULTS_FILE, RESULT_FILE, open_run_dir
from elaswave.system.processes import end_with_parent, parent_of_orphans
from elaswave.untrusted import read_bytes, read_text
from verify.chaos.cases import Ending, Placed
from verify.chaos.growth import GrowthWatch

RUN_FOLDER = "run"
CONSOLE_FILE = "console.log"
_ERROR_FILE = "error"
_SHARED_MEMORY = Path("/dev/shm")
_STACKS_GRACE_S = 1.0
_LOOK_S = 0.25


class Meanwhile(Protocol):
    """What is done while a command runs."""

    def __call__(self) -> float:
        """Does what is due; returns the seconds until it wants to be called again."""
        ...


def run_trial(
    folder: Path, config: Config, faults: Sequence[Fault], timeout_s: float, watch: GrowthWatch | None = None
) -> Ending:
    """Runs a job to its end, or until the time is over.

    Must be called in a process without other children and without threads.

    Args:
        folder: made here; afterwards it holds the run folder, what went to the terminal, and, when the job hung, the
            stacks of all its processes in their logs.
        config: with its layout resolved.
        faults: of `parse_faults`.
        timeout_s: the job's time.
        watch: looks at the job's processes while it runs.
    """

    def look(seen: GrowthWatch) -> float:
        seen.look()
        return _LOOK_S

    def start(temporary: Path) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_job(parent, folder, temporary, config, faults)
        return pid

    ending = _supervise(folder, start, timeout_s, None if watch is None else partial(look, watch))
    if ending.hung_s is None and ending.result is None and ending.error is None:
        silent = f"no result and no error (exit code {ending.exit_code})"
        ending = msgspec.structs.replace(ending, left_behind=[*ending.left_behind, silent])
    return msgspec.structs.replace(ending, exit_code=None)


def run_command(
    folder: Path, arguments: Sequence[str], timeout_s: float, meanwhile: Meanwhile, environment: Mapping[str, str]
) -> Ending:
    """Runs ``elaswave`` with its run folder in a folder, as a person does, to its end, or until the time is over.

    Must be called in a process without other children and without threads.

    Args:
        folder: made here, as by `run_trial`.
        arguments: of the command.
        timeout_s: the command's time.
        meanwhile: called again and again while it runs.
        environment: of this process; the command gets it with another folder for temporary files.
    """

    def start(temporary: Path) -> int:
        command = [sys.executable, "-m", "elaswave", *arguments]
        path = os.pathsep.join(entry for entry in sys.path if entry)  # this very elaswave
        own = {**environment, "TMPDIR": str(temporary), "PYTHONPATH": path}
        with open(folder / CONSOLE_FILE, "wb") as console:
            return os.posix_spawn(
                sys.executable,
                command,
                own,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, console.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, console.fileno(), 2),
                ],
            )

    ending = _supervise(folder, start, timeout_s, meanwhile)
    return msgspec.structs.replace(
        ending,
        error=_error_shown(folder / CONSOLE_FILE, ending.exit_code) if ending.exit_code else None,
        bad_checkpoints=_bad_checkpoints(folder / RUN_FOLDER),
        left_behind=ending.left_behind + _unfinished_files(folder / RUN_FOLDER),
    )


def _supervise(folder: Path, start: Callable[[Path], int], timeout_s: float, meanwhile: Meanwhile | None) -> Ending:
    """Starts a process, stays until it has ended or the time is over, and collects what it has left."""
    folder.mkdir(parents=True, exist_ok=True)
    with parent_of_orphans():
        return _supervise_family(folder, start, timeout_s, meanwhile)


def _supervise_family(
    folder: Path, start: Callable[[Path], int], timeout_s: float, meanwhile: Meanwhile | None
) -> Ending:
    others = set(_children_of(os.getpid()))
    # Short, since the name of a socket may not be long; in the system's folder, since another's may be.
    temporary = Path(tempfile.mkdtemp(prefix="ew-"))
    shared_before = set(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else set()
    hung_s = None
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = start(temporary)
        ended = _wait(pid, timeout_s, meanwhile)
        if not ended:
            hung_s = timeout_s
            _show_stacks()
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        left_behind = _end_children(others)
        left_behind += [f"temporary file {name}" for name in os.listdir(temporary) if not _is_torchs(name)]
        if _SHARED_MEMORY.is_dir():
            new = set(os.listdir(_SHARED_MEMORY)) - shared_before
            left_behind += [f"shared memory {name}" for name in sorted(new) if "elaswave" in name]
    except BaseException:
        _end_children(others)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    ending = _read_ending(folder)
    code = os.waitstatus_to_exitcode(status)
    return msgspec.structs.replace(ending, hung_s=hung_s, left_behind=left_behind, exit_code=code)


def placed(config: Config) -> Placed:
    """Where a job's state is at its beginning."""
    blueprint = Blueprint(config)
    elastic = config.elastic
    floats_per_element = 1 + {"adamw": 2, "sgd": 1}[config.optimizer.name]
    return Placed(
        layout=blueprint.layout,
        blocks=blueprint.blocks,
        placement=blueprint.placement,
        scatter_width=blueprint.scatter_width,
        max_elements=elastic.refill_bytes_per_step // (4 * floats_per_element),
    )


def _be_job(parent: int, folder: Path, temporary: Path, config: Config, faults: Sequence[Fault]) -> None:
    """The job's process; never returns."""
    status = 1
    try:
        end_with_parent(parent)
        console = os.open(folder / CONSOLE_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(console, 1)
        os.dup2(console, 2)
        os.close(console)
        stream = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
        sys.stdout = sys.stderr = stream
        # Inherited by the processes of the job, each of which writes its stacks to its own log.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        tempfile.tempdir = str(temporary)
        error: Exception | None = None
        with (
            open_run_dir(folder / RUN_FOLDER, config, now=datetime.now(UTC)) as run_dir,
            contextlib.closing(make_reporter(json_mode=False, stream=stream)) as reporter,
        ):
            try:
                train(config, run_dir, reporter=reporter, faults=tuple(faults))
            except Exception as caught:
                error = caught
                traceback.print_exc()
        if error is not None:
            (folder / _ERROR_FILE).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(pid: int, timeout_s: float, meanwhile: Meanwhile | None) -> bool:
    """Whether a child ends within a time."""
    deadline_s = time.monotonic() + timeout_s
    pid_fd = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(pid_fd, select.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0.0:
            wait_s = left_s if meanwhile is None else min(left_s, meanwhile())
            if poller.poll(1000 * wait_s):
                return True
        return False
    finally:
        os.close(pid_fd)


def _show_stacks() -> None:
    """Lets every process of the job write its stacks to its log; a stopped one cannot."""
    todo, found = _children_of(os.getpid()), []
    while todo:
        found.append(todo.pop())
        todo += _children_of(found[-1])
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACKS_GRACE_S)


def _end_children(others: set[int]) -> list[str]:
    """Kills and reaps the children of this process, those that were their children too; says what they were.

    Args:
        others: ids of the children that it had before and keeps.
    """
    found = []
    while children := set(_children_of(os.getpid())) - others:
        for pid in sorted(children):
            found.append(f"process {pid} ({_state_of(pid)})")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return found


def _children_of(pid: int) -> list[int]:
    """Ids of the processes whose parent a process is."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            facts = facts_of(int(name))
            if facts is not None and facts.parent == pid:
                found.append(int(name))
    return found


def _state_of(pid: int) -> str:
    facts = facts_of(pid)
    return "gone" if facts is None else facts.state


def _error_shown(console: Path, exit_code: int) -> str | None:
    """The error that a command has shown last; a traceback's last line is none that a person should see."""
    text = read_bytes(console).decode(errors="replace")
    shown = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
    if "Traceback (most recent call last)" in text:
        return f"a traceback was shown: {text.rstrip().splitlines()[-1]}"
    if shown or exit_code <= 128:
        return shown[-1] if shown else None
    return text.rstrip().splitlines()[-1] if text.strip() else None  # of a stop that was asked for


def _bad_checkpoints(run_dir: Path) -> list[str]:
    """Checkpoints that the log calls complete, that should be there, and that do not pass their checks."""
    events = read_events(run_dir / EVENTS_FILE) if (run_dir / EVENTS_FILE).exists() else []
    said = {
        event.checkpoint.step: run_dir / event.checkpoint.path
        for event in events
        if isinstance(event, CheckpointWritten)
    }
    listed = read_result(run_dir).checkpoints if (run_dir / RESULT_FILE).exists() else []
    bad = [f"{point.path} is not there" for point in listed if not (run_dir / point.path).is_dir()]
    for step, path in sorted(said.items()):
        if path.is_dir():  # an older one may have been removed for newer ones
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                bad.append(f"step {step}: {error}")
    return bad


def _unfinished_files(run_dir: Path) -> list[str]:
    """What a command that has ended should have put in its place or removed."""
    names = [path.name for pattern in (".*.tmp", PROCESSES_FILE) for path in run_dir.glob(pattern)]
    return [f"file {name}" for name in sorted(names)]


def _is_torchs(name: str) -> bool:
    """An empty folder that torch makes for its compiler when it is first used."""
    return name.startswith("torchinductor_")


def _read_ending(folder: Path) -> Ending:
    run_dir = folder / RUN_FOLDER
    found: dict[str, Any] = {}
    if (folder / _ERROR_FILE).exists():
        found["error"] = read_text(folder / _ERROR_FILE)
    elif (run_dir / "result.json").exists():
        found |= {"result": read_result(run_dir), "digests": read_digests(run_dir)}
        newest = find_newest_checkpoint(run_dir).newest
        found["checkpoint_step"] = None if newest is None else newest.step
    events = read_events(run_dir / EVENTS_FILE) if (run_dir / EVENTS_FILE).exists() else []
    return Ending(
        struck=read_fault_records(run_dir / FAULTS_FILE),
        recoveries=[event.recovery for event in events if isinstance(event, Recovered)],
        num_checkpoints=sum(isinstance(event, CheckpointWritten) for event in events),
        **found,
    )
