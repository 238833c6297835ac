"""While the coordinator looks for a checkpoint to go back to: who is held for lost, and what may be renamed."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.checkpoints.checkpoint import CheckpointRef, CheckpointSearch, SkippedCheckpoint
from elaswave.config.load import load_config
from elaswave.coordinator import driver
from elaswave.coordinator.background import Background
from elaswave.coordinator.process import CoordinatorProcess
from elaswave.coordinator.records import checkpoints as checkpoints_module
from elaswave.coordinator.records.checkpoints import CheckpointFinder
from elaswave.protocol import events
from elaswave.protocol.detection.detector import UNLEARNED_S, Detector, WorkerActivity


class Search:
    """A coordinator's process without connections, journal and recorder, and the checkpoints that it finds.

    Args:
        monkeypatch: replaces the search on the disk.
        find: in its place.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, find: Callable[[], CheckpointSearch]) -> None:
        self.found: list[events.CheckpointFound] = []
        self.put_aside: list[CheckpointSearch] = []
        self.checkpoints = SimpleNamespace(records=[], is_committing=False, is_held=False, hold=self._hold)
        self.core = SimpleNamespace(
            sequence=1,
            restarts=False,
            awaits=lambda question: question.sequence == self.core.sequence,
            handle=lambda event, now_s: self.found.append(event) or (),
        )
        self.detector = Detector()
        monkeypatch.setattr(checkpoints_module, "find_newest_checkpoint", lambda *given: find())
        monkeypatch.setattr(checkpoints_module, "put_aside", self.put_aside.append)
        self.process = CoordinatorProcess.__new__(CoordinatorProcess)
        core: Any = self.core
        checkpoints: Any = self.checkpoints
        parts: dict[str, Any] = {
            "core": self.core,
            "_publishing": SimpleNamespace(tell_settled=lambda: None),
            "_checkpoint_finder": CheckpointFinder(
                core,
                checkpoints,
                load_config(None, []),
                Path(),
                begins_at_seed=True,
                is_over=lambda: False,
                answer=self.process.answer_checkpoint,
            ),
            "detector": self.detector,
            "_background": Background(),
        }
        for name, part in parts.items():
            setattr(self.process, name, part)

    def _hold(self) -> None:
        assert not self.checkpoints.is_committing
        self.checkpoints.is_held = True


def found(step: int, *damaged: int) -> CheckpointSearch:
    skipped = tuple(SkippedCheckpoint(Path(f"step-{other}"), "damaged") for other in damaged)
    return CheckpointSearch(CheckpointRef(step, Path(), meta=None), skipped)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def lost_while_waiting(detector: Detector, begin_s: float, end_s: float) -> list[int]:
    """Whom a detector holds for lost of two workers that wait for a decision."""
    suspected: list[int] = []
    now_s = begin_s
    while now_s < end_s:
        for worker in (0, 1):
            position = WorkerActivity(2, 5, 0, "recover", computing=False, waiting_on=(), since_s=now_s)
            detector.heartbeat(worker, position, now_s)
        suspected += [suspicion.worker for suspicion in detector.tick(now_s)]
        now_s += 0.25
    return suspected


def test_no_survivor_is_held_for_lost_however_long_a_search_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums of large checkpoints may take longer than workers may stand still outside of a step."""
    go_on = threading.Event()

    def find() -> CheckpointSearch:
        assert go_on.wait(10.0)
        return found(4)

    async def run() -> None:
        search = Search(monkeypatch, find)
        for worker in (0, 1):
            search.detector.joined(worker, 0.0)
        with monkeypatch.context() as at_the_beginning:
            at_the_beginning.setattr(driver, "time", SimpleNamespace(monotonic=lambda: 0.0))
            search.process.find_checkpoint(events.FindCheckpoint(1))
        assert lost_while_waiting(search.detector, 0.0, 2 * UNLEARNED_S) == []
        go_on.set()
        await until(lambda: bool(search.found))
        assert search.found == [events.CheckpointFound(1, 4)] and search.checkpoints.is_held
        search.detector.resume(2 * UNLEARNED_S)  # the decision; from now on a standstill counts again
        assert lost_while_waiting(search.detector, 2 * UNLEARNED_S, 4 * UNLEARNED_S) != []

    asyncio.run(run())


def test_nothing_is_put_aside_while_a_commit_may_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged checkpoint of an earlier run is replaced when the run has passed its step again: by its good one."""
    searches = iter([found(4, 8), found(8)])

    async def run() -> None:
        def find() -> CheckpointSearch:
            answer = next(searches)
            search.checkpoints.is_committing = bool(answer.skipped)  # step 8's last part comes during the first one
            return answer

        search = Search(monkeypatch, find)
        search.process.find_checkpoint(events.FindCheckpoint(1))
        await until(lambda: search.checkpoints.is_committing)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert search.put_aside == [] and search.found == []
        search.checkpoints.records.append("step 8")
        search.checkpoints.is_committing = False
        await until(lambda: bool(search.found))
        assert search.put_aside == [found(8)] and search.found == [events.CheckpointFound(1, 8)]

    asyncio.run(run())


def test_a_search_that_another_loss_has_made_void_renames_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        def find() -> CheckpointSearch:
            search.core.sequence += 1
            return found(4, 8)

        search = Search(monkeypatch, find)
        search.process.find_checkpoint(events.FindCheckpoint(1))
        await until(lambda: not search.process._background._tasks)
        assert search.put_aside == search.found == [] and not search.checkpoints.is_held

    asyncio.run(run())
