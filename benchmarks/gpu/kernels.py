"""Kernels that probe 7 times: block hashes as the product's `run_hash`, and sums of squares in float64, batched."""

from typing import Any

import torch

from elaswave.hashing import key64, signed64

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LANES = 1024


def position_keys(length: int, device: torch.device) -> torch.Tensor:
    """The keys of `elaswave.state.seals.run_hash`, int64 [length], computed on the device."""
    keys = torch.arange(length, dtype=torch.int64, device=device) + signed64(key64("run_hash"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> shift & (1 << 64 - shift) - 1)) * signed64(factor)
    return keys ^ (keys >> 31 & (1 << 33) - 1) | 1


def by_operators(blocks: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hashes, int64 [n], and sums of squares, float64 [n], of float32 blocks [n, length] by torch's operators."""
    hashes = (blocks.view(torch.int32).to(torch.int64) * keys).sum(1)
    return hashes, blocks.to(torch.float64).square().sum(1)


def by_kernel(values: torch.Tensor, table: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of blocks that lie anywhere: table int64 [n, 2] of first element and length."""
    hashes = torch.empty(len(table), dtype=torch.int64, device=values.device)
    squares = torch.empty(len(table), dtype=torch.float64, device=values.device)
    _hash_and_square[(len(table),)](values, table, keys, hashes, squares, SIZE=LANES, num_warps=8)
    return hashes, squares


_hash_and_square: Any = None

if triton is not None:

    @triton.jit
    def _hash_and_square(values, table, keys, hashes, squares, SIZE: tl.constexpr):
        block = tl.program_id(0).to(tl.int64)
        first = tl.load(table + 2 * block)
        length = tl.load(table + 2 * block + 1)
        lanes = tl.arange(0, SIZE)
        hashed = tl.zeros((SIZE,), dtype=tl.int64)
        squared = tl.zeros((SIZE,), dtype=tl.float64)
        for start in range(0, length, SIZE):
            is_here = start + lanes < length
            value = tl.load(values + first + start + lanes, mask=is_here, other=0.0)
            key = tl.load(keys + start + lanes, mask=is_here, other=0)
            hashed += value.to(tl.int32, bitcast=True).to(tl.int64) * key
            wide = value.to(tl.float64)
            squared += wide * wide
        tl.store(hashes + block, tl.sum(hashed, 0))
        tl.store(squares + block, tl.sum(squared, 0))
