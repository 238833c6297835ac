"""Readings of a GPU by NVML (``pip install 'elaswave[gpu]'``): it only reads, and needs no context.

What NVML is not there for, or refuses, is left out, and not asked for again: rights and sensors do not come later.
"""

from collections.abc import Callable, Mapping
from typing import Any


class Nvml:
    """One GPU, as NVML sees it.

    Args:
        uuid: of the GPU; processes may see GPUs under other numbers than NVML.
    """

    def __init__(self, uuid: str) -> None:
        self._ask: dict[str, Callable[[], Mapping[str, float]]] = {}
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except Exception:  # not installed; no driver; a GPU that it does not know
            return
        self._ask = {
            "memory": lambda: _memory(pynvml.nvmlDeviceGetMemoryInfo(handle)),
            "utilization": lambda: {"utilization": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100},
            "power": lambda: {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000},
            "energy": lambda: {"energy_j": pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000},
        }

    def gauges(self) -> dict[str, Any]:
        """Fields of `elaswave.devices.gauges.Gauges`, as far as they are told."""
        found: dict[str, Any] = {}
        for name, ask in list(self._ask.items()):
            try:
                found |= ask()
            except Exception:  # not supported, no right, or the GPU is gone: that is for who computes on it to say
                del self._ask[name]
        return found


def _memory(info: Any) -> dict[str, float]:
    return {"memory_used_bytes": info.used, "memory_total_bytes": info.total}
