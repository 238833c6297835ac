"""A long job of a tiny model that loses a worker and gets another one again and again: nothing slows down or grows.

    python benchmarks/soak.py [--steps 2000] [--every 20] [--json]

Real processes, 2 stages x 2 replicas. Every 20 steps a worker is killed and one joins. Reported are the times of the
recoveries in the first and in the last quarter of the job, and what its long-lived processes held (threads,
descriptors, memory) in the second quarter of their lives and in the second half, beside equally many workers. Losses
and state must be those of an undisturbed job of one worker, bit for bit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from elaswave.observability.compare import compare_results
from elaswave.observability.result import RunResult, read_digests, read_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what watches a job is the checkout's

from verify.chaos.growth import Growth, GrowthWatch

MODEL = {
    "model.num_layers": "2",
    "model.hidden_size": "32",
    "model.num_heads": "2",
    "model.context_length": "16",
    "batch.num_microbatches": "4",
    "batch.microbatch_size": "1",
    "elastic.block_size": "1024",
}
WORKERS = 4
LOOK_S = 1.0
TIMEOUT_S = 7200.0


def main() -> int:
    """Runs the benchmark; the exit code is 1 if bits differ, or threads, descriptors or memory have become more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20, help="steps from one loss to the next")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        document = soak(Path(folder), arguments.steps, arguments.every)
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        show(document)
    return 0 if document["good"] else 1


def soak(folder: Path, steps: int, every: int) -> dict[str, Any]:
    """Runs both jobs; returns what is reported."""
    faults = []
    # Worker 0 stays, so that one worker is there from the beginning to the end; the next ones go in their order.
    for number, step in enumerate(range(every // 2, steps - every + 1, every), 1):
        faults += [f"kill:{number}@{step}", f"join@{step + 1}"]
    undisturbed = train(folder / "undisturbed", steps, ["layout.widths=[1]"], [])
    watch = GrowthWatch(folder / "soaked")
    settings = ["layout.widths=[2,2]", "elastic.respawn=false", "elastic.max_failures_per_hour=100000"]
    soaked = train(folder / "soaked", steps, settings, faults, watch)
    same = compare_results(
        undisturbed, soaked, read_digests(folder / "undisturbed"), read_digests(folder / "soaked")
    ).same
    lost = [recovery for recovery in soaked.recoveries if recovery.kind == "lost"]
    times_s = [recovery.total_s - recovery.redo_s for recovery in lost]
    quarter = max(1, len(times_s) // 4)
    first_s, last_s = statistics.median(times_s[:quarter]), statistics.median(times_s[-quarter:])
    growth = watch.growth()
    return {
        "steps": steps,
        "same_bits": same,
        "losses": len(lost),
        "joins": sum(fault.startswith("join") for fault in faults),
        "first_quarter_s": first_s,
        "last_quarter_s": last_s,
        "ratio": last_s / first_s,
        "held": [_as_row(each) for each in growth],
        "good": same and not any(each.is_large for each in growth),
    }


def train(
    run_dir: Path, steps: int, settings: list[str], faults: list[str], watch: GrowthWatch | None = None
) -> RunResult:
    """Trains as a person does, and looks at the processes meanwhile."""
    command = [sys.executable, "-m", "elaswave", "train", "--run-dir", str(run_dir)]
    for setting in [*(f"{key}={value}" for key, value in MODEL.items()), f"run.steps={steps}", *settings]:
        command += ["--set", setting]
    for fault in faults:
        command += ["--fault", fault]
    log = run_dir.with_suffix(".log")
    with open(log, "wb") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ))
        deadline_s = time.monotonic() + TIMEOUT_S
        try:
            while True:
                try:
                    job.wait(LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if watch is not None:
                        watch.look()
                    if time.monotonic() > deadline_s:
                        raise
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
    if job.returncode:
        raise SystemExit(f"the job has ended with exit code {job.returncode}:\n{log.read_text()[-2000:]}")
    return read_result(run_dir)


def _as_row(growth: Growth) -> dict[str, Any]:
    return {"process": growth.name, "before": growth.before._asdict(), "after": growth.after._asdict()}


def show(document: dict[str, Any]) -> None:
    """Prints the table."""
    print(
        f"{document['steps']} steps with {document['losses']} losses and {document['joins']} joins: "
        f"{'the same bits as undisturbed' if document['same_bits'] else 'OTHER BITS than undisturbed'}"
    )
    print(
        f"recoveries: {1e3 * document['first_quarter_s']:.0f} ms in the first quarter, "
        f"{1e3 * document['last_quarter_s']:.0f} ms in the last one: x {document['ratio']:.2f}"
    )
    print(f"{'process':<16}{'threads':>12}{'descriptors':>14}{'MiB':>16}")
    for row in document["held"]:
        before, after = row["before"], row["after"]
        print(
            f"{row['process']:<16}{before['threads']:>5} -> {after['threads']:<4}"
            f"{before['descriptors']:>5} -> {after['descriptors']:<4}"
            f"{before['memory_bytes'] / 2**20:>8.1f} -> {after['memory_bytes'] / 2**20:.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())
