"""The life of a step on one worker: RUN, REDUCE, VOTE, APPLY, GATHER, and another attempt where the vote says so.

The order is the contract, and the `Ledger` refuses any other. Until a worker's own vote has passed it holds step k-1
and changes no state; from then on step k is committed for everybody, because the vote can pass only when everybody is
prepared. An interrupt (a new epoch) leaves a step where it is; `catch_up` and `install` go on from there.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from elaswave.config.schema import Config
from elaswave.errors import NonFiniteError, StateError, VoteError
from elaswave.hashing import MASK64, key64
from elaswave.observability.trace import PHASE, TraceRecorder
from elaswave.planning.execution import programs_of
from elaswave.planning.layout import evaluation_layout
from elaswave.planning.recovery import choose_followers
from elaswave.protocol.ledger import CatchUp, Held, Ledger
from elaswave.protocol.messages import Decision, LayoutChange
from elaswave.state.flat import FlatLayer
from elaswave.state.placement import Placement
from elaswave.state.shapes import LayerShape, all_tensors
from elaswave.state.store import BlockStore, HeldBlock, Role, roles_of
from elaswave.state.sums import INITIAL_EXPONENT, Accumulator, ExactAccumulator, FloatAccumulator, Scratch, square_sum
from elaswave.state.verify import run_hash
from elaswave.transport.frames import Tag
from elaswave.transport.group import Group
from elaswave.transport.interface import Handle, Transport
from elaswave.types import Action, ExecutionParameters, Layout, struct_hash
from elaswave.worker.activity import Activity
from elaswave.worker.blueprint import Blueprint
from elaswave.worker.channels import WAIT_TIMEOUT_S, Channel
from elaswave.worker.compute import Compute, NonFinite, expected_coverage
from elaswave.worker.diagnosis import diagnose
from elaswave.worker.exchange import Exchange
from elaswave.worker.executor import Batches, Executor
from elaswave.worker.optimizer import Optimizer, clip_factor, learning_rate
from elaswave.worker.pacing import ActionTimer
from elaswave.worker.probe import Phase, Probe
from elaswave.worker.replication import Replication
from elaswave.worker.vote import (
    UNKNOWN_MICROBATCH,
    Ballot,
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
    """Runs steps of one worker.

    Args:
        blueprint: the run.
        worker: this worker's id.
        layout, placement, execution: who runs and holds what at the start, and how.
        layers: the materialised layers of this worker's stage, with current parameters.
        store: the blocks held here.
        progress: where training stands.
        ledger: keeps the order of commits.
        transport: links to all workers that the layout needs.
        batches: the training micro-batches.
        optimizer: applied to every held block.
        request: read when this worker votes.
        check: called between layers and blocks; moves bytes, and raises InterruptedWaitError if the epoch has risen.
        probe: told of every point.
        timer: measures every action, and makes it last on an emulated device.
        activity: told what the worker is doing, for the progress watch.
        trace: records phases and actions.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        worker: int,
        *,
        layout: Layout,
        placement: Placement,
        execution: ExecutionParameters,
        layers: dict[int, FlatLayer],
        store: BlockStore,
        progress: Progress,
        ledger: Ledger,
        transport: Transport,
        batches: Batches,
        optimizer: Optimizer,
        request: Callable[[], Request],
        check: Callable[[], None],
        probe: Probe,
        timer: ActionTimer,
        activity: Activity,
        trace: TraceRecorder,
    ) -> None:
        self.worker = worker
        self.step = 0
        self.attempt = 0
        self.phases_s: dict[str, float] = {}
        """Seconds of this worker in each phase of the present step, all attempts added."""
        self.blueprint = blueprint
        self.blocks = blueprint.blocks
        self.ledger = ledger
        self.store = store
        """The blocks held at the last committed step."""
        self.placement = placement
        self.progress = progress
        self.layers = layers
        self.transport = transport
        self._config: Config = blueprint.config
        self._shapes = blueprint.shapes
        self._batches = batches
        self._optimizer = optimizer
        self._request = request
        self.check = check
        """Between layers and blocks: moves bytes, and leaves the step if the epoch has risen."""
        self._probe = probe
        self._timer = timer
        self.activity = activity
        self._trace = trace
        exact, checked = self._config.elastic.consistency == "bitwise", self._config.elastic.verify
        self._make_accumulator: Callable[[LayerShape], Accumulator] = (
            functools.partial(ExactAccumulator, scratch=Scratch(), checked=checked) if exact else FloatAccumulator
        )
        self._accumulators = {index: self._make_accumulator(layer.shape) for index, layer in layers.items()}
        self.compute = Compute(
            blueprint.model,
            layers,
            self._accumulators,
            seed=self._config.run.seed,
            recompute=self._config.model.recompute,
            between_layers=check,
        )
        self._tensors = all_tensors(self._shapes)
        self._vote_shape = VoteShape(self._config.batch.num_microbatches, len(self._tensors))
        self._sends: list[Handle] = []
        self._reached: dict[Phase, int] = {}
        self._known_vote: tuple[int, int, Verdict] | None = None
        """Step, attempt and verdict of the newest vote that has been taken over."""
        self._complete: Placement | None = None
        """The newest placement found to lack no follower."""
        self._held_change: LayoutChange | None = None
        """The planned change of layout that is held, and told in every vote until it is in force."""
        self._change_hash = 0
        """Of the held change; 0 for none."""
        self._next: LayoutChange | None = None
        """The one that has come into force with the vote of the step in hand, until its GATHER."""
        self._use_layout(layout, execution)
        self._use_placement(placement, store)

    # ------------------------------------------------------------------------------------------- layout and placement

    def _use_layout(self, layout: Layout, execution: ExecutionParameters) -> None:
        self.layout = layout
        self.execution = execution
        self._layout_hash = struct_hash(layout)
        self.group = Group(self.transport, layout.workers, Channel.VOTE)
        self.program = programs_of(layout, execution, self._config.layout.schedule, only=self.worker)[self.worker]
        self._executor = Executor(self.worker, layout, self.compute, self.transport, self.activity, self._trace)

    def _use_placement(self, placement: Placement, store: BlockStore) -> None:
        """The placement under which the next attempt votes, and the copies that this worker holds under it."""
        self._filled = {
            block
            for block, (before, after) in enumerate(zip(self.placement.followers, placement.followers, strict=True))
            if before != after
        }
        self.voting_placement = placement
        self.voting_store = store
        self.next_layout_hash = key64(self._layout_hash, struct_hash(placement)) >> 2
        self.exchange = Exchange(
            self.worker,
            layout=self.layout,
            placement=placement,
            blocks=self.blocks,
            shapes=self._shapes,
            store=store,
            layers=self.layers,
            accumulators=self._accumulators,
            transport=self.transport,
            activity=self.activity,
            checked=self._config.elastic.verify,
        )

    def hold(self, change: LayoutChange | None) -> None:
        """Holds a planned change of layout, whose links are there, until it is in force; None forgets the held one."""
        self._held_change, self._change_hash = change, 0
        if change is None:
            self._next = None  # the decision knows of it
        else:
            content = (struct_hash(change.layout), struct_hash(change.execution))
            self._change_hash = key64("change", change.number, *content) >> 2

    def _switch(self, change: LayoutChange) -> None:
        """The next layout is in force: makes room for its layers. What is not held here comes with GATHER."""
        self._next = None
        stage = change.layout.stages[change.layout.stage_of(self.worker)]
        self._materialise(range(stage.start, stage.stop))
        self._use_layout(change.layout, change.execution)
        self._use_placement(self.placement, self.store)
        self.exchange.publish(self.store)

    def held(self) -> dict[int, Held]:
        """The copies at the last committed step, for a report."""
        return {held.block.id: Held(held.role is Role.OWNER, held.version) for held in self.store}

    def install(self, decision: Decision) -> int:
        """Takes over a decision's layout and placement and makes missing parameters complete.

        The links that it needs must be there, and `catch_up` must have been called.

        Returns:
            Bytes of state that this worker received, parameters of the step's own gather not counted.
        """
        layout, placement = decision.layout, decision.placement
        base = decision.resume_step - 1
        roles = roles_of(self.worker, placement, self.blocks)
        missing = sorted(set(roles) - set(self.store.held))
        if missing:
            raise StateError(
                f"epoch {decision.epoch} counts on blocks {missing} of worker {self.worker}, not held here"
            )
        held = {block: self.store[block] for block in roles}
        for block, role in roles.items():
            held[block].role = role
            if held[block].version != base:
                raise StateError(f"block {block} of worker {self.worker} is of step {held[block].version}, not {base}")
        self.store = BlockStore(held)
        self.placement = placement
        stage = layout.stages[layout.stage_of(self.worker)]
        if any(worker == self.worker for worker, _ in decision.deliver):
            self.ledger.parameters_step = -1
        moved = self._materialise(range(stage.start, stage.stop))
        self._use_layout(layout, decision.execution)
        self._use_placement(placement, self.store)
        received = self._deliver(decision, moved)
        self.ledger.gathered(base)
        return received

    def _materialise(self, wanted: range) -> set[int]:
        """Makes and drops layers so that exactly the wanted ones are here; returns the new ones, yet without values."""
        gone = set(self.layers) - set(wanted)
        for held in self.store:
            if held.block.layer in gone:
                # It may be a view of the layer's storage, all of which would stay with it.
                held.slots["master"] = held.slots["master"].clone()
        for index in gone:
            del self.layers[index], self._accumulators[index]
        new = {index for index in wanted if index not in self.layers}
        for index in sorted(new):
            shape = self._shapes[index]
            self.layers[index] = FlatLayer(self.blueprint.model.layers[index], shape, self.blueprint.dtype)
            self._accumulators[index] = self._make_accumulator(shape)
        return new

    def _deliver(self, decision: Decision, moved: set[int]) -> int:
        """Sends and receives the parameters that a decision asks for."""
        step, attempt = decision.resume_step - 1, decision.resume_attempt
        sends, receives, received = [], [], 0
        for worker, layer in decision.deliver:
            tag = Tag(Channel.DELIVERY, step, attempt, layer, 0)
            by_owner: dict[int, list[int]] = {}
            for block in self.blocks:
                if block.layer == layer and worker not in self.placement.holders(block.id):
                    by_owner.setdefault(self.placement.owner[block.id], []).append(block.id)
            if worker == self.worker:
                flat = self.layers[layer].flat
                for owner, ids in by_owner.items():
                    views = [flat[self.blocks[index].start : self.blocks[index].stop] for index in ids]
                    receives.append(self.transport.recv(owner, tag, views))
                    received += sum(view.nbytes for view in views) if layer in moved else 0
            elif ids := by_owner.get(self.worker, []):
                values = [self.store[index].slots["master"].to(self.blueprint.dtype) for index in ids]
                sends.append(self.transport.send(worker, tag, values))
        if decision.deliver:
            self.exchange.publish(self.store)
        self.transport.wait([*sends, *receives], WAIT_TIMEOUT_S)
        return received

    def catch_up(self, todo: CatchUp, decision: Decision) -> Verdict | None:
        """Does to this worker's state what the ledger says about a decision.

        Returns:
            The verdict of the decision's vote, or None if there is none.
        """
        self._sends.clear()  # what was pending failed with its epoch
        evidence = decision.evidence
        if evidence is None:
            return None
        vector = torch.frombuffer(bytearray(evidence.vector), dtype=torch.int64)
        if todo is CatchUp.NOTHING:
            return None
        known = self._known_vote
        if known is not None and known[:2] == (evidence.step, evidence.attempt):
            verdict = known[2]
        else:
            verdict = self._judge(vector, evidence.step)
            self._take(verdict)
            self._known_vote = (evidence.step, evidence.attempt, verdict)
        if todo is CatchUp.APPLY:
            self._apply(evidence.step, verdict)
        return verdict

    # --------------------------------------------------------------------------------------------------------- a step

    def run_step(self, step: int, attempt: int = 1) -> StepResult:
        """Runs one step until it is committed.

        Args:
            step: its number, from 1.
            attempt: number of its next attempt.
        Raises:
            InterruptedWaitError: the epoch has risen.
            NonFiniteError: a loss or gradient is not finite (and ``run.skip_nonfinite`` is off).
            VoteError: the certificate has failed twice.
            LayerError, CommError: from the layers or the links.
        """
        retries: list[str] = []
        num_rejected = 0
        while True:
            verdict = self._try_step(step, attempt)
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
            retries.append(reason)
            attempt += 1
        with self._timed("apply"):
            self.activity.compute("apply")
            self._apply(step, verdict)
        with self._timed("gather"):
            self.activity.wait("gather")
            if self._next is not None:
                self._switch(self._next)
            self._gather()
        return self.result_of(step, attempt, verdict, tuple(retries))

    def result_of(self, step: int, attempt: int, verdict: Verdict, retries: tuple[str, ...]) -> StepResult:
        """What is to be reported of a committed step."""
        rate = learning_rate(self._config.optimizer, step, self._config.run.steps)
        nonfinite = verdict.nonfinite if verdict.outcome is Outcome.SKIP else None
        return StepResult(step, attempt, verdict.loss, verdict.norm, rate, nonfinite, verdict.request, retries)

    def _try_step(self, step: int, attempt: int) -> Verdict:
        """RUN, REDUCE and VOTE."""
        self.ledger.begin(step, attempt)
        self.step, self.attempt = step, attempt
        if attempt == 1:
            self.phases_s.clear()
        self._reached = {}
        self._drain()
        filling = self._fill()
        exponents = self._exponents_by_layer()
        self.compute.begin(step, exponents)
        self.exchange.begin(step, attempt)

        def on_layer_done(layer: int) -> None:
            self._reach("reduce")
            self._sends += self.exchange.send_partials(layer, step, attempt)

        with self._timed("run"):
            self._executor.run(
                self.program,
                self._batches,
                step=step,
                attempt=attempt,
                sends=self._sends,
                before_action=self._before_action,
                on_layer_done=on_layer_done,
                on_computed=self._timer.on_computed,
            )
        with self._timed("reduce"):
            self._reach("reduce")
            self.activity.wait("reduce")
            self._sends += self.exchange.reduce(step, attempt, exponents)
            self.activity.wait_for(filling)
            self.transport.wait(filling, WAIT_TIMEOUT_S)
        self.ledger.prepare()
        with self._timed("vote"):
            self._reach("vote")
            self.activity.wait("vote")
            verdict = self._vote()
            self._drain()  # also REDUCE's buffers are free again now
        return verdict

    def _fill(self) -> list[Handle]:
        """Begins to give new followers to blocks that lack some: their base copies travel while the step runs.

        Every worker comes to the same placement by itself; the vote compares its hash, and with it the copies count.
        """
        if self._complete is self.placement is self.voting_placement:
            return []
        elastic = self._config.elastic
        placement = choose_followers(
            self.placement,
            self.blocks,
            self.layout,
            num_followers=elastic.num_followers,
            max_elements=elastic.refill_bytes_per_step // (4 * (1 + len(self._optimizer.slots))),
        )
        if placement == self.placement:
            self._complete = self.placement
            self._use_placement(self.placement, self.store)
            return []
        filling = Replication(
            self.worker, self.placement, placement, self.blocks, self._shapes, self.store, self._optimizer.slots
        )
        self._use_placement(placement, filling.store)
        sends, receives = filling.start(self.transport, self.step, self.attempt)
        self._sends += sends
        return receives

    def _exponents_by_layer(self) -> list[list[int]]:
        exponents = self.progress.grids.exponents
        return [[exponents[slot.id] for slot in shape.tensors] for shape in self._shapes]

    def _vote(self) -> Verdict:
        vector = self._vote_shape.encode(self.ballot())
        self.group.all_reduce_with(
            vector, self._vote_shape.combine, step=self.step, attempt=self.attempt, timeout_s=WAIT_TIMEOUT_S
        )
        verdict = self._judge(vector, self.step)
        commits = verdict.outcome in (Outcome.COMMIT, Outcome.SKIP)
        if verdict.change:
            assert verdict.change == self._change_hash, "a vote for a planned change that this worker does not hold"
            self._next, self._held_change, self._change_hash = self._held_change, None, 0
        number = None if self._next is None else self._next.number
        self.ledger.learn(
            vector.numpy().tobytes(), commits=commits, change=number, asks_checkpoint=verdict.asks_checkpoint
        )
        self._known_vote = (self.step, self.attempt, verdict)
        if commits:
            self.store, self.placement = self.voting_store, self.voting_placement
        self._take(verdict)
        return verdict

    def _judge(self, vector: torch.Tensor, step: int) -> Verdict:
        """Reads a vote on the present grids; a worker that did not see it come about reads the same."""
        residency = self._expected_residency(step)
        expected = Expected(
            num_workers=len(self.layout.workers),
            coverage=expected_coverage(len(self._shapes), self.layout.num_microbatches),
            residency=residency,
            next_residency=residency,
            next_layout=self.next_layout_hash,
            num_microbatches=self.layout.num_microbatches,
        )
        return judge(
            vector,
            self._vote_shape,
            expected,
            self.progress.grids,
            skip_nonfinite=self._config.run.skip_nonfinite,
        )

    def _take(self, verdict: Verdict) -> None:
        """Takes over what a vote says about grids and the number of updates."""
        progress, grids = self.progress, self.progress.grids
        # An attempt that was rejected has measured nothing that could be trusted.
        measured = grids.calibrated or verdict.outcome is Outcome.RETRY
        self.progress = Progress(
            progress.num_updates + (verdict.outcome is Outcome.COMMIT),
            grids._replace(exponents=verdict.grids, calibrated=measured),
        )

    def evaluate(self, step: int, batches: Batches) -> float:
        """The mean validation loss after a step, equal on all workers; forward only, without dropout.

        Args:
            step: part of every tag.
            batches: the validation micro-batches.
        """
        num_microbatches = self._config.run.eval_microbatches
        layout = evaluation_layout(self.layout, num_microbatches)
        program = programs_of(
            layout, self.execution, self._config.layout.schedule, forward_only=True, only=self.worker
        )[self.worker]
        executor = Executor(self.worker, layout, self.compute, self.transport, self.activity, self._trace)
        self.compute.losses.clear()
        sends: list[Handle] = []
        executor.run(
            program,
            batches,
            step=step,
            attempt=0,
            sends=sends,
            before_action=lambda action: self.activity.compute("evaluate"),
            on_layer_done=lambda layer: None,
            train=False,
        )
        losses = torch.zeros(num_microbatches, dtype=torch.float64)
        for microbatch, loss in self.compute.losses.items():
            losses[microbatch] = loss
        self.activity.wait("evaluate")
        group = Group(self.transport, layout.workers, Channel.EVALUATION_LOSS)
        group.all_reduce_with(losses.view(torch.int64), torch.Tensor.add_, step=step, timeout_s=WAIT_TIMEOUT_S)
        self.transport.wait(sends, WAIT_TIMEOUT_S)
        return math.fsum(losses.tolist()) / num_microbatches

    def ballot(self) -> Ballot:
        """What this worker brings to the vote of the present attempt."""
        square_sums = []
        nonfinite = self.compute.nonfinite
        for held in self.voting_store.with_role(Role.OWNER):
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
        return Ballot(
            coverage=self.compute.coverage,
            residency=residency,
            next_residency=residency,  # planned changes of layout come with their own set of blocks
            agreement=self._agreement() if verify else 0,
            partial_sums=self._partial_sums() if verify else 0,
            next_layout=self.next_layout_hash,
            losses=dict(self.compute.losses),
            square_sums=square_sums,
            maxima=maxima,
            nonfinite=nonfinite,
            request=self._request(),
            change=self._change_hash,
        )

    def _partial_sums(self) -> int:
        """What this worker has added and sent, less what it has made totals of."""
        added = sum(accumulator.checksum for accumulator in self._accumulators.values())
        return (added + self.exchange.balance) & MASK64

    def _residency(self) -> int:
        keys = (residency_key(held.block.id, held.role, self.worker, held.version) for held in self.voting_store)
        return sum(keys) & MASK64

    def _expected_residency(self, step: int) -> int:
        if not self._config.elastic.verify:
            return 0
        total = 0
        for block in self.blocks:
            total += residency_key(block.id, Role.OWNER, self.voting_placement.owner[block.id], step - 1)
            for follower in self.voting_placement.followers[block.id]:
                total += residency_key(block.id, Role.FOLLOWER, follower, step - 1)
        return total & MASK64

    def _agreement(self) -> int:
        return sum(weight * key for _, weight, key in self.agreement_terms()) & MASK64

    def agreement_terms(self) -> list[tuple[int, int, int]]:
        """(block, weight, key) of every copy that this worker compares; weights of equal copies add up to zero."""
        terms = []
        for held in self.voting_store:
            block = held.block.id
            num_followers = len(self.voting_placement.followers[block])
            if num_followers == 0:
                continue
            weight = num_followers if held.role is Role.OWNER else -1
            assert held.gradient is not None
            key = agreement_key("gradient", block, self.step, self.attempt, run_hash(held.gradient))
            if (block + self.step) % STATE_SAMPLE_PERIOD == 0 or block in self._filled:
                for name, values in held.slots.items():
                    key += agreement_key(name, block, self.step, self.attempt, run_hash(values))
            terms.append((block, weight, key & MASK64))
        return terms

    def _apply(self, step: int, verdict: Verdict) -> None:
        """Applies a committed step to every held block that is still at the version before it."""
        skip = verdict.outcome is Outcome.SKIP
        clip = 1.0 if skip else clip_factor(verdict.norm, self._config.optimizer.grad_clip)
        rate = learning_rate(self._config.optimizer, step, self._config.run.steps)
        for held in self.store:
            if held.version == step:
                continue
            self.check()
            self._reach("apply")
            self._apply_block(held, step, clip, rate, skip=skip)
        self.exchange.publish(self.store)

    def _apply_block(self, held: HeldBlock, step: int, clip: float, rate: float, *, skip: bool) -> None:
        gradient = held.gradient
        assert gradient is not None and held.version == step - 1
        held.gradient = None
        if not skip:
            if clip != 1.0:
                gradient.mul_(clip)
            self._optimizer.update(
                held.slots,
                gradient,
                held.decay_runs,
                learning_rate=rate,
                num_updates=self.progress.num_updates,
            )
        held.version = step

    def _gather(self) -> None:
        assert self.ledger.may_write_parameters(self.step)
        self._reach("gather")
        self._sends += self.exchange.gather(self.step, self.attempt, lambda: self._reach("gather"))
        self._drain()
        self.ledger.gathered(self.step)

    def _drain(self) -> None:
        self.activity.wait_for(self._sends)
        self.transport.wait(self._sends, WAIT_TIMEOUT_S)
        self._sends.clear()

    def _before_action(self, action: Action) -> None:
        self.activity.compute(str(action))
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
