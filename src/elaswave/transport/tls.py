"""TLS on the connections of a job: the certificate files, what each side checks, and a socket inside TLS.

Both sides show a certificate of the job's own authority. Who dials also checks that the listener's certificate names
the host that was dialled and is one for servers; who listens checks that the dialler's is one for clients. Inside, both
prove that they hold the job's key, and that proof covers the listener's certificate (`bound_key`).

TLS 1.3 only. OpenSSL does the work, in this process: a record is encrypted from the tensor's own memory into OpenSSL's
buffer, and decrypted into the tensor's own memory.
"""

import hashlib
import hmac
import os
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from elaswave.errors import ConfigError
from elaswave.untrusted import open_regular, read_text

RECORD_BYTES = 1 << 14
"""Of the largest TLS record (RFC 8446, section 5.1); OpenSSL writes one per call."""


class TlsError(ConnectionError):
    """The other side does not speak TLS, or shows a certificate that is not accepted, or does not accept ours."""


class Security(NamedTuple):
    """TLS as one side uses it."""

    context: ssl.SSLContext
    certificate_digest: bytes
    """Of the own certificate."""


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """Certificate files of one host, in PEM."""

    certificate: str
    """The certificate, followed by those between it and the authority."""
    key: str
    """Its private key, without a passphrase."""
    authority: str
    """The authority whose signature is asked of the other side."""

    def listening(self) -> Security:
        """Loads what the listener needs.

        Raises:
            ConfigError: files that cannot be read or do not belong together.
        """
        return self._load(ssl.PROTOCOL_TLS_SERVER)

    def dialling(self) -> Security:
        """Loads what a dialler needs.

        Raises:
            ConfigError: files that cannot be read or do not belong together.
        """
        return self._load(ssl.PROTOCOL_TLS_CLIENT)

    def check(self, host: str) -> None:
        """Lets both sides of this host shake hands in memory, as its peers will.

        Args:
            host: what its listeners are dialled as.
        Raises:
            ConfigError: the files cannot be used, or a peer would not accept them: expired, of another authority,
                without that name.
        """
        to_dialler, to_listener = ssl.MemoryBIO(), ssl.MemoryBIO()
        dialler = self.dialling().context.wrap_bio(to_dialler, to_listener, server_hostname=host)
        listener = self.listening().context.wrap_bio(to_listener, to_dialler, server_side=True)
        waiting = [dialler, listener]
        try:
            while waiting:
                side = waiting.pop(0)
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    waiting.append(side)
        except ssl.SSLError as error:
            raise ConfigError(
                [
                    f"TLS: {self.certificate} cannot serve {host}: {tls_reason(error)}; make certificates for this "
                    "host "
                    "with `elaswave keys`, or give the folder that holds them as net.keys"
                ]
            ) from None

    def _load(self, protocol: int) -> Security:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no connection is ever resumed
        reading = self.certificate
        try:
            for path in (self.key, self.authority):  # which openssl opens by itself, and would wait at a pipe
                os.close(open_regular(path))
            text = read_text(self.certificate)
            first = text[: text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
            certificate = ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :])
            # An encrypted key must not make a process wait for a passphrase on its terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
            reading = self.authority
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise ConfigError(
                [f"TLS: {reading} and {self.key} cannot be used: {error}; PEM files that belong together are needed"]
            ) from None
        return Security(context, hashlib.sha256(certificate).digest())


def bound_key(key: bytes, certificate_digest: bytes) -> bytes:
    """Derives the key of the handshake inside TLS: who ends TLS in the middle shows another certificate, and fails.

    Args:
        key: the job's.
        certificate_digest: of the listener's certificate.
    """
    return hmac.digest(key, b"tls" + certificate_digest, hashlib.sha256)


def digest_of_peer(connection: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Computes the digest of the other side's certificate."""
    return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").digest()


def tls_reason(error: ssl.SSLError) -> str:
    """Tells what is wrong, in one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is refused: {error.verify_message}"
    return error.reason or error.strerror or str(error)


def trouble_with(error: ssl.SSLError) -> str:
    """Tells what is wrong with a connection, and what both sides need."""
    return f"TLS failed ({tls_reason(error)}): both sides must use it, with certificates of one authority"


_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""The connection is over, for whatever reason: nothing was said against a certificate."""


def tls_failure(error: ssl.SSLError) -> ConnectionError:
    """Makes the error that a failure of TLS means: a connection that has ended, and may be dialled again, or a
    `TlsError`."""
    if isinstance(error, _ENDED):
        return ConnectionError(
            f"the connection ended inside of TLS ({tls_reason(error)}); if it does so each time, look whether both "
            "sides use TLS, with certificates of one authority"
        )
    return TlsError(trouble_with(error))


class TlsSocket:
    """A connection inside TLS, with those methods of a non-blocking socket that links and handshakes use.

    A record that the system does not take whole is held here: its bytes count as sent, since OpenSSL wants the same
    ones again, whatever the caller's memory holds by then.

    Args:
        sock: connected; belongs to this object from now on.
        security: of this side.
        host: what the listener was dialled as; None: this is the listening side.
    Raises:
        OSError: the connection has ended.
    """

    def __init__(self, sock: socket.socket, security: Security, host: str | None) -> None:
        self._listens = host is None
        self._own_digest = security.certificate_digest
        self._held = b""
        self._socket = security.context.wrap_socket(
            sock, server_side=self._listens, do_handshake_on_connect=False, server_hostname=host
        )

    def shake_hands(self) -> bool | None:
        """Goes on with the TLS handshake.

        Returns:
            None once it is done; else whether it waits for room to write, and not for what the other side says.
        Raises:
            TlsError: one side does not accept the other.
            OSError: the connection has ended.
        """
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            return True
        except ssl.SSLError as error:
            raise tls_failure(error) from None
        return None

    @property
    def listener_digest(self) -> bytes:
        """Digest of the listener's certificate, once the handshake is done."""
        return self._own_digest if self._listens else digest_of_peer(self._socket)

    @property
    def holds(self) -> bool:
        """Whether a record waits for room in the system's buffer."""
        return bool(self._held)

    @property
    def pending(self) -> bool:
        """Whether there are bytes to be received that the system knows nothing of any more."""
        return bool(self._socket.pending())

    def fileno(self) -> int:
        """Returns the socket's descriptor."""
        return self._socket.fileno()

    @property
    def family(self) -> int:
        """Of its address."""
        return self._socket.family

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        """Sets an option as that of a socket does."""
        self._socket.setsockopt(level, option, value)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def send(self, data: bytes) -> int:
        """Sends one small message, whole.

        Raises:
            BlockingIOError: there is no room.
            OSError: the connection has ended.
        """
        sent = self.sendmsg([memoryview(data)])
        if self._held:
            raise BlockingIOError
        return sent

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Sends as much as there is room for, and at most one record more.

        Raises:
            BlockingIOError: there is room for nothing.
            OSError: the connection has ended.
        """
        if self._held:
            held, self._held = self._held, b""
            self._write(held)
            if self._held:
                raise BlockingIOError
        total = 0
        place, offset = 0, 0
        while place < len(views) and not self._held:
            record = views[place][offset : offset + RECORD_BYTES]
            offset += len(record)
            if offset == len(views[place]):
                place, offset = place + 1, 0
                if len(record) < RECORD_BYTES and place < len(views):  # a header travels with what follows it
                    more = views[place][: RECORD_BYTES - len(record)]
                    record = memoryview(b"".join((record, more)))
                    offset = len(more)
                    if offset == len(views[place]):
                        place, offset = place + 1, 0
            if record:
                self._write(record)
                total += len(record)
        return total

    def _write(self, record: bytes | memoryview) -> None:
        try:
            self._socket.send(record)
        except ssl.SSLWantWriteError:
            self._held = bytes(record)
        except ssl.SSLError as error:
            raise tls_failure(error) from None

    def recv(self, num_bytes: int) -> bytes:
        """Receives at most so many bytes; none at the end of the connection.

        Raises:
            BlockingIOError: nothing has come.
            OSError: the connection has ended.
        """
        data = bytearray(num_bytes)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: bytearray | memoryview, num_bytes: int | None = None) -> int:
        """Receives into memory; returns how many bytes, 0 at the end of the connection.

        Raises:
            BlockingIOError: nothing has come.
            OSError: the connection has ended.
        """
        try:
            return self._socket.recv_into(buffer, num_bytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise tls_failure(error) from None

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        """Receives into the first of several pieces of memory: a record ends anywhere, and the caller comes again."""
        return (self.recv_into(views[0]),)
