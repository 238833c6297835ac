"""Long calculations say how far they are; short ones say nothing."""

import io

import pytest

from elaswave.cli.main import main
from elaswave.cli.tables import Waiting
from elaswave.cli.whatif import scenario_options as options_module
from elaswave.cli.whatif import simulate as simulate_module


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_it_says_how_far_and_how_long(terminal):
    stream, times_s = Stream(terminal), iter((0.0, 1.0, 2.5, 2.6, 9.0, 20.0))
    waiting = Waiting("drawing", stream=stream, clock=lambda: next(times_s))
    for done in (0.1, 0.25, 0.26, 0.5, 1e-6):
        waiting.at(done, "3 changes")
    waiting.close()
    lines = ["drawing: 25 %, about 8 s left, 3 changes", "drawing: 50 %, about 9 s left, 3 changes"]
    lines.append("drawing: 0.0001 %, about 231 days left, 3 changes")
    if terminal:
        assert stream.getvalue() == "".join(f"\r\033[K{line}" for line in lines) + "\r\033[K"
    else:
        assert stream.getvalue().splitlines() == lines


def test_what_is_short_shows_nothing():
    stream = Stream(True)
    waiting = Waiting("drawing", stream=stream, clock=lambda: 0.0)
    waiting.at(0.0)
    waiting.close()
    assert stream.getvalue() == ""


def test_simulate_tells_while_it_draws_and_while_it_lives(monkeypatch, capsys):
    told = {}

    class Told(Waiting):
        def at(self, done: float, detail: str = "") -> None:
            told.setdefault(self._what, []).append(done)

    for module in (options_module, simulate_module):
        monkeypatch.setattr(module, "Waiting", Told)
    assert main(["simulate", "--days", "20", "--policy", "torchft", "--policy", "oobleck", "--json"]) == 0
    assert set(told) == {"drawing 20 days of failures", "living through them"}
    for done in told.values():
        assert done == sorted(done) and 0 <= done[0] and done[-1] <= 1 and len(done) > 2
    assert capsys.readouterr().out.startswith("{")
