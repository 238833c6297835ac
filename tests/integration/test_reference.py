"""The engine against plain single-process PyTorch, and its gradient sums against exact ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from tests.integration.jobs import Job, run_job, small_config
from tests.reference import Recipe, Reference, microbatch_gradients, reference_run

from elaswave.blocks.placement import ReplicaRole
from elaswave.engine.blueprint import Blueprint
from elaswave.models.layers import ModelSpec, build_layer
from elaswave.state.flat import BlockStore

RECIPE: dict[str, Any] = {
    "layout.widths": [2, 2],
    "run.steps": 20,
    "optimizer.lr": 1e-3,
    "optimizer.grad_clip": 1.0,
    "optimizer.warmup_steps": 10,
}


def reference_of(job: Job, settings: dict[str, Any]) -> Reference:
    config = small_config(settings)
    blueprint = Blueprint(config)
    source = blueprint.open_samples(job.run_dir / "data")
    return reference_run(blueprint.model, source, Recipe.of(config), config.run.steps)


def full_model(settings: dict[str, Any]) -> dict[str, Any]:
    """The same with the sizes of the default model."""
    return settings | {
        "model.num_layers": 4,
        "model.hidden_size": 128,
        "model.num_heads": 4,
        "model.context_length": 64,
        "batch.num_microbatches": 8,
        "batch.microbatch_size": 8,
        "elastic.block_size": 16384,
    }


def norms_of(job: Job) -> list[float]:
    """The gradient norm of every step, from the log."""
    lines = (job.run_dir / "events.jsonl").read_text().splitlines()
    return [event["grad_norm"] for event in map(msgspec.json.decode, lines) if "grad_norm" in event]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"model.family": "llama", "model.num_heads": 4, "model.num_kv_heads": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.grad_clip": 0.5}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"optimizer.grad_clip": 0.0, "optimizer.schedule": "constant", "model.dropout": 0.0},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gpt", "llama", "sgd", "no clipping"],
)
def test_losses_and_norms_are_those_of_plain_pytorch(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = RECIPE | settings
    job = run_job(tmp_path, settings)
    reference = reference_of(job, settings)
    assert len(reference.losses) == 20
    assert job.result.losses == pytest.approx(reference.losses, rel=1e-5, abs=0)
    assert norms_of(job) == pytest.approx(reference.grad_norms, rel=1e-4, abs=0)
    assert job.result.losses[-1] < job.result.losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_losses_of_the_default_model_are_those_of_plain_pytorch(family: str, tmp_path: Path) -> None:
    settings = full_model(RECIPE | {"model.family": family})
    job = run_job(tmp_path, settings)
    assert job.result.losses == pytest.approx(reference_of(job, settings).losses, rel=1e-5, abs=0)


class GradientRecorder:
    """Writes every micro-batch's gradients as they are added, and every owner's mean gradients, to files.

    Args:
        folder: for the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if (machine.step, machine.attempt, phase, index) == (1, 1, "forward", 0):
            for layer, accumulator in machine.engine.compute.accumulators.items():
                self.wrap(machine, layer, accumulator)
        if (phase, index) == ("apply", 0):
            owned = {held.block.id: held.gradient for held in BlockStore(machine.copies).with_role(ReplicaRole.OWNER)}
            torch.save(owned, self.folder / f"mean-{machine.step}-{machine.worker}.pt")

    def wrap(self, machine: Any, layer: int, accumulator: Any) -> None:
        add = accumulator.add

        def recording(gradients: Sequence[torch.Tensor]) -> bool:
            self.count += 1
            name = f"part-{machine.step}-{machine.attempt}-{layer}-{machine.worker}-{self.count}.pt"
            torch.save([gradient.clone() for gradient in gradients], self.folder / name)
            return bool(add(gradients))

        accumulator.add = recording


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_summed_gradient_is_the_exact_sum(dtype: str, tmp_path: Path) -> None:
    settings = RECIPE | {"run.steps": 3, "model.dtype": dtype, "batch.num_microbatches": 11}
    files = tmp_path / "gradients"
    files.mkdir()
    job = run_job(tmp_path / "run", settings, probe=GradientRecorder(files))
    blueprint = Blueprint(small_config(settings))
    assert job.result.steps == 3
    for step in (1, 2, 3):
        means: dict[int, torch.Tensor] = {}
        for path in files.glob(f"mean-{step}-*.pt"):
            means |= torch.load(path)
        assert sorted(means) == [block.id for block in blueprint.blocks]
        attempt = 2 if step == 1 else 1  # the first attempt of all only measures
        for shape in blueprint.shapes:
            parts = [torch.load(path) for path in sorted(files.glob(f"part-{step}-{attempt}-{shape.layer}-*.pt"))]
            assert len(parts) == 11
            ours = torch.zeros(shape.size)
            for block in blueprint.blocks:
                if block.layer == shape.layer:
                    ours[block.start : block.stop] = means[block.id]
            for slot, gradients in zip(shape.tensors, zip(*parts, strict=True), strict=True):
                # Eleven float32 numbers of like size: their sum in float64 is exact to some 2**-50.
                exact = torch.stack([gradient.reshape(-1).double() for gradient in gradients]).sum(0) / 11
                mean = ours[slot.offset : slot.stop]
                error = (mean.double() - exact).abs().max()
                assert error <= 1e-7 * exact.abs().max(), slot.name
                plain = torch.zeros(slot.numel)
                for gradient in gradients:
                    plain += gradient.reshape(-1).float() / 11
                assert error <= (plain.double() - exact).abs().max(), slot.name


def test_the_gradient_is_no_further_from_float64_than_plain_pytorchs(tmp_path: Path) -> None:
    settings = RECIPE | {"run.steps": 1, "batch.num_microbatches": 24}
    files = tmp_path / "gradients"
    files.mkdir()
    job = run_job(tmp_path / "run", settings, probe=GradientRecorder(files))
    config = small_config(settings)
    blueprint, recipe = Blueprint(config), Recipe.of(config)
    source = blueprint.open_samples(job.run_dir / "data")
    layers = [build_layer(spec, recipe.seed, index) for index, spec in enumerate(blueprint.model.layers)]
    plain = [torch.zeros(slot.shape) for slot in blueprint.tensors]
    for gradients in microbatch_gradients(blueprint.model, layers, source, recipe, step=1):
        for total, gradient in zip(plain, gradients, strict=True):
            total += gradient / recipe.num_microbatches
    layers = [layer.double() for layer in layers]
    model = ModelSpec(
        blueprint.model.layers, lambda output, targets: F.cross_entropy(output.flatten(0, -2), targets.flatten())
    )
    parts = microbatch_gradients(model, layers, source, recipe, step=1)
    exact = [torch.stack(gradients).mean(0) for gradients in zip(*parts, strict=True)]
    assert all(gradient.dtype == torch.float64 for gradient in exact)
    means: dict[int, torch.Tensor] = {}
    for path in files.glob("mean-1-*.pt"):
        means |= torch.load(path)
    flat = [
        torch.cat([means[block.id] for block in blueprint.blocks if block.layer == shape.layer])
        for shape in blueprint.shapes
    ]
    ours = [flat[slot.layer][slot.offset : slot.stop].view(slot.shape) for slot in blueprint.tensors]

    def error(gradients: Sequence[torch.Tensor]) -> float:
        return sum(float((g.double() - e).square().sum()) for g, e in zip(gradients, exact, strict=True)) ** 0.5

    scale = sum(float(gradient.square().sum()) for gradient in exact) ** 0.5
    assert error(ours) <= error(plain) < 1e-5 * scale
