"""``python -m verify``: commands that try elaswave out, without end if asked to. Run from a checkout's root."""

import sys

import click

from elaswave.cli.groups import LazyGroup
from elaswave.cli.main import main

COMMANDS = {
    "chaos": "verify.commands.chaos:chaos_command",
    "lifetimes": "verify.commands.lifetimes:lifetimes_command",
    "protocol": "verify.commands.protocol:protocol_command",
}
"""Where each command stands; imported when it is asked for."""
PROGRAM = "python -m verify"


@click.group(
    cls=LazyGroup,
    places=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def verify() -> None:
    """Try elaswave out: every command exits with 1 at the first promise that is not kept."""


if __name__ == "__main__":
    sys.exit(main(program=verify, name=PROGRAM))
