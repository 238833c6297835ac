"""Plans of the commands that are tested here are made without the local search."""

import pytest

from elaswave.planning.search import planner


@pytest.fixture(autouse=True)
def without_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command prints is tested, not how good a plan is: the search takes two thirds of a plan's time."""
    monkeypatch.setattr(planner._Planning, "_improved", lambda planner, candidates: [])
