"""Connections that have not yet proved that they hold the job's key: at most so many at a time. Pure.

Both entrances of a job have this bound, the data plane's (`transport.acceptor`) and the control plane's
(`control.server`). How long a handshake may take, and how a connection is ended, is theirs.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

MAX_UNAUTHENTICATED = 128
"""Connections in the handshake at a time; one more ends the oldest."""
CROWDED_OUT = "too many handshakes at a time; the oldest is ended"

_T = TypeVar("_T")


class UnauthenticatedPeers(Generic[_T]):
    """The connections in the handshake, oldest first."""

    def __init__(self) -> None:
        self._connections: dict[_T, None] = {}

    def __iter__(self) -> Iterator[_T]:
        return iter(list(self._connections))

    def __contains__(self, connection: _T) -> bool:
        return connection in self._connections

    def admit(self, connection: _T) -> _T | None:
        """Adds a connection; returns the one that must end for it, which is no longer among them."""
        oldest = None
        if len(self._connections) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
        self._connections[connection] = None
        return oldest

    def remove(self, connection: _T) -> None:
        """The handshake is over, or the connection; nothing happens if it was not among them."""
        self._connections.pop(connection, None)
