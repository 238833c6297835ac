"""After a vote whose certificate did not hold: who differs, from whom, in what.

The certificate's sums say that something is wrong; the same terms, item by item, say what. One more all-reduce over
counts per item, so every worker comes to the same sentence. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from elaswave.hashing import signed64
from elaswave.state.store import Role
from elaswave.state.sums import checksum
from elaswave.worker.channels import WAIT_TIMEOUT_S

if TYPE_CHECKING:
    from elaswave.worker.step import StepEngine

_MAX_NAMED = 4


def diagnose(engine: StepEngine, failed: Sequence[str]) -> str:
    """Names what made a certificate fail. All workers must call it after the same vote.

    Args:
        engine: the worker's step engine, in the state in which it voted.
        failed: the parts that failed, from the verdict.
    Returns:
        A clause such as "block 17 differs between its owner, worker 0, and its followers, workers [1]".
    """
    findings: list[str] = []
    if "coverage" in failed:
        findings += _coverage(engine)
    if "agreement" in failed:
        findings += _agreement(engine)
    if "partial sums" in failed:
        findings += _partial_sums(engine)
    if "residency" in failed or "next residency" in failed:
        findings += _residency(engine)
    if "layout" in failed:
        findings += _layouts(engine)
    if not findings:
        return "no single item could be named"
    more = f"; and {len(findings) - _MAX_NAMED} more" if len(findings) > _MAX_NAMED else ""
    return "; ".join(findings[:_MAX_NAMED]) + more


def _sum(engine: StepEngine, values: list[int], part: int) -> list[int]:
    vector = torch.tensor(values, dtype=torch.int64)
    engine.group.all_reduce_with(
        vector, torch.Tensor.add_, step=engine.step, attempt=engine.attempt, sub=part, timeout_s=WAIT_TIMEOUT_S
    )
    result: list[int] = vector.tolist()
    return result


def _coverage(engine: StepEngine) -> list[str]:
    num_layers, num_microbatches = engine.layout.num_layers, engine.layout.num_microbatches
    counts = [0] * (num_layers * num_microbatches)
    for (layer, microbatch), count in engine.compute.counts.items():
        counts[layer * num_microbatches + microbatch] = count
    findings: dict[tuple[int, int], list[int]] = {}
    for index, count in enumerate(_sum(engine, counts, part=1)):
        if count != 1:
            layer, microbatch = divmod(index, num_microbatches)
            findings.setdefault((microbatch, count), []).append(layer)
    return [
        f"micro-batch {microbatch} was added {count} times in layers {layers}, once was needed"
        for (microbatch, count), layers in sorted(findings.items())
    ]


def _agreement(engine: StepEngine) -> list[str]:
    differences = [0] * len(engine.blocks)
    for block, weight, key in engine.agreement_terms():
        differences[block] = signed64(weight * key)
    placement = engine.voting_placement
    return [
        f"block {block} differs between its owner, worker {placement.owner[block]}, and its followers, workers "
        f"{list(placement.followers[block])}"
        for block, difference in enumerate(_sum(engine, differences, part=2))
        if difference
    ]


def _partial_sums(engine: StepEngine) -> list[str]:
    """Which partial sum is not what was added to it, has changed on its way, or was added up wrongly."""
    workers, num_layers, num_blocks = engine.layout.workers, engine.layout.num_layers, len(engine.blocks)
    position = workers.index(engine.worker)
    changed = [0] * (len(workers) * num_layers)
    for layer, accumulator in engine.compute.accumulators.items():
        difference = checksum(accumulator.sum, accumulator.shape, 0) - accumulator.checksum
        changed[position * num_layers + layer] = signed64(difference)
    on_the_way = [0] * num_blocks
    for block, difference in engine.exchange.in_transit().items():
        on_the_way[block] = signed64(difference)
    added_up = [0] * len(workers)
    added_up[position] = signed64(engine.exchange.balance - engine.exchange.recount())
    total = _sum(engine, changed + on_the_way + added_up, part=5)
    owner = engine.voting_placement.owner
    findings = []
    for index, difference in enumerate(total[: len(changed)]):
        worker, layer = workers[index // num_layers], index % num_layers
        if difference:
            findings.append(f"worker {worker}'s partial sum of layer {layer} is not what was added to it")
    for block, difference in enumerate(total[len(changed) : -len(workers)]):
        if difference:
            findings.append(f"partial sums of block {block} changed on their way to its owner, worker {owner[block]}")
    for worker, difference in zip(workers, total[-len(workers) :], strict=True):
        if difference:
            findings.append(f"worker {worker} added up partial sums wrongly")
    return findings


def _residency(engine: StepEngine) -> list[str]:
    num_blocks = len(engine.blocks)
    counts = [0] * (3 * num_blocks)
    for held in engine.voting_store:
        block = held.block.id
        counts[block + (0 if held.role is Role.OWNER else num_blocks)] += 1
        counts[block + 2 * num_blocks] += engine.step - 1 - held.version
    total = _sum(engine, counts, part=3)
    findings = []
    for block in range(num_blocks):
        owners, followers, behind = total[block], total[block + num_blocks], total[block + 2 * num_blocks]
        wanted = len(engine.voting_placement.followers[block])
        if owners != 1 or followers != wanted:
            findings.append(f"block {block} has {owners} owners and {followers} followers, needed are 1 and {wanted}")
        elif behind:
            findings.append(f"a copy of block {block} is {behind} steps behind")
    return findings


def _layouts(engine: StepEngine) -> list[str]:
    workers = engine.layout.workers
    hashes = [0] * len(workers)
    hashes[workers.index(engine.worker)] = engine.next_layout_hash
    held = dict(zip(workers, _sum(engine, hashes, part=4), strict=True))
    groups: dict[int, list[int]] = {}
    for worker, layout in held.items():
        groups.setdefault(layout, []).append(worker)
    return ["the next layout differs between workers " + " and ".join(map(str, groups.values()))]
