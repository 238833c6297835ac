"""A group of commands whose modules are imported only when they are used, and that suggests the name that was meant."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that imports a command's module only when it is used, so that no command waits for another's libraries.

    Args:
        places: "module:attribute" of each command, by its name.
    """

    def __init__(self, *args: Any, places: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Lists the names, without importing anything."""
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command of a name; None if there is none."""
        if cmd_name not in self._places:
            return None
        module, _, attribute = self._places[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command that the arguments begin with.

        Raises:
            click.UsageError: there is none; names the one that may have been meant.
        """
        name = args[0]
        if name not in self._places and not name.startswith("-"):
            close = difflib.get_close_matches(name, self._places, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(self._places)}"
            raise click.UsageError(f"No such command {name!r}; {hint}", ctx=ctx)
        return super().resolve_command(ctx, args)


class _DefaultContext(click.Context):
    """Calls the command by what a person has typed: `elaswave inspect RUN`."""

    @property
    def command_path(self) -> str:
        assert self.parent is not None, "the command is reached by its group only"
        return self.parent.command_path


class DefaultCommand(click.Command):
    """The command of a group that is meant where none is named."""

    context_class = _DefaultContext
