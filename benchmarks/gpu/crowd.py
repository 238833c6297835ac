"""Several processes at once that report to this one: started fresh, so each has a context of its own."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

_SPAWN = multiprocessing.get_context("spawn")


def pipe() -> tuple[Connection, Connection]:
    """A reading and a writing end that can be given to two members."""
    return _SPAWN.Pipe(duplex=False)


class Report(NamedTuple):
    """What a member says."""

    member: int
    at_s: float
    """On the monotonic clock, when it was heard."""
    message: Any


class Ended(NamedTuple):
    """The message of a member that has ended."""

    exit_code: int | None


class Member:
    """A member's side."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self._connection = connection

    def say(self, message: Any) -> None:
        """Reports something that can be pickled; a tensor is shared."""
        self._connection.send(message)

    def heard(self, timeout_s: float = 0.0) -> Any:
        """What was told next, or None."""
        return self._connection.recv() if self._connection.poll(timeout_s) else None


def _run(function: Callable[..., None], number: int, connection: Connection, arguments: tuple[Any, ...]) -> None:
    function(Member(number, connection), *arguments)


class Crowd:
    """Members that run until they return or are killed; killed at the end of a ``with`` at the latest.

    Args:
        function: called in each as ``function(member, *arguments)``; of a module's top level.
        arguments: by member.
    """

    def __init__(self, function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._connections: list[Connection] = []
        self._processes = []
        self._open: set[int] = set()
        for number, each in enumerate(arguments):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_run, args=(function, number, theirs, each), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
            self._open.add(number)

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self._processes)):
            self.kill(number)
        for process in self._processes:
            process.join(timeout=30)

    def kill(self, member: int) -> None:
        """SIGKILL."""
        pid = self._processes[member].pid
        if pid is not None and self._processes[member].exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tell(self, member: int, message: Any) -> None:
        """Sends something to a member; a member that has ended does not hear it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connections[member].send(message)

    def pid(self, member: int) -> int:
        """Of its process."""
        return self._processes[member].pid or 0

    def reports(self, seconds: float) -> Iterator[Report]:
        """What members say, until all have ended or the seconds are over. The last of each is an `Ended`."""
        end_s = time.monotonic() + seconds
        while self._open:
            sources = {self._connections[number]: number for number in self._open}
            ready = wait(list(sources), max(0.0, end_s - time.monotonic()))
            if not ready:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                number = sources[connection]
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._open.discard(number)
                    self._processes[number].join(timeout=30)
                    message = Ended(self._processes[number].exitcode)
                yield Report(number, time.monotonic(), message)

    def expect(self, wanted: Any, seconds: float, members: Sequence[int] | None = None) -> dict[int, Report]:
        """Waits until all members have said something that equals `wanted`, or is of that type; drops the rest.

        Raises:
            RuntimeError: one has ended, or said nothing of the kind in time.
        """
        left = set(range(len(self._processes)) if members is None else members)
        found: dict[int, Report] = {}
        if left:
            for report in self.reports(seconds):
                is_wanted = isinstance(report.message, wanted) if isinstance(wanted, type) else report.message == wanted
                if report.member in left and isinstance(report.message, Ended):
                    raise RuntimeError(f"process {report.member} ended with {report.message.exit_code}")
                if report.member in left and is_wanted:
                    found[report.member] = report
                    left.discard(report.member)
                    if not left:
                        break
        if left:
            raise RuntimeError(f"processes {sorted(left)} did not say {wanted} within {seconds:.0f} s")
        return found
