"""A transformer of your own on the source code of Python's standard library, a byte per token.

elaswave run --workers 4 --fault kill:random@5:any examples/own_model.py

12 seconds on two cores. The model is a list of modules, the data any map-style dataset, the loss a function: nothing
here knows of workers, and the result has the same bits with one worker, with four, and when some of them are killed.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import elaswave

CONTEXT, WIDTH, HEADS = 64, 64, 4


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of CONTEXT bytes of a text, and the byte after each."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return piece[:-1], piece[1:]


def standard_library() -> Bytes:
    """The source code of some of Python's modules."""
    modules = ("argparse", "ast", "dataclasses", "inspect", "pathlib", "pickle", "typing")
    return Bytes(b"".join((Path(argparse.__file__).parent / f"{name}.py").read_bytes() for name in modules))


class Embed(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """[B, T] to [B, T, C]."""
        return self.byte(bytes_BT) + self.position(torch.arange(bytes_BT.shape[1]))


class Block(nn.Module):
    """Attention to earlier positions, then a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(self.norm1(x_BTC)).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x_BTC + self.mlp(self.norm2(x_BTC))


def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy of the next byte."""
    return F.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())


def main() -> None:
    """Trains, and loads the weights into an ordinary module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=4)
    blocks = parser.parse_args().blocks

    torch.manual_seed(1)
    model = nn.Sequential(Embed(), *[Block() for _ in range(blocks)], nn.Linear(WIDTH, 256))
    trainer = elaswave.Trainer(
        model,
        loss,
        standard_library(),
        config={
            "run.steps": 40,
            "batch.num_microbatches": 8,
            "batch.microbatch_size": 4,
            "optimizer.lr": 3e-3,
        },
    )
    result = trainer.train()
    result.load_into(model)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
