"""Probe 4: do a layer's bits depend on the process, on what ran before, on addresses, or on who computes beside it?"""

import random
import sys
from collections.abc import Iterator

import torch
from bits import bits_of, cases, make_bits_repeat
from crowd import Crowd, Ended, Member
from parts import Bench, Probe, Row

PROBE = Probe(4, __file__)
_WORKERS = 4


def _shuffle_memory(bench: Bench, chance: random.Random) -> list[torch.Tensor]:
    """Blocks of the allocator at random, half of them given back: the next tensors lie elsewhere."""
    most = 1 << (10 if bench.small else 22)
    blocks = [torch.empty(chance.randrange(1, most), dtype=torch.uint8, device=bench.device) for _ in range(40)]
    chance.shuffle(blocks)
    return blocks[:20]


def _work(member: Member, bench: Bench, rounds: int, is_shuffled: bool) -> None:
    make_bits_repeat()
    chance = random.Random(member.number)
    todo = list(cases(bench.small))
    torch.ones(8, device=bench.device).sum().item()
    member.say("ready")
    if member.heard(60.0) != "go":
        return
    for number in range(rounds):
        if is_shuffled:
            chance.shuffle(todo)
        held = _shuffle_memory(bench, chance) if is_shuffled else []
        for case in todo:
            try:
                member.say((case.label, number, bits_of(case, bench.device)))
            except RuntimeError as error:
                member.say((case.label, number, str(error)[:200]))
        del held
    member.say("done")


def _bits(bench: Bench, num_workers: int, rounds: int, is_shuffled: bool) -> tuple[dict[str, dict], int]:
    """By case, how often each hash was found: {label: {(hash, is fresh): count}}; and how many processes ended well."""
    found: dict[str, dict] = {}
    done = 0
    with Crowd(_work, [(bench, rounds, is_shuffled)] * num_workers) as crowd:
        crowd.expect("ready", 60.0)
        for member in range(num_workers):
            crowd.tell(member, "go")
        for report in crowd.reports(max(10.0, bench.left_s)):
            if report.message == "done":
                done += 1
            elif not isinstance(report.message, Ended):
                label, number, bits = report.message
                counts = found.setdefault(label, {})
                counts[bits, number == 0] = counts.get((bits, number == 0), 0) + 1
    return found, done


@PROBE.part(90)
def four_processes(bench: Bench) -> Iterator[Row]:
    """One process alone, then four at once, each in an order of its own, fresh and warm, in shuffled memory."""
    alone, done = _bits(bench, 1, 1, False)
    yield {"processes": 1, "ended_well": done}
    beside, done = _bits(bench, _WORKERS, 2 if bench.small else 4, True)
    yield {"processes": _WORKERS, "ended_well": done}
    for label, counts in beside.items():
        first = next(iter(alone.get(label, {(None, True): 0})))[0]
        hashes = {bits for bits, _ in counts}
        yield {
            "case": label,
            "runs": sum(counts.values()),
            "different": len(hashes),
            "as_alone": hashes == {first},
            "fresh_differs": {bits for bits, fresh in counts if fresh} != {bits for bits, fresh in counts if not fresh},
            **({"error": next(each for each in hashes if isinstance(each, str))} if any(
                isinstance(each, str) for each in hashes
            ) else {}),
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(PROBE.main())
