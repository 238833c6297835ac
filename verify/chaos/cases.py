"""Chaos: training jobs drawn at random, with faults drawn at random, judged against their reference runs.

A case is a pure function of (seed, index): any of them can be repeated alone. Models are drawn once per seed and
shared by its cases, since the result depends on the model, the data and the seed, and on nothing else: **one
fault-free run on a single worker is the reference run of all cases of a model**, whatever their layout, schedule,
followers and checkpoints. That these do not show in the result is itself part of what is tested.

A case may end in two ways: with the same losses, evaluations and digests as its reference run; or, where faults have
destroyed all copies of a block before new ones could be made and there was no checkpoint, with an error that names the
blocks. `judge` checks that the faults really can have done that. Everything else is a defect.

Processes are another module's (`verify.chaos.trial`).
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from elaswave.blocks.placement import Block, Placement
from elaswave.config.load import load_config
from elaswave.config.schema import Config
from elaswave.config.values import toml_value
from elaswave.faults.injection import COORDINATOR, FaultRecord
from elaswave.hashing import key64
from elaswave.observability.compare import compare_results
from elaswave.observability.result import Recovery, RunResult
from elaswave.planning.search.recovery import choose_followers, promote, survivor_layout
from elaswave.protocol.step.engine import PHASES, Phase
from elaswave.types import Layout

NUM_STEPS = 12
NUM_MODELS = 6
"""Models of one seed; each needs a reference run."""
MAX_FAULTS = 3
MAX_WORKERS = 8

_KINDS = ("kill", "kill", "kill", "hang", "cut", "cut-close")
_PHASES_DRAWN: tuple[Phase, ...] = (*PHASES, *PHASES)

_T = TypeVar("_T")


class ChaosCase(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn job."""

    seed: int
    index: int
    model: int
    """Number of the model among those of the seed."""
    settings: dict[str, Any]
    """Changes to the default configuration, by dotted key."""
    faults: tuple[str, ...]
    """Specs, see `elaswave.faults.injection`."""
    reference: dict[str, Any]
    """Settings of the reference run."""
    strikes: tuple[str, ...] = ()
    """Signals from outside, see `verify.chaos.outside`."""
    weather: str = ""
    """What befalls the whole job, see `verify.chaos.weather`."""
    keeps_blocks: bool = False
    """Whether its faults cannot destroy all copies of a block."""
    watches_growth: bool = False
    """Whether it is judged, too, by what its processes hold as time goes on."""

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return config_of(self.settings)

    @property
    def command(self) -> str:
        """The command line that trains exactly this job."""
        return shlex.join(["elaswave", *self.arguments("runs/replay"), "--overwrite"])

    def arguments(self, run_dir: str) -> list[str]:
        """Those of ``elaswave`` that train this job in a folder."""
        parts = ["train", "--run-dir", run_dir]
        for key, value in self.settings.items():
            parts += ["--set", f"{key}={toml_value(value) if not isinstance(value, str) else value}"]
        for fault in self.faults:
            parts += ["--fault", fault]
        return parts

    @property
    def replay(self) -> str:
        """The command line that draws and judges this case again."""
        outside = " --outside" if self.strikes else ""
        return f"python -m verify chaos{outside} --seed {self.seed} --only {self.index}"

    @property
    def model_name(self) -> str:
        """A short name for people."""
        get = self.settings.__getitem__
        dtype = {"float32": "fp32", "bfloat16": "bf16"}[get("model.dtype")]
        return f"{get('model.family')} {dtype} {get('model.num_layers')}x{get('model.hidden_size')}"


def config_of(settings: Mapping[str, Any]) -> Config:
    """The resolved configuration with these values by dotted key."""
    overrides = [f"{key}={value if isinstance(value, str) else toml_value(value)}" for key, value in settings.items()]
    return load_config(None, overrides)


class Draw:
    """Draws in order; the same key gives the same draws on every machine and Python."""

    def __init__(self, *key: int | str) -> None:
        self._key = key
        self._count = 0

    def below(self, bound: int) -> int:
        """A whole number in [0, bound)."""
        self._count += 1
        return key64("chaos", *self._key, self._count) % bound

    def one_of(self, options: Sequence[_T]) -> _T:
        """One of several, all as likely."""
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        """True as often as that."""
        return self.below(100) < percent


def draw_model(seed: int, number: int) -> dict[str, Any]:
    """Everything that shows in the result of a job: model, batch, optimizer, length.

    Args:
        seed: of the bench.
        number: of the model among `NUM_MODELS`.
    Returns:
        Settings by dotted key. Whatever the seed, families and types take turns.
    """
    draw = Draw(seed, "model", number)
    family = ("gpt", "llama")[number % 2]
    # The last one is large enough for its frames to be cut by a death in the middle.
    is_large = number == NUM_MODELS - 1
    settings: dict[str, Any] = {
        "model.family": family,
        "model.dtype": ("float32", "bfloat16")[number // 2 % 2],
        "model.num_layers": 3 if is_large else 1 + draw.below(4),
        "model.hidden_size": 128 if is_large else draw.one_of((32, 48, 64)),
        "model.num_heads": draw.one_of((2, 4)),
        "model.context_length": draw.one_of((8, 16)),
        "model.dropout": draw.one_of((0.0, 0.1)),
        "batch.num_microbatches": draw.one_of((4, 6, 8)),
        "batch.microbatch_size": draw.one_of((2, 4)),
        "optimizer.name": draw.one_of(("adamw", "adamw", "sgd")),
        "optimizer.lr": 1e-3,
        "elastic.block_size": draw.one_of((1024, 4096, 16384)),
        "run.steps": NUM_STEPS,
        "run.seed": 1 + draw.below(1000),
        "run.eval_every": draw.one_of((0, 4)),
        "run.eval_microbatches": 3,
    }
    if family == "llama" and draw.chance(50):
        settings["model.num_kv_heads"] = 1
    return settings


def reference_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """The reference run of all cases of a model: a single worker."""
    return {**model, "layout.widths": [1]}


def draw_case(seed: int, index: int) -> ChaosCase:
    """Draws one case.

    Args:
        seed: of the bench.
        index: of the case, from 0.
    """
    draw = Draw(seed, "case", index)
    number = index % NUM_MODELS
    model = draw_model(seed, number)
    num_stages = 1 + draw.below(min(3, model["model.num_layers"] + 2))
    widths = _draw_widths(draw, num_stages, model["batch.num_microbatches"])
    settings = {
        **model,
        "model.recompute": draw.chance(25),
        "layout.widths": list(widths),
        "layout.schedule": draw.one_of(("1f1b", "1f1b", "gpipe")),
        "elastic.respawn": False,  # its losses are counted; `verify.chaos.changing` has joins
        "elastic.num_followers": draw.one_of((1, 2, "auto")),
        "elastic.refill_bytes_per_step": draw.one_of((4 << 20, 4 << 20, 256 << 10)),
        "run.checkpoint_every": draw.one_of((0, 0, 2, 3)),
    }
    return ChaosCase(
        seed=seed,
        index=index,
        model=number,
        settings=settings,
        faults=tuple(_draw_faults(draw, widths, model)),
        reference=reference_settings(model),
    )


def _draw_widths(draw: Draw, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    widest = min(4, num_microbatches)
    if draw.chance(40):
        width = 1 + draw.below(widest)
        widths = [width] * num_stages
    else:
        widths = [1 + draw.below(widest) for _ in range(num_stages)]
    while sum(widths) > MAX_WORKERS:
        widths[widths.index(max(widths))] -= 1
    if sum(widths) == 1:
        widths[0] = 2
    return tuple(widths)


def _draw_faults(draw: Draw, widths: Sequence[int], model: Mapping[str, Any]) -> Iterator[str]:
    """Up to three faults; at least one worker is left."""
    left = list(range(sum(widths)))
    step = 0
    for _ in range(1 + draw.below(MAX_FAULTS)):
        # Often close to the one before: in the same step or the next, so that recoveries meet.
        if step and draw.chance(60):
            step = min(NUM_STEPS, step + draw.below(2))
        else:
            step = 1 + draw.below(NUM_STEPS)
        if draw.chance(15) or len(left) == 1:
            yield f"kill:{COORDINATOR}@{step}"
            continue
        worker = left.pop(draw.below(len(left)))
        spec = f"{draw.one_of(_KINDS)}:{worker}@{step}"
        if draw.chance(90):
            phase = draw.one_of(_PHASES_DRAWN)
            skip = draw.below(_actions(phase, worker, widths, model)) if draw.chance(60) else 0
            spec += f":{phase}" + (f"+{skip}" if skip else "")
        yield spec


def _actions(phase: Phase, worker: int, widths: Sequence[int], model: Mapping[str, Any]) -> int:
    """About how many actions a worker has in a phase, never too many."""
    if phase in ("forward", "backward"):
        stage = next(index for index in range(len(widths)) if worker < sum(widths[: index + 1]))
        return int(model["batch.num_microbatches"]) // widths[stage]
    return {"reduce": 2, "vote": 1, "apply": 3, "gather": 2}[phase]


# ------------------------------------------------------------------------------------------------------------ judging


Outcome = Literal[
    "same bits",
    "blocks lost",
    "forkserver lost",
    "ended by weather",
    "different",
    "hung",
    "error",
    "left behind",
    "unexplained loss",
    "grown",
]
GOOD: tuple[Outcome, ...] = ("same bits", "blocks lost", "forkserver lost", "ended by weather")
"""Outcomes that are no defect."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What a job has left to be judged."""

    result: RunResult | None = None
    """Of a job that finished."""
    digests: dict[str, str] | None = None
    """Per tensor and slot."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint that passes its checks."""
    error: str | None = None
    """"ErrorType: message" of a job that ended with an error."""
    hung_s: float | None = None
    """Seconds after which a job was given up."""
    left_behind: list[str] = []
    """Processes and files that the job has not removed."""
    struck: list[FaultRecord] = []
    """Faults that have struck, in order."""
    recoveries: list[Recovery] = []
    num_checkpoints: int = 0
    """Checkpoints that had been written."""
    bad_checkpoints: list[str] = []
    """Those among them that are there and not whole, or were to be there and are not."""
    exit_code: int | None = None
    """Of a job that was a command."""


class Judgement(NamedTuple):
    """What a case has shown."""

    outcome: Outcome
    detail: str
    """One line; empty where there is nothing to say."""


def judge(case: ChaosCase, ending: Ending, reference: Ending, placed: "Placed | None") -> Judgement:
    """Judges how a case has ended.

    Args:
        case: what was run.
        ending: how it ended.
        reference: how its reference run ended.
        placed: where its state was at the beginning; None if its faults cannot destroy all copies of a block.
    """
    if ending.hung_s is not None:
        return Judgement("hung", f"not over after {ending.hung_s:.0f} s")
    if ending.left_behind:
        return Judgement("left behind", "; ".join(ending.left_behind))
    if ending.error is not None:
        return _judge_error(ending, placed)
    differs = compare_with_reference(ending, reference, case.settings["run.steps"])
    if differs is not None:
        return differs
    reported = {recovery.worker for recovery in ending.recoveries if recovery.kind == "lost"}
    unreported = [r.worker for r in ending.struck if r.loses and isinstance(r.worker, int) and r.worker not in reported]
    if unreported:
        return Judgement("error", f"the report says nothing of the loss of {_workers(unreported)}")
    alarms = false_alarms(ending)
    return Judgement("same bits", f"false alarm about {_workers(alarms)}" if alarms else "")


def compare_with_reference(ending: Ending, reference: Ending, num_steps: int) -> Judgement | None:
    """What is wrong with a job that has finished, beside its reference run; None if nothing is."""
    assert ending.result is not None and reference.result is not None
    comparison = compare_results(reference.result, ending.result, reference.digests, ending.digests)
    if not comparison.same:
        return Judgement("different", comparison.summary)
    if ending.digests != reference.digests:
        return Judgement("different", "equal state digests, but the digests of single tensors differ")
    if (ending.result.val_steps, ending.result.val_losses) != (reference.result.val_steps, reference.result.val_losses):
        return Judgement("different", "the validation losses differ")
    if ending.checkpoint_step != num_steps:
        return Judgement("error", f"the newest valid checkpoint is of step {ending.checkpoint_step}, not {num_steps}")
    return None


def false_alarms(ending: Ending) -> list[int]:
    """Workers that were held for lost, though no fault had struck them."""
    return without_cause(ending, [record.worker for record in ending.struck if isinstance(record.worker, int)])


def without_cause(ending: Ending, struck: Sequence[int]) -> list[int]:
    """Workers that were held for lost and are not among those that were struck."""
    return [
        recovery.worker
        for recovery in ending.recoveries
        if recovery.kind == "lost" and recovery.worker is not None and recovery.worker not in struck
    ]


def _judge_error(ending: Ending, placed: "Placed | None") -> Judgement:
    error = ending.error
    assert error is not None
    if not error.startswith("RecoveryError: all copies of "):
        return Judgement("error", error)
    if ending.num_checkpoints:
        return Judgement("unexplained loss", f"there were {ending.num_checkpoints} checkpoints to go back to: {error}")
    struck = [(r.worker, r.step) for r in ending.struck if r.loses and isinstance(r.worker, int)]
    if placed is None or not can_lose_blocks(placed, struck):
        return Judgement("unexplained loss", f"the faults leave a copy of every block: {error}")
    return Judgement("blocks lost", error.removeprefix("RecoveryError: "))


class Placed(NamedTuple):
    """Where a job's state is, and how it is made up for."""

    layout: Layout
    blocks: Sequence[Block]
    placement: Placement
    scatter_width: int
    max_elements: int
    """That an owner sends during a step to make new copies."""


def can_lose_blocks(placed: Placed, struck: Sequence[tuple[int, int]]) -> bool:
    """Whether faults can have destroyed all copies of a block before new copies were made.

    As many workers as some block has copies must have been struck while the copies that the first of them took along
    were not yet replaced. A worker that is gone holds up the vote, so no worker is more than one step
    beyond it when its loss is noticed; from then on each step makes one round of new copies.

    Args:
        placed: the job at its beginning.
        struck: (worker, step) of every fault that has struck a worker, in order.
    """
    copies = min(map(len, placed.placement.groups))
    window = 1 + _num_rounds(placed, [worker for worker, _ in struck])
    steps = sorted(step for _, step in struck)
    return any(last - first <= window for first, last in zip(steps, steps[copies - 1 :]))


def _num_rounds(placed: Placed, lost: Sequence[int]) -> int:
    """The most steps that it takes to make up for the lost copies, after any number of these losses."""
    most = 0
    for count in range(1, len(lost) + 1):
        gone = frozenset(lost[:count])
        if gone >= set(placed.layout.workers):
            break
        layout = survivor_layout(placed.layout, gone)
        placement = promote(placed.placement, placed.blocks, layout, partial(_is_left, gone)).placement
        # Blocks without any copy do not matter here; any worker may have them.
        owner = tuple(worker if worker not in gone else layout.workers[0] for worker in placement.owner)
        placement = Placement.of(owner, placement.followers)
        rounds = 0
        while True:
            after = choose_followers(
                placement,
                placed.blocks,
                layout,
                scatter_width=placed.scatter_width,
                max_elements=placed.max_elements,
            )
            if after == placement:
                break
            placement, rounds = after, rounds + 1
        most = max(most, rounds)
    return most


def _is_left(gone: frozenset[int], block: int, worker: int) -> bool:
    return worker not in gone


def _workers(workers: Sequence[int]) -> str:
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, workers))
