"""Over how many replica peers the blocks of a worker are spread (`elaswave.blocks.replica_peers`). Pure.

When a worker dies, each of its s replica peers takes over 1/s of what it owned: of the sums that it received, the
parameters that it sent, the updates that it made; and about 1/s of the copies that it held is made anew on each. The
smallest s for which that is hardly felt is the best: the share of pairs of workers whose loss at one instant loses
state grows as s. For losses one after the other s does not matter: s workers are then fatal, but for 1/s of the time,
since s of them make the missing copies.
"""

from collections.abc import Sequence

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.memory import MemoryModel
from elaswave.types import Stage

DEFAULT_SCATTER_WIDTH = 2
"""Where nothing is known of what a step takes: the blocks of a worker lie with its two neighbours in a ring."""
LOAD_MAX = 0.02
"""Of a step: so much longer it may become by what one replica peer takes over."""


def smallest_scatter_width(
    costs: Costs,
    stages: Sequence[Stage],
    *,
    followers: int,
    memory_bytes: float,
    step_s: float | None = None,
) -> int:
    """The smallest number of replica peers whose share of a lost worker's load fits.

    Args:
        costs: of the layers, and of what a step takes beside its actions.
        stages: of the job.
        followers: live copies of every block beside its owner's.
        memory_bytes: of a worker.
        step_s: seconds of a step; None where it, or what it takes beside its actions, is not known: then
            `DEFAULT_SCATTER_WIDTH` or more.
    Returns:
        At least 1, and at most the width of the widest stage - 1, or `DEFAULT_SCATTER_WIDTH`.
    """
    most = max(DEFAULT_SCATTER_WIDTH, max(stage.width for stage in stages) - 1)
    if step_s is None:
        width = DEFAULT_SCATTER_WIDTH
    else:
        # All of it is taken to follow from what a worker owns: too much rather than too little.
        width = next((s for s in range(1, most) if costs.overhead_s(stages) / s <= LOAD_MAX * step_s), most)
    memory = MemoryModel.of_stages(costs, stages, followers)
    for stage in stages:
        parts = memory.parts(stage.start, stage.stop, 1)  # with fewer in flight a worker waits, but runs
        while width < most and parts.total + parts.state / width > memory_bytes:
            width += 1
    return width
