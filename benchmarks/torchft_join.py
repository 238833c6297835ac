"""What torchft's survivors and a new replica go through when the replica joins: times to its first committed step.

Replicas as in `torchft_replicas.py`, whose state is copied: `torchft.Manager` on gloo, HTTP transport of the state as
by default. Used by `join.py`; needs the `bench` extra.
"""

import contextlib
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from torchft_replicas import Replica, job, receive, serve_lighthouse

JOIN_AT_STEP = 8
STEPS_AFTER = 6
"""Of the joiner, before all end."""


def measure(num_replicas: int, joins: int, pace_s: float, settings: tuple[str, ...]) -> dict:
    """One replica joins, in each of some jobs.

    Args:
        num_replicas: before it.
        joins: number of jobs.
        pace_s: of a micro-batch, beside its computation.
        settings: of the model and the data.
    """
    rows = []
    for number in range(joins):
        rows.append(run_job(num_replicas, pace_s, settings))
        print(f"torchft, join {number + 1}: {rows[-1]['first_commit_s']:.2f} s", file=sys.stderr, flush=True)
    return {
        "replicas": num_replicas,
        "joins": joins,
        **{name: statistics.median(row[name] for row in rows) for name in rows[0]},
    }


def run_job(num_replicas: int, pace_s: float, settings: tuple[str, ...]) -> dict[str, float]:
    """One job in which a replica is forked once the others have made some steps."""
    with job() as processes:
        folder = processes.folder
        address = receive(processes.start(serve_lighthouse, num_replicas, folder))
        settled = (num_replicas, address, folder, pace_s, settings)
        replicas = [processes.start(run_replica, replica, *settled) for replica in range(num_replicas)]
        for pipe in replicas:
            receive(pipe)  # it has come to the step
        forked_s = time.monotonic()
        joiner = processes.start(run_replica, num_replicas, *settled)
        receive(joiner)
        theirs = [receive(joiner)]
        while sum(committed for _, committed in theirs) < STEPS_AFTER:
            theirs.append(receive(joiner))
        others = [_arrived(pipe) for pipe in replicas]
    first_s = min(at_s for at_s, committed in theirs if committed)
    normal_s = statistics.median(each for rows in others for each in _durations(rows, 0.0, forked_s)[2:])
    meanwhile = [each for rows in others for each in _durations(rows, forked_s, first_s)]
    return {
        "first_commit_s": first_s - forked_s,
        "normal_s": normal_s,
        "longest_s": max(meanwhile),
        "longest": max(meanwhile) / normal_s,
        "discarded": sum(not committed for at_s, committed in others[0] if forked_s < at_s <= first_s),
    }


def _arrived(pipe: Connection) -> list[tuple[float, bool]]:
    """What a replica has told of its attempts so far."""
    found = []
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll():
            found.append(pipe.recv())
    return found


def _durations(attempts: list[tuple[float, bool]], from_s: float, until_s: float) -> list[float]:
    """From commit to commit, of those that end in a span of time."""
    ends_s = [at_s for at_s, committed in attempts if committed]
    return [end - begin for begin, end in zip(ends_s, ends_s[1:]) if from_s < end <= until_s + 1e-9]


def run_replica(
    replica: int,
    num_replicas: int,
    lighthouse: str,
    folder: Path,
    pace_s: float,
    settings: tuple[str, ...],
    pipe: Connection,
) -> None:
    """One replica, until it is killed; tells when it has come to the step of the join (a joiner: at once), and then
    when each of its attempts has ended."""
    trained = Replica(replica, num_replicas, lighthouse, folder, pace_s, settings, copies_state=True)
    attempts: list[tuple[float, bool]] = []  # that are not told yet
    has_said = replica == num_replicas
    if has_said:
        pipe.send("here")
    with contextlib.suppress(KeyboardInterrupt):
        step = 0
        while True:
            step += 1
            committed = trained.run_attempt(step)
            attempts.append((trained.at_s, committed))
            if not has_said and trained.manager.current_step() >= JOIN_AT_STEP:
                pipe.send("here")
                has_said = True
            if has_said:
                for attempt in attempts:
                    pipe.send(attempt)
                attempts.clear()
