"""``elaswave bench``: commands that try elaswave out, with faults, without end if asked to."""

import importlib

import click

COMMANDS = {
    "chaos": "elaswave.cli.bench_chaos:chaos_command",
    "protocol": "elaswave.cli.bench_protocol:protocol_command",
}
"""Where each bench stands; imported when it is asked for."""


class _Benches(click.Group):
    """A group that imports a bench's module only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(name="bench", cls=_Benches, short_help="Try elaswave out, with faults.")
def bench_group() -> None:
    """Try elaswave out: every bench exits with 1 at the first promise that is not kept."""
