"""What an append to the coordinator's journal costs: our own file against sqlite, with and without fsync.

    python benchmarks/journal.py [--pairs 20] [--appends 200] [--folder DIR] [--json]

Each pair appends the same records to a new journal of each kind, one after the other, in turns. sqlite is set up as a
coordinator would need it: one writer that keeps its lock, a write-ahead log, one transaction for each append, synced
(`synchronous=FULL`) or not (`OFF`), the payload a blob of the same bytes with the same digest that our entries have.
Needed for sqlite to take its place: no slower in either mode.
"""

import argparse
import hashlib
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from harness import machine, print_header

from elaswave.store.file_store import FileStore
from elaswave.store.store import JournalRecord, Published


def own_s(path: Path, num_appends: int, synced: bool) -> float:
    """Seconds of an append to our own journal."""
    store: FileStore[JournalRecord] = FileStore(path, JournalRecord, outlives_machine=synced)
    begin_s = time.perf_counter()
    for step in range(num_appends):
        store.append(record_of(step))
    taken_s = time.perf_counter() - begin_s
    store.close()
    return taken_s / num_appends


def sqlite_s(path: Path, num_appends: int, synced: bool) -> float:
    """Seconds of an append to one in sqlite."""
    database = sqlite3.connect(path, isolation_level=None)
    for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", f"synchronous={'FULL' if synced else 'OFF'}"):
        database.execute(f"PRAGMA {pragma}").fetchall()
    database.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, payload BLOB NOT NULL, digest BLOB NOT NULL)")
    encoder = msgspec.msgpack.Encoder()
    begin_s = time.perf_counter()
    for step in range(num_appends):
        payload = encoder.encode([record_of(step)])
        digest = hashlib.blake2b(payload, digest_size=8).digest()
        database.execute("INSERT INTO entries (payload, digest) VALUES (?, ?)", (payload, digest))
    taken_s = time.perf_counter() - begin_s
    database.close()
    return taken_s / num_appends


def record_of(step: int) -> Published:
    """The record that a run has most of."""
    return Published(step=step, loss=2.5 / (1 + step), finished_s=float(step))


def measure(folder: Path, num_pairs: int, num_appends: int, synced: bool) -> dict[str, object]:
    """Pairs of both kinds, in turns."""
    kinds: dict[str, Callable[[Path, int, bool], float]] = {"own": own_s, "sqlite": sqlite_s}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for pair in range(num_pairs):
        for kind in sorted(kinds, reverse=bool(pair % 2)):
            taken[kind].append(kinds[kind](folder / f"{kind}-{synced}-{pair}", num_appends, synced))
    ratios = sorted(other / own for own, other in zip(taken["own"], taken["sqlite"], strict=True))
    return {
        "synced": synced,
        "own_us": 1e6 * median(taken["own"]),
        "sqlite_us": 1e6 * median(taken["sqlite"]),
        "ratio": median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
    }


def main() -> int:
    """Runs the benchmark; the exit code is 1 if sqlite is no slower, and our own journal should go."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--appends", type=int, default=200, help="in each journal")
    parser.add_argument("--folder", type=Path, help="where the journals lie; default: the system's temporary folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-", dir=options.folder) as folder:
        rows = [measure(Path(folder), options.pairs, options.appends, synced) for synced in (True, False)]
    if options.json:
        print(json.dumps({"machine": where, "rows": rows}, indent=2))
    else:
        print_header(where)
        print(f"microseconds of an append, medians of {options.pairs} pairs of {options.appends} appends")
        for row in rows:
            low, high = row["ratio_range"]  # type: ignore[misc]
            print(
                f"{'with fsync' if row['synced'] else 'without':<12} own {row['own_us']:>8.1f}  sqlite "
                f"{row['sqlite_us']:>8.1f}  ratio {row['ratio']:.2f} ({low:.2f} to {high:.2f})"
            )
    return 1 if all(row["ratio"] <= 1.0 for row in rows) else 0  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
