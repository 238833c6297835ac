"""Whether a host is cut off, by what the coordinator's kernel knows of the connections to it. No IO, no clocks.

A worker that is silent may be starved, and a bound that bears with that is long. A host that is cut off need not wait
for it: where processes get no processor, their kernel still acknowledges what it receives. So the coordinator looks at
its own kernel's counters (TCP_INFO) once all workers of another host have been silent for `LOOK_S`, and sends something
on every connection there, so that there is something to acknowledge. Only silent hosts are looked at: thousands of
others cost nothing.

    something new has come, from its agent           the host lives, and its workers are judged one by one
    something was acknowledged, and nothing came     it lives, but is very busy: the bounds on its workers' silence are
                                                     as long as where most workers are silent together
    nothing of either, on any connection             it is cut off, in both directions or in one: its workers are lost
    nothing is outstanding, or nobody can look       nothing is known

Retransmitted segments come in again and again from a host that does not hear the coordinator. They are nothing new, so
that a host that is cut off in one direction only is found as well.
"""

from collections.abc import Iterable
from typing import NamedTuple

LOOK_S = 0.4
"""Silence of all workers of a host after which its connections are looked at: a heartbeat is missing."""
HOST_SILENT_S = 2.0
"""Silence of a whole host, kernel included, that loses it."""
UNACKNOWLEDGED_S = 1.5
"""For so long of that, at least, something must have waited for an acknowledgement: the first retransmissions, after
0.2, 0.6 and 1.4 s, may be lost too."""
MUTE_S = 1.0
"""A host of which nothing has come for so long, from its agent either, is silent as a whole."""
FRESH_S = 0.5
"""How old the newest look may be when a host is held for lost."""


class Counters(NamedTuple):
    """What the kernel has counted on one connection."""

    connection: int
    """Which one; a number is never used again."""
    num_received: int
    """Bytes that have come, each counted once."""
    num_acknowledged: int
    """Bytes sent that the other kernel has acknowledged."""
    is_outstanding: bool
    """Whether something was sent that it has not."""


class HostSilence:
    """One host, from the moment at which it fell silent.

    Args:
        last_heartbeat_s: time of the newest sign of life of its workers, as of all methods by the detector's clock.
    """

    __slots__ = ("_asked_s", "_came_s", "_known", "_lives_s", "_looked_s")

    def __init__(self, last_heartbeat_s: float) -> None:
        self._lives_s = self._came_s = last_heartbeat_s
        self._known: dict[int, Counters] | None = None
        self._asked_s: float | None = None
        """Since when something has been outstanding."""
        self._looked_s: float | None = None

    def looked(self, counters: Iterable[Counters], now_s: float) -> None:
        """Somebody has looked at all connections to the host just now.

        Args:
            counters: of each.
            now_s: the time.
        """
        known, self._known = self._known, {each.connection: each for each in counters}
        self._looked_s = now_s
        if known is not None:
            before = [(each, known.get(each.connection)) for each in self._known.values()]
            if any(_has_come(each, then) for each, then in before):
                self._came_s = self._lives_s = now_s
                self._asked_s = None
            elif any(_is_acknowledged(each, then) for each, then in before):
                self._lives_s, self._asked_s = now_s, None
        if not any(each.is_outstanding for each in self._known.values()):
            self._asked_s = None
        elif self._asked_s is None:
            self._asked_s = now_s

    def is_mute(self, now_s: float) -> bool:
        """Tells whether its agent is silent too, and what its kernel does is known: it is lost by that, or starved."""
        is_known = bool(self._known) and self._looked_s is not None and now_s - self._looked_s <= FRESH_S
        return is_known and now_s - self._came_s > MUTE_S

    def finding(self, now_s: float, factor: float = 1.0) -> str:
        """Explains why the host is lost; empty if it is not, as far as anybody knows.

        Args:
            now_s: the time.
            factor: on bounds.
        """
        if self._looked_s is None or self._asked_s is None or now_s - self._looked_s > FRESH_S:
            return ""
        silence_s, asked_s = now_s - self._lives_s, now_s - self._asked_s
        if silence_s <= factor * HOST_SILENT_S or asked_s <= factor * UNACKNOWLEDGED_S:
            return ""
        return (
            f"nothing has come from it for {silence_s:.2f} s, and its kernel has acknowledged nothing for "
            f"{asked_s:.2f} s (bounds {factor * HOST_SILENT_S:.1f} and {factor * UNACKNOWLEDGED_S:.1f} s)"
        )


def _has_come(now: Counters, before: Counters | None) -> bool:
    """Tells whether anything has come on a connection since the look before; a new one has come itself."""
    return before is None or now.num_received > before.num_received


def _is_acknowledged(now: Counters, before: Counters | None) -> bool:
    return before is not None and now.num_acknowledged > before.num_acknowledged
