"""What it takes a new worker to join a running job, and what the others notice of it; torchft beside it.

    python benchmarks/join.py [--sizes default 10m] [--joins 5] [--quick] [--json]

Real jobs on emulated devices, one stage of three workers; a fourth joins (``elaswave ctl RUN join``). Shown is the time
from the fork of its process to the first committed step in which it is a member, and to the first in which it computes;
the longest step of the others meanwhile against a normal one; and the capacity that is lost against a worker that
computes from its fork on. See README.md beside this file.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from typing import Any

import torchft_join
from harness import SIZES, configuration, machine, print_header
from live_job import LiveJob, Vote, durations_s

from elaswave.channel.messages.operator import AskJoin
from elaswave.config.schema import Config

REPLICAS = 3
MICROBATCHES = 12
PACE_S = {"default": 0.05, "10m": 0.1, "tiny": 0.01}
"""What a forward action lasts beside its computation; a backward twice as long."""
SHORT = ("model.context_length=32", "batch.microbatch_size=1")
WARM_UP, BEFORE = 3, 5
NEEDED = 1.2
"""The longest step of the others, in normal ones."""


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(PACE_S), default=["default", "10m"])
    parser.add_argument("--joins", type=int, default=5, help="of each size, one per job")
    parser.add_argument("--torchft", type=int, default=3, help="joins of a torchft replica at each size")
    parser.add_argument("--quick", action="store_true", help="one join of a tiny model, to see that all runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.joins, options.torchft = ["tiny"], 1, min(1, options.torchft)
    where = machine()
    rows, baselines = [], []
    has_torchft = importlib.util.find_spec("torchft") is not None
    for size in options.sizes:
        rows.append(_row(size, options.joins))
        if options.torchft and has_torchft:
            settings = (*SIZES[size], *SHORT, f"batch.num_microbatches={MICROBATCHES}")
            found = torchft_join.measure(REPLICAS, options.torchft, 3 * PACE_S[size], settings)
            baselines.append({"size": size, **found})
    where["load_after"] = machine()["load_before"]
    document = {"machine": where, "needed": NEEDED, "rows": rows, "torchft": baselines}
    print(json.dumps(document, indent=2) if options.json else _table(document))
    return 1 if any(row["missed"] for row in rows) else 0


def _row(size: str, joins: int) -> dict[str, Any]:
    found, loads = [], []
    for number in range(joins):
        join, load_cores = _run(_config(size), PACE_S[size])
        found.append(join)
        loads.append(load_cores)
        print(f"{size}, join {number + 1}: {join['computes_s']:.2f} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(join[name] for join in found) for name in found[0]}
    return {
        "size": size,
        "joins": joins,
        **medians,
        "longest_of_all": max(join["longest"] for join in found),
        "all": found,
        "load_cores": statistics.median(loads),
        "missed": medians["longest"] > NEEDED,
    }


def _config(size: str) -> Config:
    return configuration(
        *SIZES[size],
        *SHORT,
        f"batch.num_microbatches={MICROBATCHES}",
        "layout.stages=1",
        f"layout.replicas={REPLICAS}",
        "run.steps=100000",
        "optimizer.schedule=constant",
        "elastic.respawn=false",
    )


def _run(config: Config, pace_s: float) -> tuple[dict[str, float], float]:
    with LiveJob(config, pace_s) as job:
        job.wait_for_step(WARM_UP + BEFORE)
        asked_after = max(job.finished_s())
        (joiner,) = job.ask(lambda request: AskJoin(request=request, num_workers=1))[0].workers
        job.wait_until_it_runs(joiner)
        last = job.wait_for_change(asked_after).first_step
        job.wait_for_step(last + 2)
        finished_s, votes = job.finished_s(), job.votes()
    return join_of(joiner, finished_s, votes), job.load_cores


def join_of(joiner: int, finished_s: dict[int, float], votes: list[Vote]) -> dict[str, float]:
    """What a join was like.

    Args:
        joiner: the new worker.
        finished_s: when each step was done.
        votes: of all workers.
    """
    own = [vote for vote in votes if vote.worker == joiner]
    forked_s = own[0].forked_s
    member, computes = own[0].step, next(vote.step for vote in own if vote.ran)
    durations = durations_s(finished_s)
    begun = min(step for step, at_s in finished_s.items() if at_s > forked_s)
    normal_s = statistics.median(durations[step] for step in range(begun - BEFORE, begun))
    meanwhile = {step: durations[step] for step in range(begun, computes)}
    num_others = len({vote.worker for vote in votes}) - 1
    spent_s = finished_s[computes - 1] - forked_s
    waited_s = sum(durations[step] - normal_s for step in meanwhile)
    copying = [durations[vote.step] for vote in own if vote.moving and vote.step < computes]
    return {
        "member_s": finished_s[member] - forked_s,
        "computes_s": finished_s[computes] - forked_s,
        "normal_s": normal_s,
        "longest_s": max(meanwhile.values()),
        "longest": max(meanwhile.values()) / normal_s,
        "median": statistics.median(meanwhile.values()) / normal_s,
        "pause_s": max(durations[member], durations[member - 1]) - normal_s,
        "switch_s": durations[computes - 1] - normal_s,
        "slowdown": statistics.median(copying) / normal_s - 1 if copying else 0.0,
        "steps": len(meanwhile),
        "lost_worker_s": spent_s + num_others * waited_s,
        "after_s": statistics.median(s for step, s in durations.items() if step > computes),
    }


def _table(document: dict[str, Any]) -> str:
    print_header(document["machine"])
    lines = [
        f"{'program':9} {'size':8} {'joins':>5} {'member':>7} {'computes':>8} {'step':>7} {'longest':>8} {'x':>5} "
        f"{'steps':>5} {'lost':>10} {'after':>7} {'load':>5}"
    ]
    for row in document["rows"]:
        lines.append(
            f"{'elaswave':9} {row['size']:8} {row['joins']:5} {row['member_s']:6.2f}s {row['computes_s']:7.2f}s "
            f"{1e3 * row['normal_s']:5.0f}ms {1e3 * row['longest_s']:6.0f}ms {row['longest']:5.2f} {row['steps']:5.0f} "
            f"{row['lost_worker_s']:8.1f}ws {1e3 * row['after_s']:5.0f}ms {row['load_cores']:5.2f}"
        )
    for row in document["torchft"]:
        lines.append(
            f"{'torchft':9} {row['size']:8} {row['joins']:5} {'':7} {row['first_commit_s']:7.2f}s "
            f"{1e3 * row['normal_s']:5.0f}ms {1e3 * row['longest_s']:6.0f}ms {row['longest']:5.2f}"
        )
    if not document["torchft"]:
        lines.append("skipped: torchft is not installed (see README.md beside this file)")
    for row in document["rows"]:
        verdict = "missed" if row["missed"] else "reached"
        lines.append(f"{row['size']}: longest step {row['longest']:.2f} normal ones, needed {NEEDED}: {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
