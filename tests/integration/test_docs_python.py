"""The pieces of Python on the pages about own models train as they stand there; the script has a test of its own."""

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.scripts import ROOT
from torch import Tensor, nn

import elaswave
from elaswave.job.script import JobOptions, ScriptSession, active
from elaswave.observability.run_folder import saved_config

SHORT = ("run.steps=3", "batch.num_microbatches=4", "batch.microbatch_size=4", "layout.widths=[1,1]")
PAGES = [page for page in sorted((ROOT / "docs" / "own-models").glob("*.md")) if page.stem != "huggingface"]
"""That page's are tried where transformers is loaded anyway, in ``test_fine_tuning.py``."""
PIECES = [piece for page in PAGES for piece in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)]
MASKED, NOISY, FENCED, COUNTED_LOSS, TRAINER, GROUPS, CUT, GRAPH, TIED = PIECES


def names_of(piece: str, **given: Any) -> dict[str, Any]:
    """What a piece defines, with the imports of the page."""
    names = {"elaswave": elaswave, "nn": nn, "torch": torch, "__name__": "page", **given}
    exec(compile(piece, "a page", "exec"), names)
    return names


def train(trainer: elaswave.Trainer, folder: Path, *overrides: str) -> elaswave.Result:
    with active(ScriptSession(JobOptions(run_dir=folder / "run"), None, (*SHORT, *overrides))):
        return trainer.train()


class Start(nn.Module):
    """Words as vectors, twice, as the page's layer takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 64)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.table(batch["words"])
        return hidden, hidden


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(64, 20)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.map(value[0] + value[1])


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 64))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()


def sentence(i: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    words = (torch.arange(6) * (i + 1)) % 20
    mask = torch.arange(6) < 2 + i % 5
    return {"words": words, "mask": mask.float()}, {"labels": torch.where(mask, words.roll(-1), -100)}


@pytest.mark.slow
def test_masks_and_a_loss_with_counts(tmp_path: Path) -> None:
    masked, counted = names_of(MASKED), names_of(COUNTED_LOSS)
    torch.manual_seed(1)
    trainer = elaswave.Trainer(
        [Start(), masked["Masked"](), End()], counted["loss"], [sentence(i) for i in range(40)],
        metrics={"accuracy": counted["accuracy"]},
    )  # fmt: skip
    assert len(train(trainer, tmp_path).losses) == 3


def test_fences_of_a_script(tmp_path: Path) -> None:
    with active(ScriptSession(JobOptions(run_dir=tmp_path / "run"), None, ("run.steps=2",))):
        names_of(FENCED)["main"]()
    assert saved_config(tmp_path / "run").model.fences == ("1:int8",)


def test_optimizer_and_scheduler(tmp_path: Path) -> None:
    samples = [(torch.tensor([i / 40]), torch.tensor([i / 20])) for i in range(40)]
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer = names_of(TRAINER, model=model, loss=nn.functional.mse_loss, dataset=samples)["trainer"]
    assert len(train(trainer, tmp_path).losses) == 3


@pytest.mark.slow
def test_groups_and_a_dataset_with_noise(tmp_path: Path) -> None:
    layers = {"enter": nn.Linear(1, 8), "norm": nn.LayerNorm(8), "leave": nn.Linear(8, 1)}
    trainer = elaswave.Trainer(
        nn.Sequential(OrderedDict(layers)), nn.functional.mse_loss, names_of(NOISY)["Noisy"](),
        optimizer=names_of(GROUPS)["make"],
    )  # fmt: skip
    assert len(train(trainer, tmp_path).losses) == 3


@pytest.mark.slow
def test_ties_of_builders(tmp_path: Path) -> None:
    head = eval(TIED, {"elaswave": elaswave, "Head": Head})
    samples = [(sentence(i)[0]["words"], sentence(i + 1)[0]["words"]) for i in range(40)]
    trainer = elaswave.Trainer(
        [elaswave.Layer("embedding", lambda: nn.Embedding(20, 64)), head],
        lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()),
        samples,
    )
    weights = train(trainer, tmp_path).state_dict()
    assert weights["head.weight"].equal(weights["embedding.weight"])


@pytest.mark.slow
def test_a_network_is_cut_and_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = names_of(CUT)["main"]
    with active(ScriptSession(JobOptions(run_dir=tmp_path / "run"), None, ("batch.num_microbatches=4",))):
        main()
    assert "--- part 2 ---" in capsys.readouterr().out
    slowest = names_of(GRAPH)["slowest"]
    assert slowest.operator in capsys.readouterr().out
