"""Scenarios from traces of machines that come and go: lines of ``milliseconds,add or remove,node``.

That is the form of the spot-instance traces of Bamboo (Thorpe et al., NSDI 2023; uclasystem/bamboo, traces/). Blank
lines and lines that begin with # are skipped. A node that comes back gets new worker ids. Lines are given by the
caller: nothing here opens a file.
"""

from collections.abc import Iterable

from elaswave.costs.machines import ClusterEvent
from elaswave.errors import DataError
from elaswave.sim.cluster.failures import ClusterChange, Scenario

MOST_DIGITS = 15
"""Of a time: a float holds it exactly."""


def read_trace(lines: Iterable[str], *, name: str = "trace", workers_per_node: int = 1) -> Scenario:
    """Reads a trace.

    Lines of the same time and kind that follow each other are one change. Nodes that are added at the time of the
    first line are there from the beginning, which is time 0 of the scenario; it ends with the last line.

    Args:
        lines: of the trace, first one first.
        name: of the trace, for messages.
        workers_per_node: workers that come and go with each node.
    Raises:
        DataError: a line that is not of the form, goes back in time, adds a node that is there or removes one that is
            not; or a trace without a line. Names the line.
        ValueError: workers_per_node below 1.
    """
    if workers_per_node < 1:
        raise ValueError(f"{workers_per_node} workers per node: at least 1 is needed")
    reader = _Reader(name, workers_per_node)
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            reader.take(number, text)
    return reader.scenario()


class _Reader:
    """A trace as far as it was read."""

    def __init__(self, name: str, workers_per_node: int) -> None:
        self._name = name
        self._workers_per_node = workers_per_node
        self._there: dict[str, tuple[int, ...]] = {}
        """Nodes that are there, with their workers."""
        self._node_ids: dict[str, int] = {}
        self._next_id = 0
        self._begin_ms: int | None = None
        self._now_ms = 0
        self._batch: tuple[int, str, list[tuple[int, int]]] | None = None
        """Time, kind, and (worker, node) of lines that are one change."""
        self._initial: list[tuple[int, int]] | None = None
        self._changes: list[ClusterChange] = []

    def take(self, number: int, text: str) -> None:
        fields = [field.strip() for field in text.split(",")]
        if len(fields) != 3:
            raise self._fault(number, f"has {len(fields)} fields: {text!r}; needed are 3: milliseconds,add or "
                              "remove,node")  # fmt: skip
        time, kind, node = fields
        if not (time.isascii() and time.isdigit() and len(time) <= MOST_DIGITS):
            raise self._fault(
                number,
                f"has the time {time[:40]!r}; needed are milliseconds, a whole number of at least 0 and at most "
                f"{MOST_DIGITS} digits",
            )
        now_ms = int(time)
        if now_ms < self._now_ms:
            raise self._fault(number, f"goes back in time, from {self._now_ms} to {now_ms} ms; sort the trace by time")
        if kind not in ("add", "remove"):
            raise self._fault(number, f"says {kind!r}; needed is add or remove")
        if not node:
            raise self._fault(number, "names no node")
        if kind == "add" and node in self._there:
            raise self._fault(number, f"adds {node}, which is there already")
        if kind == "remove" and node not in self._there:
            raise self._fault(number, f"removes {node}, which is not there")
        self._now_ms = now_ms
        if self._begin_ms is None:
            self._begin_ms = now_ms
        if self._batch is None or self._batch[:2] != (now_ms, kind):
            self._flush()
            self._batch = (now_ms, kind, [])
        self._batch[2].extend(self._add(node) if kind == "add" else self._remove(node))

    def scenario(self) -> Scenario:
        if self._begin_ms is None:
            raise DataError(f"trace {self._name} has no line; needed are lines of milliseconds,add or remove,node")
        self._flush()
        initial = self._initial or []
        return Scenario(
            initial=tuple(worker for worker, _ in initial),
            nodes=tuple(node for _, node in initial),
            changes=tuple(self._changes),
            duration_s=(self._now_ms - self._begin_ms) / 1000,
            source=f"trace {self._name}",
        )

    def _add(self, node: str) -> list[tuple[int, int]]:
        index = self._node_ids.setdefault(node, len(self._node_ids))
        workers = tuple(range(self._next_id, self._next_id + self._workers_per_node))
        self._next_id += self._workers_per_node
        self._there[node] = workers
        return [(worker, index) for worker in workers]

    def _remove(self, node: str) -> list[tuple[int, int]]:
        return [(worker, self._node_ids[node]) for worker in self._there.pop(node)]

    def _flush(self) -> None:
        if self._batch is None or self._begin_ms is None:
            return
        now_ms, kind, members = self._batch
        self._batch = None
        if self._initial is None:
            self._initial = members  # the first line can only add: nothing is there that it could remove
            return
        ordered = sorted(members)
        event = ClusterEvent(kind="joined" if kind == "add" else "lost", workers=tuple(worker for worker, _ in ordered))
        nodes = tuple(node for _, node in ordered) if kind == "add" else ()
        self._changes.append(ClusterChange(at_s=(now_ms - self._begin_ms) / 1000, event=event, nodes=nodes))

    def _fault(self, number: int, what: str) -> DataError:
        return DataError(f"trace {self._name}, line {number} {what}")
