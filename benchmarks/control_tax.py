"""What control plane, heartbeats and progress watch cost a run in which nothing goes wrong, in CPU time.

    python benchmarks/control_tax.py [--workers 8] [--steps 40] [--json]

A job as users run it, from its third step on: CPU seconds of the coordinator, of the launcher and of every thread of
the workers but their main one, as a share of what the cores could have computed in that time (heartbeats come by the
clock, not by the step), and of the job's own CPU seconds (the same on a machine with nothing else to do). See README.md
beside this file.
"""

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from harness import configuration, machine, print_header

from elaswave.launcher.launcher import train
from elaswave.observability.processes import read_processes
from elaswave.observability.progress import make_reporter

MOST_TAX = 0.01
FIRST_STEP = 3
"""Start-up and learning are over after it."""


class CpuTimes(NamedTuple):
    """CPU seconds so far."""

    wall: float
    """Monotonic seconds."""
    coordinator: float
    launcher: float
    """The forkserver's and the committers' with it."""
    worker_control: float
    """All threads of the workers but the main ones."""
    worker_main: float


class Watch:
    """A reporter that notes the job's CPU times at the first measured step and at the last one."""

    def __init__(self, inner: Any, run_dir: Path) -> None:
        self._inner, self._run_dir = inner, run_dir
        self.noted: dict[int, CpuTimes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, step: int, total_steps: int, *rest: Any) -> None:
        """See `elaswave.observability.progress.Reporter`; called in the launcher's process."""
        if step in (FIRST_STEP, total_steps - 1):
            self.noted[step] = cpu_times(self._run_dir)
        self._inner.step(step, total_steps, *rest)


def cpu_times(run_dir: Path) -> CpuTimes:
    """The CPU times of a job, read from the kernel."""
    totals = dict.fromkeys(CpuTimes._fields, 0.0) | {"wall": time.monotonic()}
    for process in read_processes(run_dir):
        try:
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                if process.role == "worker":
                    name = "worker_main" if int(task.name) == process.pid else "worker_control"
                else:
                    name = "coordinator" if process.role == "coordinator" else "launcher"
                totals[name] += _thread_s(task)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return CpuTimes(**totals)


def _thread_s(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9  # `stat` counts in hundredths of a second


def main() -> int:
    """Runs the benchmark; the exit code is 1 if the tax is too high."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8, help="two stages of half as many")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    folder = Path(tempfile.mkdtemp(prefix="elaswave-bench-"))
    watch = Watch(make_reporter(json_mode=True, stream=io.StringIO()), folder)
    try:
        config = configuration(
            "layout.stages=2",
            f"layout.replicas={options.workers // 2}",
            f"batch.num_microbatches={max(8, options.workers)}",
            f"run.steps={options.steps}",
        )
        train(config, folder, reporter=watch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    before, after = watch.noted[FIRST_STEP], watch.noted[options.steps - 1]
    used = CpuTimes(*(late - early for early, late in zip(before, after, strict=True)))
    control_s = used.coordinator + used.launcher + used.worker_control
    tax = control_s / (used.wall * min(os.cpu_count() or 1, options.workers))
    num_steps = options.steps - 1 - FIRST_STEP
    row = {
        "workers": options.workers,
        "steps": num_steps,
        "s_per_step": {name: seconds / num_steps for name, seconds in used._asdict().items()},
        "share_of_cores": tax,
        "share_of_cpu_time": control_s / (control_s + used.worker_main),
        "allowed": MOST_TAX,
    }
    if options.json:
        print(json.dumps({"machine": where, "rows": [row]}, indent=2))
    else:
        print_header(where)
        print(
            f"milliseconds of each of {num_steps} undisturbed steps (wall clock, then CPU), {options.workers} workers"
        )
        for name, seconds in row["s_per_step"].items():
            print(f"{name.replace('_', ' '):<16} {1e3 * seconds:>9.2f}")
        share = row["share_of_cpu_time"]
        print(f"control plane: {tax:.2%} of the cores, allowed {MOST_TAX:.0%}; {share:.2%} of the CPU time")
    return 1 if tax > MOST_TAX else 0


if __name__ == "__main__":
    sys.exit(main())
