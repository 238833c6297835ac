"""A candidate's process: it waits beside its agent, claims the job when its coordinator is gone, and is the coordinator
from then on. All that it needs is imported before it is forked, so a take-over costs no start of a process.

It reads, and its coordinator's lease heartbeat is written, by requests of a second at most, on connections of their
own: a large record that is under way delays neither. What it asks, and when, is
`elaswave.protocol.leadership.election`'s.
"""

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from elaswave.errors import StoreError
from elaswave.protocol.coordinator.store_writes import LEASE_HEARTBEAT, Holder, lease_heartbeat_value
from elaswave.protocol.leadership.election import (
    LEASE_HEARTBEAT_S,
    Ask,
    CoordinatorCandidate,
    NoJob,
    StandBy,
    StoreAnswer,
    Won,
)
from elaswave.store.etcd_client import REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S_MAX, EtcdClient, NoAnswerError
from elaswave.store.etcd_store import RETRY_S, Patience, job_missing, lease_lost, term_of_entries

ENTRIES_S = 60.0
"""How long a candidate asks for what was written before it, where no claim stands there."""
_log = logging.getLogger("elaswave.store")


class CandidateStage(Enum):
    """How far a candidate's process is."""

    HOLDS = "holds"
    """It has the job: it reads what was decided."""
    SERVES = "serves"
    """It can be dialled."""


class CandidateProgress(NamedTuple):
    """What a candidate's process reports to its agent, one line each."""

    stage: CandidateStage
    term: int

    def line(self) -> bytes:
        """Encodes the progress for a pipe."""
        return f"{self.stage.value} {self.term}\n".encode()


def progress_of(lines: bytes) -> list[CandidateProgress]:
    """Reads what was reported. Each line was written at once, so none is torn."""
    words = [line.split() for line in lines.decode().splitlines()]
    return [CandidateProgress(CandidateStage(stage), int(term)) for stage, term in words]


def stand_by(
    client: EtcdClient,
    candidate: CoordinatorCandidate,
    *,
    now_s: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Won:
    """Waits until this candidate has the job.

    Args:
        client: of its own, of the candidate's job generation.
        candidate: says what is to be done.
        now_s: monotonic time.
        wait: for so many seconds.
    Raises:
        StoreError: the job's keys are gone, or it was created again, or they were not written with its key, or etcd
            refuses.
    """
    action = candidate.begin()
    while True:
        asked_s, result, newest_term = now_s(), None, None
        match action:
            case Won():
                client.timeout_s_max = REQUEST_TIMEOUT_S_MAX
                return action
            case NoJob():
                raise job_missing(client.name, action)
            case StandBy():
                wait(action.wait_s)
            case Ask():
                if action.news:
                    _log.info("%s", action.news)
                client.timeout_s_max = REQUEST_TIMEOUT_S
                try:
                    result = client.carry_out(action.transaction)
                except NoAnswerError as error:
                    _log.info(
                        "the store does not answer %s: %s", "a claim" if action.claims else "this candidate", error
                    )
            case _:
                client.timeout_s_max = REQUEST_TIMEOUT_S_MAX  # entries may be large
                newest_term = term_of_entries(client, Patience(client.name, ENTRIES_S, lambda *_: wait(RETRY_S)))
        action = candidate.next(StoreAnswer(asked_s, now_s(), result, newest_term))


class LeaseHeartbeats:
    """Renews the lease heartbeat of a coordinator, in a thread, as long as its process lives and may write.

    Args:
        client: of its own.
        term: the coordinator's.
    """

    def __init__(self, client: EtcdClient, term: Holder) -> None:
        self._client = client
        self._client.timeout_s_max = REQUEST_TIMEOUT_S
        self._term = term
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._error: StoreError | None = None
        self._tell: Callable[[StoreError], None] | None = None
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def tell(self, call: Callable[[StoreError], None]) -> None:
        """Has a call made, in the thread, once it turns out that this coordinator may not write: another one has taken
        over, or the store has gone back."""
        with self._lock:
            self._tell = call
            error = self._error
        if error is not None:
            call(error)

    def stop(self) -> None:
        """Ends it; a request that is under way has its bound."""
        self._end.set()
        self._thread.join(2 * REQUEST_TIMEOUT_S)

    def _run(self) -> None:
        number = 0
        try:
            while not self._end.wait(LEASE_HEARTBEAT_S if number else 0.0):
                number += 1
                error = self._lease_heartbeat(number)
                if error is not None:
                    with self._lock:
                        self._error = error
                        call = self._tell
                    if call is not None:
                        call(error)
                    return
        finally:
            self._client.close()

    def _lease_heartbeat(self, number: int) -> StoreError | None:
        lease_heartbeat = self._term.still_writes()._replace(
            puts=((LEASE_HEARTBEAT, lease_heartbeat_value(self._term.term, number)),)
        )
        try:
            outcome = self._client.carry_out(lease_heartbeat)
        except NoAnswerError:
            return None  # the next one follows; one that is late does no harm
        except StoreError as refusal:
            _log.warning("the store takes no lease heartbeat: %s", refusal)
            return None
        return None if outcome.succeeded else lease_lost(self._client.name, outcome, self._term)
