"""Optimizers of torch.optim, their groups and schedulers, in whole jobs: the same bits under every layout and loss."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.jobs import nothing_left, small_config
from tests.integration.own import CONFIG, Points, mean_square, mlp
from tests.integration.test_instants_of_loss import DiesAt, Probe
from tests.integration.thread_jobs import Machine, ThreadJob
from torch import nn
from torch.optim import lr_scheduler

import elaswave
from elaswave.cli.main import main
from elaswave.data.samples import Sampler
from elaswave.errors import CheckpointError, ConfigError, UsageError
from elaswave.job.script import JobOptions, ScriptSession, active
from elaswave.protocol.step.engine import Phase
from elaswave.training.definition import Training, builtin_training
from elaswave.training.own_optimizer import OwnOptimizer
from elaswave.training.parameters import Parameters

STEPS = 8
SETTINGS: dict[str, Any] = {"run.steps": STEPS, "elastic.num_followers": 1}


def two_groups(parameters: Parameters) -> torch.optim.Optimizer:
    without = parameters.named("*.bias", "*norm*")
    rest = parameters.except_named("*.bias", "*norm*")
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": without, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0, fused=True)


def momentum_in_one(parameters: Parameters) -> torch.optim.Optimizer:
    groups = [
        {"params": parameters.named("*.weight"), "momentum": 0.9},
        {"params": parameters.except_named("*.weight")},
    ]
    return torch.optim.SGD(groups, lr=1e-2)


OPTIMIZERS: dict[str, OwnOptimizer] = {
    "two groups": OwnOptimizer(two_groups),
    "RAdam": OwnOptimizer(lambda p: torch.optim.RAdam(p, lr=1e-3)),
    "one cycle": OwnOptimizer(
        lambda p: torch.optim.Adam(p, lr=1e-3), lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=STEPS)
    ),
    "plateau": OwnOptimizer(
        momentum_in_one, lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1e-3)
    ),
}


def training_with(optimizer: OwnOptimizer, settings: dict[str, Any]) -> Training:
    return dataclasses.replace(builtin_training(small_config(settings)), make_optimizer=optimizer)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ThreadJob]:
    """A job of one worker with each optimizer."""
    jobs = {}
    for name, optimizer in OPTIMIZERS.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            settings = SETTINGS | {"layout.widths": "[1]"}
            job = ThreadJob(tmp_path_factory.mktemp("alone"), settings, training=training_with(optimizer, settings))
            jobs[name] = job.run(monkeypatch)
    return jobs


class TwoDie(Probe):
    """Worker 3 dies in APPLY of step 3, when some of its blocks are updated and others are not; worker 1 in the forward
    of step 6. The others are in APPLY of step 3 as well, or learn from the decision that it is committed."""

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        place = (machine.worker, machine.step, phase)
        if place == (3, 3, "apply") and index == 2 or place == (1, 6, "forward"):
            self.die(machine)


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, widths: str, probe: Probe | None) -> ThreadJob:
    settings = SETTINGS | {"layout.widths": widths}
    job = ThreadJob(folder, settings, probe=probe, training=training_with(OPTIMIZERS[name], settings))
    if probe is not None:
        probe.job = job
    return job.run(monkeypatch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "RAdam" else ()) for name in OPTIMIZERS]
)
def test_two_losses_change_no_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[str, ThreadJob]
) -> None:
    job = train(tmp_path, monkeypatch, name, "[2,2]", TwoDie())
    assert len(job.decisions) == 2
    assert job.computation == alone[name].computation
    assert rates(job) == rates(alone[name])
    assert {finished.standing.optimizer for finished in job.finished.values()} == {
        finished.standing.optimizer for finished in alone[name].finished.values()
    }


@pytest.mark.parametrize("widths", ["[1,3]", pytest.param("[1,2,1]", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["plateau", *(pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS)])
def test_layouts_change_no_bit(
    name: str, widths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[str, ThreadJob]
) -> None:
    job = train(tmp_path, monkeypatch, name, widths, None)
    assert job.computation == alone[name].computation
    followed: dict[str, int] = {}
    for finished in job.finished.values():
        for tensor, part in finished.follower_digests.items():
            followed[tensor] = (followed.get(tensor, 0) + part) % 2**64
    assert followed == job.digests


def test_a_scheduler_steps_once_where_a_step_is_learned_from_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[str, ThreadJob]
) -> None:
    job = train(tmp_path, monkeypatch, "one cycle", "[2,2]", DiesAt(3, 4, "vote"))
    assert job.computation == alone["one cycle"].computation
    assert rates(job) == rates(alone["one cycle"])


def test_a_job_that_goes_back_to_the_beginning_begins_its_schedule_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[str, ThreadJob]
) -> None:
    probe = DiesAt(1, 4, "forward")
    settings = SETTINGS | {"layout.widths": "[2,2]"}
    training = training_with(OPTIMIZERS["plateau"], settings)
    probe.job = ThreadJob(tmp_path, settings, probe=probe, training=training, restart_in=[2])
    job = probe.job.run(monkeypatch)
    assert [decision.rollback for decision in job.decisions] == [0]
    assert job.computation == alone["plateau"].computation
    assert rates(job) == rates(alone["plateau"])


@pytest.mark.parametrize("name", ["one cycle", "plateau"])
def test_the_rates_are_those_of_the_scheduler(name: str, alone: dict[str, ThreadJob]) -> None:
    own, parameter = OPTIMIZERS[name], torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=1e-3 if name == "one cycle" else 1e-2)
    scheduler = own.make_scheduler(optimizer)
    expected = []
    for loss in alone[name].losses:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*([loss] if name == "plateau" else []))
    assert rates(alone[name]) == expected
    assert 1 < len(set(expected)), "the rate stays: the test shows nothing"
    if name == "plateau":
        assert len(set(expected)) < STEPS - 1, "no later loss was better than the one before: the test shows nothing"


def test_states_have_the_names_and_presence_of_torchs(alone: dict[str, ThreadJob]) -> None:
    names = alone["plateau"].digests.keys()
    weights = {name.removeprefix("master.") for name in names if name.startswith("master.")}
    momenta = {name.removeprefix("momentum_buffer.") for name in names if name.startswith("momentum_buffer.")}
    assert momenta == {name for name in weights if name.endswith(".weight")} != weights
    counted = {name.removeprefix("step.") for name in alone["RAdam"].digests if name.startswith("step.")}
    assert counted == weights


def rates(job: ThreadJob) -> list[float]:
    newest = {report.step: report.learning_rate for report in job.reports}
    return [newest[step] for step in sorted(newest)]


# ------------------------------------------------------------------------------------- real processes, from the Trainer

TWO_GROUPS_ONE_CYCLE: dict[str, Any] = {
    "optimizer": lambda p: torch.optim.AdamW(
        [{"params": p.named("*.bias"), "weight_decay": 0.0}, {"params": p.except_named("*.bias")}], lr=1e-2
    ),
    "lr_scheduler": lambda o: lr_scheduler.OneCycleLR(o, 1e-1, total_steps=8),
    "grad_clip": 0.5,
}
PLATEAU: dict[str, Any] = {
    "optimizer": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "lr_scheduler": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


def train_script(run_dir: Path, changes: dict[str, Any], faults: tuple[str, ...] = (), **options: Any) -> Any:
    config = {key: value for key, value in CONFIG.items() if not key.startswith("optimizer.")} | changes
    model = options.pop("model", None) or mlp()
    trainer = elaswave.Trainer(model, mean_square, Points(), config=config, run_dir=run_dir, **options)
    with nothing_left(), active(ScriptSession(JobOptions(fault_specs=faults), None, ())):
        return trainer.train()


@pytest.fixture(scope="module")
def script_alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    changes = {"layout.widths": [1], "optimizer.ema_decay": 0.5}
    return train_script(tmp_path_factory.mktemp("alone") / "run", changes, **TWO_GROUPS_ONE_CYCLE)


def test_a_script_with_groups_a_scheduler_and_an_average_through_losses(script_alone: Any, tmp_path: Path) -> None:
    changes = {"layout.widths": [2, 2], "optimizer.ema_decay": 0.5}
    faults = ("kill:2@3:apply+1", "kill:1@6:vote")
    result = train_script(tmp_path / "run", changes, faults, **TWO_GROUPS_ONE_CYCLE)
    assert (result.losses, result.state_digest) == (script_alone.losses, script_alone.state_digest)
    assert len(result.recoveries) == 2
    weights, average = result.state_dict(), result.state_dict(ema=True)
    assert weights.keys() == average.keys()
    for name, value in script_alone.state_dict(ema=True).items():
        assert value.equal(average[name]) and not value.equal(weights[name])
    model = mlp()
    result.load_into(model, ema=True)
    assert all(value.equal(average[name]) for name, value in model.state_dict().items())
    for option, expected in (((), weights), (("--ema",), average)):
        assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out.safetensors"), *option]) == 0
        exported = load_file(tmp_path / "out.safetensors")
        assert exported.keys() == expected.keys()
        assert all(value.equal(expected[name]) for name, value in exported.items())


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    groups = [{"params": parameters.named("*.bias"), "lr": 1e-2}, {"params": parameters.except_named("*.bias")}]
    return torch.optim.SGD(groups, lr=1e-1, momentum=0.9, weight_decay=0.01)


def cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 1e-1, total_steps=8)


def test_it_is_what_a_plain_loop_computes(tmp_path: Path) -> None:
    torch.manual_seed(4)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)]
    plain, points = copy.deepcopy(nn.Sequential(*layers)), Points()
    options = {"optimizer": sgd, "lr_scheduler": cycle, "grad_clip": 0.5}
    result = train_script(tmp_path / "run", {"layout.widths": [1, 1]}, model=layers, **options)
    sampler = Sampler(1, len(points), CONFIG["batch.microbatch_size"], CONFIG["batch.num_microbatches"])
    optimizer = sgd(Parameters(plain.named_parameters()))  # type: ignore[arg-type]
    scheduler = cycle(optimizer)
    for step in range(1, CONFIG["run.steps"] + 1):
        optimizer.zero_grad()
        for microbatch in range(CONFIG["batch.num_microbatches"]):
            batch = [points[index] for index in sampler.microbatch(step, microbatch)]
            inputs, targets = torch.utils.data.default_collate(batch)
            (mean_square(plain(inputs), targets) / CONFIG["batch.num_microbatches"]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(result.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    with pytest.raises(CheckpointError, match=r"no moving average of the weights; a run keeps one if optimizer\.ema_d"):
        result.state_dict(ema=True)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(TWO_GROUPS_ONE_CYCLE, id="one cycle", marks=pytest.mark.slow),
        pytest.param(PLATEAU, id="plateau", marks=pytest.mark.slow),
    ],
)
def test_a_resume_goes_on_with_the_scheduler_and_the_average_and_says_what_it_does_not_take(
    options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ema = {"optimizer.ema_decay": 0.9}
    whole = train_script(tmp_path / "whole", ema | {"layout.widths": [1, 2]}, **options)
    half = ema | {"layout.widths": [1], "run.steps": 4}
    train_script(tmp_path / "half", half, **options)
    assert "than the checkpoint" not in "".join(capfd.readouterr())
    options = (
        options | {"optimizer": lambda p: torch.optim.RAdam(p, lr=0.5)}
        if options is PLATEAU
        else options | {"lr_scheduler": lambda o: lr_scheduler.OneCycleLR(o, 1e-1, total_steps=9)}
    )
    resumed = train_script(tmp_path / "half", ema | {"layout.widths": [2, 1]}, resume=True, **options)
    said = " ".join("".join(capfd.readouterr()).split())
    changed = "groups[0].lr is 0.01 there and 0.5 in" if options is PLATEAU else "total_steps is 8 there and 9 in the"
    assert changed in said and "other code" not in said
    assert (resumed.losses, resumed.state_digest) == (whole.losses, whole.state_digest)


def test_an_optimizer_that_is_not_elementwise_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torch\.optim\.Adafactor cannot be used: \d\.\w+ \["):
        train_script(tmp_path / "run", {}, optimizer=torch.optim.Adafactor)


def test_keys_of_the_optimizer_are_refused_beside_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr: not for a script's own optimizer; leave it out"):
        train_script(tmp_path / "run", {"optimizer.lr": 0.1}, optimizer=torch.optim.Adam)
