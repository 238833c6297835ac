"""What a worker's threads share: messages that have arrived, and what is said on a new connection to a coordinator."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from elaswave.channel.messages.worker import (
    FromWorker,
    Heartbeat,
    KeysNow,
    Leaving,
    Settled,
    Stop,
    TakeCheckpoint,
    ToWorker,
)
from elaswave.engine.activity import Activity
from elaswave.errors import WaitTimeoutError
from elaswave.protocol.messages import FIRST_GENERATION, FencedOff, Joining, Prepare, Registered
from elaswave.protocol.step.ballot import Request
from elaswave.protocol.step.replayed_state import ReplayedState
from elaswave.transport.interface import Transport


class SharedReplayedState(ReplayedState):
    """Standing facts that several threads note and read."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def ready(self, message: Any) -> None:
        """See `Facts.ready`."""
        with self._lock:
            super().ready(message)

    def link_lost(self, peer: int, message: Any) -> None:
        """See `Facts.link_lost`."""
        with self._lock:
            super().link_lost(peer, message)

    def linked(self, message: Any) -> None:
        """See `Facts.linked`."""
        with self._lock:
            super().linked(message)

    def paused(self, message: Any) -> None:
        """See `Facts.paused`."""
        with self._lock:
            super().paused(message)

    def unsound(self, message: Any) -> None:
        """See `Facts.unsound`."""
        with self._lock:
            super().unsound(message)

    def part(self, step: int, generation: int, message: Any) -> None:
        """See `Facts.part`."""
        with self._lock:
            super().part(step, generation, message)

    def leaving(self, message: Any) -> None:
        """See `Facts.leaving`."""
        with self._lock:
            super().leaving(message)

    def ended(self, message: Any) -> None:
        """See `Facts.ended`."""
        with self._lock:
            super().ended(message)

    def moved(self) -> None:
        """See `Facts.moved`."""
        with self._lock:
            super().moved()

    def settled(self, step: int) -> None:
        """See `Facts.settled`."""
        with self._lock:
            super().settled(step)

    def rolled_back(self, step: int) -> None:
        """See `Facts.rolled_back`."""
        with self._lock:
            super().rolled_back(step)

    def standing(self) -> list[Any]:
        """See `Facts.standing`."""
        with self._lock:
            return super().standing()


NO_COORDINATOR_S = 120.0
"""Bound of waiting without a coordinator: for the start, for links, for a decision, for the end of the job. While there
is one it watches all that are waited for, and bounds the wait: by what it sees of them, not by a constant."""


class WorkerClient(Protocol):
    """The connection to the coordinator; outlives coordinators."""

    def send(self, message: FromWorker, durable: bool = False) -> object:
        """Sends a message; thread-safe. A durable one is repeated until a coordinator has handled it."""
        ...

    @property
    def disconnected_s(self) -> float:
        """Seconds without a coordinator that answers; 0 while there is one."""
        ...


def check_coordinator(client: WorkerClient, waited_for: str) -> None:
    """Ends a wait whose end only a coordinator can see to, if there is none.

    Raises:
        WaitTimeoutError: there has been none for `NO_COORDINATOR_S`.
    """
    gone_s = client.disconnected_s
    if gone_s > NO_COORDINATOR_S:
        raise WaitTimeoutError(f"{waited_for}, and no coordinator has answered for {gone_s:.0f} s")


class Mailbox:
    """What a worker's two threads share.

    Args:
        worker: its id.
        transport: woken when a message concerns the step in hand.
    """

    def __init__(self, worker: int, transport: Transport) -> None:
        self.urgent = False
        """Whether a message waits that the main thread must see before it goes on."""
        self.must_stop = False
        """Whether the coordinator has told this worker to ask for the end."""
        self.num_held = (0, 0)
        """Blocks that it owns and follows, for heartbeats."""
        self.registration = Registered(
            worker=worker, address=transport.address, generation=FIRST_GENERATION, report=None
        )
        """As of `WorkerMachine.registration`, which another thread must not ask."""
        self.joining: Joining | None = None
        """What a worker says instead that is no member yet."""
        self.replayed_state = SharedReplayedState()
        self.on_commit: Callable[[], None] = lambda: None
        """Called on the main thread whenever this worker has committed a step."""
        self.on_keys: Callable[[KeysNow], None] = lambda message: None
        self.on_fenced_off: Callable[[FencedOff], None] = lambda message: None
        """Called on the control client's thread."""
        self._gone_at_s = math.inf
        """Monotonic time at which the machine will be taken away, once there was a notice."""
        self.activity = Activity()
        self.place = (FIRST_GENERATION, 0, 0)
        """Generation, step and attempt, for heartbeats."""
        self._transport = transport
        self._wanted = (0, -1)
        """The newest (generation, step) after which the coordinator wants a checkpoint."""
        self._asked = (0, 0)
        """(generation, step) of the newest vote that has asked for one and committed. Both are compared, never cleared:
        one thread sets the one, the other the other."""
        self._messages: deque[ToWorker] = deque()
        self._changed = threading.Condition()

    def hello(self) -> Registered | Joining:
        """The first message on a new connection."""
        return self.joining or self.registration

    def standing(self) -> list[Any]:
        """What is said on a new connection after all that has not been acknowledged."""
        left_s = self._gone_at_s - time.monotonic()
        return [
            msgspec.structs.replace(fact, left_s=max(0.0, left_s)) if isinstance(fact, Leaving) else fact
            for fact in self.replayed_state.standing()
        ]

    def leaving_within(self, left_s: float) -> Leaving:
        """The worker's machine will be taken away; from now on it is said on every new connection.

        Args:
            left_s: seconds until then.
        Returns:
            What is to be said now.
        """
        leaving = Leaving(worker=self.registration.worker, left_s=left_s)
        self._gone_at_s = time.monotonic() + left_s
        self.replayed_state.leaving(leaving)
        return leaving

    def heartbeat(self) -> Heartbeat | None:
        """Where the main thread is; None of a worker that is no member yet, of which nobody asks."""
        if self.joining is not None:
            return None
        doing, now_s = self.activity.snapshot(), time.monotonic()
        generation, step, attempt = self.place
        return Heartbeat(
            worker=self.registration.worker,
            generation=generation,
            step=step,
            attempt=attempt,
            label=doing.label,
            computing=doing.computing,
            waiting_on=doing.waiting_on,
            since_s=now_s - doing.since_s,
            num_owned=self.num_held[0],
            num_followed=self.num_held[1],
            moved_bytes=self._transport.moved_bytes,
            starved_s=doing.starved_s,
            first_s=now_s - doing.began_s if doing.is_first else 0.0,
        )

    @property
    def request(self) -> Request:
        """What the coordinator has told this worker to ask for in its next ballot."""
        if self.must_stop:
            return Request.STOP
        return Request.CHECKPOINT if self._wanted >= self._asked else Request.NONE

    def asked_for_checkpoint(self, generation: int, step: int) -> None:
        """A vote has asked for a checkpoint, or for the end, and has committed a step."""
        self._asked = max(self._asked, (generation, step))

    def receive(self, message: ToWorker) -> None:
        """Takes a message; called on the control client's thread."""
        if isinstance(message, Stop):
            self.must_stop = True
            return
        if isinstance(message, TakeCheckpoint):
            self._wanted = max(self._wanted, (message.generation, message.after))
            return
        if isinstance(message, Settled):
            self.replayed_state.settled(message.step)
            return
        if isinstance(message, KeysNow):
            self.on_keys(message)
            return
        with self._changed:
            self._messages.append(message)
            self._look()
            self._changed.notify()
        if isinstance(message, Prepare | FencedOff) and self.is_urgent(message):
            self._transport.interrupt(message.reason, message.generation)
        if isinstance(message, FencedOff):
            self.on_fenced_off(message)

    def is_urgent(self, message: ToWorker) -> bool:
        """Whether a message ends the step in hand. A question that has been answered, and is asked again by a new
        coordinator, does not: it must never take a worker out of a step that nothing has happened to."""
        if isinstance(message, Prepare):
            return message.generation > self.registration.generation
        return isinstance(message, FencedOff)

    @property
    def is_empty(self) -> bool:
        """Whether no message waits; costs nothing."""
        return not self._messages

    def next(self, timeout_s: float) -> ToWorker:
        """The oldest message; called on the main thread.

        Raises:
            WaitTimeoutError: none comes in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._messages), max(0.0, timeout_s)):
                raise WaitTimeoutError(f"the coordinator has said nothing for {timeout_s:.0f} s")
            message = self._messages.popleft()
            self._look()
            return message

    def registers_as(self, registration: Registered) -> None:
        """What this worker says of itself has changed, and with it which messages are urgent."""
        with self._changed:
            self.registration, self.joining = registration, None
            self._look()

    def _look(self) -> None:
        self.urgent = any(map(self.is_urgent, self._messages))
