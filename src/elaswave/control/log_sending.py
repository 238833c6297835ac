"""What an agent sends of its workers' logs, to a coordinator whose run folder is another one.

It is asked to on each connection (`SendLogs`). Nothing is kept for later: what cannot be sent stays in the log's file
on this host, from which the next part is read.
"""

from pathlib import Path

from elaswave.channel.messages.agent import LogPart
from elaswave.observability.worker_logs import LogTail

EVERY_S = 0.5


class LogSending:
    """The logs of one host's workers.

    Args:
        run_dir: of this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
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

    def ended(self, worker: int) -> list[LogPart]:
        """A worker has ended: its last words, which are to be sent before that is said."""
        tail = self._tails.pop(worker, None)
        return [] if tail is None or not self._is_wanted else _parts({worker: tail.next(is_last=True)})

    def turn(self, now_s: float) -> list[LogPart]:
        """What has been printed, now and then."""
        if not self._is_wanted or now_s - self._looked_s < EVERY_S:
            return []
        self._looked_s = now_s
        return _parts({worker: tail.next() for worker, tail in self._tails.items()})


def _parts(texts: dict[int, str]) -> list[LogPart]:
    return [LogPart(worker=worker, text=text) for worker, text in texts.items() if text]
