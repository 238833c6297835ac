"""A ResNet-101 as anybody would write it, cut into four parts by `elaswave.split`.

elaswave run --workers 4 --fault kill:random@5:any examples/resnet101.py

The network is no list of layers: residual connections cross every cut inside of a block. It is a quarter as wide as the
one of the paper (https://arxiv.org/abs/1512.03385), so that it trains on a laptop; the pictures are those of resnet.py.
"""

import torch
from resnet import SHAPES, Shapes
from torch import Tensor, nn
from torch.nn import functional as F

import elaswave

BLOCKS, WIDTH = (3, 4, 23, 3), 16
ROWS, NUM_MICROBATCHES = 4, 8
MOMENTUM = 1 - (1 - 0.1) ** NUM_MICROBATCHES
"""Statistics move once per step; a plain loop would move them by 0.1 for each micro-batch."""


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width, momentum=MOMENTUM)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, momentum=MOMENTUM)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width, momentum=MOMENTUM)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != 4 * width:
            conv = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width, momentum=MOMENTUM))
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, 4 width, H / stride, W / stride]."""
        hidden = self.relu(self.bn1(self.conv1(x)))
        hidden = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(hidden)))))
        hidden += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(hidden)
        return result


class ResNet(nn.Module):
    """A stem, four groups of blocks, and a head."""

    def __init__(self, blocks: tuple[int, ...], width: int, kinds: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, momentum=MOMENTUM)
        groups, inputs = [], width
        for group, number in enumerate(blocks):
            wide = width * 2**group
            strides = [1 if group == 0 else 2, *[1] * (number - 1)]
            groups.append(
                nn.Sequential(*[Bottleneck(4 * wide if i else inputs, wide, s) for i, s in enumerate(strides)])
            )
            inputs = 4 * wide
        self.layer1, self.layer2, self.layer3, self.layer4 = groups
        self.fc = nn.Linear(inputs, kinds)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1, H, W] to [B, kinds]."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


def main() -> None:
    """Cuts, trains, and loads the weights into the network."""
    torch.manual_seed(1)
    network = ResNet(BLOCKS, WIDTH, len(SHAPES))
    dataset = Shapes(4096)
    layers = elaswave.split(network, torch.stack([dataset[i][0] for i in range(ROWS)]), num_parts=4)
    print(
        f"{len(layers.graph)} operators, cut at {layers.cuts}: {', '.join(f'{s * 1e3:.0f}' for s in layers.part_s)} ms"
    )
    trainer = elaswave.Trainer(
        layers,
        F.cross_entropy,
        dataset,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        config={
            "run.steps": 40,
            "batch.num_microbatches": NUM_MICROBATCHES,
            "batch.microbatch_size": ROWS,
        },
    )
    result = trainer.train()
    result.load_into(network)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
