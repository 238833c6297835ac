"""The simulated journal: what coordinators persist outlives them, and only the newest one can write."""

from elaswave.protocol.events import Record, TermRecord


class StaleTermError(Exception):
    """A newer coordinator has written to the store."""


class SimStore:
    """What coordinators persist: refuses all but the newest one."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._term = 0

    def append(self, record: Record) -> None:
        """Writes a record.

        Raises:
            StaleTermError: a coordinator of a newer term has written.
        """
        self.check(record.term)
        if isinstance(record, TermRecord) and record.term == self._term:
            raise StaleTermError(f"another coordinator has begun term {record.term}")
        self._term = record.term
        self.records.append(record)

    def check(self, term: int) -> None:
        """Refuses coordinators that have been replaced."""
        if term < self._term:
            raise StaleTermError(f"the store has been written by a coordinator of term {self._term}")
