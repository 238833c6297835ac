"""A network of one's own over four regions of the world: two lines of configuration say where its workers are.

elaswave run --fault kill:random@3:any examples/far_apart/own.py
"""

from pathlib import Path

import torch
from torch import nn

import elaswave

NETWORK = str(Path(__file__).with_name("four_regions_small.toml"))


def main() -> None:
    """The network, data and training in five lines."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    data = [(torch.randn(64) + kind, torch.tensor(kind)) for kind in range(10) for _ in range(64)]
    apart = {"sites.network": NETWORK, "sites.of_workers": ["oregon", "virginia", "tokyo", "london"]}
    config = {**apart, "run.steps": 8, "layout.widths": [1, 1, 1, 1], "model.fences": ["1:topk4", "3:int8"]}
    result = elaswave.Trainer(network, nn.functional.cross_entropy, data, config=config).train()
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
