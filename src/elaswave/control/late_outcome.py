"""How a job has ended, for an agent that was cut off when its coordinator told the others (rule H13)."""

import logging
from pathlib import Path

import msgspec

from elaswave.channel.messages.agent import Ended
from elaswave.config.schema import ControlConfig
from elaswave.control.open_store import read_outcome
from elaswave.errors import ConfigError, StoreError
from elaswave.job.key_files import JobKey, Role
from elaswave.observability.result import RESULT_FILE

_log = logging.getLogger("elaswave.control")


def late_outcome(config: ControlConfig, job: str, run_dir: Path, key: JobKey, founded: int) -> Ended | None:
    """Looks once, for a second or a little more: for the result in the run's folder, if hosts share it, and for
    any outcome in the job's store, if that is etcd.

    The run's log does not tell: what it ends with may be the end of one host's part.

    Args:
        config: which store.
        job: the name of a job of several hosts.
        run_dir: the run's folder on this host.
        key: of this agent. Without the job's it cannot tell whether an outcome in the store is genuine.
        founded: which founding of the job this agent takes part in.
    Returns:
        None: the job goes on, or nothing can be learned from here.
    """
    try:
        if (run_dir / RESULT_FILE).exists():
            return Ended(outcome="finished")
    except OSError as error:
        _log.info("this agent cannot look for the result: %s", error)
    try:
        found = None if key.role is not Role.JOB else read_outcome(config, job, key.secret, founded)
        return None if found is None else msgspec.json.decode(found, type=Ended)
    except (StoreError, ConfigError, msgspec.MsgspecError) as error:
        _log.info("the store does not tell this agent how the job has ended: %s", error)
        return None
