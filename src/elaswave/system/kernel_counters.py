"""What this kernel has counted on a TCP connection: what came, and what the other kernel has acknowledged.

The other kernel acknowledges while its processes get no processor, or are stopped; so this tells a host that is cut off
from one that is busy (`elaswave.protocol.host_silence`).
"""

import socket
import struct
from typing import Protocol

from elaswave.protocol.host_silence import Counters

_UNACKED = struct.Struct("@I")
_UNACKED_AT = 24
"""`tcpi_unacked` in `struct tcp_info` of linux/tcp.h: segments that were sent and have not been acknowledged."""
_BYTES = struct.Struct("@QQ")
_BYTES_AT = 120
"""`tcpi_bytes_acked` and `tcpi_bytes_received`, since Linux 4.1."""
_SIZE = _BYTES_AT + _BYTES.size


class _Socket(Protocol):
    """Of a socket, or of what asyncio shows of one, what is needed here."""

    @property
    def family(self) -> int:
        """Of its address."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """What the kernel says of it."""


def counters_of(sock: _Socket, connection: int) -> Counters | None:
    """Looks at a connection.

    Args:
        sock: its socket; not closed.
        connection: its number.
    Returns:
        None if it is no TCP connection, or the kernel does not count there.
    """
    if sock.family == socket.AF_UNIX:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return None
    if len(info) < _SIZE:
        return None
    (num_unacked,) = _UNACKED.unpack_from(info, _UNACKED_AT)
    num_acknowledged, num_received = _BYTES.unpack_from(info, _BYTES_AT)
    return Counters(connection, num_received, num_acknowledged, num_unacked > 0)
