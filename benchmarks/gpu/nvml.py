"""Readings of a GPU by NVML, which needs no context. Where there is none, every reading is 0 or left out."""

from collections.abc import Callable
from typing import Any

from parts import Bench

_handle: Any = None


def handle() -> Any:
    """Of the first GPU; None where NVML is not to be had."""
    global _handle
    if _handle is None:
        try:
            import pynvml

            pynvml.nvmlInit()
            _handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # not installed, or no driver
            _handle = False
    return _handle or None


def memory_used(bench: Bench) -> int:
    """Bytes of the device in use by all processes."""
    if not bench.is_cuda or handle() is None:
        return 0
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(handle()).used)


def readings() -> dict[str, Callable[[], Any]]:
    """What may be asked, by name."""
    device = handle()
    if device is None:
        return {}
    import pynvml as n

    return {
        "memory": lambda: n.nvmlDeviceGetMemoryInfo(device).used,
        "utilization": lambda: n.nvmlDeviceGetUtilizationRates(device).gpu,
        "power_mw": lambda: n.nvmlDeviceGetPowerUsage(device),
        "energy_mj": lambda: n.nvmlDeviceGetTotalEnergyConsumption(device),
        "sm_mhz": lambda: n.nvmlDeviceGetClockInfo(device, n.NVML_CLOCK_SM),
        "memory_mhz": lambda: n.nvmlDeviceGetClockInfo(device, n.NVML_CLOCK_MEM),
        "temperature_c": lambda: n.nvmlDeviceGetTemperature(device, n.NVML_TEMPERATURE_GPU),
        "throttled_by": lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(device),
        "power_limit_mw": lambda: n.nvmlDeviceGetPowerManagementLimit(device),
        "supported_memory_mhz": lambda: n.nvmlDeviceGetSupportedMemoryClocks(device)[:4],
        "processes": lambda: [(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(device)],
        "ecc_errors": lambda: n.nvmlDeviceGetTotalEccErrors(
            device, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
        ),
    }
