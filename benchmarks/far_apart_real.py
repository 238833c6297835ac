"""Training over emulated links, by real processes: the step that virtual time predicts against the measured one.

    python benchmarks/far_apart_real.py [--rates 1 0.2] [--delays 1 0.2] [--steps 8] [--json]

Links and devices are emulated, on this machine. Runs examples/far_apart/gpt2.toml with its links at these shares of
their rates and delays; each run is planned anew by OP-Fence. Predicted: `far_step` for the run's programs,
placement and links. Measured: the median step, the first and the last left out. Needed: within 10 % of each other.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from far_step import far_step
from harness import machine, print_header

from elaswave.config.cluster import cluster_of, emulated_costs
from elaswave.config.load import load_config
from elaswave.engine.blueprint import Blueprint
from elaswave.observability.events import StepCommitted, read_events

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "far_apart" / "gpt2.toml"
VOTE_BYTES = 2000
"""Of a ballot of this model, roughly."""
NEEDED = 0.10


def measure(settings: Sequence[str], num_steps: int) -> dict[str, Any]:
    """A row: one run, and what was predicted for it."""
    settings = [*settings, f"run.steps={num_steps}", "elastic.rebalance=false"]
    config = load_config(EXAMPLE, settings)
    plan = Blueprint(config)
    costs, cluster = emulated_costs(config), cluster_of(config)
    predicted = far_step(plan.layout, plan.programs, plan.placement, plan.blocks, costs, cluster, vote_bytes=VOTE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "elaswave", "train", str(EXAMPLE), "--json", "--run-dir", f"{folder}/run"]
        command += [part for setting in settings for part in ("--set", setting)]
        subprocess.run(command, check=True, capture_output=True, timeout=600, cwd=EXAMPLE.parents[2])
        events = read_events(Path(folder) / "run" / "events.jsonl")
    steps = [event for event in events if isinstance(event, StepCommitted)][1:-1]
    measured_s = statistics.median(step.duration_s for step in steps)
    return {
        "settings": list(settings),
        "layout": list(config.widths),
        "sites": list(config.sites.of_workers or ()),
        "predicted_s": predicted.step_s,
        "measured_s": measured_s,
        "steps_s": [step.duration_s for step in steps],
        "predicted_reduce_s": predicted.prepared_s - predicted.run_s,
        "measured_reduce_s": statistics.median(step.phases_s["reduce"] for step in steps),
        "off": predicted.step_s / measured_s - 1,
    }


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a prediction is too far off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 0.2])
    parser.add_argument("--delays", type=float, nargs="+", default=[1.0, 0.2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], help="section.key=value of every run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print("LINKS AND DEVICES ARE EMULATED on")
        print_header(machine())
        print("| rate | delay | layout | predicted | measured | off |\n|---|---|---|---|---|---|")
    rows = []
    rate = load_config(EXAMPLE).sites.rate
    for share in options.rates:
        for delay in options.delays:
            rows.append(
                measure([*options.set, f"sites.rate={rate * share!r}", f"sites.delay={delay!r}"], options.steps)
            )
            row = rows[-1] = {"rate": share, "delay": delay, **rows[-1]}
            if not options.json:
                print(f"| {share:g} | {delay:g} | {row['layout']} | {row['predicted_s']:.2f} s | "
                      f"{row['measured_s']:.2f} s | {row['off']:+.1%} |", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
    return int(any(abs(row["off"]) > NEEDED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
