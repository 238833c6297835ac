"""Whole jobs in one process: the product's workers as threads, on the in-process transport, under its coordinator's
machine.

A test decides at which instant a worker dies and what each worker has heard by then, which processes and sockets leave
to chance. The coordinator's own process (recorder, detector, journal) is not here: an end of a worker is told to the
machine at once, and a broken link when a worker reports it.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.integration.crew import locked, one_at_a_time
from tests.integration.jobs import small_config
from tests.memory_transport import MemoryNetwork

from elaswave.channel.messages.worker import (
    EvaluationReport,
    Exit,
    Failed,
    Finished,
    FromWorker,
    LinkLost,
    ShardWritten,
    Start,
    StepReport,
)
from elaswave.devices.opening import open_device
from elaswave.engine import torch_engine
from elaswave.engine.blueprint import Blueprint
from elaswave.errors import FencedOffError
from elaswave.faults.injection import NoProbe, Probe
from elaswave.planning.state_moves.target_placement import target_placement
from elaswave.protocol import events
from elaswave.protocol.coordinator.decisions import MemberEnd, plan_survivors
from elaswave.protocol.coordinator.driver import CoordinatorDriver
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.messages import (
    FIRST_GENERATION,
    CoreToWorker,
    Decision,
    Evidence,
    InForce,
    Installed,
    LayoutChange,
    Registered,
    Report,
    Unsound,
)
from elaswave.protocol.step.blocks import refilled
from elaswave.protocol.step.due_work import pending_after
from elaswave.protocol.step.engine import Phase
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.state.flat import HeldBlock
from elaswave.training.definition import Training
from elaswave.types import ExecutionParameters, Layout
from elaswave.worker import process as worker_module
from elaswave.worker.control import Mailbox, failure_message
from elaswave.worker.process import Worker
from elaswave.worker.setup import WorkerSetup

Machine = WorkerMachine[HeldBlock]

JOB_TIMEOUT_S = 40.0
"""Bound of a whole job, which takes about a second."""


class Killed(BaseException):
    """Ends a worker's thread where it stands, as SIGKILL ends a process."""


class ThreadJob(CoordinatorDriver):
    """One job; `run` trains to the end.

    Args:
        folder: the run's.
        settings: changes to `tests.integration.jobs.SMALL`.
        probe: told of every point of every step, in the worker's own thread. It may `kill`.
        on_message: called with each message of a live worker before the coordinator handles it, in the worker's own
            thread. It may `kill`.
        on_effect: called before each effect of the coordinator's machine; returns whether it is to be carried out.
        restart_in: generations whose losses lead back to the beginning, as a policy of restarting asks for.
        machine_class: of every worker's machine; replaced to plant bugs.
        training: what is trained; None: what the configuration describes.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        probe: Probe | None = None,
        on_message: Callable[[FromWorker], object] = lambda message: None,
        on_effect: Callable[[events.CoordinatorEffect], bool] = lambda effect: True,
        restart_in: Collection[int] = (),
        machine_class: type[Machine] = WorkerMachine,
        training: Training | None = None,
    ) -> None:
        self.config = small_config(settings)
        self.blueprint = Blueprint(self.config, training)
        self.reports: list[StepReport] = []
        """Step reports in the order in which they came."""
        self.evaluations: dict[int, float] = {}
        """Step -> validation loss."""
        self.evaluated_metrics: dict[int, dict[str, float]] = {}
        """Step -> metrics of the evaluation."""
        self.shards: list[ShardWritten] = []
        self.new_generations: list[events.NewGeneration] = []
        self.decisions: list[Decision] = []
        self.searches: list[events.FindCheckpoint] = []
        self.finished: dict[int, Finished] = {}
        self.failures: list[Failed] = []
        """Of workers that a spot check has ended; any other error ends the job."""
        self.machines: dict[int, Machine] = {}
        """The machine of each worker."""
        self._folder = folder
        self._probe = probe or NoProbe()
        self._on_message = on_message
        self._on_effect = on_effect
        self._restart_in = restart_in
        self._machine_class = machine_class
        self._lock = threading.RLock()
        self._dead: set[int] = set()
        self._errors: list[BaseException] = []
        self.core = Coordinator(
            InForce(self.blueprint.layout, self.blueprint.placement, self.blueprint.execution),
            blocks=self.blueprint.blocks,
            scatter_width=self.blueprint.scatter_width,
        )
        network = MemoryNetwork()
        self._transports = {
            worker: network.transport(worker, generation=FIRST_GENERATION) for worker in self.blueprint.layout.workers
        }
        self.mailboxes = {worker: Mailbox(worker, transport) for worker, transport in self._transports.items()}

    # ------------------------------------------------------------------------------------------------- what came of it

    @property
    def losses(self) -> list[float]:
        """The loss of every step, as it was reported last."""
        newest = {report.step: report.loss for report in self.reports}
        assert sorted(newest) == list(range(1, self.config.run.steps + 1)), f"reported were steps {sorted(newest)}"
        return [newest[step] for step in sorted(newest)]

    @property
    def digests(self) -> dict[str, int]:
        """Of everything that owners hold at the end, by slot and tensor."""
        total: Counter[str] = Counter()
        for finished in self.finished.values():
            for name, part in finished.owner_digests.items():
                total[name] = (total[name] + part) % 2**64
        return dict(total)

    @property
    def computation(self) -> tuple[list[float], dict[str, int]]:
        """What must be equal for two jobs to be the same computation."""
        return self.losses, self.digests

    # ------------------------------------------------------------------------------------------------- what tests do

    def run(self, monkeypatch: pytest.MonkeyPatch) -> "ThreadJob":
        """Trains to the end; raises what a worker has raised, or what is wrong with how the job ended."""
        for module in (worker_module, torch_engine):
            monkeypatch.setattr(module, "materialise", locked(module.materialise))
        monkeypatch.setattr(worker_module.Blueprint, "open_samples", locked(worker_module.Blueprint.open_samples))
        threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"worker {worker}", daemon=True)
            for worker in self._transports
        ]
        self.carry_out(self.core.begin())
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + JOB_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        hung = [thread.name for thread in threads if thread.is_alive()]
        for worker in self._transports:
            self.kill(worker, silently=True)
        for thread in threads:
            thread.join(10.0)
        if self._errors:
            raise self._errors[0]
        assert not hung, f"still at work after {JOB_TIMEOUT_S:.0f} s: {hung}"
        return self

    def kill(self, worker: int, *, silently: bool = False) -> None:
        """A worker's process ends: its links break and nothing of it counts any more. In its own thread `Killed` has to
        follow.

        Args:
            silently: no process tells the coordinator of the end.
        """
        with self._lock:
            if worker in self._dead:
                return
            self._dead.add(worker)
            self.mailboxes[worker].receive(Exit())
            self._transports[worker].close()
            if not silently:
                self.feed(events.Suspected(worker, "exit", f"worker {worker} was killed"))

    def plan(self, layout: Layout) -> None:
        """A planner finds a better layout for the present members."""
        with self._lock:
            blocks, before, layout = self.blueprint.blocks, self.core.in_force(), self.blueprint.with_copies(layout)
            width = self.blueprint.scatter_width
            elements = self.blueprint.refill_elements
            here = refilled(blocks, before.layout, before.placement, elements, width)
            placement = target_placement(layout, blocks, here, scatter_width=width)
            execution = ExecutionParameters()
            self.feed(
                LayoutChange(
                    generation=self.core.generation,
                    layout=layout,
                    placement=placement,
                    execution=execution,
                    reason="a test wants it",
                )
            )

    # ------------------------------------------------------------------------------------------------- the workers

    def _work(self, worker: int) -> None:
        job, hung_s = self, time.monotonic() + JOB_TIMEOUT_S / 2

        class Client:
            @property
            def disconnected_s(self) -> float:
                return 0.0 if time.monotonic() < hung_s else math.inf  # a worker that hangs says for what it waits

            def send(self, message: FromWorker, durable: bool = False) -> None:
                job._receive(worker, message)

        class Crewmate(Worker):
            machine_class = job._machine_class

            def _make_machine(self, *arguments: Any, **options: Any) -> Machine:
                machine = super()._make_machine(*arguments, **options)
                one_at_a_time(machine.engine)  # type: ignore[arg-type]
                job.machines[worker] = machine
                return machine

        mailbox, transport, client = self.mailboxes[worker], self._transports[worker], Client()
        setup = WorkerSetup(
            config=self.config,
            worker=worker,
            run_dir=self._folder,
            key=b"",
            listen="",
            checkpoint=None,
            probe=self,
            profile=False,
            training=self.blueprint.training,
            device=open_device(self.config.device.kind, self._folder),
        )
        try:
            made = Crewmate(setup, client, mailbox, transport)
            self._receive(worker, mailbox.hello())
            made.train()
        except (Killed, FencedOffError):
            pass
        except BaseException as error:
            said = failure_message(worker, error, made.failure_location)
            with self._lock:
                if worker in self._dead:
                    return
                if said.is_wrong:
                    self.failures.append(said)
                    self.feed(events.WorkerFailed(worker, said.signature, said.summary, is_wrong=True))
                    self.kill(worker, silently=True)
                else:
                    self._errors.append(error)
                    self._dismiss()

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        """Is the probe of every worker: a dead one goes no further."""
        if machine.worker in self._dead:
            raise Killed
        self._probe.reached(phase, index, machine)

    # ------------------------------------------------------------------------------------------------- the coordinator

    def _receive(self, worker: int, message: FromWorker) -> None:
        if worker not in self._dead:
            self._on_message(message)
        with self._lock:
            if worker in self._dead:
                return
            if isinstance(message, Registered | Report | Installed | Unsound):
                self.feed(message)
            elif isinstance(message, LinkLost):
                if self.core.believes(worker, message.peer, message.generation):
                    self.feed(events.Suspected(message.peer, "link", message.detail))
            elif isinstance(message, StepReport):
                evidence = Evidence(
                    step=message.step,
                    attempt=message.attempt,
                    commits=True,
                    vector=message.vector,
                    change=message.change,
                    checkpoint=message.checkpoint,
                )
                self.hears_vote(worker, evidence, message.generation)
                self.reports.append(message)
            elif isinstance(message, EvaluationReport):
                self.evaluations[message.step] = message.loss
                self.evaluated_metrics[message.step] = message.metrics
            elif isinstance(message, ShardWritten):
                self.shards.append(message)
            elif isinstance(message, Finished):
                self.finished[worker] = message
            self.end_if_finished()

    # ------------------------------------------------------------------------------------------------ as its driver

    def feed(self, event: events.CoordinatorEvent) -> None:
        """Tells the machine of an event, and does what it asks for."""
        self.core.restarts = self.core.generation in self._restart_in
        super().feed(event)

    def carry_out_one(self, effect: events.CoordinatorEffect) -> None:
        """Carries out one effect, if the test lets it."""
        if self._on_effect(effect):
            super().carry_out_one(effect)

    def now_s(self) -> float:
        """Monotonic time of this machine."""
        return time.monotonic()

    def persist(self, record: events.Record) -> None:
        """Nothing outlives this coordinator."""

    def send(self, worker: int, message: CoreToWorker) -> None:
        """Into the worker's mailbox."""
        self.mailboxes[worker].receive(message)

    def tell_addresses(self, addresses: dict[int, str]) -> None:
        """As the start."""
        for worker in self.core.members:
            self.mailboxes[worker].receive(Start(addresses=addresses))

    def find_checkpoint(self, question: events.FindCheckpoint) -> None:
        """There is none; the job begins again."""
        self.searches.append(question)
        self.answer_checkpoint(question, 0)

    def plan_recovery(self, question: events.PlanRecovery) -> None:
        """In the same turn: survivors keep their stages."""
        plan = plan_survivors(question, self.blueprint.blocks, self.blueprint.scatter_width)
        self.answer_plan(question, plan)

    def pending_work(self, step: int, asked: bool) -> events.PendingWork:
        """As the messages of workers have it."""
        run = self.config.run
        return pending_after(
            step,
            run.steps,
            run,
            asked=asked,
            first_step=1,
            evaluated=self.evaluations,
            written=(),
            published=self.published_step(),
        )

    def ends(self) -> dict[int, MemberEnd]:
        """As workers have said."""
        return {
            worker: MemberEnd(message.standing.generation, message.standing.step)
            for worker, message in self.finished.items()
        }

    def published_step(self) -> int:
        """As the reports have it."""
        return max((report.step for report in self.reports), default=0)

    def give_up_missing_parts(self) -> None:
        """Nothing commits checkpoints here."""

    def is_committing(self) -> bool:
        """Nothing commits checkpoints here."""
        return False

    def on_finished(self) -> None:
        """All workers may end."""
        self._dismiss()

    def on_new_generation(self, effect: events.NewGeneration) -> None:
        """Ends of the old generation do not count."""
        self.new_generations.append(effect)
        self.finished.clear()

    def on_decided(self, effect: events.Decided) -> None:
        """Kept for the test."""
        self.decisions.append(effect.decision)

    def on_resumed(self, effect: events.Resumed) -> None:
        """Nothing."""

    def on_end(self, effect: events.End) -> None:
        """The test has failed."""
        self._errors.append(AssertionError(f"the coordinator has ended the job: {effect.reason}"))
        self._dismiss()

    def note(self, effect: events.Note) -> None:
        """Nothing."""

    def _dismiss(self) -> None:
        for mailbox in self.mailboxes.values():
            mailbox.receive(Exit())


def wait_until(condition: Callable[[], bool]) -> None:
    """Holds a worker up until something has come to pass in another thread."""
    deadline_s = time.monotonic() + JOB_TIMEOUT_S / 2
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.001)


def is_change(effect: events.CoordinatorEffect) -> bool:
    """Whether an effect tells a worker of a planned change of layout."""
    return isinstance(effect, events.Send) and isinstance(effect.message, LayoutChange)
