"""The durable checkpoints of a job: collects what workers have written, has committed what is complete, prunes.

Which parts make a checkpoint complete, and when one is given up, `protocol.shards` decides. A commit needs torch, for
DCP's index, so another process makes it and its answer comes later; one at a time. What is lost with such a process is
tried once more. Nothing that goes wrong with a checkpoint ends a job.

While a committer may be at work in a folder, nothing is removed there: a checkpoint that gets its final name is whole.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from elaswave.channel.messages.agent import BreakOffCommit, CommitCheckpoint
from elaswave.channel.messages.worker import ShardFailed, ShardWritten, TrainingStanding
from elaswave.channel.wire import MAX_MESSAGE_BYTES
from elaswave.checkpoints.checkpoint import (
    discard_checkpoint,
    find_newest_checkpoint,
    folder_there,
    places,
    prune,
    put_aside,
    shard_name,
    temporary_folder,
)
from elaswave.checkpoints.format import SHARD_SUFFIX, CheckpointMeta, CommitRequest, WrittenItem
from elaswave.config.schema import Config
from elaswave.coordinator.background import in_thread
from elaswave.coordinator.records.terminal import Terminal
from elaswave.errors import CheckpointError
from elaswave.job.plan import RunPlan
from elaswave.observability.result import CheckpointRecord
from elaswave.observability.run_folder import differences_on_resume
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.shards import Complete, GivenUp, Shards
from elaswave.protocol.events import FindCheckpoint
from elaswave.protocol.messages import Decision

COMMIT_S_MAX = 600.0
"""A commit that has not been answered after so long is broken off."""
BREAK_OFF_S_MAX = 30.0
"""If after so much more it is not known to have ended (its disk is gone, so that it cannot be killed), the job goes on
without knowing."""
COMMIT_TRIES = 2
PATIENCE_S, RETRY_S = 60.0, 1.0
"""How long a commit of the run's last checkpoint is tried again, since what it does not hold is lost; and how often."""
REQUEST_BYTES_MAX = MAX_MESSAGE_BYTES - 1024
"""Of what describes a checkpoint; some 250 bytes for each of its pieces."""

_TOO_SLOW = f"its commit has not ended within {COMMIT_S_MAX:.0f} s; is the disk too slow, or gone?"

_Key = tuple[str, tuple[int, ...]]
"""Tensor and first index of a piece: the same for the same piece, whichever worker has written it."""

_log = logging.getLogger("elaswave.coordinator")


class _Commit(NamedTuple):
    """A checkpoint that is complete and waits to be committed, or for the answer."""

    number: int
    step: int
    request: bytes
    num_bytes: int
    began_s: float
    tries: int = 1


class RecordsCheckpoints(Protocol):
    """Of a run's recorder what is needed here."""

    def describe(self, standing: TrainingStanding) -> CheckpointMeta | None:
        """Describes the run at the step of a standing, for the checkpoint's description; None while the losses up to it
        are not all known."""

    def committed_s(self, step: int) -> float | None:
        """Returns the monotonic time at which a step was done, if that is known."""

    def checkpoint_written(self, record: CheckpointRecord) -> None:
        """A checkpoint is durable."""

    def checkpoint_given_up(self, step: int, worker: int | None, reason: str) -> None:
        """A step's checkpoint never will be, because of a worker, or of none."""


class Checkpoints:
    """The checkpoints of one job.

    Args:
        plan: of the run.
        run_dir: its folder.
        recorder: of the run.
        terminal: what is shown.
        tell_committer: sends a message to the agent that commits; `committed` takes the answer.
    """

    def __init__(
        self,
        plan: RunPlan,
        run_dir: Path,
        recorder: RecordsCheckpoints,
        terminal: Terminal,
        tell_committer: Callable[[CommitCheckpoint | BreakOffCommit], None],
    ) -> None:
        self.records: list[CheckpointRecord] = []
        """Those that are durable and have not been pruned, in the order in which they were made."""
        self._run_dir = run_dir
        self._keep = plan.config.run.keep_checkpoints
        self._last_step = plan.config.run.steps
        self.given_up: dict[int, str] = {}
        """Why a step's checkpoint was given up."""
        self._recorder, self._terminal, self._tell_committer = recorder, terminal, tell_committer
        self._state = plan.state
        self._sizes: dict[int, int] = {}
        self._shards: Shards[_Key, WrittenItem] = Shards(self._size, _num_elements, plan.layout.workers)
        self._standings: dict[int, TrainingStanding] = {}
        """Of steps whose checkpoints are being written."""
        self._commits: deque[_Commit] = deque()
        """The first one has been asked for."""
        # Not repeated by the next coordinator: what has been answered to one says nothing to another.
        self._numbers = itertools.count(time.monotonic_ns())
        self._asked_s = 0.0
        self._again_s: float | None = None
        """When the first commit is to be asked for again, after it could not be made."""
        self._sent_again: set[int] = set()
        """Steps of which people were told that their checkpoint is tried again."""
        self._is_breaking_off = False
        """Whether the first commit takes too long, and its end has been asked for."""
        self._abandoned: set[int] = set()
        """Steps in whose folders a committer may still be at work that was given up."""

    def _size(self, step: int) -> int:
        """Counts the elements of a checkpoint of which a part is written."""
        num_updates = min(1, self._standings[step].num_updates)  # the first one makes the only difference
        if num_updates not in self._sizes:
            self._sizes[num_updates] = sum(math.prod(each.shape) for each in self._state.stored(num_updates))
        return self._sizes[num_updates]

    def restore(self, record: CheckpointRecord) -> None:
        """Takes over a checkpoint that an earlier coordinator has made durable, and perhaps pruned since."""
        if (self._run_dir / record.path).is_dir():
            self.records.append(record)
        self._shards.settle(record.step)

    def restore_given_up(self, step: int) -> None:
        """Takes over that an earlier coordinator has given one up."""
        self._shards.settle(step)

    def restore_decision(self, decision: Decision) -> None:
        """Takes over a decision of an earlier coordinator. Files that it has made void are gone already."""
        self._shards.follow(decision)
        self._drop_records(decision)

    def is_settled(self, step: int) -> bool:
        """Tells whether a step's checkpoint is durable or given up."""
        return self._shards.is_settled(step)

    @property
    def is_committing(self) -> bool:
        """Whether an answer to a commit is waited for."""
        return self._shards.num_committing > 0

    @property
    def unsettled(self) -> list[int]:
        """Steps of checkpoints that are being written or committed, ascending."""
        return sorted({*self._shards.pending, *(commit.step for commit in self._commits)})

    def hold(self) -> None:
        """The newest checkpoint has been found that the job may go back to; see `Shards.hold`."""
        assert not self.is_committing
        self._shards.hold()

    def part(self, message: ShardWritten | ShardFailed) -> None:
        """Handles a worker's part of a checkpoint; may be said again."""
        if isinstance(message, ShardFailed) and message.again:
            self._say_again(message.step, message.reason, PATIENCE_S)
            return
        step = message.step if isinstance(message, ShardFailed) else message.standing.step
        generation = message.generation if isinstance(message, ShardFailed) else message.standing.generation
        if self._shards.is_committing(step):
            return  # all that is needed of it is there
        if self._shards.is_settled(step):
            # It was to be written again when a part that was still under way completed it.
            self._discard(step)
            return
        if self._shards.is_void(step, generation):
            return
        if isinstance(message, ShardFailed):
            self._take(self._shards.failed(message.step, message.generation, message.worker, message.reason))
            return
        standing = message.standing
        own = f"{shard_name(message.worker, generation)}{SHARD_SUFFIX}"
        if others := {item.relative_path for item in message.items} - {own}:
            _log.warning("worker %d says that it has written %s, and not %s", message.worker, min(others), own)
            return
        pieces = {(item.fqn, item.offsets): item for item in message.items}
        num_bytes = max((item.offset + item.length for item in message.items), default=0)
        self._standings.setdefault(standing.step, standing)
        self._take(self._shards.written(standing.step, standing.generation, message.worker, pieces, num_bytes))

    def decided(self, decision: Decision) -> None:
        """Survivors go on with a decision: some parts will never come, or are void."""
        before = self._shards.pending
        found = self._shards.follow(decision)
        self._drop_records(decision)
        for step in set(before) - set(self._shards.pending):
            self._discard(step)
        for each in found:
            self._take(each)

    def _drop_records(self, decision: Decision) -> None:
        # A later one that is on the disk is damaged, or the job would not have gone back behind it.
        if decision.rollback is not None:
            self.records = [record for record in self.records if record.step <= decision.rollback]

    def published(self) -> None:
        """More losses are known: commits what has waited for them."""
        for step in self._shards.pending:
            self._take(self._shards.judge(step))

    def end(self) -> None:
        """All members have made their last step and said what became of their parts."""
        for each in self._shards.end():
            self._take(each)

    def _take(self, found: Complete[_Key, WrittenItem] | GivenUp | None) -> None:
        if isinstance(found, GivenUp):
            self._give_up(found.step, found.worker, found.reason)
        elif found is not None:
            meta = self._recorder.describe(self._standings[found.step])
            if meta is not None:
                self._commit(found, meta)

    def _commit(self, complete: Complete[_Key, WrittenItem], meta: CheckpointMeta) -> None:
        step, items = complete.step, list(complete.pieces.values())
        sizes = {f"{shard_name(*part)}{SHARD_SUFFIX}": num_bytes for part, num_bytes in complete.files.items()}
        folders = [str(temporary_folder(self._run_dir, step, place)) for place in places(self._run_dir)]
        request = msgspec.msgpack.encode(CommitRequest(folders=folders, items=items, meta=meta, sizes=sizes))
        if len(request) > REQUEST_BYTES_MAX:
            what = f"its description of {len(items)} pieces has {len(request)} bytes"
            self._give_up(step, None, f"{what}, and at most {REQUEST_BYTES_MAX} can be sent; use larger blocks")
            return
        self._shards.commit(step)
        num_bytes = sum(item.length for item in items)
        self._commits.append(_Commit(next(self._numbers), step, request, num_bytes, time.monotonic()))
        if len(self._commits) == 1:
            self._ask_first()

    def _ask_first(self) -> None:
        """Asks for the next commit, if there is one."""
        if self._commits:
            self._asked_s = time.monotonic()
            self._ask_for(self._commits[0])

    def _ask_for(self, commit: _Commit) -> None:
        self._tell_committer(CommitCheckpoint(number=commit.number, request=commit.request))

    def _break_off(self, commit: _Commit) -> None:
        self._tell_committer(BreakOffCommit(number=commit.number))

    def ask_again(self) -> None:
        """Repeats what has been asked for and not answered: question or answer may have been lost on the way."""
        if self._commits and self._again_s is None:
            self._ask_for(self._commits[0])
            if self._is_breaking_off:
                self._break_off(self._commits[0])

    def tick(self, now_s: float) -> bool:
        """Breaks off a commit whose answer does not come, and gives it up if it cannot be broken off.

        Returns:
            Whether it has given one up.
        """
        if self._again_s is not None:
            if now_s >= self._again_s:
                self._again_s = None
                self._ask_first()
            return False
        late_s = now_s - self._asked_s - COMMIT_S_MAX
        if not self._commits or late_s <= 0.0:
            return False
        if not self._is_breaking_off:
            self._is_breaking_off = True
            self._break_off(self._commits[0])
        if late_s <= BREAK_OFF_S_MAX:
            return False
        self._abandoned.add(self._commits[0].step)
        self.committed(self._commits[0].number, _TOO_SLOW, again=False)
        return True

    def committed(self, number: int, error: str | None, *, again: bool) -> None:
        """Takes the answer to a commit; may come twice.

        Args:
            number: of the request.
            error: why there is no checkpoint; None if it is durable.
            again: whether another try may end better.
        """
        if not self._commits or self._commits[0].number != number or self._again_s is not None:
            return
        commit, is_late, self._is_breaking_off = self._commits.popleft(), self._is_breaking_off, False
        if error is None:
            self._on_durable(commit)
        elif again and not is_late and commit.tries < COMMIT_TRIES:
            self._commits.appendleft(commit._replace(number=next(self._numbers), tries=commit.tries + 1))
        elif not is_late and self._may_try_again(commit):
            self._commits.appendleft(commit._replace(number=next(self._numbers)))
            self._again_s = time.monotonic() + RETRY_S
            self._say_again(commit.step, error, PATIENCE_S)
            return
        else:
            self._give_up(commit.step, None, _TOO_SLOW if is_late else error)
        self._ask_first()

    def _may_try_again(self, commit: _Commit) -> bool:
        return commit.step == self._last_step and time.monotonic() < commit.began_s + PATIENCE_S

    def _say_again(self, step: int, reason: str, patience_s: float) -> None:
        if step not in self._sent_again:
            self._sent_again.add(step)
            self._terminal.say(
                f"the last checkpoint, of step {step}, cannot be written and is tried again for {patience_s:g} s: "
                f"{reason}; free space, or the trained weights are lost"
            )

    def _on_durable(self, commit: _Commit) -> None:
        self._settle(commit.step)
        self._abandoned.discard(commit.step)
        self._discard(commit.step)  # what survivors of a loss have written once more meanwhile
        now_s = time.monotonic()
        record = CheckpointRecord(
            step=commit.step,
            path=str(folder_there(self._run_dir, commit.step).relative_to(self._run_dir)),
            num_bytes=commit.num_bytes,
            duration_s=max(0.0, now_s - (self._recorder.committed_s(commit.step) or now_s)),
        )
        self.records.append(record)
        self._recorder.checkpoint_written(record)
        try:
            pruned = prune(self._run_dir, self._keep)
        except CheckpointError as error:
            self._terminal.say(f"an old checkpoint stays, training goes on: {error}")
            return
        removed = {str(folder.relative_to(self._run_dir)) for folder in pruned}
        self.records = [kept for kept in self.records if kept.path not in removed]

    def _give_up(self, step: int, worker: int | None, reason: str) -> None:
        self._settle(step)
        self._discard(step)
        self.given_up[step] = reason
        self._recorder.checkpoint_given_up(step, worker, reason)

    def _settle(self, step: int) -> None:
        self._shards.settle(step)
        self._standings.pop(step, None)

    def _discard(self, step: int) -> None:
        self._standings.pop(step, None)
        if step not in self._abandoned:
            for place in places(self._run_dir):
                discard_checkpoint(temporary_folder(self._run_dir, step, place))


def _num_elements(item: WrittenItem) -> int:
    return math.prod(item.sizes)


class CheckpointFinder:
    """Looks for the newest durable checkpoint, to which a job goes back, while others may be written.

    Args:
        core: the machine.
        checkpoints: of the run.
        config: of the run, with which a checkpoint must agree.
        run_dir: the run's folder.
        begins_at_seed: whether the job could begin again without a checkpoint.
        is_over: whether the job has ended.
        answer: takes the step of the checkpoint; None if there is none.
    """

    def __init__(
        self,
        core: Coordinator,
        checkpoints: Checkpoints,
        config: Config,
        run_dir: Path,
        *,
        begins_at_seed: bool,
        is_over: Callable[[], bool],
        answer: Callable[[FindCheckpoint, int | None], None],
    ) -> None:
        self._core = core
        self._checkpoints = checkpoints
        self._run_dir = run_dir
        self._config = config
        self._begins_at_seed = begins_at_seed
        self._is_over = is_over
        self._answer = answer

    def _objection(self, meta: CheckpointMeta) -> str:
        return "; ".join(differences_on_resume(meta.config, self._config))

    async def find(self, question: FindCheckpoint) -> None:
        """Looks for the newest checkpoint; under a policy of restarting only when a restart would have got there."""
        restarts = self._core.restarts
        if restarts:
            await asyncio.sleep(self._config.elastic.restart_s)
        checkpoints = self._checkpoints
        known: object = None
        while known != checkpoints.records or checkpoints.is_committing:  # a newer one may be completed meanwhile
            while checkpoints.is_committing:
                await asyncio.sleep(0.01)
            known = list(checkpoints.records)
            find = partial(find_newest_checkpoint, self._run_dir, self._objection, question.newest)
            try:
                search = await in_thread(find)
            except RuntimeError:  # the system has no room for a thread
                search = find()
            if not self._core.awaits(question) or self._is_over():
                return  # another search follows, or none; what this one has found damaged may have been replaced since
        checkpoints.hold()
        for skipped in search.skipped:
            _log.warning("checkpoint %s is not used: %s", skipped.folder.name, skipped.reason)
        put_aside(search)
        newest = search.newest
        step = None if newest is None else newest.step
        if step is None and restarts and self._begins_at_seed:
            step = 0  # from the seed, as a job without a checkpoint begins again
        self._answer(question, step)
