"""One worker's life: connect, materialise, train, evaluate, write shards, report, end.

Runs in a process of its own. What it needs from outside comes in as arguments; it reads no environment.
"""

import resource
import time
import traceback
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from elaswave.comm.group import doubling_partners
from elaswave.comm.stream import StreamTransport
from elaswave.comm.transport import Transport
from elaswave.config.schema import Config
from elaswave.control.core.ledger import Ledger
from elaswave.errors import CommError, PeerLostError, VoteError, WaitTimeoutError
from elaswave.observability.trace import TraceRecorder
from elaswave.planning.layout import peers_of
from elaswave.runtime.activity import Activity
from elaswave.runtime.allocator import keep_freed_memory
from elaswave.runtime.blueprint import Blueprint
from elaswave.runtime.compute import LayerError
from elaswave.runtime.materialise import materialise
from elaswave.runtime.messages import (
    EvaluationReport,
    Exit,
    Failed,
    Finished,
    FromWorker,
    Hello,
    Holding,
    Ready,
    Standing,
    Start,
    StepReport,
    Stop,
    ToWorker,
)
from elaswave.runtime.optimizer import OPTIMIZERS
from elaswave.runtime.probe import Probe
from elaswave.runtime.shard_writer import ShardWriter
from elaswave.runtime.step import StepEngine, StepResult
from elaswave.runtime.traced import TracedTransport
from elaswave.runtime.vote import Request
from elaswave.state.checkpoint_format import CheckpointMeta
from elaswave.state.store import Role

FIRST_EPOCH = 1
CONNECT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
"""Bound of waiting for the others to be started."""
EXIT_TIMEOUT_S = 3600.0
"""Bound of waiting for the others' last step and checkpoint."""


class ControlChannel(Protocol):
    """The connection to the coordinator."""

    closed: bool

    def fileno(self) -> int:
        """Descriptor to be polled for reading."""
        ...

    def send(self, message: FromWorker) -> None:
        """Sends a message; thread-safe."""
        ...

    def receive(self) -> list[ToWorker]:
        """What has arrived, without waiting."""
        ...

    def wait(self, timeout_s: float) -> list[ToWorker]:
        """What has arrived, waiting for at least one."""
        ...


class WorkerSetup(NamedTuple):
    """What a worker is started with."""

    config: Config
    worker: int
    run_dir: Path
    key: bytes
    """The job's secret."""
    listen: str
    """Where the data plane listens, see `elaswave.comm.addresses`."""
    checkpoint: tuple[Path, CheckpointMeta] | None
    probe: Probe
    profile: bool


class Worker:
    """A worker with its state, ready to run.

    Args:
        setup: what it is started with.
        control: the connection to the coordinator.
        transport: listening, not yet connected.
    """

    def __init__(self, setup: WorkerSetup, control: ControlChannel, transport: Transport) -> None:
        config = setup.config
        self._setup = setup
        self._config = config
        self._worker = setup.worker
        self._control = control
        self._request = Request.NONE
        self._coordinator_gone = False
        self._blueprint = Blueprint(config)
        stage = self._blueprint.layout.stage_of(setup.worker)
        self._trace = TraceRecorder(setup.worker, stage=stage, enabled=setup.profile)
        self._transport: Transport = TracedTransport(transport, self._trace) if setup.profile else transport
        optimizer = OPTIMIZERS[config.optimizer.name](config.optimizer)
        self._layers, self._store, progress = materialise(self._blueprint, setup.worker, optimizer, setup.checkpoint)
        self._first_step = 1 if setup.checkpoint is None else setup.checkpoint[1].step + 1
        self._source = self._blueprint.open_source(setup.run_dir / "data")
        self._sampler = self._blueprint.sampler(self._source)
        self.engine = StepEngine(
            self._blueprint,
            setup.worker,
            layout=self._blueprint.layout,
            placement=self._blueprint.placement,
            layers=self._layers,
            store=self._store,
            progress=progress,
            ledger=Ledger(setup.worker, self._first_step - 1),
            transport=self._transport,
            batches=self._training_batch,
            optimizer=optimizer,
            request=lambda: self._request,
            check=self._transport.poll,
            probe=setup.probe,
            activity=Activity(),
            trace=self._trace,
        )
        self._writer = ShardWriter(setup.worker, setup.run_dir, control.send)

    def peers(self) -> set[int]:
        """The workers that this one needs a link to."""
        blueprint = self._blueprint
        peers = peers_of(blueprint.layout, blueprint.placement, blueprint.blocks)[self._worker]
        return peers | doubling_partners(blueprint.layout.workers, self._worker)

    def holding(self) -> Holding:
        """What this worker holds, for the log."""
        owned = list(self._store.with_role(Role.OWNER))
        followed = list(self._store.with_role(Role.FOLLOWER))
        return Holding(
            num_parameters=sum(slot.numel for layer in self._layers.values() for slot in layer.shape.tensors),
            num_owned_blocks=len(owned),
            num_owned_parameters=sum(held.num_elements for held in owned),
            num_followed_blocks=len(followed),
            num_followed_parameters=sum(held.num_elements for held in followed),
        )

    def train(self) -> None:
        """Runs all steps, with evaluations and checkpoints in between, and reports each."""
        self._transport.watch(self._control.fileno(), self._on_control)
        run = self._config.run
        step = self._first_step - 1
        for step in range(self._first_step, run.steps + 1):
            self._check_coordinator()
            start_s = time.monotonic()
            result = self.engine.run_step(step)
            self._control.send(self._report(result, time.monotonic() - start_s))
            if run.eval_every and step % run.eval_every == 0:
                self._evaluate(step)
            wanted = step == run.steps or (run.checkpoint_every and step % run.checkpoint_every == 0)
            if (wanted and result.request is not Request.STOP) or result.request is Request.STOP_WITH_CHECKPOINT:
                self._writer.start(self._store, self._standing(step))
            if result.request is not Request.NONE:
                break
        self._finish(step)

    def _report(self, result: StepResult, duration_s: float) -> StepReport:
        skipped = result.skipped
        return StepReport(
            worker=self._worker,
            step=result.step,
            attempt=result.attempts,
            loss=result.loss,
            norm=result.norm,
            learning_rate=result.learning_rate,
            duration_s=duration_s,
            phases_s=dict(self.engine.phases_s),
            retries=list(result.retries),
            skipped=None if skipped is None else self.engine.describe_nonfinite(skipped),
            skipped_microbatch=None if skipped is None else skipped.microbatch,
            skipped_layer=None if skipped is None else self.engine.compute.layer_name(skipped.layer),
        )

    def _standing(self, step: int) -> Standing:
        progress = self.engine.progress
        return Standing(
            step=step,
            num_updates=progress.num_updates,
            exponents=list(progress.grids.exponents),
            calibrated=progress.grids.calibrated,
        )

    def _finish(self, step: int) -> None:
        """Reports the last state and waits until everybody has done so."""
        self._writer.finish()
        self._trace.dump(self._setup.run_dir)
        self._control.send(
            Finished(
                worker=self._worker,
                standing=self._standing(step),
                owner_digests=self._store.digest_parts(Role.OWNER),
                follower_digests=self._store.digest_parts(Role.FOLLOWER),
                optimizer_bytes=self._store.optimizer_bytes(),
                peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                bytes_sent=sum(self._transport.bytes_sent.values()),
            )
        )
        self._transport.watch(self._control.fileno(), None)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while not any(isinstance(message, Exit) for message in self._control.wait(deadline - time.monotonic())):
            pass

    def _training_batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._source.batch(self._sampler.microbatch(step, microbatch), "train")

    def _evaluation_batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._config.batch.microbatch_size
        num_samples = self._source.num_samples("validation")
        indices = [index % num_samples for index in range(microbatch * size, (microbatch + 1) * size)]
        return self._source.batch(indices, "validation")

    def _evaluate(self, step: int) -> None:
        start_s = time.monotonic()
        num_microbatches = self._config.run.eval_microbatches
        loss = self.engine.evaluate(step, self._evaluation_batch)
        batch, length = self._config.batch.microbatch_size, self._config.model.context_length
        self._control.send(
            EvaluationReport(
                worker=self._worker,
                step=step,
                loss=loss,
                num_tokens=num_microbatches * batch * length,
                duration_s=time.monotonic() - start_s,
            )
        )

    def _on_control(self) -> None:
        for message in self._control.receive():
            if isinstance(message, Stop):
                self._request = Request.STOP_WITH_CHECKPOINT if message.checkpoint else Request.STOP
        if self._control.closed:
            self._transport.watch(self._control.fileno(), None)
            self._transport.interrupt("the coordinator has ended")
            self._coordinator_gone = True

    def _check_coordinator(self) -> None:
        self._transport.poll()
        if self._coordinator_gone:
            raise PeerLostError(-1, "the coordinator has ended")


def run_worker(setup: WorkerSetup, control: ControlChannel) -> int:
    """A worker process from its start to its end; errors are reported to the coordinator.

    Returns:
        Exit status: 0, or 1 after an error.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    worker: Worker | None = None
    transport: StreamTransport | None = None
    try:
        transport = StreamTransport(setup.worker, key=setup.key, listen=setup.listen, epoch=FIRST_EPOCH)
        control.send(Hello(worker=setup.worker, address=transport.address))
        worker = Worker(setup, control, transport)
        addresses = _wait_for_start(control)
        transport.connect({peer: addresses[peer] for peer in worker.peers()}, CONNECT_TIMEOUT_S)
        control.send(Ready(worker=setup.worker, holding=worker.holding()))
        worker.train()
        return 0
    except Exception as error:
        traceback.print_exc()
        _report_failure(setup.worker, worker, error, control)
        return 1
    finally:
        if transport is not None:
            transport.close()


def _wait_for_start(control: ControlChannel) -> dict[int, str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        for message in control.wait(max(0.0, deadline - time.monotonic())):
            if isinstance(message, Start):
                return message.addresses
            if isinstance(message, Stop):
                raise WaitTimeoutError("stopped before the start")


def _report_failure(worker_id: int, worker: Worker | None, error: Exception, control: ControlChannel) -> None:
    cause = error.__cause__ if isinstance(error, LayerError) and error.__cause__ is not None else error
    summary = str(error) if isinstance(error, LayerError) else f"{type(error).__name__}: {error}"
    if worker is not None and worker.engine.step and not isinstance(error, LayerError | VoteError):
        summary += f" (in step {worker.engine.step})"
    try:
        control.send(
            Failed(
                worker=worker_id,
                kind=type(cause).__name__,
                summary=summary,
                # What the vote has found says all; where in this code that was said does not help anybody.
                traceback_text="" if isinstance(error, VoteError) else "".join(traceback.format_exception(cause)),
                lost_peer=error.worker if isinstance(error, PeerLostError) else None,
            )
        )
    except CommError:
        pass  # the coordinator is gone too: the worker's log file has the traceback
