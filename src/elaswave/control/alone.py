"""What an agent does while it has no coordinator (rules H12 and H13): it looks how the job has ended, and gives up once
its workers commit nothing either."""

import time
from pathlib import Path

from elaswave.channel.messages.agent import Ended
from elaswave.config.schema import ControlConfig
from elaswave.control.commit_count import CommitCount
from elaswave.control.late_outcome import late_outcome
from elaswave.control.open_store import FILE
from elaswave.job.key_files import JobKey
from elaswave.protocol.vigil import ORPHAN_S, Due, Vigil


class Alone:
    """Of one agent.

    Args:
        config: which store.
        job: the name of a job of several hosts; empty of a job of one.
        run_dir: the run's folder on this host.
        key: the job's.
        founded: which founding of the job it takes part in.
    """

    def __init__(self, config: ControlConfig, job: str, run_dir: Path, key: JobKey, founded: int) -> None:
        self._config, self._job, self._run_dir, self._key, self._founded = config, job, run_dir, key, founded
        self._vigil = Vigil(ORPHAN_S if config.store == FILE else max(ORPHAN_S, config.store_patience_s))
        self.commits = CommitCount() if job else None
        """Counts the steps that this host's workers commit."""
        self.gives_up = False
        """Whether it has been alone for too long."""

    @property
    def for_s(self) -> float:
        """How long it has been so."""
        return self._vigil.alone_s

    def look(self, *, has_coordinator: bool) -> Ended | None:
        """To be called often; may take a second or a little more.

        Returns:
            How the job has ended, if that was found out.
        """
        num_commits = 0 if self.commits is None else self.commits.value
        due = self._vigil.look(time.monotonic(), has_coordinator=has_coordinator, num_commits=num_commits)
        self.gives_up = due is Due.END
        if due is not Due.SEEK:
            return None
        return late_outcome(self._config, self._job, self._run_dir, self._key, self._founded)
