"""A person hears of waiting for data once, when it is a few percent of the time of one worker."""

from elaswave.channel.messages.worker import Timings
from elaswave.coordinator.planning.measurements import DATA_WAITS_REPORTS, DataWaits


def timings(worker: int, data_wait_s: float, elapsed_s: float = 2.0) -> Timings:
    return Timings(
        worker=worker, generation=1, step=5, level=0, actions=[], data_wait_s=data_wait_s, elapsed_s=elapsed_s
    )  # fmt: skip


def test_the_worker_that_waits_is_named_once() -> None:
    waits = DataWaits()
    said = [waits.add(timings(worker, 0.2 if worker == 1 else 0.02)) for _ in range(5) for worker in (0, 1)]
    (only,) = [text for text in said if text]
    assert only.startswith("worker 1 has spent 10% of the last 2.0 s waiting for its data: let loaders make it ahead")
    assert said.index(only) == 2 * DATA_WAITS_REPORTS - 1


def test_what_passes_is_not_said() -> None:
    waits = DataWaits()
    assert [waits.add(timings(0, data_wait_s)) for data_wait_s in (1.0, 0.05, 1.0, 0.0, 1.0)] == [None] * 5
    assert waits.add(timings(1, 0.0, elapsed_s=0.0)) is None
