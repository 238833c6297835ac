"""The simulated journal: what coordinators persist outlives them, and only the newest one can write."""

from typing import Any

from elaswave.protocol.leadership.store_position import TermLease


class ActorDead(Exception):
    """The process that was acting has been killed."""


class StaleTermError(Exception):
    """A newer coordinator has written to the store."""


class SimStore:
    """What coordinators persist: refuses all but the newest one."""

    lease_class = TermLease

    def __init__(self) -> None:
        self.records: list[Any] = []
        """Of the coordinator's machine, and of its rules about members."""
        self._lease = self.lease_class()

    def append(self, record: object) -> None:
        """Writes a record.

        Raises:
            StaleTermError: another coordinator has begun this term or a newer one.
        """
        _check(self._lease.refusal_of(record))
        self._lease.took(record)
        self.records.append(record)

    def check(self, term: int) -> None:
        """Refuses coordinators that have been replaced, as the lock on the product's journal does: what they make
        durable beside the machine's records bears no term.

        Raises:
            StaleTermError: a coordinator of a newer term has written.
        """
        _check(self._lease.refusal(term))


def _check(refusal: str | None) -> None:
    if refusal is not None:
        raise StaleTermError(f"the store {refusal}")
