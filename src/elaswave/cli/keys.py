"""``elaswave keys``: makes the authority, certificates and key of a job whose processes talk over TCP; changes the key
of a job that runs."""

import sys
from pathlib import Path

import click
import msgspec

from elaswave.channel.messages.operator import Answer, AskKey, AskStatus, StatusAnswer
from elaswave.cli.ctl import DEFAULT_TIMEOUT_S, SECONDS, answer_line, last_answer
from elaswave.cli.groups import DefaultCommand
from elaswave.cli.operator_client import OperatorClient
from elaswave.errors import ControlError, UsageError
from elaswave.job.keys import (
    JOB_KEY_FILE,
    LESSER,
    LOCAL_NAMES,
    JobKey,
    KeyRole,
    abandon_change,
    begin_change,
    end_change,
    make_keys,
    write_copy,
    write_role_key,
)
from elaswave.job.setup import ControlFile, read_control_file
from elaswave.observability.output import say, say_error, say_json

PRESENT_TIMEOUT_S = 2.0
"""For a last word of the job, where the change has not come to its end."""


class _KeysGroup(click.Group):
    """A group whose first argument may be a folder: anything but the name of a subcommand is one."""

    _DEFAULT = "make"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_named = bool(args) and args[0] in self.commands and args[0] != self._DEFAULT
        return super().parse_args(ctx, args if is_named else [self._DEFAULT, *args])


@click.group(name="keys", cls=_KeysGroup, short_help="Make a job's certificates and key; change the key.")
def keys_group() -> None:
    """Make a job's certificates and key; change the key."""


@keys_group.command(name="make", cls=DefaultCommand, hidden=True)
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
    type=click.Choice([role.value for role in LESSER]),
    help="Write a lesser key to DIR/ROLE.key, made of the job's. May be repeated.",
)
@click.option(
    "--days", type=click.IntRange(min=1), default=365, show_default=True, help="For which certificates are good."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def make_command(folder: Path, hosts: tuple[str, ...], roles: tuple[str, ...], days: int, as_json: bool) -> None:
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
    elaswave keys rotate RUN     another key for a job that runs

    Write ./rotate for a folder that is called rotate.
    """
    made = make_keys(folder, [tuple(names.split(",")) for names in hosts], days, adds=bool(roles))
    lesser = [write_role_key(folder, KeyRole(role)) for role in dict.fromkeys(roles)]
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


# ---------------------------------------------------------------------------------------------------------- the change


@keys_group.command(name="rotate", short_help="Change the key of a job that runs.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the new key there, with mode 0600: needed where the job was given its key in no file.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=SECONDS,
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until all have the new key, also while the coordinator is being replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; how it gets on goes to stderr.")
def rotate_command(run: Path, out: Path | None, timeout_s: float, as_json: bool) -> None:
    """Change the key of the job that runs in the folder RUN, while it trains.

    The new key takes the place of the old one in its file; the old one, and every lesser key that was made of it, is
    refused from then on. First all processes of the job take the new key beside the old one, then the new one alone. If
    this command ends in between, both are good: give it again.

    \b
    elaswave keys rotate RUN
    elaswave keys rotate RUN --out keys/job.key
    """
    control = read_control_file(run)
    _check(control, out)
    file = Path(control.key_file)
    key, is_new = begin_change(file)
    if out is not None:
        write_copy(key, out)
    answer = _ask(run, key, timeout_s, as_json)
    if answer.decided == "changed":
        end_change(file, key)
    elif answer.decided == "refused" and is_new:  # nobody has it but these files
        abandon_change(file, key)
        if out is not None:
            out.unlink(missing_ok=True)
    _finish(answer, [file, *([] if out is None else [out])], _outdated(file), as_json)


def _check(control: ControlFile, out: Path | None) -> None:
    """Makes the checks that come before a new key is made, and sent.

    Raises:
        ControlError: it could be read on the way.
        UsageError: nobody but the job would have it.
    """
    is_tcp = control.address.startswith("tcp:")
    if is_tcp and control.tls is None:
        raise ControlError(
            "this job's connections are not encrypted, so that the new key could be read on the way: only a job over "
            "Unix sockets or with net.tls changes its key while it runs"
        )
    if control.key_is_temporary and is_tcp and out is None:
        raise UsageError(
            f"the job was given its key in no file, and {control.key_file} goes with it: give --out FILE, for hosts "
            "that are to join later"
        )


def _ask(run: Path, key: JobKey, timeout_s: float, as_json: bool) -> Answer:
    with OperatorClient(run, new_key=key) as client:
        try:
            return last_answer(client, lambda request: AskKey(request=request, key=key.secret), timeout_s, as_json)
        except ControlError as error:
            way_on = f"nothing is lost: `elaswave keys rotate {run}` goes on with this change{_present(client)}"
            if not client.job_is_there():
                way_on = "the change has ended with it, and no file of a key was replaced"
            raise ControlError(f"{error}; {way_on}") from None


def _present(client: OperatorClient) -> str:
    """Tells how the job gets on with the change, if it says so: its first answer names all, and who hangs is among
    these."""
    try:
        answer = next(client.ask(lambda request: AskStatus(request=request), PRESENT_TIMEOUT_S))
    except ControlError:
        return ""
    lines = answer.status.under_way if isinstance(answer, StatusAnswer) else ()
    return "".join(f"; at present {line}" for line in lines)


def _outdated(file: Path) -> list[Path]:
    """Files of keys beside the job's that are of an old one: copies for other hosts, and lesser keys."""
    copies = sorted(file.parent.glob(f"*/{JOB_KEY_FILE}")) if file.name == JOB_KEY_FILE else []
    return [*copies, *(path for role in LESSER if (path := file.parent / f"{role.value}.key").exists())]


def _finish(answer: Answer, files: list[Path], outdated: list[Path], as_json: bool) -> None:
    """Shows what came of it, and what is to be done by hand; ends with 1 if the key is not changed."""
    is_changed = answer.decided == "changed"
    if as_json:
        document: dict[str, object] = {"decided": answer.decided, "reason": answer.reason}
        if is_changed:
            document |= {"files": list(map(str, files)), "outdated": list(map(str, outdated))}
        say_json(document)
    if not is_changed:
        say_error(f"error: {answer_line(answer)}")
        sys.exit(1)
    if as_json:
        return
    say(answer_line(answer))
    for file in files:
        say(f"{file}: the job's key from now on; copy it to all hosts that have the old one")
    for path in outdated:
        lesser = next((role for role in LESSER if path.name == f"{role.value}.key"), None)
        how = f"copy {files[0]} there, and to its host"
        if lesser is not None:
            how = f"remove it, and make it anew: elaswave keys {path.parent} --role {lesser.value}"
        say(f"{path}: of the old key; {how}")
