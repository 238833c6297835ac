"""What a spot check takes: a micro-batch run again or probed in all layers, against one that is not checked. And how
soon checks find what is wrong.

    python benchmarks/spot_checks.py [--sizes default 10m] [--pairs 15] [--runs 1000] [--json]

The time: one worker with all layers of the model, in this process; in turns, CPU time. `elastic.spot_checks` is kept by
counting with `elaswave.engine.checks.spot_checks.COST` for the average of both kinds. The delays: the product's choice
of places for many seeds, with 8 micro-batches on 2 x 2 workers of 2 layers each; nothing is computed for them.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import SIZES, configuration, machine, print_header, quartiles

from elaswave.engine.blueprint import Blueprint
from elaswave.engine.checks.spot_checks import COST, CheckKind, SpotChecks
from elaswave.engine.compute import Compute, ComputeRules
from elaswave.engine.reduction import Reduction


class Chosen(SpotChecks):
    """Looks at all places in one way, or at none."""

    kind: CheckKind | None = None

    def due(self, layer: int, microbatch: int) -> CheckKind | None:
        """The same everywhere."""
        return self.kind


def measure(size: str, num_pairs: int) -> dict:
    """One size: quartiles of what each kind adds, in micro-batches."""
    config = configuration(*SIZES[size], "layout.stages=1", "layout.replicas=1")
    blueprint = Blueprint(config)
    layers = {index: blueprint.flat_layer(index, {}) for index in range(blueprint.state.num_layers)}
    reduction = Reduction(0, blueprint.blocks, blueprint.shapes, exact=True)
    reduction.hold(list(layers))
    spots = Chosen(config.run.seed, 1.0, 1, 1)
    compute = Compute(
        ComputeRules(blueprint.model, config.run.seed, has_determinism_check=True),
        layers,
        reduction.accumulators,
        spots=spots,
    )
    with tempfile.TemporaryDirectory() as folder:
        samples = blueprint.open_samples(Path(folder))
        inputs, targets = samples.batch(blueprint.sampler(samples).draws(1, 0), "train")
    exponents = [[40] * len(shape.tensors) for shape in blueprint.shapes]

    def cpu_s(kind: CheckKind | None) -> float:
        spots.kind = kind
        compute.begin(1, exponents)
        begin_s = time.process_time()
        compute.forward(range(len(layers)), 0, inputs, targets)
        compute.backward(range(len(layers)), 0, None)
        return time.process_time() - begin_s

    added: dict[CheckKind, list[float]] = {kind: [] for kind in CheckKind}
    for pair in range(-2, num_pairs):
        plain_s = cpu_s(None)
        for kind, found in added.items():
            ratio = cpu_s(kind) / plain_s - 1
            if pair >= 0:
                found.append(ratio)
    rows = {kind.value: quartiles(found) for kind, found in added.items()}
    return {"size": size, "pairs": num_pairs, **rows, "average": sum(found[1] for found in rows.values()) / len(rows)}


NUM_MICROBATCHES, WIDTH, NUM_LAYERS = 8, 2, 2
"""Of the job whose delays are told: of a step, and workers and layers of a stage."""
FIRST, LATE = (1, 41), (10_000, 20_000)
"""Steps from which something is wrong: among the first, and in the long run."""


def delays(num_runs: int) -> dict:
    """Steps from the one in which something goes wrong to the one in which a check finds it, on average and at most."""
    rows = {}
    for when, steps in (("first 50 steps", FIRST), ("later", LATE)):
        layers, processors = [], []
        for seed in range(num_runs):
            start = random.Random(seed).randrange(*steps)
            layers.append(_delay(seed, start, {0}, {CheckKind.RUN}, set(range(NUM_MICROBATCHES))))
            processors.append(
                _delay(seed, start, set(range(NUM_LAYERS)), set(CheckKind), {*range(0, NUM_MICROBATCHES, 2)})
            )
        rows[when] = {
            "a layer that has become nondeterministic": (statistics.mean(layers), max(layers)),
            "a processor that is wrong in all it does": (statistics.mean(processors), max(processors)),
        }
    return rows


def _delay(seed: int, start: int, layers: set[int], kinds: set[CheckKind], microbatches: set[int]) -> int:
    spots = SpotChecks(seed, 0.005, NUM_MICROBATCHES, WIDTH)
    step = start
    while True:
        spots.begin(step)
        if any(spots.due(layer, microbatch) in kinds for layer in layers for microbatch in microbatches):
            return step - start
        step += 1


def single_runs(num_runs: int) -> float:
    """Of how many runs of a layer in the long run one is done again."""
    spots = SpotChecks(0, 0.005, NUM_MICROBATCHES, WIDTH)
    checked = 0
    steps = range(LATE[0], LATE[0] + 100 * num_runs)
    for step in steps:
        spots.begin(step)
        checked += sum(spots.due(0, microbatch) is CheckKind.RUN for microbatch in range(NUM_MICROBATCHES))
    return NUM_MICROBATCHES * len(steps) / checked


def main() -> int:
    """Runs the benchmark; the exit code is 1 if checks take more than is counted with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["default", "10m"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--runs", type=int, default=1000, help="seeds of which delays are averaged")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    torch.set_num_threads(1)
    where = machine()
    rows = [measure(size, options.pairs) for size in options.sizes]
    if options.json:
        found = {"delays": delays(options.runs), "one_run_of": single_runs(options.runs)}
        print(json.dumps({"machine": where, "rows": rows, **found}, indent=2))
    else:
        print_header(where)
        print("CPU time that a check adds to a micro-batch, in micro-batches (median of pairs, quartiles)")
        print(f"{'size':<8} {'run again':>20} {'probe':>20} {'average':>8}")
        for row in rows:
            kinds = [f"{row[kind][1]:.2f} ({row[kind][0]:.2f} to {row[kind][2]:.2f})" for kind in ("run", "probe")]
            print(f"{row['size']:<8} {kinds[0]:>20} {kinds[1]:>20} {row['average']:>8.2f}")
        print(f"steps until a check finds it, on average and at most of {options.runs} seeds")
        for when, found in delays(options.runs).items():
            for what, (mean, longest) in found.items():
                print(f"{when:<15} {what:<42} {mean:>6.1f} {longest:>5}")
        print(f"a single wrong run of a layer is done again once in {single_runs(options.runs):.0f}")
    return 1 if any(row["average"] > COST for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
