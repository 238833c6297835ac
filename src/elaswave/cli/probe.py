"""``elaswave probe``: measures the links between sites, for ``plan --network`` and for runs over real links."""

import os
import time
from pathlib import Path
from typing import Any

import click

from elaswave.api.environment import given_key
from elaswave.cli.tables import format_seconds, render_table, terminal_width
from elaswave.errors import UsageError
from elaswave.job.keys import KeyRole
from elaswave.observability.output import say, say_error, say_json
from elaswave.planning.costs.network import NetworkLink

_MBIT = 1e6 / 8


@click.command(name="probe", short_help="Measure the links between sites.")
@click.argument("network", metavar="[NETWORK.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--answer", metavar="ADDRESS:PORT", help="Answer the probes of other sites at this numeric address.")
@click.option(
    "--for",
    "for_s",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="SECONDS",
    help="How long to answer.  [default: until Ctrl-C]",
)
@click.option("--from", "source", metavar="SITE", help="The site of this host.")
@click.option(
    "--to",
    "targets",
    multiple=True,
    metavar="SITE=HOST:PORT",
    help="Another site, and where a host of it answers; may be repeated.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the network with the links that were measured; may be NETWORK.toml itself.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def probe_command(
    network: Path | None,
    answer: str | None,
    for_s: float | None,
    source: str | None,
    targets: tuple[str, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure the links from this host's site to other sites, both directions, with 15 to 27 probes each. A host of
    each of those sites answers; all are given one key (`elaswave keys`). NETWORK.toml has the sites; links that it
    lacks, or has otherwise, are those that were measured, and all others stay.

    \b
    export ELASWAVE_KEY_FILE=$PWD/keys/job.key
    elaswave probe --answer 10.0.1.5:7070
    elaswave probe sites.toml --from oslo --to quito=10.0.1.5:7070 \\
      --output sites.toml
    elaswave plan --network sites.toml
    """
    key = given_key()
    if key is None:
        raise UsageError(
            "both sides of a probe need one key: `elaswave keys DIR` makes it; give each of them ELASWAVE_KEY_FILE="
            "DIR/job.key (mode 0600)"
        )
    if answer is not None:
        if network is not None or source is not None or targets or output is not None or as_json:
            raise UsageError("--answer goes with --for alone: a host answers or measures; give the rest elsewhere")
        _answer(answer, key.held(KeyRole.JOINING), for_s)
        return
    if network is None or source is None or not targets or for_s is not None:
        raise UsageError(
            "give --answer ADDRESS:PORT to answer, or NETWORK.toml, --from SITE and --to SITE=HOST:PORT to measure"
        )
    _measure(network, source, targets, output, as_json, key.held(KeyRole.JOINING))


def _answer(where: str, key: bytes, for_s: float | None) -> None:
    from elaswave.transport.addresses import listen, tcp_address
    from elaswave.transport.probing import answer

    host, port = _host_and_port(where, "--answer")
    try:
        listener, _, _ = listen(tcp_address(host, port), 0, advertise=host)
    except (OSError, ValueError) as error:
        raise UsageError(f"--answer {where}: cannot listen there: {error}; give an address of this host") from error
    end_s = None if for_s is None else time.monotonic() + for_s
    with listener:
        say(f"answers probes at {host}:{listener.getsockname()[1]}")
        answer(listener, key, lambda: end_s is None or time.monotonic() < end_s, say)


def _measure(file: Path, source: str, targets: tuple[str, ...], output: Path | None, as_json: bool, key: bytes) -> None:
    from elaswave.config.network import network_text, read_parts
    from elaswave.observability.run_folder import atomic_write
    from elaswave.transport.probing import measure_link

    parts = read_parts(file)
    places = _places(source, targets, list(parts.sites), file)
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: its folder is not there; make it, or give another file")
    links, rows = dict(parts.links), []
    for site, (host, port) in places.items():
        if not as_json:
            say_error(f"measuring the link from {source} to {site}")
        found = measure_link(host, port, key)
        links[source, site], links[site, source] = _rounded(found.out), _rounded(found.back)
        rows.append((site, found))
    said = "; ".join(each for each in (parts.source, f"measured from {source}: {', '.join(places)}") if each)
    if output is not None:
        atomic_write(output, [network_text(parts._replace(links=links, source=said)).encode()])
    if as_json:
        document = {"from": source, "links": [_entry(site, found) for site, found in rows],
                    "output": None if output is None else os.fspath(output)}  # fmt: skip
        say_json(document)
        return
    width = terminal_width()
    table = [
        [
            site,
            *(f"{link.bandwidth_bytes_per_s / _MBIT:,.2f} Mbit/s" for link in (found.out, found.back)),
            format_seconds(found.out.latency_s),
            str(found.num_probes),
            f"{found.off:.1%}",
        ]
        for site, found in rows
    ]
    header = ["site", "there", "back", "delay", "probes", "off by"]
    say(*render_table(header, table, width))
    if output is not None:
        say(f"written: {output}")


def _rounded(link: NetworkLink) -> NetworkLink:
    """Rounds a link to four digits, which is more than is known of it."""
    rate = float(f"{link.bandwidth_bytes_per_s / _MBIT:.4g}")
    return NetworkLink(bandwidth_bytes_per_s=rate * _MBIT, latency_s=float(f"{link.latency_s:.4g}"))


def _entry(site: str, found: Any) -> dict[str, Any]:
    return {
        "to": site,
        "bandwidth_mbit_per_s": found.out.bandwidth_bytes_per_s / _MBIT,
        "back_bandwidth_mbit_per_s": found.back.bandwidth_bytes_per_s / _MBIT,
        "delay_ms": 1e3 * found.out.latency_s,
        "num_probes": found.num_probes,
        "off": found.off,
    }


def _places(source: str, targets: tuple[str, ...], sites: list[str], file: Path) -> dict[str, tuple[str, int]]:
    """Maps site to host and port."""
    places: dict[str, tuple[str, int]] = {}
    for target in targets:
        site, equals, where = target.partition("=")
        if not equals:
            raise UsageError(f"--to {target!r}: needed is SITE=HOST:PORT")
        if site in places:
            raise UsageError(f"--to {target}: {site} was given before; give each site once")
        places[site] = _host_and_port(where, "--to")
    for name in (source, *places):
        if name not in sites:
            raise UsageError(f"{file} has no site {name!r}; there are {', '.join(sites)}")
    if source in places:
        raise UsageError(f"--to {source}: is the site of --from; what is within a site stands in [sites.{source}]")
    return places


def _host_and_port(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise UsageError(f"{option} {text!r}: needed is HOST:PORT, with a port from 1 to 65535")
    return host, int(port)
