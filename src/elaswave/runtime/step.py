"""The life of a step on one worker: RUN, REDUCE, VOTE, APPLY, GATHER, and another attempt where the vote says so.

The order is the contract. Until a worker's own vote has passed it holds step k-1 and changes no state; from then on
step k is committed for everybody, because the vote can pass only when everybody is prepared.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from elaswave.comm.group import Group
from elaswave.comm.transport import Handle, Transport
from elaswave.config.schema import Config
from elaswave.errors import NonFiniteError, VoteError
from elaswave.hashing import MASK64
from elaswave.models.layers import ModelSpec
from elaswave.observability.trace import PHASE, TraceRecorder
from elaswave.planning.program import Action, Program
from elaswave.runtime.channels import WAIT_TIMEOUT_S, Channel
from elaswave.runtime.compute import Compute, NonFinite, expected_coverage
from elaswave.runtime.diagnosis import diagnose
from elaswave.runtime.exchange import Exchange
from elaswave.runtime.executor import Batches, Executor
from elaswave.runtime.optimizer import Optimizer, clip_factor, learning_rate
from elaswave.runtime.probe import Phase, Probe
from elaswave.runtime.vote import (
    UNKNOWN_MICROBATCH,
    Certificate,
    Expected,
    GridState,
    Outcome,
    Request,
    Verdict,
    VoteShape,
    agreement_key,
    judge,
    residency_key,
)
from elaswave.state.flat import FlatLayer, LayerShape, all_tensors
from elaswave.state.placement import Block, Placement
from elaswave.state.store import BlockStore, HeldBlock, Role
from elaswave.state.sums import INITIAL_EXPONENT, Accumulator, ExactAccumulator, FloatAccumulator, square_sum
from elaswave.state.verify import run_hash
from elaswave.types import Layout, struct_hash

STATE_SAMPLE_PERIOD = 16
"""Each block's state is compared between its copies once in this many steps."""
MAX_REJECTED_ATTEMPTS = 2
"""A step whose certificate fails this often is not tried again."""


class StepResult(NamedTuple):
    """A committed step, as one worker reports it; equal on all workers."""

    step: int
    attempts: int
    loss: float
    norm: float
    learning_rate: float
    skipped: NonFinite | None
    """Why no update was made, or None."""
    request: Request
    retries: tuple[str, ...]
    """Why earlier attempts did not commit."""


class Progress(NamedTuple):
    """What training has come to; with the blocks, all that decides how it goes on."""

    num_updates: int
    grids: GridState


class StepEngine:
    """Runs steps of one worker under one layout.

    Args:
        config: the run.
        worker: this worker's id.
        model, shapes, blocks: the model, its flat storage and how that is cut.
        layout, placement, program: who runs and holds what, and this worker's actions.
        layers: the materialised layers of this worker's stage, with current parameters.
        store: the blocks held here.
        progress: where training stands.
        transport: links to all workers that the layout needs.
        batches: the training micro-batches.
        optimizer: applied to every held block.
        request: read when this worker votes.
        probe: told of every point.
        trace: records phases and actions.
    """

    def __init__(
        self,
        config: Config,
        worker: int,
        *,
        model: ModelSpec,
        shapes: Sequence[LayerShape],
        blocks: Sequence[Block],
        layout: Layout,
        placement: Placement,
        program: Program,
        layers: dict[int, FlatLayer],
        store: BlockStore,
        progress: Progress,
        transport: Transport,
        batches: Batches,
        optimizer: Optimizer,
        request: Callable[[], Request],
        probe: Probe,
        trace: TraceRecorder,
    ) -> None:
        self.worker = worker
        self.step = 0
        self.attempt = 0
        self.layout = layout
        self.phases_s: dict[str, float] = {}
        """Seconds of this worker in each phase of the present step, all attempts added."""
        self.next_layout_hash = struct_hash(layout)
        self.placement = placement
        self.program = program
        self.blocks = blocks
        self.store = store
        self.progress = progress
        self.layers = layers
        self.transport = transport
        self.group = Group(transport, layout.workers, Channel.VOTE)
        self._config = config
        self._shapes = shapes
        self._batches = batches
        self._optimizer = optimizer
        self._request = request
        self._probe = probe
        self._trace = trace
        self._exact = config.elastic.consistency == "bitwise"
        make: Callable[[LayerShape], Accumulator] = ExactAccumulator if self._exact else FloatAccumulator
        accumulators = {index: make(layer.shape) for index, layer in layers.items()}
        self.compute = Compute(
            model,
            layers,
            accumulators,
            seed=config.run.seed,
            recompute=config.model.recompute,
            between_layers=transport.poll,
        )
        self._executor = Executor(worker, layout, self.compute, transport, trace)
        self._exchange = Exchange(
            worker,
            layout=layout,
            placement=placement,
            blocks=blocks,
            shapes=shapes,
            store=store,
            layers=layers,
            accumulators=accumulators,
            transport=transport,
        )
        self._tensors = all_tensors(shapes)
        self._vote_shape = VoteShape(layout.num_microbatches, len(self._tensors))
        self._sends: list[Handle] = []
        self._reached: dict[Phase, int] = {}

    def run_step(self, step: int) -> StepResult:
        """Runs one step until it is committed.

        Args:
            step: its number, from 1.
        Raises:
            NonFiniteError: a loss or gradient is not finite (and ``run.skip_nonfinite`` is off).
            VoteError: the certificate has failed twice.
            LayerError, CommError: from the layers or the links.
        """
        retries: list[str] = []
        num_rejected = 0
        while True:
            verdict = self._try_step(step, len(retries) + 1)
            if verdict.outcome in (Outcome.COMMIT, Outcome.SKIP):
                break
            if verdict.outcome is Outcome.NON_FINITE:
                assert verdict.nonfinite is not None
                raise NonFiniteError(
                    f"{self.describe_nonfinite(verdict.nonfinite)}. Lower optimizer.lr, lengthen "
                    "optimizer.warmup_steps, check the data, or set run.skip_nonfinite=true to commit such steps "
                    "without an update"
                )
            reason = verdict.reason
            if verdict.outcome is Outcome.REJECT:
                num_rejected += 1
                culprits = diagnose(self, verdict.failed)
                reason = f"{reason} ({culprits})"
                if num_rejected == MAX_REJECTED_ATTEMPTS:
                    raise VoteError(
                        f"step {step} cannot be committed, attempt {self.attempt}: {reason}. The state of step "
                        f"{step - 1} is unchanged; resume from the last checkpoint, and look at the hardware and "
                        "the log of the workers that are named"
                    )
            grids = self.progress.grids
            # An attempt that was rejected has measured nothing that could be trusted.
            measured = grids.calibrated or verdict.outcome is Outcome.RETRY
            self.progress = self.progress._replace(grids=grids._replace(exponents=verdict.grids, calibrated=measured))
            retries.append(reason)
        rate = learning_rate(self._config.optimizer, step, self._config.run.steps)
        skipped = verdict.outcome is Outcome.SKIP
        with self._timed("apply"):
            self._apply(verdict, rate, skip=skipped)
        with self._timed("gather"):
            self._gather()
        grids = self.progress.grids._replace(exponents=verdict.grids)
        self.progress = Progress(self.progress.num_updates + (not skipped), grids)
        nonfinite = verdict.nonfinite if skipped else None
        return StepResult(
            step, self.attempt, verdict.loss, verdict.norm, rate, nonfinite, verdict.request, tuple(retries)
        )

    def _try_step(self, step: int, attempt: int) -> Verdict:
        """RUN, REDUCE and VOTE."""
        self.step, self.attempt = step, attempt
        if attempt == 1:
            self.phases_s.clear()
        self._reached = {}
        exponents = self._exponents_by_layer()
        self.compute.begin(step, exponents)
        self._exchange.begin(step, attempt)

        def on_layer_done(layer: int) -> None:
            self._reach("reduce")
            self._sends += self._exchange.send_partials(layer, step, attempt)

        with self._timed("run"):
            self._executor.run(
                self.program,
                self._batches,
                step=step,
                attempt=attempt,
                sends=self._sends,
                before_action=self._before_action,
                on_layer_done=on_layer_done,
            )
        with self._timed("reduce"):
            self._reach("reduce")
            self._sends += self._exchange.reduce(step, attempt, exponents)
        with self._timed("vote"):
            self._reach("vote")
            verdict = self._vote()
            self._drain()  # also REDUCE's buffers are free again now
        return verdict

    def _exponents_by_layer(self) -> list[list[int]]:
        exponents = self.progress.grids.exponents
        return [[exponents[slot.id] for slot in shape.tensors] for shape in self._shapes]

    def _vote(self) -> Verdict:
        certificate = self.certificate()
        vector = self._vote_shape.encode(certificate)
        self.group.all_reduce_with(
            vector, self._vote_shape.combine, step=self.step, attempt=self.attempt, timeout_s=WAIT_TIMEOUT_S
        )
        residency = self._expected_residency()
        expected = Expected(
            num_workers=len(self.layout.workers),
            coverage=expected_coverage(len(self._shapes), self.layout.num_microbatches),
            residency=residency,
            next_residency=residency,
            next_layout=self.next_layout_hash,
        )
        if not self._config.elastic.verify:
            expected = expected._replace(residency=0, next_residency=0)
        return judge(
            vector,
            self._vote_shape,
            expected,
            self.progress.grids,
            skip_nonfinite=self._config.run.skip_nonfinite,
        )

    def certificate(self) -> Certificate:
        """What this worker brings to the vote of the present attempt."""
        square_sums = []
        nonfinite = self.compute.nonfinite
        for held in self.store.with_role(Role.OWNER):
            assert held.gradient is not None
            value = square_sum(held.gradient)
            if value - value != 0.0:
                nonfinite = nonfinite or NonFinite(UNKNOWN_MICROBATCH, held.block.layer)
                value = 0.0
            square_sums.append(value)
        verify = self._config.elastic.verify
        residency = self._residency() if verify else 0
        maxima = {
            slot.id: maximum
            for index, layer in self.layers.items()
            for slot, maximum in zip(
                layer.shape.tensors, self.compute.accumulators[layer.shape.layer].maxima, strict=True
            )
        }
        return Certificate(
            coverage=self.compute.coverage,
            residency=residency,
            next_residency=residency,  # planned changes of layout come with their own set of blocks
            agreement=self._agreement() if verify else 0,
            next_layout=self.next_layout_hash,
            losses=dict(self.compute.losses),
            square_sums=square_sums,
            maxima=maxima,
            nonfinite=nonfinite,
            request=self._request(),
        )

    def _residency(self) -> int:
        keys = (residency_key(held.block.id, held.role, self.worker, held.version) for held in self.store)
        return sum(keys) & MASK64

    def _expected_residency(self) -> int:
        total = 0
        for block in self.blocks:
            total += residency_key(block.id, Role.OWNER, self.placement.owner[block.id], self.step - 1)
            for follower in self.placement.followers[block.id]:
                total += residency_key(block.id, Role.FOLLOWER, follower, self.step - 1)
        return total & MASK64

    def _agreement(self) -> int:
        return sum(weight * key for _, weight, key in self.agreement_terms()) & MASK64

    def agreement_terms(self) -> list[tuple[int, int, int]]:
        """(block, weight, key) of every copy that this worker compares; weights of equal copies add up to zero."""
        terms = []
        for held in self.store:
            block = held.block.id
            num_followers = len(self.placement.followers[block])
            if num_followers == 0:
                continue
            weight = num_followers if held.role is Role.OWNER else -1
            assert held.gradient is not None
            key = agreement_key("gradient", block, self.step, self.attempt, run_hash(held.gradient))
            if (block + self.step) % STATE_SAMPLE_PERIOD == 0:
                for name, values in held.slots.items():
                    key += agreement_key(name, block, self.step, self.attempt, run_hash(values))
            terms.append((block, weight, key & MASK64))
        return terms

    def _apply(self, verdict: Verdict, rate: float, *, skip: bool) -> None:
        clip = clip_factor(verdict.norm, self._config.optimizer.grad_clip) if not skip else 1.0
        for held in self.store:
            self._reach("apply")
            self._apply_block(held, clip, rate, skip=skip)
        self._exchange.publish()

    def _apply_block(self, held: HeldBlock, clip: float, rate: float, *, skip: bool) -> None:
        gradient = held.gradient
        assert gradient is not None and held.version == self.step - 1
        held.gradient = None
        if not skip:
            if clip != 1.0:
                gradient.mul_(clip)
            self._optimizer.update(
                held.slots,
                gradient,
                held.decay_runs,
                learning_rate=rate,
                num_updates=self.progress.num_updates + 1,
            )
        held.version = self.step

    def _gather(self) -> None:
        self._sends += self._exchange.gather(self.step, self.attempt, lambda: self._reach("gather"))
        self._drain()

    def _drain(self) -> None:
        self.transport.wait(self._sends, WAIT_TIMEOUT_S)
        self._sends.clear()

    def _before_action(self, action: Action) -> None:
        self._reach("forward" if action.kind == "F" else "backward")

    def _reach(self, phase: Phase) -> None:
        index = self._reached.get(phase, 0)
        self._reached[phase] = index + 1
        self._probe.reached(phase, index, self)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        end_ns = time.monotonic_ns()
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + (end_ns - start_ns) * 1e-9
        self._trace.add(phase.upper(), PHASE, start_ns, end_ns, {"step": self.step, "attempt": self.attempt})

    def describe_nonfinite(self, nonfinite: NonFinite) -> str:
        """A clause that names what was not finite in the present step, and where."""
        is_loss = nonfinite.layer == self.compute.num_layers
        layer = nonfinite.layer - 1 if is_loss else nonfinite.layer
        place = f"layer {layer} ({self.compute.layer_name(layer)})"
        what = f"the loss, after {place}," if is_loss else f"a gradient of {place}"
        known = nonfinite.microbatch != UNKNOWN_MICROBATCH
        where = f"micro-batch {nonfinite.microbatch}" if known else "the sum over micro-batches"
        return f"{what} is not finite in step {self.step}, {where}"


def initial_progress(shapes: Sequence[LayerShape], config: Config) -> Progress:
    """Where training stands before the first step."""
    exact = config.elastic.consistency == "bitwise"
    exponents = (INITIAL_EXPONENT,) * len(all_tensors(shapes))
    return Progress(0, GridState(exponents, calibrated=not exact, exact=exact))


def evaluation_loss(
    *,
    group: Group,
    executor: Executor,
    compute: Compute,
    program: Program,
    batches: Batches,
    num_microbatches: int,
    step: int,
) -> float:
    """The mean validation loss, equal on all workers; forward only, without dropout.

    Args:
        group: all workers, on a channel of its own.
        executor, program: of the evaluation's layout.
        batches: validation micro-batches.
        num_microbatches: of the evaluation.
        step: the step after which it runs; part of every tag.
    """
    compute.losses.clear()
    sends: list[Handle] = []
    executor.run(
        program,
        batches,
        step=step,
        attempt=0,
        sends=sends,
        before_action=lambda action: None,
        on_layer_done=lambda layer: None,
        train=False,
    )
    slots = torch.zeros(num_microbatches, dtype=torch.float64)
    for microbatch, loss in compute.losses.items():
        slots[microbatch] = loss
    bits = slots.view(torch.int64)
    group.all_reduce_with(bits, torch.Tensor.add_, step=step, timeout_s=WAIT_TIMEOUT_S)
    group.transport.wait(sends, WAIT_TIMEOUT_S)
    return math.fsum(slots.tolist()) / num_microbatches
