"""What a recovery's appends to the coordinator's journal cost: in sqlite, against a file that nothing could be rolled
back in.

    python benchmarks/journal.py [--pairs 200] [--idle 0.02] [--folder DIR] [--json]

A recovery appends five entries (`SIZES`). Each pair appends them to a journal in sqlite, as a coordinator does, and to
a plain file, each with its digest in one write: the least that a journal can cost. Which comes first changes in turns.
Once the pairs follow each other; and once each waits and clears the processor's caches before, as a coordinator that
has slept between two messages would find them. Needed: 0.2 ms more at most, as the median of the second.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import msgspec
from harness import machine, print_header

from elaswave.store.file_store import FileStore

SIZES = (131, 1668, 136, 840, 338)
"""Bytes of a new generation, a decision of four workers, a step's time, the layout, the recovery."""
NEEDED_MS = 0.2
_CACHE_BYTES = 8 << 20
_ENCODER = msgspec.msgpack.Encoder()


class Entry(msgspec.Struct, frozen=True, tag=True):
    """A record of some size."""

    content: bytes


class PlainFile:
    """Entries one after the other.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def append(self, record: Entry) -> None:
        """Adds one."""
        payload = _ENCODER.encode([record])
        self._file.write(payload + hashlib.blake2b(payload, digest_size=8).digest())

    def close(self) -> None:
        """Closes it."""
        self._file.close()


def recovery_ms(append: Callable[[Entry], None], idle_s: float) -> float:
    """Milliseconds of a recovery's appends."""
    if idle_s:
        time.sleep(idle_s)
        bytes(bytearray(os.urandom(1)) * _CACHE_BYTES)
    begin_s = time.perf_counter()
    for size in SIZES:
        append(Entry(bytes(size)))
    return 1e3 * (time.perf_counter() - begin_s)


def measure(folder: Path, num_pairs: int, idle_s: float) -> dict[str, float]:
    """Pairs of both kinds, in turns."""
    plain, store = PlainFile(folder / f"plain-{idle_s}"), FileStore[Entry](folder / f"sqlite-{idle_s}", Entry)
    kinds: dict[str, Callable[[Entry], None]] = {"plain": plain.append, "sqlite": store.append}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for pair in range(num_pairs):
        for kind in sorted(kinds, reverse=bool(pair % 2)):
            taken[kind].append(recovery_ms(kinds[kind], idle_s))
    plain.close()
    store.close()
    more = [other - least for least, other in zip(taken["plain"], taken["sqlite"], strict=True)]
    row = {"idle_s": idle_s, "more_median_ms": median(more)}
    for kind, times in taken.items():
        row |= {f"{kind}_median_ms": median(times), f"{kind}_p99_ms": quantiles(times, n=100)[98]}
    return row


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a recovery takes more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--idle", type=float, default=0.02, help="seconds that a pair of the second kind waits before")
    parser.add_argument("--folder", type=Path, help="where the journals lie; default: the system's temporary folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-", dir=options.folder) as folder:
        rows = [measure(Path(folder), options.pairs, idle_s) for idle_s in (0.0, options.idle)]
    if options.json:
        print(json.dumps({"machine": where, "rows": rows}, indent=2))
    else:
        print_header(where)
        print(f"milliseconds of the {len(SIZES)} appends of a recovery, {options.pairs} pairs")
        for row in rows:
            print(
                f"{'after a pause' if row['idle_s'] else 'in a row':<14}"
                f"plain file {row['plain_median_ms']:.3f} (p99 {row['plain_p99_ms']:.2f})  "
                f"sqlite {row['sqlite_median_ms']:.3f} (p99 {row['sqlite_p99_ms']:.2f})  "
                f"more {row['more_median_ms']:.3f}"
            )
    return int(rows[-1]["more_median_ms"] > NEEDED_MS)


if __name__ == "__main__":
    sys.exit(main())
