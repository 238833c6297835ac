"""Faults on request: ``kill:3@17:gather+2`` kills worker 3 just before the third action of its gather of step 17.

    kind:W@STEP[:PHASE[+N]]     kind is one of kill (SIGKILL), hang (SIGSTOP), cut (nothing goes to or from the worker
                                any more), cut-close (the same, and its links are closed)
    kill-host:H@STEP[:PHASE[+N]]  kills all workers that the run begins with on a host (elastic.hosts), or in a rack or
                                other domain of that name, at one instant: when the first of them is at that point
    away:SITE@STEP[:SECONDS]    a site (sites.network) is cut off from all others for so long, or for good: no frame and
                                no control message goes in or out, once the first of the workers that the run begins
                                with there begins STEP
    slow:W@STEP:FACTOR          from STEP on W computes at this share of its speed: 0.5 at half of it, 1 as before
    slow-link:W@STEP:FACTOR     from STEP on the emulated links of W carry this share of what they did: 0.01 a hundredth
    drain:W@STEP                when a worker begins STEP, W is asked to leave, as by a spot notice
    kill:V+W@STEP[:PHASE[+N]]   several workers at one instant: when the first of them, V, is at that point; also of
                                hang and drain
    join@STEP                   when a worker begins STEP, one more is started, which joins

STEP counts from 1. PHASE is forward, backward, reduce, vote, apply, gather or any (default); ``+N`` skips the first N
actions of the phase in that step. W is a worker, or ``random``, or, for kill, ``coordinator``. A fault fires once, also
when the step is tried again. What is random here is drawn from the run's seed and the fault's position in the list, so
the same command always does the same.

Just before a fault strikes, a line with the time is appended to the run's ``faults.jsonl``: from it the times of a
recovery are counted.
"""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from elaswave.blocks.domains import prefixes, site_of
from elaswave.errors import ConfigError, RunFolderError
from elaswave.hashing import key64
from elaswave.observability.processes import clock_here, read_processes, signal_process
from elaswave.protocol.step.engine import PHASES, Phase
from elaswave.untrusted import decode_json, open_regular, read_bytes, reason

Kind = Literal["kill", "hang", "cut", "cut-close", "kill-host", "away", "slow", "slow-link", "drain", "join"]
KILL_HOST: Kind = "kill-host"
AWAY: Kind = "away"
OF_DOMAINS: tuple[Kind, ...] = (KILL_HOST, AWAY)
"""Kinds that strike all workers of a host, or of a site."""
LOSING: tuple[Kind, ...] = ("kill", "hang", "cut", "cut-close", *OF_DOMAINS)
"""Kinds after which the worker is lost; they strike at a point of a step."""
SLOW: Kind = "slow"
SLOW_LINK: Kind = "slow-link"
SLOWING: tuple[Kind, ...] = (SLOW, SLOW_LINK)
"""Kinds that last, with a factor."""
JOIN: Kind = "join"
DRAIN: Kind = "drain"
ASKING: tuple[Kind, ...] = (JOIN, DRAIN)
"""Kinds that are requests to the coordinator, which carries them out when a worker begins the step."""
SUPPORTED: tuple[Kind, ...] = (*LOSING, *SLOWING, *ASKING)
"""Kinds that the engine can carry out."""
COORDINATOR = "coordinator"
RANDOM = "random"
ANY = "any"
TOGETHER: tuple[Kind, ...] = ("kill", "hang", DRAIN)
"""Kinds that may strike several workers at one instant."""
_LOOK_S = 0.01

_FORMS: dict[Kind, str] = {
    **dict.fromkeys(LOSING, "{kind}:W@STEP[:PHASE[+N]]"),
    **dict.fromkeys(("kill", "hang"), "{kind}:W[+W...]@STEP[:PHASE[+N]]"),
    "kill-host": "kill-host:H@STEP[:PHASE[+N]]",
    "away": "away:SITE@STEP[:SECONDS]",
    **dict.fromkeys(SLOWING, "{kind}:W@STEP:FACTOR"),
    "drain": "drain:W[+W...]@STEP",
    "join": "join@STEP",
}
_STRUCK = {KILL_HOST: "host", AWAY: "site"}
_SPEC = re.compile(
    r"(?P<kind>[^:@]*)(?::(?P<worker>[^@]*))?(?:@(?P<step>[^:]*)(?P<colon>:(?P<detail>.*))?)?", re.DOTALL
)
_NUMBER = re.compile(r"[0-9]{1,18}")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault to be injected. ``str(fault)`` is its spec."""

    kind: Kind
    worker: int | Literal["random", "coordinator"] | None
    """Whom it strikes, of several the one that is named first, of a host the lowest; None for ``join``, and for a host
    whose workers are not known yet."""
    step: int
    """From 1."""
    phase: Phase | Literal["any"] = "any"
    skip: int = 0
    """How many actions of the phase pass before it strikes."""
    factor: float | None = None
    """``slow``: the worker's speed from then on, as a share of what it was at first: above 0, at most 1; ``slow-link``:
    the same of its links' bandwidth."""
    host: str = ""
    """``kill-host``: which, or a rack or other domain; ``away``: the site."""
    others: tuple[int, ...] = ()
    """The other workers that it strikes at the same instant."""
    seconds: float | None = None
    """``away``: for how long; None: for good."""

    @property
    def victims(self) -> tuple[int, ...]:
        """The workers that it strikes."""
        return (self.worker, *self.others) if isinstance(self.worker, int) else ()

    def __str__(self) -> str:
        whom = self.host or ("+".join(map(str, self.victims)) if self.others else self.worker)
        text = self.kind if whom is None else f"{self.kind}:{whom}"
        text += f"@{self.step}"
        if self.factor is not None:
            text += f":{self.factor:g}" if float(f"{self.factor:g}") == self.factor else f":{self.factor!r}"
        elif self.seconds is not None:
            text += f":{self.seconds!r}"
        elif self.phase != ANY or self.skip:
            text += f":{self.phase}" + (f"+{self.skip}" if self.skip else "")
        return text


def parse_fault(spec: str) -> Fault:
    """Reads one spec, without knowing the job that it is for.

    Raises:
        ConfigError: lists everything that is wrong with it.
    """
    fault, problems = _parse(spec)
    if fault is None:
        raise ConfigError([f"--fault {spec}: {problem}" for problem in problems])
    return fault


def parse_faults(
    specs: Sequence[str],
    *,
    seed: int,
    workers: Iterable[int],
    num_steps: int,
    respawns: bool = False,
    hosts: Mapping[int, str] = MappingProxyType({}),
    sites: Collection[str] = (),
    has_agents: bool = False,
) -> tuple[Fault, ...]:
    """Reads the faults of a job and draws its random workers.

    Args:
        specs: in their order; it decides what is drawn.
        seed: ``run.seed``.
        workers: ids of those that the job begins with; the ids of those that join follow the largest.
        num_steps: the job's last step.
        respawns: whether the places of lost workers are taken again.
        hosts: where the workers run that the job begins with, see `elaswave.blocks.domains`.
        sites: that may be cut off from the coordinator and from others; none where links are not emulated.
        has_agents: whether workers are on several hosts, each with a clock of its own.
    Returns:
        One fault per spec, each with a worker's id, ``coordinator``, or None for ``join``. Drawn are workers that are
        there from the beginning, and none that another fault loses or drains.
    Raises:
        ConfigError: lists every problem of every spec.
    """
    there = sorted(workers)
    kinds = [spec.partition(":")[0].partition("@")[0] for spec in specs]
    num_lost = sum(
        len(there) if kind in OF_DOMAINS else kind in LOSING and 1 + spec.partition("@")[0].count("+")
        for kind, spec in zip(kinds, specs, strict=True)
    )
    num_joiners = kinds.count(JOIN) + (num_lost if respawns else 0)
    known = range(there[-1] + 1 + num_joiners) if num_joiners else there
    problems: list[str] = []
    faults: list[tuple[int, str, Fault]] = []
    for position, spec in enumerate(specs):
        fault, wrong = _parse(spec)
        if fault is not None:
            wrong = list(_misfits(fault, known, num_steps, hosts, sites, has_agents=has_agents))
            faults.append((position, spec, fault if wrong or not fault.host else _on_host(fault, hosts)))
        problems += [f"--fault {spec}: {problem}" for problem in wrong]
    lost: dict[int, str] = {}
    for _, spec, fault in faults:
        for worker in fault.victims if fault.kind in (*LOSING, DRAIN) else ():
            if worker in lost:
                problems.append(f"--fault {spec}: worker {worker} is gone already by {lost[worker]}")
            lost.setdefault(worker, spec)
    result = []
    for position, spec, fault in faults:
        if fault.worker == RANDOM:
            left = [worker for worker in there if worker not in lost]
            if not left:
                problems.append(f"--fault {spec}: the other faults leave none of the {len(there)} workers to draw from")
                continue
            worker = left[key64(seed, position, "fault worker") % len(left)]
            if fault.kind in (*LOSING, DRAIN):
                lost[worker] = spec
            fault = msgspec.structs.replace(fault, worker=worker)
        result.append(fault)
    if problems:
        raise ConfigError(problems)
    return tuple(result)


def _parse(spec: str) -> tuple[Fault | None, list[str]]:
    """Parses a fault, or tells what is wrong with its spec."""
    match = _SPEC.fullmatch(spec)
    kind = match["kind"] if match else spec
    if match is None or kind not in _FORMS:
        return None, [f"unknown kind {kind!r}; there are {', '.join(SUPPORTED)}"]
    form = _FORMS[kind].format(kind=kind)
    problems = []
    worker: int | str | None = None
    others: tuple[int, ...] = ()
    host = ""
    if kind in OF_DOMAINS and match["worker"]:
        host = match["worker"]
    elif kind == "join":
        if match["worker"] is not None:
            problems.append(f"a new worker has no number yet; expected {form}")
    elif not match["worker"]:
        problems.append(f"no {_STRUCK.get(kind, 'worker')} is given; expected {form}")
    elif _NUMBER.fullmatch(match["worker"]):
        worker = int(match["worker"])
    elif "+" in match["worker"]:
        worker, others, wrong = _parse_several(kind, match["worker"])
        problems += wrong
    elif match["worker"] == RANDOM or (match["worker"] == COORDINATOR and kind == "kill"):
        worker = match["worker"]
    elif match["worker"] == COORDINATOR:
        problems.append(f"the coordinator can only be killed, kill:{COORDINATOR}@STEP")
    else:
        names = f"a number, {RANDOM}" + (f" or {COORDINATOR}" if kind == "kill" else "")
        problems.append(f"worker {match['worker']!r} is none of {names}")
    step = 0
    if not match["step"]:
        problems.append(f"no step is given; expected {form}")
    elif not _NUMBER.fullmatch(match["step"]) or int(match["step"]) < 1:
        problems.append(f"step {match['step']!r} is no whole number of at least 1")
    else:
        step = int(match["step"])
    phase, skip, factor, seconds = ANY, 0, None, None
    detail = match["detail"]
    if kind == AWAY:
        seconds = _parse_seconds(detail) if match["colon"] else None
        if match["colon"] and seconds is None:
            problems.append(f"{detail!r} is no number of seconds above 0; expected {form}, such as away:oslo@5:60")
    elif kind in LOSING and worker != COORDINATOR:
        if match["colon"]:
            phase, skip, wrong = _parse_phase(detail)
            problems += wrong
    elif kind in SLOWING:
        factor = _parse_factor(detail)
        if factor is None:
            problems.append(
                f"factor {detail or ''!r} is no number above 0 and at most 1; expected {form}, such as {kind}:1@5:0.5"
            )
    elif match["colon"]:
        what = "the coordinator takes part in no phase" if worker == COORDINATOR else f"expected {form}"
        problems.append(f"nothing may follow the step, but {':' + detail!r} does: {what}")
    if problems:
        return None, problems
    values = {"kind": kind, "worker": worker, "step": step, "phase": phase, "skip": skip, "factor": factor}
    return Fault(**values, host=host, others=others, seconds=seconds), []  # type: ignore[arg-type]


def _parse_several(kind: str, text: str) -> tuple[int, tuple[int, ...], list[str]]:
    names = text.split("+")
    problems = [
        f"worker {name!r} is no number, as each of several must be" for name in names if not _NUMBER.fullmatch(name)
    ]
    if kind not in TOGETHER:
        problems.append(f"{kind} strikes one worker; several at one instant are struck by {', '.join(TOGETHER)}")
    if problems:
        return 0, (), problems
    first, *others = map(int, names)
    twice = sorted({worker for worker in (first, *others) if (first, *others).count(worker) > 1})
    return first, tuple(others), [f"worker {worker} is named more than once" for worker in twice]


def _parse_phase(detail: str) -> tuple[str, int, list[str]]:
    phase, plus, count = detail.partition("+")
    problems = []
    if phase not in (*PHASES, ANY):
        problems.append(f"phase {phase!r} is none of {', '.join(PHASES)}, {ANY}")
    if plus and not _NUMBER.fullmatch(count):
        problems.append(f"+N takes a whole number, got {'+' + count!r}")
    elif plus and phase == ANY and int(count):
        problems.append(f"{'+' + count!r} needs a phase: the actions of {ANY} have no order of their own")
    return phase, int(count) if plus and not problems else 0, problems


def _parse_factor(detail: str | None) -> float | None:
    try:
        factor = float(detail or "")
    except ValueError:
        return None
    return factor if 0.0 < factor <= 1.0 else None


def _parse_seconds(detail: str) -> float | None:
    try:
        seconds = float(detail)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None


def _on_host(fault: Fault, hosts: Mapping[int, str]) -> Fault:
    """Returns the fault with the workers that it strikes."""
    first, *others = sorted(worker for worker, label in hosts.items() if fault.host in prefixes(label))
    return msgspec.structs.replace(fault, worker=first, others=tuple(others))


def _misfits(
    fault: Fault,
    workers: Sequence[int],
    num_steps: int,
    hosts: Mapping[int, str],
    sites: Collection[str],
    *,
    has_agents: bool,
) -> Iterable[str]:
    if fault.kind == KILL_HOST:
        known = dict.fromkeys(domain for label in hosts.values() for domain in prefixes(label))
        if not known:
            yield "all workers are on one host; say with elastic.hosts which of them share one"
        elif fault.host not in known:
            yield f"there is no host {fault.host!r}; the job has {', '.join(known)}"
    if fault.kind == AWAY:
        here = dict.fromkeys(site_of(label) for label in hosts.values())
        if has_agents:
            yield (
                "it begins and ends by the clock of one host, and this job has agents: use `elaswave train` with "
                "control.hosts = 1"
            )
        elif not sites:
            yield "there are no emulated links that it could cut; give sites.network, and leave sites.links out"
        elif fault.host not in here:
            yield f"there is no site {fault.host!r} with workers; the job has {', '.join(here)}"
        elif fault.host not in sites:
            yield "the coordinator is there, and all others would be cut off from it; put it elsewhere"
        elif len(here) == 1:
            yield f"all workers are at {fault.host}: nobody could go on"
    for worker in fault.victims:
        if worker not in workers:
            yield f"there is no worker {worker}; the job has {', '.join(map(str, workers))}"
    if fault.kind in LOSING and has_agents and len({hosts.get(worker) for worker in fault.victims}) > 1:
        yield (
            "they are on several machines, and none can strike the workers of another: name workers of one, and give "
            "one fault for each"
        )
    if fault.step > num_steps:
        yield f"step {fault.step} is never reached; run.steps is {num_steps}"


# ------------------------------------------------------------------------------------------------------------- record


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that has struck: one line of ``faults.jsonl``."""

    position: int
    """Of the fault in the list."""
    fault: str
    """Its spec."""
    worker: int | Literal["coordinator"] | None
    """None for ``join``."""
    step: int
    attempt: int
    phase: Phase | None
    """Where it struck; None for what the coordinator carries out."""
    action: int
    """Number of actions of the phase that had passed in this attempt."""
    time_s: float
    """Monotonic time, just before it struck."""
    clock: str = ""
    """By which clock, see `elaswave.observability.processes`."""

    @property
    def loses(self) -> bool:
        """Whether the worker is lost by it."""
        return self.fault.partition(":")[0] in LOSING


def read_fault_records(path: Path) -> list[FaultRecord]:
    """Reads the faults that have struck, in order; empty if there is no file. It may be called while they strike."""
    try:
        lines = read_bytes(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {reason(error)}") from error
    try:
        return [decode_json(line, FaultRecord) for line in lines if line.endswith(b"\n")]
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged ({error}): no run has written it") from error


def never_struck(faults: Sequence[Fault], records: Iterable[FaultRecord]) -> list[Fault]:
    """Lists the faults that a run has ended without, such as one that waits for an action that its worker does not
    have."""
    struck = {record.position for record in records}
    return [fault for position, fault in enumerate(faults) if position not in struck]


def _record(path: Path, record: FaultRecord) -> None:
    """Appends a line in one write: several processes may do so at once, and it outlives the death of this one."""
    line = msgspec.json.encode(record) + b"\n"
    file = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, line)
    finally:
        os.close(file)


# -------------------------------------------------------------------------------------------------------------- strike


class Silencer(Protocol):
    """Cuts a worker off from all others, as a broken network would."""

    def __call__(self, machine: Any, *, close_links: bool) -> None:
        """From now on nothing that this worker sends leaves it and nothing that is sent to it arrives, on the data
        plane and to the coordinator alike; the worker itself does not notice.

        Args:
            machine: the worker's machine.
            close_links: also close its connections, so that the others notice.
        """
        ...


class Slower(Protocol):
    """Makes a worker slower than its device is, or its links."""

    def __call__(self, machine: Any, factor: float, *, links: bool) -> None:
        """From its next action on the worker computes at a share of its speed.

        Args:
            machine: the worker's machine.
            factor: above 0, at most 1; 1 ends it.
            links: its emulated links carry this share of what they did, instead.
        """
        ...


class Parting(Protocol):
    """Cuts a site off from all others."""

    def __call__(self, site: str, until_s: float) -> None:
        """From now on nothing goes between workers of this site and others, the coordinator among them.

        Args:
            site: its name.
            until_s: monotonic time at which that ends; infinite: it does not.
        """
        ...


class Probe(Protocol):
    """Is told when a worker reaches a point of a step."""

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """Is called just before the index-th action (from 0) of a phase.

        Args:
            phase: where the step is.
            index: counts the phase's actions in this attempt.
            machine: the `elaswave.protocol.step.machine.WorkerMachine`; has the worker's id, the step and the attempt.
        """
        ...


class NoProbe:
    """The probe of an ordinary run."""

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """Does nothing."""


class Probes:
    """Several probes as one, told in their order.

    Args:
        probes: each is told of every point.
    """

    def __init__(self, *probes: Probe) -> None:
        self._probes = probes

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """Tells all of them."""
        for probe in self._probes:
            probe.reached(phase, index, machine)


class FaultProbe:
    """Injects faults into the workers: a `Probe` that strikes where it is told to.

    Made once per job, before the workers are forked: each strikes only the faults that are its own.

    Args:
        faults: of `parse_faults`.
        seed: ``run.seed``; decides the phase of those that may strike in any.
        record: file to which a line is appended before a fault strikes.
        silence: carries out cut and cut-close.
        slow: carries out slow and slow-link.
        part: carries out away.
        suffix: of this host's `processes.json`.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        seed: int,
        record: Path,
        silence: Silencer,
        slow: Slower,
        part: Parting,
        suffix: str = "",
    ) -> None:
        self._part = part
        self._suffix = suffix
        self._seed = seed
        self._record = record
        self._silence = silence
        self._slow = slow
        self._faults = {index: fault for index, fault in enumerate(faults) if fault.kind in (*LOSING, *SLOWING)}
        self._pending: list[tuple[int, Fault]] | None = None
        """The own faults that have not struck yet; None until this probe knows whose it is."""

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """Strikes if a fault is due here; see `Probe.reached`."""
        if self._pending is None:
            self._pending = [item for item in self._faults.items() if item[1].worker == machine.worker]
        for item in self._pending:
            fault = item[1]
            if fault.step <= machine.step and self._is_due(*item, phase, index, machine.step):
                self._pending = [other for other in self._pending if other is not item]
                self._strike(*item, phase, index, machine)
                return

    def _is_due(self, position: int, fault: Fault, phase: Phase, index: int, step: int) -> bool:
        if fault.kind in (*SLOWING, AWAY):
            return True
        if fault.phase == ANY:
            # A worker may have nothing to do in the phase drawn; then the beginning of its next step will do.
            return step > fault.step or (index == 0 and phase == drawn_phase(self._seed, position))
        return step == fault.step and phase == fault.phase and index == fault.skip

    def _strike(self, position: int, fault: Fault, phase: Phase, index: int, machine: Any) -> None:
        record = FaultRecord(
            position=position,
            fault=str(fault),
            worker=machine.worker,
            step=machine.step,
            attempt=machine.attempt,
            phase=phase,
            action=index,
            time_s=time.monotonic(),
            clock=clock_here(),
        )
        _record(self._record, record)
        for other in fault.others:
            _record(self._record, msgspec.structs.replace(record, worker=other))
        if fault.kind == AWAY:
            self._part(fault.host, end_of(fault, record.time_s))
        elif fault.kind in ("kill", KILL_HOST):
            _strike_together(self._record.parent, self._suffix, fault.others, signal.SIGKILL)
        elif fault.kind == "hang":
            _strike_together(self._record.parent, self._suffix, fault.others, signal.SIGSTOP)
        elif fault.factor is not None:
            self._slow(machine, fault.factor, links=fault.kind == SLOW_LINK)
        else:
            self._silence(machine, close_links=fault.kind == "cut-close")


def end_of(fault: Fault, time_s: float) -> float:
    """Computes when a site is back that has been away since a time; infinite: it never is."""
    return math.inf if fault.seconds is None else time_s + fault.seconds


class AwayWatch:
    """Tells a worker of sites that have gone, whichever worker cut them off: on a thread of its own, from the record.
    There is none where there is no such fault.

    Args:
        faults: of `parse_faults`.
        record: file of those that have struck.
        part: is called for each, perhaps again by the worker itself.
    """

    def __init__(self, faults: Sequence[Fault], record: Path, part: Parting) -> None:
        self._faults = faults
        self._record = record
        self._part = part
        self._reported: set[int] = set()
        self._size = 0
        if any(fault.kind == AWAY for fault in faults):
            threading.Thread(target=self._run, name="sites that are away", daemon=True).start()

    def _run(self) -> None:
        while len(self._reported) < sum(fault.kind == AWAY for fault in self._faults):
            self.look()
            time.sleep(_LOOK_S)

    def look(self) -> None:
        """Looks once."""
        try:
            size = self._record.stat().st_size
        except FileNotFoundError:
            return
        if size == self._size:
            return
        self._size = size
        for record in read_fault_records(self._record):
            fault = self._faults[record.position]
            if fault.kind == AWAY and record.position not in self._reported:
                self._reported.add(record.position)
                self._part(fault.host, end_of(fault, record.time_s))


def away_until_s(faults: Sequence[Fault], records: Iterable[FaultRecord], worker: int) -> float:
    """Computes when a worker's site is back that a fault has cut off, or was; 0 if none has."""
    ends = [
        end_of(faults[record.position], record.time_s)
        for record in records
        if faults[record.position].kind == AWAY and record.worker == worker
    ]
    return max(ends, default=0.0)


def _strike_together(run_dir: Path, suffix: str, workers: Collection[int], number: signal.Signals) -> None:
    """Sends a signal to this worker and to others, as far as they live."""
    found = read_processes(run_dir, suffix) if workers else []
    others = [process for process in found if process.role == "worker" and process.id in workers]
    # All are stopped first: none gets on while another is being killed.
    for process in others:
        signal_process(process, signal.SIGSTOP)
    if number != signal.SIGSTOP:
        for process in others:
            signal_process(process, number)
    os.kill(os.getpid(), number)


def drawn_phase(seed: int, position: int) -> Phase:
    """Draws the phase of a fault that may strike in any.

    Args:
        seed: ``run.seed``.
        position: of the fault in the list.
    """
    return PHASES[key64(seed, position, "fault phase") % len(PHASES)]


class DueFault(NamedTuple):
    """A fault whose time has come."""

    position: int
    fault: Fault


def coordinator_fault(faults: Sequence[Fault], step: int, struck: Collection[int] = ()) -> DueFault | None:
    """Finds the next fault that the coordinator is to carry out now, if any: its own end, or a request to it.

    Args:
        faults: of `parse_faults`.
        step: the newest step that any worker has begun.
        struck: positions of those that have struck already, also in earlier coordinators: see `read_fault_records`.
    """
    for position, fault in enumerate(faults):
        is_ours = fault.worker == COORDINATOR or fault.kind in ASKING
        if is_ours and fault.step <= step and position not in struck:
            return DueFault(position, fault)
    return None


class Requests(Protocol):
    """What faults may ask the coordinator for, as people may."""

    def request_join(self, count: int) -> object:
        """So many workers are to join."""
        ...

    def request_drain(self, worker: int, deadline_s: float | None = None) -> object:
        """A worker is to leave.

        Args:
            worker: its id.
            deadline_s: seconds after which it is lost; None: as configured.
        """
        ...


def strike_coordinator(due: DueFault, requests: Requests, *, step: int, record: Path) -> None:
    """Records the fault and carries it out: asks for what it asks for, or kills this process.

    Args:
        due: of `coordinator_fault`.
        requests: to the coordinator.
        step: the newest step that any worker has begun.
        record: file to which a line is appended.
    """
    fault = due.fault
    entry = FaultRecord(
        position=due.position,
        fault=str(fault),
        worker=fault.worker,  # type: ignore[arg-type]  # random ones are drawn
        step=step,
        attempt=0,
        phase=None,
        action=0,
        time_s=time.monotonic(),
        clock=clock_here(),
    )
    _record(record, entry)
    for other in fault.others:
        _record(record, msgspec.structs.replace(entry, worker=other))
    if fault.kind == JOIN:
        requests.request_join(1)
    elif fault.kind == DRAIN:
        for worker in fault.victims:
            requests.request_drain(worker)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
