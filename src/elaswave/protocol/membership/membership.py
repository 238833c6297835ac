"""Joins and leaves of a running job: who is asked to come or to go, by when, and what follows. No IO, no clocks.

How the membership changes is the core's (`elaswave.protocol.coordinator.machine`); who is started where, and who may
come in, is decided in `elaswave.protocol.membership.joiners`. Here is what stands between them, hosts and people:

    wanted       a place is free, a person asks, or a host has come      it gets an id, which is durable first
    started      by the agent of its host, once                          lost if it hangs before its first word
    speaks       it says who it is                                       refused, or the core takes it in
    linked       members make links to it                                given up if that takes too long
    joins        with a new generation                                        a member from then on
    is to leave  a person, or a notice of its machine                    lost after its deadline; the job stops if too
                                                                         few would stay

Every method returns effects, to be carried out in their order.
"""

import math
from collections.abc import Collection, Iterable, Sequence

from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.detection.active_time import ActiveTime
from elaswave.protocol.detection.detector import SILENCE_STARTING_S
from elaswave.protocol.detection.starvation import Stillness
from elaswave.protocol.events import JoinerCame, JoinerGone, LeaveWanted, NewGeneration, Suspected
from elaswave.protocol.membership import effects as asked
from elaswave.protocol.membership.agents import HostAgents
from elaswave.protocol.membership.joiners import AdmissionResult, Joiners, MembershipTerms
from elaswave.protocol.messages import Joining

JOIN_TIMEOUT_S = 120.0
"""Within this time of its first words a joiner must have become a member; steps of minutes are to fit into it."""
JOINER_STILL_S = SILENCE_STARTING_S
"""How long a joiner that has not said a word yet may use no processor time."""
JOINER_SILENT_S = SILENCE_STARTING_S
"""How long one that has, and that is no member yet, may be silent then."""
JOIN_STEPS_MAX = 10.0
"""And at least within the time of so many steps."""
_HAD_NOTICE = "it has had a notice that its machine will be taken away (SIGTERM)"

Effects = list[asked.MembershipEffect]


class Membership:
    """Who is to become a member of one job, and who is to leave.

    Args:
        core: the protocol's machine. It is read here; what it is to be told is an effect.
        joiners: who is started, and who may come in.
        agents: of the hosts on which they are started.
        terms: of the job.
        active_time: counts the time in which the coordinator is awake.
    """

    def __init__(
        self,
        core: Coordinator,
        joiners: Joiners,
        agents: HostAgents,
        terms: MembershipTerms,
        active_time: ActiveTime,
    ) -> None:
        self._core = core
        self.joiners = joiners
        self.agents = agents
        self._terms = terms
        self._active_time = active_time
        self.is_stopping = False
        """Whether the job is to end; then nobody is started, and who was to leave ends with it."""
        self._deadlines_s: dict[int, float] = {}
        """Leaving member -> when it is lost."""
        self._leaving: set[int] = set()
        """Members that have had a notice."""
        self._joining_since_s: dict[int, float] = {}
        """Joiner that may come in -> when it has said so first."""
        self._silent: dict[int, Stillness | None] = {}
        """Joiner that has not said a word yet -> what is seen of its process, in time in which this process was awake;
        None before anything is."""
        self._received_at: dict[int, float] = {}
        """Joiner that has said who it is -> when it was heard last, in time in which the coordinator was awake."""

    def begin(self, now_s: float) -> Effects:
        """This coordinator begins. Members that an earlier one has asked to leave have what is left of their time;
        places of those that it has gone on without are free."""
        effects = _said(self.joiners.take_over(self._core.members, now_s))
        for worker in self._core.admissions.leaving:
            # The request is durable before its deadline is: one that is found alone gets the whole time.
            self._deadlines_s[worker] = self.joiners.leave_at_s.get(worker, now_s + self._terms.drain_deadline_s)
        # Before all hosts have come nobody is started, and so nobody can be late.
        return [asked.AwaitMembers(), *effects] if self.agents.is_complete else effects

    # -------------------------------------------------------------------------------------------------- who is to come

    def obstacle_to_join(self, count: int) -> str | None:
        """Explains why so many more workers cannot be started; None: they can."""
        there = len(self._core.members) + len(self.joining)
        if there + count > self._terms.workers_max:
            return (
                f"{there} workers are there or on their way, and {there + count} may need more open files in a process "
                f"than the limit of this job permits (ulimit -n), which does for {self._terms.workers_max}: ask for "
                "fewer, or resume the run with a higher limit"
            )
        if count > (room := self.agents.hosts.room):
            return (
                f"the job's hosts have room for {int(room)} more workers, and {count} are wanted: start an agent on "
                "another host, or with a higher --workers"
            )
        return None

    def join(self, count: int, now_s: float, request: int = 0) -> Effects:
        """Has workers started that join, beside those that the job aims at: their ids are in `Joiners.started` then.

        Nothing follows if there is an obstacle, if the job is about to end, or if the request was dealt with.

        Args:
            count: how many.
            now_s: monotonic time.
            request: of a person, as of `Joiners.request`.
        """
        if self.joiners.started_for(request) or self.obstacle_to_join(count) is not None:
            return []
        return self._start(self.joiners.request(count, now_s, request))

    def _start(self, records: Iterable[asked.PlaceTaken]) -> Effects:
        records = list(records)
        written: Effects = [asked.WriteDown(record) for record in records]
        # All records first: a successor must know every id that an agent may have started (J1).
        return written + self._ask_for([record.worker for record in records])

    def _ask_for(self, workers: Sequence[int]) -> Effects:
        for worker in workers:
            # One that has spoken is asked for again too, with each new connection of its agent. Were it silent by
            # that, nothing would ever take it off the list, once it is a member.
            if worker not in self._received_at and worker not in self._joining_since_s:
                self._silent.setdefault(worker)
        return [effect for worker in workers for effect in self.agents.start(worker)]

    def _start_again(self) -> Effects:
        """A coordinator that takes over asks for all that may not have been started (J1); the agent knows which. Who
        has ended already is not asked for: no word, and no other end, would ever be heard of it."""
        return self._ask_for([worker for worker in self.joiners.with_places if worker not in self._core.members])

    @property
    def joining(self) -> tuple[int, ...]:
        """Joiners whose processes start, or to which links are made."""
        return tuple(sorted({*self._silent, *self._joining_since_s}))

    @property
    def coming(self) -> set[int]:
        """All that are on their way to become members, also those that have said who they are and are not answered
        yet."""
        return {*self.joining, *self._received_at}

    @property
    def silent(self) -> tuple[int, ...]:
        """Joiners that have not said a word yet: how their processes get on is of interest."""
        return tuple(sorted(self._silent))

    # ----------------------------------------------------------------------------------------------------------- hosts

    def agent_came(self, node: str, incarnation: int, slots: int, now_s: float) -> Effects:
        """An agent is ready to start workers; said on every connection. A host that comes while the job runs takes over
        places that are open, and beyond them the job grows.

        Args:
            node, incarnation, slots: as of `HostAgents.came`.
            now_s: monotonic time.
        """
        was_founded = self.agents.is_complete
        effects, room = self.agents.came(node, incarnation, slots)
        if not self.agents.takes_part(incarnation):
            return effects
        if self.agents.is_complete and not was_founded:
            effects.append(asked.AwaitMembers())
        if room > self.joiners.num_open:
            effects += self.join(room - self.joiners.num_open, now_s)
        # This may ask again for those of the line before: the agent ignores what it has started already.
        return effects + self._start_again()

    def agent_went(self, incarnation: int, now_s: float) -> None:
        """An agent's connection has ended."""
        self.agents.went(incarnation, self._active_time.passed_s(now_s))

    def agent_leaves(self, incarnation: int, left_s: float, now_s: float) -> Effects:
        """An agent has had a notice: its workers leave. If nobody stays, the job ends with a checkpoint.

        Args:
            incarnation: of the agent.
            left_s: within so many seconds.
            now_s: monotonic time.
        """
        workers = self.agents.leaving(incarnation)
        if self.is_stopping:
            return []
        effects: Effects = []
        for worker in workers:
            if self.is_joiner(worker):
                effects += self.withdraws(worker, now_s)
            elif worker not in self._leaving:
                self._leaving.add(worker)
                effects += self.leave(worker, left_s, now_s)
        return effects

    # -------------------------------------------------------------------------------------------------- who is to leave

    def leave(self, worker: int, deadline_s: float | None, now_s: float) -> Effects:
        """Has a member leave; nobody takes its place. One that is no member cannot.

        Args:
            worker: its id.
            deadline_s: seconds after which it is lost; None: as configured.
            now_s: monotonic time.
        """
        if self.is_stopping:
            return []
        if worker not in self._core.members:
            return [asked.Say(f"worker {worker} is to leave, but is no member: nothing is done")]
        within_s = self._terms.drain_deadline_s if deadline_s is None else deadline_s
        before_s = self._deadlines_s.get(worker, math.inf)
        # A later request never gives more time: a machine that is taken away does not wait.
        self._deadlines_s[worker] = min(now_s + within_s, before_s)
        # The core writes down that it leaves, before the deadline is written here.
        effects: Effects = [asked.TellCore(LeaveWanted(worker))]
        if now_s + within_s < before_s:
            effects.append(asked.WriteDown(self.joiners.left(worker, within_s, now_s)))
        return effects

    def has_notice(self, worker: int, left_s: float, now_s: float) -> Effects:
        """A member has had a notice: its machine is taken away. A job that is stopping lets it go anyway.

        Args:
            worker: its id; may be said again.
            left_s: within so many seconds.
            now_s: monotonic time.
        """
        if self.is_stopping or worker in self._leaving:
            return []
        self._leaving.add(worker)
        notice = asked.Say(
            f"worker {worker} has had a notice that its machine will be taken away (SIGTERM): it leaves within "
            f"{left_s:.0f} s"
        )
        return [notice, *self.leave(worker, left_s, now_s)]

    @property
    def may_drain(self) -> bool:
        """Whether a member that costs more than it gives may be asked to leave now: nothing else is about to change."""
        return self._core.state is CoordinatorState.TRAINING and not self._core.is_changing and not self.is_stopping

    def stop_if_none_stay(self) -> Effects:
        """Ends the job, with a checkpoint, before the time of those that leave is over, if too few would stay. Also an
        earlier coordinator may have asked the last of them to leave."""
        members, needed = self._core.members, max(1, self._terms.workers_min)
        going = self._core.admissions.leaving.intersection(members)
        if self.is_stopping or not going or len(members) - len(going) >= needed:
            return []
        named = ", ".join(map(str, sorted(going)))
        who = "all workers are" if len(going) == len(members) else f"workers {named} are"
        return [asked.StopTraining(f"{who} to leave, and the job needs {needed}")]

    def stop(self) -> None:
        """The job is stopping, or over: nobody is started any more, and who was to leave ends with it."""
        self.is_stopping = True
        self.joiners.stop()
        self._deadlines_s.clear()

    # ---------------------------------------------------------------------------------------------------------- joiners

    def is_joiner(self, worker: int) -> bool:
        """Tells whether a worker never was a member. What befalls it is no loss."""
        return not self.joiners.was_member(worker)

    def used(self, worker: int, cpu_s: float, now_s: float) -> Effects:
        """Notes what a joiner's process has used up to now; one that hangs before its first word is ended.

        Args:
            worker: its id; any other one is left to others.
            cpu_s: processor time.
            now_s: monotonic time.
        """
        if worker not in self._silent:
            return []
        active_s = self._active_time.passed_s(now_s)
        # From the first look on: how long the agent takes to start a process says nothing of the process.
        seen = self._silent[worker] = self._silent[worker] or Stillness(active_s)
        seen.looked(cpu_s, active_s)
        if seen.still_s <= JOINER_STILL_S:
            return []
        del self._silent[worker]
        problem = f"it has not said a word, and has used no processor time for {seen.still_s:.0f} s"
        return [asked.Refuse(worker, problem), *self.agents.end(worker)]

    def received(self, joining: Joining, now_s: float) -> Effects:
        """A joiner has said who it is."""
        self._silent.pop(joining.worker, None)
        if self.joiners.was_asked_to_leave(joining.worker):
            # Its agent had the notice before its first word: what it was told then had no connection to go by.
            return [asked.Refuse(joining.worker, _HAD_NOTICE)]
        self._received_at[joining.worker] = self._active_time.passed_s(now_s)
        return self._answer(self.joiners.received(joining), now_s)

    def committed(self, vector: bytes, environment: str, now_s: float) -> Effects:
        """A step of the members is committed: with the first one it is known which joiners may come in.

        Args:
            vector: the merged vote.
            environment: of a member, for people.
            now_s: monotonic time.
        """
        founders, answers = self.joiners.committed(self._core.members, vector, environment)
        written: Effects = [] if founders is None else [asked.WriteDown(founders)]
        return written + self._answer(answers, now_s)

    def _answer(self, answers: Iterable[AdmissionResult], now_s: float) -> Effects:
        effects: Effects = []
        for joining, problem in answers:
            worker = joining.worker
            if problem is not None:
                self._received_at.pop(worker, None)
                effects.append(asked.Refuse(worker, problem))
                continue
            # Said again over a new connection: it gets no more time by that.
            self._joining_since_s.setdefault(worker, now_s)
            domain = joining.domain or self.joiners.domain_of(worker)
            effects.append(asked.TellCore(JoinerCame(worker, joining.address, domain)))
        return effects

    def failed(self, worker: int, summary: str) -> Effects:
        """A joiner ends with an error of its own. That is no loss, and no reason to end the job, however many joiners
        have met the same one."""
        # The rest follows when its process has ended.
        self._received_at.pop(worker, None)
        return [asked.Refuse(worker, f"it has ended with an error: {summary}")]

    def withdraws(self, worker: int, now_s: float) -> Effects:
        """A joiner has had a notice. It does not come in then; nobody takes its place, as that of a member. This may be
        said again."""
        if self.joiners.was_asked_to_leave(worker):
            return []
        left = asked.WriteDown(self.joiners.left(worker, 0.0, now_s))
        return [left, *self._drop(worker), asked.Refuse(worker, _HAD_NOTICE)]

    def ended(self, worker: int, now_s: float) -> Effects:
        """A worker's process has ended, or the others go on without it; may be said again."""
        self._silent.pop(worker, None)
        return [*_said(self.joiners.ended(worker, now_s)), *self._drop(worker)]

    def unreachable(self, worker: int, reason: str) -> Effects:
        """Others cannot make links to a worker. A joiner does not come in then; any other one is left to others."""
        return self._give_up(worker, reason) if worker in self._joining_since_s else []

    def _give_up(self, worker: int, problem: str) -> Effects:
        """A joiner does not get on: it may hang."""
        return [*self._drop(worker), asked.Refuse(worker, problem), *self.agents.end(worker)]

    def _drop(self, worker: int) -> Effects:
        """Nothing of a joiner is waited for any more."""
        self._received_at.pop(worker, None)
        is_known = self._joining_since_s.pop(worker, None) is not None
        return [asked.TellCore(JoinerGone(worker))] if is_known else []

    # ------------------------------------------------------------------------------------------------------------- time

    def tick(self, last_heartbeat_s: dict[int, float], now_s: float, step_s: float) -> Effects:
        """Starts those whose time has come, and gives up what takes too long; to be called no later than `next_s`.

        Args:
            last_heartbeat_s: joiner that is connected -> seconds, of those in which the coordinator was awake, since
                anything has come from it.
            now_s: monotonic time.
            step_s: of a step, 0 if that is not known.
        """
        due = self.joiners.due(now_s)
        effects = self._start(due) if due else []
        bound_s = max(JOIN_TIMEOUT_S, JOIN_STEPS_MAX * step_s)
        for worker, since_s in list(self._joining_since_s.items()):
            if now_s - since_s > bound_s:
                effects += self._give_up(worker, f"the members have not made links to it within {bound_s:.0f} s")
        effects += self._look_for_silent(last_heartbeat_s, now_s)
        late = []
        for worker in [worker for worker, at_s in self._deadlines_s.items() if at_s <= now_s]:
            del self._deadlines_s[worker]
            if worker in self._core.members:
                late.append(Suspected(worker, "drain", f"worker {worker} could not leave in time"))
        if late:
            effects.append(asked.Suspect(late))
        return effects

    @property
    def next_s(self) -> float:
        """When `tick` has something to do at the latest, as far as that is known; infinite if nothing waits."""
        return min(self.joiners.next_s, *self._deadlines_s.values(), math.inf)

    def look_at_hosts(self, awaited: Collection[int], now_s: float) -> Effects:
        """Gives up hosts that have been waited for too long; to be called now and then.

        Args:
            awaited: members that have not come to this coordinator yet.
            now_s: monotonic time.
        """
        return self.agents.tick(set(self._core.members).difference(awaited), self._active_time.passed_s(now_s))

    def _look_for_silent(self, last_heartbeat_s: dict[int, float], now_s: float) -> Effects:
        active_s = self._active_time.passed_s(now_s)
        effects: Effects = []
        for worker, received_at_s in list(self._received_at.items()):
            if worker in last_heartbeat_s:
                received_at_s = self._received_at[worker] = max(received_at_s, active_s - last_heartbeat_s[worker])
            if active_s - received_at_s > JOINER_SILENT_S:
                effects += self._give_up(worker, f"nothing has been heard of it for {active_s - received_at_s:.0f} s")
        return effects

    @property
    def spoken(self) -> list[int]:
        """Joiners that have said who they are, and are no members yet: `tick` is to know when they were heard."""
        return list(self._received_at)

    def all_are_silent(self, now_s: float) -> None:
        """All workers are silent, or most: that a joiner is says nothing about it."""
        self._received_at = dict.fromkeys(self._received_at, self._active_time.passed_s(now_s))

    # ----------------------------------------------------------------------------------------------------- generations

    def new_generation(self, effect: NewGeneration, now_s: float) -> Effects:
        """Some are members now, others are none any more."""
        effects: Effects = []
        self.joiners.joined(effect.joined)
        for worker in effect.joined:
            # No bound of joiners holds for a member: the detector watches it from now on.
            self._silent.pop(worker, None)
            self._joining_since_s.pop(worker, None)
            self._received_at.pop(worker, None)
            effects.append(asked.Say(f"worker {worker} has joined: generation {effect.generation}"))
        for worker in effect.left:
            # Its place was closed when it was asked to leave, and its agent tells of the end of its process.
            self._deadlines_s.pop(worker, None)
            effects.append(asked.Say(f"worker {worker} has left, as it was asked to: generation {effect.generation}"))
        for suspicion in effect.suspicions:
            self._deadlines_s.pop(suspicion.worker, None)
            effects += self.ended(suspicion.worker, now_s)
        return effects


def _said(texts: Iterable[str]) -> Effects:
    return [asked.Say(text) for text in texts]
