"""What a coordinator lets be done beside its turns, in tasks of its event loop and in threads."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from elaswave.system.processes import DeathWatch

_T = TypeVar("_T")


class Background:
    """Tasks beside the turns of one event loop. What one of them raises ends the coordinator, as what a message's turn
    raises does; asyncio would log it and go on with a machine that has changed and has told no one."""

    def __init__(self) -> None:
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets what a task, or a turn that no message has brought about, has raised."""
        self._tasks: set[asyncio.Future[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Lets something be done beside."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self.guarded(task.result)

    def guarded(self, turn: Callable[[], None]) -> None:
        """Takes a turn that no message has brought about."""
        try:
            turn()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the coordinator."""
        if not self.broken.done():
            self.broken.set_exception(error)

    async def close(self) -> None:
        """Ends the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def in_thread(function: Callable[[], _T]) -> "asyncio.Future[_T]":
    """Calls a function in a thread of its own. Neither an end of the wait nor one of the process waits for it.

    Args:
        function: shares nothing with others that changes.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(call: Callable[[], None]) -> None:
        if not future.done():
            call()

    def work() -> None:
        try:
            call = partial(future.set_result, function())
        except Exception as error:
            call = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
            loop.call_soon_threadsafe(settle, call)

    try:
        threading.Thread(target=work, name="planner", daemon=True).start()
    except RuntimeError as error:  # the system has no room for a thread
        future.set_exception(error)
    return future


def call_at_end(deaths: DeathWatch, worker: int, turn: Callable[[], None]) -> None:
    """Waits in a thread for the end of a worker's process, then calls back on the event loop that runs now."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        if deaths.wait(worker):
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
                loop.call_soon_threadsafe(turn)

    with contextlib.suppress(RuntimeError):  # no room for a thread: its agent tells its end, or its silence
        threading.Thread(target=wait, name=f"end of worker {worker}", daemon=True).start()
