"""The hosts of tests themselves: what one that was killed leaves, and how it comes back."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.etcd_processes import cluster, needs_etcd
from tests.hosts.world import Host, World, lacking

REASON = lacking()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")

LISTEN = (
    "import socket; server = socket.create_server(('0.0.0.0', 5000));"
    "print('ready', flush=True); server.accept()[0].send(b'here')"
)


@contextlib.contextmanager
def listener(host: Host) -> "Iterator[subprocess.Popen[bytes]]":
    """A program on a host that answers the first connection."""
    command = [*host.enter(), sys.executable, "-S", "-c", LISTEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"ready\n"
        yield program


def asked(host: Host, other: Host) -> bytes:
    """What one host's program answers to another host."""
    words = f"import socket; print(socket.create_connection(('{other.address}', 5000), 60).recv(9).decode(), end='')"
    return subprocess.run([*host.enter(), sys.executable, "-S", "-c", words], capture_output=True, check=True).stdout


def test_a_host_that_was_killed_starts_again_with_its_address_and_nothing_runs_on_it() -> None:
    with World(2) as world:
        first, second = world.hosts
        with listener(second) as program:
            assert list(second.processes().values()) == [int(child) for child in _children(program.pid)]
            second.kill()
            assert program.wait(60.0) == -signal.SIGKILL
        assert not second.is_alive
        again = world.boot(second)
        assert world.hosts == [first, again] and again.is_alive and not again.processes()
        with listener(again) as program:
            assert asked(first, again) == b"here"
            assert program.wait(60.0) == 0


@needs_etcd
@pytest.mark.hosts
def test_a_member_of_etcd_is_lost_with_its_host_and_started_again_with_it() -> None:
    with World(3) as world:
        with cluster(3, places=[(host.address, on(host)) for host in world.hosts]) as members:
            members[0].kill()
            world.hosts[0].kill()
            members[0].before = on(world.boot(world.hosts[0]))
            written = members[0].log_bytes
            members[0].start()
            while b"ready to serve client requests" not in members[0].log_bytes[len(written) :]:
                assert members[0].process.poll() is None, members[0].log_bytes
                time.sleep(0.05)


def on(host: Host) -> list[str]:
    """Words before a command that uses a host's network."""
    return ["nsenter", f"--net=/proc/{host.pid}/ns/net", "--"]


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
