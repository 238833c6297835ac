"""The end of a job, as a coordinator has it: written down once, and told to all that take part."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from elaswave.channel.messages.agent import Ended
from elaswave.channel.messages.worker import Exit
from elaswave.channel.server import ControlServer
from elaswave.channel.wire import is_agent, is_operator
from elaswave.coordinator.records.recorder import RunRecorder
from elaswave.coordinator.records.terminal import Terminal
from elaswave.errors import RunFolderError
from elaswave.observability.result import write_digests, write_result
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.membership.membership import Membership


class JobEnd:
    """Whether a job is over, how it has ended, and who has heard of it.

    Args:
        core: the machine.
        membership: nobody is started any more after the end.
        recorder: of the run.
        terminal: what is shown.
        server: has the connections.
        first_workers: of the job.
        home: the agent of this coordinator's host, on control connections.
        tell_operators: called with outcome and reason.
    """

    def __init__(
        self,
        core: Coordinator,
        membership: Membership,
        recorder: RunRecorder,
        terminal: Terminal,
        server: ControlServer[Any],
        *,
        first_workers: tuple[int, ...],
        home: int,
        tell_operators: Callable[[str, str], None],
    ) -> None:
        self.event = asyncio.Event()
        """Set once the job is over."""
        self._ended: Ended | None = None
        self._core = core
        self._first_workers = first_workers
        self._home = home
        self._membership = membership
        self._recorder = recorder
        self._terminal = terminal
        self._server = server
        self._tell_operators = tell_operators
        self._informed: set[int] = set()
        """Who has been told of the end, or has ended itself."""

    @property
    def is_there(self) -> bool:
        """Whether the job is over."""
        return self._ended is not None

    def finish(self, run_dir: Path, last_words: Callable[[], list[str]]) -> None:
        """All steps are made, or a stop was asked for: writes the result, and ends the job.

        Args:
            run_dir: the run's folder.
            last_words: lines for the terminal after a result is written.
        """
        state = self._recorder.state
        if state.was_stopped:
            self.come(Ended(outcome="stopped", reason=f"stopped after step {state.last_step}"))
            return
        result, digests = self._recorder.result()
        lost = self._recorder.lost_weights(result.steps)
        if lost:  # without them there is no result that a restart, or a person, should take for the run's end
            self.come(Ended(outcome="failed", reason=lost + self._recorder.advice()))
            return
        try:
            write_digests(run_dir, digests)
            write_result(run_dir, result)
        except RunFolderError as error:
            what = f"all {result.steps} steps are trained, but their result cannot be written: {error}"
            self.come(Ended(outcome="failed", reason=what + self._recorder.advice()))
            return
        for line in last_words():
            self._terminal.say(line)
        self.come(Ended(outcome="finished"))

    def come(self, ended: Ended, *, write: bool = True) -> None:
        """The job is over: all processes may end.

        Args:
            ended: how; who is lost is filled in.
            write: also into the run's records.
        """
        if self._ended is not None:
            return
        self._membership.stop()
        lost_workers = sorted({*self._first_workers, *self._membership.joiners.started} - set(self._core.members))
        self._ended = msgspec.structs.replace(ended, lost=lost_workers)
        if write:
            outcome: Literal["finished", "failed", "interrupted"] = "failed"
            if ended.outcome == "finished":
                outcome = "finished"
            elif ended.outcome == "stopped":
                outcome = "interrupted"
            else:
                self._recorder.error(ended.reason, ended.worker, ended.traceback_text)
            self._recorder.close(outcome, ended.reason)
        self._tell_operators(ended.outcome, ended.reason)
        for peer in self._server.peers:
            if not is_operator(peer):
                self.tell(peer)
        self.event.set()

    def tell(self, peer: int) -> None:
        """Tells an agent, or a worker, if the job is over."""
        if self._ended is not None:
            self._server.send(peer, self._ended if is_agent(peer) else Exit())
            self._informed.add(peer)

    def is_known(self) -> bool:
        """Tells whether all have heard of the end and are gone. A new coordinator may first have to be found by
        them."""
        return all(map(is_operator, self._server.peers)) and self._informed >= {self._home, *self._core.members}
