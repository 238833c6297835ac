"""Where a worker listens: text to sockets. ``unix:/private/folder`` on one host, ``tcp:10.0.0.7`` between hosts.

An address that is passed on names one listener: ``unix:/private/folder/w3-1f2e.sock``, ``tcp:10.0.0.7:40123`` or
``tcp:node-3:40123``. Listeners are numeric; one that listens everywhere (``tcp:0.0.0.0``) says as what it is to be
dialled. A name is looked up again for every dial (`NameLookup`), since hosts come back with other addresses. Folders of
Unix sockets must be private (0700); paths longer than the system's 107 bytes are reached through ``/proc/self/fd``.
"""

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from elaswave.transport.tls import Tls

_MAX_UNIX_PATH_BYTES = 107
_SOCKET_BUFFER_BYTES = 4 << 20
_BACKLOG = 512
USER_TIMEOUT_S = 20.0
"""Data that the other host has not acknowledged for this long end a link (TCP_USER_TIMEOUT, RFC 5482); longer than the
10 s for which a network may be gone."""


class Endpoint(NamedTuple):
    """Where a worker listens, and how its links are secured."""

    listen: str
    """``unix:FOLDER`` or ``tcp:HOST[:PORT]``."""
    advertise: str = ""
    """Host that the others dial; "": the one that is listened at."""
    ports: tuple[int, ...] = ()
    """Ports that may be listened at, the first free one of them; none: one that the system chooses."""
    tls: Tls | None = None
    """Certificate files; None: no TLS."""


def listen(
    where: str, worker: int, *, advertise: str = "", ports: Sequence[int] = ()
) -> tuple[socket.socket, str, Callable[[], None]]:
    """Start listening.

    Args:
        where: ``unix:FOLDER`` (made with mode 0700 if it is missing) or ``tcp:HOST[:PORT]`` (IPv6 in brackets).
        worker: id that goes into the name of a Unix socket.
        advertise: host of the address to pass on, if it is not that of ``where``.
        ports: where no port is given, those that may be taken.
    Returns:
        The listening socket (non-blocking), the address to pass on, and a function that removes the socket file.
    Raises:
        OSError: the system refuses, or all ports are taken.
        ValueError: the address cannot be understood, the folder is open to others, or nobody could dial it.
    """
    kind, rest = _split(where)
    if kind == "unix":
        return _listen_in(rest, worker)
    family, host, port = _tcp(rest)
    if ipaddress.ip_address(host).is_unspecified and not advertise:
        raise ValueError(f"tcp:{rest}: no host can be dialled as {host}: say as what this one is (net.advertise)")
    sock = _listen_on(family, host, [port] if port or not ports else _turned(ports, worker))
    return sock, tcp_address(advertise or host, sock.getsockname()[1]), lambda: None


def _listen_in(rest: str, worker: int) -> tuple[socket.socket, str, Callable[[], None]]:
    folder = _private_folder(rest)
    path = folder / f"w{worker}-{secrets.token_hex(4)}.sock"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        with _unix_name(path) as name:
            sock.bind(name)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock, f"unix:{path}", lambda: path.unlink(missing_ok=True)


def _turned(ports: Sequence[int], worker: int) -> list[int]:
    """Puts the ports in another order for each worker, so that few try the same one."""
    first = worker % len(ports)
    return [*ports[first:], *ports[:first]]


def _listen_on(
    family: socket.AddressFamily, host: str, ports: Sequence[int], *, is_reserved: bool = False
) -> socket.socket:
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_reserved)
            sock.setblocking(False)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
        except BaseException as error:
            sock.close()
            if len(ports) == 1 or not (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
                raise
        else:
            return sock
    raise OSError(
        errno.EADDRINUSE,
        f"all {len(ports)} ports from {min(ports)} to {max(ports)} of {host} are in use: widen net.ports",
    )


def reserve(host: str, ports: Sequence[int] = ()) -> socket.socket:
    """Makes a TCP socket that keeps a port for processes of this job, one after the other, and does not listen itself:
    who dials is refused while none of them does.

    Two sockets may have one port if both have SO_REUSEADDR and neither listens, whoever owns them: in an instant in
    which no process of the job listens, another user could. So this one has SO_REUSEPORT instead, by which the system
    lets sockets of the same user alone have the port too (socket(7)), and of these only such as `listen_at` makes.

    Args:
        host: numeric.
        ports: that may be taken; none: one that the system chooses.
    Raises:
        OSError: the system refuses, or all ports are taken, be it by another job of this user.
    """
    family, host, _ = _tcp(f"[{host}]" if ":" in host else host)
    kept = socket.socket(family, socket.SOCK_STREAM)
    try:
        # While this one listens it has the port alone; connections of an earlier job, which linger, do not count.
        with _listen_on(family, host, list(ports) or [0]) as first:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((host, first.getsockname()[1]))
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        kept.close()
        raise
    return kept


def tcp_address(host: str, port: int) -> str:
    """Makes the address of a listener as it is passed on."""
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def host_of(address: str) -> str:
    """Finds the host of an address; "" of a Unix socket.

    Raises:
        ValueError: the address cannot be understood.
    """
    kind, rest = _split(address)
    return _host_and_port(rest)[0] if kind == "tcp" else ""


def listen_at(address: str) -> tuple[socket.socket, str, Callable[[], None]]:
    """Start listening at one exact address, which a successor can take over. A port may be kept by `reserve`.

    A Unix socket takes the place of the file that is there, in one instant: a process that dials meanwhile reaches the
    old or the new one. That only one process at a time is entitled to the address is the caller's business.

    Args:
        address: ``unix:PATH`` of the socket file, in a private folder (made with mode 0700 if it is missing), or
            ``tcp:HOST[:PORT]``.
    Returns:
        As `listen`.
    Raises:
        OSError: the system refuses.
        ValueError: the address cannot be understood, or the folder is open to others.
    """
    kind, rest = _split(address)
    if kind == "tcp":
        family, host, port = _tcp(rest)
        sock = _listen_on(family, host, [port], is_reserved=True)
        return sock, tcp_address(host, sock.getsockname()[1]), lambda: None  # who dials it was told how
    path = Path(rest)
    if path.name in ("", ".."):
        raise ValueError(f"{address}: a path to a socket file is needed")
    sock, temporary, remove = listen(f"unix:{path.parent}", 0)
    try:
        ours = os.stat(temporary.removeprefix("unix:"))
        os.rename(temporary.removeprefix("unix:"), path)
    except BaseException:
        sock.close()
        remove()
        raise

    def remove_ours() -> None:
        with contextlib.suppress(FileNotFoundError):
            there = os.stat(path)
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                path.unlink()

    return sock, address, remove_ours


def dial(address: str) -> socket.socket:
    """Begin to connect.

    Args:
        address: of a listener, numeric: a name is looked up first (see `NameLookup`).
    Returns:
        A non-blocking socket; it is connected, or has failed, once it is writable.
    Raises:
        OSError: it has failed at once (no process listens, too many are dialling, or another user listens there).
        ValueError: the address cannot be understood.
    """
    kind, rest = _split(address)
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        family, host, port = _tcp(rest)
        if not port:
            raise ValueError(f"address {address!r} has no port: pass on what Transport.address gives")
        sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        if kind == "unix":
            with _unix_name(Path(rest)) as name:
                sock.connect(name)
            _check_own(sock, rest)
        else:
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _check_own(sock: socket.socket, path: str) -> None:
    """Refuses a listener of another user, who may have made the folder anew once it was gone; root dials everybody's.

    Raises:
        ConnectionRefusedError: it is one.
    """
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user not in (0, os.geteuid()) and os.geteuid() != 0:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"user {user} listens at {path}, who is not this one")


LOOKUP_TIMEOUT_S = 10.0
"""After which a look-up is waited for no more."""


class NameLookup:
    """Looks the host of an address up, in a thread of its own: a look-up has been seen to stall for seconds.

    Args:
        address: of a listener, with a name.
        wake: called in that thread once there is a result.
        timeout_s: how long it is waited for; None: `LOOKUP_TIMEOUT_S`.
    """

    def __init__(self, address: str, wake: Callable[[], None], timeout_s: float | None = None) -> None:
        self.address = address
        self.is_done = False
        """Whether there is a result, be it that the name has no address."""
        self._host, self._port = _host_and_port(_split(address)[1])
        self._timeout_s = LOOKUP_TIMEOUT_S if timeout_s is None else timeout_s
        self._deadline_s = time.monotonic() + self._timeout_s
        self._found: list[str] = []
        self._error: OSError | None = None
        self._wake = wake
        thread = threading.Thread(target=self._look_up, name=f"look-up of {self._host}", daemon=True)
        _looking_up.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no room for a thread: a later look-up may find some
            _looking_up.discard(thread)
            self._error, self.is_done = OSError(str(error)), True

    def _look_up(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            self._found = [str(place[0]) for *_, place in found]
        except OSError as error:
            self._error = error
        except UnicodeError as error:  # no name that there could be
            self._error = OSError(str(error))
        finally:
            self.is_done = True
            _looking_up.discard(threading.current_thread())
        self._wake()

    @property
    def is_over(self) -> bool:
        """Whether there is a result, or none in time."""
        return self.is_done or self.left_s <= 0.0

    @property
    def left_s(self) -> float:
        """Seconds until it is given up."""
        return self._deadline_s - time.monotonic()

    def results(self) -> list[str]:
        """Lists the numeric addresses, at least one, once it is over. Each of them is to have its turn.

        Raises:
            OSError: the name has no address, or none was found in time.
        """
        if not self.is_done:
            raise TimeoutError(f"the name {self._host} was not looked up within {self._timeout_s:g} s")
        if not self._found:
            raise OSError(f"the name {self._host} has no address: {self._error}")
        return [tcp_address(host, self._port) for host in self._found]


_looking_up: set[threading.Thread] = set()


def await_lookups(timeout_s: float) -> None:
    """Waits for the look-ups that go on in this process, before it forks: a child could inherit a lock of the system's
    library that such a thread holds. One that takes longer waits for the network, and holds none.

    Args:
        timeout_s: for all of them.
    """
    deadline_s = time.monotonic() + timeout_s
    for thread in tuple(_looking_up):
        thread.join(max(0.0, deadline_s - time.monotonic()))


def has_name(address: str) -> bool:
    """Tells whether the host of an address must be looked up.

    Raises:
        ValueError: the address cannot be understood.
    """
    kind, rest = _split(address)
    return kind == "tcp" and not _is_numeric(_host_and_port(rest)[0])


def tune(sock: socket.socket) -> None:
    """Set what a data connection needs: non-blocking, large buffers, small frames sent at once."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * USER_TIMEOUT_S))


def _split(address: str) -> tuple[str, str]:
    kind, colon, rest = address.partition(":")
    if kind not in ("unix", "tcp") or not colon or not rest:
        raise ValueError(f"address {address!r} is neither unix:FOLDER nor tcp:HOST[:PORT]")
    return kind, rest


def _tcp(rest: str) -> tuple[socket.AddressFamily, str, int]:
    host, port = _host_and_port(rest)
    if not _is_numeric(host):
        raise ValueError(
            f"tcp:{rest}: {host!r} is not a numeric address, which is needed to listen (write 127.0.0.1, not localhost)"
        )
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), host, port


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_and_port(rest: str) -> tuple[str, int]:
    host, port = rest, "0"
    if rest.startswith("["):
        host, _, tail = rest[1:].partition("]")
        port = tail.removeprefix(":") or "0"
    elif ":" in rest:
        host, _, port = rest.partition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"tcp:{rest}: port {port!r} is not a number below 65536")
    return host, int(port)


def _private_folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_absolute():
        raise ValueError(f"unix:{text}: the folder of the sockets must be an absolute path")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"unix:{text}: the folder has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}, but "
            f"sockets need one of mode 0700 that user {os.geteuid()} owns: name a folder that does not exist yet"
        )
    return folder


@contextlib.contextmanager
def _unix_name(path: Path) -> Iterator[str]:
    """Yields a name for the path that fits into the system's address structure."""
    if len(os.fsencode(path)) <= _MAX_UNIX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
