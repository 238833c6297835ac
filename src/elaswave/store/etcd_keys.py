"""The keys of a job in etcd before its first coordinator and after its last one. What is asked, and what the answers
mean, is `elaswave.protocol.leadership.founding`'s."""

from collections.abc import Callable
from typing import NamedTuple

from elaswave.errors import StoreError
from elaswave.protocol.coordinator.store_writes import OUTCOME, SPEC, TERM, KeyValue, Outcome, Transaction, founding_of
from elaswave.protocol.leadership.founding import LOOKING, Founding, Left, Made, ending, left_of
from elaswave.store.etcd_client import EtcdClient
from elaswave.store.etcd_entries import entry_key
from elaswave.store.etcd_store import Patience, foreign_job, pause, read_entries


class Standing(NamedTuple):
    """What the store holds of a job."""

    left: Left | None
    """None: there is none."""
    outcome: KeyValue | None
    """How the last one has ended, if there is none."""


def standing_of(client: EtcdClient, patience_s: float) -> Standing:
    """Looks what the store holds of a job.

    Raises:
        StoreError: etcd does not answer or refuses.
    """
    waiting = Patience(client.name, patience_s, pause)
    spec, term, beat, outcome = waiting.ask(lambda: client.carry_out(LOOKING)).found
    key = entry_key(0 if spec is None else len(read_entries(client, waiting)))
    (entry,) = waiting.ask(lambda: client.carry_out(Transaction(reads=(key,)))).found
    return Standing(left_of(spec, term, beat, key, entry), outcome)


def remove_left(client: EtcdClient, seen: Left, patience_s: float) -> Outcome:
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
    client.founded = founding_of(KeyValue(SPEC, spec, 0))
    while True:
        (outcome,) = waiting.ask(lambda: client.carry_out(Transaction(reads=(OUTCOME,)))).found
        founding = Founding(spec, outcome)
        made = founding.judge(waiting.ask(lambda founding=founding: client.carry_out(founding.transaction())))  # type: ignore[misc]
        if made is Made.HELD:
            raise StoreError(f"{client.name} holds another job: remove its keys, or give this one another name")
        if made is Made.FOREIGN:
            raise foreign_job(client.name)
        if made is Made.YES:
            return client.founded


def remove(
    client: EtcdClient,
    patience_s: float,
    name: str = "",
    outcome: bytes | None = None,
    founded: int = 0,
    between: Callable[[str, float], None] = pause,
) -> None:
    """Removes a job's keys; no coordinator can write to it from then on.

    Args:
        client: of the job.
        patience_s: how long to wait for each of two answers.
        name, outcome, founded: as of `elaswave.protocol.leadership.founding.ending`.
        between: as of `Patience`.
    Raises:
        StoreError: etcd does not answer or refuses.
    """
    waiting = Patience(client.name, patience_s, between)
    spec, term = waiting.ask(lambda: client.carry_out(Transaction(reads=(SPEC, TERM)))).found
    asked = ending(name, founded, spec, term, outcome)
    if asked is None and not founding_of(spec) and (spec or term):
        raise foreign_job(client.name)
    if asked is not None:
        waiting.ask(lambda: client.carry_out(asked))
