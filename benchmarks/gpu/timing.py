"""Seconds and launches of work on a device."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from parts import Bench

Call = Callable[[], Any]


class Timing(NamedTuple):
    """Of one call, in seconds: on the device's clock where there is one."""

    median_s: float
    low_s: float
    """First quartile."""
    high_s: float
    """Third quartile."""
    count: int


def timing_of(seconds: list[float]) -> Timing:
    """Median and quartiles."""
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0], 1)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high, len(seconds))


def time_on_device(bench: Bench, call: Call, seconds: float, *, warm_ups: int = 2, most: int = 200) -> Timing:
    """Times a call by events around it, many times in a row without waiting in between."""
    for _ in range(warm_ups):
        call()
    bench.sync()
    start_s = time.perf_counter()
    call()
    bench.sync()
    one_s = max(time.perf_counter() - start_s, 1e-6)
    count = max(3, min(most, int(seconds / one_s)))
    if not bench.is_cuda:
        return time_on_host(bench, call, seconds, warm_ups=0, most=most)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    bench.sync()
    return timing_of([before.elapsed_time(after) / 1e3 for before, after in zip(marks, marks[1:])])


def time_on_host(bench: Bench, call: Call, seconds: float, *, warm_ups: int = 2, most: int = 200) -> Timing:
    """Times a call and the wait for the device by the host's clock."""
    for _ in range(warm_ups):
        call()
    bench.sync()
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(found) < 3 or (time.perf_counter() < end_s and len(found) < most):
        start_s = time.perf_counter()
        call()
        bench.sync()
        found.append(time.perf_counter() - start_s)
    return timing_of(found)


def time_issue(bench: Bench, call: Call, count: int) -> float:
    """Seconds of the host per call, the device not waited for."""
    call()
    bench.sync()
    start_s = time.perf_counter()
    for _ in range(count):
        call()
    took_s = time.perf_counter() - start_s
    bench.sync()
    return took_s / count


def launches_of(bench: Bench, call: Call) -> dict[str, Any]:
    """Kernels that a call launches, and seconds in which the device computes at least one of them (by the profiler).

    On a CPU: its operators.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_cuda else [])]
    bench.sync()
    with profile(activities=activities) as profiler:
        call()
        bench.sync()
    events = profiler.events() or []
    if not bench.is_cuda:
        return {"operators": len(events)}
    spans, kernels = [], 0
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels += 1
            spans.append((event.time_range.start, event.time_range.end))
    launches = sum(event.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")) for event in events)
    busy_us, done_us = 0.0, float("-inf")
    for start_us, end_us in sorted(spans):
        busy_us += max(0.0, end_us - max(start_us, done_us))
        done_us = max(done_us, end_us)
    return {"launches": launches, "kernels": kernels, "busy_s": busy_us / 1e6}


class Companion:
    """Matrix products on a stream of their own, so that something else is measured beside them.

    Args:
        size: of the square matrices, bfloat16 (float32 on a CPU, where they do not run beside anything).
    """

    def __init__(self, bench: Bench, size: int) -> None:
        self._bench = bench
        dtype = torch.bfloat16 if bench.is_cuda else torch.float32
        self._a, self._b = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
        self._c = torch.empty_like(self._a)
        self._stream = torch.cuda.Stream() if bench.is_cuda else None
        self.alone = time_on_device(bench, self.multiply, 0.2 if not bench.small else 0.01, most=50)
        """One product without anything beside it."""

    def multiply(self) -> None:
        """One product on the current stream."""
        torch.mm(self._a, self._b, out=self._c)

    def beside(self, call: Call, seconds: float) -> tuple[float, float]:
        """Runs a call again and again beside products.

        Returns:
            Seconds per call and seconds per product, both while the other runs; on a CPU of the two in turns.
        """
        if self._stream is None:
            one = time_on_host(self._bench, call, seconds)
            return one.median_s, self.alone.median_s
        bench = self._bench
        for _ in range(2):
            call()
        bench.sync()
        one_s = time_on_device(bench, call, 0.0).median_s
        num_products = max(4, int(seconds / self.alone.median_s))
        num_calls = max(3, int(seconds / max(one_s, 1e-6)))
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2))
        main = torch.cuda.current_stream()
        # Products and calls are queued in turns, so that neither queue is empty before the other is half done.
        starts[0].record(main)
        starts[1].record(self._stream)
        queued = 0
        for number in range(num_calls):
            call()
            wanted = (number + 1) * num_products // num_calls
            with torch.cuda.stream(self._stream):
                for _ in range(wanted - queued):
                    self.multiply()
            queued = wanted
        ends[0].record(main)
        ends[1].record(self._stream)
        bench.sync()
        return starts[0].elapsed_time(ends[0]) / 1e3 / num_calls, starts[1].elapsed_time(ends[1]) / 1e3 / num_products
