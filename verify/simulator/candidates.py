"""The store as one more party that fails, and candidates that follow a coordinator: rules H4 to H9.

The transactions, what their answers mean, what a candidate asks and when it claims, when an agent starts its next one,
and what the heads of members mean are the product's (`elaswave.protocol.coordinator.store_writes`,
`elaswave.protocol.leadership`). Here is what carries them: requests that are lost, slow, late or not answered. A
coordinator that writes waits for the answer: whatever comes meanwhile happens afterwards. Its lease heartbeat does not
wait.
"""

# ruff: noqa: D102 (what a `CandidateAgent` is asked is described there)

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from elaswave.protocol.coordinator.store_writes import (
    LEASE_HEARTBEAT,
    SPEC,
    TERM,
    EntryWrite,
    Holder,
    KeyValue,
    Transaction,
    TransactionResult,
    Written,
    holder_of,
    job_generation_of,
    lease_heartbeat_value,
    spec_value,
)
from elaswave.protocol.leadership.election import (
    LEASE_HEARTBEAT_S,
    Ask,
    CandidateAction,
    CoordinatorCandidate,
    NoJob,
    ReadEntries,
    StandBy,
    StoreAnswer,
    Won,
)
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.protocol.membership.agent import Standby
from elaswave.protocol.membership.effects import AnyRecord, HostCame, LeaveAsked, PlaceTaken
from elaswave.protocol.messages import Decision
from verify.simulator.schedule import ScheduledFault

if TYPE_CHECKING:
    from verify.simulator.coordinator import SimCoordinator
    from verify.simulator.world import CoordinatorActor, World

UNIT_S = 0.05
"""A unit of virtual time, by the clocks of candidates."""
TIMEOUT = 20
"""After so long a request counts as not answered: a second."""
_LEASE_HEARTBEAT = round(LEASE_HEARTBEAT_S / UNIT_S)
_ENTRIES = "rec/"
_JOB_GENERATION = 1
_LONG_AGO = -(1 << 30)
_T = TypeVar("_T")


class RemoteStore:
    """A store on other machines: keys with revisions, and one order of transactions.

    Args:
        clock: gives the time, by which copies of the store are known.
        job_generation: of a job that was created long ago; 0: there is none.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0, job_generation: int = 0) -> None:
        self.keys: dict[str, KeyValue] = {}
        self.revision = 1
        self._clock = clock
        self._written: list[tuple[int, KeyValue]] = []
        """All that was ever written, with its time."""
        if job_generation:
            created = self.keys[SPEC] = KeyValue(SPEC, spec_value(job_generation), self.revision)
            self._written.append((_LONG_AGO, created))
        self._sealed: dict[KeyValue, int] = {}
        """For which job generation a value was written, if it is not 0; -1: by a stranger."""
        self.on_entry: Callable[[bytes], None] = lambda value: None
        """Called with the value of each entry that is written."""
        self.on_claim: Callable[[Holder], None] = lambda holder: None
        """Called with each claim that is carried out."""

    def transact(self, transaction: Transaction, job_generation: int = 0) -> TransactionResult:
        """Carries one out, whole or not at all.

        Args:
            transaction: is asked for.
            job_generation: for which job generation values are sealed that it writes, and genuine that it reads; 0:
                `SPEC` says so.
        """
        job_generation = job_generation or self._job_generation()
        holds = all(self._revision(key) == revision for key, revision in transaction.unwritten_since)
        holds = holds and all(key in self.keys for key in transaction.exist)
        holds = holds and all(self._value(key) == value for key, value in transaction.values)
        if holds and (transaction.puts or transaction.deletes or transaction.clears):
            self.revision += 1
            for key in [*self.keys] if transaction.clears else transaction.deletes:
                self.keys.pop(key, None)
            for key, value in transaction.puts:
                self._write(KeyValue(key, value, self.revision), 0 if key == SPEC else job_generation)
                if key.startswith(_ENTRIES):
                    self.on_entry(value)
                elif key == TERM:
                    self.on_claim(holder_of(self.keys[key]))
            return TransactionResult(True, self.revision)
        return TransactionResult(
            holds, self.revision, tuple(self._shown(key, job_generation) for key in transaction.reads)
        )

    def view(self, job_generation: int) -> dict[str, KeyValue]:
        """All keys, as members of a job generation see them."""
        shown = {key: self._shown(key, job_generation) for key in self.keys}
        return {key: found for key, found in shown.items() if found is not None}

    def _write(self, written: KeyValue, sealed: int) -> None:
        self.keys[written.key] = written
        self._written.append((self._clock(), written))
        if sealed:
            self._sealed[written] = sealed

    def _shown(self, key: str, job_generation: int) -> KeyValue | None:
        found = self.keys.get(key)
        if found is None or self._sealed.get(found, 0) == (0 if key == SPEC else job_generation):
            return found
        return found._replace(value=b"", is_genuine=False)

    def stranger(self, kind: str, key: str) -> None:
        """Somebody who has not the job's key does what one of `STRANGER_KINDS` says.

        Args:
            kind: of these.
            key: is written, removed or put back.
        """
        self.revision += 1
        if kind == "forge":
            self._write(KeyValue(key, b"forged", self.revision), -1)
        elif kind == "lose":
            self.keys.pop(key, None)
        else:
            first = next((written for _, written in self._written if written.key == key), None)
            if first is not None and self._sealed.get(first, 0) >= 0:
                self._write(first._replace(revision=self.revision), self._sealed.get(first, 0))

    def go_back(self, to: int) -> None:
        """Somebody puts the copy of a time in the store's place (H9). Its revisions go on from that of the copy."""
        self._written = [(at, written) for at, written in self._written if at <= to]
        self.keys = {written.key: written for _, written in self._written}
        self.revision = max((written.revision for _, written in self._written), default=1)

    def entries(self, job_generation: int = 0) -> list[bytes]:
        """All genuine entries, in their order; of the job generation that `SPEC` says if none is given."""
        found = self.view(job_generation or self._job_generation())
        return [found[key].value for key in sorted(found) if key.startswith(_ENTRIES) and found[key].is_genuine]

    def _job_generation(self) -> int:
        return _job_generation_of(self._shown(SPEC, 0))

    def _value(self, key: str) -> bytes:
        found = self.keys.get(key)
        return b"" if found is None else found.value

    def _revision(self, key: str) -> int:
        found = self.keys.get(key)
        return 0 if found is None else found.revision


_job_generation_of = lru_cache(maxsize=64)(job_generation_of)
"""Each transaction asks for it."""


class _Request:
    """One request; its answer counts until it is given up."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class Clock(Protocol):
    """What the way to a store needs of a simulated world."""

    now: int

    def at(self, delay: int, call: Callable[..., None], *arguments: Any) -> None:
        """Lets something happen later."""

    def delay(self) -> int:
        """The next message's time under way."""

    def deliver(self, actor: Any, call: Callable[..., None], *arguments: Any) -> None:
        """An answer comes to a process, if it is still there."""


class WayToStore:
    """The network between processes and their store.

    Args:
        world: time and processes.
        store_delay: how much longer a request takes.
        late_by: gives how much later than the others a request arrives that is late.
    """

    def __init__(self, world: Clock, store_delay: int = 0, late_by: Callable[[], int] = lambda: 0) -> None:
        self._world = world
        self._store_delay = store_delay
        self._late_by = late_by
        self._until = {"lost": 0, "mute": 0, "late": 0}
        """Kind of fault -> until when it lasts."""
        self._shut: dict[Any, int] = {}
        """Place -> until when the store cannot be reached from there."""

    def trouble(self, kind: str, until: int) -> None:
        """Requests are ``lost``, their answers are (``mute``), or they are ``late``."""
        self._until[kind] = max(self._until[kind], until)

    def shut(self, place: Any, until: int) -> None:
        """The store cannot be reached from a place."""
        self._shut[place] = max(self._shut.get(place, 0), until)

    def is_open(self, place: Any) -> bool:
        """Whether requests from a place are answered now."""
        return max(*self._until.values(), self._shut.get(place, 0)) <= self._world.now

    def ask(self, asker: Any, place: Any, do: Callable[[], _T], answered: Callable[[_T | None], None]) -> None:
        """Asks the store for something.

        Args:
            asker: the process.
            place: where it is.
            do: what the store does when the request arrives.
            answered: called with the answer; None: there was none in time.
        """
        world, now = self._world, self._world.now
        request = _Request()
        world.at(TIMEOUT, self._time_out, asker, request, answered)
        if max(self._until["lost"], self._shut.get(place, 0)) > now:
            return
        is_late = self._until["late"] > now
        arrives = world.delay() + self._store_delay
        if is_late:
            arrives = self._until["late"] - now + TIMEOUT + self._late_by()
        is_received = not is_late and self._until["mute"] <= now
        world.at(arrives, self._arrive, asker, do, request, answered, is_received)

    def _arrive(
        self, asker: Any, do: Callable[[], _T], request: _Request, answered: Callable[[_T], None], is_received: bool
    ) -> None:
        answer = do()
        if is_received:
            self._world.at(self._world.delay(), self._answer, asker, request, answered, answer)

    def _answer(self, asker: Any, request: _Request, answered: Callable[[_T], None], answer: _T) -> None:
        if not request.is_over:
            request.is_over = True
            self._world.deliver(asker, answered, answer)

    def _time_out(self, asker: Any, request: _Request, answered: Callable[[None], None]) -> None:
        self._answer(asker, request, answered, None)


class WriteLease:
    """A coordinator's right to write, and how it does.

    Args:
        candidates: store and network.
        candidate: whose process the coordinator was.
        term: what it holds.
        entries: that stand in the store.
    """

    entry_class = EntryWrite

    def __init__(self, candidates: "Candidates", candidate: "SimCandidate", term: Holder, entries: list[bytes]) -> None:
        self.candidate = candidate
        self.term = term
        self.writer = candidates.number_of_writer()
        self.records = [candidates.contents[value][2] for value in entries]
        self.digests = list(entries)
        """Of the entries, each of which is written once."""
        self.is_lost = False
        """Whether the coordinator knows that it may not write any more."""
        self._standing: KeyValue | None = None
        """What it has found in the place of its claim."""
        self._candidates = candidates
        self._num_written = 0

    @property
    def store_position(self) -> StorePosition:
        """Where the durable history stands: told with every message (H9)."""
        return StorePosition(
            _JOB_GENERATION, self.term.term, len(self.digests), self.digests[-1] if self.digests else b""
        )

    def persist(self, coordinator: "SimCoordinator", record: AnyRecord) -> None:
        """Writes a record; the coordinator waits until it stands in the store (H5)."""
        self._candidates.world.hold(coordinator)
        self.write(coordinator, record)

    def write(self, coordinator: "SimCoordinator", record: AnyRecord) -> None:
        """Sends an entry, once and again."""
        length = len(self.digests)
        previous = f"{_ENTRIES}{length - 1:08d}" if length else ""
        entry = self.entry_class(self.term, f"{_ENTRIES}{length:08d}", self._value(record), previous=previous)
        self._ask(coordinator, entry, record)

    def _value(self, record: AnyRecord) -> bytes:
        """With a nonce that no other entry has."""
        self._num_written += 1
        value = f"{self.writer}.{self._num_written}".encode()
        self._candidates.contents[value] = (self.writer, self._num_written, record)
        self._candidates.writer_terms[value] = self.term.term
        return value

    def _ask(self, coordinator: "SimCoordinator", entry: EntryWrite, record: AnyRecord) -> None:
        candidates = self._candidates
        asked = partial(candidates.store.transact, entry.transaction())
        candidates.ask(coordinator, asked, partial(self._on_answer, coordinator, entry, record))

    def _on_answer(
        self, coordinator: "SimCoordinator", entry: EntryWrite, record: AnyRecord, outcome: TransactionResult | None
    ) -> None:
        if outcome is None:
            self.not_answered(coordinator, entry, record)
            return
        written = entry.judge(outcome)
        if written is Written.LEASE_LOST:
            self._candidates.lease_lost(coordinator, outcome.found[0])
            return
        if written is Written.GONE_BACK:
            self._candidates.gone_back(coordinator, f"there were {self.store_position}, and the last one is not there")
            return
        assert written is Written.YES, f"entry {len(self.digests)} of term {self.term.term}: {written.value}"
        self.digests.append(entry.value)
        self._candidates.world.release(coordinator)

    def confirm(self, coordinator: "SimCoordinator", received: StorePosition) -> None:
        """A member has heard of a newer term: either another coordinator has it, or the store has gone back."""
        self._candidates.world.hold(coordinator)
        self._ask_whether_mine(coordinator, received)

    def _ask_whether_mine(self, coordinator: "SimCoordinator", received: StorePosition) -> None:
        asked = partial(self._candidates.store.transact, self.term.still_writes())
        self._candidates.ask(coordinator, asked, partial(self._on_confirmed, coordinator, received))

    def _on_confirmed(
        self, coordinator: "SimCoordinator", received: StorePosition, outcome: TransactionResult | None
    ) -> None:
        if outcome is None:
            self._ask_whether_mine(coordinator, received)
        elif outcome.succeeded:
            self.gone_back(coordinator, received)
        else:
            self._candidates.lease_lost(coordinator, outcome.found[0])

    def gone_back(self, coordinator: "SimCoordinator", received: StorePosition) -> None:
        """The store has lost what a member has heard of."""
        self._candidates.gone_back(
            coordinator, f"a member has heard of {received}, and there are {self.store_position}"
        )

    def not_answered(self, coordinator: "SimCoordinator", entry: EntryWrite, record: AnyRecord) -> None:
        """The same is said again (H6)."""
        self._ask(coordinator, entry, record)

    def is_taken(self) -> bool:
        """Whether another coordinator has taken over. Who asks knows it from then on."""
        standing = self._candidates.store.keys.get(TERM)
        if self.term.has_lost_lease(standing):
            self.lost(standing)
        return self.is_lost

    def lost(self, standing: KeyValue | None) -> None:
        """The coordinator has learned that it may not write any more.

        Args:
            standing: what it has found in the place of its claim.
        """
        self.is_lost, self._standing = True, standing

    def end(self) -> None:
        """The coordinator's process has ended; its agent starts another one."""
        was_followed = self.is_lost and self.term.is_followed(self._standing)
        self.candidate.process_ended(was_replaced=was_followed, was_displaced=self.is_lost and not was_followed)


class CandidateAgent(ABC):
    """An agent that may have the coordinator: its candidate's processes, one after the other. What a process does, and
    when the next one is started, is the product's.

    Args:
        name: under which its coordinators hold the job.
        creates_job: whether it has created the job.
    """

    id = -1
    candidate_class = CoordinatorCandidate
    standby_class = Standby

    def __init__(self, name: str, *, creates_job: bool) -> None:
        self.dead = False
        self._name, self._creates_job = name, creates_job
        self._process = 0
        """Counts the processes."""
        self._num_claims = 0
        self._standby = self.standby_class(leads=False, is_candidate=True)

    def new_candidate(self, job_generation: int) -> None:
        """Its next process begins."""
        self._process += 1
        candidate = self.candidate_class(self._name, job_generation, self._new_nonce, creates_job=self._creates_job)
        self._do(self._process, candidate, candidate.begin())

    def _new_nonce(self) -> str:
        self._num_claims += 1
        return f"{self._process}.{self._num_claims}"

    def _do(self, process: int, candidate: CoordinatorCandidate, action: CandidateAction) -> None:
        asked_s = self.now() * UNIT_S

        def answered(result: TransactionResult | None = None, newest_term: int | None = None) -> None:
            if process == self._process and not self.dead:
                answer = StoreAnswer(asked_s, self.now() * UNIT_S, result, newest_term)
                self._do(process, candidate, candidate.next(answer))

        match action:
            case Ask():
                self.asks(action, answered)
            case ReadEntries():
                self.reads_entries(lambda newest_term: answered(newest_term=newest_term))
            case StandBy():
                self.waits(round(action.wait_s / UNIT_S), answered)
            case NoJob():
                self.process_ended()
            case Won():
                self._standby.has_it()
                self.has_won(action.term)

    def process_ended(self, *, was_replaced: bool = False, was_displaced: bool = False) -> None:
        """The process has ended, whether it was a candidate's or had become the coordinator; as of `Standby.ended`."""
        self._process += 1
        now = self.now()
        is_later = self._standby.ended(now * UNIT_S, was_replaced=was_replaced, was_displaced=was_displaced)
        at_s = self._standby.stand_by_at_s
        if not is_later:
            self.starts_next(0)
        elif at_s is not None:
            self.starts_next(round(at_s / UNIT_S) - now)

    # ------------------------------------------------------------------------------------------- said by the simulation

    @abstractmethod
    def now(self) -> int:
        """The time."""

    @abstractmethod
    def waits(self, delay: int, call: Callable[[], None]) -> None:
        """Lets the process go on later."""

    @abstractmethod
    def asks(self, ask: Ask, answered: Callable[[TransactionResult | None], None]) -> None:
        """Asks the store."""

    @abstractmethod
    def reads_entries(self, answered: Callable[[int | None], None]) -> None:
        """Asks the store for the newest term of the writers of all entries."""

    @abstractmethod
    def has_won(self, term: Holder) -> None:
        """The process has the job."""

    @abstractmethod
    def starts_next(self, delay: int) -> None:
        """Has `new_candidate` called later."""


class SimCandidate(CandidateAgent):
    """A candidate's agent with its process, which waits, claims the job, and becomes a coordinator.

    Args:
        candidates: store and network.
        number: the first one's agent has created the job.
    """

    def __init__(self, candidates: "Candidates", number: int) -> None:
        super().__init__(f"{number}/1", creates_job=number == 0)
        self.is_claiming = False
        """Whether a fault may end its process now."""
        self._candidates = candidates

    def start(self) -> None:
        """Starts another process."""
        if not self.dead:
            self.is_claiming = False
            self.new_candidate(_JOB_GENERATION)

    def kill(self) -> None:
        """Its process ends; another one is started."""
        self.is_claiming = False
        self.process_ended()

    def now(self) -> int:
        return self._candidates.world.now

    def waits(self, delay: int, call: Callable[[], None]) -> None:
        self._candidates.world.after(delay, self, call)

    def asks(self, ask: Ask, answered: Callable[[TransactionResult | None], None]) -> None:
        self.is_claiming = ask.claims
        asked = partial(self._candidates.store.transact, ask.transaction)
        self._candidates.ask(self, asked, answered, is_instant=self.is_claiming)

    def reads_entries(self, answered: Callable[[int | None], None]) -> None:
        self._candidates.ask(self, self._candidates.newest_term, answered, is_instant=False)

    def has_won(self, term: Holder) -> None:
        self._read(term, self._process)

    def starts_next(self, delay: int) -> None:
        world = self._candidates.world
        world.after(delay + world.conditions.restart_delay, self, self.start)

    def _read(self, won: Holder, process: int) -> None:
        """As the coordinator that it is now: it reads what was decided."""
        if process == self._process:
            self._candidates.ask(self, self.entries, partial(self._found, won, process))

    def entries(self) -> list[bytes]:
        """What a linearizable read finds."""
        return self._candidates.store.entries()

    def _found(self, won: Holder, process: int, entries: list[bytes] | None) -> None:
        if entries is None:
            self._read(won, process)
        elif process == self._process:
            self.is_claiming = False
            self._candidates.lead(self, won, entries)


class Candidates:
    """The candidates of a job, their store, and the way to it.

    Args:
        world: time and processes.
        candidate_class, write_lease_class: of each.
        make_coordinator: starts a coordinator's life.
    """

    def __init__(
        self,
        world: "World",
        *,
        candidate_class: type[SimCandidate],
        write_lease_class: type[WriteLease],
        make_coordinator: Callable[[WriteLease], "SimCoordinator"],
    ) -> None:
        self.world = world
        self.store = RemoteStore(lambda: world.now, _JOB_GENERATION)
        self.store.on_entry = self._on_entry
        self.store.on_claim = lambda holder: world.see.claimed(holder.term)
        self.contents: dict[bytes, tuple[int, int, AnyRecord]] = {}
        """Value of an entry -> number of its writer, which of its writes, and the record."""
        self.writer_terms: dict[bytes, int] = {}
        """Value of an entry -> term of its writer."""
        self._write_lease_class = write_lease_class
        self._make_coordinator = make_coordinator
        self._way = WayToStore(world, world.conditions.store_delay)
        self._num_writers = 0
        self.candidates = [candidate_class(self, number) for number in range(world.conditions.candidates)]

    def start(self) -> None:
        """The job begins."""
        for candidate in self.candidates:
            self.world.after(0, candidate, candidate.start)

    @property
    def records(self) -> list[AnyRecord]:
        """That stand in the store."""
        return [self.contents[value][2] for value in self.store.entries()]

    def _on_entry(self, value: bytes) -> None:
        writer, number, record = self.contents[value]
        self.world.see.persisted(writer, number, record)
        if isinstance(record, Decision):
            self.world.decided(record)
        elif isinstance(record, PlaceTaken | LeaveAsked | HostCame):
            self.world.see.wrote_down(record)

    def ask(
        self, asker: Any, do: Callable[[], _T], answered: Callable[[_T | None], None], *, is_instant: bool = True
    ) -> None:
        """Asks the store for something; as `WayToStore.ask`.

        Args:
            is_instant: whether a fault may strike just before.
        """
        if is_instant:
            self.world.tick(asker)
        self._way.ask(asker, asker, do, answered)

    # --------------------------------------------------------------------------------------------------- coordinators

    def lead(self, candidate: SimCandidate, term: Holder, entries: list[bytes]) -> None:
        """A candidate's process is the coordinator from now on, and has read these entries."""
        write_lease = self._write_lease_class(self, candidate, term, entries)
        coordinator = self._make_coordinator(write_lease)
        self._lease_heartbeat(coordinator, write_lease)
        self.world.serve(coordinator)

    def newest_term(self) -> int:
        """Of the coordinators that have written the entries."""
        return max((self.writer_terms[value] for value in self.store.entries()), default=0)

    def number_of_writer(self) -> int:
        """Of a new coordinator."""
        self._num_writers += 1
        return self._num_writers

    def _lease_heartbeat(self, coordinator: "SimCoordinator", write_lease: WriteLease) -> None:
        """In a thread of its own: it goes on while the coordinator waits for the store."""
        world = self.world
        if coordinator.dead or world.outcome:
            return
        if not world.is_stopped(coordinator):
            lease_heartbeat = write_lease.term.still_writes()._replace(
                puts=((LEASE_HEARTBEAT, lease_heartbeat_value(write_lease.term.term, world.now + 1)),)
            )
            asked = partial(self.store.transact, lease_heartbeat)
            self.ask(coordinator, asked, partial(self._on_lease_heartbeat, coordinator), is_instant=False)
        world.at(_LEASE_HEARTBEAT, self._lease_heartbeat, coordinator, write_lease)

    def _on_lease_heartbeat(self, coordinator: "SimCoordinator", outcome: TransactionResult | None) -> None:
        if outcome is not None and not outcome.succeeded:
            self.lease_lost(coordinator, outcome.found[0])

    def lease_lost(self, coordinator: "SimCoordinator", standing: KeyValue | None) -> None:
        """A coordinator has learned that another one has taken over, or that its claim is not there any more."""
        assert coordinator.write_lease is not None
        coordinator.write_lease.lost(standing)
        self.world.say(f"coordinator of term {coordinator.core.term} ends: the store takes nothing of it")
        self.world.see.lease_lost(coordinator.write_lease.writer)
        self.world.end_coordinator(coordinator)

    def gone_back(self, coordinator: "SimCoordinator", seen: str) -> None:
        """A coordinator has learned that the store lacks what was durable: the job ends."""
        assert coordinator.write_lease is not None
        self.world.see.gone_back(seen)
        self.world.say(f"the job ends: the store has gone back: {seen}")
        self.world.finish("ended", f"the store has gone back: {seen}")

    def ended(self, coordinator: "CoordinatorActor") -> None:
        """A coordinator's process has ended; its agent starts another one."""
        assert coordinator.write_lease is not None
        coordinator.write_lease.end()

    # --------------------------------------------------------------------------------------------------------- faults

    def strike(self, fault: ScheduledFault) -> None:
        """Something happens to the store, or to the way to it."""
        until = self.world.now + fault.duration
        if fault.kind == "back":
            before = self.records
            self.store.go_back(self.world.now - fault.duration)
            standing = [self.contents[value] for value in self.store.entries()]
            term = holder_of(self.store.keys.get(TERM)).term
            self.world.see.went_back(term, standing, before[len(standing) :])
        elif fault.kind == "shut":
            coordinator = self.world.coordinator
            if coordinator is not None:
                self._way.shut(coordinator, until)
        else:
            self._way.trouble(fault.kind, until)

    def kill_process(self) -> None:
        """The process of a candidate that claims the job ends."""
        for candidate in self.candidates:
            if candidate.is_claiming:
                candidate.kill()

    def kill_host(self, coordinator: "CoordinatorActor | None") -> None:
        """The coordinator's host is lost, if there is another candidate."""
        if coordinator is not None and sum(not candidate.dead for candidate in self.candidates) > 1:
            assert coordinator.write_lease is not None
            coordinator.write_lease.candidate.dead = True
            self.world.end_coordinator(coordinator)
