"""How long until every survivor computes again after a worker was killed, and where that time goes.

    python benchmarks/recovery.py [--kills 100] [--workers 4 8 16] [--quick] [--json]

Real jobs of the default GPT, workers killed in all phases of a step, on emulated devices (every action is paced, so
that the cores are not saturated) and on saturated cores; hung workers on a line of their own; torchft, where it is
installed, beside it. See README.md beside this file.
"""

import argparse
import importlib.util
import io
import json
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torchft_recovery
from harness import configuration, machine, print_header

from elaswave.config.schema import Config
from elaswave.faults.injection import parse_faults
from elaswave.launcher.launcher import train
from elaswave.observability.progress import make_reporter
from elaswave.observability.result import Recovery
from elaswave.protocol.step.engine import PHASES, Phase

FORWARD_S, BACKWARD_S = 0.010, 0.020
"""Emulated time of one action beside its computation, for each worker of the job: all jobs load the machine alike."""
LAYER_S = 0.005
"""An emulated device ends the layer that it is in before it looks up; a layer takes about as long as it really does."""
KILLS_PER_JOB = 2
FIRST_STEP, STEPS_BETWEEN = 3, 3
"""Steps of the kills; in between new followers are filled."""
NUM_STEPS = FIRST_STEP + STEPS_BETWEEN * (KILLS_PER_JOB - 1) + 1
"""Of a job."""
SKIPPED = {"forward": 2, "backward": 2, "reduce": 3, "vote": 1, "apply": 8, "gather": 2}
"""A kill strikes before one of so many first actions of its phase."""
NEEDED_S: dict[tuple[int, str, str], tuple[float, float | None]] = {
    (8, "paced", "kill"): (0.050, 0.150),
    (8, "saturated", "kill"): (0.080, None),
}
"""Median and worst that are allowed, by workers, mode and fault."""
PARTS = ("detect_s", "agree_s", "plan_s", "edit_s", "promote_s")
TORCHFT_REPLICAS = (3, 8)


class Pace:
    """A probe that lets every action last as long as on a device of its own: the cores are not saturated."""

    def __init__(self, num_workers: int) -> None:
        self._seconds: dict[Phase, float] = {"forward": FORWARD_S * num_workers, "backward": BACKWARD_S * num_workers}

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """See `elaswave.faults.injection.Probe`; sleeps layer by layer, as computing looks up between layers."""
        end_s = time.monotonic() + self._seconds.get(phase, 0.0)
        while (left_s := end_s - time.monotonic()) > 0.0:
            time.sleep(min(LAYER_S, left_s))
            machine.links.check()


@dataclass
class Line:
    """All recoveries of one kind."""

    workers: int
    mode: str
    fault: str
    recoveries: list[Recovery] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """Cores that each job has kept busy."""
    digests: set[str] = field(default_factory=set)

    def row(self) -> dict:
        """As a row of the table."""
        waited_s = [recovery.total_s - recovery.redo_s for recovery in self.recoveries]
        median_s, worst_s = statistics.median(waited_s), max(waited_s)
        needed = NEEDED_S.get((self.workers, self.mode, self.fault))
        return {
            "workers": self.workers,
            "mode": self.mode,
            "fault": self.fault,
            "count": len(waited_s),
            "median_s": median_s,
            "worst_s": worst_s,
            "needed_s": needed,
            "missed": needed is not None and (median_s > needed[0] or (needed[1] is not None and worst_s > needed[1])),
            "parts_s": {
                part: statistics.median(getattr(each, part) or 0.0 for each in self.recoveries) for part in PARTS
            },
            "worst_parts_s": {part: max(getattr(each, part) or 0.0 for each in self.recoveries) for part in PARTS},
            "redo_s": statistics.median(each.redo_s for each in self.recoveries),
            "waited_s": waited_s,
            "detected_by": {
                name: sum(each.detected_by == name for each in self.recoveries)
                for name in sorted({each.detected_by or "-" for each in self.recoveries})
            },
            "critical_bytes": sum(each.critical_bytes for each in self.recoveries),
            "load_cores": statistics.median(self.loads),
            "same_bits": len(self.digests) == 1,
        }


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed or bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 4, 16], help="two stages of half as many")
    parser.add_argument("--modes", nargs="+", choices=("paced", "saturated"), default=["paced", "saturated"])
    parser.add_argument("--kills", type=int, default=100, help="of each size and mode")
    parser.add_argument("--hangs", type=int, default=3, help="of each size, paced")
    parser.add_argument("--torchft", type=int, default=10, help="kills of torchft at each number of replicas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="six kills at 8 workers only, to see that all runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    if options.quick:
        options.workers, options.kills, options.hangs, options.torchft = [8], 6, 1, 1

    where = machine()
    lines = []
    for num_workers in options.workers:
        for mode in options.modes:
            lines.append(measure(Line(num_workers, mode, "kill"), options.kills, options.seed))
        if options.hangs:
            lines.append(measure(Line(num_workers, "paced", "hang"), options.hangs, options.seed))
    rows = [line.row() for line in lines]
    baselines: list[dict] = []
    if options.torchft and importlib.util.find_spec("torchft"):
        baselines = [
            torchft_recovery.measure(replicas, options.torchft, FORWARD_S + BACKWARD_S) for replicas in TORCHFT_REPLICAS
        ]
    where["load_after"] = machine()["load_before"]
    if options.json:
        print(json.dumps({"machine": where, "rows": rows, "torchft": baselines}, indent=2))
    else:
        print_table(rows, baselines, where)
    return 1 if any(row["missed"] or not row["same_bits"] for row in rows) else 0


def job_config(num_workers: int, num_steps: int) -> Config:
    """The default GPT on two stages, with two micro-batches for each worker of a stage, at least 8."""
    return configuration(
        "layout.stages=2",
        f"layout.replicas={num_workers // 2}",
        f"batch.num_microbatches={max(8, num_workers)}",
        f"run.steps={num_steps}",
        "elastic.respawn=false",
    )


def measure(line: Line, count: int, seed: int) -> Line:
    """Runs jobs until so many workers have been lost."""
    for _ in jobs(line, count, seed, job_config(line.workers, NUM_STEPS)):
        pass
    return line


def jobs(line: Line, count: int, seed: int, config: Config) -> Iterator[None]:
    """Runs jobs, one after the other, until so many workers have been lost; each time a job has ended, it is the
    caller's turn."""
    draw, per_job = random.Random(f"{seed} {line}"), 1 if line.fault == "hang" else KILLS_PER_JOB
    for number in range(2 * count):
        if len(line.recoveries) >= count:
            return
        run_job(line, config, list(_faults(line.fault, config, number * per_job, per_job, draw)))
        yield


def _faults(kind: str, config: Config, first: int, count: int, draw: random.Random) -> Iterator[str]:
    """Faults in the phases' order, of workers whose stage keeps a worker."""
    left = {stage: list(range(stage * width, (stage + 1) * width)) for stage, width in enumerate(config.widths)}
    for index in range(count):
        stage = draw.choice([stage for stage, workers in left.items() if len(workers) > 1])
        worker = left[stage].pop(draw.randrange(len(left[stage])))
        phase = "forward" if kind == "hang" else PHASES[(first + index) % len(PHASES)]
        yield f"{kind}:{worker}@{FIRST_STEP + STEPS_BETWEEN * index}:{phase}+{draw.randrange(SKIPPED[phase])}"


def run_job(line: Line, config: Config, specs: Sequence[str]) -> None:
    """One job; adds its recoveries to the line."""
    faults = parse_faults(specs, seed=config.run.seed, workers=range(sum(config.widths)), num_steps=config.run.steps)
    folder = Path(tempfile.mkdtemp(prefix="elaswave-bench-"))
    try:
        begin_s, begin_cpu_s = time.monotonic(), _cpu_s()
        result = train(
            config,
            folder,
            reporter=make_reporter(json_mode=True, stream=io.StringIO()),
            probe=Pace(line.workers) if line.mode == "paced" else None,
            faults=faults,
        )
        line.loads.append((_cpu_s() - begin_cpu_s) / (time.monotonic() - begin_s))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    recoveries = [each for each in result.recoveries if each.is_failure]
    line.recoveries += recoveries
    line.digests.add(result.state_digest)
    waited = ", ".join(f"{1e3 * (each.total_s - each.redo_s):.0f} ms" for each in recoveries)
    print(f"{line.workers} workers, {line.mode}: {' '.join(specs)}: {waited}", file=sys.stderr, flush=True)


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def print_table(rows: list[dict], baselines: list[dict], where: dict) -> None:
    """The rows for people."""
    print_header(where)
    print("milliseconds from the fault until every survivor computes again; parts: medians (worst)")
    print(
        f"{'workers':>7} {'mode':<9} {'fault':<5} {'count':>5} {'load':>5} {'median':>7} {'worst':>7} {'needed':>9} "
        + " ".join(f"{part.removesuffix('_s'):>11}" for part in PARTS)
        + f" {'redo':>6} {'bits':>5}"
    )
    for row in rows:
        needed = "-" if row["needed_s"] is None else " / ".join(f"{1e3 * s:.0f}" for s in row["needed_s"] if s)
        parts = (f"{_ms(row['parts_s'][part])} ({_ms(row['worst_parts_s'][part])})" for part in PARTS)
        print(
            f"{row['workers']:>7} {row['mode']:<9} {row['fault']:<5} {row['count']:>5} {row['load_cores']:>5.2f} "
            f"{_ms(row['median_s']):>7} {_ms(row['worst_s']):>7} {needed:>9} "
            + " ".join(f"{part:>11}" for part in parts)
            + f" {_ms(row['redo_s']):>6} {'same' if row['same_bits'] else 'NOT':>5}"
        )
    if baselines:
        torchft_recovery.print_table(baselines)
    else:
        print("skipped: torchft is not installed (the `bench` extra has it)")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 0.01 else f"{1e3 * seconds:.0f}"


if __name__ == "__main__":
    sys.exit(main())
