"""The toy job of the simulation: a model of whole numbers, and what a fault-free run of it comes to.

Everything that decides bits in the real engine has its counterpart here: parameters are rounded masters, gradients
depend on the parameters, the step, the micro-batch and the layer, sums are taken on grids that follow from the last
vote, and the update needs the vote's norm. Grids, norms and votes are the real ones. A worker that uses a wrong
parameter, a wrong grid, a sum with a part missing, or a step too many ends with other numbers. `undisturbed` computes
the truth in a few lines that share with the simulated workers only the formulas of one layer and one block.
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import msgspec

from elaswave.blocks.placement import Block, Placement, make_blocks, place_blocks
from elaswave.blocks.shapes import (
    WIDE_BITS,
    could_overflow,
    count_bits,
    is_too_coarse,
    next_exponent,
    norm_from_limbs,
    norm_limbs,
)
from elaswave.hashing import MASK64
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.programs.programs import compile_programs
from elaswave.protocol.step.ballot import GridState, Request, VoteShape, decode_certificate, float_bits
from elaswave.protocol.step.engine import JobTerms, TrainingProgress
from elaswave.types import WHOLE_STAGE, ExecutionParameters, Hop, Layout, Program

GRADIENT_BITS = 52
"""Of an ordinary gradient, which is a whole number of units of ``2**-FRACTION_BITS``: as many as a float64 holds."""
FRACTION_BITS = 28
"""More than an ordinary grid resolves, so that sums depend on their grids."""

Exponents = tuple[int, ...]
"""Of the grids, by tensor; a unit is one tensor."""

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
    """Copies wanted beside each owner; -1: all other workers of its stage (`WHOLE_STAGE`)."""
    scatter_width: int = 2
    steps: int = 3
    checkpoint_every: int = 0
    """Durable checkpoints after every so many steps; 0 for none."""
    retry_step: int = 0
    """A step whose gradients are so large that its first attempt asks for another; 0 for none."""
    change_step: int = 0
    """The first step after which, once in every generation, another layout is planned; 0 for none."""
    ask_step: int = 0
    """From this step's vote on the lowest member asks for a durable checkpoint, until one is committed; 0 for none."""
    join_step: int = 0
    """From this step on workers more are wanted, once; 0 for never."""
    joiners: int = 1
    """How many."""
    leave_step: int = 0
    """From this step on worker `leaver` is asked to leave, once it is a member; 0 for never."""
    leaver: int = 0
    """May be a joiner."""
    leavers: int = 1
    """How many leave: with it those of the next ids."""
    stop_step: int = 0
    """From this step's vote on every worker asks for the end of the job, as after a signal; 0 for never."""
    blocks_at_once: int = 1
    """Copies of a worker that APPLY updates between two places where it can be interrupted; more than 1 on devices."""
    blocks_per_round: int = 1
    """New copies that one owner sends, and one worker receives, in one step."""
    min_workers: int = 1
    renumbers: bool = False
    """Whether each planned layout also changes how many followers its stages ask for: one, or all of the stage."""
    num_hosts: int = 0
    """Hosts that the workers are dealt over, and joiners by turns; 0: nothing is known of hosts."""
    tied: bool = False
    """Whether the first and the last layer share a unit of state, and also the second one where stages have several
    layers: so uses share a stage or not, and there are stages without one."""
    salvage: bool = True
    """Whether survivors keep what they have of a step that a loss has interrupted. With bits that flip it is off: a
    worker that is lost before its vote takes with it what tells that sums of others are wrong."""
    accumulator_bits: int = WIDE_BITS
    """Width of a sum of gradients, which decides its grids: a key of `elaswave.blocks.shapes.GRID_RULES`."""

    @property
    def num_workers(self) -> int:
        """Workers at the start."""
        return sum(self.widths)

    @property
    def hosts(self) -> dict[str, int] | None:
        """Host -> number of workers that the job begins with."""
        if not self.num_hosts:
            return None
        return {f"h{index}": len(range(index, self.num_workers, self.num_hosts)) for index in range(self.num_hosts)}

    def host_of_joiner(self, worker: int) -> str:
        """Where a joiner runs; empty where nothing is known of hosts."""
        return f"h{worker % self.num_hosts}" if self.num_hosts else ""

    @property
    def num_ever(self) -> int:
        """Workers that there ever are."""
        return self.num_workers + (self.joiners if self.join_step else 0)


class Model(NamedTuple):
    """What every worker computes from the job alone."""

    layout: Layout
    blocks: tuple[Block, ...]
    placement: Placement
    blocks_of_layer: tuple[tuple[int, ...], ...]
    """By unit: first the layers."""
    uses: tuple[tuple[tuple[int, int], ...], ...]
    """For each layer the shared units that it uses, each with the number of that use."""
    blocks_used: tuple[tuple[int, ...], ...]
    """For each layer its own blocks, and those of the units that it shares."""
    terms: JobTerms
    progress: TrainingProgress
    """Of the beginning: on grids that the first step's gradients fit, as after a resume."""

    def num_terms(self, unit: int) -> int:
        """Terms of the sums of a unit."""
        return self.layout.num_microbatches * self.layout.num_uses(unit)


@lru_cache(maxsize=256)
def model_of(job: Job) -> Model:
    """Layout, blocks and placement of a job."""
    # Most jobs differ in nothing but when something is done: all of these have one model.
    alike = Job()._replace(
        **{name: getattr(job, name) for name in _OF_THE_MODEL},
    )
    model = _model_of(alike)
    terms = model.terms._replace(
        num_steps=job.steps,
        copy_elements=job.blocks_per_round,
        move_elements=2 * job.blocks_per_round,
        move_bounds=(1, 4 * job.blocks_per_round),
        checkpoint_every=job.checkpoint_every,
        salvage=job.salvage,
    )
    return model._replace(terms=terms)


_OF_THE_MODEL = (
    "widths",
    "layers_per_stage",
    "blocks_per_layer",
    "num_hosts",
    "num_microbatches",
    "num_followers",
    "scatter_width",
    "tied",
    "accumulator_bits",
)


@cache
def _model_of(job: Job) -> Model:
    num_layers = job.layers_per_stage * len(job.widths)
    users = {0, num_layers - 1} | ({1} if job.layers_per_stage > 1 else set())
    shared = (tuple(sorted(users)),) if job.tied and num_layers > 1 else ()
    layout = make_layout(
        widths=job.widths,
        layers_per_stage=[job.layers_per_stage] * len(job.widths),
        num_microbatches=job.num_microbatches,
        shared=shared,
        hosts=job.hosts,
    ).with_followers(job.num_followers)
    num_units = num_layers + len(shared)
    blocks = make_blocks([job.blocks_per_layer] * num_units, 1)
    of_layer = tuple(tuple(block.id for block in blocks if block.layer == unit) for unit in range(num_units))
    uses = tuple(
        tuple((num_layers + index, users.index(layer)) for index, users in enumerate(shared) if layer in users)
        for layer in range(num_layers)
    )
    used = tuple(
        (*of_layer[layer], *(block for unit, _ in uses[layer] for block in of_layer[unit]))
        for layer in range(num_layers)
    )
    placement = place_blocks(layout, blocks, scatter_width=job.scatter_width)
    terms = JobTerms(
        blocks=blocks,
        num_layers=num_layers,
        num_tensors=num_units,
        uses={num_layers + index: len(users) for index, users in enumerate(shared)},
        num_microbatches=job.num_microbatches,
        num_steps=job.steps,
        scatter_width=job.scatter_width,
        copy_elements=job.blocks_per_round,
        move_elements=2 * job.blocks_per_round,
        move_bounds=(1, 4 * job.blocks_per_round),
        compile=_compile,
        checkpoint_every=job.checkpoint_every,
        accumulator_bits=job.accumulator_bits,
    )
    maximum = maximum_of(1 << (GRADIENT_BITS - 1))
    width = job.accumulator_bits
    exponents = [
        next_exponent(maximum, 0, job.num_microbatches * layout.num_uses(unit), width) for unit in range(num_units)
    ]
    grids = GridState(tuple(exponents), calibrated=True, exact=True)
    return Model(layout, blocks, placement, of_layer, uses, used, terms, TrainingProgress(0, grids))


def _compile(worker: int, layout: Layout, execution: ExecutionParameters, *, forward_only: bool = False) -> Program:
    return _programs(layout, forward_only)[worker]


@lru_cache(maxsize=4096)
def _programs(layout: Layout, forward_only: bool) -> dict[int, Program]:
    return compile_programs(layout, "1f1b", forward_only=forward_only)


def renumbered(layout: Layout) -> Layout:
    """Makes the layout whose stages ask for one follower where all of the stage were to follow, and the reverse."""
    return layout.with_followers(*(1 if stage.num_followers == WHOLE_STAGE else WHOLE_STAGE for stage in layout.stages))


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
    return msgspec.structs.replace(layout, stages=stages, routes=routes)


# ------------------------------------------------------------------------------------------------------ the arithmetic


@cache
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
    x = (x ^ (step << 20) ^ (microbatch << 10) ^ layer) & MASK64
    for value in parameters:
        x = ((x ^ value) * 0xBF58476D1CE4E5B9) & MASK64
        x ^= x >> 29
    return x


def backward(job: Job, step: int, parameters: Sequence[int], x: int, dy: int) -> tuple[int, list[int]]:
    """Gradient of a layer's input, and one gradient per block, not negative."""
    # More than the headroom of a grid that was made for ordinary gradients.
    boost = 20 - count_bits(job.num_microbatches) if step == job.retry_step else 0
    gradients = []
    for value in parameters:
        dy = ((dy ^ value ^ (x >> 3)) * 0x94D049BB133111EB) & MASK64
        dy ^= dy >> 31
        gradients.append((dy >> (64 - GRADIENT_BITS) | 1 << (GRADIENT_BITS - 1)) << boost)
    return dy, gradients


def loss_of(x: int) -> float:
    """Loss of a micro-batch by the output of its last layer; exact."""
    return float(x >> 12)


def maximum_of(gradient: int) -> float:
    """The size of a gradient, as the vote compares it."""
    return math.ldexp(gradient, -FRACTION_BITS)


def to_units(gradient: int, exponent: int) -> int:
    """A gradient on a grid of units of ``2**-exponent``, rounded down."""
    return _shifted(gradient, exponent - FRACTION_BITS)


def from_units(total: int, exponent: int) -> int:
    """The inverse of `to_units`, without what rounding took."""
    return _shifted(total, FRACTION_BITS - exponent)


def _shifted(value: int, bits: int) -> int:
    return value << bits if bits >= 0 else value >> -bits


def update(state: BlockState, gradient: int, norm: float, step: int) -> BlockState:
    """State of a block after a step."""
    momentum = (state[1] * 3 + gradient + step) & MASK64
    return ((state[0] * 5 + (momentum ^ float_bits(norm))) & MASK64, momentum)


def _scatter(value: int) -> int:
    value = (value * 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    return value ^ (value >> 27)


# ------------------------------------------------------------------------------------------------------------ the truth


class Truth(NamedTuple):
    """A fault-free run."""

    states: tuple[tuple[BlockState, ...], ...]
    """``states[k][b]``: block b after step k."""
    losses: tuple[tuple[float, ...], ...]
    """``losses[k]``: one number per micro-batch of step k; nothing for step 0."""
    grids: tuple[Exponents, ...]
    """``grids[k]``: the grids that step k + 1 begins with."""


@lru_cache(maxsize=64)
def undisturbed(job: Job) -> Truth:
    """Runs the job on one machine, step by step."""
    # What decides numbers, and nothing else: neither workers nor their number, nor when something is done.
    plain = Job(
        widths=(1,) * len(job.widths),
        layers_per_stage=job.layers_per_stage,
        blocks_per_layer=job.blocks_per_layer,
        num_microbatches=job.num_microbatches,
        retry_step=job.retry_step,
        tied=job.tied,
        accumulator_bits=job.accumulator_bits,
    )
    states, losses, grids = _course(plain)
    _train_until(plain, job.steps)
    end = job.steps + 1
    return Truth(tuple(states[:end]), tuple(losses[:end]), tuple(grids[:end]))


@cache
def _course(job: Job) -> tuple[list[tuple[BlockState, ...]], list[tuple[float, ...]], list[Exponents]]:
    """As far as it has been computed: what `Truth` has."""
    model = model_of(job)
    return [tuple(initial_state(block.id) for block in model.blocks)], [()], [model.progress.grids.exponents]


def _train_until(job: Job, last: int) -> None:
    model = model_of(job)
    states, losses, grids = _course(job)
    for step in range(len(states), last + 1):
        grid, fits = grids[-1], False
        while not fits:
            step_losses, gradients, maxima = _one_attempt(job, model, step, states[-1], grid)
            width = job.accumulator_bits
            after = tuple(
                next_exponent(maximum, 0, model.num_terms(unit), width) for unit, maximum in enumerate(maxima)
            )
            fits = not any(
                could_overflow(maximum, exponent, model.num_terms(unit), width)
                or (is_too_coarse(maximum, exponent) and finer > exponent)
                for unit, (maximum, exponent, finer) in enumerate(zip(maxima, grid, after, strict=True))
            )
            grid = after
        norm = norm_from_limbs(norm_limbs([float(gradient) for gradient in gradients]))
        states.append(
            tuple(update(state, gradient, norm, step) for state, gradient in zip(states[-1], gradients, strict=True))
        )
        losses.append(step_losses)
        grids.append(after)


def _one_attempt(
    job: Job, model: Model, step: int, states: Sequence[BlockState], grid: Exponents
) -> tuple[tuple[float, ...], list[int], list[float]]:
    sums = [0] * len(states)
    maxima = [0.0] * len(grid)
    losses = []
    for microbatch in range(job.num_microbatches):
        x = sample(step, microbatch)
        inputs = []
        for layer in range(model.terms.num_layers):
            inputs.append(x)
            x = forward(layer, step, microbatch, [parameter(states[block]) for block in model.blocks_used[layer]], x)
        losses.append(loss_of(x))
        dy = x
        for layer in reversed(range(len(inputs))):
            blocks = model.blocks_used[layer]
            parameters = [parameter(states[block]) for block in blocks]
            dy, gradients = backward(job, step, parameters, inputs[layer], dy)
            for block, gradient in zip(blocks, gradients, strict=True):
                unit = model.blocks[block].layer
                sums[block] += to_units(gradient, grid[unit])
                maxima[unit] = max(maxima[unit], maximum_of(gradient))
    means = [from_units(total, grid[block.layer]) for block, total in zip(model.blocks, sums, strict=True)]
    return tuple(losses), means, maxima


def _vote_shape(job: Job) -> VoteShape:
    terms = model_of(job).terms
    return _shape(job.num_microbatches, terms.num_tensors, terms.num_layers, job.accumulator_bits)


@cache
def _shape(num_microbatches: int, num_tensors: int, num_layers: int, width: int) -> VoteShape:
    return VoteShape(num_microbatches, num_tensors, num_determinism_hashes=1 + num_layers, accumulator_bits=width)


def losses_of(job: Job, vector: bytes) -> tuple[float, ...]:
    """The losses in the vector of a vote."""
    values = decode_certificate(vector)
    shape = _vote_shape(job)
    return shape.means(values, job.num_microbatches).losses


def asks_checkpoint(job: Job, vector: bytes) -> bool:
    """Whether a worker has asked for a durable checkpoint in a vote."""
    shape = _vote_shape(job)
    place = shape.num_sums + shape.REQUEST
    return decode_certificate(vector[8 * place : 8 * place + 8])[0] >= Request.CHECKPOINT.value
