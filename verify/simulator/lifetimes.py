"""The life of a job's name in its store, from its creation to its outcome: rules H1, H4, H12 and H13.

Three hosts: the first one's agent creates the job, those of the first two may have its coordinator, and the third one
only takes part. What they do is the product's: who creates (`elaswave.protocol.leadership.job_creation`), what a
candidate asks and when it claims (`elaswave.protocol.leadership.election`), when an agent starts its next one, how long
it waits without a coordinator and when it looks for the outcome (`elaswave.protocol.membership.agent`), what a
coordinator writes (`elaswave.protocol.coordinator.store_writes`), and whom it takes for a member
(`elaswave.protocol.leadership.store_position`). Steps and workers are left out: a coordinator makes entries, and ends
the job after some. Agents die and come again, hosts are cut off from each other and from the store, whose requests are
lost, late or not answered.
"""

# ruff: noqa: D102 (what a `CandidateAgent` is asked is described there)

import random
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar

from elaswave.protocol.coordinator.store_writes import (
    LEASE_HEARTBEAT,
    OUTCOME,
    SPEC,
    TERM,
    EntryWrite,
    Holder,
    KeyValue,
    Transaction,
    TransactionResult,
    Written,
    job_generation_of,
    lease_heartbeat_value,
    spec_value,
)
from elaswave.protocol.leadership.election import ASK_AGAIN_S, LEASE_HEARTBEAT_S, Ask
from elaswave.protocol.leadership.job_creation import (
    LOOKING,
    CreationResult,
    CreatorAction,
    JobCreation,
    JobCreator,
    Left,
    ending,
    left_of,
)
from elaswave.protocol.leadership.store_position import (
    PositionVerdict,
    StorePosition,
    compare_positions,
    first_position,
)
from elaswave.protocol.membership.agent import CoordinatorTimeout
from elaswave.protocol.membership.agent import TimeoutAction as TimeoutAction
from verify.simulator.candidates import UNIT_S, CandidateAgent, RemoteStore, WayToStore
from verify.simulator.checkers import Violation
from verify.simulator.lifetime_judge import LifetimeJudge, newest_term
from verify.simulator.schedule import STRANGER_KINDS, ScheduledFault
from verify.simulator.store import ActorDead

NUM_HOSTS, NUM_CANDIDATES = 3, 2
BEATS, RETRY, WATCH, ASK = round(LEASE_HEARTBEAT_S / UNIT_S), round(ASK_AGAIN_S / UNIT_S), 8, 10
PATIENCE_S = 60.0
"""How long an agent that may found the job asks for a coordinator of one that runs."""
END_PATIENCE = round(60.0 / UNIT_S)
"""How long the end of a job waits for the store, as decisions do."""
MAX_TIME = 60_000
"""By then all agents have ended: fifty minutes."""
END = b"end"
_T = TypeVar("_T")


class Lifetime(NamedTuple):
    """All that decides a run."""

    seed: int = 0
    """Of the delays; 0: all alike."""
    length: int = 4
    """Entries that a coordinator makes before the job is over."""
    pause: int = 60
    """Between two of them."""
    restart: int = 30
    """After which a launcher starts an agent again."""
    faults: tuple[ScheduledFault, ...] = ()

    def __str__(self) -> str:
        changed = [f"{name}={getattr(self, name)}" for name in self._fields[:-1] if getattr(self, name) != _PLAIN[name]]
        return " ".join([*changed, *map(str, self.faults)])


_PLAIN = Lifetime()._asdict()


class Agent(CandidateAgent):
    """One incarnation of a host's agent."""

    founder_class = JobCreator
    job_creation_class = JobCreation
    coordinator_timeout_class = CoordinatorTimeout
    ends = staticmethod(ending)
    removes = staticmethod(Left.removal)

    def __init__(self, life: "Life", host: int, incarnation: int) -> None:
        super().__init__(f"{host}/{incarnation}", creates_job=host == 0)
        self.host, self.incarnation = host, incarnation
        self.job_generation = 0
        """Which job generation it takes part in, once it does."""
        self.saw = 0
        """JobCreation of the job that it has seen in the store before it took part."""
        self.outcome_seen = 0
        """Revision of the outcome when it looked before it created."""
        self.coordinator: Coordinator | None = None
        """To which it is connected."""
        self.alone_since: int | None = None
        self._life = life
        self._coordinator_timeout = self.coordinator_timeout_class()

    def start(self) -> None:
        """It is started by a launcher."""
        if self.host == 0:
            self._founder = self.founder_class(has_others=True, patience_s=PATIENCE_S, now_s=self._life.now * UNIT_S)
            self._go_on(CreatorAction.LOOK)
        else:
            self._find(self._life.now + 12_000, self.give_up)

    # --------------------------------------------------------------------------------------------------------- creation

    def _go_on(self, due: CreatorAction) -> None:
        life = self._life
        if due is CreatorAction.LOOK:
            life.ask(self, partial(life.store.transact, LOOKING, self._founder.job_generation), self._looked)
        elif due is CreatorAction.ASK:
            self._find(life.now + round(self._founder.ask_s / UNIT_S), lambda: self._go_on(self._founder.unanswered()))
        elif due is CreatorAction.REMOVE:
            assert self._founder.left is not None
            asked = partial(life.change, self, "remove", self.removes(self._founder.left))
            life.ask(self, asked, self._removed)
        elif due is CreatorAction.FOUND:
            life.ask(self, partial(life.store.transact, Transaction(reads=(OUTCOME,))), self._make)
        elif due is CreatorAction.FOREIGN:
            life.end(self, 2, "what is there was not written with this job's key")
        elif due is CreatorAction.END:
            assert self._founder.outcome is not None
            life.end(self, 0, f"the job has ended meanwhile: {self._founder.outcome.value.decode()}")
        else:
            self.give_up()

    def _looked(self, answer: TransactionResult | None) -> None:
        if answer is None:
            self._life.after(RETRY, self, self._go_on, CreatorAction.LOOK)
            return
        spec, term, lease_heartbeat, outcome = answer.found
        self.saw = job_generation_of(spec) or self.saw
        job_generation = self._founder.job_generation or job_generation_of(spec)
        entry = f"rec/{len(self._life.store.entries(job_generation)):08d}"
        standing = self._life.store.view(job_generation).get(entry)
        self._go_on(self._founder.looked(left_of(spec, term, lease_heartbeat, entry, standing), outcome))

    def _removed(self, answer: TransactionResult | None) -> None:
        life = self._life
        if answer is None:
            life.after(RETRY, self, self._go_on, CreatorAction.REMOVE)
        else:
            self._go_on(self._founder.removed(answer, life.now * UNIT_S))

    def _make(self, answer: TransactionResult | None) -> None:
        if answer is None:
            self._life.after(RETRY, self, self._go_on, CreatorAction.FOUND)
            return
        (outcome,) = answer.found
        self.outcome_seen = 0 if outcome is None else outcome.revision
        job_generation = self._life.draw_job_generation()
        self._say(
            self.job_creation_class(spec_value(job_generation, by=self._name, at=self._life.now), outcome),
            job_generation,
        )

    def _say(self, creation: JobCreation, job_generation: int) -> None:
        asked = partial(self._life.change, self, "found", creation.transaction())
        self._life.ask(self, asked, partial(self._made, creation, job_generation))

    def _made(self, creation: JobCreation, job_generation: int, answer: TransactionResult | None) -> None:
        if answer is None:
            self._life.after(RETRY, self, self._say, creation, job_generation)
            return
        made = creation.judge(answer)
        if made is CreationResult.YES:
            self.take_part(job_generation)
        elif made is CreationResult.CHANGED:
            self._go_on(CreatorAction.FOUND)
        else:
            self.give_up()

    def _find(self, until: int, missed: Callable[[], None]) -> None:
        """Asks candidates what is trained."""
        life = self._life
        life.tick(self)
        found = life.coordinator_for(self.host)
        if found is not None:
            self.take_part(found.job_generation)
        elif life.now >= until:
            missed()
        else:
            life.after(ASK, self, self._find, until, missed)

    # ----------------------------------------------------------------------------------------------------- taking part

    def take_part(self, job_generation: int) -> None:
        """It knows which job this is."""
        self.job_generation = job_generation
        self._life.say(f"agent {self.incarnation} of host {self.host} takes part in job generation {job_generation}")
        if self.host < NUM_CANDIDATES:
            self.new_candidate(job_generation)
        self._watch()

    def _watch(self) -> None:
        life = self._life
        life.after(WATCH, self, self._watch)
        coordinator = self.coordinator
        if coordinator is not None and (coordinator.dead or life.is_cut(self.host, coordinator.agent.host)):
            self.coordinator = None
        if self.coordinator is None:
            self._dial()
        leads = life.leads(self)
        due = self._coordinator_timeout.look(
            life.now * UNIT_S, has_coordinator=leads or self.coordinator is not None, num_commits=0
        )
        if leads or self.coordinator is not None:
            self.alone_since = None
            return
        self.alone_since = life.now if self.alone_since is None else self.alone_since
        if due is TimeoutAction.SEEK:
            looking = Transaction(reads=(OUTCOME,))
            life.ask(self, partial(life.store.transact, looking, self.job_generation), self._found_outcome)
        elif due is TimeoutAction.END:
            life.judge.given_up(self.host, self.job_generation, self.alone_since, life.now)
            life.end(self, 75, "it has no coordinator")

    def _dial(self) -> None:
        coordinator = self._life.coordinator_for(self.host)
        if coordinator is not None:
            self._life.tick(self)
            coordinator.hello(self)

    def _found_outcome(self, answer: TransactionResult | None) -> None:
        if answer is None or self.coordinator is not None or not self.counts(answer.found[0]):
            return
        assert answer.found[0] is not None
        self._life.judge.sent(self.job_generation, answer.found[0])
        self._life.end(self, 0, f"the store says how the job has ended: {answer.found[0].value.decode()}")

    def counts(self, outcome: KeyValue | None) -> bool:
        """Whether an outcome is that of this agent's job."""
        return outcome is not None and outcome.is_genuine

    def give_up(self) -> None:
        """Its part is over, and a launcher starts it again."""
        self._life.end(self, 75, "it knows of no coordinator")

    # -------------------------------------------------------------------------------------------- a candidate's process

    def now(self) -> int:
        return self._life.now

    def waits(self, delay: int, call: Callable[[], None]) -> None:
        self._life.after(delay, self, call)

    def asks(self, ask: Ask, answered: Callable[[TransactionResult | None], None]) -> None:
        asked = partial(self._life.store.transact, ask.transaction, self.job_generation)
        if ask.claims:
            asked = partial(self._life.change, self, "claim", ask.transaction)
        self._life.ask(self, asked, answered)

    def reads_entries(self, answered: Callable[[int | None], None]) -> None:
        self._life.ask(self, partial(self._life.term_of_entries, self.job_generation), answered)

    def has_won(self, term: Holder) -> None:
        self._life.lead(self, term)

    def starts_next(self, delay: int) -> None:
        self._life.after(delay, self, self.new_candidate, self.job_generation)

    # ------------------------------------------------------------------------------------------------------- the end

    def hear_end(self, *, had_it: bool) -> None:
        """A coordinator has told how the job has ended."""
        self._process += 1
        if had_it:
            self._clear(self._life.now + END_PATIENCE)
        else:
            self._life.end(self, 0, "it was told that the job has ended")

    def _clear(self, until: int) -> None:
        life = self._life
        if life.now >= until:
            life.end(self, 0, "the keys of the job stay")
        else:
            asked = partial(life.store.transact, Transaction(reads=(SPEC, TERM)), self.job_generation)
            life.ask(self, asked, partial(self._remove, until))

    def _remove(self, until: int, answer: TransactionResult | None) -> None:
        if answer is None:
            self._clear(until)
            return
        spec, term = answer.found
        asked = self.ends(self._name, self.job_generation, spec, term, f"finished {self.job_generation}".encode())
        if asked is None:
            self._life.end(self, 0, "the keys are another agent's")
        else:
            self._end_with(asked, until)

    def _end_with(self, asked: Transaction, until: int) -> None:
        life = self._life
        if life.now >= until:
            life.end(self, 0, "the keys of the job stay")
            return

        def answered(answer: TransactionResult | None) -> None:
            if answer is None:
                self._end_with(asked, until)
            else:
                life.end(self, 0, "the keys of the job are removed")

        life.ask(self, partial(life.change, self, "end", asked), answered)


class Coordinator:
    """A coordinator's process beside its agent: it makes entries until the job is over."""

    id = -1
    entry_class = EntryWrite

    def __init__(self, life: "Life", agent: Agent, term: Holder) -> None:
        self.agent, self.term = agent, term
        self.dead = False
        self.job_generation = agent.job_generation
        self._life = life
        self._entries: list[bytes] = []
        self._num_written = 0
        self._lease_heartbeat()
        self._read()

    def _lease_heartbeat(self) -> None:
        life = self._life
        if not self.dead:
            lease_heartbeat = self.term.still_writes()._replace(
                puts=((LEASE_HEARTBEAT, lease_heartbeat_value(self.term.term, life.now + 1)),)
            )
            asked = partial(life.change, self.agent, "lease_heartbeat", lease_heartbeat)
            life.ask(self, asked, self._beaten, is_instant=False)
            life.after(BEATS, self, self._lease_heartbeat)

    def _beaten(self, answer: TransactionResult | None) -> None:
        if answer is not None and not answer.succeeded:
            self._lease_lost(answer)

    def _lease_lost(self, answer: TransactionResult) -> None:
        if self.term.is_followed(answer.found[0]):
            self.end("it was replaced", was_replaced=True)
        else:
            self.end("its claim is not there any more", was_displaced=True)

    def _read(self) -> None:
        self._life.ask(self, partial(self._life.store.entries, self.job_generation), self._go_on)

    def _go_on(self, entries: list[bytes] | None) -> None:
        if entries is None:
            self._read()
            return
        self._entries = entries
        if entries and entries[-1].startswith(END):
            self._tell_end()
        else:
            self._life.after(self._life.schedule.pause, self, self._write)

    def _write(self) -> None:
        self._num_written += 1
        at = len(self._entries)
        kind = END if at >= self._life.schedule.length else b"entry"
        value = b"%s %d.%d" % (kind, self.term.term, self._num_written)
        previous = f"rec/{at - 1:08d}" if at else ""
        self._put(self.entry_class(self.term, f"rec/{at:08d}", value, previous=previous))

    def _put(self, entry: EntryWrite) -> None:
        asked = partial(self._life.change, self.agent, "entry", entry.transaction())
        self._life.ask(self, asked, partial(self._written, entry))

    def _written(self, entry: EntryWrite, answer: TransactionResult | None) -> None:
        written = Written.INCOMPLETE if answer is None else entry.judge(answer)
        if written in (Written.INCOMPLETE, Written.FOREIGN):
            self._put(entry)
            return
        if written is Written.LEASE_LOST and answer is not None:
            self._lease_lost(answer)
        elif written is not Written.YES:
            self.end(written.value, was_displaced=True)
        else:
            self._go_on([*self._entries, entry.value])

    def fits(self, received: StorePosition) -> bool:
        """Whether an agent is a member of this job."""
        own = StorePosition(self.job_generation, self.term.term, 0, b"")
        return compare_positions(received, own, []) is not PositionVerdict.OTHER_JOB

    def hello(self, agent: Agent) -> None:
        """An agent says which job generation it is of."""
        if not self.fits(first_position(agent.job_generation)):
            if agent.job_generation < self.job_generation:
                self._life.end(agent, 75, "the job was created again")
            else:
                self._confirm()
            return
        self._life.judge.took(self.job_generation, agent.job_generation)
        agent.coordinator = self

    def _confirm(self) -> None:
        """An agent of a later job generation has come: this job may be over."""
        asked = partial(self._life.store.transact, self.term.still_writes(), self.job_generation)
        self._life.ask(self, asked, self._beaten)

    def _tell_end(self) -> None:
        life = self._life
        life.judge.is_over(self.job_generation)
        for agent in life.agents:
            if agent is not self.agent and agent.coordinator is self and not life.is_cut(agent.host, self.agent.host):
                life.tick(self)
                life.after(life.delay(), agent, agent.hear_end, had_it=False)
        life.tick(self)
        life.after(life.delay(), self.agent, self.agent.hear_end, had_it=True)
        self.dead = True

    def end(self, reason: str, *, was_replaced: bool = False, was_displaced: bool = False) -> None:
        """Its process is gone; its agent starts a candidate's again."""
        if not self.dead:
            self.dead = True
            self._life.say(f"the coordinator of term {self.term.term} at host {self.agent.host} ends: {reason}")
            if not self.agent.dead:
                self.agent.process_ended(was_replaced=was_replaced, was_displaced=was_displaced)


class Life:
    """One simulated run.

    Args:
        schedule: what happens.
        agent_class, coordinator_class: bugs are planted here.
        log: takes a line per event.
    """

    def __init__(
        self,
        schedule: Lifetime,
        agent_class: type[Agent] = Agent,
        coordinator_class: type[Coordinator] = Coordinator,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.schedule = schedule
        self.now = self.instant = 0
        self.instants: list[tuple[int, int]] = []
        self.fired: list[ScheduledFault] = []
        self.store = RemoteStore(lambda: self.now)
        self.judge = LifetimeJudge(lambda: self.now)
        self.agents: list[Agent] = []
        """The newest one of each host."""
        self.coordinators: list[Coordinator] = []
        self._agent_class, self._coordinator_class = agent_class, coordinator_class
        self._log = log
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...], dict[str, Any]]] = []
        self._sequence = 0
        self._random = random.Random(schedule.seed)
        self._way = WayToStore(self, late_by=self._late_by)
        self._cut_until = [0] * NUM_HOSTS
        self._num_incarnations = 0
        self._num_foundings = 0
        self._faults = sorted(schedule.faults, key=lambda fault: fault.instant, reverse=True)
        for host in range(NUM_HOSTS):
            self._start(host)

    def run(self) -> None:
        """Until all agents have ended, and all that is under way has come to the store.

        Raises:
            Violation: something has happened that must never happen.
        """
        while self._queue:
            self.now, _, call, arguments, named = heappop(self._queue)
            if self.now > MAX_TIME:
                raise Violation(f"agents go on for ever: {[agent.host for agent in self.agents if not agent.dead]}")
            try:
                call(*arguments, **named)
            except ActorDead:
                pass
        self.judge.over(self.fired)

    # ------------------------------------------------------------------------------------------------- for processes

    def say(self, text: str) -> None:
        """A line of the log."""
        if self._log is not None:
            self._log(f"{self.now:6d} {self.instant:5d}  {text}")

    def at(self, delay: int, call: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Lets something happen later."""
        self._sequence += 1
        heappush(self._queue, (self.now + delay, self._sequence, call, arguments, named))

    def after(self, delay: int, actor: Any, call: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Lets a process do something later, if it is still there."""
        self.at(delay, self.deliver, actor, partial(call, *arguments, **named))

    def deliver(self, actor: Any, call: Callable[..., None], *arguments: Any) -> None:
        """Something comes to a process."""
        if not actor.dead:
            call(*arguments)

    def delay(self) -> int:
        """The next message's time under way."""
        return self._random.choice((1, 1, 1, 2, 3, 9)) if self.schedule.seed else 1

    def _late_by(self) -> int:
        """Some requests are still under way when the job has ended, and when another one of its name has."""
        return self._random.choice((0, 0, 400, 1500)) if self.schedule.seed else 0

    def tick(self, actor: Any) -> None:
        """An instant passes.

        Raises:
            ActorDead: a fault has ended the process.
        """
        self.instant += 1
        self.instants.append((self.now, actor.id))
        while self._faults and self._faults[-1].instant < self.instant:
            self._strike(self._faults.pop())
        if actor.dead:
            raise ActorDead

    def ask(
        self, actor: Any, do: Callable[[], _T], answered: Callable[[_T | None], None], *, is_instant: bool = True
    ) -> None:
        """Asks the store for something, as a process on a host."""
        if is_instant:
            self.tick(actor)
        self._way.ask(actor, actor.host if isinstance(actor, Agent) else actor.agent.host, do, answered)

    def change(self, agent: Agent, why: str, transaction: Transaction) -> TransactionResult:
        """The store carries out what changes it."""
        before = self.store.view(agent.job_generation)
        outcome = self.store.transact(transaction, agent.job_generation)
        if outcome.succeeded:
            by = f"agent {agent.incarnation} of host {agent.host}, job generation {agent.job_generation}"
            self.say(f"store: {why} by {by}")
            self.judge.changed(agent, why, before, self.store.view(agent.job_generation))
        return outcome

    def draw_job_generation(self) -> int:
        """A number that no other job generation has."""
        self._num_foundings += 1
        return self._num_foundings

    def term_of_entries(self, job_generation: int) -> int:
        """The newest term of the coordinators that have written the entries of a job generation."""
        return newest_term(self.store.entries(job_generation))

    def is_cut(self, one: int, other: int) -> bool:
        """Whether two hosts do not reach each other."""
        return one != other and max(self._cut_until[one], self._cut_until[other]) > self.now

    def coordinator_for(self, host: int) -> Coordinator | None:
        """Who answers first where a host's agent dials."""
        for coordinator in sorted(self.coordinators, key=lambda each: each.agent.host):
            if not coordinator.dead and not self.is_cut(host, coordinator.agent.host):
                return coordinator
        return None

    def leads(self, agent: Agent) -> bool:
        """Whether an agent has the coordinator."""
        return any(each.agent is agent and not each.dead for each in self.coordinators)

    def lead(self, agent: Agent, term: Holder) -> None:
        """A candidate's process is the coordinator from now on."""
        self.say(f"host {agent.host} has the coordinator of term {term.term}, job generation {agent.job_generation}")
        self.coordinators = [each for each in self.coordinators if not each.dead]
        self.coordinators.append(self._coordinator_class(self, agent, term))

    def end(self, agent: Agent, code: int, reason: str) -> None:
        """An agent ends, and all its processes. Unless it is done, a launcher starts it again."""
        if agent.dead:
            return
        agent.dead = True
        self.say(f"agent {agent.incarnation} of host {agent.host} ends with {code}: {reason}")
        for coordinator in self.coordinators:
            if coordinator.agent is agent:
                coordinator.end("its agent has ended")
        self.judge.is_refused |= code == 2
        if code and not self.judge.has_ended and not self.judge.is_refused:
            self.at(self.schedule.restart, self._start, agent.host)

    def _start(self, host: int) -> None:
        self._num_incarnations += 1
        agent = self._agent_class(self, host, self._num_incarnations)
        self.agents[host : host + 1] = [agent]
        self.after(0, agent, agent.start)

    def _strike(self, fault: ScheduledFault) -> None:
        self.fired.append(fault)
        self.say(f"*** {fault}")
        until = self.now + fault.duration
        if fault.kind == "kill" and fault.target == "c":
            for coordinator in self.coordinators[-1:]:
                coordinator.end("it is killed")
        elif fault.kind == "kill":
            self.end(self.agents[int(fault.target[1:])], -9, "it is killed")
        elif fault.kind == "cut":
            host = int(fault.target[1:])
            self._cut_until[host] = max(self._cut_until[host], until)
        elif fault.kind in STRANGER_KINDS:
            entry = f"rec/{sum(key.startswith('rec/') for key in self.store.keys):08d}"
            self.store.stranger(fault.kind, entry if fault.target == "entry" else fault.target)
            self.judge.stranger(fault.target)
        elif fault.kind == "shut":
            self._way.shut(int(fault.target[1:]), until)
            self.judge.trouble(int(fault.target[1:]), until)
        else:
            self._way.trouble(fault.kind, until)
            for host in range(NUM_HOSTS):
                self.judge.trouble(host, until)
