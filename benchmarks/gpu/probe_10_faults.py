"""Probe 10: out of memory, an illegal address, a failed assertion, an endless kernel in one of four processes.

What does each process see, when, and how long are the others held up? It decides the classes of faults. And NVML:
which readings there are, and what one costs.
"""

import contextlib
import ctypes
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from crowd import Crowd, Ended, Member
from nvml import memory_used, readings
from parts import Bench, Probe, Row, SkipPart

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

PROBE = Probe(10, __file__)
_WORKERS = 4
_VICTIM = 0
_REPORT_S = 0.05


def _out_of_memory(bench: Bench) -> None:
    held, size = [], 1 << 29
    if not bench.is_cuda:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (1 << 28)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        size = 1 << 24
    while True:
        held.append(torch.ones(size, dtype=torch.uint8, device=bench.device))


def _illegal_address(bench: Bench) -> None:
    if bench.is_cuda:
        if triton is None:
            raise RuntimeError("triton is not installed")
        _store_far[(1,)](torch.zeros(8, dtype=torch.int32, device=bench.device))
        torch.cuda.synchronize()
    else:
        ctypes.string_at(8)


def _failed_assertion(bench: Bench) -> None:
    values = torch.zeros(8, device=bench.device)
    print(values[torch.tensor([1 << 20], device=bench.device)].sum().item())


def _endless(bench: Bench) -> None:
    if not bench.is_cuda:
        while True:
            pass
    if triton is None:
        torch.cuda._sleep(10**15)
    else:
        _spin[(1,)](torch.zeros(1, dtype=torch.int32, device=bench.device))
    torch.cuda.synchronize()


if triton is not None:

    @triton.jit
    def _store_far(pointer):
        far = (pointer.to(tl.int64) + (1 << 45)).to(tl.pointer_type(tl.int32))
        tl.store(far, 1)

    @triton.jit
    def _spin(flag):
        while tl.load(flag, volatile=True) == 0:
            pass


_FAULTS: dict[str, Callable[[Bench], None]] = {
    "out of memory": _out_of_memory,
    "illegal address": _illegal_address,
    "failed assertion": _failed_assertion,
    "endless kernel": _endless,
}


def _work(member: Member, bench: Bench, fault: str) -> None:
    """Products, reported every `_REPORT_S`; the victim makes its fault when it is told to."""
    size = 32 if bench.small else 4096
    a = torch.randn(size, size, device=bench.device)
    member.say("ready")
    end_s = time.monotonic() + 120.0
    times: list[float] = []
    reported_s = 0.0
    while time.monotonic() < end_s:
        start_s = time.monotonic()
        try:
            if (told := member.heard()) == "enough":
                return
            if told == "fault":
                member.say("begins")
                _FAULTS[fault](bench)
            (a @ a)[0, 0].item()
            times.append(time.monotonic() - start_s)
            if time.monotonic() > reported_s + _REPORT_S:
                member.say({"took_s": times})
                times, reported_s = [], time.monotonic()
            if not bench.is_cuda:
                time.sleep(0.002)
        except Exception as error:
            member.say({"error": f"{type(error).__name__}: {error}"[:500], "after_s": time.monotonic() - start_s})
            answers = "yes"
            try:
                torch.ones(8, device=bench.device).sum().item()
            except Exception as second:
                answers = f"{type(second).__name__}: {second}"[:200]
            member.say({"goes_on": answers})
            if answers != "yes":
                raise SystemExit(3) from error
            return


def _watch(crowd: Crowd, seconds: float, stop: Callable[[Any], bool] = lambda report: False) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {number: [] for number in range(_WORKERS)}
    end_s = time.monotonic() + seconds
    for report in crowd.reports(seconds):
        found[report.member].append(report.message)
        if stop(report) or report.at_s > end_s:
            break
    return found


def _seen(messages: list[Any]) -> Row:
    times = [took_s for each in messages if isinstance(each, dict) for took_s in each.get("took_s", ())]
    row: Row = {"products": len(times)}
    if times:
        row |= {"median_s": statistics.median(times), "longest_s": max(times)}
    for each in messages:
        if isinstance(each, Ended):
            row["exit_code"] = each.exit_code
        elif isinstance(each, dict):
            row |= {key: value for key, value in each.items() if key in ("error", "after_s", "goes_on")}
    return row


def _fault(bench: Bench, fault: str) -> Iterator[Row]:
    before = memory_used(bench)
    with Crowd(_work, [(bench, fault)] * _WORKERS) as crowd:
        crowd.expect("ready", 60.0)
        seconds = 0.3 if bench.small else 2.0
        at_rest = _watch(crowd, seconds)
        held = memory_used(bench) - before
        crowd.tell(_VICTIM, "fault")
        start_s = time.monotonic()
        is_over = lambda report: report.member == _VICTIM and isinstance(report.message, Ended)  # noqa: E731
        seen = _watch(crowd, (0.5 if fault == "endless kernel" else 8.0) if bench.small else 8.0, is_over)
        waited_s = time.monotonic() - start_s
        for number in range(_WORKERS):
            row: Row = {"fault": fault, "process": "victim" if number == _VICTIM else number}
            yield {**row, "before": _seen(at_rest[number]), **_seen(seen[number]), "watched_s": waited_s}
        has_ended = any(isinstance(each, Ended) for each in seen[_VICTIM])
        start_s = time.monotonic()
        crowd.kill(_VICTIM)
        if not has_ended:
            _watch(crowd, 20.0, is_over)
        gone_s = time.monotonic() - start_s
        share = held / _WORKERS
        while memory_used(bench) - before > held - share / 2 and bench.is_cuda and time.monotonic() - start_s < 20.0:
            time.sleep(0.005)
        free_s = time.monotonic() - start_s
        after = _watch(crowd, seconds)
        yield {
            "fault": fault,
            "killed": not has_ended,
            "gone_s": gone_s,
            "memory_free_s": free_s,
            "others_after": [_seen(after[number]) for number in range(_WORKERS) if number != _VICTIM],
        }


@PROBE.part(16, alone=True)
def out_of_memory(bench: Bench) -> Iterator[Row]:
    """One process takes all memory."""
    yield from _fault(bench, "out of memory")


@PROBE.part(16, alone=True)
def illegal_address(bench: Bench) -> Iterator[Row]:
    """A kernel writes where nothing is."""
    yield from _fault(bench, "illegal address")


@PROBE.part(16, alone=True)
def failed_assertion(bench: Bench) -> Iterator[Row]:
    """An index that is too large, which torch's kernels assert."""
    yield from _fault(bench, "failed assertion")


@PROBE.part(18, alone=True)
def endless_kernel(bench: Bench) -> Iterator[Row]:
    """A kernel that never ends, until its process is killed."""
    yield from _fault(bench, "endless kernel")


@PROBE.part(5)
def nvml(bench: Bench) -> Iterator[Row]:
    """Each reading, whether it is granted, and what it costs."""
    known = readings()
    if not known:
        raise SkipPart("NVML is not to be had: no driver, or nvidia-ml-py is not installed")
    if bench.is_cuda:
        torch.ones(8, device=bench.device)
    for name, read in known.items():
        try:
            value = read()
            start_s = time.perf_counter()
            for _ in range(20):
                with contextlib.suppress(Exception):
                    read()
            yield {"reading": name, "value": value, "seconds": (time.perf_counter() - start_s) / 20}
        except Exception as error:
            yield {"reading": name, "refused": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(PROBE.main())
