"""What a worker's one thread blocks on: descriptors, interrupts and time. Both transports wait with this.

Holds the epoll set, the descriptor that ``interrupt`` writes to from any thread, and the loop behind
``Transport.wait``. Knows nothing of links, frames or generations beyond comparing an interrupt's generation with the
present one.
"""

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from elaswave.errors import InterruptedWaitError, WaitTimeoutError
from elaswave.transport.interface import Failures, Handle, describe_pending

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
_LONGEST_BLOCK_S = 3600.0  # epoll counts in 32-bit milliseconds; a longer wait blocks again


class Waiter:
    """Waits for one transport.

    Args:
        worker: its worker, for messages.
        timers: called before every block; does what is due and returns the seconds until it wants to be called again.
    """

    def __init__(self, worker: int, timers: Callable[[], float] = lambda: math.inf) -> None:
        self.worker = worker
        self.failures = Failures()
        self.closed = False
        self._timers = timers
        self._interrupts: deque[tuple[str, int | None]] = deque()
        self._on_event: dict[int, Callable[[int], None]] = {}
        self._epoll = select.epoll()
        self._wake_lock = threading.RLock()  # a signal handler may interrupt, too
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.register(self._wake_fd, self._woken)

    def register(self, fd: int, on_event: Callable[[int], None], mask: int = READ) -> None:
        """Call back with the epoll event mask whenever the descriptor is ready; replaces what was registered."""
        if fd in self._on_event:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._on_event[fd] = on_event

    def set_mask(self, fd: int, mask: int) -> None:
        """Change what a registered descriptor is watched for."""
        self._epoll.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        """Stop watching; unknown descriptors are ignored."""
        if self._on_event.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # closed by its owner already
                self._epoll.unregister(fd)

    def wake(self) -> None:
        """Let a blocked ``turn`` return. Thread-safe."""
        with self._wake_lock:  # the number of a closed descriptor may be another file's by now
            if not self.closed:
                os.eventfd_write(self._wake_fd, 1)

    def interrupt(self, reason: str, generation: int | None) -> None:
        """See ``Transport.interrupt``. Thread-safe."""
        self._interrupts.append((reason, generation))
        self.wake()

    def check_interrupts(self, generation: int) -> None:
        """Use up all interrupts so far.

        Args:
            generation: the present generation; an interrupt that asks to move to it, or to an older one, is void.
        Raises:
            InterruptedWaitError: one of them is not void.
        """
        reason = None
        while self._interrupts:
            text, target = self._interrupts.popleft()
            if target is None or target > generation:
                reason = text
        if reason is not None:
            raise InterruptedWaitError(reason)

    def turn(self, timeout_s: float) -> None:
        """Block until something happens or the time is over, and serve it.

        Raises:
            InterruptedWaitError: the transport was closed.
        """
        if self.closed:
            raise InterruptedWaitError(f"the transport of worker {self.worker} was closed")
        timeout_s = min(timeout_s, self._timers(), _LONGEST_BLOCK_S)
        for fd, event in self._epoll.poll(timeout_s):
            on_event = self._on_event.get(fd)
            if on_event is not None:  # an earlier event of this turn may have closed it
                on_event(event)

    def wait(
        self, handles: Handle | Iterable[Handle], timeout_s: float, generation: int, check_links: Callable[[], None]
    ) -> None:
        """See ``Transport.wait``.

        Args:
            handles, timeout_s: as there.
            generation: the present one.
            check_links: raises if what has been sent in this generation is lost; called before blocking, whenever
                something has failed.
        """
        pending = [handles] if isinstance(handles, Handle) else list(handles)
        deadline = None
        failures_seen = -1
        while True:
            has_failures = failures_seen != self.failures.count
            if has_failures:
                failures_seen = self.failures.count
                for handle in pending:
                    if handle.error is not None:
                        raise handle.error
            # The last ones usually end last: what is before them need not be looked at until they have.
            while pending and pending[-1].done:
                if (error := pending.pop().error) is not None:
                    raise error
            if not pending:
                return
            if has_failures:
                check_links()
            if self._interrupts:
                self.check_interrupts(generation)
            now = time.monotonic()
            if deadline is None:
                deadline = now + timeout_s
                self.turn(max(timeout_s, 0.0))
            elif now < deadline:
                self.turn(deadline - now)
            else:
                raise WaitTimeoutError(f"worker {self.worker} waited {timeout_s:g} s for {describe_pending(pending)}")

    def rest(self, until_s: float, generation: int) -> None:
        """See ``Transport.rest``; ``generation`` is the present one."""
        while (left_s := until_s - time.monotonic()) > 0:
            if self._interrupts:
                self.check_interrupts(generation)
            self.turn(left_s)

    def close(self, *, forked: bool = False) -> None:
        """Close the descriptors that were made here; may be called twice.

        Args:
            forked: this is a child of the process that made them; the thread that held the lock is not here.
        """
        if forked:
            self._wake_lock = threading.RLock()
        with self._wake_lock:
            if self.closed:
                return
            self.closed = True
            os.close(self._wake_fd)
        self._on_event.clear()
        self._epoll.close()

    def _woken(self, event: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
