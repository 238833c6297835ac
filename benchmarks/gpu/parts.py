"""Runs the parts of a probe: each answers one question in bounded time, and none can lose the others' answers.

A part is a function of a `Bench` that yields rows. Parts run in a child process, one after the other; those that may
crash, hang or poison a context (`alone`) have one of their own. The parent touches no device. It writes each row as
soon as it comes, kills a child whose part overruns its limit, with all that the child has started, and starts another
for the parts that are left. Lines of JSON: first the machine, then rows, then one line per part with its outcome.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

Row = dict[str, Any]
SOURCE = Path(__file__).resolve().parents[2] / "src"
SMALL_S = 1.0
"""Of a part with ``--small``, unless it says otherwise."""
_START_S = 40.0
"""Most seconds that a child takes until its first part begins, imports and a context included."""
_GRACE = 1.5
"""A part that takes so many times its seconds, and `_START_S`, is killed."""
_LEAST_S = 2.0
"""A part that has less is not begun."""
_LOG_CHARACTERS = 1500
_POISONED = 77
"""Exit code of a child whose device answers no more."""


class SkipPart(Exception):
    """A part cannot be answered here; the message says why."""


class Bench:
    """What a part is given.

    Args:
        device: that it measures.
        small: tiny sizes: does everything run?
        seconds: that it may take.
    """

    def __init__(self, device: str, small: bool, seconds: float) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.small = small
        self.seconds = seconds
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the part should be done."""
        return self._end_s - time.monotonic()

    def sync(self) -> None:
        """Waits until the device has computed everything."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Gives back memory that nothing uses."""
        if self.is_cuda:
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Part:
    """A question."""

    name: str
    answer: Callable[[Bench], Iterator[Row]]
    seconds: float
    """That it should take on a GPU."""
    alone: bool
    """Whether it has a process of its own, in which no device has been touched."""
    needs_cuda: str
    """Why it makes no sense without; empty where it does."""
    small_s: float = SMALL_S
    """That it should take with ``--small``."""


@dataclass(frozen=True)
class Limits:
    """How a probe is run."""

    device: str
    small: bool
    seconds: float
    """Of all its parts together."""
    only: Sequence[str] = ()
    """Parts; empty for all."""


@dataclass
class Probe:
    """The parts that belong to one number of the list in README.md."""

    number: int
    script: str
    """Its path."""
    parts: dict[str, Part] = field(default_factory=dict)

    def part(
        self, seconds: float, *, alone: bool = False, needs_cuda: str = "", small_s: float = SMALL_S
    ) -> Callable[[Callable[[Bench], Iterator[Row]]], Callable[[Bench], Iterator[Row]]]:
        """Makes a function a part; its name is the function's."""

        def register(answer: Callable[[Bench], Iterator[Row]]) -> Callable[[Bench], Iterator[Row]]:
            self.parts[answer.__name__] = Part(answer.__name__, answer, seconds, alone, needs_cuda, small_s)
            return answer

        return register

    @property
    def seconds(self) -> float:
        """That all parts should take on a GPU, their processes' start included."""
        num_starts = 1 + sum(part.alone for part in self.parts.values())
        return sum(part.seconds for part in self.parts.values()) + 6.0 * num_starts

    def main(self) -> int:
        """The command line of a probe."""
        parser = argparse.ArgumentParser(description=f"Probe {self.number}; see README.md beside this file.")
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        parser.add_argument("--small", action="store_true", help="tiny sizes: does everything run?")
        parser.add_argument("--seconds", type=float, default=self.seconds, help="of all parts (default: %(default)s)")
        parser.add_argument("--part", action="append", default=[], choices=self.parts, help="only this one")
        parser.add_argument("--out", type=Path, help="also write the lines to this file")
        parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
        options = parser.parse_args()
        limits = Limits(options.device, options.small, options.seconds, options.part)
        if options.child is not None:
            return _answer(self, limits, options.child)
        with contextlib.ExitStack() as stack:
            files: list[IO[str]] = [sys.stdout]
            if options.out:
                files.append(stack.enter_context(open(options.out, "w")))
            write_line(files, {"machine": machine()})
            outcomes = run_probe(self, limits, files)
        return 1 if any(outcome in ("failed", "died", "overran") for outcome in outcomes.values()) else 0


# ----------------------------------------------------------------------------------------------------------- the parent


def machine() -> Row:
    """What the numbers were measured on; touches no device."""
    fields = ("name", "driver_version", "memory.total")
    gpus: list[str] | str
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        gpus = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        gpus = f"none found: {error}"
    found = importlib.util.find_spec("triton")
    try:
        command = ["git", "-C", str(SOURCE), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return {
        "gpu": gpus,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton") if found else None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def write_line(files: Sequence[IO[str]], line: Row) -> None:
    """Writes one line of JSON, at once."""
    for file in files:
        print(json.dumps(line, default=str), file=file, flush=True)


def run_probe(probe: Probe, limits: Limits, files: Sequence[IO[str]]) -> dict[str, str]:
    """Runs the parts of a probe.

    Args:
        files: where lines go.
    Returns:
        The outcome of each part: done, skipped, failed (an exception), died, overran, or not begun.
    """
    end_s = time.monotonic() + limits.seconds
    chosen = [part for name, part in probe.parts.items() if not limits.only or name in limits.only]
    outcomes: dict[str, str] = {}

    def close(part: Part, outcome: str, **more: Any) -> None:
        outcomes[part.name] = outcome
        write_line(files, {"probe": probe.number, "part": part.name, "outcome": outcome, **more})

    queue = []
    for part in chosen:
        if limits.device == "cpu" and part.needs_cuda:
            close(part, "skipped", why=part.needs_cuda)
        else:
            queue.append(part)
    while queue:
        group = [queue[0]]
        if not group[0].alone:
            group = [part for part in queue if not part.alone]
        left_s = end_s - time.monotonic()
        if left_s < _LEAST_S:
            for part in queue:
                close(part, "not begun", why=f"{limits.seconds:.0f} s are over")
            break
        share = min(1.0, left_s / sum(part.seconds for part in queue))
        child = _Child(probe, limits, group, share, end_s)
        with child:
            for part in group:
                verdict = child.follow(part, lambda row, part=part: write_line(
                    files, {"probe": probe.number, "part": part.name, **row}
                ))  # fmt: skip
                if verdict is None:  # the child ended before it began this part
                    break
                outcome, more = verdict
                close(part, outcome, **more)
        # A child that never begins its first part must not be started for ever.
        if not any(part.name in outcomes for part in group):
            close(group[0], "died", why="its process did not begin it", log=child.log())
        queue = [part for part in queue if part.name not in outcomes]
    return outcomes


class _Child:
    """A process that answers some parts.

    Args:
        group: they, in order.
        share: of its seconds that each part has.
        end_s: when everything must be over, on the monotonic clock.
    """

    def __init__(self, probe: Probe, limits: Limits, group: Sequence[Part], share: float, end_s: float) -> None:
        self._limits = limits
        self._share = share
        self._end_s = end_s
        self._log = tempfile.TemporaryFile("w+")
        reading, writing = os.pipe()
        seconds = sum(part.seconds for part in group) * share
        command = [
            sys.executable, probe.script, "--device", limits.device, "--child", str(writing), "--seconds", f"{seconds}",
            *(["--small"] if limits.small else []), *(word for part in group for word in ("--part", part.name)),
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONUNBUFFERED": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            env=environment,
            start_new_session=True,
        )
        os.close(writing)
        self._reading = reading
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(reading, selectors.EVENT_READ)

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._selector.close()
        os.close(self._reading)

    def _end(self) -> None:
        """Ends the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)  # a process inside of a driver call may take its time to die

    def log(self) -> str:
        """The end of what it has printed."""
        self._log.seek(0)
        return self._log.read()[-_LOG_CHARACTERS:]

    def _line(self, until_s: float) -> Row | None | str:
        """The next line; "late" after until_s, None when the process has ended."""
        while b"\n" not in self._buffer:
            timeout_s = min(until_s, self._end_s) - time.monotonic()
            if timeout_s <= 0 or not self._selector.select(timeout_s):
                return "late"
            data = os.read(self._reading, 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def follow(self, part: Part, on_row: Callable[[Row], None]) -> tuple[str, Row] | None:
        """Waits for a part's end.

        Returns:
            Its outcome and what there is to say of it; None: the process has ended before it began.
        """
        start_s = time.monotonic()
        seconds = part.small_s if self._limits.small else part.seconds * self._share
        until_s = start_s + _GRACE * seconds + _START_S
        has_begun = False
        while True:
            line = self._line(until_s)
            took = {"seconds": round(time.monotonic() - start_s, 2)}
            if line == "late":
                self._end()
                limit_s = min(until_s, self._end_s) - start_s
                return "overran", took | {"why": f"killed after {limit_s:.0f} s", "log": self.log()}
            if line is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=10)
                if not has_begun:
                    return None
                return "died", took | {"why": f"exit code {self._process.returncode}", "log": self.log()}
            assert isinstance(line, dict)
            if "begin" in line:
                has_begun = True
            elif "row" in line:
                on_row(line["row"])
            else:
                return line["end"], took | line["more"]


# ------------------------------------------------------------------------------------------------------------ the child


def _answer(probe: Probe, limits: Limits, descriptor: int) -> int:
    """Answers parts in this process, writing lines to a pipe."""
    with open(descriptor, "w", buffering=1) as file:
        os.set_inheritable(descriptor, False)
        total_s = sum(probe.parts[name].seconds for name in limits.only)
        for name in limits.only:
            part = probe.parts[name]
            seconds = part.small_s if limits.small else part.seconds * limits.seconds / total_s
            write_line([file], {"begin": name})
            outcome, more = _outcome(part, Bench(limits.device, limits.small, seconds), file)
            write_line([file], {"end": outcome, "more": more})
            if outcome == "failed" and not _still_answers(limits.device):
                return _POISONED
    return 0


def _outcome(part: Part, bench: Bench, file: IO[str]) -> tuple[str, Row]:
    try:
        for row in part.answer(bench):
            write_line([file], {"row": row})
    except SkipPart as error:
        return "skipped", {"why": str(error)}
    except Exception as error:
        where = traceback.format_exc().splitlines()[-12:]
        return "failed", {"why": f"{type(error).__name__}: {error}"[:600], "where": where}
    finally:
        if not part.alone:
            bench.free()
    return "done", {}


def _still_answers(device: str) -> bool:
    try:
        if device == "cuda":
            torch.ones(8, device=device).sum().item()
    except RuntimeError:
        return False
    return True
