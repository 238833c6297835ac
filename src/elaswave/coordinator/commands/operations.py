"""What a person can ask of a running job with `elaswave ctl`: one method for each request. The coordinator's side.

A method decides in its turn and never waits: a reply says what was decided and why, and how to find out what became of
it (`Reply.follow`). What cannot be done now is refused. All requests mean the same when they come twice, since an
operator asks a successor again.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from elaswave.channel.messages.operator import (
    AskCheckpoint,
    AskDrain,
    AskJoin,
    AskKey,
    AskMigrate,
    AskRebalance,
    AskStop,
)
from elaswave.channel.messages.worker import StepReport, TakeCheckpoint
from elaswave.coordinator.commands.asked_checkpoints import CheckpointCommands
from elaswave.coordinator.commands.asked_keys import KeyCommands
from elaswave.coordinator.commands.asked_layouts import LayoutCommands
from elaswave.coordinator.commands.asked_members import MemberCommands
from elaswave.coordinator.commands.job_status import JobParts
from elaswave.coordinator.commands.reply import Reply, refusal
from elaswave.protocol.events import ChangePlanned
from elaswave.protocol.messages import Decision

Action = AskCheckpoint | AskStop | AskRebalance | AskMigrate | AskJoin | AskDrain | AskKey
"""A request that is for something to be done."""


class Operations:
    """What operators can ask of one job.

    Args:
        job: what is known of it.
        send_all: sends a message to workers.
        stop: tells all that the job ends after the step in hand; may be called again.
        begin: begins something beside the coordinator's turns.
        change: has all members change to a planned layout.
        members: lets workers join and leave.
        keys: changes the job's key.
    """

    def __init__(
        self,
        job: JobParts,
        *,
        send_all: Callable[[Iterable[int], TakeCheckpoint], object],
        stop: Callable[[], None],
        begin: Callable[[Coroutine[Any, Any, None]], None],
        change: Callable[[ChangePlanned], None],
        members: MemberCommands,
        keys: KeyCommands,
    ) -> None:
        self._job = job
        self._send_all = send_all
        self._stop = stop
        self._is_stopping = False
        self._moving: list[str] = []
        """How far blocks have come that move for a planned change, in words."""
        self._members, self._keys = members, keys
        self._layouts = LayoutCommands(job, begin, change)
        self._checkpoints = CheckpointCommands(job, lambda message: send_all(job.core.members, message))

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
        self._stop()
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
        """To be called now and then."""
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
            self._send_all([worker], self._checkpoints.published)
