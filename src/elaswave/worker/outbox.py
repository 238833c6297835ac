"""What a worker tells the coordinator: makes the messages, of what the machine says and what was measured beside it."""

import resource
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import msgspec

from elaswave.channel.messages.worker import (
    EvaluationReport,
    Finished,
    LinkLost,
    Ready,
    StepReport,
    Timings,
    TrainingStanding,
)
from elaswave.config.cluster import base_level
from elaswave.engine.blueprint import Blueprint
from elaswave.engine.frozen import frozen_digests
from elaswave.engine.pacing import ActionTimer
from elaswave.engine.torch_engine import TorchEngine
from elaswave.protocol.messages import Installed
from elaswave.protocol.step.ballot import Request
from elaswave.protocol.step.engine import Committed
from elaswave.protocol.step.machine import KEPT_REPORTS, WorkerMachine
from elaswave.state.buffers import BlockStore, HeldBlock, Scalars
from elaswave.worker.links import TransportLinks
from elaswave.worker.mailbox import Mailbox, WorkerClient
from elaswave.worker.watch import StepWatch

TIMINGS_EVERY_S_MIN = 1.0
TIMINGS_EVERY_S_MAX = 4.0
"""A worker tells how long its actions take after so long at first, and then less and less often, down to this."""


class _DataTime(NamedTuple):
    """How long a worker has waited for data, and when that was so."""

    at_s: float
    data_wait_s: float


class ControlOutbox:
    """See `elaswave.protocol.step.engine.Outbox` for what its methods promise.

    Args:
        blueprint: the run.
        client: the connection to the coordinator.
        mailbox: what arrives there.
        links: measure how long they took.
        watch: measures steps.
        timer: measures actions.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        client: WorkerClient,
        mailbox: Mailbox,
        links: TransportLinks,
        watch: StepWatch,
        timer: ActionTimer,
    ) -> None:
        self.machine: WorkerMachine[HeldBlock]
        self.level = base_level(blueprint.config)
        """Index of the frequency level at which the device runs."""
        self._config = blueprint.config
        self._blueprint = blueprint
        self._client = client
        self._mailbox = mailbox
        self._links = links
        self._watch = watch
        self._timer = timer
        self._timed_at_s = 0.0
        """When the newest `Timings` were sent."""
        self._timings_every_s = TIMINGS_EVERY_S_MIN
        self._waits_from = _DataTime(0.0, 0.0)
        """When `Timings` told last how long was waited for data."""
        self._runs_s: deque[float] = deque(maxlen=256)
        """Seconds of RUN of the steps since `Timings` were sent last."""
        self.is_stopping = False
        """Whether the newest committed step is the last one because the job was asked to stop."""
        self._finished_s: dict[int, float] = {}
        """When the newest steps were done."""
        self._has_warmed_up = False
        """Whether the first step is over, which also loads code and fills caches."""

    def send(self, message: Any, *, durable: bool = False) -> None:
        """Sends a message."""
        if isinstance(message, StepReport):
            message = msgspec.structs.replace(message, ago_s=time.monotonic() - self._finished_s[message.step])
        self._client.send(message, durable=durable) if durable else self._client.send(message)

    def request(self) -> Request:
        """What the coordinator has told this worker to ask for."""
        return self._mailbox.request

    def ready(self) -> Ready:
        """With what computes here, for the log."""
        text = self._engine.environment().text if self._config.elastic.verify else ""
        return Ready(worker=self.machine.worker, environment=text)

    def link_lost(self, peer: int, detail: str) -> LinkLost:
        """The link to a peer has ended."""
        return LinkLost(worker=self.machine.worker, peer=peer, generation=self.machine.member.generation, detail=detail)

    def committed(self, committed: Committed) -> StepReport:
        """A committed step; now and then also how long actions take."""
        self._mailbox.on_commit()
        self.is_stopping = committed.request is Request.STOP
        if committed.request in (Request.CHECKPOINT, Request.STOP):
            self._mailbox.asked_for_checkpoint(self.machine.member.generation, committed.step)
        if committed.was_run:
            if committed.attempt == 1:
                self._runs_s.append(self._watch.phases_s.get("run", 0.0))
            self._report_timings(committed.step)
        finished_s = self._finished_s[committed.step] = time.monotonic()
        self._finished_s.pop(committed.step - KEPT_REPORTS, None)
        skipped = committed.nonfinite
        layer_name = self.machine.terms.layer_name
        num_in_place, num_moving = self.machine.move_progress
        return StepReport(
            worker=self.machine.worker,
            generation=self.machine.member.generation,
            step=committed.step,
            attempt=committed.attempt,
            loss=committed.loss,
            norm=committed.norm,
            learning_rate=self._engine.updater.learning_rate,
            duration_s=finished_s - self._watch.step_began_s if committed.was_run else 0.0,
            phases_s=dict(self._watch.phases_s),
            vector=committed.evidence.vector,
            change=committed.evidence.change,
            checkpoint=committed.evidence.checkpoint,
            retries=list(committed.retries),
            skipped=None if skipped is None else self.machine.steps.describe_nonfinite(skipped),
            skipped_microbatch=None if skipped is None else skipped.microbatch,
            skipped_layer=None if skipped is None else layer_name(skipped.layer),
            metrics=dict(committed.metrics),
            num_in_place=num_in_place,
            num_moving=num_moving,
        )

    @property
    def _engine(self) -> TorchEngine:
        engine = self.machine.engine
        assert isinstance(engine, TorchEngine)
        return engine

    def _report_timings(self, step: int) -> None:
        now_s = time.monotonic()
        if not self._has_warmed_up:
            self._timer.times.take()
            self._runs_s.clear()
            self._has_warmed_up = True
            self._waits_from = _DataTime(now_s, self._watch.data_wait_s)
        elif now_s - self._timed_at_s >= self._timings_every_s:
            self._timed_at_s = now_s
            self._timings_every_s = min(2 * self._timings_every_s, TIMINGS_EVERY_S_MAX)
            actions = self._timer.times.take()
            run_s = median(self._runs_s) if self._runs_s else 0.0
            self._runs_s.clear()
            generation = self.machine.member.generation
            before, self._waits_from = self._waits_from, _DataTime(now_s, self._watch.data_wait_s)
            self._client.send(
                Timings(
                    worker=self.machine.worker,
                    generation=generation,
                    step=step,
                    level=self.level,
                    actions=actions,
                    run_s=run_s,
                    data_wait_s=self._waits_from.data_wait_s - before.data_wait_s,
                    elapsed_s=now_s - before.at_s,
                    device=self._engine.device.gauges(),
                )
            )

    def evaluated(self, step: int, loss: float, metrics: Mapping[str, float]) -> EvaluationReport:
        """An evaluation has been made."""
        num_microbatches = self._config.run.eval_microbatches
        batch, tokens = self._config.batch.microbatch_size, self._blueprint.tokens_per_sample
        return EvaluationReport(
            worker=self.machine.worker,
            step=step,
            loss=loss,
            num_tokens=None if tokens is None else num_microbatches * batch * tokens,
            duration_s=time.monotonic() - self._watch.evaluation_began_s,
            metrics=dict(metrics),
        )

    def installed(self, received_bytes: int) -> Installed:
        """A decision is installed."""
        return Installed(
            worker=self.machine.worker,
            generation=self.machine.member.generation,
            edit_s=self._links.edit_s,
            promote_s=time.monotonic() - self._links.connected_s,
            critical_bytes=received_bytes,
        )

    def standing(self, step: int) -> TrainingStanding:
        """Where training stands after a step."""
        progress = self.machine.progress
        return TrainingStanding(
            generation=self.machine.member.generation,
            step=step,
            num_updates=progress.num_updates,
            exponents=list(progress.grids.exponents),
            calibrated=progress.grids.calibrated,
            optimizer=self._engine.updater.state(),
        )

    def scalars(self) -> Scalars:
        """The optimizer's states that tensors have once, after the newest committed step."""
        return self._engine.updater.scalars()

    def _frozen_digests(self) -> dict[str, int]:
        machine = self.machine
        assert isinstance(machine.engine, TorchEngine)
        return frozen_digests(machine.engine.layers, machine.layout, machine.worker)

    def finished(self, stopped: bool) -> Finished:
        """The last state: all workers wait until every one has said so."""
        machine, placement = self.machine, self.machine.placement
        store, scalars = BlockStore(machine.copies), self.scalars()
        owned = {block: 1 for block, owner in enumerate(placement.owner) if owner == machine.worker}
        followed = {block: len(placement.followers[block]) for block in owned}
        follows = {block: 1 for block, others in enumerate(placement.followers) if machine.worker in others}
        of_owner, of_followed, of_follower = store.weighted_digests(scalars, owned, followed, follows)
        return Finished(
            worker=machine.worker,
            standing=self.standing(machine.last_step),
            stopped=stopped,
            owner_digests=of_owner | self._frozen_digests(),
            followed_digests=of_followed,
            follower_digests=of_follower,
            optimizer_bytes=store.optimizer_bytes(),
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            bytes_sent=sum(self._links.transport.bytes_sent.values()),
            data_wait_s=self._watch.data_wait_s,
            fence_bypasses=self._engine.compute.fence_bypasses(),
        )
