"""Whether a device can be here, and which GPU of a host a worker gets."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elaswave.devices import availability
from elaswave.devices.availability import check_device, cuda_of_torch
from elaswave.devices.host import HOST
from elaswave.devices.loopback import Loopback
from elaswave.devices.opening import open_device
from elaswave.devices.places import take_place
from elaswave.errors import ConfigError, DeviceError


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
    monkeypatch.setattr(availability, "cuda_of_torch", lambda: None)
    with pytest.raises(ConfigError, match=r"device\.kind: cuda needs .*; the torch that is installed is built without"):
        check_device("cuda")

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(availability, "cuda_of_torch", lambda: "13.0")
    monkeypatch.setattr(availability.ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match=r"built with CUDA 13\.0, and there is no driver \(libcuda\.so\.1"):
        check_device("cuda")
    monkeypatch.setattr(availability.ctypes, "CDLL", lambda name: None)
    check_device("cuda")


HOLDER = """
import sys, time
from pathlib import Path
from elaswave.devices.places import take_place
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
