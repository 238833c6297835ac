"""An update of the optimizer: elaswave's configured AdamW and classes of torch.optim on blocks, beside torch's own.

    python benchmarks/optimizers.py [--parameters 1000000 10000000] [--rounds 20] [--json]

All sides update the same tensors (a GPT's, of so many parameters), in one thread, in turns, each with its own copies:
torch.optim on whole tensors, as a plain script calls it; the class on blocks (`TorchUpdater`), one call per block, with
`committed` before it; and the fused AdamW that a configuration names. Printed are milliseconds per million parameters.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from harness import machine, print_header

from elaswave.blocks.placement import ReplicaRole, default_block_size, make_blocks
from elaswave.blocks.shapes import LayerShape
from elaswave.checkpoints.format import MASTER
from elaswave.config.load import load_config
from elaswave.config.schema import OptimizerConfig
from elaswave.state.flat import HeldBlock, model_shapes
from elaswave.training.definition import build_model
from elaswave.training.optimizer import ConfiguredOptimizer, Optimizer
from elaswave.training.own_optimizer import OwnOptimizer
from elaswave.training.parameters import Parameters

CLASSES: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
}


def gpt_of(num_parameters: int) -> tuple[LayerShape, ...]:
    """The shapes of a GPT of about so many parameters: 4 layers up to 2 million, else 8."""
    num_layers = 4 if num_parameters < 2_000_000 else 8
    hidden_size = 64 * max(2, round((num_parameters / (12 * num_layers)) ** 0.5 / 64))
    config = load_config(None, [f"model.num_layers={num_layers}", f"model.hidden_size={hidden_size}"])
    model = build_model(
        "gpt",
        vocab_size=config.data.resolved_vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=4,
        context_length=64,
        dropout=0.0,
        num_kv_heads=None,
        intermediate_size=None,
        rope_theta=10000.0,
    )
    return model_shapes(model)


def on_blocks(optimizer: Optimizer, shapes: tuple[LayerShape, ...]) -> Callable[[], None]:
    """Updates of all blocks of a model."""
    shapes = optimizer.shapes(shapes)
    sizes = [shape.size for shape in shapes]
    copies = []
    for block in make_blocks(sizes, default_block_size(sum(sizes))):
        slots = {MASTER: torch.randn(block.num_elements)}
        slots |= {name: torch.zeros(block.num_elements) for name in optimizer.slots if name not in optimizer.late}
        copies.append(HeldBlock(block, ReplicaRole.OWNER, shapes[block.layer], slots))
    gradients = [torch.randn(copy.num_elements) for copy in copies]
    updater, step = optimizer.updater(), 0

    def update() -> None:
        nonlocal step
        step += 1
        updater.committed(step, 0.0, updates=True)
        for copy, gradient in zip(copies, gradients, strict=True):
            updater.update([copy], [gradient], step)

    return update


def on_tensors(
    make: Callable[[Parameters], torch.optim.Optimizer], shapes: tuple[LayerShape, ...]
) -> Callable[[], None]:
    """The same of whole tensors."""
    named = {slot.name: torch.nn.Parameter(torch.randn(slot.shape)) for shape in shapes for slot in shape.tensors}
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape)
    optimizer = make(Parameters(named.items()))
    return lambda: optimizer.step() and None


def measured(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each side, in turns; the first two turns are not counted."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        for name, update in sides.items():
            start_s = time.perf_counter()
            update()
            if number >= 2:
                times[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.json:
        print_header(machine())
    rows = []
    for size in arguments.parameters:
        shapes = gpt_of(size)
        millions = sum(slot.numel for shape in shapes for slot in shape.tensors) / 1e6
        sides = {"configured AdamW": on_blocks(ConfiguredOptimizer(OptimizerConfig(), 1000), shapes)}
        for name, make in CLASSES.items():
            begin_s = time.perf_counter()
            optimizer = OwnOptimizer(make)(shapes)
            tried_s = time.perf_counter() - begin_s
            sides |= {f"{name}: blocks": on_blocks(optimizer, shapes), f"{name}: torch": on_tensors(make, shapes)}
            rows.append({"optimizer": name, "millions": millions, "tried_s": tried_s})
        found = measured(sides, arguments.rounds)
        configured_ms = 1e3 * found["configured AdamW"] / millions
        for row in rows[-len(CLASSES) :]:
            row["blocks_ms"] = 1e3 * found[f"{row['optimizer']}: blocks"] / millions
            row["torch_ms"] = 1e3 * found[f"{row['optimizer']}: torch"] / millions
            row["configured_ms"] = configured_ms
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return 0
    print(f"{'optimizer':20} {'parameters':>10} {'blocks':>9} {'torch':>9} {'tried in':>9}")
    for row in rows:
        print(
            f"{row['optimizer']:20} {row['millions']:8.2f} M {row['blocks_ms']:6.2f} ms {row['torch_ms']:6.2f} ms "
            f"{row['tried_s']:7.2f} s"
        )
    for millions in sorted({row["millions"] for row in rows}):
        configured_ms = next(row["configured_ms"] for row in rows if row["millions"] == millions)
        print(f"{'configured AdamW':20} {millions:8.2f} M {configured_ms:6.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
