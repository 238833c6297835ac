"""Text for a terminal of some width: broken between words, never inside a command to copy or a number with its unit."""

import re
import textwrap

_HELD = "\x00"
"""Stands for a space at which no line may end."""
_WHOLE = re.compile(r"`[^`]*`|\belaswave (?:bench|compare|demo|export|inspect|plan|simulate|train)\b[^;,]*")
"""Commands: in backticks, or from the program's name to where the sentence goes on."""
_QUANTITY = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|days|B|KiB|MiB|GiB|tokens/s|samples/s|%)\b)")


def wrap(text: str, width: int) -> list[str]:
    """Breaks a text between words, continued lines indented by two more than the first.

    A word or a command that is wider than the terminal stands on a line of its own, whole: terminals that break it
    themselves copy it as one line.

    Args:
        text: one paragraph; spaces before its first word are kept.
        width: columns of the terminal.
    """
    held = _WHOLE.sub(lambda match: match[0].replace(" ", _HELD), text)
    held = _QUANTITY.sub(_HELD, held)
    indent = held[: len(held) - len(held.lstrip(" "))]
    lines = textwrap.wrap(
        held.lstrip(" "),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_HELD, " ") for line in lines]
