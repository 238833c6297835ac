"""The first micro-batch in two processes: what differs is refused with both values, and nothing is done that has not
been done without harm."""

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elaswave
from elaswave.api.given import OwnModelSpec
from elaswave.config.load import load_config
from elaswave.config.values import OwnModel
from elaswave.data.fingerprint import FIRST_LOSS, Finding
from elaswave.engine.blueprint import Blueprint
from elaswave.engine.checks import rehearsal as module
from elaswave.engine.checks.rehearsal import FIRST_BATCH, Rehearsal, as_in_a_worker, repeat
from elaswave.errors import EndedBySignal, StoppedBySignalError, UsageError
from elaswave.training.dataset import DatasetSamples
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer


class Points:
    """Samples that count how often they are drawn."""

    def __init__(self, shift: Callable[[int], float] = lambda index: 0.0) -> None:
        self.drawn: list[int] = []
        self.shift = shift

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.drawn.append(index)
        point = torch.arange(4, dtype=torch.float32) * index + torch.rand(4) + self.shift(index)
        return point, point[:1]


def rehearsal(
    points: Points | None = None, loss: Any = nn.functional.mse_loss, memory: int | None = None, layers: Any = None
) -> Rehearsal:
    torch.manual_seed(3)
    spec = OwnModelSpec(layers or [nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)], loss)
    own = OwnModel(spec.layer_parameters, "float32", False, 0.0, (), "", ())
    settings = {"batch.microbatch_size": 4, "batch.num_microbatches": 2, "layout.widths": [1]}
    config = load_config(None, (), None, settings=settings, own=own)
    samples = DatasetSamples(points or Points())
    training = Training(
        model=spec.spec,
        dtype=spec.dtype,
        make_optimizer=lambda shapes: ConfiguredOptimizer(config.optimizer, config.run.steps),
        open_samples=lambda folder: samples,
        loaders=0,
    )
    return Rehearsal(Blueprint(config, training), samples, memory)


def found(of: Rehearsal) -> list[Finding]:
    with as_in_a_worker():
        findings = list(of.data())
        loss = of.loss()
    return findings if loss is None else [*findings, loss]


def test_what_is_the_same_passes_and_leaves_no_trace() -> None:
    there = found(rehearsal())
    assert there[0].what == "the first micro-batch" and there[1].what == f"sample {there[1].sample}"
    assert there[-1].what == FIRST_LOSS and float.fromhex(there[-1].value) > 0
    here = rehearsal()
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    threads = torch.get_num_threads()
    assert repeat(here, there, []) == ""
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist() and torch.get_num_threads() == threads


def shifted(loss: Any) -> Any:
    return lambda outputs, targets: loss(outputs, targets) + 1


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (
            {"points": Points(lambda index: 0.5)},
            r"the first micro-batch is float32 \[4, 4\] of mean .* in the script's",
        ),
        ({"points": Points(lambda index: float(index == 39))}, "sample 39 is [0-9a-f]{32} in the script's process and"),
        ({"loss": shifted(nn.functional.mse_loss)}, rf"{FIRST_LOSS} is (\S+) \(0x\S+\) in the .* and (\S+) \(0x"),
    ],
)
def test_what_differs_is_refused_with_both_values(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr(module, "HASHES_S_MAX", 60.0)
    there = found(rehearsal())
    with pytest.raises(UsageError, match=f"{named}.*could not be taken over from it: settings.CLIENT"):
        repeat(rehearsal(**other), there, ["settings.CLIENT"])


def test_nothing_is_repeated_that_the_other_process_has_not_done() -> None:
    there, points = found(rehearsal()), Points()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the other process has not come to it")

    assert repeat(rehearsal(points, loss), there[:2], []) == ""
    assert points.drawn[4:] == [there[1].sample], "the micro-batch, and one sample"
    points.drawn.clear()
    assert repeat(rehearsal(points), [], []) == "" and not points.drawn


def test_samples_are_repeated_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HASHES_S_MAX", -1.0)
    there, points = found(rehearsal()), Points()
    with pytest.raises(UsageError, match=FIRST_LOSS):
        repeat(rehearsal(points, shifted(nn.functional.mse_loss)), there, [])
    num_tries = 1 if len(os.listdir("/proc/self/task")) == 1 else 2  # another thread may have drawn meanwhile
    assert len(points.drawn) == 4 * num_tries


@pytest.mark.parametrize("error", [ValueError("only there"), SystemExit(3)])
def test_what_raises_here_only_is_said(error: BaseException) -> None:
    there = found(rehearsal())

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise error

    assert f"could not be compared with the job's processes: {type(error).__name__}" in repeat(
        rehearsal(loss=loss), there, []
    )


@pytest.mark.parametrize("at", ["a loss", "a hash", "the first micro-batch", "code of ours"])
@pytest.mark.parametrize(
    "signal", [KeyboardInterrupt(), EndedBySignal(143), StoppedBySignalError(10, "stopped")], ids=repr
)
def test_a_signal_ends_it_as_itself(signal: BaseException, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as a trouble of the code that it has met, after which the job would go on, nor as other samples."""
    there, once = found(rehearsal()), [signal]

    def comes(*_: object) -> float:
        raise once.pop()

    here = rehearsal(loss=comes) if at == "a loss" else rehearsal()
    if at == "a hash":
        here = rehearsal(Points(lambda index: comes() if index == 39 else 0.0))
    elif at == "the first micro-batch":
        here = rehearsal(Points(lambda index: comes() if once else 0.0))
    elif at == "code of ours":
        monkeypatch.setattr(module, "_loss_of", comes)
    with pytest.raises(type(signal)):
        repeat(here, there, [])


def test_a_large_models_loss_is_left_out_with_the_reason() -> None:
    there = found(rehearsal(memory=100))
    assert there[-1].value == "" and there[-1].text.startswith("the model has 0.0 GiB, more than 1/8 of the memory")
    assert "was not compared between this process and the job's: the model has" in repeat(rehearsal(), there, [])


def test_data_that_take_much_memory_are_not_drawn_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([1000, 3000])
    monkeypatch.setattr(module, "_own_memory_bytes", lambda: next(sizes))
    there, points = found(rehearsal(memory=15_000)), Points()
    assert there[0].value == "" and there[0].text.startswith("what the dataset loads has")
    assert f"{FIRST_BATCH} was not compared between" in repeat(rehearsal(points), there, [])
    assert not points.drawn


def test_samples_that_depend_on_those_made_before_are_refused() -> None:
    """Each process begins with the same generator of its own, so the two agree."""
    for own in (np.random.default_rng(0).normal, iter(range(10_000)).__next__):
        there = found(rehearsal(Points(lambda index, own=own: float(own()))))  # type: ignore[misc]
        points = Points()
        with pytest.raises(UsageError, match=r"first micro-batch is .* at first and .* when it is made again .* count"):
            repeat(rehearsal(points), there, [])
        assert not points.drawn


def test_a_thread_that_draws_beside_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    there, shifts = found(rehearsal()), [1.0]
    points = Points(lambda index: shifts.pop() if shifts else 0.0)
    monkeypatch.setattr(module.os, "listdir", lambda path: ["1", "2"])
    assert repeat(rehearsal(points), there, []) == ""
    shifts.append(1.0)
    monkeypatch.setattr(module.os, "listdir", lambda path: ["1"])
    with pytest.raises(UsageError, match=FIRST_BATCH):
        repeat(rehearsal(points), there, [])


def test_what_does_not_compute_on_the_processor_alone_has_no_loss() -> None:
    layer = elaswave.Layer("first", lambda: nn.Linear(4, 1), compile=True)
    assert found(rehearsal(layers=[layer]))[-1].what != FIRST_LOSS


def test_numpys_matrices_have_one_thread_meanwhile() -> None:
    def threads() -> list[int]:
        return [getattr(library, get)() for library, get, _ in module._libraries_of_matrices()]

    libraries = module._libraries_of_matrices()
    assert libraries, "numpy brings one"
    before = threads()
    for library, _, set_ in libraries:
        getattr(library, set_)(2)
    with as_in_a_worker():
        assert set(threads()) == {1}
    assert set(threads()) == {2}
    for (library, _, set_), number in zip(libraries, before, strict=True):
        getattr(library, set_)(number)
