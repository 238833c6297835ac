"""`elaswave agent`: one host's part in a job of several, from its start to its end.

The agent at the coordinator's address, if it is given a configuration, creates the job: it is the launcher of `elaswave
train`, in a job that others may join. All others ask there what is trained, and start the workers that they are asked
for. Both are one code (`elaswave.launcher.local_job`).

Where the processes of one host of several listen, and where they dial the coordinator.

The coordinator's address is a host and a port that every agent is given. The agent on that host creates the job: it is
the one that may listen there. A lock file, which the kernel lets go of when its holder ends, keeps two agents of one
host from both believing so. It stands where no other user can make or take it: whoever else has the port is no agent.
"""

import contextlib
import errno
import fcntl
import hashlib
import ipaddress
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from elaswave.channel.client import ClientOwner, ControlClient
from elaswave.channel.messages.agent import AgentRefused, AskJob, Ended, JobSpec, ToAgent
from elaswave.channel.wire import agent_id
from elaswave.checkpoints.checkpoint import newest_committed_step
from elaswave.config.load import build_config, load_config
from elaswave.config.rules import exposed_problem, is_exposed
from elaswave.config.schema import Config, NetConfig
from elaswave.coordinator.job_spec import check_data, check_shared, config_digest, link_checkpoints, own_folder
from elaswave.data.fingerprint import fingerprint_of_all
from elaswave.errors import CheckpointError, ConfigError, NeedlessError, RetryError, UsageError
from elaswave.faults.injection import parse_fault
from elaswave.job.keys import JobKey, KeyRole, tls_of
from elaswave.job.plan import RunPlan
from elaswave.job.script import JobOptions
from elaswave.job.setup import AgentRole, JobNetwork, address_of, new_incarnation, ports_beside
from elaswave.launcher.launcher import open_data, outcome_of, run_job
from elaswave.launcher.local_job import LocalJob, error_of_refusal
from elaswave.launcher.resources import JobPlace, sweep_dead
from elaswave.observability.output import say_error
from elaswave.observability.progress import make_reporter
from elaswave.observability.run_folder import LOGS_DIR, RESULT_FILE, TERMINAL_LOG, is_run, saved_config
from elaswave.protocol.leadership.job_creation import CreatorAction, JobCreator
from elaswave.store.etcd_store import foreign_job
from elaswave.store.opening import FILE, look_for_earlier, remove_earlier
from elaswave.system.processes import ending_early, provide_descriptors
from elaswave.transport.addresses import Endpoint, reserve, tcp_address
from elaswave.transport.tls import Tls

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Of the kernel: tells hosts apart."""
_NETWORK = Path("/proc/self/ns/net")
"""Tells apart containers of one host."""
_LOCK_FILE = "agents"
FREE_S = 3.0
"""How long the port may take to become free: the processes of an agent that was killed end a little later than it."""


class Seed(NamedTuple):
    """Where a coordinator is dialled."""

    host: str
    """As it was given: an address or a name."""
    port: int
    address: str
    """Numeric, as it is now; empty if the name has none. Dials look the name up again."""


class HeldPort(NamedTuple):
    """A seed's port on this host."""

    port: socket.socket
    """Keeps it from all other programs."""
    lock: "_Lock"
    """Tells other agents of this host who has it."""

    def close(self) -> None:
        """Gives it up."""
        self.port.close()
        self.lock.close()


def seed_of(text: str) -> Seed:
    """Finds where ``HOST:PORT`` is, with an IPv6 address in brackets.

    Raises:
        UsageError: it is no such text.
        RetryError: the name has no address now.
    """
    host, port = _split(text)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RetryError(f"--coordinator {text}: {host} has no address: {error.strerror}") from None
    return Seed(host, port, str(found[0][4][0]))


def _split(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise UsageError(f"--coordinator {text}: give HOST:PORT, such as 10.77.0.1:7077 or [fd00::1]:7077")
    return host, int(port)


def seeds_of(texts: Sequence[str]) -> tuple[Seed, ...]:
    """Finds where candidates are, in their order.

    Raises:
        UsageError: a text is no HOST:PORT.
        RetryError: no name has an address now.
    """
    seeds: list[Seed] = []
    errors: list[RetryError] = []
    for text in texts:
        try:
            seeds.append(seed_of(text))
        except RetryError as error:
            # It keeps its place, for the place says who creates the job.
            errors.append(error)
            host, port = _split(text)
            seeds.append(Seed(host, port, ""))
    if len(errors) == len(seeds):
        raise errors[0]
    return tuple(seeds)


def hold(seed: Seed, bind: str, locks: Path) -> HeldPort | None:
    """Takes a seed's port for this host's agent.

    Args:
        seed: where the coordinator is dialled.
        bind: numeric address of this host to listen at, which may be another one than the seed's.
        locks: this user's folder for lock files, in which nobody else can write.
    Returns:
        None if the seed is another host's, or its name has no address now, or another agent of this host has it.
    Raises:
        RetryError: another program of this host has the port.
        UsageError: this user may not listen at it.
    """
    if not (seed.address and _is_here(seed)):
        return None
    port, lock = None, _Lock(locks, f"{seed.address}/{seed.port}")
    try:
        # The lock first: an agent of this host that was sooner has the port too, and is no other program.
        if lock.is_held:
            port = _reserve(bind, seed.port)
    except OSError as error:
        _raise_unless_elsewhere(seed, error)
    finally:
        if port is None:
            lock.close()
    return None if port is None else HeldPort(port, lock)


def _raise_unless_elsewhere(seed: Seed, error: OSError) -> None:
    if error.errno == errno.EADDRNOTAVAIL:
        return
    if error.errno == errno.EACCES:
        raise UsageError(
            f"this user may not listen at port {seed.port}, and the coordinator is to be at {seed.host}:{seed.port}: "
            "give another --coordinator to all agents, with a port from 1024 up"
        ) from error
    if error.errno == errno.EADDRINUSE:
        raise RetryError(
            f"port {seed.port} of this host is used by another program, and the coordinator is to be at "
            f"{seed.host}:{seed.port}: end that program (ss -tlnp sport = :{seed.port} shows it), or give another "
            "--coordinator to all agents"
        ) from error
    raise error


class _Lock:
    """A byte of this user's lock file, which stays, empty. The byte's place stands for host, network and what is
    locked: hosts may share the folder. The kernel lets go of it when this process ends, whatever children it has left.

    Args:
        folder: in which nobody else can write.
        what: it is for; no process may ask twice.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.is_held = True
        """Also where the file cannot be had, or not be locked: then the port alone says who was first."""
        here = _NETWORK.stat()
        boot = _BOOT.read_text() if _BOOT.exists() else ""
        text = f"{boot} {here.st_dev}:{here.st_ino} {what}"
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                # Not flock: that lock is the open file's, and children that outlive this process would keep it.
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except (BlockingIOError, PermissionError):  # fcntl(2) may say either
                self.is_held = False

    def close(self) -> None:
        """Gives it up."""
        if self._fd >= 0:
            # This lets go of all locks that this process has on the file, not of this byte alone.
            os.close(self._fd)


def _reserve(bind: str, port: int) -> socket.socket:
    by_s = time.monotonic() + FREE_S
    while True:
        try:
            return reserve(bind, [port])
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= by_s:
                raise
            time.sleep(0.1)


def _is_here(seed: Seed) -> bool:
    """Tells whether the seed's address is one of this host."""
    family = socket.AF_INET6 if ":" in seed.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((seed.address, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
        return True


def own_address(seed: Seed) -> str:
    """Finds the address of this host that the coordinator's host is reached from.

    Raises:
        RetryError: there is no way to it.
    """
    family = socket.AF_INET6 if ":" in seed.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((seed.address, seed.port))  # sends nothing
        except OSError as error:
            raise RetryError(f"{seed.host} cannot be reached from here: {error.strerror}") from None
        return str(probe.getsockname()[0])


def where_to_listen(net: NetConfig, seed: Seed) -> str:
    """Chooses the numeric address at which this host's processes listen.

    Raises:
        ConfigError: an interface that cannot be used.
        RetryError: there is no way to the coordinator's host.
    """
    if net.bind is not None:
        return net.bind
    return own_address(seed) if net.interface is None else address_of(net.interface)


def tls_here(net: NetConfig) -> Tls | None:
    """Finds this host's certificate files; None: no TLS.

    Raises:
        UsageError: a file is missing, or others could read the private key.
    """
    if net.tls == "off":
        return None
    assert net.keys is not None
    return tls_of(Path(net.keys))


def agent_network(net: NetConfig, seeds: Sequence[Seed], own: int | None, slots: int = 0) -> JobNetwork:
    """Determines the addresses of a job's processes on this host.

    Args:
        net: as configured here.
        seeds: where coordinators are dialled.
        own: index of the one at which this host may have one; None: at none.
        slots: workers that may run here, once that is known.
    Raises:
        ConfigError: an address, certificate or range of ports that cannot be used.
        UsageError: certificate files that cannot be used.
        RetryError: there is no way to the coordinator's host.
    """
    # `seeds_of` has refused seeds of which none has an address.
    seed = seeds[own] if own is not None else next(seed for seed in seeds if seed.address)
    bind = where_to_listen(net, seed)
    if net.tls == "off" and not net.trusted and is_exposed(bind):
        raise ConfigError([exposed_problem(bind)])
    is_unspecified = ipaddress.ip_address(bind).is_unspecified
    is_own = own is not None
    host = net.advertise or (seed.host if is_own and is_unspecified else bind)
    tls = tls_here(net)
    if tls is not None:
        tls.check(seed.host if is_own else host)
    near = bind
    if is_unspecified:
        near = "::1" if ":" in bind else "127.0.0.1"
    return JobNetwork(
        listen=tcp_address(bind, seed.port),
        dial=tcp_address(seed.host, seed.port),
        launcher_dials=tcp_address(near if is_own else seed.host, seed.port),
        links=Endpoint(
            tcp_address(bind, 0),
            advertise="" if host == bind else host,
            ports=ports_beside(net, seed.port, slots),
            tls=tls,
        ),
        host=seed.host,
        # By name, which is looked up for every dial: the address may be another one by then.
        others=tuple((tcp_address(each.host, each.port), each.host) for each in seeds if each is not seed),
    )


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
    """It never creates the job."""
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
    # An agent that is started again without a configuration goes on with that of its run.
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
        # Only the agent at the first address creates the job (H1).
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
    """Finds the seed at which this host's agent may start coordinators, if there is one."""
    for index, seed in enumerate(seeds):
        # With one candidate only an agent that may create the job starts coordinators.
        if seed.address and (len(seeds) > 1 or can_found):
            held = hold(seed, where_to_listen(config.net, seed), locks)
            if held is not None:
                return index, held
    return None, None


def _ask_whether_it_runs(host: _Host) -> JobSpec | AgentRefused | Ended | None:
    """A job that outlives the loss of a host may be there already when the agent that creates it is started again (H1).

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
    """Tells whether the job has been finished: an agent that is started again by a launcher has nothing to do."""
    if not (is_run(run_dir) and (run_dir / RESULT_FILE).exists()):
        return False
    say_error(f"the job is finished already: {run_dir / RESULT_FILE}")
    return True


def _slots(options: AgentOptions, config: Config) -> int:
    return options.slots or -(-sum(config.widths) // config.control.hosts)


# ---------------------------------------------------------------------------------------------------------- the creator


def _found(host: _Host, held: HeldPort, prepare: Callable[[], None]) -> None:
    """Creates the job, or goes on with it after its end: from its newest checkpoint, if it has one."""
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
        # Where no other host can have the coordinator, a notice to this one ends the job.
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
        faults = tuple(map(parse_fault, spec.faults))
        place = JobPlace(config, run_dir, agent_role, host.key)
        setup = place.setup(started_s=started_s, faults=faults, profile=spec.profile)
        job = LocalJob(setup, place, reporter, probe=None, script=None)
        try:
            # Meanwhile the forkserver loads torch and the model.
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


class _Asks(ClientOwner):
    """Asks the coordinator one question, on each new connection."""

    def __init__(self, question: AskJob) -> None:
        self.question = question
        self.answers: list[ToAgent] = []

    def hello(self) -> AskJob:
        """Returns the question."""
        return self.question

    def receive(self, message: ToAgent) -> None:
        """Keeps an answer."""
        self.answers.append(message)


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
    question = _Asks(
        AskJob(
            job=options.job,
            node=options.node,
            incarnation=host.incarnation,
            config_digest=config_digest(host.config) if host.is_given else "",
        )
    )
    network = agent_network(host.config.net, host.seeds, host.own)
    client: ControlClient[ToAgent] = ControlClient(
        network.launcher_targets,
        host.key.held(KeyRole.JOINING),
        agent_id(host.incarnation),
        ToAgent,
        question,
        tls=tls_here(host.config.net),
    )
    client.interval_s, client.silence_timeout_s = ASK_S, 4 * ASK_S
    began_s = time.monotonic()
    hopeless_since_s: float | None = None  # kept while other candidates' hosts refuse connections
    has_said = False
    try:
        while True:
            client.turn(ASK_S)
            for answer in question.answers:
                if isinstance(answer, JobSpec | AgentRefused | Ended):
                    return answer
            now_s = time.monotonic()
            if client.connected:
                hopeless_since_s = None
            # The client puts the class of the error first.
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
