"""GPTs with layers that fail, in ways that do not depend on who runs them: put in the place of the family ``gpt``.

Every draw inside a layer is keyed by step, micro-batch and layer, so a layer that fails by a draw fails at the same
place of the computation under every layout.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from elaswave.models.gpt import gpt
from elaswave.models.layers import Layer, ModelSpec
from elaswave.training import definition as builtin

UNLUCKY_LAYER = 2
"""``block.1``: the layer that fails."""


class Unlucky(nn.Module):
    """A layer whose output is spoilt in a share of its training calls.

    Args:
        inner: the layer.
        probability: of being spoilt.
        spoil: from a good output to a bad one.
    """

    def __init__(self, inner: nn.Module, probability: float, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.probability = probability
        self.spoil = spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strikes = self.training and float(torch.rand(())) < self.probability
        output: torch.Tensor = self.inner(x)
        return self.spoil(output) if strikes else output


def nan_output(output: torch.Tensor) -> torch.Tensor:
    return output * float("nan")


def infinite_output(output: torch.Tensor) -> torch.Tensor:
    return output / 0.0


def nan_gradient(output: torch.Tensor) -> torch.Tensor:
    """The same values; the gradient of a square root at zero is infinite."""
    return output + (output * 0.0).abs().sqrt()


def broken(output: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("the layer is broken")


def make_unlucky(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor], torch.Tensor], probability: float = 0.02
) -> None:
    """Puts a GPT with an unlucky layer in the place of the family ``gpt``, in this process and what it forks."""

    def family(**sizes: float) -> ModelSpec:
        model = gpt(**sizes)  # type: ignore[arg-type]
        spec = model.layers[UNLUCKY_LAYER]
        layers = list(model.layers)
        layers[UNLUCKY_LAYER] = Layer(spec.name, lambda: Unlucky(spec.build(), probability, spoil))
        return ModelSpec(tuple(layers), model.loss)

    monkeypatch.setitem(builtin.MODELS, "gpt", family)
