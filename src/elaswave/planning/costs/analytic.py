"""Costs and clusters from a description: a model's shape, a kind of device, kinds of links. Pure.

Seconds are operations over the device's peak times its efficiency (`elaswave.planning.costs.presets`), for matrix
products and attention; a look-up in the embedding moves bytes instead. Bytes are those of a bfloat16 model with float32
masters under AdamW, and of the tensors that eager PyTorch with flash attention keeps for the backward. What is left
out: kernel launches, norms and activations' own time (they are in the efficiency), and how products of odd sizes do
worse.

Source of the counts: Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters, appendix;
Korthikanti et al. 2022, Reducing activation recomputation in large transformer models, section 4. Differs: layer by
layer, backward in its two halves, causal attention counted as half, gated feed-forward and grouped queries.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from elaswave.fences import built_in_layer_names, codecs_at
from elaswave.planning.costs.layers import Costs, LayerCosts, fenced_costs, sum_bytes
from elaswave.planning.costs.machines import Cluster, DeviceSpec
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.presets import DevicePreset, ModelShape

PARAMETER_BYTES = 2
"""bfloat16."""
OPTIMIZER_BYTES = 12
"""float32 master, first and second moment (AdamW)."""
LOGIT_BYTES = 6
"""Kept per logit: the bfloat16 logit and the float32 logarithm of its probability."""
USABLE_MEMORY = 0.9
"""Share of a device's memory that training may fill; the rest is the driver's, the links' and lost between tensors."""


class LayerWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer does for one micro-batch, whatever runs it."""

    name: str
    forward_flops: float
    input_gradient_flops: float
    weight_gradient_flops: float
    moved_bytes: float
    """Read and written by a layer that computes next to nothing (a look-up), once per direction."""
    num_parameters: int
    activation_bytes: float
    boundary_bytes: float


def layer_work(
    shape: ModelShape, *, microbatch_size: int = 1, recompute: bool = False, parameter_bytes: int = PARAMETER_BYTES
) -> tuple[LayerWork, ...]:
    """Operations and bytes of every layer for one micro-batch: embedding, blocks, head.

    A matrix product costs 2 operations per parameter and token in the forward, and as much in each half of the
    backward. Attention has no parameters: its backward, twice its forward, belongs to the input gradient.

    Args:
        shape: sizes of the model.
        microbatch_size: samples of a micro-batch, each `shape.context_length` tokens long.
        recompute: keep only a block's input and run its forward again before its backward.
        parameter_bytes: of an element of parameters and activations.
    Raises:
        ValueError: microbatch_size below 1.
    """
    if microbatch_size < 1:
        raise ValueError(f"microbatch_size is {microbatch_size}, needed: at least 1")
    tokens = microbatch_size * shape.context_length
    boundary_bytes = float(tokens * shape.hidden_size * parameter_bytes)
    embedding = LayerWork(
        name="embedding",
        forward_flops=0.0,
        input_gradient_flops=0.0,
        weight_gradient_flops=0.0,
        moved_bytes=2 * boundary_bytes,
        num_parameters=shape.embedding_parameters,
        activation_bytes=8.0 * tokens,
        boundary_bytes=boundary_bytes,
    )
    products = 2.0 * tokens * shape.block_products
    # Scores and their product with the values: 2 x 2 operations per pair of tokens, of which a causal mask leaves half.
    attention = 2.0 * tokens * shape.context_length * shape.hidden_size
    forward_flops = products + attention
    # Kept per token: the input and the middle of the stream, both norms' results, queries, keys, values, attention's
    # result; of the feed-forward what goes into and comes out of its activation, and for a gate the other factor and
    # the product too.
    kept = 6 * shape.hidden_size + 2 * shape.kv_size + (4 if shape.family == "llama" else 2) * shape.intermediate_size
    block = LayerWork(
        name="block",
        forward_flops=forward_flops,
        input_gradient_flops=products + 2 * attention + (forward_flops if recompute else 0.0),
        weight_gradient_flops=products,
        moved_bytes=0.0,
        num_parameters=shape.block_parameters,
        activation_bytes=boundary_bytes if recompute else float(tokens * kept * parameter_bytes),
        boundary_bytes=boundary_bytes,
    )
    head_flops = 2.0 * tokens * shape.hidden_size * shape.vocab_size
    head = LayerWork(
        name="head",
        forward_flops=head_flops,
        input_gradient_flops=head_flops,
        weight_gradient_flops=head_flops,
        moved_bytes=0.0,
        num_parameters=shape.head_parameters,
        activation_bytes=2 * boundary_bytes + float(tokens * shape.vocab_size * LOGIT_BYTES),
        boundary_bytes=0.0,
    )
    blocks = tuple(msgspec.structs.replace(block, name=f"block.{index}") for index in range(shape.num_layers))
    return (embedding, *blocks, head)


def multiplications(shape: ModelShape) -> tuple[float, ...]:
    """Computes the work of each layer per token, embedding first and head last: by this layers are dealt to stages
    where no device is described. Only ratios count. Attention's scores are taken as a plain kernel computes them, all
    of them.

    Args:
        shape: sizes of the model.
    Returns:
        Multiplications of a forward pass for one token, ``num_layers + 2`` of them.
    """
    block = float(shape.block_products + 2 * shape.context_length * shape.hidden_size)
    # A look-up moves a row; the head is one matrix.
    return (float(shape.hidden_size), *[block] * shape.num_layers, float(shape.hidden_size * shape.vocab_size))


def analytic_costs(
    shape: ModelShape,
    preset: DevicePreset,
    *,
    microbatch_size: int = 1,
    consistency: str = "bitwise",
    accumulator_bits: int = 64,
    recompute: bool = False,
    tensor_parallel: int = 1,
    efficiency: float | None = None,
    within_node: NetworkLink | None = None,
    between_nodes: NetworkLink | None = None,
    fences: Sequence[str] = (),
) -> Costs:
    """Costs of a model on a kind of device.

    Args:
        shape: sizes of the model.
        preset: the device.
        microbatch_size: samples of a micro-batch.
        consistency: ``bitwise`` (exact sums) or ``scaled`` (float32).
        accumulator_bits: width of an exact sum.
        recompute: run a block's forward again before its backward instead of keeping its activations.
        tensor_parallel: devices that make up a worker; they share every layer and exchange activations twice per
            block and direction (Shoeybi et al. 2019, Megatron-LM, section 3), and keep
            nothing twice (sequence parallelism, Korthikanti et al. 2022, section 4.2).
        efficiency: share of the peak that is reached; the preset's if None.
        within_node, between_nodes: links other than the preset's.
        fences: of the model, as ``LAYER:CODEC``.
    Raises:
        ValueError: an impossible argument.
    """
    bytes_of_sum = sum_bytes(consistency, accumulator_bits)
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel is {tensor_parallel}, needed: at least 1")
    efficiency = preset.efficiency if efficiency is None else efficiency
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency is {efficiency}, needed: above 0, at most 1")
    within_node = within_node or preset.within_node.link
    between_nodes = between_nodes or preset.between_nodes.link
    flops_per_s = preset.device.flops_per_s * efficiency * tensor_parallel
    bytes_per_s = preset.memory_bandwidth_bytes_per_s * tensor_parallel
    work = layer_work(shape, microbatch_size=microbatch_size, recompute=recompute)

    def layer_costs(layer: LayerWork) -> LayerCosts:
        moving_s = layer.moved_bytes / bytes_per_s
        is_block = layer.name.startswith("block")
        sharing_s = _all_reduces_s(layer.boundary_bytes, tensor_parallel, within_node) if is_block else 0.0
        return LayerCosts(
            name=layer.name,
            forward_s=layer.forward_flops / flops_per_s + moving_s + sharing_s,
            input_gradient_s=layer.input_gradient_flops / flops_per_s + sharing_s * (2 if recompute else 1),
            weight_gradient_s=layer.weight_gradient_flops / flops_per_s + moving_s,
            parameter_bytes=float(layer.num_parameters * PARAMETER_BYTES),
            accumulator_bytes=float(layer.num_parameters * bytes_of_sum),
            optimizer_bytes=float(layer.num_parameters * OPTIMIZER_BYTES),
            activation_bytes=layer.activation_bytes,
            boundary_bytes=layer.boundary_bytes,
        )

    sizes = f"{microbatch_size} x {shape.context_length} tokens per micro-batch"
    group = f", {tensor_parallel} devices per worker" if tensor_parallel > 1 else ""
    costs = Costs(
        layers=tuple(map(layer_costs, work)),
        end_link=_widened(between_nodes, tensor_parallel),
        source=f"analytic: {shape.name} ({shape.source}) on {preset.device.name} ({preset.device.source}) at "
        f"{efficiency:.0%} of its peak ({preset.efficiency_source}), {sizes}{group}"
        + (", blocks run again before their backward" if recompute else "")
        + (f", fences {', '.join(fences)}" if fences else ""),
    )
    codecs = codecs_at(fences, built_in_layer_names(shape.num_layers))
    return fenced_costs(costs, codecs, element_bytes=PARAMETER_BYTES, memory_bandwidth_bytes_per_s=bytes_per_s)


def analytic_shares(
    shape: ModelShape,
    *,
    microbatch_size: int,
    consistency: str = "bitwise",
    accumulator_bits: int = 64,
    recompute: bool = False,
    parameter_bytes: int = 4,
    optimizer_bytes: int = OPTIMIZER_BYTES,
) -> Costs:
    """Costs of a model on no device in particular: bytes as they are, seconds only in proportion to each other.

    What `elaswave.planning.costs.profiled.CostMeter` needs to know of a job beside its timings.

    Args:
        shape: sizes of the model.
        microbatch_size: samples of a micro-batch.
        consistency: ``bitwise`` or ``scaled``.
        accumulator_bits: width of an exact sum.
        recompute: blocks are run again before their backward.
        parameter_bytes: of an element of parameters and activations: 4 for float32.
        optimizer_bytes: of the masters and the optimizer's slots, per parameter.
    Raises:
        ValueError: an impossible argument.
    """
    bytes_of_sum = sum_bytes(consistency, accumulator_bits)
    work = layer_work(shape, microbatch_size=microbatch_size, recompute=recompute, parameter_bytes=parameter_bytes)
    return Costs(
        layers=tuple(
            LayerCosts(
                name=layer.name,
                forward_s=(layer.forward_flops + layer.moved_bytes) * 1e-12,
                input_gradient_s=layer.input_gradient_flops * 1e-12,
                weight_gradient_s=(layer.weight_gradient_flops + layer.moved_bytes) * 1e-12,
                parameter_bytes=float(layer.num_parameters * parameter_bytes),
                accumulator_bytes=float(layer.num_parameters * bytes_of_sum),
                optimizer_bytes=float(layer.num_parameters * optimizer_bytes),
                activation_bytes=layer.activation_bytes,
                boundary_bytes=layer.boundary_bytes,
            )
            for layer in work
        ),
        source=f"analytic: {shape.name}, in proportion only",
    )


def _all_reduces_s(num_bytes: float, num_devices: int, link: NetworkLink) -> float:
    """Computes the seconds of a block's two all-reduces in one direction, as rings."""
    if num_devices == 1:
        return 0.0
    steps = 2 * (num_devices - 1)
    return 2 * steps * link.transfer_s(num_bytes / num_devices)


def preset_cluster(
    num_workers: int,
    preset: DevicePreset,
    *,
    tensor_parallel: int = 1,
    workers_per_node: int | None = None,
    within_node: NetworkLink | None = None,
    between_nodes: NetworkLink | None = None,
    power_limit_w: float | Literal["base level"] | None = "base level",
    usable_memory: float = USABLE_MEMORY,
) -> Cluster:
    """Makes a cluster of one kind of device.

    Args:
        num_workers: number of workers; worker i is in node ``i // workers_per_node``.
        preset: the device.
        tensor_parallel: devices that make up a worker.
        workers_per_node: the preset's devices per node over `tensor_parallel` if None.
        within_node, between_nodes: links other than the preset's.
        power_limit_w: of all workers together; by default what they draw at their base level, for which a machine room
            is built: who is lost leaves power to the others. None means no limit.
        usable_memory: share of the memory that training may fill.
    Raises:
        ValueError: no worker, a worker that does not fit into a node, or an impossible share or limit.
    """
    if not 0 < usable_memory <= 1:
        raise ValueError(f"usable_memory is {usable_memory}, needed: above 0, at most 1")
    if not 1 <= tensor_parallel <= preset.devices_per_node:
        raise ValueError(
            f"{tensor_parallel} devices per worker, needed: at least 1, and at most the {preset.devices_per_node} of a "
            "node, which share the fast links"
        )
    if workers_per_node is None:
        workers_per_node = preset.devices_per_node // tensor_parallel
    one = preset.device
    group = DeviceSpec(
        name=one.name if tensor_parallel == 1 else f"{tensor_parallel} x {one.name}",
        flops_per_s=one.flops_per_s * tensor_parallel,
        memory_bytes=one.memory_bytes * usable_memory * tensor_parallel,
        levels=tuple(msgspec.structs.replace(level, power_w=level.power_w * tensor_parallel) for level in one.levels),
        idle_power_w=one.idle_power_w * tensor_parallel,
        source=one.source,
    )
    cluster = Cluster.uniform(
        num_workers,
        group,
        within_node=_widened(within_node or preset.within_node.link, tensor_parallel),
        between_nodes=_widened(between_nodes or preset.between_nodes.link, tensor_parallel),
        workers_per_node=workers_per_node,
    )
    if power_limit_w is None:
        return cluster
    if power_limit_w == "base level":
        # A little more, so that rounding does not forbid the base level itself.
        power_limit_w = num_workers * group.levels[group.base_level].power_w * (1 + 1e-9)
    return Cluster(**{**vars(cluster), "power_limit_w": power_limit_w})


def _widened(link: NetworkLink, num_devices: int) -> NetworkLink:
    """Every device of a worker has its own link, and carries its share of a tensor."""
    return NetworkLink(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * num_devices, latency_s=link.latency_s)
