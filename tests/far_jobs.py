"""Small jobs on machines far apart, for tests of their plans."""

from collections.abc import Sequence

import numpy as np

from elaswave.fences import Codec
from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.machines import Cluster, DeviceSpec
from elaswave.planning.costs.network import Network, NetworkLink
from elaswave.planning.far_apart.job import Copies, FarJob

DEVICE = DeviceSpec(name="d", flops_per_s=1.0, memory_bytes=1e12)
NEAR = NetworkLink(bandwidth_bytes_per_s=1e9, latency_s=0.0)


def far_costs(
    seconds: Sequence[float], *, boundary_bytes: float = 4000.0, parameters: float = 0.0, activation_bytes: float = 0.0
) -> Costs:
    """Layers whose forward takes so long, and each half of the backward as long."""
    return Costs(
        layers=tuple(
            LayerCosts(
                forward_s=each,
                input_gradient_s=each,
                weight_gradient_s=each,
                parameter_bytes=2 * parameters,
                accumulator_bytes=8 * parameters,
                optimizer_bytes=12 * parameters,
                activation_bytes=activation_bytes,
                boundary_bytes=boundary_bytes,
            )
            for each in seconds
        )
    )


def far_cluster(
    sizes: Sequence[int],
    *,
    between: NetworkLink,
    within: NetworkLink = NEAR,
    speeds: Sequence[float] | None = None,
    memory_bytes: float = 1e12,
) -> Cluster:
    """Sites of so many workers, each in a machine of its own; all sites equally far apart."""
    count, names = sum(sizes), [f"site{number}" for number in range(len(sizes))]
    links = {(a, b): within if a == b else between for a in names for b in names}
    network = Network.of_links(names, links)
    return Cluster(
        ids=np.arange(count),
        node=np.arange(count),
        speed=np.array(speeds if speeds is not None else [1.0] * count),
        memory_bytes=np.full(count, memory_bytes),
        device=np.zeros(count, dtype=np.int64),
        devices=(DEVICE,),
        within_node=within,
        between_nodes=network.slowest,
        network=network,
        site=np.repeat(np.arange(len(sizes)), sizes),
    )


def far_job(
    cluster: Cluster, costs: Costs, *, microbatches: int = 8, codec: Codec = "none", copies: Copies = "inside",
    followers: int = 1,
) -> FarJob:  # fmt: skip
    """A job of one kind of device."""
    return FarJob(
        cluster=cluster, costs=(costs,), num_microbatches=microbatches, element_bytes=4, codec=codec,
        copies=copies, followers=followers,
    )  # fmt: skip
