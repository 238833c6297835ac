"""Joins and leaves of a running job, as its coordinator's process sees them: requests, joiners, bounds.

How the membership changes is the protocol's core's; who is started when, and who may come in, is
`elaswave.coordinator.joiners`'. Here is what stands between them, and between both and people.
"""

import logging
import math
from collections.abc import Callable, Sequence

from elaswave.coordinator.joiners import Answer, Joiners
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.detection.awake import AwakeTime
from elaswave.protocol.detection.detector import SILENCE_STARTING_S
from elaswave.protocol.detection.starvation import Stillness
from elaswave.protocol.events import CoordinatorEvent, JoinerCame, JoinerGone, LeaveWanted, NewEpoch, Suspected
from elaswave.protocol.messages import CoreToWorker, Fenced, Joining

JOIN_TIMEOUT_S = 120.0
"""Within this time of its first words a joiner must have become a member; steps of minutes are to fit into it."""
JOINER_STILL_S = SILENCE_STARTING_S
"""How long a joiner that has not said a word yet may use no processor time."""
JOINER_SILENT_S = SILENCE_STARTING_S
"""How long one that has, and that is no member yet, may be silent then."""
JOIN_STEPS_MAX = 10.0
"""And at least within the time of so many steps."""

_log = logging.getLogger("elaswave.coordinator")


class Membership:
    """Who is to become a member of one job, and who is to leave.

    Args:
        core: the protocol's machine.
        joiners: who is started, and who may come in.
        feed: tells the core of an event.
        suspect: tells the core of suspicions.
        spawn: asks the agent for a worker's process.
        end: asks the agent to kill a joiner's process.
        send: sends a message to a worker that is connected.
        say: tells people.
        drain_deadline_s: seconds that a leaving worker may take, unless its notice says otherwise.
        workers_min, workers_max: so few, and so many, may there be at a time; each has links to all others.
        heard_s: seconds, of those in which the coordinator was awake, since anything has come from a worker; None: it
            has no connection.
        awake: counts those seconds.
        refused: told of a joiner that is not let in, and why.
    """

    def __init__(
        self,
        core: Coordinator,
        joiners: Joiners,
        *,
        feed: Callable[[CoordinatorEvent], None],
        suspect: Callable[[Sequence[Suspected]], None],
        spawn: Callable[[int], object],
        end: Callable[[int], object],
        send: Callable[[int, CoreToWorker], object],
        say: Callable[[str], None],
        drain_deadline_s: float,
        workers_min: int,
        workers_max: int,
        heard_s: Callable[[int], float | None],
        awake: AwakeTime,
        refused: Callable[[int, str], object] = lambda worker, problem: None,
    ) -> None:
        self._core = core
        self._joiners = joiners
        self._feed = feed
        self._suspect = suspect
        self._spawn = spawn
        self._end = end
        self._send = send
        self._say = say
        self._drain_deadline_s = drain_deadline_s
        self._workers_min, self._workers_max = workers_min, workers_max
        self._heard_s = heard_s
        self._refused = refused
        self._deadlines_s: dict[int, float] = {}
        """Leaving member -> when it is lost."""
        self._withdrawn: set[int] = set()
        """Joiners that have had a notice."""
        self._joining_since_s: dict[int, float] = {}
        """Joiner that may come in -> when it has said so first."""
        self._silent: dict[int, Stillness | None] = {}
        """Joiner that has not said a word yet -> what is seen of its process, in time in which this process was awake;
        None before anything is."""
        self._awake = awake
        self._heard_at: dict[int, float] = {}
        """Joiner that has said who it is -> when it was heard last, in time in which the coordinator was awake."""

    @property
    def started(self) -> list[int]:
        """All workers that were ever started to join."""
        return self._joiners.started

    # ------------------------------------------------------------------------------------------------------- requests

    def join(self, count: int, now_s: float, request: int = 0) -> list[int] | str:
        """Has workers started that join, beside those that the job aims at; returns their ids, or why there are none.

        Args:
            count: how many.
            now_s: monotonic time.
            request: of a person, as of `Joiners.request`.
        """
        if begun := self._joiners.started_for(request):
            return begun
        there = len(self._core.members) + len(self.joining)
        if there + count > self._workers_max:
            return (
                f"{there} workers are there or on their way, and {there + count} may need more open files in a process "
                f"than the limit of this job permits (ulimit -n), which does for {self._workers_max}: ask for fewer, "
                "or resume the run with a higher limit"
            )
        if count > self._joiners.room:
            room = int(self._joiners.room)
            return (
                f"the job's hosts have room for {room} more workers, and {count} are wanted: start an agent on another "
                "host, or with a higher --workers"
            )
        workers = self._joiners.request(count, now_s, request)
        self._start(workers)
        return workers or "the job is about to end, and takes nobody in any more"

    def _start(self, workers: Sequence[int]) -> None:
        for worker in workers:
            self._silent.setdefault(worker)
            self._spawn(worker)

    def spawn_again(self) -> None:
        """A coordinator that takes over asks for all that may not have been started (J1); the agent knows which. Who
        has ended already is not asked for: no word, and no other end, would ever be heard of it."""
        self._start([worker for worker in self._joiners.with_places if worker not in self._core.members])

    def leave(self, worker: int, deadline_s: float | None, now_s: float) -> None:
        """Has a member leave; nobody takes its place. One that is no member cannot.

        Args:
            worker: its id.
            deadline_s: seconds after which it is lost; None: as configured.
            now_s: monotonic time.
        """
        if worker not in self._core.members:
            self._tell(f"worker {worker} is to leave, but is no member: nothing is done")
            return
        within_s = self._drain_deadline_s if deadline_s is None else deadline_s
        before_s = self._deadlines_s.get(worker, math.inf)
        self._deadlines_s[worker] = min(now_s + within_s, before_s)
        _log.info("worker %d is to leave within %.1f s", worker, within_s)
        self._feed(LeaveWanted(worker))
        if now_s + within_s < before_s:
            self._joiners.left(worker, within_s, now_s)

    def cause_to_stop(self) -> str | None:
        """Why the job is to end, with a checkpoint, before the time of those that leave is over: too few would stay.

        Also an earlier coordinator may have asked the last of them to leave. None: the job goes on.
        """
        members, needed = self._core.members, max(1, self._workers_min)
        going = self._core.admissions.leaving.intersection(members)
        if not going or len(members) - len(going) >= needed:
            return None
        named = ", ".join(map(str, sorted(going)))
        who = "all workers are" if len(going) == len(members) else f"workers {named} are"
        return f"{who} to leave, and the job needs {needed}"

    def stop(self) -> None:
        """The job is stopping: nobody is started any more, and who was to leave ends with it."""
        self._joiners.stop()
        self._deadlines_s.clear()

    def take_over(self, now_s: float) -> None:
        """Members that an earlier coordinator has asked to leave have what is left of their time; places of those that
        it has gone on without are free."""
        self._joiners.take_over(self._core.members, now_s)
        for worker in self._core.admissions.leaving:
            self._deadlines_s[worker] = self._joiners.leave_at_s.get(worker, now_s + self._drain_deadline_s)

    # ---------------------------------------------------------------------------------------------------------- joiners

    @property
    def joining(self) -> tuple[int, ...]:
        """Joiners whose processes start, or to which links are made."""
        return tuple(sorted({*self._silent, *self._joining_since_s}))

    @property
    def coming(self) -> set[int]:
        """All that are on their way to become members, also those that have said who they are and are not answered
        yet."""
        return {*self.joining, *self._heard_at}

    @property
    def silent(self) -> tuple[int, ...]:
        """Joiners that have not said a word yet: how their processes get on is of interest."""
        return tuple(sorted(self._silent))

    def used(self, worker: int, cpu_s: float, now_s: float) -> None:
        """What a joiner's process has used up to now; one that hangs before its first word is ended.

        Args:
            worker: its id; any other one is left to others.
            cpu_s: processor time.
            now_s: monotonic time.
        """
        if worker not in self._silent:
            return
        awake_s = self._awake.passed_s(now_s)
        seen = self._silent[worker] = self._silent[worker] or Stillness(awake_s)
        seen.looked(cpu_s, awake_s)
        if seen.still_s > JOINER_STILL_S:
            del self._silent[worker]
            finding = f"has not said a word, and has used no processor time for {seen.still_s:.0f} s"
            self._tell(f"worker {worker} is ended: it was to join, {finding}")
            self._refused(worker, f"it {finding}")
            self._end(worker)

    def heard(self, joining: Joining, now_s: float) -> None:
        """A joiner has said who it is."""
        self._silent.pop(joining.worker, None)
        self._heard_at[joining.worker] = self._awake.passed_s(now_s)
        self.answer(self._joiners.heard(joining), now_s)

    def answer(self, answers: Sequence[Answer], now_s: float) -> None:
        """It is known which joiners may come in."""
        for joining, problem in answers:
            worker = joining.worker
            if problem is None:
                if worker not in self._joining_since_s:
                    _log.info("worker %d at %s may come in", worker, joining.address)
                self._joining_since_s.setdefault(worker, now_s)
                domain = joining.domain or self._joiners.domain_of(worker)
                self._feed(JoinerCame(worker, joining.address, domain))
            else:
                self._refuse(worker, problem)

    def _refuse(self, worker: int, problem: str) -> None:
        self._heard_at.pop(worker, None)
        text = f"worker {worker} is not admitted: {problem}"
        _log.warning("%s", text)
        self._say(text)
        self._refused(worker, problem)
        self._send(worker, Fenced(term=self._core.term, epoch=self._core.epoch, reason=problem))

    def failed(self, worker: int, summary: str) -> bool:
        """A worker ends with an error of its own. That of a joiner is no loss, and no reason to end the job, however
        many joiners have met the same one.

        Returns:
            Whether it was a joiner.
        """
        if self._joiners.was_member(worker):
            return False
        self._refuse(worker, f"it has ended with an error: {summary}")
        return True

    def withdraws(self, worker: int, now_s: float) -> bool:
        """A worker has had a notice. A joiner does not come in then; nobody takes its place, as that of a member. May
        be said again.

        Returns:
            Whether it was a joiner.
        """
        if self._joiners.was_member(worker):
            return False
        if worker in self._withdrawn:
            return True
        self._withdrawn.add(worker)
        self._joiners.left(worker, 0.0, now_s)
        if self._joining_since_s.pop(worker, None) is not None:
            self._feed(JoinerGone(worker))
        self._refuse(worker, "it has had a notice that its machine will be taken away (SIGTERM)")
        return True

    def ended(self, worker: int, now_s: float) -> None:
        """A worker's process has ended, or the others go on without it; may be said again."""
        self._silent.pop(worker, None)
        self._heard_at.pop(worker, None)
        self._joiners.ended(worker, now_s)
        if self._joining_since_s.pop(worker, None) is not None:
            self._feed(JoinerGone(worker))

    # ------------------------------------------------------------------------------------------------------------- time

    def tick(self, now_s: float, step_s: float) -> float:
        """Starts those whose time has come, and gives up what takes too long.

        Args:
            now_s: monotonic time.
            step_s: of a step, 0 if that is not known.
        Returns:
            When it is to be called again at the latest.
        """
        self._start(self._joiners.due(now_s))
        bound_s = max(JOIN_TIMEOUT_S, JOIN_STEPS_MAX * step_s)
        for worker, since_s in list(self._joining_since_s.items()):
            if now_s - since_s > bound_s:
                self._give_up(worker, f"the members have not made links to it within {bound_s:.0f} s")
        self._look_for_silent(now_s)
        overdue = [worker for worker, at_s in self._deadlines_s.items() if at_s <= now_s]
        for worker in overdue:
            del self._deadlines_s[worker]
        late = [Suspected(worker, "drain", f"worker {worker} could not leave in time") for worker in overdue]
        if members := [each for each in late if each.worker in self._core.members]:
            self._suspect(members)
        return min(self._joiners.next_s, *self._deadlines_s.values(), math.inf)

    def _look_for_silent(self, now_s: float) -> None:
        awake_s = self._awake.passed_s(now_s)
        for worker, heard_at_s in list(self._heard_at.items()):
            ago_s = self._heard_s(worker)
            if ago_s is not None:
                heard_at_s = self._heard_at[worker] = max(heard_at_s, awake_s - ago_s)
            if awake_s - heard_at_s > JOINER_SILENT_S:
                self._give_up(worker, f"nothing has been heard of it for {awake_s - heard_at_s:.0f} s")

    def nobody_is_heard(self, now_s: float) -> None:
        """All workers are silent, or most: that a joiner is says nothing about it."""
        self._heard_at = dict.fromkeys(self._heard_at, self._awake.passed_s(now_s))

    def unreachable(self, worker: int, reason: str) -> None:
        """Others cannot make links to a worker. A joiner does not come in then; any other one is left to others."""
        if worker in self._joining_since_s:
            self._give_up(worker, reason)

    def _give_up(self, worker: int, problem: str) -> None:
        """A joiner does not get on: it may hang."""
        if self._joining_since_s.pop(worker, None) is not None:
            self._feed(JoinerGone(worker))
        self._refuse(worker, problem)
        self._end(worker)

    # ----------------------------------------------------------------------------------------------------------- epochs

    def new_epoch(self, effect: NewEpoch, now_s: float) -> None:
        """Some are members now, others are none any more."""
        self._joiners.joined(effect.joined)
        for worker in effect.joined:
            self._joining_since_s.pop(worker, None)
            self._heard_at.pop(worker, None)
            self._tell(f"worker {worker} has joined: epoch {effect.epoch}")
        for worker in effect.left:
            self._deadlines_s.pop(worker, None)
            self._tell(f"worker {worker} has left, as it was asked to: epoch {effect.epoch}")
        for suspicion in effect.suspicions:
            self._deadlines_s.pop(suspicion.worker, None)
            self.ended(suspicion.worker, now_s)

    def _tell(self, text: str) -> None:
        """To people, and into the log of the coordinator."""
        _log.info("%s", text)
        self._say(text)
