"""How a coordinator looks for the newest durable checkpoint, to which a job goes back, while others may be written."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elaswave.control.background import in_thread
from elaswave.control.checkpoints import Checkpoints
from elaswave.protocol.coordinator import Coordinator
from elaswave.protocol.events import FindCheckpoint
from elaswave.state.checkpoint import find_newest_checkpoint, put_aside
from elaswave.state.checkpoint_format import CheckpointMeta

_log = logging.getLogger(__name__)


class CheckpointFinder:
    """Answers the machine's questions for a checkpoint.

    Args:
        core: the machine.
        checkpoints: of the run.
        run_dir: the run's folder.
        restart_s: seconds that a restart takes, under a policy of restarting.
        begins_at_seed: whether the job could begin again without a checkpoint.
        is_over: whether the job has ended.
        objection: as of `find_newest_checkpoint`.
        answer: takes the step of the checkpoint; None if there is none.
    """

    def __init__(
        self,
        core: Coordinator,
        checkpoints: Checkpoints,
        run_dir: Path,
        *,
        restart_s: float,
        begins_at_seed: bool,
        is_over: Callable[[], bool],
        objection: Callable[[CheckpointMeta], str],
        answer: Callable[[FindCheckpoint, int | None], None],
    ) -> None:
        self._core = core
        self._checkpoints = checkpoints
        self._run_dir = run_dir
        self._restart_s = restart_s
        self._begins_at_seed = begins_at_seed
        self._is_over = is_over
        self._objection = objection
        self._answer = answer

    async def find(self, question: FindCheckpoint) -> None:
        """Looks for the newest checkpoint; under a policy of restarting only when a restart would have got there."""
        restarts = self._core.restarts
        if restarts:
            await asyncio.sleep(self._restart_s)
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
