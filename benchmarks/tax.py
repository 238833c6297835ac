"""What exact sums, followers and verification cost on an undisturbed step, each switched alone.

    python benchmarks/tax.py [--tokens 1024 256] [--starts 3] [--rounds 5] [--json]

10 M parameters, one stage on two workers, 8 micro-batches per worker: elaswave with everything on, and with single
parts on, against elaswave with all of them off, in turns of one step. See README.md beside this file.
"""

import argparse
import json
import sys
from typing import NamedTuple

from harness import (
    SIZES,
    Program,
    Turns,
    compare,
    configuration,
    elaswave_program,
    machine,
    print_header,
    quartiles,
    run_in_turns,
)

WORKERS = 2
MICROBATCHES_PER_WORKER = 8
MOST_TAX = {1024: 0.05}
"""Largest share of the step that all parts together may cost, by tokens per micro-batch."""


class Variant(NamedTuple):
    """Which parts are on."""

    exact: bool
    followers: bool
    verify: bool

    @property
    def settings(self) -> tuple[str, ...]:
        """As ``section.key=value``."""
        return (
            f"elastic.consistency={'bitwise' if self.exact else 'scaled'}",
            f"elastic.num_followers={int(self.followers)}",
            f"elastic.verify={str(self.verify).lower()}",
        )


OFF = Variant(False, False, False)
EXACT = Variant(True, False, False)
FOLLOWERS = Variant(False, True, False)
VERIFIED = Variant(False, True, True)
ALL = Variant(True, True, True)
ROWS = {
    "exact sums": (EXACT, OFF),
    "followers": (FOLLOWERS, OFF),
    "vote and verification": (VERIFIED, FOLLOWERS),  # without followers there is nothing to compare
    "all together": (ALL, OFF),
}
"""Each part: with it, and the same without it."""


def main() -> int:
    """Runs the benchmark; the exit code is 1 if the parts together cost too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 256], help="per micro-batch")
    parser.add_argument("--starts", type=int, default=3, help="how often the variants are started anew")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant in each start")
    parser.add_argument("--steps-per-turn", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    rows = []
    for tokens in options.tokens:
        rows += measure(options.size, tokens, Turns(options.starts, options.rounds, options.steps_per_turn))
    if options.json:
        document = {"machine": where, "starts": options.starts, "rounds": options.rounds, "rows": rows}
        print(json.dumps(document, indent=2))
    else:
        print_table(rows, where)
    return 1 if any(row["allowed"] is not None and row["tax"] > row["allowed"] for row in rows) else 0


def measure(size: str, tokens: int, turns: Turns) -> list[dict]:
    """All variants in turns; one row for each part."""
    programs = {}
    for variant in dict.fromkeys(variant for pair in ROWS.values() for variant in pair):
        settings = [*SIZES[size], "layout.stages=1", f"layout.replicas={WORKERS}", *variant.settings]
        settings.append(f"batch.num_microbatches={MICROBATCHES_PER_WORKER * WORKERS}")
        context_length = configuration(*settings).model.context_length
        config = configuration(*settings, f"batch.microbatch_size={max(1, tokens // context_length)}")
        programs[variant] = Program(", ".join(variant.settings), elaswave_program(config), WORKERS)
    run_in_turns(list(programs.values()), turns)
    rows = []
    for part, (on, off) in ROWS.items():
        compared = compare(programs[off], programs[on])  # how much longer a step with it takes
        rows.append(
            {
                "part": part,
                "tokens_per_microbatch": tokens,
                "step_s": quartiles(programs[on].wall_s)[1],
                "tax": compared.ratio - 1,
                "tax_quartiles": [compared.low - 1, compared.high - 1],
                "cpu_tax": compared.cpu_ratio - 1,
                "allowed": MOST_TAX.get(tokens) if part == "all together" and size == "10m" else None,
            }
        )
    return rows


def print_table(rows: list[dict], where: dict) -> None:
    """The rows for people."""
    print_header(where)
    print("share of a step added by each part: medians of pairs; cpu: the same of CPU seconds")
    print(f"{'part':<22} {'tokens':>6} {'step s':>7} {'tax':>7} {'quartiles':>15} {'cpu':>7} {'allowed':>7}")
    for row in rows:
        low, high = row["tax_quartiles"]
        allowed = "-" if row["allowed"] is None else f"{row['allowed']:.1%}"
        print(
            f"{row['part']:<22} {row['tokens_per_microbatch']:>6} {row['step_s']:>7.3f} {row['tax']:>7.1%} "
            f"{f'{low:.1%} to {high:.1%}':>15} {row['cpu_tax']:>7.1%} {allowed:>7}"
        )


if __name__ == "__main__":
    sys.exit(main())
