"""The least memory that a run needs, by arithmetic on its configuration.

With it, what this machine cannot hold is refused before anything of it is built. No IO here.

Counted is only what cannot be otherwise: parameters, sums of gradients, optimizer state with its live copies, and the
activations of the micro-batches in flight, without temporary values, receive buffers, libraries or checkpoints.
"""

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elaswave.config.schema import Config

_SLOTS = {"adamw": 2, "sgd": 1}
"""float32 states per parameter."""


class Memory(NamedTuple):
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


def least_memory(config: "Config") -> Memory:
    """What a run needs at least.

    Args:
        config: with its layout resolved.
    """
    layers = _layer_parameters(config)
    number = 4 if config.model.dtype == "float32" else 2
    rows = config.batch.microbatch_size * config.model.context_length
    vocabulary = config.data.resolved_vocab_size
    widths, num_stages = config.widths, len(config.widths)
    num_copies = 1 + min(config.elastic.num_followers, sum(widths) - 1)
    # Masters of layers that a worker computes in float32 are views of its parameters.
    states = 4 * _SLOTS[config.optimizer.name] + (0 if number == 4 else 4)
    total, fullest = 0, Memory(0, 0, 0, 0, 0, 0)
    for stage, (start, stop) in enumerate(pairwise(accumulate(config.layers_per_stage, initial=0))):
        num_parameters = sum(layers[start:stop])
        num_blocks = sum(0 < layer < len(layers) - 1 for layer in range(start, stop))
        in_flight = min(-(-config.batch.num_microbatches // widths[stage]), num_stages - stage)
        per_block = config.model.hidden_size * (1 if config.model.recompute else 5)
        outputs = num_blocks * per_block + (vocabulary if stop == len(layers) else 0)
        found = Memory(
            num_parameters=sum(layers),
            parameters=num_parameters * number,
            sums=num_parameters * (8 if config.elastic.consistency == "bitwise" else 4),
            optimizer=num_parameters * states * num_copies // widths[stage],
            activations=in_flight * rows * outputs * number,
            total=0,
        )
        total += found.worker * widths[stage]
        fullest = max(fullest, found, key=lambda memory: memory.worker)
    return fullest._replace(total=total)


def _layer_parameters(config: "Config") -> list[int]:
    """Parameters of each layer, embedding first and head last; vectors (norms, biases) are left out."""
    model, vocabulary = config.model, config.data.resolved_vocab_size
    hidden_size = model.hidden_size
    if model.family == "llama":
        keys_and_values = 2 * hidden_size * (model.num_kv_heads or model.num_heads) * (hidden_size // model.num_heads)
        block = (
            2 * hidden_size * hidden_size
            + keys_and_values
            + 3 * hidden_size * (model.intermediate_size or 8 * hidden_size // 3)
        )
        embedding = vocabulary * hidden_size
    else:
        block = 12 * hidden_size * hidden_size
        embedding = (vocabulary + model.context_length) * hidden_size
    return [embedding, *[block] * model.num_layers, vocabulary * hidden_size]


def memory_problem(memory: Memory, available: int, source: str) -> str | None:
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
        "Lower model.hidden_size, model.num_layers, model.context_length, batch.microbatch_size or the number of "
        "workers"
    )


def _bytes(size: int) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} EB"
