"""Compiled layers: the same bits in every process, or refused."""

import pytest
import torch
from tests.unit.engine.test_determinism_check import model_of
from tests.unit.engine.test_layer_calls import (
    SIZE,
    Block,
    Head,
    Table,
    assert_same,
    inputs_of,
    make_compute,
    results,
    targets_of,
    train,
)
from tests.unit.engine.test_spot_checks import checked
from torch import nn

from elaswave.engine.checks.spot_checks import CheckKind
from elaswave.engine.compute import CompiledLayers, LayerError
from elaswave.errors import UsageError
from elaswave.models.layers import Layer, ModelSpec, batch


def with_compiled(build, **options):
    return ModelSpec(
        (Layer("l0", Table), Layer("l1", build, compile=True, **options), Layer("l2", Head)),
        lambda output, targets: output.square().mean(),
    )


class Ordinary(Block):
    def forward(self, x):
        return torch.nn.functional.layer_norm(x + torch.tanh(self.map(x)), (SIZE,))


@pytest.mark.slow  # a compiler runs
@pytest.mark.filterwarnings("ignore")  # torch's own, as its compiler is loaded
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_layer_has_the_same_bits_wherever_it_runs(recompute):
    model = with_compiled(Ordinary, recompute=recompute)
    whole = make_compute(model, has_determinism_check=True)
    train([whole], [range(3)], [0, 1, 2])
    cuts = [range(1), range(1, 3)]
    computes = [make_compute(model, layers, has_determinism_check=True) for layers in cuts]
    train(computes, cuts, [1, 2, 0], split=True)
    assert_same(results(computes), results([whole]))
    assert {**computes[0].determinism_hashes, **computes[1].determinism_hashes} == whole.determinism_hashes
    for kind in CheckKind:
        watched, spots = checked(model, kind)
        train([watched], [range(3)], [0, 1, 2])
        assert_same(results([watched]), results([whole]))
        assert spots.num_checks >= 3
    ordinary = make_compute(model_of(Table, Ordinary, Head), has_determinism_check=True)
    train([ordinary], [range(3)], [0, 1, 2])
    assert ordinary.losses == pytest.approx(whole.losses, rel=1e-4)
    whole.forward(range(3), 0, inputs_of(0), targets_of(0), train=False)


@pytest.fixture
def uncompiled(monkeypatch):
    """Stands for a compiler; returns how many graphs there are."""
    graphs = {"stats": {"unique_graphs": 1}}
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: module)
    monkeypatch.setattr("torch._dynamo.utils.counters", graphs)
    return graphs["stats"]


def test_each_compilation_is_proven_anew(uncompiled):
    model = with_compiled(Ordinary)
    compute = make_compute(model, has_determinism_check=True)
    train([compute], [range(3)], [0])
    proven = []
    compute._prove = lambda index, *arguments: proven.append(index)
    train([compute], [range(3)], [1])
    assert proven == []
    uncompiled["unique_graphs"] += 1
    train([compute], [range(3)], [2])
    assert proven == [1]


def test_a_module_that_is_made_anew_is_compiled_anew(uncompiled):
    layers = CompiledLayers()
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert layers(0, one) is one and layers(0, one) is one and layers(0, other) is other


def test_a_compiled_layer_that_cannot_be_compared_is_refused(uncompiled):
    class Strict(Block):
        def forward(self, x):
            if not batch().any():
                raise ValueError("no tokens")
            return self.map(x)

    with pytest.raises(LayerError, match="layer l1 is to be compiled, and does not run on made-up numbers"):
        train([make_compute(with_compiled(Strict), has_determinism_check=True)], [range(3)], [0])


def test_without_the_canary_nothing_is_compiled():
    with pytest.raises(UsageError, match="layers l1 are to be compiled.*elastic.verify=true"):
        make_compute(with_compiled(Ordinary))
