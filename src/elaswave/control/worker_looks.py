"""What an agent sees of workers that the coordinator waits for, or hears nothing of: how much they compute, and how
long they have waited for a processor. Only the agent can look: a coordinator may be on another host."""

import time
from collections.abc import Mapping

from elaswave.channel.messages.agent import Awaited, CpuTimes
from elaswave.control.job_processes import TICK_S, JobProcesses
from elaswave.observability.processor_waits import ProcessorWaits

LOOK_S = 1.0
"""Between two looks at the processes of workers that have not registered."""
LOOK_AT_SILENT_S = 0.9 * TICK_S
"""Between two looks at the processes of workers that are silent: every turn of the loop, if nothing wakes it."""


class WorkerLooks:
    """Looks at an agent's workers as its coordinator asks for it.

    Args:
        processes: of the agent.
    """

    def __init__(self, processes: JobProcesses) -> None:
        self._processes = processes
        self._awaited: tuple[int, ...] = ()
        """Workers that the coordinator waits for."""
        self._looked_s = 0.0
        self._silent: Mapping[int, ProcessorWaits] = {}
        """Workers of which the coordinator hears nothing."""
        self._looked_at_silent_s = 0.0

    def asked(self, message: Awaited) -> None:
        """Whom the coordinator waits for now."""
        self._awaited = message.workers
        now_s, pids = time.monotonic(), self._processes.pids_of(message.silent)
        self._silent = {worker: self._silent.get(worker) or ProcessorWaits(pid, now_s) for worker, pid in pids.items()}

    def turn(self) -> list[CpuTimes]:
        """What to tell the coordinator now; to be called often."""
        now_s, found = time.monotonic(), []
        if self._awaited and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            cpu_s = {worker: facts.cpu_s for worker, facts in self._processes.facts_of(self._awaited).items()}
            found.append(CpuTimes(cpu_s=cpu_s))
        if self._silent and now_s - self._looked_at_silent_s >= LOOK_AT_SILENT_S:
            self._looked_at_silent_s = now_s
            waited_s = {worker: waits.look(now_s) for worker, waits in self._silent.items()}
            found.append(CpuTimes(cpu_s={}, waited_s=waited_s))
        return found
