"""The store as one more party that fails, and candidates that follow a coordinator: rules H4 to H9.

The transactions, what their answers mean, when to claim, and what the heads of members mean are the product's
(`elaswave.protocol.coordinator.store_writes`, `elaswave.protocol.leadership`). Here is what carries them: requests that
are lost, slow, late or not answered. A coordinator that writes waits for the answer: whatever comes meanwhile happens
afterwards. Its lease heartbeat does not wait.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from elaswave.protocol.coordinator.store_writes import (
    LEASE_HEARTBEAT,
    SPEC,
    TERM,
    Claim,
    EntryWrite,
    Holder,
    KeyValue,
    Transaction,
    TransactionResult,
    Written,
    holder_of,
    job_generation_of,
    lease_heartbeat_of,
    lease_heartbeat_value,
    spec_value,
)
from elaswave.protocol.leadership.election import LEASE_HEARTBEAT_S, POLL_S, Seen, Watch
from elaswave.protocol.leadership.store_position import StorePosition
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
RETRY = 2
"""Between two looks of a candidate if the store does not answer."""
_POLL, _LEASE_HEARTBEAT = round(POLL_S / UNIT_S), round(LEASE_HEARTBEAT_S / UNIT_S)
_ENTRIES = "rec/"
_JOB_GENERATION = 1
_SPEC = KeyValue(SPEC, spec_value(_JOB_GENERATION), 0)
"""There is one job, which is created once, and has no key that says so; see `verify.simulator.lifetimes`."""
_T = TypeVar("_T")


class RemoteStore:
    """A store on other machines: keys with revisions, and one order of transactions.

    Args:
        clock: gives the time, by which copies of the store are known.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self.keys: dict[str, KeyValue] = {}
        self.revision = 1
        self._clock = clock
        self._written: list[tuple[int, KeyValue]] = []
        """All that was ever written, with its time."""
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
        job_generation = job_generation or job_generation_of(self._shown(SPEC, 0))
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
        """All genuine entries, in their order."""
        found = self.view(job_generation)
        return [found[key].value for key in sorted(found) if key.startswith(_ENTRIES) and found[key].is_genuine]

    def _value(self, key: str) -> bytes:
        found = self.keys.get(key)
        return b"" if found is None else found.value

    def _revision(self, key: str) -> int:
        found = self.keys.get(key)
        return 0 if found is None else found.revision


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
        crew: store and network.
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
            self._candidates.lease_lost(coordinator)
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
            self._candidates.lease_lost(coordinator)

    def gone_back(self, coordinator: "SimCoordinator", received: StorePosition) -> None:
        """The store has lost what a member has heard of."""
        self._candidates.gone_back(
            coordinator, f"a member has heard of {received}, and there are {self.store_position}"
        )

    def not_answered(self, coordinator: "SimCoordinator", entry: EntryWrite, record: AnyRecord) -> None:
        """The same is said again (H6)."""
        self._ask(coordinator, entry, record)

    @property
    def is_taken(self) -> bool:
        """Whether another coordinator has taken over; the coordinator itself may not know it yet."""
        return self.term.has_lost_lease(self._candidates.store.keys.get(TERM))


class SimCandidate:
    """A candidate's agent with its process, which waits, claims the job, and becomes a coordinator.

    Args:
        crew: store and network.
        number: the first one's agent has created the job.
    """

    id = -1
    claim_class = Claim

    def __init__(self, candidates: "Candidates", number: int) -> None:
        self.dead = False
        self.is_claiming = False
        self._candidates = candidates
        self._number = number
        self._name = f"{number}/1"
        self._process = 0
        self._num_claims = 0

    def start(self) -> None:
        """Starts another process."""
        self._process += 1
        self.is_claiming = False
        if not self.dead:
            self._watch = Watch(self._name, creates_job=self._number == 0)
            self._look(self._process)

    def kill(self) -> None:
        """Its process ends; another one is started."""
        self._process += 1
        self.is_claiming = False
        world = self._candidates.world
        world.after(world.conditions.restart_delay, self, self.start)

    def _ask(self, process: int, do: Callable[[], _T], answered: Callable[[int, _T | None], None]) -> None:
        if process == self._process:
            self._candidates.ask(self, do, partial(self._on_answer, process, answered), is_instant=self.is_claiming)

    def _on_answer(self, process: int, answered: Callable[[int, _T | None], None], found: _T | None) -> None:
        if process == self._process:
            answered(process, found)

    def _look(self, process: int) -> None:
        asked = self._candidates.world.now
        looking = Transaction(reads=(TERM, LEASE_HEARTBEAT))
        self._ask(process, partial(self._candidates.store.transact, looking), partial(self._looked, asked))

    def _looked(self, asked: int, process: int, outcome: TransactionResult | None) -> None:
        world, watch = self._candidates.world, self._watch
        if outcome is None:
            watch.missed()
            world.after(RETRY, self, self._look, process)
            return
        term, lease_heartbeat = outcome.found
        holder = holder_of(term)
        watch.looked(Seen(holder, lease_heartbeat_of(lease_heartbeat, holder)), asked * UNIT_S, world.now * UNIT_S)
        if not watch.is_due(world.now * UNIT_S):
            world.after(_POLL, self, self._look, process)
            return
        self._num_claims += 1
        self.is_claiming = True
        nonce = f"{self._process}.{self._num_claims}"
        self._claim(self.claim_class(self._name, nonce, watch.holder, _SPEC, _JOB_GENERATION), process)

    def _claim(self, claim: Claim, process: int) -> None:
        asked = partial(self._candidates.store.transact, claim.transaction())
        self._ask(process, asked, partial(self._claimed, claim))

    def _claimed(self, claim: Claim, process: int, outcome: TransactionResult | None) -> None:
        if outcome is None:
            self._claim(claim, process)
            return
        won = claim.judge(outcome)
        if won is not None:
            self._read(won, process)
            return
        self.is_claiming = False
        self._watch.failed(self._candidates.world.now * UNIT_S)
        self._look(process)

    def _read(self, won: Holder, process: int) -> None:
        self._ask(process, self.entries, partial(self._found, won))

    def entries(self) -> list[bytes]:
        """What a linearizable read finds."""
        return self._candidates.store.entries()

    def _found(self, won: Holder, process: int, entries: list[bytes] | None) -> None:
        if entries is None:
            self._read(won, process)
            return
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
        self.store = RemoteStore(lambda: world.now)
        self.store.on_entry = self._on_entry
        self.store.on_claim = lambda holder: world.see.claimed(holder.term)
        self.contents: dict[bytes, tuple[int, int, AnyRecord]] = {}
        """Value of an entry -> number of its writer, which of its writes, and the record."""
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
            self.lease_lost(coordinator)

    def lease_lost(self, coordinator: "SimCoordinator") -> None:
        """A coordinator has learned that another one has taken over."""
        assert coordinator.write_lease is not None
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
        world, candidate = self.world, coordinator.write_lease.candidate
        world.after(world.conditions.restart_delay, candidate, candidate.start)

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
