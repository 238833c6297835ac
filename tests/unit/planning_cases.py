"""Small clusters and costs for tests of planners."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.machines import Cluster, DeviceSpec, FrequencyLevel
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.programs.prediction import EXACT_ACTIONS, fidelity_for, step_s
from elaswave.planning.search import planner
from elaswave.planning.search.candidates import Axis, Options
from elaswave.types import Layout

LINK = NetworkLink(bandwidth_bytes_per_s=1e9, latency_s=1e-5)


def device(memory_bytes: float = 1e12) -> DeviceSpec:
    return DeviceSpec(
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


def moved_layers(old: Layout, new: Layout) -> dict[int, list[int]]:
    """The layers that workers hold as members of a stage under one layout, but did not under another.

    Args:
        old: the layout before.
        new: the layout after.
    Returns:
        Worker -> layers, ascending; only workers with such layers. For a worker that is new these are all of its stage.
    """
    before = {worker: range(stage.start, stage.stop) for stage in old.stages for worker in stage.workers}
    moved: dict[int, list[int]] = {}
    for stage in new.stages:
        for worker in stage.workers:
            held = before.get(worker, range(0))
            if layers := [layer for layer in range(stage.start, stage.stop) if layer not in held]:
                moved[worker] = layers
    return moved


def plan(
    *arguments: Any,
    options: Options | None = None,
    axes: Collection[Axis] | None = None,
    horizon_s: float | None = None,
    baselines: Sequence[Planner] = (),
) -> Plan:
    """ElasWave's plan, with these axes and this horizon instead of the options'."""
    given = {"axes": None if axes is None else frozenset(axes), "horizon_s": horizon_s}
    changed = {name: value for name, value in given.items() if value is not None}
    return planner.plan(*arguments, options=replace(options or Options(), **changed), baselines=baselines)
