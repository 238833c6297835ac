"""What workers say they are doing, and whom a standstill goes back to. Pure data and one pure function."""

from collections.abc import Iterable, Mapping

import msgspec

START = "start"
"""Label of a worker that has not begun its first step. Libraries that are being loaded, layers that are being made and
data that is being read keep whole processes busy, and say nothing about how they behave later."""
LINK = "link"
"""Label of a worker that makes its first links, and waits for peers that are still at `START`."""
STARTING = (START, LINK)
"""Labels before the first step."""
WRITE = "write"
"""Label of a worker that waits for its disk to take its part of the checkpoint before: it bounds that wait itself."""
DATA = "data"
"""Label of a worker that makes a micro-batch, or waits for its loaders to make it: a person's own code, which may take
far longer for one sample than for all before."""
FOREIGN = "foreign"
"""Label of a worker that waits for the server of a foreign part: it bounds that wait itself, and the first answers,
for which the server loads its software, may take far longer than all before."""
COMPARE = "compare"
"""Label of a worker that compares its copies of the state with the others', before anything is told of it."""
RECOVER = "recover"
"""Label of a worker that goes over to a decision: it waits for it, moves state, and makes or loads what it lacks."""
PAUSED = "paused"
"""Label of a worker that waits between two steps, because the membership is about to change."""
UNSOUND = "unsound"
"""Label of a worker that waits for a new generation, because copies of the state are wrong."""
FIRST_S = 3600.0
"""The longest first run of anything, however busily it computes."""
IDLE = ("idle", "end", START, PAUSED, UNSOUND)
"""Labels of workers that wait for the coordinator: never a sign of trouble by themselves."""
PHASES = ("F", "B", "I", "W", "reduce", "vote", "apply", "gather")
"""What a step consists of, in order of appearance; only these have tight bounds."""


class WorkerActivity(msgspec.Struct, frozen=True, array_like=True):
    """What a worker's main thread is doing, as its heartbeat tells."""

    generation: int
    step: int
    attempt: int
    label: str
    """An action such as "2F0", a phase ("reduce", "vote", "apply", "gather"), one of `IDLE`, or another word."""
    computing: bool
    """False: it waits for others."""
    waiting_on: tuple[int, ...]
    """Workers whose frames it waits for; empty where that is not known."""
    since_s: float
    """How long it has been doing this, by its own clock."""
    moved_bytes: int = 0
    """Changes whenever bytes move over its links, however slowly."""
    starved_s: float = 0.0
    """Seconds of `since_s` in which it was seen to wait for a processor, if it computes."""
    first_s: float = 0.0
    """Seconds for which it has been at its first run of this kind, which may compile, load and build and take any time;
    0 if it is none. `since_s` is then counted from when it, or a process that it has started, used a processor last."""

    def same_stay(self, later: "WorkerActivity") -> bool:
        """Tells whether a later heartbeat tells of the same thing still going on."""
        return (
            self.label == later.label
            and self.computing == later.computing
            and self.waiting_on == later.waiting_on
            and (self.generation, self.step, self.attempt) == (later.generation, later.step, later.attempt)
            and self.since_s <= later.since_s
        )

    def __str__(self) -> str:
        return f"{self.label} of step {self.step}"


def action_kind(label: str) -> str:
    """Returns what a label is a case of: "F" of "2F0", "reduce" of "reduce"."""
    return label.strip("0123456789")


def blame(activities: Mapping[int, WorkerActivity]) -> int:
    """Finds whom a standstill goes back to.

    The chains of who waits for whom end in a worker that waits for no other (that is known), or in a circle. Of those
    at the ends the one is named that most workers wait for; then the one that is furthest behind; then the largest id.

    Args:
        activities: of all workers, none of which computes; at least one is not idle.
    Returns:
        A worker.
    """
    edges = {
        worker: {other for other in position.waiting_on if other in activities and other != worker}
        for worker, position in activities.items()
    }
    num_waiting = dict.fromkeys(activities, 0)
    for targets in edges.values():
        for target in targets:
            num_waiting[target] += 1
    reachable = {worker: _reachable(edges, worker) for worker in activities}
    ends = [
        worker
        for worker, position in activities.items()
        if all(worker in reachable[other] for other in reachable[worker])
        and (num_waiting[worker] or position.label not in IDLE)
    ]
    waited_for = [worker for worker in ends if num_waiting[worker]]

    def guilt(worker: int) -> tuple[int, tuple[int, int, int, int], int]:
        position = activities[worker]
        kind = action_kind(position.label)
        phase = max(PHASES.index("W"), PHASES.index(kind)) if kind in PHASES else -1
        behind = (-position.generation, -position.step, -position.attempt, -phase)
        return num_waiting[worker], behind, worker

    return max(waited_for or ends, key=guilt)


def _reachable(edges: Mapping[int, Iterable[int]], start: int) -> set[int]:
    """Finds whom a worker waits for, directly or not."""
    found: set[int] = set()
    todo = list(edges[start])
    while todo:
        worker = todo.pop()
        if worker not in found:
            found.add(worker)
            todo += edges[worker]
    return found
