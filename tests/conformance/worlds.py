"""Small worlds of linked transports of every kind, driven from one thread, for the conformance suite."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.certificates import job_tls
from tests.memory_transport import MemoryNetwork

from elaswave.transport.addresses import Endpoint
from elaswave.transport.interface import Handle, Transport
from elaswave.transport.stream import StreamTransport

KEY = b"the key of the conformance suite"
KINDS = ("unix", "tcp", "tls", "memory")
STREAM_KINDS = ("unix", "tcp")
PATIENCE_S = 20.0
"""Bound for whatever must happen; nothing in the suite waits for it to pass."""


class World:
    """Makes transports of one kind and closes them at the end.

    Args:
        kind: one of ``KINDS``.
        folder: private folder for sockets.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.transports: list[Transport] = []
        self._network = MemoryNetwork()

    def make(self, worker: int, **options: object) -> Transport:
        """A transport without links."""
        if self.kind == "memory":
            transport: Transport = self._network.transport(worker, **options)  # type: ignore[arg-type]
        else:
            transport = StreamTransport(worker, key=KEY, listen=self.place(), **options)  # type: ignore[arg-type]
        self.transports.append(transport)
        return transport

    def place(self) -> Endpoint:
        """Where transports of this world's kind listen."""
        listen = f"unix:{self.folder}" if self.kind == "unix" else "tcp:127.0.0.1"
        return Endpoint(listen, tls=job_tls() if self.kind == "tls" else None)

    def linked(self, num_workers: int, **options: object) -> list[Transport]:
        """Workers 0, 1, ... with links between all of them."""
        transports = [self.make(worker, **options) for worker in range(num_workers)]
        link(transports)
        return transports

    def close(self) -> None:
        """Close everything; no socket file may remain."""
        for transport in self.transports:
            transport.close()
        assert os.listdir(self.folder) == []


def link(transports: Sequence[Transport]) -> None:
    """Make the missing links between some transports, each in a thread of its own as in real life."""
    addresses = {transport.worker: transport.address for transport in transports}
    in_threads([lambda transport=transport: transport.connect(addresses, PATIENCE_S) for transport in transports])


def in_threads(functions: Sequence[Callable[[], object]]) -> list[object]:
    """Run functions at the same time; returns their results, or raises the first error."""
    results: list[object] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def until(condition: Callable[[], object], *transports: Transport) -> None:
    """Poll the transports until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        for transport in transports:
            transport.poll()


def finish(handles: Sequence[Handle], *transports: Transport) -> None:
    """Poll the transports until the handles are done, and check that none has failed."""
    until(lambda: all(handle.done for handle in handles), *transports)
    for handle in handles:
        assert handle.error is None, handle.error


def settle(*transports: Transport) -> None:
    """Poll until nothing moves any more."""
    quiet = 0
    seen = None
    deadline = time.monotonic() + PATIENCE_S
    while quiet < 3:
        assert time.monotonic() < deadline, "it never comes to rest"
        for transport in transports:
            transport.poll()
        now = [(dict(transport.bytes_sent), dict(transport.bytes_received)) for transport in transports]
        quiet = quiet + 1 if now == seen else 0
        seen = now
