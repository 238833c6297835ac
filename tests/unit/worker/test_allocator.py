"""Freed memory stays in the process, so that a step faults no pages in again, and it lies in huge pages."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")

REUSE = """
import resource
from elaswave.worker.process import tune_allocator

def num_page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        memory = bytearray(4 << 20)
        memory[::4096] = b"x" * 1024
        del memory
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = num_page_faults()
tune_allocator()
num_page_faults()
print(usual, num_page_faults())
"""
FLAGS = """
from pathlib import Path
from elaswave.worker.process import tune_allocator

tune_allocator()
memory = bytearray(16 << 20)
mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
print(any("[heap]" in before and " hg" in after.splitlines()[0] for before, after in zip(mappings, mappings[1:])))
"""
LIMITED = """
import resource
from pathlib import Path
from elaswave.worker.process import tune_allocator

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
tune_allocator()
print(len(bytearray(64 << 20)))
"""


def output_of(script: str) -> str:
    # In a process of its own: the settings cannot be taken back.
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout


def test_freed_memory_is_reused_without_page_faults() -> None:
    usual, kept = map(int, output_of(REUSE).split())
    assert usual > 1000
    assert kept < 100


def test_the_heap_asks_for_huge_pages() -> None:
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not offered.exists():
        pytest.skip("the kernel knows no huge pages")
    assert output_of(FLAGS).strip() == "True"


def test_limited_address_space_is_no_error() -> None:
    assert output_of(LIMITED).strip() == str(64 << 20)
