"""A step: what it is, when it is committed, and why that is safe. No torch, IO, clocks or threads.

A step takes training from the state after step k - 1 to the state after step k, on all members or on none. One
*attempt* of it is, on every worker, in this order:

1. *replicate*: base copies of some blocks begin to travel to new holders, beside all that follows;
2. RUN: forwards and backwards of the worker's program; gradients are added to exact sums, as integers;
3. REDUCE: partial sums go to the owners of blocks, mean gradients go from there to the followers;
4. *prepare*: each block that the worker owns or follows has its complete gradient, and it says so to its ledger;
5. VOTE: one all-reduce over the ballots of all workers. Its result is the *certificate*, the same for all.

If the certificate commits the step, three things follow, which no other worker has to wait for or to hear of:

6. APPLY: each copy that is still of step k - 1 takes the update, and is of step k;
7. *switch*: a planned change of layout that the vote has brought into force is taken over;
8. GATHER: parameters go from owners to those that run a layer and hold no copy of its blocks.

**What is committed when.** Until its own vote is complete a worker holds step k - 1, and changes nothing of it. It
votes only when it is prepared, and the all-reduce ends nowhere unless the ballot of every member is in it. So:

> A worker that has learned that the vote of step k passed knows that **all members** were prepared, and that all of
> them can apply k, now or later, from what they hold.

The step is committed in the instant in which the first worker has the whole certificate. No coordinator takes part; it
hears of the step afterwards. What a worker needs to apply k beside its gradients (the norm, the scale of the loss, the
grids of the next step) stands in the certificate, so one that was interrupted before its end of the vote, and is given
the certificate by a decision, comes to the same bits as one that saw it.

**Why each instant of a loss has one right outcome.** Say that a worker is lost, and the others are interrupted.

- Its ballot was not sent: no certificate can exist. Everybody holds k - 1, and tries k again.
- A survivor, or the coordinator, has the certificate: k is committed. The others are prepared, and apply it.
- Only the lost worker had it: k is tried again. What it has made of the certificate is lost with it: nobody that goes
  on has read its new parameters, because memory for them is named only after the own vote (W2), and their frames are of
  a generation in which nobody learns any more (W1, W3).

The question who has it is answered once for all, since a report is a promise to learn nothing more: how the coordinator
asks and decides is told in `elaswave.protocol.coordinator.transitions`.

**What a certificate proves**, beside the norm and the scores that it carries: every layer ran every micro-batch once;
every block has the owner and the followers that the placement says; copies are equal; no partial sum has changed on its
way; memory is as it was written; all workers go on with the same layout, placement, grids and number of updates
(`next_state`: each ballot has a hash h of them, as max(h) and max(-h), which add to 0 if all are equal). The parts are
listed in `elaswave.protocol.step.ballot`. It can say five other things than that all apply the step:

- *retry*: a grid was too coarse or could overflow. All try k again, on the grids that the certificate tells;
- *reject*: a part does not hold. All find together which copy, worker or layer is to blame
  (`elaswave.protocol.step.diagnosis`), then try again. What makes copies wrong needs a new generation; a second
  rejection without a cause that was made good ends the job, and so does at once one that would only come again;
- *skip*: a loss or gradient is not finite, and such steps are committed without an update;
- *non-finite* and *unequal*: the same where they are not, and buffers in which micro-batches disagree, end the job.

**Interrupts.** Every method that can wait is a generator of `Wait`; a driver may close it at any of these places, and
engine and links may raise out of any call (W4). So nothing that must survive is kept in local variables, and what
a vote changes is changed in one moment (`StepLoop.learn`). How a worker goes on from there is told in
`elaswave.protocol.step.machine`. The `Ledger` refuses any other order than this one.

The rules of a worker, which methods, tests and planted bugs name:

- **W1** *An answer is a promise.* A worker moves its data plane to the new generation, and only then reports. Until the
  decision it learns nothing, begins nothing and discards nothing.
- **W2** *Parameters wait for the own vote.* A worker names the memory in which GATHER's frames arrive only after its
  vote.
- **W3** *Every frame carries generation, step and attempt*, and is used in no other.
- **W4** *An interruption ends what a worker does where it stands.* What must survive it is kept outside of the
  generator; what a vote changes is changed in one moment, without a place to be interrupted.
- **W5** *Copies carry versions.* APPLY updates copies one by one, on a device some at once, and moves their versions
  with that; it can be interrupted between two such batches. Catching up applies the decision's step to exactly those
  that are still at the step before; then missing parameters are delivered, and until they have arrived the worker does
  not report that it has them. A worker that reads the decision's vote in another way than those that completed it (they
  read that it commits, it reads that it does not, or the other way round) ends the job with a `StateError`. In the same
  way a worker reports that it has gone back to a checkpoint only once it has loaded all of it; if it is interrupted
  before, the next decision sends it back again.
- **W6** *Re-replication.* All workers choose the same new followers by themselves. A base copy travels in an attempt,
  gets the gradient of the step, and counts from the commit of that attempt's vote; before it, it is not reported.
- **W7** *A layout changes by vote*, and blocks move before it does: rules M of ``docs/protocol.md``.
- **W8** *A change is held between two steps*, once its links are there. A worker leaves its generation without it.
- **W9** *Reports are kept.* The member with the lowest id sends the report of each step; after a loss the next one
  sends those that the coordinator has not published.
- **W10** *The end.* A worker says that it has made all steps once its last part of a checkpoint is written, and stays
  until the coordinator ends the job.
- **W11** *A link that has ended within a generation is told*, if frames of that generation were sent over it, as soon
  as the worker would block, whichever peer it then waits for: the other side may never have read them, and a link that
  is made again does not bring them back. A worker that waits for the coordinator, between steps or after the last one,
  goes on looking, and accepts links: what it sent last may be all that another one waits for.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

import msgspec
import numpy as np

from elaswave.errors import NonFiniteError, UnequalBufferError, VoteError
from elaswave.hashing import key64
from elaswave.protocol.messages import InForce, LayoutChange
from elaswave.protocol.step.ballot import (
    NOTHING_COUNTED,
    UNKNOWN_MICROBATCH,
    Ballot,
    BufferTensor,
    Expected,
    GridState,
    NonFinite,
    Request,
    Verdict,
    VoteOutcome,
    VoteShape,
    encode_certificate,
    expected_coverage,
    expected_residency,
    pairs_of,
    read_verdict,
)
from elaswave.protocol.step.blocks import PlannedChange, WorkerBlocks
from elaswave.protocol.step.diagnosis import diagnose
from elaswave.protocol.step.engine import C, Committed, FrameKind, Pause, Ports, TrainingProgress
from elaswave.protocol.step.execution import Execution, Life
from elaswave.protocol.step.ledger import HeldCopies, Ledger
from elaswave.protocol.step.salvage import Keep, Partial, keep_of
from elaswave.protocol.step.soundness import CopyChecks

MAX_REJECTED_ATTEMPTS = 2
"""A step whose certificate fails this often is not tried again, unless what was wrong has been made good."""
PROVES_COPIES = frozenset(("agreement", "residency", "layout and grids"))
"""Parts of a certificate that together say that all copies are where all workers take them to be, and equal."""


class StepLoop(Generic[C]):
    """Runs the steps of one worker, in the order that is the contract, over the parts that it makes.

    Args:
        ports: what the worker stands on.
        ledger: keeps the order of commits.
        in_force: layout, placement and execution parameters of the beginning.
        copies: the blocks that are held at the last committed step, by block.
        progress: where training stands.
        request: is asked what this worker asks for when it fills its ballot.
    """

    execution_class: type[Execution[C]] = Execution
    blocks_class: type[WorkerBlocks[C]] = WorkerBlocks
    planned_class: type[PlannedChange] = PlannedChange
    checks_class: type[CopyChecks[C]] = CopyChecks

    def __init__(
        self,
        ports: Ports[C],
        ledger: Ledger,
        in_force: InForce,
        copies: Mapping[int, C],
        progress: TrainingProgress,
        request: Callable[[], Request] = lambda: Request.NONE,
    ) -> None:
        self.worker, self.terms, self.engine, self.links, self.observer, *_ = ports
        self.ledger = ledger
        held = HeldCopies(copies, ledger.step)
        self.execution = self.execution_class(ports, in_force.layout, in_force.execution, held.all)
        self.blocks = self.blocks_class(self.execution, in_force.placement, held)
        self.planned = self.planned_class(self.worker, self.terms, self.engine)
        self.checks = self.checks_class(self.blocks, ledger)
        self.progress = progress
        self.request = request
        self.known_vote: tuple[int, int, Verdict] | None = None
        """Step, attempt and verdict of the newest vote that has been taken over."""
        self.determinism_hashes: dict[int, int] = {}
        """That all workers have agreed on in votes, by place."""
        self.sums: Partial | None = None
        """What the engine's sums are of, without what is in them; None for nothing."""
        self.kept_next: tuple[Partial, ...] = ()
        """What all workers keep, by the newest decision."""
        self.kept_for = (0, 0)
        """The step and the attempt for which."""
        terms = self.terms
        self._vote_shape = _shape(
            terms.num_microbatches,
            terms.num_tensors,
            len(terms.metrics),
            1 + terms.num_layers,
            tuple(sorted(terms.uses.items())),
            terms.buffers,
            terms.accumulator_bits,
        )

    # --------------------------------------------------------------------------------------------------------- a step

    def run_step(self, step: int, attempt: int = 1) -> Life[Committed | str]:
        """Runs one step until it is committed, or until copies are found wrong that a new generation must make good.

        Args:
            step: its number, from 1.
            attempt: number of its next attempt.
        Returns:
            What is to be told of it; or what is wrong.
        Raises:
            StateError: this worker's memory changes again and again.
            NonFiniteError: a loss or gradient is not finite, and such steps are not skipped.
            VoteError: the certificate has failed twice.
            UnequalBufferError: micro-batches have left different whole numbers in a buffer.
        """
        self.observer.step_begins(step, attempt)
        retries: list[str] = []
        num_rejected = 0
        while True:
            verdict = yield from self._try_step(step, attempt)
            if verdict.commits:
                break
            if verdict.outcome is VoteOutcome.NON_FINITE:
                assert verdict.nonfinite is not None
                raise NonFiniteError(
                    f"{self.describe_nonfinite(verdict.nonfinite)}. Lower optimizer.lr, lengthen "
                    "optimizer.warmup_steps, check the data, or set run.skip_nonfinite=true to commit such steps "
                    "without an update"
                )
            if verdict.outcome is VoteOutcome.UNEQUAL:
                raise UnequalBufferError(self.describe_unequal(verdict.unequal))
            reason = verdict.reason
            if verdict.outcome is VoteOutcome.REJECT:
                culprits, found = yield from diagnose(self, verdict.failed)
                yield Pause.SENT  # the others need it for the same finding, and this worker may be about to end
                if not {"environment", "layers"}.isdisjoint(verdict.failed):
                    # Another attempt would fail as this one has: the same machines would compute it.
                    raise VoteError(
                        f"step {step} cannot be committed, since workers do not compute the same bits: {culprits}. All "
                        "machines of a job need processors of one kind and the same libraries, and a layer must give "
                        f"the same bits in every process. The state of step {step - 1} is unchanged"
                    )
                reason = f"{reason} ({culprits})"
                # First: `note_unsound` would count what code has written as a fault of this worker's memory.
                self.checks.refuse_code(found)
                self.checks.note_unsound(found)
                # Only now: it waits, and if it is interrupted the report must already say what is wrong (K2).
                yield from self.checks.fetch_constants(found)
                if found.needs_copies:
                    return f"step {step} was refused: {reason}"
                # What has changed in memory is made good by now; what has not a cause may come again for ever.
                num_rejected += not found.changes
                if num_rejected == MAX_REJECTED_ATTEMPTS:
                    raise VoteError(
                        f"step {step} cannot be committed, attempt {attempt}: {reason}. The state of step "
                        f"{step - 1} is unchanged; resume from the last checkpoint, and look at the hardware and "
                        "the log of the workers that are named"
                    )
            retries.append(reason)
            attempt += 1
        self.observer.enter("apply")
        self.observer.doing("apply", computing=True)
        yield from self.apply(step, verdict)
        self.observer.leave("apply")
        self.observer.enter("gather")
        self.observer.doing("gather", computing=False)
        # Between APPLY and GATHER: new layers begin with updated masters, and GATHER serves those that run them (M5).
        if self.planned.coming is not None:
            self.switch(self.planned.coming)
        yield from self.gather()
        self.observer.leave("gather")
        return self.committed(step, attempt, verdict, tuple(retries))

    def _try_step(self, step: int, attempt: int) -> Life[Verdict]:
        """Makes one attempt: all up to the vote, and what is learned from it."""
        self.ledger.begin(step, attempt)
        self.execution.step, self.execution.attempt = step, attempt
        self.observer.began()
        yield Pause.SENT  # of the attempt before: the memory that this one writes may still be on its way
        # The placement that this attempt votes under comes first: what is sent and received follows from it (W6). Sums
        # are begun before receives are posted, since the engine then drops the slots of the attempt before.
        self.replicate()
        self.begin_sums()
        self.blocks.post_receives()  # before RUN, in which partial sums of peers may arrive already
        self.observer.enter("run")
        yield from self.execution.run(self.blocks.send_partials)
        self.observer.leave("run")
        self.observer.enter("reduce")
        yield from self.blocks.reduce()
        self.observer.leave("reduce")
        self.ledger.prepare()  # from here on the others may count on this worker: it has all that APPLY needs
        self.observer.enter("vote")
        verdict = yield from self.vote()
        yield Pause.SENT  # also REDUCE's buffers are free again now
        self.observer.leave("vote")
        return verdict

    def replicate(self) -> None:
        """Begins to give blocks new holders, as far as the budget of the attempt goes."""
        self.blocks.replicate(self.planned.moving, self.planned.budget.elements, self.progress.num_updates)

    def committed(
        self, step: int, attempt: int, verdict: Verdict, retries: tuple[str, ...], *, was_run: bool = True
    ) -> Committed:
        """Says what is to be told of a committed step."""
        assert self.ledger.evidence is not None
        nonfinite = verdict.nonfinite if verdict.outcome is VoteOutcome.SKIP else None
        return Committed(
            step,
            attempt,
            verdict.loss,
            verdict.norm,
            nonfinite,
            verdict.request,
            self.ledger.evidence,
            verdict.means.by_name(self.terms.metrics),
            retries,
            was_run,
        )

    # ------------------------------------------------------------------------------------------------------- the sums

    def begin_sums(self) -> None:
        """Begins the sums of the attempt: empty, or with what a decision says that workers keep (S3)."""
        step, attempt = self.execution.step, self.execution.attempt
        # Only in the attempt that the decision is about: one that follows it is on other grids, or was rejected (S5).
        self.execution.kept = self.kept_next if (step, attempt) == self.kept_for else ()
        kept = self.execution.kept
        # Sums that are kept stay as old as the attempt that began them: a vote since then makes them void (S5).
        root = next((partial.root for partial in kept if partial.worker == self.worker), attempt)
        keep = self.keep() if kept else None
        self.sums = None  # an interrupt within the next call leaves sums of which nothing can be said
        self.engine.begin(step, self.progress.grids.exponents, keep)
        self.sums = Partial(
            worker=self.worker,
            step=step,
            root=root,
            num_microbatches=self.execution.layout.num_microbatches,
            can_be_kept=self.terms.salvage,
        )

    def keep(self) -> Keep | None:
        """Finds what this worker keeps of an earlier attempt."""
        return keep_of(self.worker, self.execution.kept, self.execution.layout, self.terms.lowest_trained)

    def partial(self) -> Partial | None:
        """Tells what this worker has of the step that it was trying, for a report (S2)."""
        if self.sums is None:
            return None
        found = self.engine.unfinished()
        return msgspec.structs.replace(
            self.sums,
            can_be_kept=self.sums.can_be_kept and found.can_be_kept,
            rows=found.rows,
            losses=f"{found.losses:x}",
            in_flight=found.in_flight,
        )

    # ----------------------------------------------------------------------------------------------------------- VOTE

    def vote(self) -> Life[Verdict]:
        """Does VOTE: merges the ballots in one all-reduce; a worker that has the whole certificate has learned the
        result."""
        self.observer.point("vote")
        self.observer.doing("vote", computing=False)
        yield Pause.MOMENT
        vector = self._vote_shape.vector_of(self.ballot())
        vector = list((yield from self.execution.all_reduce(FrameKind.VOTE, vector, self._vote_shape.merge)))
        # Before `learn`, which changes what a vote is judged by: grids, number of updates and the budget of copies.
        verdict = self.judge(vector, self.execution.step)
        self.learn(vector, verdict)
        if verdict.outcome is VoteOutcome.REJECT:
            self.checks.note_changes()  # in the same moment: whatever follows, a report must tell of them (K2)
            if PROVES_COPIES.isdisjoint(verdict.failed):  # what has just come is what its owner has written
                self.blocks.count_arriving()
        return verdict

    def ballot(self) -> Ballot:
        """Fills what this worker brings to the vote of the present attempt."""
        measured = self.engine.measured()
        nonfinite = measured.nonfinite
        held = self.blocks.voting_copies
        square_sums = np.array(self.engine.square_sums(held.owned), np.float64)
        # Infinite or nan. The norm's limbs take finite numbers only; a finding with a micro-batch says more.
        if len(places := np.flatnonzero(~np.isfinite(square_sums))):
            layer = self.execution.layout.layer_of(held.owned[places[0]].block.layer)
            nonfinite = nonfinite or NonFinite(UNKNOWN_MICROBATCH, layer)
            square_sums[places] = 0.0
        residency = agreement = 0
        self.checks.changes = ()
        if self.terms.verify:
            # Before `compared`, for which the engine gives the hashes that it had when it looked last.
            self.checks.look(held)
            residency = held.residency(self.worker, len(self.terms.blocks))
            agreement = self.checks.compared(held).sum
        return Ballot(
            coverage=measured.coverage,
            residency=residency,
            agreement=agreement,
            partial_sums=measured.partial_sums if self.terms.verify else 0,
            next_state=self.next_state,
            scores=measured.scores,
            square_sums=square_sums.tolist(),
            maxima=measured.maxima,
            writes=measured.writes,
            nonfinite=nonfinite,
            request=self.request(),
            num_changed=len(self.checks.changes),
            change=self.planned.hash,
            next_residency=self.planned.residency(held),
            duration_us=measured.duration_us,
            determinism_hashes=pairs_of(self.determinism_hashes, measured.determinism_hashes),
        )

    @property
    def progress_hash(self) -> int:
        """Hashes grids and number of updates, which every worker must go into a vote with, to 62 bits."""
        return _progress_hash(self.progress)

    @property
    def next_state(self) -> int:
        """Hashes all that a vote needs to be the same on all workers beside the copies, to 62 bits."""
        return key64(self.blocks.agreement_hash, self.progress_hash, self.planned.budget.hash) >> 2

    def judge(self, vector: Sequence[int], step: int) -> Verdict:
        """Reads a vote on the present grids; a worker that did not see it come about reads the same."""
        terms, layout = self.terms, self.execution.layout
        expected = Expected(
            num_workers=len(layout.workers),
            coverage=expected_coverage(terms.num_layers, layout.num_microbatches, layout.shared),
            residency=expected_residency(self.blocks.voting, step) if terms.verify else 0,
            next_state=self.next_state,
            num_microbatches=layout.num_microbatches,
        )
        return _judge(tuple(vector), self._vote_shape, expected, self.progress.grids, terms.skip_nonfinite)

    def learn(self, vector: Sequence[int], verdict: Verdict) -> None:
        """Takes over the own vote, which is complete. One moment: what is known of the vote and what follows from it
        change together, and nothing in between may raise an interrupt."""
        execution, planned = self.execution, self.planned
        # Before the ledger: the evidence names the change that comes into force with this very vote.
        planned.learn(verdict, execution.step, copied=bool(self.blocks.traffic.changed))
        evidence = self.ledger.learn(
            encode_certificate(vector),
            commits=verdict.commits,
            change=None if planned.coming is None else planned.coming.number,
            asks_checkpoint=verdict.asks_checkpoint,
        )
        self.known_vote = (execution.step, execution.attempt, verdict)
        if verdict.commits:
            self.blocks.count_arriving()
            if planned.coming is not None:
                self.blocks.take_placement(planned.coming.placement)
        self.take(verdict)
        self.observer.learned(evidence)

    def take(self, verdict: Verdict) -> None:
        """Takes over what a vote says about grids and the number of updates."""
        if verdict.outcome is not VoteOutcome.REJECT:
            self.determinism_hashes.update(verdict.determinism_hashes.known)
        copied = bool(self.blocks.traffic.changed)
        self.planned.budget = self.planned.budget.after(
            verdict.duration_us, copied=copied, bounds=self.terms.move_bounds
        )
        progress, grids = self.progress, self.progress.grids
        # An attempt that was rejected has measured nothing that could be trusted.
        measured = grids.calibrated or verdict.outcome is VoteOutcome.RETRY
        self.progress = TrainingProgress(
            progress.num_updates + (verdict.outcome is VoteOutcome.COMMIT),
            grids._replace(exponents=verdict.grids, calibrated=measured),
        )

    # ------------------------------------------------------------------------------------------ APPLY, switch, GATHER

    def apply(self, step: int, verdict: Verdict) -> Life[None]:
        """Does APPLY: updates every held copy that is still at the version before (W5). An interrupt takes effect
        between two batches of copies; the versions of those before it are moved."""
        self.engine.committed(step, verdict.loss, updates=verdict.outcome is not VoteOutcome.SKIP)
        # Others are of the step already: an APPLY that was interrupted goes on here after the decision (W5).
        copies = self.blocks.copies
        for batch in self.engine.batches(copies.not_at(step)):
            yield Pause.MOMENT
            self.observer.point("apply")
            self.apply_batch(batch, step, verdict)
        copies.version, copies.other_versions = step, {}
        # All of them: some may have been updated before an interrupt, and not published. None that was arriving when an
        # attempt was interrupted: it may never have come.
        self.engine.publish(copies.all)

    def apply_batch(self, batch: Sequence[C], step: int, verdict: Verdict) -> None:
        """Updates some copies."""
        copies = self.blocks.copies
        assert copies.version == step - 1, f"copies are of step {copies.version} when {step} is applied"
        # A skipped step moves versions too, since it is committed; its gradients are only forgotten.
        norm = None if verdict.outcome is VoteOutcome.SKIP else verdict.norm
        self.engine.apply(batch, step, norm, verdict.means.scale, self.progress.num_updates, verdict.written)
        # In the same moment as the update (W4): a copy that has it and does not say so would be updated once more.
        copies.other_versions.update((copy.block.id, step) for copy in batch)

    def switch(self, change: LayoutChange) -> None:
        """Brings the next layout into force, whose owners serve GATHER (M5). What is not held here comes with it."""
        self.planned.coming = None
        copies = self.blocks.copies
        new = self.execution.use_layout(change.layout, change.execution, copies.all)
        # After the layout: whom GATHER serves follows from both.
        self.blocks.use_placement(self.blocks.placement)
        self.planned.restart_budget()
        self.engine.publish(copy for copy in copies.all if copy.block.layer in new)  # APPLY did the others
        self.observer.switched()

    def gather(self) -> Life[None]:
        """Does GATHER: sends and receives parameters, and notes then that those here are of the step."""
        step = self.execution.step
        assert self.ledger.may_write_parameters(step)
        yield from self.blocks.gather()
        self.ledger.gathered(step)

    # ------------------------------------------------------------------------------------------------------ for people

    def describe_unequal(self, tensors: Sequence[int]) -> str:
        """Says of buffers of whole numbers that micro-batches do not agree in them."""
        names = ", ".join(map(self.terms.tensor_name, tensors))
        return (
            f"step {self.execution.step}: micro-batches have left different whole numbers in the buffers {names}. All "
            "micro-batches of a step begin with the same buffers, and a buffer of whole numbers becomes what all of "
            "them have left in it. Make it a floating-point buffer (it becomes the mean), or register it with "
            "persistent=False (every micro-batch begins with the built value)"
        )

    def describe_nonfinite(self, nonfinite: NonFinite) -> str:
        """Makes a clause that names what was not finite in the present step, and where."""
        step = self.execution.step
        if nonfinite == NOTHING_COUNTED:
            return f"the loss's counts add up to 0 in step {step}: no target of it is one that counts"
        is_loss = nonfinite.layer == self.terms.num_layers
        layer = nonfinite.layer - 1 if is_loss else nonfinite.layer
        place = f"layer {layer} ({self.terms.layer_name(layer)})"
        what = f"the loss, after {place}," if is_loss else f"a gradient of {place}"
        known = nonfinite.microbatch != UNKNOWN_MICROBATCH
        where = f"micro-batch {nonfinite.microbatch}" if known else "the sum over micro-batches"
        return f"{what} is not finite in step {step}, {where}"


@functools.lru_cache(maxsize=64)
def _shape(
    num_microbatches: int,
    num_tensors: int,
    num_metrics: int,
    num_determinism_hashes: int,
    uses: tuple[tuple[int, int], ...],
    buffers: tuple[BufferTensor, ...],
    accumulator_bits: int,
) -> VoteShape:
    return VoteShape(
        num_microbatches,
        num_tensors,
        num_metrics,
        num_determinism_hashes,
        uses=dict(uses),
        buffers=buffers,
        accumulator_bits=accumulator_bits,
    )


@functools.lru_cache(maxsize=64)
def _progress_hash(progress: TrainingProgress) -> int:
    grids = progress.grids
    return key64("progress", progress.num_updates, grids.calibrated, *grids.exponents) >> 2


@functools.lru_cache(maxsize=64)  # in a simulation all workers read the same vote in one process
def _judge(
    vector: tuple[int, ...], shape: VoteShape, expected: Expected, grids: GridState, skip_nonfinite: bool
) -> Verdict:
    return read_verdict(vector, shape, expected, grids, skip_nonfinite=skip_nonfinite)
