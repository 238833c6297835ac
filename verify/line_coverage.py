"""Which lines of `elaswave.protocol` simulated schedules run: those that calls run, and not importing."""

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.abc import InspectLoader
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NamedTuple

import elaswave.protocol

ROOT = Path(elaswave.protocol.__file__).parent
Lines = dict[str, frozenset[int]]
"""Path of a file below `ROOT` -> some of its lines."""


class Covered(NamedTuple):
    """What was run of a folder, or of all."""

    name: str
    num_run: int
    num_lines: int

    def __str__(self) -> str:
        return (
            f"{100 * self.num_run / max(1, self.num_lines):5.1f} %  {self.num_run:,} of {self.num_lines:,}  {self.name}"
        )


def lines_of_functions() -> Lines:
    """All lines that a call of some function can run."""
    found = {}
    for module in walk_packages(elaswave.protocol.__path__, "elaswave.protocol."):
        if not module.ispkg:
            path, loader = str(import_module(module.name).__file__), import_module(module.name).__loader__
            assert isinstance(loader, InspectLoader)
            code = loader.get_code(module.name)
            assert code is not None
            lines = {line for function in _functions(code, within=False) for line in _lines(function)}
            found[str(Path(path).relative_to(ROOT))] = frozenset(lines)
    return found


def _functions(code: types.CodeType, *, within: bool) -> Iterator[types.CodeType]:
    """Code that is run by calls: neither a module's own nor that of a class."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            is_function = within or bool(inner.co_flags & 0x2)  # CO_NEWLOCALS: bodies of classes have it not
            if is_function:
                yield inner
            yield from _functions(inner, within=is_function)


def _lines(code: types.CodeType) -> set[int]:
    """Without the line of its head, which runs before anything is done."""
    return {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}


def lines_run(call: Callable[[], object]) -> Lines:
    """The lines that are run while something is called. A function that has run whole is not looked at again.

    Args:
        call: is called once, in this thread.
    """
    missing: dict[types.CodeType, set[int]] = {}
    root = str(ROOT)

    def enter(frame: types.FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(root):
            return None
        left = missing.get(code)
        if left is None:
            left = missing[code] = _lines(code)
        return within if left else None

    def within(frame: types.FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        left = missing[frame.f_code]
        left.discard(frame.f_lineno)
        return within if left else None

    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(None)
    found: dict[str, set[int]] = {}
    for code, left in missing.items():
        found.setdefault(str(Path(code.co_filename).relative_to(ROOT)), set()).update(_lines(code) - left)
    return {path: frozenset(lines) for path, lines in found.items()}


def report(run: Lines) -> list[Covered]:
    """By folder, the least covered first, and of all at last.

    Args:
        run: as of `lines_run`, perhaps of several.
    """
    of_all, of_run = Counter[str](), Counter[str]()
    for path, lines in lines_of_functions().items():
        folder = str(Path(path).parent) if "/" in path else path
        of_all[folder] += len(lines)
        of_run[folder] += len(lines & run.get(path, frozenset()))
    rows = [Covered(folder, of_run[folder], of_all[folder]) for folder in of_all if of_all[folder]]
    rows.sort(key=lambda row: row.num_run / max(1, row.num_lines))
    return [*rows, Covered("all of protocol/", of_run.total(), of_all.total())]
