"""How the grids of exact sums do: steps tried again, rows far below their tensor's maximum, and whether there are such.

    python benchmarks/grids.py [--size default] [--steps 1500] [--tensors ordinary alternates rare] [--json]

1. Errors of the mean of 8 micro-batches in rows that are 1e-3 to 1e-13 of their tensor's largest gradient, exact sums
   beside float32 sums.
2. Retries of whole trainings: the recipe as it is; with a tensor whose gradients are 2**-40 of the ordinary in every
   other step (`alternates`); with one whose gradients are zero but in one step of 50 (`rare`).
3. Rows (of the last dimension) of the real gradients in every 25th of those steps, by how far their largest element is
   below their tensor's. See README.md beside this file.
"""

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from harness import SIZES, configuration, machine, print_header, with_steps
from torch import nn

from elaswave.blocks.shapes import LayerShape, TensorSlot, next_exponent
from elaswave.hashing import signed64
from elaswave.launcher.launcher import train
from elaswave.models.gpt import gpt
from elaswave.models.layers import Layer, ModelSpec
from elaswave.observability.progress import make_reporter
from elaswave.state.sums import ExactAccumulator, offset, reduced_gradient
from elaswave.training import definition as builtin

SCALES = tuple(10.0**-decade for decade in range(3, 14))
"""Size of a row, as a share of the tensor's largest gradient."""
NUM_MICROBATCHES = 8
SHRUNK = 2.0**-40
RARE_PERIOD = 50
SAMPLE_PERIOD = 25
_ROWS_FILE = "rows.json"
_step = 0
"""The step in hand of the worker that this process has become; layers know none."""


class Scaled(nn.Module):
    """A layer with one more tensor, a factor of its output that starts at 1 and whose gradients are scaled by step.

    Args:
        inner: the layer.
        width: of its output.
        kind: "alternates" or "rare".
    """

    def __init__(self, inner: nn.Module, width: int, kind: str) -> None:
        super().__init__()
        self.inner = inner
        self.factor = nn.Parameter(torch.ones(width))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output times the factor."""
        if self.kind == "alternates":
            scale = SHRUNK if _step % 2 else 1.0
        else:
            scale = 0.0 if _step % RARE_PERIOD else 1.0
        factor = self.factor.detach() + scale * (self.factor - self.factor.detach())
        output: torch.Tensor = self.inner(x) * factor
        return output


class Watch:
    """Tells the layers the step, and counts rows of gradients by decades below their tensor's largest element.

    Args:
        folder: for the counts.
        last_step: at whose vote they are written.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.folder = folder
        self.last_step = last_step
        self.rows: Counter[int] = Counter()

    def reached(self, phase: str, index: int, machine: Any) -> None:
        """See `elaswave.faults.injection.Probe`."""
        global _step
        _step = machine.step
        if (phase, machine.attempt) == ("vote", 1) and machine.step % SAMPLE_PERIOD == 0:
            for accumulator in machine.engine.compute.accumulators.values():
                self._count(accumulator, machine)
        if (phase, machine.step) == ("vote", self.last_step):
            (self.folder / _ROWS_FILE).write_text(json.dumps(self.rows))

    def _count(self, accumulator: ExactAccumulator, machine: Any) -> None:
        for slot in accumulator.shape.tensors:
            if len(slot.shape) < 2:
                continue
            constants = machine.layout.num_microbatches * offset(machine.progress.grids.exponents[slot.id])
            units = accumulator.sum[slot.offset : slot.stop] - signed64(constants)
            largest = units.double().abs().view(slot.shape).amax(dim=-1).flatten()
            for row in largest.tolist():
                self.rows[_decades(row, float(largest.max()))] += 1


def _decades(row: float, largest: float) -> int:
    """How many whole decades a row is below the largest; -1 for zero."""
    return -1 if row == 0.0 else math.floor(math.log10(largest / row))


def errors_by_scale() -> list[dict]:
    """Relative errors (root of the sum of squares) of rows of 4,096 elements, for exact and for float32 sums."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for scale in SCALES:
        gradients = [torch.randn(2, 4096, generator=generator) for _ in range(NUM_MICROBATCHES)]
        for gradient in gradients:
            gradient[1] *= scale
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        shape = LayerShape(0, (TensorSlot(0, "t", 0, (2, 4096), 0, 8192, True),), 8192)
        exponent = next_exponent(largest, 0, NUM_MICROBATCHES)
        exact = ExactAccumulator(shape)
        exact.reset([exponent])
        plain = torch.zeros(2, 4096)
        for gradient in gradients:
            exact.add([gradient])
            plain += gradient
        mean = reduced_gradient(exact.sum, shape, 0, [exponent], NUM_MICROBATCHES).view(2, 4096)[1].double()
        true = sum(gradient[1].double() for gradient in gradients) / NUM_MICROBATCHES
        float32 = plain[1].double() / NUM_MICROBATCHES
        rows.append({
            "scale": scale,
            "exact": float((mean - true).norm() / true.norm()),
            "float32": float((float32 - true).norm() / true.norm()),
        })  # fmt: skip
    return rows


def retries_of(kind: str, size: str, num_steps: int) -> dict:
    """Trains with one worker, and counts the steps that were tried again and the rows of gradients."""
    config = configuration(*SIZES[size], "layout.stages=1", "layout.replicas=1")
    builtin.MODELS["gpt"] = gpt if kind == "ordinary" else _family(kind)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "progress.log", "w") as log:
            reporter = make_reporter(json_mode=True, stream=log)
            train(with_steps(config, num_steps), folder / "run", reporter=reporter, probe=Watch(folder, num_steps))
        lines = (folder / "run" / "events.jsonl").read_text().splitlines()
        rows = json.loads((folder / _ROWS_FILE).read_text())
    events = [msgspec.json.decode(line) for line in lines]
    reasons = Counter(reason for event in events if event["kind"] == "step" for reason in event["retries"])
    decades = {int(decade): count for decade, count in rows.items()}
    return {"tensors": kind, "size": size, "steps": num_steps, "retries": dict(reasons), "rows": decades}


def _family(kind: str) -> Callable[..., ModelSpec]:
    def family(**sizes: float) -> ModelSpec:
        model = gpt(**sizes)
        middle = len(model.layers) // 2
        spec = model.layers[middle]
        layers = list(model.layers)
        build = lambda: Scaled(spec.build(), int(sizes["hidden_size"]), kind)  # noqa: E731
        layers[middle] = Layer(spec.name, build)
        return ModelSpec(tuple(layers), model.loss)

    return family


def main() -> int:
    """Runs the benchmark; the exit code is 1 if an ordinary training tried a step again beside the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["ordinary", "alternates", "rare"]
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tensors", choices=kinds, nargs="*", default=kinds)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    if not options.json:
        print_header(where)
    errors = errors_by_scale()
    if not options.json:
        print("relative error of rows that are this share of their tensor's largest gradient")
        print(f"{'share':>8} {'exact sums':>11} {'float32 sums':>13}")
        for row in errors:
            print(f"{row['scale']:>8.0e} {row['exact']:>11.1e} {row['float32']:>13.1e}")
    runs = []
    for kind in options.tensors:
        runs.append(retries_of(kind, options.size, options.steps))
        if not options.json:
            print_run(runs[-1])
    if options.json:
        print(json.dumps({"machine": where, "errors": errors, "runs": runs}, indent=2))
    return 1 if any(run["tensors"] == "ordinary" and sum(run["retries"].values()) > 1 for run in runs) else 0


def print_run(run: dict) -> None:
    """What came of one training."""
    print(f"\n{run['tensors']}: {run['steps']} steps, size {run['size']}; tried again:")
    for reason, count in run["retries"].items():
        print(f"  {count:>5} times: {reason}", flush=True)
    if run["tensors"] != "ordinary":
        return
    total = sum(run["rows"].values())
    print(f"  rows of gradients by decades below their tensor's largest (of {total}):")
    for decade, count in sorted(run["rows"].items()):
        print(f"  {'zero' if decade < 0 else decade:>5}: {count}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
