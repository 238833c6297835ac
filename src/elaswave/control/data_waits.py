"""Whether workers wait for their data so long that a person should know. No IO."""

from elaswave.channel.messages.worker import Timings

SHARE = 0.05
"""Of a worker's time that it may wait for its data before a person is told."""
NUM_REPORTS = 2
"""Reports of a worker, one after the other, that must say so."""


class DataWaits:
    """What the workers of a run say of their waiting for data."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """By worker: its newest reports that said so, in a row."""
        self._is_told = False

    def add(self, timings: Timings) -> str | None:
        """Takes what one worker tells of a few of its steps.

        Returns:
            What a person is to be told, once in the run.
        """
        share = timings.data_wait_s / timings.elapsed_s if timings.elapsed_s > 0 else 0.0
        count = self._counts.get(timings.worker, 0) + 1 if share > SHARE else 0
        self._counts[timings.worker] = count
        if self._is_told or count < NUM_REPORTS:
            return None
        self._is_told = True
        return (
            f"worker {timings.worker} has spent {share:.0%} of the last {timings.elapsed_s:.1f} s waiting for its "
            "data: let loaders make it ahead (loaders=2, or more of them), or make a sample less work"
        )
