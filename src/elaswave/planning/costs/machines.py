"""The machines of a job as values: devices, links, workers, and what happens to them. Pure, no torch, no IO.

Workers are columns of arrays, not objects: plans are made for a million of them. All of it has a JSON form.
Links are of two kinds, within a machine and between machines; where sites are far apart, a network
(`elaswave.planning.costs.network`) has one for each pair of sites.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from elaswave.planning.costs.network import Network, NetworkLink

EventKind = Literal["lost", "joined", "slowed", "drained"]
_SPREAD_MAX = 2
"""Ids of a cluster may span so many times as many numbers for its workers to be looked up in a table."""


class FrequencyLevel(msgspec.Struct, frozen=True, kw_only=True):
    """One clock setting of a device."""

    speed: float
    """Computation per second relative to the base level's, above 0."""
    power_w: float
    """Draw while it computes, in watts."""


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of accelerator."""

    name: str
    flops_per_s: float
    """Dense bfloat16 peak at the base level."""
    memory_bytes: float
    levels: tuple[FrequencyLevel, ...] = (FrequencyLevel(speed=1.0, power_w=0.0),)
    """Clock settings, speed ascending; one of them has speed 1.0: the base level."""
    idle_power_w: float = 0.0
    source: str = ""
    """Where the figures are published."""

    def __post_init__(self) -> None:
        """Checks the figures.

        Raises:
            ValueError: with every figure that cannot be.
        """
        problems = [
            f"{name} is {value}, needed: above 0"
            for name, value in (("flops_per_s", self.flops_per_s), ("memory_bytes", self.memory_bytes))
            if not 0 < value < float("inf")
        ]
        speeds = [level.speed for level in self.levels]
        if not speeds or speeds != sorted(set(speeds)) or speeds[0] <= 0 or 1.0 not in speeds:
            problems.append(f"levels have speeds {speeds}, needed: ascending, above 0, one of them 1.0")
        powers = [self.idle_power_w, *(level.power_w for level in self.levels)]
        if not all(0 <= power < float("inf") for power in powers):
            problems.append(f"powers are {powers} W, needed: finite, at least 0")
        if problems:
            raise ValueError(f"device {self.name!r} is impossible: " + "; ".join(problems))

    @property
    def base_level(self) -> int:
        """Index of the level of speed 1.0."""
        return [level.speed for level in self.levels].index(1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """Workers, their devices and the links between them. Arrays have one entry per worker, in order of ids."""

    ids: np.ndarray
    """int64, ascending."""
    node: np.ndarray
    """int64: the machine that a worker is in; workers of one node talk over `within_node`."""
    speed: np.ndarray
    """float64, above 0: of this worker relative to its device's description; 0.5 is a straggler at half speed."""
    memory_bytes: np.ndarray
    """float64: usable by training."""
    device: np.ndarray
    """int64: index into `devices`."""
    devices: tuple[DeviceSpec, ...]
    within_node: NetworkLink
    between_nodes: NetworkLink
    power_limit_w: float | None = None
    """Of all workers together; None means no limit."""
    network: Network | None = None
    """Links per pair of sites; they take the place of `between_nodes`, which is then what planners go by that know no
    sites. None: all machines are equally far apart."""
    site: np.ndarray | None = None
    """int64: of each worker, its position in the network's sites; there where `network` is."""

    def __post_init__(self) -> None:
        """Checks the columns.

        Raises:
            ValueError: with every fault that was found.
        """
        columns = {name: getattr(self, name) for name in ("node", "speed", "memory_bytes", "device")}
        problems = [
            f"{name} has {len(column)} entries for {len(self.ids)} workers"
            for name, column in columns.items()
            if len(column) != len(self.ids)
        ]
        if len(self.ids) > 1 and not bool(np.all(self.ids[1:] > self.ids[:-1])):
            problems.append("worker ids do not ascend")
        if not self.devices:
            problems.append("there is no device")
        elif len(self.device) and not 0 <= self.device.min() <= self.device.max() < len(self.devices):
            problems.append(f"device indices run from {self.device.min()} to {self.device.max()}, but there are "
                            f"{len(self.devices)} devices")  # fmt: skip
        for name, what in (("speed", "above 0"), ("memory_bytes", "above 0")):
            column = columns[name]
            bad = np.flatnonzero(~((column > 0) & np.isfinite(column)))
            if len(bad):
                problems.append(f"{name}[{bad[0]}] is {column[bad[0]]}, needed: {what} and finite")
        if self.power_limit_w is not None and not self.power_limit_w > 0:
            problems.append(f"power_limit_w is {self.power_limit_w}, needed: above 0")
        problems += self._site_problems()
        if problems:
            raise ValueError("the cluster is impossible: " + "; ".join(problems))

    def _site_problems(self) -> list[str]:
        if self.network is None or self.site is None:
            is_whole = self.network is None and self.site is None
            return [] if is_whole else ["a network needs the site of each worker, and the other way"]
        if len(self.site) != len(self.ids):
            return [f"site has {len(self.site)} entries for {len(self.ids)} workers"]
        last = len(self.network.sites) - 1
        if len(self.site) and not 0 <= self.site.min() <= self.site.max() <= last:
            return [f"sites run from {self.site.min()} to {self.site.max()}, needed: 0 to {last}"]
        return []

    @classmethod
    def uniform(
        cls,
        num_workers: int,
        device: DeviceSpec,
        *,
        within_node: NetworkLink,
        between_nodes: NetworkLink,
        workers_per_node: int = 8,
    ) -> "Cluster":
        """Makes a cluster of workers 0 to num_workers - 1 of one kind, node after node."""
        if num_workers < 1 or workers_per_node < 1:
            raise ValueError(f"{num_workers} workers, {workers_per_node} per node: both must be at least 1")
        ids = np.arange(num_workers, dtype=np.int64)
        return cls(
            ids=ids,
            node=ids // workers_per_node,
            speed=np.ones(num_workers),
            memory_bytes=np.full(num_workers, float(device.memory_bytes)),
            device=np.zeros(num_workers, dtype=np.int64),
            devices=(device,),
            within_node=within_node,
            between_nodes=between_nodes,
        )

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.ids)

    def index_of(self, workers: np.ndarray | Sequence[int]) -> np.ndarray:
        """Finds the positions of worker ids in the columns.

        Raises:
            KeyError: a worker that is not in the cluster.
        """
        wanted = np.asarray(workers, dtype=np.int64)
        if len(self.ids) and len(wanted) and self.ids[-1] - self.ids[0] == len(self.ids) - 1:  # no gaps to search
            where = wanted - self.ids[0]
            if where.min() >= 0 and where.max() < len(self.ids):
                return where
        if 2 * len(wanted) >= len(self.ids) and self._positions is not None:
            where = wanted - self.ids[0]
            if where.min() >= 0 and where.max() < len(self._positions):
                found = self._positions[where]
                if found.min() >= 0:
                    return found
        found = np.searchsorted(self.ids, wanted)
        if len(wanted) and (
            not len(self.ids) or bool(np.any(self.ids[np.minimum(found, len(self.ids) - 1)] != wanted))
        ):
            raise KeyError(f"not all of the workers {wanted[:8].tolist()} ... are in the cluster")
        return found

    @cached_property
    def _positions(self) -> np.ndarray | None:
        """Of each id from the first to the last one, -1 where it is nobody's; None where there are many gaps."""
        if not len(self.ids) or (span := int(self.ids[-1] - self.ids[0]) + 1) > _SPREAD_MAX * len(self.ids):
            return None
        table = np.full(span, -1, dtype=np.int64)
        table[self.ids - self.ids[0]] = np.arange(len(self.ids))
        return table

    def base_level(self, worker: int) -> int:
        """Finds the index of the frequency level of speed 1.0 of a worker's device.

        Raises:
            KeyError: a worker that is not in the cluster.
        """
        return self.devices[int(self.device[self.index_of([worker])[0]])].base_level

    def speed_of(self, levels: Mapping[int, int] | None = None) -> Callable[[int], float]:
        """Looks up the speed of single workers, by id.

        Args:
            levels: worker -> index of its frequency level; others run at their device's base level.
        Returns:
            A function that raises KeyError for a worker that is not in the cluster.
        """
        known = levels or {}

        def speed(worker: int) -> float:
            index = int(self.index_of([worker])[0])
            device = self.devices[int(self.device[index])]
            return float(self.speed[index]) * device.levels[known.get(worker, device.base_level)].speed

        return speed

    def link_between(self, first: int, second: int) -> NetworkLink:
        """Finds the link from one worker to another, both by position in the columns."""
        if self.node[first] == self.node[second]:
            return self.within_node
        if self.network is None or self.site is None:
            return self.between_nodes
        return self.network.link(int(self.site[first]), int(self.site[second]))

    @property
    def _columns(self) -> tuple[str, ...]:
        names = ("ids", "node", "speed", "memory_bytes", "device")
        return names if self.site is None else (*names, "site")

    def joined_by(self, others: "Cluster") -> "Cluster":
        """Returns the cluster with other workers of the same devices; those that are in it already stay as they are.

        Raises:
            ValueError: other devices.
        """
        if others.devices != self.devices:
            raise ValueError(
                f"the others have the devices {[device.name for device in others.devices]}, those of the cluster are "
                f"{[device.name for device in self.devices]}: describe both by the same list"
            )
        if others.network is not self.network:
            raise ValueError("the others are in another network: describe both by the same one")
        new = others.without(self.ids)
        order = np.argsort(np.concatenate((self.ids, new.ids)))
        columns: dict[str, Any] = {
            name: np.concatenate((getattr(self, name), getattr(new, name)))[order] for name in self._columns
        }
        return replace(self, **columns)

    def without(self, workers: Collection[int] | np.ndarray) -> "Cluster":
        """Returns the cluster after these workers are gone; those that are not in it do not matter."""
        return self.take(~np.isin(self.ids, np.fromiter(workers, dtype=np.int64, count=len(workers))))

    def take(self, chosen: np.ndarray) -> "Cluster":
        """Selects the workers at these positions (a mask, or ascending indices)."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in self._columns})


def worker_speeds(cluster: Cluster, where: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Looks up the speed of workers at these positions and levels."""
    speeds: np.ndarray = cluster.speed[where] * _at_levels(cluster, where, levels, lambda level: level.speed)
    return speeds


def worker_power(cluster: Cluster, where: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Looks up the draw while computing and the draw while idle, in watts, of workers at these positions and levels."""
    idle = np.array([device.idle_power_w for device in cluster.devices])
    draw = _at_levels(cluster, where, levels, lambda level: level.power_w)
    return draw, idle[cluster.device[where]] if len(idle) > 1 else np.full(len(where), idle[0])


def _at_levels(
    cluster: Cluster, where: np.ndarray, levels: np.ndarray, value: Callable[[FrequencyLevel], float]
) -> np.ndarray:
    """Looks up what a level says, for each of these workers' devices and levels."""
    found: np.ndarray
    if len(cluster.devices) == 1:
        found = np.array([value(level) for level in cluster.devices[0].levels])[levels]
        return found
    table = np.zeros((len(cluster.devices), max(len(device.levels) for device in cluster.devices)))
    for index, device in enumerate(cluster.devices):
        table[index, : len(device.levels)] = [value(level) for level in device.levels]
    found = table[cluster.device[where], levels]
    return found


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to some workers at one instant."""

    kind: EventKind
    workers: tuple[int, ...]
    """Ascending ids."""
    speed: float = 1.0
    """slowed: of the workers from now on, relative to their device."""

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: no worker, ids that do not ascend, or an impossible speed.
        """
        if not self.workers or list(self.workers) != sorted(set(self.workers)):
            raise ValueError(f"an event names workers {self.workers}: needed are ascending ids, at least one")
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"an event's speed is {self.speed}, needed: above 0 and finite")
