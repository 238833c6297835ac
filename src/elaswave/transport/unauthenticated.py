"""Connections that have not yet proved that they hold the job's key: at most so many at a time, and few lines of log
about them. Pure.

Both entrances of a job have these bounds, the data plane's (`transport.acceptor`) and the control plane's
(`control.server`). How long a handshake may take, and how a connection is ended, is theirs.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

MAX_UNAUTHENTICATED = 128
"""Connections in the handshake at a time; one more ends another."""
CROWDED_OUT = "too many handshakes at a time; one of those that have said nothing, from where most come, is ended"
MAX_LINES_PER_PERIOD = 20
"""Lines of log; more in `PERIOD_S` are only counted, so that a flood of connections is no flood of lines."""
PERIOD_S = 10.0

_T = TypeVar("_T")


def source_network(address: Any) -> str:
    """Where a connection comes from, as far as its sender cannot choose: an IPv4 address, an IPv6 network of 64 bits.

    Args:
        address: of the other side, as `socket.accept` returns it; of a Unix socket: one for all.
    """
    if not isinstance(address, tuple) or not address:
        return ""
    try:
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return str(address[0])
    return str(ipaddress.ip_network((int(found), 64), strict=False) if found.version == 6 else found)


class UnauthenticatedPeers(Generic[_T]):
    """The connections in the handshake, oldest first."""

    def __init__(self) -> None:
        self._sources: dict[_T, str] = {}
        self._silent: set[_T] = set()
        """Those that have said nothing yet."""

    def __iter__(self) -> Iterator[_T]:
        return iter(list(self._sources))

    def __contains__(self, connection: _T) -> bool:
        return connection in self._sources

    def admit(self, connection: _T, source: str = "") -> _T | None:
        """Adds a connection.

        Args:
            connection: the new one; it has said nothing.
            source: as of `source_of`.
        Returns:
            The one that must end for it, which is no longer among them: of those that have said nothing, if there are
            any, the oldest from the source that has most.
        """
        ended = None
        if len(self._sources) >= MAX_UNAUTHENTICATED:
            among = [each for each in self._sources if each in self._silent] or list(self._sources)
            most = Counter(self._sources[each] for each in among).most_common(1)[0][0]
            ended = next(each for each in among if self._sources[each] == most)
            self.remove(ended)
        self._sources[connection] = source
        self._silent.add(connection)
        return ended

    def spoke(self, connection: _T) -> None:
        """Something has come from it."""
        self._silent.discard(connection)

    def remove(self, connection: _T) -> None:
        """The handshake is over, or the connection; nothing happens if it was not among them."""
        self._sources.pop(connection, None)
        self._silent.discard(connection)


class LimitedLines:
    """Which lines about strangers are written, and how many were not."""

    def __init__(self) -> None:
        self.ends_s: float | None = None
        """When `unsaid` has something to tell at the earliest, by the caller's clock; None: there is nothing."""
        self._num_lines = 0
        self._period_ends_s = 0.0

    def admit(self, now_s: float) -> bool:
        """Says whether one more line is to be written now."""
        if not self._num_lines:
            self._period_ends_s = now_s + PERIOD_S
        self._num_lines += 1
        if self._num_lines <= MAX_LINES_PER_PERIOD:
            return True
        self.ends_s = self._period_ends_s
        return False

    def unsaid(self, now_s: float) -> str:
        """A line about those that were not written in a period that is over; empty: there are none, or it is not."""
        if not self._num_lines or now_s < self._period_ends_s:
            return ""
        left, self._num_lines, self.ends_s = self._num_lines - MAX_LINES_PER_PERIOD, 0, None
        return f"{left} more connections were turned away within {PERIOD_S:g} s" if left > 0 else ""
