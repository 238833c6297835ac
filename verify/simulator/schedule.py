"""What happens in one simulated run: the job, the conditions of the network, and the faults. Plain values with a text
form, so that a failing schedule can be printed, shortened and run again.

A fault strikes at an *instant*. Instants are counted over the whole run: one passes before each frame or message that
any process sends, before each batch of blocks that is applied and each block that is loaded, and before each effect
that a coordinator carries out. So "the coordinator dies between persisting a decision and sending it to the second
worker" is one number.
"""

import random
from typing import NamedTuple

from elaswave.blocks.domains import deal_over_hosts
from elaswave.blocks.shapes import GRID_RULES
from elaswave.types import WHOLE_STAGE
from verify.simulator.job import Job

AGENT = "a"
"""First letter of an agent as a target: ``a1``, that of the second node."""
COORDINATOR, HOST, STORE = "c", "h", "s"
"""Targets that are no workers: the coordinator's process, its host with the candidate there, and the store."""
KINDS = {
    "kill": "the target ends at once; several workers, those of a host say, at one instant",
    "suspect": "the coordinator is told that a worker is lost, which is not true",
    "hang": "a worker, or all of a host, stops for a while, and is suspected if that lasts long enough",
    "isolate": "nothing reaches a worker, or all of a host, or comes from there, for a while",
    "spoil": "a worker hands on wrong numbers, until a spot check finds it after so many actions, or before its vote",
    "cut": "the link between two workers closes; both say so",
    "delay": "what two workers send each other is held back for a while",
    "disconnect": "the control connection of a worker closes; it connects again",
    "flip": "a bit flips in what a worker computes with, or in a copy that it holds; the duration says where",
    "slip": "a worker's next update of a copy is written wrongly; the duration says of which, and whether its master",
    "notice": "the machine of a worker, or of an agent, is taken away after a while, and it knows",
    "usurp": "the coordinator stops for a while; a second one starts then, with candidates if heartbeats are missed",
    "lost": "with candidates: requests to the store are lost for a while",
    "mute": "with candidates: the store does what it is asked, and its answers are lost for a while",
    "late": "with candidates: what the store is asked for a while arrives after its senders have given up",
    "back": "with candidates: the store is put back to the copy of so long ago",
    "shut": "with candidates: the coordinator alone cannot reach the store for a while",
}
AGENT_KINDS = ("kill", "disconnect", "notice")
"""Those that may strike an agent."""
STRANGER_KINDS = {
    "forge": "who has not the job's key writes `spec`, `term`, `beat`, `outcome` or the next `entry` of the store",
    "lose": "who has not the job's key removes one of these",
    "old": "who has not the job's key puts the first value back that one of these ever had",
}
"""Of a job's keys in its store."""
STORE_KEYS = ("spec", "term", "lease_heartbeat", "outcome", "entry")
"""Their targets."""
"""ScheduledFault kinds."""


class ScheduledFault(NamedTuple):
    """One fault: ``kill:2@57``, ``kill:c@80``, ``hang:1@30+50``, ``cut:0-2@41``."""

    kind: str
    target: str
    """A worker, several as ``0-2``, or ``c``."""
    instant: int
    duration: int = 0
    """For kinds that last; in units of virtual time."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}@{self.instant}" + (f"+{self.duration}" if self.duration else "")

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that it names."""
        is_none = self.target in (COORDINATOR, HOST, STORE, *STORE_KEYS) or self.is_of_agent
        return () if is_none else tuple(map(int, self.target.split("-")))

    @property
    def is_of_agent(self) -> bool:
        """Whether it strikes the agent of a node, ``a1``."""
        return self.target[:1] == AGENT and self.target[1:].isdecimal()


def parse_fault(text: str) -> ScheduledFault:
    """The inverse of ``str(fault)``.

    Raises:
        ValueError: it is none.
    """
    try:
        kind, _, rest = text.partition(":")
        target, _, when = rest.partition("@")
        instant, _, duration = when.partition("+")
        fault = ScheduledFault(kind, target, int(instant), int(duration or 0))
        _ = fault.workers
    except ValueError:
        raise ValueError(f"{text!r} is no fault: write kind:target@instant, such as kill:2@57") from None
    if kind not in KINDS and kind not in STRANGER_KINDS:
        raise ValueError(f"{text!r} is of no known kind: use one of {', '.join(KINDS)}")
    return fault


class Conditions(NamedTuple):
    """The network and the clocks of one run, in units of virtual time (an undisturbed frame takes 1 to 3)."""

    seed: int = 0
    """Of the delays; 0 means that every frame takes the same time."""
    exit_delay: int = 4
    """Until the coordinator sees that a process has ended."""
    link_delay: int = 2
    """Until the other end sees that a link has closed."""
    heartbeat_bound: int = 40
    """Silence after which the coordinator suspects a worker."""
    restart_delay: int = 10
    """Until a killed coordinator is started again."""
    slow_worker: int = -1
    """Control messages to this worker take longer."""
    slow_by: int = 0
    """By so much."""
    keeps_in_flight: bool = True
    """Whether frames that a process has sent before its death still arrive."""
    plan_delay: int = 0
    """How long a recovery is planned; 0: the answer comes in the same turn. Beyond a bound the planner has failed."""
    commit_delay: int = 0
    """How long a complete checkpoint is committed; 0: it is durable in the same turn."""
    mid_action: int = 0
    """How many layers of the action at hand a worker still runs before it does what the coordinator asks; 0: none."""
    candidates: int = 0
    """Hosts that watch the coordinator's lease heartbeat in a store on other machines; 0: a killed coordinator is
    started again, and its store is a file."""
    store_delay: int = 0
    """How much longer a request to that store takes."""
    agents: int = 0
    """Nodes with an agent that starts the workers there; without candidates. 0: a worker's end is seen by itself."""
    orphan_delay: int = 600
    """After so long without a coordinator and without a commit an agent ends its workers."""
    detects: bool = False
    """Whether coordinators listen to heartbeats and judge them as the product does; else they are told of faults that
    only silence shows."""
    respawns: bool = False
    """Whether a lost worker's place is taken again."""
    drain_delay: int = 600
    """After so long a worker is lost that was asked to leave."""
    replans: bool = False
    """Whether a recovery also moves survivors and micro-batches; else they stay where they are."""


class Schedule(NamedTuple):
    """All that decides a run."""

    job: Job = Job()
    conditions: Conditions = Conditions()
    faults: tuple[ScheduledFault, ...] = ()

    def __str__(self) -> str:
        parts = [f"{name}={_show(value)}" for name, value in _changed(self.job, Job())]
        parts += [f"{name}={_show(value)}" for name, value in _changed(self.conditions, Conditions())]
        return " ".join([*parts, *map(str, self.faults)])


def _changed(values: Job | Conditions, defaults: Job | Conditions) -> list[tuple[str, object]]:
    return [
        (name, value) for name, value, default in zip(values._fields, values, defaults, strict=True) if value != default
    ]


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def parse_schedule(text: str) -> Schedule:
    """The inverse of ``str(schedule)``.

    Raises:
        ValueError: an unknown word, a value that is no whole number, or a worker that the job does not have.
    """
    job, conditions, faults = Job()._asdict(), Conditions()._asdict(), []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals:
            faults.append(parse_fault(word))
        elif name == "widths":
            job[name] = tuple(_whole(word, width) for width in value.split(","))
        elif name in job:
            job[name] = bool(_whole(word, value)) if type(job[name]) is bool else _whole(word, value)
        elif name in conditions:
            conditions[name] = bool(_whole(word, value)) if type(conditions[name]) is bool else _whole(word, value)
        else:
            raise ValueError(f"{word!r} is neither a fault nor one of {', '.join([*job, *conditions])}")
    schedule = Schedule(Job(**job), Conditions(**conditions), tuple(faults))
    widest = max(schedule.job.widths)
    if min(schedule.job.widths) < 1 or schedule.job.num_microbatches < widest:
        raise ValueError(f"every stage needs a worker, and num_microbatches must be at least {widest}: {text!r}")
    if schedule.job.accumulator_bits not in GRID_RULES:
        raise ValueError(f"accumulator_bits must be one of {', '.join(map(str, GRID_RULES))}: {text!r}")
    if schedule.job.blocks_at_once < 1:
        raise ValueError(f"blocks_at_once must be at least 1: {text!r}")
    last = schedule.job.num_ever - 1
    for fault in faults:
        if any(worker > last for worker in fault.workers):
            raise ValueError(f"{str(fault)!r} strikes a worker that does not exist: they are 0 to {last}")
    agents = schedule.conditions.agents
    for fault in faults:
        if fault.is_of_agent and (int(fault.target[1:]) >= agents or fault.kind not in AGENT_KINDS):
            kinds = ", ".join(AGENT_KINDS)
            raise ValueError(f"{str(fault)!r} needs an agent of a node below {agents}, and one of the kinds {kinds}")
    if agents and (schedule.conditions.candidates or schedule.job.num_hosts):
        raise ValueError(f"agents={agents} goes neither with candidates nor with num_hosts")
    if schedule.job.leaver > last:
        raise ValueError(f"worker {schedule.job.leaver} is to leave, but they are 0 to {last}")
    return schedule


def _whole(word: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{word!r} needs a whole number") from None


# ----------------------------------------------------------------------------------------------------- seeded schedules

LAYOUTS = (
    *((2, 1), (1, 2), (3,), (1, 1)) * 2,  # small jobs are searched fastest, and most of what goes wrong does so in them
    *((2, 2), (1, 1, 1), (2, 1, 1), (1, 3), (3, 1), (4,), (3, 2), (2, 3)),
)
_MANY_KINDS = ("kill",) * 8 + ("suspect",) * 3 + ("hang", "hang", "isolate", "cut", "delay", "disconnect", "usurp")


def random_schedule(seed: int, job: Job | None = None) -> Schedule:
    """The schedule of a seed: up to five faults on one of the small layouts, in any weather.

    Args:
        seed: decides everything.
        job: train this one instead of a random one.
    """
    rng = random.Random(seed)
    drawn = _random_job(rng)._replace(
        change_step=_drawn_for(f"change of {seed}").choice((0, 0, 1, 2)),
        ask_step=_drawn_for(f"request of {seed}").choice((0, 0, 1, 2)),
        stop_step=_drawn_for(f"stop of {seed}").choice((0, 0, 0, 0, 0, 1, 2)),
        tied=_drawn_for(f"tie of {seed}").random() < 0.5,
        accumulator_bits=_drawn_for(f"width of {seed}").choice(tuple(GRID_RULES)),
        blocks_at_once=_drawn_for(f"batch of {seed}").choice((1, 1, 2, 3)),
    )
    if drawn.change_step:  # blocks move for some steps before it is in force
        drawn = drawn._replace(steps=drawn.steps + _drawn_for(f"moves of {seed}").choice((1, 2, 3)))
    rounds = _drawn_for(f"rounds of {seed}").choice((1, 1, 1, 1, 2, 3))
    drawn = drawn._replace(num_microbatches=rounds * drawn.num_microbatches)
    is_drawn = job is None
    if _drawn_for(f"copies of {seed}").random() < 0.3:
        drawn = drawn._replace(num_followers=WHOLE_STAGE, renumbers=_drawn_for(f"numbers of {seed}").random() < 0.5)
    if job is None:
        job = _with_membership(drawn, _drawn_for(f"membership of {seed}"))
        job = _with_hosts(job, _drawn_for(f"hosts of {seed}"))
    host = _lost_host(job, _drawn_for(f"lost host of {seed}"))
    num_workers, steps = job.num_workers, job.steps
    conditions = Conditions(
        seed=rng.randrange(1, 1 << 30),
        exit_delay=rng.choice((1, 3, 6, 12, 40)),
        link_delay=rng.choice((1, 2, 5, 30)),
        heartbeat_bound=rng.choice((25, 25, 40, 80)),
        restart_delay=rng.choice((1, 8, 30)),
        slow_worker=rng.choice((-1, -1, *range(num_workers))),
        slow_by=rng.choice((5, 15, 40)),
        keeps_in_flight=rng.random() < 0.6,
        plan_delay=_drawn_for(f"plan of {seed}").choice((0, 0, 0, 4, 15, 60)),
        commit_delay=_drawn_for(f"commit of {seed}").choice((0, 0, 4, 15, 60)),
        mid_action=_drawn_for(f"layers of {seed}").choice((0, 0, 1, 1, 2)),
        replans=_drawn_for(f"recovery of {seed}").random() < 0.3,
    )
    candidates = _drawn_for(f"candidates of {seed}")
    has_candidates = candidates.random() < 0.25
    if has_candidates:
        conditions = conditions._replace(candidates=2, store_delay=candidates.choice((0, 0, 2, 8)))
    agents = _drawn_for(f"agents of {seed}")
    has_agents = not has_candidates and not job.num_hosts and num_workers > 1 and agents.random() < 0.25
    if has_agents:
        conditions = conditions._replace(agents=agents.choice((2, 3) if num_workers > 2 else (2,)))
    detector = _drawn_for(f"detector of {seed}")
    conditions = conditions._replace(detects=detector.random() < (0.4 if job.num_hosts else 0.15))
    places = _drawn_for(f"places of {seed}")
    if places.random() < 0.2:
        job = job._replace(steps=job.steps + places.choice((3, 5, 8))) if is_drawn else job
        conditions, steps = conditions._replace(respawns=True), job.steps
    conditions = conditions._replace(
        drain_delay=_drawn_for(f"deadline of {seed}").choice((600, 600, 150, 60)) if job.leave_step else 600
    )
    span = 8 * num_workers * steps * (job.num_microbatches // max(job.widths))
    at = rng.randrange(span)
    faults = []
    for index in range(rng.choice((1, 2, 2, 3, 3, 4) if num_workers < 5 else (3, 4, 5))):
        if index > 0:
            # Most of the later faults strike while an earlier one is being dealt with.
            at = at + rng.randrange(1, 30) if rng.random() < 0.7 else rng.randrange(span)
        faults.append(_random_fault(rng, num_workers + (job.join_step > 0), at))
        if host and index == 0:
            faults[0] = ScheduledFault("kill", host, at)
            if conditions.detects and detector.random() < 0.5:
                silence = detector.choice(("isolate", "isolate", "hang"))
                faults[0] = ScheduledFault(silence, host, at, detector.choice((40, 60, 150, 400)))
    if has_candidates:
        faults += [_random_store_fault(candidates, span) for _ in range(candidates.choice((0, 1, 1, 2)))]
    notices = _drawn_for(f"notices of {seed}")
    if notices.random() < 0.15:
        workers = range(num_workers + (job.join_step > 0))
        targets = [*map(str, workers), *(f"{AGENT}{number}" for number in range(conditions.agents))]
        faults += [
            ScheduledFault("notice", target, notices.randrange(span), notices.choice((20, 60, 150, 400)))
            for target in notices.sample(targets, notices.choice((1, 1, 2)))
        ]
    if has_agents:
        faults += [_random_agent_fault(agents, conditions.agents, span) for _ in range(agents.choice((1, 1, 2)))]
    flips = _drawn_for(f"flips of {seed}")
    if flips.random() < 0.2 and (is_drawn or not job.salvage):
        job = job._replace(salvage=False)
        faults.append(ScheduledFault("flip", str(flips.randrange(num_workers)), flips.randrange(span)))
    if has_candidates:
        copies = _drawn_for(f"copy of {seed}")
        if copies.random() < 0.2:
            faults.append(ScheduledFault("back", STORE, copies.randrange(span), copies.choice((5, 20, 60, 150))))
    return Schedule(job, conditions, tuple(sorted(faults, key=lambda fault: fault.instant)))


_FOR_ONE_PURPOSE = random.Random(0)


def _drawn_for(purpose: str) -> random.Random:
    """A generator for one purpose, until the next one is asked for: a new one each would be seeded twice."""
    _FOR_ONE_PURPOSE.seed(purpose)
    return _FOR_ONE_PURPOSE


def _with_membership(job: Job, rng: random.Random) -> Job:
    """Perhaps a worker joins, one leaves, or both."""
    if rng.random() < 0.65:
        return job
    joins, leaves = rng.choice(((1, 0), (1, 0), (0, 1), (1, 1)))
    return job._replace(
        join_step=joins * rng.choice((1, 2)),
        leave_step=leaves * rng.choice((1, 2, 4)),
        leaver=leaves * rng.randrange(job.num_workers),
        steps=job.steps + rng.choice((3, 4, 5)),
    )


def _with_hosts(job: Job, rng: random.Random) -> Job:
    """Perhaps the workers are on several hosts."""
    if job.num_workers < 3 or rng.random() < 0.7:
        return job
    return job._replace(num_hosts=rng.choice([number for number in (2, 2, 3) if number < job.num_workers]))


def _lost_host(job: Job, rng: random.Random) -> str:
    """The workers of a host that is lost, as a fault's target; often none."""
    hosts = workers_of_hosts(job)
    return "-".join(map(str, rng.choice(hosts))) if hosts and rng.random() < 0.6 else ""


def workers_of_hosts(job: Job) -> list[tuple[int, ...]]:
    """The workers that a job begins with, by host; nothing where nothing is known of hosts."""
    if job.hosts is None:
        return []
    dealt = deal_over_hosts(job.widths, job.hosts)
    return [tuple(worker for worker, where in dealt if where == host) for host in job.hosts]


def _random_job(rng: random.Random) -> Job:
    widths = rng.choice(LAYOUTS)
    return Job(
        widths=widths,
        layers_per_stage=rng.choice((1, 1, 2)) if len(widths) < 3 else 1,
        blocks_per_layer=rng.choice((1, 2)),
        num_microbatches=max(widths),
        num_followers=rng.choice((1, 1, 2)),
        steps=rng.choice((2, 3, 3, 3)),
        checkpoint_every=rng.choice((0, 1, 1, 2)),
        retry_step=rng.choice((0, 0, 2, 2, 3)),
        blocks_per_round=rng.choice((1, 1, 8)),
    )


def _random_store_fault(rng: random.Random, span: int) -> ScheduledFault:
    kind = rng.choice(("lost", "mute", "late", "shut", "kill", "kill"))
    target = {"kill": rng.choice((HOST, COORDINATOR)), "shut": COORDINATOR}.get(kind, STORE)
    return ScheduledFault(kind, target, rng.randrange(span), 0 if kind == "kill" else rng.choice((5, 20, 60, 150)))


def _random_agent_fault(rng: random.Random, num_agents: int, span: int) -> ScheduledFault:
    target = f"{AGENT}{rng.randrange(num_agents)}"
    if rng.random() < 0.5:
        return ScheduledFault("kill", target, rng.randrange(span))
    return ScheduledFault("disconnect", target, rng.randrange(span), rng.choice((5, 20, 60, 150)))


def _random_fault(rng: random.Random, num_workers: int, instant: int) -> ScheduledFault:
    kind = rng.choice(_MANY_KINDS)
    target = str(rng.randrange(num_workers))
    duration = 0
    if kind == "usurp" or (kind == "kill" and rng.random() < 0.25):
        target = COORDINATOR
    if kind in ("cut", "delay"):
        target = "-".join(map(str, sorted(rng.sample(range(num_workers), 2))))
    if kind in ("hang", "isolate", "delay", "usurp"):
        duration = rng.choice((5, 20, 30, 40, 50, 60, 150))
    return ScheduledFault(kind, target, instant, duration)
