"""Whether a device can be here, and which GPU of a host a worker gets."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elaswave.devices import opening
from elaswave.devices.interface import HOST, DeviceMemory
from elaswave.devices.loopback import Loopback
from elaswave.devices.opening import PLACE_TIMEOUT_S, open_device, take_place, with_room
from elaswave.errors import ConfigError, DeviceError
from elaswave.launcher import resources
from elaswave.launcher.resources import check_device, check_frequency, cuda_of_torch
from elaswave.protocol.membership.membership import JOINER_STILL_S


def test_the_kinds_that_need_no_device_are_always_there(tmp_path: Path) -> None:
    for kind in ("cpu", "emulated", "loopback"):
        check_device(kind)
    assert open_device("cpu", tmp_path) is HOST is open_device("emulated", tmp_path)
    assert isinstance(open_device("loopback", tmp_path), Loopback)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n", "13.0"),
        ("cuda = '12.8'\n", "12.8"),
        ("hip = '6.0'\n", None),
    ],
)
def test_what_torch_is_built_with_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str | None
) -> None:
    (tmp_path / "version.py").write_text(text)
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert cuda_of_torch() == version


def test_without_torch_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cuda_of_torch() is None


def test_cuda_is_refused_with_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "cuda_of_torch", lambda: None)
    with pytest.raises(ConfigError, match=r"device\.kind: cuda needs .*; the torch that is installed is built without"):
        check_device("cuda")

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(resources, "cuda_of_torch", lambda: "13.0")
    monkeypatch.setattr(resources.ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match=r"built with CUDA 13\.0, and there is no driver \(libcuda\.so\.1"):
        check_device("cuda")
    monkeypatch.setattr(resources.ctypes, "CDLL", lambda name: None)
    check_device("cuda")


HOLDER = """
import sys, time
from pathlib import Path
from elaswave.devices.opening import take_place
print(take_place(Path(sys.argv[1]), 2, 2), flush=True)
time.sleep(60)
"""


def test_workers_are_spread_over_gpus_and_the_place_of_one_that_was_killed_is_free(tmp_path: Path) -> None:
    processes = []
    try:
        for _ in range(4):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
                )
            )  # fmt: skip
            assert processes[-1].stdout is not None
        devices = sorted(int(process.stdout.readline()) for process in processes)  # type: ignore[union-attr]
        assert devices == [0, 0, 1, 1]
        with pytest.raises(DeviceError, match="all 4 places on 2 GPUs are taken .* raise device.workers_per_device"):
            take_place(tmp_path, 2, 2, timeout_s=0.0)
        processes[2].kill()
        processes[2].wait()
        assert take_place(tmp_path, 2, 2, timeout_s=5.0) in (0, 1)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_process_that_sees_no_gpu_says_so(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="sees no GPU; look at CUDA_VISIBLE_DEVICES"):
        take_place(tmp_path, 0, 1)


class Emulated(Loopback):
    """A device of 100 bytes, of which others hold some that they give back, look by look.

    Args:
        free: bytes at each look; the last one stays.
        asked: takes note of looks.
    """

    def __init__(self, free: list[int], asked: list[int]) -> None:
        super().__init__()
        self.free, self.asked = free, asked

    def memory(self) -> DeviceMemory:
        self.asked.append(self.free[0])
        return DeviceMemory(self.free.pop(0) if len(self.free) > 1 else self.free[0], 100)


@pytest.fixture
def time_passes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Virtual time of `with_room`: seconds that it has slept."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(opening, "time", clock)
    return slept


def test_a_device_is_had_when_a_dead_process_has_given_its_memory_back(time_passes: list[float]) -> None:
    asked: list[int] = []
    device = with_room(lambda: Emulated([10, 10, 59, 60, 61], asked), 60.0)
    assert isinstance(device, Emulated) and asked == [10, 10, 59, 60] and len(time_passes) == 3


def test_memory_that_nobody_gives_back_is_said_with_what_is_needed(time_passes: list[float]) -> None:
    with pytest.raises(
        DeviceError,
        match=r"cpu \(loopback on .*\) has 0\.00 of 0\.00 GB free, and this worker needs at least .*; waited 2 s for "
        "others to give memory back: look at nvidia-smi for other processes, lower device.workers_per_device",
    ):
        with_room(lambda: Emulated([59], []), 60.0, timeout_s=2.0)
    assert 2.0 <= sum(time_passes) < 2.0 + 2 * opening.MEMORY_TURN_S


def test_more_than_a_device_has_is_not_waited_for(time_passes: list[float]) -> None:
    with pytest.raises(DeviceError, match="needs at least .* optimizer states: look at"):
        with_room(lambda: Emulated([100], []), 101.0)
    assert not time_passes


def test_a_context_is_made_again_while_there_is_no_memory_for_it(time_passes: list[float]) -> None:
    tries: list[Exception] = [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    ]

    def make(left: list[Exception]) -> Loopback:
        if left:
            raise DeviceError(f"cannot be used: {left[0]}") from left.pop(0)
        return Loopback()

    first = tries[:2]
    assert isinstance(with_room(lambda: make(first), 0.0), Loopback) and len(time_passes) == 2
    last = tries[2:]
    with pytest.raises(DeviceError, match="no kernel image"):
        with_room(lambda: make(last), 0.0)
    with pytest.raises(DeviceError, match="cannot be used: CUDA out of memory"):
        with_room(lambda: make([torch.OutOfMemoryError("CUDA out of memory")] * 1000), 0.0, timeout_s=1.0)
    assert sum(time_passes) < 2.0


def test_a_joiner_that_waits_for_its_device_is_not_taken_for_one_that_hangs() -> None:
    assert PLACE_TIMEOUT_S < JOINER_STILL_S


def test_what_is_needed_is_asked_only_of_devices_with_memory_of_their_own(tmp_path: Path) -> None:
    asked: list[str] = []

    def needed(kind: str) -> float:
        asked.append(kind)
        return 1.0

    for kind in ("cpu", "emulated", "loopback"):
        open_device(kind, tmp_path, 1, lambda kind=kind: needed(kind))  # type: ignore[misc]
    assert asked == ["loopback"]
    free, total = Loopback().memory()
    assert 0 < free <= total and HOST.memory() is None  # type: ignore[func-returns-value]


def test_a_missing_library_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="nvidia needs the zeus library"):
        check_frequency("nvidia")
    check_frequency("none")
