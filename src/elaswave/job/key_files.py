"""The job's key and certificate files: found, checked, read. `elaswave.job.key_making` makes them.

No argument, log, file of the run or environment of a child ever holds the key. What a person gives it with stands in
`elaswave.api.environment`; a job that is given none makes one.
"""

import os
import secrets
import stat
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elaswave.errors import UsageError
from elaswave.transport.handshake import MIN_KEY_BYTES, Secrets, derived
from elaswave.transport.tls import Tls

if TYPE_CHECKING:  # numpy would come along: whoever prepares the environment imports this, before any such library
    from elaswave.config.schema import NetConfig

JOB_KEY_FILE = "job.key"
JOINING_KEY_FILE = "joining.key"
CERTIFICATE_FILE = "certificate.pem"
CERTIFICATE_KEY_FILE = "certificate.key"
AUTHORITY_FILE = "authority.pem"
AUTHORITY_KEY_FILE = "authority.key"
_KEY_BYTES = 32
_KEY_FILE_BYTES_MAX = 1 << 16


class KeyRole(Enum):
    """What a key is for. Who holds one cannot compute those that may do more."""

    JOB = "job"
    """All of it: to start the job and its coordinators, to write to its store; each other key is derived from it."""
    JOINING = "joining"
    """To take part with workers: agents that start no coordinator, and all connections of workers."""
    STEERING = "steering"
    """To ask a running job for something, as `elaswave ctl` does."""
    READING = "reading"
    """To ask a running job how it gets on, and for nothing else."""
    CHANGING = "changing"
    """To change the job's key while it runs. In no file: who may do that may do all."""


_ABOVE = {
    KeyRole.JOINING: KeyRole.JOB,
    KeyRole.STEERING: KeyRole.JOB,
    KeyRole.READING: KeyRole.STEERING,
    KeyRole.CHANGING: KeyRole.JOB,
}
"""Role -> from whose key its own is derived."""
LESSER = (KeyRole.JOINING, KeyRole.STEERING, KeyRole.READING)
"""Those of which there are files."""
_MARK = b"-key:"


class JobKey(NamedTuple):
    """A secret that processes of a job hold."""

    secret: bytes
    file: Path | None
    """Where it stands; None: nowhere yet."""
    role: KeyRole = KeyRole.JOB

    def held(self, role: KeyRole) -> bytes:
        """The secret of a role.

        Raises:
            UsageError: this key is of a role that may not do what that one may.
        """
        if role is self.role:
            return self.secret
        if role not in _ABOVE:
            where = "this key" if self.file is None else str(self.file)
            raise UsageError(
                f"{where} is a {self.role.value} key of the job: what is asked for needs its key, or one that may do "
                f"more; `elaswave keys DIR --role {KeyRole.STEERING.value}` and such make them, where the job's key "
                "stands"
            )
        return derived(self.held(_ABOVE[role]), role.value)

    @property
    def text(self) -> bytes:
        """As it stands in a file."""
        return (
            self.secret if self.role is KeyRole.JOB else self.role.value.encode() + _MARK + self.secret.hex().encode()
        )


def role_key(key: JobKey, role: KeyRole, file: Path | None = None) -> JobKey:
    """The key of a role.

    Raises:
        UsageError: as of `JobKey.held`.
    """
    return JobKey(key.held(role), file, role)


def secrets_for(job: Secrets, role: KeyRole) -> Secrets:
    """The secrets of a role that are made of a job's keys."""
    return job.each(lambda key: JobKey(key, None).held(role))


def next_file(file: Path) -> Path:
    """Where the key stands that is to follow the one in a file, from the beginning of the change to its end."""
    return file.with_name(f"{file.name}.next")


def key_of_text(text: bytes, where: str, file: Path | None) -> JobKey:
    """The inverse of `JobKey.text`.

    Args:
        text: of a key.
        where: it stands, in messages.
        file: it stands; None: in none.
    Raises:
        UsageError: it is too short, or no key.
    """
    name, mark, digits = text.partition(_MARK)
    roles = {role.value.encode(): role for role in LESSER}
    if not mark or name not in roles:
        return JobKey(checked_key(text, where), file)
    try:
        secret = bytes.fromhex(digits.decode())
    except ValueError:
        raise UsageError(f"{where} holds no {name.decode()} key: `elaswave keys DIR --role` makes one") from None
    return JobKey(checked_key(secret, where), file, roles[name])


def new_key() -> bytes:
    """A key that nobody has, as text."""
    return secrets.token_hex(_KEY_BYTES).encode()


def own_key(net: "NetConfig") -> JobKey:
    """The key beside the certificates in ``net.keys``: the job's, or else the joining one; or else a new one.

    Raises:
        UsageError: a file that others could read, or that cannot be read, or a key that is too short.
    """
    for name in (JOB_KEY_FILE, JOINING_KEY_FILE):
        if net.keys is not None and (path := Path(net.keys) / name).exists():
            return read_key(path)
    return JobKey(new_key(), None)


def read_key(path: Path) -> JobKey:
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
        return key_of_text(os.read(fd, _KEY_FILE_BYTES_MAX).strip(), str(path), path)
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
