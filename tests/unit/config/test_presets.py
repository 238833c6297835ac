"""Presets from data files: those of the package, and a person's own, with every problem of a bad one."""

from pathlib import Path

import pytest

from elaswave.cli.main import main
from elaswave.config.presets import catalog, device_preset, link_preset, model_shape, read_presets
from elaswave.errors import ConfigError, UsageError

MINE = """
[links.wire]
bandwidth_bytes_per_s = 1e9
latency_s = 1e-5
source = "measured"

[devices.mine]
flops_per_s = 100e12
memory_gib = 48
level_speeds = [0.5, 1.0]
level_power_w = [80, 200]
memory_bandwidth_bytes_per_s = 1e12
efficiency = 0.4
within_node = "nvlink-3"
between_nodes = "wire"
devices_per_node = 2
source = "my datasheet"
efficiency_source = "measured"
"""
SMALL = """
[models.small]
family = "gpt"
num_layers = 6
hidden_size = 256
intermediate_size = 1024
num_heads = 4
vocab_size = 1000
context_length = 128
source = "mine"
"""


def written(folder: Path, text: str, name: str = "my.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_every_preset_names_its_source() -> None:
    known = catalog()
    for shape in known.models.values():
        assert len(shape.source) > 20
    for preset in known.devices.values():
        assert len(preset.device.source) > 40 and len(preset.efficiency_source) > 20
        assert known.links[preset.within_node.name] is preset.within_node
    for link in known.links.values():
        assert len(link.source) > 20


@pytest.mark.parametrize(
    ("kind", "look_up"), [("models", model_shape), ("devices", device_preset), ("links", link_preset)]
)
def test_an_unknown_name_lists_what_there_is(kind: str, look_up: object) -> None:
    known = getattr(catalog(), kind)
    with pytest.raises(UsageError, match=f"'no-such'; choose one of {', '.join(known)}, or give the path"):
        look_up("no-such")  # type: ignore[operator]
    for name in known:
        assert look_up(name) is known[name]  # type: ignore[operator]


def test_a_file_describes_a_device_with_links_of_its_own_and_of_the_package(tmp_path: Path) -> None:
    found = device_preset(str(written(tmp_path, MINE)))
    assert found.device.name == "mine"
    assert found.device.memory_bytes == 48 * 2.0**30
    assert [(level.speed, level.power_w) for level in found.device.levels] == [(0.5, 80.0), (1.0, 200.0)]
    assert found.within_node is catalog().links["nvlink-3"]
    assert found.between_nodes.link.bandwidth_bytes_per_s == 1e9
    assert link_preset(str(tmp_path / "my.toml")).name == "wire"
    shape = model_shape(str(written(tmp_path, SMALL, "model.toml")))
    assert (shape.name, shape.num_kv_heads, shape.intermediate_size) == ("small", 4, 1024)


def test_commands_take_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device, model = written(tmp_path, MINE), written(tmp_path, SMALL, "model.toml")
    options = ["--device", str(device), "--model", str(model), "--workers", "4", "--stages", "2"]
    assert main(["plan", *options, "--json"]) == 0
    out = capsys.readouterr().out
    assert "small on 4 x mine" in out and "analytic: small (mine) on mine (my datasheet)" in out
    assert main(["plan", "--device", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: cannot be read: No such file" in capsys.readouterr().err


def test_a_bad_file_lists_every_problem(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        machines = 3
        links = 5
        [devices.a]
        flops_per_s = "fast"
        efficiency = 1.5
        colour = "red"
        memory_gib = 1
        memory_bandwidth_bytes_per_s = 1
        within_node = "hccs"
        between_nodes = "hccs"
        devices_per_node = 8
        source = "mine"
        [devices.b]
        flops_per_s = 1
        memory_gib = 1
        memory_bandwidth_bytes_per_s = 1
        efficiency = 1
        within_node = "string"
        between_nodes = "hccs"
        devices_per_node = 8
        source = "mine"
        efficiency_source = "mine"
        [devices.c]
        flops_per_s = 1
        memory_gib = 1
        level_speeds = [0.5]
        memory_bandwidth_bytes_per_s = 1
        efficiency = 1
        within_node = "hccs"
        between_nodes = "hccs"
        devices_per_node = 8
        source = "mine"
        efficiency_source = "mine"
        [devices.d]
        flops_per_s = 1
        memory_gib = 1
        level_power_w = [1.0, 2.0]
        memory_bandwidth_bytes_per_s = 1
        efficiency = 1
        within_node = "hccs"
        between_nodes = "hccs"
        devices_per_node = 8
        source = "mine"
        efficiency_source = "mine"
        [models]
        e = 4
        [models.f]
        family = "gpt"
        num_layers = 2
        hidden_size = 10
        intermediate_size = 40
        num_heads = 3
        vocab_size = 100
        context_length = 8
        source = "mine"
        """,
    )
    with pytest.raises(ConfigError) as caught:
        read_presets(path)
    found = [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]
    expected = [
        "machines: unknown section; there are devices, links, models",
        "links: got 5, expected tables [links.NAME]",
        'devices.a.flops_per_s: got "fast", expected a finite number, above 0',
        "devices.a.efficiency: got 1.5, expected a finite number, above 0 and at most 1",
        "devices.a.colour: unknown key",
        "devices.a.efficiency_source: is missing",
        "devices.b.within_node: there is no link 'string'; choose one of nvlink-3",
        "devices.c: device 'c' is impossible: levels have speeds [0.5]",
        "devices.d: level_power_w has 2 entries for 1 level_speeds",
        "models.e: got 4, expected a table of keys, [models.e]",
        "models.f: model 'f' is impossible: hidden_size 10, num_heads 3",
    ]
    for line in expected:
        assert any(problem.startswith(line) for problem in found), (line, found)
    assert len(found) == len(expected)


def test_a_file_of_one_kind_has_exactly_one_of_it(tmp_path: Path) -> None:
    path = written(tmp_path, MINE + MINE.replace("mine]", "other]").replace("wire]", "cable]"))
    with pytest.raises(ConfigError, match=r"describes 2 devices \(mine, other\), needed: exactly one table"):
        device_preset(str(path))
    with pytest.raises(ConfigError, match=r"describes 0 models, needed: exactly one table \[models.NAME\]"):
        model_shape(str(path))


def test_what_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my.toml, line 2: this is not TOML"):
        read_presets(written(tmp_path, "[devices.a]\nflops\n"))
