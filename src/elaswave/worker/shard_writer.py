"""Writes a worker's part of durable checkpoints in a background thread, from copies, one at a time."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from elaswave.channel.messages.worker import ShardFailed, ShardWritten, TrainingStanding
from elaswave.checkpoints.checkpoint import places, shard_folder, shard_name, temporary_folder
from elaswave.checkpoints.format import SHARD_SUFFIX
from elaswave.checkpoints.shards import Piece, write_shard
from elaswave.engine.blueprint import frozen_pieces, owned_pieces
from elaswave.engine.torch_engine import TorchEngine
from elaswave.errors import CheckpointError, WaitTimeoutError
from elaswave.state.flat import BlockStore, Scalars
from elaswave.worker.control import ControlOutbox

WRITE_TIMEOUT_S = 1800.0
"""Bound of waiting for one shard's writing."""
PATIENCE_S = 60.0
"""How long the last checkpoint of a run is tried again: what it does not hold is lost."""
RETRY_S = 1.0
"""Between two tries."""
TURN_S = 0.05
"""How long the worker waits for the writing before it looks whether something else has happened."""


class ShardWriter:
    """The background writer of one worker.

    Args:
        worker: its id, which names its files.
        run_dir: the run's folder.
        report: sends a message to the coordinator; called from the background thread.
    """

    def __init__(self, worker: int, run_dir: Path, report: Callable[[ShardWritten | ShardFailed], object]) -> None:
        self._worker = worker
        self._run_dir = run_dir
        self._report = report
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a shard is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        store: BlockStore,
        standing: TrainingStanding,
        scalars: Scalars = (),
        fixed: Iterable[Piece] = (),
        patience_s: float = 0.0,
    ) -> None:
        """Copies the owned blocks and begins to write them; the shard before this one must be written.

        Args:
            store: with the owned blocks.
            standing: where training stands.
            scalars: the optimizer's states that tensors have once.
            fixed: further pieces, whose values do not change.
            patience_s: how long it is tried again where the disk does not take it.
        """
        assert not self.is_busy
        pieces = [*owned_pieces(store, scalars), *fixed]
        thread = threading.Thread(
            target=lambda: self._write_for(patience_s, standing, pieces), name="checkpoint", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system has no room for a thread
            if patience_s:
                self._write_for(0.0, standing, pieces)  # nothing is trained any more that it could keep waiting
            else:
                self._report(self._failed(standing, f"its thread cannot be started ({error}); raise the limit of pids"))
            return
        self._thread = thread

    def _write_for(self, patience_s: float, standing: TrainingStanding, pieces: list[Piece]) -> None:
        """Writes and reports; tries again for so long."""
        deadline_s = time.monotonic() + patience_s
        has_said = False
        while isinstance(message := self._write(standing, pieces), ShardFailed) and time.monotonic() < deadline_s:
            if not has_said:
                self._report(msgspec.structs.replace(message, again=True))
                has_said = True
            time.sleep(RETRY_S)
        self._report(message)

    def _write(self, standing: TrainingStanding, pieces: list[Piece]) -> ShardWritten | ShardFailed:
        """Writes to the first place that takes it."""
        name, troubles = shard_name(self._worker, standing.generation), []
        for place in places(self._run_dir):
            try:
                folder = shard_folder(self._run_dir, standing.step, place)
                return ShardWritten(worker=self._worker, standing=standing, items=write_shard(folder, name, pieces))
            except (CheckpointError, OSError) as error:
                troubles.append(str(error))
                with contextlib.suppress(OSError):
                    (temporary_folder(self._run_dir, standing.step, place) / f"{name}{SHARD_SUFFIX}").unlink()
        return self._failed(standing, "; ".join(troubles))

    def _failed(self, standing: TrainingStanding, reason: str) -> ShardFailed:
        return ShardFailed(worker=self._worker, generation=standing.generation, step=standing.step, reason=reason)

    def finish(self, check: Callable[[], None]) -> None:
        """Waits until the shard in hand is written and reported.

        Args:
            check: called now and then; what it raises ends the wait, and the writing goes on.
        Raises:
            WaitTimeoutError: the disk does not take it.
        """
        deadline_s = time.monotonic() + WRITE_TIMEOUT_S
        while self._thread is not None and self._thread.is_alive():
            if time.monotonic() > deadline_s:
                raise WaitTimeoutError(
                    f"worker {self._worker} could not write its checkpoint in {WRITE_TIMEOUT_S:.0f} s"
                )
            self._thread.join(TURN_S)
            check()
        self._thread = None


class ShardDisk:
    """See `elaswave.protocol.step.engine.Disk` for what its methods promise.

    Args:
        writer: writes.
        outbox: knows where training stands.
        every_s: seconds between checkpoints by time; 0 for none.
    """

    def __init__(self, writer: ShardWriter, outbox: ControlOutbox, every_s: float) -> None:
        self._writer = writer
        self._outbox = outbox
        self._every_s = every_s
        self._began_s = time.monotonic()
        """When the newest checkpoint was begun, or this was made."""

    @property
    def is_busy(self) -> bool:
        """Whether a part is still being written."""
        return self._writer.is_busy

    def is_due(self) -> bool:
        """Tells whether a durable checkpoint is due by this worker's clock."""
        return bool(self._every_s) and time.monotonic() - self._began_s >= self._every_s

    def restart_clock(self) -> None:
        """The clock of `is_due` begins anew."""
        self._began_s = time.monotonic()

    def write(self, step: int) -> None:
        """Begins to write the owned copies as they are now."""
        machine = self._outbox.machine
        assert isinstance(machine.engine, TorchEngine)
        frozen = frozen_pieces(machine.engine.layers, machine.layout, machine.worker)
        standing = self._outbox.standing(step)
        is_last = step == machine.terms.num_steps or self._outbox.is_stopping
        patience_s = PATIENCE_S if is_last else 0.0
        self._writer.start(BlockStore(machine.copies), standing, self._outbox.scalars(), frozen, patience_s)

    def finish(self, check: Callable[[], None]) -> None:
        """Waits until nothing is being written; see `ShardWriter.finish`."""
        self._writer.finish(check)
