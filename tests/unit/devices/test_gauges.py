"""What devices tell of themselves; NVML is a small stand-in with the calls that are used, as nvidia-ml-py has them."""

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from elaswave.devices.cuda import Cuda, Nvml
from elaswave.devices.interface import HOST
from elaswave.devices.loopback import Loopback
from elaswave.types import Gauges


class NVMLError(Exception):
    """As pynvml raises it."""


class FakeNvml(ModuleType):
    """One GPU, whose energy is not supported.

    Args:
        uuid: of the GPU.
    """

    def __init__(self, uuid: str) -> None:
        super().__init__("pynvml")
        self.uuid = uuid
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        self.asked.append("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self.asked.append("memory")
        return SimpleNamespace(total=80_000, free=30_000, used=50_000)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 412_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.asked.append("energy")
        raise NVMLError("Not Supported")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml("GPU-12-34")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_what_nvml_refuses_is_absent_and_not_asked_for_again(fake: FakeNvml) -> None:
    gpu = Nvml("12-34")
    expected = {"memory_used_bytes": 50_000, "memory_total_bytes": 80_000, "utilization": 0.97, "power_w": 412.5}
    assert gpu.gauges() == gpu.gauges() == expected
    assert fake.asked == ["init", "memory", "energy", "memory"]
    assert Nvml("GPU-12-34").gauges() == expected


def test_energy_is_told_where_it_is_supported(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: 7_250)
    assert Nvml("12-34").gauges()["energy_j"] == 7.25


def test_without_nvml_or_with_a_gpu_that_it_does_not_know_nothing_is_told(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Nvml("56").gauges() == Nvml("").gauges() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert Nvml("12-34").gauges() == {}


def test_a_gpu_tells_of_memory_without_nvml_too(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (1_000, 5_000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda place: 400)
    device = Cuda.__new__(Cuda)  # a context would need a GPU
    device.place, device._nvml = torch.device("cuda", 0), Nvml("12-34")
    own = {"allocated_bytes": 300, "peak_allocated_bytes": 400}
    assert device.gauges() == Gauges(
        memory_used_bytes=50_000, memory_total_bytes=80_000, utilization=0.97, power_w=412.5, **own
    )
    device._nvml = Nvml("another")
    assert device.gauges() == Gauges(memory_used_bytes=4_000, memory_total_bytes=5_000, **own)


def test_what_is_absent_is_absent_in_files_too() -> None:
    assert json.loads(msgspec.json.encode(Gauges(utilization=0.0))) == {"utilization": 0.0}
    assert HOST.gauges() is None  # type: ignore[func-returns-value]
    told = json.loads(msgspec.json.encode(Loopback().gauges()))
    assert told.keys() == {"memory_used_bytes", "memory_total_bytes"}
    assert 0 < told["memory_used_bytes"] < told["memory_total_bytes"]
