"""Digests of tensors' parts put together: per tensor, and of the whole state. No torch; `verify` computes the parts."""

from collections.abc import Iterable, Mapping

from elaswave.hashing import MASK64, key64, mix64


def add_digests(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The digests per tensor and slot from those of all parts, in sorted order of names."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) & MASK64
    return dict(sorted(total.items()))


def state_digest(
    *,
    step: int,
    num_updates: int,
    data_cursor: tuple[int, int],
    grids: Iterable[int],
    tensor_digests: Mapping[str, int],
    fences: Iterable[str] = (),
) -> str:
    """The hash of everything that decides how training goes on, as 16 hexadecimal digits."""
    total = key64("state", step, num_updates, *data_cursor, *grids)
    for fence in fences:
        total = mix64(total + key64("fence", fence))
    for name, value in sorted(tensor_digests.items()):
        total = mix64(total + key64(name, value))
    return f"{total:016x}"
