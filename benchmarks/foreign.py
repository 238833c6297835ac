"""What a foreign part costs: forward and backward of one layer by a server, against the same layer in the worker.

    python benchmarks/foreign.py [--widths 64 512 1024] [--rows 512] [--rounds 20] [--json]

The layer is ``tanh(x @ weight + bias)`` in torch on both sides, with the same bits, in one thread each, in turns. A
backward of the server computes the forward again, which a layer in the worker does not; "recomputed" is that layer with
its forward run twice. "same" is the time with the parameters of the call before, "new" with parameters that a step has
changed, which are sent. See README.md beside this file.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import machine, print_header
from torch import nn

import elaswave

PART = """
import torch


class Part(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.map = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.map(x).tanh()
"""


def sides_of(file: Path, width: int, rows: int) -> dict[str, Callable[[], None]]:
    """One forward and backward each."""
    part = elaswave.Foreign(f"{file}:Part", software="torch", options={"width": width})
    linear = nn.Linear(width, width)
    with torch.no_grad():
        linear.weight.copy_(part.get_parameter("map.weight"))
        linear.bias.copy_(part.get_parameter("map.bias"))
    x, gradient = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)

    def here() -> list[torch.Tensor]:
        return list(torch.autograd.grad(linear(x).tanh(), [x, *linear.parameters()], gradient))

    def foreign() -> list[torch.Tensor]:
        return list(torch.autograd.grad(part(x), [x, *part.parameters()], gradient))

    def recomputed() -> None:
        with torch.no_grad():
            linear(x).tanh()
        here()

    def changed() -> None:
        with torch.no_grad():
            part.get_parameter("map.bias").add_(1e-3)
        foreign()

    assert all(map(torch.equal, here(), foreign())), "both sides compute the same bits"
    return {"here": here, "recomputed": recomputed, "same": foreign, "new": changed}  # type: ignore[dict-item]


def measured(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of a call of each side, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(rounds + 2):
        for name, call in sides.items():
            start_s = time.perf_counter()
            call()
            if round_number >= 2:
                times[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Exit status 0: nothing is asked of the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512, 1024])
    parser.add_argument("--rows", type=int, default=512, help="of the input: samples times positions")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where, rows = machine(), []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parts.py"
        file.write_text(PART)
        for width in arguments.widths:
            found = measured(sides_of(file, width, arguments.rows), arguments.rounds)
            rows.append({"width": width, "rows": arguments.rows} | {f"{name}_s": found[name] for name in found})
    if arguments.json:
        print(json.dumps({"machine": where, "rows": rows}, indent=2))
        return 0
    print_header(where)
    print(f"{'width':>6} {'rows':>6} {'here':>10} {'recomputed':>11} {'foreign':>10} {'new param.':>11} {'ratio':>6}")
    for row in rows:
        here, recomputed, same, new = (1e3 * row[f"{name}_s"] for name in ("here", "recomputed", "same", "new"))
        print(
            f"{row['width']:6} {row['rows']:6} {here:7.2f} ms {recomputed:8.2f} ms {same:7.2f} ms {new:8.2f} ms "
            f"{same / here:6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
