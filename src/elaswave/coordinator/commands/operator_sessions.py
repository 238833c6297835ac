"""The coordinator's end of operators' connections: who is served, and the way of each request to its last answer.

An operator is a peer of the control server like a worker, and nothing depends on it: so many are served, each may have
so many requests open, and what they may send and leave unread the server bounds (`server.OPERATOR_LIMITS`). Whatever
is wrong with a request, it is refused, and the job goes on; only what would end a coordinator anyway (a journal that
takes no records, a state that contradicts itself) comes out of here.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from elaswave.channel.messages.operator import (
    Answer,
    AskKey,
    AskStatus,
    JobOver,
    JobStatus,
    OperatorHello,
    StatusAnswer,
    ToOperator,
    TurnedAway,
)
from elaswave.channel.messages.worker import Heartbeat
from elaswave.channel.wire import is_reader, role_of
from elaswave.coordinator.commands.commands import Action, Operations, Reply, refusal
from elaswave.coordinator.commands.job_status import JobParts, LastHeartbeat, job_status
from elaswave.errors import StateError, StoreError
from elaswave.job.keys import KeyRole

OPERATORS_MAX = 16
REQUESTS_MAX = 8
"""Of one operator that are open at a time."""
STATUS_EVERY_S = 0.1
"""However many ask, a status is made anew no more often."""

_log = logging.getLogger("elaswave.coordinator")


class ServesOperators(Protocol):
    """Of a control server what is needed here."""

    def send(self, peer: int, message: msgspec.Struct) -> bool:
        """Sends a message; False if there is no connection to this peer."""
        ...

    def hang_up(self, peer: int) -> None:
        """Ends a peer's connection."""
        ...


class _Open(NamedTuple):
    """A request that has not had its last answer."""

    peer: int
    request: int
    follow: Callable[[], Reply | None]


class OperatorSessions:
    """Serves the operators of one job.

    Args:
        server: has the connections.
        job: what is known of it.
        operations: decides about requests.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        server: ServesOperators,
        job: JobParts,
        operations: Operations,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._job = job
        self._operations = operations
        self._clock = clock
        self._served: set[int] = set()
        self._open: list[_Open] = []
        self._heartbeats: dict[int, LastHeartbeat] = {}
        self._status: JobStatus | None = None
        """The newest one, and when it was made."""
        self._status_s = 0.0
        self._over: JobOver | None = None

    # -------------------------------------------------------------------------------------------------- connections

    def connected(self, peer: int) -> None:
        """An operator has connected."""
        if self._over is not None:
            self._turn_away(peer, self._over)
        elif len(self._served) >= OPERATORS_MAX:
            busy = f"{OPERATORS_MAX} operators are connected to the job already; end one of them, and try again"
            self._turn_away(peer, TurnedAway(reason=busy))
        else:
            self._served.add(peer)

    def _turn_away(self, peer: int, message: ToOperator) -> None:
        self._server.send(peer, message)
        self._server.hang_up(peer)

    def closed(self, peer: int) -> None:
        """An operator has no connection any more: nobody follows what it has asked for."""
        self._served.discard(peer)
        self._open = [each for each in self._open if each.peer != peer]

    # ----------------------------------------------------------------------------------------------------- requests

    def received(self, peer: int, message: Any) -> None:
        """Handles a message of an operator. One that only others may send ends its connection."""
        if peer not in self._served or isinstance(message, OperatorHello):
            return
        if isinstance(message, AskStatus):
            self._tell_status(peer, message.request)
        elif is_reader(peer) and isinstance(message, Action):
            reason = "a reading key may ask for the status alone; use a steering key, or the job's"
            self._answer(peer, message.request, refusal(reason))
        elif isinstance(message, AskKey) and role_of(peer) is not KeyRole.CHANGING:
            self._answer(peer, message.request, refusal("only who holds the job's own key may change it"))
        elif not isinstance(message, Action):
            self.closed(peer)
            self._turn_away(peer, TurnedAway(reason=f"an operator may not send {type(message).__name__}"))
        elif sum(each.peer == peer for each in self._open) >= REQUESTS_MAX:
            self._answer(peer, message.request, refusal(f"{REQUESTS_MAX} requests of this operator are open already"))
        else:
            reply = self._guarded(lambda: self._operations.reply_to(message))
            _log.info("%s: %s, %s", type(message).__name__, reply.decided, reply.reason)
            self._answer(peer, message.request, reply)

    def _guarded(self, decide: Callable[[], Reply]) -> Reply:
        try:
            return decide()
        except (StoreError, StateError):
            raise
        except Exception as error:
            _log.exception("a request of an operator has failed")
            return refusal(f"it has failed ({error}); the job goes on, and logs/coordinator.log tells more")

    def _answer(self, peer: int, request: int, reply: Reply) -> None:
        if reply.follow is not None:
            self._open.append(_Open(peer, request, reply.follow))
        values = {name: value for name, value in reply._asdict().items() if name != "follow"}
        self._server.send(peer, Answer(request=request, is_last=reply.follow is None, **values))

    def _tell_status(self, peer: int, request: int) -> None:
        now_s = self._clock()
        if self._status is None or now_s - self._status_s >= STATUS_EVERY_S:
            try:
                self._status = job_status(self._job, self._heartbeats, self._operations.under_way, now_s)
            except Exception as error:
                _log.exception("the job's status has failed")
                self._answer(peer, request, refusal(f"it has failed ({error}); logs/coordinator.log tells more"))
                return
            self._status_s = now_s
        self._server.send(peer, StatusAnswer(request=request, status=self._status))

    def turn(self) -> None:
        """Goes on with what was asked for; to be called now and then."""
        self._operations.turn()
        before, self._open = self._open, []
        for each in before:
            reply = self._guarded(partial(_next_reply, each.follow))
            if reply is _NOTHING_NEW:
                self._open.append(each)
            else:
                self._answer(each.peer, each.request, reply)

    # ------------------------------------------------------------------------------------------------- what happens

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Notes a member's heartbeat."""
        members = self._job.core.members
        if len(self._heartbeats) > 2 * len(members):  # those who have left need no room for ever
            self._heartbeats = {worker: each for worker, each in self._heartbeats.items() if worker in members}
        self._heartbeats[heartbeat.worker] = LastHeartbeat(self._clock(), heartbeat)

    def ended(self, outcome: str, reason: str) -> None:
        """The job is over: all operators are told, none is waited for."""
        self.turn()
        self._over = JobOver(outcome=outcome, reason=reason)
        for peer in sorted(self._served):
            self._turn_away(peer, self._over)
        self._served.clear()
        self._open.clear()


_NOTHING_NEW = Reply("asked", "")


def _next_reply(follow: Callable[[], Reply | None]) -> Reply:
    return follow() or _NOTHING_NEW
