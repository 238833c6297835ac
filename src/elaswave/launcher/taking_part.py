"""`elaswave agent`: one host's part in a job of several, from its start to its end.

The agent at the coordinator's address, if it is given a configuration, founds the job: it is the launcher of `elaswave
train`, in a job that others may join. All others ask there what is trained, and start the workers that they are asked
for. Both are one code (`elaswave.launcher.local_job`).
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from elaswave.channel.client import ControlClient
from elaswave.channel.messages.agent import AgentRefused, AskJob, Ended, JobSpec, ToAgent
from elaswave.channel.wire import agent_id
from elaswave.checkpoints.checkpoint import newest_committed_step
from elaswave.config.load import build_config, load_config
from elaswave.config.schema import Config
from elaswave.coordinator.job_spec import check_data, check_shared, config_digest, link_checkpoints, own_folder
from elaswave.data.fingerprint import fingerprint_of_all
from elaswave.errors import CheckpointError, NeedlessError, RetryError, UsageError
from elaswave.faults.injection import parse_fault
from elaswave.job.key_files import JobKey, KeyRole
from elaswave.job.plan import RunPlan
from elaswave.job.role import AgentRole, new_incarnation
from elaswave.launcher.host_network import HeldPort, Seed, agent_network, hold, seeds_of, tls_here, where_to_listen
from elaswave.launcher.job import JobOptions, run_job
from elaswave.launcher.launcher import open_data, outcome_of
from elaswave.launcher.local_job import LocalJob, error_of_refusal
from elaswave.observability.output import say_error
from elaswave.observability.progress import make_reporter
from elaswave.observability.result import RESULT_FILE
from elaswave.observability.run_folder import TERMINAL_LOG, is_run, saved_config
from elaswave.observability.worker_logs import LOGS_DIR
from elaswave.protocol.leadership.job_creation import CreatorAction, JobCreator
from elaswave.store.etcd_store import foreign_job
from elaswave.store.opening import FILE, look_for_earlier, remove_earlier
from elaswave.system.job_folder import sweep_dead
from elaswave.system.kernel import provide_descriptors
from elaswave.system.stop_signals import ending_early

ASK_S = 0.5
"""Heartbeats of the connection on which an agent asks what is trained; three without an answer end it."""
HOPELESS_S = 5.0
"""Who has turned the key, or the certificate, away for so long will not have others: a coordinator of another key, or
somebody who has taken the coordinator's place. Which of them this host cannot know, so it is worth another try."""
_HOPELESS = ("AuthenticationError", "FrameError")


class AgentOptions(NamedTuple):
    """How an agent is started."""

    job: str
    coordinator: str
    """``HOST:PORT``, or several, separated by commas: the candidates' hosts."""
    node: str
    """Name of this host."""
    locks: Path
    """This user's folder for lock files, in which nobody else can write."""
    config_file: Path | None = None
    workers: int | None = None
    """With which the job begins; None: as configured."""
    overrides: tuple[str, ...] = ()
    """Values of ``--set``."""
    slots: int | None = None
    """Workers that may run here; None: an even share of those with which the job begins."""
    run_dir: Path | None = None
    checkpoints: Path | None = None
    """Folder that all hosts share; None: it is in the run folder."""
    fault_specs: tuple[str, ...] = ()
    joins: bool = False
    """It never founds the job."""
    wait_s: float = 600.0
    """How long a coordinator is waited for."""
    leave_s: float = 25.0
    """How long this host's workers may take to leave after a notice."""


class _Host(NamedTuple):
    """What is known of this host before the job is."""

    options: AgentOptions
    config: Config
    """As given here: of a host that does not found the job, only the network's section counts."""
    is_given: bool
    """Whether the configuration was given at all, beyond the network's section."""
    seeds: tuple[Seed, ...]
    own: int | None
    """Index of the seed that this host has; None: it has none."""
    key: JobKey
    incarnation: int


@ending_early()
def run_agent(options: AgentOptions, key: JobKey, prepare: Callable[[], None]) -> None:
    """Takes part in a job until it is over, or this host's part is.

    Args:
        options: how.
        key: the job's.
        prepare: called once all is checked that can be without loading anything that computes.
    Raises:
        UsageError: bad input, or what this host has is not what the job needs.
        RetryError: this host's part is over for now; the job may go on.
        ElaswaveError: see `elaswave.launcher.launcher.train`.
    """
    overrides = ("net.transport=tcp", *options.overrides)
    given = [override for override in options.overrides if not override.strip().startswith("net.")]
    is_given = bool(given) or options.config_file is not None or options.workers is not None
    run_dir = _run_dir(options)
    base = saved_config(run_dir) if is_run(run_dir) and not is_given else None
    config = load_config(options.config_file, overrides, options.workers, base=base)
    if config.net.transport != "tcp":
        raise UsageError('net.transport: agents of several hosts need "tcp"; leave it out')
    seeds = seeds_of([text.strip() for text in options.coordinator.split(",")])
    if len(seeds) > 1 and is_given and config.control.store == "file":
        raise UsageError(
            f"--coordinator names {len(seeds)} candidates, but what a coordinator decides stays on its host: set "
            "control.store=etcd://HOST:PORT,..., or name one"
        )
    if _is_over(run_dir):
        return
    can_found = not options.joins and (is_given or base is not None)  # who is told of no configuration is to find one
    key.held(KeyRole.JOINING)
    own, held = _hold_one(seeds, config, options.locks, can_found)
    host = _Host(options, config, is_given, seeds, own, key, new_incarnation())
    try:
        if held is not None:
            key.held(KeyRole.JOB)  # coordinators need it
        spec = None
        if not can_found or own != 0:
            spec = _ask(host, options.wait_s)
        else:
            spec = _ask_whether_it_runs(host)
        if spec is not None:
            _follow(host, held, spec, prepare)
        else:
            assert held is not None
            _found(host, held, prepare)
    except NeedlessError as error:
        say_error(f"nothing to do: {error}")
    finally:
        if held is not None:
            held.close()


def _hold_one(
    seeds: Sequence[Seed], config: Config, locks: Path, can_found: bool
) -> tuple[int | None, HeldPort | None]:
    """The seed at which this host's agent may start coordinators, if there is one."""
    for index, seed in enumerate(seeds):
        if seed.address and (len(seeds) > 1 or can_found):
            held = hold(seed, where_to_listen(config.net, seed), locks)
            if held is not None:
                return index, held
    return None, None


def _ask_whether_it_runs(host: _Host) -> JobSpec | AgentRefused | Ended | None:
    """A job that outlives the loss of a host may be there already when the agent that founds it is started again (H1).

    Returns:
        None: it does not run, and nothing of it is left.
    Raises:
        RetryError: it runs, but no candidate can be reached from here.
    """
    options, control = host.options, host.config.control
    founder = JobCreator(has_others=len(host.seeds) > 1, patience_s=options.wait_s, now_s=time.monotonic())
    due = CreatorAction.LOOK
    while due is not CreatorAction.FOUND:
        if due is CreatorAction.LOOK:
            due = founder.looked(*look_for_earlier(control, options.job, host.key.secret, founder.job_generation))
        elif due is CreatorAction.ASK:
            try:
                return _ask(host, founder.ask_s, hopeless_s=math.inf)  # a stranger must not cut it short
            except RetryError:
                due = founder.unanswered()
        elif due is CreatorAction.REMOVE:
            assert founder.left is not None
            due = founder.removed(remove_earlier(control, options.job, host.key.secret, founder.left), time.monotonic())
        elif due is CreatorAction.END:
            assert founder.outcome is not None
            return msgspec.json.decode(founder.outcome.value, type=Ended)
        elif due is CreatorAction.FOREIGN:
            raise UsageError(str(foreign_job(f"{control.store}/elaswave/{options.job}/")))
        else:
            raise RetryError(
                f"job {options.job} runs, for its coordinator writes to {control.store}, but there is none at "
                f"{options.coordinator} for {options.wait_s:g} s: see whether those hosts can be reached from here"
            )
    return None


def _run_dir(options: AgentOptions) -> Path:
    return Path(os.path.abspath(options.run_dir or Path("runs") / options.job))


def _is_over(run_dir: Path) -> bool:
    """Whether the job has been finished: an agent that is started again by a launcher has nothing to do."""
    if not (is_run(run_dir) and (run_dir / RESULT_FILE).exists()):
        return False
    say_error(f"the job is finished already: {run_dir / RESULT_FILE}")
    return True


def _slots(options: AgentOptions, config: Config) -> int:
    return options.slots or -(-sum(config.widths) // config.control.hosts)


# ---------------------------------------------------------------------------------------------------------- the founder


def _found(host: _Host, held: HeldPort, prepare: Callable[[], None]) -> None:
    """Founds the job, or goes on with it after its end: from its newest checkpoint, if it has one."""
    options, config = host.options, host.config
    run_dir = _run_dir(options)
    has_checkpoint = False
    if options.checkpoints is not None:
        link_checkpoints(run_dir, options.checkpoints)
    if is_run(run_dir):
        try:
            has_checkpoint = newest_committed_step(run_dir) is not None
        except CheckpointError:
            has_checkpoint = True  # the launcher says what is wrong with it
    agent_role = AgentRole(
        node=options.node,
        incarnation=host.incarnation,
        slots=_slots(options, config),
        job=options.job,
        network=agent_network(config.net, host.seeds, 0, _slots(options, config)),
        kept_port=held.port,
        is_candidate=len(host.seeds) > 1 and config.control.store != FILE,
        leave_s=options.leave_s if len(host.seeds) > 1 else None,
    )
    job_options = JobOptions(
        run_dir=run_dir,
        resume=has_checkpoint,
        overwrite=is_run(run_dir) and not has_checkpoint,
        fault_specs=options.fault_specs,
    )
    run_job(config, job_options, prepare=prepare, key=host.key, agent_role=agent_role)


# ----------------------------------------------------------------------------------------------------------- the others


def _follow(
    host: _Host, held: HeldPort | None, answer: JobSpec | AgentRefused | Ended, prepare: Callable[[], None]
) -> None:
    """Starts the workers that the coordinator asks for, and stays until the job is over."""
    started_s = time.monotonic()
    options = host.options
    if isinstance(answer, Ended):
        if answer.outcome == "finished":
            say_error("the job is finished already")
            return
        raise RetryError(f"the job was just ending: {answer.outcome} ({answer.reason})")
    if isinstance(answer, AgentRefused):
        raise error_of_refusal(answer)
    spec = answer
    config = build_config({**spec.config})
    network = agent_network(host.config.net, host.seeds, host.own, _slots(options, config))
    run_dir = Path(os.path.abspath(options.run_dir)) if options.run_dir is not None else Path(spec.run_dir)
    own_folder(run_dir, spec.job)
    if options.checkpoints is not None:
        link_checkpoints(run_dir, options.checkpoints)
    check_shared(run_dir, spec, options.node)
    provide_descriptors(sum(config.widths), 0)
    sweep_dead()
    prepare()
    agent_role = AgentRole(
        node=options.node,
        incarnation=host.incarnation,
        slots=_slots(options, config),
        job=spec.job,
        job_generation=spec.job_generation,
        keys=spec.keys,
        creates_job=False,
        network=network,
        kept_port=None if held is None else held.port,
        is_candidate=held is not None and config.control.store != FILE,
        leave_s=options.leave_s,
    )
    lost_output = run_dir / LOGS_DIR / f"{options.node}-{TERMINAL_LOG}"
    reporter = make_reporter(json_mode=False, lost_output=lost_output)
    try:
        job = LocalJob(
            config,
            run_dir,
            profile=spec.profile,
            reporter=reporter,
            probe=None,
            faults=tuple(map(parse_fault, spec.faults)),
            before_effect=lambda effect: None,
            started_s=started_s,
            key=host.key,
            agent_role=agent_role,
        )
        try:
            data = open_data(config, run_dir, None)
            facts = msgspec.to_builtins(fingerprint_of_all(data.paths, whole=False))
            check_data(spec, facts, options.node)
            plan = RunPlan(config, job.await_forkserver())
            reporter.started(config, plan.layout, run_dir)
            ended = job.run(
                plan, data.sampler, spec.checkpoint, lambda: "start the agent again when the coordinator is back"
            )
            result = None
            if ended.outcome != "finished" or (run_dir / RESULT_FILE).exists():
                result = outcome_of(ended, job.stop_signal, run_dir)
        finally:
            job.end()
        if result is not None:
            reporter.finished(result, run_dir)
        else:
            reporter.message(
                f"the job is finished: its result is in the run folder of the coordinator's host; {run_dir} "
                "has what this host's workers have printed"
            )
    finally:
        reporter.close()


def _ask(host: _Host, wait_s: float, *, hopeless_s: float = HOPELESS_S) -> JobSpec | AgentRefused | Ended:
    """Asks the coordinator what is trained.

    Args:
        host: this one.
        wait_s: how long to wait for a coordinator.
        hopeless_s: how long for one that turns this host away.
    Raises:
        RetryError: there is none within the time, or it has another key, or certificates of another authority.
    """
    options = host.options
    answers: list[ToAgent] = []
    question = AskJob(
        job=options.job,
        node=options.node,
        incarnation=host.incarnation,
        config_digest=config_digest(host.config) if host.is_given else "",
    )
    network = agent_network(host.config.net, host.seeds, host.own)
    client: ControlClient[ToAgent] = ControlClient(
        network.launcher_dials,
        host.key.held(KeyRole.JOINING),
        agent_id(host.incarnation),
        ToAgent,
        answers.append,
        lambda: question,
        interval_s=ASK_S,
        tls=tls_here(host.config.net),
        host=network.host,
        others=network.others,
        silence_timeout_s=4 * ASK_S,
    )
    began_s = time.monotonic()
    hopeless_since_s: float | None = None  # kept while other candidates' hosts refuse connections
    has_said = False
    try:
        while True:
            client.turn(ASK_S)
            for answer in answers:
                if isinstance(answer, JobSpec | AgentRefused | Ended):
                    return answer
            now_s = time.monotonic()
            if client.connected:
                hopeless_since_s = None
            elif client.trouble.startswith(_HOPELESS):
                hopeless_since_s = hopeless_since_s or now_s
                if now_s - hopeless_since_s > hopeless_s:
                    raise RetryError(
                        f"who answers at {options.coordinator} is not this job's coordinator ({client.trouble}): give "
                        "all agents one key, and certificates of one authority; if they have them, another program has "
                        "that address (ss -tlnp shows it on its host)"
                    )
            if now_s - began_s > wait_s:
                raise RetryError(
                    f"no coordinator at {options.coordinator} within {wait_s:g} s ({client.trouble}): start the agent "
                    "on that host"
                )
            if not has_said and now_s - began_s > min(1.0, wait_s):
                has_said = True
                say_error(f"{options.node} waits for the coordinator of {options.job} at {options.coordinator}")
    finally:
        client.close(0.0)
