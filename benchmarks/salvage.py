"""What runs again after a kill in the midst of a step, and how long that takes, with and without what survivors keep.

    python benchmarks/salvage.py [--model gpt2-small] [--device a100] [--time-scale 600] [--rounds 1] [--quick] [--json]

Real processes on emulated devices: 2 stages x 4 replicas, 32 micro-batches. In each job one worker is killed at one
point of step 3. Jobs come in pairs: one keeps what survivors have of the step, as a job does by default, the other
(``elastic.salvage = false``) runs the whole step again. All must have the same bits. See README.md beside this file.
"""

import argparse
import io
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import configuration, machine, print_header

from elaswave.config.presets import model_shape
from elaswave.config.schema import Config
from elaswave.faults.injection import parse_faults
from elaswave.launcher.launcher import train
from elaswave.observability.events import StepCommitted, read_events
from elaswave.observability.progress import make_reporter
from elaswave.observability.run_folder import EVENTS_FILE

STAGES, REPLICAS = 2, 4
STEP, STEPS = 3, 4
NEEDED = 3.0
"""Times fewer micro-batches that run again, in the median."""
LOAD_MAX = 1.4


def main() -> int:
    """Runs the benchmark; the exit code is 1 if the target was missed or bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--device", default="a100")
    parser.add_argument("--time-scale", type=float, default=600.0, help="real seconds of a described one")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of jobs for each point")
    parser.add_argument("--quick", action="store_true", help="two points, short steps, to see that all runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    arguments = parser.parse_args()
    points = points_of(arguments.microbatches // REPLICAS)
    if arguments.quick:
        arguments.microbatches, arguments.time_scale = 8, 50.0
        points = points_of(2)[-2:]
    where = machine()
    if not arguments.json:
        print_header(where)
    rows = [_row(point, number, arguments) for number in range(arguments.rounds) for point in points]
    fewer = statistics.median(row["fewer"] for row in rows)
    document = {
        "machine": where,
        "rows": rows,
        "fewer": fewer,
        "faster": statistics.median(row["faster"] for row in rows),
        "needed": NEEDED,
        "missed": fewer < NEEDED or len({row["digest"] for row in rows}) > 1,
    }
    print(json.dumps(document, indent=2) if arguments.json else _table(document))
    return 1 if document["missed"] else 0


def points_of(each: int) -> list[str]:
    """Where a worker is killed, in the order of a step.

    Args:
        each: micro-batches of a worker.
    """
    first, last = 1, STAGES * REPLICAS - 2
    return [
        f"kill:{first}@{STEP}:forward+{each // 4}",
        f"kill:{last}@{STEP}:forward+{each // 2}",
        f"kill:{first}@{STEP}:backward+{each // 4}",
        f"kill:{last}@{STEP}:backward+{each // 2}",
        f"kill:{first}@{STEP}:backward+{3 * each // 4}",
        f"kill:{last}@{STEP}:backward+{each - 1}",
        f"kill:{first}@{STEP}:reduce",
        f"kill:{last}@{STEP}:vote",
    ]


def _row(point: str, number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One pair of jobs."""
    order = (True, False) if number % 2 == 0 else (False, True)
    jobs = {keeps: _run(_config(arguments, keeps=keeps), point) for keeps in order}
    print(f"round {number + 1}, {point}: done", file=sys.stderr, flush=True)
    return {
        "fault": point,
        "with": jobs[True],
        "without": jobs[False],
        "fewer": jobs[False]["recomputed"] / max(1, jobs[True]["recomputed"]),
        "faster": jobs[False]["redo_s"] / jobs[True]["redo_s"],
        "digest": jobs[True]["digest"] if jobs[True]["digest"] == jobs[False]["digest"] else f"differs at {point}",
    }


def _config(arguments: argparse.Namespace, *, keeps: bool) -> Config:
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
        f"run.steps={STEPS}",
        "elastic.rebalance=false",
        "elastic.respawn=false",
        f"elastic.salvage={str(keeps).lower()}",
    )


def _run(config: Config, point: str) -> dict[str, Any]:
    faults = parse_faults([point], seed=1, workers=range(STAGES * REPLICAS), num_steps=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        begin_s, used_s = time.monotonic(), _used_s()
        reporter = make_reporter(json_mode=True, stream=io.StringIO())
        result = train(config, run_dir, reporter=reporter, faults=faults)
        load_cores = (_used_s() - used_s) / (time.monotonic() - begin_s)
        steps = {e.step: e.duration_s for e in read_events(run_dir / EVENTS_FILE) if isinstance(e, StepCommitted)}
    (recovery,) = (each for each in result.recoveries if each.is_failure)
    return {
        "recomputed": recovery.num_microbatches_recomputed,
        "outcome": recovery.outcome,
        "redo_s": recovery.redo_s,
        "step_s": steps[STEP - 1],
        "load_cores": load_cores,
        "digest": result.state_digest,
    }


def _used_s() -> float:
    """Processor seconds of this process and its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _table(document: dict[str, Any]) -> str:
    lines = [
        f"{'fault':24} {'step':>8} {'run again: with':>15} {'without':>8} {'fewer':>6} {'redo with':>10} "
        f"{'without':>8} {'faster':>6} {'load':>5}"
    ]
    for row in document["rows"]:
        kept, whole = row["with"], row["without"]
        lines.append(
            f"{row['fault']:24} {whole['step_s']:7.2f}s {kept['recomputed']:15} {whole['recomputed']:8} "
            f"{row['fewer']:6.2f} {kept['redo_s']:9.2f}s {whole['redo_s']:7.2f}s {row['faster']:6.2f} "
            f"{max(kept['load_cores'], whole['load_cores']):5.2f}"
        )
    busy = [row for row in document["rows"] if max(row[name]["load_cores"] for name in ("with", "without")) > LOAD_MAX]
    if busy:
        lines.append(f"{len(busy)} pairs kept more than {LOAD_MAX} cores busy: their times are not to be trusted")
    bits = "equal" if len({row["digest"] for row in document["rows"]}) == 1 else "OTHER"
    lines.append(f"medians: {document['fewer']:.2f} times fewer run again (needed {document['needed']:.0f}), redone "
                 f"{document['faster']:.2f} times as fast; bits {bits}")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
