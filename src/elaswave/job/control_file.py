"""`control.json` in the run folder: where a running job is talked to, and where its key stands. No state here.

The key itself is in no file of the run's folder, which may be copied or shared. Whoever can read the files that are
named here can do with the job what its owner can. The launcher writes the file when the job begins and removes it when
the job ends. A launcher that is killed leaves it behind; all processes of the job end with the launcher, so that a file
whose launcher is gone is known to be stale.
"""

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from elaswave.errors import ControlError, RunFolderError
from elaswave.job.network import JobNetwork
from elaswave.observability.processes import RunProcess, lives, process_entry
from elaswave.observability.run_folder import CONTROL_FILE, is_run
from elaswave.transport.tls import Tls
from elaswave.untrusted import read_json, reason


class ControlFile(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `control.json`."""

    address: str
    """Where the coordinator is dialled."""
    key_file: str
    """Path of the job's key."""
    key_is_temporary: bool = False
    """Whether that file goes with the job, which was given its key in none."""
    host: str
    """Where the job runs."""
    launcher: RunProcess
    tls: Tls | None = None
    """Certificate files; None: no TLS."""
    tls_host: str = ""
    """With TLS: what the coordinator's certificate must name."""


def write_control_file(run_dir: Path, network: JobNetwork, key_file: Path, *, is_temporary: bool = False) -> None:
    """Writes it for a job that this process launches. What an earlier one has left is replaced.

    Args:
        run_dir: the run's folder.
        network: of the job.
        key_file: of the job's key.
        is_temporary: whether that file goes with the job.
    Raises:
        OSError: the folder takes no file; a job can do without.
    """
    content = ControlFile(
        address=network.launcher_dials,
        key_file=str(key_file),
        key_is_temporary=is_temporary,
        host=socket.gethostname(),
        launcher=process_entry("launcher", 0, os.getpid()),
        tls=network.tls,
        tls_host=network.host,
    )
    temporary = run_dir / f".{CONTROL_FILE}.{os.getpid()}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        # The mode holds from the very first instant: nobody else can ever have opened it.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(content) + b"\n")
        os.replace(temporary, run_dir / CONTROL_FILE)
    except OSError:
        for path in (temporary, run_dir / CONTROL_FILE):  # an earlier job's must not stand there for this one's
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def remove_control_file(run_dir: Path) -> None:
    """Removes it: the job is over."""
    with contextlib.suppress(OSError):
        (run_dir / CONTROL_FILE).unlink(missing_ok=True)


def read_control_file(run_dir: Path) -> ControlFile:
    """How the job that runs in a folder is talked to.

    Raises:
        RunFolderError: the folder holds no run.
        ControlError: no job runs there, it runs on another machine, or this user may not talk to it.
    """
    path = run_dir / CONTROL_FILE
    try:
        content: ControlFile = read_json(path, ControlFile)
    except (FileNotFoundError, NotADirectoryError):
        if not is_run(run_dir):
            raise RunFolderError(f"{run_dir} holds no run; give the folder of a run that is going on") from None
        raise ControlError(
            f"no job runs in {run_dir}: there is no {CONTROL_FILE}, which a job keeps from its start to its end; "
            f"`elaswave inspect {run_dir}` shows what became of it"
        ) from None
    except OSError as error:
        raise ControlError(
            f"{path} cannot be read ({reason(error)}): only the user who has started the job can talk to it"
        ) from error
    except ValueError as error:
        raise ControlError(f"{path} is damaged ({error}): it is written by the job's launcher alone") from None
    if content.host != socket.gethostname():
        raise ControlError(
            f"the job in {run_dir} runs on {content.host}, and is talked to from that machine, where its key stands: "
            "give the command there"
        )
    if not lives(content.launcher):
        raise ControlError(
            f"no job runs in {run_dir}: {CONTROL_FILE} is stale, its launcher (process {content.launcher.pid}) was "
            "killed, and all processes of a job end with their launcher; the next run in the folder replaces the file"
        )
    return content
