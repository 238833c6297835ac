"""Sites and the links between each pair of them: a network of which some links are slow. Pure values.

A transfer takes ``latency + bytes / bandwidth`` seconds. A link belongs to a worker and a site: what one worker sends
to all workers of another site shares it, what other workers send does not. Links may differ by direction. An access
link that a whole site shares is not modelled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

MAX_SITES = 1000
"""The links are a matrix: a million of them is what it may take."""


class NetworkLink(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can send over one level of the network: latency + bytes / bandwidth."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the figures.

        Raises:
            ValueError: a bandwidth of 0 or less, a negative latency, or not a finite number.
        """
        if not 0 < self.bandwidth_bytes_per_s < float("inf"):
            raise ValueError(f"link bandwidth is {self.bandwidth_bytes_per_s} bytes/s, needed: above 0 and finite")
        if not 0 <= self.latency_s < float("inf"):
            raise ValueError(f"link latency is {self.latency_s} s, needed: at least 0 and finite")

    def transfer_s(self, num_bytes: float) -> float:
        """Computes the seconds until so many bytes are there."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Links per pair of sites."""

    sites: tuple[str, ...]
    latency_s: np.ndarray
    """float64 [sites, sites], from the first to the second; the diagonal is between machines of one site."""
    bandwidth_bytes_per_s: np.ndarray
    """float64 [sites, sites], the same."""

    def __post_init__(self) -> None:
        """Checks the matrices.

        Raises:
            ValueError: with every fault that was found.
        """
        count = len(self.sites)
        problems = []
        if not 1 <= count <= MAX_SITES:
            problems.append(f"there are {count} sites, needed: 1 to {MAX_SITES}")
        if len(set(self.sites)) != count:
            problems.append(f"two sites have one name, of {', '.join(self.sites[:8])}")
        for name, matrix, what in (
            ("latency_s", self.latency_s, "at least 0"),
            ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, "above 0"),
        ):
            if matrix.shape != (count, count):
                problems.append(f"{name} has the shape {matrix.shape}, needed: {(count, count)}, a row for each site")
                continue
            good = (matrix >= 0 if name == "latency_s" else matrix > 0) & np.isfinite(matrix)
            for first, second in np.argwhere(~good)[:3]:
                problems.append(
                    f"{name} from {self.sites[first]} to {self.sites[second]} is {matrix[first, second]}, needed: "
                    f"{what} and finite"
                )
        if problems:
            raise ValueError("the network is impossible: " + "; ".join(problems))

    @classmethod
    def of_links(cls, sites: Sequence[str], links: Mapping[tuple[str, str], NetworkLink]) -> "Network":
        """Makes a network of named links.

        Args:
            sites: their names.
            links: (from, to) -> the link; of one site with itself, too. A pair that is given in one direction only is
                alike in both.
        Raises:
            ValueError: a pair without a link, or a site that there is not.
        """
        strange = sorted({name for pair in links for name in pair} - set(sites))
        if strange:
            raise ValueError(f"links name {strange[0]!r}, but the sites are {', '.join(sites)}")
        count = len(sites)
        latency_s, bandwidth = np.zeros((count, count)), np.zeros((count, count))
        for row, source in enumerate(sites):
            for column, target in enumerate(sites):
                link = links.get((source, target)) or links.get((target, source))
                if link is None:
                    raise ValueError(f"there is no link between {source} and {target}; each pair of sites needs one")
                latency_s[row, column], bandwidth[row, column] = link.latency_s, link.bandwidth_bytes_per_s
        return cls(sites=tuple(sites), latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)

    def link(self, source: int, target: int) -> NetworkLink:
        """Returns the link from one site to another, both by position in `sites`."""
        return NetworkLink(
            bandwidth_bytes_per_s=float(self.bandwidth_bytes_per_s[source, target]),
            latency_s=float(self.latency_s[source, target]),
        )

    @property
    def slowest(self) -> NetworkLink:
        """The smallest bandwidth and the largest latency of all links, though they may be of two."""
        return NetworkLink(
            bandwidth_bytes_per_s=float(self.bandwidth_bytes_per_s.min()), latency_s=float(self.latency_s.max())
        )
