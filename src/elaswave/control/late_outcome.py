"""How a job has ended, for an agent that was cut off when its coordinator told the others (rule H13)."""

import logging
import os
from pathlib import Path

import msgspec

from elaswave.config.schema import ControlConfig
from elaswave.control.agent_messages import Ended
from elaswave.control.open_store import read_outcome
from elaswave.errors import ConfigError, StoreError
from elaswave.observability.events import RunFinished, read_events
from elaswave.observability.result import EVENTS_FILE, RESULT_FILE

_log = logging.getLogger("elaswave.control")


class LateOutcome:
    """Where the outcome may stand: the run's folder, if hosts share it, and the job's store, if that is etcd.

    Args:
        config: which store.
        job: the name of a job of several hosts.
        run_dir: the run's folder on this host.
    """

    def __init__(self, config: ControlConfig, job: str, run_dir: Path) -> None:
        self._config = config
        self._job = job
        self._run_dir = run_dir
        self._began_with = self._size_of_log()
        """What this host's folder has of earlier parts of the job says nothing of this one."""

    def seek(self) -> Ended | None:
        """Looks once, within a second or a little more. None: the job goes on, or nothing can be learned from here."""
        if (self._run_dir / RESULT_FILE).exists():
            return Ended(outcome="finished")
        if self._size_of_log() != self._began_with:
            events = read_events(self._run_dir / EVENTS_FILE)
            last = events[-1] if events else None
            if isinstance(last, RunFinished) and last.outcome != "finished":
                return Ended(outcome="stopped" if last.outcome == "interrupted" else "failed", reason=last.reason)
        try:
            found = read_outcome(self._config, self._job)
            return None if found is None else msgspec.json.decode(found, type=Ended)
        except (StoreError, ConfigError, msgspec.DecodeError) as error:
            _log.info("the store does not tell this agent how the job has ended: %s", error)
            return None

    def _size_of_log(self) -> int:
        try:
            return os.stat(self._run_dir / EVENTS_FILE).st_size
        except OSError:
            return 0
