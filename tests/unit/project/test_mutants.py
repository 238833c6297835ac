"""The list of mutants fits the code and the tests: nothing is run here, see `scripts/mutants`."""

from pathlib import Path

import pytest
from tests.mutants import runner
from tests.mutants.places import Mutant, StaleMutantError, missing_tests, mutated, read_mutants

CODE = """
LIMIT = 3


class Counter:
    def add(self, value):
        self.total += value
        return self.total

    def sub(self, value):
        self.total -= value
        return self.total
"""


def test_every_mutants_place_text_and_tests_are_there() -> None:
    problems = []
    mutants = read_mutants()
    for each in sorted(mutants, key=lambda mutant: mutant.place):  # file by file, since only some stay parsed
        try:
            assert mutated(each)
        except StaleMutantError as error:
            problems.append(str(error))
    for each in sorted(mutants, key=lambda mutant: mutant.tests):
        problems += [f"{each.name}: there is no {test}" for test in missing_tests(each)]
    assert problems == []


def mutant(**fields: object) -> Mutant:
    return Mutant(**{"name": "m", "place": "pkg.code:Counter.sub", "old": "-=", "new": "+=", **fields})  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src/pkg").mkdir(parents=True)
    (tmp_path / "src/pkg/code.py").write_text(CODE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_code.py").write_text(
        "def test_one(): pass\n\n\nclass TestMore:\n    def test_two(self): pass\n"
    )
    return tmp_path


def test_only_the_place_is_changed(root: Path) -> None:
    assert mutated(mutant(), root) == CODE.replace("-=", "+=")
    changed = mutated(mutant(old="return self.total", new="return 0"), root)
    assert changed.count("return self.total") == 1 and changed.endswith("return 0\n")
    assert mutated(mutant(place="pkg.code:LIMIT", old="3", new="4"), root) == CODE.replace("3", "4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"place": "pkg.other:f"}, "m: there is no src/pkg/other.py"),
        ({"place": "pkg.code:Counter.mul"}, "m: there is no Counter.mul in src/pkg/code.py"),
        ({"old": "*="}, "m: '\\*=' stands 0 times in pkg.code:Counter.sub, not once"),
        ({"old": "total"}, "m: 'total' stands 2 times in"),
        ({"old": "value)", "new": "value"}, "m: the changed src/pkg/code.py is no Python"),
        ({"old": " -= ", "new": "  -= "}, "m: the change means nothing to Python"),
    ],
)
def test_a_stale_mutant_is_refused(root: Path, fields: dict[str, str], message: str) -> None:
    with pytest.raises(StaleMutantError, match=message):
        mutated(mutant(**fields), root)


def test_tests_that_are_not_there_are_named(root: Path) -> None:
    there = ["tests/test_code.py::test_one[x]", "tests/test_code.py::TestMore::test_two"]
    absent = ["tests/test_code.py::test_two", "tests/test_other.py::test_one", "tests/test_code.py"]
    assert missing_tests(mutant(tests=there + absent), root) == absent


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["tests = ['t']", "tests = ['t']"], "several mutants are called m"),
        ([""], "m: give either tests that must fail or why it is equivalent"),
        (["tests = ['t']\nequivalent = 'why'"], "m: give either"),
    ],
)
def test_a_list_that_says_too_little_or_too_much_is_refused(tmp_path: Path, entries: list[str], message: str) -> None:
    text = "".join(f"[[mutant]]\nname = 'm'\nplace = 'a:b'\nold = 'x'\nnew = 'y'\n{entry}\n" for entry in entries)
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(StaleMutantError, match=message):
        read_mutants(tmp_path / "list.toml")


class TreeOfCode(runner.Tree):
    """A copy of the example instead of the checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stamp = 1


def judged(root: Path, test: str, **fields: str) -> runner.Verdict:
    (root / "tests/test_code.py").write_text(test)
    verdict = TreeOfCode(root).judge(mutant(tests=["tests/test_code.py::test_it"], **fields))
    assert (root / "src/pkg/code.py").read_text() == CODE
    return verdict


SUBTRACTS = """
from pkg.code import Counter


def test_it():
    counter = Counter()
    counter.total = 3
    assert counter.sub(1) == 2
"""


@pytest.mark.parametrize(
    ("test", "fields", "is_good", "text"),
    [
        (SUBTRACTS, {}, True, "killed by tests/test_code.py::test_it in "),
        (SUBTRACTS, {"place": "pkg.code:LIMIT", "old": "3", "new": "4"}, False, "SURVIVED tests/test_code.py::test_it"),
        (SUBTRACTS.replace("test_it", "test_that"), {}, False, "NOT TESTED, pytest ended with 4"),
        ("def test_it():\n    while True:\n        pass\n", {}, True, "killed by the time-out of "),
    ],
    ids=["killed", "survives", "not tested", "hangs"],
)
def test_a_mutant_is_judged_by_its_tests(
    root: Path, monkeypatch: pytest.MonkeyPatch, test: str, fields: dict[str, str], is_good: bool, text: str
) -> None:
    if "while" in test:
        monkeypatch.setattr(runner, "TIMEOUT_S", 0.5)
    verdict = judged(root, test, **fields)
    assert (verdict.is_good, verdict.text[: len(text)]) == (is_good, text)


def test_an_equivalent_mutant_is_not_run(root: Path) -> None:
    verdict = TreeOfCode(root).judge(mutant(equivalent="no test can tell"))
    assert verdict == (mutant(equivalent="no test can tell"), True, "equivalent: no test can tell", "")
