"""What agents of other hosts are told of a job, and how they check that they have the same run folder and data."""

import secrets
import socket
from pathlib import Path

import msgspec

from elaswave.config.schema import Config
from elaswave.control.agent_messages import JobSpec
from elaswave.control.coordinator_setup import CoordinatorSetup
from elaswave.control.template_messages import StartingPoint
from elaswave.errors import DataError, RunFolderError
from elaswave.hashing import key64
from elaswave.observability.result import atomic_write
from elaswave.observability.run_folder import AGENTS_FILE, data_facts

_MARK_BYTES = 16


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `agents.json`."""

    job: str
    mark: str
    """Drawn whenever the job is founded."""


def config_digest(config: Config) -> str:
    """A hash of a configuration without its section ``net``, in which hosts differ."""
    values = {name: section for name, section in config.to_dict().items() if name != "net"}
    return f"{key64(msgspec.json.encode(values, order='deterministic').decode()):016x}"


def write_mark(run_dir: Path, job: str) -> None:
    """Marks a run's folder, which all hosts share."""
    mark = Mark(job=job, mark=secrets.token_hex(_MARK_BYTES))
    atomic_write(run_dir / AGENTS_FILE, [msgspec.json.encode(mark), b"\n"])


def _read_mark(run_dir: Path) -> Mark | None:
    try:
        return msgspec.json.decode((run_dir / AGENTS_FILE).read_bytes(), type=Mark)
    except (OSError, msgspec.MsgspecError):
        return None


def spec_of(setup: CoordinatorSetup) -> JobSpec | None:
    """What the coordinator of a job of several hosts tells their agents; None for a job of one machine."""
    if not setup.job:
        return None
    mark = _read_mark(setup.run_dir)
    return JobSpec(
        job=setup.job,
        config=setup.plan.config.to_dict(),
        config_digest=config_digest(setup.plan.config),
        host=socket.gethostname(),
        run_dir=str(setup.run_dir),
        mark="" if mark is None else mark.mark,
        data=data_facts(setup.run_dir),
        faults=[str(fault) for fault in setup.faults],
        profile=setup.profile,
        checkpoint=setup.checkpoint and StartingPoint(folder=str(setup.checkpoint[0]), meta=setup.checkpoint[1]),
    )


def check_shared(run_dir: Path, spec: JobSpec, node: str) -> None:
    """Refuses a run folder that is another one than the coordinator's.

    Raises:
        RunFolderError: it is, or it is missing here.
    """
    mark = _read_mark(run_dir)
    if mark is None or mark.mark != spec.mark:
        what = f"has no {AGENTS_FILE}" if mark is None else "is another folder"
        raise RunFolderError(
            f"{run_dir} on {node} {what}, so it is not the run folder {spec.run_dir} that {spec.host} has: checkpoints "
            "and logs of all hosts go there; mount the same folder on all hosts, and name it with --run-dir where its "
            "path differs"
        )


def check_data(spec: JobSpec, facts: dict[str, object], node: str) -> None:
    """Refuses data that differ from those where the job was founded.

    Args:
        spec: of the job.
        facts: what is known of the data here, as `JobSpec.data`.
        node: this host.
    Raises:
        DataError: names what both sides have.
    """
    compared = [key for key in ("num_bytes", "sample", "num_samples") if key in spec.data or key in facts]
    if any(spec.data.get(key) != facts.get(key) for key in compared):
        there, here = (_shown({key: each.get(key) for key in compared}) for each in (spec.data, facts))
        raise DataError(
            f"the data on {node} are not those on {spec.host}: {here} here, and {there} there; bring the same files to "
            "the same path on every host"
        )


def _shown(facts: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())
