"""The launcher's end of the template process: starts it, asks it, hears it, ends it. Nothing here waits but the end."""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping

from elaswave.job.read_files import at_present
from elaswave.launcher.forkserver.forking import Child, fork, how_it_ended
from elaswave.launcher.forkserver.messages import (
    FromForkServer,
    LoaderSpawned,
    Spawned,
    ToForkServer,
    Unpacker,
    pack_message,
)
from elaswave.launcher.forkserver.server import ForkServerSetup, run_forkserver
from elaswave.observability.processes import children_of


def forkserver_log(suffix: str) -> str:
    """The name of the template's log.

    Args:
        suffix: see `elaswave.job.role.Post.suffix`.
    """
    return f"template{suffix}.log"


class ForkServerProcess:
    """The template of a job.

    Args:
        setup: what it is started with.
        let_go: called in a forked template: closes what is the launcher's.
        environment: of a fresh interpreter; None: it is forked, and this process must have one thread only.
    Raises:
        LaunchError: the system refuses the process.
        UsageError: a fresh interpreter cannot be given what it needs.
    """

    def __init__(
        self, setup: ForkServerSetup, let_go: Callable[[], None], environment: Mapping[str, str] | None = None
    ) -> None:
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        self._unpacker: Unpacker[FromForkServer] = Unpacker(FromForkServer)
        self._unsent = bytearray()

        def release() -> None:
            self._link.close()
            let_go()

        log = setup.run_dir / "logs" / forkserver_log(setup.suffix)
        self._child: Child | None
        try:
            if environment is None:
                inherited = at_present(setup.read_files)
                self._child = fork(
                    "the template", log, lambda: run_forkserver(setup, theirs, inherited), let_go=release
                )
            else:
                from elaswave.launcher.forkserver.fresh_forkserver import pickled_setup, spawn  # late: few jobs need it

                self._unsent += pickled_setup(setup)
                self._child = spawn(log, theirs, environment)
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
        self.pid = self._child.pid
        self.pid_fd = self._child.pid_fd

    def fileno(self) -> int:
        """Readable when `hear` has something to do."""
        return self._link.fileno()

    def ask(self, message: ToForkServer) -> None:
        """Sends a message, or as much of it as there is room for; `flush` sends the rest."""
        self._unsent += pack_message(message)
        self.flush()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Sends what waits, as far as there is room. To a template that has ended, nothing is sent."""
        try:
            while self._unsent:
                del self._unsent[: self._link.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def hear(self) -> list[FromForkServer]:
        """What has come."""
        messages: list[FromForkServer] = []
        with contextlib.suppress(OSError):
            while data := self._link.recv(1 << 20):
                messages += self._unpacker.feed(data)
        return messages

    def ended(self) -> str | None:
        """How it has ended, if it has ended by itself: "was killed by SIGKILL". It is reaped then."""
        if self._child is None or not _has_ended(self._child, 0.0):
            return None
        child, self._child = self._child, None
        return how_it_ended(child.reap())

    def let_go(self) -> None:
        """In another child: closes what is the launcher's."""
        self._link.close()
        if self._child is not None:
            os.close(self.pid_fd)

    def end(self, timeout_s: float) -> list[int]:
        """Ends it, and with it all that it has forked: it kills and reaps them itself, or is killed after a time.

        May be called again.

        Returns:
            Process ids of children that it may have left, also of those that it had no time to tell of.
        """
        told = [message.pid for message in self.hear() if isinstance(message, Spawned | LoaderSpawned)]
        self._link.close()
        if self._child is None:
            return told
        child, self._child = self._child, None
        left: list[int] = []
        if not _has_ended(child, timeout_s):
            left = children_of(child.pid)
            os.kill(child.pid, signal.SIGKILL)
        child.reap()
        return told + left


def _has_ended(child: Child, timeout_s: float) -> bool:
    """Whether a process ends within a time."""
    poll = select.poll()
    poll.register(child.pid_fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))
