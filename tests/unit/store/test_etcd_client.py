"""What errors of etcd mean, which member is asked, and that every request has an end."""

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fake_etcd import KEY, FakeEtcd, FakeGateway, lost, says

from elaswave.errors import ConfigError, StoreError
from elaswave.store.etcd_client import (
    REQUEST_TIMEOUT_S,
    REQUEST_TIMEOUT_S_MAX,
    Credentials,
    EtcdClient,
    HttpGateway,
    HttpResponse,
    NoAnswerError,
    endpoints_of,
    security_of,
)


def client_of(gateway: FakeGateway, credentials: Credentials | None = None) -> EtcdClient:
    return EtcdClient(["a:1", "b:2"], "/elaswave/job/", gateway, KEY, credentials)


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (503, 14, "etcdserver: leader changed"),
        (504, 4, "context deadline exceeded"),
        (429, 8, "etcdserver: mvcc: database space exceeded"),
        (500, 13, "something"),
        (401, 16, "etcdserver: invalid auth token"),
    ],
)
def test_what_may_have_been_done_or_may_be_done_later_is_no_answer(status: int, code: int, text: str) -> None:
    gateway = FakeGateway(FakeEtcd(), [says(status, code, text)])
    client = client_of(gateway)
    with pytest.raises(NoAnswerError, match=f"a:1: {text}"):
        client.transact([], [client.get("k")])
    assert client.transact([], [client.get("k")]).succeeded
    assert gateway.endpoints == ["a:1", "b:2"], "the next member is asked"


@pytest.mark.parametrize(
    ("status", "code", "text", "advice"),
    [
        (400, 3, "etcdserver: user name is empty", "set control.store_credentials"),
        (400, 3, "etcdserver: authentication failed, invalid user ID or password", "set control.store_credentials"),
        (403, 7, "etcdserver: permission denied", "give the user read and write permission"),
        (412, 9, "etcdserver: authentication is not enabled", "leave out control.store_credentials"),
        (501, 12, "not implemented", ""),
        (500, 15, "etcdserver: corrupt cluster", ""),
    ],
)
def test_what_will_be_said_again_however_often_one_asks_is_a_refusal(
    status: int, code: int, text: str, advice: str
) -> None:
    client = client_of(FakeGateway(FakeEtcd(), [says(status, code, text)]))
    with pytest.raises(StoreError, match=f"etcd at a:1 refuses: {text}.*{advice}"):
        client.transact([], [client.get("k")])


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (b"Client sent an HTTP request to an HTTPS server.\n", "set control.store_ca"),
        (
            b"CommonName of client sending a request against gateway will be ignored",
            "where etcd has users, the certificate",
        ),
    ],
)
def test_what_etcd_refuses_before_it_looks_at_a_request(text: bytes, advice: str) -> None:
    client = client_of(FakeGateway(FakeEtcd(), [lambda gateway, path, body: HttpResponse(400, text)]))
    with pytest.raises(StoreError, match=f"etcd at a:1 refuses: {text.decode().strip()}; {advice}"):
        client.transact([], [])


@pytest.mark.parametrize(
    "answer", [HttpResponse(404, b"Not Found"), HttpResponse(200, b"<html>"), HttpResponse(200, b"{}")]
)
def test_who_is_no_etcd_is_named(answer: HttpResponse) -> None:
    client = client_of(FakeGateway(FakeEtcd(), [lambda gateway, path, body: answer]))
    with pytest.raises(StoreError, match="a:1 does not speak as etcd does .* members of etcd 3.4 or newer"):
        client.transact([], [])


def test_where_nobody_answers_in_time_each_gets_longer_and_never_too_long() -> None:
    gateway = FakeGateway(FakeEtcd(), [lost] * 12)
    client = client_of(gateway)
    for _ in range(12):
        with pytest.raises(NoAnswerError, match="no answer within"):
            client.transact([], [])
    assert gateway.timeouts_s[:5] == [REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S, 2.0, 2.0, 4.0]
    assert gateway.timeouts_s[-1] == REQUEST_TIMEOUT_S_MAX
    client.transact([], [])
    client.transact([], [])
    assert gateway.timeouts_s[-1] == REQUEST_TIMEOUT_S


class WithUsers(FakeGateway):
    """etcd that asks for a token, and forgets it."""

    tokens = 0
    heard: list[str]

    def post(self, endpoint: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> HttpResponse:
        if path == "/v3/auth/authenticate":
            assert json.loads(body) == {"name": "ann", "password": "secret"}
            self.tokens += 1
            return HttpResponse(200, json.dumps({"header": {}, "token": f"t{self.tokens}"}).encode())
        if headers.get("Authorization") != f"t{self.tokens}":
            return says(401, 16, "etcdserver: invalid auth token")(self, path, body) or HttpResponse(0, b"")
        return super().post(endpoint, path, body, headers, timeout_s)


def test_a_token_is_asked_for_and_again_when_it_has_expired() -> None:
    gateway = WithUsers(FakeEtcd())
    client = client_of(gateway, Credentials("ann", "secret"))
    assert client.transact([], []).succeeded and client.transact([], []).succeeded
    assert gateway.tokens == 1
    client._token = "expired"
    with pytest.raises(NoAnswerError, match="invalid auth token"):
        client.transact([], [])
    assert client.transact([], []).succeeded and gateway.tokens == 2


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("etcd://127.0.0.1:2379", ("127.0.0.1:2379",)),
        ("etcd://a:1,b,[::1]:3,[::1]", ("a:1", "b:2379", "[::1]:3", "[::1]:2379")),
    ],
)
def test_addresses(text: str, endpoints: tuple[str, ...]) -> None:
    assert endpoints_of(text) == endpoints


@pytest.mark.parametrize(
    "text", ["etcd://", "etcd://a:x", "etcd://a:1,,b:2", "http://a:1", "etcd://a:70000", "etcd://a/b:1"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match='expected "file" or "etcd://HOST:PORT,HOST:PORT,..."'):
        endpoints_of(text)


# --------------------------------------------------------------------------------------------------- over real sockets


class Server:
    """Accepts connections and does with each what it is told."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self._serve = serve
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with sock:
                try:
                    self._serve(sock)
                except OSError:
                    pass

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join()


def drip(sock: socket.socket) -> None:
    """Sends a byte now and then, so that no single wait is long."""
    sock.recv(65536)
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
        sock.sendall(bytes([byte]))
        threading.Event().wait(0.02)


def hang(sock: socket.socket) -> None:
    while sock.recv(65536):
        pass


def hang_up(sock: socket.socket) -> None:
    sock.recv(65536)


def babble(sock: socket.socket) -> None:
    sock.recv(65536)
    sock.sendall(b"220 mail\r\n")


@pytest.mark.parametrize(
    ("serve", "error"),
    [(drip, TimeoutError), (hang, TimeoutError), (hang_up, ConnectionError), (babble, ConnectionError)],
)
def test_every_request_has_an_end(serve: Callable[[socket.socket], None], error: type[OSError]) -> None:
    server, gateway = Server(serve), HttpGateway()
    try:
        begun_s = time.monotonic()
        with pytest.raises(error):
            gateway.post(server.endpoint, "/v3/kv/txn", b"{}", {}, 0.2)
        assert time.monotonic() - begun_s < 15, "however the other side drips: without a bound it would take 20 s"
    finally:
        gateway.close()
        server.close()


class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        if self.path == "/close":
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[http.server.HTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests_share_a_connection_which_is_made_again(echo: http.server.HTTPServer) -> None:
    endpoint, gateway = f"127.0.0.1:{echo.server_port}", HttpGateway()
    try:
        for path, size in (("/a", 10), ("/a", 3_000_000), ("/close", 100_000), ("/a", 5)):
            assert gateway.post(endpoint, path, b"x" * size, {}, 20.0) == HttpResponse(200, b"x" * size)
        with pytest.raises(ConnectionRefusedError):
            gateway.post(f"127.0.0.1:{unused_port()}", "/a", b"", {}, 20.0)
    finally:
        gateway.close()


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_files_for_tls_that_cannot_be_used(tmp_path: Path) -> None:
    assert security_of(None, None, None) is None
    with pytest.raises(ConfigError, match="ca.pem cannot be used for TLS"):
        security_of(tmp_path / "ca.pem", None, None)
    (tmp_path / "bad.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="bad.pem cannot be used for TLS"):
        security_of(tmp_path / "bad.pem", None, None)
