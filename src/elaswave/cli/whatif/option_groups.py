"""Options that belong together reach a command as one value."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound=Callable[..., Any])


def add_group(
    command: Command,
    name: str,
    group: "type[DataclassInstance]",
    options: Sequence[Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Command:
    """Adds options to a command, which gets their values together.

    Args:
        command: a function that click is to call.
        name: of its parameter that takes the group.
        group: a dataclass with one field for each option, of the option's name.
        options: what ``click.option`` made, in the order in which the help lists them.
    """
    names = [field.name for field in fields(group)]

    def gathering(*args: Any, **values: Any) -> Any:
        return command(*args, **{name: group(**{each: values.pop(each) for each in names})}, **values)

    gathering.__name__, gathering.__doc__ = command.__name__, command.__doc__
    gathering.__dict__.update(vars(command))
    for option in reversed(options):
        gathering = option(gathering)
    return gathering  # type: ignore[return-value]


def given_in(group: "DataclassInstance") -> list[str]:
    """Names of a group's options that were given, as they are typed; None says that one was not."""
    return [f"--{name.replace('_', '-')}" for name, value in vars(group).items() if value is not None]
