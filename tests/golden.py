"""The golden set: what runs, simulated jobs, plans and help texts give, as digests, before and after a change.

A change that moves code must leave all of it as it is. One that means to change something says in its message why which
digest moved, and records the set anew.

Four parts, each with a name in the file: ``runs`` (the state after real jobs, and their losses), ``transcripts`` (all
that happens in simulated jobs, by seed), ``plans`` (the JSON of plans and comparisons) and ``help`` (of all commands).
Bits of runs depend on the processor and on torch, so theirs are kept for each; the runs of one model have the same bits
everywhere.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner

from elaswave.errors import ElaswaveError

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_suffix(".json")
_SEEDS = 2000
_SEEDS_PER_DIGEST = 100
_RUN_TIMEOUT_S = 180.0

Golden = dict[str, dict[str, str]]
"""Part -> name -> digest."""


class Run(NamedTuple):
    """A real job."""

    name: str
    arguments: tuple[str, ...]
    """Of `elaswave`."""
    like: str | None = None
    """Name of the run whose bits it has as well."""


_TRAIN = ("train", "--set", "run.steps=10")
_FOUR = ("--set", "layout.stages=2", "--set", "layout.replicas=2")
_SCRIPT = ("run", "--workers", "4", "--set", "run.steps=6")

RUNS = (
    Run("one worker", (*_TRAIN, "--set", "layout.stages=1", "--set", "layout.replicas=1")),
    Run("uneven layout", (*_TRAIN, "--set", "layout.widths=[1,3]"), "one worker"),
    Run("kill", (*_TRAIN, *_FOUR, "--fault", "kill:3@4:gather"), "one worker"),
    Run("hang", (*_TRAIN, *_FOUR, "--fault", "hang:1@3:backward"), "one worker"),
    Run("join", (*_TRAIN, *_FOUR, "--fault", "kill:0@2:forward", "--fault", "join@4"), "one worker"),
    Run("drain", (*_TRAIN, *_FOUR, "--fault", "drain:0@3"), "one worker"),
    Run("own model", (*_SCRIPT, "--fault", "kill:2@3:reduce", "examples/own_model.py")),
    Run("transformers", (*_SCRIPT, "examples/t5.py")),
)

_CLUSTERS = (
    "--workers 12 --stages 3 --model llama-2-7b --device h100",
    "--workers 16 --stages 8 --model llama-2-13b --device ascend-910b",
    "--workers 8 --stages 2 --model gpt2-large --device a100 --microbatches 8",
    "--workers 24 --stages 4 --model llama-2-34b --device h200 --tensor-parallel 8 --recompute",
    "--workers 12 --stages 6 --model gpt2-xl --device a100 --speed 3=0.7 --nodes-per-rack 2",
    "--workers 12 --stages 4 --model gpt2-medium --device a100 --fence block.3:int8 --schedule zero-bubble",
)
_LOSSES = ("--lose 1", "--lose 3 --pattern clustered", "--lose 2 --pattern random --seed 5")
_POLICIES = ("elaswave", "recycle", "oobleck_aligned")
_FAR = "--network examples/far_apart/four_regions_small.toml"
PLANS = (
    *(f"plan {cluster} {loss} --policy {policy}" for cluster in _CLUSTERS for loss in _LOSSES for policy in _POLICIES),
    *(f"compare {cluster} --lose 2" for cluster in _CLUSTERS[:3]),
    f"plan {_FAR} --codec int8",
    f"plan {_FAR} --codec adatopk10 --copies outside",
    f"compare {_FAR} --codec int4",
)


def digest(text: str | bytes) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def machine() -> str:
    """What bits of runs depend on: the processor and torch."""
    import torch

    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{names[0] if names else platform.machine()}, torch {torch.__version__}"


# ------------------------------------------------------------------------------------------------------------ the parts


def runs() -> Iterator[tuple[str, str]]:
    """Each run's losses and state.

    Raises:
        SystemExit: a run failed, or has not the bits of the one that it is like.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="elaswave-golden-") as scratch:
        for number, run in enumerate(RUNS):
            folder = Path(scratch) / str(number)
            first, *rest = run.arguments
            command = [sys.executable, "-m", "elaswave", first, "--run-dir", str(folder), *rest]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S)
            if ended.returncode != 0:
                sys.exit(f"the run {run.name!r} ended with {ended.returncode}: {' '.join(command)}\n{ended.stderr}")
            result = json.loads((folder / "result.json").read_bytes())
            found[run.name] = digest(json.dumps([result["losses"], result["state_digest"]]))
            if run.like is not None and found[run.name] != found[run.like]:
                sys.exit(f"the run {run.name!r} has not the bits of the run {run.like!r}")
            yield run.name, found[run.name]


def transcripts() -> Iterator[tuple[str, str]]:
    """Every line of simulated jobs, by ranges of seeds."""
    starts = range(0, _SEEDS, _SEEDS_PER_DIGEST)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for start, found in zip(starts, pool.map(_transcript, starts), strict=True):
            yield f"seeds {start} to {start + _SEEDS_PER_DIGEST - 1}", found


def _transcript(start: int) -> str:
    from verify.simulator.run import run_schedule
    from verify.simulator.schedule import random_schedule

    lines: list[str] = []
    for seed in range(start, start + _SEEDS_PER_DIGEST):
        outcome = run_schedule(random_schedule(seed), log=lines.append)
        lines.append(f"{outcome.violation} {outcome.ended} {outcome.reason} {outcome.time}")
    return digest("\n".join(lines))


def plans() -> Iterator[tuple[str, str]]:
    """The JSON of each plan and each comparison, or the error in its place."""
    for command in PLANS:
        yield command, digest(_output([*command.split(), "--json"]))


def help_texts() -> Iterator[tuple[str, str]]:
    """What each command says of itself."""
    yield from _helps([])
    yield from _helps(["verify"])


def _helps(program: list[str]) -> Iterator[tuple[str, str]]:
    text = _output([*program, "--help"])
    yield " ".join(program) or "elaswave", digest(text)
    for verb in _commands_in(text):
        yield " ".join([*program, verb]), digest(text := _output([*program, verb, "--help"]))
        for action in _commands_in(text):
            yield " ".join([*program, verb, action]), digest(_output([*program, verb, action, "--help"]))


def _commands_in(text: str) -> list[str]:
    return re.findall(r"^  ([a-z][\w-]*)", text.partition("\nCommands:\n")[2].partition("\n\n")[0], re.MULTILINE)


def _output(arguments: list[str]) -> str:
    from elaswave.cli.main import cli
    from verify.__main__ import PROGRAM, verify

    program, name = (verify, PROGRAM) if arguments[0] == "verify" else (cli, "elaswave")
    words = arguments[1:] if program is verify else arguments
    try:
        ended = CliRunner().invoke(program, words, prog_name=name, terminal_width=80, catch_exceptions=False)
    except ElaswaveError as error:
        return f"{type(error).__name__}: {error}"
    if ended.exit_code != 0:
        sys.exit(f"elaswave {' '.join(arguments)} ended with {ended.exit_code}: {ended.output}")
    return ended.stdout


PARTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "help": help_texts,
    "plans": plans,
    "transcripts": transcripts,
    "runs": runs,
}


# ---------------------------------------------------------------------------------------------------------- the command


def key_of(part: str) -> str:
    """Under what a part stands in the file."""
    return f"runs on {machine()}" if part == "runs" else part


def differences(recorded: dict[str, str], found: dict[str, str]) -> list[str]:
    """One line for each name that moved, is new or is gone."""
    lines = [f"  moved: {name}" for name in found if name in recorded and recorded[name] != found[name]]
    lines += [f"  new: {name}" for name in found if name not in recorded]
    return lines + [f"  gone: {name}" for name in recorded if name not in found]


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/golden", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--record", action="store_true", help="write what is found to the file instead of comparing")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}: there are {', '.join(PARTS)}")
    os.chdir(ROOT)
    golden: Golden = json.loads(FILE.read_bytes()) if FILE.exists() else {}
    moved = False
    for part in options.parts or PARTS:
        started_s = time.monotonic()
        found = dict(PARTS[part]())
        recorded = golden.get(key_of(part))
        golden[key_of(part)] = found
        lines = [] if recorded is None else differences(recorded, found)
        state = "not recorded on this machine" if recorded is None else f"{len(lines)} moved" if lines else "equal"
        print(f"{part}: {len(found)}, {state}, {time.monotonic() - started_s:.0f} s", *lines, sep="\n", flush=True)
        moved |= bool(lines)
    if options.record:
        FILE.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
    return int(moved and not options.record)


if __name__ == "__main__":
    sys.exit(main())
