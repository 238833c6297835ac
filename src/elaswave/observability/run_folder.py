"""The folder of a run: when it may be used, what is saved when it begins, what is removed from it, logs of its workers.

A folder *is a run* if it holds ``run.json``, which is written first and removed last. A folder that is not one is only
used if nothing in it has a name that a run would write, and nothing is ever removed from it. A lock, which the system
drops when its holders end, keeps two commands from working in one folder.

A host that has a run folder of its own sends what its workers print. The coordinator appends it to a file of the same
name in its own folder, so that one folder tells of all workers. What is sent of one worker is bounded.

Files are replaced atomically (temporary file, fsync, rename, fsync of the folder): a reader sees the old content or
the new, never a half.

No clock and no random source here: the caller says when it is and what the folder is called.
"""

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from elaswave._version import __version__
from elaswave.checkpoints.checkpoint import CHECKPOINTS, SPARE, link_spare
from elaswave.config.load import load_config
from elaswave.config.schema import SECTIONS, Config
from elaswave.config.values import OWN, path_problem
from elaswave.errors import CheckpointError, ConfigError, DataError, RunFolderError, UsageError
from elaswave.hashing import key64
from elaswave.observability.processes import PROCESSES_FILE
from elaswave.untrusted import open_binary, open_regular, read_bytes, read_json, reason, stays_inside

MARKER_FILE = "run.json"
CONFIG_FILE = "config.toml"
RESULT_FILE = "result.json"
DIGESTS_FILE = "digests.json"
EVENTS_FILE = "events.jsonl"
FAULTS_FILE = "faults.jsonl"
TRACE_FILE = "trace.json"
LOCK_FILE = ".lock"
CONTROL_FILE = "control.json"
AGENTS_FILE = "agents.json"
"""In a run's folder and in its folder of checkpoints: shows agents of other hosts that they have the same one."""
CHECKPOINTS_DIR, SPARE_DIR = CHECKPOINTS, SPARE
LOGS_DIR = "logs"
DATA_FILE = "data.json"
TERMINAL_LOG = "terminal.log"
"""In the folder of logs: what the terminal would not show any more."""
DATA_DIR = "data"
EXPORT_DIR = "export"
HUGGINGFACE_DIR = "huggingface"
"""What an export needs of a transformers model, beside the weights."""
FINE_TUNING_FILE = "fine-tuning.json"
"""In that folder: what ``elaswave train --hf`` was given, so that it can go on."""
WRITTEN_NAMES = (
    LOCK_FILE,
    CONFIG_FILE,
    RESULT_FILE,
    DIGESTS_FILE,
    EVENTS_FILE,
    FAULTS_FILE,
    PROCESSES_FILE,
    CONTROL_FILE,
    AGENTS_FILE,
    TRACE_FILE,
    DATA_FILE,
    CHECKPOINTS_DIR,
    SPARE_DIR,
    LOGS_DIR,
    DATA_DIR,
    EXPORT_DIR,
    HUGGINGFACE_DIR,
)
"""What a run, and what is made from it, stands under in its folder, beside the marker."""
WRITTEN_PATTERNS = (
    "trace-worker-*.json.part",
    "processes-*.json",
    ".processes-*.json.*.tmp",
    *(f".{name}.*.tmp" for name in (MARKER_FILE, *WRITTEN_NAMES)),
)
"""What a run that was cut short may leave beside them."""
KEYS_FREE_ON_RESUME = (
    *("layout.", "elastic.", "device.", "sites.", "control.", "net.", "run."),
    *("model.recompute", "data.verify"),
)
"""Keys, or the beginnings of keys, that a resumed run may change."""
KEYS_FIXED_ON_RESUME = ("run.seed", "elastic.consistency", "elastic.accumulator_bits")
"""Exceptions from them: they change bits."""
LINES = 5
"""So many last lines of a lost worker stand in the recovery's report."""
TAIL_BYTES = 4096
"""In so many last bytes they are looked for; more of one line is left out."""
SENT_AT_ONCE_BYTES = 16 << 10
SENT_MAX_BYTES = 4 << 20
"""Of one worker's log; what it prints beyond that stands on its host."""


def default_run_dir(now: datetime, token: str) -> Path:
    """Names the folder of a run that was not given one: ``runs/<UTC time>-<token>``.

    Args:
        now: the time, UTC.
        token: a few random characters.
    """
    return Path("runs") / f"{now:%Y%m%dT%H%M%SZ}-{token}"


def is_run(path: Path) -> bool:
    """Tells whether a folder holds a run, finished or not."""
    return (path / MARKER_FILE).is_file()


def saved_config(path: Path) -> Config:
    """Reads the configuration that the run in a folder was started with.

    Raises:
        RunFolderError: the folder holds no run, or its configuration cannot be read.
    """
    _check_usable(path, resume=True, overwrite=False)
    try:
        return load_config(path / CONFIG_FILE, is_saved=True)
    except ConfigError as error:
        raise RunFolderError(f"the configuration saved in {path} is damaged: {'; '.join(error.problems)}") from error


def resume_command(config: Config, path: Path) -> str:
    """Writes the command that goes on with a run.

    Args:
        config: of the run.
        path: its folder.
    """
    options = f"--resume --run-dir {shlex.quote(str(path))}"
    is_script = config.model.family == OWN and not is_fine_tuning(path)
    return f"elaswave run {options} SCRIPT.py" if is_script else f"elaswave train {options}"


def is_fine_tuning(path: Path) -> bool:
    """Tells whether a folder holds a run of ``elaswave train --hf``."""
    return (path / HUGGINGFACE_DIR / FINE_TUNING_FILE).is_file()


@contextlib.contextmanager
def open_run_dir(
    path: Path, config: Config, *, now: datetime, resume: bool = False, overwrite: bool = False
) -> Iterator[Path]:
    """Makes a folder ready for a run and keeps others out of it for as long as the context lasts.

    When bad input (`ConfigError`, `DataError`) ends a new run that has no checkpoint, the folder is no run afterwards,
    and what was made for it here, the folder itself and those above it included, is gone again.

    Args:
        path: the folder; made, with its parents, if it is not there.
        config: resolved configuration of the run; saved in the folder.
        now: the time, UTC.
        resume: go on with the run that the folder holds.
        overwrite: remove the run that the folder holds, and nothing else.
    Returns:
        The folder as an absolute path (entering the context).
    Raises:
        RunFolderError: the folder holds a run and neither `resume` nor `overwrite` is given, holds files of others
            where the run would write, holds no run to resume, is in use, or cannot be written.
    """
    assert not (resume and overwrite), "resume keeps what overwrite removes"
    path = Path(os.path.abspath(path))
    if problem := path_problem(path):
        raise RunFolderError(f"the run's folder: {problem}")
    _check_usable(path, resume=resume, overwrite=overwrite)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(path, error) from error
    with contextlib.ExitStack() as stack:
        is_new = not os.path.lexists(path / LOCK_FILE)
        stack.enter_context(_locked(path))
        # Once more, because only now no other command can change it.
        _check_usable(path, resume=resume, overwrite=overwrite)
        if resume:
            saved_config(path)  # whether it can be read; what it says is compared with the checkpoint
        try:
            if overwrite and is_run(path):
                _remove_run(path)
            before = read_bytes(path / CONFIG_FILE) if resume else b""
            if not resume:
                marker = {"written_by": "elaswave", "version": __version__, "created": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
                atomic_write(path / MARKER_FILE, [msgspec.json.encode(marker), b"\n"])
            atomic_write(path / CONFIG_FILE, [config.to_toml().encode()])
            (path / LOGS_DIR).mkdir(exist_ok=True)
        except OSError as error:
            raise _not_writable(path, error) from error
        try:
            yield path
        except (UsageError, CheckpointError) as error:
            if resume:  # nothing has been computed with what was asked for
                with contextlib.suppress(OSError):
                    atomic_write(path / CONFIG_FILE, [before])
            if not isinstance(error, ConfigError | DataError):
                raise
            # Bad input, so nothing has been computed: the next try should not find a run in its way.
            if not resume and not any((path / CHECKPOINTS_DIR).glob("step-*")):
                with contextlib.suppress(OSError):
                    _remove_run(path)
                    if is_new:
                        (path / LOCK_FILE).unlink()
                    for folder in made:
                        folder.rmdir()  # refused where others have put something meanwhile
            raise


def prepare_spare(path: Path, config: Config, job: str = "") -> None:
    """Makes the second place for a run's checkpoints, if it is to have one.

    Args:
        path: the run's folder.
        config: of the run.
        job: its name, where several hosts take part; else the run's folder names what is the run's alone.
    Raises:
        RunFolderError: it cannot be made.
    """
    if config.run.spare_checkpoints is None:
        return
    target = Path(config.run.spare_checkpoints) / (job or f"{path.name}-{key64(str(path)):016x}")
    try:
        link_spare(path, target)
    except OSError as error:
        raise RunFolderError(
            f"run.spare_checkpoints: {target} cannot be used: {error.strerror or error}; name a folder that can be "
            "written"
        ) from error


def atomic_write(path: Path, chunks: Iterable[bytes]) -> None:
    """Replaces a file's content at once: readers see the old content or the new one, also after a power cut.

    Args:
        path: the file; its folder must exist.
        chunks: the content, piece by piece.
    Raises:
        RunFolderError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}; choose another --run-dir") from error


def write_data_facts(path: Path, facts: object) -> None:
    """Keeps in a run's folder what is known of its data file, a struct."""
    atomic_write(path / DATA_FILE, [msgspec.json.encode(facts), b"\n"])


def keep_huggingface(path: Path, files: Mapping[str, bytes]) -> None:
    """Keeps files of a transformers model in a run's folder, by name.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    folder = path / HUGGINGFACE_DIR
    try:
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            atomic_write(folder / name, [content])
    except OSError as error:
        raise _not_writable(path, error) from error


def huggingface_files(path: Path) -> dict[str, bytes]:
    """Reads what a run keeps of a transformers model, by name; empty if it trained another one.

    Raises:
        RunFolderError: it cannot be read.
    """
    try:
        files = [file for file in sorted((path / HUGGINGFACE_DIR).glob("[!.]*")) if file.name != FINE_TUNING_FILE]
        for file in files:
            if not stays_inside(file):
                raise RunFolderError(f"{file} is a link to {file.resolve()}, which no run has written: remove it")
        return {file.name: read_bytes(file) for file in files}
    except OSError as error:
        raise RunFolderError(f"{error.filename} cannot be read: {reason(error)}") from error


def data_facts(path: Path) -> dict[str, object]:
    """Reads what a run's folder says of its data file, for its checkpoints; empty if that cannot be read."""
    try:
        return read_json(path / DATA_FILE, dict[str, object])
    except (OSError, ValueError):
        return {}


def differences_on_resume(there: Mapping[str, Any], config: Config) -> list[str]:
    """Lists what would be another computation than the one that a checkpoint is of, a text for each key, with both
    values.

    Args:
        there: the configuration that the checkpoint keeps: values by key, by section.
        config: that the run is to go on with.
    """
    old, new = _by_key(there), _by_key(_as_in_files(config.to_dict()))
    return [
        f"{key} is {_shown(old.get(key))} there and {_shown(new.get(key))} here"
        for key in dict.fromkeys((*new, *old))
        if old.get(key) != new.get(key) and (key in KEYS_FIXED_ON_RESUME or not key.startswith(KEYS_FREE_ON_RESUME))
    ]


def check_same_computation(there: Mapping[str, Any], config: Config, checkpoint: Path) -> None:
    """Refuses to go on from a checkpoint of another computation, wherever the wanted configuration comes from.

    Args:
        there, config: as of `differences_on_resume`.
        checkpoint: its folder.
    Raises:
        RunFolderError: they differ; lists every key.
    """
    if differences := differences_on_resume(there, config):
        raise RunFolderError(
            f"the checkpoint {checkpoint} is of another computation, so this configuration cannot go on from it: "
            f"{'; '.join(differences)}. Ask for its values (--set, or {CONFIG_FILE} of the run), or begin a new run"
        )


def _as_in_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values as a checkpoint gives them back."""
    return msgspec.json.decode(msgspec.json.encode(values), type=dict[str, Any])


def _by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by dotted key; what is left out has its default, as in a file."""
    flat: dict[str, Any] = {}
    for name, struct in SECTIONS.items():
        defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
        given = values.get(name, {})
        flat |= {f"{name}.{key}": value for key, value in (_as_in_files(defaults) | dict(given)).items()}
    return flat


def _check_usable(path: Path, *, resume: bool, overwrite: bool) -> None:
    try:
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file; choose another --run-dir")
        if is_run(path):
            if not resume and not overwrite:
                raise RunFolderError(
                    f"{path} holds a run already; add --resume to go on with it, --overwrite to replace it, "
                    "or choose another --run-dir"
                )
            return
        if resume:
            raise RunFolderError(f"{path} holds no run that could be resumed; start one without --resume")
        in_the_way = [name for name in WRITTEN_NAMES if name != LOCK_FILE and _is_in_the_way(path / name)]
    except OSError as error:
        raise _not_writable(path, error) from error
    if in_the_way:
        raise RunFolderError(
            f"{path} is not the folder of a run, but holds {', '.join(in_the_way)}, where a run would write; "
            "choose another --run-dir, or move them away"
        )


def _is_in_the_way(item: Path) -> bool:
    """Tells whether a run's own name is taken by what no run has written. A folder of checkpoints may be somewhere
    else, and empty: all hosts share it."""
    if item.name in (CHECKPOINTS_DIR, SPARE_DIR) and item.is_symlink() and item.is_dir():
        return any(item.glob("step-*"))
    return os.path.lexists(item)


def _shown(value: object) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()


def _remove_run(path: Path) -> None:
    """Removes what a run has written, its marker last: a removal cut short leaves a folder that still is a run."""
    found = [path / name for name in WRITTEN_NAMES if name != LOCK_FILE]
    for pattern in WRITTEN_PATTERNS:
        found += path.glob(pattern)
    for item in [*found, path / MARKER_FILE]:
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name in (CHECKPOINTS_DIR, SPARE_DIR) and item.is_dir():  # it is somewhere else, and stays, empty
            for folder in item.glob("step-*"):
                shutil.rmtree(folder)
        else:
            item.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the folder's lock. Processes forked inside hold it too, until they end or the context is left."""
    try:
        descriptor = _open_lock(path / LOCK_FILE)
    except OSError as error:
        raise _not_writable(path, error) from error
    owner = os.getpid()
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:
                raise RunFolderError(f"another elaswave has just given up {path}; try again")
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunFolderError(
                    f"another elaswave is at work in {path}; wait for its end or choose another --run-dir"
                ) from error
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise _not_writable(path, error) from error
            # A file system without locks: the marker still protects what is there.
        yield
    finally:
        # A forked worker that unwinds through here must not unlock for the launcher, whose lock it shares.
        if os.getpid() == owner:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Others may not open it: who can read a file can lock it."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # of an earlier version's, or not this user's own
        os.fchmod(descriptor, 0o600)
    return descriptor


def _not_writable(path: Path, error: OSError) -> RunFolderError:
    place = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
    return RunFolderError(f"cannot write {path}: {error.strerror or error}{place}; choose another --run-dir")


def worker_log(worker: int) -> str:
    """Returns the name of a worker's log."""
    return f"worker-{worker}.log"


def last_lines(run_dir: Path, worker: int) -> list[str]:
    """Reads what a worker has printed last, as far as it is known here; a line that was cut is shown as it is."""
    try:
        with open_binary(run_dir / LOGS_DIR / worker_log(worker)) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LINES:]


def add_to_copy(run_dir: Path, worker: int, text: str) -> None:
    """Appends to the copy of a log that another host has.

    Raises:
        OSError: the folder cannot be written.
    """
    path = run_dir / LOGS_DIR / worker_log(worker)
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as log:
        log.write(text)


class LogTail:
    """What of one worker's log has still to be sent.

    Args:
        run_dir: of its host.
        worker: its id.
    """

    def __init__(self, run_dir: Path, worker: int) -> None:
        self._path = run_dir / LOGS_DIR / worker_log(worker)
        self._num_sent = 0

    def next(self, *, is_last: bool = False) -> str:
        """Reads the next part; empty if there is none.

        Args:
            is_last: the worker has ended: what does not fit is left out before its last words, and not after them.
        """
        try:
            size = self._path.stat().st_size
        except OSError:
            return ""
        if self._num_sent >= SENT_MAX_BYTES and not is_last:
            return ""
        skipped = max(0, size - self._num_sent - TAIL_BYTES) if is_last else 0
        begin, num_bytes = self._num_sent + skipped, TAIL_BYTES if is_last else SENT_AT_ONCE_BYTES
        if begin >= size:
            return ""
        try:
            with open_binary(self._path) as log:
                log.seek(begin)
                part = log.read(num_bytes)
        except OSError:
            return ""
        self._num_sent = begin + len(part)
        text = part.decode(errors="replace")
        if skipped:
            text = f"\n[{skipped} bytes stand only in {self._path}]\n{text}"
        if self._num_sent >= SENT_MAX_BYTES and not is_last:
            text += f"\n[what follows stands only in {self._path}, but for the last words]\n"
        return text
