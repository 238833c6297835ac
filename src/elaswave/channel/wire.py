"""One end of a control connection as bytes in, messages out. No sockets, threads or clocks here.

From the outside in: TLS where it is asked for (``elaswave.transport.tls``); the handshake of
``elaswave.transport.handshake``, in which both sides prove that they hold the job's key; then frames:

    version 1 | kind 1 | length 4 | number 8 | payload | mac 16

The payload is one msgpack message of the agreed union, or nothing; a long one is compressed by zlib (decisions, which
name every worker and block, to a tenth or less). The mac covers the frame, its place in the stream
and its direction, under secrets of this connection alone, so that a frame that was changed, replayed, left out or moved
ends the connection. Of a long payload it covers the hash, so that a decision that goes to every worker is read once and
not once for each. Nothing is decoded before its mac is right, and nothing is ever pickled. Before a peer has
proved anything, we hold a few hundred bytes for it.

With TLS the handshake's key also depends on the listener's certificate: a process that terminates TLS in the middle
fails the handshake, also with a certificate of the job's authority.
"""

import functools
import hashlib
import hmac
import os
import ssl
import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from elaswave.errors import AuthenticationError, FrameError
from elaswave.job.keys import KeyRole
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.protocol.messages import PROTOCOL_VERSION
from elaswave.transport.handshake import NONCE_BYTES, Dialler, Key, Listener, secrets_of
from elaswave.transport.tls import Security, bound_key, digest_of_peer, trouble_with

COORDINATOR = 2**32 - 2
"""The coordinator's id in the handshake."""
FIRST_AGENT = 2**31
"""Ids of agents begin here; those below belong to workers."""
FIRST_OPERATOR = 3 * 2**30
"""Ids of operators (`elaswave ctl`) begin here."""
FIRST_READER = FIRST_OPERATOR + 2**29
"""From here on they are of operators that may ask for the status alone."""
FIRST_CHANGER = FIRST_READER + 2**28
"""From here on they are of operators that may also change the job's key."""
MAX_MESSAGE_BYTES = 64 << 20
"""Largest message, encoded: checkpoint items of models with very many tensors."""

COMPRESSED_FROM_BYTES = 1 << 14
"""Messages from this length on are compressed, if that at least halves them."""
_SAMPLE_BYTES = 1 << 12
_COMPRESSED = zlib.compress(b"", 1)[:1]
"""How compressed payloads begin, and none that is a struct in msgpack."""

_HEADER = struct.Struct("<BBIIQ")
_AGE_MS_MAX = 2**32 - 1
_PLACE = struct.Struct("<Q")
_MAC_BYTES = 16
_HASHED_FROM_BYTES = 1 << 12
"""Payloads from here on stand in macs by their hash."""
_T = TypeVar("_T")


def agent_id(incarnation: int) -> int:
    """Computes the id of an agent on control connections.

    Args:
        incarnation: drawn at random when the agent starts, so that two agents of a job hardly ever have the same one.
    """
    return FIRST_AGENT + incarnation % (FIRST_OPERATOR - FIRST_AGENT)


def is_agent(peer: int) -> bool:
    """Tells whether an id is an agent's."""
    return FIRST_AGENT <= peer < FIRST_OPERATOR


_OPERATORS = {
    KeyRole.STEERING: range(FIRST_OPERATOR, FIRST_READER),
    KeyRole.READING: range(FIRST_READER, FIRST_CHANGER),
    KeyRole.CHANGING: range(FIRST_CHANGER, COORDINATOR),
}


def operator_id(number: int, role: KeyRole = KeyRole.STEERING) -> int:
    """Computes the id of an operator on control connections. It says which key it proves.

    Args:
        number: drawn at random, so that two operators of a job hardly ever have the same one.
        role: of the key.
    """
    ids = _OPERATORS[role]
    return ids[number % len(ids)]


def role_of(peer: int) -> KeyRole:
    """Tells of which key a participant of an id must prove that it holds it: a worker and an agent of the joining key,
    an operator of the one that its id says. So nobody is more than its key is for, whatever id it claims."""
    return next((role for role, ids in _OPERATORS.items() if peer in ids), KeyRole.JOINING)


def is_reader(peer: int) -> bool:
    """Tells whether an id is of an operator that may ask for the status alone."""
    return role_of(peer) is KeyRole.READING


def is_operator(peer: int) -> bool:
    """Tells whether an id is an operator's."""
    return FIRST_OPERATOR <= peer < COORDINATOR


def peer_name(peer: int) -> str:
    """Tells what a participant is called in messages."""
    if peer == COORDINATOR:
        return "the coordinator"
    if is_operator(peer):
        return f"operator {peer - FIRST_OPERATOR}"
    return f"worker {peer}" if peer < FIRST_AGENT else f"agent {peer - FIRST_AGENT}"


class _Dialler(Dialler):
    _name = staticmethod(peer_name)


class _Listener(Listener):
    _name = staticmethod(peer_name)


class ControlFrameKind(IntEnum):
    """What a frame is."""

    OPEN = 1
    """The client's first one. Its number tells this client apart from others that have had its id."""
    MESSAGE = 2
    """A message; its number is 0, or counts those that must not be lost."""
    ACK = 3
    """The server has handled all messages up to this number. Also the answer to a heartbeat that asks for one."""
    HEARTBEAT = 4
    """The client is alive; with or without a message. Its number is 1 if it asks for an answer, else 0."""
    STORE_POSITION = 5
    """Where the coordinator's history stands, before what it has led to; a client says the newest one first on each new
    connection."""


class Frame(NamedTuple):
    """One frame that has arrived."""

    kind: ControlFrameKind
    number: int
    message: Any
    """Of the agreed union; None if the frame carries none."""
    age_s: float = 0.0
    """Seconds that it has waited at the sender, which may have lacked a connection."""


class _TlsLayer:
    """TLS between bytes from the socket and the bytes within."""

    def __init__(self, security: Security, host: str | None) -> None:
        self.listener_digest: bytes | None = None
        """Digest of the listener's certificate, once the TLS handshake is done."""
        self._own_digest = security.certificate_digest
        self._listens = host is None
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._object = security.context.wrap_bio(
            self._arrived, self._leaving, server_side=self._listens, server_hostname=host
        )

    def feed(self, data: bytes) -> bytes:
        self._arrived.write(data)
        plain = bytearray()
        try:
            if self.listener_digest is None:
                self._object.do_handshake()
                self.listener_digest = self._own_digest if self._listens else digest_of_peer(self._object)
            while chunk := self._object.read(1 << 16):
                plain += chunk
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise AuthenticationError(trouble_with(error)) from None
        return bytes(plain)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._object.write(rest) :]

    def take(self) -> bytes:
        return self._leaving.read()


class Session(Generic[_T]):
    """One end of a control connection.

    Made by `dialling` or `listening`. The owner of the socket passes received bytes to `feed` and writes what `take`
    returns, after each call.
    """

    def __init__(
        self,
        make_side: Callable[[Callable[[bytes], bytes]], Dialler | Listener],
        key: Key,
        receives: Any,
        security: Security | None,
        host: str | None,
        max_message_bytes: int,
    ) -> None:
        self.open = False
        """The handshake is done: frames may be written."""
        self._make_side = make_side
        secrets_of(key)  # checks them
        self._listens = host is None
        self.max_message_bytes = max_message_bytes
        """Largest message that may arrive; may be changed."""
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(receives)
        self._tls = _TlsLayer(security, host) if security else None
        self._side: Dialler | Listener | None = None
        self._arrived = bytearray()
        self._leaving: list[bytes] = []
        self._keys = (b"", b"")
        self._num_written = 0
        self._num_read = 0
        if self._tls is None:
            self._begin(lambda key: key)
        else:
            self._tls.feed(b"")  # the dialler speaks first

    @classmethod
    def dialling(
        cls,
        key: Key,
        own: int,
        peer: int,
        receives: Any,
        *,
        security: Security | None = None,
        host: str = "",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> "Session[_T]":
        """Makes the end that connects.

        Args:
            key: the job's key, or several.
            own: own id.
            peer: id that must answer.
            receives: union of the message types that may arrive.
            security: TLS, where it is used.
            host: with TLS, what the listener's certificate must name.
            max_message_bytes: largest message that may arrive.
        Raises:
            ValueError: the key is too short.
        """

        def make_side(bind: Callable[[bytes], bytes]) -> Dialler:
            return _Dialler(lambda: secrets_of(key).each(bind), own, peer, os.urandom(NONCE_BYTES))

        return cls(make_side, key, receives, security, host, max_message_bytes)

    @classmethod
    def listening(
        cls,
        key: Key,
        own: int,
        receives: Any,
        refusal: Callable[[int], str | None] = lambda peer: None,
        *,
        key_of: Callable[[int], Key] | None = None,
        security: Security | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> "Session[_T]":
        """Makes the end that has accepted a connection.

        Args:
            key, own, receives, security, max_message_bytes: as for `dialling`.
            refusal: returns why a participant may not connect, or None if it may.
            key_of: gives the keys of which a participant of an id must hold one; None: ``key``, whoever it is.
        Raises:
            ValueError: the key is too short.
        """

        def make_side(bind: Callable[[bytes], bytes]) -> Listener:
            held = None if key_of is None else lambda peer: secrets_of(key_of(peer)).each(bind)
            return _Listener(lambda: secrets_of(key).each(bind), own, os.urandom(NONCE_BYTES), refusal, held)

        return cls(make_side, key, receives, security, None, max_message_bytes)

    @property
    def peer(self) -> int:
        """Id of the other side, once `open`; before that what it claims, or -1."""
        return -1 if self._side is None else self._side.peer

    def feed(self, data: bytes) -> list[Frame]:
        """Takes bytes from the socket; returns the frames that are complete.

        Raises:
            AuthenticationError: the other side does not hold the key, or what came is not what it sent.
            FrameError: an authenticated peer sent what is no message, too long, or of another version.
        """
        if self._tls is not None:
            self._arrived += self._tls.feed(data)
            if self._side is None:
                if self._tls.listener_digest is None:
                    return []
                self._begin(functools.partial(bound_key, certificate_digest=self._tls.listener_digest))
        else:
            self._arrived += data
        if not self.open:
            self._shake_hands()
        return self._frames() if self.open else []

    def write(self, kind: ControlFrameKind, number: int = 0, payload: bytes = b"", age_s: float = 0.0) -> None:
        """Appends a frame to what is to be sent. Only when `open`.

        Args:
            kind, number: of the frame.
            payload: its message.
            age_s: seconds since the message was made.
        """
        assert self.open and len(payload) <= 0xFFFFFFFF
        age_ms = min(_AGE_MS_MAX, max(0, round(age_s * 1e3)))
        header = _HEADER.pack(PROTOCOL_VERSION, kind, age_ms, len(payload), number)
        self._leaving += (header, payload, _mac(self._keys[0], self._num_written, header, _shared_content(payload)))
        self._num_written += 1

    def take(self) -> bytes:
        """Returns what is to be written to the socket now; forgets it."""
        data = b"".join(self._leaving)
        self._leaving.clear()
        if self._tls is None:
            return data
        self._tls.write(data)
        return self._tls.take()

    def _begin(self, bind: Callable[[bytes], bytes]) -> None:
        self._side = self._make_side(bind)
        self._leaving.append(self._side.opening())

    def _shake_hands(self) -> None:
        side = self._side
        assert side is not None
        while not side.done and len(self._arrived) >= side.bytes_needed:
            data = bytes(self._arrived[: side.bytes_needed])
            del self._arrived[: len(data)]
            try:
                self._leaving.append(side.receive(data))
            except AuthenticationError:
                self._leaving.append(side.last_words)
                raise
            if self._listens and self._arrived:
                raise AuthenticationError("it spoke out of turn during the handshake: it is not an elaswave process")
        if side.done:
            dialler, listener = side.secret(b"dialler's frames"), side.secret(b"listener's frames")
            self._keys = (listener, dialler) if self._listens else (dialler, listener)
            self.open = True

    def _frames(self) -> list[Frame]:
        frames = []
        at = 0
        while len(self._arrived) - at >= _HEADER.size:
            version, kind, age_ms, length, number = _HEADER.unpack_from(self._arrived, at)
            if version != PROTOCOL_VERSION:
                raise FrameError(
                    f"{peer_name(self.peer)} speaks version {version} of the control protocol, this process "
                    f"{PROTOCOL_VERSION}: install one release everywhere"
                )
            if length > self.max_message_bytes:
                raise FrameError(
                    f"a message of {length} bytes from {peer_name(self.peer)}; at most {self.max_message_bytes} are "
                    "allowed"
                )
            end = at + _HEADER.size + length
            if len(self._arrived) < end + _MAC_BYTES:
                break
            frame = bytes(memoryview(self._arrived)[at : end + _MAC_BYTES])
            header, payload, mac = frame[: _HEADER.size], frame[_HEADER.size : -_MAC_BYTES], frame[-_MAC_BYTES:]
            if not hmac.compare_digest(mac, _mac(self._keys[1], self._num_read, header, _content(payload))):
                raise AuthenticationError(
                    f"a frame that {peer_name(self.peer)} did not send in this place: it was changed, replayed or "
                    "moved on its way"
                )
            self._num_read += 1
            at = end + _MAC_BYTES
            frames.append(self._frame(kind, number, payload, age_ms / 1e3))
        del self._arrived[:at]
        return frames

    def _frame(self, kind: int, number: int, payload: bytes, age_s: float) -> Frame:
        try:
            is_store_position = kind == ControlFrameKind.STORE_POSITION
            decoder = _position_decoder if is_store_position else self._decoder
            message = (
                decoder.decode(unpacked(payload, self.max_message_bytes)) if payload or is_store_position else None
            )
            return Frame(ControlFrameKind(kind), number, message, age_s)
        except (msgspec.MsgspecError, ValueError, RecursionError, zlib.error) as error:
            raise FrameError(f"a malformed message from {peer_name(self.peer)}: {error}") from error


def unpacked(payload: bytes, max_message_bytes: int) -> bytes:
    """Unpacks a payload as it was before it was compressed; of one that is longer than may be, no more is unpacked.

    Raises:
        ValueError: it is longer, or does not end where it should.
        zlib.error: it is damaged.
    """
    if payload[:1] != _COMPRESSED:
        return payload
    unpacking = zlib.decompressobj()
    whole = unpacking.decompress(payload, max_message_bytes + 1)
    if len(whole) > max_message_bytes:
        raise ValueError(f"it is longer than {max_message_bytes} bytes when it is unpacked")
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError("it is compressed, and does not end where its frame ends")
    return whole


def encode_payload(message: msgspec.Struct, max_message_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Encodes a message as a payload.

    Raises:
        FrameError: it is larger than may be sent.
    """
    payload = _encoder.encode(message)
    if len(payload) > max_message_bytes:
        raise FrameError(
            f"a {type(message).__name__} of {len(payload)} bytes is larger than the {max_message_bytes} that a control "
            "message may have"
        )
    if len(payload) < COMPRESSED_FROM_BYTES or not _is_worth_compressing(payload):
        return payload
    return zlib.compress(payload, 1)


def _is_worth_compressing(payload: bytes) -> bool:
    """Judges by a sample from the middle: what does not shrink to a half costs more time than it saves bytes."""
    middle = len(payload) // 2
    sample = payload[middle : middle + _SAMPLE_BYTES]
    return len(zlib.compress(sample, 1)) < len(sample) // 2


_encoder = msgspec.msgpack.Encoder()
_position_decoder = msgspec.msgpack.Decoder(StorePosition)


def _content(payload: bytes) -> bytes:
    """Returns what a mac covers of a payload, whose length is in the header: a short one itself."""
    return payload if len(payload) < _HASHED_FROM_BYTES else hashlib.blake2b(payload, digest_size=32).digest()


_shared_content = functools.lru_cache(maxsize=1)(_content)
"""One message goes to one peer after the other."""


def _mac(key: bytes, place: int, header: bytes, content: bytes) -> bytes:
    mac = hashlib.blake2b(_PLACE.pack(place), digest_size=_MAC_BYTES, key=key)
    mac.update(header)
    mac.update(content)
    return mac.digest()
