"""Small clusters and costs for tests of planners."""

from collections.abc import Mapping

from elaswave.costs.layers import Costs, LayerCosts
from elaswave.costs.machines import Cluster, Device, FrequencyLevel, NetworkLink
from elaswave.planning.plan import Allocation
from elaswave.planning.prediction import EXACT_ACTIONS, fidelity_for, step_s

LINK = NetworkLink(bandwidth_bytes_per_s=1e9, latency_s=1e-5)


def device(memory_bytes: float = 1e12) -> Device:
    return Device(
        name="test",
        flops_per_s=1e12,
        memory_bytes=memory_bytes,
        levels=(FrequencyLevel(speed=1.0, power_w=300.0),),
        idle_power_w=50.0,
    )


def machines(num_workers: int, *, memory_bytes: float = 1e12, workers_per_node: int = 4) -> Cluster:
    return Cluster.uniform(
        num_workers, device(memory_bytes), within_node=LINK, between_nodes=LINK, workers_per_node=workers_per_node
    )


def layers(*seconds: float, activation_bytes: float = 1e6) -> Costs:
    """Layers with a forward of so many seconds and a backward of twice as many."""
    return Costs(
        layers=tuple(
            LayerCosts(
                name=f"layer.{index}",
                forward_s=each,
                input_gradient_s=each,
                weight_gradient_s=each,
                parameter_bytes=1e6,
                accumulator_bytes=2e6,
                optimizer_bytes=3e6,
                activation_bytes=activation_bytes,
                boundary_bytes=1e3,
            )
            for index, each in enumerate(seconds)
        )
    )


def predict(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    *,
    exact_actions: int = EXACT_ACTIONS,
    max_in_flight: Mapping[int, int] | None = None,
) -> float:
    """Seconds of a step: exact where there are few enough actions, else the bound."""
    return step_s(cluster, costs, allocation, fidelity_for(allocation, exact_actions), max_in_flight=max_in_flight)
