"""One request to one member of etcd, over the JSON gateway that each of them has. Nothing is tried twice here.

Own code over `http.client`, since none of etcd's Python clients bounds a whole call: what takes longer than its time,
from the connection to the last byte of the answer, ends in `TimeoutError`, however the other side drips.
"""

import http.client
import io
import socket
import ssl
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from elaswave.errors import ConfigError, StoreError

PREFIX = "etcd://"
DEFAULT_PORT = 2379
_ANSWER_BYTES_MAX = 256 << 20


class HttpResponse(NamedTuple):
    """What a member has said."""

    status: int
    body: bytes


class Gateway(Protocol):
    """Reaches members; tests have one that loses, delays and repeats."""

    def post(self, endpoint: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> HttpResponse:
        """Sends a request and returns the answer.

        Raises:
            OSError: there is none, within the time or at all. Whether the request was carried out is not known.
        """

    def close(self) -> None:
        """Ends all connections."""


def endpoints_of(store: str) -> tuple[str, ...]:
    """The members that ``etcd://HOST:PORT,...`` names, as HOST:PORT.

    Raises:
        ConfigError: it names none, or something else.
    """
    found = []
    for text in store.removeprefix(PREFIX).split(","):
        host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        host, port = (host, port) if colon else (text, str(DEFAULT_PORT))
        bare = host.removeprefix("[").removesuffix("]")
        if not store.startswith(PREFIX) or not bare or ("/" in host) or not port.isdecimal() or int(port) > 65535:
            raise ConfigError([f'control.store: got "{store}", expected "file" or "etcd://HOST:PORT,HOST:PORT,..."'])
        found.append(f"{host}:{port}")
    return tuple(found)


def security_of(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """TLS to the members: names are checked against the authority. None: without.

    Raises:
        ConfigError: files that cannot be read or do not belong together.
    """
    if ca is None:
        return None
    reading = ca
    try:
        context = ssl.create_default_context(cafile=str(ca))
        if certificate is not None:
            reading = certificate
            context.load_cert_chain(certificate, key, password="")  # not to wait for a passphrase on the terminal
    except (OSError, ValueError) as error:
        raise ConfigError([f"control.store: {reading} cannot be used for TLS: {error}"]) from None
    return context


class HttpGateway:
    """Keeps one connection for each member.

    Args:
        security: TLS; None: without.
    """

    def __init__(self, security: ssl.SSLContext | None = None) -> None:
        self._security = security
        self._connections: dict[str, _Connection] = {}

    def post(self, endpoint: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> HttpResponse:
        """See `Gateway.post`."""
        connection = self._connections.get(endpoint)
        is_used = connection is not None
        if connection is None:
            connection = self._connections[endpoint] = _Connection(endpoint, self._security)
        try:
            return connection.post(path, body, headers, time.monotonic() + timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self._connections.pop(endpoint).close()
            if is_used and isinstance(error, ConnectionError | http.client.RemoteDisconnected):
                raise ConnectionError(f"the connection has ended: {error}") from error
            if isinstance(error, http.client.HTTPException):
                raise ConnectionError(f"no answer in HTTP: {error!r}") from error
            raise

    def close(self) -> None:
        """See `Gateway.close`."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


class _Connection(http.client.HTTPConnection):
    """One connection whose every wait ends at the present request's deadline."""

    def __init__(self, endpoint: str, security: ssl.SSLContext | None) -> None:
        host, _, port = endpoint.rpartition(":")
        super().__init__(host.removeprefix("[").removesuffix("]"), int(port))
        self._security = security
        self._deadline_s = 0.0

    def connect(self) -> None:
        sock = socket.create_connection((self.host, self.port), self.left_s())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._security is not None:
            sock.settimeout(self.left_s())
            try:
                sock = self._security.wrap_socket(sock, server_hostname=self.host)
            except BaseException:
                sock.close()
                raise
        self.sock: Any = _Timed(sock, self)

    def post(self, path: str, body: bytes, headers: dict[str, str], deadline_s: float) -> HttpResponse:
        self._deadline_s = deadline_s
        self.request("POST", path, body, {"Content-Type": "application/json", **headers})
        with self.getresponse() as response:
            content = response.read(_ANSWER_BYTES_MAX)
            if response.read(1):
                raise StoreError(f"an answer of etcd has more than {_ANSWER_BYTES_MAX} bytes")
        return HttpResponse(response.status, content)

    def left_s(self) -> float:
        """Of the present request.

        Raises:
            TimeoutError: nothing.
        """
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s


class _Timed:
    """A socket as `http.client` uses one: it stays open for those that still read when it is closed."""

    def __init__(self, sock: socket.socket, connection: _Connection) -> None:
        self._sock = sock
        self._connection = connection
        self._num_users = 1

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._connection.left_s())
        self._sock.sendall(data)  # its timeout is of all of it

    def makefile(self, mode: str) -> io.BufferedReader:
        self._num_users += 1
        return io.BufferedReader(_Reader(self))

    def receive(self, buffer: Any) -> int:
        self._sock.settimeout(self._connection.left_s())
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._sock.close()


class _Reader(io.RawIOBase):
    def __init__(self, sock: _Timed) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.receive(buffer)

    def close(self) -> None:
        if not self.closed:
            self._sock.close()
        super().close()
