"""``elaswave bench``: commands that try elaswave out, with faults, without end if asked to."""

import click

from elaswave.cli.groups import LazyGroup

COMMANDS = {
    "chaos": "elaswave.cli.bench_chaos:chaos_command",
    "lifetimes": "elaswave.cli.bench_lifetimes:lifetimes_command",
    "protocol": "elaswave.cli.bench_protocol:protocol_command",
}
"""Where each bench stands; imported when it is asked for."""


@click.group(name="bench", cls=LazyGroup, places=COMMANDS, short_help="Try elaswave out, with faults.")
def bench_group() -> None:
    """Try elaswave out: every bench exits with 1 at the first promise that is not kept."""
