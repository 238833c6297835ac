"""What the members of a generation do next, as pure functions of their reports. The coordinator's machine calls them.

From the reports follow the committed step, who holds a valid copy of which block, and which blocks are lost; from a
plan, the decision.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import msgspec

from elaswave.blocks.domains import label_members
from elaswave.blocks.placement import Block, Placement, place_blocks
from elaswave.planning.search.recovery import promote, survivor_layout, without_surplus
from elaswave.protocol.events import PendingWork, PlanRecovery, RecoveryPlan
from elaswave.protocol.messages import BlockReplicas, Decision, Evidence, Progress, Report
from elaswave.protocol.step.salvage import Salvage, salvage
from elaswave.types import WHOLE_STAGE, ExecutionParameters, Layout


def newest_evidence(found: Sequence[Evidence | None]) -> Evidence | None:
    """Returns the newest of several votes."""
    known = [evidence for evidence in found if evidence is not None]
    return max(known, key=lambda evidence: evidence.order, default=None)


def base_step(decided: int, evidence: Evidence | None) -> int:
    """Finds the newest step that is committed.

    Args:
        decided: the step that the newest decision, or the job itself, goes on after.
        evidence: the newest vote.
    """
    return decided if evidence is None else max(decided, evidence.committed_step)


def can_reach(version: int, report: Report, evidence: Evidence | None, base: int) -> bool:
    """Tells whether a copy at a version is, or can at once be brought, to the committed step.

    One step behind is enough where the worker holds that step's complete gradients: every voter does.
    """
    if version == base:
        return True
    return (
        version == base - 1
        and evidence is not None
        and evidence.commits
        and evidence.step == base
        and (
            # A vote proves gradients for its own attempt alone: the worker has learned it, or was prepared for it.
            (report.evidence is not None and report.evidence.order == evidence.order) or _is_prepared(report, evidence)
        )
    )


def _is_prepared(report: Report, evidence: Evidence) -> bool:
    return report.prepared and (report.step, report.attempt) == evidence.order


def as_decided(report: Report, decision: Decision | None) -> Report:
    """Takes from a report what its worker would not say any more if it had not missed the newest decision: copies that
    the decision does not count on, and parameters that it has sent again.

    Those that have taken the decision have forgotten what was wrong, since it is made good. The one that has missed it
    still has it, and may never have known that it is wrong (K2).
    """
    if decision is None or report.decided >= decision.generation:
        return report
    worker, holders, copies = report.worker, decision.placement.holders, report.copies
    counts = [worker in holders(block) for block in copies.blocks]
    lacks = any(receiver == worker for receiver, _ in decision.deliver)
    return msgspec.structs.replace(
        report,
        copies=BlockReplicas(
            blocks=list(compress(copies.blocks, counts)),
            owned=list(compress(copies.owned, counts)),
            versions=list(compress(copies.versions, counts)),
        ),
        parameters_step=-1 if lacks else report.parameters_step,
    )


def valid_copies(
    reports: Sequence[Report], evidence: Evidence | None, base: int, wrong: Collection[tuple[int, int]] = ()
) -> dict[int, frozenset[int]]:
    """Maps each worker to the blocks of which it holds a copy that is, or can at once be brought, to the committed
    step, and that is not known to be wrong.

    Args:
        reports: of all members.
        evidence: the newest vote.
        base: the newest committed step.
        wrong: (block, worker) of copies that are known to be wrong.
    """
    wrong_of: dict[int, set[int]] = {}
    for block, worker in wrong:
        wrong_of.setdefault(worker, set()).add(block)
    return {
        report.worker: _valid_in(report, evidence, base).difference(wrong_of.get(report.worker, ()))
        for report in reports
    }


def _valid_in(report: Report, evidence: Evidence | None, base: int) -> frozenset[int]:
    copies = report.copies
    versions = set(copies.versions)
    reaching = {version for version in versions if can_reach(version, report, evidence, base)}
    if reaching == versions:  # almost always: blocks of one worker are at one version
        return frozenset(copies.blocks)
    return frozenset(
        block for block, version in zip(copies.blocks, copies.versions, strict=True) if version in reaching
    )


def lost_blocks(num_blocks: int, valid: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """Lists the blocks of which no valid copy is left, ascending."""
    kept = frozenset().union(*valid.values())
    if len(kept) == num_blocks:
        return ()
    return tuple(block for block in range(num_blocks) if block not in kept)


def merged_placement(placement: Placement, reports: Sequence[Report]) -> Placement:
    """Extends a placement with the followers that have been added since, as the members report them.

    Args:
        placement: of the newest decision, or of the change that has come into force since.
        reports: of all members, in their order.
    """
    owner = placement.owner
    followers: list[tuple[int, ...]] = [()] * len(owner)
    for report in reports:
        worker = report.worker
        for block in report.copies.blocks:
            # Whether the copy is valid does not matter yet: `promote` drops followers whose copies are not.
            if owner[block] != worker:
                followers[block] += (worker,)
    return Placement.of(owner, tuple(followers))


def next_attempt(reports: Sequence[Report], evidence: Evidence | None, step: int) -> int:
    """Computes the number of the next attempt of a step: larger than every earlier one."""
    attempt = 1 + max((report.attempt for report in reports if report.step == step), default=0)
    # Perhaps only a lost worker has told of this vote: its attempt is used up, though no report is of it.
    if evidence is not None and not evidence.commits:
        attempt = max(attempt, evidence.attempt + 1)
    return attempt


def deliveries(
    layout: Layout, reports: Sequence[Report], base: int, *, is_sound: bool = True
) -> tuple[tuple[int, int], ...]:
    """Lists (worker, unit) of all parameters that are not where they are needed, or not of the committed step; of all,
    where some are wrong.

    Args:
        layout: to go on with.
        reports: of all members.
        base: the newest committed step.
        is_sound: whether no copy and no parameter is known to be wrong.
    """
    by_worker = {report.worker: report for report in reports}
    found = []
    for stage in layout.stages:
        for worker in stage.workers:
            report = by_worker[worker]
            # Until its GATHER is complete a worker reports the step before: what has come already is sent again too.
            has = range(*report.layers) if is_sound and report.parameters_step == base else range(0)
            wanted, had = range(stage.start, stage.stop), layout.shared_units(has)
            found += [(worker, layer) for layer in wanted if layer not in has]
            found += [(worker, unit) for unit in layout.shared_units(wanted) if unit not in had]
    return tuple(found)


def salvaged(
    question: PlanRecovery, layout: Layout, pending: PendingWork, reports: Sequence[Report], *, doubts_step: bool
) -> Salvage:
    """Determines what of the step that was being tried is kept (S5): nothing after a return to a checkpoint, or where
    an evaluation must be made before the step, which computes losses of its own; and nothing where what a lost worker
    has handed on may be wrong, since survivors have computed with it.

    Args:
        question: what was planned.
        layout: to go on with.
        pending: what of the base step is still to be done.
        reports: of all members.
        doubts_step: whether that is so.
    """
    if question.rollback or pending.evaluate:
        return Salvage((), 0)
    partials = [report.partial for report in reports if report.partial is not None]
    return salvage(
        # What is not kept stays in the list: it tells what had run, and now runs again (S6).
        [msgspec.structs.replace(partial, can_be_kept=partial.can_be_kept and not doubts_step) for partial in partials],
        {report.worker: range(*report.layers) for report in reports},
        layout,
        question.base + 1,
        None if question.evidence is None else question.evidence.order,
        question.layout,
    )


def what_is_lost(orphans: Sequence[int], num_blocks: int, lost: Sequence[int]) -> str:
    """Describes for people which blocks have no copy left."""
    named = ", ".join(map(str, orphans[:8])) + (" ..." if len(orphans) > 8 else "")
    if not lost:
        return f"of {len(orphans)} of {num_blocks} blocks ({named}) no copy is known to be right"
    return f"all copies of {len(orphans)} of {num_blocks} blocks ({named}) were lost with workers {list(lost)}"


def what_helps(layout: Layout, placement: Placement, num_lost: int) -> str:
    """Describes what a person can set so that a loss of so many workers is survived."""
    if any(stage.num_followers == WHOLE_STAGE for stage in layout.stages):
        now = (
            "with elastic.num_followers = auto a stage survives while one of its workers is left; stages of more "
            f"workers, or elastic.num_followers = {num_lost}, would survive any {num_lost} at one instant"
        )
    else:
        copies = max((len(group) - 1 for group in placement.groups), default=0)
        together = max(copies + 1, num_lost)
        survived = f"any {copies} at one instant, and any number with some steps between them" if copies else "no loss"
        now = (
            f"elastic.num_followers = {copies} survives {survived}; {together} would survive any {together} at one "
            "instant, and auto all of a stage but one"
        )
    return (
        f"{now}. With run.checkpoint_every or run.checkpoint_every_s the job goes back to its newest checkpoint "
        "by itself, and --resume continues from it later"
    )


# ------------------------------------------------------------------------------------------------------------- planning


def plan_with(
    question: PlanRecovery,
    layout: Layout,
    blocks: Sequence[Block],
    scatter_width: int,
    *,
    execution: ExecutionParameters | None = None,
    reason: str = "",
    predicted_step_s: float | None = None,
) -> RecoveryPlan:
    """Makes a plan under a layout: valid copies are promoted, or, for a return to a checkpoint, blocks are placed
    afresh.

    Args:
        question: what is to be planned.
        layout: of the members.
        blocks: of the model.
        scatter_width: over how many replica peers the followers of blocks that are placed afresh are spread.
        execution, reason, predicted_step_s: as of `RecoveryPlan`.
    Raises:
        ValueError: the layout is of other workers than the members, or shares other units than the model.
    """
    if layout.workers != question.members:
        raise ValueError(f"the layout is of workers {layout.workers}, but the members are {question.members}")
    # Without labels followers would be chosen as if all workers were on one host (D1).
    labels = question.layout.domain_of
    if any(labels.get(worker) != label for worker, label in layout.domains):
        raise ValueError(f"the layout has its workers at {layout.domains}, but they are at {question.layout.domains}")
    if layout.shared != question.layout.shared:
        raise ValueError(f"the layout shares units as {layout.shared}, but the model does as {question.layout.shared}")
    if question.rollback:
        placement = place_blocks(layout, blocks, scatter_width=scatter_width)
        promoted = 0
    else:
        valid = question.valid.get
        found = promote(question.placement, blocks, layout, lambda block, worker: block in valid(worker, ()))
        placement, promoted = found.placement, len(found.promoted)
        if layout.with_followers_of(question.layout) != layout:
            placement = without_surplus(placement, blocks, layout)
    return RecoveryPlan(layout, placement, promoted, execution, reason, predicted_step_s)


def plan_survivors(
    question: PlanRecovery,
    blocks: Sequence[Block],
    scatter_width: int,
    *,
    reason: str = "",
) -> RecoveryPlan:
    """Makes the plan that needs no planner: survivors keep their stages and micro-batches. Arguments are as of
    `plan_with`."""
    layout = survivor_layout(question.layout, question.lost) if question.lost else question.layout
    return plan_with(question, layout, blocks, scatter_width, reason=reason)


def make_decision(
    question: PlanRecovery,
    plan: RecoveryPlan,
    pending: PendingWork,
    reports: Sequence[Report],
    *,
    term: int,
    lost: tuple[int, ...],
    reason: str,
    joined: tuple[int, ...] = (),
    left: tuple[int, ...] = (),
    newcomers: Sequence[int] = (),
    doubts_step: bool = False,
    is_sound: bool = True,
) -> Decision:
    """Makes the decision that follows from a plan.

    Args:
        question: what was planned.
        plan: the answer.
        pending: what of the base step is still to be done.
        reports: of all members.
        term: of the coordinator.
        lost: workers lost since the last decision.
        reason: of the loss, or of what else has changed the membership.
        joined, left: as of `Decision`.
        newcomers: members without state.
        doubts_step: as of `salvaged`.
        is_sound: as of `deliveries`.
    """
    assert plan.layout.workers == question.members, (
        f"a plan for workers {plan.layout.workers}, but the members are {question.members}"
    )
    base, rollback = question.base, question.rollback
    kept = salvaged(question, plan.layout, pending, reports, doubts_step=doubts_step)
    return Decision(
        term=term,
        generation=question.generation,
        members=question.members,
        lost=lost,
        evidence=question.evidence,
        resume_step=base + 1,
        # All load what they hold from a checkpoint: nothing is delivered, and attempts of before do not count.
        resume_attempt=1 if rollback else next_attempt(reports, question.evidence, base + 1),
        layout=plan.layout,
        placement=plan.placement,
        deliver=() if rollback else deliveries(plan.layout, reports, base, is_sound=is_sound),
        rollback=base if rollback else None,
        evaluate=pending.evaluate and not rollback,
        checkpoint=pending.checkpoint and not rollback,
        published=base if rollback else pending.published,
        promoted=plan.promoted,
        reason=reason,
        change=question.change,
        execution=question.execution if plan.execution is None else plan.execution,
        plan=plan.reason,
        kept=kept.kept,
        num_microbatches_recomputed=kept.num_recomputed,
        joined=joined,
        left=left,
        progress=newest_progress(reports) if newcomers and not rollback else None,
    )


def newest_progress(reports: Sequence[Report]) -> Progress | None:
    """Tells where training stands, as the member says that has learned the newest vote."""
    told = [report for report in reports if report.progress is not None]
    newest = max(told, key=lambda report: (0, 0) if report.evidence is None else report.evidence.order, default=None)
    return None if newest is None else newest.progress


def with_members(layout: Layout, members: Sequence[int], domains: Mapping[int, str]) -> Layout:
    """Extends the layout with the members that it lacks as idle ones; lost workers stay in it.

    Args:
        layout: in force.
        members: of the generation.
        domains: where they run, of those of whom that is known.
    """
    # A planner takes the lost ones out by itself, and has to know what they ran.
    new = set(members) - set(layout.workers)
    if not new:
        return layout
    layout = msgspec.structs.replace(layout, idle=tuple(sorted({*layout.idle, *new})))
    return msgspec.structs.replace(layout, domains=label_members(layout, domains))


# ------------------------------------------------------------------------------------------------------------ the end


class MemberEnd(NamedTuple):
    """A worker has said that it has made its last step."""

    generation: int
    """In which it said so."""
    step: int
    """The last one."""


def all_have_ended(members: Iterable[int], generation: int, ends: Mapping[int, MemberEnd], published: int) -> bool:
    """Tells whether no worker is needed any more: the coordinator's part of W10.

    Args:
        members: of the present generation.
        generation: the present one. Only in it does a member know its roles, so an end of an older one does not count.
        ends: worker -> its end.
        published: the newest step whose loss is known: until its last one is, another member may have to tell of it.
    """
    return all(
        worker in ends and ends[worker].generation == generation and ends[worker].step <= published
        for worker in members
    )
