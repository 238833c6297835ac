"""Reads a configuration: defaults, then a saved one, then a TOML file, then ``--set``, the later the stronger.

All problems of all sources are found and raised together. Only the TOML file is read here, and the headers of data
files, which say how many different tokens there are; no environment, no clock.

The layout of a run whose workers are far apart, where none is given: OP-Fence's plan for the run's own model.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from elaswave.config.cluster import (
    device_of,
    element_bytes,
    emulated_costs,
    labels_of,
    network_file,
    own_bytes,
    own_layer_costs,
    run_network,
    shape_of,
)
from elaswave.config.presets import device_preset
from elaswave.config.rules import SHAPE_KEYS, broken_rules
from elaswave.config.schema import SECTIONS, Config
from elaswave.config.values import (
    OWN,
    OwnModel,
    check_values,
    free_keys,
    parse_toml,
    path_problem,
    plain,
    problems_with_own,
    read_toml,
    toml_text,
    unknown_section,
)
from elaswave.config_format import FORMAT_KEY, format_problem
from elaswave.data.samples import known_vocabulary
from elaswave.errors import ConfigError, DataError, InfeasiblePlan
from elaswave.fences import Fence, built_in_layer_names
from elaswave.planning.costs.analytic import multiplications
from elaswave.planning.costs.layers import Costs, sum_bytes
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.presets import DevicePreset
from elaswave.planning.far_apart.job import FarJob, FarPlan
from elaswave.planning.far_apart.objective import FAR_SCHEDULES
from elaswave.planning.far_apart.op_fence import op_fence
from elaswave.planning.far_apart.ratios import plan_with_ratios
from elaswave.planning.programs.layout import partition_layers, resolve_widths

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
    """Makes what OP-Fence plans for: the run's model on all workers of its file.

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
        followers=config.elastic.planned_followers,
        sum_bytes=sum_bytes(config.elastic.consistency, config.elastic.accumulator_bits),
        copies=sites.copies,
    )


def _flops_per_s(preset: DevicePreset) -> float:
    return float(preset.device.flops_per_s * preset.efficiency)


def planned_keys(config: Config, *, is_schedule_given: bool) -> dict[str, Any]:
    """Returns what OP-Fence makes of a run for which no layout is given, as values by dotted key.

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


BUILT_IN_SOURCES = ("python-docs",)
"""Values of ``data.source`` that are not paths."""

_PATHS = {"net": ("keys",), "sites": ("network",), "run": ("spare_checkpoints",)}
"""Keys, by section, whose paths are written out."""

Values = dict[str, Any]
"""What a file holds: tables by name, and anything else that a person may have written."""


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    *,
    base: Config | None = None,
    settings: Mapping[Any, Any] | None = None,
    own: OwnModel | None = None,
    is_saved: bool = False,
) -> Config:
    """Loads the resolved configuration of a run.

    Args:
        path: a TOML file; None for none.
        overrides: texts ``section.key=value``; the value is read as TOML, and as a string where it is none.
        workers: number of workers that the layout must have; decides the layout where none is given.
        base: what takes the place of the defaults, such as the configuration of the run that is resumed. Its layout
            counts only where none of the other arguments says anything about the layout.
        settings: a script's: values by key, by section, or by dotted key; stronger than the file.
        own: a script's model; None: the configuration describes the model.
        is_saved: the file was saved by a run, so that it may say that the model is a script's.
    Returns:
        A valid configuration whose layout is written out and whose ``data.source`` and ``elastic.policy`` do not depend
        on the folder that the command was started in.
    Raises:
        ConfigError: lists every problem.
    """
    problems: list[str] = []
    sources: list[Values] = []
    if path is not None:
        sources.append(_in_this_format(read_toml(path), path, problems, is_saved=is_saved))
    if settings is not None:
        sources.append(_by_section(settings, problems))
    sources.append(_parse_overrides(overrides, problems))

    values: Values = base.to_dict() if base is not None else {}
    if workers is not None:
        _forget(values, "stages", "replicas", "widths", "layers")
    given: Values = {}
    for source in sources:
        _merge(values, source)
        _merge(given, source)
    if not is_saved:
        problems += problems_with_own(own, given)
    if own is not None:
        replaced = {"model", "data"}
        if own.has_optimizer or (base is not None and base.optimizer.name == OWN):
            replaced.add("optimizer")
        values = {name: table if name not in replaced else free_keys(name, table) for name, table in values.items()}
        for name, table in own.values.items():
            values[name] = {**values.get(name, {}), **table}
    return build_config(values, workers=workers, problems=problems, own=own)


def build_config(
    values: Mapping[str, Any],
    *,
    workers: int | None = None,
    problems: Sequence[str] = (),
    own: OwnModel | None = None,
) -> Config:
    """Builds the resolved configuration with these values.

    Args:
        values: values by key, by section; what is missing takes its default.
        workers: number of workers that the layout must have; decides the layout where none is given.
        problems: what is known to be wrong already.
        own: a script's model; the values hold what the configuration says of it.
    Raises:
        ConfigError: lists every problem.
    """
    found = list(problems)
    sections: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name == FORMAT_KEY:
            problem = format_problem(values)
            found += [problem] if problem else []
        elif name not in SECTIONS:
            found.append(unknown_section(name, value, SECTIONS))
        elif not isinstance(value, Mapping):
            found.append(f"{name}: got {toml_text(value)}, expected a table of keys, [{name}]")
    for name, struct in SECTIONS.items():
        given = values.get(name)
        given = given if isinstance(given, Mapping) else {}
        sections[name], bad = check_values(name, struct, given)
        found += bad
        if name == "data" and "source" in sections[name]:
            _resolve_data(sections[name], given, found)
        if name == "elastic" and "policy" in sections[name]:
            sections[name]["policy"] = _resolved_policy(sections[name]["policy"])
        for key in _PATHS.get(name, ()):
            if sections[name].get(key) is not None:
                sections[name][key] = _absolute(sections[name][key])
        defaults = {field.name: field.default for field in msgspec.structs.fields(struct) if field.name not in given}
        flat |= {f"{name}.{key}": value for key, value in (defaults | sections[name]).items()}

    is_to_be_planned = workers is None and all(flat.get(key) is None for key in SHAPE_KEYS)
    if all(key in flat for key in SHAPE_KEYS):
        stages, replicas, widths = (flat[key] for key in SHAPE_KEYS)
        try:
            widths = resolve_widths(stages, replicas, widths, workers)
            flat |= {"layout.stages": None, "layout.replicas": None, "layout.widths": widths}
        except ConfigError as error:
            found += error.problems
            for key in SHAPE_KEYS:
                del flat[key]
    found += broken_rules(flat)
    if not found and is_to_be_planned and flat["sites.network"] is not None:
        planned = _planned(sections, is_schedule_given="schedule" in (values.get("layout") or {}))
        for key, value in planned.items():
            name, _, field = key.partition(".")
            sections[name][field] = value
        flat |= planned
        found += broken_rules(flat)
    if found:
        raise ConfigError(found)
    config = Config(**{name: struct(**sections[name]) for name, struct in SECTIONS.items()})  # type: ignore[arg-type]
    config = resolve(config, workers, None if own is None else own.layer_parameters)
    labels_of(config)  # refuses what the network's file contradicts
    return config


def _planned(sections: Mapping[str, Mapping[str, Any]], *, is_schedule_given: bool) -> dict[str, Any]:
    """Returns what OP-Fence plans for workers far apart, by dotted key."""
    asked = {name: struct(**sections[name]) for name, struct in SECTIONS.items()}
    return planned_keys(Config(**asked), is_schedule_given=is_schedule_given)  # type: ignore[arg-type]


def _in_this_format(values: Values, path: Path, problems: list[str], *, is_saved: bool) -> Values:
    """Returns the values of a file without its number; of another format, none: their keys mean something else."""
    problem = format_problem(values, is_saved=is_saved)
    if problem:
        problems.append(f"{path}: {problem}")
        return {}
    return {name: table for name, table in values.items() if name != FORMAT_KEY}


def _by_section(settings: Mapping[Any, Any], problems: list[str]) -> Values:
    """Groups a script's settings, by key or by dotted key, by section."""
    values: Values = {}
    for name, value in settings.items():
        value = plain(dict(value) if isinstance(value, Mapping) else value)
        section, dot, key = name.partition(".") if isinstance(name, str) else (str(name), "", "")
        if isinstance(value, Mapping) and not dot:
            table = values.setdefault(section, {})
            table.update(value)
        elif dot and section and key:
            values.setdefault(section, {})[key] = value
        elif section in SECTIONS:
            problems.append(f"{section}: got {toml_text(value)}, expected a dictionary of keys")
        else:
            problems.append(unknown_section(section, value, SECTIONS))
    return values


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> Values:
    values: Values = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot or not section or not name:
            homes = [f"{home}.{section}" for home, struct in SECTIONS.items() if section in struct.__struct_fields__]
            is_key = bool(homes) and section not in SECTIONS
            example = f"{homes[0]}={text.strip()}" if is_key and equals else "optimizer.lr=1e-3"
            problems.append(f"--set {override}: expected section.key=value, such as --set {example}")
            continue
        values.setdefault(section, {})[name] = _parse_value(text.strip())
    return values


def _parse_value(text: str) -> Any:
    try:
        parsed = parse_toml(f"value = {text}", "--set")
    except ConfigError:
        return text
    # A text of several lines could have smuggled in more keys.
    return parsed["value"] if len(parsed) == 1 else text


def _merge(values: Values, source: Values) -> None:
    """Lays a source over the values. A layout in the other of the two forms replaces the one that was there."""
    layout = source.get("layout")
    if isinstance(layout, Mapping):
        if "widths" in layout:
            _forget(values, "stages", "replicas", "layers")
        if "stages" in layout or "replicas" in layout:
            _forget(values, "widths", "layers")
    for name, table in source.items():
        below = values.get(name, {})
        if not isinstance(below, Mapping):
            # What is no table stays, to be reported, whatever is laid over it.
            continue
        values[name] = {**below, **table} if isinstance(table, Mapping) else table


def _forget(values: Values, *layout_keys: str) -> None:
    layout = values.get("layout")
    if isinstance(layout, Mapping):
        values["layout"] = {key: value for key, value in layout.items() if key not in layout_keys}


def _resolve_data(section: dict[str, Any], given: Mapping[str, Any], problems: list[str]) -> None:
    """Makes the data's files independent of the working directory, and takes from them what they say of themselves."""
    source = section["source"]
    section["source"] = _absolute(source) if isinstance(source, str) else tuple(map(_absolute, source))
    if given.get("vocab_size") is None:
        try:
            section["vocab_size"] = known_vocabulary(section["source"])
        except DataError as error:
            problems.append(f"data.source: {error}")


def _resolved_policy(policy: str) -> str:
    """Makes a policy's file independent of the working directory: successors of the coordinator load it too."""
    where, _, function = policy.rpartition(":")
    return f"{_absolute(where)}:{function}" if where.endswith(".py") else policy


def _absolute(source: str) -> str:
    """Makes a path that does not depend on the working directory.

    Raises:
        ConfigError: that is no text.
    """
    if source in BUILT_IN_SOURCES:
        return source
    found = os.path.abspath(os.path.expanduser(source))
    if problem := path_problem(found):
        raise ConfigError([problem])
    return found


def resolve(config: Config, workers: int | None = None, layer_parameters: Sequence[int] | None = None) -> Config:
    """Returns the same configuration with ``layout.widths`` and ``layout.layers`` set.

    Args:
        config: valid.
        workers: number of workers that the layout must have; decides the layout where none is given.
        layer_parameters: number of parameters of each layer of a script's own model: before anything is measured, a
            layer is taken to cost as much as it has. None: all its layers are taken to be equal.
    Raises:
        ConfigError: lists why no such layout exists.
    """
    given = config.layout
    widths = resolve_widths(given.stages, given.replicas, given.widths, workers)
    shape = msgspec.structs.replace(given, stages=None, replicas=None, widths=widths)
    config = msgspec.structs.replace(config, layout=shape)
    if shape.layers is not None:
        return config
    if config.model.family == OWN:
        costs = own_layer_costs(layer_parameters or (1,) * config.model.num_layers)
    else:
        costs = multiplications(shape_of(config))
    if config.device.kind == "emulated":
        prefix = emulated_costs(config).prefix["busy_s"]
        costs = tuple(float(after - before) for before, after in pairwise(prefix))
    layers = partition_layers(costs, widths)
    return msgspec.structs.replace(config, layout=msgspec.structs.replace(shape, layers=layers))
