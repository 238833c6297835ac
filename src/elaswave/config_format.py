"""The number that a written configuration carries. Pure.

A person's file may leave it out, and means this format then. What a run has saved always has it: without it, it is of a
version that had other names for some keys, and is refused.
"""

from collections.abc import Mapping
from typing import Any

FORMAT_KEY = "format"
"""The only key of a configuration outside of its sections."""
FORMAT = 2


def format_problem(values: Mapping[str, Any], *, is_saved: bool = False) -> str | None:
    """Tells why the keys of a configuration cannot be trusted, or returns None.

    Args:
        values: by key, by section.
        is_saved: a run has saved it.
    """
    found = values.get(FORMAT_KEY)
    if (found == FORMAT and not isinstance(found, bool)) or (FORMAT_KEY not in values and not is_saved):
        return None
    seen = f"got {found!r}" if FORMAT_KEY in values else "missing: an older version of elaswave has saved this"
    return f"{FORMAT_KEY}: {seen}, but this version of elaswave reads {FORMAT_KEY} = {FORMAT}"
