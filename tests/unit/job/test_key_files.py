"""The job's key and certificate files: where they come from, who may read them, what is said where they do not fit."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.certificates import keys_of

from elaswave.api.environment import KEY_FILE_VARIABLE, KEY_VARIABLE, given_key
from elaswave.cli.main import main
from elaswave.config.schema import NetConfig
from elaswave.errors import ConfigError, UsageError
from elaswave.job import keys
from elaswave.job.keys import (
    LESSER,
    JobKey,
    KeyRole,
    key_of_text,
    next_file,
    own_key,
    read_key,
    role_key,
    tls_of,
)
from elaswave.transport.tls import Tls

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


def test_a_file_in_the_environment_gives_the_key(key_file: Path, monkeypatch) -> None:
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key_file))
    found = given_key()
    assert found is not None and (found.secret, found.file) == (KEY.encode(), key_file)


def test_the_folder_of_the_certificates_gives_the_key(key_file: Path) -> None:
    net = NetConfig(transport="tcp", tls="required", keys=str(key_file.parent))
    assert own_key(net).secret == KEY.encode()


def test_without_either_each_job_has_its_own() -> None:
    assert given_key() is None
    first, second = own_key(NetConfig()), own_key(NetConfig())
    assert first.file is None and len(first.secret) == 64 and first.secret != second.secret


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_key_that_others_could_read_or_replace_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(UsageError, match=f"has mode {mode:04o} .*chmod 600"):
        read_key(key_file)


def test_what_is_no_key(tmp_path: Path, key_file: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_key(tmp_path / "none")
    with pytest.raises(UsageError, match="is no file with a job's key"):
        read_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="is no file with a job's key"):
        read_key(tmp_path / "pipe")
    key_file.write_text("short")
    with pytest.raises(UsageError, match="holds a key of 5 bytes, at least 16"):
        read_key(key_file)


def test_the_variable_is_erased_where_children_and_others_could_read_it(key_file: Path) -> None:
    code = f"""
import os
from pathlib import Path
from elaswave.api.environment import environment_to_compute, given_key
os.environ.update(dict(os.environ))
assert b"{KEY}" in Path("/proc/self/environ").read_bytes()
assert "{KEY_VARIABLE}" not in environment_to_compute()
assert given_key().secret == b"{KEY}"
assert given_key().secret == b"{KEY}", "a second job of this process"
assert "{KEY_VARIABLE}" not in os.environ and "{KEY_VARIABLE}".encode() not in os.environb
shown = Path("/proc/self/environ").read_bytes()
assert b"{KEY}" not in shown and b"AFTER=1" in shown and b"BEFORE=1" in shown
if os.fork() == 0:
    os._exit(b"{KEY}" in Path("/proc/self/environ").read_bytes())
assert os.wait()[1] == 0
"""
    environment = {"BEFORE": "1", KEY_VARIABLE: KEY, "AFTER": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, timeout=60)
    both = {**environment, KEY_FILE_VARIABLE: str(key_file)}
    run = "from elaswave.api.environment import given_key; given_key()"
    done = subprocess.run([sys.executable, "-c", run], env=both, capture_output=True, text=True, timeout=60)
    assert "both give the job's key; unset one of them" in done.stderr


def test_missing_certificates_and_a_key_that_others_could_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no certificate.pem and no certificate.key and no authority.pem; make"):
        tls_of(tmp_path)
    for name in ("certificate.pem", "certificate.key", "authority.pem"):
        (tmp_path / name).write_text("")
    (tmp_path / "certificate.key").chmod(0o644)
    with pytest.raises(UsageError, match=r"certificate.key has mode 0644"):
        tls_of(tmp_path)


@pytest.mark.parametrize(
    ("folder", "host", "seen"),
    [
        ("", "10.1.1.1", "cannot serve 10.1.1.1: the certificate is refused: IP address mismatch"),
        ("10.9.8.7", "node-1", "cannot serve node-1: the certificate is refused: Hostname mismatch"),
    ],
)
def test_a_host_that_the_certificate_does_not_name_is_refused_at_once(folder: str, host: str, seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        tls_of(keys_of("job") / folder).check(host)


def test_a_good_certificate_is_good_for_all_its_names() -> None:
    for host in keys.LOCAL_NAMES:
        tls_of(keys_of("job")).check(host)


def test_an_expired_certificate_and_one_of_another_authority_are_refused_at_once() -> None:
    from tests.certificates import expired_tls, job_tls, stranger_tls

    with pytest.raises(ConfigError, match="certificate has expired"):
        expired_tls().check("127.0.0.1")
    mixed = Tls(certificate=job_tls().certificate, key=job_tls().key, authority=stranger_tls().authority)
    with pytest.raises(ConfigError, match="unable to get local issuer certificate|certificate signature failure"):
        mixed.check("127.0.0.1")


def test_the_command_makes_keys_that_only_their_owner_can_read(tmp_path: Path, capsys) -> None:
    keys_of("job")  # skips where there is no openssl
    folder = tmp_path / "keys"
    previous = os.umask(0)
    try:
        assert main(["keys", str(folder), "--host", "node-1,10.0.0.5"]) == 0
    finally:
        os.umask(previous)
    out = capsys.readouterr().out
    assert f"{folder / 'node-1'}: certificate for node-1, 10.0.0.5, good for 365 days" in out
    secret = [*folder.rglob("*.key")]
    assert sorted(path.name for path in secret) == [
        *("authority.key", "certificate.key", "certificate.key", "job.key", "job.key")
    ]
    for path in (folder, folder / "node-1", *secret):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert read_key(folder / "job.key").secret == read_key(folder / "node-1" / "job.key").secret
    for host in ("node-1", "10.0.0.5"):
        tls_of(folder / "node-1").check(host)

    assert main(["keys", str(folder)]) == 2
    assert "has keys already" in capsys.readouterr().err
    assert main(["keys", str(folder), "--host", "node-1"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["keys", str(folder), "--host", "../x"]) == 2
    assert "'../x' is neither an address nor a host's name" in capsys.readouterr().err
    assert main(["keys", str(folder), "--host", "::1", "--json"]) == 0
    assert str(folder / "::1") in capsys.readouterr().out


def test_without_openssl_the_command_says_what_to_do(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["keys", str(tmp_path / "keys")]) == 2
    assert "there is no openssl command here" in capsys.readouterr().err
    (tmp_path / "openssl").write_text("#!/bin/sh\necho too old >&2\nexit 1\n")
    (tmp_path / "openssl").chmod(0o755)
    assert main(["keys", str(tmp_path / "other")]) == 2
    assert "openssl genpkey failed: too old; version 1.1.1" in capsys.readouterr().err
    monkeypatch.setattr(keys, "_COMMAND_TIMEOUT_S", 0.05)
    (tmp_path / "openssl").write_text("#!/bin/sh\nread line\nexec /bin/sleep 60\n")
    assert main(["keys", str(tmp_path / "slow")]) == 2
    assert "has not ended within 0.05 s" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["keys", str(blocked / "keys")]) == 2
    assert "keys cannot be made in" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- roles


JOB = JobKey(KEY.encode(), None)
MAY = {
    KeyRole.JOB: set(KeyRole),
    KeyRole.STEERING: {KeyRole.STEERING, KeyRole.READING},
    KeyRole.JOINING: {KeyRole.JOINING},
    KeyRole.READING: {KeyRole.READING},
    KeyRole.CHANGING: {KeyRole.CHANGING},
}


@pytest.mark.parametrize("role", KeyRole)
def test_a_key_gives_those_that_may_do_less_and_no_other(role: KeyRole) -> None:
    key = role_key(JOB, role, Path("own.key"))
    for other in KeyRole:
        if other in MAY[role]:
            assert key.held(other) == JOB.held(other)
        else:
            with pytest.raises(UsageError, match=f"own.key is a {role.value} key of the job: .* needs its key, or one"):
                key.held(other)
    assert len({JOB.held(each) for each in KeyRole}) == len(KeyRole)


@pytest.mark.parametrize("role", [KeyRole.JOB, *LESSER])
def test_a_key_is_read_as_it_was_written(tmp_path: Path, role: KeyRole) -> None:
    path = tmp_path / "any.key"
    path.write_bytes(role_key(JOB, role).text + b"\n")
    path.chmod(0o600)
    assert read_key(path) == role_key(JOB, role, path)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (b"reading-key:zz", "holds no reading key"),
        (b"joining-key:", "holds a key of 0 bytes"),
        (b"steering-key:\xff\xff", "holds no steering key"),
    ],
)
def test_what_is_no_key_of_a_role(text: bytes, seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        key_of_text(text, "it", None)


def test_a_key_of_a_person_may_look_like_anything() -> None:
    assert key_of_text(b"my-key:of long text, no role", "it", None).role is KeyRole.JOB


def test_the_command_writes_lesser_keys_beside_the_jobs(key_file: Path, capsys) -> None:
    folder = key_file.parent
    (folder / "authority.pem").write_text("")
    command = ["keys", str(folder), "--role", "reading", "--role", "joining"]
    assert main(command) == main(command) == 0, "the same again"
    assert f"{folder / 'reading.key'}: the reading key; whoever has it cannot make the job's" in capsys.readouterr().out
    for role in (KeyRole.READING, KeyRole.JOINING):
        path = folder / f"{role.value}.key"
        assert read_key(path) == role_key(JOB, role, path) and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert own_key(NetConfig(transport="tcp", tls="required", keys=str(folder))).role is KeyRole.JOB
    key_file.write_text(KEY[::-1])
    assert main(command) == 2 and "reading.key is there already, of another key" in capsys.readouterr().err
    key_file.unlink()
    assert own_key(NetConfig(transport="tcp", tls="required", keys=str(folder))).role is KeyRole.JOINING
    assert main(command) == 2 and "cannot be read" in capsys.readouterr().err


def test_a_job_is_not_started_with_a_lesser_key(tmp_path: Path, capsys, monkeypatch) -> None:
    for role in (KeyRole.READING, KeyRole.STEERING, KeyRole.JOINING):
        monkeypatch.setenv(KEY_VARIABLE, role_key(JOB, role).text.decode())
        monkeypatch.setattr(
            "elaswave.api.environment._taken_from_environment", lambda role=role: role_key(JOB, role).text
        )
        assert main(["train", "--run-dir", str(tmp_path / "run")]) == 2
        assert f"this key is a {role.value} key of the job" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------- changes


def test_a_change_that_was_begun_is_gone_on_with(key_file: Path) -> None:
    first, is_new = keys.begin_change(key_file)
    assert is_new and first.file == next_file(key_file) and first.secret != KEY.encode()
    assert stat.S_IMODE(next_file(key_file).stat().st_mode) == 0o600
    assert keys.begin_change(key_file) == (first, False)
    assert read_key(key_file).secret == KEY.encode(), "until the change is ended"
    keys.end_change(key_file, first)
    keys.end_change(key_file, first)
    assert read_key(key_file).secret == first.secret
    assert sorted(path.name for path in key_file.parent.iterdir()) == ["job.key"]


def test_a_new_key_that_cannot_be_written_is_an_error(key_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no new key can be written beside .*none/job.key: No such file"):
        keys.begin_change(tmp_path / "none" / "job.key")
    next_file(key_file).write_bytes(role_key(JOB, KeyRole.STEERING).text)
    next_file(key_file).chmod(0o600)
    with pytest.raises(UsageError, match="job.key.next is a steering key of the job"):
        keys.begin_change(key_file)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").touch()
    second, _ = keys.begin_change(tmp_path / "folder")
    with pytest.raises(UsageError, match="the job goes by the key in .*folder.next, but .* cannot be replaced"):
        keys.end_change(tmp_path / "folder", second)


def test_of_two_commands_at_a_time_neither_touches_the_key_of_a_third(key_file: Path) -> None:
    first, _ = keys.begin_change(key_file)
    assert keys.begin_change(key_file) == (first, False), "the second one goes on with it"
    keys.end_change(key_file, first)
    third, is_new = keys.begin_change(key_file)
    assert is_new
    keys.end_change(key_file, first)  # the second one hears late that it is over
    keys.abandon_change(key_file, first)
    assert read_key(key_file).secret == first.secret and read_key(next_file(key_file)) == third
    with open(next_file(key_file)) as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another command is just about to rename it
        keys.end_change(key_file, third)
        keys.abandon_change(key_file, third)
        assert read_key(key_file).secret == first.secret and read_key(next_file(key_file)) == third
    keys.abandon_change(key_file, third)
    assert not next_file(key_file).exists()
    keys.abandon_change(key_file, third)


@pytest.mark.parametrize("target", ["other.key", "nothing"])
def test_no_link_takes_the_place_of_the_jobs_key(key_file: Path, target: str) -> None:
    other = key_file.with_name("other.key")
    other.write_text(KEY)
    other.chmod(0o600)
    next_file(key_file).symlink_to(target)
    with pytest.raises(UsageError, match="job.key.next is a link, and the job's new key is to stand there: remove it"):
        keys.begin_change(key_file)


def test_a_copy_replaces_nothing(key_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.key"
    keys.write_copy(JOB, path)
    keys.write_copy(JOB, path)
    assert read_key(path).secret == JOB.secret
    with pytest.raises(UsageError, match="copy.key is there already: name a new file"):
        keys.write_copy(JobKey(b"another key of a job", None), path)
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        keys.write_copy(JOB, tmp_path / "none" / "copy.key")
