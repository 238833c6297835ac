"""The cluster that a configuration describes: where its workers are, how fast they are, what their layers cost.

An emulated device computes the run's own tiny layers for real, and then rests until the described model's layer of the
same index would be done. So a run's model has as many blocks as the described one. Transfers are the real ones of the
tiny model, over emulated links where the run's workers are at several sites. Only the network's file is read here.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from elaswave.blocks.domains import site_of
from elaswave.config.network import NetworkFile, read_network
from elaswave.config.presets import device_preset, model_shape
from elaswave.config.schema import Config
from elaswave.config.values import OWN
from elaswave.errors import ConfigError
from elaswave.fences import built_in_layer_names, codecs_at
from elaswave.planning.costs.analytic import USABLE_MEMORY, analytic_costs, analytic_shares, multiplications
from elaswave.planning.costs.layers import Costs, LayerCosts, fenced_costs
from elaswave.planning.costs.machines import Cluster, DeviceSpec, FrequencyLevel
from elaswave.planning.costs.network import Network, NetworkLink
from elaswave.planning.costs.presets import ModelShape
from elaswave.types import ExecutionParameters

SLOWED = 100
"""A link that has become so many times as slow loses nobody."""
CONTROL_BYTES = 16384
"""What a worker may say to the coordinator at once: the report of a step is a few kilobytes."""
PACED_SHARE = 0.9
"""Of a real link's rate, for data: the rest is for headers of packets, acknowledgements and control messages."""
REAL_LINK = NetworkLink(bandwidth_bytes_per_s=2e9, latency_s=0.0)
"""Between processes of one machine, as measured; their latency is in the step's overhead."""
CPU = DeviceSpec(
    name="cpu", flops_per_s=1e11, memory_bytes=1e15, source="not described; its memory is not planned with"
)
"""Stands for the processor that a worker really runs on: costs are measured there, so only speeds' ratios count."""
QUOTA_SPEEDS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
"""Of the levels of a processor under a quota, as far as they fit in a core."""
_SLOTS = {"adamw": 2, "sgd": 1, OWN: 0}
"""Float32 states of an optimizer per parameter, at least; of a script's own nothing is known here."""
_SECONDS = ("forward_s", "input_gradient_s", "weight_gradient_s")


class Sites(NamedTuple):
    """The places of a run's workers."""

    network: Network
    """With the rates and delays of the run."""
    of_workers: tuple[int, ...]
    """By id, as positions in the network's sites."""

    coordinator: int | None
    """Where the coordinator is; None: near all workers."""
    are_real: bool = False
    """Whether the links are there, and are only paced; else they are emulated."""

    def site_of(self, worker: int, labels: Mapping[int, str] = MappingProxyType({})) -> int:
        """Finds where a worker is; those that have joined take their turn, as long as their labels are not known.

        Args:
            worker: its id.
            labels: of members, see `elaswave.blocks.domains`.
        """
        name = site_of(labels.get(worker, ""))
        return self.network.sites.index(name) if name else self.of_workers[worker % len(self.of_workers)]


@functools.lru_cache(maxsize=8)
def network_file(path: str) -> NetworkFile:
    """Returns the contents of a file, which is read once."""
    return read_network(Path(path))


@functools.lru_cache(maxsize=8)
def network_at(path: str, rate: float, delay: float) -> Network:
    """Makes the network of a file with other links: one value for one job, as clusters want it.

    Args:
        path: of the file.
        rate, delay: what bandwidths and delays are multiplied by.
    """
    network = network_file(path).cluster.network
    assert network is not None
    return Network(
        sites=network.sites,
        latency_s=network.latency_s * delay,
        bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * rate,
    )


def run_network(config: Config) -> Network:
    """Makes the links of a run's data: emulated ones with the run's rates and delays, real ones with what is used of
    them."""
    sites = config.sites
    assert sites.network is not None
    return network_at(sites.network, PACED_SHARE if sites.links == "real" else sites.rate, sites.delay)


def configured_sites(config: Config) -> Sites | None:
    """Tells where workers are; None: all at one place.

    Raises:
        ConfigError: a file that cannot be read, or that knows no such site, or fewer workers than the run has.
    """
    sites = config.sites
    if sites.network is None:
        return None
    file = network_file(sites.network)
    network = run_network(config)
    if sites.of_workers is None:
        assert file.cluster.site is not None
        of_workers = file.cluster.site.tolist()
        if config.layout.widths is not None and sum(config.layout.widths) > len(of_workers):
            raise ConfigError(
                [
                    f"sites.network: {sites.network} has {len(of_workers)} workers, and the layout "
                    f"{sum(config.layout.widths)}; give a smaller layout, or sites.of_workers"
                ]
            )
    else:
        if unknown := sorted(set(sites.of_workers) - set(network.sites)):
            raise ConfigError(
                [f"sites.of_workers: {sites.network} has no site {unknown[0]!r}; there are {', '.join(network.sites)}"]
            )
        of_workers = [network.sites.index(name) for name in sites.of_workers]
    coordinator = sites.coordinator
    if coordinator is not None and coordinator not in network.sites:
        raise ConfigError(
            [f"sites.coordinator: {sites.network} has no site {coordinator!r}; there are {', '.join(network.sites)}"]
        )
    home = None if coordinator is None else network.sites.index(coordinator)
    return Sites(network, tuple(of_workers), home, sites.links == "real")


def sites_that_may_part(config: Config) -> tuple[str, ...]:
    """Sites whose links to the others are emulated, so that they can be cut: all but the coordinator's."""
    sites = configured_sites(config)
    if sites is None or sites.are_real:
        return ()
    return tuple(name for number, name in enumerate(sites.network.sites) if number != sites.coordinator)


def control_network(config: Config) -> Network:
    """Makes the links as control messages find them: with the run's delays, and the file's rates."""
    sites = config.sites
    assert sites.network is not None
    return network_at(sites.network, 1.0, sites.delay)


def control_delays_s(config: Config) -> dict[int, float]:
    """Maps each site to how much later a heartbeat from there may come than one from the coordinator's site.

    It waits for the link's latency, and for other messages, at most `CONTROL_BYTES` of them, also where the link has
    become `SLOWED` times as slow.
    """
    sites = configured_sites(config)
    if sites is None or sites.coordinator is None:
        return {}
    network = control_network(config)
    found = {}
    for site in range(len(network.sites)):
        link = network.link(site, sites.coordinator)
        found[site] = link.latency_s + SLOWED * CONTROL_BYTES / link.bandwidth_bytes_per_s
    found[sites.coordinator] = 0.0
    return found


def labels_of(config: Config) -> dict[int, str]:
    """Maps each worker to where it runs (`elaswave.blocks.domains`), of those that a run begins with; empty: all are on
    one host.

    Of workers at several sites it is the site, or, where hosts are named too, a host of it (``oslo/a``): that with the
    most room, or where hosts have no numbers, with the fewest workers.

    Args:
        config: resolved.
    Raises:
        ConfigError: hosts that are at no site, or have no room for their site's workers.
    """
    sites = configured_sites(config)
    if sites is None:
        return config.host_of
    names = [sites.network.sites[sites.site_of(worker)] for worker in range(sum(config.widths))]
    if config.hosts is None:
        return dict(enumerate(names))
    known = set(names)
    if strange := [host for host in config.hosts if "/" not in host or site_of(host) not in known]:
        if config.elastic.hosts is None:
            raise ConfigError(
                [
                    f"control.hosts: {config.control.hosts} hosts of a job with sites.network: name the hosts with "
                    f"elastic.hosts, as SITE/HOST; sites of the workers are {', '.join(sorted(known))}"
                ]
            )
        raise ConfigError(
            [
                f"elastic.hosts: {strange[0]} is at none of the sites of the workers ({', '.join(sorted(known))}); "
                "name hosts SITE/HOST"
            ]
        )
    counted = any("=" in entry for entry in config.elastic.hosts or ())
    used: Counter[str] = Counter()
    labels = {}
    for worker, name in enumerate(names):
        here = [host for host in config.hosts if site_of(host) == name]
        free = [host for host in here if not counted or used[host] < config.hosts[host]]
        if not free:
            raise ConfigError(
                [f"elastic.hosts: the hosts of {name} have no room for its {names.count(name)} workers; name more"]
            )
        room = {host: (config.hosts[host] if counted else 0) - used[host] for host in free}
        labels[worker] = max(free, key=room.__getitem__)
        used[labels[worker]] += 1
    return labels


def shape_of(config: Config) -> ModelShape:
    """Sizes of a run's model, which is a built-in one."""
    model = config.model
    assert model.family != "own", "a script's own model has no sizes that the configuration knows"
    usual = 4 * model.hidden_size if model.family == "gpt" else 8 * model.hidden_size // 3
    return ModelShape(
        name=f"{model.family} of {model.num_layers} blocks of hidden size {model.hidden_size}",
        family=model.family,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        intermediate_size=model.intermediate_size or usual,
        vocab_size=config.data.resolved_vocab_size,
        context_length=model.context_length,
        source="the run's configuration",
    )


def element_bytes(config: Config) -> int:
    """Returns the bytes of an element of parameters and activations."""
    return 4 if config.model.dtype == "float32" else 2


def state_bytes(config: Config) -> int:
    """Computes the bytes of masters and optimizer slots, per parameter: slots are float32, and so is a master, which is
    the parameter itself where workers compute in float32."""
    num_slots = _SLOTS[config.optimizer.name] + bool(config.optimizer.ema_decay)
    return 4 * num_slots + (0 if config.model.dtype == "float32" else 4)


def emulated_costs(config: Config) -> Costs:
    """Costs of the described model on the described device, one micro-batch of one sample, in seconds as emulated.

    Args:
        config: with ``device.kind = "emulated"``.
    """
    device = config.device
    described = analytic_costs(
        model_shape(device.model),
        device_preset(device.name),
        consistency=config.elastic.consistency,
        accumulator_bits=config.elastic.accumulator_bits,
        recompute=config.model.recompute,
        fences=config.model.fences,
    )
    layers = tuple(
        msgspec.structs.replace(layer, **{name: getattr(layer, name) * device.time_scale for name in _SECONDS})
        for layer in described.layers
    )
    sites, end_link = configured_sites(config), None
    if sites is not None:  # whose links carry the tensors of the run's own model
        carried = own_bytes(config).layers
        layers = tuple(
            msgspec.structs.replace(layer, boundary_bytes=own.boundary_bytes)
            for layer, own in zip(layers, carried, strict=True)
        )
        described_bytes, own_sums = (sum(each.accumulator_bytes for each in some) for some in (layers, carried))
        slowest = sites.network.slowest
        end_link = msgspec.structs.replace(
            slowest, bandwidth_bytes_per_s=slowest.bandwidth_bytes_per_s * described_bytes / own_sums
        )
    links = "transfers are not emulated" if config.sites.network is None else f"links are {config.sites.links}"
    source = f"{described.source}; each described second takes {device.time_scale:g} s; {links}"
    # What a step costs beside its actions is real, and measured. Over slow links sums of replicas are most of it: as if
    # all went over the slowest one.
    return Costs(layers=layers, step_overhead_s=0.0, end_link=end_link, source=source)


def own_bytes(config: Config) -> Costs:
    """Computes the bytes of the layers of a run's own model, a built-in one, with its fences; of seconds only
    shares."""
    costs = analytic_shares(
        shape_of(config),
        microbatch_size=config.batch.microbatch_size,
        consistency=config.elastic.consistency,
        accumulator_bits=config.elastic.accumulator_bits,
        recompute=config.model.recompute,
        parameter_bytes=element_bytes(config),
        optimizer_bytes=state_bytes(config),
    )
    names = built_in_layer_names(config.model.num_layers)
    return fenced_costs(costs, codecs_at(config.model.fences, names), element_bytes=element_bytes(config))


def own_layer_costs(layer_parameters: Sequence[int]) -> tuple[float, ...]:
    """Estimates what the layers of a script's own model cost before anything is measured, in proportion to each other.

    A layer costs as much as it has parameters, one without any a little: nothing else is known of it.

    Args:
        layer_parameters: number of parameters of each layer.
    """
    return tuple(float(max(1, number)) for number in layer_parameters)


def estimated_costs(config: Config, layer_parameters: Sequence[int] = ()) -> Costs:
    """Costs of the run's own layers as far as they are known before anything is measured: only shares of time count.

    Bytes are left at 0: what a process of this machine needs is not planned with.

    Args:
        config: of the run.
        layer_parameters: number of parameters of each layer; read for a script's own model.
    """
    is_own = config.model.family == OWN
    estimates = own_layer_costs(layer_parameters) if is_own else multiplications(shape_of(config))
    layers = tuple(
        LayerCosts(
            name=f"layer {index}",
            forward_s=estimate * 1e-9,
            input_gradient_s=estimate * 1e-9,
            weight_gradient_s=estimate * 1e-9,
            parameter_bytes=0.0,
            accumulator_bytes=0.0,
            optimizer_bytes=0.0,
            activation_bytes=0.0,
            boundary_bytes=0.0,
        )
        for index, estimate in enumerate(estimates)
    )
    return Costs(layers=layers, source="estimated from the sizes of the layers")


def device_of(config: Config) -> DeviceSpec:
    """Returns what every worker of a run computes on."""
    if config.device.kind == "emulated":
        return device_preset(config.device.name).device
    return CPU if config.device.quota is None else cpu_under_quota(config.device.quota)


def cpu_under_quota(share: float) -> DeviceSpec:
    """Makes a processor of which each worker may use a share of a core at the base level, at higher ones more.

    What a level draws is its share of a core: then a limit of power is a limit of cores. There are no lower levels,
    which would leave to nobody what a worker does not use: the kernel does so anyway.

    Args:
        share: above 0, at most 1.
    """
    most = 1.0 / share
    speeds = sorted({speed for speed in QUOTA_SPEEDS if speed < most} | {most})
    return msgspec.structs.replace(
        CPU, levels=tuple(FrequencyLevel(speed=speed, power_w=speed * share) for speed in speeds)
    )


def base_level(config: Config) -> int:
    """Finds the index of the frequency level that workers begin at."""
    return device_of(config).base_level


def speed_of(config: Config, worker: int) -> float:
    """Returns the speed of a worker as configured; 1.0 for one that joins later."""
    speeds = config.device.speeds or ()
    return speeds[worker] if worker < len(speeds) else 1.0


def planned_speeds(config: Config, execution: ExecutionParameters) -> dict[int, float]:
    """Speeds of the workers that a layout was planned with, relative to what the configuration says of them.

    Args:
        config: of the run.
        execution: beside the layout.
    """
    levels = device_of(config).levels
    found = {}
    for worker in sorted({*range(sum(config.widths)), *execution.speeds, *execution.levels}):
        level = levels[execution.levels.get(worker, base_level(config))].speed
        found[worker] = execution.speeds.get(worker, 1.0) / (speed_of(config, worker) * level)
    return found


def power_limit_w(config: Config, num_workers: int) -> float | None:
    """Computes what so many workers may draw together: as many as there are or were at first, whichever is more, at
    base level.

    So who is lost leaves power for the others' clocks, and who joins a job of full size brings its own. None where
    nothing sets clocks: then all stay at the base level.
    """
    if config.device.frequency == "none":
        return None
    device = device_of(config)
    base_w = device.levels[device.base_level].power_w
    return max(num_workers, sum(config.widths)) * base_w if base_w > 0 else None


def cluster_of(
    config: Config, workers: Sequence[int] | None = None, labels: Mapping[int, str] = MappingProxyType({})
) -> Cluster:
    """Makes the cluster of a job's workers, as the planner sees them.

    Args:
        config: of the run, resolved.
        workers: ids, ascending; None: those that the job begins with.
        labels: where they run, as far as that is known, see `elaswave.blocks.domains`.
    """
    ids = range(sum(config.widths)) if workers is None else workers
    num_workers = len(ids)
    device, sites = device_of(config), configured_sites(config)
    return Cluster(
        ids=np.array(ids, dtype=np.int64),
        node=np.zeros(num_workers, dtype=np.int64) if sites is None else np.array(ids, dtype=np.int64),
        speed=np.array([speed_of(config, worker) for worker in ids]),
        memory_bytes=np.full(num_workers, device.memory_bytes * USABLE_MEMORY),
        device=np.zeros(num_workers, dtype=np.int64),
        devices=(device,),
        within_node=REAL_LINK,
        between_nodes=REAL_LINK if sites is None else sites.network.slowest,
        power_limit_w=power_limit_w(config, num_workers),
        network=None if sites is None else sites.network,
        site=None if sites is None else np.array([sites.site_of(worker, labels) for worker in ids], dtype=np.int64),
    )
