"""After a vote whose certificate did not hold: who differs, from whom, in what.

The certificate's sums say that something is wrong; the same terms, item by item, say what. One more all-reduce over
counts per item, so every worker comes to the same sentence. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from elaswave.hashing import signed64
from elaswave.runtime.channels import WAIT_TIMEOUT_S
from elaswave.state.store import Role

if TYPE_CHECKING:
    from elaswave.runtime.step import StepEngine

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
