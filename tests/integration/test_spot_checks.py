"""Layers and processors that are right at first and wrong later: what is lost by it, and what counts."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch
from tests.integration.own import train
from tests.integration.thread_jobs import ThreadJob
from tests.own_models import WIDTH, Head, Mix, settings_of, training_of
from torch import nn

from elaswave.engine.checks.spot_checks import CheckKind, SpotChecks
from elaswave.errors import WorkerError
from elaswave.models.layers import Layer, draw_key
from elaswave.training.definition import Training

NUM_MICROBATCHES, STEPS = 8, 12
STRUCK = 1
"""The layer that is struck, of the first stage."""
SETTINGS: dict[str, Any] = {
    "batch.num_microbatches": NUM_MICROBATCHES,
    "layout.widths": [2, 2],
    "run.steps": STEPS,
}
Strike = Callable[[int, int], float]
"""(step, micro-batch) of a run -> by what share its result is wrong; the step of a probe is 0."""


def right(step: int, microbatch: int) -> float:
    return 0.0


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strike: Strike) -> torch.Tensor:
        ctx.strike = strike
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * (1.0 + _share(ctx.strike)), None


def _share(strike: Strike) -> float:
    key = draw_key()
    return 0.0 if key is None else strike(*key[1:])


class Struck(nn.Module):
    """A layer whose output, or whose weight's gradient, may be wrong."""

    def __init__(self, forward: Strike = right, backward: Strike = right) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.strikes = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _WrongGradient.apply(self.map.weight, self.strikes[1])
        return nn.functional.linear(x, weight, self.map.bias) * (1.0 + _share(self.strikes[0]))


def training(**strikes: Strike) -> Training:
    builds = [Mix, lambda: Struck(**strikes), Mix, Mix, Head]
    return training_of(*[Layer(f"l{index}", build) for index, build in enumerate(builds)])


def places(kind: CheckKind, seed: int) -> list[tuple[int, int]]:
    """(step, micro-batch) at which the layer is checked."""
    spots = SpotChecks(seed, 0.005, NUM_MICROBATCHES, 2)
    found = []
    for step in range(3, STEPS):
        spots.begin(step)
        found += [(step, number) for number in range(NUM_MICROBATCHES) if spots.due(STRUCK, number) is kind]
    return found


def job_of(folder: Path, model: Training, **settings: Any) -> ThreadJob:
    return ThreadJob(folder, {**settings_of(model), **SETTINGS, **settings}, training=model)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ThreadJob:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return job_of(tmp_path_factory.mktemp("right"), training()).run(monkeypatch)


class Once:
    """One run at a place is wrong, its first.

    Args:
        place: step and micro-batch.
    """

    def __init__(self, place: tuple[int, int]) -> None:
        self.place = place
        self.struck = ""

    def __call__(self, *place: int) -> float:
        if place != self.place or self.struck:
            return 0.0
        self.struck = current_thread().name
        return 2.0**-20


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_processor_that_is_wrong_once_is_lost_and_the_bits_are_right(
    where: str, schedule: str, undisturbed: ThreadJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike = Once(places(CheckKind.RUN, undisturbed.config.run.seed)[-1])
    job = job_of(tmp_path, training(**{where: strike}), **{"layout.schedule": schedule}).run(monkeypatch)
    (failed,) = job.failures
    assert f"worker {failed.worker}" == strike.struck and [decision.lost for decision in job.decisions] == [
        (failed.worker,)
    ]
    what = "its output" if where == "forward" else "the gradient of map.weight"
    assert f"{what} differs" in failed.summary and "the last one that held here was in step" in failed.summary
    assert job.computation == undisturbed.computation


class ForGood:
    """From a step on all that one worker computes is wrong, always by the same share."""

    def __init__(self, step: int, worker: int) -> None:
        self.step, self.who = step, f"worker {worker}"
        self.wrong: list[tuple[int, int]] = []

    def __call__(self, *place: int) -> float:
        if current_thread().name != self.who or (place[0] < self.step and not self.wrong):
            return 0.0
        self.wrong.append((place[0], place[1]))
        return 2.0**-20


def test_a_processor_that_has_become_wrong_for_good_is_lost_and_nothing_is_kept_of_its_step(
    undisturbed: ThreadJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has handed on wrong numbers before its check is due: others have computed with them."""
    step, microbatch = next(each for each in places(CheckKind.PROBE, undisturbed.config.run.seed) if each[1] >= 4)
    strike = ForGood(step, microbatch % 2)
    job = job_of(tmp_path, training(forward=strike)).run(monkeypatch)
    (failed,) = job.failures
    assert failed.worker == microbatch % 2 and "gives other bits than at the start of the run" in failed.summary
    assert (step, microbatch % 2) in strike.wrong and strike.wrong[-1][0] == 0
    assert [(decision.resume_step, decision.kept) for decision in job.decisions] == [(step, ())]
    assert job.computation == undisturbed.computation


def test_a_layer_that_becomes_nondeterministic_ends_the_job_by_name(
    undisturbed: ThreadJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(step: int, microbatch: int) -> float:
        return int.from_bytes(os.urandom(2), "little") * 2.0**-20 if step >= 5 else 0.0

    job = job_of(tmp_path, training(forward=late))
    with pytest.raises(AssertionError, match=r"layer l1 is not deterministic.*; the same error has ended worker [01]"):
        job.run(monkeypatch)
    step = next(step for step, _ in places(CheckKind.RUN, undisturbed.config.run.seed) if step >= 5)
    assert {each.signature for each in job.failures} == {f"SpotCheckError at step {step}, layer {STRUCK}"}
    assert all(report.step < step for report in job.reports)


def test_without_checks_nobody_notices(undisturbed: ThreadJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike = Once(places(CheckKind.RUN, undisturbed.config.run.seed)[-1])
    job = job_of(tmp_path, training(forward=strike), **{"elastic.spot_checks": 0}).run(monkeypatch)
    assert strike.struck and not job.failures and job.computation != undisturbed.computation


# ------------------------------------------------------------------------------------------------------- real processes


class Turns(nn.Module):
    """Wrong for good in one process, or from one time to the next in all of them, from a step on.

    Args:
        folder: where the first process that comes to it leaves its mark; None: all are struck.
        step: from which on.
    """

    def __init__(self, folder: Path | None, step: int) -> None:
        super().__init__()
        self.map = nn.Linear(24, 24)
        self.folder, self.step = folder, step
        self.is_wrong = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = draw_key()
        if key is not None and key[1] >= self.step and not self.is_wrong:
            self.is_wrong = self.folder is None or self._is_first()
        share = 0.0
        if self.is_wrong:
            share = 2.0**-20 if self.folder else int.from_bytes(os.urandom(2), "little") * 2.0**-20
        found: torch.Tensor = self.map(x) * (1.0 + share)
        return found

    def _is_first(self) -> bool:
        assert self.folder is not None
        try:
            (self.folder / "struck").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def network(folder: Path | None, step: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(6, 24), Turns(folder, step), nn.Linear(24, 24), nn.Linear(24, 2)]


REAL: dict[str, Any] = {"run.steps": 16, "batch.num_microbatches": 4, "layout.widths": [2, 1]}


@pytest.mark.slow
def test_in_real_processes_a_wrong_one_is_lost_and_the_job_goes_on(tmp_path: Path) -> None:
    result = train(tmp_path / "wrong", REAL, model=network(tmp_path, 5))
    (lost,) = result.recoveries
    assert 4 <= lost.step <= 12 and len(result.losses) == 16
    assert (tmp_path / "struck").exists() and any("This is a spot check" in line for line in lost.last_lines)


@pytest.mark.slow
def test_in_real_processes_a_layer_that_becomes_nondeterministic_ends_the_job_by_name(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"layer 1 is not deterministic.*; the same error has ended worker"):
        train(tmp_path / "run", REAL, model=network(None, 7))
