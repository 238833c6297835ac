"""A ResNet that tells drawn shapes apart, with batch normalisation, augmentation and loader processes.

elaswave run --workers 4 --fault kill:random@5:any examples/resnet.py

14 seconds on two cores; the images are drawn as they are asked for, nothing is downloaded. Running statistics are
state: each step makes their exact mean over its micro-batches, whichever workers ran them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import elaswave

SIZE, SHAPES = 24, ("disc", "square", "ring", "cross")
NUM_MICROBATCHES = 4
MOMENTUM = 1 - (1 - 0.1) ** NUM_MICROBATCHES
"""Statistics move once per step; a plain loop would move them by 0.1 for each micro-batch."""


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Pictures [1, SIZE, SIZE] of one shape each, and which one it is.

    Place, size and noise are drawn anew each time: they follow from the seed of the run and the sample's place in the
    order of the data, so they do not depend on the process that draws them.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        kind = index % len(SHAPES)
        radius = 4 + 4 * torch.rand(())
        centre = radius + (SIZE - 2 * radius) * torch.rand(2)
        x, y = torch.meshgrid(torch.arange(SIZE) - centre[0], torch.arange(SIZE) - centre[1], indexing="ij")
        distance = (x * x + y * y).sqrt()
        shape = (
            distance < radius,
            (x.abs() < radius * 0.9) & (y.abs() < radius * 0.9),
            (distance < radius) & (distance > radius * 0.6),
            (distance < radius) & ((x.abs() < radius * 0.3) | (y.abs() < radius * 0.3)),
        )[kind]
        return shape[None].float() + 0.3 * torch.randn(1, SIZE, SIZE), torch.tensor(kind)


def norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation with the pace of a plain loop."""
    return nn.BatchNorm2d(channels, momentum=MOMENTUM)


class Residual(nn.Module):
    """Two convolutions beside a shortcut (https://arxiv.org/abs/1512.03385, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = norm(outputs), norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def accuracy(logits: Tensor, kinds: Tensor) -> Tensor:
    """Share of the pictures that are recognised."""
    return (logits.argmax(-1) == kinds).float().mean()


def main() -> None:
    """Trains with evaluations, and loads the weights into an ordinary module."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), norm(16), nn.ReLU(inplace=True)),
        Residual(16, 16),
        Residual(16, 32, stride=2),
        Residual(32, 32),
        Residual(32, 64, stride=2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(SHAPES))),
    )
    trainer = elaswave.Trainer(
        model,
        F.cross_entropy,
        Shapes(4096),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30),
        eval_dataset=Shapes(256),
        metrics={"accuracy": accuracy},
        loaders=1,
        config={
            "run.steps": 30,
            "run.eval_every": 15,
            "run.eval_microbatches": 8,
            "batch.num_microbatches": NUM_MICROBATCHES,
            "batch.microbatch_size": 32,
        },
    )
    result = trainer.train()
    result.load_into(model)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")
    print(f"on other pictures: {trainer.evaluate()}")


if __name__ == "__main__":
    main()
