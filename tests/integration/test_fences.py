"""Fences in jobs of real processes: equal bits under any layout, through losses, joins and resumes."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration import own
from tests.integration.jobs import Job, run_job
from tests.integration.thread_jobs import ThreadJob
from tests.integration.waits import WaitsFor, log_of
from torch import nn

import elaswave

SETTINGS: dict[str, Any] = {
    "model.num_layers": 4,
    "run.steps": 6,
    "run.eval_every": 3,
    "run.eval_microbatches": 2,
    "optimizer.schedule": "constant",
}
SHORT = SETTINGS | {"run.steps": 3}
ONE = {"layout.stages": 1, "layout.replicas": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "2x2": {"layout.stages": 2, "layout.replicas": 2},
    "1+3": {"layout.widths": [1, 3], "layout.layers": [2, 4], "model.recompute": True},
    "2+1+2": {"layout.widths": [2, 1, 2], "layout.layers": [2, 2, 2], "layout.schedule": "zero-bubble"},
}
CODECS = ("bf16", "int8", "int4", "topk10", "topk100-own")
FAULTS = {"kill": ["kill:1@3:backward"], "two kills": ["kill:0@2:forward", "kill:2@5:reduce"]}


def fences(codec: str) -> dict[str, Any]:
    """Two fences, one of them where the pipelines of these tests are cut."""
    return {"model.fences": [f"block.0:{codec}", f"block.2:{codec}"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """The training with each codec by one worker, made when it is first asked for."""

    @functools.cache
    def job_of(codec: str) -> Job:
        return run_job(tmp_path_factory.mktemp("alone"), SETTINGS | ONE | fences(codec))

    return job_of


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("faults", ["", *FAULTS])
def test_layouts_and_losses_change_no_bit(
    alone: Callable[[str], Job], tmp_path: Path, codec: str, layout: str, faults: str
) -> None:
    job = run_job(tmp_path, SETTINGS | LAYOUTS[layout] | fences(codec), faults=FAULTS.get(faults, ()))
    assert job.computation == alone(codec).computation
    assert job.result.val_losses == alone(codec).result.val_losses
    assert sum(each.is_failure for each in job.result.recoveries) == len(FAULTS.get(faults, ()))


@pytest.mark.parametrize(("codec", "layout"), [("int8", "1+3"), ("int4", "2+1+2"), ("topk10", "2+1+2")])
def test_layouts_of_threads_change_no_bit(
    codec: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (
        ThreadJob(tmp_path / str(len(shape)), SHORT | shape | fences(codec)).run(monkeypatch)
        for shape in (ONE, LAYOUTS[layout])
    )
    assert other.computation == one.computation
    assert other.evaluations == one.evaluations and list(one.evaluations) == [3]


@pytest.mark.parametrize("codec", ["int8", pytest.param("topk10", marks=pytest.mark.slow)])
def test_a_loss_changes_no_bit(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ThreadJob(tmp_path / "one", SHORT | ONE | fences(codec)).run(monkeypatch)
    job = run_job(tmp_path / "job", SHORT | LAYOUTS["2x2"] | fences(codec), faults=["kill:1@2:backward"])
    assert job.result.losses == one.losses
    assert job.digests == {name: f"{value:016x}" for name, value in one.digests.items()}
    assert [each.worker for each in job.result.recoveries if each.is_failure] == [1]


def test_fewer_bytes_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline of two workers, who send each other activations, gradients and votes: all bytes, heads included."""
    settings = SETTINGS | {"layout.widths": [1, 1], "layout.layers": [2, 4], "elastic.num_followers": 0, "run.steps": 2}
    sent = {}
    for codec in ("none", "int8", "int4", "topk20"):
        job = ThreadJob(tmp_path / codec, settings | fences(codec) | {"batch.microbatch_size": 8}).run(monkeypatch)
        sent[codec] = sum(finished.bytes_sent for finished in job.finished.values())
    assert sent["int8"] < 0.35 * sent["none"] and sent["int4"] < 0.25 * sent["none"]
    assert sent["topk20"] < sent["int4"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_join_changes_no_bit(tmp_path: Path, codec: str) -> None:
    settings = SETTINGS | {"run.steps": 60, "run.eval_every": 0, "elastic.rebalance": True} | fences(codec)
    undisturbed = run_job(tmp_path / "alone", settings | ONE)
    probe = WaitsFor(log_of(tmp_path / "joined"), "worker 4 has joined", step=8)
    job = run_job(tmp_path / "joined", settings | LAYOUTS["2x2"], probe=probe, faults=["kill:1@4", "join@8"])
    assert job.computation == undisturbed.computation
    assert 4 in job.result.generations[-1].layout.workers


@pytest.mark.slow
def test_a_resume_under_another_layout_changes_no_bit(alone: Callable[[str], Job], tmp_path: Path) -> None:
    run_job(tmp_path, SETTINGS | LAYOUTS["2x2"] | fences("int4") | {"run.steps": 3})
    job = run_job(tmp_path, SETTINGS | LAYOUTS["2+1+2"] | fences("int4"), resume=True)
    assert job.computation == alone("int4").computation


@pytest.mark.slow
def test_other_fences_are_another_computation_and_none_is_none(alone: Callable[[str], Job], tmp_path: Path) -> None:
    without = run_job(tmp_path / "without", SETTINGS | ONE)
    none = run_job(tmp_path / "none", SETTINGS | ONE | fences("none"))
    assert none.computation == without.computation
    computations = [without.computation, *(alone(codec).computation for codec in CODECS)]
    assert all(a[1] != b[1] for a in computations for b in computations if a is not b)


class WithSkip(nn.Module):
    """A network with a connection over its middle, for `elaswave.split`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(128, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x).tanh()
        return self.head(torch.cat([first, self.third(self.second(first).tanh())], -1))


@pytest.mark.slow
def test_a_network_that_was_cut_has_fences_at_its_cuts(tmp_path: Path) -> None:
    torch.manual_seed(3)
    layers = elaswave.split(WithSkip(), torch.randn(4, 6), num_parts=3)
    changes = {"model.fences": ["part0:int8", "part1:int8"]}
    results = [
        own.train(tmp_path / name, changes | layout, model=layers, faults=faults)
        for name, layout, faults in (
            ("one", {"layout.widths": [1]}, []),
            ("three", {"layout.widths": [1, 2, 1]}, ["kill:1@3:backward"]),
        )
    ]
    assert results[0].state_digest == results[1].state_digest
    assert results[0].state_digest != own.train(tmp_path / "none", {"layout.widths": [1]}, model=layers).state_digest
