"""Own layers with all that they may do: the same bits under any layout and schedule, and through losses of workers."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.jobs import nothing_left
from tests.integration.own_layers import NUM_SAMPLES, SETTINGS, Sequences, Values, make_model, training_of
from tests.integration.thread_jobs import Killed, Machine, ThreadJob

import elaswave
from elaswave.data.samples import Draw
from elaswave.errors import NonFiniteError
from elaswave.job.script import JobOptions, ScriptSession, active
from elaswave.models.layers import Call, LossOutput, build_layer, inside
from elaswave.protocol.step.engine import Phase
from elaswave.training.optimizer import learning_rate

ONE: dict[str, Any] = {"layout.widths": [1]}


class DiesAt:
    """Workers die in their own threads, each at the first action of a phase of a step.

    Args:
        points: worker -> step and phase.
    """

    def __init__(self, points: dict[int, tuple[int, Phase]]) -> None:
        self.job: ThreadJob
        self.points = points

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        if self.points.get(machine.worker) == (machine.step, phase):
            self.job.kill(machine.worker)
            raise Killed


def run(folder: Path, settings: dict[str, Any], points: dict[int, tuple[int, Phase]] | None = None) -> ThreadJob:
    probe = DiesAt(points or {})
    probe.job = ThreadJob(folder, {**SETTINGS, **settings}, probe=probe, training=training_of(settings))
    with pytest.MonkeyPatch.context() as monkeypatch:
        return probe.job.run(monkeypatch)


def told(job: ThreadJob) -> Any:
    """All that a job says of itself and that may not depend on its layout."""
    newest = {report.step: report for report in job.reports}
    return (
        job.computation,
        [(newest[step].norm, newest[step].metrics) for step in sorted(newest)],
        job.evaluations,
        job.evaluated_metrics,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> ThreadJob:
    return run(tmp_path_factory.mktemp("alone"), ONE)


@pytest.mark.parametrize(
    "settings",
    [
        {"layout.widths": [2, 2]},
        {"layout.widths": [1, 2], "layout.layers": [2, 4]},
        {"layout.widths": [1, 1, 1], "layout.schedule": "zero-bubble"},
        {"layout.widths": [1, 1, 1, 1, 1, 1]},
    ],
    ids=str,
)
def test_the_layout_does_not_show(settings: dict[str, Any], alone: ThreadJob, tmp_path: Path) -> None:
    assert told(run(tmp_path, settings)) == told(alone)


@pytest.mark.parametrize(
    ("widths", "points"),
    [([2, 2], {3: (2, "backward"), 2: (4, "gather")}), ([1, 2], {0: (2, "forward"), 2: (4, "vote")})],
)
def test_two_losses_do_not_show(
    widths: list[int], points: dict[int, tuple[int, Phase]], alone: ThreadJob, tmp_path: Path
) -> None:
    job = run(tmp_path, {"layout.widths": widths}, points)
    assert len(job.decisions) == 2
    assert told(job) == told(alone)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_losses_metrics_and_updates_are_those_of_ordinary_pytorch(name: str, tmp_path: Path) -> None:
    """AdamW's updates show no constant factor of all gradients; SGD's do."""
    model, steps = make_model(dropout=0.0), 4
    settings = {**ONE, "run.steps": steps, "run.eval_every": 0, "optimizer.name": name, "optimizer.lr": 1e-2}
    with pytest.MonkeyPatch.context() as monkeypatch:
        job = ThreadJob(tmp_path, {**SETTINGS, **settings}, training=training_of(settings, model)).run(monkeypatch)
    config = job.config
    layers = [build_layer(layer, config.run.seed, index) for index, layer in enumerate(model.layers)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    options = config.optimizer
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=options.momentum)
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps)
    source = Sequences()
    sampler = job.blueprint.sampler(source)
    for step in range(1, steps + 1):
        total, aux, right, count = torch.zeros(()), torch.zeros(()), 0.0, 0
        for microbatch in range(config.batch.num_microbatches):
            inputs, targets = source.batch(sampler.draws(step, microbatch), "train")
            call = Call(functools.partial(dict, inputs))
            with inside(call):
                value: Any = inputs
                for layer in layers:
                    value = layer(value)
            returned = model.loss(value, targets)
            assert isinstance(returned, LossOutput)
            total, count = total + returned.total, count + int(returned.count)
            aux = aux + int(returned.count) * sum(call.aux_losses)
            right += float(model.metrics["accuracy"](value, targets)[0])
        optimizer.zero_grad()
        ((total + aux) / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, options.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step, steps)
        optimizer.step()
        report = job.reports[step - 1]
        assert report.loss == pytest.approx(float(total.detach()) / count, rel=1e-4)
        assert report.norm == pytest.approx(float(norm), rel=1e-3) and report.norm > options.grad_clip
        assert report.metrics["aux_loss"] == pytest.approx(float(aux.detach()) / count, rel=1e-4)
        assert report.metrics["accuracy"] == right / count


@pytest.mark.parametrize("skip", [False, True])
def test_a_step_in_which_nothing_counts_has_no_update(skip: bool, tmp_path: Path) -> None:
    class Padding(Sequences):
        def batch(self, indices: Any, split: str) -> tuple[Values, Values]:
            inputs, targets = super().batch(indices, split)
            return inputs, {**targets, "mask": torch.zeros_like(targets["mask"])}

    settings = {"layout.widths": [1, 1], "run.steps": 2, "run.skip_nonfinite": skip}
    training = dataclasses.replace(training_of(settings), open_samples=lambda folder: Padding())
    job = ThreadJob(tmp_path, {**SETTINGS, **settings}, training=training)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not skip:
            with pytest.raises(NonFiniteError, match="the loss's counts add up to 0 in step 1"):
                job.run(monkeypatch)
            return
        job.run(monkeypatch)
    assert all("counts add up to 0" in (report.skipped or "") for report in job.reports)


class Points:
    """A map-style dataset of the same sequences."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Values, Values]:
        inputs, targets = Sequences().batch([Draw(index, 0, index)], "train")
        return {name: value[0] for name, value in inputs.items()}, {name: value[0] for name, value in targets.items()}


def train_script(folder: Path, widths: list[int], faults: tuple[str, ...] = ()) -> tuple[elaswave.Trainer, Any]:
    told: list[Any] = []
    model = make_model()
    trainer = elaswave.Trainer(
        list(model.layers),
        model.loss,
        Points(),
        eval_dataset=Points(),
        metrics=model.metrics,
        config={
            "run.steps": 6,
            "run.eval_every": 3,
            "batch.num_microbatches": 5,
            "batch.microbatch_size": 4,
            "elastic.block_size": 256,
            "layout.widths": widths,
        },
        callbacks=[lambda step, loss, metrics: told.append((step, loss, metrics))],
        run_dir=folder / "run",
    )
    with nothing_left(), active(ScriptSession(JobOptions(fault_specs=faults), None, ())):
        result = trainer.train()
    return trainer, (result.losses, result.state_digest, result.record.metrics, result.record.val_metrics, told)


def test_a_script_trains_it_through_two_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaswave.api.trainer.forkserver_environment", lambda: None)
    trainer, expected = train_script(tmp_path / "one", [1])
    _, found = train_script(tmp_path / "four", [2, 2], ("kill:3@2:backward", "kill:2@4:gather"))
    assert found == expected
    losses, _, metrics, val_metrics, told = expected
    assert metrics.keys() == {"accuracy", "largest", "aux_loss"} and val_metrics.keys() == {"accuracy", "largest"}
    assert [step for step, _, _ in told] == [1, 2, 3, 4, 5, 6]
    assert told[0][2] == {name: values[0] for name, values in metrics.items()} and told[0][1] == losses[0]
    assert trainer.evaluate() == {"loss": trainer.evaluate()["loss"], **{n: v[-1] for n, v in val_metrics.items()}}
