"""A script's own model: the same bits under any layout, through losses, from any forkserver, and after a resume."""

import importlib
import math
import os
import re
import signal
import sys
import threading
import traceback
import types
from pathlib import Path

import pytest
import torch
from tests.integration.own import CONFIG, FORK, FRESH, WAYS, Points, computation, mean_square, mlp, train
from torch import nn

import elaswave
from elaswave.api.environment import environment_to_compute
from elaswave.data.samples import Sampler
from elaswave.errors import CheckpointError, DataError, LaunchError, RunFolderError, UsageError, WorkerError
from elaswave.observability.events import StepCommitted, read_events
from elaswave.observability.processes import read_processes
from elaswave.observability.run_folder import EVENTS_FILE, RESULT_FILE


@pytest.fixture(params=[FORK, pytest.param(FRESH, marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the forkserver begins."""
    use(request.param, monkeypatch)
    return request.param


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaswave.api.trainer.forkserver_environment", WAYS[way])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> elaswave.Result:
    """One worker, without faults."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(FORK, monkeypatch)
        return train(tmp_path_factory.mktemp("alone") / "run", {"layout.widths": [1]})


@pytest.mark.parametrize(
    ("way", "widths", "faults"),
    [
        (FORK, [2, 2], ("kill:2@3:backward", "kill:coordinator@5")),
        (FRESH, [1, 2], ("kill:random@4:gather", "kill:coordinator@6")),
        pytest.param(FORK, [1, 1, 1], ("kill:1@6:vote",), marks=pytest.mark.slow),
    ],
    indirect=["way"],
)
def test_any_layout_through_losses_gives_the_bits_of_one_worker(way, widths, faults, alone, tmp_path):
    steps: list[tuple[int, float]] = []
    called = train(
        tmp_path / "run",
        {"layout.widths": widths},
        faults=faults,
        callbacks=[lambda step, loss, metrics: steps.append((step, loss))],
    )
    assert computation(called) == computation(alone)
    assert steps == list(enumerate(alone.losses, 1))
    kinds = [recovery.kind for recovery in called.recoveries]
    assert kinds.count("lost") == sum("coordinator" not in fault for fault in faults)
    assert kinds.count("coordinator") == sum("coordinator" in fault for fault in faults)


def test_another_default_type_gives_a_float32_model_the_same_bits(alone, tmp_path, monkeypatch):
    use(FORK, monkeypatch)
    model = mlp()
    torch.set_default_dtype(torch.float64)
    try:
        result = train(tmp_path / "run", {"layout.widths": [1]}, model=model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert computation(result) == computation(alone)


def test_it_learns_what_plain_torch_learns(tmp_path, monkeypatch):
    use(FORK, monkeypatch)
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)]
    plain = nn.Sequential(*(type(layer)(*_sizes(layer)) for layer in layers))
    plain.load_state_dict(nn.Sequential(*layers).state_dict())
    settings = {"optimizer.name": "sgd", "optimizer.schedule": "constant", "optimizer.warmup_steps": 0,
                "optimizer.weight_decay": 0.0, "optimizer.grad_clip": 0.0, "layout.widths": [1, 1]}  # fmt: skip
    result = train(tmp_path / "run", settings, model=layers)
    optimizer = torch.optim.SGD(plain.parameters(), lr=CONFIG["optimizer.lr"], momentum=0.9)
    points, sampler = Points(), Sampler(1, 47, CONFIG["batch.microbatch_size"], CONFIG["batch.num_microbatches"])
    losses = []
    for step in range(1, CONFIG["run.steps"] + 1):
        optimizer.zero_grad()
        batches = [
            torch.utils.data.default_collate([points[index] for index in sampler.microbatch(step, microbatch)])
            for microbatch in range(CONFIG["batch.num_microbatches"])
        ]
        loss = torch.stack([mean_square(plain(inputs), targets) for inputs, targets in batches]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert result.losses == pytest.approx(losses, rel=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(result.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def _sizes(layer: nn.Module) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()


def test_weights_come_back_under_the_names_of_sequential(alone, tmp_path):
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = alone.state_dict()
    assert list(state) == list(before)
    assert all(not torch.equal(state[name], before[name]) for name in state)
    alone.load_into(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    layers = list(mlp())
    alone.load_into(layers)
    assert torch.equal(layers[0].weight, state["0.weight"])
    with pytest.raises(RuntimeError, match="5.weight"):
        alone.load_into(mlp()[:5])
    with pytest.raises(UsageError, match="6 layers are to be loaded into"):
        alone.load_into(layers[:5])


def test_layers_are_built_where_they_are_held_and_instances_stay_as_they_are(tmp_path, monkeypatch):
    """A layer that is built draws what depends on run.seed and its position only; an instance keeps its values."""
    use(FORK, monkeypatch)
    head = nn.Linear(24, 2)
    value = head.weight.detach().clone()
    model = [elaswave.Layer("body", lambda: nn.Linear(6, 24)), head]
    changes = {"run.steps": 1, "optimizer.lr": 0.0, "optimizer.weight_decay": 0.0}
    results = [
        train(tmp_path / f"{len(widths)}", {**changes, "layout.widths": widths}, model=model)
        for widths in ([2], [1, 1])
    ]
    assert computation(results[0]) == computation(results[1])
    state = results[0].state_dict()
    assert list(state) == ["body.weight", "body.bias", "1.weight", "1.bias"]
    assert torch.equal(state["1.weight"], value) and torch.equal(head.weight, value)


def test_a_resume_goes_on_under_another_layout_whatever_the_instances_hold_by_then(alone, tmp_path, way):
    run = tmp_path / "run"
    train(run, {"layout.widths": [2, 1], "run.steps": 3})
    changed = mlp()
    with torch.no_grad():
        changed[0].weight.fill_(1.0)
    steps: list[int] = []
    resumed = train(
        run, {"layout.widths": [1, 1]}, model=changed, resume=True, callbacks=[lambda step, *_: steps.append(step)]
    )
    assert computation(resumed) == computation(alone)
    assert steps == [4, 5, 6, 7, 8]


def test_a_resume_with_another_model_or_dataset_is_refused(tmp_path, monkeypatch):
    use(FORK, monkeypatch)
    run, changes = tmp_path / "run", {"layout.widths": [1], "run.steps": 1}
    train(run, changes)
    other = mlp()
    other[4] = nn.Linear(24, 9)
    other[5] = nn.Linear(9, 2)
    more = {**changes, "run.steps": 2}
    with pytest.raises(CheckpointError, match=r"4\.bias is of shape \[8\] there and of shape \[9\] here"):
        train(run, more, model=other, resume=True)
    with pytest.raises(RunFolderError, match="model.num_layers is 6 there and 5 here"):
        train(run, more, model=mlp()[:5], resume=True)
    with pytest.raises(DataError, match="it had 47 samples in dataset and now has 46"):
        train(run, more, dataset=Points(46), resume=True)
    with pytest.raises(RunFolderError, match="add --resume"):
        train(run, more)


@pytest.mark.slow
def test_a_second_training_in_one_script(tmp_path, monkeypatch):
    use(FORK, monkeypatch)
    monkeypatch.chdir(tmp_path)
    results = [train(None, {"layout.widths": [1], "run.steps": 2}) for _ in range(2)]
    assert computation(results[0]) == computation(results[1])
    assert results[0].run_dir != results[1].run_dir


class Failing(nn.Module):
    """Fails in its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().sum() > 0 and self.training:
            raise LookupError("no such feature")
        return self.linear(x)


class Torn(Points):
    """Cannot load one of its samples."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 9:
            raise OSError(f"sample {index} is torn")
        return super().__getitem__(index)


def failing_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("no loss today")


@pytest.mark.parametrize(
    ("arguments", "error", "place"),
    [
        ({"model": [nn.Linear(6, 6), Failing()]}, "LookupError: no such feature", r"micro-batch [01], layer 1 \(1\)"),
        ({"loss": failing_loss}, "ArithmeticError: no loss today", r"micro-batch [01], layer 6 \(loss\)"),
        ({"dataset": Torn()}, "OSError: sample 9 is torn", r"micro-batch \d"),
        (
            {"collate": lambda samples: samples[:3]},
            "DataError: a micro-batch is a list of 3 values; needed",
            r"micro-batch \d",
        ),
    ],
    ids=["layer", "loss", "dataset", "collate"],
)
def test_exceptions_of_the_script_end_the_job_with_their_traceback_and_place(
    arguments, error, place, tmp_path, monkeypatch
):
    use(FORK, monkeypatch)
    with pytest.raises(WorkerError) as raised:
        train(tmp_path / "run", {"layout.widths": [2]}, **arguments)
    assert re.search(rf"worker [01]: {error}.* \(at step \d+, {place}", str(raised.value))
    shown = "".join(traceback.format_exception(raised.value))
    first, _, place_told = shown.partition("The above exception was the direct cause")
    assert first.count(error) == 1 and "launcher.py" not in shown and "compute.py" not in shown
    assert re.search(rf"WorkerError: worker [01]: {error}", place_told)


def test_an_exception_in_a_callback_ends_the_job_with_a_checkpoint(alone, tmp_path, monkeypatch):
    use(FORK, monkeypatch)
    run = tmp_path / "run"

    def stop(step: int, loss: float, metrics: object) -> None:
        if step == 3:
            raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        train(run, {"layout.widths": [1, 1], "run.steps": 2000}, callbacks=[stop])
    assert not (run / RESULT_FILE).exists()
    done = max(event.step for event in read_events(run / EVENTS_FILE) if isinstance(event, StepCommitted))
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    steps = done + 1
    resumed = train(run, {"layout.widths": [1], "run.steps": steps}, resume=True)
    assert resumed.losses[:3] != [] and len(resumed.losses) == steps


def test_evaluate_gives_what_evaluations_while_training_gave(tmp_path, monkeypatch):
    use(FORK, monkeypatch)
    settings = {**CONFIG, "run.steps": 4, "run.eval_every": 2, "run.eval_microbatches": 3, "run.checkpoint_every": 2,
                "layout.widths": [1, 2]}  # fmt: skip
    trainer = elaswave.Trainer(
        mlp(), mean_square, Points(), config=settings, eval_dataset=Points(7), run_dir=tmp_path / "run"
    )
    with pytest.raises(UsageError, match="holds no run yet"):
        trainer.evaluate()
    result = trainer.train()
    draw = torch.rand(1)
    assert trainer.evaluate() == {"loss": result.val_losses[4]}
    assert trainer.evaluate(2) == {"loss": result.val_losses[2]}
    assert trainer.evaluate(tmp_path / "run" / "checkpoints" / "step-00000002") == {"loss": result.val_losses[2]}
    assert math.isfinite(result.val_losses[4]) and result.val_losses[2] != result.val_losses[4]
    assert not torch.equal(draw, torch.rand(1)), "the script's generator was reset"
    without = elaswave.Trainer(mlp(), mean_square, Points(), run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="give eval_dataset"):
        without.evaluate()
    with pytest.raises(UsageError, match="nothing was trained yet"):
        elaswave.Trainer(mlp(), mean_square, Points(), eval_dataset=Points()).evaluate()


def test_what_cannot_be_pickled_is_named(tmp_path, monkeypatch):
    use(FRESH, monkeypatch)
    points = Points()
    points.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"the dataset \(or collate\) cannot be sent .*TypeError.*than one thread"):
        train(tmp_path / "run", {"layout.widths": [1]}, dataset=points)


SMALL = """
import torch
SCALE = 1.0

class Small(torch.nn.Module):
    def forward(self, x):
        return x * 1e-3 * 1e-18 * 1e-18 * 1e18 * 1e18 * 1e3 * SCALE  # passes through denormals
"""


@pytest.mark.slow
def test_what_a_script_has_set_reaches_a_fresh_interpreter(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text(SMALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = importlib.import_module("small")
    monkeypatch.setattr(small, "SCALE", 3.0)
    found = {}
    torch.set_flush_denormal(True)
    try:
        for way in (FORK, FRESH):
            use(way, monkeypatch)
            torch.manual_seed(4)
            layers = [torch.nn.Linear(6, 8), small.Small(), torch.nn.Linear(8, 2)]
            settings = {"layout.widths": [1], "run.steps": 1, "batch.num_microbatches": 1}
            found[way] = computation(train(tmp_path / way, settings, model=layers))
    finally:
        torch.set_flush_denormal(False)
        del sys.modules["small"]
    assert found[FORK] == found[FRESH]


class OfParent(torch.nn.Module):
    """Computes something else in another process than the script's."""

    parent = os.getpid()

    def forward(self, x):
        return x if os.getpid() == self.parent else 2 * x


def test_a_loss_that_is_another_one_in_the_script_ends_the_job_before_its_first_step(tmp_path, monkeypatch, capfd):
    use(FORK, monkeypatch)
    with pytest.raises(
        UsageError, match=r"the loss of the first micro-batch is \S+ .* script's process and \S+ .* job's"
    ):
        train(tmp_path / "run", {"layout.widths": [1]}, model=[OfParent(), *mlp()])
    assert not (tmp_path / "run" / EVENTS_FILE).exists(), "no coordinator has begun"
    monkeypatch.setattr("elaswave.launcher.launcher.memory_bytes", lambda: (1, "a file"))
    monkeypatch.setattr("elaswave.launcher.forkserver.server.memory_bytes", lambda: (1, "a file"))
    train(tmp_path / "large", {"layout.widths": [1], "run.steps": 1}, model=[OfParent(), *mlp()])
    assert "was not compared between this process and the job's: the model has" in "".join(capfd.readouterr())


PAIR = """
from typing import NamedTuple
import torch

class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor

class Splits(torch.nn.Linear):
    def forward(self, x):
        return Pair(super().forward(x), x)

class Joins(torch.nn.Module):
    def forward(self, pair):
        assert type(pair) is Pair
        return pair.one + pair.other
"""


@pytest.mark.slow
def test_named_tuples_of_a_script_that_must_not_be_forked_travel(tmp_path, monkeypatch):
    """Its classes reach the workers by value."""
    use(FRESH, monkeypatch)
    script = types.ModuleType("__main__")
    exec(PAIR, script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    torch.manual_seed(2)
    result = train(
        tmp_path / "run",
        {"layout.widths": [1, 1], "layout.layers": [2, 2], "run.steps": 2},
        model=[torch.nn.Linear(6, 8), script.Splits(8, 8), script.Joins(), torch.nn.Linear(8, 2)],
    )
    assert len(result.losses) == 2


@pytest.mark.slow
def test_what_the_fresh_interpreter_cannot_load_is_named(tmp_path, monkeypatch):
    use(FRESH, monkeypatch)
    ghost = types.ModuleType("ghost")
    exec("def loss(outputs, targets):\n    return (outputs - targets).square().mean()\n", ghost.__dict__)
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    with pytest.raises(LaunchError, match="what the script trains cannot be loaded: ModuleNotFoundError: .*ghost"):
        train(tmp_path / "run", {"layout.widths": [1]}, loss=ghost.loss)
    seeded = environment_to_compute() | {"PYTHONHASHSEED": "4294967295"}
    monkeypatch.setattr("elaswave.api.trainer.forkserver_environment", lambda: seeded)
    with pytest.raises(UsageError, match="a new Python has other hashes than this process"):
        train(tmp_path / "third", {"layout.widths": [1]})
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(LaunchError, match="does not know which Python runs it"):
        train(tmp_path / "other", {"layout.widths": [1]})


def test_the_template_forks_the_coordinators_of_a_script(tmp_path, monkeypatch, way):
    """The script's own process forks none, not even after one was lost."""
    run = tmp_path / "run"
    parents: dict[str, set[int]] = {}
    templates: set[int] = set()

    def look(step: int, loss: float, metrics: object) -> None:
        for process in read_processes(run):
            if process.role == "forkserver":
                templates.add(process.pid)
            elif process.role != "launcher":
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                parents.setdefault(f"{process.role} {process.id}", set()).add(int(fields[1]))
        if step == 2:
            coordinator = next(process.pid for process in read_processes(run) if process.role == "coordinator")
            os.kill(coordinator, signal.SIGKILL)

    train(run, {"layout.widths": [1, 1], "run.steps": 20}, callbacks=[look])
    assert len(templates) == 1
    assert {"coordinator 1", "coordinator 2", "worker 0", "worker 1"} <= parents.keys()
    assert set().union(*parents.values()) == templates
