"""What agreeing on a loss costs the coordinator, by the number of workers: processor time, messages and bytes.

    python benchmarks/agreement.py [--workers 8 64 1024] [--model gpt2-small] [--runs 3] [--json]
    python benchmarks/agreement.py --workers 16 --blocks 262144 --followers 15

The product's coordinator machine, recovery plan and wire format, in one process, without sockets: one worker of a job
is lost, every survivor's report is decoded and handled, survivors keep their stages, and the decision is encoded as it
is sent. Survivors do their own part side by side on machines of their own, so it is not counted; nor is the time that
messages travel. Best of several runs.

With `--blocks` the workers are one stage that holds so many blocks, with one follower of each and with as many as
`--followers` says. Then it is told also what a step costs a worker in the protocol, beside what its engine computes:
the ballot (numbers of gradients, masters and states are given), the verdict, which is compared with what placement and
layout say, and what is learned from it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from harness import machine, print_header

from elaswave.blocks.placement import Block, Placement, ReplicaRole, default_block_size, make_blocks, place_blocks
from elaswave.channel.wire import MAX_MESSAGE_BYTES, encode_payload, unpacked
from elaswave.config.presets import device_preset, model_shape
from elaswave.planning.costs.analytic import PARAMETER_BYTES, analytic_costs
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.coordinator.decisions import plan_survivors
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import (
    CoordinatorEffect,
    CoordinatorEvent,
    PendingWork,
    Persist,
    PlanRecovery,
    RecoveryPlanned,
    Send,
    Suspected,
)
from elaswave.protocol.messages import BlockReplicas, Decision, Evidence, InForce, Installed, Registered, Report
from elaswave.protocol.step.ballot import GridState, Scores, VoteOutcome
from elaswave.protocol.step.engine import JobTerms, Measured, Ports, StepObserver, TrainingProgress
from elaswave.protocol.step.ledger import HeldCopies, Ledger
from elaswave.protocol.step.loop import StepLoop
from elaswave.types import WHOLE_STAGE, Layout

STAGES = {8: 2, 16: 2, 64: 4, 256: 8, 1_024: 8, 4_096: 8}
MICROBATCHES_PER_REPLICA = 8
LAYERS = 32
"""Where the number of blocks is given."""
SCATTER_WIDTH = 2
STEP = 10
"""The newest committed step."""


class Job(NamedTuple):
    """What a coordinator is given."""

    layout: Layout
    blocks: tuple[Block, ...]
    placement: Placement
    held: dict[int, BlockReplicas]
    """By worker."""
    num_followers: int = 1


class Costs(NamedTuple):
    """Of one loss."""

    reports_s: float
    """To decode and handle the survivors' reports."""
    plan_s: float
    """To plan how they go on."""
    decide_s: float
    """To make the decision, and to encode what is sent."""
    installed_s: float
    """To decode and handle their word that they compute again."""
    decision_bytes: int
    sent_bytes: int
    """All messages to all survivors."""
    received_bytes: int
    messages: int
    """Both ways."""

    @property
    def total_s(self) -> float:
        """Processor time from the loss until the last decision is encoded."""
        return self.reports_s + self.plan_s + self.decide_s


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=sorted(STAGES), choices=sorted(STAGES))
    parser.add_argument("--model", default="gpt2-small", help="a preset: its parameters are the blocks")
    parser.add_argument("--blocks", type=int, help="so many in one stage, in place of a model's")
    parser.add_argument("--followers", type=int, default=1, help="of each of these blocks, besides one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    what = options.model if options.blocks is None else f"{options.blocks:,} blocks in one stage"
    rows = []
    if not options.json:
        print_head(what, where)
    for job in jobs_of(options):
        best = min((lose_one(job) for _ in range(options.runs)), key=lambda costs: costs.total_s)
        row = {"workers": len(job.layout.workers), "blocks": len(job.blocks), "followers": job.num_followers}
        row |= {**best._asdict(), "total_s": best.total_s}
        if options.blocks is not None:
            row["step_s"] = step_of_a_worker(job, 4 * options.runs)
        rows.append(row)
        if not options.json:
            print_row(row)
    if options.json:
        print(json.dumps({"machine": where, "model": what, "rows": rows}, indent=2))
    return 0


def jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    """The jobs that are asked for."""
    for workers in options.workers:
        if options.blocks is None:
            yield make_job(options.model, workers)
        else:
            for num_followers in dict.fromkeys((1, options.followers)):
                yield one_stage(workers, options.blocks, num_followers)


def one_stage(num_workers: int, num_blocks: int, num_followers: int) -> Job:
    """A job of one stage with so many blocks."""
    layout = make_layout(
        widths=[num_workers], layers_per_stage=[LAYERS], num_microbatches=MICROBATCHES_PER_REPLICA * num_workers
    ).with_followers(WHOLE_STAGE if num_followers == num_workers - 1 else num_followers)
    sizes = [num_blocks // LAYERS + (layer < num_blocks % LAYERS) for layer in range(LAYERS)]
    return job_of(layout, make_blocks(sizes, 1), num_followers)


def make_job(model: str, num_workers: int) -> Job:
    """A job of so many workers, and what each of them holds."""
    costs = analytic_costs(model_shape(model), device_preset("h100"))
    sizes = [int(layer.parameter_bytes // PARAMETER_BYTES) for layer in costs.layers]
    num_stages = min(STAGES.get(num_workers, max(STAGES.values())), len(sizes))
    replicas = num_workers // num_stages
    each, rest = divmod(len(sizes), num_stages)
    layout = make_layout(
        widths=[replicas] * num_stages,
        layers_per_stage=[each + (stage < rest) for stage in range(num_stages)],
        num_microbatches=MICROBATCHES_PER_REPLICA * replicas,
    )
    blocks = make_blocks(sizes, default_block_size(sum(sizes)))
    return job_of(layout, blocks, 1)


def job_of(layout: Layout, blocks: tuple[Block, ...], num_followers: int) -> Job:
    """A job, and what each of its workers holds."""
    placement = place_blocks(layout, blocks, scatter_width=SCATTER_WIDTH)
    held = {worker: HeldCopies(copies_of(worker, placement, blocks), STEP).replicas() for worker in layout.active}
    return Job(layout, blocks, placement, held, num_followers)


def copies_of(worker: int, placement: Placement, blocks: tuple[Block, ...]) -> dict[int, Any]:
    """The copies that a worker holds."""
    return {
        block.id: SimpleNamespace(block=block, role=ReplicaRole(role))
        for block, role in zip(blocks, placement.roles(worker).tolist(), strict=True)
        if role
    }


def lose_one(job: Job) -> Costs:
    """One worker in the middle is lost."""
    workers = job.layout.active
    core = Coordinator(InForce(job.layout, job.placement), blocks=job.blocks, scatter_width=SCATTER_WIDTH)
    core.begin()
    for worker in workers:
        core.handle(Registered(worker=worker, address=f"tcp:10.0.0.1:{worker}", generation=1, report=None), 0.0)
    lost = workers[len(workers) // 2]
    survivors = [worker for worker in workers if worker != lost]
    reports = [encode_payload(report_of(job, worker)) for worker in survivors]
    sent: list[bytes] = []

    asking_s, _ = handle(core, Suspected(lost, "exit", "it was killed"), sent)
    reports_s, questions = 0.0, list[CoordinatorEffect]()
    decoder = msgspec.msgpack.Decoder(Report)
    for payload in reports:
        begin_s = time.process_time()
        report = decoder.decode(unpacked(payload, MAX_MESSAGE_BYTES))
        reports_s += time.process_time() - begin_s
        taken_s, questions = handle(core, report, sent)
        reports_s += taken_s
    question = next(effect for effect in questions if isinstance(effect, PlanRecovery))
    begin_s = time.process_time()
    plan = plan_survivors(question, job.blocks, SCATTER_WIDTH)
    plan_s = time.process_time() - begin_s
    pending = PendingWork(evaluate=False, checkpoint=False)
    decide_s, effects = handle(core, RecoveryPlanned(question.sequence, plan, pending), sent)
    decision = next(e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Decision))
    words = [
        encode_payload(
            Installed(worker=worker, generation=decision.generation, edit_s=0.01, promote_s=0.01, critical_bytes=0)
        )
        for worker in survivors
    ]
    begin_s = time.process_time()
    for payload in words:
        core.handle(msgspec.msgpack.decode(payload, type=Installed), 0.0)
    installed_s = time.process_time() - begin_s
    return Costs(
        reports_s=asking_s + reports_s,
        plan_s=plan_s,
        decide_s=decide_s,
        installed_s=installed_s,
        decision_bytes=len(encode_payload(decision)),
        sent_bytes=sum(map(len, sent)),
        received_bytes=sum(map(len, reports + words)),
        messages=len(sent) + len(reports) + len(words),
    )


class Numbers:
    """An engine that has computed all that is asked of it."""

    def use_layout(self, layout: Layout, execution: Any, copies: Any) -> frozenset[int]:
        """Nothing to make room for."""
        return frozenset()

    def measured(self) -> Measured:
        """Of one micro-batch."""
        return Measured(1, 1, Scores({0: 2.0}), {0: 1.0}, None, duration_us=100)

    def square_sums(self, copies: Any) -> Any:
        """Any."""
        return np.ones(len(copies))

    def changes(self, copies: Any, *, given_up: bool) -> list[Any]:
        """None."""
        return []

    def gradient_hashes(self, copies: Any) -> Any:
        """Any."""
        return np.ones(len(copies), np.uint64)

    master_hashes = state_hashes = gradient_hashes

    def parameter_hashes(self, blocks: Any, copies: Any) -> Any:
        """Any."""
        return np.ones(len(blocks), np.uint64)


def step_of_a_worker(job: Job, runs: int) -> float:
    """Seconds of processor time that the protocol takes of a worker in a step: ballot, verdict, and what is learned;
    the least of several."""
    worker, num_elements = job.layout.active[0], sum(block.num_elements for block in job.blocks)
    terms = JobTerms(
        blocks=job.blocks,
        num_layers=LAYERS,
        num_tensors=1,
        num_microbatches=job.layout.num_microbatches,
        num_steps=1000,
        scatter_width=SCATTER_WIDTH,
        copy_elements=num_elements,
        move_elements=num_elements,
        move_bounds=(1, num_elements),
        compile=lambda *_, **__: (),
    )
    ports = Ports(worker, terms, Numbers(), *[SimpleNamespace()], StepObserver(), *[SimpleNamespace()] * 2)
    copies = copies_of(worker, job.placement, job.blocks)
    progress = TrainingProgress(STEP, GridState((0,), calibrated=True, exact=True))
    loop = StepLoop[Any](ports, Ledger(worker, STEP), InForce(job.layout, job.placement), copies, progress)
    taken_s = []
    for step in range(STEP + 1, STEP + 1 + runs):
        loop.ledger.begin(step, 1)
        loop.execution.step, loop.execution.attempt = step, 1
        loop.ledger.prepare()
        begin_s = time.process_time()
        vector = loop._vote_shape.vector_of(loop.ballot())
        verdict = loop.judge(vector, step)
        loop.learn(vector, verdict._replace(outcome=VoteOutcome.COMMIT, failed=()))
        taken_s.append(time.process_time() - begin_s)
        loop.blocks.copies.version = step
    return min(taken_s)


def handle(core: Coordinator, event: CoordinatorEvent, sent: list[bytes]) -> tuple[float, list[CoordinatorEffect]]:
    """Gives the machine an event, and encodes what it persists and sends; processor time, and the effects."""
    begin_s = time.process_time()
    effects = core.handle(event, 0.0)
    newest: tuple[Any, bytes] = (None, b"")
    for effect in effects:
        if isinstance(effect, Persist):
            encode_payload(effect.record)
        elif isinstance(effect, Send):
            if newest[0] is not effect.message:  # as the server has it: one message to several peers is encoded once
                newest = (effect.message, encode_payload(effect.message))
            sent.append(newest[1])
    return time.process_time() - begin_s, effects


def report_of(job: Job, worker: int) -> Report:
    """What a survivor says of step 11, which was interrupted."""
    stage = job.layout.stages[job.layout.stage_of(worker)]
    return Report(
        worker=worker,
        generation=2,
        evidence=Evidence(step=STEP, attempt=1, commits=True, vector=b"v" * 64),
        step=STEP + 1,
        attempt=1,
        prepared=False,
        parameters_step=STEP,
        layers=(stage.start, stage.stop),
        copies=job.held[worker],
    )


def print_head(what: str, where: dict[str, Any]) -> None:
    """For people."""
    print_header(where)
    print(f"one of so many workers is lost, {what}: processor time of the coordinator, best of several runs")
    print(
        f"{'workers':>7} {'blocks':>7} {'followers':>9} {'reports ms':>10} {'plan ms':>8} {'decide ms':>9} "
        f"{'total ms':>8} {'us/worker':>9} {'decision KB':>11} {'sent MB':>8} {'received MB':>11} {'messages':>8} "
        f"{'step ms':>8}",
        flush=True,
    )


def print_row(row: dict[str, Any]) -> None:
    """For people."""
    each_us = row["total_s"] / row["workers"] * 1e6
    step = f"{row['step_s'] * 1e3:.1f}" if "step_s" in row else "-"
    print(
        f"{row['workers']:>7,} {row['blocks']:>7,} {row['followers']:>9} {row['reports_s'] * 1e3:>10.1f} "
        f"{row['plan_s'] * 1e3:>8.1f} {row['decide_s'] * 1e3:>9.1f} {row['total_s'] * 1e3:>8.1f} {each_us:>9.0f} "
        f"{row['decision_bytes'] / 1e3:>11.1f} {row['sent_bytes'] / 1e6:>8.1f} "
        f"{row['received_bytes'] / 1e6:>11.2f} {row['messages']:>8,} {step:>8}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
