"""What the checksum of partial sums costs: steps with and without it, in turns, inside one training process.

    python benchmarks/checksum.py [--sizes default 10m] [--steps 120] [--json]

Where a process's memory happens to lie is worth more than a checksum, so both sides are the same worker, which keeps
its checksums in every other step, as A B B A. Whole steps differ by more than that too; compared is the CPU time of
what a checksum is part of, adding gradients and REDUCE, as a share of the step's. One worker; the default recipe's
micro-batches. See README.md beside this file.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import SIZES, configuration, machine, print_header, quartiles, with_steps

from elaswave.engine.reduction import Reduction
from elaswave.launcher.launcher import train
from elaswave.observability.progress import make_reporter
from elaswave.state.sums import ExactAccumulator

MOST_SHARE = 0.01
"""Of a step that the checksum may cost."""
_STEPS_BEFORE = 4
"""Not measured: the first attempt of step 1, and warming up."""
_TIMES_FILE = "times.json"


class Alternating:
    """Switches the checksums of a worker on and off between steps, and notes the CPU time of each step and its sums.

    Args:
        folder: for the times.
        last_step: at whose beginning they are written.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.folder = folder
        self.last_step = last_step
        self.times: list[tuple[float, float]] = []
        self.since_s = self.sums_s = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; the CPU time that it takes counts as that of sums."""

        def call(*arguments: Any) -> Any:
            start_s = time.thread_time()
            result = function(*arguments)
            self.sums_s += time.thread_time() - start_s
            return result

        return call

    def reached(self, phase: str, index: int, machine: Any) -> None:
        """See `elaswave.faults.injection.Probe`."""
        if (phase, index, machine.attempt) != ("forward", 0, 1 + (machine.step == 1)):
            return
        self.times.append((time.thread_time() - self.since_s, self.sums_s))
        is_on = has_checksum(machine.step)
        machine.engine.reduction.checked = is_on
        for accumulator in machine.engine.compute.accumulators.values():
            accumulator._checked = is_on
        if machine.step == self.last_step:
            (self.folder / _TIMES_FILE).write_text(json.dumps(self.times[1:]))
        self.since_s, self.sums_s = time.thread_time(), 0.0


def has_checksum(step: int) -> bool:
    """Whether a step runs with checksums: A B B A from step 1 on."""
    return step % 4 in (0, 1)


def measure(size: str, num_steps: int) -> dict:
    """The share that the checksum adds to a step, over neighbouring pairs."""
    config = configuration(*SIZES[size], "layout.stages=1", "layout.replicas=1")
    last = _STEPS_BEFORE + 2 * (num_steps // 2) + 1
    add, reduce = ExactAccumulator.add, Reduction.reduce
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        probe = Alternating(folder, last)
        ExactAccumulator.add, Reduction.reduce = probe.timed(add), probe.timed(reduce)
        try:
            with open(folder / "progress.log", "w") as log:
                reporter = make_reporter(json_mode=True, stream=log)
                train(with_steps(config, last), folder / "run", reporter=reporter, probe=probe)
        finally:
            ExactAccumulator.add, Reduction.reduce = add, reduce
        times = json.loads((folder / _TIMES_FILE).read_text())
    step_s = quartiles([step_s for step_s, _ in times[_STEPS_BEFORE:]])[1]
    sums_s, shares = [], []
    for step in range(_STEPS_BEFORE + 1, last, 2):
        pair = times[step - 1], times[step]
        on, off = pair if has_checksum(step) else pair[::-1]
        sums_s.append(off[1])
        shares.append((on[1] - off[1]) / step_s)
    sums_share = quartiles(sums_s)[1] / step_s
    return {"size": size, "pairs": len(shares), "step_cpu_s": step_s, "sums": sums_share, "added": quartiles(shares)}


def main() -> int:
    """Runs the benchmark; the exit code is 1 if the checksum costs too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["default", "10m"])
    parser.add_argument("--steps", type=int, default=120, help="measured, of each size")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    rows = [measure(size, options.steps) for size in options.sizes]
    if options.json:
        print(json.dumps({"machine": where, "rows": rows}, indent=2))
    else:
        print_header(where)
        print("CPU time: of a step, the share of its sums, what checksums add to the step (median of pairs, quartiles)")
        print(f"{'size':<8} {'pairs':>5} {'step s':>7} {'sums':>6} {'checksums':>26}")
        for row in rows:
            low, middle, high = row["added"]
            added = f"{middle:.2%} ({low:.2%} to {high:.2%})"
            print(f"{row['size']:<8} {row['pairs']:>5} {row['step_cpu_s']:>7.3f} {row['sums']:>6.1%} {added:>26}")
    return 1 if any(row["added"][1] > MOST_SHARE for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
