"""What viewers of the Trace Event Format need of a trace. A helper, not a test."""

from collections.abc import Mapping
from typing import Any

_REQUIRED = {
    "X": ("dur",),
    "b": ("id", "cat"),
    "e": ("id", "cat"),
    "s": ("id", "cat"),
    "f": ("id", "cat"),
    "M": ("args",),
}


def validate_trace(document: Mapping[str, Any]) -> None:
    """Checks a trace against what viewers of the Trace Event Format need.

    Every event has ``name``, ``ph``, ``ts``, ``pid`` and ``tid``, and what its kind needs beside them; no time is
    negative; asynchronous events and flows come in pairs, the end not before the beginning.

    Raises:
        ValueError: the first thing that is wrong, with the event's position.
    """
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("a trace needs a list of events under 'traceEvents'")
    open_pairs: dict[tuple[str, str, str], float] = {}
    for position, event in enumerate(events):
        where = f"traceEvents[{position}]"
        kind = event.get("ph")
        if kind not in _REQUIRED:
            raise ValueError(f"{where}: unknown kind of event {kind!r}")
        missing = [name for name in ("name", "ts", "pid", "tid", *_REQUIRED[kind]) if name not in event]
        if missing:
            raise ValueError(f"{where}: an event of kind {kind!r} lacks {', '.join(missing)}")
        if event["ts"] < 0 or event.get("dur", 0) < 0:
            raise ValueError(f"{where}: a time is negative: ts {event['ts']}, dur {event.get('dur', 0)}")
        if kind in "bs":
            open_pairs[kind, event["cat"], str(event["id"])] = event["ts"]
        elif kind in "ef":
            began = open_pairs.pop(("b" if kind == "e" else "s", event["cat"], str(event["id"])), None)
            if began is None or event["ts"] < began:
                raise ValueError(f"{where}: {event['cat']} {event['id']} ends before it begins")
    if open_pairs:
        _, category, identity = next(iter(open_pairs))
        raise ValueError(f"{category} {identity} begins but does not end")
