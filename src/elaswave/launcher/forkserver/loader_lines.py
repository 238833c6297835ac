"""The template's lines to workers over which loaders are handed out: one socket for each worker, which carries sockets.

A worker learns of a loader by a descriptor that arrives on its line: its own line to that loader. It asks for another
one by the loader's number.
"""

import contextlib
import socket
from collections.abc import Callable

import msgspec

from elaswave.launcher.forkserver.machine import Loader

_ASK_BYTES_MAX = 64


class LoaderSockets:
    """The template's ends of all lines.

    Args:
        watch: called with each line that is opened, and its worker: `asked` is to be called when it can be read.
        unwatch: called with each line that is about to be closed.
    """

    def __init__(
        self, watch: Callable[[socket.socket, int], object], unwatch: Callable[[socket.socket], object]
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._lines: dict[int, socket.socket] = {}

    def open(self, worker: int) -> socket.socket:
        """Makes the line to a worker that is about to be forked.

        Returns:
            The worker's end; the template closes its copy once the worker has it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._lines[worker] = ours
        self._watch(ours, worker)
        return theirs

    def hand_over(self, loader: Loader) -> socket.socket:
        """Makes the line between a worker and a loader that is about to be forked, and hands the worker its end.

        Returns:
            The loader's end; the template closes its copy once the loader has it.
        """
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError, KeyError):  # a worker that has ended needs no loader
            socket.send_fds(self._lines[loader.worker], [msgspec.msgpack.encode(loader.number)], [theirs.fileno()])
        return ours

    def asked(self, worker: int) -> list[Loader]:
        """The loaders that a worker wants to be replaced. The end of its line closes it."""
        line = self._lines[worker]
        loaders = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = b""
                with contextlib.suppress(ConnectionError):
                    data = line.recv(_ASK_BYTES_MAX)
                if not data:
                    self._close(worker)
                    break
                loaders.append(Loader(worker, msgspec.msgpack.decode(data, type=int)))
        return loaders

    def _close(self, worker: int) -> None:
        line = self._lines.pop(worker)
        self._unwatch(line)
        line.close()

    def let_go(self) -> None:
        """In a child: closes what is the template's."""
        for line in self._lines.values():
            line.close()
