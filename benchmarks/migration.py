"""What moving layers costs the steps meanwhile, against stop-and-copy on the same engine.

    python benchmarks/migration.py [--sizes 10m 100m] [--modes paced saturated] [--moves N] [--quick] [--json]

Real jobs, 2 stages x 2 replicas. Layers go from the first stage to the second and back (``elaswave ctl RUN migrate``).
Once as the product does it: copies travel within a budget per attempt, the layout changes with a vote. Once with
`StopAndCopy`: nobody computes until all copies have arrived. Both must have the same losses, bit for bit. See README.md
beside this file.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from harness import SIZES, configuration, machine, print_header
from live_job import LiveJob, Vote, durations_s

from elaswave.channel.messages.operator import AskMigrate
from elaswave.config.schema import Config
from elaswave.protocol.messages import LayoutChange
from elaswave.protocol.step.ballot import add_words
from elaswave.protocol.step.blocks import WorkerBlocks
from elaswave.protocol.step.engine import FrameKind, Key
from elaswave.protocol.step.execution import Execution, Life
from elaswave.protocol.step.loop import StepLoop
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.state.flat import HeldBlock

STAGES, REPLICAS = 2, 2
MICROBATCHES = {"10m": 4, "100m": 2, "tiny": 4}
MOVES = {"10m": 6, "100m": 2, "tiny": 1}
"""Of each job, unless the command says otherwise."""
PACE_S = {"10m": 0.05, "100m": 0.3, "tiny": 0.01}
"""What a forward action lasts beside its computation, in paced jobs: cores are not saturated."""
SHAPES = {
    **SIZES,
    "100m": ("model.num_layers=12", "model.hidden_size=832", "model.num_heads=8"),
}
SHORT = ("model.context_length=32", "batch.microbatch_size=1")
"""Micro-batches are short: what a step takes is mostly described, so that bytes weigh as much as they can."""
WARM_UP = 1
BEFORE = 5
"""Steps before a move that its own are compared with."""
UNBOUNDED = 1 << 50
NEEDED_CUT, NEEDED_SLOWDOWN = 0.90, 0.10


class _TimedExecution(Execution[HeldBlock]):
    held_s = 0.0

    def receive(self, keys: Sequence[Key]) -> Life[list[Any]]:
        begin_s = time.monotonic()
        found = yield from super().receive(keys)
        if keys and keys[0].kind is FrameKind.BASE_COPY:
            self.held_s += time.monotonic() - begin_s
        return found


class _TimedSteps(StepLoop[HeldBlock]):
    execution_class = _TimedExecution
    execution: _TimedExecution

    def replicate(self) -> None:
        begin_s = time.monotonic()
        super().replicate()  # chooses and begins copies, and builds layers
        self.execution.held_s += time.monotonic() - begin_s

    def switch(self, change: LayoutChange) -> None:
        begin_s = time.monotonic()
        super().switch(change)
        self.execution.held_s += time.monotonic() - begin_s


class Timed(WorkerMachine[HeldBlock]):
    """A worker that notes for how long it does nothing but move layers."""

    steps_class = _TimedSteps
    execution: _TimedExecution

    @property
    def held_s(self) -> float:
        """So far."""
        return self.execution.held_s


class _StopAndCopyExecution(_TimedExecution):
    blocks: WorkerBlocks[HeldBlock]

    def run(self, on_layer_done: Callable[[int], None]) -> Life[None]:
        traffic = self.blocks.traffic
        if traffic.changed:
            begin_s = time.monotonic()
            if keys := tuple(self.key(FrameKind.BASE_COPY, block, 0, owner) for block, owner in traffic.copies_in):
                yield keys
            yield from self.all_reduce(FrameKind.VOTE, [0], add_words, part=1)  # the vote itself is part 0
            self.held_s += time.monotonic() - begin_s
        yield from super().run(on_layer_done)


class _StopAndCopySteps(_TimedSteps):
    execution_class = _StopAndCopyExecution
    execution: _StopAndCopyExecution

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.execution.blocks = self.blocks


class StopAndCopy(Timed):
    """A worker that stops to copy: in an attempt in which base copies travel, all of which must (`UNBOUNDED`), no
    worker computes before every worker has all of its own."""

    steps_class = _StopAndCopySteps


class Move(NamedTuple):
    """One change of layout."""

    before_s: float
    """Median step before."""
    switch_s: float
    """The step with whose vote the layout changed; of stop-and-copy the one before, in which nobody computes while
    copies travel."""
    worst_s: float
    """The longest step from the adoption to the first step under the next layout."""
    copying_s: list[float]
    """The steps in which copies travelled, but for the switching one."""
    total_s: float
    """From the beginning of the first step that copied to the end of the switching one."""
    sent_bytes: int
    """Over all links."""
    largest_bytes: int
    """That one worker sent in one attempt."""
    held_s: float
    """The most that a worker spent in the switching step on nothing but the move."""

    @property
    def pause_s(self) -> float:
        """How much longer the switching step took, or that of stop-and-copy which stands still."""
        return self.switch_s - self.before_s


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed or bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["10m", "100m"])
    parser.add_argument("--modes", nargs="+", choices=("paced", "saturated"), default=["paced", "saturated"])
    parser.add_argument("--moves", type=int, help="of each job; 6, of 100m 2")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of jobs")
    parser.add_argument("--layers", type=int, default=1, help="that go with each move")
    parser.add_argument("--quick", action="store_true", help="a tiny model moves once, to see that all runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.modes = ["tiny"], ["paced"]
    where = machine()
    rows = []
    for size in options.sizes:
        for mode in options.modes:
            rows.append(_row(size, mode, options.moves or MOVES[size], options.rounds, options.layers))
    where["load_after"] = machine()["load_before"]
    document = {"machine": where, "needed_cut": NEEDED_CUT, "needed_slowdown": NEEDED_SLOWDOWN, "rows": rows}
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        _print_table(document)
    return 1 if any(row["missed"] or not row["same_bits"] for row in rows) else 0


def _row(size: str, mode: str, num_moves: int, rounds: int, num_layers: int) -> dict[str, Any]:
    moves: dict[str, list[Move]] = {"elaswave": [], "stop-and-copy": []}
    loads: dict[str, float] = {}
    same_bits = True
    for number in range(rounds):
        losses = []
        for name in list(moves) if number % 2 == 0 else list(moves)[::-1]:
            pace_s = PACE_S[size] if mode == "paced" else 0.0
            stops = name != "elaswave"
            found, their_losses, loads[name] = _run(_config(size, stops=stops), pace_s, num_moves, num_layers, stops)
            moves[name] += found
            losses.append(their_losses)
            print(f"{size}, {mode}, {name}: {len(found)} moves", file=sys.stderr, flush=True)
        both = min(map(len, losses))
        same_bits &= losses[0][:both] == losses[1][:both]
    ours, theirs = (_summary(moves[name], loads[name]) for name in moves)
    cut, held_cut = (1 - ours[name] / theirs[name] for name in ("pause_s", "held_s"))
    return {
        "size": size,
        "mode": mode,
        "elaswave": ours,
        "stop_and_copy": theirs,
        "pause_cut": cut,
        "held_cut": held_cut,
        "same_bits": same_bits,
        "missed": cut < NEEDED_CUT or ours["slowdown"] > NEEDED_SLOWDOWN,
    }


def _summary(moves: list[Move], load_cores: float) -> dict[str, Any]:
    """Medians over moves."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    ratios = [duration_s / move.before_s for move in moves for duration_s in move.copying_s]
    return {
        "moves": len(moves),
        "step_s": median([move.before_s for move in moves]),
        "pause_s": median([move.pause_s for move in moves]),
        "pauses_s": [move.pause_s for move in moves],
        "held_s": median([move.held_s for move in moves]),
        "worst_excess_s": median([move.worst_s - move.before_s for move in moves]),
        "slowdown": median(ratios) - 1 if ratios else 0.0,
        "copying_steps": median([len(move.copying_s) + 1 for move in moves]),
        "total_s": median([move.total_s for move in moves]),
        "sent_bytes": median([move.sent_bytes for move in moves]),
        "largest_bytes": max(move.largest_bytes for move in moves),
        "load_cores": load_cores,
    }


def _config(size: str, *, stops: bool) -> Config:
    return configuration(
        *SHAPES[size],
        *SHORT,
        f"batch.num_microbatches={MICROBATCHES[size]}",
        f"layout.stages={STAGES}",
        f"layout.replicas={REPLICAS}",
        "run.steps=100000",
        "optimizer.schedule=constant",
        "elastic.rebalance=false",
        "elastic.respawn=false",
        *([f"elastic.copy_bytes_per_step={UNBOUNDED}"] if stops else []),
    )


def _migrate(layers: tuple[int, ...], request: int) -> AskMigrate:
    return AskMigrate(request=request, layers=layers)


def _run(
    config: Config, pace_s: float, num_moves: int, num_layers: int, stops: bool
) -> tuple[list[Move], list[Any], float]:
    """One job: its moves, its losses, and the cores that it has kept busy."""
    changed: list[int] = []
    with LiveJob(config, pace_s, StopAndCopy if stops else Timed) as job:
        job.wait_for_step(WARM_UP + BEFORE)
        before = [stage.stop - stage.start for stage in job.first_layout().stages]
        for number in range(num_moves):
            gone = (number + 1) % 2 * num_layers  # layers go, and come back with the next move
            layers = (before[0] - gone, before[1] + gone)
            answer = job.ask(partial(_migrate, layers))[-1]
            assert answer.step is not None, answer.reason
            changed.append(answer.step)
            job.wait_for_step(answer.step + WARM_UP + BEFORE)
        finished_s, votes, losses = job.finished_s(), job.votes(), job.losses()
    return [move_at(step, finished_s, votes, stops) for step in changed], losses, job.load_cores


def move_at(first_step: int, finished_s: dict[int, float], votes: list[Vote], stops: bool = False) -> Move:
    """What a change of layout was like.

    Args:
        first_step: the first one under the next layout.
        finished_s: when each step was done.
        votes: of all workers.
        stops: whether the workers stop to copy; they do in the step before the switching one, in which none travel.
    """
    durations = durations_s(finished_s)
    switch = first_step - 1
    begun = switch
    while any(vote.moving for vote in votes if vote.step == begun - 1):
        begun -= 1
    copying = [vote for vote in votes if begun <= vote.step <= switch]
    return Move(
        before_s=statistics.median(durations[step] for step in range(begun - BEFORE, begun)),
        switch_s=durations[switch - stops],
        worst_s=max(durations[step] for step in range(begun, first_step + 1)),
        copying_s=[durations[step] for step in range(begun, switch)],
        total_s=finished_s[switch] - finished_s[begun - 1],
        sent_bytes=sum(vote.sent_bytes for vote in copying),
        largest_bytes=max(vote.sent_bytes for vote in copying),
        held_s=max(_held_s(votes, worker, first_step, 1 + stops) for worker in {vote.worker for vote in copying}),
    )


def _held_s(votes: list[Vote], worker: int, first_step: int, num_steps: int) -> float:
    """What a worker has spent on a move in the last steps under the old layout.

    A vote tells what was spent before it: what the switch itself takes is told by the first one after it.
    """
    noted = {vote.step: vote.held_s for vote in votes if vote.worker == worker}
    return noted[first_step] - noted[first_step - 1 - num_steps]


def _print_table(document: dict[str, Any]) -> None:
    print_header(document["machine"])
    print(
        f"{'size':5} {'mode':9} {'copies':13} {'moves':>5} {'step':>8} {'pause':>8} {'held':>8} {'worst':>8} "
        f"{'slower':>7} {'steps':>5} {'total':>7} {'MB':>7} {'MB/step':>7} {'load':>5}"
    )
    for row in document["rows"]:
        for name in ("elaswave", "stop_and_copy"):
            each = row[name]
            print(
                f"{row['size']:5} {row['mode']:9} {name.replace('_', '-'):13} {each['moves']:5} "
                f"{1e3 * each['step_s']:6.0f}ms {1e3 * each['pause_s']:6.0f}ms {1e3 * each['held_s']:6.1f}ms "
                f"{1e3 * each['worst_excess_s']:6.0f}ms {100 * each['slowdown']:6.1f}% "
                f"{each['copying_steps']:5.0f} {each['total_s']:6.1f}s "
                f"{each['sent_bytes'] / 1e6:7.1f} {each['largest_bytes'] / 1e6:7.2f} {each['load_cores']:5.2f}"
            )
        verdict = "missed" if row["missed"] else "reached"
        bits = "same" if row["same_bits"] else "OTHER"
        print(
            f"      pause cut by {100 * row['pause_cut']:.0f} %, the time that workers are held by "
            f"{100 * row['held_cut']:.0f} %: {verdict}; {bits} bits"
        )


if __name__ == "__main__":
    sys.exit(main())
