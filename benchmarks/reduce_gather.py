"""REDUCE and GATHER as a step of elaswave does them, against gloo's collectives on the same model's gradients.

    python benchmarks/reduce_gather.py [--workers 4] [--sizes default 10m] [--rounds 15] [--listen tcp] [--json]

Ours is the product's own code: the blocks of `elaswave.protocol.step.blocks`, the sums of
`elaswave.engine.torch_engine` and the links of `elaswave.worker.links`, one stage of W workers. Every worker sends its
exact int64 partial sums to the owners of the blocks, an owner makes the float32 mean and sends it to the block's
follower, and then the parameters to those that neither own nor follow the block. Theirs is what ZeRO does with the same
tensors: gloo's reduce-scatter of float32 gradients and all-gather of parameters. Beside it stands gloo's all-reduce,
which moves gradients only.

Every worker process holds both and runs them in turns, one thread each. A time is that of the slowest worker; printed
are medians over all rounds, and bytes that a worker has received in a round, counted by our transport and by the kernel
(TCP_INFO). In training ours begins while gradients are still being computed; here nothing is hidden behind computation.
"""

import argparse
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
from harness import SIZES, configuration, machine, print_header

from elaswave.config.schema import Config
from elaswave.engine.activity import ActionTimer, Activity
from elaswave.engine.blueprint import Blueprint, materialise
from elaswave.engine.compute import Surroundings
from elaswave.engine.torch_engine import EngineContext, TorchEngine
from elaswave.protocol.step.blocks import WorkerBlocks
from elaswave.protocol.step.engine import Pause, Ports, StepObserver, Wait
from elaswave.protocol.step.execution import Execution
from elaswave.transport.stream import StreamTransport
from elaswave.worker.links import TransportLinks
from elaswave.worker.process import terms_of

TIMEOUT_S = 60.0
WARM_ROUNDS = 2
GRID_EXPONENT = 40
"""Of the grids of all tensors: numbers as large as one, with room for as many as the default's micro-batches."""
OURS, ZERO, ALL_REDUCE = "elaswave", "gloo reduce-scatter + all-gather", "gloo all-reduce"
_TCP_BYTES_RECEIVED = 128
"""Where a connection's count stands in the kernel's ``struct tcp_info``."""


class Polling(Surroundings):
    """Lets a transport move bytes.

    Args:
        transport: of the worker.
    """

    def __init__(self, transport: StreamTransport) -> None:
        self._transport = transport

    def check(self) -> None:
        """Moves what can move."""
        self._transport.poll()


class Ours:
    """REDUCE and GATHER of one worker.

    Args:
        config: of the model and of one stage of workers.
        worker: its id.
        transport: linked with all others.
    """

    def __init__(self, config: Config, worker: int, transport: StreamTransport) -> None:
        blueprint = Blueprint(config)
        layout, placement = blueprint.layout, blueprint.placement
        layers, store, progress = materialise(blueprint, worker, layout, placement, None)
        context = EngineContext(
            blueprint=blueprint,
            worker=worker,
            batches=_no_batches,
            evaluation_batches=_no_batches,
            timer=ActionTimer(worker, None, transport.rest),
            run_dir=Path(),
            surroundings=Polling(transport),
        )
        self._transport = transport
        self._engine = TorchEngine(context, layers)
        self._links = TransportLinks(worker, blueprint.blocks, transport, Activity(), transport.poll)
        nothing: Any = None  # neither a coordinator nor a disk has a part in it
        ports = Ports(worker, terms_of(blueprint), self._engine, self._links, StepObserver(), nothing, nothing)
        self._execution = Execution(ports, layout, blueprint.execution, store.held.values())
        self._blocks = WorkerBlocks(self._execution, placement, store.held)
        self._blocks.replicate(None, 0, progress.num_updates)  # no follower is missing

    @property
    def num_parameters(self) -> int:
        """Of the whole model, padding left out."""
        return sum(slot.numel for shape in self._shapes for slot in shape.tensors)

    @property
    def _shapes(self) -> Any:
        return self._engine.context.blueprint.shapes

    @property
    def bytes_received(self) -> int:
        """So far, headers included."""
        return sum(self._transport.bytes_received.values())

    def begin(self, step: int) -> None:
        """What comes before: sums that hold one micro-batch of this worker, and memory for what will arrive."""
        self._execution.step, self._execution.attempt = step, 1
        self._engine.begin(step, [GRID_EXPONENT] * len(self._engine.context.blueprint.tensors))
        generator = torch.Generator().manual_seed(self._execution.worker)
        for accumulator in self._engine.reduction.accumulators.values():
            gradients = [torch.randn(slot.shape, generator=generator) for slot in accumulator.shape.tensors]
            assert accumulator.add(gradients)
        self._blocks.post_receives()

    def run(self) -> None:
        """REDUCE and GATHER."""
        for layer in sorted(self._engine.layers, reverse=True):
            self._blocks.send_partials(layer)
        self._drive(self._blocks.reduce())
        self._drive(self._blocks.gather())

    def check(self, num_workers: int) -> None:
        """Compares a mean gradient with the one that float64 gives."""
        copy = next(iter(self._blocks.copies.values()))
        shape = self._shapes[copy.block.layer]
        total = torch.zeros(shape.size, dtype=torch.float64)
        for worker in range(num_workers):
            generator = torch.Generator().manual_seed(worker)
            for index in sorted(self._engine.layers):
                for slot in self._shapes[index].tensors:
                    values = torch.randn(slot.shape, generator=generator)
                    if index == copy.block.layer:
                        total[slot.offset : slot.stop] += values.flatten().double()
        expected = (total[copy.block.start : copy.block.stop] / self._execution.layout.num_microbatches).float()
        assert copy.gradient is not None
        torch.testing.assert_close(copy.gradient, expected, rtol=1e-4, atol=1e-6)

    def _drive(self, life: Iterator[Wait]) -> None:
        for wait in life:
            self._links.wait(wait)
        self._links.wait(Pause.SENT)


def _no_batches(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("nothing is trained here")


class Gloo:
    """The same tensors over gloo, flat and padded to a multiple of the number of workers.

    Args:
        num_parameters: of the model.
        num_workers: of the group, which has been made.
    """

    def __init__(self, num_parameters: int, num_workers: int) -> None:
        part = -(-num_parameters // num_workers)
        self._gradients = torch.ones(part * num_workers)
        self._parameters = torch.ones(part * num_workers)
        self._part = torch.empty(part)

    def zero(self) -> None:
        """Reduce-scatter of gradients, all-gather of parameters."""
        dist.reduce_scatter_tensor(self._part, self._gradients)
        dist.all_gather_into_tensor(self._parameters, self._part)

    def all_reduce(self) -> None:
        """All-reduce of gradients."""
        dist.all_reduce(self._gradients)

    @property
    def bytes_received(self) -> int:
        """Bytes that the kernel has received so far on this process's TCP connections."""
        total = 0
        for entry in os.scandir("/proc/self/fd"):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += struct.unpack_from("Q", facts, _TCP_BYTES_RECEIVED)[0]
        return total


def main() -> int:
    """Runs the benchmark. There is no target: exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["default", "10m"])
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each size")
    parser.add_argument("--listen", choices=("unix", "tcp"), default="unix", help="what our links run over")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    where = machine()
    rows = [row for size in options.sizes for row in measure(size, options.workers, options.rounds, options.listen)]
    if options.json:
        print(json.dumps({"machine": where, "workers": options.workers, "rows": rows}, indent=2))
        return 0
    print_header(where)
    print(f"{options.workers} workers, our links over {options.listen}; medians of {options.rounds} rounds")
    print(f"{'model':<8} {'parameters':>11} {'what':<34} {'ms':>8} {'of ours':>8} {'bytes per parameter':>20}")
    for row in rows:
        print(
            f"{row['size']:<8} {row['parameters']:>11,} {row['what']:<34} {row['s'] * 1e3:>8.1f} "
            f"{row['times_ours']:>8.2f} {row['received_per_parameter']:>20.2f}"
        )
    return 0


def measure(size: str, num_workers: int, num_rounds: int, listen: str) -> list[dict[str, Any]]:
    """Forks the workers, lets them run, and reduces their times to one row for each program."""
    one_each = f"batch.num_microbatches={num_workers}"
    config = configuration(*SIZES[size], "layout.stages=1", f"layout.replicas={num_workers}", one_each)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gloo_port = probe.getsockname()[1]
    key, context = secrets.token_bytes(32), multiprocessing.get_context("fork")
    folder = tempfile.mkdtemp(prefix="elaswave-bench-")
    pipes, processes = [], []
    try:
        for worker in range(num_workers):
            ours, theirs = context.Pipe()
            arguments = (config, worker, num_workers, num_rounds, listen, folder, gloo_port, key, theirs)
            processes.append(context.Process(target=run_worker, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        addresses = {worker: _receive(pipe) for worker, pipe in enumerate(pipes)}
        for pipe in pipes:
            pipe.send(addresses)
        found = [_receive(pipe, TIMEOUT_S * (1 + num_rounds)) for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)
    num_parameters = found[0]["parameters"]
    seconds = {name: [max(times) for times in zip(*(each["s"][name] for each in found))] for name in found[0]["s"]}
    return [
        {
            "size": size,
            "parameters": num_parameters,
            "what": name,
            "s": statistics.median(times),
            "times_ours": statistics.median(one / ours for one, ours in zip(times, seconds[OURS], strict=True)),
            "received_per_parameter": statistics.mean(each["received"][name] for each in found) / num_parameters,
        }
        for name, times in seconds.items()
    ]


def _receive(pipe: Connection, timeout_s: float = TIMEOUT_S) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a worker has said nothing for {timeout_s:g} s")
    return pipe.recv()


def run_worker(
    config: Config,
    worker: int,
    num_workers: int,
    num_rounds: int,
    listen: str,
    folder: str,
    gloo_port: int,
    key: bytes,
    pipe: Connection,
) -> None:
    """One process: links up with the others in both ways, then runs both in turns."""
    torch.set_num_threads(1)
    where = f"unix:{folder}" if listen == "unix" else "tcp:127.0.0.1"
    transport = StreamTransport(worker, key=key, listen=where)
    pipe.send(transport.address)
    transport.connect(_receive(pipe), TIMEOUT_S)
    method, bound = f"tcp://127.0.0.1:{gloo_port}", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=method, rank=worker, world_size=num_workers, timeout=bound)
    ours = Ours(config, worker, transport)
    gloo = Gloo(ours.num_parameters, num_workers)
    programs: dict[str, tuple[Callable[[], None], Callable[[], int]]] = {
        OURS: (ours.run, lambda: ours.bytes_received),
        ZERO: (gloo.zero, lambda: gloo.bytes_received),
        ALL_REDUCE: (gloo.all_reduce, lambda: gloo.bytes_received),
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    received: dict[str, int] = {}
    for round_ in range(-WARM_ROUNDS, num_rounds):
        for name in list(programs)[:: 1 if round_ % 2 else -1]:
            run, count = programs[name]
            if name == OURS:
                ours.begin(round_ + WARM_ROUNDS + 1)
            dist.barrier()
            before, begin_s = count(), time.perf_counter()
            run()
            duration_s = time.perf_counter() - begin_s
            received[name] = count() - before
            if round_ >= 0:
                seconds[name].append(duration_s)
    dist.barrier()
    ours.check(num_workers)
    pipe.send({"s": seconds, "received": received, "parameters": ours.num_parameters})
    dist.barrier()
    dist.destroy_process_group()
    transport.close()


if __name__ == "__main__":
    sys.exit(main())
