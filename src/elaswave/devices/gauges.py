"""What a device tells of itself. No torch: the coordinator and people's commands read it, too."""

import msgspec


class Gauges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Readings of one worker's device at one instant; what a device does not tell is None, and never 0."""

    memory_used_bytes: int | None = None
    """Of the device's memory, by all processes, contexts included."""
    memory_total_bytes: int | None = None
    allocated_bytes: int | None = None
    """Of the worker's own tensors."""
    peak_allocated_bytes: int | None = None
    """The most of those so far."""
    utilization: float | None = None
    """Share of the last instants in which it computed, 0 to 1."""
    power_w: float | None = None
    energy_j: float | None = None
    """Since its driver was loaded: the difference of two readings counts."""
