"""`control.json`: who may read it, and what is said where it does not lead to a running job."""

import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from elaswave.errors import ControlError, RunFolderError
from elaswave.job.setup import ControlFile, JobNetwork, read_control_file, remove_control_file, write_control_file
from elaswave.observability.processes import process_entry
from elaswave.observability.run_folder import CONTROL_FILE, MARKER_FILE
from elaswave.transport.addresses import Endpoint

KEY_FILE = Path("/private/job.key")


def at(address: str) -> JobNetwork:
    """A network whose coordinator is dialled there."""
    return JobNetwork(address, address, address, Endpoint(address))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / MARKER_FILE).write_text("{}")
    return tmp_path


def rewritten(run_dir: Path, **values: object) -> None:
    path = run_dir / CONTROL_FILE
    content = msgspec.json.decode(path.read_bytes(), type=ControlFile)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(content, **values)))


def test_only_its_owner_can_read_it_and_the_end_removes_it(run_dir: Path) -> None:
    path = run_dir / CONTROL_FILE
    path.write_text("an earlier job's")
    path.chmod(0o644)
    previous = os.umask(0)
    try:
        write_control_file(run_dir, at("unix:/somewhere"), KEY_FILE)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_control_file(run_dir)
    assert (found.address, found.key_file, found.launcher.pid) == ("unix:/somewhere", str(KEY_FILE), os.getpid())
    assert sorted(os.listdir(run_dir)) == [CONTROL_FILE, MARKER_FILE]
    remove_control_file(run_dir)
    remove_control_file(run_dir)
    assert os.listdir(run_dir) == [MARKER_FILE]


def test_a_folder_that_takes_no_file_keeps_none_of_an_earlier_job(run_dir: Path, monkeypatch) -> None:
    write_control_file(run_dir, at("unix:/earlier"), KEY_FILE)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_control_file(run_dir, at("unix:/later"), KEY_FILE)
    assert os.listdir(run_dir) == [MARKER_FILE]


def test_no_job_no_run_and_a_stale_file_are_told_apart(run_dir: Path, tmp_path_factory) -> None:
    with pytest.raises(ControlError, match="no job runs in .*: there is no control.json"):
        read_control_file(run_dir)
    with pytest.raises(RunFolderError, match="holds no run"):
        read_control_file(tmp_path_factory.mktemp("empty"))
    with pytest.raises(RunFolderError, match="run.json holds no run; give the folder"):
        read_control_file(run_dir / MARKER_FILE)
    write_control_file(run_dir, at("unix:/somewhere"), KEY_FILE)
    gone = msgspec.structs.replace(process_entry("launcher", 0, os.getpid()), start_ticks=1)
    rewritten(run_dir, launcher=gone)
    with pytest.raises(
        ControlError, match=rf"control.json is stale, its launcher \(process {os.getpid()}\) was killed"
    ):
        read_control_file(run_dir)


def test_a_job_on_another_machine_is_talked_to_there(run_dir: Path) -> None:
    write_control_file(run_dir, at("unix:/somewhere"), KEY_FILE)
    rewritten(run_dir, host=f"not-{socket.gethostname()}")
    with pytest.raises(ControlError, match=f"runs on not-{socket.gethostname()}.*give the command there"):
        read_control_file(run_dir)


def test_a_file_that_cannot_be_read_or_understood(run_dir: Path) -> None:
    (run_dir / CONTROL_FILE).write_text("{}")
    with pytest.raises(ControlError, match="control.json is damaged"):
        read_control_file(run_dir)
    (run_dir / CONTROL_FILE).unlink()
    (run_dir / CONTROL_FILE).mkdir()  # root may read every file
    with pytest.raises(ControlError, match=r"cannot be read \(Is a directory\): only the user who has started"):
        read_control_file(run_dir)
