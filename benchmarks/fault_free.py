"""Tokens per second of elaswave against plain PyTorch, with nothing going wrong.

    python benchmarks/fault_free.py [--sizes default 10m gpt2] [--layouts 1x1 2x2] [--starts 5] [--rounds 5] [--json]

One worker against a plain loop, and 2 stages x 2 replicas against torch.distributed.pipelining with ZeRO-1 on gloo;
same model code, data, layer split, clipping, loss reporting, one thread per process. Size gpt2 is transformers' own
model with the width of GPT-2 124 M and two blocks, 1,024 tokens per micro-batch. See README.md beside this file.
"""

import argparse
import json
import sys

from harness import (
    Compared,
    Program,
    Turns,
    compare,
    elaswave_program,
    machine,
    print_header,
    quartiles,
    run_in_turns,
)
from plain import plain_loop, torch_pipeline
from tasks import TASKS

STEPS_PER_TURN = {"default": 5, "tiny": 2, "gpt2-tiny": 2}
"""Others: 1."""
TARGETS = {
    ("default", "1x1", "bitwise"): 0.90,
    ("default", "1x1", "scaled"): 1.0,
    ("10m", "1x1", "bitwise"): 0.95,
    ("default", "2x2", "bitwise"): 1.0,
    ("10m", "2x2", "bitwise"): 1.0,
    ("gpt2", "1x1", "bitwise"): 0.95,
    ("gpt2", "2x2", "bitwise"): 1.0,
}
"""Smallest ratio of tokens per second, by size, layout and consistency."""


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=TASKS, default=["default", "10m", "gpt2"])
    parser.add_argument("--layouts", nargs="+", choices=("1x1", "2x2"), default=["1x1", "2x2"])
    parser.add_argument("--consistency", nargs="+", choices=("bitwise", "scaled"), default=["bitwise", "scaled"])
    parser.add_argument("--starts", type=int, default=5, help="how often the programs are started anew")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program in each start")
    parser.add_argument("--steps-per-turn", type=int, help="default: by size")
    parser.add_argument("--tune-plain", action="store_true", help="our allocator's settings for plain PyTorch, too")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change both sides")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    rows = []
    where = machine()
    for size in options.sizes:
        for layout in options.layouts:
            turns = Turns(options.starts, options.rounds, options.steps_per_turn or STEPS_PER_TURN.get(size, 1))
            rows += measure(size, layout, options.consistency, turns, options.set, tune_plain=options.tune_plain)
    if options.json:
        document = {"machine": where, "starts": options.starts, "rounds": options.rounds, "rows": rows}
        print(json.dumps(document, indent=2))
    else:
        print_table(rows, where)
    return 1 if any(row["needed"] is not None and row["ratio"] < row["needed"] for row in rows) else 0


def measure(
    size: str, layout: str, modes: list[str], turns: Turns, settings: list[str], *, tune_plain: bool
) -> list[dict]:
    """Plain PyTorch and elaswave in each mode, in turns; one row for each mode."""
    stages, replicas = layout.split("x")
    task = TASKS[size]
    settings = (f"layout.stages={stages}", f"layout.replicas={replicas}", *settings)
    config = task.configuration(*settings)
    num_workers = sum(config.widths)
    tokens = config.batch.num_microbatches * task.tokens(config)
    body = (plain_loop if layout == "1x1" else torch_pipeline)(config, task, tuned=tune_plain)
    plain = Program("plain PyTorch", body, num_workers)
    ours = {
        mode: Program(
            mode,
            elaswave_program(task.configuration(*settings, f"elastic.consistency={mode}"), task.training),
            num_workers,
        )
        for mode in modes
    }
    run_in_turns([plain, *ours.values()], turns)
    return [row(size, layout, mode, tokens, plain, program, compare(program, plain)) for mode, program in ours.items()]


def row(size: str, layout: str, mode: str, tokens: int, plain: Program, ours: Program, compared: Compared) -> dict:
    """One line of the table."""
    needed = TARGETS.get((size, layout, mode))
    return {
        "size": size,
        "layout": layout,
        "consistency": mode,
        "plain_tokens_per_s": tokens / quartiles(plain.wall_s)[1],
        "elaswave_tokens_per_s": tokens / quartiles(ours.wall_s)[1],
        "ratio": compared.ratio,
        "ratio_quartiles": [compared.low, compared.high],
        "cpu_ratio": compared.cpu_ratio,
        "plain_loss": plain.last_loss,
        "elaswave_loss": ours.last_loss,
        "needed": needed,
    }


def print_table(rows: list[dict], where: dict) -> None:
    """The rows for people."""
    print_header(where)
    print("tokens/s against plain PyTorch: medians of pairs; cpu: the same ratio of CPU seconds")
    print(
        f"{'size':<8} {'layout':<6} {'mode':<8} {'plain':>8} {'elaswave':>8} "
        f"{'ratio':>6} {'quartiles':>11} {'cpu':>5} {'needed':>6}"
    )
    for each in rows:
        low, high = each["ratio_quartiles"]
        needed = "-" if each["needed"] is None else f"{each['needed']:.2f}"
        print(
            f"{each['size']:<8} {each['layout']:<6} {each['consistency']:<8} {each['plain_tokens_per_s']:>8.0f} "
            f"{each['elaswave_tokens_per_s']:>8.0f} {each['ratio']:>6.3f} {f'{low:.2f}-{high:.2f}':>11} "
            f"{each['cpu_ratio']:>5.2f} {needed:>6}"
        )


if __name__ == "__main__":
    sys.exit(main())
