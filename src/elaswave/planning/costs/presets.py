"""The form of known models, devices and links; for questions about machines that one lacks. Pure.

The figures themselves, each with where it is published, are data: ``src/elaswave/presets/``, read by
`elaswave.config.presets`. A figure of a device is a vendor's peak, an efficiency is what others have reported to reach
of it, and a level's power is modelled, since no vendor publishes draw over clock: ``idle + (board - idle) * speed *
voltage**2``, where voltage falls and rises by half as much as the clock, and by no more than a fifth. Plans made from
presets are therefore good for comparisons on one machine; a running job measures instead
(`elaswave.planning.costs.profiled`).

GB and TB of memory are powers of 1024, as vendors' tools show them; bandwidths are powers of 1000, per direction.
"""

from typing import Literal

import msgspec

from elaswave.planning.costs.machines import DeviceSpec, FrequencyLevel
from elaswave.planning.costs.network import NetworkLink

VOLTAGE_PER_SPEED = 0.5
"""Relative change of voltage per relative change of the clock."""
LOWEST_VOLTAGE = 0.8
"""Relative to the base level's: a chip needs that much to work at all."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder-only transformer, from which its costs follow."""

    name: str
    family: Literal["gpt", "llama"]
    """``gpt``: biases, learned positions, LayerNorm, two matrices of hidden_size x intermediate_size; ``llama``: no
    biases, rotary positions, RMSNorm, three matrices (SwiGLU)."""
    num_layers: int
    """Transformer blocks; embedding and head are two layers more."""
    hidden_size: int
    """Length of the vector that stands for a token."""
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    """Width inside the feed-forward part."""
    vocab_size: int
    context_length: int
    """Tokens of a sample."""
    source: str

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: a size below 1, or heads that do not divide.
        """
        problems = [
            f"{name} is {getattr(self, name)}, needed: at least 1"
            for name in self.__struct_fields__[2:-1]
            if getattr(self, name) < 1
        ]
        if not problems and (self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads):
            problems.append(
                f"hidden_size {self.hidden_size}, num_heads {self.num_heads} and num_kv_heads {self.num_kv_heads} must "
                "divide each other in this order"
            )
        if problems:
            raise ValueError(f"model {self.name!r} is impossible: " + "; ".join(problems))

    @property
    def kv_size(self) -> int:
        """Length of a token's keys, and of its values."""
        return self.num_kv_heads * (self.hidden_size // self.num_heads)

    @property
    def block_products(self) -> int:
        """Elements of a block's matrices: multiplications of a token, without attention's."""
        num_matrices = 3 if self.family == "llama" else 2
        attention = 2 * self.hidden_size * (self.hidden_size + self.kv_size)
        return attention + num_matrices * self.hidden_size * self.intermediate_size

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self.kv_size
        if self.family == "llama":
            return self.block_products + 2 * hidden
        biases = 2 * hidden + 2 * kv + inner + hidden
        return self.block_products + biases + 4 * hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; GPT's positions are among them."""
        positions = self.context_length if self.family == "gpt" else 0
        return (self.vocab_size + positions) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm and the map to logits. It is its own matrix, not the embedding's, as in
        `elaswave.models.gpt`, so that both may live on different workers."""
        return self.vocab_size * self.hidden_size + self.hidden_size * (2 if self.family == "gpt" else 1)

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return self.embedding_parameters + self.num_layers * self.block_parameters + self.head_parameters


class LinkPreset(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of connection."""

    name: str
    link: NetworkLink
    """Of one worker, in each direction."""
    source: str


class DevicePreset(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of accelerator and the machine that it usually comes in."""

    device: DeviceSpec
    memory_bandwidth_bytes_per_s: float
    efficiency: float
    """Share of the peak that matrix products of a training step reach."""
    efficiency_source: str
    within_node: LinkPreset
    """Between devices of one machine."""
    between_nodes: LinkPreset
    """Between machines, each device's share."""
    devices_per_node: int

    def __post_init__(self) -> None:
        """Checks the figures.

        Raises:
            ValueError: an efficiency that is none, no bandwidth, or no device.
        """
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency}, needed: above 0, at most 1")
        if not 0 < self.memory_bandwidth_bytes_per_s < float("inf") or self.devices_per_node < 1:
            raise ValueError(
                f"memory bandwidth is {self.memory_bandwidth_bytes_per_s} bytes/s with {self.devices_per_node} devices "
                "per node: both must be above 0"
            )


def frequency_levels(speeds: tuple[float, ...], *, idle_w: float, base_w: float) -> tuple[FrequencyLevel, ...]:
    """Makes clock settings with a modelled draw: dynamic power is proportional to clock x voltage squared.

    Args:
        speeds: of the levels, relative to the base level.
        idle_w: draw without work.
        base_w: draw at the base level.
    Source: P = a C V^2 f; for a chip near its limits 10 % more clock takes some 5 % more voltage.
    """
    levels = []
    for speed in speeds:
        voltage = max(LOWEST_VOLTAGE, 1 + VOLTAGE_PER_SPEED * (speed - 1))
        levels.append(
            FrequencyLevel(speed=speed, power_w=round(idle_w + (base_w - idle_w) * speed * voltage * voltage, 1))
        )
    return tuple(levels)
