"""The terms of elaswave as values: ids, stages, routes, layouts, programs, what a device tells. No torch, no IO.

Ranges are half-open. Worker ids are given once and never reused. A layout says who runs what; who *holds* which
block of state is the placement (``elaswave.blocks.placement``), which follows from the layout and the model alone. A
program says in which order a worker runs its part of the routes: what an action computes (which layers) and where its
input comes from stand in the routes, not in the program.
"""

import hashlib
from functools import cached_property
from typing import Literal

import msgspec

from elaswave.hashing import MASK64


class Hop(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a route: a worker that runs layers [start, stop) of a micro-batch as part of a stage.

    The layers of a hop are usually all of its stage's layers; neighbouring stages may cut a shared boundary layer
    on either side, which is why a hop carries its own range.
    """

    worker: int
    stage: int
    start: int
    stop: int


WHOLE_STAGE = -1
"""`Stage.num_followers` where all other workers that run a block's layer follow it."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous range of layers and the workers (data-parallel replicas) that hold it."""

    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    workers: tuple[int, ...]
    """Ids of the workers of the stage, ascending."""
    num_followers: int = 1
    """Live copies wanted of each block of its layers beside the owner's, or `WHOLE_STAGE`."""

    @property
    def width(self) -> int:
        """Number of workers."""
        return len(self.workers)


Copies = Literal["", "outside", "inside"]
"""Where the copies of a block are: nothing is known of sites, outside of its owner's, or inside."""


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Everything about who runs what in a step.

    State is kept in *units*: unit i below `num_layers` is what layer i alone has, the further ones are shared.
    """

    stages: tuple[Stage, ...]
    routes: tuple[tuple[Hop, ...], ...]
    """``routes[m]`` is the chain of hops of micro-batch m in forward order; covers every layer once."""
    shared: tuple[tuple[int, ...], ...] = ()
    """``shared[k]`` are the layers that use unit num_layers + k, one entry for each use: of a tensor that is tied
    between layers, or of the buffers of one layer. Follows from the model, and is the same in all layouts of a job."""
    idle: tuple[int, ...] = ()
    """Members that are in no stage, ascending: they vote, and run no layer. One that has just joined holds nothing; one
    that is about to leave may still hold blocks."""
    domains: tuple[tuple[int, str], ...] = ()
    """(worker, where it runs) of every member, ascending, see `elaswave.blocks.domains`; empty: all are on one host."""
    copies: Copies = ""
    """Not empty: the coarsest domain of each label is a site that slow links join to the others, and followers are
    outside of their owner's site, as far as they can be, or never outside of it."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the model, embedding and head included."""
        return self.stages[-1].stop

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches of the global batch."""
        return len(self.routes)

    def shared_units(self, layers: range) -> tuple[int, ...]:
        """Lists the shared units that any of these layers uses, ascending."""
        first = self.num_layers
        return tuple(
            first + index for index, users in enumerate(self.shared) if any(layer in layers for layer in users)
        )

    def num_uses(self, unit: int) -> int:
        """Counts how often each micro-batch adds to a unit: once, or once for each use of a shared one."""
        return 1 if unit < self.num_layers else len(self.shared[unit - self.num_layers])

    def layer_of(self, unit: int) -> int:
        """Finds the layer that a unit is, or the first of those that share it."""
        return unit if unit < self.num_layers else self.shared[unit - self.num_layers][0]

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """All members, ascending: those of stages and the idle ones."""
        return tuple(sorted((*self.active, *self.idle)))

    @cached_property
    def domain_of(self) -> dict[int, str]:
        """`domains`, to look up."""
        return dict(self.domains)

    @cached_property
    def active(self) -> tuple[int, ...]:
        """The workers of stages, ascending."""
        return tuple(sorted(worker for stage in self.stages for worker in stage.workers))

    def layers_of(self, worker: int) -> range:
        """Returns the layers of a worker's stage; none for an idle one.

        Raises:
            KeyError: the worker is not in the layout.
        """
        if worker in self.idle:
            return range(0)
        stage = self.stages[self.stage_of(worker)]
        return range(stage.start, stage.stop)

    def stage_of(self, worker: int) -> int:
        """Finds the index of the stage that a worker belongs to.

        Raises:
            KeyError: the worker is in no stage; an idle one is in none.
        """
        for index, stage in enumerate(self.stages):
            if worker in stage.workers:
                return index
        raise KeyError(worker)

    def with_followers(self, *num_followers: int) -> "Layout":
        """Returns the same layout with other numbers of followers.

        Args:
            num_followers: of each stage, or one for all of them.
        """
        numbers = num_followers * len(self.stages) if len(num_followers) == 1 else num_followers
        stages = tuple(
            msgspec.structs.replace(stage, num_followers=number)
            for stage, number in zip(self.stages, numbers, strict=True)
        )
        return self if stages == self.stages else msgspec.structs.replace(self, stages=stages)

    def with_followers_of(self, other: "Layout") -> "Layout":
        """Returns the same layout with the numbers of followers that another one has: each stage has that of the stage
        with which it shares the most layers.

        Args:
            other: of the same model.
        """
        return self.with_followers(
            *(
                max(
                    other.stages, key=lambda them: min(stage.stop, them.stop) - max(stage.start, them.start)
                ).num_followers
                for stage in self.stages
            )
        )

    def describe(self) -> str:
        """Makes a short name: "2x2" (stages x replicas), or "[1,3]" for stages of unequal width; "2x2+1" with one
        idle."""
        widths = [stage.width for stage in self.stages]
        idle = f"+{len(self.idle)}" if self.idle else ""
        if len(set(widths)) == 1:
            return f"{len(widths)}x{widths[0]}{idle}"
        return "[" + ",".join(map(str, widths)) + "]" + idle


class ExecutionParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What of a plan stands beside the layout. The protocol carries it and does not look into it."""

    schedule: str = ""
    """Of the programs; empty: as configured."""
    levels: dict[int, int] = {}
    """Worker -> index of its device's frequency level; the base level for those that are not in it."""
    layer_s: tuple[tuple[float, float, float], ...] = ()
    """Seconds of each layer's forward, input gradient and weight gradient, by which all workers compile the same
    programs; empty: layers are taken to be balanced over stages."""
    speeds: dict[int, float] = {}
    """Worker -> its speed, level included, for the same purpose; 1 for those that are not in it."""
    in_flight: dict[int, int] = {}
    """Worker -> the most micro-batches that it may hold at once, where memory is short; those that are not in it may
    hold as many as the schedule wants."""
    ratios: dict[int, int] = {}
    """Position of the layer before an adaptive fence -> its ratio (`elaswave.fences`). They change with a planned
    change alone, never with a decision: a step that is tried again has those that it had."""


Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; or backward in two halves: the input's gradient, then the weights'."""

ACTION_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One piece of work of one worker: a stage's layers, forward or backward, for one micro-batch; prints ``2F0``."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Program = tuple[Action, ...]
"""What one worker does in a step, in order."""


def struct_hash(value: msgspec.Struct) -> int:
    """Computes a 62-bit hash of a struct's content, the same in every process; workers compare layouts by it."""
    try:
        content = msgspec.json.encode(value, order="deterministic")
    except TypeError:  # a dict whose keys are no strings; made strings they can be sorted
        content = msgspec.json.encode(msgspec.to_builtins(value, str_keys=True), order="deterministic")
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return (int.from_bytes(digest, "little") & MASK64) >> 2


class Gauges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Readings of one worker's device at one instant; what a device does not tell is None, and never 0."""

    memory_used_bytes: int | None = None
    """Of the device's memory, by all processes, contexts included."""
    memory_total_bytes: int | None = None
    allocated_bytes: int | None = None
    """Of the worker's own tensors."""
    peak_allocated_bytes: int | None = None
    """The most of those so far."""
    utilization: float | None = None
    """Share of the last instants in which it computed, 0 to 1."""
    power_w: float | None = None
    energy_j: float | None = None
    """Since its driver was loaded: the difference of two readings counts."""
