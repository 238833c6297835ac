"""What single values of a configuration may be: written in TOML, of a known key, of its type and in its range.

The types and ranges are those written beside the fields in ``schema``. msgspec converts, but stops at the first error
and speaks of its own types; here every value is judged, and the answer says what was seen and what is needed. What is
not TOML is refused with its line.

A script gives layers, dataset and optimizer to ``elaswave.Trainer``. What they decide is no key of the configuration,
so such a key is refused wherever it is set; the few facts that the configuration keeps (`OwnModel`) are written by the
Trainer.
"""

import difflib
import math
import operator
import os
import re
import tomllib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from elaswave.errors import ConfigError
from elaswave.untrusted import read_text, reason

TOML_BYTES_MAX = 1 << 24
"""Of a file that a person writes; tomllib takes seconds for as much."""
_SHOWN_LENGTH_MAX = 60
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
OWN = "own"
"""Value of ``model.family`` and ``optimizer.name`` for what a script brings."""
TOKENS_PER_S, SAMPLES_PER_S = "tokens/s", "samples/s"
"""Units of throughput: of the built-in models, and of a script's own, whose samples are not counted in tokens."""
_MODEL_KEYS = ("family", "num_layers", "dtype")
_SET_KEYS = ("fences", "fence_ratios", "cuts", "network", "foreign")
"""Kept as far as they say anything."""
_OPTIMIZER_KEYS = ("name", "grad_clip", "ema_decay")
_FREE_KEYS = ("optimizer.ema_decay", "model.fences", "model.fence_ratios")
"""Of those sections, what a person may set: the average is of weights, whichever optimizer makes them; and fences stand
between layers, whatever these are."""
_ADVICE = {
    "model.recompute": "give elaswave.Layer(..., recompute=True)",
    "model": "the model decides its sizes and types itself, and gets them as arguments of its layers",
    "data.validation_fraction": "give eval_dataset to the Trainer",
    "data": "the dataset is an argument of the Trainer",
    "optimizer.grad_clip": "give grad_clip to the Trainer",
    "optimizer": "the optimizer is an argument of the Trainer, and gets its settings there",
}


def read_toml(path: Path) -> dict[str, Any]:
    """Reads what a TOML file holds.

    Raises:
        ConfigError: a file that cannot be read, or is not TOML; names the line.
    """
    try:
        return parse_toml(read_text(path, TOML_BYTES_MAX), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: byte {error.start} is not UTF-8; a configuration is a text file"]) from error
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {reason(error)}; give the path of a TOML file"]) from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parses what a text of TOML says.

    Args:
        text: of a file.
        where: its name, for the message.
    Raises:
        ConfigError: it is not TOML; names the line.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # "Expected '=' after a key in a key/value pair (at line 3, column 7)"
        message, _, place = str(error).partition(" (at ")
        line = re.search(r"line (\d+)", place)
        place = f"{where}, line {line.group(1)}" if line else f"{where}, at its end"
        raise ConfigError([f"{place}: this is not TOML: {message}"]) from error
    except RecursionError:
        raise ConfigError([f"{where}: it is nested too deeply"]) from None
    except ValueError as error:  # a whole number of thousands of digits
        raise ConfigError([f"{where}: {error}"]) from error


def toml_value(value: Any) -> str:
    """Writes one value as TOML.

    Args:
        value: a bool, int, finite float, string, or a list or tuple of such values.
    Returns:
        Text from which ``tomllib`` reads the same value (a tuple as a list).
    Raises:
        TypeError: a value of another type.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(map(_escaped, value)) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    raise TypeError(f"a configuration holds no {type(value).__name__}: {value!r}")


def toml_document(document: Mapping[str, Any]) -> str:
    """Writes a TOML document of one level of tables; keys whose value is None are left out, and so are empty tables.

    Args:
        document: values by key, by section; and values outside of any section, which are written first.
    """
    outside = {key: value for key, value in document.items() if not isinstance(value, Mapping)}
    tables = ["".join(f"{key} = {toml_value(value)}\n" for key, value in outside.items())] if outside else []
    for name, values in document.items():
        if not isinstance(values, Mapping):
            continue
        lines = [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
        if lines:
            tables.append("\n".join([f"[{name}]", *lines, ""]))
    return "\n".join(tables)


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    # TOML wants every control character escaped, DEL included.
    return f"\\u{ord(character):04x}" if ord(character) < 0x20 or ord(character) == 0x7F else character


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
    """Tells what is wrong with a path that is no text, which no file and no message of a run could hold, or that no
    system takes. The result is empty for any other."""
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
    """Returns a value with Python's own numbers and lists for numpy's, also within Python's own containers; the value
    itself where there are none. Does not load numpy, whose threads would keep a process from forking."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if type(value) in (tuple, list):
        parts = [plain(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    if type(value) in (dict, Counter, OrderedDict):  # a scheduler counts its milestones
        return type(value)({plain(key): plain(part) for key, part in value.items()})
    return value


def unknown_section(name: str, value: Any, sections: Mapping[str, type[msgspec.Struct]]) -> str:
    """Writes the line about a section (or a key outside of any section) that does not exist."""
    problem = f"{name}: unknown section"
    for section, struct in sections.items():
        if not isinstance(value, Mapping) and name in struct.__struct_fields__:
            return f"{problem}; did you mean {section}.{name}?"
    close = difflib.get_close_matches(name, sections, n=1)
    return f"{problem}; did you mean {close[0]}?" if close else f"{problem}; there are {', '.join(sections)}"


def expectation(field_type: Any) -> str:
    """Describes what a field takes, in words: "a whole number, at least 1"."""
    return _in_words(inspect.type_info(field_type))


def toml_text(value: Any) -> str:
    """Writes a value as a person would write it in TOML, shortened."""
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


class OwnModel(NamedTuple):
    """What a configuration has to know of a script's model and optimizer."""

    layer_parameters: tuple[int, ...]
    """Number of parameters of each layer."""
    dtype: str
    """That the layers compute in: "float32" or "bfloat16"."""
    has_optimizer: bool
    """Whether the script brings an optimizer too."""
    grad_clip: float
    """With an optimizer: largest norm of the whole gradient; 0: off."""
    cuts: tuple[int, ...] = ()
    """Of a network that `elaswave.split` has cut."""
    network: str = ""
    """Fingerprint of that network."""
    foreign: tuple[str, ...] = ()
    """``LAYER: KIND`` of each foreign part."""

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """What the configuration says of it, by section and key."""
        model: dict[str, Any] = {"family": OWN, "num_layers": len(self.layer_parameters), "dtype": self.dtype}
        if self.network:
            model |= {"cuts": self.cuts, "network": self.network}
        if self.foreign:
            model["foreign"] = self.foreign
        optimizer = {"optimizer": {"name": OWN, "grad_clip": self.grad_clip}} if self.has_optimizer else {}
        return {"model": model, **optimizer}


def problems_with_own(own: OwnModel | None, values: Mapping[str, Any]) -> list[str]:
    """Lists what a person sets although a script decides it, or sets as if there were a script.

    Args:
        own: what the script brings; None: there is no script.
        values: what is set, by section and key.
    """
    if own is None:
        return [
            f'{section}.{key}: "{OWN}" is for the model or optimizer of a script, which gives them to '
            "elaswave.Trainer; run it with: elaswave run SCRIPT.py"
            for section, key in (("model", "family"), ("optimizer", "name"))
            if isinstance(values.get(section), Mapping) and values[section].get(key) == OWN
        ]
    sections = ("model", "data", "optimizer") if own.has_optimizer else ("model", "data")
    return [
        f"{section}.{key}: not for a script's own {'dataset' if section == 'data' else section}; leave it out: "
        + _ADVICE.get(f"{section}.{key}", _ADVICE[section])
        for section in sections
        if isinstance(values.get(section), Mapping)
        for key in values[section]
        if f"{section}.{key}" not in _FREE_KEYS
    ]


def free_keys(section: str, table: Any) -> dict[str, Any]:
    """Returns the keys of a section that a person may set also where a script decides the others."""
    return {
        key: value
        for key, value in (table.items() if isinstance(table, Mapping) else ())
        if f"{section}.{key}" in _FREE_KEYS
    }


def without_unused(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections without the keys that a script's own model, dataset or optimizer leaves without use.

    Args:
        sections: values by key, by section.
    """
    kept = {name: dict(section) for name, section in sections.items()}
    if kept["model"].get("family") == OWN:
        kept["model"] = {
            key: value for key, value in kept["model"].items() if key in _MODEL_KEYS or (key in _SET_KEYS and value)
        }
        kept["data"] = {}
    if kept["optimizer"].get("name") == OWN:
        kept["optimizer"] = {key: value for key, value in kept["optimizer"].items() if key in _OPTIMIZER_KEYS}
    return kept
