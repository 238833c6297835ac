"""Runs several training programs beside each other, a few steps of one at a time, and compares their times.

All programs are alive from the beginning to the end, and all but one wait at a step boundary: ``A B A B``, so that
whatever else the machine does meets all of them. A program is a process forked from this warm one (torch is imported,
no tensor operation has run), with workers that call `Gate.before_step` before every step. A turn lasts from the
moment its workers are let go until all of them have come back to their gate.
"""

import contextlib
import ctypes
import math
import os
import shutil
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import msgspec
import torch

from elaswave.config.load import load_config
from elaswave.config.schema import Config
from elaswave.config.values import OwnModel
from elaswave.job.script import Script
from elaswave.launcher.launcher import train
from elaswave.observability.progress import make_reporter
from elaswave.observability.summary import summarize_run
from elaswave.protocol.step.activity import IDLE
from elaswave.training.definition import Training

SIZES: dict[str, tuple[str, ...]] = {
    "default": (),
    "10m": ("model.num_layers=8", "model.hidden_size=320"),
    "tiny": ("model.num_layers=2", "model.hidden_size=32", "model.context_length=16", "batch.microbatch_size=4"),
}
"""What differs from the default recipe; `tiny` is for a quick look whether everything runs."""
TURN_TIMEOUT_S = 600.0
"""A turn that takes longer means that something hangs."""
END_TIMEOUT_S = 60.0
_COUNT = struct.Struct("<I")
_HERE = b"h"
_PR_SET_PDEATHSIG = 1


class Gate:
    """What holds a worker at the beginning of a step until it is the program's turn; inherited by forked workers."""

    def __init__(self, num_workers: int) -> None:
        pairs = [socket.socketpair() for _ in range(num_workers)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._left = 0

    def before_step(self, worker: int) -> None:
        """Called by a worker before each step; waits when its turn is over."""
        if self._left == 0:
            end = self._theirs[worker]
            end.sendall(_HERE)
            self._left = _COUNT.unpack(_receive(end, _COUNT.size))[0]
        self._left -= 1

    def let_go(self, num_steps: int) -> None:
        """Lets every worker run some steps."""
        for end in self._ours:
            end.sendall(_COUNT.pack(num_steps))

    def wait(self) -> None:
        """Waits until every worker has come to its gate.

        Raises:
            RuntimeError: a worker has ended, or TURN_TIMEOUT_S has passed.
        """
        for worker, end in enumerate(self._ours):
            end.settimeout(TURN_TIMEOUT_S)
            try:
                _receive(end, len(_HERE))
            except (EOFError, TimeoutError) as error:
                raise RuntimeError(f"worker {worker} did not come to its gate: {error or 'it was silent'}") from error

    def keep_side(self, *, conductor: bool) -> None:
        """Closes the ends that this process does not use, so that a process's end is noticed at the other side."""
        for end in self._theirs if conductor else self._ours:
            end.close()


def _receive(end: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = end.recv(num_bytes - len(data))
        if not part:
            raise EOFError("its process has ended")
        data += part
    return data


class _GateProbe:
    """Holds the workers of our own launcher at the first action of a step."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._step = 0

    def reached(self, phase: str, index: int, machine: Any) -> None:
        """See `elaswave.faults.injection.Probe`; a step that is tried again does not count twice."""
        if phase == "forward" and index == 0 and machine.step != self._step:
            self._step = machine.step
            activity = machine.observer.activity
            label = activity.label
            activity.wait(IDLE[0])  # else the progress watch would take the gate for a hang
            self._gate.before_step(machine.worker)
            activity.compute(label)


Body = Callable[[Gate, Path, int], None]
"""(gate, an empty folder, number of steps) -> None: a training program, in a process of its own. At its end it calls
`write_loss`."""

_LOSS_FILE = "last_loss"


def write_loss(folder: Path, loss: float) -> None:
    """Notes the loss of a program's last step, so that it can be seen that all have trained alike."""
    (folder / _LOSS_FILE).write_text(str(loss))


def elaswave_program(config: Config, training: Callable[[Config], Training | None] = lambda config: None) -> Body:
    """``elaswave train`` as users run it, launcher and run folder included; its progress goes to the folder's log.

    Args:
        training: of a configuration, what a script trains; None: what the configuration describes.
    """

    def body(gate: Gate, folder: Path, num_steps: int) -> None:
        with open(folder / "progress.log", "w") as log:
            reporter = make_reporter(json_mode=True, stream=log)
            options = with_steps(config, num_steps)
            own = training(options)
            script = None if own is None else Script(own, None, lambda step, loss, metrics: None)
            result = train(options, folder, reporter=reporter, probe=_GateProbe(gate), script=script)
        write_loss(folder, float(result.losses[-1]))

    return body


def configuration(*settings: str, own: OwnModel | None = None) -> Config:
    """The resolved configuration with ``section.key=value`` settings; without spot checks unless they say so, since few
    steps are measured, and a run's first ones have many checks (`spot_checks.py` measures what one takes).

    Args:
        own: a script's model; None: the configuration describes the model.
    """
    return load_config(overrides=("elastic.spot_checks=0", *settings), own=own)


def with_steps(config: Config, num_steps: int) -> Config:
    """The same configuration for another number of steps."""
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=num_steps))


@dataclass
class Program:
    """One of the programs to be compared.

    Args:
        name: in tables.
        body: what it does.
        num_workers: how many workers come to the gate.
    """

    name: str
    body: Body
    num_workers: int
    wall_s: list[float] = field(default_factory=list)
    """Seconds per step of each turn."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds (user and system) per step of each turn, of all its processes."""
    last_loss: float = math.nan
    """Mean nats per token in its last step."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Mean seconds of our own phases but RUN, in which the gate is, in the last start."""


class Compared(NamedTuple):
    """One program against another, over pairs of neighbouring turns."""

    ratio: float
    """Median of (time of the other / time of the one): above 1 the one is faster."""
    low: float
    high: float
    """First and third quartile."""
    cpu_ratio: float
    """The same of CPU seconds."""


def compare(one: Program, other: Program) -> Compared:
    """How much faster `one` is than `other`."""
    ratios = [theirs / ours for ours, theirs in zip(one.wall_s, other.wall_s, strict=True)]
    cpu_ratios = [theirs / ours for ours, theirs in zip(one.cpu_s, other.cpu_s, strict=True)]
    low, middle, high = quartiles(ratios)
    return Compared(middle, low, high, statistics.median(cpu_ratios))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Turns(NamedTuple):
    """How often programs are run, and for how long."""

    starts: int
    """How often all of them are started. Where a process's memory happens to lie is worth some percent of its speed
    for as long as it lives, so one start would not do."""
    rounds: int
    """Turns of each program in each start; every other round goes through them backward."""
    steps: int
    """Steps of a turn."""
    steps_before: int = 3
    """Steps of each program in each start that are not measured."""


def run_in_turns(programs: Sequence[Program], turns: Turns) -> None:
    """Runs all programs in turns and fills in their times.

    Raises:
        RuntimeError: a program has failed; its own message stands on standard error.
    """
    for _ in rounds_of(programs, turns):
        pass


def rounds_of(programs: Sequence[Program], turns: Turns) -> Iterator[int]:
    """The same, for a caller that says after each round what is known so far: a benchmark may be cut off.

    Yields:
        Rounds of all starts that are done; each program has that many times. Losses and phases come with a program's
        end.
    Raises:
        RuntimeError: a program has failed; its own message stands on standard error.
    """
    num_steps = turns.steps_before + turns.rounds * turns.steps + 1  # the last step only lets the programs end
    begin_s = time.monotonic()
    names = " and ".join(program.name for program in programs)
    for start in range(turns.starts):
        spent_s = time.monotonic() - begin_s
        left = f", about {spent_s * (turns.starts - start) / start:.0f} s left" if start else ""
        print(f"{names}: start {start + 1} of {turns.starts}{left}", file=sys.stderr, flush=True)
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(_started(program, num_steps)) for program in programs]
            for process in running:
                process.turn(turns.steps_before)
            for round_ in range(turns.rounds):
                print(f"  round {round_ + 1} of {turns.rounds}", file=sys.stderr, flush=True)
                for process in running if round_ % 2 == 0 else running[::-1]:
                    wall_s, cpu_s = process.turn(turns.steps)
                    process.program.wall_s.append(wall_s / turns.steps)
                    process.program.cpu_s.append(cpu_s / turns.steps)
                yield start * turns.rounds + round_ + 1
            for process in running:
                process.finish()


class _Running:
    """A program that has been started and waits at its gate."""

    def __init__(self, program: Program, pid: int, gate: Gate, folder: Path) -> None:
        self.program = program
        self._folder = folder
        self.pid: int | None = pid
        self._gate = gate
        gate.wait()
        self._pids = _with_descendants(pid)

    def turn(self, num_steps: int) -> tuple[float, float]:
        """Lets it run some steps; wall-clock and CPU seconds."""
        cpu_s = self._cpu_s()
        start_s = time.monotonic()
        self._gate.let_go(num_steps)
        self._gate.wait()
        return time.monotonic() - start_s, self._cpu_s() - cpu_s

    def finish(self) -> None:
        """Lets it run its last step and end."""
        self._gate.let_go(1)
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while self.pid is not None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = None
                if status:
                    raise RuntimeError(f"{self.program.name} ended with status {os.waitstatus_to_exitcode(status)}")
                self.program.last_loss = float((self._folder / _LOSS_FILE).read_text())
                self.program.phases_s = _phases_of(self._folder)
            elif time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.program.name} did not end within {END_TIMEOUT_S:g} s")
            else:
                time.sleep(0.01)

    def _cpu_s(self) -> float:
        return sum(time.clock_gettime(_cpu_clock(pid)) for pid in self._pids)


def _phases_of(folder: Path) -> dict[str, float]:
    if not (folder / "result.json").exists():
        return {}  # plain PyTorch's
    steps = summarize_run(folder).timings
    return {} if steps is None else {name: s for name, s in steps.phases_s.items() if name not in ("run", "data")}


def _with_descendants(first: int) -> list[int]:
    """A process and all that it and those have started; workers have sessions of their own."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    pids = [first]
    for pid in pids:
        pids += children.get(pid, ())
    return pids


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, all its threads (clock_getcpuclockid of glibc)."""
    return (~pid << 3) | 2


@contextlib.contextmanager
def _started(program: Program, num_steps: int) -> Iterator[_Running]:
    gate = Gate(program.num_workers)
    folder = Path(tempfile.mkdtemp(prefix="elaswave-bench-"))
    process: _Running | None = None
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _run_and_exit(lambda: program.body(gate, folder, num_steps), gate)
    gate.keep_side(conductor=True)
    try:
        process = _Running(program, pid, gate, folder)
        yield process
    finally:
        if process is None or process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _run_and_exit(body: Callable[[], None], gate: Gate) -> None:
    """The life of a forked process: ends with it, and never returns into the caller's code."""
    status = 1
    try:
        os.setpgid(0, 0)
        end_with_parent()
        gate.keep_side(conductor=False)
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def fork_workers(num_workers: int, body: Callable[[int], None]) -> None:
    """Runs ``body(worker)`` in as many forked processes and waits for all of them.

    Raises:
        RuntimeError: one has failed; the others are killed.
    """
    pids = {}
    for worker in range(num_workers):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                end_with_parent()
                body(worker)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids[pid] = worker
    while pids:
        pid, status = os.wait()
        worker = pids.pop(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            raise RuntimeError(f"worker {worker} ended with status {os.waitstatus_to_exitcode(status)}")


def exit_on_sigterm() -> None:
    """SIGTERM ends this process as an exception does, so that its children are ended and its folders removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def end_with_parent() -> None:
    """Has this process killed when the one that has forked it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def machine() -> dict[str, Any]:
    """What the numbers are measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "unknown")
    return {"cores": os.cpu_count(), "cpu": model, "torch": torch.__version__, "load_before": load()}


def load() -> float:
    """Processes that wanted a core lately, on average; above 1 or so at the start means that the machine is in use."""
    return round(os.getloadavg()[0], 2)


def print_header(where: dict[str, Any]) -> None:
    """The first line of a table."""
    print(f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, load {where['load_before']} at the start")
