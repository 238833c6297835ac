"""Workers that end at one instant are lost together, however their ends are told."""

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

from elaswave.coordinator.driver import JobDriver


def driver(ended: set[int]) -> MagicMock:
    """A coordinator that watches workers 0 to 3, of whom some have ended."""
    job = MagicMock(spec=JobDriver)
    job._setup = SimpleNamespace(job=SimpleNamespace(deaths=SimpleNamespace(has_ended=ended.__contains__)))
    job._watched = {0, 1, 2, 3, 7}
    job.core = SimpleNamespace(members=(0, 1, 2, 3, 4))
    job._ticker = None
    return job


def test_an_end_that_is_told_shows_those_of_the_same_instant():
    job = driver({1, 2, 7})
    JobDriver.worker_ended(job, 1, "was killed by SIGKILL")
    noted = {call.args for call in job.note_end.call_args_list}
    assert noted == {(1, "was killed by SIGKILL"), (2, "has ended")}, "worker 7 is no member any more"
    job.look_soon.assert_called_once_with()


def test_all_that_one_turn_brings_is_looked_at_together():
    job = driver(set())
    looked = []
    job._tick = lambda: looked.append(len(told))
    job._background = SimpleNamespace(guarded=lambda turn: turn())
    told = []

    async def turns() -> None:
        for worker in range(3):
            told.append(worker)
            JobDriver.look_soon(job)
        assert not looked
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(turns())
    assert looked == [3]
