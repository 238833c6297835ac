"""One model of three kinds of software: layers in torch, one in numpy, and one in JAX where an interpreter has it.

elaswave run --workers 4 --fault kill:random@5:any examples/foreign.py

Numpy and JAX compute in processes of their own, beside the worker that holds the layer (docs/foreign.md);
all else, from the sums of gradients to checkpoints, is as with layers in torch. `--jax PYTHON` names the interpreter
with JAX; without one that part is numpy's too.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elaswave

WIDTH = 48
PARTS = Path(__file__).parent / "foreign" / "parts.py"


class Waves(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sums of two waves, and both frequencies."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, second = 1 + index % 7, 1 + index % 11
        time = torch.linspace(0, 3, 32)
        return (first * time).sin() + (second * time).cos(), torch.tensor([first / 7, second / 11])


def layers(jax: str | None) -> list[nn.Module]:
    """The model.

    Args:
        jax: an interpreter that has JAX; None: there is none.
    """
    torch.manual_seed(1)
    options = {"width": WIDTH}
    in_numpy = elaswave.Foreign(f"{PARTS}:InNumpy", software="numpy", options=options, seed=1)
    if jax is None:
        other = elaswave.Foreign(f"{PARTS}:InNumpy", software="numpy", options=options, seed=2)
    else:
        other = elaswave.Foreign(f"{PARTS}:InJax", software="jax", python=jax, options=options, seed=2)
    return [nn.Linear(32, WIDTH), in_numpy, nn.Tanh(), other, nn.Linear(WIDTH, 2)]


def main() -> None:
    """Trains."""
    here = sys.executable if importlib.util.find_spec("jax") else None
    parser = argparse.ArgumentParser()
    parser.add_argument("--jax", default=here, help="an interpreter that has JAX")
    model = layers(parser.parse_args().jax)
    print(*(f"{part.kind}\n" for part in model if isinstance(part, elaswave.Foreign)), sep="", end="")
    config = {
        "run.steps": 40,
        "batch.num_microbatches": 8,
        "batch.microbatch_size": 16,
        "optimizer.lr": 3e-3,
    }
    result = elaswave.Trainer(model, F.mse_loss, Waves(), config=config).train()
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
