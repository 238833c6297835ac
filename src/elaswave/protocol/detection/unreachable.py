"""Workers whose address does not answer as they: a NAT that changes ports, a wrong `net.advertise`, a firewall. No IO.

Lower ids dial higher ones, joiners too, at the address that the dialled worker has told, and the handshake proves who
answers there (`transport.handshake`). A worker says now and then whom it cannot reach. Here it is decided with whom the
job cannot go on: with as few as explain all that was said.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

REACH_S = 20.0
"""So long nobody must have answered."""
FRESH_S = 25.0
"""What was not said again for so long does not count."""


class _Report(NamedTuple):
    first_s: float
    last_s: float
    text: str
    """Where was dialled, and what was seen there."""


class Unreachable:
    """What the workers of a job have said of each other; a successor is told again."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, int], _Report] = {}
        """(who dials, who is dialled)."""
        self._given_up: set[int] = set()
        """Ids are never used again."""

    def received(self, worker: int, peers: Mapping[int, str], now_s: float) -> dict[int, str]:
        """A worker says whom it cannot reach at present.

        Args:
            worker: its id.
            peers: all of these -> where it dials, and what it sees there.
            now_s: monotonic time.
        Returns:
            Workers that the job is to go on without -> why.
        """
        before = self._reported
        self._reported = {
            pair: reported
            for pair, reported in before.items()
            if pair[0] != worker and now_s - reported.last_s <= FRESH_S
        }
        for peer, text in peers.items():
            if {worker, peer} & self._given_up:
                continue
            old = before.get((worker, peer))
            is_new = old is None or now_s - old.last_s > FRESH_S
            self._reported[worker, peer] = _Report(now_s if old is None or is_new else old.first_s, now_s, text)
        found = {}
        left = dict(self._reported)
        while left:
            counts = Counter(each for pair in left for each in pair)
            worst = max(counts, key=lambda each: (counts[each], each))  # of two that do not meet who is dialled
            pairs = [pair for pair in left if worst in pair]
            if any(left[pair].last_s - left[pair].first_s >= REACH_S for pair in pairs):
                found[worst] = _reason(worst, {pair: left[pair].text for pair in pairs})
            for pair in pairs:
                del left[pair]
        self._given_up |= found.keys()
        self._reported = {pair: reported for pair, reported in self._reported.items() if not self._given_up & set(pair)}
        return found

    def forget(self) -> None:
        """Nobody, or hardly anybody, is heard at present: what was said was of a network that is gone."""
        self._reported = {}


def _reason(worker: int, seen: Mapping[tuple[int, int], str]) -> str:
    diallers = sorted(dialler for dialler, dialled in seen if dialled == worker)
    if not diallers:
        (_, first), text = min(seen.items())
        others = ", ".join(str(dialled) for _, dialled in sorted(seen))
        return f"worker {worker} reaches nobody of workers {others} (worker {first} {text}), which others reach"
    others = ", ".join(map(str, diallers))
    return (
        f"worker {worker} does not answer {seen[diallers[0], worker]} (dialled by {others}). Every worker must be "
        "reached at the address that it tells: give one with net.advertise on its host, open net.ports=FIRST-LAST "
        "there, and use no NAT that changes ports"
    )
