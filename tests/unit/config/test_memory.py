"""Sizes that no machine can hold are refused with their numbers, before anything is built."""

from pathlib import Path

import pytest

from elaswave.cli.main import main
from elaswave.config.load import load_config
from elaswave.engine.blueprint import Blueprint
from elaswave.launcher.resources import least_memory, memory_bytes, memory_problem


@pytest.mark.parametrize("settings", [["model.family=gpt"], ["model.family=llama"], ["model.dtype=bfloat16"]])
def test_the_estimate_is_below_what_a_run_holds_and_not_far(settings):
    config = load_config(None, [*settings, "layout.widths=[1,2]"])
    found, blueprint = least_memory(config), Blueprint(config)
    assert 0.95 < found.num_parameters / sum(slot.numel for slot in blueprint.tensors) <= 1
    number = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    assert found.sums * number == found.parameters * 8
    assert found.worker < found.total < 3 * found.worker


@pytest.mark.parametrize(
    ("setting", "size", "size_in_demo"),
    [
        ("model.hidden_size=100000000000", "a model of 480,000,", "a model of 480,000,"),
        ("model.context_length=100000000000", "a model of 12,800,", "a model of 9,600,"),
        ("batch.microbatch_size=100000000000", "a model of 8", "a model of 502,848 "),
    ],
)
def test_the_command_refuses_at_once(setting, size, size_in_demo, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run-dir", "run", "--set", setting]) == 2
    errors = capsys.readouterr().err
    assert size in errors and "needs at least" in errors and "and there are " in errors
    assert main(["demo", "--run-dir", "run", "--set", setting]) == 2
    assert size_in_demo in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_fits_is_not_refused():
    memory = least_memory(load_config(None, []))
    assert memory_problem(memory, memory.total, "a file") is None
    assert memory_problem(memory, memory.total - 1, "a file").startswith("a model of 8")
    assert memory.total < 100e6


def test_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path):
    assert memory_bytes(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000 kB\nMemFree: 1 kB\nSwapTotal: 48 kB\n")
    assert memory_bytes(tmp_path) == (2048 * 1024, "/proc/meminfo")
    group = tmp_path / "sys/fs/cgroup/user/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user/job\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("1000000\n")
    (group.parent / "memory.swap.max").write_text("24\n")
    assert memory_bytes(tmp_path) == (1000024, "/sys/fs/cgroup/user/memory.max")
