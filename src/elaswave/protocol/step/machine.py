"""The worker machine: a worker's whole life among the others and the coordinator. No torch, IO, clocks or threads.

It gets ready, runs its steps with what is to be done between them, leaves a generation when it is asked to, installs
decisions, and ends when all have ended. What a step is, and the rules W1 to W11, stand at the head of
`elaswave.protocol.step.loop`. The product's worker and the simulated one drive this class; they differ only in the
engine, the links, and the way to the coordinator.

A worker does one thing at a time, its *life*: it trains (`WorkerMachine.train`), or it goes over to a decision
(`install`) and then trains; or it does nothing and waits for the coordinator, because it has reported, has paused, has
found copies wrong, or is done. A message of the coordinator, or the loss of a peer, ends a life where it stands:

- *asked to report* (`move`): the life ends; the links move to the new generation; then the report is made and sent.
  From here on nothing of the old generation can arrive, so nothing can be learned that the report does not say (W1).
- *a decision comes* (`install`): a new life begins with it. It takes over the vote that the decision carries, if this
  worker has not, applies its step to the copies that are still behind (`catch_up`), takes layout and placement and gets
  missing parameters (`take_roles`), or loads a checkpoint (`roll_back`); then training goes on with `next_step`. If
  that life is interrupted too, the next report tells how far it has come: versions of copies, `parameters_step`, the
  generation of the last decision.
- *a peer is lost* (`abandon`): the life ends, the coordinator is told which link broke, and its decision is waited for.

The step that is being tried, or was tried last, is `step`, with its `attempt`: they name the frames. The step that
training goes on with is `next_step`: it moves only when a step is committed, or a decision says so. Between two steps
they differ by one; while an evaluation or a comparison of step k runs, `step` is k and `attempt` is 0.

A driver calls `resume` until that returns what must be waited for, waits, and so on; an exception that comes out of
`resume`, or of the waiting, it answers with `abandon`. Messages of the coordinator go to `on_message`, never during
`resume`.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Generic

import msgspec

from elaswave.blocks.placement import Placement
from elaswave.errors import StateError
from elaswave.protocol.messages import (
    FIRST_GENERATION,
    CoreToWorker,
    Decision,
    FencedOff,
    InForce,
    LayoutChange,
    Linked,
    Paused,
    Progress,
    Registered,
    Report,
    Unsound,
)
from elaswave.protocol.step.activity import PAUSED, UNSOUND
from elaswave.protocol.step.ballot import GridState, Request, decode_certificate
from elaswave.protocol.step.blocks import followed_by
from elaswave.protocol.step.due_work import WorkBetweenSteps
from elaswave.protocol.step.engine import C, Committed, Pause, Ports, TrainingProgress, Wait
from elaswave.protocol.step.execution import Life
from elaswave.protocol.step.ledger import CatchUp, HeldCopies, Ledger
from elaswave.protocol.step.loop import StepLoop
from elaswave.protocol.step.member import (
    AskForPause,
    DialPeers,
    GoOnTraining,
    Hold,
    Install,
    Leave,
    Member,
    MemberState,
    MoveAndReport,
    ReportAgain,
)
from elaswave.protocol.step.replayed_state import ReplayedState
from elaswave.types import Layout

KEPT_REPORTS = 1024
"""Reports of steps kept for the case that the worker that should have sent them is lost."""


class WorkerMachine(Generic[C]):
    """Lives one worker's life, over parts that each keep a state of their own.

    - `steps`: the order of a step, what its vote said, where training stands (`elaswave.protocol.step.loop`);
    - `execution`: the layout, its program, the frames of the attempt in hand (`elaswave.protocol.step.execution`);
    - `blocks`: the copies held here, their placement, their traffic (`elaswave.protocol.step.blocks`);
    - `planned`: the change of layout that is under way (`elaswave.protocol.step.blocks`);
    - `checks`: whether memory is as it was written (`elaswave.protocol.step.soundness`);
    - `between`: evaluations and checkpoints that are due (`elaswave.protocol.step.due_work`);
    - `ledger`: what is known of commits (`elaswave.protocol.step.ledger`);
    - `member`: which messages of the coordinator count (`elaswave.protocol.step.member`).

    Args:
        ports: what it stands on.
        replayed_state: what is said again on every new connection to a coordinator; the driver may share it with its
            threads.
        in_force: layout, placement and execution parameters of the beginning.
        copies: the blocks that are held, by block.
        progress: where training stands.
        step: the newest committed step.
        joins: whether it joins a job that runs: it has no state, is idle in the layout, and waits to become a member.
    """

    member_class = Member
    ledger_class = Ledger
    steps_class: type[StepLoop[C]] = StepLoop
    between_class: type[WorkBetweenSteps[C]] = WorkBetweenSteps

    def __init__(
        self,
        ports: Ports[C],
        replayed_state: ReplayedState,
        in_force: InForce,
        copies: Mapping[int, C],
        progress: TrainingProgress,
        *,
        step: int = 0,
        joins: bool = False,
    ) -> None:
        self.worker, self.terms, self.engine, self.links, self.observer, self.outbox, self.disk = ports
        self.replayed_state = replayed_state
        self.ledger = self.ledger_class(self.worker, step, is_fresh=joins)
        self.member = self.member_class(self.worker, FIRST_GENERATION)
        steps = self.steps_class(ports, self.ledger, in_force, copies, progress, self._request)
        self.steps = steps
        self.execution, self.blocks = steps.execution, steps.blocks
        self.planned, self.checks = steps.planned, steps.checks
        self.between = self.between_class(ports, steps.checks)
        self.members = in_force.layout.workers
        """Of the newest decision."""
        self.report: Report | None = None
        """The last report, until the decision that answers it is carried out."""
        self.is_started = joins
        """Whether it has been told where its peers are; until then it can do nothing else. A joiner waits for calls."""
        self.is_done = False
        """Whether it has made all its steps and said so; it stays, since others may need what it holds."""
        self.fenced_off: str | None = None
        """Why it must end itself."""
        self.is_released = False
        """Whether it must because it was asked to leave."""
        self._early: list[CoreToWorker] = []
        """Messages that came before the start."""
        self.num_lives = 0
        """How often it has begun to do something, or left it; tells a driver that what it waited for is void."""
        self._life: Life[None] | None = None
        self._is_ready = joins
        self._wanted: frozenset[int] = frozenset()
        """Peers to which links are made in the background."""
        self._linked: tuple[int, ...] | None = None
        """Those of them to which links stand, as it was told last."""
        self._asks_pause = False
        """Whether it asks for a pause in its ballots."""
        self.is_paused = False
        """Whether it waits, between two steps, for what becomes of the membership."""
        self.is_unsound = False
        """Whether it waits for a new generation, since copies are wrong."""
        self.next_step, self.next_attempt = step + 1, 1
        """Where it goes on once nothing is left to be done between steps. The step that is being tried, or was tried
        last, is the execution's."""
        self._offered: LayoutChange | None = None
        """The newest planned change that has come since it looked."""
        self._reports: deque[tuple[int, Any]] = deque(maxlen=KEPT_REPORTS)
        """(step, message), steps ascending."""

    @property
    def last_step(self) -> int:
        """Names the newest step that this worker has behind it."""
        return self.next_step - 1

    # What the driver, its threads and whoever watches may read; each has one place, in the part that changes it.

    @property
    def is_at_rest(self) -> bool:
        """Whether it waits for the coordinator between steps or after the last one, in a generation that goes on."""
        return self.is_done or self.is_paused or self.is_unsound

    @property
    def step(self) -> int:
        """The step that is being tried, or was tried last."""
        return self.execution.step

    @property
    def attempt(self) -> int:
        """The attempt of it."""
        return self.execution.attempt

    @property
    def layout(self) -> Layout:
        """In force."""
        return self.execution.layout

    @property
    def placement(self) -> Placement:
        """In force."""
        return self.blocks.placement

    @property
    def copies(self) -> HeldCopies[C]:
        """The copies held at the last committed step, by block."""
        return self.blocks.copies

    @property
    def progress(self) -> TrainingProgress:
        """Where training stands."""
        return self.steps.progress

    @property
    def move_progress(self) -> tuple[int, int]:
        """Of the adopted change: how many copies are in their places, and how many there will be; (0, 0) if none is."""
        return self.planned.num_in_place(self.blocks.placement)

    # ----------------------------------------------------------------------------------------------- for the driver

    def start(self) -> None:
        """Begins: the links can be made. A start that is said again is ignored."""
        if self.is_started:
            return
        self.is_started = True
        self._live(self.train())
        # After the life has begun: one of them may end it, and a life begun later would train on after a promise (W1).
        early, self._early = self._early, []
        for message in early:
            self.on_message(message)

    def resume(self) -> Wait | None:
        """Goes on to the next point at which it has to wait.

        Returns:
            What it waits for; None if it is a message of the coordinator.
        """
        if self._life is None:
            return None
        try:
            return next(self._life)
        except StopIteration:
            self._life = None
            return None
        except BaseException:
            self._life = None
            raise

    def abandon(self, lost_peer: int | None = None, detail: str = "") -> None:
        """Leaves what it is doing (W4): it goes on as the coordinator's decision says.

        Args:
            lost_peer: the peer whose link has ended, if that is why.
            detail: what was seen.
        """
        self._stop()
        # A worker that has reported has left the generation that the link was of.
        if lost_peer is not None and self.member.state is MemberState.TRAINING:
            self._tell_of_link(lost_peer, detail)

    def look_at_sent(self) -> None:
        """Tells of a link that has ended while it waits between steps or after the last one (W11), once in a
        generation. A peer may still wait for what was sent over it, and no frame that this worker waits for would show
        that."""
        if self.is_at_rest and not self.replayed_state.has_broken_links and self.links.broken is not None:
            self._tell_of_link(*self.links.broken)

    def _tell_of_link(self, peer: int, detail: str) -> None:
        accusation = self.outbox.link_lost(peer, detail)
        self.replayed_state.link_lost(peer, accusation)
        self.outbox.send(accusation)

    def _live(self, life: Life[None]) -> None:
        self._stop()
        self._life = life

    def _stop(self) -> None:
        self.num_lives += 1
        if self._life is not None:
            self._life.close()
            self._life = None

    def on_message(self, message: CoreToWorker) -> None:
        """Takes a message of the coordinator's machine."""
        # Who is fenced off before the start may never get one, and must end itself now.
        if not self.is_started and not isinstance(message, FencedOff):
            self._early.append(message)
            return
        if isinstance(message, LayoutChange):
            self.offer(message)
            return
        action = self.member.handle(message)
        if isinstance(action, MoveAndReport):
            self.move(action.generation, action.members, with_progress=action.with_progress)
        elif isinstance(action, ReportAgain):
            if self.report is not None:
                self.outbox.send(self.report)
        elif isinstance(action, Install):
            self._live(self.install(action.decision))
        elif isinstance(action, DialPeers):
            self._wanted = frozenset(action.addresses)
            self.links.want(action.addresses)
            self.look_at_links()
        elif isinstance(action, AskForPause):
            self._asks_pause = not self.is_paused
        elif isinstance(action, GoOnTraining):
            self.go_on()
        elif isinstance(action, Leave):
            self._stop()
            self.fenced_off, self.is_released = action.reason, action.as_asked

    def registration(self, address: str) -> Registered:
        """Makes the first words on a new control connection. Until the decision that it answers is carried out, the
        report is among them: the coordinator may have to send that decision again.

        Args:
            address: where the data plane listens.
        """
        return Registered(worker=self.worker, address=address, generation=self.member.generation, report=self.report)

    def wrote(self, step: int, generation: int, message: Any) -> None:
        """Tells that the part of a checkpoint is written, or could not be. Any thread may call it, if facts and outbox
        bear that.

        Args:
            step: of the checkpoint.
            generation: in which writing began.
            message: tells of it.
        """
        # The fact first: a new connection, which another thread makes, says all facts once and would miss a later one.
        self.replayed_state.part(step, generation, message)
        self.outbox.send(message)

    # ------------------------------------------------------------------------------------------------------- training

    def train(self) -> Life[None]:
        """Gets ready, makes all steps with the duties between them, and finishes (W10)."""
        if not self._is_ready:
            self.links.connect(self.layout, self.placement)
            self._is_ready = True
            ready = self.outbox.ready()
            self.replayed_state.ready(ready)
            self.outbox.send(ready)
        stopped = pauses = False
        while True:
            # Before the end and before a pause: who says either may be let go, and its parts must be written (W10, J6).
            if wrong := (yield from self.between.do(self.last_step, self.members[0])):
                self.wait_for_copies(wrong)
                return
            if self.next_step > self.terms.num_steps or stopped:
                break
            if pauses:
                if self.worker in self.layout.idle:  # perhaps it is let go, and with it what it has not written
                    yield Pause.DISK
                self.pause()
                return
            yield Pause.MOMENT
            self.look_for_change()
            self.look_at_links()
            committed = yield from self.steps.run_step(self.next_step, self.next_attempt)
            if isinstance(committed, str):
                self.wait_for_copies(committed)
                return
            # No wait from here to `between.note`: the report, the next step and what is due change in one moment (W4).
            self.note_committed(committed)
            pauses = committed.request is Request.PAUSE
            stopped = committed.request is Request.STOP and committed.step < self.terms.num_steps
            self.next_step, self.next_attempt = committed.step + 1, 1
            self.between.note(committed.step, committed.request)
        yield from self.finish(stopped)

    def wait_for_copies(self, reason: str) -> None:
        """Says that copies are wrong, and waits for the new generation that makes them good (K3)."""
        self.is_unsound = True
        message = Unsound(worker=self.worker, generation=self.member.generation, step=self.step, reason=reason)
        self.replayed_state.unsound(message)
        self.outbox.send(message)
        self.observer.doing(UNSOUND, computing=False)

    def offer(self, change: LayoutChange) -> None:
        """Takes a planned change that has come; it is looked at between two steps. By then a coordinator may have
        followed, and have said the same change again: in the name of the one before, the change would count no more."""
        known = self._offered
        if known is None or (change.number, change.term) > (known.number, known.term):
            self._offered = change

    def look_for_change(self) -> None:
        """Holds the newest planned change that has come, once its links are there (W8). Between two steps: within one,
        nothing may be held that the own ballot did not tell of."""
        change, self._offered = self._offered, None
        # A coordinator says a change again to each member that registers, also one that is in force by now.
        if change is None or change.number <= self.ledger.change:
            return
        action = self.member.handle(change)
        if isinstance(action, Hold):
            self.links.connect(self.layout, followed_by(self.placement, change.placement))  # while copies travel
            self.links.connect(change.layout, change.placement)
            self.planned.hold(change)

    def pause(self) -> None:
        """Says that it waits before the next step, as a vote has asked for, and waits for the coordinator (J4)."""
        self._asks_pause, self.is_paused = False, True
        message = Paused(worker=self.worker, generation=self.member.generation, step=self.last_step)
        self.replayed_state.paused(message)
        self.outbox.send(message)
        self.observer.doing(PAUSED, computing=False)

    def go_on(self) -> None:
        """Ends the pause, or asks for none any more: the membership stays as it is."""
        self._asks_pause = False
        if self.is_paused:
            self.is_paused = False
            # Others may still wait, for a coordinator that is gone: the next one learns here that they are to go on.
            over = Paused(worker=self.worker, generation=self.member.generation, step=self.last_step, is_over=True)
            self.replayed_state.paused(over)
            self._live(self.train())

    @property
    def wants_links(self) -> bool:
        """Says whether links are made in the background, so that `look_at_links` is to be called now and then."""
        return bool(self._wanted)

    def look_at_links(self) -> None:
        """Says to which of the wanted peers there are links, when that has changed (J3)."""
        here = tuple(sorted(peer for peer in self._wanted if self.links.has(peer)))
        if here != self._linked and (here or self._linked is not None):
            self._linked = here
            message = Linked(worker=self.worker, peers=here)
            self.replayed_state.linked(message)
            self.outbox.send(message)

    def _request(self) -> Request:
        """Finds what this worker asks for in its ballot.

        Checkpoints by time are asked for by the clock of the member with the lowest id; the vote makes that the
        decision of all members. All clocks begin anew at the same vote, so the next member goes on asking when that one
        is lost.
        """
        asked = self.outbox.request()
        # Not while a part is still being written: training would stand still until it is.
        if asked is Request.NONE and self.worker == self.members[0] and self.disk.is_due() and not self.disk.is_busy:
            asked = Request.CHECKPOINT
        # A pause can give way: it is asked for in every ballot until it begins.
        return Request.PAUSE if asked is Request.NONE and self._asks_pause else asked

    # -------------------------------------------------------------------------------------------- reports and the end

    def note_committed(self, committed: Committed) -> None:
        """Keeps the report of a committed step; the member with the lowest id sends it (W9)."""
        report = self.outbox.committed(committed)
        self.keep_report(committed.step, report)
        if self.worker == self.members[0]:
            self.outbox.send(report, durable=True)

    def keep_report(self, step: int, report: Any) -> None:
        """Keeps the report of a committed step, for the case that the worker that should have sent it is lost."""
        # Catching up makes the report again also of a step that this worker has noted itself.
        if not self._reports or self._reports[-1][0] < step:
            self._reports.append((step, report))

    def finish(self, stopped: bool) -> Life[None]:
        """Says that it has made all steps; from now on it waits until the coordinator ends the job (W10)."""
        self.observer.doing("end", computing=False)
        yield Pause.DISK
        if not self.checks.is_sound():
            self.wait_for_copies(self.between.refusal("the end of the job", self.last_step))
            return
        finished = self.outbox.finished(stopped)
        self.replayed_state.ended(finished)
        self.outbox.send(finished)
        self.is_done = True

    # ------------------------------------------------------------------------------------------------------- recovery

    def move(self, generation: int, members: tuple[int, ...], *, with_progress: bool = False) -> None:
        """Leaves the old generation's data plane, and only then promises and reports (W1)."""
        self._stop()
        self.is_done = self.is_paused = self.is_unsound = self._asks_pause = False
        self.planned.forget()  # what was planned for the old generation is void
        self.replayed_state.moved()
        self.links.edit(generation, members)
        progress = self.progress_for_joiners() if with_progress else None
        partial = self.steps.partial()
        report = self.ledger.promise(generation, self.blocks.held(), self.layers_here(), partial, progress)
        wrong = tuple(sorted(self.checks.wrong))
        self.report = msgspec.structs.replace(report, wrong=wrong, proven=self.checks.proven)
        self.observer.moved()
        # Not durable: until the decision is carried out each new connection begins with it (`registration`).
        self.outbox.send(self.report)

    def layers_here(self) -> tuple[int, int]:
        """Finds the first layer of those that are here, and one past the last; shared units follow from it. (0, 0) for
        none."""
        layers = sorted(unit for unit in self.engine.layers if unit < self.terms.num_layers)
        return (layers[0], layers[-1] + 1) if layers else (0, 0)

    def progress_for_joiners(self) -> Progress:
        """Tells where training stands, for a member without state (J5)."""
        progress, grids = self.steps.progress, self.steps.progress.grids
        return Progress(
            num_updates=progress.num_updates,
            exponents=grids.exponents,
            calibrated=grids.calibrated,
            exact=grids.exact,
            determinism_hashes=dict(self.steps.determinism_hashes),
            engine=self.engine.carried(),
        )

    def _begin_with(self, progress: Progress | None, step: int) -> None:
        """Takes over where training stands, as a member without state."""
        if progress is None:
            raise StateError(f"worker {self.worker} joins, and is not told where training stands")
        grids = GridState(progress.exponents, calibrated=progress.calibrated, exact=progress.exact)
        self.steps.progress = TrainingProgress(progress.num_updates, grids)
        self.steps.determinism_hashes = dict(progress.determinism_hashes)
        self.engine.carry_on(progress.engine, step)

    def install(self, decision: Decision) -> Life[None]:
        """Carries out a decision, and goes on."""
        steps = self.steps
        self.members = decision.members
        # It may be interrupted: until the decision is accepted below, the promise and the report stay as they were.
        self.links.connect(decision.layout, decision.placement)
        if decision.rollback is not None:
            yield Pause.MOMENT
        # From here on its reports say that it has the decision. A worker that goes back must then have loaded:
        # nothing may interrupt it in between (W4), or it would go on with the grids of steps that count no more.
        todo = self.ledger.accept(decision)
        self.checks.forget_wrong()
        if todo is CatchUp.JOIN:
            self._begin_with(decision.progress, decision.resume_step - 1)
        self.next_step, self.next_attempt = steps.kept_for = decision.resume_step, decision.resume_attempt
        steps.kept_next = decision.kept
        self.between.forget()
        if todo is CatchUp.ROLL_BACK:
            received = self.roll_back(decision)
        else:
            yield from self.catch_up(todo, decision)
            received = yield from self.take_roles(decision)
        self.planned.restart_budget()  # not all members have taken over the same votes
        # After catching up, which has made the report of the step that the decision commits.
        self.send_reports_again(decision)
        self.between.note_decided(self.last_step, evaluate=decision.evaluate, checkpoint=decision.checkpoint)
        self.report = None
        self.observer.installed(decision)
        self.outbox.send(self.outbox.installed(received), durable=True)
        yield from self.train()

    def catch_up(self, todo: CatchUp, decision: Decision) -> Life[None]:
        """Takes over the decision's vote, and applies its step to what is still at the version before (W5).

        Args:
            todo: what the ledger says about it.
            decision: with the vote.
        Raises:
            StateError: this worker reads the vote in another way than those that completed it.
        """
        evidence, steps = decision.evidence, self.steps
        if evidence is None or todo in (CatchUp.NOTHING, CatchUp.JOIN):
            return
        known = steps.known_vote
        if known is not None and known[:2] == evidence.order:
            verdict = known[2]  # taken over already; once more, an update or a change of grids would count twice
        else:
            verdict = steps.judge(decode_certificate(evidence.vector), evidence.step)
            if verdict.commits is not evidence.commits:
                raise StateError(
                    f"those that completed the vote on step {evidence.step} read that it "
                    f"{'commits' if evidence.commits else 'does not commit'}; worker {self.worker} reads "
                    f"{verdict.outcome.value} ({', '.join(verdict.failed) or 'nothing failed'})"
                )
            # Before APPLY, whose number of updates has this step in it.
            steps.take(verdict)
            steps.known_vote = (*evidence.order, verdict)
        if todo is not CatchUp.APPLY:
            return
        yield from steps.apply(evidence.step, verdict)
        self.execution.step = evidence.step
        # Also where the vote was known: this worker may have been interrupted before it had noted the step (W9).
        committed = steps.committed(*evidence.order, verdict, (), was_run=False)
        self.keep_report(evidence.step, self.outbox.committed(committed))

    def take_roles(self, decision: Decision) -> Life[int]:
        """Takes over layout and placement, and makes missing parameters complete.

        Returns:
            Bytes of layers that are new here and came from others.
        """
        base = decision.resume_step - 1
        self.blocks.take_decided(decision)
        # Before the first call that may be interrupted: new layers have no values until the deliveries are here (W5).
        self.note_missing_parameters(decision)
        new = self.execution.use_layout(decision.layout, decision.execution, self.copies.all)
        self.blocks.use_placement(decision.placement)
        # They name the frames of deliveries, so they are the decision's, whatever each member was trying.
        self.execution.step, self.execution.attempt = base, decision.resume_attempt
        received = yield from self.blocks.deliver(decision, new)
        self.ledger.gathered(base)
        return received

    def note_missing_parameters(self, decision: Decision) -> None:
        """Notes, until the deliveries are here, that this worker lacks parameters of its layers: it must not say in a
        report that it has them."""
        if any(worker == self.worker for worker, _ in decision.deliver):
            self.ledger.parameters_step = -1

    def roll_back(self, decision: Decision) -> int:
        """Starts over from the decision's checkpoint, under its layout.

        Returns:
            Bytes that were loaded.
        """
        assert decision.rollback is not None
        steps, placement = self.steps, decision.placement
        self.replayed_state.rolled_back(decision.rollback)
        # Loading writes over what is here: until it has ended, no report may say that parameters or sums are there.
        self.ledger.parameters_step, steps.sums = -1, None
        # These steps are made again: `keep_report` would take their new reports for known ones.
        while self._reports and self._reports[-1][0] > decision.rollback:
            self._reports.pop()
        # Attempts are counted from 1 again, so a vote to come may have the numbers of this one.
        steps.known_vote = None
        self.checks.loaded_step = decision.rollback
        self.blocks.forget()
        loaded = self.engine.load(decision.rollback, decision.layout, placement)
        self.blocks.take_loaded(HeldCopies(loaded.copies, decision.rollback), placement)
        steps.progress = loaded.progress
        self.execution.use_layout(decision.layout, decision.execution, self.copies.all)
        self.blocks.use_placement(placement)
        self.ledger.gathered(decision.rollback)
        return loaded.num_bytes

    def send_reports_again(self, decision: Decision) -> None:
        """Sends the reports of steps that the coordinator has not published, as the member with the lowest id (W9)."""
        if self.worker != self.members[0]:
            return
        for step, report in self._reports:
            if decision.published < step < decision.resume_step:
                self.outbox.send(report, durable=True)
