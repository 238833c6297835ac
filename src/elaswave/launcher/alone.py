"""What an agent does while it has no coordinator (rules H12 and H13): it looks how the job has ended, and gives up once
its workers commit nothing either."""

import logging
import time
from pathlib import Path

import msgspec

from elaswave.channel.messages.agent import Ended
from elaswave.config.schema import ControlConfig
from elaswave.errors import ConfigError, StoreError
from elaswave.job.key_files import JobKey, KeyRole
from elaswave.launcher.forkserver.commit_count import CommitCount
from elaswave.observability.result import RESULT_FILE
from elaswave.protocol.leadership.coordinator_timeout import ORPHAN_S, CoordinatorTimeout, TimeoutAction
from elaswave.store.opening import FILE, read_outcome

_log = logging.getLogger("elaswave.launcher")


class WithoutCoordinator:
    """Of one agent.

    Args:
        config: which store.
        job: the name of a job of several hosts; empty of a job of one.
        run_dir: the run's folder on this host.
        key: the job's.
        job_generation: which founding of the job it takes part in.
    """

    def __init__(self, config: ControlConfig, job: str, run_dir: Path, key: JobKey, job_generation: int) -> None:
        self._config, self._job, self._run_dir, self._key, self._job_generation = (
            config,
            job,
            run_dir,
            key,
            job_generation,
        )
        self._coordinator_timeout = CoordinatorTimeout(
            ORPHAN_S if config.store == FILE else max(ORPHAN_S, config.store_patience_s)
        )
        self.commits = CommitCount() if job else None
        """Counts the steps that this host's workers commit."""
        self.gives_up = False
        """Whether it has been alone for too long."""

    @property
    def for_s(self) -> float:
        """How long it has been so."""
        return self._coordinator_timeout.without_s

    def look(self, *, has_coordinator: bool) -> Ended | None:
        """To be called often; may take a second or a little more.

        Returns:
            How the job has ended, if that was found out.
        """
        num_commits = 0 if self.commits is None else self.commits.value
        due = self._coordinator_timeout.look(time.monotonic(), has_coordinator=has_coordinator, num_commits=num_commits)
        self.gives_up = due is TimeoutAction.END
        if due is not TimeoutAction.SEEK:
            return None
        return find_outcome(self._config, self._job, self._run_dir, self._key, self._job_generation)


def find_outcome(config: ControlConfig, job: str, run_dir: Path, key: JobKey, job_generation: int) -> Ended | None:
    """How the job has ended, for an agent that was cut off when its coordinator told the others (rule H13).

    It looks once, for a second or a little more: for the result in the run's folder, if hosts share it, and for any
    outcome in the job's store, if that is etcd.

    The run's log does not tell: what it ends with may be the end of one host's part.

    Args:
        config: which store.
        job: the name of a job of several hosts.
        run_dir: the run's folder on this host.
        key: of this agent. Without the job's it cannot tell whether an outcome in the store is genuine.
        job_generation: which founding of the job this agent takes part in.
    Returns:
        None: the job goes on, or nothing can be learned from here.
    """
    try:
        if (run_dir / RESULT_FILE).exists():
            return Ended(outcome="finished")
    except OSError as error:
        _log.info("this agent cannot look for the result: %s", error)
    try:
        found = None if key.role is not KeyRole.JOB else read_outcome(config, job, key.secret, job_generation)
        return None if found is None else msgspec.json.decode(found, type=Ended)
    except (StoreError, ConfigError, msgspec.MsgspecError) as error:
        _log.info("the store does not tell this agent how the job has ended: %s", error)
        return None
