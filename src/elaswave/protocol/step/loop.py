"""The order of a step: re-replicate, RUN, REDUCE, prepare, VOTE, APPLY, switch, GATHER, and another attempt where the
vote says so. No torch, IO, clocks or threads.

The order is the contract, and the `Ledger` refuses any other. Until a worker's own vote has passed it holds step k-1
and changes no state; from then on step k is committed for all, because the vote can pass only when every worker is
prepared. An interrupt leaves a step where it is; `protocol.worker` says how it goes on from there.

Every method that can wait is a generator of `Wait`. The numbers W1, W2, ... are those of ``docs/protocol.md``.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from elaswave.blocks.placement import Placement, Role, holders_of_layers
from elaswave.errors import NonFiniteError, StateError, UnequalBufferError, VoteError
from elaswave.hashing import MASK64, key64
from elaswave.protocol.environment import pairs_of
from elaswave.protocol.messages import LayoutChange
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
    agreement_key,
    encode_certificate,
    expected_coverage,
    expected_residency,
    judge,
    residency_of,
)
from elaswave.protocol.step.diagnosis import diagnose, differing
from elaswave.protocol.step.engine import (
    C,
    Change,
    Committed,
    Engine,
    FrameKind,
    JobTerms,
    Key,
    Links,
    Memory,
    Pause,
    StepObserver,
    TrainingProgress,
)
from elaswave.protocol.step.execution import Execution, Life
from elaswave.protocol.step.ledger import Ledger
from elaswave.protocol.step.moves import CopyBudget, held_keys, next_placement, num_in_place
from elaswave.protocol.step.position import COMPARE
from elaswave.protocol.step.salvage import Keep, Partial, keep_of
from elaswave.protocol.step.soundness import Soundness, describe, judge_copies
from elaswave.protocol.step.traffic import Shipment, Traffic, agreement_hash, traffic_of
from elaswave.types import ExecutionParameters, Layout, struct_hash

STATE_SAMPLE_PERIOD = 16
"""The optimizer's states of each block are compared between its copies once in this many steps."""
MAX_REJECTED_ATTEMPTS = 2
"""A step whose certificate fails this often is not tried again, unless what was wrong has been made good."""
PROVES_COPIES = frozenset(("agreement", "residency", "layout and grids"))
"""Parts of a certificate that together say that all copies are where all workers take them to be, and equal."""
MAX_CHANGES = 3
"""A worker whose memory changes this often within `CHANGES_STEPS` ends itself: it would do so again."""
CHANGES_STEPS = 100


class StepLoop(Execution[C]):
    """Runs steps of one worker.

    Args:
        worker, terms, engine, links, observer, layout, execution, copies: as of `Execution`.
        ledger: keeps the order of commits.
        placement: in force.
        progress: where training stands.
        request: read when this worker fills its ballot.
    """

    traffic_of: Callable[..., Traffic] = staticmethod(traffic_of)

    def __init__(
        self,
        worker: int,
        terms: JobTerms,
        engine: Engine[C],
        links: Links,
        observer: StepObserver,
        ledger: Ledger,
        *,
        layout: Layout,
        execution: ExecutionParameters,
        placement: Placement,
        copies: Mapping[int, C],
        progress: TrainingProgress,
        request: Callable[[], Request] = lambda: Request.NONE,
    ) -> None:
        super().__init__(worker, terms, engine, links, observer, layout, execution, copies)
        self.ledger = ledger
        self.arriving: dict[int, C] = {}
        """Base copies on their way in: they count once a vote has passed with them."""
        self.placement = placement
        self.progress = progress
        self.held_change: LayoutChange | None = None
        """The planned change that is held, and told in every ballot until it is adopted (M2)."""
        self.moving: LayoutChange | None = None
        """The one that all members have adopted: blocks move to those that will hold them (M4)."""
        self.coming: LayoutChange | None = None
        """The one that has come into force with the vote of the step in hand, until its GATHER (M5)."""
        self.budget = CopyBudget(terms.move_elements)
        self.request = request
        self.sums: Partial | None = None
        """What the engine's sums are of, without what is in them; None for nothing."""
        self.kept_next: tuple[Partial, ...] = ()
        """What all workers keep, by the newest decision."""
        self.kept_for = (0, 0)
        """The step and the attempt for which."""
        self._vote_shape = _shape(
            terms.num_microbatches,
            terms.num_tensors,
            len(terms.metrics),
            1 + terms.num_layers,
            tuple(sorted(terms.uses.items())),
            terms.buffers,
            terms.accumulator_bits,
        )
        self.canaries: dict[int, int] = {}
        """That all workers have agreed on in votes, by place."""
        self.changes: Sequence[Change] = ()
        """In this worker's memory, as they were found for the newest ballot."""
        self.loaded_step = ledger.step
        """The newest step at which all state was read from a checkpoint, or made from the seed."""
        self.wrong: frozenset[tuple[int, int]] = frozenset()
        """(block, worker) of copies that are known to be wrong; until a decision."""
        self.proven: int | None = None
        """Where copies are wrong, until a decision: the newest step of which a checkpoint can be trusted."""
        self._changed_at: list[int] = []
        """Steps of the newest votes, or looks, that have found changes in this worker's memory."""
        self._unsound_at: list[int] = []
        """The step that was refused for wrong copies last, as often as it was."""
        self._change_hash = 0
        """Of the held change; 0 for none."""
        self.known_vote: tuple[int, int, Verdict] | None = None
        """Step, attempt and verdict of the newest vote that has been taken over."""
        self._routed: tuple[Layout, Placement, Placement] | None = None
        """Layout, placement and next placement of which `traffic` is."""
        self._is_complete = False
        """Whether what `traffic` is of has been found to lack no follower. Of no placement by itself: `next_placement`
        gives the same object once more when the same copy is lost again, while the traffic is that of its refill."""
        self._use_placement(placement)

    # ------------------------------------------------------------------------------------------- layout and placement

    def _use_placement(self, voting: Placement) -> None:
        """The placement under which the next attempt votes."""
        self.voting = voting
        before, self._routed = self._routed, (self.layout, self.placement, voting)
        if before is None or any(old is not new for old, new in zip(before, self._routed, strict=True)):
            self._is_complete = False
            self.agreement_hash = agreement_hash(self.layout, voting)
            self.traffic: Traffic = self.traffic_of(self.worker, self.terms.blocks, self.layout, self.placement, voting)

    @property
    def progress_hash(self) -> int:
        """62-bit hash of grids and number of updates, which every worker must go into a vote with."""
        return _progress_hash(self.progress)

    @property
    def next_state(self) -> int:
        """62-bit hash of all that a vote needs to be the same on all workers beside the copies."""
        return key64(self.agreement_hash, self.progress_hash, self.budget.hash) >> 2

    @property
    def voting_copies(self) -> dict[int, C]:
        """The copies that this worker votes with, by block; ascending."""
        return dict(sorted({**self.copies, **self.arriving}.items())) if self.arriving else self.copies

    def hold(self, change: LayoutChange | None) -> None:
        """Holds a planned change, whose links are there, until it is adopted; None forgets all changes (W8, M7)."""
        self.held_change, self._change_hash = change, 0
        if change is None:
            self.moving = self.coming = None  # of one that is in force the decision knows
            self.engine.forget_layout()
        else:
            content = (struct_hash(change.layout), struct_hash(change.execution), struct_hash(change.placement))
            self._change_hash = key64("change", change.number, *content) >> 2

    def switch(self, change: LayoutChange) -> None:
        """The next layout is in force, and its owners serve GATHER (M5). What is not held here comes with GATHER."""
        self.coming = None
        new = self._use_layout(change.layout, change.execution)
        self._use_placement(self.placement)
        self.budget = CopyBudget(self.terms.move_elements)
        self.engine.publish(copy for copy in self.copies.values() if copy.block.layer in new)  # APPLY did the others
        self.observer.switched()

    def _take_placement(self, placement: Placement) -> None:
        """A placement is in force. Copies that it does not need are dropped: APPLY spares itself their update (M6)."""
        self.placement, holders = placement, placement.holders
        self.copies = {block: copy for block, copy in self.copies.items() if self.worker in holders(block)}
        self._take_roles()

    def _take_roles(self) -> None:
        owners = self.placement.owner
        for block, copy in self.copies.items():
            copy.role = Role.OWNER if owners[block] == self.worker else Role.FOLLOWER

    @property
    def move_progress(self) -> tuple[int, int]:
        """Of the adopted change: how many copies are in their places, and how many there will be; (0, 0) if none is."""
        return (0, 0) if self.moving is None else num_in_place(self.placement, self.moving.placement)

    # --------------------------------------------------------------------------------------------------------- a step

    def run_step(self, step: int, attempt: int = 1) -> Life[Committed | str]:
        """Runs one step until it is committed, or until copies are found wrong that a new epoch must make good.

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
                    raise VoteError(
                        f"step {step} cannot be committed, since workers do not compute the same bits: {culprits}. All "
                        "machines of a job need processors of one kind and the same libraries, and a layer must give "
                        f"the same bits in every process. The state of step {step - 1} is unchanged"
                    )
                reason = f"{reason} ({culprits})"
                self.refuse_code(found)
                self.note_unsound(found)
                yield from self.fetch_constants(found)
                if found.needs_copies:
                    return f"step {step} was refused: {reason}"
                num_rejected += not found.changes
                if num_rejected == MAX_REJECTED_ATTEMPTS:
                    raise VoteError(
                        f"step {step} cannot be committed, attempt {self.attempt}: {reason}. The state of step "
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
        if self.coming is not None:
            self.switch(self.coming)
        yield from self.gather()
        self.observer.leave("gather")
        return self.committed(step, attempt, verdict, tuple(retries))

    def committed(
        self, step: int, attempt: int, verdict: Verdict, retries: tuple[str, ...], *, was_run: bool = True
    ) -> Committed:
        """What is to be told of a committed step."""
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

    def _try_step(self, step: int, attempt: int) -> Life[Verdict]:
        """One attempt: all up to the vote, and what is learned from it."""
        self.ledger.begin(step, attempt)
        self.step, self.attempt = step, attempt
        self.observer.began()
        yield Pause.SENT
        self.replicate()
        self.begin_sums()
        self.post_receives()
        self.observer.enter("run")
        yield from self.run(self.send_partials)
        self.observer.leave("run")
        self.observer.enter("reduce")
        yield from self.reduce()
        self.observer.leave("reduce")
        self.ledger.prepare()
        self.observer.enter("vote")
        verdict = yield from self.vote()
        yield Pause.SENT  # also REDUCE's buffers are free again now
        self.observer.leave("vote")
        return verdict

    def begin_sums(self) -> None:
        """The sums of the attempt begin: empty, or with what a decision says that workers keep (S3)."""
        is_redo = (self.step, self.attempt) == self.kept_for
        self.kept = self.kept_next if is_redo else ()
        root = next((partial.root for partial in self.kept if partial.worker == self.worker), self.attempt)
        keep = self.keep()
        self.sums = None
        self.engine.begin(self.step, self.progress.grids.exponents, keep)
        self.sums = Partial(
            worker=self.worker,
            step=self.step,
            root=root,
            num_microbatches=self.layout.num_microbatches,
            can_be_kept=self.terms.salvage,
        )

    def keep(self) -> Keep | None:
        """What this worker keeps of an earlier attempt."""
        return keep_of(self.worker, self.kept, self.layout, self.terms.lowest_trained)

    def partial(self) -> Partial | None:
        """What this worker has of the step that it was trying, for a report (S2)."""
        if self.sums is None:
            return None
        found = self.engine.unfinished()
        return msgspec.structs.replace(
            self.sums,
            can_be_kept=self.sums.can_be_kept and found.can_be_kept,
            rows=found.rows,
            losses=f"{found.losses:x}",
            flights=found.flights,
        )

    # ------------------------------------------------------------------------------------------- copies that are wrong

    def refuse_code(self, found: Soundness) -> None:
        """What several workers have found changed in one and the same block was written by code.

        Raises:
            VoteError: it was.
        """
        for block, workers in found.of_code.items():
            layer = self.terms.layer_name(self._layer_of(self.terms.blocks[block].layer))
            raise VoteError(
                f"step {self.step} cannot be committed: parameters or buffers of layer {layer} (in block {block}) were "
                f"written on workers {list(workers)} at once, and not by the optimizer. A forward, a backward or a "
                "hook must not write them, nor `.data` or a numpy array that shares their memory. The state of step "
                f"{self.step - 1} is unchanged"
            )

    def is_sound(self) -> bool:
        """Whether nothing has changed in this worker's memory since it was written, outside of a vote. If something
        has, a new epoch must make it good.

        Raises:
            StateError: it changes again and again, or is of what only others have now.
        """
        self.changes = self.engine.changes(self.copies.values(), given_up=False) if self.terms.verify else ()
        self.note_changes()
        if any(change.memory is Memory.CONSTANT for change in self.changes):
            raise StateError(f"{self.describe_changes()}: they cannot be made anew here")
        if self.changes:
            self._count_changes()
        return not self.changes

    def compare_at_rest(self, step: int) -> Life[str]:
        """Compares all copies of the state between two steps, before anything is told of it (K4).

        Args:
            step: the committed one that they are of.
        Returns:
            What is wrong; nothing if all is well.
        Raises:
            StateError: as of `is_sound`.
            VoteError: as of `note_unsound`.
        """
        if not self.terms.verify:
            return ""
        self.step, self.attempt = step, 0
        self.observer.doing(COMPARE, computing=True)
        yield Pause.MOMENT
        if not self.is_sound():
            return self.describe_changes()
        self.observer.doing(COMPARE, computing=False)
        differences = yield from differing(self, at_rest=True)
        found = judge_copies(self.placement, (), differences)
        self.note_unsound(found)
        yield Pause.SENT
        if not found.needs_copies:
            return ""
        return "; ".join(describe(self.placement, (), differences, self.layer_of_change)[:MAX_CHANGES])

    def note_changes(self) -> None:
        """Takes down, for the next report, what has changed in this worker's memory."""
        found = judge_copies(self.placement, [(self.worker, each) for each in self.changes], ())
        self._note_wrong(found)

    def note_unsound(self, found: Soundness) -> None:
        """Takes down, for the next report, which copies are wrong.

        Raises:
            StateError: this worker's memory changes again and again.
            VoteError: copies are wrong again and again, though they were made good.
        """
        self._note_wrong(found)
        if self.changes:
            self._count_changes()
        if found.needs_copies:
            self._unsound_at = [at for at in self._unsound_at if at == self.step] + [self.step]
            if len(self._unsound_at) > MAX_CHANGES * len(self.layout.workers):
                raise VoteError(f"step {self.step} cannot be committed: copies are wrong again and again")

    def _note_wrong(self, found: Soundness) -> None:
        if not found.needs_copies:
            return
        self.wrong |= found.wrong
        self.ledger.parameters_step = -1
        # What was read in this attempt was written after the vote before, which has proven what was there then.
        since = STATE_SAMPLE_PERIOD + 1 if any(each.what == "state" for each in found.differences) else 2
        proven = max(self.loaded_step, self.step - since)
        self.proven = proven if self.proven is None else min(proven, self.proven)

    def _count_changes(self) -> None:
        self._changed_at = [at for at in self._changed_at if self.step - at < CHANGES_STEPS] + [self.step]
        if len(self._changed_at) >= MAX_CHANGES:
            raise StateError(
                f"the memory of worker {self.worker} has changed {MAX_CHANGES} times within {CHANGES_STEPS} steps, by "
                f"itself or by code that writes parameters or buffers: {self.describe_changes()}. Look at the hardware "
                "of its machine"
            )

    def describe_changes(self) -> str:
        """What has changed in this worker's memory, for people."""
        changes = [(self.worker, change) for change in self.changes]
        return "; ".join(describe(self.placement, changes, (), self.layer_of_change)[:MAX_CHANGES])

    def layer_of_change(self, change: Change) -> str:
        """Name of the layer that a change is of."""
        is_block = change.memory in (Memory.WORKING, Memory.COPY)
        return self.terms.layer_name(
            self._layer_of(self.terms.blocks[change.place].layer if is_block else change.place)
        )

    def fetch_constants(self, found: Soundness) -> Life[None]:
        """Those that have lost constants, and cannot make them again, get them from another worker.

        Raises:
            StateError: no other worker has this one's.
        """
        missing = []
        for layer, worker, source in found.sources(holders_of_layers(self.layout)):
            if self.worker == source:
                self.links.send(self.key(FrameKind.CONSTANTS, layer, 0, worker), self.engine.constants(layer))
            elif self.worker == worker:
                missing.append((layer, source))
        for layer, source in missing:
            key = self.key(FrameKind.CONSTANTS, layer, 0, self.worker if source is None else source)
            if source is not None:
                self.links.post(key, self.engine.constants_slot(layer))
                yield from self._receive([key])
            if source is None or not self.engine.take_constants(layer):
                raise StateError(
                    f"{self.describe_changes()}: they cannot be made anew here, and no other worker has them"
                )
        yield Pause.SENT

    # ------------------------------------------------------------------------------------------------ re-replication

    def replicate(self) -> None:
        """Begins to give blocks new holders: followers where some are missing (W6), then those that a change asks for
        (M4). Their base copies travel while the step runs.

        Every worker comes to the same placement by itself; the vote compares its hash, and with it the copies count.
        """
        self.arriving = {}
        target = None
        if self.moving is not None:
            target = self.moving.placement
            self.engine.prepare_layout(self.moving.layout)
        elif self._is_complete:
            return
        terms = self.terms
        voting = next_placement(
            terms.blocks,
            self.layout,
            self.placement,
            target,
            terms.num_followers,
            terms.copy_elements,
            self.budget.elements,
            terms.scatter_width,
        )
        if voting == self.placement:
            voting = self.placement
        self._use_placement(voting)
        self._is_complete = target is None and voting is self.placement
        for block, peer in self.traffic.copies_out:
            payload = self.engine.state(self.copies[block])
            self.links.send(self.key(FrameKind.BASE_COPY, block, 0, peer), payload)
        for block, owner in self.traffic.copies_in:
            copy = self.arriving[block] = self.engine.empty_copy(block, self.progress.num_updates)
            self.links.post(self.key(FrameKind.BASE_COPY, block, 0, owner), self.engine.state_slot(copy))

    # --------------------------------------------------------------------------------------------------------- REDUCE

    def post_receives(self) -> None:
        """Names the memory of all that REDUCE receives, so that frames that arrive early land where they belong.

        Parameters are not among it: until the own vote has passed, none may be written (W2).
        """
        for shipment in self.traffic.partials_in:
            slot = self.engine.partial_sums_slot(*shipment)
            self.links.post(self.key(FrameKind.PARTIAL_SUM, shipment.layer, 0, shipment.peer), slot)
        for shipment in self.traffic.reduced_in:
            slot = self.engine.gradients_slot(self._copies_of(shipment.blocks))
            self.links.post(self.key(FrameKind.REDUCED, shipment.layer, 0, shipment.peer), slot)

    def _copies_of(self, blocks: Iterable[int]) -> list[C]:
        return [self.arriving[block] if block in self.arriving else self.copies[block] for block in blocks]

    def send_partials(self, layer: int) -> None:
        """Sends this worker's complete partial sums of a layer to the owners of its blocks."""
        self.observer.point("reduce")
        for shipment in self.traffic.partials_out.get(layer, ()):
            payload = self.engine.partial_sums(layer, shipment.blocks)
            self.links.send(self.key(FrameKind.PARTIAL_SUM, layer, 0, shipment.peer), payload)

    def reduce(self) -> Life[None]:
        """REDUCE: makes every held block's mean gradient complete, and every new base copy."""
        self.observer.point("reduce")
        self.observer.doing("reduce", computing=False)
        peers: dict[int, list[int]] = {}
        for shipment in self.traffic.partials_in:
            peers.setdefault(shipment.layer, []).append(shipment.peer)
        for layer, blocks in self.traffic.owned.items():
            senders = peers.get(layer, [])
            yield from self._receive([self.key(FrameKind.PARTIAL_SUM, layer, 0, peer) for peer in senders])
            self.engine.reduce(layer, [self.copies[block] for block in blocks], senders)
            for shipment in self.traffic.reduced_out.get(layer, ()):
                payload = self.engine.gradients(self._copies_of(shipment.blocks))
                self.links.send(self.key(FrameKind.REDUCED, layer, 0, shipment.peer), payload)
        yield from self._receive(
            [self.key(FrameKind.REDUCED, shipment.layer, 0, shipment.peer) for shipment in self.traffic.reduced_in]
        )
        yield from self._receive(
            [self.key(FrameKind.BASE_COPY, block, 0, owner) for block, owner in self.traffic.copies_in]
        )
        for copy in self.arriving.values():
            copy.version = self.step - 1

    # ----------------------------------------------------------------------------------------------------------- VOTE

    def vote(self) -> Life[Verdict]:
        """VOTE: one all-reduce over the ballots; a worker that has the whole certificate has learned the result."""
        self.observer.point("vote")
        self.observer.doing("vote", computing=False)
        yield Pause.MOMENT
        vector = self._vote_shape.vector_of(self.ballot())
        vector = list((yield from self.all_reduce(FrameKind.VOTE, vector, self._vote_shape.merge)))
        verdict = self.judge(vector, self.step)
        self.learn(vector, verdict)
        if verdict.outcome is VoteOutcome.REJECT:
            self.note_changes()  # in the same moment: whatever follows, a report must tell of them (K2)
            if PROVES_COPIES.isdisjoint(verdict.failed):  # what has just come is what its owner has written
                self._count_arriving()
        return verdict

    def ballot(self) -> Ballot:
        """What this worker brings to the vote of the present attempt."""
        measured = self.engine.measured()
        nonfinite = measured.nonfinite
        copies = self.voting_copies.values()
        owned = [copy for copy in copies if copy.role is Role.OWNER]
        square_sums = list(self.engine.square_sums(owned))
        for place, (copy, value) in enumerate(zip(owned, square_sums, strict=True)):
            if value - value != 0.0:
                nonfinite = nonfinite or NonFinite(UNKNOWN_MICROBATCH, self._layer_of(copy.block.layer))
                square_sums[place] = 0.0
        residency = agreement = 0
        self.changes = ()
        if self.terms.verify:
            self.changes = self.engine.changes(copies, given_up=True)
            residency = residency_of(((copy.block.id, copy.role, copy.version) for copy in copies), self.worker)
            agreement = sum(weight * key for _, weight, key in self.agreement_terms(self.compared()))
        return Ballot(
            coverage=measured.coverage,
            residency=residency,
            agreement=agreement & MASK64,
            partial_sums=measured.partial_sums if self.terms.verify else 0,
            next_state=self.next_state,
            scores=measured.scores,
            square_sums=square_sums,
            maxima=measured.maxima,
            writes=measured.writes,
            nonfinite=nonfinite,
            request=self.request(),
            num_changed=len(self.changes),
            change=self._change_hash,
            next_residency=self._next_residency(),
            duration_us=measured.duration_us,
            canaries=pairs_of(self.canaries, measured.canaries),
        )

    def _next_residency(self) -> int:
        """Of the copies that are in their places under the change that is held or adopted."""
        change = self.moving or self.held_change
        if change is None:
            return 0
        versions = ((block, copy.version) for block, copy in self.voting_copies.items())
        return residency_of(held_keys(self.worker, change.placement, self.terms.blocks, versions), self.worker)

    def compared(self, *, at_rest: bool = False) -> dict[int, tuple[int, int, int]]:
        """By block, hashes of gradient and state of a copy that has others, and of the parameters that this worker
        computes with or serves; 0 for nothing.

        Args:
            at_rest: between two steps: there are no gradients, and of the optimizer's states none is left out.
        """
        held = self.copies if at_rest else self.voting_copies  # what was arriving when an attempt ended is nothing
        copies = {block: copy for block, copy in held.items() if self.voting.followers[block]}
        states = self.engine.master_hashes([*copies.values()])
        gradients = [0] * len(copies) if at_rest else self.engine.gradient_hashes([*copies.values()])
        found = {
            block: (0 if at_rest else gradient or 1, state or 1, 0)
            for block, gradient, state in zip(copies, gradients, states, strict=True)
        }
        sampled = [
            block
            for block in copies
            if at_rest or (block + self.step) % STATE_SAMPLE_PERIOD == 0 or block in self.traffic.changed
        ]
        of_states = self.engine.state_hashes([copies[block] for block in sampled])
        for block, states_of in zip(sampled, of_states, strict=True):
            gradient, master, _ = found[block]
            found[block] = (gradient, key64("state", master, *(part for each in states_of for part in each)), 0)
        read = [*self.traffic.read]
        for block, parameters in zip(read, self.engine.parameter_hashes(read, held), strict=True):
            found[block] = (*found.get(block, (0, 0))[:2], parameters or 1)
        return found

    def agreement_terms(self, compared: Mapping[int, tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """(block, weight, key) of all that this worker compares; weights of what is equal add up to zero."""
        terms = []
        for block, (gradient, state, parameters) in compared.items():
            if state:
                weight = len(self.voting.followers[block]) if self.voting.owner[block] == self.worker else -1
                terms.append((block, weight, agreement_key("copy", block, self.step, self.attempt, gradient, state)))
            if parameters:
                key = agreement_key("parameters", block, self.step, self.attempt, parameters)
                terms.append((block, self.traffic.read[block], key))
        return terms

    def judge(self, vector: Sequence[int], step: int) -> Verdict:
        """Reads a vote on the present grids; a worker that did not see it come about reads the same."""
        terms, num_microbatches = self.terms, self.layout.num_microbatches
        expected = Expected(
            num_workers=len(self.layout.workers),
            coverage=expected_coverage(terms.num_layers, num_microbatches, self.layout.shared),
            residency=expected_residency(self.voting, step) if terms.verify else 0,
            next_state=self.next_state,
            num_microbatches=num_microbatches,
        )
        return _judge(tuple(vector), self._vote_shape, expected, self.progress.grids, terms.skip_nonfinite)

    def learn(self, vector: Sequence[int], verdict: Verdict) -> None:
        """The own vote is complete. One moment: what is known of the vote and what follows from it change together."""
        if self.adopts(verdict):
            self.moving, self.held_change, self._change_hash = self.held_change, None, 0
        if self.arrives(verdict):
            self.coming, self.moving = self.moving, None
        evidence = self.ledger.learn(
            encode_certificate(vector),
            commits=verdict.commits,
            change=None if self.coming is None else self.coming.number,
            asks_checkpoint=verdict.asks_checkpoint,
        )
        self.known_vote = (self.step, self.attempt, verdict)
        if verdict.commits:
            self._count_arriving()
            if self.coming is not None:
                self._take_placement(self.coming.placement)
        self.take(verdict)
        self.observer.learned(evidence)

    def _count_arriving(self) -> None:
        """Copies that have come count, and are not sent again: the gradients of the next attempt are for them."""
        self.copies, self.arriving = self.voting_copies, {}
        self.placement = self.voting

    def adopts(self, verdict: Verdict) -> bool:
        """Whether a vote adopts the held change: all hold it (M3)."""
        assert verdict.change in (0, self._change_hash), "a vote for a planned change that this worker does not hold"
        return verdict.change != 0

    def arrives(self, verdict: Verdict) -> bool:
        """Whether the adopted change comes into force with a vote: its copies are proven in their places, and none has
        travelled in this attempt (M5)."""
        if self.moving is None or not verdict.commits or self.traffic.changed:
            return False
        return verdict.next_residency == expected_residency(self.moving.placement, self.step)

    def take(self, verdict: Verdict) -> None:
        """Takes over what a vote says about grids and the number of updates."""
        if verdict.outcome is not VoteOutcome.REJECT:
            self.canaries.update(verdict.canaries.known)
        copied = bool(self.traffic.changed)
        self.budget = self.budget.after(verdict.duration_us, copied=copied, bounds=self.terms.move_bounds)
        progress, grids = self.progress, self.progress.grids
        # An attempt that was rejected has measured nothing that could be trusted.
        measured = grids.calibrated or verdict.outcome is VoteOutcome.RETRY
        self.progress = TrainingProgress(
            progress.num_updates + (verdict.outcome is VoteOutcome.COMMIT),
            grids._replace(exponents=verdict.grids, calibrated=measured),
        )

    # --------------------------------------------------------------------------------------------------- APPLY, GATHER

    def apply(self, step: int, verdict: Verdict) -> Life[None]:
        """APPLY: every held copy that is still at the version before takes the step (W5). Ends between two batches of
        copies, and the versions of those before are moved."""
        self.engine.committed(step, verdict.loss, updates=verdict.outcome is not VoteOutcome.SKIP)
        behind = [copy for copy in self.copies.values() if copy.version != step]
        for batch in self.engine.batches(behind):
            yield Pause.MOMENT
            self.observer.point("apply")
            self.apply_batch(batch, step, verdict)
        self.engine.publish(self.copies.values())

    def apply_batch(self, batch: Sequence[C], step: int, verdict: Verdict) -> None:
        """Updates some copies."""
        for copy in batch:
            assert copy.version == step - 1, f"block {copy.block.id} is of step {copy.version} when {step} is applied"
        norm = None if verdict.outcome is VoteOutcome.SKIP else verdict.norm
        self.engine.apply(batch, step, norm, verdict.means.scale, self.progress.num_updates, verdict.written)
        for copy in batch:
            copy.version = step

    def gather(self) -> Life[None]:
        """GATHER: new parameters to those that run a layer and hold no copy of its blocks."""
        assert self.ledger.may_write_parameters(self.step)
        self.observer.point("gather")
        for index, (layer, peer, blocks) in enumerate(self.traffic.parameters_out):
            if index:
                self.observer.point("gather")
            payload = self.engine.parameters_of([self.copies[block] for block in blocks])
            self.links.send(self.key(FrameKind.PARAMETERS, layer, 0, peer), payload)
        yield from self._receive_parameters(self._post_parameters(FrameKind.PARAMETERS, self.traffic.parameters_in))
        yield Pause.SENT
        self.ledger.gathered(self.step)

    def _post_parameters(self, kind: FrameKind, shipments: Iterable[Shipment]) -> dict[Key, Shipment]:
        posted = {self.key(kind, shipment.layer, 0, shipment.peer): shipment for shipment in shipments}
        for key, (layer, _, blocks) in posted.items():
            self.links.post(key, self.engine.parameters_slot(layer, blocks))
        return posted

    def _receive_parameters(self, posted: Mapping[Key, Shipment]) -> Life[None]:
        yield from self._receive([*posted])
        for layer, _, blocks in posted.values():
            self.engine.parameters_arrived(layer, blocks)

    def _layer_of(self, unit: int) -> int:
        first = self.layout.num_layers
        return unit if unit < first else self.layout.shared[unit - first][0]

    def describe_unequal(self, tensors: Sequence[int]) -> str:
        """What is to be said of buffers of whole numbers in which micro-batches do not agree."""
        names = ", ".join(map(self.terms.tensor_name, tensors))
        return (
            f"step {self.step}: micro-batches have left different whole numbers in the buffers {names}. All micro-"
            "batches of a step begin with the same buffers, and a buffer of whole numbers becomes what all of them "
            "have left in it. Make it a floating-point buffer (it becomes the mean), or register it with "
            "persistent=False (every micro-batch begins with the built value)"
        )

    def describe_nonfinite(self, nonfinite: NonFinite) -> str:
        """A clause that names what was not finite in the present step, and where."""
        if nonfinite == NOTHING_COUNTED:
            return f"the loss's counts add up to 0 in step {self.step}: no target of it is one that counts"
        is_loss = nonfinite.layer == self.terms.num_layers
        layer = nonfinite.layer - 1 if is_loss else nonfinite.layer
        place = f"layer {layer} ({self.terms.layer_name(layer)})"
        what = f"the loss, after {place}," if is_loss else f"a gradient of {place}"
        known = nonfinite.microbatch != UNKNOWN_MICROBATCH
        where = f"micro-batch {nonfinite.microbatch}" if known else "the sum over micro-batches"
        return f"{what} is not finite in step {self.step}, {where}"


@functools.lru_cache(maxsize=64)
def _shape(
    num_microbatches: int,
    num_tensors: int,
    num_metrics: int,
    num_canaries: int,
    uses: tuple[tuple[int, int], ...],
    buffers: tuple[BufferTensor, ...],
    accumulator_bits: int,
) -> VoteShape:
    return VoteShape(
        num_microbatches,
        num_tensors,
        num_metrics,
        num_canaries,
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
    return judge(vector, shape, expected, grids, skip_nonfinite=skip_nonfinite)
