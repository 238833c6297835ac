"""Known models, devices and links, each figure with where it is published; for questions about machines one lacks.

A figure of a device is a vendor's peak, an efficiency is what others have reported to reach of it, and a level's power
is modelled, since nobody publishes draw over clock: ``idle + (board - idle) * speed * voltage**2``, where voltage falls
and rises by half as much as the clock, and by no more than a fifth. Plans made from presets are therefore good for
comparisons on one machine; a running job measures instead (`elaswave.costs.profiled`).

GB and TB of memory are powers of 1024, as vendors' tools show them; bandwidths are powers of 1000, per direction.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

from elaswave.costs.machines import Device, FrequencyLevel, NetworkLink
from elaswave.errors import UsageError

GIB = 2.0**30
GB_PER_S = 1e9

VOLTAGE_PER_SPEED = 0.5
"""Relative change of voltage per relative change of the clock."""
LOWEST_VOLTAGE = 0.8
"""Relative to the base level's: a chip needs that much to work at all."""

NCCL_LATENCIES = "latency: hwLat of NCCL 2.20's src/graph/execution.cc, ring, protocol Simple"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder-only transformer, from which its costs follow."""

    name: str
    family: Literal["gpt", "llama"]
    """``gpt``: biases, learned positions, LayerNorm, two matrices of hidden_size x intermediate_size; ``llama``:
    no biases, rotary positions, RMSNorm, three matrices (SwiGLU)."""
    num_layers: int
    """Transformer blocks; embedding and head are two layers more."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    """Elements of a token inside the feed-forward part."""
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
    def block_parameters(self) -> int:
        """Parameters of one transformer block."""
        kv_width = self.num_kv_heads * (self.hidden_size // self.num_heads)
        if self.family == "llama":
            return (
                2 * self.hidden_size * (self.hidden_size + kv_width)
                + 3 * self.hidden_size * self.intermediate_size
                + 2 * self.hidden_size
            )
        matrices = 2 * self.hidden_size * (self.hidden_size + kv_width) + 2 * self.hidden_size * self.intermediate_size
        biases = 2 * self.hidden_size + 2 * kv_width + self.intermediate_size + self.hidden_size
        return matrices + biases + 4 * self.hidden_size

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

    device: Device
    memory_bandwidth_bytes_per_s: float
    efficiency: float
    """Share of the peak that matrix products of a training step reach."""
    efficiency_source: str
    within_node: str
    """Name of the link between devices of one machine."""
    between_nodes: str
    """Name of the link between machines, each device's share."""
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
    """Clock settings with a modelled draw: dynamic power is proportional to clock x voltage squared.

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


# ----------------------------------------------------------------------------------------------------------- the models

_GPT2 = (
    "Radford et al. 2019, Language models are unsupervised multitask learners, table 2; sizes of the released models"
)
_LLAMA2 = "Touvron et al. 2023, arXiv 2307.09288, and the released config.json"
_LLAMA2_34B = (
    "Touvron et al. 2023, arXiv 2307.09288, table 1 (34B was not released); sizes from the released config.json "
    "of Code Llama 34B (Roziere et al. 2023, arXiv 2308.12950), which starts from it"
)


def _gpt2(name: str, num_layers: int, hidden_size: int, num_heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        family="gpt",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        intermediate_size=4 * hidden_size,
        vocab_size=50257,
        context_length=1024,
        source=_GPT2,
    )


def _llama2(
    name: str,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    source: str = _LLAMA2,
) -> ModelShape:
    return ModelShape(
        name=name,
        family="llama",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        vocab_size=32000,
        context_length=4096,
        source=source,
    )


MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2-small", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        _llama2("llama-2-7b", 32, 4096, 32, 32, 11008),
        _llama2("llama-2-13b", 40, 5120, 40, 40, 13824),
        _llama2("llama-2-34b", 48, 8192, 64, 8, 22016, _LLAMA2_34B),
        _llama2("llama-2-70b", 80, 8192, 64, 8, 28672),
    )
}
"""By name."""

# ------------------------------------------------------------------------------------------------------------ the links

LINKS: Mapping[str, LinkPreset] = {
    preset.name: preset
    for preset in (
        LinkPreset(
            name="nvlink-3",
            link=NetworkLink(bandwidth_bytes_per_s=300 * GB_PER_S, latency_s=3.4e-6),
            source=f"NVIDIA A100 datasheet: 600 GB/s in both directions together; {NCCL_LATENCIES}, NVLINK",
        ),
        LinkPreset(
            name="nvlink-4",
            link=NetworkLink(bandwidth_bytes_per_s=450 * GB_PER_S, latency_s=3.4e-6),
            source=f"NVIDIA H100 datasheet: 900 GB/s in both directions together; {NCCL_LATENCIES}, NVLINK",
        ),
        LinkPreset(
            name="hccs",
            link=NetworkLink(bandwidth_bytes_per_s=28 * GB_PER_S, latency_s=5.7e-6),
            source="Huawei Atlas 800T A2 (8 devices, fully meshed): 392 GB/s over 7 links in both directions together, "
            f"so 28 GB/s between two devices; {NCCL_LATENCIES}, PCI, for want of a published one",
        ),
        LinkPreset(
            name="infiniband-hdr",
            link=NetworkLink(bandwidth_bytes_per_s=25 * GB_PER_S, latency_s=14e-6),
            source=f"NVIDIA DGX A100 datasheet: one 200 Gb/s HDR adapter per GPU; {NCCL_LATENCIES}, NET",
        ),
        LinkPreset(
            name="infiniband-ndr",
            link=NetworkLink(bandwidth_bytes_per_s=50 * GB_PER_S, latency_s=14e-6),
            source=f"NVIDIA DGX H100 datasheet: one 400 Gb/s NDR adapter per GPU; {NCCL_LATENCIES}, NET",
        ),
        LinkPreset(
            name="roce-200",
            link=NetworkLink(bandwidth_bytes_per_s=25 * GB_PER_S, latency_s=14e-6),
            source="Huawei Atlas 800T A2: one 200 Gb/s RoCE port per device; "
            f"{NCCL_LATENCIES}, NET, for want of a published one",
        ),
        LinkPreset(
            name="ethernet-100",
            link=NetworkLink(bandwidth_bytes_per_s=12.5 * GB_PER_S, latency_s=14e-6),
            source=f"100 Gb/s Ethernet, IEEE 802.3bm; {NCCL_LATENCIES}, NET",
        ),
    )
}
"""By name."""

# ---------------------------------------------------------------------------------------------------------- the devices

_LEVEL_POWER = "power by level: modelled from board and idle power, see the module"

DEVICES: Mapping[str, DevicePreset] = {
    preset.device.name: preset
    for preset in (
        DevicePreset(
            device=Device(
                name="ascend-910b",
                flops_per_s=320e12,
                memory_bytes=64 * GIB,
                levels=frequency_levels((0.6, 0.7, 0.8, 0.9, 1.0, 1.05, 1.1), idle_w=66.0, base_w=310.0),
                idle_power_w=66.0,
                source="peak 320 TFLOPS, 64 GB, 310 W: Huawei's figures as reported by boardor.com, Huawei Ascend 910B "
                "outperforms H20; reports go from 256 to 400 by variant. Levels 1.0 to 1.8 GHz: Using analytical "
                "performance/power model and fine-grained DVFS to enhance AI accelerator energy efficiency, ASPLOS "
                "2025; 24 cores (910B2) of 4,096 multiply-adds (Liao et al. 2019, Hot Chips 31) give 320 TFLOPS at "
                "1.63 GHz and 354, level 1.1, at 1.8. Idle power: as npu-smi shows it in Huawei's guide. "
                + _LEVEL_POWER,
            ),
            memory_bandwidth_bytes_per_s=1600 * GB_PER_S,
            efficiency=0.5,
            efficiency_source="Yin et al. 2025, Pangu Ultra, arXiv 2504.07866: above 50 % model FLOPs utilization on "
            "8,192 Ascend NPUs. Memory bandwidth: half of the two-die 910C's, Zuo et al. 2025, arXiv 2506.12708",
            within_node="hccs",
            between_nodes="roce-200",
            devices_per_node=8,
        ),
        DevicePreset(
            device=Device(
                name="a100",
                flops_per_s=312e12,
                memory_bytes=80 * GIB,
                levels=frequency_levels((0.6, 0.7, 0.8, 0.9, 1.0), idle_w=55.0, base_w=400.0),
                idle_power_w=55.0,
                source="A100 80GB SXM: NVIDIA A100 datasheet, 1758950-r4: 312 TFLOPS dense bfloat16, 80 GB, 400 W. The "
                "peak is that of the highest clock, 1,410 MHz (Ampere architecture whitepaper), so no level is above "
                "it. Idle power: as nvidia-smi shows it, not specified. " + _LEVEL_POWER,
            ),
            memory_bandwidth_bytes_per_s=2039 * GB_PER_S,
            efficiency=0.52,
            efficiency_source="Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters, "
            "table 1: 44 to 52 % of peak, bubbles included. Memory bandwidth: datasheet",
            within_node="nvlink-3",
            between_nodes="infiniband-hdr",
            devices_per_node=8,
        ),
        DevicePreset(
            device=Device(
                name="h100",
                flops_per_s=989.4e12,
                memory_bytes=80 * GIB,
                levels=frequency_levels((0.6, 0.7, 0.8, 0.9, 1.0), idle_w=70.0, base_w=700.0),
                idle_power_w=70.0,
                source="H100 SXM5: NVIDIA H100 architecture whitepaper, table 3: 989.4 TFLOPS dense bfloat16, 80 GB, "
                "700 W, at 1,830 MHz; products at the power limit do not hold more. Idle power: as nvidia-smi shows "
                "it, not specified. " + _LEVEL_POWER,
            ),
            memory_bandwidth_bytes_per_s=3350 * GB_PER_S,
            efficiency=0.47,
            efficiency_source="Megatron-LM, README: 41 to 48 % model FLOPs utilization on H100 with bfloat16. Memory "
            "bandwidth: datasheet",
            within_node="nvlink-4",
            between_nodes="infiniband-ndr",
            devices_per_node=8,
        ),
        DevicePreset(
            device=Device(
                name="h200",
                flops_per_s=989.4e12,
                memory_bytes=141 * GIB,
                levels=frequency_levels((0.6, 0.7, 0.8, 0.9, 1.0), idle_w=75.0, base_w=700.0),
                idle_power_w=75.0,
                source="H200 SXM: NVIDIA H200 datasheet: the H100's arithmetic with 141 GB at 4.8 TB/s, 700 W. Idle "
                "power: as nvidia-smi shows it, not specified. " + _LEVEL_POWER,
            ),
            memory_bandwidth_bytes_per_s=4800 * GB_PER_S,
            efficiency=0.47,
            efficiency_source="the H100's: Megatron-LM, README. Memory bandwidth: datasheet",
            within_node="nvlink-4",
            between_nodes="infiniband-ndr",
            devices_per_node=8,
        ),
    )
}
"""By name."""

_T = TypeVar("_T")


def _look_up(presets: Mapping[str, _T], name: str, what: str) -> _T:
    if name not in presets:
        raise UsageError(f"there is no {what} {name!r}; choose one of {', '.join(presets)}")
    return presets[name]


def model_shape(name: str) -> ModelShape:
    """A known model.

    Raises:
        UsageError: there is none of that name; lists those there are.
    """
    return _look_up(MODELS, name, "model")


def device_preset(name: str) -> DevicePreset:
    """A known device.

    Raises:
        UsageError: there is none of that name; lists those there are.
    """
    return _look_up(DEVICES, name, "device")


def link_preset(name: str) -> LinkPreset:
    """A known link.

    Raises:
        UsageError: there is none of that name; lists those there are.
    """
    return _look_up(LINKS, name, "link")
