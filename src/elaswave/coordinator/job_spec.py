"""What a coordinator is started with, and what of it agents of other hosts are told and check: job, checkpoints, data.

The folder of checkpoints is marked by who creates the job: another folder has no mark, or another one. Run folders are
marked too, by whoever uses them first, so that a coordinator sees which hosts share its own.
"""

import os
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

import msgspec

from elaswave.channel.messages.agent import JobSpec
from elaswave.config.schema import Config
from elaswave.data.samples import Sampler
from elaswave.errors import DataError, RunFolderError
from elaswave.hashing import key64
from elaswave.job.plan import RunPlan, StartingPoint
from elaswave.job.setup import JobSetup
from elaswave.observability.run_folder import AGENTS_FILE, CHECKPOINTS_DIR, LOGS_DIR, atomic_write, data_facts
from elaswave.store.opening import Claimed
from elaswave.transport.handshake import Secrets
from elaswave.untrusted import read_json

_MARK_BYTES = 16


class CoordinatorSetup(NamedTuple):
    """What a coordinator is started with."""

    job: JobSetup
    plan: RunPlan
    sampler: Sampler
    keys: Secrets
    """The job's: one, unless it was changed."""
    checkpoint: StartingPoint | None
    """Where workers begin; None: at the seed."""
    coordinator_ends_s: tuple[float, ...]
    """Monotonic times at which earlier coordinators of the job have ended."""
    lost_s: float | None = None
    """In a job of several hosts: monotonic time since when the coordinator before this one is missed; None: it is the
    first. Of a candidate that waits: at which its agent's last coordinator has ended."""
    claimed: Claimed | None = None
    """What it holds, if it has waited for that as a candidate."""


class JobMark(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `agents.json`."""

    job: str
    mark: str
    """Drawn whenever the job is created."""


def config_digest(config: Config) -> str:
    """Computes a hash of a configuration without its section ``net``, in which hosts differ."""
    values = {name: section for name, section in config.to_dict().items() if name != "net"}
    return f"{key64(msgspec.json.encode(values, order='deterministic').decode()):016x}"


def write_marks(run_dir: Path, job: str) -> None:
    """Marks the folder of a run that begins, and its folder of checkpoints, which all hosts share."""
    (run_dir / CHECKPOINTS_DIR).mkdir(exist_ok=True)
    for folder in (run_dir, run_dir / CHECKPOINTS_DIR):
        _write_mark(folder, job)


def _write_mark(folder: Path, job: str) -> None:
    mark = JobMark(job=job, mark=secrets.token_hex(_MARK_BYTES))
    atomic_write(folder / AGENTS_FILE, [msgspec.json.encode(mark), b"\n"])


def _read_mark(folder: Path) -> JobMark | None:
    try:
        return read_json(folder / AGENTS_FILE, JobMark)
    except (OSError, ValueError):
        return None


def mark_of(folder: Path) -> str:
    """Reads the mark of a folder; empty if it has none."""
    mark = _read_mark(folder)
    return "" if mark is None else mark.mark


def link_checkpoints(run_dir: Path, shared: Path) -> None:
    """Has a run's folder of checkpoints be one that is somewhere else.

    Raises:
        RunFolderError: the run's folder has another one, or cannot be written.
    """
    link, shared = run_dir / CHECKPOINTS_DIR, Path(os.path.abspath(shared))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        shared.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(link):
            link.symlink_to(shared)
        elif not link.samefile(shared):
            raise RunFolderError(
                f"{link} is there already, and is not {shared}: leave --checkpoints out, or give another --run-dir"
            )
    except OSError as error:
        raise RunFolderError(f"{link} cannot be made to be {shared}: {error.strerror}") from error


def own_folder(run_dir: Path, job: str) -> None:
    """Makes a host's run folder, which may be its own or one that hosts share.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        (run_dir / LOGS_DIR).mkdir(parents=True, exist_ok=True)
        mark = _read_mark(run_dir)
        if mark is None or mark.job != job:
            _write_mark(run_dir, job)
    except OSError as error:
        raise RunFolderError(f"{run_dir} cannot be written: {error.strerror}; give another --run-dir") from error


def spec_of(setup: CoordinatorSetup) -> JobSpec | None:
    """Makes what the coordinator of a job of several hosts tells their agents; None for a job of one machine."""
    job = setup.job
    if not job.name:
        return None
    return JobSpec(
        job=job.name,
        config=job.config.to_dict(),
        config_digest=config_digest(job.config),
        host=socket.gethostname(),
        run_dir=str(job.run_dir),
        mark=mark_of(job.run_dir / CHECKPOINTS_DIR),
        data=data_facts(job.run_dir),
        faults=[str(fault) for fault in job.faults],
        profile=job.profile,
        checkpoint=setup.checkpoint,
        job_generation=job.job_generation,
    )


def check_shared(run_dir: Path, spec: JobSpec, node: str) -> None:
    """Refuses a folder of checkpoints that is another one than the coordinator's, or cannot be written.

    Raises:
        RunFolderError: it is, or it is missing here.
    """
    folder = run_dir / CHECKPOINTS_DIR
    mark = mark_of(folder)
    way = (
        "every worker writes its part of a checkpoint there; mount the same folder on all hosts and name it with "
        "--checkpoints, or share the whole run folder and name it with --run-dir"
    )
    if not spec.mark or mark != spec.mark:
        what = "is another folder" if mark else f"has no {AGENTS_FILE}"
        there = f"{spec.run_dir}/{CHECKPOINTS_DIR} that {spec.host} has"
        raise RunFolderError(f"{folder} on {node} {what}, so it is not the folder {there}: {way}")
    probe = folder / f".{node}.tmp"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunFolderError(f"{folder} on {node} cannot be written ({error.strerror}), but {way}") from error


def check_data(spec: JobSpec, facts: dict[str, object], node: str) -> None:
    """Refuses data that differ from those where the job was created.

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
