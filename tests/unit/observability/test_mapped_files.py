"""Files that are cut short while a process has them mapped."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

from elaswave.observability.processes import FIRST_LOOK_S, LAST_LOOK_S, MappedFiles

MAPS = """
import mmap, sys
file = open(sys.argv[1], "rb")
memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_files_that_have_become_shorter_are_named_also_when_who_has_mapped_them_is_gone(tmp_path: Path) -> None:
    size = 5 * mmap.PAGESIZE + 7
    whole, cut = tmp_path / "whole.bin", tmp_path / "a file with spaces.bin"
    for path in (whole, cut):
        path.write_bytes(b"x" * size)
    files = MappedFiles(0.0)
    command = [sys.executable, "-c", MAPS]
    processes = [
        subprocess.Popen([*command, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for path in (whole, cut)
    ]
    pids = [process.pid for process in processes]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"mapped\n"
    assert files.cut_short(pids) == []
    for process in processes:
        process.communicate(timeout=60)
    with cut.open("r+b") as file:
        file.truncate(5 * mmap.PAGESIZE + 1)
    assert files.cut_short(pids) == [], "the last page is still there"
    with cut.open("r+b") as file:
        file.truncate(mmap.PAGESIZE)
    expected = f"{cut}, of which {6 * mmap.PAGESIZE} bytes are mapped into memory, has {mmap.PAGESIZE} now"
    assert files.cut_short(pids) == [expected]
    cut.unlink()
    assert files.cut_short(pids) == []


def test_nothing_of_this_process_is_taken_for_cut_short() -> None:
    files = MappedFiles(0.0)
    assert files.cut_short([os.getpid()]) == []
    assert files._ends, "libraries at least"


def test_looks_become_rarer() -> None:
    files, dues = MappedFiles(0.0), []
    for now_s in range(200):
        if files.is_due(float(now_s)):
            dues.append(now_s)
    assert dues[:5] == [1, 3, 7, 15, 31] and FIRST_LOOK_S == 1.0
    assert {later - earlier for earlier, later in zip(dues[5:], dues[6:], strict=False)} == {int(LAST_LOOK_S)}
