"""Probe 1: what the machine is, and whether the product's tests pass under its Python and torch."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from parts import SOURCE, Bench, Probe, Row
from timing import time_on_device

PROBE = Probe(1, __file__)
_ROOT = SOURCE.parent
_NEEDED = ("msgspec", "click", "cloudpickle", "networkx", "numpy", "rich", "safetensors", "torch", "transformers")
_TESTED = ("triton", "hypothesis", "pytest_timeout", "xdist")


@PROBE.part(10)
def device(bench: Bench) -> Iterator[Row]:
    """What torch says of the device, and its two ceilings: copies and products."""
    if bench.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        names = ("name", "total_memory", "multi_processor_count", "major", "minor", "L2_cache_size")
        yield {name: getattr(properties, name, None) for name in names}
    elements = 1 << (12 if bench.small else 29)
    source, target = (torch.empty(elements, dtype=torch.float32, device=bench.device) for _ in range(2))
    copied = time_on_device(bench, lambda: target.copy_(source), bench.seconds / 6)
    yield {"copy_bytes_per_s": 8 * elements / copied.median_s}
    size = 64 if bench.small else 8192
    a, b = (torch.randn(size, size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    product = time_on_device(bench, lambda: a @ b, bench.seconds / 6)
    yield {"bf16_flop_per_s": 2 * size**3 / product.median_s, "size": size}


@PROBE.part(5)
def host(bench: Bench) -> Iterator[Row]:
    """Shared memory, its size and speed, and packages."""
    usage = shutil.disk_usage("/dev/shm")
    row: Row = {
        "shm_total": usage.total,
        "shm_free": usage.free,
        "huge_pages": _read_line("/proc/meminfo", "HugePages_"),
    }
    row["overcommit"] = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    row["ptrace_scope"] = _read_line("/proc/sys/kernel/yama/ptrace_scope", "")
    yield row
    for name in (*_NEEDED, *_TESTED):
        try:
            yield {"package": name, "version": getattr(importlib.import_module(name), "__version__", "there")}
        except ImportError as error:
            yield {"package": name, "missing": str(error)}
    for module in ("state.sums", "state.flat", "worker.canary", "training.optimizer", "worker.compute", "cli.main"):
        try:
            importlib.import_module(f"elaswave.{module}")
        except ImportError as error:
            yield {"module": module, "missing": str(error)}


def _read_line(path: str, beginning: str) -> list[str] | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return [line for line in lines if line.startswith(beginning)]


def _run(command: list[str], timeout_s: float) -> Row:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])}
    try:
        ended = subprocess.run(
            command, cwd=_ROOT, env=environment, text=True, capture_output=True, timeout=max(5.0, timeout_s)
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return {"command": command[2:], "exit_code": "out of time", "end": text.splitlines()[-12:]}
    lines = ended.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "command": command[2:],
        "exit_code": ended.returncode,
        "failures": failures[:60],
        "end": lines[-4:] + ended.stderr.splitlines()[-4:],
    }


@PROBE.part(20)
def kernel_tests(bench: Bench) -> Iterator[Row]:
    """The tests of the kernel for sums, on the GPU if there is one."""
    arguments = ["-q", "-rs", "tests/unit/devices"]
    yield _run([sys.executable, "-m", "pytest", *arguments, *(["-k", "types"] if bench.small else [])], bench.left_s)


@PROBE.part(25)
def training(bench: Bench) -> Iterator[Row]:
    """A small job on the CPU, as users start it: processes, shared memory, a kill, equal bits."""
    if bench.small:
        yield _run([sys.executable, "-m", "elaswave", "--help"], 30)
    else:
        yield _run([sys.executable, "-m", "elaswave", "demo"], bench.left_s)


@PROBE.part(150)
def unit_tests(bench: Bench) -> Iterator[Row]:
    """The unit tests, but for those of the project's own tools."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "120", "-p", "no:cacheprovider"]
    if bench.small:
        yield _run([*command, "tests/unit/state/test_verify.py"], 60)
    else:
        workers = ["-n", "12", "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
        yield _run([*command, *workers, "tests/unit", "--ignore", "tests/unit/project"], bench.left_s)


if __name__ == "__main__":
    sys.exit(PROBE.main())
