"""The layout of a run whose workers are far apart, where none is given: OP-Fence's plan for the run's own model."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from elaswave.config.devices import device_of, element_bytes, emulated_costs, own_bytes, shape_of
from elaswave.config.own import OWN
from elaswave.config.presets import device_preset
from elaswave.config.schema import Config
from elaswave.config.sites import network_file, run_network
from elaswave.errors import ConfigError, InfeasiblePlan
from elaswave.fences import Fence, built_in_layer_names
from elaswave.planning.costs.analytic import multiplications, sum_bytes
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.presets import DevicePreset
from elaswave.planning.far_apart.job import FarJob, FarPlan
from elaswave.planning.far_apart.objective import FAR_SCHEDULES
from elaswave.planning.far_apart.op_fence import op_fence
from elaswave.planning.far_apart.ratios import plan_with_ratios

CORE_FLOPS_PER_S = 2e10
"""Of a core of a usual processor, roughly: only for the layout of a run on real devices over emulated links."""
_SECONDS = ("forward_s", "input_gradient_s", "weight_gradient_s")


def own_costs(config: Config) -> Costs:
    """Costs of a run with a built-in model, without its fences: seconds of its devices, bytes of its own layers, which
    are what its links carry.

    Args:
        config: its layout need not be resolved.
    """
    plain = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, fences=()))
    costs = own_bytes(plain)
    if config.device.kind == "emulated":
        seconds = emulated_costs(plain).layers
        layers = tuple(
            msgspec.structs.replace(layer, **{name: getattr(timed, name) for name in _SECONDS})
            for layer, timed in zip(costs.layers, seconds, strict=True)
        )
    else:
        tokens = config.batch.microbatch_size * config.model.context_length
        one_s = [2 * tokens * each / CORE_FLOPS_PER_S for each in multiplications(shape_of(config))]
        layers = tuple(
            msgspec.structs.replace(layer, forward_s=each, input_gradient_s=each, weight_gradient_s=each)
            for layer, each in zip(costs.layers, one_s, strict=True)
        )
    return msgspec.structs.replace(costs, layers=layers, end_link=None, step_overhead_s=0.0)


def far_job(config: Config, codec: str) -> FarJob:
    """What OP-Fence plans for: the run's model on all workers of its file.

    Args:
        config: with a network, and a built-in model.
        codec: between sites.
    """
    sites = config.sites
    assert sites.network is not None
    file = network_file(sites.network)
    cluster = file.cluster
    speed = np.ones(cluster.num_workers)
    if config.device.kind == "emulated":
        base = device_preset(config.device.name)
        kinds = [_flops_per_s(preset) / _flops_per_s(base) for preset in file.presets]
        speed = cluster.speed * np.array(kinds)[cluster.device]
    return FarJob(
        cluster=Cluster(
            ids=cluster.ids,
            node=np.arange(cluster.num_workers, dtype=np.int64),
            speed=speed,
            memory_bytes=cluster.memory_bytes,
            device=np.zeros(cluster.num_workers, dtype=np.int64),
            devices=(device_of(config),),
            within_node=cluster.within_node,
            between_nodes=cluster.between_nodes,
            network=run_network(config),
            site=cluster.site,
        ),
        costs=(own_costs(config),),
        num_microbatches=config.batch.num_microbatches,
        element_bytes=element_bytes(config),
        codec=codec,
        followers=config.elastic.num_followers,
        sum_bytes=sum_bytes(config.elastic.consistency, config.elastic.accumulator_bits),
        copies=sites.copies,
    )


def _flops_per_s(preset: DevicePreset) -> float:
    return float(preset.device.flops_per_s * preset.efficiency)


def planned_keys(config: Config, *, is_schedule_given: bool) -> dict[str, Any]:
    """What OP-Fence makes of a run for which no layout is given, as values by dotted key.

    Args:
        config: with a network. Its layout does not count.
        is_schedule_given: whether the plan has to keep to the configured schedule.
    Raises:
        ConfigError: no plan fits, or the file cannot be read.
    """
    assert config.sites.network is not None
    if config.model.family == OWN:
        return {}  # nothing is known of what its layers cost
    codec = config.sites.codec or "none"
    job = far_job(config, codec)
    schedules = (config.layout.schedule,) if is_schedule_given else FAR_SCHEDULES
    if not set(schedules) <= set(FAR_SCHEDULES):
        raise ConfigError(
            [
                f"layout.schedule: OP-Fence does not plan {config.layout.schedule}; give one of "
                f"{', '.join(FAR_SCHEDULES)}, or a layout"
            ]
        )
    try:
        _, plan = plan_with_ratios(job, lambda job: op_fence(job, use_all=config.sites.use_all, schedules=schedules))
    except InfeasiblePlan as error:
        raise ConfigError([f"sites.network: OP-Fence has no plan for {config.sites.network}: {error}"]) from error
    devices = [device for stage in plan.stages for device in stage.devices]
    network = job.cluster.network
    assert network is not None
    found: dict[str, Any] = {
        "layout.widths": tuple(len(stage.devices) for stage in plan.stages),
        "layout.layers": tuple(stage.stop - stage.start for stage in plan.stages),
        "layout.schedule": plan.schedule,
        "sites.of_workers": tuple(network.sites[int(job.site[device])] for device in devices),
    }
    if config.device.kind == "emulated" and config.device.speeds is None:
        found["device.speeds"] = tuple(float(job.cluster.speed[device]) for device in devices)
    if codec != "none" and not config.model.fences:
        found["model.fences"] = fences_between_sites(config, plan)
    return found


def fences_between_sites(config: Config, plan: FarPlan) -> tuple[str, ...]:
    """Fences of a plan, as a configuration has them."""
    names: Sequence[str] = built_in_layer_names(config.model.num_layers)
    return tuple(str(Fence(names[layer - 1], plan.codec)) for layer in plan.fences)
