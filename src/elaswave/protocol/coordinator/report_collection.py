"""What a coordinator asks in a new generation, and what comes of it: reports, a checkpoint to go back to, a plan. No
IO.

All members report which vote they know and which copies they hold. From that follows the newest committed step, and
whether a copy of each block is left: else the job goes back to a checkpoint. Then the planner is asked, once, and anew
when another loss or a newer vote makes the question void.
"""

from elaswave.protocol.coordinator.decisions import (
    as_decided,
    lost_blocks,
    make_decision,
    merged_placement,
    newest_evidence,
    plan_survivors,
    valid_copies,
    what_helps,
    what_is_lost,
    with_members,
)
from elaswave.protocol.coordinator.history import JobHistory
from elaswave.protocol.coordinator.transitions import Cause
from elaswave.protocol.events import CheckpointFound, FindCheckpoint, PlanningFailed, PlanRecovery, RecoveryPlanned
from elaswave.protocol.messages import Decision, Evidence, Report


class ReportCollection:
    """The questions of a generation that has no decision yet.

    Args:
        history: where the job stands; only read here.
    """

    def __init__(self, history: JobHistory) -> None:
        self._history = history
        self._reports: dict[int, Report] = {}
        self._trusted: int | None = None
        """The newest step of which the checkpoint may be that is sought; nothing where any will do."""
        self._wrong: frozenset[tuple[int, int]] = frozenset()
        """(block, worker) of copies that any report since the last decision has called wrong (K2)."""
        self._proven: int | None = None
        """The newest step of which a checkpoint can be trusted, where such a report has found copies or parameters
        wrong."""
        self.orphans: tuple[int, ...] = ()
        """Blocks without a copy, where a checkpoint is sought for their sake."""
        self._why_back = ""
        """Why a checkpoint is sought."""
        self._seed_is_enough = False
        """Whether nothing was committed when a checkpoint was sought: what is lost can be made again from the seed."""
        self._rollback_step: int | None = None
        """The checkpoint that has been found for this generation."""
        self._rollback_reason = ""
        self.sequence = 0
        """Of the newest question; an answer to an older one is void (P3)."""
        self.question: PlanRecovery | None = None
        """What the planner is asked."""

    def new_generation(self) -> None:
        """What was said in the last one is void."""
        self._reports.clear()
        self._rollback_step = None  # it is sought anew: another one may be the newest by then

    # ---------------------------------------------------------------------------------------------------------- reports

    def add(self, report: Report) -> bool:
        """Takes a member's report; returns whether all have reported."""
        self._reports[report.worker] = as_decided(report, self._history.decision)
        # They outlast the report: its worker, perhaps the only one that has finished the diagnosis, may be lost next.
        self._wrong |= frozenset(report.wrong)
        if report.proven is not None:
            self._proven = report.proven if self._proven is None else min(self._proven, report.proven)
        return len(self._reports) == len(self._history.members)

    @property
    def reports(self) -> list[Report]:
        """Of all members, in their order."""
        return [self._reports[worker] for worker in self._history.members]

    def newest_evidence(self) -> Evidence | None:
        """Finds the newest vote that any member or the coordinator knows. One that knows it is enough: evidence is the
        whole vote, from which all that it has decided can be read."""
        return newest_evidence([self._history.evidence, *(report.evidence for report in self.reports)])

    @property
    def is_outdated(self) -> bool:
        """Whether the planner was asked about an older vote than the newest; a return to a checkpoint needs none.

        Workers say which steps they have made beside their reports: such a word may come while the planner works.
        """
        asked, newest = self.question, self.newest_evidence()
        if asked is None or asked.rollback or newest is None:
            return False
        return asked.evidence is None or asked.evidence.order < newest.order

    def assess(self, cause: Cause) -> Cause:
        """All reports are there: training goes on from the newest vote, or back to a checkpoint.

        Args:
            cause: why now.
        Returns:
            The same cause, or why it goes back.
        """
        history, reports = self._history, self.reports
        if any(report.decided < history.rollback_generation and not history.is_new(report) for report in reports):
            # A member has not gone back to the checkpoint yet: its votes and versions are of steps that do not count
            # any more. No vote can have passed without it since, so nothing is lost by going back once more.
            assert history.decision is not None
            return self._seek(Cause.ROLLBACK_MISSED, history.decision.resume_step - 1)
        evidence = self.newest_evidence()
        base = history.base_step(evidence)
        orphans = lost_blocks(len(history.blocks), valid_copies(reports, evidence, base, self._wrong))
        if orphans:
            return self._seek(Cause.NO_COPY_LEFT, base, orphans)
        # Last, so that blocks without a copy are known under every policy.
        if history.restarts and history.lost:
            return self._seek(Cause.RESTART_POLICY, base)
        return cause

    # ------------------------------------------------------------------------------------------ returns to a checkpoint

    def _seek(self, cause: Cause, base: int, orphans: tuple[int, ...] = ()) -> Cause:
        lost = self._history.lost
        self.orphans, self._trusted = orphans, None
        if cause is Cause.RESTART_POLICY:
            self._why_back = "the job starts over, as the policy is"
        elif cause is Cause.ROLLBACK_MISSED:
            self._why_back = f"workers {list(lost)} were lost before all members had gone back to the last checkpoint"
        else:
            self._why_back = what_is_lost(orphans, len(self._history.blocks), lost)
            self._trusted = self._proven
        self._seed_is_enough = base == 0
        return cause

    def ask_for_checkpoint(self) -> FindCheckpoint:
        """Makes the question which checkpoint there is."""
        self.sequence += 1
        return FindCheckpoint(self.sequence, self._trusted)

    def take_checkpoint(self, event: CheckpointFound) -> str:
        """Takes the answer; returns why the job cannot go back, or nothing."""
        history, why = self._history, self._why_back
        step = 0 if event.step is None and self._seed_is_enough else event.step
        if step is None:
            helps = what_helps(history.layout, history.placement, len(history.lost))
            if self._trusted is not None:
                why = f"{history.reason}; {why}"
                helps = f"Of three copies two decide: elastic.num_followers = 2. {helps}"
            return f"{why}, and there is no valid durable checkpoint to go back to. {helps}"
        self._rollback_step, self._rollback_reason = step, f"{history.reason}; {why}"
        return ""

    # --------------------------------------------------------------------------------------------------------- the plan

    def ask_for_plan(self) -> PlanRecovery:
        """Makes the question how training goes on."""
        history = self._history
        self.sequence += 1
        # Votes after the checkpoint do not count any more, nor do copies: all are loaded.
        rollback = self._rollback_step
        evidence = None if rollback is not None else self.newest_evidence()
        base = history.base_step(evidence) if rollback is None else rollback
        layout, owners, execution, change = (
            history.in_force() if rollback is not None else history.in_force_by(evidence)
        )
        layout = with_members(layout, history.members, history.domains)
        self.question = PlanRecovery(
            sequence=self.sequence,
            generation=history.generation,
            members=history.members,
            lost=tuple(sorted(set(layout.workers) - set(history.members))),
            layout=layout,
            execution=execution,
            change=change,
            placement=merged_placement(owners, self.reports) if rollback is None else owners,
            valid=valid_copies(self.reports, evidence, base, self._wrong) if rollback is None else {},
            base=base,
            evidence=evidence,
            rollback=rollback is not None,
        )
        return self.question

    def decide(self, event: RecoveryPlanned | PlanningFailed) -> tuple[Decision, float | None]:
        """Makes the decision that follows from an answer to the newest question, and returns it with the predicted
        seconds of a step.

        Without a plan survivors keep their stages (P4).
        """
        history, question = self._history, self.question
        assert question is not None
        if isinstance(event, RecoveryPlanned):
            plan = event.plan
        else:
            why = f"{event.reason}: survivors keep their stages"
            plan = plan_survivors(question, history.blocks, history.scatter_width, reason=why)
        decision = make_decision(
            question,
            plan,
            event.pending,
            self.reports,
            term=history.term,
            lost=history.lost,
            reason=self._rollback_reason if question.rollback else history.reason,
            joined=history.joined,
            left=history.left,
            newcomers=[report.worker for report in self.reports if history.is_new(report)],
            doubts_step=history.doubts_step,
            is_sound=self._proven is None,
        )
        self._reports.clear()
        self._wrong, self._proven = frozenset(), None
        self.question = None
        return decision, plan.predicted_step_s
