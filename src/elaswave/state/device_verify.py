"""Hashes and norms of blocks on a device, many at once: the numbers stay there until they are read together.

Blocks of one length are laid side by side, so that the number of launches does not grow with that of blocks. A block's
number depends on its own elements only, however many others are beside it: hashes are sums of integers, and squares
are added in a fixed tree, element by element, which rounds the same in every grouping and on every device. (The host's
`elaswave.state.sums.square_sum` has another order, so the norm of a CPU's run has other bits.)
"""

from collections.abc import Iterator, Sequence

import torch

from elaswave.state.verify import position_keys

_TOGETHER_ELEMENTS = 1 << 23
"""Most elements that are laid side by side: 64 MiB of words."""


def run_hashes(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`elaswave.state.verify.run_hash` of each run, int64 [len(runs)], modulo 2**64.

    Args:
        runs: float32 [length] each, on one device.
    """
    found = torch.empty(len(runs), dtype=torch.int64, device=_device_of(runs))
    for places, rows in _side_by_side(runs):
        keys = _keys(rows.shape[1], rows.device)
        found[places] = rows.view(torch.int32).to(torch.int64).mul_(keys).sum(1)
    return found


def square_sums(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of squares in float64 [len(runs)]; not finite where a run is not."""
    found = torch.empty(len(runs), dtype=torch.float64, device=_device_of(runs))
    for places, rows in _side_by_side(runs):
        wide = rows.to(torch.float64)
        found[places] = _tree_sum(wide.mul_(wide))
    return found


def _tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """Sum of each row: its halves are added element by element until one is left; an odd last one waits for the next
    round."""
    while (length := rows.shape[1]) > 1:
        half = length // 2
        added = rows[:, :half] + rows[:, half : 2 * half]
        rows = torch.cat([added, rows[:, 2 * half :]], 1) if length % 2 else added
    return rows[:, 0] if rows.shape[1] else rows.new_zeros(rows.shape[0])


def _device_of(runs: Sequence[torch.Tensor]) -> torch.device:
    return runs[0].device if runs else torch.device("cpu")


def _side_by_side(runs: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Runs of equal length as the rows of matrices, and the places of these runs."""
    by_length: dict[int, list[int]] = {}
    for place, run in enumerate(runs):
        by_length.setdefault(len(run), []).append(place)
    for length, places in by_length.items():
        at_once = max(1, _TOGETHER_ELEMENTS // max(1, length))
        for first in range(0, len(places), at_once):
            some = places[first : first + at_once]
            yield some, torch.stack([runs[place] for place in some])


_KNOWN_KEYS: dict[torch.device, torch.Tensor] = {}


def _keys(length: int, device: torch.device) -> torch.Tensor:
    """The keys of positions on a device; those of the longest run begin with those of all others."""
    longest = _KNOWN_KEYS.get(device)
    if longest is None or len(longest) < length:
        longest = _KNOWN_KEYS[device] = torch.from_numpy(position_keys(length).copy()).to(device)
    return longest[:length]
