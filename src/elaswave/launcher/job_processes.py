"""The processes of a job on this machine: begun, named in `processes.json`, reaped, ended. Nothing is decided here.

This process is the launcher. It forks the template, which forks the workers, and the coordinators. Whatever happens,
no process outlives the job: children ask the kernel to be killed when their parent dies, and this process kills and
reaps those that are left, also the orphans of a template that was killed. It has no threads, so it may fork at any
time, and no torch.

The process of a script is another matter: it may have both. There the template forks the coordinators too, and is a
fresh interpreter where this process must not even fork once (`elaswave.job.script`).
"""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from elaswave.errors import LaunchError, UsageError
from elaswave.launcher.forkserver.forking import Child, fork, how_it_ended
from elaswave.launcher.forkserver.machine import COMMITTER, COORDINATOR, Loader
from elaswave.launcher.forkserver.messages import (
    ChildGone,
    CommitDone,
    FromForkServer,
    KillWorkers,
    LoaderGone,
    LoaderSpawned,
    Prepared,
    SpawnCoordinator,
    Spawned,
    ToForkServer,
    Unprepared,
)
from elaswave.launcher.forkserver.server import ForkServerSetup
from elaswave.launcher.launcher_waits import Standstill, how_it_stands_still
from elaswave.launcher.template_link import ForkServerProcess
from elaswave.observability.processes import (
    ProcessFacts,
    Role,
    RunProcess,
    facts_of,
    process_entry,
    remove_processes,
    write_processes,
)
from elaswave.system.parent_death import ORPHAN_S_MAX, end_group, end_orphan, parent_of_orphans

FORKSERVER_GRACE_S = 2.0
"""At the end, how long the template may take to reap what it has killed, and a commit in hand to be finished."""
TICK_S = 0.2
FORKSERVER = "forkserver"
FORKSERVER_EXIT = "template exit"
COORDINATOR_EXIT = "coordinator exit"
"""What `JobProcesses.selector` tells by a key's data."""
_LAUNCHER, _FORKSERVER = -4, -3
"""Names of processes, beside workers' ids, `COMMITTER` and `COORDINATOR`."""


class JobProcesses:
    """The processes of one job; begins with the template.

    Args:
        setup: what the template is started with.
        environment: of a fresh interpreter for the template; None: it is forked.
    Raises:
        LaunchError: the system refuses the template's process.
        UsageError: a fresh interpreter cannot be given what it needs.
    """

    def __init__(self, setup: ForkServerSetup, environment: Mapping[str, str] | None = None) -> None:
        self._run_dir, self._suffix = setup.run_dir, setup.suffix
        self.selector = selectors.DefaultSelector()
        self._coordinator: Child | None = None
        """The one that this process has forked."""
        self._coordinator_number = 0
        self._pids: dict[int | Loader, int] = {}
        """Of the template's children that live."""
        self._processes: dict[int | Loader, RunProcess] = {_LAUNCHER: process_entry("launcher", 0, os.getpid())}
        self._has_changed = True
        self._orphans = contextlib.ExitStack()
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

    # -------------------------------------------------------------------------------------------------------- template

    def ask_forkserver(self, message: ToForkServer) -> None:
        """Asks the template for something; never waits."""
        self._forkserver.ask(message)
        self._watch_room()

    def _watch_room(self) -> None:
        """Waits for room in the template's socket only while something is to be sent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._forkserver.has_unsent else 0)
        if self.selector.get_key(self._forkserver).events != events:
            self.selector.modify(self._forkserver, events, FORKSERVER)

    def receive_from_forkserver(self) -> list[FromForkServer]:
        """What the template has said; the processes that it tells of are noted already."""
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
        """How the template has ended, if it has: "was killed by SIGKILL". Its workers have then ended, or will."""
        text = self._forkserver.ended()
        if text is not None:
            self.selector.unregister(self._forkserver.pid_fd)
            self._note(_FORKSERVER, None)
        return text

    def forkserver_facts(self) -> ProcessFacts | None:
        """What the kernel says of the template, if it lives."""
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
        """Has the template fork a coordinator; its end is a `ChildGone`.

        Args:
            number: how many there have been, this one included.
            message: what it is started with.
        """
        self._coordinator_number = number
        self.ask_forkserver(message)

    def _let_go(self) -> None:
        """In a coordinator: closes what is the launcher's."""
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
        """Workers that live, as far as the template has told."""
        return sorted(name for name in self._pids if not isinstance(name, Loader) and name >= 0)

    def pids_of(self, workers: Iterable[int]) -> dict[int, int]:
        """The processes of those workers that live."""
        return {worker: self._pids[worker] for worker in workers if worker in self._pids}

    @property
    def all_pids(self) -> list[int]:
        """Of this process, the template, workers and loaders."""
        return [os.getpid(), self.forkserver_pid, *self._pids.values()]

    def facts_of(self, workers: Iterable[int]) -> dict[int, ProcessFacts]:
        """What the kernel says of those workers that live."""
        found = {worker: facts_of(pid) for worker, pid in self.pids_of(workers).items()}
        return {worker: facts for worker, facts in found.items() if facts is not None}

    def _note(self, name: int | Loader, process: RunProcess | None) -> None:
        """A process has begun, or ended (None)."""
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
        """Whether all that are left are stopped (a hung worker): nothing to wait for. Loaders end with their worker."""
        pids = [pid for name, pid in self._pids.items() if not isinstance(name, Loader)]
        pids += [*([self._coordinator.pid] if self._coordinator is not None else [])]
        for pid in pids:
            facts = facts_of(pid)
            if facts is not None and facts.state != "T":
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
        for group in {*self._pids.values(), *orphans}:  # where the template could not end what its workers have left
            end_group(group, ORPHAN_S_MAX)
        self.selector.close()
        self._orphans.close()
        remove_processes(self._run_dir, self._suffix)


def await_prepared(processes: JobProcesses, log: Path, turn: Callable[[], None]) -> Prepared:
    """Waits until the template has loaded torch and the model.

    Args:
        processes: of this agent; nothing else comes from them yet.
        log: the template's.
        turn: called again and again meanwhile.
    Returns:
        What the template has found.
    Raises:
        LaunchError: torch or the model cannot be loaded.
        UsageError: what is to be trained cannot be.
    """
    standstill = Standstill(time.monotonic())
    while True:
        processes.selector.select(TICK_S)
        for message in processes.receive_from_forkserver():
            if isinstance(message, Prepared):
                return message
            assert isinstance(message, Unprepared), message
            if message.is_usage:
                raise UsageError(message.text)
            raise _unprepared(message.text, log)
        ended = processes.forkserver_end()
        if ended is not None:
            raise _unprepared(f"it {ended}", log)
        still = how_it_stands_still(standstill, processes.forkserver_facts(), time.monotonic())
        if still is not None:
            raise _unprepared(still, log)
        turn()


def _unprepared(text: str, log: Path) -> LaunchError:
    return LaunchError(
        f"the template process, from which workers are forked, cannot load torch and the model: {text}; see {log}"
    )
