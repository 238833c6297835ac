"""Sums of 64 and of 48 bits beside each other: errors of mean gradients, on real gradients, and what adding takes.

    python benchmarks/accumulator.py [--config examples/gpt-10m.toml] [--set data.paths='["text.txt"]'] [--steps 40]

A plain PyTorch loop trains the model of a configuration. In every fifth step the gradients of all micro-batches are
added in three ways: exactly, in sums of 64 and of 48 bits on the grids that follow from the step before, and in
float32, one micro-batch after the other. All means are compared with those of float64. Then both kinds of sums add the
last step's gradients and make its means, in turns. See README.md beside this file.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness import machine, print_header  # first: it sets the number of threads

import torch  # isort: skip
from torch import nn

from elaswave.blocks.shapes import GRID_RULES, LayerShape, TensorSlot, could_overflow, is_too_coarse, next_exponent
from elaswave.config.load import load_config
from elaswave.config.schema import Config
from elaswave.engine.blueprint import Blueprint
from elaswave.models.layers import build_layer
from elaswave.state.sums import ExactAccumulator, Scratch, reduced_gradient

SAMPLE_PERIOD = 5
WIDTHS = tuple(GRID_RULES)
ROUNDS = 15
Gradients = list[list[torch.Tensor]]
"""By layer and tensor, of one micro-batch."""


class Errors(NamedTuple):
    """Of the means of one tensor in one step, relative."""

    whole: float
    """Root of the sum of squares of the errors, by that of the exact mean."""
    of_largest: float
    """The largest error of an element, by the tensor's largest gradient M."""
    off: float
    """Share of the elements that are off by more than 2**-20 of themselves."""


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a mean is further off than docs/numerics.md states."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/gpt-10m.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")
    options = parser.parse_args()
    config = load_config(Path(options.config), options.set)
    where = machine()
    run = Blueprint(config)
    found, retries, within, last = errors_of(config, run, options.steps)
    times = [timed(run.shapes, last) for _ in range(ROUNDS)]
    ratios = {
        part: statistics.quantiles([each[48][part] / each[64][part] for each in times], n=4) for part in ("add", "mean")
    }
    best = {width: {part: min(each[width][part] for each in times) for part in ("add", "mean")} for width in WIDTHS}
    document = {
        "machine": where,
        "config": options.config,
        "settings": options.set,
        "steps": options.steps,
        "errors": {name: _summary(errors) for name, errors in found.items()},
        "tried again": retries,
        "within bound": within,
        "best ns per element": best,
        "ratio 48 to 64, quartiles": ratios,
    }
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print_header(where)
        _print(document)
    return 0 if within else 1


def errors_of(
    config: Config, run: Blueprint, num_steps: int
) -> tuple[dict[str, list[Errors]], dict[int, int], bool, list[Gradients]]:
    """Trains; errors by way of adding, tensors by width whose grids a vote would not have accepted, whether all errors
    of exact sums were within the stated bound, and the last step's gradients by micro-batch."""
    torch.set_num_threads(1)
    layers = [build_layer(spec, config.run.seed, index) for index, spec in enumerate(run.model.layers)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, betas=config.optimizer.betas)
    exponents = {(width, slot.id): 0 for width in WIDTHS for slot in run.tensors}
    found: dict[str, list[Errors]] = {"48 bits": [], "64 bits": [], "float32": []}
    retries, within, parts = dict.fromkeys(WIDTHS, 0), True, []
    with tempfile.TemporaryDirectory(prefix="elaswave-accumulator-") as folder:
        source = run.open_samples(Path(folder))
        sampler = run.sampler(source)
        for step in range(1, num_steps + 1):
            parts = []
            for microbatch in range(config.batch.num_microbatches):
                tokens, targets = source.batch(sampler.draws(step, microbatch), "train")
                model.zero_grad(set_to_none=True)
                run.model.loss(model(tokens), targets).backward()
                parts.append([[_gradient(parameter) for parameter in layer.parameters()] for layer in layers])
            is_sample = step % SAMPLE_PERIOD == 0
            for index, shape in enumerate(run.shapes):
                for position, slot in enumerate(shape.tensors):
                    gradients = [part[index][position] for part in parts]
                    maximum = max(float(gradient.abs().max()) for gradient in gradients)
                    exact = torch.stack([gradient.double() for gradient in gradients]).sum(0) / len(parts)
                    for width in WIDTHS:
                        exponent, count = exponents[width, slot.id], len(parts)
                        after = next_exponent(maximum, exponent, count, width)
                        refused = could_overflow(maximum, exponent, count, width) or is_too_coarse(maximum, exponent)
                        if step > 1 and refused:
                            retries[width] += 1
                        if refused:
                            exponent = after
                        if is_sample and maximum > 0.0:
                            mean = mean_on(gradients, exponent, width)
                            found[f"{width} bits"].append(errors(mean, exact, maximum))
                            within &= _is_within(mean, exact, exponent)
                        exponents[width, slot.id] = after
                    if is_sample and maximum > 0.0:
                        plain = gradients[0].clone()
                        for gradient in gradients[1:]:
                            plain += gradient
                        found["float32"].append(errors(plain / len(parts), exact, maximum))
            for index, layer in enumerate(layers):
                for position, parameter in enumerate(layer.parameters()):
                    parameter.grad = torch.stack([part[index][position] for part in parts]).mean(0)
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip or float("inf"))
            optimizer.step()
    return found, retries, within, parts


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def mean_on(gradients: Sequence[torch.Tensor], exponent: int, width: int) -> torch.Tensor:
    """The mean of one tensor's gradients as the product makes it."""
    size = gradients[0].numel()
    padded = -(-size // 32) * 32
    slot = TensorSlot(0, "gradient", 0, tuple(gradients[0].shape), 0, size, True)
    shape = LayerShape(0, (slot,), padded)
    exact = ExactAccumulator(shape, width=width)
    exact.reset([exponent])
    for gradient in gradients:
        assert exact.add([gradient])
    mean = reduced_gradient(exact.sum, shape, 0, [exponent], len(gradients), width=width)
    return mean[:size].view(gradients[0].shape)


def errors(mean: torch.Tensor, exact: torch.Tensor, maximum: float) -> Errors:
    """How far a mean is off."""
    off = (mean.double() - exact).abs()
    share = (off > 2.0**-20 * exact.abs()).double().mean()
    return Errors(float(off.norm() / exact.norm()), float(off.max()) / maximum, float(share))


def _is_within(mean: torch.Tensor, exact: torch.Tensor, exponent: int) -> bool:
    """The bound of docs/numerics.md: half a unit, and one rounding to float32."""
    bound = exact.abs() * 2.0**-24 + 0.5 * 2.0**-exponent
    return bool(((mean.double() - exact).abs() <= bound * (1 + 2.0**-20) + 2.0**-150).all())


def timed(shapes: Sequence[LayerShape], parts: Sequence[Gradients]) -> dict[int, dict[str, float]]:
    """Nanoseconds per element of adding micro-batches and of making means, by width, one width after the other."""
    found = {}
    for width in WIDTHS:
        scratch = Scratch()
        sums = [ExactAccumulator(shape, scratch, width=width) for shape in shapes]
        exponents = [[30] * len(shape.tensors) for shape in shapes]
        for accumulator, own in zip(sums, exponents, strict=True):
            accumulator.reset(own)
        elements = sum(shape.size for shape in shapes)
        seconds = []
        for part in parts:
            began = time.process_time()
            for accumulator, gradients in zip(sums, part, strict=True):
                assert accumulator.add(gradients)
            seconds.append(time.process_time() - began)
        began = time.process_time()
        for accumulator, own in zip(sums, exponents, strict=True):
            reduced_gradient(accumulator.sum, accumulator.shape, 0, own, len(parts), width=width)
        mean_s = time.process_time() - began
        # The first addition of a step writes and adds nothing.
        found[width] = {
            "add": statistics.median(seconds[1:]) / elements * 1e9,
            "mean": mean_s / elements * 1e9,
        }
    return found


def _summary(found: Sequence[Errors]) -> dict[str, float]:
    whole = [each.whole for each in found]
    return {
        "median of tensors": statistics.median(whole),
        "worst tensor": max(whole),
        "largest error / M": max(each.of_largest for each in found),
        "elements off by 2**-20": statistics.mean(each.off for each in found),
        "tensors": len(found),
    }


def _print(document: dict) -> None:
    print(f"{document['config']}, {document['steps']} steps, every {SAMPLE_PERIOD}th looked at")
    rows = document["errors"]
    columns = list(next(iter(rows.values())))
    print(f"{'sums':<9}" + "".join(f"{name:>{len(name) + 2}}" for name in columns))
    for name, row in rows.items():
        print(f"{name:<9}" + "".join(f"{row[column]:>{len(column) + 2}.3g}" for column in columns))
    print(f"grids that a vote would have refused after step 1, tensors: {document['tried again']}")
    print(f"all exact means within the stated bound: {document['within bound']}")
    for width, row in document["best ns per element"].items():
        print(f"{width} bits: add {row['add']:.2f} ns, mean {row['mean']:.2f} ns per element")
    for part, (low, middle, high) in document["ratio 48 to 64, quartiles"].items():
        print(f"{part}: 48 bits take {middle:.2f} of 64 (quartiles {low:.2f} to {high:.2f}, {ROUNDS} pairs)")


if __name__ == "__main__":
    raise SystemExit(main())
