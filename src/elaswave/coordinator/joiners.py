"""The joiners of a job, as its coordinator sees them: who is started when, and who is let in.

When a place is taken again is `elaswave.protocol.membership.respawn`'s, who may join is
`elaswave.protocol.membership.admission`'s. What a successor must know of both is in the journal. What follows from a
joiner that may come in is the protocol's core's.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from elaswave.job.identity import Identity
from elaswave.job.plan import RunPlan
from elaswave.protocol.events import LeavingRecord, NewEpochRecord
from elaswave.protocol.membership.admission import Founders, admission_problem, canaries_in
from elaswave.protocol.membership.hosts import Hosts
from elaswave.protocol.membership.respawn import PlaceClosed, Respawn, Spawn
from elaswave.protocol.messages import PROTOCOL_VERSION, Decision, Joining
from elaswave.protocol.step.ballot import decode_certificate
from elaswave.store.journal import JoinersRecord, JournalRecord, LeaveAsked, PlaceTaken, Published
from elaswave.types import Layout


class Answer(NamedTuple):
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
        """The host of a joiner."""
        return self._of_worker.get(worker, "")


class Joiners:
    """The joiners of one job.

    Args:
        plan: of the run.
        identity: of those that begin; found out anew by every coordinator, and used by the first one that needs it.
        records: of the journal.
        persist: writes one more.
        say: tells people.
        hosts: where they are started; None: on the one host that there is.
        away_until_s: until when nobody can be started in a lost worker's place, since its site is cut off.
    """

    def __init__(
        self,
        plan: RunPlan,
        identity: Callable[[], Identity],
        records: Iterable[JournalRecord],
        persist: Callable[[JoinersRecord], None],
        say: Callable[[str], None],
        hosts: Hosts | None = None,
        away_until_s: Callable[[int], float] = lambda worker: 0.0,
    ) -> None:
        self._away_until_s = away_until_s
        self._plan = plan
        self._identity = identity
        self._persist = persist
        self._say = say
        self._hosts = hosts
        self._founders: Founders | None = None
        self._waiting: dict[int, Joining] = {}
        """Those that have come before it is known what to compare them with."""
        self._respawn = Respawn(plan.layout.workers, enabled=plan.config.elastic.respawns)
        self.started: list[int] = []
        """Ids of all joiners that there ever were, ascending."""
        self._labels = JoinerHosts(plan.layout, plan.config.hosts or dict.fromkeys(plan.layout.domain_of.values()))
        self._asked: dict[int, list[int]] = {}
        """Number of a person's request -> the joiners that were started for it."""
        self._were_members = set(plan.layout.workers)
        """Those that are members, or were."""
        self.leave_at_s: dict[int, float] = {}
        """Worker that is to leave -> monotonic time at which it is lost, as earlier coordinators have said it."""
        self._restore(records)

    def _restore(self, records: Iterable[JournalRecord]) -> None:
        members: Sequence[int] = self._plan.layout.workers
        for record in records:
            if isinstance(record, PlaceTaken):
                self._respawn.spawned(record.worker, record.place, record.at_s, record.backoff_s)
                self._note(record)
            elif isinstance(record, LeaveAsked):
                self._respawn.left(record.worker)
                self.leave_at_s[record.worker] = record.at_s + record.within_s
            elif isinstance(record, NewEpochRecord):
                for worker in sorted(self._were_members.difference(record.members)):
                    at_s = max(record.at_s, self._away_until_s(worker))
                    self._respawn.ended(worker, at_s)  # people were told if that has closed a place
                self._were_members.update(record.members)
            elif isinstance(record, Decision):
                members = record.members
            elif isinstance(record, Published):
                self._respawn.committed(members)
            elif isinstance(record, LeavingRecord):
                self._respawn.left(record.worker)
            elif isinstance(record, Founders):
                self._founders = record

    def _note(self, record: PlaceTaken) -> None:
        self.started.append(record.worker)
        self._labels.placed(record.worker, record.place)
        if record.request:
            self._asked.setdefault(record.request, []).append(record.worker)

    def take_over(self, members: Collection[int], now_s: float) -> None:
        """The places of those that earlier coordinators have gone on without are free. Their processes may be there
        still (stopped, cut off), so that the agent does not say that they have ended.

        Args:
            members: of the job.
            now_s: monotonic time.
        """
        for worker in sorted(self._were_members.difference(members)):
            self.ended(worker, now_s)

    def joined(self, workers: Iterable[int]) -> None:
        """These are members now."""
        self._were_members.update(workers)

    def was_member(self, worker: int) -> bool:
        """Whether a worker is a member, or was one."""
        return worker in self._were_members

    def domain_of(self, worker: int) -> str:
        """Where a joiner runs that does not say it itself: on the host of its place. Empty: on the only one."""
        own = "" if self._hosts is None else self._hosts.label_of(worker)
        return own or self._labels.of(worker)

    # ------------------------------------------------------------------------------------------------ who is started

    @property
    def room(self) -> float:
        """So many more may be started on the hosts that there are."""
        return math.inf if self._hosts is None else self._hosts.room

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
        return self._respawn.next_s if self.room else math.inf

    def due(self, now_s: float) -> list[int]:
        """Workers that are to be started now. The core makes that durable, and asks the agent."""
        return self._take(self._respawn.tick(now_s, self.room), now_s)

    def request(self, count: int, now_s: float, request: int = 0) -> list[int]:
        """Workers that are to be started because a person wants so many more.

        Args:
            count: how many.
            now_s: monotonic time.
            request: its number, see `started_for`. 0: it has none.
        """
        return self._take(self._respawn.join(count, now_s), now_s, request)

    def started_for(self, request: int) -> list[int]:
        """Workers that were started for a request, perhaps by an earlier coordinator: it may come again, and is to
        start nobody else then.

        Args:
            request: its number.
        """
        return list(self._asked.get(request, ()))

    def _take(self, spawns: Iterable[Spawn], now_s: float, request: int = 0) -> list[int]:
        workers = []
        for worker, place in spawns:
            host = 0
            if self._hosts is not None:
                chosen = self._hosts.choose()
                assert chosen is not None, "no more are taken than there is room for"
                host = chosen.number
                self._hosts.placed(worker, host)
            backoff_s = self._respawn.backoff_s(place)
            record = PlaceTaken(worker=worker, place=place, at_s=now_s, request=request, backoff_s=backoff_s, host=host)
            self._persist(record)
            self._note(record)
            workers.append(worker)
        return workers

    def ended(self, worker: int, now_s: float) -> None:
        """A worker's process has ended, or the others go on without it; may be said again."""
        self._waiting.pop(worker, None)
        if self._hosts is not None:
            self._hosts.ended(worker)
        for answer in self._respawn.ended(worker, max(now_s, self._away_until_s(worker))):
            if isinstance(answer, PlaceClosed):
                self._say(answer.text)

    def left(self, worker: int, within_s: float, now_s: float) -> None:
        """A worker leaves because it was asked to; a successor knows it too.

        Args:
            worker: its id.
            within_s: after which it is lost.
            now_s: monotonic time.
        """
        self._respawn.left(worker)
        self._persist(LeaveAsked(worker=worker, within_s=within_s, at_s=now_s))

    def stop(self) -> None:
        """The job is stopping, or has made its steps."""
        self._respawn.stop()

    # ---------------------------------------------------------------------------------------------------- who is let in

    def committed(self, members: Collection[int], vector: bytes, environment: str) -> list[Answer]:
        """A step is committed: with the first one it is known what workers have in common.

        Args:
            members: that have made it.
            vector: the merged vote.
            environment: of a member, for people.
        Returns:
            What becomes of those that have waited for it.
        """
        self._respawn.committed(members)
        if self._founders is not None:
            return []
        plan, identity = self._plan, self._identity()
        canaries = canaries_in(
            decode_certificate(vector),
            num_layers=plan.state.num_layers,
            num_tensors=len(plan.tensors),
            num_buffers=sum(tensor.is_buffer for tensor in plan.tensors),
        )
        self._founders = Founders(
            protocol=PROTOCOL_VERSION,
            libraries=identity.libraries,
            environment=environment,
            config_hash=identity.config_hash,
            model_hash=identity.model_hash,
            data_hash=identity.data_hash,
            foreign=plan.config.model.foreign,
            canaries=dict(canaries),
        )
        self._persist(self._founders)
        waiting, self._waiting = list(self._waiting.values()), {}
        return [answer for joining in waiting for answer in self.heard(joining)]

    def heard(self, joining: Joining) -> list[Answer]:
        """A joiner has said who it is; may be said again. Nothing follows until there is something to compare with."""
        if self._founders is None:
            self._waiting[joining.worker] = joining
            return []
        return [Answer(joining, admission_problem(joining, self._founders, self._plan.state.layer_names))]
