"""Known devices, links and models: those of the package's data files, and a person's own. The one reader of such files.

A file has tables ``[devices.NAME]``, ``[links.NAME]`` and ``[models.NAME]``; what they take is said by the structs here
and in ``src/elaswave/presets/``. Wherever a name is asked for, the path of a file that ends in ``.toml`` and holds one
entry of the kind will do. The forms themselves, without any file, are `elaswave.planning.costs.presets`.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from elaswave.config.values import check_values, parse_toml, read_toml, toml_text, unknown_section
from elaswave.errors import ConfigError, UsageError
from elaswave.planning.costs.machines import DeviceSpec, FrequencyLevel
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.presets import DevicePreset, LinkPreset, ModelShape, frequency_levels

GIB = 2.0**30

_Positive = Annotated[float, Meta(gt=0)]
_NotNegative = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]
_Text = Annotated[str, Meta(min_length=1)]


class PresetLinkEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of a link."""

    bandwidth_bytes_per_s: _Positive
    """Of one worker, in each direction."""
    latency_s: _NotNegative
    source: _Text
    """Where the figures are published."""


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of a device and of the machine that it usually comes in."""

    flops_per_s: _Positive
    """Dense bfloat16 peak at the base level."""
    memory_gib: _Positive
    """In units of 1024**3 bytes."""
    level_speeds: Annotated[tuple[_Positive, ...], Meta(min_length=1)] = (1.0,)
    """Clock settings relative to the base level, ascending, one of them 1.0."""
    level_power_w: tuple[_NotNegative, ...] | None = None
    """Draw of each of them; unset: modelled from ``base_power_w`` and ``idle_power_w``."""
    base_power_w: _NotNegative = 0.0
    """Draw at the base level; 0 where it does not matter."""
    idle_power_w: _NotNegative = 0.0
    memory_bandwidth_bytes_per_s: _Positive
    efficiency: Annotated[float, Meta(gt=0, le=1)]
    """Share of the peak that matrix products of a training step reach."""
    within_node: _Text
    """Name of the link between devices of one machine."""
    between_nodes: _Text
    """Name of the link between machines, each device's share."""
    devices_per_node: _Count
    source: _Text
    efficiency_source: _Text


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of a model."""

    family: Literal["gpt", "llama"]
    num_layers: _Count
    """Transformer blocks."""
    hidden_size: _Count
    intermediate_size: _Count
    """Width inside the feed-forward part."""
    num_heads: _Count
    num_kv_heads: _Count | None = None
    """Unset: as many as ``num_heads``."""
    vocab_size: _Count
    context_length: _Count
    """Tokens of a sample."""
    source: _Text


class Catalog(NamedTuple):
    """Presets by name."""

    devices: Mapping[str, DevicePreset]
    links: Mapping[str, LinkPreset]
    models: Mapping[str, ModelShape]


@cache
def catalog() -> Catalog:
    """Returns the package's own presets, read once."""
    folder = resources.files("elaswave") / "presets"
    found = Catalog({}, {}, {})
    for file in ("links.toml", "devices.toml", "models.toml"):  # devices name links
        more = catalog_of(parse_toml((folder / file).read_text(encoding="utf-8"), file), file, known=found)
        found = Catalog(
            {**found.devices, **more.devices}, {**found.links, **more.links}, {**found.models, **more.models}
        )
    return found


def read_presets(path: Path) -> Catalog:
    """Reads the presets of a person's file; its devices may name the package's links beside the file's own.

    Raises:
        ConfigError: lists every problem.
    """
    return catalog_of(read_toml(path), str(path), known=catalog())


def device_preset(name: str) -> DevicePreset:
    """Finds a known device, or the one that a file describes.

    Raises:
        UsageError: there is none of that name; lists those there are.
        ConfigError: a file with problems; lists every one.
    """
    return _look_up("devices", name)


def model_shape(name: str) -> ModelShape:
    """Finds a known model, or the one that a file describes.

    Raises:
        UsageError: there is none of that name; lists those there are.
        ConfigError: a file with problems; lists every one.
    """
    return _look_up("models", name)


def link_preset(name: str) -> LinkPreset:
    """Finds a known link, or the one that a file describes.

    Raises:
        UsageError: there is none of that name; lists those there are.
        ConfigError: a file with problems; lists every one.
    """
    return _look_up("links", name)


def _look_up(kind: str, name: str) -> Any:
    if name.endswith(".toml"):
        presets = getattr(read_presets(Path(name)), kind)
        if len(presets) != 1:
            listed = f"{len(presets)} {kind}" + (f" ({', '.join(presets)})" if presets else "")
            raise ConfigError([f"{name}: describes {listed}, needed: exactly one table [{kind}.NAME]"])
        return next(iter(presets.values()))
    presets = getattr(catalog(), kind)
    if name not in presets:
        raise UsageError(
            f"there is no {kind[:-1]} {name!r}; choose one of {', '.join(presets)}, or give the path of a .toml file"
        )
    return presets[name]


def catalog_of(document: Mapping[str, Any], where: str, *, known: Catalog) -> Catalog:
    """Makes a catalog of the presets of a document.

    Args:
        document: as read from TOML.
        where: the file's name, for messages.
        known: whose links devices may name.
    Raises:
        ConfigError: lists every problem.
    """
    problems: list[str] = []
    entries: dict[str, type[msgspec.Struct]] = {"devices": DeviceEntry, "links": PresetLinkEntry, "models": ModelEntry}
    for kind, table in document.items():
        if kind not in entries:
            problems.append(unknown_section(kind, table, entries))
        elif not isinstance(table, Mapping):
            problems.append(f"{kind}: got {toml_text(table)}, expected tables [{kind}.NAME]")
    links = {
        name: LinkPreset(
            name=name,
            link=NetworkLink(bandwidth_bytes_per_s=entry.bandwidth_bytes_per_s, latency_s=entry.latency_s),
            source=entry.source,
        )
        for name, entry in _entries(document, "links", PresetLinkEntry, problems)
    }
    devices, models = {}, {}
    for name, device in _entries(document, "devices", DeviceEntry, problems):
        try:
            devices[name] = _device(name, device, {**known.links, **links})
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"devices.{name}: {error}")
    for name, model in _entries(document, "models", ModelEntry, problems):
        try:
            models[name] = _model(name, model)
        except ValueError as error:
            problems.append(f"models.{name}: {error}")
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    return Catalog(devices, links, models)


_Entry = TypeVar("_Entry", bound=msgspec.Struct)


def _entries(
    document: Mapping[str, Any], kind: str, struct: type[_Entry], problems: list[str]
) -> Iterator[tuple[str, _Entry]]:
    """Yields the good entries of one kind; what is wrong with the others is added to the problems."""
    tables = document.get(kind)
    for name, values in tables.items() if isinstance(tables, Mapping) else ():
        section = f"{kind}.{name}"
        if not isinstance(values, Mapping):
            problems.append(f"{section}: got {toml_text(values)}, expected a table of keys, [{section}]")
            continue
        good, bad = check_values(section, struct, values)
        fields = msgspec.structs.fields(struct)
        bad += [
            f"{section}.{field.name}: is missing" for field in fields if field.required and field.name not in values
        ]
        problems += bad
        if not bad:
            yield name, struct(**good)


def _device(name: str, entry: DeviceEntry, links: Mapping[str, LinkPreset]) -> DevicePreset:
    """Makes a device of what its file says.

    Raises:
        ConfigError: links that are not known.
        ValueError: levels that cannot be.
    """
    unknown = [
        f"devices.{name}.{key}: there is no link {link!r}; choose one of {', '.join(links)}, or add [links.{link}]"
        for key, link in (("within_node", entry.within_node), ("between_nodes", entry.between_nodes))
        if link not in links
    ]
    if unknown:
        raise ConfigError(unknown)
    levels = frequency_levels(entry.level_speeds, idle_w=entry.idle_power_w, base_w=entry.base_power_w)
    if entry.level_power_w is not None:
        if len(entry.level_power_w) != len(levels):
            raise ValueError(f"level_power_w has {len(entry.level_power_w)} entries for {len(levels)} level_speeds")
        pairs = zip(entry.level_speeds, entry.level_power_w, strict=True)
        levels = tuple(FrequencyLevel(speed=speed, power_w=power_w) for speed, power_w in pairs)
    return DevicePreset(
        device=DeviceSpec(
            name=name,
            flops_per_s=entry.flops_per_s,
            memory_bytes=entry.memory_gib * GIB,
            levels=levels,
            idle_power_w=entry.idle_power_w,
            source=entry.source,
        ),
        memory_bandwidth_bytes_per_s=entry.memory_bandwidth_bytes_per_s,
        efficiency=entry.efficiency,
        efficiency_source=entry.efficiency_source,
        within_node=links[entry.within_node],
        between_nodes=links[entry.between_nodes],
        devices_per_node=entry.devices_per_node,
    )


def _model(name: str, entry: ModelEntry) -> ModelShape:
    """Makes a model of what its file says.

    Raises:
        ValueError: heads that do not divide.
    """
    values = msgspec.structs.asdict(entry)
    values["num_kv_heads"] = entry.num_heads if entry.num_kv_heads is None else entry.num_kv_heads
    return ModelShape(name=name, **values)
