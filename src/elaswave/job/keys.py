"""The job's key and certificate files: found, checked, read. `elaswave.job.keys` makes them.

No argument, log, file of the run or environment of a child ever holds the key. What a person gives it with stands in
`elaswave.api.environment`; a job that is given none makes one.

Makes a job's authority, certificates and key: what `elaswave keys` does.

The `openssl` command makes them: it belongs to the library that Python's own TLS uses, and jobs that need no
certificates then need no further Python package. Any other tool will do as well, if the files have these names, the
certificates name their hosts, and are for servers and clients (extendedKeyUsage).
"""

import contextlib
import fcntl
import ipaddress
import os
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elaswave.errors import UsageError
from elaswave.transport.handshake import MIN_KEY_BYTES, Secrets, derived
from elaswave.transport.tls import Tls
from elaswave.untrusted import read_bytes

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
        """Returns the secret of a role.

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
    """Makes the key of a role.

    Raises:
        UsageError: as of `JobKey.held`.
    """
    return JobKey(key.held(role), file, role)


def secrets_for(job: Secrets, role: KeyRole) -> Secrets:
    """Makes the secrets of a role out of a job's keys."""
    return job.each(lambda key: JobKey(key, None).held(role))


def next_file(file: Path) -> Path:
    """Tells where the key stands that is to follow the one in a file, from the beginning of the change to its end."""
    return file.with_name(f"{file.name}.next")


def key_of_text(text: bytes, where: str, file: Path | None) -> JobKey:
    """Does the inverse of `JobKey.text`.

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
    """Makes a key that nobody has, as text."""
    return secrets.token_hex(_KEY_BYTES).encode()


def own_key(net: "NetConfig") -> JobKey:
    """Returns the key beside the certificates in ``net.keys``: the job's, or else the joining one; or else a new one.

    Raises:
        UsageError: a file that others could read, or that cannot be read, or a key that is too short.
    """
    for name in (JOB_KEY_FILE, JOINING_KEY_FILE):
        if net.keys is not None and (path := Path(net.keys) / name).exists():
            return read_key(path)
    return JobKey(new_key(), None)


def read_key(path: Path) -> JobKey:
    """Reads a key from its file; white space around it does not count.

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
    """Returns the key, if it can be one.

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
    """Finds the certificate files in a folder that `elaswave keys` has made.

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


LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_COMMAND_TIMEOUT_S = 60.0
_AUTHORITY = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = elaswave job authority
[extensions]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_HOST = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[extensions]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


def make_keys(folder: Path, hosts: Sequence[Sequence[str]], days: int, *, adds: bool = False) -> list[Path]:
    """Makes what is missing: the authority and this machine's certificate, and a folder for each other host.

    Args:
        folder: made with mode 0700; its authority is used if it has one.
        hosts: the names and addresses of each other host, the first one names its folder.
        days: for which certificates are good.
        adds: whether a folder that has all is not refused, since more is to be made in it.
    Returns:
        The folders that were made or filled, each for one host.
    Raises:
        UsageError: a host that has a folder already, a name that is none, or openssl is missing or fails.
    """
    for names in hosts:
        _check_names(names)
        if (folder / names[0]).exists():
            raise UsageError(
                f"{folder / names[0]} is there already; remove it to have a new certificate for {names[0]}"
            )
    made = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / AUTHORITY_FILE).exists():
            _make_authority(folder, days)
            _write_private(folder / JOB_KEY_FILE, new_key() + b"\n")
            _make_certificate(folder, folder, LOCAL_NAMES, days)
            made.append(folder)
        elif not hosts and not adds:
            raise UsageError(f"{folder} has keys already; name a new folder, or add hosts with --host")
        for names in hosts:
            own = folder / names[0]
            own.mkdir(mode=0o700)
            _write_private(own / JOB_KEY_FILE, read_bytes(folder / JOB_KEY_FILE))
            (own / AUTHORITY_FILE).write_bytes(read_bytes(folder / AUTHORITY_FILE))
            _make_certificate(folder, own, names, days)
            made.append(own)
    except OSError as error:
        raise UsageError(f"keys cannot be made in {folder}: {error}") from error
    return made


def write_role_key(folder: Path, role: KeyRole) -> Path:
    """Writes a lesser key beside the job's; one that is there already stays.

    Returns:
        Its file.
    Raises:
        UsageError: the folder has no job's key, or another one's lesser key.
    """
    key, path = read_key(folder / JOB_KEY_FILE), folder / f"{role.value}.key"
    made = role_key(key, role, path)
    try:
        _write_private(path, made.text + b"\n")
    except FileExistsError:
        if read_key(path) != made:
            raise UsageError(f"{path} is there already, of another key: remove it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    return path


def begin_change(file: Path) -> tuple[JobKey, bool]:
    """Returns the key that is to follow the one in a file: that of a change that was begun and not ended, or a new one,
    which stands in `next_file` at once and whole.

    Returns:
        The key, and whether it was made now.
    Raises:
        UsageError: it cannot be written, or what stands there is no key of a job, or a link.
    """
    path, is_new = next_file(file), False
    try:
        if not os.path.lexists(path):
            scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                _write_private(scratch, new_key() + b"\n")
                with contextlib.suppress(FileExistsError):  # another command has begun one just now
                    os.link(scratch, path)
                    is_new = True
            finally:
                scratch.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"no new key can be written beside {file}: {error.strerror}") from error
    if path.is_symlink():  # it would take the place of the job's key
        raise UsageError(f"{path} is a link, and the job's new key is to stand there: remove it")
    key = read_key(path)
    key.held(KeyRole.JOB)
    return key, is_new


def end_change(file: Path, key: JobKey) -> None:
    """The new key takes the place of the old one, if no other command has seen to that. May be said again.

    Raises:
        UsageError: it cannot.
    """
    try:
        with _following(file, key) as is_there:
            if is_there:
                os.replace(next_file(file), file)
    except OSError as error:
        raise UsageError(
            f"the job goes by the key in {next_file(file)}, but {file} cannot be replaced: {error.strerror}; do so by "
            "hand"
        ) from error


def abandon_change(file: Path, key: JobKey) -> None:
    """A new key that nobody has taken is removed."""
    with _following(file, key) as is_there:
        if is_there:
            next_file(file).unlink()


@contextlib.contextmanager
def _following(file: Path, key: JobKey) -> Iterator[bool]:
    """Tells whether a key is still the one that is to follow that in a file; nobody takes it away in here. Two commands
    may go on with one change, and when the first one has ended it, a third may have begun the next."""
    path = next_file(file)
    with contextlib.ExitStack() as stack:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            stack.callback(os.close, fd)
            is_there = _is_alone_with(fd) and os.path.samefile(fd, path) and read_key(path).secret == key.secret
        except FileNotFoundError:
            is_there = False
        yield is_there


def _is_alone_with(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # another command is about to take the file away
    except OSError:
        pass  # a file system without locks
    return True


def write_copy(key: JobKey, path: Path) -> None:
    """Writes a key to a file of mode 0600; one that is there already must hold it.

    Raises:
        UsageError: it holds another one, or cannot be written.
    """
    try:
        _write_private(path, key.text + b"\n")
    except FileExistsError:
        if read_key(path).secret != key.secret:
            raise UsageError(f"{path} is there already: name a new file, or remove it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not name or not name[0].isalnum() and ":" not in name or set(name) - _NAME_CHARACTERS:
            raise UsageError(f"--host: {name!r} is neither an address nor a host's name, such as 10.0.0.5 or node-1")


_NAME_CHARACTERS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.:")


def _make_authority(folder: Path, days: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch) / "settings"
        settings.write_text(_AUTHORITY)
        key = _make_private_key(folder / AUTHORITY_KEY_FILE)
        _openssl(
            *("req", "-x509", "-new", "-sha256", "-key", key, "-config", settings, "-extensions", "extensions"),
            *("-days", days, "-out", folder / AUTHORITY_FILE),
        )


def _make_certificate(authority: Path, folder: Path, names: Sequence[str], days: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        settings, request = Path(scratch) / "settings", Path(scratch) / "request"
        listed = ", ".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in names)
        settings.write_text(_HOST.format(name=names[0], names=listed))
        key = _make_private_key(folder / CERTIFICATE_KEY_FILE)
        _openssl("req", "-new", "-sha256", "-key", key, "-config", settings, "-out", request)
        _openssl(
            *("x509", "-req", "-sha256", "-in", request, "-extfile", settings, "-extensions", "extensions"),
            *("-CA", authority / AUTHORITY_FILE, "-CAkey", authority / AUTHORITY_KEY_FILE),
            *(
                "-set_serial",
                int.from_bytes(os.urandom(8), "big") | 1,
                "-days",
                days,
                "-out",
                folder / CERTIFICATE_FILE,
            ),
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _make_private_key(path: Path) -> Path:
    _write_private(path, b"")  # before the secret is there
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path)
    path.chmod(0o600)
    return path


def _write_private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)


def _openssl(*arguments: object) -> None:
    command = ["openssl", *map(str, arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL, umask=0o077
        )
    except FileNotFoundError:
        raise UsageError(
            "there is no openssl command here, which makes the certificates; install it (apt-get install openssl), or "
            "make them on another machine and copy the folder"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"openssl {arguments[0]} has not ended within {_COMMAND_TIMEOUT_S:g} s; try again") from None
    if done.returncode:
        raise UsageError(f"openssl {arguments[0]} failed: {done.stderr.strip()}; version 1.1.1 or later is needed")
