"""The product on one GPU beside plain PyTorch: what it costs, what a kill costs, what memory it takes.

    python benchmarks/gpu/fault_free.py [--part curve_gpt] [--budget-s 540] [--json] [--device cpu --small]

A curve over tokens per micro-batch for GPT-2 124 M and a Llama of 1.1 B, bfloat16; two stages of two workers on the one
device against one worker; kills; peak memory against the prediction. Rows are printed and saved as they come, those of
the curve after each round anew. See README.md beside this file.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

import recovery
import torch
from bits import make_bits_repeat
from harness import Program, Turns, elaswave_program, fork_workers, quartiles, rounds_of, run_in_turns
from parts import Bench, Limits, Probe, Row, machine, run_probe, write_line
from plain import plain_loop
from tasks import BuiltIn

from elaswave.config.cluster import own_bytes
from elaswave.config.schema import Config
from elaswave.launcher.launcher import train
from elaswave.observability.progress import make_reporter
from elaswave.planning.costs.layers import MemoryModel

BENCH = Probe(0, __file__)
OUT = Path(__file__).resolve().parents[1] / "results" / "local" / "gpu_fault_free.jsonl"
"""Rows of earlier runs stay in front of them."""
TOKENS = {"gpt": (8192, 2048, 16384, 4096, 1024), "llama": (8192, 2048, 16384, 4096, 1024)}
"""Of a micro-batch, what tells most first."""
SMALL_TOKENS = (32, 16)
CONTEXT = {"gpt": 1024, "llama": 2048}
"""Tokens of a sequence, where a micro-batch has so many."""
SMALL_CONTEXT = 16
SHAPES = {
    "gpt": {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50257},
    "llama": {
        "num_layers": 22, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "intermediate_size": 5632,
        "vocab_size": 32000,
    },
}  # fmt: skip
SMALL_SHAPES = {
    "gpt": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 256},
    "llama": {
        "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64,
        "vocab_size": 256,
    },
}  # fmt: skip
NUM_MICROBATCHES, SMALL_MICROBATCHES = 8, 4
"""Of a step: sums, hashes, vote and update are once in so many."""
TARGETS = {"bitwise": 0.95, "scaled": 1.0}
"""Smallest ratio to the deterministic plain loop, from `TARGET_TOKENS` on."""
TARGET_TOKENS = 8192
PLAIN, PLAIN_ANYTHING = "plain, deterministic", "plain, anything allowed"
NUM_KILLS, SMALL_KILLS = 30, 2
KILL_TARGET_S = 0.150
"""Until survivors compute again; beside it, one micro-batch of a worker."""
MEMORY_TARGET = 0.10
"""Share by which the peak may differ from the prediction."""


# ------------------------------------------------------------------------------------------------------ what is trained


def task_of(bench: Bench, model: str, num_tokens: int) -> BuiltIn:
    """A model, its micro-batches of so many tokens, and the device."""
    shape = dict((SMALL_SHAPES if bench.small else SHAPES)[model])
    context = min(num_tokens, SMALL_CONTEXT if bench.small else CONTEXT[model])
    return BuiltIn(
        f"data.vocab_size={shape.pop('vocab_size')}",
        f"model.family={model}",
        *(f"model.{name}={value}" for name, value in shape.items()),
        f"model.context_length={context}",
        "model.dtype=bfloat16",
        "model.dropout=0.0",
        f"batch.microbatch_size={num_tokens // context}",
        f"batch.num_microbatches={SMALL_MICROBATCHES if bench.small else NUM_MICROBATCHES}",
        *device_settings(bench),
    )


def device_settings(bench: Bench) -> tuple[str, ...]:
    """The GPU, for as many workers as are wanted; without one the loopback device, which runs an accelerator's code."""
    if bench.is_cuda:
        return ("device.kind=cuda", "device.workers_per_device=8")
    return ("device.kind=loopback",)


def ours(task: BuiltIn, name: str, *settings: str) -> Program:
    """The product, as users run it."""
    config = task.configuration(*settings)
    return Program(name, elaswave_program(config), sum(config.widths))


def plain(bench: Bench, task: BuiltIn, name: str) -> Program:
    """A plain loop; attention is torch's choice, flash where it may."""

    def prepare() -> None:
        make_bits_repeat(repeat=name == PLAIN)

    config = task.configuration(*ONE)
    return Program(name, plain_loop(config, task, tuned=False, place=bench.device, prepare=prepare), 1)


ONE = ("layout.stages=1", "layout.replicas=1")
FOUR = ("layout.stages=2", "layout.replicas=2")


def turns_of(bench: Bench, num_tokens: int) -> Turns:
    """Few steps: a device's seconds hardly differ from one to the next."""
    if bench.small:
        return Turns(starts=1, rounds=1, steps=1)
    return Turns(starts=1, rounds=3, steps=max(1, TARGET_TOKENS // num_tokens))


class Pacer:
    """Says whether there is time for more of the same.

    Args:
        bench: its seconds are looked at.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._longest_s = 0.0
        self._began_s = time.monotonic()

    def next(self) -> bool:
        """One more begins."""
        now_s = time.monotonic()
        self._longest_s = max(self._longest_s, now_s - self._began_s)
        self._began_s = now_s
        return self._bench.small or self._bench.left_s > 1.1 * self._longest_s


# ------------------------------------------------------------------------------------------------------------ the curve


def curve(bench: Bench, model: str, *, together: bool) -> Iterator[Row]:
    """Tokens per second over tokens per micro-batch.

    Args:
        model: gpt or llama.
        together: all programs are alive at a time, and measured in turns; else one after the other, for memory's sake.
    """
    pacer, count = Pacer(bench), SMALL_MICROBATCHES if bench.small else NUM_MICROBATCHES
    for num_tokens in SMALL_TOKENS if bench.small else TOKENS[model]:
        about: Row = {"model": model, "tokens": num_tokens}
        if not pacer.next():
            yield {**about, "not_begun": f"{bench.left_s:.0f} s are left"}
            continue
        task = task_of(bench, model, num_tokens)
        programs = [
            plain(bench, task, PLAIN),
            plain(bench, task, PLAIN_ANYTHING),
            *(ours(task, mode, *ONE, f"elastic.consistency={mode}") for mode in TARGETS),
        ]
        for group in [programs] if together else [[program] for program in programs]:
            turns = turns_of(bench, num_tokens)
            try:
                for num_rounds in rounds_of(group, turns):
                    yield from curve_rows({**about, "rounds": num_rounds}, group, programs, count)
            except RuntimeError as error:
                yield {**about, "programs": [program.name for program in group], "error": str(error)}
                continue
            yield from curve_rows({**about, "rounds": "all"}, group, programs, count)


def curve_rows(about: Row, group: list[Program], programs: list[Program], num_microbatches: int) -> Iterator[Row]:
    """One row for each program that runs, against the plain ones that run or have run.

    Args:
        about: what they have in common: "tokens" of a micro-batch and "rounds" among it.
        group: that runs.
        programs: all of this size.
    """
    median_s = {program.name: quartiles(program.wall_s)[1] for program in programs if program.wall_s}
    for program in group:
        own_s = median_s[program.name]
        row: Row = {
            **about,
            "program": program.name,
            "tokens_per_s": num_microbatches * about["tokens"] / own_s,
            "step_s": own_s,
            "step_quartiles_s": quartiles(program.wall_s)[::2],
            "last_loss": program.last_loss,
        }
        if program.name in TARGETS:
            row["ratio"] = median_s[PLAIN] / own_s if PLAIN in median_s else None
            row["ratio_anything"] = median_s[PLAIN_ANYTHING] / own_s if PLAIN_ANYTHING in median_s else None
            row["needed"] = TARGETS[program.name] if about["tokens"] >= TARGET_TOKENS else None
            row["phases_s"] = program.phases_s
        yield row


@BENCH.part(190, alone=True, small_s=150)
def curve_gpt(bench: Bench) -> Iterator[Row]:
    """GPT-2 124 M."""
    yield from curve(bench, "gpt", together=True)


@BENCH.part(190, alone=True, small_s=150)
def curve_llama(bench: Bench) -> Iterator[Row]:
    """A Llama of 1.1 B."""
    yield from curve(bench, "llama", together=False)


# ----------------------------------------------------------------------------------------------- several on one device


@BENCH.part(45, alone=True, small_s=90)
def company(bench: Bench) -> Iterator[Row]:
    """Two stages of two workers on the one device against one worker. Their kernels take turns on it, frames go by way
    of host memory, and each block has a second copy, which is updated too."""
    num_tokens = SMALL_TOKENS[0] if bench.small else TARGET_TOKENS
    task = task_of(bench, "gpt", num_tokens)
    one, four = ours(task, "1x1", *ONE), ours(task, "2x2", *FOUR)
    run_in_turns([one, four], turns_of(bench, num_tokens))
    one_s, four_s = (quartiles(program.wall_s)[1] for program in (one, four))
    yield {
        "model": "gpt",
        "tokens": num_tokens,
        "one_step_s": one_s,
        "four_step_s": four_s,
        "ratio": one_s / four_s,
        "one_phases_s": one.phases_s,
        "four_phases_s": four.phases_s,
        "same_loss": one.last_loss == four.last_loss,
    }


# ---------------------------------------------------------------------------------------------------------------- kills


@BENCH.part(100, alone=True, small_s=100)
def kills(bench: Bench) -> Iterator[Row]:
    """From a kill until every survivor computes again; four workers on the one device."""
    num_tokens = SMALL_TOKENS[0] if bench.small else 2048
    task = task_of(bench, "gpt", num_tokens)
    config = task.configuration(*FOUR, f"run.steps={recovery.NUM_STEPS}", "elastic.respawn=false")
    whole = ours(task, "2x2", *FOUR)
    run_in_turns([whole], turns_of(bench, num_tokens))
    num_each = config.batch.num_microbatches / config.widths[0]
    microbatch_s = quartiles(whole.wall_s)[1] / num_each
    line, pacer = recovery.Line(4, "cuda" if bench.is_cuda else "loopback", "kill"), Pacer(bench)
    pacer.next()
    told = 0
    for _ in recovery.jobs(line, SMALL_KILLS if bench.small else NUM_KILLS, 1, config):
        for each in line.recoveries[told:]:
            yield {"tokens": num_tokens, "phase": each.phase, "waited_s": each.total_s - each.redo_s}
        told = len(line.recoveries)
        if not pacer.next():
            break
    if not line.recoveries:
        raise RuntimeError("no kill struck")
    found = line.row()
    waited_s = found["waited_s"]
    yield {
        "tokens": num_tokens,
        "kills": found["count"],
        "median_s": statistics.median(waited_s),
        "worst_s": max(waited_s),
        "microbatch_s": microbatch_s,
        "needed_s": KILL_TARGET_S + microbatch_s,
        "parts_s": found["parts_s"],
        "critical_bytes": found["critical_bytes"],
        "same_bits": found["same_bits"],
    }


# --------------------------------------------------------------------------------------------------------------- memory


class Marker:
    """Notes, in the last step, the most memory that the worker's device has had in use.

    Args:
        path: of the note.
        last_step: in which it is made, when all gradients of the step are there.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path, self._last_step = path, last_step

    def reached(self, phase: str, index: int, machine: Any) -> None:
        """See `elaswave.faults.injection.Probe`."""
        if (machine.step, phase, index) != (self._last_step, "apply", 0):
            return
        place = machine.engine.device.place
        found = {"process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if place.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated(place)
            found["reserved_bytes"] = torch.cuda.max_memory_reserved(place)
            found["device_bytes"] = place_total_bytes(place)
        self._path.write_text(json.dumps(found))


def place_total_bytes(place: torch.device) -> int:
    """In use on the device by all processes, contexts included."""
    free, total = torch.cuda.mem_get_info(place)
    return total - free


def predicted_parts(config: Config) -> dict[str, float]:
    """Bytes of the one worker by the memory model."""
    layout_costs = own_bytes(config)
    stage = _Held(0, layout_costs.num_layers, 1)
    model = MemoryModel.of_stages(layout_costs, [stage], config.elastic.planned_followers)
    return model.parts(stage.start, stage.stop, in_flight=1).by_name


class _Held(NamedTuple):
    start: int
    stop: int
    width: int


@BENCH.part(25, alone=True, small_s=60)
def memory(bench: Bench) -> Iterator[Row]:
    """Peak of the device's memory against the prediction, one worker."""
    num_tokens, num_steps = SMALL_TOKENS[0] if bench.small else TARGET_TOKENS, 3
    config = task_of(bench, "llama", num_tokens).configuration(*ONE, f"run.steps={num_steps}")
    folder = Path(tempfile.mkdtemp(prefix="elaswave-bench-"))
    try:
        note = folder / "memory.json"

        def body(_: int) -> None:
            reporter = make_reporter(json_mode=True, stream=io.StringIO())
            train(config, folder / "run", reporter=reporter, probe=Marker(note, num_steps))

        (folder / "run" / "logs").mkdir(parents=True)
        fork_workers(1, body)
        measured = json.loads(note.read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    parts = predicted_parts(config)
    row: Row = {"model": "llama", "tokens": num_tokens, "predicted_bytes": sum(parts.values()), "parts": parts}
    if "peak_bytes" in measured:
        ratio = measured["peak_bytes"] / row["predicted_bytes"]
        row |= {"ratio": ratio, "needed": [1 - MEMORY_TARGET, 1 + MEMORY_TARGET]}
    yield row | measured


# -------------------------------------------------------------------------------------------------------------- running


def missed(row: Row) -> bool:
    """Whether a row misses its target, or shows other bits than it should; not what is still being measured."""
    if row.get("rounds", "all") != "all":
        return False
    ratio, needed = row.get("ratio"), row.get("needed")
    if isinstance(needed, list):
        return ratio is not None and not needed[0] <= ratio <= needed[1]
    if needed is not None and ratio is not None and ratio < needed:
        return True
    if "median_s" in row and row["median_s"] > row["needed_s"]:
        return True
    return row.get("same_bits") is False or row.get("same_loss") is False or bool(row.get("critical_bytes"))


def main() -> int:
    """Runs the parts; the exit code is 1 if one failed, or a target was missed on a GPU."""
    if "--child" in sys.argv:
        return BENCH.main()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--part", action="append", default=[], choices=BENCH.parts, help="only this one")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds of all parts (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON document at the end; rows go to standard error")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="where rows are saved, one line of JSON each (default: %(default)s)"
    )
    options = parser.parse_args()
    where, lines = machine(), io.StringIO()
    with contextlib.ExitStack() as stack:
        files: list[IO[str]] = [sys.stderr if options.json else sys.stdout, lines]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        files.append(stack.enter_context(open(options.out, "a")))
        write_line(files[:1] + files[2:], {"machine": where})
        outcomes = run_probe(BENCH, Limits(options.device, options.small, options.budget_s, options.part), files)
    rows = [json.loads(line) for line in lines.getvalue().splitlines()]
    if options.json:
        print(json.dumps({"machine": where, "outcomes": outcomes, "rows": rows}, indent=2))
    failed = any(outcome in ("failed", "died", "overran") for outcome in outcomes.values())
    # Tiny sizes and a processor miss what is meant for a GPU.
    return 1 if failed or (options.device == "cuda" and not options.small and any(map(missed, rows))) else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
