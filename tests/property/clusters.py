"""Small clusters, costs and jobs for the tests of planning."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.machines import Cluster, DeviceSpec, FrequencyLevel
from elaswave.planning.costs.network import NetworkLink

LINK = NetworkLink(bandwidth_bytes_per_s=1e9)
LEVELS = (
    FrequencyLevel(speed=0.5, power_w=40.0),
    FrequencyLevel(speed=1.0, power_w=100.0),
    FrequencyLevel(speed=1.25, power_w=150.0),
)


def make_costs(seconds: Sequence[float], *, parameter_bytes: float = 1.0, activation_bytes: float = 1.0) -> Costs:
    """Layers whose forward, input gradient and weight gradient each take a third of these seconds."""
    return Costs(
        layers=tuple(
            LayerCosts(
                forward_s=each / 3,
                input_gradient_s=each / 3,
                weight_gradient_s=each / 3,
                parameter_bytes=parameter_bytes,
                accumulator_bytes=2 * parameter_bytes,
                optimizer_bytes=3 * parameter_bytes,
                activation_bytes=activation_bytes,
                boundary_bytes=0.0,
            )
            for each in seconds
        )
    )


def make_cluster(
    speeds: Sequence[float],
    *,
    memory_bytes: float | Sequence[float] = 1e9,
    levels: tuple[FrequencyLevel, ...] = (FrequencyLevel(speed=1.0, power_w=100.0),),
    power_limit_w: float | None = None,
) -> Cluster:
    """Workers 0, 1, ... of one device with these speeds, all in one node."""
    number = len(speeds)
    return Cluster(
        ids=np.arange(number),
        node=np.zeros(number, dtype=np.int64),
        speed=np.array(speeds, dtype=np.float64),
        memory_bytes=np.broadcast_to(np.array(memory_bytes, dtype=np.float64), (number,)).copy(),
        device=np.zeros(number, dtype=np.int64),
        devices=(DeviceSpec(name="d", flops_per_s=1.0, memory_bytes=1e9, levels=levels, idle_power_w=10.0),),
        within_node=LINK,
        between_nodes=LINK,
        power_limit_w=power_limit_w,
    )


speeds = st.sampled_from([0.5, 0.75, 1.0, 1.0, 1.0, 1.5])
layer_seconds = st.sampled_from([0.25, 0.5, 1.0, 1.0, 1.0, 2.0])
