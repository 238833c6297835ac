"""Traces of single machines that come and go: lines of ``milliseconds,add or remove,node``.

The form of the spot instances' traces of Bamboo (Thorpe et al., NSDI 2023; uclasystem/bamboo, traces/*.csv).
"""

from collections.abc import Iterable

from elaswave.sim.cluster.failures import Scenario
from elaswave.sim.cluster.traces.history import History, TraceMachines

NEEDED = "milliseconds,add or remove,node"
MOST_DIGITS = 15
"""Of a time: a float holds it exactly."""


def read_event_trace(lines: Iterable[tuple[int, str]], layout: TraceMachines) -> Scenario:
    """Reads a trace.

    Args:
        lines: their numbers and texts, without blank lines and comments.
        layout: of the machines.
    Raises:
        DataError: a line that is not of the form, goes back in time, adds a node that is there or removes one that is
            not; or no line. Names the line.
    """
    history, now_ms = History(layout), -1
    for number, text in lines:
        fields = [field.strip() for field in text.split(",")]
        if len(fields) != 3:
            raise layout.fault(number, f"has {len(fields)} fields: {text!r}; needed are 3: {NEEDED}")
        time, kind, node = fields
        if not (time.isascii() and time.isdigit() and len(time) <= MOST_DIGITS):
            raise layout.fault(
                number,
                f"has the time {time[:40]!r}; needed are milliseconds, a whole number of at least 0 and at most "
                f"{MOST_DIGITS} digits",
            )
        if int(time) < now_ms:
            raise layout.fault(number, f"goes back in time, from {now_ms} to {int(time)} ms; sort the trace by time")
        now_ms = int(time)
        if kind not in ("add", "remove"):
            raise layout.fault(number, f"says {kind!r}; needed is add or remove")
        if not node:
            raise layout.fault(number, "names no node")
        if kind == "add" and node in history:
            raise layout.fault(number, f"adds {node}, which is there already")
        if kind == "remove" and node not in history:
            raise layout.fault(number, f"removes {node}, which is not there")
        if kind == "add":
            history.come(now_ms / 1000, node)
        else:
            history.go(now_ms / 1000, node)
    if now_ms < 0:
        raise layout.empty(NEEDED)
    return history.scenario(now_ms / 1000)
