"""Reads TOML files, with errors that name the line; writes the few kinds of TOML values that a configuration holds."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave.errors import ConfigError
from elaswave.untrusted import read_text, reason

TOML_BYTES_MAX = 1 << 24
"""Of a file that a person writes; tomllib takes seconds for as much."""

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds.

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
    """What a text of TOML says.

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
    """One value as TOML.

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
    """A TOML document of one level of tables; keys whose value is None are left out, and so are empty tables.

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
