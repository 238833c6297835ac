"""Runs probes, those first that tell most per second, and stops before a budget ends.

    python benchmarks/gpu/probes.py (--all | --only 3,4) --out DIR [--budget-s 540] [--device cpu --small]

All lines of all probes go to one file, ``DIR/probes-TIME.jsonl``; a table of outcomes is printed last. See README.md
beside this file.
"""

import argparse
import importlib
import time
from pathlib import Path

from parts import Limits, Probe, machine, run_probe, write_line

VALUE = {1: 5, 2: 6, 3: 9, 4: 10, 5: 9, 6: 8, 7: 5, 8: 4, 9: 2, 10: 5}
"""How much depends on a probe's answers, roughly; per second it decides the order."""
MODULES = (
    "probe_01_machine", "probe_02_contexts", "probe_03_offsets", "probe_04_company", "probe_05_loop", "probe_06_sums",
    "probe_07_updates", "probe_08_transfers", "probe_09_ipc", "probe_10_faults",
)  # fmt: skip
SMALL_S = 120.0
"""Of a probe with ``--small``; its parts take about a second each."""
_LEAST_S = 10.0
"""A probe that has less is not begun."""


def load() -> dict[int, Probe]:
    """All probes by number."""
    probes = [importlib.import_module(name).PROBE for name in MODULES]
    return {probe.number: probe for probe in probes}


def order(probes: dict[int, Probe]) -> list[int]:
    """Numbers, the most value per second first."""
    return sorted(probes, key=lambda number: (-VALUE[number] / probes[number].seconds, number))


def chosen_numbers(text: str) -> list[int]:
    """Of ``--only``.

    Raises:
        argparse.ArgumentTypeError: there is no such probe.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 3,4") from error
    if unknown := set(found) - set(VALUE):
        raise argparse.ArgumentTypeError(f"there are no probes {sorted(unknown)}, needed: numbers of 1 to {len(VALUE)}")
    return found


def main() -> int:
    """Runs them; the exit code is 1 if a part failed, died or overran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="all ten")
    which.add_argument("--only", type=chosen_numbers, help="some, such as 3,4")
    parser.add_argument("--skip-part", action="append", default=[], help="name of a part that is left out")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does everything run?")
    options = parser.parse_args()

    end_s = time.monotonic() + options.budget_s
    probes = load()
    for probe in probes.values():
        for name in options.skip_part:
            probe.parts.pop(name, None)
    numbers = [number for number in order(probes) if options.all or number in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"probes-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.jsonl"
    outcomes: dict[int, dict[str, str]] = {}
    with open(path, "w") as file:
        write_line([file], {"machine": machine(), "order": numbers})
        for number in numbers:
            left_s = end_s - time.monotonic()
            if left_s < _LEAST_S:
                outcomes[number] = dict.fromkeys(probes[number].parts, "not begun")
                write_line([file], {"probe": number, "outcome": "not begun", "why": "the budget is spent"})
                continue
            wanted_s = SMALL_S if options.small else probes[number].seconds
            started_s = time.monotonic()
            limits = Limits(options.device, options.small, min(left_s, wanted_s))
            outcomes[number] = run_probe(probes[number], limits, [file])
            print(f"probe {number}: {time.monotonic() - started_s:.0f} s of {wanted_s:.0f}", flush=True)
    for number, parts in outcomes.items():
        print(f"{number:>2}  " + ", ".join(f"{name} {outcome}" for name, outcome in parts.items()))
    print(path)
    bad = {"failed", "died", "overran"}
    return 1 if any(bad & set(parts.values()) for parts in outcomes.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
