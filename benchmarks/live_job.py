"""A job in a process of its own that is talked to while it trains, as ``elaswave ctl`` does; what each attempt copies.

Used by `migration.py` and `join.py`. The job runs until it is asked to stop. A probe in every worker writes a line
before each vote: bytes of base copies that it sends in the attempt, its budget, the membership's generation.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import end_with_parent

from elaswave.channel.messages.operator import Answer, AskStop, Request
from elaswave.cli.operator_client import OperatorClient
from elaswave.config.schema import Config
from elaswave.errors import ControlError, StoppedBySignalError
from elaswave.launcher.launcher import train
from elaswave.observability.events import AnyEvent, LayoutChosen, StepCommitted, read_events
from elaswave.observability.progress import make_reporter
from elaswave.observability.run_folder import EVENTS_FILE
from elaswave.protocol.step.engine import Phase
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.types import Layout
from elaswave.worker.process import Worker

WAIT_S = 300.0
"""Bound of everything that is waited for."""
TURN_S = 0.1
LAYER_S = 0.005
"""A paced action looks up between layers, as computing does."""


class Vote(NamedTuple):
    """What a worker has written before a vote."""

    worker: int
    step: int
    generation: int
    moving: bool
    """Whether a planned change is adopted, and not in force yet."""
    sent_bytes: int
    """Of base copies, in this attempt."""
    budget_bytes: int
    ran: bool
    """Whether it has run a micro-batch in this attempt."""
    forked_s: float
    """When its process began."""
    at_s: float
    held_s: float = 0.0
    """That it has spent so far on nothing but a move, if its machine notes that (`migration.Timed`)."""


class Watch:
    """A probe that paces every action, and writes what each attempt copies.

    Args:
        folder: for one file per worker.
        forward_s, backward_s: that an action lasts beside its computation.
        slots: tensors of the optimizer's state beside the parameters, for the size of copies.
    """

    def __init__(self, folder: Path, forward_s: float, backward_s: float, slots: int = 3) -> None:
        self._folder = folder
        self._seconds: dict[Phase, float] = {"forward": forward_s, "backward": backward_s}
        self._element_bytes = 4 * slots
        self._open: io.TextIOWrapper | None = None
        self._forked_s = 0.0
        self._has_run = False

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """See `elaswave.faults.injection.Probe`."""
        end_s = time.monotonic() + self._seconds.get(phase, 0.0)
        while (left_s := end_s - time.monotonic()) > 0.0:
            time.sleep(min(LAYER_S, left_s))
            machine.links.check()
        self._has_run |= phase == "forward"
        if phase == "vote":
            self._note(machine)
            self._has_run = False

    def _note(self, machine: Any) -> None:
        if self._open is None:
            self._open = open(self._folder / f"watch-{machine.worker}.jsonl", "w", buffering=1)
            self._forked_s = _forked_s()
        blocks = machine.terms.blocks
        elements = sum(blocks[block].num_elements for block, _ in machine.blocks.traffic.copies_out)
        vote = Vote(
            machine.worker,
            machine.step,
            machine.member.generation,
            machine.planned.moving is not None,
            elements * self._element_bytes,
            machine.planned.budget.elements * self._element_bytes,
            self._has_run,
            self._forked_s,
            time.monotonic(),
            getattr(machine, "held_s", 0.0),
        )
        self._open.write(json.dumps(vote) + "\n")


class LiveJob:
    """A training job in a process of its own; a context, at whose end it has ended.

    Args:
        config: of the run; its steps should not come to an end by themselves.
        pace_s: what a forward action lasts beside its computation; a backward twice as long. 0: not paced.
        machine_class: of every worker's machine; replaced by a baseline.
    """

    def __init__(
        self, config: Config, pace_s: float = 0.0, machine_class: type[WorkerMachine[Any]] = WorkerMachine
    ) -> None:
        self._config, self._pace_s, self._machine_class = config, pace_s, machine_class
        self.folder = Path(tempfile.mkdtemp(prefix="elaswave-bench-"))
        self.run_dir = self.folder / "run"
        self.load_cores = 0.0
        """That the job has kept busy; known at its end."""
        self._pid = 0

    def __enter__(self) -> "LiveJob":
        self.run_dir.mkdir()
        sys.stdout.flush()
        self._begin_s, self._begin_cpu_s = time.monotonic(), _children_s()
        self._pid = os.fork()
        if self._pid == 0:
            self._train_and_exit()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self.stop()
        finally:
            if self._pid:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _train_and_exit(self) -> None:
        status = 1
        try:
            end_with_parent()
            Worker.machine_class = self._machine_class  # workers are forked from this process
            with open(self.folder / "progress.log", "w") as log:
                probe = Watch(self.folder, self._pace_s, 2 * self._pace_s)
                with contextlib.suppress(StoppedBySignalError):
                    train(self._config, self.run_dir, reporter=make_reporter(json_mode=True, stream=log), probe=probe)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def stop(self) -> None:
        """Ends the job after the step in hand, and reads its last events."""
        self.ask(lambda request: AskStop(request=request))
        deadline_s = time.monotonic() + WAIT_S
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            self._must_not_pass(deadline_s, "the job's end")
        self._pid = 0
        self.load_cores = (_children_s() - self._begin_cpu_s) / (time.monotonic() - self._begin_s)

    def _must_not_pass(self, deadline_s: float, what: str) -> None:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{what} did not come within {WAIT_S:g} s; the job said last:\n{self._newest_log()}")
        time.sleep(TURN_S)

    def _newest_log(self) -> str:
        return (self.folder / "progress.log").read_text()[-2000:]

    # ---------------------------------------------------------------------------------------------------------- asking

    def ask(self, make: Callable[[int], Request]) -> list[Answer]:
        """Asks the job for something; returns its answers, the last one last.

        Raises:
            ControlError: it is refused, or not done in time.
        """
        with OperatorClient(self.run_dir) as client:
            answers = [answer for answer in client.ask(make, WAIT_S) if isinstance(answer, Answer)]
        last = answers[-1]
        if last.decided in ("refused", "failed", "void", "kept"):
            raise ControlError(last.reason)
        return answers

    def events(self) -> list[AnyEvent]:
        """All that the job has written so far."""
        path = self.run_dir / EVENTS_FILE
        return list(read_events(path)) if path.exists() else []

    def first_layout(self) -> Layout:
        """That the job began with."""
        return next(event.layout for event in self.events() if isinstance(event, LayoutChosen))

    def finished_s(self) -> dict[int, float]:
        """When each step was done, monotonic."""
        return {event.step: event.finished_s for event in self.events() if isinstance(event, StepCommitted)}

    def losses(self) -> list[Any]:
        """Of the steps so far."""
        return [event.loss for event in self.events() if isinstance(event, StepCommitted)]

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is committed."""
        self.wait_for(
            lambda events: any(e.step >= step for e in events if isinstance(e, StepCommitted)), f"step {step}"
        )

    def wait_for_change(self, step: int) -> LayoutChosen:
        """Waits until a layout that a planned change has brought is in force, for the first time after a step."""
        self.wait_for(lambda events: bool(_changes(events, step)), f"a change of layout after step {step}")
        return _changes(self.events(), step)[0]

    def wait_for(self, holds: Callable[[list[AnyEvent]], bool], what: str) -> None:
        """Waits until the log of events says something."""
        deadline_s = time.monotonic() + WAIT_S
        while not holds(self.events()):
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                self._pid = 0
                raise RuntimeError(f"the job ended before {what}:\n{self._newest_log()}")
            self._must_not_pass(deadline_s, what)

    def wait_until_it_runs(self, worker: int) -> None:
        """Waits until a worker has run a micro-batch."""
        what = f"a micro-batch of worker {worker}"
        self.wait_for(lambda _: any(vote.ran for vote in self.votes() if vote.worker == worker), what)

    def votes(self) -> list[Vote]:
        """Of all workers, by time."""
        found = []
        for path in self.folder.glob("watch-*.jsonl"):
            found += [Vote(*json.loads(line)) for line in path.read_text().splitlines() if line.endswith("]")]
        return sorted(found, key=lambda vote: vote.at_s)


def _changes(events: list[AnyEvent], step: int) -> list[LayoutChosen]:
    return [event for event in events if isinstance(event, LayoutChosen) and event.change and event.first_step > step]


def _forked_s() -> float:
    """When this process began, as monotonic time; the kernel notes it in hundredths of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def durations_s(finished_s: dict[int, float]) -> dict[int, float]:
    """Seconds from the end of the step before to the end of each step."""
    return {step: at_s - finished_s[step - 1] for step, at_s in finished_s.items() if step - 1 in finished_s}
