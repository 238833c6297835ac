"""The number that a written configuration carries, and how one without it is read. Pure.

Format 2 names two sizes of the model as Hugging Face does. Before it, the hidden size was ``model.width``, and
``model.hidden_size`` was what is called ``model.intermediate_size`` now. Nothing else differs. Files and checkpoints
of that time carry no number. What was saved by a run is read as it was meant; a file that a person gives to a new run
is refused where its keys have changed their meaning, since it may as well be a new one that lacks the number.
"""

from collections.abc import Mapping
from typing import Any

FORMAT_KEY = "format"
"""The only key of a configuration outside of its sections."""
FORMAT = 2

RENAMED_KEYS = {"model.width": "model.hidden_size", "model.hidden_size": "model.intermediate_size"}
"""Key of format 2 by the key that meant the same before."""
GONE_KEYS = {old: new for old, new in RENAMED_KEYS.items() if old not in RENAMED_KEYS.values()}
"""Those that are no key any more."""


def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that a run has saved, as format 2 has it.

    Args:
        values: by key, by section; without a number they are read as what was written before there was one.
    Returns:
        The same values under the keys of today, with the number.
    """
    if FORMAT_KEY in values:
        return dict(values)
    return {FORMAT_KEY: FORMAT} | {
        section: {_renamed(section, key): value for key, value in keys.items()} if isinstance(keys, Mapping) else keys
        for section, keys in values.items()
    }


def format_problem(values: Mapping[str, Any], *, reads_old_format: bool = False) -> str | None:
    """Why the keys of a configuration cannot be trusted, or None.

    Args:
        values: by key, by section.
        reads_old_format: without a number they mean what they meant before there was one, which is no problem.
    """
    if FORMAT_KEY in values:
        found = values[FORMAT_KEY]
        if found == FORMAT and not isinstance(found, bool):
            return None
        return f"{FORMAT_KEY}: got {found!r}, but this version of elaswave reads {FORMAT_KEY} = {FORMAT}"
    if reads_old_format:
        return None
    model = values.get("model")
    changed = [key for key in RENAMED_KEYS if isinstance(model, Mapping) and key.partition(".")[2] in model]
    if not changed:
        return None
    renamed = "; ".join(f"what was {old} is now {new}" for old, new in RENAMED_KEYS.items())
    return (
        f"{' and '.join(changed)} without {FORMAT_KEY} = {FORMAT}: {renamed}. Check both names and write "
        f"{FORMAT_KEY} = {FORMAT} above the first section"
    )


def _renamed(section: str, key: str) -> str:
    return RENAMED_KEYS.get(f"{section}.{key}", f"{section}.{key}").partition(".")[2]
