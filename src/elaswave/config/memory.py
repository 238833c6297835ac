"""The least memory that a run needs, by arithmetic on its configuration.

With it, what this machine cannot hold is refused before anything of it is built. No IO here.

Counted is only what cannot be otherwise: parameters, sums of gradients, optimizer state with its live copies, and the
activations of the micro-batches in flight, without temporary values, receive buffers, libraries or checkpoints.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from elaswave.config.devices import element_bytes, shape_of, state_bytes
from elaswave.config.own import OWN
from elaswave.config.schema import Config
from elaswave.planning.costs.analytic import sum_bytes
from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.memory import MemoryModel, num_copies


class MemoryEstimate(NamedTuple):
    """Bytes, at least, by worker of the fullest stage and in all."""

    num_parameters: int
    parameters: int
    sums: int
    optimizer: int
    activations: int
    total: int
    """Of all workers together, which share one machine."""

    @property
    def worker(self) -> int:
        """Of one worker of the fullest stage."""
        return self.parameters + self.sums + self.optimizer + self.activations


def least_memory(config: Config, layer_parameters: Sequence[int] = ()) -> MemoryEstimate:
    """What a run needs at least.

    Args:
        config: with its layout resolved.
        layer_parameters: number of parameters of each layer of a script's own model, of whose activations nothing is
            known.
    """
    is_own = config.model.family == OWN
    costs = _own_costs(config, layer_parameters) if is_own else _least_costs(config)
    num_parameters = sum(layer_parameters) if is_own else shape_of(config).num_parameters
    widths, num_stages = config.widths, len(config.widths)
    copies = num_copies(config.elastic.num_followers, sum(widths))
    total, fullest = 0, MemoryEstimate(0, 0, 0, 0, 0, 0)
    for stage, (start, stop) in enumerate(pairwise(accumulate(config.layers_per_stage, initial=0))):
        in_flight = min(-(-config.batch.num_microbatches // widths[stage]), num_stages - stage)
        parts = MemoryModel.of_width(costs, widths[stage], copies).parts(start, stop, in_flight)
        found = MemoryEstimate(
            num_parameters=num_parameters,
            parameters=round(parts.parameters),
            sums=round(parts.sums),
            optimizer=round(parts.state),
            activations=round(parts.activations),
            total=0,
        )
        total += found.worker * widths[stage]
        fullest = max(fullest, found, key=lambda memory: memory.worker)
    return fullest._replace(total=total)


def _least_costs(config: Config) -> Costs:
    """Bytes of the run's layers, at least: of a block's activations only what every kernel keeps."""
    shape = shape_of(config)
    rows = config.batch.microbatch_size * shape.context_length
    block = _layer(config, shape.block_parameters, rows * shape.hidden_size * (1 if config.model.recompute else 5))
    embedding = _layer(config, shape.embedding_parameters, 0)
    head = _layer(config, shape.head_parameters, rows * shape.vocab_size)
    return Costs(layers=(embedding, *(block,) * shape.num_layers, head))


def _own_costs(config: Config, layer_parameters: Sequence[int]) -> Costs:
    return Costs(layers=tuple(_layer(config, number, 0) for number in layer_parameters))


def _layer(config: Config, num_parameters: int, num_kept: int) -> LayerCosts:
    """Bytes of a layer with these parameters, and kept elements of activations of a micro-batch."""
    size, elastic = element_bytes(config), config.elastic
    return LayerCosts(
        forward_s=0.0,
        input_gradient_s=0.0,
        weight_gradient_s=0.0,
        parameter_bytes=float(num_parameters * size),
        accumulator_bytes=float(num_parameters * sum_bytes(elastic.consistency, elastic.accumulator_bits)),
        optimizer_bytes=float(num_parameters * state_bytes(config)),
        activation_bytes=float(num_kept * size),
        boundary_bytes=0.0,
    )


def memory_problem(memory: MemoryEstimate, available: int, source: str) -> str | None:
    """Why a run cannot be held, or None.

    Args:
        memory: what it needs at least.
        available: bytes that there are.
        source: where that was read.
    """
    if memory.total <= available:
        return None
    parts = ", ".join(
        f"{name} {_bytes(size)}"
        for name, size in (
            ("parameters", memory.parameters),
            ("sums of gradients", memory.sums),
            ("optimizer state and copies", memory.optimizer),
            ("activations", memory.activations),
        )
    )
    return (
        f"a model of {memory.num_parameters:,} parameters needs at least {_bytes(memory.total)} of memory for its "
        f"workers together, and there are {_bytes(available)} ({source}); a worker of its fullest stage: {parts}. "
        "Lower the sizes of the model, batch.microbatch_size or the number of workers"
    )


def _bytes(size: int) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} EB"
