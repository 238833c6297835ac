"""Where a job listens and what it locks: another user of this machine takes neither, and is no reason to give up."""

import math
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from tests.agents import free_port
from tests.security.attacker import as_another, needs_root

from elaswave.config.load import load_config
from elaswave.control import host_network, taking_part
from elaswave.control.host_network import Seed, hold
from elaswave.control.key_files import JobKey
from elaswave.control.taking_part import AgentOptions
from elaswave.devices.places import take_place
from elaswave.errors import RetryError
from elaswave.observability.run_folder import LOCK_FILE, open_run_dir
from elaswave.transport import addresses

pytestmark = [pytest.mark.security, needs_root]

SOMEBODY = 4711
"""A user who is neither root nor the attacker."""


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder of the victim's that others can look into."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def refused_to_another(path: Path) -> None:
    """Asserts that another user cannot open a file: who can read one can lock it."""

    def act() -> None:
        with pytest.raises(PermissionError):
            os.open(path, os.O_RDONLY)

    with as_another(act):
        pass


def test_names_and_ports_of_another_user_are_no_agent_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was taken for one was followed, and so the job never founded."""
    monkeypatch.setattr(host_network, "FREE_S", 0.0)
    where = Seed("127.0.0.1", free_port(), "127.0.0.1")

    def act() -> None:
        name, port = socket.socket(socket.AF_UNIX), socket.socket()
        name.bind(f"\0elaswave-agent/{where.address}/{where.port}")
        port.bind((where.address, where.port))
        port.listen()
        globals()["kept"] = name, port

    with as_another(act), pytest.raises(RetryError, match=f"port {where.port} of this host is used by another program"):
        hold(where, "127.0.0.1", tmp_path)


@pytest.mark.parametrize("words", [b"HTTP/1.1 200 OK\r\n" * 40, b"\0" * 400], ids=["another protocol", "zeros"])
def test_an_impostor_at_the_coordinators_address_is_worth_another_try(words: bytes) -> None:
    where = Seed("127.0.0.1", free_port(), "127.0.0.1")

    def serve(listener: socket.socket) -> None:
        while True:
            peer, _ = listener.accept()
            peer.sendall(words)

    def act() -> None:
        listener = socket.create_server((where.address, where.port))
        threading.Thread(target=serve, args=(listener,), daemon=True).start()

    options = AgentOptions("demo", f"127.0.0.1:{where.port}", "a", Path("/"))
    config = load_config(None, ("net.transport=tcp",))
    host = taking_part._Host(options, config, False, (where,), None, JobKey(b"k" * 32, None), 1)
    with as_another(act):
        with pytest.raises(RetryError, match="is not this job's coordinator"):
            taking_part._ask(host, 30.0, hopeless_s=0.5)
        with pytest.raises(RetryError, match="no coordinator at .* within 0.5 s .*Error"):
            taking_part._ask(host, 0.5, hopeless_s=math.inf)


def test_a_unix_socket_of_another_user_is_not_dialled(reachable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's folder may be gone, and made anew by others, while somebody still knows its name."""
    path = reachable / "control.sock"
    reachable.chmod(0o777)

    def act() -> None:
        os.umask(0)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        globals()["kept"] = listener

    with as_another(act):
        addresses.dial(f"unix:{path}").close()  # root talks to everybody's jobs
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
        with pytest.raises(ConnectionRefusedError, match=f"user 65534 listens at {path}"):
            addresses.dial(f"unix:{path}")


def test_the_lock_of_a_run_cannot_be_taken(reachable: Path) -> None:
    run = reachable / "run"
    config = load_config(None, ())
    run.mkdir()
    (run / LOCK_FILE).touch(0o644)  # of an earlier version
    with open_run_dir(run, config, now=datetime(2026, 1, 1)):
        pass
    refused_to_another(run / LOCK_FILE)


def test_a_place_on_a_gpu_cannot_be_taken(reachable: Path) -> None:
    assert take_place(reachable, 1, 1) == 0
    (path,) = reachable.iterdir()
    refused_to_another(path)
