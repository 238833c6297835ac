"""Probe 8: transfers through pinned memory beside computing, queries of events, and seeding the device's generator.

It decides how `stream` stages device tensors, and how random numbers are keyed per (step, micro-batch, layer).
"""

import mmap
import sys
import time
from collections.abc import Iterator

import torch
from parts import Bench, Probe, Row
from timing import Companion, time_issue, time_on_host

PROBE = Probe(8, __file__)
_NO_EVENTS = "a CPU has no events"


class _Ways:
    """Copies between host and device on streams of their own."""

    def __init__(self, bench: Bench, num_bytes: int, is_pinned: bool) -> None:
        pin = is_pinned and bench.is_cuda
        self._host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._there = [torch.ones(num_bytes, dtype=torch.uint8, device=bench.device) for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)] if bench.is_cuda else []

    def up(self) -> None:
        """Host to device, on the current stream."""
        self._there[0].copy_(self._host[0], non_blocking=True)

    def down(self) -> None:
        """Device to host, on the current stream."""
        self._host[1].copy_(self._there[1], non_blocking=True)

    def both(self) -> None:
        """Both at once."""
        if not self._streams:
            self.up()
            self.down()
            return
        current = torch.cuda.current_stream()
        for stream, copy in zip(self._streams, (self.up, self.down)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                copy()
            current.wait_stream(stream)


@PROBE.part(25)
def transfers(bench: Bench) -> Iterator[Row]:
    """Each way and both, pinned and not, alone and beside matrix products."""
    companion = Companion(bench, 32 if bench.small else 8192)
    for num_bytes in (1 << 12,) if bench.small else (1 << 16, 1 << 20, 1 << 24, 1 << 28):
        for is_pinned in (True, False):
            ways = _Ways(bench, num_bytes, is_pinned)
            for name in ("up", "down", "both"):
                copy = getattr(ways, name)
                moved = num_bytes * (2 if name == "both" else 1)
                alone = time_on_host(bench, copy, bench.seconds / 60)
                row: Row = {"way": name, "bytes": num_bytes, "pinned": is_pinned}
                row |= {"alone_bytes_per_s": moved / alone.median_s, "issue_s": time_issue(bench, copy, 5)}
                if is_pinned:
                    beside_s, product_s = companion.beside(copy, bench.seconds / 60)
                    row["beside_bytes_per_s"] = moved / beside_s
                    row["product_slower"] = product_s / companion.alone.median_s
                yield row


@PROBE.part(8)
def pinning(bench: Bench) -> Iterator[Row]:
    """What pinned memory costs to make: by torch, and by registering shared memory that is there."""
    num_bytes = 1 << (16 if bench.small else 28)
    start_s = time.perf_counter()
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=bench.is_cuda)
    yield {"by": "torch", "bytes": num_bytes, "seconds": time.perf_counter() - start_s}
    del memory
    with mmap.mmap(-1, num_bytes) as shared:
        values = torch.frombuffer(shared, dtype=torch.uint8)
        values.fill_(1)
        row: Row = {"by": "cudaHostRegister", "bytes": num_bytes}
        if bench.is_cuda:
            runtime = torch.cuda.cudart()
            start_s = time.perf_counter()
            code = runtime.cudaHostRegister(values.data_ptr(), num_bytes, 0)
            row |= {"code": int(code), "seconds": time.perf_counter() - start_s, "is_pinned": values.is_pinned()}
            there = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
            taken = time_on_host(bench, lambda values=values: there.copy_(values, non_blocking=True), bench.seconds / 8)
            row["bytes_per_s"] = num_bytes / taken.median_s
            start_s = time.perf_counter()
            row["code_of_unregistering"] = int(runtime.cudaHostUnregister(values.data_ptr()))
            row["unregister_s"] = time.perf_counter() - start_s
        else:
            row["left_out"] = "there is no CUDA"
        yield row
        del values


@PROBE.part(8, needs_cuda=_NO_EVENTS)
def events(bench: Bench) -> Iterator[Row]:
    """What a query costs, and how late a host that polls notices the end of a kernel."""
    event = torch.cuda.Event()
    event.record()
    bench.sync()
    yield {"query_passed_s": time_issue(bench, event.query, 2000)}
    yield {"record_s": time_issue(bench, event.record, 2000)}
    for blocking in (False, True):
        for cycles in (200_000, 20_000_000):
            late, waits = [], 0
            for _ in range(5 if bench.small else 40):
                start, end = (torch.cuda.Event(enable_timing=True, blocking=blocking) for _ in range(2))
                bench.sync()
                before_s = time.perf_counter()
                start.record()
                torch.cuda._sleep(cycles)
                end.record()
                while not end.query():
                    waits += 1
                polled_s = time.perf_counter() - before_s
                late.append(polled_s - start.elapsed_time(end) / 1e3)
            late.sort()
            yield {
                "kernel_cycles": cycles,
                "blocking": blocking,
                "queries": waits,
                "noticed_after_s": late[len(late) // 2],
                "worst_s": late[-1],
            }
    start_s = time.perf_counter()
    torch.cuda._sleep(20_000_000)
    number = 0
    event.record()
    while not event.query():
        number += 1
    yield {"query_pending_s": (time.perf_counter() - start_s) / max(1, number)}


@PROBE.part(6)
def seeding(bench: Bench) -> Iterator[Row]:
    """Seeding a generator per (step, micro-batch, layer): seconds, and whether draws follow the key alone."""
    count = 50 if bench.small else 2000
    generator = torch.Generator(bench.device)
    yield {"by": "Generator.manual_seed", "seconds": time_issue(bench, lambda: generator.manual_seed(12345), count)}
    yield {"by": "torch.manual_seed", "seconds": time_issue(bench, lambda: torch.manual_seed(12345), count)}
    if bench.is_cuda:
        yield {"by": "torch.cuda.manual_seed", "seconds": time_issue(bench, lambda: torch.cuda.manual_seed(9), count)}
        current = torch.cuda.default_generators[torch.cuda.current_device()]
        yield {"by": "default generator", "seconds": time_issue(bench, lambda: current.manual_seed(9), count)}
        yield {"by": "set_offset", "seconds": time_issue(bench, lambda: current.set_offset(0), count)}
    x = torch.ones(1000, 1000, device=bench.device)

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.nn.functional.dropout(x, 0.1)

    first = draw(1)
    draw(2)
    equal = torch.equal(draw(1), first)
    yield {"dropout_by_key": equal, "other_key_differs": not torch.equal(draw(2), first)}


if __name__ == "__main__":
    sys.exit(PROBE.main())
