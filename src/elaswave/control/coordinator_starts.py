"""How an agent starts a coordinator: as a fork of its own, which may be a candidate that waits, or, where a script's
process must not fork, by the template."""

import contextlib
import os
import time

from elaswave.control.candidacy import Candidacy
from elaswave.control.candidate import Progress
from elaswave.control.coordinator import run_candidate, run_coordinator
from elaswave.control.coordinator_setup import CoordinatorSetup
from elaswave.control.job_processes import JobProcesses
from elaswave.control.launcher_waits import LauncherWaits
from elaswave.control.template_messages import SpawnCoordinator
from elaswave.job.plan import StartingPoint
from elaswave.job.role import Post
from elaswave.protocol.template import COORDINATOR


class CoordinatorStarts:
    """Of one agent.

    Args:
        setup: what its first coordinator is started with.
        checkpoint: where workers begin; None: at the seed.
        post: how the agent takes part.
        processes, candidacy, waits: of the agent.
        by_template: whether the template forks coordinators.
    """

    def __init__(
        self,
        setup: CoordinatorSetup,
        checkpoint: StartingPoint | None,
        post: Post,
        processes: JobProcesses,
        candidacy: Candidacy,
        waits: LauncherWaits,
        *,
        by_template: bool,
    ) -> None:
        self._setup, self._checkpoint, self._post = setup, checkpoint, post
        self.keys = setup.keys
        """The job's, of those that are started from now on; the template has its own."""
        self._processes, self._candidacy, self._waits = processes, candidacy, waits
        self._by_template = by_template

    def start(self, ends_s: tuple[float, ...]) -> None:
        """Starts the next one.

        Args:
            ends_s: monotonic times at which earlier ones have ended.
        Raises:
            LaunchError: the system refuses its process.
        """
        number, setup = 1 + len(ends_s), self._setup
        if self._by_template:
            message = SpawnCoordinator(
                num_samples=setup.sampler.num_samples,
                checkpoint=self._checkpoint,
                started_s=setup.started_s,
                coordinator_ends_s=ends_s,
                home=setup.home,
            )
            self._processes.ask_for_coordinator(number, message)
            self._waits.for_forks((COORDINATOR,), time.monotonic())
            return
        setup = setup._replace(keys=self.keys, coordinator_ends_s=ends_s, lost_s=self._candidacy.missed_since_s)
        if not self._post.is_candidate:
            self._processes.start_coordinator(number, lambda: run_coordinator(setup))
            return
        writes = self._candidacy.open()

        def stand_by() -> int:
            name, founds = self._post.name, self._post.founds
            return run_candidate(setup, name, founds, lambda progress: _tell(writes, progress))

        try:
            self._processes.start_coordinator(number, stand_by, waits=True)
        finally:
            os.close(writes)


def _tell(writes: int, progress: Progress) -> None:
    """In a candidate's process: a report to its agent, which may have ended, and with it this process."""
    with contextlib.suppress(OSError):
        os.write(writes, progress.line())
