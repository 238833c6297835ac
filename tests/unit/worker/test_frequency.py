"""Frequency actuators: what they write, that they give the device back, and what they say where they cannot work."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from elaswave.errors import FrequencyError
from elaswave.planning.costs.machines import FrequencyLevel
from elaswave.worker import frequency
from elaswave.worker.frequency import (
    CGROUP_ROOT,
    CgroupFrequency,
    EmulatedFrequency,
    NoFrequency,
    NvidiaFrequency,
    make_actuator,
)

HALF = FrequencyLevel(speed=0.5, power_w=100.0)
TINY = FrequencyLevel(speed=0.001, power_w=1.0)


def test_none_does_nothing():
    actuator = make_actuator("none", 0, lambda speed: pytest.fail("told"))
    assert isinstance(actuator, NoFrequency)
    actuator.set_level(HALF)
    actuator.close()


def test_the_emulated_device_is_told_its_speed_and_goes_back():
    speeds = []
    actuator = make_actuator("emulated", 0, speeds.append)
    assert isinstance(actuator, EmulatedFrequency)
    actuator.set_level(HALF)
    actuator.close()
    assert speeds == [0.5, 1.0]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown frequency actuator 'steam'"):
        make_actuator("steam", 0, lambda speed: None)


# ------------------------------------------------------------------------------------------------------- cgroup, fake


@pytest.fixture(params=["v1", "v2"])
def system(request, tmp_path, monkeypatch):
    """A file tree as the kernel shows it, with a process 7 in group /job; new groups get the kernel's files."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    if request.param == "v1":
        home, text = root / "cpu,cpuacct" / "job", "3:cpu,cpuacct:/job\n2:memory:/other\n"
        files = {"cgroup.procs": "", "cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}
    else:
        home, text = root / "job", "0::/job\n"
        files = {"cgroup.procs": "", "cpu.max": "max 100000", "cgroup.controllers": "cpu"}
        root.mkdir()
        (root / "cgroup.controllers").write_text("cpu memory")
    home.mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(text)
    _fill(home, files)
    make, remove = Path.mkdir, Path.rmdir

    def make_group(self, *arguments, **options):
        make(self, *arguments, **options)
        _fill(self, files)

    def remove_group(self):
        for name in files:
            (self / name).unlink(missing_ok=True)
        remove(self)

    monkeypatch.setattr(Path, "mkdir", make_group)
    monkeypatch.setattr(Path, "rmdir", remove_group)
    return request.param, home, {"root": root, "proc": proc}


def _fill(folder, files):
    for name, content in files.items():
        (folder / name).write_text(content)


def _quota(version, group):
    if version == "v2":
        return (group / "cpu.max").read_text()
    return f"{(group / 'cpu.cfs_quota_us').read_text()} {(group / 'cpu.cfs_period_us').read_text()}"


def test_a_quota_is_written_and_the_group_removed(system):
    version, home, places = system
    actuator = CgroupFrequency(7, "w7", **places)
    assert (home / "w7" / "cgroup.procs").read_text() == "7"
    actuator.set_level(HALF)
    assert _quota(version, home / "w7") == "50000 100000"
    actuator.set_level(TINY)
    assert _quota(version, home / "w7") == "1000 100000"  # the kernel refuses less
    actuator.close()
    actuator.close()
    assert (home / "cgroup.procs").read_text() == "7" and not (home / "w7").exists()


def test_a_level_counts_from_the_share_of_a_core(system):
    version, home, places = system
    CgroupFrequency(7, "w7", share=0.3, **places).set_level(HALF)
    assert _quota(version, home / "w7") == "15000 100000"


def test_groups_of_killed_workers_are_removed(system):
    _, home, places = system
    for name in ("elaswave-7-worker-0", "elaswave-7-worker-12", "elaswave-70-worker-0"):
        CgroupFrequency(7, name, **places)
    frequency.remove_groups(7, 7, **places)
    assert [path.name for path in home.iterdir() if path.is_dir()] == ["elaswave-70-worker-0"]
    frequency.remove_groups(7, 8, **places)  # there is no such process: nothing was made


def test_a_used_name_is_refused(system):
    _, _, places = system
    CgroupFrequency(7, "w7", **places)
    with pytest.raises(FrequencyError, match="no CPU quota can be set for process 7"):
        CgroupFrequency(7, "w7", **places)


def test_a_group_without_the_controller_is_refused_and_not_left_behind(system):
    version, home, places = system
    control = "cpu.max" if version == "v2" else "cpu.cfs_quota_us"
    fill = frequency.Path.mkdir

    def without_control(self, *arguments, **options):
        fill(self, *arguments, **options)
        (self / control).unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", without_control)
        with pytest.raises(FrequencyError, match=f"{control} does not exist"):
            CgroupFrequency(7, "w7", **places)
    assert not (home / "w7").exists()


def test_a_refused_quota_says_what_was_asked(system):
    _, home, places = system
    actuator = CgroupFrequency(7, "w7", **places)
    for name in ("cpu.max", "cpu.cfs_quota_us"):
        (home / "w7" / name).unlink(missing_ok=True)
        (home / "w7" / name).mkdir()  # cannot be written
    with pytest.raises(FrequencyError, match="a quota of 50000 of 100000 us is refused"):
        actuator.set_level(HALF)


def test_a_process_that_is_gone_is_named(tmp_path):
    with pytest.raises(FrequencyError, match="control groups of process 7 cannot be read"):
        CgroupFrequency(7, "w7", root=tmp_path, proc=tmp_path)


def test_a_system_without_a_controller_is_told(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text("0::/job\n")
    with pytest.raises(FrequencyError, match="no CPU controller is found"):
        CgroupFrequency(7, "w7", root=tmp_path / "none", proc=tmp_path)


# ------------------------------------------------------------------------------------------------------- cgroup, real


@pytest.fixture
def process():
    """A process that computes for ever."""
    process = subprocess.Popen([sys.executable, "-c", "print('ready', flush=True)\nwhile True: pass"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_real_process_gets_a_quota_and_is_throttled(process):
    try:
        actuator = CgroupFrequency(process.pid, f"elaswave-test-{uuid.uuid4().hex[:8]}")
    except FrequencyError as error:
        pytest.skip(f"no writable CPU controller here: {error}")
    group = actuator._group
    try:
        actuator.set_level(FrequencyLevel(speed=0.05, power_w=0.0))
        assert str(process.pid) in (group / "cgroup.procs").read_text().split()
        while "nr_throttled 0" in (group / "cpu.stat").read_text().splitlines():  # bounded by the suite's timeout
            os.sched_yield()
        actuator.set_level(HALF)  # live
        assert _quota("v2" if (group / "cpu.max").exists() else "v1", group).split() == ["50000", "100000"]
    finally:
        actuator.close()
    assert not group.exists() and group.is_relative_to(CGROUP_ROOT)


def test_this_process_itself(monkeypatch):
    made = []

    def make(pid, name, *, share):
        made.append((pid, name, share))
        return NoFrequency()

    monkeypatch.setattr(frequency, "CgroupFrequency", make)
    make_actuator("cgroup", 3, lambda speed: None, share=0.4)
    assert made == [(os.getpid(), f"elaswave-{os.getppid()}-worker-3", 0.4)]


# ------------------------------------------------------------------------------------------------------------- nvidia


class FakeGpus:
    """Answers as ``zeus.device.get_gpus()`` does (zeus 0.16)."""

    def __init__(self, refuse=False):
        self.calls = []
        self.refuse = refuse

    def __len__(self):
        return 2

    def get_supported_graphics_clocks(self, gpu_index, memory_clock_mhz=None):
        return [1980, 1410, 990, 345]

    def set_gpu_locked_clocks(self, gpu_index, min_clock_mhz, max_clock_mhz, block=True):
        if self.refuse:
            raise PermissionError("no permission")
        self.calls.append(("lock", gpu_index, min_clock_mhz, max_clock_mhz))

    def reset_gpu_locked_clocks(self, gpu_index, block=True):
        self.calls.append(("reset", gpu_index))


def test_the_nearest_clock_is_locked_and_released():
    gpus = FakeGpus()
    actuator = NvidiaFrequency(1, gpus=gpus)
    actuator.set_level(HALF)
    actuator.close()
    actuator.close()
    assert gpus.calls == [("lock", 1, 990, 990), ("reset", 1)]


def test_the_base_clock_can_be_given():
    gpus = FakeGpus()
    NvidiaFrequency(0, base_clock_mhz=1410, gpus=gpus).set_level(FrequencyLevel(speed=1.0, power_w=0.0))
    assert gpus.calls == [("lock", 0, 1410, 1410)]


def test_a_missing_gpu_is_named():
    with pytest.raises(FrequencyError, match="there is no GPU 2: zeus finds 2"):
        NvidiaFrequency(2, gpus=FakeGpus())


def test_a_refusal_of_the_driver_is_told():
    with pytest.raises(FrequencyError, match=r"set_gpu_locked_clocks.* is refused: PermissionError"):
        NvidiaFrequency(0, gpus=FakeGpus(refuse=True)).set_level(HALF)


def test_without_zeus_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    with pytest.raises(FrequencyError, match=r"elaswave\[gpu\]"):
        make_actuator("nvidia", 0, lambda speed: None)


def test_workers_share_the_gpus_of_their_machine(monkeypatch):
    gpus = FakeGpus()
    monkeypatch.setattr(frequency, "_zeus_gpus", lambda: gpus)
    make_actuator("nvidia", 5, lambda speed: None).set_level(HALF)
    assert gpus.calls == [("lock", 1, 990, 990)]


def test_a_machine_without_gpus_is_told(monkeypatch):
    class Device:
        @staticmethod
        def get_gpus():
            raise RuntimeError("NVML not found")

    monkeypatch.setattr(frequency.importlib, "import_module", lambda name: Device)
    with pytest.raises(FrequencyError, match="zeus finds no GPU: RuntimeError: NVML not found"):
        make_actuator("nvidia", 0, lambda speed: None)
