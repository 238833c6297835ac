"""A worker's part of a checkpoint, written in the background: what is waited for, and what ends the wait."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elaswave.channel.messages.worker import ShardWritten, TrainingStanding
from elaswave.errors import InterruptedWaitError, WaitTimeoutError
from elaswave.state.flat import BlockStore
from elaswave.worker import shard_writer
from elaswave.worker.shard_writer import ShardWriter

STANDING = TrainingStanding(generation=1, step=4, num_updates=4, exponents=[], calibrated=True)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing until it is set."""
    free = threading.Event()

    def write(folder: Path, shard: str, pieces: object) -> list[object]:
        assert free.wait(60.0)
        return []

    monkeypatch.setattr(shard_writer, "write_shard", write)
    return free


def raises(error: Exception) -> Callable[[], None]:
    def check() -> None:
        raise error

    return check


def test_a_loss_ends_the_wait_for_a_slow_disk_and_not_the_writing(tmp_path: Path, disk: threading.Event) -> None:
    said: list[object] = []
    writer = ShardWriter(3, tmp_path, said.append)
    writer.start(BlockStore({}), STANDING)
    with pytest.raises(InterruptedWaitError, match="a report"):
        writer.finish(raises(InterruptedWaitError("the coordinator asks for a report")))
    assert writer.is_busy and said == []
    disk.set()
    writer.finish(lambda: None)
    assert not writer.is_busy
    assert said == [ShardWritten(worker=3, standing=STANDING, items=[])]


def test_a_disk_that_takes_nothing_is_given_up(
    tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "WRITE_TIMEOUT_S", 0.01)
    writer = ShardWriter(3, tmp_path, lambda message: None)
    writer.start(BlockStore({}), STANDING)
    with pytest.raises(WaitTimeoutError, match="worker 3 could not write its checkpoint"):
        writer.finish(lambda: None)
    disk.set()
    writer.finish(lambda: None)
