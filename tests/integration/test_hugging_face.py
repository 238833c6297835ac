"""transformers' models: the bits of one worker under any layout and through losses; the losses of a plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hugging_face import CONFIGS, config_of, microbatch_losses, original, save, tokens
from tests.integration.thread_jobs import Killed, Machine, ThreadJob

import elaswave
from elaswave.api.given import OwnModelSpec
from elaswave.protocol.step.engine import Phase
from elaswave.training.dataset import DatasetSamples
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer, learning_rate

NUM_SAMPLES, LENGTH = 24, 12
QUICK = ("gpt2", "llama")
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


BALANCED = dict.fromkeys(("qwen3_moe", "mixtral"), {"output_router_logits": True, "router_aux_loss_coef": 0.5})
"""Their routers' sums travel from stage to stage."""


class Padded:
    """Sequences with a mask, a few of whose first tokens do not count; inputs as transformers' collators name them."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        input_ids = tokens(NUM_SAMPLES, LENGTH)[index]
        mask = (torch.arange(LENGTH) >= index % 3).long()
        return {"input_ids": input_ids, "attention_mask": mask}, input_ids.where(mask.bool(), -100)


class DiesAt:
    """Workers die in their own threads, each at the first action of a phase of a step."""

    def __init__(self, points: dict[int, tuple[int, Phase]]) -> None:
        self.job: ThreadJob
        self.points = points

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        if self.points.get(machine.worker) == (machine.step, phase):
            self.job.kill(machine.worker)
            raise Killed


def run(
    folder: Path,
    source: Any,
    settings: dict[str, Any],
    points: dict[int, tuple[int, Phase]] | None = None,
    dataset: Any = None,
) -> ThreadJob:
    """A job of workers as threads.

    Args:
        folder: of the run.
        source: what `elaswave.hf` gets.
        settings: of the configuration.
        points: worker -> step and phase in which it dies.
        dataset: samples.
    """
    layers = elaswave.hf(source)
    settings = {"model.num_layers": len(layers) - 2, "run.steps": 4, "elastic.block_size": 256, **settings}
    probe = DiesAt(points or {})
    job = ThreadJob(folder, settings, probe=probe, training=training_of(layers, settings, dataset or Padded()))
    probe.job = job
    with pytest.MonkeyPatch.context() as monkeypatch:
        return job.run(monkeypatch)


def training_of(layers: Any, settings: dict[str, Any], dataset: Any) -> Training:
    from tests.integration.jobs import small_config

    config = small_config(settings)
    return Training(
        model=OwnModelSpec(layers, layers.loss).spec,
        dtype=layers.dtype,
        make_optimizer=lambda shapes: ConfiguredOptimizer(config.optimizer, config.run.steps),
        open_samples=lambda folder: DatasetSamples(dataset),
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, with tied weights and dropout."""
    config = config_of(family, tie_word_embeddings=True, **BALANCED.get(family, {}))
    return save(original(config), tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ThreadJob:
    return run(tmp_path_factory.mktemp("alone"), folder, {"layout.widths": [1]})


@pytest.mark.parametrize(
    ("settings", "points"),
    [
        pytest.param({"layout.widths": [2, 2]}, {}, id="2x2"),
        pytest.param({"layout.widths": [1, 2]}, {2: (2, "backward"), 0: (3, "gather")}, id="1+2, two losses"),
    ],
)
def test_layouts_and_losses_do_not_show(
    settings: dict[str, Any], points: dict[int, tuple[int, Phase]], folder: Path, alone: ThreadJob, tmp_path: Path
) -> None:
    """The head, in the last stage, is tied to the token table in the first."""
    job = run(tmp_path, folder, settings, points)
    assert job.computation == alone.computation
    assert len(job.decisions) == len(points)


class Plain:
    """Sequences; the labels are the tokens, not shifted."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (tokens(NUM_SAMPLES, LENGTH)[index],) * 2


@pytest.mark.parametrize("dataset", [Plain(), pytest.param(Padded(), marks=pytest.mark.slow)], ids=["plain", "padded"])
def test_losses_are_those_of_a_plain_loop_over_the_same_samples(dataset: Any, family: str, tmp_path: Path) -> None:
    model, steps = original(config_of(family)), 20
    folder = save(model, tmp_path / "checkpoint")
    job = run(tmp_path / "run", folder, {"layout.widths": [1], "run.steps": steps}, dataset=dataset)
    options, source = job.config.optimizer, DatasetSamples(dataset)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps)
    sampler, losses = job.blueprint.sampler(source), []
    for step in range(1, steps + 1):
        microbatches = range(job.config.batch.num_microbatches)
        batches = [source.batch(sampler.draws(step, microbatch), "train") for microbatch in microbatches]
        named = [(inputs if isinstance(inputs, dict) else {"input_ids": inputs}, labels) for inputs, labels in batches]
        counts = torch.tensor([float((labels[:, 1:] != -100).sum()) for _, labels in batches])
        loss = (microbatch_losses(model, named) * counts).sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step, steps)
        optimizer.step()
        losses.append(loss.item())
    assert job.losses == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0] - 1e-3
