"""``elaswave keys``: makes the authority, certificates and key of a job whose processes talk over TCP."""

from pathlib import Path

import click
import msgspec

from elaswave.control.key_files import Role
from elaswave.control.key_making import LOCAL_NAMES, make_keys, write_role_key
from elaswave.observability.output import say


@click.command(name="keys", short_help="Make a job's certificates and key.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME[,NAME...]",
    help="Names and addresses of one host, as others dial it; its files get a folder DIR/NAME. May be repeated.",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice([role.value for role in Role if role is not Role.JOB]),
    help="Write a lesser key to DIR/ROLE.key, made of the job's. May be repeated.",
)
@click.option(
    "--days", type=click.IntRange(min=1), default=365, show_default=True, help="For which certificates are good."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def keys_command(folder: Path, hosts: tuple[str, ...], roles: tuple[str, ...], days: int, as_json: bool) -> None:
    """Make an authority for one job, and in DIR a certificate for this machine alone (localhost, 127.0.0.1, ::1) and
    the job's key. Each --host gets a folder with its own certificate, which is what is copied to that host; the
    authority's key (authority.key) stays where it was made. A folder that has an authority keeps it, and gets the hosts
    that are new. A reading key is good for `elaswave ctl --key FILE` and its status alone, a steering key for all of
    it, a joining key for agents that start no coordinator.

    \b
    elaswave keys keys
    elaswave train --set net.transport=tcp --set net.tls=required \\
      --set net.keys=keys
    elaswave keys keys --host node-1,10.0.0.5
    elaswave keys keys --role reading --role joining
    """
    made = make_keys(folder, [tuple(names.split(",")) for names in hosts], days, adds=bool(roles))
    lesser = [write_role_key(folder, Role(role)) for role in dict.fromkeys(roles)]
    if as_json:
        document = {"folders": [str(each) for each in made], "keys": [str(each) for each in lesser]}
        say(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    for each in made:
        names = LOCAL_NAMES if each == folder else tuple(dict.fromkeys(_named(hosts, each)))
        say(f"{each}: certificate for {', '.join(names)}, good for {days} days; the job's key")
    for each in lesser:
        say(f"{each}: the {each.stem} key; whoever has it cannot make the job's of it")
    if made:
        say(f"use it: --set net.transport=tcp --set net.tls=required --set net.keys={made[-1]}")


def _named(hosts: tuple[str, ...], folder: Path) -> list[str]:
    return next(names.split(",") for names in hosts if names.split(",")[0] == folder.name)
