"""Networks that were not written as lists of layers: what `elaswave.split` has to cut."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH, HEADS, KINDS = 23, 6, 8, 2, 5

Tokens = dict[str, Tensor]


class Residual(nn.Module):
    """A convolution with batch normalisation, dropout and writing in place beside a shortcut."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.map = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm, self.drop, self.act = nn.BatchNorm2d(channels), nn.Dropout(dropout), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(x + self.drop(self.norm(self.map(x))))
        return result


class Pictures(nn.Module):
    """A residual network with a skip connection from its beginning to its end."""

    def __init__(self, dropout: float = 0.0, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, WIDTH, 3, padding=1)
        self.body = nn.Sequential(*[Residual(WIDTH, dropout) for _ in range(blocks)])
        self.head = nn.Linear(2 * WIDTH, KINDS)

    def forward(self, pictures: Tensor) -> Tensor:
        first = self.stem(pictures)
        last = self.body(first)
        result: Tensor = self.head(torch.cat([first, last], 1).mean((2, 3)))
        return result


class Rotary(nn.Module):
    """Tables of positions, as rotary embeddings need them: of whole numbers and a constant alone."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(0, size, 2) / size), persistent=False)

    @torch.no_grad()
    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions[..., None].float() * self.frequencies).repeat(1, 1, 2)[:, None]
        return angles.cos(), angles.sin()


def turned(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    half = x.shape[-1] // 2
    return x * table[0] + torch.cat([-x[..., half:], x[..., :half]], -1) * table[1]


class Block(nn.Module):
    """Attention and a feed-forward part, each with a norm before it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head_norm = nn.RMSNorm(WIDTH // HEADS)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = dropout

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = heads.split(HEADS, 1)
        q, k = turned(self.head_norm(q), table), turned(k, table)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, float("-inf"))
        mixed = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Texts(nn.Module):
    """A decoder with rotary positions, a mask of padding, and one table for the first and the last layer."""

    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.table, self.rotary = nn.Embedding(VOCABULARY, WIDTH), Rotary()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        positions = (mask.long().cumsum(-1) - 1).clamp_(min=0)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        seen = (causal & mask[:, None, :])[:, None] | torch.eye(LENGTH, dtype=torch.bool)
        x, table = self.table(tokens), self.rotary(positions)
        for block in self.blocks:
            x = block(x, table, seen)
        return {"logits": self.head(self.norm(x))}


def pictures(rows: int = 2) -> Tensor:
    """Inputs of `Pictures`."""
    return torch.randn(rows, 2, 5, 5, generator=torch.Generator().manual_seed(3))


def tokens(rows: int = 2) -> Tokens:
    """Inputs of `Texts`."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)
    found = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    return {"tokens": found, "mask": torch.arange(LENGTH) < lengths}


def seeded(kind: Any, *arguments: Any, **options: Any) -> Any:
    """A network with the same values each time."""
    torch.manual_seed(7)
    return kind(*arguments, **options)
