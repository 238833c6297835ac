"""What torchft does when a replica is killed: time to the next committed step, steps discarded, batch kept or shrunk.

The same default GPT, a whole model in each replica, two micro-batches per replica and step, actions paced as ours;
`torchft.Manager` on gloo as its README shows it, tuned as well as its users can: lighthouse heartbeat time-out 200 ms,
manager heartbeats every 50 ms, quorum ticks every 10 ms, process group time-out a little above a step. Used by
`recovery.py`; needs the `bench` extra.
"""

import contextlib
import os
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torchft_replicas import MICROBATCHES, Replica, job, receive, serve_lighthouse

KILL_AT_STEP = 4
STEPS_AFTER = 3


def measure(num_replicas: int, kills: int, action_s: float) -> dict:
    """Kills one replica in each of some jobs.

    Args:
        num_replicas: at the beginning.
        kills: number of jobs.
        action_s: emulated seconds of a forward and a backward action together, for each replica.
    Returns:
        A row of the table.
    """
    gaps_s, discarded, after = [], [], set()
    for number in range(kills):
        gap_s, num_discarded, num_participants = run_job(num_replicas, number % num_replicas, action_s * num_replicas)
        gaps_s.append(gap_s)
        discarded.append(num_discarded)
        after.add(num_participants)
        print(f"torchft, {num_replicas} replicas: {1e3 * gap_s:.0f} ms", file=sys.stderr, flush=True)
    return {
        "replicas": num_replicas,
        "kills": kills,
        "next_commit_median_s": statistics.median(gaps_s),
        "next_commit_worst_s": max(gaps_s),
        "next_commit_s": gaps_s,
        "steps_discarded_median": statistics.median(discarded),
        "microbatches_before": MICROBATCHES * num_replicas,
        "microbatches_after": sorted(MICROBATCHES * count for count in after),
    }


def run_job(num_replicas: int, victim: int, pace_s: float) -> tuple[float, int, int]:
    """One job in which the victim kills itself in the backward pass of a step.

    Returns:
        Seconds from the kill until the slowest survivor has committed a step, steps that survivors discarded, and
        the number of replicas that took part in the next committed step.
    """
    with job() as processes:
        folder = processes.folder
        address = receive(processes.start(serve_lighthouse, num_replicas - 1, folder))
        replicas = [
            processes.start(run_replica, replica, num_replicas, victim, address, folder, pace_s)
            for replica in range(num_replicas)
        ]
        killed_s = receive(replicas[victim])
        answers = [receive(pipe) for pipe in replicas if pipe is not replicas[victim]]
    committed_s = []
    for attempts in answers:
        committed_s.append(min(at_s for at_s, committed, _ in attempts if committed and at_s > killed_s))
    last = answers[0]
    discarded = sum(not committed for at_s, committed, _ in last if at_s > killed_s)
    participants = next(count for at_s, committed, count in last if committed and at_s > killed_s)
    return max(committed_s) - killed_s, discarded, participants


def run_replica(
    replica: int, num_replicas: int, victim: int, lighthouse: str, folder: Path, pace_s: float, pipe: Connection
) -> None:
    """One replica: trains until some steps after the kill, and tells when each step was committed or discarded."""
    trained = Replica(replica, num_replicas - 1, lighthouse, folder, pace_s)
    manager = trained.manager

    def before_backward(microbatch: int) -> None:
        if replica == victim and manager.current_step() >= KILL_AT_STEP and microbatch:
            pipe.send(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    attempts: list[tuple[float, bool, int]] = []
    with contextlib.suppress(KeyboardInterrupt):
        step = stop_at = 0
        while not stop_at or step < stop_at:
            step += 1
            committed = trained.run_attempt(step, before_backward)
            attempts.append((trained.at_s, committed, manager.num_participants()))
            if not stop_at and manager.current_step() >= KILL_AT_STEP + STEPS_AFTER:
                stop_at = step
        pipe.send(attempts)
    wait([pipe])


def print_table(rows: list[dict]) -> None:
    """The rows for people."""
    print("torchft, tuned: milliseconds from the kill until every survivor has committed a step")
    print(f"{'replicas':>8} {'kills':>5} {'median':>7} {'worst':>7} {'discarded':>9} {'micro-batches':>13}")
    for row in rows:
        batch = f"{row['microbatches_before']} -> {', '.join(map(str, row['microbatches_after']))}"
        print(
            f"{row['replicas']:>8} {row['kills']:>5} {1e3 * row['next_commit_median_s']:>7.0f} "
            f"{1e3 * row['next_commit_worst_s']:>7.0f} {row['steps_discarded_median']:>9.0f} {batch:>13}"
        )
