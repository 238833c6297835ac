"""What an agent sends of its workers' logs, to a coordinator whose run folder is another one.

It is asked to on each connection (`SendLogs`). Nothing is kept for later: what cannot be sent stays in the log's file
on this host, from which the next part is read.
"""

from collections.abc import Callable
from pathlib import Path

from elaswave.control.agent_messages import LogPart
from elaswave.observability.worker_logs import LogTail

EVERY_S = 0.5


class LogSending:
    """The logs of one host's workers.

    Args:
        run_dir: of this host.
        send: sends to the coordinator; returns whether there is a connection.
    """

    def __init__(self, run_dir: Path, send: Callable[[LogPart], bool]) -> None:
        self._run_dir = run_dir
        self._send = send
        self._is_wanted = False
        self._tails: dict[int, LogTail] = {}
        self._looked_s = 0.0

    def started(self, worker: int) -> None:
        """A worker is being started here."""
        self._tails[worker] = LogTail(self._run_dir, worker)

    def connected(self) -> None:
        """There is a new connection: a coordinator asks for logs if it wants them."""
        self._is_wanted = False

    def wanted(self) -> None:
        """The coordinator wants them."""
        self._is_wanted = True

    def ended(self, worker: int) -> None:
        """A worker has ended: its last words are sent before it is said."""
        tail = self._tails.pop(worker, None)
        if tail is not None and self._is_wanted:
            self._send_part(worker, tail.next(is_last=True))

    def turn(self, now_s: float) -> None:
        """Sends what has been printed, now and then."""
        if not self._is_wanted or now_s - self._looked_s < EVERY_S:
            return
        self._looked_s = now_s
        for worker, tail in self._tails.items():
            self._send_part(worker, tail.next())

    def _send_part(self, worker: int, text: str) -> None:
        if text:
            self._send(LogPart(worker=worker, text=text))
