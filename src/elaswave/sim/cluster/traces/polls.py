"""Poll logs: lines of ``date, time, count`` that say how many machines were there when someone asked.

The form of Bamboo's traces of Google Cloud (Thorpe et al., NSDI 2023; uclasystem/bamboo, traces/gcloud/*.txt). A log
says how many, not which, and nothing of what happened between two polls:

- Machines that went are drawn from those that were there, with equal chances. Those that come are new ones.
- A count that falls by k is one loss of k machines at the instant of the poll. If they went one after the other within
  the minute or two between polls, this is harder on a job than what happened. A machine that was replaced between two
  polls is not seen, which is kinder.
- Where polls overlapped, the file goes back in time by a minute or so (v100x1-east1c.txt does, 15 times). The later
  line holds: what earlier lines said of its time and of later ones is dropped.
"""

import random
from collections.abc import Iterable

from elaswave.sim.cluster.failures import Scenario
from elaswave.sim.cluster.traces.history import History, TraceMachines, timestamp_s

NEEDED = "date, time, count, as 2021-12-11, 11:11:30, 55"
OVERLAP_S = 120.0
"""By how much polls may overlap; Bamboo's do by 60 s."""
MACHINES_MAX = 1_000_000


def read_polls(lines: Iterable[tuple[int, str]], layout: TraceMachines) -> Scenario:
    """Reads a poll log.

    Args:
        lines: their numbers and texts, without blank lines and comments.
        layout: of the machines; its seed draws which of them went.
    Raises:
        DataError: a line that is not of the form or goes back in time by more than polls overlap, or no line. Names
            the line.
    """
    polls: list[tuple[float, int]] = []
    for number, text in lines:
        at_s, count = _poll(number, text, layout)
        if polls and polls[-1][0] - at_s > OVERLAP_S:
            raise layout.fault(
                number,
                f"goes back in time, by {polls[-1][0] - at_s:.0f} s: {text!r}; sort the log by time (polls may overlap "
                f"by {OVERLAP_S:.0f} s)",
            )
        while polls and polls[-1][0] >= at_s:
            polls.pop()
        polls.append((at_s, count))
    if not polls:
        raise layout.empty(NEEDED)
    return _live(polls, layout)


def _poll(number: int, text: str, layout: TraceMachines) -> tuple[float, int]:
    date, _, rest = text.partition(",")
    time, _, count = (part.strip() for part in rest.partition(","))
    at_s = timestamp_s(f"{date.strip()} {time}")
    if at_s is None:
        raise layout.fault(number, f"has no time: {text[:60]!r}; needed are {NEEDED}")
    if not (count.isascii() and count.isdigit() and len(count) <= 7 and int(count) <= MACHINES_MAX):
        raise layout.fault(
            number, f"has the count {count[:40]!r}; needed is a whole number of at least 0 and at most {MACHINES_MAX:,}"
        )
    return at_s, int(count)


def _live(polls: list[tuple[float, int]], layout: TraceMachines) -> Scenario:
    history, rng, num_named = History(layout), random.Random(f"{layout.seed} polls"), 0
    history.begin(polls[0][0])
    for at_s, count in polls:
        there = history.machines
        for machine in rng.sample(there, max(0, len(there) - count)):
            history.go(at_s, machine)
        for _ in range(count - len(there)):
            history.come(at_s, f"machine {num_named}")
            num_named += 1
    return history.scenario(polls[-1][0])
