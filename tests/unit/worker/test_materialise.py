"""What a worker makes before its first step: from real builds, layer by layer, and with the memory of its own share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.integration.jobs import small_config
from tests.own_models import WIDTH, Head, Mix, settings_of, training_of
from torch import nn

from elaswave.models.layers import Layer
from elaswave.planning.layout import make_layout
from elaswave.state.placement import place_blocks
from elaswave.worker.blueprint import Blueprint
from elaswave.worker.materialise import materialise

FREQUENCIES = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)


class Rotary(nn.Module):
    """Turns pairs of elements by angles that a buffer holds, which no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None] * self.inv_freq
        even, odd = self.map(x).view(len(x), -1, 2).unbind(-1)
        return torch.stack(
            [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
        ).view(len(x), -1)


def blueprint_of(*layers: nn.Module | Layer) -> Blueprint:
    training = training_of(*layers)
    return Blueprint(small_config(settings_of(training)), training)


def test_buffers_that_no_checkpoint_has_come_from_a_real_build() -> None:
    """Zeros for them would silently take positions out of the model."""
    blueprint = blueprint_of(Layer("a", Mix), Layer("rotary", Rotary), Layer("head", Head))
    layout = make_layout(widths=(1, 1), layers_per_stage=(1, 2), num_microbatches=5, shared=blueprint.state.shared)
    placement = place_blocks(layout, blueprint.blocks, num_followers=1)
    here, _, _ = materialise(blueprint, 1, layout, placement, None)
    made = here[1].module  # type: ignore[union-attr]
    assert made.inv_freq.equal(FREQUENCIES)
    taken_over = blueprint.flat_layer(1, {})
    assert taken_over.module.inv_freq.equal(FREQUENCIES)
    taken_over.flat.copy_(here[1].flat)
    x = torch.randn(6, WIDTH)
    assert taken_over.module(x).equal(made(x))
    assert not made(x.flip(0)).flip(0).allclose(made(x)), "positions count"


def test_an_instance_stays_as_it_was_and_begins_the_run() -> None:
    module = Mix()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    blueprint = blueprint_of(module, Mix(), Head())
    layout = make_layout(widths=(1, 1), layers_per_stage=(1, 2), num_microbatches=5)
    placement = place_blocks(layout, blueprint.blocks, num_followers=1)
    here, store, _ = materialise(blueprint, 0, layout, placement, None)
    assert here[0].module.weight.equal(before["weight"])  # type: ignore[union-attr]
    for flat in here.values():
        flat.flat.zero_()
    for held in store:
        held.slots["master"].zero_()
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    again, _, _ = materialise(blueprint, 0, layout, placement, None)
    assert again[0].module.weight.equal(before["weight"])  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_the_initial_values_whatever_layers_compute_in(dtype: torch.dtype) -> None:
    training = training_of(Layer("a", Mix), Layer("b", Mix, ties={"weight": "a.weight"}), Layer("h", Head), dtype=dtype)
    blueprint = Blueprint(small_config(settings_of(training)), training)
    reference = {}
    for widths, layers in (((1,), (3,)), ((1, 1), (1, 2)), ((1, 1, 1), (1, 1, 1))):
        layout = make_layout(widths=widths, layers_per_stage=layers, num_microbatches=5, shared=blueprint.state.shared)
        placement = place_blocks(layout, blueprint.blocks, num_followers=1)
        for worker in layout.workers:
            here, store, _ = materialise(blueprint, worker, layout, placement, None)
            for held in store:
                first = reference.setdefault(held.block.id, held.slots["master"].clone())
                assert held.slots["master"].equal(first)
                if held.block.layer in here:
                    flat = here[held.block.layer].flat[held.block.start : held.block.stop]
                    assert flat.equal(first.to(dtype))
    assert len(reference) == len(blueprint.blocks)


MEASURE = r"""
import re, sys
from pathlib import Path
import torch
from torch import nn
from tests.integration.jobs import small_config
from tests.own_models import settings_of, training_of
from elaswave.config.schema import OptimizerConfig
from elaswave.models.layers import Layer
from elaswave.planning.layout import make_layout
from elaswave.state.placement import place_blocks
from elaswave.worker.blueprint import Blueprint
from elaswave.worker.materialise import materialise

torch.set_num_threads(1)
SIDE, NUM_LAYERS, OWN = 2048, 40, 2
trains = sys.argv[1] == "trained"

def build():
    return nn.Linear(SIDE, SIDE, bias=False).requires_grad_(trains)

layers = [Layer(f"l{index}", build) for index in range(NUM_LAYERS - 1)] + [Layer("last", lambda: nn.Linear(SIDE, 1))]
training = training_of(*layers, optimizer=OptimizerConfig(name="sgd", momentum=0.0))
settings = settings_of(training) | {"elastic.num_followers": 0, "elastic.block_size": 65536,
                                    "batch.num_microbatches": 1, "layout.widths": [1]}
blueprint = Blueprint(small_config(settings), training)
layout = make_layout(widths=[1] * (NUM_LAYERS // OWN), layers_per_stage=[OWN] * (NUM_LAYERS // OWN),
                     num_microbatches=1, shared=blueprint.state.shared)
placement = place_blocks(layout, blueprint.blocks, num_followers=0)

def peak_kib():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = peak_kib()
here, store, _ = materialise(blueprint, 3, layout, placement, None)
print((peak_kib() - before) * 1024 / (4 * SIDE * SIDE))
"""


@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_the_peak_is_the_stages_share_and_one_layer(kind: str) -> None:
    """A stage of 2 of 40 layers of 16 MB; sums and momentum are not counted, as SGD without momentum has none."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, kind], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    layers = float(measured.stdout)
    assert 1.5 < layers < 3.4, f"{layers} layers at the peak: 2 are kept, and one is being made"
