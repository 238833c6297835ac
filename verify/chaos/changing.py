"""Chaos with a changing membership: drawn jobs that grow, shrink, lose, and slow down, all in one run.

A case is a pure function of (seed, index), as in `verify.chaos.cases`. It is longer, since a joiner needs seconds
to get ready. Kinds of cases take turns: a mix of everything, growing to twelve workers, shrinking to one, and both
several times in a long run, whose processes may not hold more and more. Losses are so far apart that new copies are
made in between: none of these cases may lose a block.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from elaswave.faults.injection import COORDINATOR, DRAIN, JOIN, SLOW
from verify.chaos.cases import ChaosCase, Draw, draw_case, draw_model, reference_settings

NUM_STEPS = 80
MAX_WORKERS = 12
SPACING = 14
"""Steps from one loss to the next: enough to make up for the copies that went with the first one."""
JOIN_STEPS = 30
"""So many steps after it was asked for a joiner is expected to be a member."""
_MIX = (JOIN, JOIN, JOIN, DRAIN, DRAIN, SLOW, SLOW, "kill", "kill", "hang", "cut-close", COORDINATOR)
_LATEST = NUM_STEPS - 20
"""The last step in which a worker is asked to leave where all are to have left in the end."""
_FACTORS = (0.25, 0.5, 0.5, 1.0)
KINDS = ("mix", "grow", "mix", "shrink", "mix", "cycle", "mix", "shrink")
CYCLE_STEPS = 140
"""Of a long run, from twelve workers to twelve workers."""
NUM_CYCLES = 3


def draw_any(seed: int, index: int) -> ChaosCase:
    """Draws a case of either sort, as likely."""
    return draw_changing(seed, index) if Draw(seed, "sort", index).chance(50) else draw_case(seed, index)


def draw_changing(seed: int, index: int) -> ChaosCase:
    """Draws a case.

    Args:
        seed: of the bench.
        index: of the case, from 0.
    """
    base = draw_case(seed, index)
    draw = Draw(seed, "changing", index)
    kind = KINDS[draw.below(len(KINDS))]
    num_steps = CYCLE_STEPS * NUM_CYCLES if kind == "cycle" else NUM_STEPS
    model = {**draw_model(seed, base.model), "run.steps": num_steps, "run.eval_every": 20 * (base.model % 2)}
    widths = list(base.config.widths) if kind not in ("grow", "cycle") else [2]
    settings: dict[str, Any] = {
        **base.settings,
        **model,
        "layout.widths": widths,
        "elastic.respawn": draw.chance(30) and kind != "cycle",
        "elastic.drain_deadline_s": 60.0,
        "run.checkpoint_every": draw.one_of((0, 15)),
    }
    faults = tuple(_DRAWERS[kind](draw, sum(widths)))
    return msgspec.structs.replace(
        base,
        settings=settings,
        faults=faults,
        reference=reference_settings(model),
        keeps_blocks=True,
        watches_growth=kind == "cycle",
    )


class _Members:
    """The workers as a drawer expects them. The first one is never struck, so that somebody is always there."""

    def __init__(self, num_workers: int) -> None:
        self._next = num_workers
        self._since = dict.fromkeys(range(1, num_workers), 0)
        """Worker that may be struck -> the step from which on it is expected."""

    @property
    def num_workers(self) -> int:
        return 1 + len(self._since)

    def join(self, step: int) -> None:
        self._since[self._next] = step + JOIN_STEPS
        self._next += 1

    def there(self, step: int) -> list[int]:
        return [worker for worker, since in self._since.items() if since <= step]

    def leave(self, worker: int) -> None:
        del self._since[worker]


def _draw_mix(draw: Draw, num_workers: int) -> Iterator[str]:
    """Four to nine events of all kinds."""
    members = _Members(num_workers)
    lost_at = -SPACING
    steps = sorted(2 + draw.below(NUM_STEPS - 10) for _ in range(4 + draw.below(6)))
    for step in steps:
        kind = draw.one_of(_MIX)
        there = members.there(step)
        if kind == JOIN and members.num_workers < MAX_WORKERS:
            members.join(step)
            yield f"{JOIN}@{step}"
        elif kind == COORDINATOR or not there:
            yield f"kill:{COORDINATOR}@{step}"
        elif kind in (DRAIN, JOIN):
            yield _leave(draw, members, there, step)
        elif kind == SLOW:
            yield f"{SLOW}:{draw.one_of(there)}@{step}:{draw.one_of(_FACTORS):g}"
        elif step >= lost_at + SPACING:
            lost_at = step
            worker = draw.one_of(there)
            members.leave(worker)
            yield f"{kind}:{worker}@{step}"


def _leave(draw: Draw, members: _Members, there: list[int], step: int) -> str:
    worker = draw.one_of(there)
    members.leave(worker)
    return f"{DRAIN}:{worker}@{step}"


def _draw_growth(draw: Draw, num_workers: int) -> Iterator[str]:
    """To twelve workers, some at once; one of the first ones is lost, or leaves, and perhaps the coordinator too."""
    for _ in range(MAX_WORKERS - num_workers):
        yield f"{JOIN}@{2 + draw.below(5) * 4}"
    if draw.chance(50):
        yield f"{draw.one_of(('kill', DRAIN))}:{num_workers - 1}@{20 + draw.below(NUM_STEPS - 40)}"
    if draw.chance(50):
        yield f"kill:{COORDINATOR}@{2 + draw.below(40)}"


def _draw_shrinking(draw: Draw, num_workers: int) -> Iterator[str]:
    """To one worker: some leave, some are lost, in an order that is drawn. Then perhaps others come."""
    members = _Members(num_workers)
    step = 2
    while there := members.there(0):
        worker = draw.one_of(there)
        members.leave(worker)
        is_loss = draw.chance(40) and step <= _LATEST
        yield f"{'kill' if is_loss else DRAIN}:{worker}@{min(step, _LATEST)}"
        # Leaves may come at once; losses wait until all copies are there again.
        step += SPACING if is_loss or draw.chance(50) else draw.below(3)
    if draw.chance(50):
        yield f"{JOIN}@{min(step, NUM_STEPS // 2)}"


def _draw_cycles(draw: Draw, num_workers: int) -> Iterator[str]:
    """To twelve workers and back to one, again and again."""
    members = _Members(num_workers)
    for begin in range(0, CYCLE_STEPS * NUM_CYCLES, CYCLE_STEPS):
        while members.num_workers < MAX_WORKERS:
            members.join(begin + 2)
            yield f"{JOIN}@{begin + 2}"
        step = begin + CYCLE_STEPS // 2
        while there := members.there(step):
            worker = draw.one_of(there)
            members.leave(worker)
            is_loss = draw.chance(20) and step < begin + CYCLE_STEPS - 3 * SPACING
            yield f"{'kill' if is_loss else DRAIN}:{worker}@{step}"
            step += SPACING if is_loss else draw.below(3)


_DRAWERS = {"mix": _draw_mix, "grow": _draw_growth, "shrink": _draw_shrinking, "cycle": _draw_cycles}
