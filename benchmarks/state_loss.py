"""How often a job loses state: all copies of some block, so that it goes back to a checkpoint.

    python benchmarks/state_loss.py [--workers 16384] [--stages 16] [--model llama-2-70b] [--device h100]
        [--widths 2 8 32] [--step-s 10] [--racks 4] [--json]
    python benchmarks/state_loss.py --trace spot-p3-trace.csv [--stages 4] [--model llama-2-7b] [--device a100]

Without a trace: the expected number of losses of state in a year, and their probability, at the rates of Llama 3 for
single workers, for whole hosts and for racks, under placements of several scatter widths, which know hosts alone or
racks too. Fatal sets are counted as the simulator counts them; independent losses then lose state where they fall into
one refill window, which is worked out: N pairs of workers of rate r are lost within a window of w seconds 2 N r^2 w T
times, triples 3 N r^3 w^2 T times. Nothing is drawn. With a trace: the whole simulation, under plans that are made
once, for one and two followers and three intervals of checkpoints.
"""

import argparse
import json
from collections.abc import Iterator
from math import ceil, expm1
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from remembering import Remembering

from elaswave.config.policy_code import other_policies
from elaswave.config.presets import device_preset, model_shape
from elaswave.config.schema import ElasticConfig
from elaswave.planning.costs.analytic import analytic_costs, preset_cluster
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation
from elaswave.planning.policy.policies import make_policies
from elaswave.planning.policy.policy_parts import rectangle
from elaswave.planning.state_moves.placed_blocks import PlacedBlocks, Placing
from elaswave.sim.cluster.failures import DAY_S, RACK_LOSSES_PER_DAY, racks_of, rates_named
from elaswave.sim.cluster.job import simulate
from elaswave.sim.cluster.traces.formats import read_trace

YEAR_S = 365 * DAY_S
INTERVALS_S = (300.0, 1200.0, 3600.0)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16_384)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--model")
    parser.add_argument("--device")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="scatter widths")
    parser.add_argument("--step-s", type=float, default=10.0, help="seconds of a step: a refill takes at least one")
    parser.add_argument("--racks", type=int, default=4, help="hosts of a rack")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = of_trace(options) if options.trace else of_rates(options)
    print(json.dumps(rows, indent=2) if options.json else "\n".join(table(rows)))
    return 0


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """As Markdown."""
    names = list(rows[0])
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in rows:
        yield f"| {' | '.join(f'{value:.3g}' if isinstance(value, float) else str(value) for value in row.values())} |"


# ------------------------------------------------------------------------------------------------------------ at rates


def of_rates(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each placement."""
    device = device_preset(options.device or "h100")
    stages = options.stages or 16
    costs = analytic_costs(model_shape(options.model or "llama-2-70b"), device, recompute=True)
    cluster = preset_cluster(options.workers, device)
    microbatches = options.workers // stages * 8
    job = rectangle(cluster, costs, num_stages=stages, num_microbatches=microbatches, schedule="zero-bubble")
    in_racks = racks_of(int(cluster.node.max()) + 1, options.racks)
    placings = [
        Placing(scatter_width=width, followers=k, racks=racks)
        for k in (1, 2)
        for width in options.widths
        for racks in ((), in_racks)
    ]
    return [of_everybody(k, cluster, costs, job, options) for k in (1, 2)] + [
        of_placing(placing, cluster, costs, job, options) for placing in placings
    ]


def of_placing(
    placing: Placing, cluster: Cluster, costs: Costs, job: Allocation, options: argparse.Namespace
) -> dict[str, Any]:
    """What is lost under the simulator's placement."""
    placed = PlacedBlocks.of(job, cluster, placing, costs)
    sets = sum(1 for _ in placed.fatal_sets(placing.followers + 1))
    hosts = groups_of(cluster, 1)
    racks = groups_of(cluster, options.racks)
    fatal_hosts = sum(placed.lost_with(members) for members in hosts) / len(hosts)
    fatal_racks = sum(placed.lost_with(members) for members in racks) / len(racks)
    senders = placed.num_senders(0)
    name = f"replica peers, {placing.scatter_width}{', in other racks' if placing.racks else ''}"
    return row_of(name, placing.followers, sets, senders, fatal_hosts, fatal_racks, cluster, costs, options)


def of_everybody(
    followers: int, cluster: Cluster, costs: Costs, job: Allocation, options: argparse.Namespace
) -> dict[str, Any]:
    """As it was: first followers on all workers of the stage, hosts unknown, further ones outside of it.

    An owner has followers in as many places as it owns blocks, at most, taken to be any of them. Counted by hand, since
    there are too many to list.
    """
    stage = job.chains[0].stages[0].width
    size = ElasticConfig().block_size or 65536
    parameters = costs.prefix["optimizer_bytes"][-1] / 12  # a master and two slots, float32 each
    blocks = parameters / size / cluster.num_workers
    both_ways = min(1.0, 2 * blocks / (stage - 1))
    per_host = int(np.bincount(cluster.node).max())
    in_rack = per_host * options.racks
    if followers == 1:
        sets = cluster.num_workers * (stage - 1) / 2 * both_ways
        fatal_hosts, fatal_racks = (1 - (1 - both_ways) ** (each * (each - 1) / 2) for each in (per_host, in_rack))
    else:
        sets = cluster.num_workers * blocks
        fatal_hosts = fatal_racks = 0.0  # all of one stage, and the third copy is outside of it
    name = f"all of the stage, {min(stage - 1, 2 * blocks):.0f}"
    senders = min(stage - 1, ceil(2 * blocks))
    return row_of(name, followers, sets, senders, fatal_hosts, fatal_racks, cluster, costs, options)


def row_of(
    name: str, followers: int, sets: float, senders: int, fatal_hosts: float, fatal_racks: float, cluster: Cluster,
    costs: Costs, options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Expected losses of state in a year, by what was lost at one instant or within a window."""
    rate = rates_named("llama3").losses_per_worker_day / DAY_S
    owned = costs.prefix["optimizer_bytes"][-1] / cluster.num_workers
    sent = owned * (1 + followers) / senders
    steps = ceil(sent / ElasticConfig().refill_bytes_per_step)
    window_s = max(cluster.between_nodes.transfer_s(sent), steps * options.step_s)
    singles = (2 * sets * rate**2 * window_s if followers == 1 else 3 * sets * rate**3 * window_s**2) * YEAR_S
    num_hosts = len(groups_of(cluster, 1))
    per_host = cluster.num_workers / num_hosts
    # The same interruptions, if each of them took the whole host of its worker.
    hosts = fatal_hosts * rate * per_host * num_hosts * YEAR_S
    racks = fatal_racks * RACK_LOSSES_PER_DAY * len(groups_of(cluster, options.racks)) * YEAR_S / DAY_S
    return {
        "first followers on": name,
        "followers": followers,
        "fatal sets": f"{sets:,.0f}",
        "refill, s": window_s,
        "single workers, a year": in_a_year(singles),
        "whole hosts, fatal": f"{fatal_hosts:.1%}",
        "whole hosts, a year": in_a_year(hosts),
        "racks, fatal": f"{fatal_racks:.1%}",
        "racks, a year": in_a_year(racks),
    }


def in_a_year(expected: float) -> str:
    """An expected number of times, and the probability of at least one."""
    return f"{expected:.2g} ({-expm1(-expected):.2g})" if expected else "0"


def groups_of(cluster: Cluster, num_hosts: int) -> list[list[int]]:
    """Workers of so many neighbouring hosts each."""
    groups: dict[int, list[int]] = {}
    for worker, node in zip(cluster.ids.tolist(), cluster.node.tolist(), strict=True):
        groups.setdefault(node // num_hosts, []).append(worker)
    return list(groups.values())


# ----------------------------------------------------------------------------------------------------------- of traces


def of_trace(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each placement and number of followers."""
    lines = options.trace.read_text(encoding="utf-8").splitlines()
    life = read_trace(lines, name=options.trace.name)
    device = device_preset(options.device or "a100")
    stages = options.stages or 4
    costs = analytic_costs(model_shape(options.model or "llama-2-7b"), device)
    machines = preset_cluster(life.num_workers_max, device)
    pauses = RecoveryTimes().for_mtbf(life.mtbf_s)
    rows = []
    for followers in (1, 2):
        policies = make_policies(pauses, followers=followers, others=other_policies())
        planner = Remembering(policies["elaswave"])
        placings = [Placing(followers=followers, scatter_width=None, knows_hosts=False)]
        placings += [Placing(followers=followers, scatter_width=width) for width in options.widths]
        for placing in placings:
            row: dict[str, Any] = {
                "first followers on": "all of the stage"
                if placing.scatter_width is None
                else f"replica peers, {placing.scatter_width}",
                "followers": followers,
            }
            for interval_s in INTERVALS_S:
                found = simulate(
                    life, machines, costs, "elaswave", planner.again(),
                    num_stages=stages, num_microbatches=life.num_workers_max // stages * 4 * stages,
                    schedule="zero-bubble", placing=placing,
                    pauses=msgspec.structs.replace(pauses, backup_interval_s=interval_s),
                )  # fmt: skip
                row["times back"] = found.num_rollbacks
                row["of losses"] = found.num_events["lost"]
                row[f"goodput, every {interval_s:g} s"] = f"{found.goodput:.4f}"
                row[f"ETTR, every {interval_s:g} s"] = f"{found.ettr:.4f}"
            rows.append(row)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
