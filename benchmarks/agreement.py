"""What agreeing on a loss costs the coordinator, by the number of workers: processor time, messages and bytes.

    python benchmarks/agreement.py [--workers 8 64 1024] [--model gpt2-small] [--runs 3] [--json]

The product's coordinator machine, recovery plan and wire format, in one process, without sockets: one worker of a job
is lost, every survivor's report is decoded and handled, survivors keep their stages, and the decision is encoded as it
is sent. Survivors do their own part side by side on machines of their own, so it is not counted; nor is the time that
messages travel. Best of several runs.
"""

import argparse
import json
import sys
import time
from typing import Any, NamedTuple

import msgspec
from harness import machine, print_header

from elaswave.blocks.placement import Block, Placement, default_block_size, make_blocks, place_blocks
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
from elaswave.protocol.messages import BlockReplicas, Decision, Evidence, Installed, Registered, Report
from elaswave.types import Layout

STAGES = {8: 2, 16: 2, 64: 4, 256: 8, 1_024: 8, 4_096: 8}
MICROBATCHES_PER_REPLICA = 8
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
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    rows = []
    for workers in options.workers:
        job = make_job(options.model, workers)
        best = min((lose_one(job) for _ in range(options.runs)), key=lambda costs: costs.total_s)
        rows.append({"workers": workers, "blocks": len(job.blocks), **best._asdict(), "total_s": best.total_s})
    if options.json:
        print(json.dumps({"machine": where, "model": options.model, "rows": rows}, indent=2))
    else:
        print_table(rows, options.model, where)
    return 0


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
    placement = place_blocks(layout.with_followers(1), blocks, scatter_width=SCATTER_WIDTH)
    held: dict[int, BlockReplicas] = {
        worker: BlockReplicas(blocks=[], owned=[], versions=[]) for worker in layout.active
    }
    for block in blocks:
        for worker in placement.holders(block.id):
            held[worker].blocks.append(block.id)
            held[worker].owned.append(worker == placement.owner[block.id])
            held[worker].versions.append(STEP)
    return Job(layout, blocks, placement, held)


def lose_one(job: Job) -> Costs:
    """One worker in the middle is lost."""
    workers = job.layout.active
    core = Coordinator(
        layout=job.layout,
        placement=job.placement,
        blocks=job.blocks,
        scatter_width=SCATTER_WIDTH,
    )
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


def print_table(rows: list[dict[str, Any]], model: str, where: dict[str, Any]) -> None:
    """For people."""
    print_header(where)
    print(f"one of so many workers is lost, blocks of {model}: processor time of the coordinator, best of several runs")
    print(
        f"{'workers':>7} {'blocks':>7} {'reports ms':>10} {'plan ms':>8} {'decide ms':>9} {'total ms':>8} "
        f"{'us/worker':>9} {'decision KB':>11} {'sent MB':>8} {'received MB':>11} {'messages':>8}"
    )
    for row in rows:
        each_us = row["total_s"] / row["workers"] * 1e6
        print(
            f"{row['workers']:>7,} {row['blocks']:>7,} {row['reports_s'] * 1e3:>10.1f} {row['plan_s'] * 1e3:>8.1f} "
            f"{row['decide_s'] * 1e3:>9.1f} {row['total_s'] * 1e3:>8.1f} {each_us:>9.0f} "
            f"{row['decision_bytes'] / 1e3:>11.1f} {row['sent_bytes'] / 1e6:>8.1f} "
            f"{row['received_bytes'] / 1e6:>11.2f} {row['messages']:>8,}"
        )


if __name__ == "__main__":
    sys.exit(main())
