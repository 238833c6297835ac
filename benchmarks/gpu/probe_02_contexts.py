"""Probe 2: contexts of forked processes: what they cost, what before the fork forbids them, what a kill leaves."""

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch
from crowd import Crowd, Member
from nvml import memory_used
from parts import Bench, Probe, Row, SkipPart

PROBE = Probe(2, __file__)
_WORKERS = 4
_MOST_S = 25.0
_NO_GPU = "it is about the memory of a device that a killed process leaves"


class _Forked:
    """A process forked from this one, which must have touched no device."""

    def __init__(self, body: Callable[[Connection], None]) -> None:
        self.connection, theirs = Pipe()
        self.started_s = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self.connection.close()
                body(theirs)
                code = 0
            except BaseException as error:
                with contextlib.suppress(OSError):
                    theirs.send(
                        {"error": f"{type(error).__name__}: {error}"[:600], "at": traceback.format_exc()[-400:]}
                    )
            finally:
                os._exit(code)
        theirs.close()

    def hear(self, timeout_s: float) -> Row:
        """Its next report."""
        try:
            return self.connection.recv() if self.connection.poll(timeout_s) else {"error": "said nothing in time"}
        except EOFError:
            return {"error": "ended without a word"}

    def end(self) -> None:
        """Kills and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.connection.close()


def _first_steps(bench: Bench) -> Row:
    """Seconds until a device has done something for the first time in this process."""
    start_s = time.monotonic()
    x = torch.ones(256, 256, device=bench.device, requires_grad=True)
    bench.sync()
    row = {"context_s": time.monotonic() - start_s}
    (x @ x).sum().backward()
    bench.sync()
    row["backward_s"] = time.monotonic() - start_s
    row["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


def _worker(bench: Bench) -> Callable[[Connection], None]:
    def body(connection: Connection) -> None:
        connection.send(_first_steps(bench))
        connection.poll(_MOST_S)

    return body


@PROBE.part(20, alone=True)
def forked(bench: Bench) -> Iterator[Row]:
    """Four at once, then one after the other: seconds and bytes of the device each."""
    for at_once in (True, False):
        before, workers = memory_used(bench), []
        try:
            for _ in range(_WORKERS):
                workers.append(_Forked(_worker(bench)))
                if not at_once:
                    yield {"at_once": at_once, **workers[-1].hear(_MOST_S), "device_bytes": memory_used(bench) - before}
            if at_once:
                for worker in workers:
                    yield {"at_once": at_once, **worker.hear(_MOST_S)}
                yield {"at_once": at_once, "device_bytes_of_all": memory_used(bench) - before}
        finally:
            for worker in workers:
                worker.end()


def _in_crowd(member: Member, bench: Bench) -> None:
    member.say(_first_steps(bench))
    member.heard(_MOST_S)


@PROBE.part(20, alone=True)
def spawned(bench: Bench) -> Iterator[Row]:
    """The same without a template: interpreters that import torch themselves."""
    start_s, before = time.monotonic(), memory_used(bench)
    with Crowd(_in_crowd, [(bench,)] * _WORKERS) as crowd:
        for report in crowd.expect(dict, _MOST_S).values():
            yield {**report.message, "since_start_s": report.at_s - start_s}
        yield {"device_bytes_of_all": memory_used(bench) - before}


def _poisoned(bench: Bench, what: str, before_fork: Callable[[], object]) -> Row:
    answer = str(before_fork())
    worker = _Forked(_worker(bench))
    try:
        return {"before_fork": what, "answered": answer, **worker.hear(_MOST_S)}
    finally:
        worker.end()


def _backward(device: str) -> float:
    x = torch.ones(4, 4, device=device, requires_grad=True)
    (x @ x).sum().backward()
    return 0.0


@PROBE.part(6, alone=True)
def after_is_available(bench: Bench) -> Iterator[Row]:
    """`torch.cuda.is_available()` in the template."""
    yield _poisoned(bench, "is_available", torch.cuda.is_available)


@PROBE.part(6, alone=True)
def after_nvml_check(bench: Bench) -> Iterator[Row]:
    """The same, told to ask NVML; and the number of devices."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    yield _poisoned(bench, "is_available by NVML, device_count", lambda: (
        torch.cuda.is_available(), torch.cuda.device_count()
    ))  # fmt: skip


@PROBE.part(6, alone=True)
def after_backward(bench: Bench) -> Iterator[Row]:
    """A backward on the CPU in the template."""
    yield _poisoned(bench, "backward on the CPU", lambda: _backward("cpu"))


@PROBE.part(6, alone=True)
def after_generator(bench: Bench) -> Iterator[Row]:
    """`torch.manual_seed` in the template, which also seeds devices, lazily."""
    yield _poisoned(bench, "manual_seed", lambda: torch.manual_seed(1).initial_seed())


@PROBE.part(6, alone=True)
def after_context(bench: Bench) -> Iterator[Row]:
    """A context in the template: it should fail, and says how."""
    yield _poisoned(bench, "a tensor on the device", lambda: torch.ones(1, device=bench.device).item())


def _in_kernel(bench: Bench) -> Callable[[Connection], None]:
    def body(connection: Connection) -> None:
        held = torch.ones((1 << 10) if bench.small else (8 << 30) // 4, device=bench.device)
        bench.sync()
        connection.send({"holds": held.nbytes})
        if bench.is_cuda:
            torch.cuda._sleep(60_000_000_000)  # some 30 s
            torch.cuda.synchronize()
        else:
            while True:
                held.add_(1.0)

    return body


@PROBE.part(40, alone=True)
def killed_in_kernel(bench: Bench) -> Iterator[Row]:
    """SIGKILL in the middle of a kernel until the process is gone, its memory is free, and another computes."""
    if not bench.is_cuda and not bench.small:
        raise SkipPart(_NO_GPU)
    before = memory_used(bench)
    while bench.left_s > 0:
        worker = _Forked(_in_kernel(bench))
        try:
            said = worker.hear(_MOST_S)
            time.sleep(0.01 if bench.small else 0.5)  # it is in its kernel now
            held = memory_used(bench) - before
            start_s = time.monotonic()
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
            gone_s = time.monotonic() - start_s
            while memory_used(bench) - before > held / 10 and time.monotonic() - start_s < _MOST_S:
                time.sleep(0.001)
            free_s = time.monotonic() - start_s
        finally:
            worker.end()
        next_one = _Forked(_worker(bench))
        try:
            first = next_one.hear(_MOST_S)
        finally:
            next_one.end()
        yield {**said, "device_bytes": held, "gone_s": gone_s, "free_s": free_s, "next": first}
        if bench.small:
            break


if __name__ == "__main__":
    sys.exit(PROBE.main())
