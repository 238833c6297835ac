"""Where the workers of a run are: the network of its file, with the run's rates and delays, and the site of each."""

import functools
from pathlib import Path
from typing import NamedTuple

from elaswave.config.network import NetworkFile, read_network
from elaswave.config.schema import Config
from elaswave.costs.network import Network
from elaswave.errors import ConfigError


class Sites(NamedTuple):
    """The places of a run's workers."""

    network: Network
    """With the rates and delays of the run."""
    of_workers: tuple[int, ...]
    """By id, as positions in the network's sites."""

    def site_of(self, worker: int) -> int:
        """Where a worker is; those that have joined take their turn."""
        return self.of_workers[worker % len(self.of_workers)]


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


def sites_of(config: Config) -> Sites | None:
    """Where workers are; None: all at one place.

    Raises:
        ConfigError: a file that cannot be read, or that knows no such site, or fewer workers than the run has.
    """
    sites = config.sites
    if sites.network is None:
        return None
    file = network_file(sites.network)
    network = network_at(sites.network, sites.rate, sites.delay)
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
    return Sites(network, tuple(of_workers))
