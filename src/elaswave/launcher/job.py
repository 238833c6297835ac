"""A job from its options to its result: the folder, the faults, the display, the launcher.

Every entry point calls it: ``elaswave train`` for what a configuration describes, `elaswave.Trainer` for what a script
brings.
"""

import contextlib
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from elaswave.config.schema import Config
from elaswave.config.sites import labels_of, sites_that_may_part
from elaswave.errors import UsageError
from elaswave.faults.injection import KILL_HOST, parse_faults
from elaswave.job.key_files import JobKey, KeyRole, own_key
from elaswave.job.role import AgentRole
from elaswave.job.script import Script
from elaswave.launcher.machine import check_machine_memory
from elaswave.observability.result import RunResult
from elaswave.observability.run_folder import (
    TERMINAL_LOG,
    default_run_dir,
    keep_huggingface,
    open_run_dir,
    saved_config,
)
from elaswave.observability.worker_logs import LOGS_DIR


class JobOptions(NamedTuple):
    """How a job is run, beside its configuration."""

    run_dir: Path | None = None
    """Folder for everything that the run writes; None: a new one below ``runs``."""
    resume: bool = False
    """Go on from the newest valid checkpoint of the folder."""
    overwrite: bool = False
    """Replace the run that the folder holds."""
    profile: bool = False
    """Write a trace."""
    fault_specs: tuple[str, ...] = ()
    """Faults to inject, as ``--fault`` takes them."""
    as_json: bool = False
    """Standard output belongs to a JSON document: progress goes to standard error."""

    def saved_config(self) -> Config | None:
        """The configuration of the run that is resumed, if one is.

        Raises:
            UsageError: options that contradict each other.
            RunFolderError: there is no run to resume.
        """
        if self.resume and self.overwrite:
            raise UsageError("--resume goes on with a run and --overwrite removes it; give one of them")
        if self.resume and self.run_dir is None:
            raise UsageError("--resume needs --run-dir, the folder of the run to go on with (a Trainer its run_dir)")
        return saved_config(self.run_dir) if self.resume and self.run_dir is not None else None


class FinishedJob(NamedTuple):
    """A job that has ended well."""

    run_dir: Path
    result: RunResult


def run_job(
    config: Config,
    options: JobOptions,
    *,
    script: Script | None = None,
    layer_parameters: tuple[int, ...] = (),
    prepare: Callable[[], None] = lambda: None,
    key: JobKey | None = None,
    agent_role: AgentRole | None = None,
) -> FinishedJob:
    """Trains to the end.

    Args:
        config: with its layout resolved.
        options: how.
        script: what a script trains; None: what the configuration describes.
        layer_parameters: number of parameters of each layer of a script's model.
        prepare: called once all is checked that can be without loading anything that computes.
        key: the job's; None: that of ``net.keys``, or a new one.
        agent_role: of this host's agent; None: the job has no other hosts.
    Raises:
        ElaswaveError: see `elaswave.launcher.launcher.train`, `own_key`, `check_memory`, `find_policy`,
            `parse_faults` and `open_run_dir`.
        UsageError: a job of several hosts, without an agent.
        Exception: what a script's callback has raised.
    """
    key = key or own_key(config.net)
    key.held(KeyRole.JOB)
    if agent_role is None and config.control.hosts > 1:
        raise UsageError(
            f"control.hosts: {config.control.hosts} hosts, but this command starts all workers here: start `elaswave "
            "agent` on each host, or set control.hosts = 1"
        )
    check_machine_memory(config, layer_parameters)
    if config.elastic.policy_is_code:
        from elaswave.config.policy_code import find_policy  # late: few jobs need the planners this early

        find_policy(config.elastic.policy)
    workers = range(sum(config.widths))
    faults = parse_faults(
        options.fault_specs,
        seed=config.run.seed,
        workers=workers,
        num_steps=config.run.steps,
        respawns=config.elastic.respawns,
        hosts=labels_of(config),
        sites=sites_that_may_part(config),
        has_agents=agent_role is not None and bool(agent_role.job),
    )
    if agent_role is not None and agent_role.job and any(fault.kind == KILL_HOST for fault in faults):
        raise UsageError(
            "--fault kill-host strikes hosts that one machine stands for, and this job has agents: kill the agent of a "
            "host instead, or use `elaswave train` with elastic.hosts"
        )

    now = datetime.now(UTC)
    folder = options.run_dir or default_run_dir(now, secrets.token_hex(3))
    with open_run_dir(folder, config, now=now, resume=options.resume, overwrite=options.overwrite) as run:
        prepare()
        if script is not None and script.files:
            keep_huggingface(run, script.files)
        from elaswave.launcher.launcher import train  # late: bad input is answered before what computes is loaded
        from elaswave.observability.progress import make_reporter

        lost_output = run / LOGS_DIR / TERMINAL_LOG
        with contextlib.closing(make_reporter(json_mode=options.as_json, lost_output=lost_output)) as reporter:
            result = train(
                config,
                run,
                resume=options.resume,
                profile=options.profile,
                reporter=reporter,
                faults=faults,
                script=script,
                key=key,
                agent_role=agent_role,
            )
    return FinishedJob(run, result)
