"""What the transcripts are written with: a job of three workers, and short ways to say things."""

from collections.abc import Sequence
from typing import Any

from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.protocol.coordinator.decisions import plan_survivors
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import (
    CoordinatorEffect,
    CoordinatorEvent,
    Decided,
    End,
    FindCheckpoint,
    NewGeneration,
    NewGenerationRecord,
    Note,
    PendingWork,
    Persist,
    PlanningFailed,
    PlanRecovery,
    Record,
    RecoveryPlanned,
    Resumed,
    Send,
    Suspected,
    TellAddresses,
)
from elaswave.protocol.messages import (
    BlockReplicas,
    Decision,
    Evidence,
    FencedOff,
    InForce,
    Prepare,
    Registered,
    Report,
)
from verify.simulator.job import Job, Model, model_of

FIVE = Job(widths=(3, 2), num_microbatches=3)
THREE = Job(widths=(2, 1))


NOTHING_PENDING = PendingWork(evaluate=False, checkpoint=False)


class PromptCoordinator(Coordinator):
    """A machine with a driver that answers what the planner is asked in the same turn."""

    asked: PlanRecovery | None = None
    """What the planner was asked last."""

    def handle(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorEffect]:
        effects = []
        for effect in super().handle(event, now_s):
            if isinstance(effect, PlanRecovery):
                self.asked = effect
                effects += super().handle(answer(effect), now_s)
            else:
                effects.append(effect)
        return effects


def answer(question: PlanRecovery, *, job: Job | None = None) -> RecoveryPlanned:
    """The answer of a driver whose planner lets survivors keep their stages."""
    jobs = [job] if job else [each for each in (THREE, FIVE) if set(question.members) <= set(range(each.num_workers))]
    num_blocks = len(question.placement.owner)
    model = next(model_of(each) for each in jobs if len(model_of(each).blocks) == num_blocks)
    plan = plan_survivors(question, model.blocks, scatter_width=EVERYBODY)
    asked = question.evidence is not None and question.evidence.checkpoint == question.base
    return RecoveryPlanned(question.sequence, plan, PendingWork(evaluate=False, checkpoint=asked))


def failure(question: PlanRecovery) -> PlanningFailed:
    """The answer of a driver whose planner has none."""
    return PlanningFailed(question.sequence, "the planner has failed", NOTHING_PENDING)


def coordinator(
    records: Sequence[Record] = (), job: Job = THREE, kind: type[Coordinator] = PromptCoordinator, **options: Any
) -> Coordinator:
    """A coordinator of a small job."""
    model = model_of(job)
    return kind(
        InForce(model.layout, model.placement),
        blocks=model.blocks,
        scatter_width=job.scatter_width,
        records=records,
        **options,
    )


def registered(worker: int, generation: int = 1, report: Report | None = None) -> Registered:
    return Registered(worker=worker, address=f"unix:/{worker}", generation=generation, report=report)


def vote(step: int, attempt: int = 1, *, commits: bool = True, checkpoint: int = 0) -> Evidence:
    vector = b"v%d.%d" % (step, attempt)
    return Evidence(step=step, attempt=attempt, commits=commits, vector=vector, checkpoint=checkpoint)


def suspicion(worker: int) -> Suspected:
    return Suspected(worker, "exit", f"worker {worker} was killed")


def report(
    worker: int,
    generation: int,
    *,
    job: Job = THREE,
    evidence: Evidence | None = None,
    step: int = 1,
    attempt: int = 1,
    prepared: bool = False,
    version: int | None = None,
    decided: int = 0,
) -> Report:
    """A worker's report: it holds what the first placement gives it, all at one version."""
    model: Model = model_of(job)
    base = version if version is not None else (0 if evidence is None else evidence.committed_step)
    blocks = [block.id for block in model.blocks if worker in model.placement.holders(block.id)]
    stage = model.layout.stages[model.layout.stage_of(worker)]
    return Report(
        worker=worker,
        generation=generation,
        evidence=evidence,
        step=step,
        attempt=attempt,
        prepared=prepared,
        parameters_step=base,
        layers=(stage.start, stage.stop),
        copies=BlockReplicas(
            blocks=blocks,
            owned=[model.placement.owner[block] == worker for block in blocks],
            versions=[base] * len(blocks),
        ),
        decided=decided,
    )


def started(job: Job = THREE, kind: type[Coordinator] = PromptCoordinator, **options: Any) -> Coordinator:
    """A coordinator whose job is training."""
    machine = coordinator(job=job, kind=kind, **options)
    machine.begin()
    for worker in range(job.num_workers):
        machine.handle(registered(worker), 0.0)
    return machine


def shown(effects: Sequence[CoordinatorEffect]) -> list[str]:
    """Effects as lines to read."""
    return [_line(effect) for effect in effects]


def _line(effect: CoordinatorEffect) -> str:
    if isinstance(effect, Persist):
        return f"persist {_message(effect.record)}"
    if isinstance(effect, Send):
        return f"to {effect.worker}: {_message(effect.message)}"
    if isinstance(effect, TellAddresses):
        return f"start {sorted(effect.addresses)}"
    if isinstance(effect, PlanRecovery):
        return (
            f"plan {effect.sequence} of generation {effect.generation}: {list(effect.members)} after step {effect.base}"
        )
    if isinstance(effect, NewGeneration):
        return f"show generation {effect.generation}"
    if isinstance(effect, Decided):
        return f"decided {effect.decision.generation}"
    if isinstance(effect, Resumed):
        return f"resumed {effect.generation}"
    if isinstance(effect, End):
        return f"end: {effect.reason}"
    if isinstance(effect, Note):
        return f"note: {effect.text}"
    assert isinstance(effect, FindCheckpoint)
    return "find a checkpoint"


def _message(message: Any) -> str:
    if isinstance(message, Decision):
        again = "" if message.rollback is None else f", back to {message.rollback}"
        seen = "" if message.evidence is None else f", vote {message.evidence.step}.{message.evidence.attempt}"
        return (
            f"decision {message.generation} of term {message.term}: {list(message.members)} resume "
            f"{message.resume_step}.{message.resume_attempt}{seen}{again}"
        )
    if isinstance(message, Prepare):
        return f"prepare {message.generation} of term {message.term}: {list(message.members)}"
    if isinstance(message, FencedOff):
        return f"fenced at {message.generation}"
    if isinstance(message, NewGenerationRecord):
        return f"new generation {message.generation}"
    text = type(message).__name__.removesuffix("Record").lower()
    return f"{text} {message.generation}" if hasattr(message, "generation") else f"{text} of term {message.term}"
