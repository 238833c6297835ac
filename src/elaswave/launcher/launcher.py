"""A job on this machine from its options to its result: checks what it is given, starts it, says how it ended.

Every entry point calls it: ``elaswave train`` for what a configuration describes, `elaswave.Trainer` for what a script
brings. What runs the job is `elaswave.launcher.local_job`. This process holds no torch, unless it is a script's: the
forkserver, which is started first, loads it while the data and the checkpoints are looked at here.
"""

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from elaswave.channel.messages.agent import Ended
from elaswave.checkpoints.checkpoint import find_newest_checkpoint, newest_committed_step, put_aside, remove_stale
from elaswave.checkpoints.format import CheckpointMeta, stored_name
from elaswave.config.cluster import labels_of, sites_that_may_part
from elaswave.config.schema import Config
from elaswave.data.fingerprint import (
    DatasetFingerprint,
    check_same_data,
    check_same_dataset,
    dataset_fingerprint_in,
    fingerprint_in,
    fingerprint_of_all,
    script_differences,
    script_in_force,
)
from elaswave.data.samples import Sampler
from elaswave.errors import (
    CheckpointError,
    RecoveryError,
    RetryError,
    RunFolderError,
    StateError,
    StoppedBySignalError,
    UsageError,
    WorkerError,
)
from elaswave.faults.injection import KILL_HOST, Fault, Probe, parse_faults
from elaswave.job.keys import JobKey, KeyRole, new_key, own_key
from elaswave.job.plan import RunPlan, StartingPoint, sampler_of
from elaswave.job.script import FinishedJob, JobOptions, Script
from elaswave.job.setup import AgentRole, own_role
from elaswave.launcher.local_job import LocalJob
from elaswave.launcher.resources import (
    JobPlace,
    check_device,
    check_frequency,
    check_machine_memory,
    memory_bytes,
    sweep_dead,
    with_worker_memory,
)
from elaswave.observability.events import ErrorRaised, EventLog, RunFinished, StepCommitted, read_events
from elaswave.observability.progress import Reporter
from elaswave.observability.result import RunResult, from_json_float, read_result
from elaswave.observability.run_folder import (
    DIGESTS_FILE,
    EVENTS_FILE,
    FAULTS_FILE,
    LOGS_DIR,
    RESULT_FILE,
    TERMINAL_LOG,
    check_same_computation,
    default_run_dir,
    keep_huggingface,
    open_run_dir,
    resume_command,
    write_data_facts,
)
from elaswave.observability.trace import PART_PATTERN, merge_traces
from elaswave.protocol.events import CoordinatorEffect
from elaswave.system.processes import ending_early, provide_descriptors
from elaswave.training.tokens import open_tokens

NOT_TAKEN_SHOWN = 5
"""Names of values that a warning lists."""


@ending_early()
def train(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    profile: bool = False,
    reporter: Reporter,
    probe: Probe | None = None,
    faults: tuple[Fault, ...] = (),
    before_effect: Callable[[CoordinatorEffect], None] = lambda effect: None,
    script: Script | None = None,
    key: JobKey | None = None,
    agent_role: AgentRole | None = None,
) -> RunResult:
    """Trains to the end and writes the run folder.

    Args:
        config: with its layout resolved.
        run_dir: an existing folder, prepared for this run.
        resume: continue from its newest valid checkpoint.
        profile: also write a trace.
        reporter: shows progress.
        probe: told of every point of every step in every worker (for tests and benchmarks).
        faults: injected into workers and coordinator.
        before_effect: called in the coordinator before each effect of the protocol's core (for tests).
        script: what a script trains; None: what the configuration describes.
        key: the job's; None: a new one.
        agent_role: of this host's agent; None: the job has no other hosts.
    Returns:
        What stands in ``result.json``.
    Raises:
        WorkerError: a worker has ended with an error of its own that ends the job.
        RecoveryError: too much was lost to go on.
        StateError: the state contradicts itself.
        LaunchError: the system refuses a process or a folder that the job needs.
        StoppedBySignalError: SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2; says from which checkpoint the run can go on.
        UsageError: the data or the run folder cannot be used, or too few files may be open.
        CheckpointError: resume is asked for and there is no valid checkpoint, or it is of another model.
        RetryError: too few hosts have come, or the store is not reached.
        Exception: what a script's callback has raised.
    """
    started_s = time.monotonic()
    check_device(config.device.kind)
    check_frequency(config.device.frequency)
    num_loaders = 0 if script is None else script.training.loaders
    provide_descriptors(sum(config.widths), num_loaders)
    if agent_role is None or not agent_role.job:  # of other hosts' memory nothing is known here
        config = with_worker_memory(config)
    sweep_dead()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    place = JobPlace(config, run_dir, agent_role or own_role(), key or JobKey(new_key(), None))
    setup = place.setup(
        started_s=started_s,
        faults=faults,
        profile=profile,
        num_loaders=num_loaders,
        before_effect=before_effect,
    )
    job = LocalJob(setup, place, reporter, probe=probe, script=script)
    try:
        data = open_data(config, run_dir, script)  # bad data ends here, not in a worker
        checkpoint = _look_around(config, run_dir, data, job.dataset_facts, reporter, resume=resume)
        plan = RunPlan(config, job.await_forkserver())
        if script is not None:
            _compare_with_script(config, run_dir, script, job, reporter)
        if checkpoint is not None:
            _check_same_tensors(plan, checkpoint)
        if script is None:  # else the forkserver does, from which those coordinators are forked
            _ = plan.programs, plan.placement  # computed and checked once, inherited by all coordinators
    except BaseException:
        job.end()
        raise
    reporter.started(config, plan.layout, run_dir)
    try:
        ended = job.run(plan, data.sampler, checkpoint, lambda: _way_on(config, run_dir, agent_role))
        job.calls.raise_error()
        result = outcome_of(ended, job.stop_signal, run_dir)
        metrics = {name: list(map(from_json_float, values)) for name, values in result.metrics.items()}
        job.calls.finish([from_json_float(loss) for loss in result.losses], metrics)
        job.calls.raise_error()
    except StoppedBySignalError as error:
        job.end()  # from now on no process writes checkpoints
        raise StoppedBySignalError(error.signal_number, f"{error}; {_way_on(config, run_dir, agent_role)}") from None
    finally:
        job.end()
        if config.device.frequency == "cgroup":
            from elaswave.worker.frequency import remove_groups  # late: few jobs have such groups

            remove_groups(job.forkserver_pid, os.getpid())
        if profile:
            merge_traces(run_dir)  # an interrupted run has recorded something too
        if agent_role is None or not agent_role.is_candidate:  # else the job may go on without this host
            _close_log(run_dir, started_s, reporter)
    reporter.finished(result, run_dir)
    return result


class OpenedData(NamedTuple):
    """The data of a run, as they were opened here."""

    sampler: Sampler
    paths: tuple[Path, ...]
    """Of files of tokens; they are not kept open."""
    num_samples: dict[str, int]
    """Of a script's datasets, by name."""


def open_data(config: Config, run_dir: Path, script: Script | None) -> OpenedData:
    """Opens the data."""
    if script is None:
        source = open_tokens(config, run_dir / "data")
        return OpenedData(sampler_of(config, source.num_samples("train")), source.paths, {})
    samples = script.training.open_samples(run_dir / "data")
    samples.require_samples(config.batch.microbatch_size)
    return OpenedData(sampler_of(config, samples.num_samples("train"), samples.sources), (), samples.sizes)


def _compare_data(
    config: Config,
    data: OpenedData,
    facts: Callable[[dict[str, int]], DatasetFingerprint],
    extra: dict[str, Any] | None,
) -> tuple[object, list[str]]:
    """Compares the data, and what else a script gives, with those of the run that is resumed.

    Args:
        facts: gives what is known of a script's datasets of these sizes.
        extra: what the checkpoint says beside the state; None without one.
    Returns:
        What is known, for the run's folder, and warnings.
    Raises:
        DataError: they are others.
    """
    if not data.paths:
        dataset = facts(data.num_samples)
        if extra is None:
            return dataset, []
        then = dataset_fingerprint_in(extra)
        warnings = [check_same_dataset(then, dataset), *script_differences(then, dataset)]
        return script_in_force(then, dataset), list(filter(None, warnings))
    fingerprint = fingerprint_of_all(data.paths, whole=config.data.verify == "full")
    named = ", ".join(map(str, data.paths))
    warning = "" if extra is None else check_same_data(named, fingerprint_in(extra), fingerprint)
    return fingerprint, [warning] if warning else []


def _look_around(
    config: Config,
    run_dir: Path,
    data: OpenedData,
    facts_of: Callable[[dict[str, int]], DatasetFingerprint],
    reporter: Reporter,
    *,
    resume: bool,
) -> StartingPoint | None:
    """Checks, for a resume, the data and the checkpoints; clears the run folder of what is stale.

    Returns:
        The checkpoint to go on from, if any.
    """
    remove_stale(run_dir)
    checkpoint = None
    if resume:
        checkpoint = _newest_checkpoint(run_dir, reporter)
        check_same_computation(checkpoint.meta.config, config, Path(checkpoint.folder))
        _check_resumable(config, checkpoint.meta, run_dir, reporter)
    facts, warnings = _compare_data(config, data, facts_of, None if checkpoint is None else checkpoint.meta.extra)
    for warning in warnings:
        reporter.message(f"warning: {warning}")
    write_data_facts(run_dir, facts)
    # A run that goes on has no result until its new end, and no part of a trace of workers that are long gone.
    for stale in (
        run_dir / RESULT_FILE,
        run_dir / DIGESTS_FILE,
        run_dir / FAULTS_FILE,
        *run_dir.glob(PART_PATTERN),
    ):
        stale.unlink(missing_ok=True)
    return checkpoint


def _newest_checkpoint(run_dir: Path, reporter: Reporter) -> StartingPoint:
    search = find_newest_checkpoint(run_dir)
    put_aside(search)
    for skipped in search.skipped:
        reporter.message(f"checkpoint {skipped.folder.name} is not used: {skipped.reason}")
    if search.newest is None:
        raise CheckpointError(
            f"{run_dir} has no valid checkpoint to resume from; start again with --overwrite, and set "
            "run.checkpoint_every or run.checkpoint_every_s to have one sooner next time"
        )
    return StartingPoint(folder=str(search.newest.folder), meta=search.newest.meta)


def _compare_with_script(config: Config, run_dir: Path, script: Script, job: LocalJob, reporter: Reporter) -> None:
    """Compares what the job's processes see with what the script's sees.

    Raises:
        UsageError: they find other samples or another loss.
    """
    from elaswave.engine.blueprint import Blueprint  # a script's process has loaded torch
    from elaswave.engine.checks.rehearsal import Rehearsal, repeat

    lost = job.not_taken()
    memory, _ = memory_bytes() or (None, "")
    here = Rehearsal(Blueprint(config, script.training), script.training.open_samples(run_dir / "data"), memory)
    warning = repeat(here, job.findings(), lost)
    if warning:
        reporter.message(warning)
    if lost:
        shown = ", ".join(lost[:NOT_TAKEN_SHOWN]) + (" and others" if len(lost) > NOT_TAKEN_SHOWN else "")
        reporter.message(
            "warning: this process has threads or a GPU's state, so the job's processes are not forked from it but "
            f"import its modules anew, and cannot take over {shown}: they have what a fresh import gives. Make such "
            "values where they are first used"
        )


def _check_same_tensors(plan: RunPlan, checkpoint: StartingPoint) -> None:
    """Refuses a checkpoint of another model or optimizer; a configuration cannot tell them apart for a script."""
    found = {name: tuple(info.shape) for name, info in checkpoint.meta.tensors.items()}
    stored = plan.state.stored(int(checkpoint.meta.extra.get("num_updates", 1)))
    needed = {stored_name(state.slot, state.tensor): state.shape for state in stored}
    for name in sorted(found.keys() | needed.keys()):
        if found.get(name) != needed.get(name):
            there, here = (_shape_text(shapes.get(name)) for shapes in (found, needed))
            raise CheckpointError(
                f"the checkpoint in {checkpoint.folder} is of another model or optimizer: {name} is {there} there and "
                f"{here} here; give the model and optimizer that the run began with, or begin again with --overwrite"
            )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


def _check_resumable(config: Config, meta: CheckpointMeta, run_dir: Path, reporter: Reporter) -> None:
    """Refuses to go on to a step that a run has behind it, and says so if it has all of them already."""
    if len(meta.losses) != meta.step:
        raise CheckpointError(
            f"the newest checkpoint in {run_dir} is of step {meta.step} and has {len(meta.losses)} losses, so it was "
            "not written by a run: remove it, and resume from the one before"
        )
    if config.run.steps < meta.step:
        raise RunFolderError(
            f"the run in {run_dir} has {meta.step} steps already, and run.steps = {config.run.steps} asks for fewer: "
            "there is nothing to do; ask for more steps, or begin again with --overwrite"
        )
    if config.run.steps == meta.step:
        reporter.message(f"the run has all of its {meta.step} steps already: nothing is trained; ask for more steps")


def outcome_of(ended: Ended, stop_signal: int | None, run_dir: Path) -> RunResult:
    """Reads the result of a job that has finished; raises what ended any other."""
    if ended.outcome == "finished":
        return read_result(run_dir)
    if ended.outcome == "stopped":
        raise StoppedBySignalError(stop_signal or signal.SIGTERM, ended.reason)
    if ended.worker is not None:
        raise WorkerError(ended.worker, ended.reason, ended.traceback_text)
    if ended.again:
        raise RetryError(ended.reason)
    raise (StateError if ended.is_state_error else RecoveryError)(ended.reason)


def _way_on(config: Config, run_dir: Path, agent_role: AgentRole | None) -> str:
    """Describes how a run that was stopped can go on."""
    try:
        step = newest_committed_step(run_dir)
    except CheckpointError as error:
        return str(error)
    if step is None:
        return "it has no checkpoint, so it can only begin again" + (" (--overwrite)" if agent_role is None else "")
    command = resume_command(config, run_dir) if agent_role is None else "start its agents again"
    return f"its newest checkpoint is of step {step}, to go on from there: {command}"


def _close_log(run_dir: Path, started_s: float, reporter: Reporter) -> None:
    """The log of a run always ends with how it ended, also when the coordinator could not say it."""
    error = sys.exception()
    try:
        events = read_events(run_dir / EVENTS_FILE) if (run_dir / EVENTS_FILE).exists() else []
    except (RunFolderError, OSError) as trouble:  # of the log only: it must not hide how the run has ended
        reporter.message(f"{trouble}: the log of the run stays as it is")
        return
    if error is None or not events or isinstance(events[-1], RunFinished):
        return
    steps = max((event.step for event in events if isinstance(event, StepCommitted)), default=0)
    with EventLog(run_dir / EVENTS_FILE, on_trouble=reporter.message) as log:
        stopped = isinstance(error, StoppedBySignalError)
        if not stopped:
            log.write(ErrorRaised(message=str(error)))
        log.write(
            RunFinished(
                outcome="interrupted" if stopped else "failed",
                steps=steps,
                duration_s=time.monotonic() - started_s,
                reason=str(error),
            )
        )


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
            `_faults` and `open_run_dir`.
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
    faults = _faults(config, options.fault_specs, agent_role) if options.fault_specs else ()
    now = datetime.now(UTC)
    folder = options.run_dir or default_run_dir(now, secrets.token_hex(3))
    with open_run_dir(folder, config, now=now, resume=options.resume, overwrite=options.overwrite) as run:
        prepare()
        if script is not None and script.files:
            keep_huggingface(run, script.files)
        # late: bad input is answered before what computes is loaded
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


def _faults(config: Config, specs: Sequence[str], agent_role: AgentRole | None) -> tuple[Fault, ...]:
    """Reads the faults that are to be injected.

    Raises:
        ConfigError: see `parse_faults`.
        UsageError: a host that one machine stands for is to be killed, in a job of several machines.
    """
    has_agents = agent_role is not None and bool(agent_role.job)
    faults = parse_faults(
        specs,
        seed=config.run.seed,
        workers=range(sum(config.widths)),
        num_steps=config.run.steps,
        respawns=config.elastic.respawns,
        hosts=labels_of(config),
        sites=sites_that_may_part(config),
        has_agents=has_agents,
    )
    if has_agents and any(fault.kind == KILL_HOST for fault in faults):
        raise UsageError(
            "--fault kill-host strikes hosts that one machine stands for, and this job has agents: kill the agent of a "
            "host instead, or use `elaswave train` with elastic.hosts"
        )
    return faults
