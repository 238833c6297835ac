"""The job's key and certificate files: found, checked, read. `elaswave.control.key_making` makes them.

No argument, log, file of the run or environment of a child ever holds the key. What a person gives it with stands in
`elaswave.api.environment`; a job that is given none makes one.
"""

import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elaswave.errors import UsageError
from elaswave.transport.handshake import MIN_KEY_BYTES
from elaswave.transport.tls import Tls

if TYPE_CHECKING:  # numpy would come along: whoever prepares the environment imports this, before any such library
    from elaswave.config.schema import NetConfig

JOB_KEY_FILE = "job.key"
CERTIFICATE_FILE = "certificate.pem"
CERTIFICATE_KEY_FILE = "certificate.key"
AUTHORITY_FILE = "authority.pem"
AUTHORITY_KEY_FILE = "authority.key"
_KEY_BYTES = 32
_KEY_FILE_BYTES_MAX = 1 << 16


class JobKey(NamedTuple):
    """The secret that every process of a job holds."""

    secret: bytes
    file: Path | None
    """Where it stands; None: nowhere yet."""


def new_key() -> bytes:
    """A key that nobody has, as text."""
    return secrets.token_hex(_KEY_BYTES).encode()


def own_key(net: "NetConfig") -> JobKey:
    """The key beside the certificates in ``net.keys``, or else a new one.

    Raises:
        UsageError: a file that others could read, or that cannot be read, or a key that is too short.
    """
    if net.keys is not None and (path := Path(net.keys) / JOB_KEY_FILE).exists():
        return JobKey(read_key(path), path)
    return JobKey(new_key(), None)


def read_key(path: Path) -> bytes:
    """A key from its file; white space around it does not count.

    Raises:
        UsageError: it cannot be read, others could read it, or it holds no key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(
            f"the job's key in {path} cannot be read: {error.strerror}; `elaswave keys` makes one"
        ) from None
    try:
        status = os.fstat(fd)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is no file with a job's key; `elaswave keys` makes one")
        if mode & 0o077 or status.st_uid != os.geteuid():
            raise UsageError(
                f"{path} has mode {mode:04o} and owner {status.st_uid}, so that others could read the job's key: it "
                f"must belong to user {os.geteuid()}: chmod 600 {path}, and make a new key if others may have read it"
            )
        return checked_key(os.read(fd, _KEY_FILE_BYTES_MAX).strip(), str(path))
    finally:
        os.close(fd)


def checked_key(key: bytes, where: str) -> bytes:
    """The key, if it can be one.

    Args:
        where: it stands.
    Raises:
        UsageError: it is too short.
    """
    if len(key) < MIN_KEY_BYTES:
        raise UsageError(
            f"{where} holds a key of {len(key)} bytes, at least {MIN_KEY_BYTES} random ones are needed; "
            "`elaswave keys` makes one"
        )
    return key


def tls_of(folder: Path) -> Tls:
    """The certificate files in a folder that `elaswave keys` has made.

    Raises:
        UsageError: a file is missing, or others could read the private key.
    """
    names = (CERTIFICATE_FILE, CERTIFICATE_KEY_FILE, AUTHORITY_FILE)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"net.keys: {folder} has no {' and no '.join(missing)}; make certificates: elaswave keys {folder}"
        )
    certificate, key, authority = (str(folder / name) for name in names)
    mode = stat.S_IMODE(os.stat(key).st_mode)
    if mode & 0o077:
        raise UsageError(f"{key} has mode {mode:04o}, so that others could read it: chmod 600 {key}")
    return Tls(certificate=certificate, key=key, authority=authority)
