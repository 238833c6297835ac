"""Where a job listens and what it locks: another user of this machine takes neither, and is no reason to give up."""

import errno
import itertools
import math
import os
import re
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from tests.agents import free_port
from tests.integration.jobs import run_job
from tests.security.attacker import as_another, needs_root

import elaswave
from elaswave.config.load import load_config
from elaswave.devices.opening import take_place
from elaswave.errors import RetryError
from elaswave.job import setup as job_setup
from elaswave.job.keys import JobKey
from elaswave.launcher import agent
from elaswave.launcher.agent import AgentOptions, Seed, hold
from elaswave.observability.run_folder import LOCK_FILE, open_run_dir
from elaswave.transport import addresses

pytestmark = pytest.mark.security

SOURCE = Path(elaswave.__file__).parent
HOSTS = ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::")
"""By which a socket has a port of 127.0.0.1."""
SOMEBODY = 4711
"""A user who is neither root nor the attacker."""


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder of the victim's that others can look into."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_every_socket_that_listens_and_every_lock_is_known_here() -> None:
    """What is new belongs beside what is there: `transport.addresses`, or a file that others cannot open."""
    calls = re.compile(r"\.(bind|(?:create|start)(?:_unix)?_server|flock|lockf)\(")
    found = {str(path.relative_to(SOURCE)): set(calls.findall(path.read_text())) for path in SOURCE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {
        "transport/addresses.py": {"bind"},
        "channel/server.py": {"create_server", "create_unix_server"},  # of a socket of those
        "launcher/agent.py": {"bind", "lockf"},  # to see whether an address is this host's; nobody listens
        "launcher/resources.py": {"flock"},  # the journal in that folder is locked by sqlite
        "job/keys.py": {"flock"},
        "devices/opening.py": {"flock"},
        "observability/run_folder.py": {"flock"},
    }


def refused_to_another(path: Path) -> None:
    """Asserts that another user cannot open a file: who can read one can lock it."""

    def act() -> None:
        with pytest.raises(PermissionError):
            os.open(path, os.O_RDONLY)

    with as_another(act):
        pass


@needs_root
def test_names_and_ports_of_another_user_are_no_agent_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was taken for one was followed, and so the job never created."""
    monkeypatch.setattr(agent, "FREE_S", 0.0)
    where = Seed("127.0.0.1", free_port(), "127.0.0.1")

    def act() -> None:
        name, port = socket.socket(socket.AF_UNIX), socket.socket()
        name.bind(f"\0elaswave-agent/{where.address}/{where.port}")
        port.bind((where.address, where.port))
        port.listen()
        globals()["kept"] = name, port

    with as_another(act), pytest.raises(RetryError, match=f"port {where.port} of this host is used by another program"):
        hold(where, "127.0.0.1", tmp_path)


@needs_root
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
    host = agent._Host(options, config, False, (where,), None, JobKey(b"k" * 32, None), 1)
    with as_another(act):
        with pytest.raises(RetryError, match="is not this job's coordinator"):
            agent._ask(host, 30.0, hopeless_s=0.5)
        with pytest.raises(RetryError, match="no coordinator at .* within 0.5 s .*Error"):
            agent._ask(host, 0.5, hopeless_s=math.inf)


@needs_root
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


@needs_root
def test_the_lock_of_a_run_cannot_be_taken(reachable: Path) -> None:
    run = reachable / "run"
    config = load_config(None, ())
    run.mkdir()
    (run / LOCK_FILE).touch(0o644)  # of an earlier version
    with open_run_dir(run, config, now=datetime(2026, 1, 1)):
        pass
    refused_to_another(run / LOCK_FILE)


@needs_root
def test_a_place_on_a_gpu_cannot_be_taken(reachable: Path) -> None:
    assert take_place(reachable, 1, 1) == 0
    (path,) = reachable.iterdir()
    refused_to_another(path)


def listening(host: str, port: int, *, reuses: bool, shares: bool) -> socket.socket | None:
    """A socket that listens at a port, if it can be had."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if ":" in host:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
    try:
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        assert error.errno == errno.EADDRINUSE, error
        sock.close()
        return None
    return sock


def taken_by_another(port: int) -> bool:
    """Whether another user can listen where the coordinator is dialled."""

    def act() -> None:
        for host, reuses, shares in itertools.product(HOSTS, (False, True), (False, True)):
            assert listening(host, port, reuses=reuses, shares=shares) is None, (host, reuses, shares)

    with as_another(act):
        return False


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("is_chosen", [True, False])
def test_the_port_of_a_job_cannot_be_taken_between_two_coordinators(host: str, is_chosen: bool) -> None:
    with addresses.reserve(host, [free_port()] if is_chosen else []) as kept:
        port = kept.getsockname()[1]
        here = f"tcp:127.0.0.1:{port}"
        assert not taken_by_another(port), "before the first coordinator"
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            listener, _, _ = addresses.listen_at(f"tcp:{host}:{port}")
            with addresses.dial(here) as client:
                select.select([listener], [], [])
                peer, _ = listener.accept()
                assert not taken_by_another(port), "while one listens"
                listener.close()
                assert not taken_by_another(port), "while a connection of the last one is left"
                listener, _, _ = addresses.listen_at(f"tcp:{host}:{port}")
                with addresses.dial(here):
                    listener.close()
                assert not taken_by_another(port), "while a dial of the last one has not ended"
                peer.close()
                client.setblocking(True)
                assert client.recv(1) == b""
            assert not taken_by_another(port), "while the last one's connections linger"


def test_neither_does_another_job_of_this_user_take_it_nor_is_it_lost_to_an_earlier_one() -> None:
    first = addresses.reserve("127.0.0.1")
    port = first.getsockname()[1]
    for listens in (False, True):
        if listens:
            listener, _, _ = addresses.listen_at(f"tcp:127.0.0.1:{port}")
        with pytest.raises(OSError, match="in use"):
            addresses.reserve("127.0.0.1", [port])
    with addresses.dial(f"tcp:127.0.0.1:{port}") as client:
        select.select([listener], [], [])
        listener.accept()[0].close()  # lingers, as it ends it
        client.setblocking(True)
        assert client.recv(1) == b""
    listener.close()
    first.close()
    addresses.reserve("127.0.0.1", [port]).close()


@needs_root
@pytest.mark.slow
def test_a_job_outlives_its_coordinators_while_another_user_wants_their_port(tmp_path: Path) -> None:
    port = max(free_port() for _ in range(9))
    settings = {"run.steps": 8, "net.transport": "tcp", "net.ports": f"{port}-{port + 4}"}

    def take() -> None:
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", port)):  # until the job has it
                time.sleep(0.001)
        while (taken := listening("127.0.0.1", port, reuses=True, shares=False)) is None:
            time.sleep(0.0002)
        globals()["kept"] = taken

    with as_another(lambda: threading.Thread(target=take, daemon=True).start()):
        job = run_job(tmp_path / "run", settings, faults=["kill:coordinator@3", "kill:coordinator@5"])
    assert job.computation == run_job(tmp_path / "reference", {"run.steps": 8}).computation


@pytest.mark.slow
def test_a_job_whose_port_is_taken_all_the_same_is_worth_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(job_setup, "reserve", lambda host, ports: taken.dup())
        with pytest.raises(RetryError, match="another program has the coordinator's port on this host"):
            run_job(tmp_path / "run", {"net.transport": "tcp"})
    assert "another program listens at tcp:127.0.0.1:" in (tmp_path / "run" / "logs" / "coordinator.log").read_text()
