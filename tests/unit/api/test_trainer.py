"""What a trainer refuses, before anything runs: all that is wrong, in the words of its caller."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import elaswave
from elaswave.api.model import OwnModelSpec
from elaswave.api.session import ScriptSession, active, current_session
from elaswave.control.job import JobOptions
from elaswave.errors import ConfigError, UsageError
from elaswave.models.instances import CopyOf

SAMPLES = [(torch.zeros(2), torch.zeros(1))] * 8


def make(**changes: Any) -> elaswave.Trainer:
    arguments: dict[str, Any] = {
        "model": [nn.Linear(2, 2), nn.Linear(2, 1)],
        "loss": nn.functional.mse_loss,
        "dataset": SAMPLES,
    }
    return elaswave.Trainer(**{**arguments, **changes})


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(())


def views() -> list[nn.Module]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = nn.Parameter(first.weight.data.t())
    return [first, second]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear(2, 1)}, "model is of type Linear, needed: an nn.Sequential, or a list"),
        ({"model": []}, "the model has 0 layers, needed: 1 to 1024"),
        ({"model": [nn.Linear(2, 1), nn.Linear]}, "layer 1 is <class 'torch.nn.modules.linear.Linear'>"),
        ({"model": [nn.ReLU()]}, "no parameter of the model requires a gradient"),
        ({"model": [nn.Linear(2, 1).requires_grad_(False)]}, "no parameter of the model requires a gradient"),
        ({"model": [nn.Linear(2, 2), nn.Linear(2, 1).double()]}, "1.weight is of type torch.float64, needed: float32"),
        ({"model": [nn.Linear(2, 2), nn.Linear(2, 1).bfloat16()]}, "of the types bfloat16 and float32, needed: one"),
        ({"model": [elaswave.Layer("a", nn.ReLU), elaswave.Layer("a", nn.ReLU)]}, "two layers are called 'a'"),
        ({"model": [elaswave.Layer("a", nn.ReLU), elaswave.Layer("a.b", nn.ReLU)]}, "'a' and 'a.b': names of tensors"),
        ({"model": [nn.DataParallel(nn.Linear(2, 1))]}, "layer 0 is wrapped in DataParallel"),
        ({"model": [nn.Embedding(2, 1, sparse=True)]}, "layer 0 makes sparse gradients"),
        (
            {"model": [elaswave.Layer("a", lambda: nn.Linear(2, 1), ties={"x": "y"})]},
            "ties: a.x is to be one tensor with y",
        ),
        ({"model": views()}, "parameters 0.weight and 1.weight are different views of the same memory"),
        ({"loss": "mse"}, "the loss is of type str, needed: a function of outputs and targets"),
        ({"dataset": Stream()}, "Stream, which can only be iterated over; needed a map-style dataset"),
        ({"dataset": []}, "dataset is empty"),
        ({"eval_dataset": iter(SAMPLES)}, "eval_dataset is a list_iterator, which can only be iterated over"),
        ({"optimizer": "sgd"}, "optimizer is of type str, needed: a function that makes one in each process, such as"),
        ({"lr_scheduler": 3, "optimizer": torch.optim.SGD}, "lr_scheduler is of type int, needed: a function"),
        ({"lr_scheduler": lambda optimizer: None}, "lr_scheduler goes with an optimizer; set optimizer.schedule"),
        ({"grad_clip": 1.0}, "grad_clip = 1.0 goes with an optimizer; set optimizer.grad_clip"),
        ({"grad_clip": "1", "optimizer": torch.optim.SGD}, "grad_clip = '1', needed: the largest norm"),
        ({"grad_clip": None}, "grad_clip = None, needed: the largest norm"),
        ({"grad_clip": -1.0}, "grad_clip = -1.0, needed: the largest norm"),
        ({"loaders": True}, "loaders = True, needed: a number"),
        ({"callbacks": print}, "callbacks are of type builtin_function_or_method, needed: a list"),
        ({"callbacks": None}, "callbacks are of type NoneType, needed: a list"),
        ({"run_dir": 5}, "run_dir = 5, needed: the path of a folder"),
        ({"resume": "no"}, "resume = 'no', needed: True or False"),
        ({"metrics": {"loss": lambda outputs, targets: 1.0}}, "a metric is called loss, as the loss is; rename it"),
        ({"loaders": -1}, "loaders = -1, needed: a number of processes for each worker, 0 to 64"),
        ({"metrics": {"accuracy": 1.0}}, "the metric 'accuracy' is of type float, needed: a function"),
        ({"metrics": {"aux_loss": lambda outputs, targets: 1.0}}, "a metric is called aux_loss"),
        ({"metrics": [len]}, "metrics are of type list, needed: a dictionary"),
        ({"callbacks": [3]}, "a callback is of type int, needed: a function of (step, loss, metrics)"),
        ({"config": [1]}, "config is of type list, needed: a dictionary"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make(**changes)


def test_all_that_is_wrong_with_a_model_is_said_at_once() -> None:
    with pytest.raises(UsageError, match=r"0\.weight is of type torch\.float64.*1\.weight is of type torch\.float16"):
        make(model=[nn.Linear(1, 1).double(), nn.Linear(1, 1).half()])


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        ({"run.stepz": 3, "batch": {"microbatch_size": 0}},
         ["batch.microbatch_size: got 0, expected a whole number, at least 1",
          "run.stepz: unknown key; did you mean run.steps?"]),
        ({"model.hidden_size": 3, "data": {"source": "x"}},
         ["model.hidden_size: not for a script's own model; leave it out: the model decides its sizes",
          "data.source: not for a script's own dataset; leave it out: the dataset is an argument"]),
        ({"model.recompute": True}, ["model.recompute: not for a script's own model; leave it out: give elaswave.L"]),
        ({"steps": 3}, ["steps: unknown section; did you mean run.steps?"]),
        ({"run": 3}, ["run: got 3, expected a dictionary of keys"]),
        ({3: 4}, ["3: unknown section"]),
        ({"layout.widths": [1, 1, 1]}, ["layout: 3 stages for a model of 2 layers (as many as the script gives)"]),
        ({"device.kind": "emulated"}, ["device.kind: emulated devices take the time of a described model"]),
    ],
)  # fmt: skip
def test_bad_keys_are_listed_all_at_once(config: dict[Any, Any], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        make(config=config).train()
    assert len(raised.value.problems) == len(problems)
    for found, wanted in zip(raised.value.problems, problems, strict=True):
        assert found.startswith(wanted), found


def test_evaluations_need_a_dataset() -> None:
    with pytest.raises(UsageError, match="run.eval_every = 2 asks for evaluations"):
        make(config={"run.eval_every": 2}).train()


def test_what_cannot_be_evaluated_is_said(tmp_path: Path) -> None:
    trainer = make(eval_dataset=SAMPLES, run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="run holds no run yet: call train first"):
        trainer.evaluate()
    for checkpoint in (2.0, True):
        with pytest.raises(UsageError, match=f"evaluate was given {checkpoint}, needed: the step of a checkpoint"):
            trainer.evaluate(checkpoint)  # type: ignore[arg-type]


def test_resuming_needs_a_folder() -> None:
    with pytest.raises(UsageError, match="--resume needs --run-dir"):
        make(resume=True).train()


def test_the_options_of_a_command_are_stronger_and_for_one_training(tmp_path) -> None:
    options = JobOptions(run_dir=tmp_path / "theirs", overwrite=True, profile=True)
    with active(ScriptSession(options, 2, ("run.steps=3",))) as session:
        assert current_session() is session
        found = session.begin_job(tmp_path / "own", resume=True)
        assert found == options, "to overwrite is not to resume"
        with pytest.raises(UsageError, match="trains a second time, and --run-dir is for one training"):
            session.begin_job(tmp_path / "own", resume=False)
    plain = current_session()
    assert plain is not session
    for _ in range(2):
        assert plain.begin_job(tmp_path / "own", resume=True) == JobOptions(run_dir=tmp_path / "own", resume=True)


def test_a_copy_has_the_values_of_its_module_and_none_of_its_memory() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    module.register_buffer("table", torch.arange(3.0))
    copied = CopyOf(module)()
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), copied.state_dict().values(), strict=True)
    )
    assert {each.data_ptr() for each in module.parameters()}.isdisjoint(each.data_ptr() for each in copied.parameters())
    with torch.device("meta"):
        described = CopyOf(module)()
    assert {each.device.type for each in (*described.parameters(), *described.buffers())} == {"meta"}
    assert [each.shape for each in described.parameters()] == [each.shape for each in module.parameters()]


def test_layers_have_the_names_of_sequential_or_their_own() -> None:
    named = nn.Sequential()
    named.add_module("body", nn.Linear(2, 2))
    named.add_module("head", nn.Linear(2, 1))
    assert [layer.name for layer in OwnModelSpec(named, min).spec.layers] == ["body", "head"]
    mixed = [nn.Linear(2, 2), elaswave.Layer("head", lambda: nn.Linear(2, 1))]
    model = OwnModelSpec(mixed, min)
    assert [layer.name for layer in model.spec.layers] == ["0", "head"]
    assert model.layer_parameters == (6, 3)


def test_the_package_exports_lazily() -> None:
    assert elaswave.__all__ == sorted(elaswave.__all__)
    assert set(elaswave.__all__) <= set(dir(elaswave))
    with pytest.raises(AttributeError, match="no attribute 'Trayner'"):
        elaswave.Trayner  # noqa: B018
