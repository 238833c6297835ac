"""What follows in a coordinator's process from what is seen and heard of workers and hosts. No IO, no clocks.

The machines decide: `elaswave.protocol.coordinator` who is a member, `elaswave.protocol.membership` who is to be one,
`elaswave.protocol.detection` who is held for lost. Here is which of them is told of what, and in which order; the
product's process and the simulated one differ in how their effects are carried out.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from elaswave.protocol.coordinator.driver import CoordinatorDriver
from elaswave.protocol.detection.detector import Detector
from elaswave.protocol.detection.unreachable import Unreachable
from elaswave.protocol.events import NewGeneration, Persist, Resumed, Send, Suspected, WorkerFailed
from elaswave.protocol.membership import effects as asked
from elaswave.protocol.membership.membership import Membership
from elaswave.protocol.messages import FencedOff, Joining, Registered


class MembersDriver(CoordinatorDriver):
    """Tells the machines of workers and hosts, and carries out what they ask for."""

    membership: Membership
    detector: Detector
    unreachable: Unreachable
    has_begun: bool
    """Whether all members have registered before: with an earlier coordinator."""
    failures: Mapping[int, object]
    """Workers whose own errors explain their ends."""

    def carry_out_one(self, effect: asked.Effect) -> None:
        """Carries out one effect."""
        match effect:
            case Persist() | Send():  # of these there are as many as workers
                super().carry_out_one(effect)
            case asked.WriteDown(record):
                self.persist(record)
            case asked.TellCore(event):
                self.feed(event)
            case asked.Suspect(suspicions):
                self.take_suspicions(suspicions)
            case asked.TellAgent() | asked.StartFirst() | asked.TurnAway() | asked.HangUp():
                self.tell_agent(effect)
            case asked.Refuse(worker, problem):
                self.say(f"worker {worker} is not admitted: {problem}")
                self.not_admitted(worker, problem)
                self.send(worker, FencedOff(term=self.core.term, generation=self.core.generation, reason=problem))
            case asked.AwaitMembers():
                self._await_members()
            case asked.WorkerGone(worker, text):
                self.note_end(worker, text)
            case asked.StopTraining(cause):
                if not self.membership.is_stopping:
                    self.stop_job(cause)
            case asked.GiveUpJob(reason):
                self.give_up_job(reason)
            case asked.Say(text):
                self.say(text)
            case _:
                super().carry_out_one(effect)

    # ----------------------------------------------------------------------------------------------- members and losses

    def _await_members(self) -> None:
        """A member that does not find this coordinator is lost, however it was to its predecessors."""
        for worker in self.core.members:
            # Once the job has begun members send heartbeats: silence counts. Before, what their processes use counts.
            if self.has_begun:
                self.detector.joined(worker, self.now_s())
            else:
                self.detector.expect(worker, self.now_s())

    def worker_registered(self, message: Registered) -> None:
        """A worker has a new connection, and says who it is."""
        if message.worker in self.core.members:
            self.detector.joined(message.worker, self.now_s())
        if not self.is_over:
            self.feed(message)

    def worker_ended(self, worker: int, text: str) -> None:
        """A worker's process has ended; may be said again.

        Args:
            worker: its id.
            text: how, such as "was killed by SIGKILL".
        """
        if self.note_end(worker, text):
            self.look_soon()

    def note_end(self, worker: int, text: str) -> bool:
        """Does the same as `worker_ended`, but returns whether the next look has something to say of it."""
        self.carry_out(self.membership.ended(worker, self.now_s()))
        self.not_admitted(worker, f"its process {text}")
        # Its own error has explained the end already, see `worker_failed`.
        if worker not in self.core.members or self.is_over or worker in self.failures:
            return False
        self.detector.exited(worker, text, self.now_s())
        return True

    def worker_unreached(self, worker: int, peers: Mapping[int, str]) -> None:
        """A worker cannot reach others: at the beginning, when somebody joins, or after a recovery (J3).

        Args:
            worker: its id.
            peers: all whom it cannot reach at present -> where it dials, and what it sees there.
        """
        here = {*self.core.members, *self.membership.joining}
        if worker not in here or self.is_over:
            return
        there = {peer: text for peer, text in peers.items() if peer in here}
        found = self.unreachable.received(worker, there, self.now_s())
        for lost, reason in found.items():
            self.carry_out(self.membership.unreachable(lost, reason))
        self.take_suspicions(
            [Suspected(lost, "link", reason) for lost, reason in found.items() if lost in self.core.members]
        )

    def worker_failed(self, event: WorkerFailed) -> None:
        """A worker ends with an error of its own, which explains its end."""
        if self.membership.is_joiner(event.worker):
            self.carry_out(self.membership.failed(event.worker, event.summary))
        else:
            # Before the machine goes on without it: the end of its process, which follows, is no news.
            self.detector.left(event.worker)
            self.feed(event)

    def take_suspicions(self, suspicions: Sequence[Suspected]) -> None:
        """Workers are held for lost, and with them all that are lost with the same hosts."""
        if suspicions and not self.is_over:
            lost = self.membership.agents.with_their_hosts(suspicions, self.core.members)
            self.suspect(lost)
            self.carry_out(self.membership.agents.hang_up_on_lost(lost))

    def on_resumed(self, effect: Resumed) -> None:
        """Who was to leave may be all that is left."""
        self.then(self.stop_if_none_stay)

    def on_new_generation(self, effect: NewGeneration) -> None:
        """Who is a member now is watched, and who is none is not."""
        now_s = self.now_s()
        self.detector.new_generation(now_s)
        for worker in effect.joined:
            self.detector.joined(worker, now_s)
        for worker in (*effect.left, *(suspicion.worker for suspicion in effect.suspicions)):
            # Not all suspicions come from the detector: a deadline, or the loss of a host, is news to it.
            self.detector.left(worker)
        self.carry_out(self.membership.new_generation(effect, now_s))

    # ------------------------------------------------------------------------------------------------- joins and leaves

    def worker_joining(self, message: Joining) -> None:
        """A worker that is to join says who it is. It may not have heard yet that it is a member."""
        if message.worker in self.core.members:
            # Generation 0 is older than any: the machine asks for its report, as of a member that has missed it.
            registered = Registered(worker=message.worker, address=message.address, generation=0, report=None)
            self.worker_registered(registered)
        else:
            self.carry_out(self.membership.received(message, self.now_s()))

    def worker_leaving(self, worker: int, left_s: float) -> None:
        """A worker has had a notice that its machine is taken away within so many seconds; may be said again."""
        if self.membership.is_joiner(worker):
            self.carry_out(self.membership.withdraws(worker, self.now_s()))
        else:
            self._let_go(self.membership.has_notice(worker, left_s, self.now_s()))

    def request_join(self, count: int, request: int = 0) -> list[int] | str:
        """Has workers started that join, beside those that the job aims at.

        Args:
            count: how many.
            request: number of a person's request, which may come again; 0: it has none.
        Returns:
            Their ids, or why there are none.
        """
        membership = self.membership
        # First: a request that comes again must not lack the room that its own workers have taken.
        if begun := membership.joiners.started_for(request):
            return begun
        if obstacle := membership.obstacle_to_join(count):
            return obstacle
        num_started = len(membership.joiners.started)
        self.carry_out(membership.join(count, self.now_s(), request))
        return membership.joiners.started[num_started:] or "the job is about to end, and takes nobody in any more"

    def request_drain(self, worker: int, deadline_s: float | None = None) -> None:
        """Has a member leave.

        Args:
            worker: its id.
            deadline_s: seconds after which it is lost; None: as configured.
        """
        self._let_go(self.membership.leave(worker, deadline_s, self.now_s()))

    def agent_leaving(self, incarnation: int, left_s: float) -> None:
        """An agent has had a notice, and its workers with it."""
        self._let_go(self.membership.agent_leaves(incarnation, left_s, self.now_s()))

    def _let_go(self, effects: Sequence[asked.MembershipEffect]) -> None:
        """Asks members to leave, and ends the job if too few would stay."""
        if effects:
            self.carry_out(effects)
            self.leaves_were_asked()
            # Only then: while an effect is held up the machine does not know yet who is to leave.
            self.then(self.stop_if_none_stay)

    def agent_came(self, node: str, incarnation: int, slots: int) -> bool:
        """An agent is ready to start workers; said on every connection.

        Returns:
            Whether it takes part.
        """
        self.carry_out(self.membership.agent_came(node, incarnation, slots, self.now_s()))
        return self.membership.agents.takes_part(incarnation)

    def stop_if_none_stay(self) -> None:
        """Ends the job if too few would stay; also an earlier coordinator may have asked the last to leave."""
        self.carry_out(self.membership.stop_if_none_stay())

    # ------------------------------------------------------------------------------------------------------------- time

    def look(self) -> float:
        """Asks the machines what is due by now; returns when to ask again at the latest, in monotonic time."""
        now_s = self.now_s()
        self.take_suspicions(self.detector.tick(now_s))
        # What holds up most workers at once says nothing about single links and joiners.
        if self.detector.are_together:
            self.unreachable.forget()
            self.membership.all_are_silent(now_s)
        if not self.is_over:
            self.carry_out(self.membership.look_at_hosts(self.detector.awaited, now_s))
        last_heartbeat_s = {
            worker: ago_s for worker in self.membership.spoken if (ago_s := self.last_heartbeat_s(worker)) is not None
        }
        self.carry_out(self.membership.tick(last_heartbeat_s, now_s, self.step_s()))
        return min(self.detector.next_tick_s(now_s), self.membership.next_s)

    # -------------------------------------------------------------------------------------------- what differs

    def then(self, call: Callable[[], object]) -> None:
        """Goes on once all effects are carried out: at once, where none can be held up."""
        call()

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the job has ended: then nothing that befalls a worker counts any more."""

    @abstractmethod
    def tell_agent(self, effect: asked.AgentEffect) -> None:
        """Tells an agent, if it is connected; it says who it is on every connection, and is told again then."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Tells people."""

    @abstractmethod
    def not_admitted(self, worker: int, problem: str) -> None:
        """Tells whoever has asked for a joiner that it does not come, or has ended."""

    @abstractmethod
    def last_heartbeat_s(self, worker: int) -> float | None:
        """Returns the seconds, of those in which the coordinator was awake, since anything has come from a worker;
        None: it is not connected."""

    @abstractmethod
    def step_s(self) -> float:
        """Returns the seconds of a step; 0 if that is not known."""

    @abstractmethod
    def stop_job(self, cause: str) -> None:
        """Asks all workers for the end of the job, with a checkpoint."""

    @abstractmethod
    def give_up_job(self, reason: str) -> None:
        """Ends the job, which cannot begin."""

    def leaves_were_asked(self) -> None:
        """Looks for a layout without those that are to leave."""

    @abstractmethod
    def look_soon(self) -> None:
        """Has `look` called as soon as the turn is over: there is news that cannot wait, and perhaps more of it."""
