"""Where the processes of one host of several listen, and where they dial the coordinator.

The coordinator's address is a host and a port that every agent is given. The agent on that host founds the job: it is
the one that may listen there. A lock file, which the kernel lets go of when its holder ends, keeps two agents of one
host from both believing so. It stands where no other user can make or take it: whoever else has the port is no agent.
"""

import contextlib
import errno
import fcntl
import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elaswave.config.rules import exposed_problem, is_exposed
from elaswave.config.schema import NetConfig
from elaswave.errors import ConfigError, RetryError, UsageError
from elaswave.job.key_files import tls_of
from elaswave.job.network import JobNetwork, address_of, ports_beside
from elaswave.transport.addresses import Endpoint, reserve, tcp_address
from elaswave.transport.tls import Tls

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Of the kernel: tells hosts apart."""
_NETWORK = Path("/proc/self/ns/net")
"""Tells apart containers of one host."""
_LOCK_FILE = "agents"
FREE_S = 3.0
"""How long the port may take to become free: the processes of an agent that was killed end a little later than it."""


class Seed(NamedTuple):
    """Where a coordinator is dialled."""

    host: str
    """As it was given: an address or a name."""
    port: int
    address: str
    """Numeric, as it is now; empty if the name has none. Dials look the name up again."""


class HeldPort(NamedTuple):
    """A seed's port on this host."""

    port: socket.socket
    """Keeps it from all other programs."""
    lock: "_Lock"
    """Tells other agents of this host who has it."""

    def close(self) -> None:
        """Gives it up."""
        self.port.close()
        self.lock.close()


def seed_of(text: str) -> Seed:
    """Where ``HOST:PORT`` is, with an IPv6 address in brackets.

    Raises:
        UsageError: it is no such text.
        RetryError: the name has no address now.
    """
    host, port = _split(text)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RetryError(f"--coordinator {text}: {host} has no address: {error.strerror}") from None
    return Seed(host, port, str(found[0][4][0]))


def _split(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise UsageError(f"--coordinator {text}: give HOST:PORT, such as 10.77.0.1:7077 or [fd00::1]:7077")
    return host, int(port)


def seeds_of(texts: Sequence[str]) -> tuple[Seed, ...]:
    """Where candidates are, in their order.

    Raises:
        UsageError: a text is no HOST:PORT.
        RetryError: no name has an address now.
    """
    seeds: list[Seed] = []
    errors: list[RetryError] = []
    for text in texts:
        try:
            seeds.append(seed_of(text))
        except RetryError as error:
            # It keeps its place, for the place says who founds the job.
            errors.append(error)
            host, port = _split(text)
            seeds.append(Seed(host, port, ""))
    if len(errors) == len(seeds):
        raise errors[0]
    return tuple(seeds)


def hold(seed: Seed, bind: str, locks: Path) -> HeldPort | None:
    """Takes a seed's port for this host's agent.

    Args:
        seed: where the coordinator is dialled.
        bind: numeric address of this host to listen at, which may be another one than the seed's.
        locks: this user's folder for lock files, in which nobody else can write.
    Returns:
        None if the seed is another host's, or its name has no address now, or another agent of this host has it.
    Raises:
        RetryError: another program of this host has the port.
        UsageError: this user may not listen at it.
    """
    if not (seed.address and _is_here(seed)):
        return None
    port, lock = None, _Lock(locks, f"{seed.address}/{seed.port}")
    try:
        if lock.is_held:
            port = _reserve(bind, seed.port)
    except OSError as error:
        _raise_unless_elsewhere(seed, error)
    finally:
        if port is None:
            lock.close()
    return None if port is None else HeldPort(port, lock)


def _raise_unless_elsewhere(seed: Seed, error: OSError) -> None:
    if error.errno == errno.EADDRNOTAVAIL:
        return
    if error.errno == errno.EACCES:
        raise UsageError(
            f"this user may not listen at port {seed.port}, and the coordinator is to be at {seed.host}:{seed.port}: "
            "give another --coordinator to all agents, with a port from 1024 up"
        ) from error
    if error.errno == errno.EADDRINUSE:
        raise RetryError(
            f"port {seed.port} of this host is used by another program, and the coordinator is to be at "
            f"{seed.host}:{seed.port}: end that program (ss -tlnp sport = :{seed.port} shows it), or give another "
            "--coordinator to all agents"
        ) from error
    raise error


class _Lock:
    """A byte of this user's lock file, which stays, empty. The byte's place stands for host, network and what is
    locked: hosts may share the folder. The kernel lets go of it when this process ends, whatever children it has left.

    Args:
        folder: in which nobody else can write.
        what: it is for; no process may ask twice.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.is_held = True
        """Also where the file cannot be had, or not be locked: then the port alone says who was first."""
        here = _NETWORK.stat()
        boot = _BOOT.read_text() if _BOOT.exists() else ""
        text = f"{boot} {here.st_dev}:{here.st_ino} {what}"
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except (BlockingIOError, PermissionError):  # fcntl(2) may say either
                self.is_held = False

    def close(self) -> None:
        """Gives it up."""
        if self._fd >= 0:
            os.close(self._fd)


def _reserve(bind: str, port: int) -> socket.socket:
    by_s = time.monotonic() + FREE_S
    while True:
        try:
            return reserve(bind, [port])
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= by_s:
                raise
            time.sleep(0.1)


def _is_here(seed: Seed) -> bool:
    """Whether the seed's address is one of this host."""
    family = socket.AF_INET6 if ":" in seed.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((seed.address, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
        return True


def own_address(seed: Seed) -> str:
    """The address of this host that the coordinator's host is reached from.

    Raises:
        RetryError: there is no way to it.
    """
    family = socket.AF_INET6 if ":" in seed.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((seed.address, seed.port))  # sends nothing
        except OSError as error:
            raise RetryError(f"{seed.host} cannot be reached from here: {error.strerror}") from None
        return str(probe.getsockname()[0])


def where_to_listen(net: NetConfig, seed: Seed) -> str:
    """The numeric address at which this host's processes listen.

    Raises:
        ConfigError: an interface that cannot be used.
        RetryError: there is no way to the coordinator's host.
    """
    if net.bind is not None:
        return net.bind
    return own_address(seed) if net.interface is None else address_of(net.interface)


def tls_here(net: NetConfig) -> Tls | None:
    """This host's certificate files; None: no TLS.

    Raises:
        UsageError: a file is missing, or others could read the private key.
    """
    if net.tls == "off":
        return None
    assert net.keys is not None
    return tls_of(Path(net.keys))


def agent_network(net: NetConfig, seeds: Sequence[Seed], own: int | None, slots: int = 0) -> JobNetwork:
    """The addresses of a job's processes on this host.

    Args:
        net: as configured here.
        seeds: where coordinators are dialled.
        own: index of the one at which this host may have one; None: at none.
        slots: workers that may run here, once that is known.
    Raises:
        ConfigError: an address, certificate or range of ports that cannot be used.
        UsageError: certificate files that cannot be used.
        RetryError: there is no way to the coordinator's host.
    """
    seed = seeds[own] if own is not None else next(seed for seed in seeds if seed.address)
    bind = where_to_listen(net, seed)
    if net.tls == "off" and not net.trusted and is_exposed(bind):
        raise ConfigError([exposed_problem(bind)])
    is_unspecified = ipaddress.ip_address(bind).is_unspecified
    is_own = own is not None
    host = net.advertise or (seed.host if is_own and is_unspecified else bind)
    tls = tls_here(net)
    if tls is not None:
        tls.check(seed.host if is_own else host)
    near = bind
    if is_unspecified:
        near = "::1" if ":" in bind else "127.0.0.1"
    return JobNetwork(
        listen=tcp_address(bind, seed.port),
        dial=tcp_address(seed.host, seed.port),
        launcher_dials=tcp_address(near if is_own else seed.host, seed.port),
        links=Endpoint(
            tcp_address(bind, 0),
            advertise="" if host == bind else host,
            ports=ports_beside(net, seed.port, slots),
            tls=tls,
        ),
        host=seed.host,
        others=tuple((tcp_address(each.host, each.port), each.host) for each in seeds if each is not seed),
    )
