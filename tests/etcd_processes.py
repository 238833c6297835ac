"""Real members of etcd on loopback, where it is installed."""

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.children import with_parent

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(
    ETCD is None, reason="no etcd here: install a server that is called etcd (Debian: etcd-server)"
)


class Member:
    """One member; `before` are words before its command, that put it on another host."""

    def __init__(self, name: str, folder: Path, options: list[str], endpoint: str, before: Sequence[str] = ()) -> None:
        self.endpoint = endpoint
        self.folder = folder / name
        """Of its data."""
        self.before = before
        """Counts from its next start on."""
        self._command = [str(ETCD), "--name", name, "--data-dir", str(folder / name), *options]
        self._log = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        """Starts it, with the data that it has."""
        with self._log.open("ab") as log:
            command = with_parent([*self.before, *self._command])
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def log_bytes(self) -> bytes:
        """What it has said since it was first started."""
        return self._log.read_bytes()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def is_ready(self) -> bool:
        if self.before:
            return "ready to serve client requests" in self._log.read_text(errors="replace")
        host, port = self.endpoint.rsplit(":", 1)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return "ready to serve client requests" in self._log.read_text(errors="replace")
        return False


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def cluster(
    num_members: int, *options: str, scheme: str = "http", places: Sequence[tuple[str, Sequence[str]]] = ()
) -> Iterator[list[Member]]:
    """A cluster that serves; its processes and files are gone afterwards.

    Args:
        options: more of each member.
        scheme: of client addresses.
        places: address of each member's host, and words before a command that is to run there; none: all are here.
    """
    folder = Path(tempfile.mkdtemp(prefix="etcd-"))
    ports = free_ports(2 * num_members)
    places = places or [("127.0.0.1", ())] * num_members
    peers = {f"m{at}": f"http://{places[at][0]}:{ports[2 * at]}" for at in range(num_members)}
    members: list[Member] = []
    try:
        for at, (name, peer) in enumerate(peers.items()):
            address, before = places[at]
            endpoint = f"{address}:{ports[2 * at + 1]}"
            own = [
                "--listen-client-urls",
                f"{scheme}://{endpoint}",
                "--advertise-client-urls",
                f"{scheme}://{endpoint}",
            ]
            own += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            own += ["--initial-cluster", ",".join(f"{each}={url}" for each, url in peers.items())]
            members.append(Member(name, folder, [*own, *options], endpoint, before))
        deadline_s = time.monotonic() + 60
        while not all(member.is_ready() for member in members):
            assert time.monotonic() < deadline_s, [path.read_text()[-2000:] for path in folder.glob("*.log")]
            time.sleep(0.02)
        yield members
    finally:
        for member in members:
            member.kill()
        shutil.rmtree(folder)
