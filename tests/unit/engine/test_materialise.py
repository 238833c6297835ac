"""What a worker makes before its first step: from real builds, layer by layer, and with the memory of its own share."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.jobs import small_config
from tests.own_models import WIDTH, Head, Mix, settings_of, training_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave.blocks.placement import place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.engine.blueprint import Blueprint, materialise, owned_pieces
from elaswave.errors import UsageError
from elaswave.models.layers import Layer
from elaswave.planning.programs.layout import make_layout

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
    placement = place_blocks(layout.with_followers(1), blueprint.blocks, scatter_width=EVERYBODY)
    here, _, _ = materialise(blueprint, 1, layout, placement, None)
    made = here[1].module  # type: ignore[union-attr]
    assert made.inv_freq.equal(FREQUENCIES)
    taken_over = blueprint.flat_layer(1, {})
    assert taken_over.module.inv_freq.equal(FREQUENCIES)
    taken_over.flat.copy_(here[1].flat)
    x = torch.randn(6, WIDTH)
    assert taken_over.module(x).equal(made(x))
    assert not made(x.flip(0)).flip(0).allclose(made(x)), "positions count"


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.num_bytes += made.untyped_storage().nbytes()
        return made


def test_what_a_checkpoint_writes_is_copied_once() -> None:
    blueprint = blueprint_of(Mix(), Mix(), Head())
    layout = make_layout(widths=(1, 1), layers_per_stage=(1, 2), num_microbatches=5)
    placement = place_blocks(layout.with_followers(1), blueprint.blocks, scatter_width=EVERYBODY)
    _, store, _ = materialise(blueprint, 1, layout, placement, None)
    with CopiedBytes() as copied:
        pieces = list(owned_pieces(store))
    assert copied.num_bytes == sum(piece.values.nbytes for piece in pieces) > 0
    held = {values.untyped_storage().data_ptr() for block in store for values in block.slots.values()}
    own = {piece.values.untyped_storage().data_ptr() for piece in pieces}
    assert len(own) == len(pieces) and own.isdisjoint(held)


def test_an_instance_stays_as_it_was_and_begins_the_run() -> None:
    module = Mix()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    blueprint = blueprint_of(module, Mix(), Head())
    layout = make_layout(widths=(1, 1), layers_per_stage=(1, 2), num_microbatches=5)
    placement = place_blocks(layout.with_followers(1), blueprint.blocks, scatter_width=EVERYBODY)
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
        placement = place_blocks(layout.with_followers(1), blueprint.blocks, scatter_width=EVERYBODY)
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
from elaswave.planning.programs.layout import make_layout
from elaswave.blocks.placement import place_blocks
from elaswave.engine.blueprint import Blueprint, materialise

torch.set_num_threads(1)
trains = sys.argv[1] == "trained"

def measure(build, num_layers, own, block_size, dtype):
    layers = [Layer(f"l{index}", build) for index in range(num_layers - 1)]
    layers.append(Layer("last", lambda: nn.Linear(1, 1, dtype=dtype)))
    training = training_of(*layers, optimizer=OptimizerConfig(name="sgd", momentum=0.0), dtype=dtype)
    settings = settings_of(training) | {"elastic.num_followers": 0, "elastic.block_size": block_size,
                                        "batch.num_microbatches": 1, "layout.widths": [1]}
    blueprint = Blueprint(small_config(settings), training)
    layout = make_layout(widths=[1] * (num_layers // own), layers_per_stage=[own] * (num_layers // own),
                         num_microbatches=1, shared=blueprint.state.shared)
    placement = place_blocks(layout.with_followers(0), blueprint.blocks, scatter_width=1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak_bytes()
    here, store, _ = materialise(blueprint, 3, layout, placement, None)
    peak = peak_bytes() - before
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build().parameters())
    return peak / parameters, parameters * num_layers

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""
LINEARS = r"""
def build():
    return nn.Linear(2048, 2048, bias=False).requires_grad_(trains)

per_parameter, _ = measure(build, 40, 2, 65536, torch.float32)
print(per_parameter / 4)
"""
LLAMA_70B = r"""
class Linear(nn.Module):
    "torch.nn.Linear without minutes of random numbers."
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.full((outputs, inputs), 0.01, dtype=torch.bfloat16), requires_grad=trains)

class Block(nn.Module):
    "https://arxiv.org/abs/2307.09288: 80 of these, hidden size 8,192, 8 heads of keys and values of 64."
    def __init__(self):
        super().__init__()
        self.q, self.o = Linear(8192, 8192), Linear(8192, 8192)
        self.k, self.v = Linear(8192, 1024), Linear(8192, 1024)
        self.gate, self.up, self.down = Linear(8192, 28672), Linear(8192, 28672), Linear(28672, 8192)
        self.norm1, self.norm2 = nn.RMSNorm(8192, dtype=torch.bfloat16), nn.RMSNorm(8192, dtype=torch.bfloat16)

per_parameter, parameters = measure(Block, 80, 1, 1 << 22, torch.bfloat16)
print(per_parameter, parameters)
"""


def measured(model: str, kind: str) -> list[float]:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE + model, kind], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return [float(number) for number in done.stdout.split()]


@pytest.mark.parametrize("kind", ["trained", pytest.param("frozen", marks=pytest.mark.slow)])
def test_the_peak_is_the_stages_share_and_one_layer(kind: str) -> None:
    """A stage of 2 of 40 layers of 16 MB; sums and momentum are not counted, as SGD without momentum has none."""
    (layers,) = measured(LINEARS, kind)
    assert 1.5 < layers < 3.4, f"{layers} layers at the peak: 2 are kept, and one is being made"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_a_stage_of_a_70b_model_is_built_where_the_whole_has_no_room(kind: str) -> None:
    """One of 80 blocks in bfloat16: 1.7 GB, with masters 5.1 GB."""
    bytes_per_parameter, parameters = measured(LLAMA_70B, kind)
    assert parameters > 68e9
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2 * parameters > memory, "the whole would have room here"
    kept = 6 if kind == "trained" else 2
    assert bytes_per_parameter < kept + 4, f"{bytes_per_parameter} bytes per parameter at the peak, {kept} are kept"


def is_for_shapes() -> bool:
    return torch.empty(0).device.type == "meta"


def raises() -> nn.Module:
    if not is_for_shapes():
        raise FileNotFoundError("no such weights")
    return Mix()


def with_buffer() -> nn.Module:
    module = Mix()
    if not is_for_shapes():
        module.register_buffer("mean", torch.zeros(3))
    return module


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (raises, "layer own cannot be built: FileNotFoundError: no such weights"),
        (with_buffer, r"layer own made a persistent buffer of shape \[3\] of type float32 as mean, and .* nothing: it"),
        (
            lambda: nn.Linear(2, 2 if is_for_shapes() else 3),
            r"layer own made a trained parameter of shape \[3, 2\] as weight, and under .*'meta'\) .* shape \[2, 2\]",
        ),
        (
            lambda: nn.Linear(2, 2).requires_grad_(is_for_shapes()),
            r"made a frozen parameter of shape \[2, 2\] of type float32 as weight, and .* a trained parameter of shape",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2)) if not is_for_shapes() else nn.Linear(2, 2), "made nothing as weight"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight of layer own is on the meta device, so it has no values"),
        (lambda: Mix() if is_for_shapes() else None, "the build of layer own returned None of type NoneType"),
    ],
)
def test_a_build_that_makes_another_module_than_for_its_shapes_is_refused(build: Any, words: str) -> None:
    blueprint = blueprint_of(Layer("a", Mix), Layer("own", build), Layer("b", Mix, ties={"weight": "a.weight"}))
    assert blueprint.build(2) is not None
    with pytest.raises(UsageError, match=words):
        blueprint.flat_layer(1, {})
