"""Workers that compute other bits are found in the first vote, both sides named; so are later holders of a layer."""

from pathlib import Path
from typing import Any

import pytest
from tests.integration.thread_jobs import Killed, Machine, ThreadJob

from elaswave.engine.checks.determinism_check import UPDATE, environment
from elaswave.errors import VoteError
from elaswave.protocol.step.ballot import ENVIRONMENT, Environment
from elaswave.protocol.step.engine import Measured, Phase

SETTINGS: dict[str, Any] = {"run.steps": 3, "layout.widths": [1, 2]}


class Strange:
    """Lets some workers compute something else.

    Args:
        operators: of their environment, that are others.
        layer: whose bits are others there, or None.
        deaths: worker -> step at whose vote it dies.
    """

    def __init__(
        self,
        workers: tuple[int, ...],
        operators: dict[str, int] | None = None,
        layer: int | None = None,
        deaths: dict[int, int] | None = None,
    ) -> None:
        self.job: ThreadJob
        self.workers, self.operators, self.layer, self.deaths = workers, operators, layer, deaths or {}
        self.environment: Environment | None = None
        self._done: set[int] = set()

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        if self.deaths.get(machine.worker) == machine.step and phase == "backward":
            self.job.kill(machine.worker)
            raise Killed
        if machine.worker in self.workers and machine.worker not in self._done:
            self._done.add(machine.worker)
            if self.operators:
                ours = machine.engine.environment()
                self.environment = Environment("torch 9.9, another processor", {**ours.operators, **self.operators})
            self._change(machine.engine)

    def _change(self, engine: Any) -> None:
        measured = engine.measured

        def otherwise() -> Measured:
            found: Measured = measured()
            determinism_hashes = dict(found.determinism_hashes)
            if self.environment is not None:
                determinism_hashes[ENVIRONMENT] = self.environment.determinism_hash
            if self.layer is not None and self.layer + 1 in determinism_hashes:
                determinism_hashes[self.layer + 1] ^= 1
            return found._replace(determinism_hashes=determinism_hashes)

        engine.measured = otherwise
        if self.environment is not None:
            engine.environment = lambda: self.environment


def finding(folder: Path, strange: Strange) -> str:
    strange.job = ThreadJob(folder, SETTINGS, probe=strange)
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(VoteError) as raised:
        strange.job.run(monkeypatch)
    assert "workers do not compute the same bits" in str(raised.value)
    return str(raised.value)


def test_another_environment_is_named_with_what_differs(tmp_path: Path) -> None:
    ours = environment()
    found = finding(tmp_path, Strange((2,), {"gelu": 1, "matmul": 2, UPDATE: 3}))
    assert "step 1 cannot be committed" in found
    assert "workers [2] (torch 9.9, another processor) compute other bits than workers [0, 1]" in found
    assert ours.text[:40] in found
    assert "in gelu, matmul, update." in found


def test_a_layer_that_differs_between_its_holders_is_named(tmp_path: Path) -> None:
    found = finding(tmp_path, Strange((1,), layer=3))
    assert "layer head differs in shapes or bits between workers [1] and workers [2]" in found


def test_a_later_holder_is_compared_with_those_that_are_gone(tmp_path: Path) -> None:
    # Workers 1 and 2 are the whole second stage; its layers go to worker 0, where one of them gives other bits.
    found = finding(tmp_path, Strange((0,), layer=3, deaths={1: 2, 2: 3}))
    assert "layer head differs in shapes or bits between workers [0] and where it ran before" in found
    assert "step 3 cannot be committed" in found
