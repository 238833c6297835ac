"""Applies each mutant of the list to a copy of the checkout and runs the tests that must notice it.

The tools of the ecosystem (mutmut, cosmic-ray) make mutants of their own, by the thousand, and run a whole suite on
each. Here a mutant is a bug that a developer could make, chosen and named, with the quickest tests that must notice it;
the suite takes ten minutes, so anything else would take days. Hence a runner of our own, which is small.

Copies are made of what git tracks or would track; the working tree is never touched. The tests are first run without
any mutant: a test that fails anyway proves nothing.
"""

import argparse
import fnmatch
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutants.places import ROOT, Mutant, StaleMutantError, missing_tests, mutated, read_mutants, source_file

TIMEOUT_S = 150.0
"""A mutant under which its tests have not ended after so long counts as killed."""
BASELINE_TIMEOUT_S = 1800.0


class Ended(NamedTuple):
    """How a run of tests ended."""

    status: int | None
    """Exit status of pytest; None after a time-out."""
    output: str
    duration_s: float

    @property
    def failed(self) -> list[str]:
        """Ids of the tests that failed."""
        return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self.output, re.MULTILINE)


class Verdict(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    is_good: bool
    text: str
    output: str = ""


class Tree:
    """A copy of the checkout in which tests run, one mutant at a time.

    Args:
        folder: to be filled.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self._stamp = time.time_ns()
        for name in _files():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)

    def judge(self, mutant: Mutant) -> Verdict:
        """Runs a mutant's tests with it, and takes it out again."""
        if mutant.equivalent:
            return Verdict(mutant, True, f"equivalent: {mutant.equivalent}")
        path = self.root / source_file(mutant)
        original = path.read_text()
        self._write(path, mutated(mutant, self.root))
        try:
            ended = self.run(mutant.tests, TIMEOUT_S)
        finally:
            self._write(path, original)
        if ended.status is None:
            return Verdict(mutant, True, f"killed by the time-out of {TIMEOUT_S:.0f} s")
        if ended.status == 1:
            first = ended.failed[0] if ended.failed else "a test"
            return Verdict(mutant, True, f"killed by {first} in {ended.duration_s:.1f} s")
        if ended.status == 0:
            return Verdict(mutant, False, f"SURVIVED {', '.join(mutant.tests)}")
        return Verdict(mutant, False, f"NOT TESTED, pytest ended with {ended.status}", ended.output)

    def run(self, tests: Sequence[str], timeout_s: float) -> Ended:
        """Runs tests until the first one fails."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-rfE", "-m", "", "-p", "no:cacheprovider"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        begin_s = time.monotonic()
        process = subprocess.Popen(
            [*command, *tests],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        status: int | None
        try:
            output, _ = process.communicate(timeout=timeout_s)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = None
        return Ended(status, output, time.monotonic() - begin_s)

    def _write(self, path: Path, text: str) -> None:
        """Writes a source file with a time of its own, or Python might take compiled code of another mutant for it."""
        path.write_text(text)
        self._stamp += 2_000_000_000
        os.utime(path, ns=(self._stamp, self._stamp))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mutants that are asked for; returns 0 if all are killed or argued equivalent, 1 if one is not, and 2 if
    the list does not fit the code or a test fails without any mutant."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of mutants, wildcards allowed; all, if none is given")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (default 2)")
    parser.add_argument("--without-baseline", action="store_true", help="do not run the tests without mutants first")
    options = parser.parse_args(arguments)
    try:
        mutants = _chosen(read_mutants(), options.names)
        for mutant in mutants:
            _check(mutant)
    except StaleMutantError as error:
        print(error, file=sys.stderr)
        return 2
    width = max(len(mutant.name) for mutant in mutants)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:{width}}  {mutant.place}")
        return 0
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elaswave-mutants-") as folder:
        trees = [Tree(Path(folder, str(index))) for index in range(options.jobs)]
        if not options.without_baseline and not _baseline(trees, mutants):
            return 2
        verdicts = _judge(trees, mutants, width)
    bad = [verdict for verdict in verdicts if not verdict.is_good]
    for verdict in bad:
        print(f"\n{verdict.mutant.name}: {verdict.text}\n{verdict.output}")
    num_equivalent = sum(bool(mutant.equivalent) for mutant in mutants)
    print(
        f"\n{len(mutants)} mutants in {(time.monotonic() - begin_s) / 60:.1f} min: "
        f"{len(mutants) - num_equivalent - len(bad)} killed, {num_equivalent} argued equivalent, {len(bad)} not killed"
    )
    return 1 if bad else 0


def _chosen(mutants: Sequence[Mutant], patterns: Sequence[str]) -> list[Mutant]:
    if not patterns:
        return list(mutants)
    for pattern in patterns:
        if not any(fnmatch.fnmatch(mutant.name, pattern) for mutant in mutants):
            raise StaleMutantError(f"no mutant is called {pattern}; scripts/mutants --list names all")
    return [mutant for mutant in mutants if any(fnmatch.fnmatch(mutant.name, each) for each in patterns)]


def _check(mutant: Mutant) -> None:
    mutated(mutant)
    if missing := missing_tests(mutant):
        raise StaleMutantError(f"{mutant.name}: there is no {', '.join(missing)}")


def _baseline(trees: Sequence[Tree], mutants: Sequence[Mutant]) -> bool:
    """Whether all tests pass without any mutant. They run in as many parts as there are trees, a file in one part."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = sorted({test.partition("::")[0] for test in tests})
    parts = [
        [test for test in tests if files.index(test.partition("::")[0]) % len(trees) == i] for i in range(len(trees))
    ]
    with ThreadPoolExecutor(len(trees)) as pool:
        runs = list(pool.map(lambda tree, part: tree.run(part, BASELINE_TIMEOUT_S) if part else None, trees, parts))
    for ended in runs:
        if ended is not None and ended.status != 0:
            print(f"without any mutant the tests do not pass:\n{ended.output}", file=sys.stderr)
            return False
    print(
        f"{len(tests)} tests pass without any mutant, in {max(run.duration_s for run in runs if run):.0f} s", flush=True
    )
    return True


def _judge(trees: Sequence[Tree], mutants: Sequence[Mutant], width: int) -> list[Verdict]:
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def judge(mutant: Mutant) -> Verdict:
        tree = free.get()
        try:
            verdict = tree.judge(mutant)
        finally:
            free.put(tree)
        print(f"{mutant.name:{width}}  {verdict.text}", flush=True)
        return verdict

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(judge, mutants))


def _files() -> list[str]:
    """What git tracks, and what it would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


if __name__ == "__main__":
    sys.exit(main())
