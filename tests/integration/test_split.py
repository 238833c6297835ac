"""Networks that `elaswave.split` has cut, in whole jobs: equal bits in any layout, through losses, after a resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.integration.crew import locked
from tests.integration.crew import train as crew_train
from tests.integration.own import computation, train
from tests.networks import KINDS, LENGTH, VOCABULARY, Pictures, Texts, pictures, seeded, tokens
from torch import Tensor, nn

import elaswave
from elaswave.api.given import OwnModelSpec
from elaswave.config.schema import OptimizerConfig
from elaswave.planning.programs.layout import make_layout
from elaswave.training.dataset import DatasetSamples
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer

ROWS = 2
LAYOUTS = {
    "1x1": make_layout(widths=(1,), layers_per_stage=(4,), num_microbatches=5),
    "2x2": make_layout(widths=(2, 2), layers_per_stage=(2, 2), num_microbatches=5),
    "uneven, between tied uses": make_layout(widths=(1, 3), layers_per_stage=(3, 1), num_microbatches=5),
}


class Drawn:
    """Pictures and their kinds."""

    def __len__(self) -> int:
        return 31

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, 5, 5, generator=generator), torch.tensor(index % KINDS)


class Numbers:
    """Rows of numbers, and their sums."""

    def __len__(self) -> int:
        return 31

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        found = torch.linspace(-1, 1, 4) * (index % 7) / 3
        return found, found.sin().sum(-1, keepdim=True)


class Routed(nn.Module):
    """Routers with auxiliary losses before experts that are used again and again, with dropout."""

    def __init__(self, dropout: float = 0.1, rounds: int = 3) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(4, 2) for _ in range(rounds))
        self.experts, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 1)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for router in self.routers:
            shares = router(x).softmax(-1)
            elaswave.aux_loss(2 * shares.mean(0).square().sum())
            mixed = sum(shares[:, at : at + 1] * expert(x).tanh() for at, expert in enumerate(self.experts))
            x = x + F.dropout(mixed, self.dropout, self.training)
        result: Tensor = self.last(x)
        return result


class Written:
    """Texts of several lengths, and their next tokens."""

    def __len__(self) -> int:
        return 31

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        found = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": found[:-1], "mask": torch.arange(LENGTH) < 2 + index % 5}, found[1:]


def next_token(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), targets.flatten())


def cut(name: str, cuts: Any = None) -> Any:
    """Four parts of a network, its loss and its data."""
    if name == "texts":
        return elaswave.split(seeded(Texts, dropout=0.1), tokens(ROWS), 4, cuts=cuts), next_token, Written()
    return elaswave.split(seeded(Pictures, dropout=0.1), pictures(ROWS), 4, cuts=cuts), F.cross_entropy, Drawn()


def training_of(layers: Any, loss: Any, dataset: Any) -> Training:
    samples = DatasetSamples(dataset, torch.utils.data.default_collate, dataset).seeded(0)
    samples.batch = locked(samples.batch)  # it seeds the generator that layers of other threads draw from
    return Training(
        model=OwnModelSpec(layers, loss).spec,
        dtype=torch.float32,
        make_optimizer=lambda shapes: ConfiguredOptimizer(OptimizerConfig(lr=0.01), 4),
        open_samples=lambda folder: samples,
    )


@pytest.mark.parametrize("name", ["pictures", "texts"])
def test_the_layout_does_not_show(name: str, tmp_path: Path) -> None:
    training = training_of(*cut(name))
    settings = {
        "model.num_layers": 2,
        "batch.microbatch_size": ROWS,
        "elastic.block_size": 64,
        "optimizer.grad_clip": 0.5,
    }
    found = {each: crew_train(layout, tmp_path, settings, steps=3, model=training) for each, layout in LAYOUTS.items()}
    alone = found["1x1"]
    for each, training_found in found.items():
        assert (training_found.losses, training_found.digests) == (alone.losses, alone.digests), each


def test_neither_cuts_nor_layout_show_where_parameters_are_used_again(tmp_path: Path) -> None:
    layers = elaswave.split(seeded(Routed), torch.randn(ROWS, 4), 4)
    costs = layers.network.costs.cross_s
    places = [place for place in range(1, len(costs) - 1) if costs[place] < float("inf")]
    settings = {"model.num_layers": 2, "batch.microbatch_size": ROWS, "elastic.block_size": 64}
    found = [
        crew_train(LAYOUTS[layout], tmp_path, settings, model=training_of(layers.cut_at(cuts), F.mse_loss, Numbers()))
        for layout, cuts in (
            ("1x1", layers.cuts), ("1x1", places[1:4]), ("2x2", places[-9::4]), ("2x2", places[3:40:14]),
        )
    ]  # fmt: skip
    for each in found[1:]:
        assert (each.losses, each.digests) == (found[0].losses, found[0].digests)


def test_auxiliary_losses_of_a_network_train_it_as_those_of_a_layer(tmp_path: Path) -> None:
    settings = {"model.num_layers": 2, "batch.microbatch_size": ROWS}
    alone = make_layout(widths=(1,), layers_per_stage=(1,), num_microbatches=5)
    network = seeded(Routed, dropout=0.0, rounds=1)
    cut_network = elaswave.split(network, torch.randn(ROWS, 4), 4)
    found, as_layer = (
        crew_train(layout, tmp_path, settings, model=training_of(model, F.mse_loss, Numbers()))
        for layout, model in ((LAYOUTS["2x2"], cut_network), (alone, [network]))
    )
    assert found.losses == as_layer.losses


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[..., elaswave.Result], Any, elaswave.Result]:
    """How texts are trained, their network in layers, and a run of it without faults."""
    first, loss, dataset = cut("texts")

    def run(folder: Path, faults: tuple[str, ...] = (), layers: Any = first, **options: Any) -> elaswave.Result:
        changes = {"batch.microbatch_size": ROWS, "layout.widths": [1, 2], **options.pop("changes", {})}
        return train(folder, changes, model=layers, loss=loss, dataset=dataset, faults=faults, **options)

    return run, first, run(tmp_path_factory.mktemp("calm"))


@pytest.mark.slow
def test_a_run_survives_two_kills(tmp_path: Path, texts: Any) -> None:
    run, _, calm = texts
    struck = run(tmp_path, ("kill:1@2:backward", "kill:2@5:any"))
    assert computation(struck) == computation(calm)
    assert len(struck.recoveries) == 2


@pytest.mark.slow
def test_a_run_keeps_its_cuts_when_it_resumes(tmp_path: Path, texts: Any) -> None:
    run, first, calm = texts
    run(tmp_path, changes={"run.steps": 4})
    elsewhere = first.cut_at([place + 1 for place in first.cuts])
    resumed = run(tmp_path, layers=elsewhere, resume=True)
    assert computation(resumed) == computation(calm), "the run's cuts hold, not those that were found anew"

    model = seeded(Texts)
    resumed.load_into(model)
    state = resumed.state_dict()
    assert model.head.weight is model.table.weight and torch.equal(model.table.weight, state["table.weight"])
    assert not torch.equal(state["table.weight"], seeded(Texts).table.weight)


@pytest.mark.slow
def test_the_cuts_do_not_show_in_the_weights(tmp_path: Path) -> None:
    states, digests = [], set()
    first, loss, dataset = cut("pictures", [6, 12, 18])
    for index, places in enumerate((first.cuts, [1, 11, 19])):
        layers = first.cut_at(places)
        changes = {"batch.microbatch_size": ROWS, "run.steps": 3, "layout.widths": [1]}
        result = train(tmp_path / str(index), changes, model=layers, loss=loss, dataset=dataset)
        states.append(result.state_dict())
        digests.add(result.state_digest)
    assert len(digests) == 1
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(values, states[1][name]) for name, values in states[0].items())
