"""The keys of a job in etcd before its first coordinator and after its last one. What is asked, and what the answers
mean, is `elaswave.protocol.leadership.job_creation`'s."""

from collections.abc import Callable
from typing import NamedTuple

from elaswave.errors import StoreError
from elaswave.protocol.coordinator.store_writes import (
    OUTCOME,
    SPEC,
    TERM,
    KeyValue,
    Transaction,
    TransactionResult,
    job_generation_of,
)
from elaswave.protocol.leadership.job_creation import LOOKING, CreationResult, JobCreation, Left, ending, left_of
from elaswave.store.etcd_client import EtcdClient
from elaswave.store.etcd_entries import entry_key
from elaswave.store.etcd_store import Patience, foreign_job, pause, read_entries


class StoredJob(NamedTuple):
    """What the store holds of a job."""

    left: Left | None
    """None: there is none."""
    outcome: KeyValue | None
    """How the last one has ended, if there is none."""


def standing_of(client: EtcdClient, patience_s: float) -> StoredJob:
    """Looks what the store holds of a job.

    Raises:
        StoreError: etcd does not answer or refuses.
    """
    waiting = Patience(client.name, patience_s, pause)
    spec, term, lease_heartbeat, outcome = waiting.ask(lambda: client.carry_out(LOOKING)).found
    key = entry_key(0 if spec is None else len(read_entries(client, waiting)))
    (entry,) = waiting.ask(lambda: client.carry_out(Transaction(reads=(key,)))).found
    return StoredJob(left_of(spec, term, lease_heartbeat, key, entry), outcome)


def remove_left(client: EtcdClient, seen: Left, patience_s: float) -> TransactionResult:
    """Removes a job's keys, unless one of its coordinators has written, or was started, since it was looked at.

    Raises:
        StoreError: etcd does not answer or refuses.
    """
    return Patience(client.name, patience_s, pause).ask(lambda: client.carry_out(seen.removal()))


def found(client: EtcdClient, spec: bytes, patience_s: float) -> int:
    """Makes a job's keys, so that coordinators can open it.

    Args:
        spec: what the job is, see `spec_value`; has a nonce.
        patience_s: how long to wait for an answer.
    Returns:
        The number of the founding.
    Raises:
        StoreError: the job is there already, or etcd does not answer or refuses.
    """
    waiting = Patience(client.name, patience_s, pause)
    client.job_generation = job_generation_of(KeyValue(SPEC, spec, 0))
    while True:
        (outcome,) = waiting.ask(lambda: client.carry_out(Transaction(reads=(OUTCOME,)))).found
        creation = JobCreation(spec, outcome)
        made = creation.judge(waiting.ask(lambda creation=creation: client.carry_out(creation.transaction())))  # type: ignore[misc]
        if made is CreationResult.HELD:
            raise StoreError(f"{client.name} holds another job: remove its keys, or give this one another name")
        if made is CreationResult.FOREIGN:
            raise foreign_job(client.name)
        if made is CreationResult.YES:
            return client.job_generation


def remove(
    client: EtcdClient,
    patience_s: float,
    name: str = "",
    outcome: bytes | None = None,
    job_generation: int = 0,
    between: Callable[[str, float], None] = pause,
) -> None:
    """Removes a job's keys; no coordinator can write to it from then on.

    Args:
        client: of the job.
        patience_s: how long to wait for each of two answers.
        name, outcome, founded: as of `elaswave.protocol.leadership.job_creation.ending`.
        between: as of `Patience`.
    Raises:
        StoreError: etcd does not answer or refuses.
    """
    waiting = Patience(client.name, patience_s, between)
    spec, term = waiting.ask(lambda: client.carry_out(Transaction(reads=(SPEC, TERM)))).found
    asked = ending(name, job_generation, spec, term, outcome)
    if asked is None and not job_generation_of(spec) and (spec or term):
        raise foreign_job(client.name)
    if asked is not None:
        waiting.ask(lambda: client.carry_out(asked))
