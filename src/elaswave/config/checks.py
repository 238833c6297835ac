"""Checks of single values: is the key known, is the value of its type and in its range?

The types and ranges are those written beside the fields in ``schema``. msgspec converts, but stops at the first error
and speaks of its own types; here every value is judged, and the answer says what was seen and what is needed.
"""

import difflib
import math
import operator
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from elaswave.config.toml import toml_value

_SHOWN_LENGTH_MAX = 60


def check_values(
    section: str, struct: type[msgspec.Struct], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Judges the values of one section, each on its own.

    Args:
        section: name of the section, for the messages.
        struct: the section's type.
        values: value by key; a key may be missing, then it is not judged.
    Returns:
        The good values, converted to the fields' types (lists to tuples, whole numbers to floats), and one line for
        every bad or unknown one.
    """
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    good: dict[str, Any] = {}
    problems = []
    for key, value in values.items():
        if key not in fields:
            problems.append(f"{section}.{key}: unknown key; {_suggestion(section, key, fields)}")
            continue
        try:
            good[key] = _converted(value, fields[key].type)
        except msgspec.ValidationError:
            problems.append(f"{section}.{key}: got {toml_text(value)}, expected {expectation(fields[key].type)}")
    return good, problems


def path_problem(path: str | os.PathLike[str]) -> str:
    """What is wrong with a path that is no text, which no file and no message of a run could hold, or that no system
    takes. Empty for any other."""
    text = os.fspath(path)
    if "\0" in text:
        return f"the path {text!r} has a character of number 0, which no path may have: give another one"
    if text.isprintable() or not any("\ud800" <= character <= "\udfff" for character in text):
        return ""
    return (
        f"the path {os.fsencode(text)!r} is no UTF-8 text, which the files of a run could not hold: rename what is "
        "called so, or give another path"
    )


def plain(value: Any) -> Any:
    """A value with Python's own numbers and lists for numpy's, also within Python's own containers; the value itself
    where there are none. Does not load numpy, whose threads would keep a process from forking."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if type(value) in (tuple, list):
        parts = [plain(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    if type(value) in (dict, Counter, OrderedDict):  # a scheduler counts its milestones
        return type(value)({plain(key): plain(part) for key, part in value.items()})
    return value


def unknown_section(name: str, value: Any, sections: Mapping[str, type[msgspec.Struct]]) -> str:
    """The line about a section (or a key outside of any section) that does not exist."""
    problem = f"{name}: unknown section"
    for section, struct in sections.items():
        if not isinstance(value, Mapping) and name in struct.__struct_fields__:
            return f"{problem}; did you mean {section}.{name}?"
    close = difflib.get_close_matches(name, sections, n=1)
    return f"{problem}; did you mean {close[0]}?" if close else f"{problem}; there are {', '.join(sections)}"


def expectation(field_type: Any) -> str:
    """What a field takes, in words: "a whole number, at least 1"."""
    return _in_words(inspect.type_info(field_type))


def toml_text(value: Any) -> str:
    """A value as a person would write it in TOML, shortened."""
    try:
        text = toml_value(value)
    except TypeError:
        text = "a table" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= _SHOWN_LENGTH_MAX else text[:_SHOWN_LENGTH_MAX] + "..."


def _converted(value: Any, field_type: Any) -> Any:
    result = msgspec.convert(value, field_type)
    for item in result if isinstance(result, tuple) else (result,):
        if isinstance(item, float) and not math.isfinite(item):
            raise msgspec.ValidationError("not finite")
        if isinstance(item, str) and any("\ud800" <= character <= "\udfff" for character in item):
            raise msgspec.ValidationError("half a character, which no file could hold")
    return result


def _suggestion(section: str, key: str, fields: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, fields, n=1)
    return f"did you mean {section}.{close[0]}?" if close else f"[{section}] has {', '.join(fields)}"


def _in_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(extra={"words": str(words)}):
            return words
        case inspect.UnionType():
            return ", or ".join(_in_words(member) for member in kind.types if not isinstance(member, inspect.NoneType))
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a non-empty string" if kind.min_length else "a string"
        case inspect.LiteralType():
            return "one of " + ", ".join(f'"{value}"' for value in kind.values)
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)} values, each {_in_words(kind.item_types[0])}"
        case inspect.VarTupleType():
            return f"a {'non-empty ' if kind.min_length else ''}list of values, each {_in_words(kind.item_type)}"
        case inspect.IntType():
            return "a whole number" + _range_in_words(kind)
        case inspect.FloatType():
            return "a finite number" + _range_in_words(kind)
    raise AssertionError(f"no words for {kind}")


def _range_in_words(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = []
    if kind.ge is not None:
        bounds.append(f"at least {kind.ge}")
    if kind.gt is not None:
        bounds.append(f"above {kind.gt}")
    # The largest value of 63 bits says nothing to a person.
    if kind.le is not None and kind.le < 2**63 - 1:
        bounds.append(f"at most {kind.le}")
    if kind.lt is not None:
        bounds.append(f"below {kind.lt}")
    if kind.multiple_of is not None:
        bounds.append(f"a multiple of {kind.multiple_of}")
    return ", " + " and ".join(bounds) if bounds else ""
