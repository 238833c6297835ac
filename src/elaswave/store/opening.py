"""Which store a job's coordinators use, by `control.store`; and the keys that a job has in etcd, from its launcher's
start to its end."""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from elaswave.config.schema import ControlConfig
from elaswave.errors import ConfigError, LaunchError, RecoveryError, StoreError
from elaswave.protocol.coordinator.store_writes import OUTCOME, Holder, Transaction, TransactionResult, spec_value
from elaswave.protocol.leadership.election import CoordinatorCandidate
from elaswave.protocol.leadership.job_creation import Left
from elaswave.store.claim import CandidateProgress, CandidateStage, LeaseHeartbeats, stand_by
from elaswave.store.etcd_client import Credentials, EtcdClient, HttpGateway, NoAnswerError, endpoints_of, security_of
from elaswave.store.etcd_store import EtcdStore, StoredJob, found, new_nonce, pause, remove, remove_left, standing_of
from elaswave.store.file_store import FileStore
from elaswave.store.store import JournalRecord, Owner, Store
from elaswave.untrusted import read_text, reason

_CREDENTIALS_BYTES_MAX = 1 << 16

JOURNAL_FILE = "journal"
FILE = "file"
FOUND_S = 10.0
"""How long a start waits for etcd. Longer than its members take to choose another leader."""
REMOVE_S = 2.0
"""How long an end does, unless others are to learn the outcome; then it is said after this time."""
_JOB_GENERATION_BITS = 20
_log = logging.getLogger("elaswave.store")


class Claimed(NamedTuple):
    """What a candidate's process has when it has become the coordinator."""

    term: Holder
    missed_s: float | None
    """As of `Won.missed_s`."""
    lease_heartbeats: LeaseHeartbeats
    report: Callable[[CandidateProgress], None]
    """Tells its agent how far it is."""


def open_store(
    config: ControlConfig,
    run_dir: Path,
    control_dir: Path,
    owner: Owner,
    key: bytes,
    *,
    job: str = "",
    term: Holder | None = None,
    job_generation: int = 0,
) -> Store[JournalRecord]:
    """Opens the store of a job for its coordinator.

    Args:
        config: which.
        run_dir: the run's folder.
        control_dir: private folder of the job on this machine.
        owner: how a store that has a thread reaches the coordinator.
        key: the job's.
        job: the name of a job of several hosts.
        term: what this coordinator has claimed already; None: it claims the job now.
        job_generation: of the job that its members take part in.
    Raises:
        StoreError: it cannot be opened.
    """
    if config.store == FILE:
        # All of a job's processes run on this machine: after its crash no process is left that could act on the
        # journal.
        journal = control_dir / JOURNAL_FILE
        return FileStore(journal, JournalRecord, lock_timeout_s=5.0, job_generation=job_generation)
    client = _client(config, job or _own_name(run_dir, control_dir), key, job_generation)
    return EtcdStore(client, JournalRecord, owner, patience_s=config.store_patience_s, term=term)


def claim(
    config: ControlConfig,
    job: str,
    name: str,
    key: bytes,
    *,
    creates_job: bool,
    job_generation: int,
    ended_s: float | None,
    report: Callable[[CandidateProgress], None],
) -> Claimed:
    """Waits until this candidate has a job of several hosts.

    Args:
        config: which store.
        job: its name.
        name: of this host's agent, under which all of its coordinators hold the job.
        key: the job's.
        creates_job: whether that agent has created the job.
        job_generation: which job generation it takes part in.
        ended_s: as of `CoordinatorCandidate`.
        report: tells the agent how far it is.
    Raises:
        StoreError: the job's keys are gone, or etcd refuses.
        ConfigError: files that cannot be read.
    """
    with contextlib.closing(_client(config, job, key, job_generation)) as client:
        candidate = CoordinatorCandidate(name, job_generation, new_nonce, creates_job=creates_job, ended_s=ended_s)
        won = stand_by(client, candidate)
        report(CandidateProgress(CandidateStage.HOLDS, won.term.term))
        return Claimed(
            won.term, won.missed_s, LeaseHeartbeats(_client(config, job, key, job_generation), won.term), report
        )


class JobStore:
    """What a job has in its store before its first coordinator and after its last one.

    Args:
        config: which store.
        run_dir, control_dir: of the job.
        key: the job's.
        job: the name of a job of several hosts; what an earlier one of this name has left must have been removed, see
            `remove_earlier`.
        creates_job: whether it is made anew; else a candidate goes on with it.
    Raises:
        LaunchError: etcd does not answer, or refuses.
    """

    def __init__(
        self,
        config: ControlConfig,
        run_dir: Path,
        control_dir: Path,
        key: bytes,
        *,
        job: str = "",
        creates_job: bool = True,
    ) -> None:
        self._config = config
        self._control_dir = control_dir
        self._client: EtcdClient | None = None
        self.job_generation = 0
        """Number of the job generation that was made here, in a store of other machines; see
        `elaswave.protocol.leadership.store_position.StorePosition`."""
        self.patience_s = 0.0
        """How long a coordinator may take to open it."""
        if config.store == FILE:
            # Made here, so that a coordinator that follows another one knows whether it is still there.
            (control_dir / JOURNAL_FILE).touch(0o600)
            return
        self.patience_s = config.store_patience_s
        spec = spec_value(
            _new_job_generation(),
            run=str(run_dir),
            host=socket.gethostname(),
            launcher=os.getpid(),
            nonce=new_nonce(),
        )
        try:
            self._client = _client(config, job or _own_name(run_dir, control_dir), key)
            if creates_job:
                self.job_generation = found(self._client, spec, FOUND_S)
            self._client.close()  # the job's processes, which are forked, are not to inherit the connection
        except (StoreError, ConfigError) as error:
            if self._client is not None:
                self._client.close()
            raise LaunchError(f"the job's store cannot be used: {error}") from error

    def check(self) -> None:
        """Looks whether it is still there.

        Raises:
            RecoveryError: it is gone, and with it what the job has decided.
        """
        if self._client is None and not (self._control_dir / JOURNAL_FILE).exists():
            raise RecoveryError(
                f"the coordinator is lost, and so is its journal: {self._control_dir} was removed while the job "
                "ran; keep what cleans temporary folders away from there"
            )

    def end(
        self,
        name: str = "",
        outcome: bytes | None = None,
        job_generation: int = 0,
        *,
        is_patient: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> str:
        """The job is over: removes its keys. (The launcher removes files.)

        Args:
            name: of the agent in a job of several hosts: the keys stay if another one's coordinator has the job.
            outcome: of a job of several hosts: stays, for `read_outcome`.
            job_generation: which job generation is over; 0: there was one only.
            is_patient: wait for etcd as long as a decision does.
            say: called with a line for people if that takes long.
        Returns:
            What people should know of it; empty if all went well.
        """
        if self._client is None:
            return ""
        client, self._client = self._client, None
        client.job_generation = job_generation or client.job_generation
        has_said = False

        def between(text: str, passed_s: float) -> None:
            nonlocal has_said
            if is_patient and not has_said and passed_s >= REMOVE_S:
                has_said = True
                say(
                    f"the job is over; {client.name} does not answer, and is to keep how it has ended for hosts that "
                    f"were cut off: waits for up to {self.patience_s:g} s"
                )
            pause(text, passed_s)

        try:
            remove(client, self.patience_s if is_patient else REMOVE_S, name, outcome, job_generation, between)
            return ""
        except StoreError as error:
            return f"the job is over, but its keys below {client.prefix} stay in etcd: {error}"
        finally:
            client.close()


def _new_job_generation() -> int:
    """Makes a number that no other job generation has. By the creator's clock later ones are larger, which a
    coordinator takes for a hint that it was replaced, and for nothing else."""
    return (time.time_ns() // 1_000_000 << _JOB_GENERATION_BITS) + secrets.randbits(_JOB_GENERATION_BITS)


def read_outcome(config: ControlConfig, job: str, key: bytes, job_generation: int) -> bytes | None:
    """Reads what `JobStore.end` has left of a job of several hosts; asks one member of etcd once, for a second at most.

    Args:
        config: which store.
        job: its name.
        key: its key.
        job_generation: which job generation of it is meant.
    Returns:
        None: the job goes on, etcd does not answer, nothing was left, or what stands there is of another job generation
        or of nobody with the key.
    Raises:
        StoreError: etcd refuses.
        ConfigError: this host lacks the files that the store needs.
    """
    if config.store == FILE:
        return None
    with contextlib.closing(_client(config, job, key, job_generation)) as client:
        try:
            (standing,) = client.carry_out(Transaction(reads=(OUTCOME,))).found
        except NoAnswerError:
            return None
        if standing is not None and not standing.is_genuine:
            _log.warning("%s: the outcome there was not written for this job with its key", client.name)
        return standing.value if standing is not None and standing.is_genuine else None


def look_for_earlier(config: ControlConfig, job: str, key: bytes, job_generation: int = 0) -> StoredJob:
    """Finds what the store holds of a job of several hosts that runs, or has run.

    Args:
        config: which store.
        job: its name.
        key: its key.
        job_generation: whose outcome counts: the job generation that was seen before; 0: none was.
    Raises:
        LaunchError: etcd does not answer, or refuses.
    """
    if config.store == FILE:
        return StoredJob(None, None)
    with _asking(config, job, key, job_generation) as client:
        return standing_of(client, FOUND_S)


def remove_earlier(config: ControlConfig, job: str, key: bytes, seen: Left) -> TransactionResult:
    """Removes what was found, unless a coordinator of that job has written since.

    Raises:
        LaunchError: etcd does not answer, or refuses.
    """
    with _asking(config, job, key, seen.job_generation) as client:
        return remove_left(client, seen, FOUND_S)


@contextlib.contextmanager
def _asking(config: ControlConfig, job: str, key: bytes, job_generation: int) -> Iterator[EtcdClient]:
    try:
        with contextlib.closing(_client(config, job, key, job_generation)) as client:
            yield client
    except (StoreError, ConfigError) as error:
        raise LaunchError(f"the job's store cannot be used: {error}") from error


def _own_name(run_dir: Path, control_dir: Path) -> str:
    """Makes the name of a job of one host. The second part keeps jobs apart that have folders of one name, on one host
    or several."""
    return f"{run_dir.name}-{control_dir.name.rpartition('-')[2]}"


def _client(config: ControlConfig, name: str, key: bytes, job_generation: int = 0) -> EtcdClient:
    security = security_of(
        *(None if name is None else Path(name) for name in (config.store_ca, config.store_cert, config.store_key))
    )
    return EtcdClient(
        endpoints_of(config.store),
        f"/elaswave/{name}/",
        HttpGateway(security),
        key,
        None if config.store_credentials is None else _credentials(Path(config.store_credentials)),
        job_generation=job_generation,
    )


def _credentials(path: Path) -> Credentials:
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError([f"control.store_credentials: others can read {path}: chmod 600 {path}"])
        user, colon, password = read_text(path, _CREDENTIALS_BYTES_MAX).strip().partition(":")
    except OSError as error:
        raise ConfigError([f"control.store_credentials: {path} cannot be read: {reason(error)}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"control.store_credentials: {path} is no text"]) from None
    if not (user and colon):
        raise ConfigError([f"control.store_credentials: {path} holds no USER:PASSWORD"])
    return Credentials(user, password)
