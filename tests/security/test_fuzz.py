"""The first cases of each target of `tests.security.fuzz`, and that it finds what it looks for."""

import random
import time
from pathlib import Path

import pytest
from tests.security import fuzz
from tests.security.fuzz import Target, run_case, targets

pytestmark = pytest.mark.security

SEED, CASES = 7, 6
TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_end_in_a_value_or_in_an_error_of_ours(name: str) -> None:
    failures = [run_case(name, TARGETS[name], SEED, case) for case in range(CASES)]
    assert not [failure for failure in failures if failure is not None]


def test_a_case_is_the_same_again(tmp_path: Path) -> None:
    drawn = []
    target = Target(lambda rng, folder: drawn.append(rng.random()))
    for _ in range(2):
        run_case("a", target, SEED, 5)
    run_case("a", target, SEED, 6)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_traceback_is_a_failure_and_its_input_is_kept(tmp_path: Path) -> None:
    def case(rng: random.Random, folder: Path) -> None:
        (folder / "input").write_text("x")
        raise KeyError("a")

    failure = run_case("a", Target(case), SEED, 5, tmp_path)
    assert failure is not None and "KeyError" in failure.what
    assert (tmp_path / f"a-{SEED}-5" / "input").read_text() == "x"


def test_a_wait_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "CASE_S", 0.01)
    failure = run_case("a", Target(lambda rng, folder: time.sleep(60)), SEED, 5)
    assert failure is not None and "it takes more than" in failure.what


def test_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "CASE_BYTES", -1)
    failure = run_case("a", Target(lambda rng, folder: None), SEED, 5)
    assert failure is not None and "MiB" in failure.what
