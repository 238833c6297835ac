"""Reads and writes network files: sites with their workers, and the links between each two sites. Nothing else does.

A file has tables ``[sites.NAME]`` and ``[[links]]``; what they take is said by the structs here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from elaswave.config.presets import device_preset
from elaswave.config.values import check_values, read_toml, toml_text, toml_value
from elaswave.errors import ConfigError, UsageError
from elaswave.planning.costs.analytic import USABLE_MEMORY
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.network import MAX_SITES, Network, NetworkLink
from elaswave.planning.costs.presets import DevicePreset

MAX_WORKERS = 1024
"""Of all sites: pairs of workers are matrices in the planner."""
_MBIT = 1e6 / 8
_MS = 1e-3

_Rate = Annotated[float, Meta(gt=0)]
_Delay = Annotated[float, Meta(ge=0)]


class SiteEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of a site."""

    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    device: Annotated[str, Meta(min_length=1)] = "a100"
    """Name of a known device, or a .toml file with one."""
    speeds: tuple[_Rate, ...] | None = None
    """Of each worker, relative to its device: 0.5 is a straggler at half speed; unset: 1."""
    memory_gib: _Rate | None = None
    """Of each worker; unset: the device's."""
    workers_per_machine: Annotated[int, Meta(ge=1)] = 1
    """Those of one machine talk over the device's own links."""
    bandwidth_mbit_per_s: _Rate
    """Between machines of the site, of each worker."""
    delay_ms: _Delay
    """One way, between machines of the site."""


class SiteLinkEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of the link between two sites."""

    between: tuple[str, str]
    """Names of two sites."""
    bandwidth_mbit_per_s: _Rate
    """Of each worker to the other site."""
    delay_ms: _Delay
    """One way."""
    back_bandwidth_mbit_per_s: _Rate | None = None
    """From the second to the first, where that differs."""
    back_delay_ms: _Delay | None = None


class NetworkFile(NamedTuple):
    """A network and the workers in it."""

    cluster: Cluster
    presets: tuple[DevicePreset, ...]
    """The device of each kind of the cluster."""
    source: str
    """Where the figures come from, as the file says."""


class NetworkParts(NamedTuple):
    """What a file says; pairs of sites may lack a link."""

    sites: dict[str, SiteEntry]
    links: dict[tuple[str, str], NetworkLink]
    """(from, to) -> the link, in both directions."""
    source: str


def read_network(path: Path) -> NetworkFile:
    """Reads the workers and links of a file.

    Raises:
        ConfigError: a file that cannot be read, is not TOML, or says what cannot be; names every fault.
        UsageError: a device that is not known.
    """
    parts, problems = _read(path)
    if not problems:
        problems += _lacking(list(parts.sites), parts.links)
    _refuse(path, problems)
    return _file(*parts)


def read_parts(path: Path) -> NetworkParts:
    """Reads a file whose links are still to be measured.

    Raises:
        ConfigError: as of `read_network`, but for links that are not there.
    """
    parts, problems = _read(path)
    _refuse(path, problems)
    return parts


def network_text(parts: NetworkParts) -> str:
    """Writes the text of a file from which the same is read."""
    tables = [f"source = {toml_value(parts.source)}\n"] if parts.source else []
    for name, entry in parts.sites.items():
        tables.append(_table(f"[sites.{toml_value(name)}]", msgspec.structs.asdict(entry)))
    for (first, second), link in parts.links.items():
        if list(parts.sites).index(first) < list(parts.sites).index(second):
            back = parts.links[second, first]
            values = {"between": (first, second), "bandwidth_mbit_per_s": link.bandwidth_bytes_per_s / _MBIT,
                      "delay_ms": link.latency_s / _MS}  # fmt: skip
            if back != link:
                values |= {"back_bandwidth_mbit_per_s": back.bandwidth_bytes_per_s / _MBIT,
                           "back_delay_ms": back.latency_s / _MS}  # fmt: skip
            tables.append(_table("[[links]]", values))
    return "\n".join(tables)


def _table(head: str, values: Mapping[str, Any]) -> str:
    """Writes a table; without the last digits of numbers, which changes of unit have made."""
    rounded = {key: float(f"{value:.12g}") if isinstance(value, float) else value for key, value in values.items()}
    lines = [f"{key} = {toml_value(value)}" for key, value in rounded.items() if value is not None]
    return "\n".join([head, *lines, ""])


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])


def _read(path: Path) -> tuple[NetworkParts, list[str]]:
    """Reads what a file says, and every fault of it."""
    document = read_toml(path)
    problems = [
        f"{key}: unknown table; a network file has [sites.NAME], [[links]] and source"
        for key in document
        if key not in ("sites", "links", "source")
    ]
    source = document.get("source", "")
    if not isinstance(source, str):
        problems.append(f"source: got {toml_text(source)}, expected text")
    sites = _sites(document.get("sites"), problems)
    links = _links(document.get("links", []), list(sites), problems)
    return NetworkParts(sites, links, source), problems


def scaled(cluster: Cluster, bandwidth_mbit_per_s: float) -> Cluster:
    """Makes the same cluster where the slowest link between sites has this bandwidth, and all others as many times
    that.

    Args:
        cluster: with a network of several sites.
        bandwidth_mbit_per_s: of the slowest one; links within sites stay.
    """
    network = cluster.network
    assert network is not None
    apart = ~np.eye(len(network.sites), dtype=bool)
    factor = bandwidth_mbit_per_s * _MBIT / float(network.bandwidth_bytes_per_s[apart].min())
    slower = np.where(apart, network.bandwidth_bytes_per_s * factor, network.bandwidth_bytes_per_s)
    changed = Network(sites=network.sites, latency_s=network.latency_s, bandwidth_bytes_per_s=slower)
    return Cluster(**{**vars(cluster), "network": changed, "between_nodes": changed.slowest})


_Entry = TypeVar("_Entry", bound=msgspec.Struct)


def _entry(section: str, struct: type[_Entry], values: Any, problems: list[str]) -> _Entry | None:
    if not isinstance(values, Mapping):
        problems.append(f"{section}: got {toml_text(values)}, expected a table of keys")
        return None
    good, bad = check_values(section, struct, values)
    bad += [
        f"{section}.{field.name}: is missing"
        for field in msgspec.structs.fields(struct)
        if field.required and field.name not in values
    ]
    problems += bad
    return None if bad else struct(**good)


def _sites(tables: Any, problems: list[str]) -> dict[str, SiteEntry]:
    if not isinstance(tables, Mapping) or not tables:
        problems.append("sites: there is none; give at least one table [sites.NAME] with workers")
        return {}
    if len(tables) > MAX_SITES:
        problems.append(f"sites: there are {len(tables)}, at most {MAX_SITES} are possible")
        return {}
    found = {}
    for name, values in tables.items():
        entry = _entry(f"sites.{name}", SiteEntry, values, problems)
        if entry is None:
            continue
        found[name] = entry
        if "/" in name or not name.strip():
            problems.append(f"sites.{name}: a site's name stands before the slash of SITE/HOST; give one without")
        if entry.speeds is not None and len(entry.speeds) != entry.workers:
            problems.append(f"sites.{name}.speeds: {len(entry.speeds)} speeds for {entry.workers} workers")
    if (total := sum(entry.workers for entry in found.values())) > MAX_WORKERS:
        problems.append(f"sites: {total} workers in all, at most {MAX_WORKERS} are possible")
    return found


def _links(tables: Any, sites: list[str], problems: list[str]) -> dict[tuple[str, str], NetworkLink]:
    if not isinstance(tables, list):
        problems.append(f"links: got {toml_text(tables)}, expected tables [[links]]")
        return {}
    found: dict[tuple[str, str], NetworkLink] = {}
    for number, values in enumerate(tables, start=1):
        entry = _entry(f"links {number}", SiteLinkEntry, values, problems)
        if entry is None:
            continue
        first, second = entry.between
        for name in (first, second):
            if name not in sites:
                problems.append(f"links {number}.between: there is no site {name!r}; there are {', '.join(sites)}")
        if first == second:
            problems.append(f"links {number}.between: {first} with itself; its own link is in [sites.{first}]")
        if (first, second) in found:
            problems.append(f"links {number}.between: a second link between {first} and {second}; give one")
        back_rate = entry.back_bandwidth_mbit_per_s or entry.bandwidth_mbit_per_s
        back_delay = entry.delay_ms if entry.back_delay_ms is None else entry.back_delay_ms
        found[first, second] = _link(entry.bandwidth_mbit_per_s, entry.delay_ms)
        found[second, first] = _link(back_rate, back_delay)
    return found


def _link(bandwidth_mbit_per_s: float, delay_ms: float) -> NetworkLink:
    return NetworkLink(bandwidth_bytes_per_s=bandwidth_mbit_per_s * _MBIT, latency_s=delay_ms * _MS)


def _lacking(sites: list[str], links: Mapping[tuple[str, str], NetworkLink]) -> list[str]:
    return [
        f"links: there is none between {first} and {second}; give [[links]] with between = [{first!r}, {second!r}]"
        for index, first in enumerate(sites)
        for second in sites[index + 1 :]
        if (first, second) not in links
    ]


def _file(sites: Mapping[str, SiteEntry], links: dict[tuple[str, str], NetworkLink], source: str) -> NetworkFile:
    kinds = list(dict.fromkeys(entry.device for entry in sites.values()))
    presets = tuple(device_preset(kind) for kind in kinds)
    for name, entry in sites.items():
        links[name, name] = _link(entry.bandwidth_mbit_per_s, entry.delay_ms)
    network = Network.of_links(list(sites), links)
    node: list[int] = []
    site: list[int] = []
    speed: list[float] = []
    memory: list[float] = []
    device: list[int] = []
    for number, entry in enumerate(sites.values()):
        first = node[-1] + 1 if node else 0
        kind = kinds.index(entry.device)
        own = presets[kind].device.memory_bytes if entry.memory_gib is None else entry.memory_gib * 2.0**30
        node += [first + index // entry.workers_per_machine for index in range(entry.workers)]
        site += [number] * entry.workers
        speed += entry.speeds or [1.0] * entry.workers
        memory += [own * USABLE_MEMORY] * entry.workers
        device += [kind] * entry.workers
    try:
        cluster = Cluster(
            ids=np.arange(len(node), dtype=np.int64),
            node=np.array(node, dtype=np.int64),
            speed=np.array(speed),
            memory_bytes=np.array(memory),
            device=np.array(device, dtype=np.int64),
            devices=tuple(preset.device for preset in presets),
            within_node=presets[0].within_node.link,
            between_nodes=network.slowest,
            network=network,
            site=np.array(site, dtype=np.int64),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return NetworkFile(cluster, presets, source)
