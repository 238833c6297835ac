"""What a codec makes of a tensor's bytes, for plans: a function of the number of elements, and seconds per byte. Pure.

The sizes are known in advance: int8 and int4 have one float32 scale per group of elements.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

GROUP = 64
"""Elements that share a scale."""
SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How a fence codes a tensor."""

    name: str
    num_bytes: Callable[[float, float], float]
    """Of so many elements, that have so many bytes each before."""
    s_per_byte: float = 0.0
    """Of coding or decoding, per byte before; 0: as if it hid behind computing."""


def _grouped(bits: int) -> Callable[[float, float], float]:
    return lambda elements, _: ceil(elements * bits / 8) + SCALE_BYTES * ceil(elements / GROUP)


CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec(name="none", num_bytes=lambda elements, each: elements * each),
        Codec(name="bf16", num_bytes=lambda elements, each: elements * min(2.0, each)),
        Codec(name="int8", num_bytes=_grouped(8)),
        Codec(name="int4", num_bytes=_grouped(4)),
    )
}
