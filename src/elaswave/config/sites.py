"""Where the workers of a run are: the network of its file, with the run's rates and delays, and the site of each."""

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from elaswave.blocks.domains import site_of
from elaswave.config.network import NetworkFile, read_network
from elaswave.config.schema import Config
from elaswave.errors import ConfigError
from elaswave.planning.costs.network import Network

SLOWED = 100
"""A link that has become so many times as slow loses nobody."""
CONTROL_BYTES = 16384
"""What a worker may say to the coordinator at once: the report of a step is a few kilobytes."""


PACED_SHARE = 0.9
"""Of a real link's rate, for data: the rest is for headers of packets, acknowledgements and control messages."""


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
        """Where a worker is; those that have joined take their turn, as long as their labels are not known.

        Args:
            worker: its id.
            labels: of members, see `elaswave.blocks.domains`.
        """
        name = site_of(labels.get(worker, ""))
        return self.network.sites.index(name) if name else self.of_workers[worker % len(self.of_workers)]


@functools.lru_cache(maxsize=8)
def network_file(path: str) -> NetworkFile:
    """The contents of a file, which is read once."""
    return read_network(Path(path))


@functools.lru_cache(maxsize=8)
def network_at(path: str, rate: float, delay: float) -> Network:
    """The network of a file with other links: one value for one job, as clusters want it.

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
    """The links of a run's data: emulated ones with the run's rates and delays, real ones with what is used of them."""
    sites = config.sites
    assert sites.network is not None
    return network_at(sites.network, PACED_SHARE if sites.links == "real" else sites.rate, sites.delay)


def configured_sites(config: Config) -> Sites | None:
    """Where workers are; None: all at one place.

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
    """The links as control messages find them: with the run's delays, and the file's rates."""
    sites = config.sites
    assert sites.network is not None
    return network_at(sites.network, 1.0, sites.delay)


def control_delays_s(config: Config) -> dict[int, float]:
    """Site -> by how much later a heartbeat from there may come than one from the coordinator's site.

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
    """Worker -> where it runs (`elaswave.blocks.domains`), of those that a run begins with; empty: all are on one host.

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
