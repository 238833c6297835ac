"""What a codec makes of a tensor's bytes, for plans: a function of the number of elements, and seconds per byte. Pure.

The sizes are known in advance: int8 and int4 code whole groups of elements with one bfloat16 scale each. A tensor that
a codec would not make smaller stays as it is. The few bytes of a head are not counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

GROUP = 64
"""Elements that share a scale."""
SCALE_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How a fence codes a tensor."""

    name: str
    num_bytes: Callable[[float, float], float]
    """Of so many elements, that have so many bytes each before."""
    s_per_byte: float = 0.0
    """Of coding or decoding, per byte before; 0: as if it hid behind computing."""


def _grouped(bits: int) -> Callable[[float, float], float]:
    return lambda elements, each: min(elements * each, ceil(elements / GROUP) * (SCALE_BYTES + GROUP * bits // 8))


CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec(name="none", num_bytes=lambda elements, each: elements * each),
        Codec(name="bf16", num_bytes=lambda elements, each: elements * min(2.0, each)),
        Codec(name="int8", num_bytes=_grouped(8)),
        Codec(name="int4", num_bytes=_grouped(4)),
    )
}
