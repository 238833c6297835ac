"""A U-Net that finds discs in noise, cut into pipeline stages although its skip connections cross all of them.

elaswave run --workers 4 --fault kill:random@5:any examples/unet.py

10 seconds on two cores. A layer takes one argument, which may be any tree of tensors: here the features and
a tuple of those that later layers will join. What a stage does not use itself travels through it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import elaswave

SIZE, CHANNELS = 32, 16

Value = tuple[Tensor, tuple[Tensor, ...]]
"""Features [B, C, H, W], and the skip connections that are open, the newest last."""


class Discs(Dataset[tuple[Tensor, Tensor]]):
    """Pictures [1, SIZE, SIZE] of three discs in noise, and the discs without it."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
        centres, radii = SIZE * torch.rand(3, 2, 1, 1), 2 + 5 * torch.rand(3, 1, 1)
        discs = ((grid - centres).norm(dim=1) < radii).any(0, keepdim=True).float()
        return discs + 0.7 * torch.randn(1, SIZE, SIZE), discs


def two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """[B, inputs, H, W] to [B, outputs, H, W]."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.LeakyReLU(0.1, inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.LeakyReLU(0.1, inplace=True),
    )  # fmt: skip


class Enter(nn.Module):
    """The picture as the first features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = two_convolutions(1, CHANNELS)

    def forward(self, picture: Tensor) -> Value:
        """[B, 1, H, W] to features [B, CHANNELS, H, W]."""
        return self.body(picture), ()


class Down(nn.Module):
    """Opens a skip connection, halves the sides and doubles the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = two_convolutions(channels, 2 * channels)

    def forward(self, value: Value) -> Value:
        """[B, C, H, W] to [B, 2 C, H / 2, W / 2]."""
        features, skips = value
        return self.body(F.max_pool2d(features, 2)), (*skips, features)


class Up(nn.Module):
    """Doubles the sides, halves the channels and joins the newest skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        self.body = two_convolutions(channels, channels // 2)

    def forward(self, value: Value) -> Value:
        """[B, C, H, W] to [B, C / 2, 2 H, 2 W]."""
        features, (*skips, newest) = value
        return self.body(torch.cat([newest, self.up(features)], dim=1)), tuple(skips)


class Leave(nn.Module):
    """The features as one number for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(CHANNELS, 1, 1)

    def forward(self, value: Value) -> Tensor:
        """[B, CHANNELS, H, W] to [B, 1, H, W]."""
        return self.map(value[0])


def overlap(logits: Tensor, discs: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels in both the discs that are found and those that are there, of those in either."""
    found, there = logits > 0, discs > 0.5
    return (found & there).sum(), (found | there).sum()


def main() -> None:
    """Trains, and loads the weights into an ordinary module."""
    torch.manual_seed(1)
    model = nn.Sequential(
        Enter(), Down(CHANNELS), Down(2 * CHANNELS), Up(4 * CHANNELS), Up(2 * CHANNELS), Leave()
    )  # fmt: skip
    trainer = elaswave.Trainer(
        model,
        F.binary_cross_entropy_with_logits,
        Discs(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        metrics={"overlap": overlap},
        callbacks=[lambda step, loss, metrics: print(f"step {step}: overlap {metrics['overlap']:.2f}")],
        config={"run.steps": 25, "batch.num_microbatches": 8, "batch.microbatch_size": 4},
    )
    result = trainer.train()
    result.load_into(model)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
