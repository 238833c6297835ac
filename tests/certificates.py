"""Certificates for tests, made as `elaswave keys` makes them, once per test process."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import pytest

from elaswave.job import keys
from elaswave.job.keys import tls_of
from elaswave.transport.tls import Tls


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="test-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def keys_of(authority: str) -> Path:
    """A folder with the keys of a job's authority, and those of the host 10.9.8.7, which is another one."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    folder = _folder() / authority
    keys.make_keys(folder, [("10.9.8.7",)], 2)
    return folder


def job_tls() -> Tls:
    """This host's files, which most tests use."""
    return tls_of(keys_of("job"))


def stranger_tls() -> Tls:
    """Of another job's authority."""
    return tls_of(keys_of("stranger"))


def misnamed_tls() -> Tls:
    """Of the job's authority, for another host."""
    return tls_of(keys_of("job") / "10.9.8.7")


@functools.cache
def expired_tls() -> Tls:
    """Of the job's authority, expired."""
    folder = keys_of("job") / "expired"
    folder.mkdir()
    keys._make_certificate(keys_of("job"), folder, keys.LOCAL_NAMES, -1)
    shutil.copy(keys_of("job") / "authority.pem", folder)
    return tls_of(folder)


@functools.cache
def client_only_tls() -> Tls:
    """Of the job's authority, for clients alone."""
    folder = keys_of("job") / "client"
    folder.mkdir()
    whole, keys._HOST = keys._HOST, keys._HOST.replace("serverAuth, ", "")
    try:
        keys._make_certificate(keys_of("job"), folder, keys.LOCAL_NAMES, 2)
    finally:
        keys._HOST = whole
    shutil.copy(keys_of("job") / "authority.pem", folder)
    return tls_of(folder)


@functools.cache
def second_tls() -> Tls:
    """As good as this host's, and another certificate."""
    folder = keys_of("job") / "second"
    folder.mkdir()
    keys._make_certificate(keys_of("job"), folder, keys.LOCAL_NAMES, 2)
    shutil.copy(keys_of("job") / "authority.pem", folder)
    return tls_of(folder)
