"""What a worker's process is given when it starts.

The links of a worker whose peers may be at other sites, emulated or paced: which path frames to a peer take.

Where a member is stands in its label (`elaswave.blocks.domains`), which comes with each layout. Of a worker of which
nothing is known yet, such as one that is about to join, the site follows from its number.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from elaswave.checkpoints.format import CheckpointMeta
from elaswave.config.cluster import Sites, configured_sites
from elaswave.config.schema import Config
from elaswave.devices.host import HOST
from elaswave.devices.interface import Device
from elaswave.engine.checks.probe import Probe
from elaswave.training.definition import Training
from elaswave.transport.addresses import Endpoint
from elaswave.transport.emulated import EmulatedLinks, EmulatedPath, PacedLinks
from elaswave.transport.handshake import Key
from elaswave.types import Layout


class SiteLinks:
    """See the module.

    Args:
        sites: of the run.
        worker: whose links they are.
    """

    def __init__(self, sites: Sites, worker: int) -> None:
        self.emulated = None if sites.are_real else EmulatedLinks(self._path_to)
        self.paced = PacedLinks(self._path_to) if sites.are_real else None
        self._sites = sites
        self._worker = worker
        self._labels: Mapping[int, str] = {}

    def use_layout(self, layout: Layout) -> None:
        """Members are where their labels say."""
        self._labels = layout.domain_of

    def slow_down(self, factor: float) -> None:
        """Leaves every link to another site this share of its rate.

        Args:
            factor: above 0; 1 ends it.
        """
        for links in (self.emulated, self.paced):
            if links is not None:
                links.slow_down(factor)

    @property
    def has_frames(self) -> bool:
        """Whether a frame stands on an emulated link: somebody has to let time pass."""
        return self.emulated is not None and self.emulated.has_frames

    def part(self, site: str, until_s: float) -> bool:
        """From now on nothing goes between a site and the others.

        Args:
            site: its name.
            until_s: monotonic time at which that ends.
        Returns:
            Whether this worker is there.
        """
        away = self._sites.network.sites.index(site)

        def is_cut(there: int) -> bool:
            return (there == away) != (self._here == away)

        assert self.emulated is not None, "a real link cannot be cut"
        self.emulated.part(is_cut, until_s)
        return self._here == away

    @property
    def _here(self) -> int:
        return self._sites.site_of(self._worker, self._labels)

    def _path_to(self, peer: int) -> EmulatedPath | None:
        if peer == self._worker:
            return None
        there = self._sites.site_of(peer, self._labels)
        link = self._sites.network.link(self._here, there)
        return EmulatedPath(there, link.latency_s, link.bandwidth_bytes_per_s)


def site_links(config: Config, worker: int) -> SiteLinks | None:
    """The links of a worker; None: all are at one place."""
    sites = configured_sites(config)
    return None if sites is None else SiteLinks(sites, worker)


class WorkerSetup(NamedTuple):
    """What a worker is started with."""

    config: Config
    worker: int
    run_dir: Path
    key: Key
    """Of those who take part."""
    listen: Endpoint | str
    """Where the data plane listens."""
    checkpoint: tuple[Path, CheckpointMeta] | None
    probe: Probe
    profile: bool
    training: Training | None = None
    """What is trained; None: what the configuration describes."""
    loaders: socket.socket | None = None
    """Where the forkserver hands over lines to loaders; None: the worker makes its micro-batches itself."""
    frozen: Mapping[str, torch.Tensor] | None = None
    """Frozen parameters that the checkpoint has otherwise than they are built; None: they are still to be compared."""
    joins: bool = False
    """Whether it joins a job that runs: it begins without state, and says `Joining` before it registers."""
    sites: SiteLinks | None = None
    """The transport's links to other sites; None: there is only one."""
    domain: str = ""
    """Where it runs, as a joiner says it, see `elaswave.blocks.domains`; empty: the coordinator knows, or nobody."""
    device: Device = HOST
    """What it computes on; `run_worker` opens the configured one."""
