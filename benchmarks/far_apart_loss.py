"""What top-k compression gains on slow links in the end: the time until a training has the same held-out loss.

    python benchmarks/far_apart_loss.py [--rates 1 0.1] [--ratio 10] [--seeds 1 2 3] [--steps 120] [--json]

Links and devices are emulated, in virtual time; the trainings are real. Takes the job of examples/far_apart/gpt2.toml
with its links at these shares of their rates. OP-Fence plans a layout for `adatopkR`; on that cut R is also used
uniformly (`topkR`), and nothing at all; and OP-Fence's own plan without a codec stands beside them. A step takes what
`far_step` says. One worker trains with each set of fences and ratios, which has the bits that the job
would have. Time to equal loss: that to the highest of the lowest held-out losses of all of a seed, by interpolation
between evaluations, as mean over the seeds. AdaTopK codes no more than uniform top-k does, so its steps are no
shorter: it can gain by losing less.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from far_step import far_step
from harness import exit_on_sigterm, machine, print_header

from elaswave.config.cluster import cluster_of, emulated_costs
from elaswave.config.load import load_config
from elaswave.config.schema import Config
from elaswave.engine.blueprint import Blueprint
from elaswave.fences import TopK

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "far_apart" / "gpt2.toml"
VOTE_BYTES = 2000
"""Of a ballot of this model, roughly."""
EVALUATIONS = 12
"""Of a training."""
TRAINED = (
    "layout.widths=[1]", "elastic.num_followers=0", "run.eval_microbatches=48", "run.checkpoint_every_s=0",
    "batch.num_microbatches=8", "optimizer.warmup_steps=2",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One way to train."""

    name: str
    fences: tuple[str, ...]
    ratios: tuple[int, ...]
    """By fence; empty: what its codec says."""
    step_s: float


def with_fences(config: Config, fences: Sequence[str]) -> Config:
    """The same job, layout included, with other fences."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, fences=tuple(fences)))


def step_s(config: Config) -> float:
    """Of a job in virtual time."""
    plan = Blueprint(config)
    costs, cluster = emulated_costs(config), cluster_of(config)
    return far_step(
        plan.layout, plan.programs, plan.placement, plan.blocks, costs, cluster, vote_bytes=VOTE_BYTES
    ).step_s  # fmt: skip


def kinds_of(rate: float, ratio: int) -> list[Kind]:
    """The ways at one rate."""
    at_rate = [f"sites.rate={load_config(EXAMPLE).sites.rate * rate!r}"]
    best = load_config(EXAMPLE, [*at_rate, 'sites.codec="none"'])
    kinds = [Kind("dense, its own cut", (), (), step_s(best))]
    config = load_config(EXAMPLE, [*at_rate, f'sites.codec="adatopk{ratio}"'])
    layers = [fence.rpartition(":")[0] for fence in config.model.fences]
    plan = Blueprint(config)
    chosen = plan.ratios_of(plan.layout)
    ratios = tuple(chosen[plan.state.layer_names.index(layer)] for layer in layers)
    uniform = tuple(f"{layer}:{TopK(ratio)}" for layer in layers)
    adapted = tuple(f"{layer}:{TopK(each)}" for layer, each in zip(layers, ratios, strict=True) if each > 1)
    kinds.append(Kind("dense, the same cut", (), (), step_s(with_fences(config, ()))))
    kinds.append(Kind(str(TopK(ratio)), uniform, (), step_s(with_fences(config, uniform))))
    kinds.append(Kind(f"adatopk{ratio}", config.model.fences, ratios, step_s(with_fences(config, adapted))))
    return kinds


@cache
def held_out_losses(
    fences: tuple[str, ...], ratios: tuple[int, ...], seed: int, num_steps: int, sizes: tuple[str, ...]
) -> list[float]:
    """Of a whole training, at its evaluations."""
    model = load_config(EXAMPLE).model
    layers = [fence.rpartition(":")[0] for fence in fences]
    recorded = [f"1:{layer}:{ratio}" for layer, ratio in zip(layers, ratios)]
    settings = [
        *TRAINED, *(f"model.{key}={getattr(model, key)}" for key in ("num_layers", "hidden_size", "num_heads")),
        f"model.context_length={model.context_length}", *sizes, f"run.seed={seed}", f"run.steps={num_steps}",
        f"run.eval_every={max(1, num_steps // EVALUATIONS)}", f"model.fences={json.dumps(fences)}",
        f"model.fence_ratios={json.dumps(recorded)}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "elaswave", "train", "--json", "--run-dir", f"{folder}/run"]
        done = subprocess.run(
            [*command, *(part for setting in settings for part in ("--set", setting))],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    losses: list[float] = json.loads(done.stdout)["val_losses"]
    return losses


def steps_to(losses: Sequence[float], target: float, every: int) -> float:
    """Steps until a loss is reached, by interpolation; before the first evaluation, up to that."""
    for number, loss in enumerate(losses):
        if loss <= target:
            if number == 0:
                return float(every)
            before = losses[number - 1]
            return every * (number + (before - target) / (before - loss))
    raise ValueError(f"the loss {target} is never reached; the lowest is {min(losses)}")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way at each rate."""
    every = max(1, options.steps // EVALUATIONS)
    rows = []
    for rate in options.rates:
        kinds = kinds_of(rate, options.ratio)
        needed: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        for seed in options.seeds:
            losses = {
                kind.name: held_out_losses(kind.fences, kind.ratios, seed, options.steps, tuple(options.size))
                for kind in kinds
            }
            print(f"rate {rate:g}, seed {seed}: {losses}", file=sys.stderr, flush=True)
            target = max(map(min, losses.values()))
            for name, those in losses.items():
                needed[name].append(steps_to(those, target, every))
        first_s = kinds[0].step_s * statistics.mean(needed[kinds[0].name])
        for kind in kinds:
            steps = statistics.mean(needed[kind.name])
            rows.append(
                {
                    "rate": rate, "kind": kind.name, "ratios": list(kind.ratios), "num_fences": len(kind.fences),
                    "step_s": kind.step_s, "steps": steps, "steps_by_seed": needed[kind.name],
                    "time_s": steps * kind.step_s, "speed_up": first_s / (steps * kind.step_s),
                }
            )  # fmt: skip
            print(f"rate {rate:g}, {kind.name}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--ratio", type=int, default=10, help="of topk, the largest of adatopk")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--size", action="append", default=[], help="section.key=value of the trainings")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    exit_on_sigterm()
    rows = measure(options)
    if options.json:
        print(json.dumps({"machine": machine(), "emulated": True, "rows": rows}))
        return 0
    print("LINKS AND DEVICES ARE EMULATED, in virtual time; trained on")
    print_header(machine())
    print("| rate | | ratios | step | steps to equal loss | time | |\n|---|---|---|---|---|---|---|")
    for row in rows:
        ratios = ", ".join(map(str, row["ratios"]))
        print(f"| {row['rate']:g} | {row['kind']} | {ratios} | {row['step_s']:.2f} s | {row['steps']:.1f} | "
              f"{row['time_s']:.0f} s | {row['speed_up']:.2f}x |")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
