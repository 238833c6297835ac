"""What a person can ask of a running job with `elaswave ctl`: one method for each request. The coordinator's side.

A method decides in its turn and never waits: a reply says what was decided and why, and how to find out what became of
it (`Reply.follow`). What cannot be done now is refused. All requests mean the same when they come twice, since an
operator asks a successor again.

The change of a job's key that a person asks for: the coordinator's side. When a key counts no more is
`elaswave.protocol.coordinator.key_change`'s; here it is said who takes part, what they are told, and what the person
is.

Workers and agents are told the secrets of those who take part, which are made of the job's keys; the agent of this
host, which starts coordinators, reads the job's new key from its file. A change goes on only while a person asks for
it, who has that file: a key that nobody has must not remain alone.

Layouts that a person asks for: planned in a thread, told to the members as any planned change, followed until the
change is in force or void.

Members that a person wants to join or to leave: asked for once, followed until it has happened or never will.

Checkpoints that a person asks for: from the request to the vote that asks all workers, to the durable files.

The workers are told "a step later than this one", and ask in their votes until one that has asked commits such a step.
So it may be said twice, late, and by a successor, and still makes one checkpoint. Those who ask at the same time get
the same one; while one is being written, the next waits, so that training never waits for the disk because of it.

What was decided about an operator's request so far, as the coordinator's parts say it to each other.
"""

import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from elaswave.channel.messages.operator import (
    AskCheckpoint,
    AskDrain,
    AskJoin,
    AskKey,
    AskMigrate,
    AskRebalance,
    AskStop,
    Decided,
)
from elaswave.channel.messages.worker import KeysNow, StepReport, TakeCheckpoint
from elaswave.channel.server import ControlServer
from elaswave.channel.wire import peer_name, role_of
from elaswave.coordinator.background import Background, in_thread
from elaswave.coordinator.commands.job_status import JobParts
from elaswave.coordinator.planning.run_planner import Request
from elaswave.errors import ConfigError, InfeasiblePlan
from elaswave.job.keys import KeyRole, secrets_for
from elaswave.planning.search.requested_stages import requested_stages
from elaswave.protocol.coordinator.key_change import KeyChange
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.membership.driver import MembersDriver
from elaswave.protocol.messages import Decision, LayoutChange
from elaswave.transport.handshake import Secrets
from elaswave.types import Layout


class Reply(NamedTuple):
    """See `elaswave.channel.messages.operator.Answer`, which it becomes."""

    decided: Decided
    reason: str
    step: int | None = None
    layout: str | None = None
    workers: tuple[int, ...] = ()
    predicted_step_s: float | None = None
    present_step_s: float | None = None
    follow: "Callable[[], Reply | None] | None" = None
    """Asked now and then for the next reply; None: this is the last one."""


def refusal(reason: str) -> Reply:
    """Nothing is done."""
    return Reply("refused", reason)


SHOWN_MAX = 5
"""Of those that are waited for."""


def obstacle_to(store: str, listen: str, *, has_tls: bool) -> str:
    """Tells why the key of a job cannot be changed while it runs; empty: it can.

    Args:
        store: as configured.
        listen: where the coordinator does.
        has_tls: whether connections are encrypted.
    """
    if store != "file":
        return (
            "what this job keeps in etcd is sealed with its key, which therefore stays: end the job (`elaswave ctl RUN "
            "stop`), and start it with another key"
        )
    if not listen.startswith("unix:") and not has_tls:
        return (
            "this job's connections are not encrypted, so that the new key could be read on the way: only a job over "
            "Unix sockets or with net.tls changes its key while it runs"
        )
    return ""


class KeyCommands:
    """The keys of one job, as its coordinator has them.

    Args:
        keys: the job's, with which it is started.
        obstacle: as of `obstacle_to`.
        server: has the connections.
        present: gives all that take part, also those that are not connected just now.
        retired: called when old keys count no more. Connections that stand were made with them: whoever does not take
            part has to connect anew.
    """

    def __init__(
        self,
        keys: Secrets,
        obstacle: str,
        server: ControlServer[Any],
        present: Callable[[], Iterable[int]],
        retired: Callable[[], None],
    ) -> None:
        self._change = KeyChange(*keys)
        self._obstacle = obstacle
        self._server, self._present, self._retired = server, present, retired
        self._problems: dict[int, str] = {}
        """Of participants that cannot take the present keys."""

    def of_peer(self, peer: int) -> Secrets:
        """Returns what a participant of an id must prove one of."""
        return secrets_for(Secrets(self._change.accepted, self._change.retired), role_of(peer))

    @property
    def sent(self) -> tuple[bytes, ...]:
        """What participants are told to go by; none: by what they were given."""
        return self._of_participants.accepted if self._change.was_begun else ()

    @property
    def _of_participants(self) -> Secrets:
        return secrets_for(Secrets(self._change.accepted), KeyRole.JOINING)

    @property
    def under_way(self) -> list[str]:
        """What is not ended, in words."""
        num_keys = len(self._change.accepted)
        if num_keys == 1:
            return []
        return [f"{num_keys} keys of the job are good: `elaswave keys rotate` ends the change{self._waiting()}"]

    def ask(self, key: bytes) -> Reply:
        """Somebody wants another key.

        Args:
            key: the new one.
        """
        problem = self._obstacle or self._change.offer(key)
        if problem:
            return refusal(problem)
        self._tell_all()
        if self._change.accepted == (key,):
            return self._retiring(key)
        text = f"the new key of the job is good too{self._waiting()}; once all have it, the old one is good no more"
        return Reply("offered", text, follow=lambda: self._next(key))

    def _next(self, key: bytes) -> Reply | None:
        if key in self._change.retired:
            return Reply("void", "another change of the key has come before this one to its end")
        if self._problems:
            peer, problem = next(iter(self._problems.items()))
            return Reply("failed", f"{peer_name(peer)} cannot take the new key: {problem}")
        if self._change.retire(key, self._present()):
            self._tell_all()
            self._retired()
            return self._retiring(key)
        if self._change.is_over(key, self._present()):
            return Reply("changed", "the new key is the job's only one, and nobody takes the old one any more")
        return None

    def _retiring(self, key: bytes) -> Reply:
        text = "all have the new key: the old one, and all that were made of it, are refused from now on"
        return Reply("retiring", text, follow=lambda: self._next(key))

    def connected(self, peer: int) -> None:
        """A worker or an agent has connected."""
        self._change.connected(peer)
        self._problems.pop(peer, None)
        if self._change.was_begun:
            self._server.send_all([peer], KeysNow(keys=self.sent))

    def taken(self, peer: int, ring: bytes, problem: str = "") -> None:
        """A participant says by what it goes.

        Args:
            peer: its id.
            ring: the name of its secrets. Of older ones, that it had before it heard of the present ones, it is no
                answer.
            problem: why it cannot; empty: it does.
        """
        if problem:
            self._problems[peer] = problem
        elif ring == self._of_participants.name:
            self._problems.pop(peer, None)
            self._change.has(peer)

    def _tell_all(self) -> None:
        self._problems.clear()
        self._server.send_all(sorted(set(self._present())), KeysNow(keys=self._of_participants.accepted))

    def _waiting(self) -> str:
        names = [peer_name(peer) for peer in self._change.waits_for(self._present())]
        more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
        return f", and {', '.join(names[:SHOWN_MAX])}{more} must still say so" if names else ""


_log = logging.getLogger("elaswave.coordinator")


class LayoutCommands:
    """The changes of layout of one job that were asked for.

    Args:
        job: what is known of it.
        begin: begins something beside the coordinator's turns.
        change: has all members change to a planned layout.
    """

    def __init__(
        self,
        job: JobParts,
        begin: Callable[[Coroutine[Any, Any, None]], None],
        change: Callable[[LayoutChange], None],
    ) -> None:
        self._job = job
        self._begin = begin
        self._change = change
        self._planning = ""
        """What is being planned, in words."""

    @property
    def under_way(self) -> list[str]:
        """In words."""
        change = self._job.core.newest_change
        found = [self._planning] if self._planning else []
        if change is not None and self._job.core.is_changing:
            found.append(f"change {change.number} to {stages_in_words(change.layout)}: {change.reason}")
        return found

    def rebalance(self) -> Reply:
        """Looks for a better layout of the members."""
        if (change := self._outstanding) is not None:
            return self._follow(change)
        if problem := self._problem():
            return refusal(problem)
        look = self._job.planner.look(self._job.core.generation, self._job.core.in_force())
        if isinstance(look, str):
            return refusal(look)
        return self._plan("a better layout is looked for", look)

    def migrate(self, layers: tuple[int, ...] | None, widths: tuple[int, ...] | None) -> Reply:
        """Plans the layout that a person asks for; arguments as of `requested_stages`."""
        core = self._job.core
        try:
            if (change := self._outstanding) is not None:
                asked = requested_stages(core.in_force().layout, layers, widths)
                # Not how many followers they have: the planner decides that for each layout.
                if [(each.start, each.stop, each.workers) for each in asked] == [
                    (each.start, each.stop, each.workers) for each in change.layout.stages
                ]:
                    return self._follow(change)
                return refusal(f"{self.under_way[0]}, is under way: ask again when it is in force")
            if problem := self._problem():
                return refusal(problem)
            plan = self._job.planner.asked(core.generation, core.in_force(), layers, widths)
        except ConfigError as error:
            return refusal("; ".join(error.problems))
        return self._plan("the layout that is asked for is planned", plan)

    @property
    def _outstanding(self) -> LayoutChange | None:
        """The change that is under way."""
        core = self._job.core
        return core.newest_change if core.is_changing and core.state is CoordinatorState.TRAINING else None

    def _follow(self, change: LayoutChange) -> Reply:
        """Follows a change that is under way already: a person asks a second time, or a successor for the first
        time."""
        values = {"layout": change.layout.describe(), "predicted_step_s": change.predicted_step_s}
        return self._answered(change, f"change {change.number} is under way already ({change.reason})", values)

    def _problem(self) -> str:
        """Tells why no change can be planned now; empty if one can."""
        core = self._job.core
        if core.state is not CoordinatorState.TRAINING:
            return f"the job is {core.state.value}: the layout can change when it trains; ask again then"
        return f"{self._planning} already" if self._planning else ""

    def _plan(self, what: str, plan: Request) -> Reply:
        self._planning = what
        outcome: list[Reply] = []
        core = self._job.core
        self._begin(self._planned(plan, core.generation, core.in_force().change, outcome))
        reason = f"{what}, with what was measured so far, while training goes on"
        return Reply("planning", reason, follow=lambda: outcome[0] if outcome else None)

    async def _planned(self, plan: Request, generation: int, number: int, outcome: list[Reply]) -> None:
        """Plans, and has the members of a generation change, if the change in force is still this one. What the journal
        raises then is the coordinator's own."""
        core = self._job.core
        try:
            present_s, found, change = await in_thread(plan)
        except (InfeasiblePlan, ValueError) as error:
            outcome.append(refusal(f"there is no such layout: {error}"))
            return
        except Exception as error:
            _log.exception("planning a layout that a person has asked for has failed")
            outcome.append(refusal(f"planning has failed ({error}); logs/coordinator.log tells more"))
            return
        finally:
            self._planning = ""
        is_free = core.state is CoordinatorState.TRAINING and not core.is_changing
        if not is_free or (core.generation, core.in_force().change) != (generation, number):
            outcome.append(refusal("workers were lost, or the layout has changed, while it was planned: ask again"))
            return
        values: dict[str, Any] = {
            "layout": found.layout.describe(),
            "predicted_step_s": None if present_s is None else found.predicted_step_s,
            "present_step_s": present_s,
        }
        if change is None:
            same = found.layout == core.in_force().layout
            outcome.append(Reply("kept", "it is in force already" if same else found.reason, **values))
            return
        self._change(change)
        newest = core.newest_change
        assert newest is not None
        predicted = ""
        if present_s is not None:
            predicted = f", predicted {found.predicted_step_s:.3g} s per step instead of {present_s:.3g}"
        outcome.append(self._answered(newest, f"{found.reason}: {stages_in_words(found.layout)}{predicted}", values))

    def _answered(self, change: LayoutChange, reason: str, values: dict[str, Any]) -> Reply:
        """The members have been told of a change."""
        reason += "; it is in force when blocks and layers are where it wants them"
        generation, number = change.generation, change.number
        return Reply("planned", reason, follow=lambda: self._until_in_force(generation, number, values), **values)

    def _until_in_force(self, generation: int, number: int, values: dict[str, Any]) -> Reply | None:
        core = self._job.core
        if core.in_force().change >= number:
            records = (record for record in reversed(self._job.state.generations) if record.change == number)
            record = next(records, None)
            step = None if record is None else record.first_step
            stages = stages_in_words(core.in_force().layout)
            return Reply("in force", f"all members have changed to {stages}", step=step, **values)
        if core.generation != generation and core.state is CoordinatorState.TRAINING:
            return Reply(
                "void", f"workers were lost before it was in force; generation {core.generation} goes on without it"
            )
        return None


def stages_in_words(layout: Layout) -> str:
    """Describes the stages of a layout, such as "2+4 layers on 1+2 workers"."""
    layers = "+".join(str(stage.stop - stage.start) for stage in layout.stages)
    workers = "+".join(str(stage.width) for stage in layout.stages)
    return f"{layers} layers on {workers} workers" + (f", {len(layout.idle)} idle" if layout.idle else "")


class MemberCommands:
    """The joins and leaves of one job that were asked for.

    Args:
        job: what is known of it.
        driver: does it.
    """

    def __init__(self, job: JobParts, driver: MembersDriver) -> None:
        self._job = job
        self._driver = driver
        self._refused: dict[int, str] = {}
        """Joiners that were not let in, or have ended before they were members, and why."""
        self._lost: set[int] = set()
        """Members that the others had to go on without, and that were not asked to leave since."""

    @property
    def under_way(self) -> list[str]:
        """Who is on the way in or out, in words."""
        core, joining = self._job.core, self._driver.membership.joining
        leaving = sorted(core.admissions.leaving.intersection(core.members))
        found = [f"{_named(joining)} to join"] if joining else []
        return [*found, *([f"{_named(leaving)} to leave"] if leaving else [])]

    def join(self, count: int, request: int) -> Reply:
        """Takes in new workers.

        Args:
            count: how many.
            request: its number.
        """
        started = self._driver.request_join(count, request)
        if isinstance(started, str):
            return refusal(started)
        workers = tuple(started)
        reason = "the process starts, links are made and state is copied while training goes on"
        return Reply("joining", f"{_named(workers)}: {reason}", workers=workers, follow=partial(self._joined, workers))

    def _joined(self, workers: Sequence[int]) -> Reply | None:
        members = self._job.core.members
        for worker in set(workers).difference(members):
            if not self._driver.membership.is_joiner(worker):
                gone = "was lost" if worker in self._lost else "is none any more"
                return Reply("failed", f"worker {worker} had become a member, and {gone} before all had joined")
            if worker in self._refused:
                return Reply("failed", f"worker {worker} is not admitted: {self._refused[worker]}")
        if not set(workers) <= set(members):
            return None
        verb = "is a member" if len(workers) == 1 else "are members"
        return Reply("joined", f"{_named(workers)} {verb} since generation {self._job.core.generation} at the latest")

    def drain(self, worker: int, deadline_s: float | None, *, begun: bool = False) -> Reply:
        """Lets a worker go.

        Args:
            worker: its id.
            deadline_s: after which it is lost; None: as configured.
            begun: whether an earlier coordinator was asked for it.
        """
        core, elastic = self._job.core, self._job.config.elastic
        if begun and (gone := self._drained(worker)) is not None:
            return gone
        if worker not in core.members:
            return refusal(f"worker {worker} is no member; the members are {', '.join(map(str, core.members))}")
        going = core.admissions.leaving.intersection(core.members) - {worker}
        if len(core.members) - len(going) <= max(1, elastic.min_workers):
            others = f", of which {len(going)} are to leave already," if going else ""
            return refusal(
                f"the job has {len(core.members)} members{others} and needs {max(1, elastic.min_workers)}: `elaswave "
                "ctl RUN stop` ends it with a checkpoint"
            )
        self._lost.discard(worker)
        self._driver.request_drain(worker, deadline_s)
        within_s = elastic.drain_deadline_s if deadline_s is None else deadline_s
        reason = f"worker {worker} leaves when others hold what it holds, and is lost after {within_s:g} s otherwise"
        return Reply("draining", reason, workers=(worker,), follow=lambda: self._drained(worker))

    def _drained(self, worker: int) -> Reply | None:
        core = self._job.core
        if worker in core.members:
            return None
        if worker in self._lost:
            return Reply(
                "failed", f"worker {worker} was lost before it could leave; generation {core.generation} goes on"
            )
        return Reply("drained", f"worker {worker} is no member of generation {core.generation}; no step was done twice")

    # --------------------------------------------------------------------------------------------------- what happens

    def refused(self, worker: int, problem: str) -> None:
        """A joiner is not let in, or has ended before it was a member; what is said first is why."""
        self._refused.setdefault(worker, problem)

    def lost(self, workers: Iterable[int]) -> None:
        """The members go on without these, which have not left by themselves."""
        self._lost.update(workers)


def _named(workers: Collection[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"


class CommittedStep(NamedTuple):
    """A committed step. Of two places the later one is the larger, also after a return to a checkpoint."""

    generation: int
    step: int


class CheckpointCommands:
    """The checkpoints of one job that were asked for.

    Args:
        job: what is known of it.
        tell: sends a message to all members.
    """

    def __init__(self, job: JobParts, tell: Callable[[TakeCheckpoint], object]) -> None:
        self._job = job
        self._tell = tell
        self._at = CommittedStep(job.core.generation, job.state.last_step)
        """The newest committed step that is known."""
        self._taken = CommittedStep(0, 0)
        """The newest one whose vote has asked for a checkpoint, as far as this coordinator has heard."""
        self._is_wanted = False
        """Whether the workers are still to be told, once the one before is written."""
        self._published: TakeCheckpoint | None = None
        """What they have been told, until a vote has answered it."""
        self._back = CommittedStep(0, 0)
        """The newest return to a checkpoint: what was committed in older generations, of later steps, is void."""

    @property
    def under_way(self) -> list[str]:
        """In words."""
        if self._published is not None:
            return [f"a checkpoint of a step after step {self._published.after} is asked for"]
        return ["a checkpoint is asked for; the one before it is still being written"] if self._is_wanted else []

    def ask(self, *, wait: bool) -> Reply:
        """Somebody wants one.

        Args:
            wait: whether the last reply is to come when it is durable.
        """
        asked_at = self._at
        self._is_wanted = True
        self.turn()
        when = "as soon as the checkpoint before it is written" if self._is_wanted else "in their next votes"
        reason = f"the newest committed step is {asked_at.step}; the workers ask for a checkpoint {when}"
        return Reply("asked", reason, follow=lambda: self._until_taken(asked_at, wait=wait))

    def _until_taken(self, asked_at: CommittedStep, *, wait: bool) -> Reply | None:
        taken = self._taken
        if taken <= asked_at:
            return None
        reason = f"the vote of step {taken.step} has asked all workers for it; they write it while training goes on"
        follow = (lambda: self._until_settled(taken)) if wait else None
        return Reply("taken", reason, step=taken.step, follow=follow)

    def _until_settled(self, taken: CommittedStep) -> Reply | None:
        step, checkpoints = taken.step, self._job.checkpoints
        if self._is_void(taken):
            return Reply("failed", f"the job has gone back to the checkpoint of step {self._back.step}", step=step)
        if not checkpoints.is_settled(step):
            return None
        record = next((each for each in checkpoints.records if each.step == step), None)
        if record is None:
            return Reply(
                "failed", f"the checkpoint of step {step} was given up, the job's terminal says why", step=step
            )
        return Reply("written", f"{record.path} is durable", step=step)

    def _is_void(self, place: CommittedStep) -> bool:
        return place.generation < self._back.generation and place.step > self._back.step

    # --------------------------------------------------------------------------------------------- what happens

    def turn(self) -> None:
        """Tells the workers what is wanted, unless a checkpoint is still being written."""
        taken = self._taken
        is_writing = taken.step > 0 and not self._is_void(taken) and not self._job.checkpoints.is_settled(taken.step)
        if self._is_wanted and not is_writing:
            self._is_wanted = False
            self._published = TakeCheckpoint(generation=self._at.generation, after=self._at.step)
            self._tell(self._published)

    def committed(self, report: StepReport) -> None:
        """A member reports a step; may be said again."""
        place = CommittedStep(report.generation, report.step)
        self._at = max(self._at, place)
        if report.checkpoint == report.step and place > self._taken:
            self._taken = place
            if self._published is not None and place > CommittedStep(self._published.generation, self._published.after):
                self._published = None

    def decided(self, decision: Decision) -> None:
        """Survivors go on: what was told may have reached only those who are gone."""
        if decision.rollback is not None:
            self._at = self._back = CommittedStep(decision.generation, decision.rollback)
        if self._published is not None:
            self._published = None
            self._is_wanted = True
            self.turn()

    @property
    def published(self) -> TakeCheckpoint | None:
        """What a worker is told that has connected again."""
        return self._published


Action = AskCheckpoint | AskStop | AskRebalance | AskMigrate | AskJoin | AskDrain | AskKey
"""A request that is for something to be done."""


class Operations:
    """What operators can ask of one job.

    Args:
        job: what is known of it.
        driver: does what is asked for.
        server: has the connections.
        background: where layouts are planned.
        keys: changes the job's key.
    """

    def __init__(
        self,
        job: JobParts,
        driver: MembersDriver,
        server: ControlServer[Any],
        background: Background,
        keys: KeyCommands,
    ) -> None:
        self._job = job
        self._driver = driver
        self._server = server
        self._is_stopping = False
        self._moving: list[str] = []
        """How far blocks have come that move for a planned change, in words."""
        self._members, self._keys = MemberCommands(job, driver), keys
        self._layouts = LayoutCommands(job, background.begin, driver.feed)
        self._checkpoints = CheckpointCommands(job, lambda message: server.send_all(job.core.members, message))

    def reply_to(self, request: Action) -> Reply:
        """Decides about a request."""
        if isinstance(request, AskStop):
            return self.request_stop()
        if self._is_stopping:
            return refusal("the job ends after the step in hand, with a checkpoint of it")
        if isinstance(request, AskCheckpoint):
            return self.request_checkpoint(wait=request.wait)
        if isinstance(request, AskJoin):
            return self.request_join(request.num_workers, request.request)
        if isinstance(request, AskDrain):
            return self.request_drain(request.worker, request.deadline_s, begun=request.begun)
        if isinstance(request, AskMigrate):
            return self.request_migrate(request.layers, request.widths)
        if isinstance(request, AskKey):
            return self._keys.ask(request.key)
        return self.request_rebalance()

    # -------------------------------------------------------------------------------------------------- the requests

    def request_stop(self) -> Reply:
        """Ends the job after the step in hand, with a checkpoint of it."""
        was_stopping, self._is_stopping = self._is_stopping, True
        self._driver.stop_job("elaswave ctl stop")
        newest = self._job.state.last_step
        if was_stopping:
            return Reply("stopping", "the workers have been told already", step=newest)
        return Reply("stopping", f"step {newest} is committed; the step in hand is the last, and is checkpointed")

    def request_checkpoint(self, *, wait: bool) -> Reply:
        """Has a durable checkpoint written.

        Args:
            wait: whether the last reply is to come when it is durable; else when a vote has asked for it.
        """
        num_steps = self._job.config.run.steps
        if self._job.state.last_step >= num_steps:
            return refusal(f"all {num_steps} steps are made, and the last one is checkpointed anyway")
        return self._checkpoints.ask(wait=wait)

    def request_join(self, num_workers: int, request: int) -> Reply:
        """Takes in new workers.

        Args:
            num_workers: how many.
            request: its number; one that comes again is followed only.
        """
        return self._members.join(num_workers, request)

    def request_drain(self, worker: int, deadline_s: float | None, *, begun: bool = False) -> Reply:
        """Lets a worker go at a step boundary.

        Args:
            worker: its id.
            deadline_s: after which it is lost like any other; None: as configured.
            begun: whether an earlier coordinator was asked for it.
        """
        return self._members.drain(worker, deadline_s, begun=begun)

    def request_migrate(self, layers: tuple[int, ...] | None, widths: tuple[int, ...] | None) -> Reply:
        """Changes to a layout.

        Args:
            layers: number of layers of each stage; None: as they are.
            widths: number of workers of each stage; None: as they are.
        """
        return self._layouts.migrate(layers, widths)

    def request_rebalance(self) -> Reply:
        """Looks for a better layout of the members, and changes to it."""
        return self._layouts.rebalance()

    # --------------------------------------------------------------------------------------------------- what happens

    @property
    def under_way(self) -> list[str]:
        """What is asked for or planned and not done yet, in words."""
        stopping = ["the job ends after the step in hand, with a checkpoint of it"] if self._is_stopping else []
        members = [] if self._is_stopping else self._members.under_way
        training = [*self._layouts.under_way, *self._moving, *self._checkpoints.under_way]
        return [*stopping, *members, *training, *self._keys.under_way]

    def turn(self) -> None:
        """Takes a turn; is to be called now and then."""
        self._checkpoints.turn()

    def stopping(self) -> None:
        """The workers are told to end, by whomever."""
        self._is_stopping = True

    def committed(self, report: StepReport) -> None:
        """A member reports a step; may be said again."""
        self._moving = (
            [f"blocks move: {report.num_in_place} of {report.num_moving} copies are in their places"]
            if report.num_moving
            else []
        )
        self._checkpoints.committed(report)

    def decided(self, decision: Decision) -> None:
        """Survivors go on with a decision."""
        self._checkpoints.decided(decision)

    def not_admitted(self, worker: int, problem: str) -> None:
        """A joiner is not let in, or its process has ended."""
        self._members.refused(worker, problem)

    def lost(self, workers: Iterable[int]) -> None:
        """The members go on without these, which have not left as they were asked to."""
        self._members.lost(workers)

    def registered(self, worker: int) -> None:
        """A member has connected: what was told may have been lost with its connection."""
        if self._checkpoints.published is not None:
            self._server.send_all([worker], self._checkpoints.published)
