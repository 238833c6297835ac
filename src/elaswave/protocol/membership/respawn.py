"""When a worker's place is taken again by a new process: the policy, as a machine. No IO, no clocks.

A job aims at a number of workers: as many as it began with, more if a person has asked for more. Each of them has a
*place*. Whatever process of a place ends, the next one gets an id that was never used, after a back-off that doubles
from death to death and begins anew once a process has lived for `LONG_S`. A place is closed whose processes keep dying
before they have committed a step: what kills them would kill the next one too. One that a worker leaves on request (a
drain) is closed without a word: a person wants fewer workers.

Whether a death is a loss is not decided here: a process that dies before it is admitted was no member yet.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

BACKOFF_S_MIN = 1.0
"""From the first death in a place to the next process."""
BACKOFF_S_MAX = 60.0
"""It doubles up to this."""
LONG_S = 60.0
"""A process that has lived for so long is a success: the back-off begins anew."""
DEATHS_MAX = 3
"""So many deaths one after the other, without a committed step in between, close a place."""


class PlaceState(Enum):
    """What is known of a place."""

    TAKEN = "a process has it"
    OPEN = "it waits for the next process"
    CLOSED = "it stays empty"


class Spawn(NamedTuple):
    """Start a worker that joins, now."""

    worker: int
    """Its id, never used before."""
    place: int


class PlaceClosed(NamedTuple):
    """Tell people: a place stays empty."""

    place: int
    text: str


Answer = Spawn | PlaceClosed


class _Place:
    def __init__(self, worker: int, now_s: float) -> None:
        self.state = PlaceState.TAKEN
        self.worker = worker
        """The newest one."""
        self.since_s = now_s
        """When its process was started; of the state OPEN: when the next one is due."""
        self.backoff_s = BACKOFF_S_MIN
        """Before the next process."""
        self.deaths: list[int] = []
        """Its workers that have ended since one of them committed a step."""

    def take(self, worker: int, now_s: float) -> None:
        self.state, self.worker, self.since_s = PlaceState.TAKEN, worker, now_s

    def open(self, due_s: float) -> None:
        self.state, self.since_s = PlaceState.OPEN, due_s


class Respawn:
    """The places of one job.

    Args:
        workers: those that it begins with.
        enabled: whether a place is taken again after a death; places that are asked for are filled in any case.
    """

    def __init__(self, workers: Sequence[int], *, enabled: bool) -> None:
        self._enabled = enabled
        self._places = [_Place(worker, -math.inf) for worker in workers]
        self._place_of = {worker: place for place, worker in enumerate(workers)}
        """Of every worker that there ever was."""
        self._uncommitted = set(workers)
        """Workers that have not committed a step."""
        self._is_over = False

    @property
    def workers(self) -> frozenset[int]:
        """All that there ever were."""
        return frozenset(self._place_of)

    @property
    def num_wanted(self) -> int:
        """Workers that the job aims at: its places that are not closed."""
        return sum(place.state is not PlaceState.CLOSED for place in self._places)

    @property
    def num_open(self) -> int:
        """Places that wait for the next worker."""
        return 0 if self._is_over else sum(place.state is PlaceState.OPEN for place in self._places)

    @property
    def next_s(self) -> float:
        """When `tick` has something to do; infinite if nothing waits."""
        if self._is_over:
            return math.inf
        return min((place.since_s for place in self._places if place.state is PlaceState.OPEN), default=math.inf)

    def has_place(self, worker: int) -> bool:
        """Whether a worker has a place: it was started for it, and has not ended since, as far as is known."""
        number = self._place_of.get(worker)
        return (
            number is not None
            and self._places[number].worker == worker
            and self._places[number].state is PlaceState.TAKEN
        )

    def backoff_s(self, place: int) -> float:
        """From the end of a place's process to the next one, should it not live long."""
        return self._places[place].backoff_s

    def spawned(self, worker: int, place: int, now_s: float, backoff_s: float = BACKOFF_S_MIN) -> None:
        """A worker was started for a place by an earlier coordinator, as its records say. The one before it has ended.

        A successor says so, who has ended and which steps were committed, in the order of the records.

        Args:
            worker: its id.
            place: its place.
            now_s: when.
            backoff_s: as of `backoff_s` then.
        """
        while place >= len(self._places):
            self._places.append(_Place(worker, now_s))
        found = self._places[place]
        if found.worker != worker and found.state is PlaceState.TAKEN and found.worker in self._uncommitted:
            found.deaths.append(found.worker)
        self._take(worker, place, now_s)
        found.backoff_s = backoff_s

    def _take(self, worker: int, place: int, now_s: float) -> None:
        self._places[place].take(worker, now_s)
        self._place_of[worker] = place
        self._uncommitted.add(worker)

    def committed(self, workers: Collection[int]) -> None:
        """These members have committed a step."""
        for worker in self._uncommitted.intersection(workers):
            self._uncommitted.discard(worker)
            place = self._places[self._place_of[worker]]
            if place.worker == worker:
                place.deaths.clear()

    def ended(self, worker: int, now_s: float) -> list[Answer]:
        """A worker's process has ended, or the others go on without it; may be said again.

        Args:
            worker: its id.
            now_s: monotonic time.
        Returns:
            What to do now; `tick` does the rest when its time has come.
        """
        number = self._place_of.get(worker)
        if number is None:
            return []
        place = self._places[number]
        if place.worker != worker or place.state is not PlaceState.TAKEN:
            return []
        if not self._enabled or self._is_over:
            place.state = PlaceState.CLOSED
            return []
        if worker in self._uncommitted:
            place.deaths.append(worker)
        if len(place.deaths) >= DEATHS_MAX:
            place.state = PlaceState.CLOSED
            return [PlaceClosed(number, _closed(number, place.deaths))]
        if now_s - place.since_s >= LONG_S:
            place.backoff_s = BACKOFF_S_MIN
        place.open(now_s + place.backoff_s)
        place.backoff_s = min(2 * place.backoff_s, BACKOFF_S_MAX)
        return []

    def left(self, worker: int) -> None:
        """A worker leaves because it was asked to: nobody takes its place."""
        number = self._place_of.get(worker)
        if number is not None and self._places[number].worker == worker:
            self._places[number].state = PlaceState.CLOSED

    def join(self, count: int, now_s: float) -> list[Spawn]:
        """So many workers more are wanted, beside those that the job aims at.

        Args:
            count: of new places.
            now_s: monotonic time.
        """
        if self._is_over:
            return []
        return [self._spawn(len(self._places), now_s) for _ in range(count)]

    def stop(self) -> None:
        """The job is stopping, or has made its steps: nobody is started any more."""
        self._is_over = True

    def tick(self, now_s: float, room: float = math.inf) -> list[Spawn]:
        """The workers whose time has come, as many as there is room for: the others wait.

        Args:
            now_s: monotonic time.
            room: most workers that may be started.
        """
        if self._is_over:
            return []
        due = [
            number
            for number, place in enumerate(self._places)
            if place.state is PlaceState.OPEN and place.since_s <= now_s
        ]
        return [self._spawn(number, now_s) for number in due[: int(min(room, len(due)))]]

    def _spawn(self, number: int, now_s: float) -> Spawn:
        worker = 1 + max(self._place_of, default=-1)
        if number == len(self._places):
            self._places.append(_Place(worker, now_s))
        self._take(worker, number, now_s)
        return Spawn(worker, number)


def _closed(place: int, deaths: Iterable[int]) -> str:
    *others, last = map(str, deaths)
    return (
        f"place {place} stays empty: workers {', '.join(others)} and {last}, one after the other, have ended before "
        "they had committed a step; their logs say why, and `elaswave ctl RUN join` has another one started"
    )
