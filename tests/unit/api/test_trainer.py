"""What a trainer refuses, before anything runs: all that is wrong, in the words of its caller."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import IterableDataset

import elaswave
from elaswave.api import result, trainer
from elaswave.api.environment import RANDOM
from elaswave.api.given import OwnModelSpec
from elaswave.errors import ConfigError, UsageError
from elaswave.job.script import JobOptions, ScriptSession, active, current_session
from elaswave.models.admission import CopyOf

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


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(1))


def watched(register: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 1))
    getattr(model, register)(lambda *args: None)
    return model


def hooked(register: str) -> list[nn.Module]:
    layer = nn.Linear(2, 1)
    getattr(layer.weight, register)(lambda *args: None)
    return [layer]


def on_meta() -> list[nn.Module]:
    with torch.device("meta"):
        return [nn.Linear(2, 2), nn.Linear(2, 1)]


class Around(nn.Module):
    """A layer around what was made outside of its build."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.map = nn.Linear(2, 2)


class OnMemory(nn.Module):
    """A layer whose parameter lies on a tensor that was made outside of its build."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


class Versioned(nn.Linear):
    """Has something in its state that is no tensor."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        assert state == 1


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(2, 1), "weight", 0.5)  # its weight is a product


def around(inner: nn.Module, kind: type = Around) -> list[elaswave.Layer]:
    return [elaswave.Layer(name, lambda: kind(inner)) for name in ("a", "b")]


def layer(build: Any = lambda: nn.Linear(2, 1), name: Any = "a", **options: Any) -> dict[str, Any]:
    return {"model": [elaswave.Layer(name, build, **options)]}


SHARED, SHARED_NORM = nn.Linear(2, 2), nn.BatchNorm1d(2)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature", "ignore:Lazy modules are a new feature")
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
        ({"model": Doubled(nn.Linear(2, 1))}, "model is a Doubled with a forward of its own, which would be left out"),
        ({"model": Scaled(nn.Linear(2, 1))}, "model is a Scaled with scale of its own, which would be left out"),
        ({"model": watched("register_forward_hook")}, "model is a Sequential with forward or backward hooks"),
        ({"model": watched("register_full_backward_pre_hook")}, "model is a Sequential with forward or backward hooks"),
        ({"model": hooked("register_hook")}, "parameter weight of layer 0 has a gradient hook: remove it"),
        ({"model": hooked("register_post_accumulate_grad_hook")}, "parameter weight of layer 0 has a gradient hook"),
        (
            {"model": nn.Sequential(nn.Linear(2, 2), SHARED_NORM, nn.Linear(2, 2), SHARED_NORM)},
            "layer 3 has its buffer 3.running_mean in common with 1.running_mean: running statistics of one module",
        ),
        ({"model": on_meta()}, "weight of layer 1 is on the meta device, so it has no values: make it on the CPU, or"),
        ({"model": [pruned()]}, "layer 0 (Linear) cannot be copied: Only Tensors created explicitly by the user"),
        ({"model": [nn.LazyLinear(1)]}, "weight of layer 0 has no shape yet, as in nn.LazyLinear: give all sizes, or"),
        (layer(lambda: nn.LazyLinear(1)), "weight of layer a has no shape yet"),
        ({"model": [nn.Embedding(2, 1, max_norm=1.0)]}, "layer 0 has max_norm=1.0, so its forward writes its weight"),
        ({"model": [nn.EmbeddingBag(2, 1, max_norm=1.0)]}, "layer 0 has max_norm=1.0"),
        ({"model": [nn.Linear(2, 1, dtype=torch.complex64)]}, "keep real and imaginary parts in a float32 parameter"),
        (layer(nn.Linear(2, 1)), "layer 'a' has the module Linear as its build, needed: a function that makes one"),
        (layer(5), "layer 'a' has a build of type int, needed: a function"),
        (layer(lambda: None), "the build of layer a returned None of type NoneType, needed: an nn.Module"),
        (layer(name=3), "a layer is called 3, of type int, needed: a text"),
        (layer(name=""), "a layer is called '', needed: a name of printable characters"),
        (layer(name="a/b"), "a layer is called 'a/b', needed: a name"),
        (layer(name="a..b"), "a layer is called 'a..b', needed: a name"),
        (layer(ties=5), "layer 'a' has ties of type int, needed: a dictionary"),
        (layer(ties={"weight": 3}), "layer 'a' has the tie ('weight', 3), needed: names of two parameters"),
        (
            layer(lambda: nn.Dropout(torch.ones(1).item())),
            "its build raised RuntimeError: Tensor.item() cannot be called on meta tensors. elaswave also calls it "
            "under torch.device('meta'), where tensors have shapes and no values: take numbers",
        ),
        (layer(lambda: SHARED), "the build of layer a did not make its parameter weight itself: another build of laye"),
        ({"model": around(SHARED)}, "layer b did not make its parameter inner.weight itself: another build of layer a"),
        ({"model": around(nn.BatchNorm1d(2, affine=False))}, "layer a did not make its module inner itself"),
        ({"model": [SHARED, *around(SHARED)]}, "inner.weight itself: layer 0 has the same object"),
        ({"model": around(torch.ones(3), OnMemory)}, "parameters a.weight and b.weight are different views"),
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


def test_fences_stand_behind_layers_of_the_model() -> None:
    with pytest.raises(ConfigError) as raised:
        make(config={"model.fences": ["0:int8", "1:int8", "layer:bf16"]}).train()
    assert list(raised.value.problems) == [
        'model.fences: "1:int8": 1 is the last layer, and a fence stands between two layers',
        'model.fences: "layer:bf16": the model has no layer layer; a fence stands behind one of 0',
    ]


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


def test_numpys_truth_resumes_too() -> None:
    with pytest.raises(UsageError, match="--resume needs --run-dir"):
        make(resume=np.True_).train()


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


def test_a_module_that_a_sequential_has_twice_is_two_layers_that_share_its_parameters() -> None:
    act, scale = nn.Tanh(), nn.PReLU()
    model = nn.Sequential(nn.Linear(2, 2), act, scale, nn.Linear(2, 2), act, scale, nn.Linear(2, 1))
    layers = OwnModelSpec(model, min).spec.layers
    assert [each.name for each in layers] == list("0123456")
    assert [dict(each.ties) for each in layers if each.ties] == [{"weight": "2.weight"}]


def test_weights_go_back_into_a_sequential_that_has_a_module_twice(tmp_path: Path, monkeypatch) -> None:
    scale = nn.PReLU()
    model = nn.Sequential(nn.Linear(2, 2), scale, Versioned(2, 1), scale)
    names = {"0.weight", "0.bias", "1.weight", "2.weight", "2.bias"}
    assert model.state_dict().keys() == names | {"2._extra_state", "3.weight"}
    stored = {name: torch.rand_like(value) for name, value in model.state_dict().items() if name in names}
    monkeypatch.setattr(result, "checkpoint_of_step", lambda run_dir, step: None)
    monkeypatch.setattr(result, "stored_weights", lambda checkpoint, *, ema: SimpleNamespace(tensors=stored))
    record: Any = SimpleNamespace(steps=1)
    result.Result(tmp_path, record, OwnModelSpec(model, min).spec.layers).load_into(model)
    assert list(model[3].parameters())[0] is scale.weight
    assert all(model.state_dict()[name].equal(value) for name, value in stored.items())


def test_what_functions_may_share() -> None:
    OwnModelSpec([*around(nn.Tanh())], min)
    OwnModelSpec([*around(nn.Linear(2, 2).requires_grad_(False))], min)
    OwnModelSpec([elaswave.Layer("a", lambda: OnMemory(torch.ones(3).requires_grad_(False)))], min)


def test_the_package_exports_lazily() -> None:
    assert elaswave.__all__ == sorted(elaswave.__all__)
    assert set(elaswave.__all__) <= set(dir(elaswave))
    with pytest.raises(AttributeError, match="no attribute 'Trayner'"):
        elaswave.Trayner  # noqa: B018


class JobBeganError(Exception):
    """Instead of a job."""


@pytest.mark.parametrize(
    ("forks", "seed", "words", "named"),
    [
        (False, RANDOM, {"a", "b"}, True),
        (False, RANDOM, frozenset({b"a", b"b"}), True),
        (False, RANDOM, {"a"}, False),
        (False, RANDOM, {1, 2}, False),
        (False, "0", {"a", "b"}, False),
        (True, RANDOM, {"a", "b"}, False),
    ],
)
def test_a_set_of_texts_that_workers_would_order_otherwise_is_named(
    monkeypatch: pytest.MonkeyPatch, forks: bool, seed: str, words: Any, named: bool
) -> None:
    def begin(*arguments: Any, **options: Any) -> None:
        raise JobBeganError

    monkeypatch.setattr(trainer, "run_job", begin)
    monkeypatch.setattr(trainer, "hash_seed", lambda: seed)
    monkeypatch.setattr(trainer, "forkserver_environment", lambda: None if forks else {})
    run = make(collate=lambda samples: (words, samples))
    expected = pytest.warns(UserWarning, match="collate's words is a set of texts") if named else nullcontext()
    with expected, pytest.raises(JobBeganError):
        run.train()
