"""Control servers and clients of every kind: on threads, as peers with raw sockets, in processes."""

import asyncio
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from elaswave.channel.client import ClientOwner, ControlClient
from elaswave.channel.server import ControlServer, RefusedPeer
from elaswave.channel.wire import COORDINATOR, ControlFrameKind, Session, encode_payload
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.transport import addresses
from elaswave.transport.tls import Tls

KEY = b"the key of the control connections"
PATIENCE_S = 20.0
"""Bound for whatever must happen; nothing waits for it to pass."""
KINDS = ("unix", "tcp", "tls")

_T = TypeVar("_T")


class Say(msgspec.Struct, frozen=True, tag=True):
    """From a client."""

    number: int
    text: str = ""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a client."""

    times: int = 0


class Tell(msgspec.Struct, frozen=True, tag=True):
    """From the coordinator."""

    number: int
    padding: bytes = b""


FromClient = Say | Hello
ToClient = Tell


def until(condition: Callable[[], object]) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


class Coordinator:
    """A `ControlServer` on a thread of its own, which writes down what happens and answers `Say` with `Tell`.

    Args:
        listen: where.
        on_message: called with each message too; what it raises ends the server.
    """

    def __init__(
        self,
        listen: str,
        *,
        key: bytes = KEY,
        tls: Tls | None = None,
        on_message: Callable[[int, Any], None] = lambda peer, message: None,
        refusal: Callable[[int], str | None] = lambda peer: None,
        turned_away: Callable[[int, StorePosition], RefusedPeer | None] = lambda peer, store_position: None,
        key_of: Callable[[int], bytes] | None = None,
        **options: Any,
    ) -> None:
        self.log: list[tuple[str, int, Any]] = []
        self.refusals: list[str] = []
        self.strangers: list[str] = []
        self.heads: list[tuple[int, Any]] = []
        self.failure: BaseException | None = None
        self.server: ControlServer[Any] = ControlServer(**options)
        self._also = on_message
        self._turned_away = turned_away
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._run(
                self.server.start(
                    listen,
                    key,
                    FromClient,
                    self._on_message,
                    lambda peer: self.log.append(("connected", peer, None)),
                    lambda peer: self.log.append(("closed", peer, None)),
                    tls=tls,
                    on_refused=self.refusals.append,
                    on_stranger=self.strangers.append,
                    on_store_position=self._on_store_position,
                    refusal=refusal,
                    key_of=key_of,
                )
            )
        except BaseException:
            self._end_loop()
            raise
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        self.address = self.server.address

    def _on_message(self, peer: int, message: Any) -> None:
        self._also(peer, message)
        self.log.append(("message", peer, message))
        if isinstance(message, Say):
            self.server.send(peer, Tell(message.number))

    def _on_store_position(self, peer: int, store_position: StorePosition) -> RefusedPeer | None:
        self.heads.append((peer, store_position))
        return self._turned_away(peer, store_position)

    async def _serve(self) -> None:
        try:
            await self.server.serve()
        except Exception as error:
            self.failure = error

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def call(self, function: Callable[[], _T]) -> _T:
        """Calls a function on the server's loop."""

        async def run() -> _T:
            return function()

        return self._run(run())  # type: ignore[no-any-return]

    def events(self, peer: int) -> list[str]:
        """What happened to a peer, without the messages."""
        return [what for what, who, _ in list(self.log) if who == peer and what != "message"]

    def wait_for_events(self, peer: int, *events: str) -> None:
        """Waits until just this has happened to a peer."""
        until(lambda: self.events(peer) == list(events))

    def said(self, peer: int) -> list[int]:
        """Numbers of the `Say`s of a peer."""
        return [message.number for _, who, message in list(self.log) if who == peer and isinstance(message, Say)]

    def hellos(self, peer: int) -> list[int]:
        return [message.times for _, who, message in list(self.log) if who == peer and isinstance(message, Hello)]

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._run(self.server.close())
        self._serving.result(PATIENCE_S)
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._loop.close()


class History:
    """A coordinator's store, as far as its server sees one."""

    def __init__(
        self,
        store_position: StorePosition | None = None,
        when_durable: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:
        self.store_position = store_position
        self.when_durable = when_durable


class Owner(ClientOwner):
    """Serves a client by functions."""

    def __init__(
        self,
        receive: Callable[[Any], object] = lambda message: None,
        hello: Callable[[], Any] = Hello,
        standing: Callable[[], Any] = tuple,
        heartbeat: Callable[[], Any] = lambda: None,
    ) -> None:
        self.receive, self.hello, self.standing, self.heartbeat = receive, hello, standing, heartbeat  # type: ignore


class Participant:
    """A `ControlClient` that writes down what it hears."""

    def __init__(self, address: str, peer: int, *, key: bytes = KEY, start: bool = True, **options: Any) -> None:
        self.heard: list[int] = []
        self.num_hellos = 0
        targets = [(address, options.pop("host", "")), *options.pop("others", ())]
        owner = Owner(lambda message: self.heard.append(message.number), self._hello)
        owner.heartbeat = options.pop("heartbeat", owner.heartbeat)  # type: ignore[method-assign]
        chosen = {name: options.pop(name) for name in list(options) if hasattr(ControlClient, name)}
        chosen |= {name: options.pop(name) for name in ("silence_timeout_s",) if name in options}
        self.client: ControlClient[Any] = ControlClient(targets, key, peer, ToClient, owner, **options)
        for name, value in {"interval_s": 0.02, **chosen}.items():
            setattr(self.client, name, value)
        if start:
            self.client.start()

    def _hello(self) -> Hello:
        self.num_hellos += 1
        return Hello(self.num_hellos)

    def works(self) -> None:
        """Exchanges a message in both directions."""
        number = secrets.randbits(32)
        until(lambda: self.client.connected)
        self.client.send(Say(number), durable=True)
        until(lambda: number in self.heard)


class RawPeer:
    """A raw connection, driven from the test's thread, that can say anything."""

    def __init__(
        self, address: str, *, key: bytes = KEY, own: int = 66, peer: int = COORDINATOR, **options: Any
    ) -> None:
        self.socket = addresses.dial(address)
        self.socket.settimeout(PATIENCE_S)
        self.session: Session[Any] = Session.dialling(key, own, peer, ToClient, **options)
        self.sent = b""
        self.frames: list[Any] = []

    def authenticate(self) -> "RawPeer":
        """Does the handshake; raises ConnectionError if it is refused."""
        self.flush()
        while not self.session.open:
            self.receive()
        return self

    def say_hello(self, identity: int = 1) -> "RawPeer":
        """Opens the connection as a client does."""
        self.session.write(ControlFrameKind.OPEN, identity)
        self.session.write(ControlFrameKind.MESSAGE, 0, encode_payload(Hello()))
        return self.flush()

    def say(self, number: int, *, durable: bool = True) -> "RawPeer":
        self.session.write(ControlFrameKind.MESSAGE, number if durable else 0, encode_payload(Say(number)))
        return self.flush()

    def flush(self) -> "RawPeer":
        return self.write(self.session.take())

    def write(self, data: bytes) -> "RawPeer":
        self.sent += data
        self.socket.sendall(data)
        return self

    def receive(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("refused")
        self.frames += self.session.feed(data)
        self.flush()

    def acknowledged(self) -> int:
        """Waits for an acknowledgement and returns its number."""
        while True:
            while self.frames:
                frame = self.frames.pop(0)
                if frame.kind is ControlFrameKind.ACK:
                    return int(frame.number)
            self.receive()

    def is_refused(self) -> bool:
        """Waits until the other side has ended the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()


class Town:
    """Makes coordinators, participants and raw peers of one kind of address, and closes them at the end."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder / "control"
        self.folder.mkdir(mode=0o700)
        self.tls = None
        if kind == "tls":
            from tests.certificates import job_tls  # late: processes that are killed at once need none of it

            self.tls = job_tls()
        self.listen = f"unix:{self.folder}/coordinator.sock" if kind == "unix" else f"tcp:127.0.0.1:{free_port()}"
        self._opened: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def coordinator(self, **options: Any) -> Coordinator:
        options.setdefault("tls", self.tls)
        coordinator = Coordinator(self.listen, **options)
        self._opened.append(coordinator)
        return coordinator

    def participant(self, peer: int, **options: Any) -> Participant:
        options.setdefault("tls", self.tls)
        participant = Participant(self.listen, peer, **options)
        self._opened.append(participant.client)
        return participant

    def raw_peer(self, **options: Any) -> RawPeer:
        if self.tls is not None:
            options.setdefault("security", self.tls.dialling())
            options.setdefault("host", "127.0.0.1")
        raw_peer = RawPeer(self.listen, **options)
        self._opened.append(raw_peer)
        return raw_peer

    def process(self, journal: Path) -> "subprocess.Popen[bytes]":
        """A coordinator in a process of its own, which appends what it hears to a file and answers."""
        script = Path(__file__).with_name("coordinator_process.py")
        command = [sys.executable, str(script), self.listen, KEY.hex(), str(journal)]
        if self.tls is not None:
            command += [self.tls.certificate, self.tls.key, self.tls.authority]
        process = subprocess.Popen(command, env={"PYTHONPATH": os.pathsep.join(sys.path)}, stdout=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"listening\n"
        return process

    def close(self) -> None:
        for opened in reversed(self._opened):
            if isinstance(opened, ControlClient):
                opened.close(0.0)
            else:
                opened.close()
        for process in self._processes:
            kill(process)
        if self._processes and self.kind == "unix":
            Path(self.listen.removeprefix("unix:")).unlink()  # who is killed leaves its file to its successor


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process as the fault injection does."""
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    if process.stdout is not None:
        process.stdout.close()


def free_port() -> int:
    """A port without a listener; closed without having been connected, so that it can be listened at again."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def heard_by(journal: Path) -> list[tuple[int, int]]:
    """(peer, number) of everything that coordinators in processes have handled, in order."""
    content = journal.read_bytes() if journal.exists() else b""
    return list(struct.iter_unpack("<qq", content[: len(content) // 16 * 16]))
