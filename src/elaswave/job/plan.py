"""What follows from a run's configuration and its model's shapes: blocks, layout, programs, order of samples. No torch.

Nothing of it is negotiated: the same configuration gives the same plan in every process, and the vote compares its
hash. Workers have it from their `elaswave.engine.blueprint`; launcher and coordinator, which hold no torch, are told
the shapes by the forkserver. `Identity` is what must be equal in all workers of one run, as hashes.
"""

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from elaswave._version import __version__
from elaswave.blocks.domains import hosts_of, workers_by_site
from elaswave.blocks.placement import (
    MOVE_BYTES_MAX,
    MOVE_BYTES_MIN,
    Block,
    Placement,
    default_block_size,
    make_blocks,
    place_blocks,
)
from elaswave.blocks.shapes import LayerShape, StateShapes, TensorSlot, all_tensors
from elaswave.blocks.survival import alone_on
from elaswave.checkpoints.format import CheckpointMeta
from elaswave.config.cluster import cluster_of, element_bytes, emulated_costs, labels_of, own_bytes
from elaswave.config.schema import Config
from elaswave.config.values import OWN
from elaswave.data.fingerprint import data_hash
from elaswave.data.samples import MixedSampler, Sampler, Source
from elaswave.errors import ConfigError, InfeasiblePlan
from elaswave.fences import adaptive, codecs_at
from elaswave.hashing import key64
from elaswave.planning.costs.layers import followers_that_fit, sum_bytes
from elaswave.planning.costs.schedules import bounds_within
from elaswave.planning.far_apart.ratios import adapted_ratios
from elaswave.planning.programs.execution import execution_of, programs_of
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.programs.validation import validate_programs
from elaswave.planning.search.memory_limits import layout_limits
from elaswave.planning.search.recovery import choose_followers, survivor_layout
from elaswave.planning.state_moves.target_placement import DEFAULT_SCATTER_WIDTH, smallest_scatter_width
from elaswave.protocol.membership.admissions import libraries
from elaswave.protocol.step.blocks import refilled
from elaswave.types import ExecutionParameters, Layout, Program


class StartingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint from which workers begin."""

    folder: str
    meta: CheckpointMeta


class RunPlan:
    """Everything about a run that follows from its configuration but the model itself.

    Args:
        config: with its layout resolved.
        shapes: of the model's and the optimizer's state.
    """

    def __init__(self, config: Config, shapes: StateShapes) -> None:
        self.config = config
        self.state = shapes

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The flat storage of every unit."""
        return self.state.layers

    def slots_of(self, shape: LayerShape) -> tuple[str, ...]:
        """Lists the float32 states that the elements of a unit have: buffers only have values."""
        return self.state.slots[:1] if shape.is_buffers else self.state.slots

    @cached_property
    def tensors(self) -> tuple[TensorSlot, ...]:
        """Every trained parameter and persistent buffer of the model."""
        return all_tensors(self.shapes)

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """Number of parameters of each layer."""
        return tuple(map(self.state.num_parameters, range(self.state.num_layers)))

    @property
    def tokens_per_sample(self) -> int | None:
        """Of the built-in models; a script's own samples are not counted in tokens."""
        return None if self.config.model.family == OWN else self.config.model.context_length

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of the model."""
        sizes = [shape.size for shape in self.shapes]
        return make_blocks(sizes, self.config.elastic.block_size or default_block_size(sum(sizes)))

    @cached_property
    def layout(self) -> Layout:
        """The layout of training."""
        config = self.config
        layout = make_layout(
            widths=config.widths,
            layers_per_stage=config.layers_per_stage,
            num_microbatches=config.batch.num_microbatches,
            shared=self.state.shared,
            labels=labels_of(config),
            copies="" if config.sites.network is None else config.sites.copies,
        )
        return self.with_copies(layout)

    def with_copies(self, layout: Layout) -> Layout:
        """Returns a layout whose stages ask for as many followers as the configuration does; where it says "auto", for
        all of the stage where their copies fit, else for as many as do, and at least one.

        Args:
            layout: of any members.
        """
        elastic = self.config.elastic
        if elastic.num_followers != "auto":
            return layout.with_followers(elastic.num_followers)
        memory_bytes = self._memory_bytes(layout)
        numbers = []
        for stage in layout.stages:
            layers = range(stage.start, stage.stop)
            units = [self.shapes[unit] for unit in (*layers, *layout.shared_units(layers))]
            # Of a copy that was made anew, since those are the largest, with the mean gradient that it receives.
            whole_bytes = sum(4 * (len(self.slots_of(shape)) + 1) * shape.size for shape in units)
            least_bytes = min(map(memory_bytes.__getitem__, stage.workers))
            numbers.append(followers_that_fit(stage.width, whole_bytes, least_bytes, elastic.copies_memory))
        return layout.with_followers(*numbers)

    def _memory_bytes(self, layout: Layout) -> Mapping[int, float]:
        """Maps worker to the bytes of memory that it may use."""
        config = self.config
        cluster = cluster_of(config, layout.workers, layout.domain_of)
        given = config.elastic.worker_memory_bytes
        return {
            worker: known if given is None else min(known, given)
            for worker, known in zip(cluster.ids.tolist(), cluster.memory_bytes.tolist())
        }

    @cached_property
    def scatter_width(self) -> int:
        """Over how many replica peers the blocks of a worker are spread."""
        config = self.config
        if config.elastic.scatter_width is not None:
            return config.elastic.scatter_width
        if config.device.kind != "emulated":
            return DEFAULT_SCATTER_WIDTH
        return smallest_scatter_width(
            emulated_costs(config),
            self.layout.stages,
            followers=config.elastic.planned_followers,
            memory_bytes=float(cluster_of(config).memory_bytes.min()),
        )

    @cached_property
    def placement(self) -> Placement:
        """Who holds which block."""
        return place_blocks(self.layout, self.blocks, scatter_width=self.scatter_width)

    def least_bytes(self, worker: int | None) -> int:
        """Computes the memory that a worker needs before anything is computed: parameters, sums of gradients, and the
        masters and optimizer states that it holds.

        Args:
            worker: that the job begins with; None: one that joins, of which the smallest part is told.
        """
        if worker is None:
            return min(map(self.least_bytes, self.layout.workers))
        config, layout, placement = self.config, self.layout, self.placement
        layers = layout.layers_of(worker)
        here = {*layers, *layout.shared_units(layers)}
        each = element_bytes(config) + sum_bytes(config.elastic.consistency, config.elastic.accumulator_bits)
        num_bytes = each * sum(self.shapes[unit].size for unit in here)
        for block in self.blocks:
            if worker == placement.owner[block.id] or worker in placement.followers[block.id]:
                # In float32 layers compute with masters themselves.
                shared = config.model.dtype == "float32" and block.layer in here
                num_slots = len(self.slots_of(self.shapes[block.layer])) - shared
                num_bytes += 4 * num_slots * block.num_elements
        return num_bytes

    def complete(self, layout: Layout, placement: Placement) -> Placement:
        """Returns a placement as it is once all copies that it lacks have been made."""
        elements = sum(block.num_elements for block in self.blocks)
        return refilled(self.blocks, layout, placement, elements, self.scatter_width)

    def unprotected(self, layout: Layout, placement: Placement) -> str:
        """Describes for people which blocks have all copies on one host after a loss, or at one site, and for how long;
        empty if none has, or if nothing is known of hosts, or if copies are to be inside of sites.

        Args:
            layout, placement: that the members go on with.
        """
        hosts, at, kind = workers_by_site(layout), "at", "site"
        if not hosts:
            hosts, at, kind = hosts_of(layout), "on", "host"
        alone = alone_on(placement, hosts)
        if not layout.domains or layout.copies == "inside" or not alone:
            return ""
        where = " and ".join(f"{number} {at} {kind} {host}" for host, number in sorted(alone.items()))
        text = f"of {len(self.blocks)} blocks all copies are {at} one {kind} ({where})"
        if len(hosts) == 1:
            return f"{text}, the only one that is left"
        rounds = [placement]
        while (after := self._refilled_once(layout, rounds[-1])) != rounds[-1]:
            rounds.append(after)
        if alone_on(rounds[-1], hosts):
            return f"{text}, until " + (
                "others work" if self.config.elastic.num_followers else "elastic.num_followers is 1 or more"
            )
        steps = "step" if len(rounds) == 2 else f"{len(rounds) - 1} steps"
        return f"{text}: until copies are made on others, within the next {steps}, that {kind} must not be lost"

    def _refilled_once(self, layout: Layout, placement: Placement) -> Placement:
        return choose_followers(
            placement,
            self.blocks,
            layout,
            max_elements=self.refill_elements,
            scatter_width=self.scatter_width,
        )

    def problem_without(self, layout: Layout) -> Callable[[Collection[int]], str | None]:
        """Returns a function that tells why a job under a layout would not go on without some of its workers, by
        `Survival.problem_without`: too few are left, or, of emulated devices, those who are left lack the memory for
        what survivors run at first.

        Args:
            layout: in force.
        """

        def problem(lost: Collection[int]) -> str | None:
            left = len(set(layout.workers).difference(lost))
            needed = self.config.elastic.min_workers
            if left < needed:
                return f"{left} workers would be left, and elastic.min_workers asks for {needed}"
            if self.config.device.kind != "emulated":
                return None  # all are on one machine, whose memory is the same then
            try:
                self._in_flight_limits(survivor_layout(layout, lost))
            except InfeasiblePlan as error:
                return f"the others lack memory: {error}"
            return None

        return problem

    def _in_flight_limits(self, layout: Layout) -> dict[int, int]:
        """Computes what the memory of emulated devices permits.

        Raises:
            InfeasiblePlan: it is too little.
        """
        config = self.config
        cluster, costs = cluster_of(config, layout.workers, layout.domain_of), emulated_costs(config)
        return layout_limits(cluster, costs, layout, config.layout.schedule, followers=config.elastic.planned_followers)

    @property
    def refill_elements(self) -> int:
        """The most elements of new copies that an owner sends, and a worker receives, in a step, to make up for missing
        followers; at least a block, so that all owners can send at once."""
        return max(self.config.elastic.refill_bytes_per_step // self._element_bytes, self._block_elements)

    @property
    def move_elements(self) -> int:
        """The same when blocks move as a plan asks for, to begin with."""
        elastic = self.config.elastic
        given = (elastic.copy_bytes_per_step or elastic.refill_bytes_per_step) // self._element_bytes
        return max(given, self._block_elements)

    @property
    def move_bounds(self) -> tuple[int, int]:
        """What that may become by what is measured."""
        fixed = self.config.elastic.copy_bytes_per_step
        least, most = (MOVE_BYTES_MIN, MOVE_BYTES_MAX) if fixed is None else (fixed, fixed)
        return max(least // self._element_bytes, self._block_elements), max(
            most // self._element_bytes, self._block_elements
        )

    @property
    def _block_elements(self) -> int:
        """Of the largest block."""
        return max((block.num_elements for block in self.blocks), default=0)

    @property
    def _element_bytes(self) -> int:
        return 4 * len(self.state.slots)

    def ratios_of(self, layout: Layout) -> dict[int, int]:
        """Returns what the run chooses for its adaptive fences under a layout, by position of the layer before each;
        empty where it has none, or all were given.

        Args:
            layout: of workers whose sites are known.
        """
        config = self.config
        codecs = codecs_at(config.model.fences, self.state.layer_names) if config.model.fences else {}
        largest = adaptive(codecs)
        if not largest or config.model.fence_ratios:
            return {}
        if config.model.family == OWN:
            return largest  # nothing is known of what its layers hand on
        plain = replace(config, model=replace(config.model, fences=()))
        raw_bytes = [layer.boundary_bytes for layer in own_bytes(plain).layers]
        # Of real devices it is not known what hides behind their computing.
        is_emulated = config.device.kind == "emulated"
        layer_s = emulated_costs(plain).layer_s if is_emulated else ((0.0, 0.0, 0.0),) * len(raw_bytes)
        cluster = cluster_of(config, layout.workers, layout.domain_of)
        return adapted_ratios(layout, largest, raw_bytes, layer_s, cluster, element_bytes=element_bytes(config))

    @cached_property
    def execution(self) -> ExecutionParameters:
        """What stands beside the layout at the start: what emulated devices are known to take, and have room for.

        Raises:
            ConfigError: the described model does not fit into the emulated devices.
        """
        config = self.config
        if config.device.kind != "emulated":
            return ExecutionParameters(ratios=self.ratios_of(self.layout))
        costs = emulated_costs(config)
        try:
            limits = self._in_flight_limits(self.layout)
        except InfeasiblePlan as error:
            what = f"{config.device.model} does not fit into {len(self.layout.workers)} emulated {config.device.name}"
            raise ConfigError([f"{what}: {error}"]) from error
        speeds = dict(enumerate(config.device.speeds or ()))
        return replace(execution_of(costs, speeds, in_flight=limits), ratios=self.ratios_of(self.layout))

    @cached_property
    def programs(self) -> dict[int, Program]:
        """The validated program of every worker for a training step."""
        programs = programs_of(self.layout, self.execution, self.config.layout.schedule)
        bounds = bounds_within(self.layout, self.config.layout.schedule, self.execution.in_flight)
        validate_programs(self.layout, programs, max_in_flight=bounds)
        return programs


def sampler_of(config: Config, num_samples: int, sources: Sequence[Source] = ()) -> Sampler:
    """Makes the sampler that says which samples make up which micro-batch of a run's training.

    Args:
        config: of the run.
        num_samples: samples of a data pass.
        sources: where they come from, if these are several with weights.
    """
    batch = config.batch
    if sources:
        return MixedSampler(config.run.seed, sources, batch.microbatch_size, batch.num_microbatches)
    return Sampler(config.run.seed, num_samples, batch.microbatch_size, batch.num_microbatches)


class Identity(NamedTuple):
    """Of one process; equal in all that may be workers of one run."""

    libraries: str
    config_hash: int
    """Of all values that are set."""
    model_hash: int
    """Of the tensors of model and optimizer."""
    data_hash: int


def identity_of(plan: RunPlan, data_facts: Mapping[str, object]) -> Identity:
    """Describes what this process would train.

    Args:
        plan: of the run, as this process has made it.
        data_facts: what is known of the data here, see `elaswave.data.fingerprint.data_hash`.
    """
    versions = {"elaswave": __version__, "Python": platform.python_version()}
    versions |= {name: version(name) for name in ("numpy", "torch")}  # as installed: the coordinator loads no torch
    return Identity(libraries(versions), _hash(plan.config.to_dict()), _hash(plan.state), data_hash(data_facts))


def _hash(value: object) -> int:
    return key64(msgspec.json.encode(value, order="deterministic").decode()) >> 2
