"""Writes a worker's part of durable checkpoints in a background thread, from copies, one at a time."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from elaswave.errors import CheckpointError, WaitTimeoutError
from elaswave.state.checkpoint import shard_folder, shard_name
from elaswave.state.checkpoint_shards import Piece, write_shard
from elaswave.state.store import BlockStore, Scalars
from elaswave.worker.frozen import frozen_pieces
from elaswave.worker.materialise import owned_pieces
from elaswave.worker.messages import ShardFailed, ShardWritten, Standing
from elaswave.worker.outbox import ControlOutbox
from elaswave.worker.torch_engine import TorchEngine

WRITE_TIMEOUT_S = 1800.0
"""Bound of waiting for one shard's writing."""
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

    def start(self, store: BlockStore, standing: Standing, scalars: Scalars = (), fixed: Iterable[Piece] = ()) -> None:
        """Copies the owned blocks and begins to write them; the shard before this one must be written.

        Args:
            store: with the owned blocks.
            standing: where training stands.
            scalars: the optimizer's states that tensors have once.
            fixed: further pieces, whose values do not change.
        """
        assert not self.is_busy
        pieces = [*owned_pieces(store, scalars), *fixed]

        def write() -> None:
            try:
                folder = shard_folder(self._run_dir, standing.step)
                items = write_shard(folder, shard_name(self._worker, standing.epoch), pieces)
            except (CheckpointError, OSError) as error:
                epoch, step = standing.epoch, standing.step
                self._report(ShardFailed(worker=self._worker, epoch=epoch, step=step, reason=str(error)))
            else:
                self._report(ShardWritten(worker=self._worker, standing=standing, items=items))

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

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
    """See `elaswave.protocol.engine.Disk` for what its methods promise.

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
        """Whether a durable checkpoint is due by this worker's clock."""
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
        self._writer.start(BlockStore(machine.copies), standing, self._outbox.scalars(), frozen)

    def finish(self, check: Callable[[], None]) -> None:
        """Waits until nothing is being written; see `ShardWriter.finish`."""
        self._writer.finish(check)
