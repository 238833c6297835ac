"""The stages that a person asks for in a running job: their layers, and which members work in them. Pure."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from elaswave.errors import ConfigError
from elaswave.types import Layout, Stage


def requested_stages(present: Layout, layers: Sequence[int] | None, widths: Sequence[int] | None) -> tuple[Stage, ...]:
    """Stages with these layers and widths.

    With the number of stages that there is, workers stay in their stage as far as its width permits; those that are too
    many go to the stages that want more, in the order of stages. With another number of stages the workers, in the
    order of their stages, are divided anew. Idle workers are taken last.

    Args:
        present: the layout in force.
        layers: number of layers of each stage, each at least 1; None: as they are.
        widths: number of workers of each stage, each at least 1; None: as they are.
    Raises:
        ConfigError: such stages cannot be; every problem is listed.
    """
    problems = []
    asked = layers or widths or ()
    if layers is not None and widths is not None and len(layers) != len(widths):
        problems.append(f"--layers has {len(layers)} stages and --widths {len(widths)}: give one number of stages")
    for name, given, other in (("--layers", layers, "--widths"), ("--widths", widths, "--layers")):
        missing = widths if name == "--layers" else layers
        if given is not None and missing is None and len(given) != len(present.stages):
            problems.append(f"{name} has {len(given)} stages and the layout {len(present.stages)}: give {other} too")
    if layers is not None and sum(layers) != present.num_layers:
        problems.append(f"--layers adds up to {sum(layers)}, but the model has {present.num_layers} layers")
    shares = any(before.stop != after.start for before, after in pairwise(present.stages))
    if layers is None and shares and not problems:
        problems.append(f"stages of the layout {present.describe()} share layers: give --layers too")
    num_active, num_members = len(present.active), len(present.workers)
    if widths is not None and not num_active <= sum(widths) <= num_members:
        has = f"{num_members} members" + (f", {num_members - num_active} of them idle" if present.idle else "")
        problems.append(f"--widths adds up to {sum(widths)}, but the job has {has}")
    if problems:
        raise ConfigError(problems)
    sizes = layers or [stage.stop - stage.start for stage in present.stages]
    members = _members(present, widths or [stage.width for stage in present.stages])
    assert len(asked) == len(sizes) == len(members)
    stages = tuple(
        Stage(start=start, stop=stop, workers=workers)
        for (start, stop), workers in zip(pairwise([0, *accumulate(sizes)]), members, strict=True)
    )
    return msgspec.structs.replace(present, stages=stages).with_followers_of(present).stages


def _members(present: Layout, widths: Sequence[int]) -> list[tuple[int, ...]]:
    """Chooses the workers of each stage."""
    in_order = [worker for stage in present.stages for worker in stage.workers]
    if len(widths) == len(present.stages):
        kept = [list(stage.workers[:width]) for stage, width in zip(present.stages, widths)]
        staying = {worker for workers in kept for worker in workers}
        in_order = [worker for worker in in_order if worker not in staying]
    else:
        kept = [[] for _ in widths]
    free = iter([*in_order, *present.idle])
    for workers, width in zip(kept, widths):
        while len(workers) < width:
            workers.append(next(free))
    return [tuple(sorted(workers)) for workers in kept]
