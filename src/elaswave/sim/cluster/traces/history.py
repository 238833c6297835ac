"""Comings and goings of named machines, one after the other in time, made a scenario."""

import re
from typing import Literal

from elaswave.errors import DataError
from elaswave.planning.costs.machines import ClusterEvent
from elaswave.sim.cluster.failures import ClusterChange, Scenario, racks_of

Kind = Literal["joined", "lost", "drained"]


_DATE_AND_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")

_DAYS_BEFORE_MONTH = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334, 365)


def timestamp_s(text: str) -> float | None:
    """Reads the seconds since 1970 of a date and time, as 2021-12-11 11:11:30; returns None if it is none."""
    found = _DATE_AND_TIME.fullmatch(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in found.groups())
    if not (1970 <= year and 1 <= month <= 12 and hour < 24 and minute < 60 and second < 60):
        return None
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    in_month = _DAYS_BEFORE_MONTH[month] - _DAYS_BEFORE_MONTH[month - 1] + (leap and month == 2)
    if not 1 <= day <= in_month:
        return None
    years = year - 1
    days = 365 * year + years // 4 - years // 100 + years // 400 + _DAYS_BEFORE_MONTH[month - 1] + (leap and month > 2)
    return float(((days + day - 1 - 719_527) * 24 + hour) * 3600 + minute * 60 + second)  # 719,527 days before 1970


class TraceMachines:
    """What a trace does not say of its machines, and the name that messages give it."""

    def __init__(self, name: str, *, workers_per_node: int = 1, nodes_per_rack: int = 1, seed: int = 0) -> None:
        """Makes a layout.

        Args:
            name: of the trace, for messages.
            workers_per_node: workers that come and go with each machine.
            nodes_per_rack: machines that share a rack, in the order in which they first come.
            seed: of what the trace leaves open.
        Raises:
            ValueError: fewer than one worker or node.
        """
        if workers_per_node < 1 or nodes_per_rack < 1:
            raise ValueError(
                f"{workers_per_node} workers per node, {nodes_per_rack} nodes per rack: at least 1 is needed of each"
            )
        self.name = name
        self.workers_per_node = workers_per_node
        self.nodes_per_rack = nodes_per_rack
        self.seed = seed

    def fault(self, number: int, what: str) -> DataError:
        """Makes an error about one line."""
        return DataError(f"trace {self.name}, line {number} {what}")

    def empty(self, needed: str) -> DataError:
        """Makes an error about a trace without a line."""
        return DataError(f"trace {self.name} has no line; needed are lines of {needed}")


class History:
    """A trace as far as it was read: changes of one kind at one instant that follow each other are one.

    Machines that come at the first instant are there from the beginning, which is time 0 of the scenario. A machine
    that comes back gets new worker ids, in the same node.
    """

    def __init__(self, layout: TraceMachines) -> None:
        self._layout = layout
        self._there: dict[str, tuple[int, ...]] = {}
        """Machines, with their workers."""
        self._node_ids: dict[str, int] = {}
        self._next_id = 0
        self._begin_s: float | None = None
        self._now_s = 0.0
        self._batch: tuple[float, Kind, list[tuple[int, int]]] | None = None
        """Time, kind, and (worker, node) of what is one change."""
        self._initial: list[tuple[int, int]] | None = None
        self._changes: list[ClusterChange] = []

    def __contains__(self, machine: str) -> bool:
        """Tells whether it is there now."""
        return machine in self._there

    @property
    def machines(self) -> tuple[str, ...]:
        """Those that are there now, in the order in which they came."""
        return tuple(self._there)

    def begin(self, at_s: float) -> None:
        """The trace begins, if it has not."""
        if self._begin_s is None:
            self._begin_s = self._now_s = at_s

    def come(self, at_s: float, machine: str, *, node: str | None = None) -> None:
        """A machine comes, that is not there: with all its workers, or one worker of the node named."""
        index = self._node_ids.setdefault(node or machine, len(self._node_ids))
        number = self._layout.workers_per_node if node is None else 1
        workers = tuple(range(self._next_id, self._next_id + number))
        self._next_id += number
        self._there[machine] = workers
        self._add(at_s, "joined", [(worker, index) for worker in workers])

    def go(self, at_s: float, machine: str, kind: Kind = "lost") -> None:
        """A machine goes, that is there."""
        self._add(at_s, kind, [(worker, -1) for worker in self._there.pop(machine)])

    def scenario(self, end_s: float) -> Scenario:
        """Returns what happened until then."""
        self._flush()
        begin_s = self._begin_s or 0.0
        initial = self._initial or []
        return Scenario(
            initial=tuple(worker for worker, _ in initial),
            nodes=tuple(node for _, node in initial),
            racks=racks_of(len(self._node_ids), self._layout.nodes_per_rack),
            changes=tuple(self._changes),
            duration_s=end_s - begin_s,
            source=f"trace {self._layout.name}",
        )

    def _add(self, at_s: float, kind: Kind, members: list[tuple[int, int]]) -> None:
        self.begin(at_s)
        if self._batch is None or self._batch[:2] != (at_s, kind):
            self._flush()
            self._batch = (at_s, kind, [])
        self._batch[2].extend(members)

    def _flush(self) -> None:
        if self._batch is None or self._begin_s is None:
            return
        at_s, kind, members = self._batch
        self._batch = None
        if self._initial is None:
            self._initial = []
            if kind == "joined" and at_s == self._begin_s:
                self._initial = members
                return
        ordered = sorted(members)
        event = ClusterEvent(kind=kind, workers=tuple(worker for worker, _ in ordered))
        nodes = tuple(node for _, node in ordered) if kind == "joined" else ()
        self._changes.append(ClusterChange(at_s=at_s - self._begin_s, event=event, nodes=nodes))
