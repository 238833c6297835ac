"""After a vote whose certificate did not hold: who differs, from whom, in what.

The certificate's sums say that something is wrong; the same terms, item by item, say what. One more all-reduce over
counts per item, so every worker comes to the same sentence, and to the same copies that are wrong. Nothing is decided
here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from elaswave.blocks.placement import ReplicaRole
from elaswave.hashing import signed64
from elaswave.protocol.step.ballot import ENVIRONMENT, LOSS, TEXT_WORDS, add_words, text_words, words_text
from elaswave.protocol.step.blocks import WorkerBlocks
from elaswave.protocol.step.engine import FrameKind
from elaswave.protocol.step.execution import Execution, Life
from elaswave.protocol.step.soundness import CopyChecks, Soundness, describe_mismatches, judge_copies

_Finding = Life[list[str]]

_MAX_NAMED = 4


class Voter(Protocol):
    """A worker in the state in which it voted: an `elaswave.protocol.step.loop.StepLoop`."""

    execution: Execution[Any]
    blocks: WorkerBlocks[Any]
    checks: CopyChecks[Any]
    determinism_hashes: dict[int, int]
    """What layers made of made-up numbers where they ran before, by place."""

    @property
    def progress_hash(self) -> int:
        """Hashes grids and number of updates."""


def diagnose(voter: Voter, failed: Sequence[str]) -> Life[tuple[str, Soundness]]:
    """Names what made a certificate fail. All workers must do it after the same vote.

    Args:
        voter: this worker.
        failed: the parts that failed, from the verdict.
    Returns:
        A clause such as "block 17 differs between its owner, worker 0, and its followers, workers [1]", and which
        copies are wrong.
    """
    checks, blocks = voter.checks, voter.blocks
    changes = (yield from checks.changes_of_all()) if "memory" in failed else []
    differences = (yield from checks.differing()) if "agreement" in failed else []
    findings = describe_mismatches(blocks.voting, changes, differences, checks.layer_of_change)
    text = yield from _name(voter, failed, findings)
    return text, judge_copies(blocks.placement, changes, differences)


def _name(voter: Voter, failed: Sequence[str], findings: list[str]) -> Life[str]:
    for what, find in _FINDERS.items():
        if what in failed:
            findings += yield from find(voter)
    if "loss counts" in failed:
        findings.append("the loss returned a count for some micro-batches and none for others")
    if not findings:
        return "no single item could be named"
    more = f"; and {len(findings) - _MAX_NAMED} more" if len(findings) > _MAX_NAMED else ""
    return "; ".join(findings[:_MAX_NAMED]) + more


def _sum(voter: Voter, values: list[int], part: int) -> Life[Sequence[int]]:
    return (yield from voter.execution.all_reduce(FrameKind.DIAGNOSIS, values, add_words, part))


def _coverage(voter: Voter) -> _Finding:
    layout = voter.execution.layout
    num_units, num_microbatches = layout.num_layers + len(layout.shared), layout.num_microbatches
    counts = [0] * ((num_units + 1) * num_microbatches)
    for (layer, microbatch), count in voter.execution.engine.counts().items():
        counts[(num_units if layer == LOSS else layer) * num_microbatches + microbatch] = count
    findings: dict[tuple[int, int, int], list[int]] = {}
    losses = []
    for index, count in enumerate((yield from _sum(voter, counts, part=1))):
        unit, microbatch = divmod(index, num_microbatches)
        if unit == num_units:
            losses += [f"the loss of micro-batch {microbatch} counts {_times(count)}"] if count != 1 else []
        elif count != layout.num_uses(unit):
            findings.setdefault((microbatch, count, layout.num_uses(unit)), []).append(unit)
    return [
        f"micro-batch {microbatch} was added {count} times in layers {units}, {_times(needed)} was needed"
        for (microbatch, count, needed), units in sorted(findings.items())
    ] + losses


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _partial_sums(voter: Voter) -> _Finding:
    """Finds which partial sum is not what was added to it, has changed on its way, or was added up wrongly."""
    workers, num_blocks = voter.execution.layout.workers, len(voter.execution.terms.blocks)
    num_layers = voter.execution.layout.num_layers + len(voter.execution.layout.shared)
    position = workers.index(voter.execution.worker)
    imbalance = voter.execution.engine.imbalance()
    changed = [0] * (len(workers) * num_layers)
    for layer, difference in imbalance.layers.items():
        changed[position * num_layers + layer] = signed64(difference)
    on_the_way = [0] * num_blocks
    for block, difference in imbalance.blocks.items():
        on_the_way[block] = signed64(difference)
    added_up = [0] * len(workers)
    added_up[position] = signed64(imbalance.totals)
    total = yield from _sum(voter, changed + on_the_way + added_up, part=5)
    owner = voter.blocks.voting.owner
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


def _residency(voter: Voter) -> _Finding:
    num_blocks = len(voter.execution.terms.blocks)
    counts = [0] * (3 * num_blocks)
    held = voter.blocks.voting_copies
    for block, role, version in zip(held.blocks.tolist(), held.roles.tolist(), held.versions, strict=True):
        counts[block + (0 if role == ReplicaRole.OWNER else num_blocks)] += 1
        counts[block + 2 * num_blocks] += voter.execution.step - 1 - version
    total = yield from _sum(voter, counts, part=3)
    findings = []
    for block in range(num_blocks):
        owners, followers, behind = total[block], total[block + num_blocks], total[block + 2 * num_blocks]
        wanted = len(voter.blocks.voting.followers[block])
        if owners != 1 or followers != wanted:
            findings.append(f"block {block} has {owners} owners and {followers} followers, needed are 1 and {wanted}")
        elif behind:
            findings.append(f"a copy of block {block} is {behind} steps behind")
    return findings


def _layouts_and_grids(voter: Voter) -> _Finding:
    workers = voter.execution.layout.workers
    own = (voter.blocks.agreement_hash, voter.progress_hash)
    hashes = [0] * (len(own) * len(workers))
    for kind, value in enumerate(own):
        hashes[kind * len(workers) + workers.index(voter.execution.worker)] = value
    total = yield from _sum(voter, hashes, part=4)
    findings = []
    for kind, what in enumerate(("the next layout differs", "grids or the number of updates differ")):
        groups: dict[int, list[int]] = {}
        for worker, held in zip(workers, total[kind * len(workers) :], strict=False):
            groups.setdefault(held, []).append(worker)
        if len(groups) > 1:
            findings.append(f"{what} between workers " + " and ".join(map(str, groups.values())))
    return findings


def _environments(voter: Voter) -> _Finding:
    """Finds which workers compute with something else, and in which operators that shows."""
    workers, ours = voter.execution.layout.workers, voter.execution.engine.environment()
    names = sorted(ours.operators)
    size, position = len(names) + TEXT_WORDS, workers.index(voter.execution.worker)
    values = [0] * (size * len(workers))
    values[size * position : size * (position + 1)] = [
        *(ours.operators[name] for name in names),
        *text_words(ours.text),
    ]
    total = yield from _sum(voter, values, part=6)
    groups: dict[tuple[int, ...], list[int]] = {}
    texts: dict[tuple[int, ...], str] = {}
    for index, worker in enumerate(workers):
        found = total[size * index : size * (index + 1)]
        hashes = tuple(found[: len(names)])
        groups.setdefault(hashes, []).append(worker)
        texts.setdefault(hashes, words_text(found[len(names) :]))
    (first, most), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    if not others:
        return [f"workers {most} ({texts[first]}) compute other bits than those that have voted before"]
    return [
        f"workers {few} ({texts[hashes]}) compute other bits than workers {most} ({texts[first]}) in "
        + ", ".join(name for name, one, other in zip(names, hashes, first, strict=True) if one != other)
        for hashes, few in others
    ]


def _layers(voter: Voter) -> _Finding:
    """Finds which layers are not the same on all workers."""
    workers, num_layers = voter.execution.layout.workers, voter.execution.layout.num_layers
    values = [0] * (num_layers * len(workers))
    for place, value in voter.execution.engine.measured().determinism_hashes.items():
        if place != ENVIRONMENT:
            values[num_layers * workers.index(voter.execution.worker) + place - ENVIRONMENT - 1] = value
    total = yield from _sum(voter, values, part=7)
    findings = []
    for layer in range(num_layers):
        groups: dict[int, list[int]] = {}
        for index, worker in enumerate(workers):
            if value := total[num_layers * index + layer]:
                groups.setdefault(value, []).append(worker)
        known = voter.determinism_hashes.get(ENVIRONMENT + 1 + layer)
        if known is not None and set(groups) - {known}:
            groups.setdefault(known, [])
        if len(groups) > 1:
            sides = [f"workers {members}" if members else "where it ran before" for members in groups.values()]
            name = voter.execution.terms.layer_name(layer)
            findings.append(f"layer {name} differs in shapes or bits between " + " and ".join(sides))
    return findings


_FINDERS: dict[str, Callable[[Voter], _Finding]] = {
    "coverage": _coverage,
    "partial sums": _partial_sums,
    "residency": _residency,
    "layout and grids": _layouts_and_grids,
    "environment": _environments,
    "layers": _layers,
}
"""By part of the certificate, in the order in which all workers look."""
