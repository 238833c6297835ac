"""How two processes prove to each other that they hold the job's key, before a connection carries its first frame.

Sans-IO: both sides are fed the bytes that have come and return the bytes to send; no sockets, clocks or retries here.
HMAC-SHA256 challenge and response over fresh nonces of both sides, both ids and the protocol version:

    dialler  -> listener  HELLO   magic 8 | version 2 | dialler id 4 | listener id 4 | nonce 24 | sign 8
    listener -> dialler   PROOF   magic 8 | version 2 | listener id 4 | nonce 24 | sign 8 | mac("listener" + transcript)
    dialler  -> listener  ANSWER  mac("dialler" + transcript)
    listener -> dialler   WELCOME mac("welcome" + transcript)

A dialler that does not believe the PROOF proves nothing: it may say so by `DISBELIEF` in place of the ANSWER, so that
the reason is known on both sides, and ends the connection.

While the job's key is changed, a side holds several (`Secrets`). The sign, which is a mac of the rest of the HELLO,
says by which one the dialler would rather speak; the listener proves that one, or else its own first one. The dialler
takes a proof of any that it holds, and from there on both speak by it. So two sides meet if one of them holds the first
key of the other. They may take other keys in between: the listener goes by those of when the HELLO comes, the dialler
believes those of when it was sent and of when the PROOF comes. The sign of the PROOF is random, unless the dialler has
signed by a key that was retired: then it says so by that key, for a dialler that has no other one.

Each message has a fixed size, so an unauthenticated peer can make us hold at most 64 bytes. Every proof covers the
whole transcript and the speaker's role, so that a replayed, reflected or redirected message proves nothing. From the
same transcript both sides can derive secrets of this connection alone (``secret``), with which frames can be
authenticated.

Connections that have not yet proved that they hold the key are bounded at both entrances of a job, the data plane's
(`elaswave.transport.stream`) and the control plane's (`elaswave.channel.server`): at most so many at a time
(`UnauthenticatedPeers`), and few lines of log about them (`LimitedLines`). How long a handshake may take, and how a
connection is ended, is theirs.
"""

import hashlib
import hmac
import ipaddress
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from elaswave.errors import AuthenticationError

MAGIC = b"ELWLINK\n"
VERSION = 3
NONCE_BYTES = 32
_SIGN_BYTES = 8
MIN_KEY_BYTES = 16
_HELLO = struct.Struct(f"<8sHII{NONCE_BYTES}s")
_PROOF = struct.Struct(f"<8sHI{NONCE_BYTES}s32s")
_MAC_BYTES = 32
DISBELIEF = bytes(_MAC_BYTES)
"""No mac that anybody meets."""
RETIRED = (
    "the job's key was changed while the job runs (elaswave keys rotate), and this process holds the old one, or one "
    "that was made of it: give it the new one, or make the lesser key anew of that"
)
"""What a dialler says that was told so."""


def check_key(key: bytes) -> bytes:
    """Return the key of a job if it can be one.

    Raises:
        ValueError: shorter than 16 bytes.
    """
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a job's key has {len(key)} bytes, at least {MIN_KEY_BYTES} random ones are needed")
    return bytes(key)


class Secrets(NamedTuple):
    """The keys that one side of handshakes holds: one, and several while the job's is changed."""

    accepted: tuple[bytes, ...]
    """By each of them a handshake succeeds; the first one is preferred."""
    retired: tuple[bytes, ...] = ()
    """By none of these; who holds one is told that it was changed."""

    def each(self, change: Callable[[bytes], bytes]) -> "Secrets":
        """Returns what is made of each of them."""
        return Secrets(tuple(map(change, self.accepted)), tuple(map(change, self.retired)))

    @property
    def name(self) -> bytes:
        """Equal for those who accept the same keys in the same order; tells nothing of these."""
        return hashlib.sha256(b"".join(derived(key, "name") for key in self.accepted)).digest()[:16]


class KeyRing:
    """The secrets of one process, for all of its threads: replaced as a whole, and handshakes that begin later go by
    the new ones. Connections that stand are not touched.

    Args:
        now: those at first.
    """

    def __init__(self, now: Secrets) -> None:
        self.now = now


Key = bytes | Secrets | KeyRing | Callable[[], Secrets]
"""What one side of handshakes goes by. Bytes: one key, as long as the process lives. A function gives those of now."""


def secrets_of(key: Key) -> Secrets:
    """Returns the secrets at present.

    Raises:
        ValueError: one is shorter than 16 bytes, or there is none.
    """
    if isinstance(key, KeyRing):
        key = key.now
    elif callable(key):
        key = key()
    secrets = Secrets((key,)) if isinstance(key, bytes | bytearray) else key
    if not secrets.accepted:
        raise ValueError("a side of a handshake needs a key, and was given none")
    for each in secrets.accepted:
        check_key(each)
    return secrets


def derived(key: bytes, purpose: str) -> bytes:
    """Derives a key for one purpose, of 32 bytes. Who holds it cannot compute the job's, nor that of another purpose.

    Args:
        key: the job's.
        purpose: a word.
    """
    return hmac.digest(key, b"elaswave " + purpose.encode(), "sha256")


def worker_name(peer: int) -> str:
    """Tells what a worker is called in messages."""
    return f"worker {peer}"


class Dialler:
    """The side that connects (the lower worker id). Where ids are not workers', a subclass names them.

    Args:
        key: the job's key, or several.
        worker: own id.
        peer: id of the worker that is dialled.
        nonce: 32 fresh random bytes, of which 24 are sent.
    """

    _name = staticmethod(worker_name)

    def __init__(self, key: Key, worker: int, peer: int, nonce: bytes) -> None:
        self.peer = peer
        self.done = False
        self.bytes_needed = _PROOF.size
        self.last_words = b""
        """What the listener may be told once it was not believed."""
        self._held = key
        self._secrets = secrets_of(key)
        """Of when the HELLO is sent."""
        self._key = b""
        """The one that the listener has proved."""
        # The sign stands in place of the nonce's last bytes: one field of the message has both.
        unsigned = _HELLO.pack(MAGIC, VERSION, worker, peer, nonce)[:-_SIGN_BYTES]
        self._hello = unsigned + _sign(self._secrets.accepted[0], b"hello", unsigned)
        self._transcript = b""

    def opening(self) -> bytes:
        """Returns what to send first."""
        return self._hello

    def receive(self, data: bytes) -> bytes:
        """Take exactly ``bytes_needed`` bytes; returns what to send.

        Raises:
            AuthenticationError: the listener does not hold the key, has another id, or speaks another version; or it
                says that the key was changed.
        """
        assert len(data) == self.bytes_needed and not self.done
        if not self._transcript:
            magic, version, listener, nonce, mac = _PROOF.unpack(data)
            _check_magic(magic, version, self._name(self.peer))
            self._transcript = self._hello + nonce
            found = self._proved(mac)
            if listener != self.peer or found is None:
                self.last_words = DISBELIEF
                # Only who has held our key can tell us that it was retired: a stranger cannot make us believe that.
                signs = (_sign(key, b"retired", self._transcript[:-_SIGN_BYTES]) for key in self._secrets.accepted)
                if any(hmac.compare_digest(nonce[-_SIGN_BYTES:], sign) for sign in signs):
                    raise AuthenticationError(RETIRED)
                raise AuthenticationError(
                    f"the process that listens at the address of {self._name(self.peer)} does not hold this job's key: "
                    "check the address and that all processes were given the same key"
                )
            self._key = found
            self.bytes_needed = _MAC_BYTES
            return _mac(self._key, b"dialler", self._transcript)
        if not hmac.compare_digest(data, _mac(self._key, b"welcome", self._transcript)):
            raise AuthenticationError(f"{self._name(self.peer)} ended the handshake with a wrong proof: dial it again")
        self.done = True
        self.bytes_needed = 0
        return b""

    def _proved(self, mac: bytes) -> bytes | None:
        """Finds the key by which the listener has made its proof; None: by none of ours. It may have been told of a
        change after we had sent the HELLO, as we have been."""
        held = dict.fromkeys((*self._secrets.accepted, *secrets_of(self._held).accepted))
        macs = ((key, _mac(key, b"listener", self._transcript)) for key in held)
        return next((key for key, right in macs if hmac.compare_digest(mac, right)), None)

    def secret(self, purpose: bytes) -> bytes:
        """Derives 32 bytes that only the two ends of this connection know, for one purpose; it is to be called once
        ``done``."""
        return _secret(self._key, self._transcript, purpose)


class Listener:
    """The side that accepts (the higher worker id). Where ids are not workers', a subclass names them.

    Args:
        key: the job's key, or several.
        worker: own id.
        nonce: 32 fresh random bytes.
        refusal: returns why a worker may not link with us, or None if it may.
        key_of: gives the keys of which the dialler of an id must hold one; None: ``key``, whoever it is.
    """

    _name = staticmethod(worker_name)

    def __init__(
        self,
        key: Key,
        worker: int,
        nonce: bytes,
        refusal: Callable[[int], str | None],
        key_of: Callable[[int], Key] | None = None,
    ) -> None:
        self.peer = -1
        """The id that the dialler claims; to be believed once ``done``."""
        self.done = False
        self.bytes_needed = _HELLO.size
        self.last_words = b""
        """None."""
        secrets_of(key)  # checks them
        self._held = key
        self._key_of = key_of
        self._key = b""
        """The one that was proved to the dialler."""
        self._is_old = False
        """Whether the dialler has signed by one that was retired."""
        self._worker = worker
        self._nonce = nonce
        self._refusal = refusal
        self._transcript = b""

    def opening(self) -> bytes:
        """Returns what to send first: nothing."""
        return b""

    def receive(self, data: bytes) -> bytes:
        """Take exactly ``bytes_needed`` bytes; returns what to send.

        Raises:
            AuthenticationError: the dialler does not hold the key, wants another worker, may not link with us, or
                speaks another version.
        """
        assert len(data) == self.bytes_needed and not self.done
        if not self._transcript:
            magic, version, dialler, listener, _ = _HELLO.unpack(data)
            _check_magic(magic, version, "a dialler")
            if listener != self._worker:
                raise AuthenticationError(
                    f"{self._name(dialler)} dialled {self._name(listener)} but reached {self._name(self._worker)}"
                )
            self.peer = dialler
            self._choose(data)
            self._transcript = data + self._nonce
            self.bytes_needed = _MAC_BYTES
            mac = _mac(self._key, b"listener", self._transcript)
            return _PROOF.pack(MAGIC, VERSION, self._worker, self._nonce, mac)
        if data == DISBELIEF and self._is_old:
            raise AuthenticationError(
                f"{self._name(self.peer)} holds a key of this job that was changed while it runs (elaswave keys "
                "rotate): give it the new one"
            )
        if data == DISBELIEF:
            raise AuthenticationError(
                f"{self._name(self.peer)} was given another key than this process, and has ended the handshake: give "
                "all processes of the job one key"
            )
        if not hmac.compare_digest(data, _mac(self._key, b"dialler", self._transcript)):
            raise AuthenticationError(
                f"the process that claims to be {self._name(self.peer)} does not hold this job's key"
            )
        # Asked only now: before its proof the id was a mere claim.
        reason = self._refusal(self.peer)
        if reason is not None:
            raise AuthenticationError(f"{self._name(self.peer)} may not link with {self._name(self._worker)}: {reason}")
        self.done = True
        self.bytes_needed = 0
        return _mac(self._key, b"welcome", self._transcript)

    def _choose(self, hello: bytes) -> None:
        """Chooses the key by which the dialler has signed its HELLO, or else the first one. If that was one of those
        that are retired, it is to learn that."""
        accepted, retired = secrets_of(self._held if self._key_of is None else self._key_of(self.peer))
        unsigned, sign = hello[:-_SIGN_BYTES], hello[-_SIGN_BYTES:]
        found = (key for key in (*accepted, *retired) if hmac.compare_digest(sign, _sign(key, b"hello", unsigned)))
        key = next(found, accepted[0])
        self._is_old = key not in accepted
        # Nobody speaks by a retired key any more: who holds it alone would be let in.
        self._key = accepted[0] if self._is_old else key
        if self._is_old:
            nonce = self._nonce[:-_SIGN_BYTES]
            self._nonce = nonce + _sign(key, b"retired", hello + nonce)

    def secret(self, purpose: bytes) -> bytes:
        """Derives 32 bytes that only the two ends of this connection know, for one purpose; it is to be called once
        ``done``."""
        return _secret(self._key, self._transcript, purpose)


def _check_magic(magic: bytes, version: int, who: str) -> None:
    if magic != MAGIC:
        raise AuthenticationError(f"{who} began with {magic!r} instead of {MAGIC!r}: it is not an elaswave worker")
    if version != VERSION:
        raise AuthenticationError(
            f"{who} speaks handshake version {version}, this worker {VERSION}: install one release everywhere"
        )


def _sign(key: bytes, role: bytes, unsigned: bytes) -> bytes:
    return _mac(key, role, unsigned)[:_SIGN_BYTES]


def _mac(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + transcript, hashlib.sha256)


def _secret(key: bytes, transcript: bytes, purpose: bytes) -> bytes:
    return _mac(key, b"secret " + purpose, transcript)


MAX_UNAUTHENTICATED = 128
"""Connections in the handshake at a time; one more ends another."""
CROWDED_OUT = "too many handshakes at a time; one of those that have said nothing, from where most come, is ended"
MAX_LINES_PER_PERIOD = 20
"""Lines of log; more in `PERIOD_S` are only counted, so that a flood of connections is no flood of lines."""
PERIOD_S = 10.0

_T = TypeVar("_T")


def source_network(address: Any) -> str:
    """Tells where a connection comes from, as far as its sender cannot choose: an IPv4 address, an IPv6 network of 64
    bits.

    Args:
        address: of the other side, as `socket.accept` returns it; of a Unix socket: one for all.
    """
    if not isinstance(address, tuple) or not address:
        return ""
    try:
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return str(address[0])
    return str(ipaddress.ip_network((int(found), 64), strict=False) if found.version == 6 else found)


class UnauthenticatedPeers(Generic[_T]):
    """The connections in the handshake, oldest first."""

    def __init__(self) -> None:
        self._sources: dict[_T, str] = {}
        self._silent: set[_T] = set()
        """Those that have said nothing yet."""

    def __iter__(self) -> Iterator[_T]:
        return iter(list(self._sources))

    def __contains__(self, connection: _T) -> bool:
        return connection in self._sources

    def admit(self, connection: _T, source: str = "") -> _T | None:
        """Adds a connection.

        Args:
            connection: the new one; it has said nothing.
            source: as of `source_of`.
        Returns:
            The one that must end for it, which is no longer among them: of those that have said nothing, if there are
            any, the oldest from the source that has most.
        """
        ended = None
        if len(self._sources) >= MAX_UNAUTHENTICATED:
            among = [each for each in self._sources if each in self._silent] or list(self._sources)
            most = Counter(self._sources[each] for each in among).most_common(1)[0][0]
            ended = next(each for each in among if self._sources[each] == most)
            self.remove(ended)
        self._sources[connection] = source
        self._silent.add(connection)
        return ended

    def spoke(self, connection: _T) -> None:
        """Something has come from it."""
        self._silent.discard(connection)

    def remove(self, connection: _T) -> None:
        """The handshake is over, or the connection; nothing happens if it was not among them."""
        self._sources.pop(connection, None)
        self._silent.discard(connection)


class LimitedLines:
    """Which lines about strangers are written, and how many were not."""

    def __init__(self) -> None:
        self.ends_s: float | None = None
        """When `unsaid` has something to tell at the earliest, by the caller's clock; None: there is nothing."""
        self._num_lines = 0
        self._period_ends_s = 0.0

    def admit(self, now_s: float) -> bool:
        """Says whether one more line is to be written now."""
        if not self._num_lines:
            self._period_ends_s = now_s + PERIOD_S
        self._num_lines += 1
        if self._num_lines <= MAX_LINES_PER_PERIOD:
            return True
        self.ends_s = self._period_ends_s
        return False

    def unsaid(self, now_s: float) -> str:
        """Returns a line about those that were not written in a period that is over; empty: there are none, or it is
        not."""
        if not self._num_lines or now_s < self._period_ends_s:
            return ""
        left, self._num_lines, self.ends_s = self._num_lines - MAX_LINES_PER_PERIOD, 0, None
        return f"{left} more connections were turned away within {PERIOD_S:g} s" if left > 0 else ""
