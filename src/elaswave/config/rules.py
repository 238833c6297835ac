"""The rules between keys: which values do not go together.

Each rule names the keys that it reads and is skipped when one of them is bad in itself, so that every problem of a
configuration is listed and none is listed only because of another. The functions of ``elastic.hosts`` say which hosts
workers are told apart by, and how many each has.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from elaswave.config.presets import catalog
from elaswave.config.values import OWN
from elaswave.errors import ConfigError
from elaswave.fences import built_in_layer_names, fence_problems, ratio_problems
from elaswave.planning.programs.layout import layout_problems, resolve_widths

LOOPBACK = "127.0.0.1"
_ETCD = "etcd://"
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\.?")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
ROWS_MIN = 4
"""Fewest rows of a matrix product: with fewer, kernels round differently at different addresses."""
SHAPE_KEYS = ("layout.stages", "layout.replicas", "layout.widths")
"""The keys that decide how many workers each stage has; ``widths``, without a dot, stands for the result."""


class _Rule(NamedTuple):
    """One rule: the keys that it reads, and what is wrong with their values, or None."""

    keys: tuple[str, ...]
    check: Callable[..., str | None]


def broken_rules(values: Mapping[str, Any]) -> list[str]:
    """Judges values together.

    Args:
        values: by dotted key; every value is good in itself. Rules whose keys are not all there are skipped.
    Returns:
        One line for every rule that is broken.
    """
    known = dict(values)
    problems = _resolve_shape(known)
    for rule in RULES:
        if all(key in known for key in rule.keys):
            problem = rule.check(*(known[key] for key in rule.keys))
            if problem is not None:
                problems.append(problem)
    return problems + _impossible_layout(known)


def _resolve_shape(known: dict[str, Any]) -> list[str]:
    """Adds "widths" to the known values, if a shape is given and makes sense."""
    if not all(key in known for key in SHAPE_KEYS):
        return []
    stages, replicas, widths = (known[key] for key in SHAPE_KEYS)
    if stages is replicas is widths is None:
        # The layout is decided later, when the number of workers is known.
        return []
    try:
        known["widths"] = resolve_widths(stages, replicas, widths, None)
    except ConfigError as error:
        return list(error.problems)
    return []


def _impossible_layout(known: Mapping[str, Any]) -> list[str]:
    """Lists what is wrong with the layout for this model and batch; what is not known is taken to fit."""
    if "widths" not in known or not {"model.num_layers", "batch.num_microbatches"} & known.keys():
        return []
    widths, layers = known["widths"], known.get("layout.layers")
    added = 0 if known.get("model.family") == OWN else 2
    fitting_num_layers = max(len(widths), sum(layers or ()))
    return layout_problems(
        widths,
        num_layers=known["model.num_layers"] + added if "model.num_layers" in known else fitting_num_layers,
        num_microbatches=known.get("batch.num_microbatches", max(widths)),
        layers_per_stage=layers,
        counted="embedding and head included" if added else "as many as the script gives",
    )


def _heads_divide_hidden_size(hidden_size: int, num_heads: int) -> str | None:
    if hidden_size % num_heads:
        return f"model.num_heads: {num_heads} heads do not divide model.hidden_size = {hidden_size}"
    return None


def _kv_heads_divide_heads(family: str, num_heads: int, num_kv_heads: int | None) -> str | None:
    if num_kv_heads is None:
        return None
    if family != "llama":
        return f'model.num_kv_heads: only llama has grouped queries, not model.family = "{family}"; leave it out'
    if num_heads % num_kv_heads:
        return f"model.num_kv_heads: {num_kv_heads} heads do not divide model.num_heads = {num_heads}"
    return None


def _intermediate_size_is_llamas(family: str, intermediate_size: int | None) -> str | None:
    if intermediate_size is not None and family != "llama":
        return f'model.intermediate_size: fixed at 4 x model.hidden_size for model.family = "{family}"; leave it out'
    return None


def _rotary_pairs(family: str, hidden_size: int, num_heads: int) -> str | None:
    if family == "llama" and hidden_size % num_heads == 0 and hidden_size // num_heads % 2:
        return (
            f"model.hidden_size: {hidden_size // num_heads} elements per head ({hidden_size} / {num_heads}) is odd; "
            "rotary positions turn pairs of elements"
        )
    return None


def _ratios_are_of_fences(fences: tuple[str, ...], ratios: tuple[str, ...]) -> str | None:
    problems = ratio_problems(ratios, fences) if ratios else ()
    return f"model.fence_ratios: {'; '.join(problems)}" if problems else None


def _fences_stand_behind_layers(family: str, num_layers: int, fences: tuple[str, ...]) -> str | None:
    if family == OWN:
        return None  # only the script knows the names of its layers
    problems = fence_problems(fences, built_in_layer_names(num_layers))
    return f"model.fences: {'; '.join(problems)}" if problems else None


def _enough_rows(microbatch_size: int, context_length: int) -> str | None:
    if microbatch_size * context_length < ROWS_MIN:
        return (
            f"batch.microbatch_size: {microbatch_size} samples of model.context_length = {context_length} tokens are "
            f"fewer than {ROWS_MIN} rows, too few for equal bits at any address"
        )
    return None


def _bin_needs_vocabulary(source: str | tuple[str, ...], vocab_size: int | None) -> str | None:
    names = (source,) if isinstance(source, str) else source
    if vocab_size is None and (tokens := [name for name in names if name.endswith(".bin")]):
        return (
            f"data.vocab_size: unset, but {tokens[0]} holds tokens, not bytes, and has no header that says how many "
            "there are; give the number of different tokens"
        )
    return None


def _evaluation_needs_tokens(eval_every: int, validation_fraction: float) -> str | None:
    if eval_every and not validation_fraction:
        return f"data.validation_fraction: 0 leaves nothing to evaluate; set it, or run.eval_every = {eval_every} to 0"
    return None


def _steps_have_a_length(schedule: str, step_every: int | None) -> str | None:
    if schedule == "step" and step_every is None:
        return 'optimizer.step_every: unset, but optimizer.schedule = "step" needs the steps from one fall to the next'
    return None


def _decay_fits(schedule: str, decay_steps: int | None, warmup_steps: int, steps: int) -> str | None:
    if schedule == "wsd" and decay_steps is not None and warmup_steps + decay_steps > steps:
        return (
            f"optimizer.decay_steps: {decay_steps} steps of decay after optimizer.warmup_steps = {warmup_steps} are "
            f"more than run.steps = {steps}"
        )
    return None


def _enough_workers(min_workers: int, widths: tuple[int, ...]) -> str | None:
    if min_workers > sum(widths):
        return f"elastic.min_workers: {min_workers} is more than the {sum(widths)} workers of the layout"
    return None


def _hosts_have_names_and_workers(number: int, hosts: tuple[str, ...] | None, widths: tuple[int, ...]) -> str | None:
    if number > sum(widths):
        return f"control.hosts: {number} hosts for {sum(widths)} workers; begin with at most one for each"
    if number > 1 and hosts is not None and len(hosts) != number:
        return f"control.hosts: {number}, but elastic.hosts names {len(hosts)}; make them equal, or leave the names out"
    return None


def _hosts_have_all_workers(hosts: tuple[str, ...] | None, widths: tuple[int, ...]) -> str | None:
    problems = [] if hosts is None else host_problems(hosts, sum(widths))
    return f"elastic.hosts: {'; '.join(problems)}" if problems else None


def host_problems(hosts: Sequence[str], num_workers: int | None) -> list[str]:
    """Lists what is wrong with the setting.

    Args:
        hosts: as configured.
        num_workers: of the layout; None: it is not known.
    """
    problems = []
    entries = [entry.partition("=") for entry in hosts]
    for entry, (label, _, count) in zip(hosts, entries, strict=True):
        if not _LABEL.fullmatch(label) or ("=" in entry and not _COUNT.fullmatch(count)):
            problems.append(
                f"{entry!r} is no host: write a label such as a or rack-1/a, and, for all hosts or none, =N for the "
                "number of its workers"
            )
    if problems:
        return problems
    counted = [bool(equals) for _, equals, _ in entries]
    if len(set(counted)) > 1:
        problems.append("some hosts have a number of workers and some have none: give it for all (a=2) or for none")
    problems += [f"host {label} is given {times} times" for label, times in _labels(hosts).items() if times > 1]
    labels = list(_labels(hosts))
    problems += [
        f"{label} is a host, and {other} a host in a domain of that name: rename one"
        for label in labels
        for other in labels
        if other.startswith(f"{label}/")
    ]
    if problems or num_workers is None:
        return problems
    if not all(counted):
        if len(hosts) > num_workers:
            problems.append(f"{len(hosts)} hosts are given for {num_workers} workers: give at most one for each")
    elif (total := sum(int(count) for _, _, count in entries)) != num_workers:
        problems.append(f"the hosts have {total} workers, but the layout has {num_workers}: make them equal")
    return problems


def host_sizes(hosts: Sequence[str], num_workers: int) -> dict[str, int]:
    """Maps each host to the number of workers that a run begins with; even shares where no numbers are given, larger
    ones first.

    Args:
        hosts: as configured, without a problem.
        num_workers: of the layout.
    """
    share, more = divmod(num_workers, len(hosts))
    sizes = {}
    for index, entry in enumerate(hosts):
        label, equals, count = entry.partition("=")
        sizes[label] = int(count) if equals else share + (index < more)
    return sizes


def _labels(hosts: Sequence[str]) -> Counter[str]:
    return Counter(entry.partition("=")[0] for entry in hosts)


def _sites_have_a_network(
    network: str | None,
    coordinator: str | None,
    copies: str,
    codec: str | None,
    of_workers: tuple[str, ...] | None,
    use_all: bool,
    rate: float,
    delay: float,
) -> str | None:
    given = [
        text
        for text, is_set in (
            (f'sites.coordinator: "{coordinator}"', coordinator is not None),
            (f'sites.copies: "{copies}"', copies != "outside"),
            (f'sites.codec: "{codec}"', codec is not None),
            ("sites.of_workers", of_workers is not None),
            ("sites.use_all", use_all),
            (f"sites.rate: {rate:g}", rate != 1.0),
            (f"sites.delay: {delay:g}", delay != 1.0),
        )
        if is_set
    ]
    if network is not None or not given:
        return None
    return f"{given[0]} needs sites.network, the file with the sites; without it all workers are at one place"


def _real_links_are_there(
    network: str | None, links: str, rate: float, delay: float, transport: str, num_hosts: int
) -> str | None:
    if links == "emulated":
        return None
    if network is None:
        return 'sites.links: "real" needs sites.network, the file with sites and links; without it there are none'
    if rate != 1.0 or delay != 1.0:
        key, value = ("rate", rate) if rate != 1.0 else ("delay", delay)
        return f"sites.{key}: {value:g} changes emulated links only; real ones are as the file says, leave it out"
    if transport == "unix" and num_hosts == 1:
        return (
            'sites.links: "real" paces TCP connections, and net.transport is "unix"; set net.transport=tcp, or leave '
            "sites.links out for emulated links"
        )
    return None


def _described_model_is_known(kind: str, name: str) -> str | None:
    if kind == "emulated" and name not in (known := catalog().models):
        return f'device.model: "{name}" is not described; choose one of {", ".join(known)}'
    return None


def _described_device_is_known(kind: str, name: str) -> str | None:
    if kind == "emulated" and name not in (known := catalog().devices):
        return f'device.name: "{name}" is not described; choose one of {", ".join(known)}'
    return None


def _own_models_run_on_real_devices(family: str, kind: str) -> str | None:
    if family == OWN and kind == "emulated":
        return "device.kind: emulated devices take the time of a described model, not of a script's own; leave it out"
    return None


def _codecs_and_servers_are_on_the_host(kind: str, fences: tuple[str, ...], foreign: tuple[str, ...]) -> str | None:
    what = "fences" if fences else "foreign parts" if foreign else ""
    if kind == "cuda" and what:
        return f"device.kind: {what} compute in host memory only, not on a GPU; leave them out, or use device.kind=cpu"
    return None


def _as_many_blocks_as_described(family: str, kind: str, name: str, num_layers: int) -> str | None:
    described = catalog().models.get(name) if kind == "emulated" and family != OWN else None
    if described is None or described.num_layers == num_layers:
        return None
    needed = described.num_layers
    return f"model.num_layers: {num_layers}, but device.model = {name} has {needed} blocks; set it to {needed}"


def _a_speed_for_each_worker(speeds: tuple[float, ...] | None, widths: tuple[int, ...]) -> str | None:
    if speeds is not None and len(speeds) != sum(widths):
        return f"device.speeds: {len(speeds)} speeds for the {sum(widths)} workers of the layout; give one for each"
    return None


def _emulated_levels_need_an_emulated_device(kind: str, frequency: str) -> str | None:
    if frequency == "emulated" and kind != "emulated":
        return f'device.frequency: emulated levels need device.kind = "emulated", not "{kind}"'
    if frequency not in ("none", "emulated") and kind == "emulated":
        return f'device.frequency: {frequency} acts on real devices; emulated ones take "emulated" or "none"'
    return None


def _a_quota_needs_control_groups(frequency: str, quota: float | None) -> str | None:
    if quota is not None and frequency != "cgroup":
        return f'device.quota: a share of a core is set by device.frequency = "cgroup", not "{frequency}"'
    return None


_TCP_KEYS = ("bind", "interface", "advertise", "ports", "tls", "keys")
"""Of ``net``: without use where sockets are in a folder."""


def _only_tcp_has_addresses(transport: str, *values: str | None) -> str | None:
    given = [key for key, value in zip(_TCP_KEYS, values) if value not in (None, "off")]
    if transport == "unix" and given:
        return f'net.{given[0]}: of TCP only, but net.transport = "unix"; leave it out, or set net.transport = "tcp"'
    return None


def _one_place_to_listen(bind: str | None, interface: str | None) -> str | None:
    if bind is not None and interface is not None:
        return f"net.interface: {interface}, but net.bind = {bind} says where to listen; leave one of them out"
    return None


def _bind_is_numeric(bind: str | None, advertise: str | None) -> str | None:
    try:
        address = ipaddress.ip_address(bind or LOOPBACK)
    except ValueError:
        return f"net.bind: {bind} is no numeric address such as 10.0.0.5; a name goes to net.advertise"
    if address.is_unspecified and advertise is None:
        return f"net.advertise: unset, but nobody can dial net.bind = {bind}; give the address that others reach"
    return None


def _dialled_as_a_host(advertise: str | None) -> str | None:
    if advertise is None:
        return None
    try:
        unspecified = ipaddress.ip_address(advertise).is_unspecified
    except ValueError:
        unspecified = not _HOST_NAME.fullmatch(advertise)
    if unspecified:
        return f"net.advertise: {advertise} is no host that can be dialled; give an address or a name, without a port"
    return None


def _tls_needs_certificates(tls: str, keys: str | None) -> str | None:
    if tls == "required" and keys is None:
        return 'net.keys: unset, but net.tls = "required"; make certificates: elaswave keys DIR; and give DIR'
    if tls == "off" and keys is not None:
        return f'net.keys: {keys}, but net.tls = "off"; set net.tls = "required", or leave the certificates out'
    return None


def is_exposed(address: str) -> bool:
    """Tells whether other machines may reach what listens at a numeric address."""
    return not ipaddress.ip_address(address).is_loopback


def _exposed_needs_tls(transport: str, bind: str | None, tls: str, trusted: bool) -> str | None:
    try:
        is_open = transport == "tcp" and tls == "off" and not trusted and is_exposed(bind or LOOPBACK)
    except ValueError:
        return None
    return exposed_problem(f"net.bind = {bind}") if is_open else None


def _exposed_store_needs_tls(store: str, store_ca: str | None, trusted: bool) -> str | None:
    if store_ca is not None or trusted or not store.startswith(_ETCD):
        return None
    members = store.removeprefix(_ETCD).split(",")
    hosts = [member if member.endswith("]") else member.rpartition(":")[0] or member for member in members]
    exposed = [host for host in hosts if _is_elsewhere(host.removeprefix("[").removesuffix("]"))]
    if not exposed:
        return None
    return (
        f"control.store_ca: unset, but control.store names {', '.join(exposed)}: who is on the way there could read "
        "credentials and what the job decides, and change it; give the authority of etcd's certificates, or set "
        "net.trusted = true if nobody else is on that network"
    )


def _is_elsewhere(host: str) -> bool:
    """Tells whether a host that is dialled may be another machine."""
    try:
        return is_exposed(host)
    except ValueError:
        return host.lower() != "localhost"


def exposed_problem(where: str) -> str:
    """Says what is said where TCP without TLS would be open to other machines."""
    return (
        f'net.tls: "off", but other machines reach {where}, and could read and change what is sent; set net.tls = '
        '"required" (elaswave keys makes the certificates), or net.trusted = true if nobody else is on that network'
    )


def ports_of(text: str | None) -> range:
    """Reads the ports of ``net.ports``; none: the system chooses."""
    if text is None:
        return range(0)
    first, _, last = text.partition("-")
    return range(int(first), int(last) + 1)


def _ports_are_a_range(text: str | None) -> str | None:
    ports = ports_of(text)
    if text is None or (ports and ports.start >= 1 and ports.stop <= 1 << 16):
        return None
    return f"net.ports: {text} is no range of ports; give FIRST-LAST with 1 <= FIRST <= LAST <= 65535"


RULES: tuple[_Rule, ...] = (
    _Rule(("model.hidden_size", "model.num_heads"), _heads_divide_hidden_size),
    _Rule(("model.family", "model.num_heads", "model.num_kv_heads"), _kv_heads_divide_heads),
    _Rule(("model.family", "model.intermediate_size"), _intermediate_size_is_llamas),
    _Rule(("model.family", "model.hidden_size", "model.num_heads"), _rotary_pairs),
    _Rule(("model.family", "model.num_layers", "model.fences"), _fences_stand_behind_layers),
    _Rule(("model.fences", "model.fence_ratios"), _ratios_are_of_fences),
    _Rule(("batch.microbatch_size", "model.context_length"), _enough_rows),
    _Rule(("data.source", "data.vocab_size"), _bin_needs_vocabulary),
    _Rule(("run.eval_every", "data.validation_fraction"), _evaluation_needs_tokens),
    _Rule(("optimizer.schedule", "optimizer.step_every"), _steps_have_a_length),
    _Rule(("optimizer.schedule", "optimizer.decay_steps", "optimizer.warmup_steps", "run.steps"), _decay_fits),
    _Rule(("elastic.min_workers", "widths"), _enough_workers),
    _Rule(("elastic.hosts", "widths"), _hosts_have_all_workers),
    _Rule(("control.hosts", "elastic.hosts", "widths"), _hosts_have_names_and_workers),
    _Rule(
        (
            "sites.network",
            "sites.coordinator",
            "sites.copies",
            "sites.codec",
            "sites.of_workers",
            "sites.use_all",
            "sites.rate",
            "sites.delay",
        ),
        _sites_have_a_network,
    ),
    _Rule(
        ("sites.network", "sites.links", "sites.rate", "sites.delay", "net.transport", "control.hosts"),
        _real_links_are_there,
    ),
    _Rule(("device.kind", "device.model"), _described_model_is_known),
    _Rule(("device.kind", "device.name"), _described_device_is_known),
    _Rule(("model.family", "device.kind"), _own_models_run_on_real_devices),
    _Rule(("device.kind", "model.fences", "model.foreign"), _codecs_and_servers_are_on_the_host),
    _Rule(("model.family", "device.kind", "device.model", "model.num_layers"), _as_many_blocks_as_described),
    _Rule(("device.speeds", "widths"), _a_speed_for_each_worker),
    _Rule(("device.kind", "device.frequency"), _emulated_levels_need_an_emulated_device),
    _Rule(("device.frequency", "device.quota"), _a_quota_needs_control_groups),
    _Rule(("net.transport", *(f"net.{key}" for key in _TCP_KEYS)), _only_tcp_has_addresses),
    _Rule(("net.bind", "net.interface"), _one_place_to_listen),
    _Rule(("net.bind", "net.advertise"), _bind_is_numeric),
    _Rule(("net.advertise",), _dialled_as_a_host),
    _Rule(("net.tls", "net.keys"), _tls_needs_certificates),
    _Rule(("net.transport", "net.bind", "net.tls", "net.trusted"), _exposed_needs_tls),
    _Rule(("net.ports",), _ports_are_a_range),
    _Rule(("control.store", "control.store_ca", "net.trusted"), _exposed_store_needs_tls),
)
