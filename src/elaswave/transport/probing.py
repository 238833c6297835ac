"""Probes of a link between two hosts, over TCP: who answers them, and who measures.

Both sides prove that they hold the job's key (`elaswave.transport.handshake`); then a probe is

    bytes that follow 8 | bytes to return 8 | the bytes

and is answered by the bytes that were asked for, or by one where none were. What they are does not matter: they are
random, so that nothing on the way makes them shorter. Connections have the buffers of those that carry data. One host
is answered at a time, since two would share the link; the others wait for the last word of the handshake.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from elaswave.errors import AuthenticationError, CommError, ProbeError
from elaswave.planning.costs.link_probes import PROBE_BYTES_MAX, LinkProbe, MeasuredLinks, probing
from elaswave.transport.addresses import tune
from elaswave.transport.handshake import (
    NONCE_BYTES,
    Dialler,
    LimitedLines,
    Listener,
    UnauthenticatedPeers,
    source_network,
)

PROBER = 2**32 - 1
"""Id of both sides in the handshake; no process of a job has it."""
PROBE_S_MAX = 60.0
"""A probe that takes longer has failed."""
IDLE_S_MAX = 20.0
"""Between two probes of a host that measures; then the next one has its turn."""
HANDSHAKE_S_MAX = 5.0
"""In which a host proves that it holds the key."""
_TURN_S = 0.2
_HEADER = struct.Struct("<QQ")
_CHUNK_BYTES = 1 << 20


def measure_link(host: str, port: int, key: bytes) -> MeasuredLinks:
    """Measures the link to a host that answers.

    Args:
        host: its name or address.
        port: where it answers.
        key: the job's.
    Raises:
        ProbeError: it cannot be reached, or does not answer in time.
        AuthenticationError: it holds another key.
    """
    try:
        sock = socket.create_connection((host, port), timeout=IDLE_S_MAX)
    except OSError as error:
        raise ProbeError(
            f"nobody answers probes at {host}:{port}: {error.strerror or error}; start "
            f"`elaswave probe --answer ADDRESS:{port}` on a host of that site, and let the port pass"
        ) from error
    link = _Link(sock, f"the host at {host}:{port}")
    with sock:
        # It may be answering another host before.
        _shake_hands(link, _Dialler(key, PROBER, PROBER, os.urandom(NONCE_BYTES)), PROBE_S_MAX)
        steps = probing()
        probe = next(steps)
        while True:
            begin_s = time.perf_counter()
            _ask(link, probe)
            try:
                probe = steps.send(max(time.perf_counter() - begin_s, 1e-9))
            except StopIteration as end:
                found: MeasuredLinks = end.value
                return found


def answer(listener: socket.socket, key: bytes, goes_on: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Answers the probes of hosts, one host after the other.

    Args:
        listener: a socket that listens.
        key: the job's.
        goes_on: asked several times a second whether to go on waiting for hosts.
        say: told of each host that has ended, and why.
    """
    listener.settimeout(_TURN_S)
    probes = _ProbeListener(key, say)
    try:
        while goes_on():
            with contextlib.suppress(TimeoutError):
                sock, address = listener.accept()
                probes.admit(sock, address)
            probes.say_the_rest()
    finally:
        probes.close()


class _ProbeListener:
    """Those who want to measure: they shake hands at the same time, and then wait for their turn. So who holds no key
    makes nobody wait.

    Args:
        key: the job's.
        say: told of each host that has ended, and why; of a flood, of some.
    """

    def __init__(self, key: bytes, say: Callable[[str], None]) -> None:
        self._key, self._say = key, say
        self._lock = threading.Lock()
        """Of what is here and of `say`."""
        self._turn = threading.Lock()
        """The one that has it measures."""
        self._guests: dict[socket.socket, threading.Thread] = {}
        self._unauthenticated: UnauthenticatedPeers[socket.socket] = UnauthenticatedPeers()
        self._lines = LimitedLines()

    def admit(self, sock: socket.socket, address: Any) -> None:
        """Somebody has connected; who has to make room for that is hung up."""
        thread = threading.Thread(target=self._serve, args=(sock, str(address[0])), daemon=True)
        with self._lock:
            ended = self._unauthenticated.admit(sock, source_network(address))
            self._guests[sock] = thread
        if ended is not None:
            _hang_up(ended)
        thread.start()

    def say_the_rest(self) -> None:
        """Tells of those of whom nothing was said."""
        with self._lock:
            if unsaid := self._lines.unsaid(time.monotonic()):
                self._say(unsaid)

    def close(self) -> None:
        """Hangs all of them up."""
        with self._lock:
            guests = dict(self._guests)
        for sock in guests:
            _hang_up(sock)
        for thread in guests.values():
            thread.join()  # each wait of it ends with its connection

    def _serve(self, sock: socket.socket, host: str) -> None:
        link, is_known = _Link(sock, f"the host at {host}"), False
        try:
            listening = _Listener(self._key, PROBER, os.urandom(NONCE_BYTES), _refusal)
            welcome = _shake_hands(link, listening, HANDSHAKE_S_MAX)
            with self._lock:
                self._unauthenticated.remove(sock)
                is_known = True
            with self._turn:  # its clock runs from the welcome on
                link.begin("the handshake", HANDSHAKE_S_MAX)
                link.send(welcome)
                said = f"{host} measured this link with {_serve(link)} probes"
        except CommError as error:
            said = f"{host}: {error}"
        with self._lock:
            self._unauthenticated.remove(sock)
            del self._guests[sock]
            if is_known or self._lines.admit(time.monotonic()):
                self._say(said)
        sock.close()


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Link:
    """A connection on which every wait has a bound."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        tune(sock)
        self.who = who
        self._sock = sock
        self.begin("nothing", 0.0)

    def begin(self, what: str, seconds: float) -> None:
        """All that follows has to be done within some seconds."""
        self._what, self._seconds = what, seconds
        self._deadline_s = time.monotonic() + seconds

    def send(self, data: bytes) -> None:
        """Sends all of it."""
        with self._bounded():
            self._sock.sendall(data)

    def receive(self, num_bytes: int) -> bytes:
        """Receives up to so many bytes; none at the end."""
        with self._bounded():
            return self._sock.recv(num_bytes)

    def exactly(self, num_bytes: int) -> bytes:
        """Receives so many bytes; none if the other side has ended before the first."""
        found = b""
        while len(found) < num_bytes:
            data = self.receive(num_bytes - len(found))
            if not data:
                if found:
                    raise self._ended(len(found), num_bytes)
                return b""
            found += data
        return found

    def skip(self, num_bytes: int) -> None:
        """Takes so many bytes, and forgets them."""
        left = num_bytes
        while left:
            data = self.receive(min(left, _CHUNK_BYTES))
            if not data:
                raise self._ended(num_bytes - left, num_bytes)
            left -= len(data)

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        left_s = self._deadline_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self._sock.settimeout(left_s)
            yield
        except TimeoutError as error:
            raise ProbeError(
                f"{self.who} has not done its part of {self._what} within {self._seconds:g} s: it has stopped, it "
                "answers another host, or the link is too slow to be measured; try again"
            ) from error
        except OSError as error:
            raise ProbeError(f"the connection to {self.who} broke during {self._what}: {error.strerror}") from error

    def _ended(self, found: int, needed: int) -> ProbeError:
        return ProbeError(f"{self.who} ended the connection during {self._what}, after {found} of {needed} bytes")


def _ask(link: _Link, probe: LinkProbe) -> None:
    """Makes one probe, until its last byte is back."""
    link.begin(f"a probe of {probe.sent_bytes} bytes there and {probe.returned_bytes} back", PROBE_S_MAX)
    link.send(_HEADER.pack(*probe))
    _send_random(link, probe.sent_bytes)
    link.skip(max(1, probe.returned_bytes))


def _serve(link: _Link) -> int:
    """Answers probes until the other side ends; returns their number."""
    count = 0
    while True:
        link.begin("the next probe", IDLE_S_MAX)
        header = link.exactly(_HEADER.size)
        if not header:
            return count
        sent, returned = _HEADER.unpack(header)
        if max(sent, returned) > PROBE_BYTES_MAX:
            raise ProbeError(
                f"{link.who} asked for a probe of {sent} and {returned} bytes, at most {PROBE_BYTES_MAX} are answered"
            )
        link.begin(f"a probe of {sent} bytes there and {returned} back", PROBE_S_MAX)
        link.skip(sent)
        _send_random(link, max(1, returned))
        count += 1


def _send_random(link: _Link, num_bytes: int) -> None:
    some = os.urandom(min(num_bytes, _CHUNK_BYTES))
    for begin in range(0, num_bytes, _CHUNK_BYTES):
        link.send(some[: num_bytes - begin])


def _shake_hands(link: _Link, side: Dialler | Listener, seconds: float) -> bytes:
    """Proves who is here; returns the last message, which is still to be sent."""
    link.begin("the handshake", seconds)
    link.send(side.opening())
    while True:
        data = link.exactly(side.bytes_needed)
        if not data:
            raise ProbeError(
                f"{link.who} ended the connection during the handshake: it does not answer probes, or was given "
                "another key"
            )
        try:
            reply = side.receive(data)
        except AuthenticationError:
            with contextlib.suppress(CommError):
                link.send(side.last_words)
            raise
        if side.done:
            return reply
        link.send(reply)


def _refusal(peer: int) -> str | None:
    return None if peer == PROBER else "it does not measure links"


def _name(peer: int) -> str:
    return "the host at the other end" if peer == PROBER else f"process {peer} of a job"


class _Dialler(Dialler):
    _name = staticmethod(_name)


class _Listener(Listener):
    _name = staticmethod(_name)
