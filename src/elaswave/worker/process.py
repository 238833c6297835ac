"""One worker process: it makes the machine and what that stands on, and drives it from its start to its end.

Runs in a process of its own. What it needs from outside comes in as arguments; it reads no environment.

Two threads: the main one computes, waits for peers and does everything that changes state; the control client's one
receives messages, puts them into the mailbox, and wakes the main thread. Whatever happens (a lost peer, a new
generation), the machine leaves what it does and goes on as the coordinator's decision says.

With ``--profile`` a transport stands before the worker's own that records each transfer (`TracedTransport`). The
process takes its memory from the system once, and in huge pages (`tune_allocator`).
"""

import ctypes
import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from elaswave.channel.messages.worker import Exit, ShardFailed, ShardWritten, Start, ToWorker
from elaswave.config.cluster import base_level, device_of, emulated_costs, speed_of
from elaswave.devices.faults import fault_of
from elaswave.devices.interface import Device
from elaswave.devices.opening import open_device
from elaswave.engine.activity import ActionTimer, Pace
from elaswave.engine.batches import Batches, BatchMaker, LoaderSupply, Supply, loader_log
from elaswave.engine.blueprint import Blueprint, changed_frozen, materialise, updater_after
from elaswave.engine.compute import Surroundings
from elaswave.engine.torch_engine import EngineContext, TorchEngine
from elaswave.errors import FencedOffError, InterruptedWaitError, PeerLostError, WaitTimeoutError
from elaswave.models.foreign.connection import close_all
from elaswave.observability.trace import TraceRecorder
from elaswave.planning.programs.execution import programs_of
from elaswave.protocol.messages import FIRST_GENERATION, CoreToWorker, InForce
from elaswave.protocol.step.activity import FOREIGN, START
from elaswave.protocol.step.ballot import BufferTensor
from elaswave.protocol.step.engine import JobTerms, Pause, Ports, Wait
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.state.flat import HeldBlock
from elaswave.training.raised import traceback_of
from elaswave.transport.interface import Handle, Tag, Transport
from elaswave.transport.stream import StreamTransport
from elaswave.types import ExecutionParameters, Layout, Program
from elaswave.worker.control import (
    UNKNOWN_LOCATION,
    ControlOutbox,
    FailureLocation,
    Mailbox,
    StepWatch,
    failure_message,
)
from elaswave.worker.frequency import make_actuator
from elaswave.worker.links import NO_COORDINATOR_S, TransportLinks, WorkerClient, check_coordinator
from elaswave.worker.setup import WorkerSetup, first_words
from elaswave.worker.shard_writer import ShardDisk, ShardWriter

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""The most that glibc accepts."""
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 << 20
_RESERVE_BYTES = 1 << 30
"""Address space, not memory: what is never used costs nothing."""
_STEP_BYTES = 16 << 20


def tune_allocator() -> None:
    """Makes glibc's allocator keep what is freed, and take its memory from a heap of huge pages.

    By default every larger activation and gradient is a mapping of its own, or is trimmed off the heap, and the kernel
    hands out zeroed pages again in the next micro-batch: thousands of page faults, 8 % of a step of the default model.
    In pages of 4 KiB the processor's address translation costs another 4 %. Does nothing where the C library is not
    glibc, and has no huge pages where the kernel does not offer them to who asks.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    start, stop = _grow_heap(libc)
    # The large pad was for one growth; whatever comes after it grows by small steps.
    libc.mallopt(_M_TOP_PAD, _STEP_BYTES)
    first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    if stop - first >= _HUGE_PAGE_BYTES:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _MADV_HUGEPAGE)


def _grow_heap(libc: ctypes.CDLL) -> tuple[int, int]:
    """Lets the heap grow by a large piece of address space, where the system allows it; the ends of what was added."""
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(_M_TOP_PAD, _RESERVE_BYTES)
    start = libc.sbrk(0) or 0
    # Below the threshold: a larger block would be a mapping of its own, and the heap would stay as it is.
    block = libc.malloc(ctypes.c_size_t(_LARGEST_MMAP_THRESHOLD - (1 << 20)))  # large enough to need more heap
    stop = libc.sbrk(0) or 0
    libc.free(ctypes.c_void_p(block))
    return start, stop


class TracedTransport:
    """Passes everything on to another transport, and notes when each transfer was asked for and done.

    Args:
        inner: does the work.
        trace: gets one record per transfer.
    """

    def __init__(self, inner: Transport, trace: TraceRecorder) -> None:
        self.worker = inner.worker
        self.generation = inner.generation
        self._inner = inner
        self._trace = trace
        self._pending: list[tuple[Handle, int, int]] = []

    @property
    def address(self) -> str:
        """Where other workers reach this one."""
        return self._inner.address

    @property
    def peers(self) -> frozenset[int]:
        """Workers to which a link is up."""
        return self._inner.peers

    @property
    def broken(self) -> tuple[int, str] | None:
        """A peer whose link has ended in this generation though frames of it were sent there, and how it ended."""
        return self._inner.broken

    @property
    def bytes_sent(self) -> Mapping[int, int]:
        """Bytes handed to each peer so far."""
        return self._inner.bytes_sent

    @property
    def bytes_received(self) -> Mapping[int, int]:
        """Bytes taken from each peer so far."""
        return self._inner.bytes_received

    @property
    def moved_bytes(self) -> int:
        """See `Transport.moved_bytes`."""
        return self._inner.moved_bytes

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """See `Transport.connect`."""
        self._inner.connect(addresses, timeout_s)

    def want(self, addresses: Mapping[int, str]) -> None:
        """See `Transport.want`."""
        self._inner.want(addresses)

    def trouble(self, peer: int) -> str:
        """See `Transport.trouble`."""
        return self._inner.trouble(peer)

    def unreached(self, peer: int) -> str:
        """See `Transport.unreached`."""
        return self._inner.unreached(peer)

    def send(self, dst: int, tag: Tag, tensors: Tensor | Sequence[Tensor]) -> Handle:
        """See `Transport.send`."""
        start_ns = time.monotonic_ns()
        return self._note(self._inner.send(dst, tag, tensors), _num_bytes(tensors), start_ns)

    def recv(self, src: int, tag: Tag, out: Tensor | Sequence[Tensor] | None = None) -> Handle:
        """See `Transport.recv`."""
        start_ns = time.monotonic_ns()
        return self._note(self._inner.recv(src, tag, out), 0 if out is None else _num_bytes(out), start_ns)

    def wait(self, handles: Handle | Iterable[Handle], timeout_s: float) -> None:
        """See `Transport.wait`."""
        try:
            self._inner.wait(handles, timeout_s)
        finally:
            self._collect()

    def poll(self) -> None:
        """See `Transport.poll`."""
        self._inner.poll()
        self._collect()

    def rest(self, until_s: float) -> None:
        """See `Transport.rest`."""
        self._inner.rest(until_s)
        self._collect()

    def interrupt(self, reason: str, generation: int | None = None) -> None:
        """See `Transport.interrupt`."""
        self._inner.interrupt(reason, generation)

    def advance_generation(self, generation: int, members: Iterable[int]) -> None:
        """See `Transport.advance_generation`."""
        self._inner.advance_generation(generation, members)
        self.generation = generation
        self._pending.clear()

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def _note(self, handle: Handle, num_bytes: int, start_ns: int) -> Handle:
        self._pending.append((handle, num_bytes, start_ns))
        return handle

    def _collect(self) -> None:
        """Records what has been done since the last look."""
        end_ns = time.monotonic_ns()
        rest = []
        for handle, num_bytes, start_ns in self._pending:
            if not handle.done:
                rest.append((handle, num_bytes, start_ns))
            elif handle.error is None:
                size = num_bytes if handle.result is None else handle.result.nbytes
                self._trace.transfer(
                    sent=handle.verb == "send",
                    peer=handle.peer,
                    num_bytes=size,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    tag=handle.tag,
                )
        self._pending = rest


def _num_bytes(tensors: Tensor | Sequence[Tensor]) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(tensor.nbytes for tensor in tensors)


TURN_S = 5.0
"""How long a message of the coordinator is waited for before it is checked whether there is one."""
DIAL_TURN_S = 0.01
"""The same while links are made in the background, or emulated ones have frames: they move only while they are looked
at, and others may wait for a frame."""
REST_TURN_S = 0.1
"""The same between steps or after the last one: peers may still dial, or wait for what was sent."""
_UNTOUCHED: list[object] = []
"""What a worker that does not end well holds of its device: giving memory back asks the device, which may abort the
process if its context is broken, and not return if it is stuck. The process ends by `os._exit`, which leaves it."""
FLUSH_TIMEOUT_S = 5.0
"""Bound of waiting, at the end, for the coordinator to have handled the last messages."""


class Worker(Surroundings):
    """A worker with its state, ready to run; while it computes it lets bytes move, and listens.

    Args:
        setup: what it is started with.
        client: the connection to the coordinator.
        mailbox: what arrives there.
        transport: listening, not yet connected.
    """

    machine_class: type[WorkerMachine[HeldBlock]] = WorkerMachine

    def __init__(
        self,
        setup: WorkerSetup,
        client: WorkerClient,
        mailbox: Mailbox,
        transport: Transport,
    ) -> None:
        config = setup.config
        self._setup = setup
        self._config = config
        self._client = client
        self._mailbox = mailbox
        self._blueprint = blueprint = Blueprint(config, setup.training)
        blueprint.frozen = changed_frozen(blueprint, setup.checkpoint) if setup.frozen is None else setup.frozen
        layout, placement, stage = blueprint.layout, blueprint.placement, None
        if setup.joins:  # it holds nothing until a decision says otherwise
            layout = replace(layout, idle=(setup.worker,))
        else:
            stage = layout.stage_of(setup.worker)
        self._trace = TraceRecorder(setup.worker, stage=stage, enabled=setup.profile)
        self._transport: Transport = TracedTransport(transport, self._trace) if setup.profile else transport
        self._has_quota = config.device.frequency == "cgroup"
        self._timer = ActionTimer(setup.worker, self._make_pace(), self._transport.rest, has_quota=self._has_quota)
        self._level = base_level(config)
        """Index of the frequency level at which the device runs."""
        self._slowness = 1.0
        """The share of its level's speed that an injected fault leaves the device."""
        self._actuator = make_actuator(
            config.device.frequency, setup.worker, self._set_level_speed, share=config.device.quota or 1.0
        )
        self._must_end = False
        """Whether the coordinator has said that the job is over."""
        self._watch = StepWatch(setup.probe, mailbox, self._trace, setup.device.gauges)
        self._batches = batches = Batches(self._make_supply(), mailbox.activity, self._watch.waited_for_data)
        layers, store, progress = materialise(
            blueprint, setup.worker, layout, placement, setup.checkpoint, setup.device
        )
        context = EngineContext(
            blueprint=blueprint,
            worker=setup.worker,
            batches=batches.training,
            evaluation_batches=batches.evaluation,
            timer=self._timer,
            run_dir=setup.run_dir,
            surroundings=self,
            on_execution=self._set_level,
            on_layout=self._use_layout,
            on_begin=batches.begin,
            building=mailbox.activity.building,
            slow_down=self._slow_down,
            slow_links=(lambda factor: None) if setup.sites is None else setup.sites.slow_down,
            device=setup.device,
        )
        self._links = TransportLinks(
            setup.worker,
            blueprint.blocks,
            self._transport,
            mailbox.activity,
            self.check,
            client,
            setup.device,
        )
        self._outbox = ControlOutbox(blueprint, client, mailbox, self._links, self._watch, self._timer)
        self._disk = ShardDisk(
            ShardWriter(setup.worker, setup.run_dir, self._wrote), self._outbox, config.run.checkpoint_every_s
        )
        engine = TorchEngine(context, layers, updater_after(blueprint, setup.checkpoint), store)
        self.machine = self._make_machine(
            Ports(setup.worker, terms_of(blueprint), engine, self._links, self._watch, self._outbox, self._disk),
            mailbox.replayed_state,
            InForce(layout, placement, blueprint.execution),
            store.held,
            progress,
            step=0 if setup.checkpoint is None else setup.checkpoint[1].step,
            joins=setup.joins,
        )
        self._watch.machine = self._outbox.machine = self.machine

    def _make_machine(self, *arguments: Any, **options: Any) -> WorkerMachine[HeldBlock]:
        return self.machine_class(*arguments, **options)

    def _make_supply(self) -> Supply:
        """Makes what the micro-batches come from: they are made here, or by loaders."""
        setup, blueprint, run = self._setup, self._blueprint, self._config.run
        if setup.loaders is None:
            samples = blueprint.open_samples(setup.run_dir / "data")
            return BatchMaker(self._config, samples, blueprint.sampler(samples))
        return LoaderSupply(
            setup.worker,
            setup.loaders,
            num_loaders=blueprint.training.loaders,
            num_steps=run.steps,
            eval_microbatches=run.eval_microbatches if run.eval_every else 0,
            check=self.check,
            activity=self._mailbox.activity,
            log=setup.run_dir / "logs" / loader_log(setup.worker),
        )

    def _make_pace(self) -> Pace | None:
        config = self._config
        if config.device.kind != "emulated":
            return None
        layer_s = [
            (layer.forward_s, layer.input_gradient_s, layer.weight_gradient_s)
            for layer in emulated_costs(config).layers
        ]
        return Pace(layer_s, speed_of(config, self._setup.worker), self._transport.rest)

    def _use_layout(self, layout: Layout) -> None:
        self._batches.use_layout(layout)
        if self._setup.sites is not None:
            self._setup.sites.use_layout(layout)

    def _set_level(self, execution: ExecutionParameters) -> None:
        """Sets the frequency level that a plan gives this worker."""
        level = execution.levels.get(self._setup.worker, base_level(self._config))
        if level != self._level:
            self._timer.times.take()  # of another clock
            self._level = self._outbox.level = level
            self._actuate()

    def _actuate(self) -> None:
        level = device_of(self._config).levels[self._level]
        if self._has_quota:
            level = replace(level, speed=level.speed * self._slowness)
        self._actuator.set_level(level)

    def _slow_down(self, factor: float) -> None:
        """Carries out the fault `slow`: sets a smaller quota where there is one, else makes every action last
        longer."""
        self._slowness = factor
        if self._has_quota:
            self._actuate()
        else:
            self._timer.slow_down(factor)

    def _set_level_speed(self, speed: float) -> None:
        if self._timer.pace is not None:
            self._timer.pace.set_level_speed(speed)

    @property
    def failure_location(self) -> FailureLocation:
        """What it is at."""
        return FailureLocation(self.machine.step, self._mailbox.activity.label)

    def close(self) -> None:
        """Gives the device back as it was found; asks nothing of its context."""
        self._actuator.close()

    # -------------------------------------------------------------------------------------------------------- driving

    def train(self) -> None:
        """Drives the machine from its start to its end.

        Raises:
            FencedOffError: the others go on without this worker, or the job has ended.
            WaitTimeoutError: something that must come does not.
        """
        self._mailbox.activity.wait(START)
        if self._config.device.quota is not None:
            self._actuate()
        while True:
            wait = None
            try:
                wait = self.machine.resume()
                if wait is not None:
                    self._wait(wait)
            except PeerLostError as error:
                self.machine.abandon(error.worker, str(error))
            except InterruptedWaitError:
                self.machine.abandon()
            if wait is None:
                self._wait_for_message()
            if self.machine.wants_links:
                self.machine.look_at_links()
                self._links.look_at_unreached()
            # Not between waits that do not block: what a worker can still finish with what it has, it finishes.
            while (wait is None or wait is Pause.MOMENT) and not self._mailbox.is_empty:
                self._hand_over(self._mailbox.next(0.0))
            if self.machine.is_released:
                return
            if self.machine.fenced_off is not None:
                what = "is not admitted" if self._mailbox.joining else "is no member any more"
                raise FencedOffError(f"worker {self._setup.worker} {what} and ends itself: {self.machine.fenced_off}")
            # A worker that has made all steps stays until it is told to end: others may still need what it holds (W10).
            if self._must_end and self.machine.is_done:
                self._trace.dump(self._setup.run_dir)
                return

    def _wait(self, wait: Wait) -> None:
        if wait is Pause.DISK:
            self._disk.finish(self.check)
        else:
            self._links.wait(wait)

    def check(self) -> None:
        """Lets bytes move between layers and blocks, and leaves the step if a new generation has begun."""
        self.move()
        if self._mailbox.urgent:
            raise InterruptedWaitError("the coordinator asks for a report")

    def move(self) -> None:
        """Lets bytes move: from the device to its links, and over these."""
        self._links.hand_over()
        self._transport.poll()

    def elsewhere(self) -> AbstractContextManager[None]:
        """Heartbeats tell that a foreign part is waited for."""
        return self._mailbox.activity.during(FOREIGN)

    def _hand_over(self, message: ToWorker) -> None:
        """Gives a message to the machine."""
        if isinstance(message, Exit):
            self._must_end = True
        elif isinstance(message, Start):
            # A start may come twice: it is said again to whoever may have missed it.
            if not self.machine.is_started:
                self._links.addresses = message.addresses
                self.machine.start()
        elif isinstance(message, CoreToWorker):
            self.machine.on_message(message)

    def _wait_for_message(self) -> None:
        """Waits until the coordinator says something to a worker that does nothing else.

        Raises:
            FencedOffError: the job has ended before this worker has.
            WaitTimeoutError: there has been no coordinator for too long.
        """
        machine = self.machine
        if machine.is_paused:
            waited_for = "the membership is about to change, and it has not been said how"
        elif self._mailbox.joining is not None:
            waited_for = "it has not been admitted"
        elif not machine.is_started:
            waited_for = "the start has not been given"
        elif machine.is_unsound:
            waited_for = "copies of the state are wrong, and it has not been said which are right"
        elif machine.is_done:
            waited_for = "all steps are made, and the job has not been ended"
        else:
            self._watch.recovering()
            waited_for = "it has not been decided how to go on"
        if self._must_end and not machine.is_done:
            has_begun = machine.is_started and self._mailbox.joining is None
            raise FencedOffError("the job has ended" if has_begun else "the job has ended before it began")
        links, sites = self._links, self._setup.sites
        moves = links.is_dialling or links.is_fetching or (sites is not None and sites.has_frames)
        if moves or machine.is_at_rest:
            self.move()
        # After the move, in which the end of a link is seen (W11).
        machine.look_at_sent()
        try:
            self._hand_over(self._mailbox.next(DIAL_TURN_S if moves else REST_TURN_S if machine.is_at_rest else TURN_S))
        except WaitTimeoutError:
            check_coordinator(self._client, waited_for)

    def _wrote(self, message: ShardWritten | ShardFailed) -> None:
        """Notes what became of this worker's part of a checkpoint; it is called on the writer's thread."""
        where = message.standing if isinstance(message, ShardWritten) else message
        self.machine.wrote(where.step, where.generation, message)


def terms_of(blueprint: Blueprint) -> JobTerms:
    """Collects what the machine needs of a run's configuration."""
    config = blueprint.config
    elastic, run = config.elastic, config.run

    def compile_one(
        worker: int, layout: Layout, execution: ExecutionParameters, *, forward_only: bool = False
    ) -> Program:
        return programs_of(layout, execution, config.layout.schedule, forward_only=forward_only, only=worker)[worker]

    return JobTerms(
        blocks=blueprint.blocks,
        num_layers=blueprint.state.num_layers,
        num_tensors=len(blueprint.tensors),
        num_microbatches=config.batch.num_microbatches,
        num_steps=run.steps,
        scatter_width=blueprint.scatter_width,
        copy_elements=blueprint.refill_elements,
        move_elements=blueprint.move_elements,
        move_bounds=blueprint.move_bounds,
        compile=compile_one,
        metrics=tuple(blueprint.model.metrics),
        layer_name=lambda layer: blueprint.model.layers[layer].name if layer < blueprint.state.num_layers else "loss",
        verify=elastic.verify,
        skip_nonfinite=run.skip_nonfinite,
        salvage=elastic.salvage,
        eval_every=run.eval_every,
        eval_microbatches=run.eval_microbatches,
        checkpoint_every=run.checkpoint_every,
        lowest_trained=blueprint.state.lowest_trained,
        uses={slot.id: shape.num_terms for shape in blueprint.shapes for slot in shape.tensors if shape.num_terms > 1},
        buffers=tuple(BufferTensor(slot.id, slot.is_whole) for slot in blueprint.tensors if slot.is_buffer),
        tensor_name=lambda tensor: blueprint.tensors[tensor].name,
        accumulator_bits=elastic.accumulator_bits,
    )


class ClosableClient(WorkerClient, Protocol):
    """A control client of which this process has charge."""

    def close(self, timeout_s: float = 0.0) -> object:
        """Ends the connection, after what is durable has been handled or the time is over."""
        ...


class MakeClient(Protocol):
    """Makes the control client of a worker."""

    def __call__(self, mailbox: Mailbox) -> ClosableClient:
        """Connects; messages go to the mailbox."""
        ...


def run_worker(setup: WorkerSetup, make_client: MakeClient) -> int:
    """Runs a worker process from its start to its end; errors are reported to the coordinator.

    Args:
        setup: what it is started with.
        make_client: connects to the coordinator.
    Returns:
        Exit status: 0, or 1 after an error.
    """
    # With another number of threads some kernels round otherwise.
    torch.set_num_threads(1)
    # Backward runs in this thread, whatever it computes on: a layer's call is found here (`elaswave.models.layers`),
    # and nothing is handed over to a thread of autograd's and back.
    torch.autograd.set_multithreading_enabled(False)
    tune_allocator()
    worker: Worker | None = None
    transport: StreamTransport | None = None
    client: ClosableClient | None = None
    flush_s = FLUSH_TIMEOUT_S
    try:
        transport = StreamTransport(
            setup.worker,
            key=setup.key,
            listen=setup.listen,
            generation=FIRST_GENERATION,
            emulated=None if setup.sites is None else setup.sites.emulated,
            paced=None if setup.sites is None else setup.sites.paced,
        )
        mailbox = Mailbox(setup.worker, transport)
        if setup.joins:  # what it says of itself needs its device
            setup = setup._replace(device=_open_device(setup))
            mailbox.joining = first_words(setup, transport.address)
        client = make_client(mailbox)
        if not setup.joins:  # the coordinator is told if it cannot be had
            setup = setup._replace(device=_open_device(setup))
        worker = Worker(setup, client, mailbox, transport)
        worker.train()
        return 0
    except FencedOffError as error:
        _UNTOUCHED.append((error, worker, setup))
        print(str(error), flush=True)
        return 1
    except BaseException as error:  # also sys.exit of a person's code: the signals that end a job do not come here
        print(traceback_of(error), file=sys.stderr, flush=True)
        _UNTOUCHED.append((error, worker, setup))
        if (fault := fault_of(error)) is not None and fault.forbids_touch:
            gc.freeze()  # also what nothing refers to any more
        if client is not None:
            at = UNKNOWN_LOCATION if worker is None else worker.failure_location
            said = failure_message(setup.worker, error, at)
            client.send(said, durable=True)
            if said.is_wrong:  # who hears of its end alone would let others keep what they have of it
                flush_s = NO_COORDINATOR_S
        return 1
    finally:
        if worker is not None:
            worker.close()
        close_all()
        if client is not None:
            client.close(flush_s)
        if transport is not None:
            transport.close()


def _open_device(setup: WorkerSetup) -> Device:
    device = setup.config.device

    def needed_bytes() -> float:
        return Blueprint(setup.config, setup.training).least_bytes(None if setup.joins else setup.worker)

    return open_device(device.kind, setup.run_dir, device.workers_per_device, needed_bytes)
