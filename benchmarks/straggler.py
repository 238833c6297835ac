"""Throughput with one worker at half speed, with the planner's reaction and without, against what arithmetic permits.

    python benchmarks/straggler.py [--factor 0.5] [--worker 1] [--time-scale 300] [--rounds 1] [--quick] [--json]

Real processes on emulated devices: 2 stages x 2 replicas, 32 micro-batches. From step 4 on one worker is slow
(``--fault slow:W@4:F``). One job of a round reacts, as a job does by default, the other (``elastic.rebalance = false``)
does not; it stops earlier. Both must have the same losses, bit for bit. See README.md beside this file.
"""

import argparse
import io
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import configuration, machine, print_header

from elaswave.config.cluster import emulated_costs
from elaswave.config.presets import model_shape
from elaswave.config.schema import Config
from elaswave.faults.injection import parse_faults
from elaswave.launcher.launcher import train
from elaswave.observability.events import StepCommitted, read_events
from elaswave.observability.progress import make_reporter
from elaswave.observability.result import RunResult
from elaswave.observability.run_folder import EVENTS_FILE
from elaswave.planning.costs.layers import Costs
from elaswave.planning.search.apportionment import apportion

STAGES, REPLICAS = 2, 2
SLOW_FROM = 4
STEPS_WITHOUT = SLOW_FROM + 5
"""Of the job that does not react."""
WARM_UP = 1
"""Steps at the beginning, and after the slow-down or the change of layout, that are not measured."""
NEEDED = 0.97
"""Of what whole micro-batches permit."""
LOAD_MAX = 1.2


class Job(NamedTuple):
    """A run that has ended."""

    result: RunResult
    durations_s: dict[int, float]
    """By step."""
    load_cores: float


def main() -> int:
    """Runs the benchmark; the exit code is 1 if the target was missed or bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factor", type=float, default=0.5, help="the slow worker's share of its speed")
    parser.add_argument("--worker", type=int, default=1, choices=range(STAGES * REPLICAS), help="the slow one")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--device", default="a100")
    parser.add_argument("--steps", type=int, default=18, help="of the job that reacts")
    parser.add_argument("--time-scale", type=float, default=300.0, help="real seconds of a described one")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of jobs")
    parser.add_argument("--quick", action="store_true", help="8 micro-batches, many short steps, to see that all runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.microbatches, arguments.time_scale, arguments.steps = 8, 20.0, 40
    where = machine()
    if not arguments.json:
        print_header(where)
    rows = [_row(number, arguments) for number in range(arguments.rounds)]
    reached = statistics.median(row["with"]["of_whole"] for row in rows)
    document = {
        "machine": where,
        "slow_worker": arguments.worker,
        "factor": arguments.factor,
        "rows": rows,
        "of_whole": reached,
        "needed": NEEDED,
        "missed": reached < NEEDED or not all(row["same_bits"] for row in rows),
    }
    print(json.dumps(document, indent=2) if arguments.json else _table(document))
    return 1 if document["missed"] else 0


def _row(number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One pair of jobs."""
    jobs = {}
    order = ("with", "without") if number % 2 == 0 else ("without", "with")
    for name in order:
        jobs[name] = _run(_config(arguments, reacts=name == "with"), arguments)
        print(f"round {number + 1}, {name} the reaction: done", file=sys.stderr, flush=True)
    config = _config(arguments, reacts=True)
    speeds = [arguments.factor if worker == arguments.worker else 1.0 for worker in range(STAGES * REPLICAS)]
    costs = emulated_costs(config)
    whole_s = best_whole_s(costs, speeds, arguments.microbatches)
    divisible_s = arguments.microbatches * costs.between("busy_s", 0, costs.num_layers) / sum(speeds)
    row: dict[str, Any] = {"whole_s": whole_s, "divisible_s": divisible_s}
    for name, job in jobs.items():
        last = job.result.generations[-1]
        begun = max(SLOW_FROM, last.first_step) + WARM_UP
        after = [s for step, s in job.durations_s.items() if step >= begun]
        step_s = statistics.median(after)
        row[name] = {
            "fault_free_step_s": statistics.median(
                s for step, s in job.durations_s.items() if WARM_UP < step < SLOW_FROM
            ),
            "step_s": step_s,
            "num_steps": len(after),
            "predicted_step_s": last.predicted_step_s,
            "changed_before_step": [each.first_step for each in job.result.generations[1:]],
            "microbatches_per_s": arguments.microbatches / step_s,
            "of_whole": whole_s / step_s,
            "of_divisible": divisible_s / step_s,
            "reason": last.reason,
            "load_cores": job.load_cores,
        }
    row["gain"] = row["without"]["step_s"] / row["with"]["step_s"]
    losses = [jobs[name].result.losses[:STEPS_WITHOUT] for name in ("with", "without")]
    row["same_bits"] = losses[0] == losses[1]
    return row


def best_whole_s(costs: Costs, speeds: Sequence[float], num_microbatches: int) -> float:
    """The shortest step of two stages of two workers, if each worker runs whole micro-batches of its stage's layers.

    Pipelines are taken to fill and drain at once, and steps to cost nothing beside their actions: no program reaches
    it. Layouts in which neighbours share a layer may.

    Args:
        costs: of the layers.
        speeds: of the workers, stage by stage.
        num_microbatches: of a step.
    """
    stages = [np.array(speeds[:REPLICAS]), np.array(speeds[REPLICAS:])]
    # The pace of each stage, in seconds of one micro-batch on a worker of speed 1.
    paces = [float((apportion(num_microbatches, 1 / own) / own).max()) for own in stages]
    return min(
        max(
            paces[0] * costs.between("busy_s", 0, cut),
            paces[1] * costs.between("busy_s", cut, costs.num_layers),
        )
        for cut in range(1, costs.num_layers)
    )


def _config(arguments: argparse.Namespace, *, reacts: bool) -> Config:
    return configuration(
        "device.kind=emulated",
        f"device.model={arguments.model}",
        f"device.name={arguments.device}",
        f"device.time_scale={arguments.time_scale}",
        f"model.num_layers={model_shape(arguments.model).num_layers}",
        "model.hidden_size=16",
        "model.num_heads=2",
        "model.context_length=8",
        "batch.microbatch_size=1",
        f"batch.num_microbatches={arguments.microbatches}",
        f"layout.stages={STAGES}",
        f"layout.replicas={REPLICAS}",
        f"run.steps={arguments.steps if reacts else STEPS_WITHOUT}",
        "optimizer.schedule=constant",  # the cosine depends on the number of steps
        f"elastic.rebalance={str(reacts).lower()}",
    )


def _run(config: Config, arguments: argparse.Namespace) -> Job:
    specs = [f"slow:{arguments.worker}@{SLOW_FROM}:{arguments.factor}"]
    faults = parse_faults(specs, seed=1, workers=range(STAGES * REPLICAS), num_steps=config.run.steps)
    reporter = make_reporter(json_mode=True, stream=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        begin_s, used_s = time.monotonic(), _used_s()
        result = train(config, run_dir, reporter=reporter, faults=faults)
        load_cores = (_used_s() - used_s) / (time.monotonic() - begin_s)
        events = read_events(run_dir / EVENTS_FILE)
    return Job(result, {e.step: e.duration_s for e in events if isinstance(e, StepCommitted)}, load_cores)


def _used_s() -> float:
    """Processor seconds of this process and its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _table(document: dict[str, Any]) -> str:
    lines = [
        f"{'round':>5} {'reaction':8} {'fault_free':>8} {'slow':>8} {'predicted':>9} {'whole':>8} {'of whole':>8} "
        f"{'of divisible':>12} {'changed before':>14} {'load':>5}"
    ]
    for number, row in enumerate(document["rows"], start=1):
        for name in ("with", "without"):
            job = row[name]
            predicted = "-" if job["predicted_step_s"] is None else f"{job['predicted_step_s']:.3f}s"
            changed = ",".join(map(str, job["changed_before_step"])) or "never"
            lines.append(
                f"{number:5} {name:8} {job['fault_free_step_s']:7.3f}s {job['step_s']:7.3f}s {predicted:>9} "
                f"{row['whole_s']:7.3f}s {job['of_whole']:8.3f} {job['of_divisible']:12.3f} {changed:>14} "
                f"{job['load_cores']:5.2f}"
            )
        lines.append(f"      gain {row['gain']:.2f}, bits {'equal' if row['same_bits'] else 'OTHER'}")
    busy = [row for row in document["rows"] if max(row["with"]["load_cores"], row["without"]["load_cores"]) > LOAD_MAX]
    if busy:
        lines.append(f"{len(busy)} pairs kept more than {LOAD_MAX} cores busy: their pace is not to be trusted")
    verdict = "missed" if document["missed"] else "reached"
    lines.append(f"of whole, median: {document['of_whole']:.3f}, needed {document['needed']}: {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
