"""The joiners of a job: who is started when and where, and who is let in. No IO, no clocks.

A job aims at a number of workers: as many as it began with, more if a person has asked for more. Each of them has a
*place*. Whatever process of a place ends, the next one gets an id that was never used, after a back-off that doubles
from death to death and begins anew once a process has lived for `LONG_S`. A place is closed whose processes keep dying
before they have committed a step: what kills them would kill the next one too. One that a worker leaves on request (a
drain) is closed without a word: a person wants fewer workers.

Whether a death is a loss is not decided here: a process that dies before it is admitted was no member yet.

On which host a joiner is started is decided in `hosts`, and who may join in `admissions`, both in this folder. What a
successor must know of it all is in records, which it reads here.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from elaswave.protocol.events import LeavingRecord, NewGenerationRecord
from elaswave.protocol.membership.admissions import Founders, admission_problem
from elaswave.protocol.membership.effects import BACKOFF_S_MIN, LeaveAsked, PlaceTaken, StepPublished
from elaswave.protocol.membership.hosts import Hosts
from elaswave.protocol.messages import Decision, Joining
from elaswave.types import Layout

BACKOFF_S_MAX = 60.0
"""It doubles up to this."""
LONG_S = 60.0
"""A process that has lived for so long is a success: the back-off begins anew."""
DEATHS_MAX = 3
"""So many deaths one after the other, without a committed step in between, close a place."""


class PlaceState(Enum):
    """What is known of a place."""

    TAKEN = "a process has it"
    OPEN = "it waits for the next process"
    CLOSED = "it stays empty"


class PlaceClosed(NamedTuple):
    """Tell people: a place stays empty."""

    place: int
    text: str


class _Place:
    def __init__(self, worker: int, now_s: float) -> None:
        self.state = PlaceState.TAKEN
        self.worker = worker
        """The newest one."""
        self.since_s = now_s
        """When its process was started."""
        self.due_s = math.inf
        """When the next one is due; infinite unless the place is open."""
        self.backoff_s = BACKOFF_S_MIN
        """Before the next process."""
        self.deaths: list[int] = []
        """Its workers that have ended since one of them committed a step."""

    def take(self, worker: int, now_s: float) -> None:
        self.state, self.due_s = PlaceState.TAKEN, math.inf
        self.worker, self.since_s = worker, now_s

    def open(self, due_s: float) -> None:
        self.state, self.due_s = PlaceState.OPEN, due_s

    def close(self) -> None:
        self.state, self.due_s = PlaceState.CLOSED, math.inf


class Respawn:
    """The places of one job.

    Args:
        workers: those that it begins with.
        enabled: whether a place is taken again after a death; places that are asked for are filled in any case.
    """

    def __init__(self, workers: Sequence[int], *, enabled: bool) -> None:
        self._enabled = enabled
        self._places = [_Place(worker, -math.inf) for worker in workers]
        self._place_of = {worker: place for place, worker in enumerate(workers)}
        """Of every worker that there ever was."""
        self._uncommitted = set(workers)
        """Workers that have not committed a step."""
        self._is_over = False

    @property
    def workers(self) -> frozenset[int]:
        """All that there ever were."""
        return frozenset(self._place_of)

    @property
    def num_wanted(self) -> int:
        """Workers that the job aims at: its places that are not closed."""
        return sum(place.state is not PlaceState.CLOSED for place in self._places)

    @property
    def num_open(self) -> int:
        """Places that wait for the next worker."""
        return 0 if self._is_over else sum(place.state is PlaceState.OPEN for place in self._places)

    @property
    def next_s(self) -> float:
        """When `tick` has something to do; infinite if nothing waits."""
        if self._is_over:
            return math.inf
        return min([place.due_s for place in self._places], default=math.inf)

    def has_place(self, worker: int) -> bool:
        """Tells whether a worker has a place: it was started for it, and has not ended since, as far as is known."""
        number = self._place_of.get(worker)
        return (
            number is not None
            and self._places[number].worker == worker
            and self._places[number].state is PlaceState.TAKEN
        )

    def spawned(self, record: PlaceTaken) -> None:
        """A worker was started for a place by an earlier coordinator. The one before it has ended.

        A successor says so, who has ended and which steps were committed, in the order of the records.
        """
        worker, place, now_s = record.worker, record.place, record.at_s
        while place >= len(self._places):
            self._places.append(_Place(worker, now_s))
        found = self._places[place]
        # No record tells of the end of a joiner that was no member: that another one got its place shows it.
        if found.worker != worker and found.state is PlaceState.TAKEN and found.worker in self._uncommitted:
            found.deaths.append(found.worker)
        self._take(worker, place, now_s)
        # As doubled by then: another coordinator is no reason for a short back-off.
        found.backoff_s = record.backoff_s

    def _take(self, worker: int, place: int, now_s: float) -> None:
        self._places[place].take(worker, now_s)
        self._place_of[worker] = place
        self._uncommitted.add(worker)

    def committed(self, workers: Collection[int]) -> None:
        """These members have committed a step."""
        for worker in self._uncommitted.intersection(workers):
            self._uncommitted.discard(worker)
            place = self._places[self._place_of[worker]]
            if place.worker == worker:
                place.deaths.clear()

    def ended(self, worker: int, now_s: float) -> list[PlaceClosed]:
        """A worker's process has ended, or the others go on without it; may be said again.

        Args:
            worker: its id.
            now_s: monotonic time.
        Returns:
            What to do now; `tick` does the rest when its time has come.
        """
        number = self._place_of.get(worker)
        if number is None:
            return []
        place = self._places[number]
        # Said again, or of a process before the one that has the place now.
        if place.worker != worker or place.state is not PlaceState.TAKEN:
            return []
        if not self._enabled or self._is_over:
            place.close()
            return []
        if worker in self._uncommitted:
            place.deaths.append(worker)
        if len(place.deaths) >= DEATHS_MAX:
            place.close()
            return [PlaceClosed(number, _closed(number, place.deaths))]
        if now_s - place.since_s >= LONG_S:
            place.backoff_s = BACKOFF_S_MIN
        place.open(now_s + place.backoff_s)
        place.backoff_s = min(2 * place.backoff_s, BACKOFF_S_MAX)
        return []

    def left(self, worker: int) -> None:
        """A worker leaves because it was asked to: nobody takes its place."""
        number = self._place_of.get(worker)
        if number is not None and self._places[number].worker == worker:
            self._places[number].close()

    def join(self, count: int, now_s: float) -> list[PlaceTaken]:
        """So many workers more are wanted, beside those that the job aims at.

        Args:
            count: of new places.
            now_s: monotonic time.
        """
        if self._is_over:
            return []
        return [self._spawn(len(self._places), now_s) for _ in range(count)]

    def stop(self) -> None:
        """The job is stopping, or has made its steps: nobody is started any more."""
        self._is_over = True

    def tick(self, now_s: float, room: float = math.inf) -> list[PlaceTaken]:
        """Lists the workers whose time has come, as many as there is room for: the others wait.

        Args:
            now_s: monotonic time.
            room: most workers that may be started.
        """
        if self._is_over:
            return []
        due = [number for number, place in enumerate(self._places) if place.due_s <= now_s]
        return [self._spawn(number, now_s) for number in due[: int(min(room, len(due)))]]

    def _spawn(self, number: int, now_s: float) -> PlaceTaken:
        # Above all that there ever were: an id is never used again (J1).
        worker = 1 + max(self._place_of, default=-1)
        if number == len(self._places):
            self._places.append(_Place(worker, now_s))
        self._take(worker, number, now_s)
        return PlaceTaken(worker=worker, place=number, at_s=now_s, backoff_s=self._places[number].backoff_s)


def _closed(place: int, deaths: Iterable[int]) -> str:
    *others, last = map(str, deaths)
    return (
        f"place {place} stays empty: workers {', '.join(others)} and {last}, one after the other, have ended before "
        "they had committed a step; their logs say why, and `elaswave ctl RUN join` has another one started"
    )


class MembershipTerms(NamedTuple):
    """What the configuration of a job says of its members."""

    layout: Layout
    """Of the start."""
    labels: tuple[str, ...] = ()
    """Hosts that are configured, or sites; none: there is only one."""
    respawns: bool = False
    """Whether a lost worker's place is taken again."""
    layer_names: tuple[str, ...] = ()
    drain_deadline_s: float = 30.0
    """Seconds that a leaving worker may take, unless its notice says otherwise."""
    workers_min: int = 1
    workers_max: float = math.inf
    """So few, and so many, may there be at a time; each has links to all others."""
    hosts_wait_s: float = math.inf
    """How long the hosts with which the job begins are waited for."""


class AdmissionResult(NamedTuple):
    """What becomes of a joiner."""

    joining: Joining
    problem: str | None
    """Why it may not come in; None if it may."""


class JoinerHosts:
    """On which of the configured hosts, or at which site, each joiner runs: a place that is taken again stays where it
    is, and a new one is on the host with the fewest places. Follows from the records alone.

    Args:
        layout: of the start.
        hosts: that are configured, or sites; none: there is only one.
    """

    def __init__(self, layout: Layout, hosts: Iterable[str]) -> None:
        self._of_place = [host for _, host in layout.domains]
        self._hosts = list(hosts)
        self._of_worker: dict[int, str] = {}

    def placed(self, worker: int, place: int) -> None:
        """A joiner was started for a place."""
        if not self._hosts:
            return
        while place >= len(self._of_place):
            self._of_place.append(min(self._hosts, key=self._of_place.count))
        self._of_worker[worker] = self._of_place[place]

    def of(self, worker: int) -> str:
        """Returns the host of a joiner."""
        return self._of_worker.get(worker, "")


class Joiners:
    """The joiners of one job. Records that it returns are to be made durable before anything follows from them.

    Args:
        terms: of the job.
        hosts: where they are started.
        records: of earlier coordinators, of all kinds.
        found: gives, by the first committed vote and what a member says of its environment, what all have in common
            that began; asked for once in the life of a job.
        away_until_s: until when nobody can be started in a lost worker's place, since its site is cut off.
    """

    def __init__(
        self,
        terms: MembershipTerms,
        hosts: Hosts,
        records: Iterable[Any],
        found: Callable[[bytes, str], Founders],
        away_until_s: Callable[[int], float] = lambda worker: 0.0,
    ) -> None:
        self._terms = terms
        self._hosts = hosts
        self._found = found
        self._away_until_s = away_until_s
        self._founders: Founders | None = None
        self._waiting: dict[int, Joining] = {}
        """Those that have come before it is known what to compare them with."""
        self._respawn = Respawn(terms.layout.workers, enabled=terms.respawns)
        self.started: list[int] = []
        """Ids of all joiners that there ever were, ascending."""
        self._labels = JoinerHosts(terms.layout, terms.labels)
        self._asked: dict[int, list[int]] = {}
        """Number of a person's request -> the joiners that were started for it."""
        self._were_members = set(terms.layout.workers)
        """Those that are members, or were."""
        self.leave_at_s: dict[int, float] = {}
        """Worker that is to leave -> monotonic time at which it is lost, as earlier coordinators have said it."""
        self._asked_to_leave: set[int] = set()
        self._restore(records)

    def _restore(self, records: Iterable[Any]) -> None:
        members: Sequence[int] = self._terms.layout.workers
        for record in records:
            match record:
                case PlaceTaken():
                    self._respawn.spawned(record)
                    self._note(record)
                # Closes the place as `LeavingRecord` does: a coordinator may have died between the two of a leave.
                case LeaveAsked():
                    self._leaves(record.worker)
                    self.leave_at_s[record.worker] = record.at_s + record.within_s
                case NewGenerationRecord():
                    for worker in sorted(self._were_members.difference(record.members)):
                        at_s = max(record.at_s, self._away_until_s(worker))
                        self._respawn.ended(worker, at_s)  # people were told if that has closed a place
                    self._were_members.update(record.members)
                # A published step does not say who has made it: the members of the newest decision have.
                case Decision():
                    members = record.members
                case LeavingRecord():
                    self._leaves(record.worker)
                case Founders():
                    self._founders = record
                case StepPublished():
                    self._hosts.committed(members)
                    self._respawn.committed(members)

    def _note(self, record: PlaceTaken) -> None:
        self.started.append(record.worker)
        self._labels.placed(record.worker, record.place)
        if record.request:
            self._asked.setdefault(record.request, []).append(record.worker)

    def take_over(self, members: Collection[int], now_s: float) -> list[str]:
        """The places of those that earlier coordinators have gone on without are free. Their processes may be there
        still (stopped, cut off), so that the agent does not say that they have ended.

        Args:
            members: of the job.
            now_s: monotonic time.
        Returns:
            What people are to be told.
        """
        gone = sorted(self._were_members.difference(members))
        return [text for worker in gone for text in self.ended(worker, now_s)]

    def joined(self, workers: Iterable[int]) -> None:
        """These are members now."""
        self._were_members.update(workers)

    def was_member(self, worker: int) -> bool:
        """Tells whether a worker is a member, or was one."""
        return worker in self._were_members

    def domain_of(self, worker: int) -> str:
        """Tells where a joiner runs that does not say it itself: on the host of its place. Empty means on the only
        one."""
        return self._hosts.label_of(worker) or self._labels.of(worker)

    # ------------------------------------------------------------------------------------------------ who is started

    @property
    def with_places(self) -> list[int]:
        """Of all that were started to join those that have not ended, as far as is known."""
        return [worker for worker in self.started if self._respawn.has_place(worker)]

    @property
    def num_open(self) -> int:
        """Places that wait for a worker."""
        return self._respawn.num_open

    @property
    def next_s(self) -> float:
        """When the next one is due; infinite if none is, or there is no room for it."""
        next_s = self._respawn.next_s
        return next_s if next_s < math.inf and self._hosts.room else math.inf

    def due(self, now_s: float) -> list[PlaceTaken]:
        """Lists the workers that are to be started now."""
        if self._respawn.next_s > now_s:  # nearly always: to look for room is to look at every host
            return []
        return self._take(self._respawn.tick(now_s, self._hosts.room))

    def request(self, count: int, now_s: float, request: int = 0) -> list[PlaceTaken]:
        """Lists the workers that are to be started because a person wants so many more; none once the job is stopping.

        Args:
            count: how many.
            now_s: monotonic time.
            request: its number, see `started_for`. 0: it has none.
        """
        return self._take(self._respawn.join(count, now_s), request)

    def started_for(self, request: int) -> list[int]:
        """Lists the workers that were started for a request, perhaps by an earlier coordinator: it may come again, and
        is to start nobody else then.

        Args:
            request: its number.
        """
        return list(self._asked.get(request, ()))

    def _take(self, taken: Iterable[PlaceTaken], request: int = 0) -> list[PlaceTaken]:
        """Gives each a host."""
        records = []
        for each in taken:
            host = self._hosts.choose()
            assert host is not None, "no more are taken than there is room for"
            # At once: the next choice of this turn has to see that there is less room.
            self._hosts.placed(each.worker, host.number)
            record = msgspec.structs.replace(each, request=request, host=host.number)
            self._note(record)
            records.append(record)
        return records

    def ended(self, worker: int, now_s: float) -> list[str]:
        """A worker's process has ended, or the others go on without it; may be said again.

        Returns:
            What people are to be told.
        """
        self._waiting.pop(worker, None)
        self._hosts.ended(worker)
        answers = self._respawn.ended(worker, max(now_s, self._away_until_s(worker)))
        return [answer.text for answer in answers]

    def left(self, worker: int, within_s: float, now_s: float) -> LeaveAsked:
        """A worker leaves because it was asked to; a successor knows it too.

        Args:
            worker: its id.
            within_s: after which it is lost.
            now_s: monotonic time.
        """
        self._leaves(worker)
        return LeaveAsked(worker=worker, within_s=within_s, at_s=now_s)

    def _leaves(self, worker: int) -> None:
        self._respawn.left(worker)
        self._asked_to_leave.add(worker)

    def was_asked_to_leave(self, worker: int) -> bool:
        """Tells whether a worker was asked to leave, by this coordinator or an earlier one."""
        return worker in self._asked_to_leave

    def stop(self) -> None:
        """The job is stopping, or has made its steps: nobody is started any more."""
        self._respawn.stop()

    # ---------------------------------------------------------------------------------------------------- who is let in

    def committed(
        self, members: Collection[int], vector: bytes, environment: str
    ) -> tuple[Founders | None, list[AdmissionResult]]:
        """A step is committed: with the first one it is known what workers have in common.

        Args:
            members: that have made it.
            vector: the merged vote.
            environment: of a member, for people.
        Returns:
            What is to be made durable, once; and what becomes of those that have waited for it.
        """
        # With every step, not only the first one: a host or a worker that has come since is proven by a later one.
        self._hosts.committed(members)
        self._respawn.committed(members)
        if self._founders is not None:
            return None, []
        self._founders = self._found(vector, environment)
        waiting, self._waiting = list(self._waiting.values()), {}
        return self._founders, [answer for joining in waiting for answer in self.received(joining)]

    def received(self, joining: Joining) -> list[AdmissionResult]:
        """A joiner has said who it is; may be said again. Nothing follows until there is something to compare with."""
        if self._founders is None:
            self._waiting[joining.worker] = joining
            return []
        return [AdmissionResult(joining, admission_problem(joining, self._founders, self._terms.layer_names))]
