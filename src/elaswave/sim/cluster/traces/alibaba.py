"""Alibaba's server_event.csv of 2017: lines of ``timestamp,machine,event,detail,CPUs,memory,disk``.

alibaba/clusterdata, cluster-trace-v2017/trace_201708.md, section Machine events. Timestamps are seconds, events are

- ``add``: the machine became available; all have one at time 0;
- ``harderror``: it became unavailable because hardware failed: here it is lost;
- ``softerror``: it became unavailable for a time because of software; nothing new is placed on it, what runs "may still
  function normally": here it is drained, as a machine is that one has been told to leave.

The trace has no event for a repair, so a machine stays away unless it is added again. The published file goes back in
time seven times, so lines are sorted by time; those of one second stay in order.
"""

from collections.abc import Iterable

from elaswave.sim.cluster.failures import Scenario
from elaswave.sim.cluster.traces.history import History, Kind, TraceMachines

NEEDED = "seconds,machine,add or softerror or harderror,..."
GOES: dict[str, Kind] = {"harderror": "lost", "softerror": "drained"}
MOST_DIGITS = 12


def read_alibaba(lines: Iterable[tuple[int, str]], layout: TraceMachines) -> Scenario:
    """Reads a trace.

    Args:
        lines: their numbers and texts, without blank lines and comments.
        layout: of the machines.
    Raises:
        DataError: a line that is not of the form, or no line. Names the line.
    """
    events: list[tuple[int, str, str]] = []
    for number, text in lines:
        fields = [field.strip() for field in text.split(",")]
        if len(fields) < 3:
            raise layout.fault(number, f"has {len(fields)} fields: {text[:60]!r}; needed are {NEEDED}")
        time, machine, event = fields[:3]
        if not (time.isascii() and time.isdigit() and len(time) <= MOST_DIGITS):
            raise layout.fault(number, f"has the time {time[:40]!r}; needed are seconds, a whole number of at least 0")
        if event not in GOES and event != "add":
            raise layout.fault(number, f"says {event[:40]!r}; needed is add, softerror or harderror")
        if not machine:
            raise layout.fault(number, "names no machine")
        events.append((int(time), machine, event))
    if not events:
        raise layout.empty(NEEDED)
    events.sort(key=lambda each: each[0])
    history = History(layout)
    for at_s, machine, event in events:
        if event == "add" and machine not in history:
            history.come(float(at_s), machine)
        elif event != "add" and machine in history:
            history.go(float(at_s), machine, GOES[event])
        # A machine that is away may have a further error, and one that is there be added again: nothing changes.
    return history.scenario(float(events[-1][0]))
