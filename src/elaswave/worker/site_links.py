"""The emulated links of a worker whose peers may be at other sites: which path frames to a peer take.

Where a member is stands in its label (`elaswave.state.domains`), which comes with each layout. Of a worker of which
nothing is known yet, such as one that is about to join, the site follows from its number.
"""

from collections.abc import Mapping

from elaswave.config.schema import Config
from elaswave.config.sites import Sites, sites_of
from elaswave.transport.emulated import EmulatedLinks, EmulatedPath
from elaswave.types import Layout


class SiteLinks:
    """See the module.

    Args:
        sites: of the run.
        worker: whose links they are.
    """

    def __init__(self, sites: Sites, worker: int) -> None:
        self.links = EmulatedLinks(self._path_to)
        self._sites = sites
        self._worker = worker
        self._labels: Mapping[int, str] = {}

    def use_layout(self, layout: Layout) -> None:
        """Members are where their labels say."""
        self._labels = layout.domain_of

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

        self.links.part(is_cut, until_s)
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
    """The emulated links of a worker; None: it has only those that are there."""
    sites = sites_of(config)
    return None if sites is None else SiteLinks(sites, worker)
