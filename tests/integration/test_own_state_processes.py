"""Tied, frozen and written state through the Trainer, in real processes: kills, a resume, and the weights back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.own import computation, train
from tests.own_models import KINDS, WIDTH, Head, Mix, Normed, mean_square
from torch import nn

import elaswave

STEPS = 6


class Points:
    """Points in space, and a number for each."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index + 1))
        return point, point.sum(0, keepdim=True)


def run(folder: Path, model: Any, widths: list[int], **options: Any) -> elaswave.Result:
    config = {"run.steps": STEPS, "layout.widths": widths, "run.checkpoint_every": 3} | options.pop("config", {})
    return train(folder, config, model=model, loss=mean_square, dataset=Points(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_kills_a_resume_elsewhere_and_the_weights_back(kind: str, tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", KINDS[kind](), [1])
    unlucky = run(tmp_path / "unlucky", KINDS[kind](), [2, 2], faults=("kill:0@2:reduce", "kill:random@4:any"))
    assert len(unlucky.recoveries) == 2
    assert computation(unlucky) == computation(alone)
    # The whole first stage goes, under a layout with a cut between all uses.
    cut = run(tmp_path / "cut", KINDS[kind](), [1, 1, 1], faults=("kill:0@3:gather",))
    assert computation(cut) == computation(alone)
    run(tmp_path / "half", KINDS[kind](), [1, 2], config={"run.steps": 3})
    resumed = run(tmp_path / "half", KINDS[kind](), [2, 1], resume=True)
    assert computation(resumed) == computation(alone)
    modules = [layer.build() for layer in KINDS[kind]()]
    state = {
        f"{layer.name}.{name}": value
        for layer, module in zip(KINDS[kind](), modules, strict=True)
        for name, value in module.state_dict().items()
    }
    weights = resumed.state_dict()
    assert weights.keys() == state.keys()
    assert {name: value.dtype for name, value in weights.items()} == {
        name: value.dtype for name, value in state.items()
    }
    for layer in KINDS[kind]():
        for name, target in layer.ties.items():
            assert weights[f"{layer.name}.{name}"].equal(weights[target])


@pytest.mark.slow
def test_instances_that_share_a_parameter_and_a_frozen_base(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(3)
        first, frozen, last = Mix(), Mix().requires_grad_(False), Mix(transposed=True)
        last.weight = first.weight
        return nn.Sequential(first, frozen, Normed(), last, Head())

    alone = run(tmp_path / "alone", model(), [1])
    script = model()
    before = {name: value.clone() for name, value in script.state_dict().items()}
    unlucky = run(tmp_path / "unlucky", script, [2, 2], faults=("kill:3@2:backward", "kill:0@5:apply"))
    assert computation(unlucky) == computation(alone)
    assert all(value.equal(before[name]) for name, value in script.state_dict().items()), "the script's own stays"
    with torch.no_grad():
        script[1].weight.add_(1.0)  # on a resume the checkpoint's counts
    resumed = run(tmp_path / "unlucky", script, [1, 1], resume=True, config={"run.steps": STEPS + 2})
    assert computation(resumed) == computation(run(tmp_path / "longer", model(), [1], config={"run.steps": STEPS + 2}))
    loaded = model()
    resumed.load_into(loaded)
    assert loaded[0].weight is loaded[3].weight
    assert loaded[1].weight.equal(before["1.weight"])
    assert loaded[2].norm.num_batches_tracked.item() == STEPS + 2
    assert not loaded[2].norm.running_mean.equal(before["2.norm.running_mean"])
