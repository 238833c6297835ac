"""Freed memory stays in the process, so that a step faults no pages in again."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from elaswave.runtime.allocator import keep_freed_memory

def num_page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        memory = bytearray(4 << 20)
        memory[::4096] = b"x" * 1024
        del memory
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = num_page_faults()
keep_freed_memory()
num_page_faults()
print(usual, num_page_faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_reused_without_page_faults() -> None:
    # In a process of its own: the setting cannot be taken back.
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    usual, kept = map(int, result.stdout.split())
    assert usual > 1000
    assert kept < 100
