"""The processes of a job on this machine: begun, named in `processes.json`, reaped, ended. Nothing is decided here.

This process is the launcher. It forks the forkserver, which forks the workers, and the coordinators. Whatever happens,
no process outlives the job: children ask the kernel to be killed when their parent dies, and this process kills and
reaps those that are left, also the orphans of a forkserver that was killed. It has no threads, so it may fork at any
time, and no torch.

The process of a script is another matter: it may have both. There the forkserver forks the coordinators too, and is a
fresh interpreter where this process must not even fork once (`elaswave.job.script`).

The launcher's end of the forkserver: starts it, asks it, hears it, ends it. Nothing here waits but the end.

What the launcher waits for that may never come: every wait has a bound, and words for its end. No IO, no clocks.
"""

import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from elaswave.errors import LaunchError, UsageError
from elaswave.job.script import at_present
from elaswave.launcher.forkserver.machine import COMMITTER, COORDINATOR, Loader
from elaswave.launcher.forkserver.messages import (
    ChildGone,
    CommitDone,
    ForkServerSetup,
    FromForkServer,
    KillWorkers,
    LoaderGone,
    LoaderSpawned,
    Prepared,
    SpawnCoordinator,
    Spawned,
    ToForkServer,
    Unpacker,
    Unprepared,
    pack_message,
)
from elaswave.launcher.forkserver.server import run_forkserver
from elaswave.observability.processes import (
    ProcessFacts,
    Role,
    RunProcess,
    children_of,
    facts_of,
    process_entry,
    remove_processes,
    write_processes,
)
from elaswave.protocol.detection.active_time import ActiveTime
from elaswave.system.processes import ORPHAN_S_MAX, Child, end_group, end_orphan, fork, how_it_ended, parent_of_orphans


def forkserver_log(suffix: str) -> str:
    """Returns the name of the forkserver's log.

    Args:
        suffix: see `elaswave.job.setup.AgentRole.suffix`.
    """
    return f"forkserver{suffix}.log"


class ForkServerProcess:
    """The forkserver of a job.

    Args:
        setup: what it is started with.
        let_go: called in a forked forkserver: closes what is the launcher's.
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

        log = setup.job.run_dir / "logs" / forkserver_log(setup.suffix)
        self._child: Child | None
        try:
            if environment is None:
                inherited = at_present(setup.read_files)
                self._child = fork(
                    "the forkserver", log, lambda: run_forkserver(setup, theirs, inherited), let_go=release
                )
            else:
                from elaswave.launcher.forkserver.fresh import pickled_setup, spawn  # late: few jobs need it

                # First, so that what cannot be pickled is refused before there is a process.
                self._unsent += pickled_setup(setup)
                self._child = spawn(log, theirs, environment)
        except BaseException:
            self._link.close()
            raise
        finally:
            # While a copy of its end is open here, its own end would not end the link.
            theirs.close()
        self.pid = self._child.pid
        self.pid_fd = self._child.pid_fd

    def fileno(self) -> int:
        """Returns the descriptor that is readable when `hear` has something to do."""
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
        """Sends what waits, as far as there is room. To a forkserver that has ended, nothing is sent."""
        try:
            while self._unsent:
                del self._unsent[: self._link.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def hear(self) -> list[FromForkServer]:
        """Reads what has come."""
        messages: list[FromForkServer] = []
        with contextlib.suppress(OSError):
            while data := self._link.recv(1 << 20):
                messages += self._unpacker.feed(data)
        return messages

    def ended(self) -> str | None:
        """Tells how it has ended, if it has ended by itself: "was killed by SIGKILL". It is reaped then."""
        if self._child is None or not _has_ended(self._child, 0.0):
            return None
        child, self._child = self._child, None
        return how_it_ended(child.reap())

    def let_go(self) -> None:
        """Closes, in another child, what is the launcher's."""
        self._link.close()
        if self._child is not None:
            os.close(self.pid_fd)

    def end(self, timeout_s: float) -> list[int]:
        """Ends it, and with it all that it has forked: it kills and reaps them itself, or is killed after a time.

        May be called again.

        Returns:
            Process ids of children that it may have left, also of those that it had no time to tell of.
        """
        # What it has said and nobody has read yet.
        told = [message.pid for message in self.hear() if isinstance(message, Spawned | LoaderSpawned)]
        # The end of the link is what asks it to end (`EndAsked`).
        self._link.close()
        if self._child is None:
            return told
        child, self._child = self._child, None
        left: list[int] = []
        if not _has_ended(child, timeout_s):
            # Asked before it is killed: afterwards the kernel gives them to another parent.
            left = children_of(child.pid)
            os.kill(child.pid, signal.SIGKILL)
        child.reap()
        return told + left


def _has_ended(child: Child, timeout_s: float) -> bool:
    """Tells whether a process ends within a time."""
    poll = select.poll()
    poll.register(child.pid_fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


STOPPED_S_MAX = 20.0
"""How long the forkserver may be stopped, and use no processor time, while it loads the model, or is to fork."""
STILL_S_MAX = 600.0
"""How long it may use none otherwise: what loads a model may wait for a disk or a network."""
KILLED_S_MAX = 60.0
"""How long a coordinator, or the process that commits a checkpoint, may take to end once it is to be killed."""


class Standstill:
    """For how long a process has used no processor time.

    Args:
        now_s: monotonic time of the beginning.
    """

    def __init__(self, now_s: float) -> None:
        self._active_time = ActiveTime(now_s)
        self._cpu_s = -1.0
        self._moved_s = 0.0

    def look(self, cpu_s: float, now_s: float) -> float:
        """Takes note of what a process has used up to now.

        Args:
            cpu_s: its processor time.
            now_s: monotonic time.
        Returns:
            Seconds for which it has used none, of those in which this process was awake.
        """
        passed_s = self._active_time.passed_s(now_s)
        if cpu_s != self._cpu_s:
            self._cpu_s, self._moved_s = cpu_s, passed_s
        return passed_s - self._moved_s


def how_it_stands_still(standstill: Standstill, forkserver: ProcessFacts | None, now_s: float) -> str | None:
    """Describes what to tell of a forkserver that has used no processor time for too long.

    Args:
        standstill: what was seen of it.
        forkserver: what the kernel says of it; None if it does not live.
        now_s: monotonic time.
    Returns:
        None of one that gets on.
    """
    if forkserver is None:
        return None
    still_s, is_stopped = standstill.look(forkserver.cpu_s, now_s), forkserver.is_stopped
    if still_s <= (STOPPED_S_MAX if is_stopped else STILL_S_MAX):
        return None
    return f"it has used no processor time for {still_s:.0f} s" + (" and is stopped" if is_stopped else "")


class LauncherWaits:
    """The waits of a launcher whose job runs."""

    def __init__(self) -> None:
        self._unforked: set[int] = set()
        self._forking = Standstill(0.0)
        self._killed: ActiveTime | None = None
        self._ending_commit: ActiveTime | None = None

    def for_forks(self, names: Iterable[int], now_s: float) -> None:
        """The forkserver is to fork workers, or a `COORDINATOR`."""
        self._unforked.update(names)
        self._forking = Standstill(now_s)

    def forked(self, name: int) -> None:
        """The forkserver has forked a process."""
        self._unforked.discard(name)

    def for_killed_coordinator(self, now_s: float) -> None:
        """The coordinator is to be killed; may be said again."""
        # Said again it must not begin the wait anew.
        self._killed = self._killed or ActiveTime(now_s)

    def coordinator_ended(self) -> None:
        """It has ended."""
        self._killed = None

    @property
    def is_for_commit(self) -> bool:
        """Whether the next coordinator waits for the end of the commit that the one before had in hand."""
        return self._ending_commit is not None

    def for_commit(self, now_s: float) -> None:
        """The process that commits a checkpoint is to be killed before the next coordinator is started."""
        self._ending_commit = ActiveTime(now_s)

    def commit_ended(self) -> None:
        """No checkpoint is being committed any more."""
        self._ending_commit = None

    def overdue(self, forkserver: Callable[[], ProcessFacts | None], now_s: float) -> str | None:
        """Tells why the job cannot go on; is to be asked often.

        Args:
            forkserver: what the kernel says of the forkserver; None if it does not live. Called only while it is to
                fork.
            now_s: monotonic time.
        Returns:
            None if nothing is overdue.
        """
        still = how_it_stands_still(self._forking, forkserver(), now_s) if self._unforked else None
        if still is not None:
            names = ["the coordinator" if name == COORDINATOR else f"worker {name}" for name in sorted(self._unforked)]
            return f"the forkserver does not fork {', '.join(names)}: {still}"
        if self._killed is not None and self._killed.passed_s(now_s) > KILLED_S_MAX:
            return (
                f"the coordinator does not answer, and has not ended within {KILLED_S_MAX:.0f} s after it was to be "
                "killed; is a disk gone, or the forkserver stopped?"
            )
        if self._ending_commit is not None and self._ending_commit.passed_s(now_s) > KILLED_S_MAX:
            return (
                "the coordinator is lost, and no other one can be started: the process that was committing a "
                f"checkpoint was to be killed, and has not ended within {KILLED_S_MAX:.0f} s; is its disk gone, or "
                "the forkserver stopped?"
            )
        return None


FORKSERVER_GRACE_S = 2.0
"""At the end, how long the forkserver may take to reap what it has killed, and a commit in hand to be finished."""
TICK_S = 0.2
FORKSERVER = "forkserver"
FORKSERVER_EXIT = "forkserver exit"
COORDINATOR_EXIT = "coordinator exit"
"""What `JobProcesses.selector` tells by a key's data."""
_LAUNCHER, _FORKSERVER = -4, -3
"""Names of processes, beside workers' ids, `COMMITTER` and `COORDINATOR`."""


class JobProcesses:
    """The processes of one job; begins with the forkserver.

    Args:
        setup: what the forkserver is started with.
        environment: of a fresh interpreter for the forkserver; None: it is forked.
    Raises:
        LaunchError: the system refuses the forkserver's process.
        UsageError: a fresh interpreter cannot be given what it needs.
    """

    def __init__(self, setup: ForkServerSetup, environment: Mapping[str, str] | None = None) -> None:
        self._run_dir, self._suffix = setup.job.run_dir, setup.suffix
        self.selector = selectors.DefaultSelector()
        self._coordinator: Child | None = None
        """The one that this process has forked."""
        self._coordinator_number = 0
        self._pids: dict[int | Loader, int] = {}
        """Of the forkserver's children that live."""
        self._processes: dict[int | Loader, RunProcess] = {_LAUNCHER: process_entry("launcher", 0, os.getpid())}
        self._has_changed = True
        self._orphans = contextlib.ExitStack()
        # Before the first fork: whatever the forkserver leaves, if it is killed, comes to this process.
        self._orphans.enter_context(parent_of_orphans())
        try:
            self._forkserver = ForkServerProcess(setup, self.selector.close, environment)
        except BaseException:
            self.selector.close()
            self._orphans.close()
            raise
        self.forkserver_pid = self._forkserver.pid
        self.selector.register(self._forkserver, selectors.EVENT_READ, FORKSERVER)
        self.selector.register(self._forkserver.pid_fd, selectors.EVENT_READ, FORKSERVER_EXIT)
        self._note(_FORKSERVER, process_entry("forkserver", 0, self._forkserver.pid))
        self.show()

    # ------------------------------------------------------------------------------------------------------- forkserver

    def ask_forkserver(self, message: ToForkServer) -> None:
        """Asks the forkserver for something; never waits."""
        self._forkserver.ask(message)
        self._watch_room()

    def _watch_room(self) -> None:
        """Waits for room in the forkserver's socket only while something is to be sent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._forkserver.has_unsent else 0)
        if self.selector.get_key(self._forkserver).events != events:
            self.selector.modify(self._forkserver, events, FORKSERVER)

    def receive_from_forkserver(self) -> list[FromForkServer]:
        """Reads what the forkserver has said; the processes that it tells of are noted already."""
        # Its link is also ready when there is room in it again.
        self._forkserver.flush()
        self._watch_room()
        messages = self._forkserver.hear()
        for message in messages:
            if isinstance(message, Spawned):
                self._pids[message.child] = message.pid
                self._note(message.child, self._described(message))
            elif isinstance(message, LoaderSpawned):
                loader = Loader(message.worker, message.number)
                self._pids[loader] = message.pid
                self._note(loader, process_entry("loader", message.worker, message.pid))
            elif isinstance(message, LoaderGone):
                loader = Loader(message.worker, message.number)
                self._pids.pop(loader, None)
                self._note(loader, None)
            elif isinstance(message, ChildGone | CommitDone):
                child = message.child if isinstance(message, ChildGone) else COMMITTER
                self._pids.pop(child, None)
                self._note(child, None)
        return messages

    def _described(self, message: Spawned) -> RunProcess:
        if message.child == COMMITTER:
            return process_entry("committer", 0, message.pid)
        if message.child == COORDINATOR:
            return process_entry("coordinator", self._coordinator_number, message.pid)
        return process_entry("worker", message.child, message.pid)

    def forkserver_end(self) -> str | None:
        """Tells how the forkserver has ended, if it has: "was killed by SIGKILL". Its workers have then ended, or
        will."""
        text = self._forkserver.ended()
        if text is not None:
            self.selector.unregister(self._forkserver.pid_fd)
            self._note(_FORKSERVER, None)
        return text

    def forkserver_facts(self) -> ProcessFacts | None:
        """Reads what the kernel says of the forkserver, if it lives."""
        return facts_of(self.forkserver_pid) if _FORKSERVER in self._processes else None

    # ----------------------------------------------------------------------------------------------------- coordinator

    def start_coordinator(self, number: int, body: Callable[[], int], *, waits: bool = False) -> None:
        """Forks a coordinator.

        Args:
            number: how many there have been, this one included.
            body: its life.
            waits: it is a candidate, until `has_taken_over` is called.
        Raises:
            LaunchError: the system refuses its process.
        """
        log = self._run_dir / "logs" / "coordinator.log"
        self._coordinator = fork("the coordinator", log, body, let_go=self._let_go)
        self.selector.register(self._coordinator.pid_fd, selectors.EVENT_READ, COORDINATOR_EXIT)
        self._coordinator_number = number
        role: Role = "candidate" if waits else "coordinator"
        self._note(COORDINATOR, process_entry(role, number, self._coordinator.pid))

    def has_taken_over(self) -> None:
        """The candidate that was forked is the coordinator from now on."""
        if self._coordinator is not None:
            self._note(COORDINATOR, process_entry("coordinator", self._coordinator_number, self._coordinator.pid))

    def ask_for_coordinator(self, number: int, message: SpawnCoordinator) -> None:
        """Has the forkserver fork a coordinator; its end is a `ChildGone`.

        Args:
            number: how many there have been, this one included.
            message: what it is started with.
        """
        self._coordinator_number = number
        self.ask_forkserver(message)

    def _let_go(self) -> None:
        """Closes, in a coordinator, what is the launcher's."""
        self.selector.close()
        self._forkserver.let_go()

    def reap_coordinator(self) -> str:
        """Reaps a coordinator that has ended.

        Returns:
            How it did: "ended with status 0".
        """
        child, self._coordinator = self._coordinator, None
        assert child is not None
        self.selector.unregister(child.pid_fd)
        self._note(COORDINATOR, None)
        return how_it_ended(child.reap())

    def kill_coordinator(self) -> None:
        """Kills a coordinator that may have ended already; it is reaped as any other."""
        if self._coordinator is not None:
            os.kill(self._coordinator.pid, signal.SIGKILL)
        elif COORDINATOR in self._pids:
            self.ask_forkserver(KillWorkers(workers=(COORDINATOR,)))

    # ------------------------------------------------------------------------------------------------------------- all

    @property
    def workers(self) -> list[int]:
        """Workers that live, as far as the forkserver has told."""
        return sorted(name for name in self._pids if not isinstance(name, Loader) and name >= 0)

    def pids_of(self, workers: Iterable[int]) -> dict[int, int]:
        """Finds the processes of those workers that live."""
        return {worker: self._pids[worker] for worker in workers if worker in self._pids}

    @property
    def all_pids(self) -> list[int]:
        """Of this process, the forkserver, workers and loaders."""
        return [os.getpid(), self.forkserver_pid, *self._pids.values()]

    def facts_of(self, workers: Iterable[int]) -> dict[int, ProcessFacts]:
        """Reads what the kernel says of those workers that live."""
        found = {worker: facts_of(pid) for worker, pid in self.pids_of(workers).items()}
        return {worker: facts for worker, facts in found.items() if facts is not None}

    def _note(self, name: int | Loader, process: RunProcess | None) -> None:
        """Notes that a process has begun, or ended (None)."""
        self._has_changed = True
        if process is None:
            self._processes.pop(name, None)
        else:
            self._processes[name] = process

    def show(self) -> None:
        """Brings `processes.json` up to date, if it is not."""
        if self._has_changed:
            self._has_changed = False
            write_processes(self._run_dir, list(self._processes.values()), self._suffix)

    def reap_all(self, timeout_s: float) -> None:
        """Waits until coordinator and workers have ended, but not for ever, nor for those that are stopped."""
        deadline_s = time.monotonic() + timeout_s
        while (self._pids or self._coordinator) and time.monotonic() < deadline_s and not self._only_stopped():
            if _FORKSERVER not in self._processes:
                return  # its children have ended with it, and are reaped as orphans
            for key, _ in self.selector.select(TICK_S):
                if key.data == FORKSERVER_EXIT:
                    return
                if key.data == COORDINATOR_EXIT:
                    self.reap_coordinator()
                elif key.data == FORKSERVER:
                    self.receive_from_forkserver()

    def _only_stopped(self) -> bool:
        """Tells whether all that are left are stopped (a hung worker): there is nothing to wait for. Loaders end with
        their worker."""
        pids = [pid for name, pid in self._pids.items() if not isinstance(name, Loader)]
        pids += [*([self._coordinator.pid] if self._coordinator is not None else [])]
        for pid in pids:
            facts = facts_of(pid)
            if facts is not None and not facts.is_stopped:
                return False
        return True

    def end(self) -> None:
        """Kills and reaps the processes that are left. To be called once."""
        self.kill_coordinator()
        orphans = self._forkserver.end(FORKSERVER_GRACE_S)
        if self._coordinator is not None:
            self._coordinator.reap()
            self._coordinator = None
        for pid in {*self._pids.values(), *orphans}:
            end_orphan(pid)
        for group in {*self._pids.values(), *orphans}:  # where the forkserver could not end what its workers have left
            end_group(group, ORPHAN_S_MAX)
        self.selector.close()
        self._orphans.close()
        remove_processes(self._run_dir, self._suffix)


def await_prepared(processes: JobProcesses, log: Path, turn: Callable[[], None]) -> Prepared:
    """Waits until the forkserver has loaded torch and the model.

    Args:
        processes: of this agent; nothing else comes from them yet.
        log: the forkserver's.
        turn: called again and again meanwhile.
    Returns:
        What the forkserver has found.
    Raises:
        LaunchError: torch or the model cannot be loaded.
        UsageError: what is to be trained cannot be.
    """
    standstill = Standstill(time.monotonic())
    while True:
        processes.selector.select(TICK_S)
        ended = processes.forkserver_end()  # looked at first: then all that it has said is there
        for message in processes.receive_from_forkserver():
            if isinstance(message, Prepared):
                return message
            assert isinstance(message, Unprepared), message
            if message.is_usage:
                raise UsageError(message.text)
            raise _unprepared(message.text, log)
        if ended is not None:
            raise _unprepared(f"it {ended}", log)
        still = how_it_stands_still(standstill, processes.forkserver_facts(), time.monotonic())
        if still is not None:
            raise _unprepared(still, log)
        turn()


def _unprepared(text: str, log: Path) -> LaunchError:
    return LaunchError(
        f"the forkserver, from which workers are forked, cannot load torch and the model: {text}; see {log}"
    )
