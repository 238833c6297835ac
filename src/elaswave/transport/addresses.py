"""Where a worker listens: text to sockets. ``unix:/private/folder`` on one host, ``tcp:10.0.0.7`` between hosts.

An address that is passed on names one listener: ``unix:/private/folder/w3-1f2e.sock`` or ``tcp:10.0.0.7:40123``. Hosts
are numeric, because look-ups of names have been seen to stall for seconds. Folders of Unix sockets must be private
(0700); paths longer than the system's 107 bytes are reached through ``/proc/self/fd``.
"""

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

_MAX_UNIX_PATH_BYTES = 107
_SOCKET_BUFFER_BYTES = 4 << 20
_BACKLOG = 512


def listen(where: str, worker: int) -> tuple[socket.socket, str, Callable[[], None]]:
    """Start listening.

    Args:
        where: ``unix:FOLDER`` (made with mode 0700 if it is missing) or ``tcp:HOST[:PORT]`` (IPv6 in brackets).
        worker: id that goes into the name of a Unix socket.
    Returns:
        The listening socket (non-blocking), the address to pass on, and a function that removes the socket file.
    Raises:
        OSError: the system refuses.
        ValueError: the address cannot be understood, or the folder is open to others.
    """
    kind, rest = _split(where)
    if kind == "unix":
        folder = _private_folder(rest)
        path = folder / f"w{worker}-{secrets.token_hex(4)}.sock"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = f"unix:{path}"

        def remove() -> None:
            path.unlink(missing_ok=True)
    else:
        family, host, port = _tcp(rest)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def remove() -> None:
            return

    try:
        sock.setblocking(False)
        if kind == "unix":
            with _unix_name(path) as name:
                sock.bind(name)
        else:
            sock.bind((host, port))
            shown = f"[{host}]" if family == socket.AF_INET6 else host
            address = f"tcp:{shown}:{sock.getsockname()[1]}"
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock, address, remove


def listen_at(address: str) -> tuple[socket.socket, str, Callable[[], None]]:
    """Start listening at one exact address, which a successor can take over.

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
        return listen(address, 0)
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

    Returns:
        A non-blocking socket; it is connected, or has failed, once it is writable.
    Raises:
        OSError: it has failed at once (no process listens, too many are dialling).
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
        else:
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Set what a data connection needs: non-blocking, large buffers, small frames sent at once."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _split(address: str) -> tuple[str, str]:
    kind, colon, rest = address.partition(":")
    if kind not in ("unix", "tcp") or not colon or not rest:
        raise ValueError(f"address {address!r} is neither unix:FOLDER nor tcp:HOST[:PORT]")
    return kind, rest


def _tcp(rest: str) -> tuple[socket.AddressFamily, str, int]:
    host, port = rest, "0"
    if rest.startswith("["):
        host, _, tail = rest[1:].partition("]")
        port = tail.removeprefix(":") or "0"
    elif ":" in rest:
        host, _, port = rest.partition(":")
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise ValueError(
            f"tcp:{rest}: {host!r} is not a numeric address; names are not looked up (write 127.0.0.1, not localhost)"
        ) from None
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"tcp:{rest}: port {port!r} is not a number below 65536")
    return (socket.AF_INET6 if version == 6 else socket.AF_INET), host, int(port)


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
    """A name for the path that fits into the system's address structure."""
    if len(os.fsencode(path)) <= _MAX_UNIX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
