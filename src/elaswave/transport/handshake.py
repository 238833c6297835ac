"""How two workers prove to each other that they hold the job's key, before a link carries its first frame.

Sans-IO: both sides are fed the bytes that have come and return the bytes to send; no sockets, clocks or retries here.
HMAC-SHA256 challenge and response over fresh nonces of both sides, both ids and the protocol version:

    dialler  -> listener   HELLO    magic 8 | version 2 | dialler id 4 | listener id 4 | nonce 32
    listener -> dialler    PROOF    magic 8 | version 2 | listener id 4 | nonce 32 | mac("listener" + transcript)
    dialler  -> listener   ANSWER   mac("dialler" + transcript)
    listener -> dialler    WELCOME  mac("welcome" + transcript)

A dialler that does not believe the PROOF proves nothing: it may say so by `DISBELIEF` in place of the ANSWER, so that
the reason is known on both sides, and ends the connection.

Each message has a fixed size, so an unauthenticated peer can make us hold at most 64 bytes. Every proof covers the
whole transcript and the speaker's role, so that a replayed, reflected or redirected message proves nothing. From the
same transcript both sides can derive secrets of this connection alone (``secret``), with which frames can be
authenticated.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable

from elaswave.errors import AuthenticationError

MAGIC = b"ELWLINK\n"
VERSION = 2
NONCE_BYTES = 32
MIN_KEY_BYTES = 16
_HELLO = struct.Struct(f"<8sHII{NONCE_BYTES}s")
_PROOF = struct.Struct(f"<8sHI{NONCE_BYTES}s32s")
_MAC_BYTES = 32
DISBELIEF = bytes(_MAC_BYTES)
"""No mac that anybody meets."""


def check_key(key: bytes) -> bytes:
    """Return the key of a job if it can be one.

    Raises:
        ValueError: shorter than 16 bytes.
    """
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a job's key has {len(key)} bytes, at least {MIN_KEY_BYTES} random ones are needed")
    return bytes(key)


def derived(key: bytes, purpose: str) -> bytes:
    """A key for one purpose, of 32 bytes. Who holds it cannot compute the job's, nor that of another purpose.

    Args:
        key: the job's.
        purpose: a word.
    """
    return hmac.digest(key, b"elaswave " + purpose.encode(), "sha256")


def worker_name(worker: int) -> str:
    """What a worker is called in messages."""
    return f"worker {worker}"


class Dialler:
    """The side that connects (the lower worker id).

    Args:
        key: the job's key.
        worker: own id.
        peer: id of the worker that is dialled.
        nonce: 32 fresh random bytes.
        name: what an id is called in messages.
    """

    def __init__(
        self, key: bytes, worker: int, peer: int, nonce: bytes, name: Callable[[int], str] = worker_name
    ) -> None:
        self.peer = peer
        self.done = False
        self.bytes_needed = _PROOF.size
        self.last_words = b""
        """What the listener may be told once it was not believed."""
        self._key = key
        self._name = name
        self._hello = _HELLO.pack(MAGIC, VERSION, worker, peer, nonce)
        self._transcript = b""

    def opening(self) -> bytes:
        """What to send first."""
        return self._hello

    def receive(self, data: bytes) -> bytes:
        """Take exactly ``bytes_needed`` bytes; returns what to send.

        Raises:
            AuthenticationError: the listener does not hold the key, has another id, or speaks another version.
        """
        assert len(data) == self.bytes_needed and not self.done
        if not self._transcript:
            magic, version, listener, nonce, mac = _PROOF.unpack(data)
            _check_magic(magic, version, self._name(self.peer))
            self._transcript = self._hello + nonce
            if listener != self.peer or not hmac.compare_digest(mac, _mac(self._key, b"listener", self._transcript)):
                self.last_words = DISBELIEF
                raise AuthenticationError(
                    f"the process that listens at the address of {self._name(self.peer)} does not hold this job's key: "
                    "check the address and that all processes were given the same key"
                )
            self.bytes_needed = _MAC_BYTES
            return _mac(self._key, b"dialler", self._transcript)
        if not hmac.compare_digest(data, _mac(self._key, b"welcome", self._transcript)):
            raise AuthenticationError(f"{self._name(self.peer)} ended the handshake with a wrong proof: dial it again")
        self.done = True
        self.bytes_needed = 0
        return b""

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that only the two ends of this connection know, for one purpose; to be called once ``done``."""
        return _secret(self._key, self._transcript, purpose)


class Listener:
    """The side that accepts (the higher worker id).

    Args:
        key: the job's key.
        worker: own id.
        nonce: 32 fresh random bytes.
        refusal: returns why a worker may not link with us, or None if it may.
        name: what an id is called in messages.
        key_of: gives the key that the dialler of an id must hold; None: the job's, whoever it is.
    """

    def __init__(
        self,
        key: bytes,
        worker: int,
        nonce: bytes,
        refusal: Callable[[int], str | None],
        name: Callable[[int], str] = worker_name,
        key_of: Callable[[int], bytes] | None = None,
    ) -> None:
        self.peer = -1
        """The id that the dialler claims; to be believed once ``done``."""
        self.done = False
        self.bytes_needed = _HELLO.size
        self.last_words = b""
        """None."""
        self._key = key
        self._key_of = key_of
        self._worker = worker
        self._nonce = nonce
        self._refusal = refusal
        self._name = name
        self._transcript = b""

    def opening(self) -> bytes:
        """What to send first: nothing."""
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
            self._key = self._key if self._key_of is None else self._key_of(dialler)
            self._transcript = data + self._nonce
            self.bytes_needed = _MAC_BYTES
            mac = _mac(self._key, b"listener", self._transcript)
            return _PROOF.pack(MAGIC, VERSION, self._worker, self._nonce, mac)
        if data == DISBELIEF:
            raise AuthenticationError(
                f"{self._name(self.peer)} was given another key than this process, and has ended the handshake: give "
                "all processes of the job one key"
            )
        if not hmac.compare_digest(data, _mac(self._key, b"dialler", self._transcript)):
            raise AuthenticationError(
                f"the process that claims to be {self._name(self.peer)} does not hold this job's key"
            )
        reason = self._refusal(self.peer)
        if reason is not None:
            raise AuthenticationError(f"{self._name(self.peer)} may not link with {self._name(self._worker)}: {reason}")
        self.done = True
        self.bytes_needed = 0
        return _mac(self._key, b"welcome", self._transcript)

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that only the two ends of this connection know, for one purpose; to be called once ``done``."""
        return _secret(self._key, self._transcript, purpose)


def _check_magic(magic: bytes, version: int, who: str) -> None:
    if magic != MAGIC:
        raise AuthenticationError(f"{who} began with {magic!r} instead of {MAGIC!r}: it is not an elaswave worker")
    if version != VERSION:
        raise AuthenticationError(
            f"{who} speaks handshake version {version}, this worker {VERSION}: install one release everywhere"
        )


def _mac(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + transcript, hashlib.sha256)


def _secret(key: bytes, transcript: bytes, purpose: bytes) -> bytes:
    return _mac(key, b"secret " + purpose, transcript)
