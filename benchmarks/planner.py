"""How long planning takes, from 96 to 1,000,000 workers.

    python benchmarks/planner.py [--workers 1024 1000000] [--runs 5] [--json]

Plans for the loss of 6 workers, in a uniform cluster and in one where every hundredth worker is slow, with all axes and
moves. The model is Llama-2 7B's block, as many times as the pipeline needs; all costs are described, nothing trains.
Times are wall-clock seconds of one call, the best of several; the baselines are not asked.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from harness import machine, print_header

from elaswave.config.presets import device_preset, model_shape
from elaswave.planning.costs.analytic import analytic_costs, preset_cluster
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.policy.fault_free_policies import fault_free
from elaswave.planning.search.planner import plan

SHAPES = {
    96: (8, 32),
    1_024: (16, 62),
    8_192: (32, 126),
    65_536: (64, 190),
    262_144: (128, 254),
    1_000_000: (250, 510),
}
"""Workers -> (stages, transformer blocks)."""
ALLOWED_S = {1_024: 0.05, 1_000_000: 1.0}
NUM_LOST = 6
MICROBATCHES_PER_REPLICA = 8
SLOW_EVERY = 100
SLOW_SPEED = 0.7


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=sorted(SHAPES), choices=sorted(SHAPES))
    parser.add_argument("--runs", type=int, default=5, help="plans of each kind; the fastest counts")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    rows = [measure(workers, slow, options.runs) for workers in options.workers for slow in (False, True)]
    if options.json:
        print(json.dumps({"machine": where, "runs": options.runs, "rows": rows}, indent=2))
    else:
        print_table(rows, where)
    return 1 if any(row["allowed_s"] is not None and row["plan_s"] > row["allowed_s"] for row in rows) else 0


def measure(num_workers: int, slow: bool, num_runs: int) -> dict[str, Any]:
    """Times plans for one size of cluster."""
    num_stages, num_blocks = SHAPES[num_workers]
    preset = device_preset("h200")
    shape = msgspec.structs.replace(model_shape("llama-2-7b"), num_layers=num_blocks)
    costs = analytic_costs(shape, preset)
    cluster = preset_cluster(num_workers, preset)
    if slow:
        cluster = with_stragglers(cluster)
    replicas = num_workers // num_stages
    allocation = fault_free(cluster, costs, num_stages, replicas, MICROBATCHES_PER_REPLICA * replicas)
    spread = np.linspace(0, num_workers - 1, 2 * NUM_LOST + 1).astype(int)[1::2]
    lost = tuple(spread.tolist())
    left = cluster.without(lost)
    event = ClusterEvent(kind="lost", workers=lost)
    times = []
    for _ in range(num_runs):
        started = time.perf_counter()
        found = plan(left, costs, allocation, event)
        times.append(time.perf_counter() - started)
    return {
        "workers": num_workers,
        "stages": num_stages,
        "layers": costs.num_layers,
        "stragglers": slow,
        "plan_s": min(times),
        "allowed_s": ALLOWED_S.get(num_workers),
        "predicted_step_s": found.predicted_step_s,
        "reason": found.reason,
    }


def with_stragglers(cluster: Cluster) -> Cluster:
    """The cluster with every hundredth worker slow."""
    speed = cluster.speed.copy()
    speed[::SLOW_EVERY] = SLOW_SPEED
    return replace(cluster, speed=speed)


def print_table(rows: list[dict[str, Any]], where: dict[str, Any]) -> None:
    """For people."""
    print_header(where)
    print(f"a plan for the loss of {NUM_LOST} workers, Llama-2 7B's block, described for H200")
    print(
        f"{'workers':>9} {'stages':>6} {'layers':>6} {'stragglers':>10} {'plan ms':>9} {'us/worker':>9} {'allowed':>8}"
    )
    for row in rows:
        allowed = "-" if row["allowed_s"] is None else f"{row['allowed_s'] * 1e3:.0f} ms"
        print(
            f"{row['workers']:>9,} {row['stages']:>6} {row['layers']:>6} {'1 %' if row['stragglers'] else 'none':>10} "
            f"{row['plan_s'] * 1e3:>9.1f} {row['plan_s'] / row['workers'] * 1e6:>9.2f} {allowed:>8}"
        )


if __name__ == "__main__":
    sys.exit(main())
