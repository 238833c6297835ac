"""Requests to a cluster of etcd: which member is asked, and what an error means. Nothing is repeated here.

Every request of this package may be sent again with the same words: it is a transaction that compares first, or it
reads. So of an error only two things matter. A *refusal* (`StoreError`) will be said again however often one asks:
wrong credentials, no permission, a server that is no etcd. All else is `NoAnswerError`: the request may have been
carried out, or may yet be; whoever asks says it again, to the next member.

One request to one member of etcd, over the JSON gateway that each of them has. Nothing is tried twice here.

Own code over `http.client`, since none of etcd's Python clients bounds a whole call: what takes longer than its time,
from the connection to the last byte of the answer, ends in `TimeoutError`, however the other side drips.
"""

import base64
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from elaswave.errors import ConfigError, StoreError
from elaswave.protocol.coordinator.store_writes import SPEC, KeyValue, Transaction, TransactionResult, job_generation_of
from elaswave.store.seal import StoreSeal
from elaswave.untrusted import decode_json

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
    """Lists the members that ``etcd://HOST:PORT,...`` names, as HOST:PORT.

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
    """Makes the context of TLS to the members: names are checked against the authority. None: it goes without TLS.

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
        """Computes the seconds left of the present request.

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


REQUEST_TIMEOUT_S = 1.0
"""Of one request to one member, at first."""
REQUEST_TIMEOUT_S_MAX = 8.0
"""Where no member has answered in time, they get twice as long in the next round, up to this."""
_INVALID, _DENIED, _PRECONDITION, _UNIMPLEMENTED, _DAMAGED, _UNAUTHENTICATED = 3, 7, 9, 12, 15, 16
"""Codes of gRPC."""
_NO_TOKEN = "user name is empty"


class NoAnswerError(Exception):
    """Whether a request was carried out is not known."""


class Transacted(NamedTuple):
    """What became of a transaction."""

    succeeded: bool
    """Whether all its comparisons held."""
    revision: int
    """Of the store, after it."""
    ranges: tuple[tuple[KeyValue, ...], ...]
    """What its reads have found."""


class Credentials(NamedTuple):
    """A user of etcd."""

    user: str
    password: str


class EtcdClient:
    """Asks the members of one cluster, below one prefix.

    Args:
        endpoints: HOST:PORT of members.
        prefix: of all keys.
        gateway: reaches them.
        key: the job's: all values are sealed with it.
        credentials: None: etcd asks for none.
        job_generation: number of the job generation whose values count; 0: of the one that `SPEC` tells when it is
            first read.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        gateway: Gateway,
        key: bytes,
        credentials: Credentials | None = None,
        *,
        job_generation: int = 0,
    ) -> None:
        self.prefix = prefix
        self.seal = StoreSeal(key, prefix)
        self.job_generation = job_generation
        self.timeout_s_max = REQUEST_TIMEOUT_S_MAX
        """The longest that a member gets; who asks again and again takes the first one for all."""
        self._endpoints = tuple(endpoints)
        self._gateway = gateway
        self._credentials = credentials
        self._token = ""
        self._at = 0
        """The member that is asked."""
        self._num_failed = 0
        """Requests without an answer since the last one with one."""

    @property
    def name(self) -> str:
        """In messages."""
        return f"etcd://{','.join(self._endpoints)}{self.prefix}"

    def transact(
        self,
        compare: Sequence[dict[str, Any]],
        success: Sequence[dict[str, Any]],
        failure: Sequence[dict[str, Any]] = (),
    ) -> Transacted:
        """Carries out one transaction: linearizable, whole or not at all.

        Raises:
            NoAnswerError, StoreError: see the module's docstring.
        """
        response = self._ask("/v3/kv/txn", {"compare": compare, "success": success, "failure": failure})
        try:
            responses = response.get("responses", [])
            ranges = [each["response_range"].get("kvs", []) for each in responses if "response_range" in each]
            for found in (found for page in ranges for found in page if found["key"] == self._key(SPEC)):
                self.job_generation = self.job_generation or job_generation_of(self._key_value(found))
            return Transacted(
                bool(response.get("succeeded", False)),
                int(response["header"]["revision"]),
                tuple(tuple(map(self._key_value, page)) for page in ranges),
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise StoreError(
                f"{self.name} answers what no etcd does ({type(error).__name__}: {error}): see who is at that address"
            ) from error

    def carry_out(self, transaction: Transaction) -> TransactionResult:
        """Carries out one transaction, in the protocol's words.

        Raises:
            NoAnswerError, StoreError: see the module's docstring.
        """
        compare = [self.unwritten_since(key, revision) for key, revision in transaction.unwritten_since]
        compare += [self.has_value(key, value) for key, value in transaction.values]
        compare += [self.exists(key) for key in transaction.exist]
        changes = [self.put(key, value) for key, value in transaction.puts]
        changes += [self.delete(key) for key in transaction.deletes]
        if transaction.clears:
            changes += self.delete_all_but([key for key, _ in transaction.puts])
        reads = [self.get(key) for key in transaction.reads]
        only_reads = not compare and not changes
        response = self.transact(compare, reads if only_reads else changes, reads)
        found = tuple(page[0] if page else None for page in response.ranges)
        return TransactionResult(response.succeeded, response.revision, found)

    def close(self) -> None:
        """Ends all connections."""
        self._gateway.close()

    # ----------------------------------------------------------------------------------------------- parts of requests

    def unwritten_since(self, key: str, revision: int) -> dict[str, Any]:
        """Compares: a key was last written at a revision; 0: it does not exist."""
        return {"key": self._key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}

    def has_value(self, key: str, value: bytes) -> dict[str, Any]:
        """Compares: a key exists and has a value."""
        return {"key": self._key(key), "target": "VALUE", "result": "EQUAL", "value": self._stored(key, value)}

    def exists(self, key: str) -> dict[str, Any]:
        """Compares: a key exists."""
        return {"key": self._key(key), "target": "VERSION", "result": "GREATER", "version": "0"}

    def put(self, key: str, value: bytes) -> dict[str, Any]:
        """Writes a key."""
        return {"request_put": {"key": self._key(key), "value": self._stored(key, value)}}

    def get(self, key: str) -> dict[str, Any]:
        """Reads a key."""
        return {"request_range": {"key": self._key(key)}}

    def get_from(self, first: str, folder: str, limit: int, *, keys_only: bool = False) -> dict[str, Any]:
        """Reads keys of a folder, from one on, in their order.

        Args:
            folder: such as ``rec/``.
            limit: of how many.
        """
        asked = {"key": self._key(first), "range_end": self._key(_after(folder)), "limit": str(limit)}
        return {"request_range": asked | ({"keys_only": True} if keys_only else {})}

    def delete(self, key: str) -> dict[str, Any]:
        """Removes a key."""
        return {"request_delete_range": {"key": self._key(key)}}

    def delete_all_but(self, kept: Sequence[str]) -> list[dict[str, Any]]:
        """Removes all keys of the prefix but some, which the same transaction may then write."""
        begins = [self._key(""), *(self._key(key + "\0") for key in sorted(kept))]
        ends = [*(self._key(key) for key in sorted(kept)), _encoded(_after(self.prefix))]
        return [{"request_delete_range": {"key": key, "range_end": end}} for key, end in zip(begins, ends, strict=True)]

    def _key(self, key: str) -> str:
        return _encoded(self.prefix + key)

    def _stored(self, key: str, value: bytes) -> str:
        return base64.b64encode(self.seal.sealed(key, value, self.job_generation)).decode()

    def _key_value(self, found: dict[str, str]) -> KeyValue:
        key = base64.b64decode(found["key"]).decode(errors="replace").removeprefix(self.prefix)
        value = self.seal.opened(key, base64.b64decode(found.get("value", "")), self.job_generation)
        return KeyValue(key, value or b"", int(found["mod_revision"]), value is not None)

    # --------------------------------------------------------------------------------------------------------- asking

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if self._credentials is not None and not self._token:
            user, password = self._credentials
            token = self._post("/v3/auth/authenticate", {"name": user, "password": password}).get("token", "")
            if not (isinstance(token, str) and token.isascii() and token.isprintable()):  # it goes into a header
                raise StoreError(f"{self.name} answers with a token that no etcd gives: see who is at that address")
            self._token = token
        return self._post(path, request)

    def _post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        endpoint = self._endpoints[self._at]
        rounds = self._num_failed // len(self._endpoints)
        timeout_s = min(self.timeout_s_max, REQUEST_TIMEOUT_S * 2.0 ** min(rounds, 10))
        headers = {"Authorization": self._token} if self._token else {}
        try:
            answer = self._gateway.post(endpoint, path, json.dumps(request).encode(), headers, timeout_s)
            response = self._response(endpoint, answer)
        except (OSError, NoAnswerError) as error:
            self._num_failed += 1
            self._at = (self._at + 1) % len(self._endpoints)
            text = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise NoAnswerError(f"{endpoint}: {text}") from error
        self._num_failed = 0
        return response

    def _response(self, endpoint: str, answer: HttpResponse) -> dict[str, Any]:
        try:
            response = decode_json(answer.body)
        except ValueError:
            response = None
        if not isinstance(response, dict) or (answer.status == 200 and "header" not in response):
            if answer.status in (200, 404):
                raise StoreError(
                    f"{endpoint} does not speak as etcd does (status {answer.status}): members of etcd 3.4 or newer "
                    "are needed, at their client addresses"
                )
            if answer.status == 400:  # said before the gateway has looked at the request
                text = answer.body.decode(errors="replace").strip()[:200]
                raise StoreError(f"etcd at {endpoint} refuses: {text}{_advice(text)}")
            raise NoAnswerError(f"status {answer.status}")
        if answer.status == 200:
            return response
        code, text = (
            response.get("code"),
            str(response.get("message") or response.get("error") or f"status {answer.status}"),
        )
        if code == _UNAUTHENTICATED or (code == _INVALID and _NO_TOKEN in text and self._credentials is not None):
            self._token = ""  # it has expired, or the member was started again
            raise NoAnswerError(text)
        if code in (_INVALID, _DENIED, _PRECONDITION, _UNIMPLEMENTED, _DAMAGED):
            raise StoreError(f"etcd at {endpoint} refuses: {text}{_advice(text)}")
        raise NoAnswerError(text)


def _advice(text: str) -> str:
    if "CommonName" in text:
        return "; where etcd has users, the certificate of control.store_cert must have no common name"
    if _NO_TOKEN in text or "authentication failed" in text:
        return "; set control.store_credentials to a file with USER:PASSWORD of a user of etcd"
    if "HTTPS server" in text:
        return "; set control.store_ca"
    if "not enabled" in text:
        return "; leave out control.store_credentials"
    if "permission denied" in text:
        return "; give the user read and write permission for all keys below /elaswave/"
    return ""


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _after(folder: str) -> str:
    """Finds the first key behind all that begin with a folder's name."""
    return folder[:-1] + chr(ord(folder[-1]) + 1)
