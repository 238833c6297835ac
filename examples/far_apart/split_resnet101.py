"""A ResNet-101, cut into four parts by `elaswave.split`, one in each of four regions of the world.

elaswave run --fault kill:random@3:any examples/far_apart/split_resnet101.py

The network is that of ../resnet101.py, an eighth as wide as the one of the paper; the pictures are made here. Links are
emulated, with a tenth of their bandwidth and a fifth of their delay. Each cut is a fence.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import elaswave

sys.path.append(str(Path(__file__).resolve().parents[1]))

from resnet import SHAPES, Shapes
from resnet101 import BLOCKS, ResNet

NETWORK = str(Path(__file__).with_name("four_regions_small.toml"))
REGIONS = ["oregon", "virginia", "tokyo", "london"]
WIDTH, ROWS = 8, 4


def main() -> None:
    """Cuts and trains."""
    torch.manual_seed(1)
    dataset = Shapes(512)
    layers = elaswave.split(
        ResNet(BLOCKS, WIDTH, len(SHAPES)), torch.stack([dataset[i][0] for i in range(ROWS)]), num_parts=len(REGIONS)
    )
    trainer = elaswave.Trainer(
        layers,
        F.cross_entropy,
        dataset,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        config={
            "run.steps": 5,
            "batch.num_microbatches": 4,
            "batch.microbatch_size": ROWS,
            "layout.widths": [1] * len(REGIONS),
            "model.fences": [f"part{part}:int8" for part in range(len(REGIONS) - 1)],
            "sites.network": NETWORK,
            "sites.of_workers": REGIONS,
            "sites.rate": 0.1,
            "sites.delay": 0.2,
        },
    )
    result = trainer.train()
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
