"""The toy job of the simulation: a model of whole numbers, and what an undisturbed run of it comes to.

Everything that decides bits in the real engine has its counterpart here: parameters are rounded masters, gradients
depend on the parameters, the step, the micro-batch and the layer, sums are taken on a grid that follows from the last
vote, and the update needs the vote's norm. A worker that uses a wrong parameter, a wrong grid, a sum with a part
missing, or a step too many ends with other numbers. `undisturbed` computes the truth in a few lines that share with
the simulated workers only the formulas of one layer and one block.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from elaswave.planning.layout import make_layout
from elaswave.state.placement import Block, Placement, make_blocks, place_blocks
from elaswave.types import Hop, Layout

MASK = (1 << 64) - 1
INITIAL_GRID = 4
GRADIENT_BITS = 24
"""Width of an ordinary gradient; on the initial grid it leaves room."""
ROOM_BITS = 22
"""A gradient wider than this on the attempt's grid could overflow a sum."""

BlockState = tuple[int, int]
"""Master and momentum of one block: all of its state."""


class Job(NamedTuple):
    """A toy training job."""

    widths: tuple[int, ...] = (2, 1)
    """Workers of each stage."""
    layers_per_stage: int = 1
    blocks_per_layer: int = 2
    num_microbatches: int = 2
    num_followers: int = 1
    steps: int = 3
    checkpoint_every: int = 0
    """Durable checkpoints after every so many steps; 0 for none."""
    retry_step: int = 0
    """A step whose gradients are so large that its first attempt asks for another; 0 for none."""
    move_step: int = 0
    """A step in which a follower of the first block begins to be replaced by another worker; 0 for none."""
    change_step: int = 0
    """The first step after which, once in every epoch, another layout is planned; 0 for none."""
    ask_step: int = 0
    """From this step's vote on the lowest member asks for a durable checkpoint, until one is committed; 0 for none."""
    blocks_per_round: int = 1
    """New copies that one owner sends, and one worker receives, in one step."""
    min_workers: int = 1

    @property
    def num_workers(self) -> int:
        """Workers at the start."""
        return sum(self.widths)


class Model(NamedTuple):
    """What every worker computes from the job alone."""

    layout: Layout
    blocks: tuple[Block, ...]
    placement: Placement
    blocks_of_layer: tuple[tuple[int, ...], ...]


@cache
def model_of(job: Job) -> Model:
    """Layout, blocks and placement of a job."""
    num_layers = job.layers_per_stage * len(job.widths)
    layout = make_layout(
        widths=job.widths,
        layers_per_stage=[job.layers_per_stage] * len(job.widths),
        num_microbatches=job.num_microbatches,
    )
    blocks = make_blocks([job.blocks_per_layer] * num_layers, 1)
    of_layer = tuple(tuple(block.id for block in blocks if block.layer == layer) for layer in range(num_layers))
    placement = place_blocks(layout, blocks, num_followers=job.num_followers)
    return Model(layout, blocks, placement, of_layer)


def other_layout(layout: Layout) -> Layout:
    """A planned change: the last worker of the widest stage moves to the next one, so all that it runs changes.

    Where every stage has one worker, the first two change places; in a single stage the micro-batches move on by one.
    """
    workers = [list(stage.workers) for stage in layout.stages]
    widest = max(range(len(workers)), key=lambda index: len(workers[index]))
    if len(workers) == 1:
        order = workers[0][1:] + workers[0][:1]
    elif len(workers[widest]) == 1:
        workers[0], workers[1] = workers[1], workers[0]
    else:
        target = workers[(widest + 1) % len(workers)]
        target.append(workers[widest].pop())
        target.sort()
    stages = tuple(
        msgspec.structs.replace(stage, workers=tuple(members))
        for stage, members in zip(layout.stages, workers, strict=True)
    )
    orders = [order] if len(workers) == 1 else workers
    routes = tuple(
        tuple(
            Hop(members[microbatch % len(members)], index, stage.start, stage.stop)
            for index, (stage, members) in enumerate(zip(stages, orders, strict=True))
        )
        for microbatch in range(layout.num_microbatches)
    )
    return Layout(stages=stages, routes=routes)


# ------------------------------------------------------------------------------------------------------ the arithmetic


def initial_state(block: int) -> BlockState:
    """State of a block before the first step."""
    return (_scatter(block + 1), _scatter(block + 1000))


def parameter(state: BlockState) -> int:
    """What the model computes with: the master in the model's coarser type."""
    return state[0] >> 9


def sample(step: int, microbatch: int) -> int:
    """The input of a micro-batch."""
    return _scatter(step * 1009 + microbatch)


def forward(layer: int, step: int, microbatch: int, parameters: Sequence[int], x: int) -> int:
    """Output of a layer."""
    x = (x ^ (step << 20) ^ (microbatch << 10) ^ layer) & MASK
    for value in parameters:
        x = ((x ^ value) * 0xBF58476D1CE4E5B9) & MASK
        x ^= x >> 29
    return x


def backward(job: Job, step: int, parameters: Sequence[int], x: int, dy: int) -> tuple[int, list[int]]:
    """Gradient of a layer's input, and one gradient per block, not negative."""
    boost = 4 if step == job.retry_step else 0
    gradients = []
    for value in parameters:
        dy = ((dy ^ value ^ (x >> 3)) * 0x94D049BB133111EB) & MASK
        dy ^= dy >> 31
        gradients.append((dy >> (64 - GRADIENT_BITS) | 1 << (GRADIENT_BITS - 1)) << boost)
    return dy, gradients


def overflows(maximum: int, grid: int) -> bool:
    """Whether sums of such gradients could overflow on a grid."""
    return maximum.bit_length() - grid > ROOM_BITS


def next_grid(maximum: int) -> int:
    """The grid that follows from the largest gradient of a step."""
    return max(0, maximum.bit_length() - GRADIENT_BITS + INITIAL_GRID)


def update(state: BlockState, gradient: int, norm: int, step: int) -> BlockState:
    """State of a block after a step."""
    momentum = (state[1] * 3 + gradient + step) & MASK
    return ((state[0] * 5 + (momentum ^ norm)) & MASK, momentum)


def _scatter(value: int) -> int:
    value = (value * 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    return value ^ (value >> 27)


# ------------------------------------------------------------------------------------------------------------ the truth


class Truth(NamedTuple):
    """An undisturbed run."""

    states: tuple[tuple[BlockState, ...], ...]
    """``states[k][b]``: block b after step k."""
    losses: tuple[tuple[int, ...], ...]
    """``losses[k]``: one number per micro-batch of step k; nothing for step 0."""
    grids: tuple[int, ...]
    """``grids[k]``: the grid that step k + 1 begins with."""


@cache
def undisturbed(job: Job) -> Truth:
    """Runs the job on one machine, step by step."""
    model = model_of(job)
    states = [tuple(initial_state(block.id) for block in model.blocks)]
    losses: list[tuple[int, ...]] = [()]
    grids = [INITIAL_GRID]
    for step in range(1, job.steps + 1):
        grid = grids[-1]
        while True:
            step_losses, gradients, maximum = _one_attempt(job, model, step, states[-1], grid)
            if not overflows(maximum, grid):
                break
            grid = next_grid(maximum)
        norm = sum(gradients) & MASK
        states.append(
            tuple(update(state, gradient, norm, step) for state, gradient in zip(states[-1], gradients, strict=True))
        )
        losses.append(step_losses)
        grids.append(next_grid(maximum))
    return Truth(tuple(states), tuple(losses), tuple(grids))


def _one_attempt(
    job: Job, model: Model, step: int, states: Sequence[BlockState], grid: int
) -> tuple[tuple[int, ...], list[int], int]:
    sums = [0] * len(states)
    maximum = 0
    losses = []
    for microbatch in range(job.num_microbatches):
        x = sample(step, microbatch)
        inputs = []
        for layer, blocks in enumerate(model.blocks_of_layer):
            inputs.append(x)
            x = forward(layer, step, microbatch, [parameter(states[block]) for block in blocks], x)
        losses.append(x)
        dy = x
        for layer in reversed(range(len(inputs))):
            blocks = model.blocks_of_layer[layer]
            parameters = [parameter(states[block]) for block in blocks]
            dy, gradients = backward(job, step, parameters, inputs[layer], dy)
            for block, gradient in zip(blocks, gradients, strict=True):
                sums[block] += gradient >> grid
                maximum = max(maximum, gradient)
    return tuple(losses), [total << grid for total in sums], maximum
