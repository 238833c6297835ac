"""Time of an all-reduce over our links against torch.distributed's gloo, in pairs within one run.

    python benchmarks/allreduce.py [--workers 4] [--sizes 65536 1048576 16777216] [--pairs 15] [--listen tcp] [--json]

Every worker process holds both a gloo process group (over 127.0.0.1) and our transport, one thread each, and runs them
alternately on float32 tensors; a time is that of the slowest worker. Printed are the medians over all pairs of both
times and of their ratio. Needed: at most 1.0 at 16 MB, 0.5 at 1 MB and at 64 KB (4 workers).
"""

import argparse
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from elaswave.transport.group import Group
from elaswave.transport.stream import StreamTransport

TARGETS = {64 << 10: 0.5, 1 << 20: 0.5, 16 << 20: 1.0}
"""Largest ratio allowed, by bytes."""
TIMEOUT_S = 60.0


def main() -> int:
    """Run the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=sorted(TARGETS), help="bytes")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timed rounds for each size")
    parser.add_argument("--listen", choices=("unix", "tcp"), default="unix", help="what our links run over")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    folder = tempfile.mkdtemp(prefix="elaswave-bench-")
    try:
        rows = measure(options.workers, options.sizes, options.pairs, options.listen, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps({"workers": options.workers, "listen": options.listen, "rows": rows}, indent=2))
    else:
        print(f"all-reduce of float32, {options.workers} workers with one thread each, {os.cpu_count()} cores")
        print(f"{'bytes':>10} {'gloo ms':>9} {f'{options.listen} ms':>9} {'ratio':>7} {'allowed':>8}")
        for row in rows:
            allowed = "-" if row["allowed"] is None else f"{row['allowed']:.2f}"
            print(
                f"{row['bytes']:>10} {row['gloo_s'] * 1e3:>9.3f} {row['elaswave_s'] * 1e3:>9.3f} "
                f"{row['ratio']:>7.2f} {allowed:>8}"
            )
    missed = [row for row in rows if row["allowed"] is not None and row["ratio"] > row["allowed"]]
    return 1 if missed and options.workers == 4 else 0


def measure(num_workers: int, sizes: list[int], num_pairs: int, listen: str, folder: str) -> list[dict]:
    """Fork the workers, let them run, and reduce their times to one row for each size."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gloo_port = probe.getsockname()[1]
    key = secrets.token_bytes(32)
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for worker in range(num_workers):
        ours, theirs = context.Pipe()
        args = (worker, num_workers, sizes, num_pairs, listen, folder, gloo_port, key, theirs)
        process = context.Process(target=run_worker, args=args)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        addresses = {worker: pipe.recv() for worker, pipe in enumerate(pipes)}
        for pipe in pipes:
            pipe.send(addresses)
        times = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    rows = []
    for size in sizes:
        gloo = [max(column) for column in zip(*(worker_times[size]["gloo"] for worker_times in times))]
        ours = [max(column) for column in zip(*(worker_times[size]["elaswave"] for worker_times in times))]
        rows.append(
            {
                "bytes": size,
                "gloo_s": statistics.median(gloo),
                "elaswave_s": statistics.median(ours),
                "ratio": statistics.median(mine / theirs for mine, theirs in zip(ours, gloo)),
                "allowed": TARGETS.get(size),
            }
        )
    return rows


def run_worker(
    worker: int,
    num_workers: int,
    sizes: list[int],
    num_pairs: int,
    listen: str,
    folder: str,
    gloo_port: int,
    key: bytes,
    pipe: Connection,
) -> None:
    """One process: links up both, then times them alternately."""
    torch.set_num_threads(1)
    where = f"unix:{folder}" if listen == "unix" else "tcp:127.0.0.1"
    transport = StreamTransport(worker, key=key, listen=where)
    pipe.send(transport.address)
    transport.connect(pipe.recv(), TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{gloo_port}",
        rank=worker,
        world_size=num_workers,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = Group(transport, range(num_workers), channel=1)
    times: dict[int, dict[str, list[float]]] = {}
    step = 0
    for size in sizes:
        tensor = torch.full((size // 4,), 1.0)
        repeats = max(1, min(50, (4 << 20) // size))

        def ours(tensor: torch.Tensor = tensor) -> None:
            nonlocal step
            step += 1
            group.all_reduce(tensor, step=step, timeout_s=TIMEOUT_S)

        def gloo(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)

        times[size] = {"gloo": [], "elaswave": []}
        for pair in range(-2, num_pairs):
            for name, run in (("gloo", gloo), ("elaswave", ours))[:: 1 if pair % 2 else -1]:
                tensor.fill_(1.0)
                seconds = timed(run, repeats, group, step)
                if pair >= 0:
                    times[size][name].append(seconds)
        tensor.fill_(1.0)
        ours()
        assert torch.equal(tensor, torch.full_like(tensor, float(num_workers)))
    pipe.send(times)
    group.barrier(step=step + 1, timeout_s=TIMEOUT_S)
    dist.destroy_process_group()
    transport.close()


def timed(run: Callable[[], None], repeats: int, group: Group, step: int) -> float:
    """Seconds of one call, after all processes have arrived."""
    group.barrier(step=step, sub=1, timeout_s=TIMEOUT_S)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


if __name__ == "__main__":
    sys.exit(main())
