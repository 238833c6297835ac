"""Where a coordinator makes durable what it decides: what every store promises. No IO here.

A store holds records of one typed union in the order in which they were given to it. Two implementations:
`elaswave.store.file_store` (a journal in a file, the default) and `elaswave.store.etcd_store`. The suite
`tests/conformance/test_store_conformance.py` is the definition: both pass it.

*Persist before send*: `append` returns when records are durable, so whoever calls it before it sends never acts on what
a successor would not know. What is only reported (losses, checkpoints, recoveries) is given to `add`, which does not
wait; whatever must not be forgotten by others before that is durable is put off with `when_durable`.

At most one coordinator writes: opening a store either ends the right of the one before to write, or is refused. A
coordinator that has been replaced is refused with `SupersededError`, and nothing of it is written.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from elaswave.errors import StoreError, SupersededError
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.protocol.leadership.term_lease import TermLease

_T = TypeVar("_T")


class Store(Protocol[_T]):
    """Records of a job's coordinators."""

    def append(self, *records: _T) -> None:
        """Appends records, all of them or none; returns when they, and all before them, are durable.

        Raises:
            SupersededError: another coordinator has taken over. They are not written.
            StoreError: they may or may not be durable, or the store is closed. It takes no more records: open it again.
        """

    def add(self, *records: _T) -> None:
        """Appends records, all of them or none, without waiting: they are durable soon, in the order given.

        Raises:
            SupersededError, StoreError: as of `append`; also for what was given earlier.
        """

    def when_durable(self, call: Callable[[], None]) -> None:
        """Calls back on the caller's thread once all that was given so far is durable; at once if it is. Never if that
        fails."""

    def records(self) -> list[_T]:
        """All durable records, oldest first: those found at the opening and those since."""

    @property
    def store_position(self) -> StorePosition | None:
        """Where the durable history stands; None: the store cannot go back while a job runs."""

    def check(self, reported: StorePosition) -> bool:
        """Compares what a member has heard of the history with what is there (H9).

        Returns:
            Whether it is a member of this job, and of no other founding of it.
        Raises:
            SupersededError: another coordinator has taken over.
            StoreError: the store has lost what was durable.
        """

    def close(self) -> None:
        """Gives up the store; another process may open it. What was added is written first, within a bound."""


class Owner(NamedTuple):
    """How a store that works in a thread of its own reaches the thread that uses it."""

    post: Callable[[Callable[[], None]], object]
    """Has a call made on the owner's thread, soon. Called by the store's thread."""
    turn: Callable[[], None]
    """Called again and again while the owner waits in `Store.append`: its peers must not take it for dead."""
    say: Callable[[str], None]
    """Says to people what is waited for. Called on the owner's thread."""
    broken: Callable[[StoreError], None]
    """The store takes no more records, and nobody waits who could be told so. Called on the owner's thread."""


class WriterLease:
    """Refuses what a coordinator gives to a store that has been replaced.

    Args:
        name: of the store, in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lease = TermLease()

    def check(self, records: Iterable[object]) -> None:
        """Records are to be written.

        Raises:
            SupersededError: see `TermLease`.
        """
        for record in records:
            refusal = self._lease.refusal_of(record)
            if refusal is not None:
                raise SupersededError(f"{self._name} {refusal}")

    def took(self, records: Iterable[object]) -> None:
        """Records stand in the store, or will before all later ones."""
        for record in records:
            self._lease.took(record)
