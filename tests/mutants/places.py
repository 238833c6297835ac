"""The list of mutants (`mutants.toml`), and where in the source each of them belongs.

A place is ``module:qualified.name`` of a function, a method, a class or an assignment; the change is a text that stands
exactly once in the source of that place, and what is put there instead. So moving code changes a place, and what a
mutant does to the code can be read in the list.
"""

import ast
import functools
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")


class StaleMutantError(Exception):
    """A mutant's place, text or test is not there any more: the list has to follow the code."""


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change of the product that a test must notice."""

    name: str
    place: str
    """``module:qualified.name``."""
    old: str
    """Stands exactly once in the source of the place."""
    new: str
    tests: list[str] = []
    """Ids of the tests of which at least one must fail; the quickest ones that do."""
    equivalent: str = ""
    """Why no test can notice it; then it is not run."""


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: list[Mutant]


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """All mutants, in the order of the list.

    Raises:
        StaleMutantError: two have one name, or one names neither tests nor why it is equivalent.
    """
    mutants = msgspec.convert(tomllib.loads(path.read_text()), _List).mutant
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise StaleMutantError(f"several mutants are called {', '.join(twice)}: give each a name of its own")
    for mutant in mutants:
        if bool(mutant.tests) == bool(mutant.equivalent):
            raise StaleMutantError(f"{mutant.name}: give either tests that must fail or why it is equivalent")
    return mutants


def source_file(mutant: Mutant) -> Path:
    """The file of a mutant's place, relative to the root of the checkout."""
    module = mutant.place.partition(":")[0]
    folder = "" if module.startswith("verify.") else "src"
    return Path(folder, *module.split(".")).with_suffix(".py")


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The whole source of the mutant's file with its change.

    Raises:
        StaleMutantError: the place is not there, its text does not stand there exactly once, or what comes of it is no
            Python or the same as before.
    """
    path = root / source_file(mutant)
    if not path.is_file():
        raise StaleMutantError(f"{mutant.name}: there is no {source_file(mutant)}")
    source = path.read_text()
    begin, end = _span(source, mutant)
    text = source[begin:end]
    count = text.count(mutant.old)
    if count != 1:
        raise StaleMutantError(f"{mutant.name}: {mutant.old!r} stands {count} times in {mutant.place}, not once")
    changed = source[:begin] + text.replace(mutant.old, mutant.new) + source[end:]
    if not _alone(text.replace(mutant.old, mutant.new), unlike=text):
        try:
            after = ast.dump(ast.parse(changed))
        except SyntaxError as error:
            raise StaleMutantError(f"{mutant.name}: the changed {source_file(mutant)} is no Python: {error}") from error
        if after == ast.dump(_parsed(source)):
            raise StaleMutantError(f"{mutant.name}: the change means nothing to Python")
    return changed


def missing_tests(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """The mutant's tests that are not there. Parameters in brackets are not looked at."""
    return [test for test in mutant.tests if not _has_test(test, root)]


def _has_test(test: str, root: Path) -> bool:
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    if not names or not path.is_file():
        return False
    return _find(_parsed(path.read_text()).body, names) is not None


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _alone(changed: str, *, unlike: str) -> bool:
    """Whether a place is Python by itself, and another than before: a whole file takes ten times as long."""
    try:
        after, before = (ast.dump(ast.parse(textwrap.dedent(text))) for text in (changed, unlike))
    except SyntaxError:
        return False
    return after != before


def _span(source: str, mutant: Mutant) -> tuple[int, int]:
    """First and one past the last character of the place."""
    name = mutant.place.partition(":")[2]
    node = _find(_parsed(source).body, name.split("."))
    if node is None:
        raise StaleMutantError(f"{mutant.name}: there is no {name} in {source_file(mutant)}")
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    assert node.end_lineno is not None
    begin = sum(map(len, lines[: first - 1]))
    return begin, begin + sum(map(len, lines[first - 1 : node.end_lineno]))


def _find(body: Sequence[ast.stmt], names: Sequence[str]) -> ast.stmt | None:
    for node in body:
        if names[0] in _names(node):
            if len(names) == 1:
                return node
            if found := _find(getattr(node, "body", []), names[1:]):
                return found
    return None


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Name):
                    yield each.id
