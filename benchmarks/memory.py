"""What training costs in memory: bytes per parameter of a worker, by part, beside DDP and ZeRO-1.

    python benchmarks/memory.py [--hidden-size 640] [--layers 10] [--workers 1 2 4] [--accumulator-bits 64] [--json]

One stage, float32, AdamW. elaswave as users run it, a checkpoint at the end included; plain PyTorch as
DistributedDataParallel, and the same with ZeroRedundancyOptimizer, on gloo. See README.md beside this file.
"""

import argparse
import json
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import configuration, fork_workers, machine, print_header
from plain import TIMEOUT
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from elaswave.blocks.placement import ReplicaRole
from elaswave.blocks.shapes import GRID_RULES
from elaswave.config.schema import Config
from elaswave.engine.blueprint import Blueprint
from elaswave.launcher.launcher import train
from elaswave.models.layers import build_layer
from elaswave.observability.progress import make_reporter
from elaswave.state.flat import BlockStore

NUM_STEPS = 3
SMALL_HIDDEN_SIZE = 64
"""Of the model that shows what a process takes beside the parameters: interpreter, libraries, threads."""
NUM_MICROBATCHES = 4
CONTEXT_LENGTH = 16
"""One sample of so few tokens makes a micro-batch, so that activations take next to nothing."""
COLUMNS = {
    "weights": "masters, with which a float32 layer computes",
    "optimizer": "of owned blocks, or of all parameters",
    "followed": "optimizer state of followed blocks",
    "sums": "accumulators; of the plain programs, gradients",
    "receive": "buffers for peers' sums",
    "reduced": "mean gradients of held blocks, for one step",
    "rest": "peak of the steps less all of these",
    "steps": "peak until the checkpoint",
    "checkpoint": "what it adds to the peak",
    "peak": "of the whole run",
}
Marks = dict[str, float]
"""Bytes of one worker by name; "steps" and "peak" are peaks of the resident memory of its process."""


def main() -> int:
    """Runs the benchmark; there is no target to miss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=640)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--accumulator-bits", type=int, choices=tuple(GRID_RULES), default=64)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    if options.hidden_size <= SMALL_HIDDEN_SIZE:
        parser.error(f"--hidden-size {options.hidden_size}: must be above {SMALL_HIDDEN_SIZE}, which is subtracted")

    where = machine()
    rows = []
    for num_workers in options.workers:
        for name, run in PROGRAMS.items():
            print(f"measuring {name}, {num_workers} workers", file=sys.stderr)
            rows.append({"program": name, "workers": num_workers, **_per_parameter(run, options, num_workers)})
    num_parameters = _num_parameters(_configuration(options.hidden_size, options, 1))
    if options.json:
        print(json.dumps({"machine": where, "parameters": num_parameters, "rows": rows}, indent=2))
    else:
        _print_table(rows, where, num_parameters)
    return 0


def _per_parameter(
    run: Callable[[Config, int, Path], list[Marks]], options: argparse.Namespace, num_workers: int
) -> dict[str, float]:
    """Bytes per parameter, the largest of all workers, each less what it is with a small model."""
    small, large = (
        _measured(run, _configuration(hidden_size, options, num_workers), num_workers)
        for hidden_size in (SMALL_HIDDEN_SIZE, options.hidden_size)
    )
    added = _num_parameters(_configuration(options.hidden_size, options, 1)) - _num_parameters(
        _configuration(SMALL_HIDDEN_SIZE, options, 1)
    )
    found = {name: (large[name] - small[name]) / added for name in large}
    parts = sum(value for name, value in found.items() if name not in ("steps", "peak"))
    return found | {"rest": found["steps"] - parts, "checkpoint": found["peak"] - found["steps"]}


def _measured(run: Callable[[Config, int, Path], list[Marks]], config: Config, num_workers: int) -> Marks:
    folder = Path(tempfile.mkdtemp(prefix="elaswave-memory-"))
    try:
        marks = run(config, num_workers, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert len(marks) == num_workers
    return max(marks, key=lambda mark: mark["peak"])


def _configuration(hidden_size: int, options: argparse.Namespace, num_workers: int) -> Config:
    return configuration(
        f"model.hidden_size={hidden_size}",
        f"model.num_layers={options.layers}",
        f"elastic.accumulator_bits={options.accumulator_bits}",
        f"model.context_length={CONTEXT_LENGTH}",
        "batch.microbatch_size=1",
        f"batch.num_microbatches={max(NUM_MICROBATCHES, num_workers)}",
        "layout.stages=1",
        f"layout.replicas={num_workers}",
        f"run.steps={NUM_STEPS}",
    )


def _num_parameters(config: Config) -> int:
    return sum(slot.numel for shape in Blueprint(config).shapes for slot in shape.tensors)


def _peak_bytes() -> int:
    """Most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors; memory that several of them share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


# ------------------------------------------------------------------------------------------------------------ elaswave


class _Marker:
    """Looks at a worker's memory when the owners have all sums of the last step, the fullest point before its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reached(self, phase: str, index: int, machine: Any) -> None:
        """See `elaswave.faults.injection.Probe`."""
        if (machine.step, phase, index) != (NUM_STEPS, "apply", 0):
            return
        store = BlockStore(machine.copies)

        def optimizer_of(role: ReplicaRole) -> list[torch.Tensor]:
            return [values for held in store.with_role(role) for name, values in held.slots.items() if name != "master"]

        marks = {
            "weights": _num_bytes(
                [layer.flat for layer in machine.engine.layers.values()] + [held.slots["master"] for held in store]
            ),
            "optimizer": _num_bytes(optimizer_of(ReplicaRole.OWNER)),
            "followed": _num_bytes(optimizer_of(ReplicaRole.FOLLOWER)),
            "sums": _num_bytes(
                plane for accumulator in machine.engine.reduction.accumulators.values() for plane in accumulator.planes
            ),
            "receive": _num_bytes(buffer for slot in machine.engine.reduction._slots.values() for buffer in slot),
            "reduced": _num_bytes(held.gradient for held in store if held.gradient is not None),
            "steps": _peak_bytes(),
        }
        (self._folder / f"marks-{machine.worker}.json").write_text(json.dumps(marks))


def _elaswave(config: Config, num_workers: int, folder: Path) -> list[Marks]:
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "logs").mkdir()

    def body(_: int) -> None:
        with open(folder / "progress.log", "w") as log:
            result = train(config, run_dir, reporter=make_reporter(json_mode=True, stream=log), probe=_Marker(folder))
        peaks = {worker: memory.peak_bytes for worker, memory in result.memory.items()}
        (folder / "peaks.json").write_text(json.dumps(peaks))

    fork_workers(1, body)
    peaks = json.loads((folder / "peaks.json").read_text())
    return [
        json.loads((folder / f"marks-{worker}.json").read_text()) | {"peak": peaks[str(worker)]}
        for worker in range(num_workers)
    ]


# --------------------------------------------------------------------------------------------------------------- plain


def _plain(config: Config, num_workers: int, folder: Path, *, shards_optimizer: bool) -> list[Marks]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_workers, timeout=TIMEOUT
        )
        run = Blueprint(config)
        source = run.open_samples(folder / f"data-{rank}")
        sampler = run.sampler(source)
        layers = [build_layer(spec, config.run.seed, index) for index, spec in enumerate(run.model.layers)]
        # Views into the buckets: without it every gradient is there twice.
        model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
        settings = {"lr": config.optimizer.lr, "betas": config.optimizer.betas, "fused": True}
        parameters = list(model.parameters())
        optimizer = (
            ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)
            if shards_optimizer
            else torch.optim.AdamW(parameters, **settings)
        )
        own = range(rank, config.batch.num_microbatches, num_workers)
        for step in range(1, NUM_STEPS + 1):
            for microbatch in own:
                model.require_backward_grad_sync = microbatch == own[-1]
                tokens, targets = source.batch(sampler.draws(step, microbatch), "train")
                (run.model.loss(model(tokens), targets) / len(own)).backward()
            nn.utils.clip_grad_norm_(parameters, config.optimizer.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        inner = optimizer.optim if shards_optimizer else optimizer
        slots = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
        marks = {
            "weights": _num_bytes(parameters),
            "optimizer": _num_bytes(slots),
            "followed": 0,
            "sums": _num_bytes(parameter.grad for parameter in parameters),
            "receive": 0,
            "reduced": 0,
            "steps": _peak_bytes(),
        }
        # A checkpoint of each rank's own state, written from where it lies.
        torch.save([*parameters, *slots] if rank == 0 else slots, folder / f"checkpoint-{rank}")
        (folder / f"marks-{rank}.json").write_text(json.dumps(marks | {"peak": _peak_bytes()}))
        dist.barrier()
        dist.destroy_process_group()

    fork_workers(num_workers, body)
    return [json.loads((folder / f"marks-{rank}.json").read_text()) for rank in range(num_workers)]


PROGRAMS: dict[str, Callable[[Config, int, Path], list[Marks]]] = {
    "elaswave": _elaswave,
    "DDP": lambda config, num_workers, folder: _plain(config, num_workers, folder, shards_optimizer=False),
    "ZeRO-1": lambda config, num_workers, folder: _plain(config, num_workers, folder, shards_optimizer=True),
}


def _print_table(rows: list[dict[str, Any]], where: dict[str, Any], num_parameters: int) -> None:
    print_header(where)
    print(f"{num_parameters:,} parameters, float32, one stage; bytes per parameter of the worker with the largest peak")
    print()
    print(f"{'program':<10}{'workers':>8}" + "".join(f"{name:>{len(name) + 2}}" for name in COLUMNS))
    for row in rows:
        cells = "".join(f"{row[name]:>{len(name) + 2}.1f}" for name in COLUMNS)
        print(f"{row['program']:<10}{row['workers']:>8}{cells}")
    print()
    for name, meaning in COLUMNS.items():
        print(f"{name}: {meaning}")


if __name__ == "__main__":
    sys.exit(main())
