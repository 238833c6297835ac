"""Network files: what they say, and how bad ones are refused."""

from pathlib import Path

import numpy as np
import pytest

from elaswave.config.network import network_text, read_network, read_parts, scaled
from elaswave.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples" / "far_apart"
SITE = "workers = {}\nbandwidth_mbit_per_s = 1000\ndelay_ms = 1\n"
LINK = '[[links]]\nbetween = ["{}", "{}"]\nbandwidth_mbit_per_s = 8\ndelay_ms = 50\n'
GOOD = f"[sites.a]\n{SITE.format(2)}[sites.b]\n{SITE.format(1)}{LINK.format('a', 'b')}"


def read(tmp_path, text):
    path = tmp_path / "network.toml"
    path.write_text(text)
    return read_network(path)


def problem(tmp_path, text):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    return str(error.value)


def test_a_file(tmp_path):
    text = GOOD + "back_bandwidth_mbit_per_s = 4\nback_delay_ms = 60\n"
    cluster = read(tmp_path, text).cluster
    assert cluster.site.tolist() == [0, 0, 1]
    assert cluster.link_between(0, 2).transfer_s(1e6) == pytest.approx(1.05)
    assert cluster.link_between(2, 0).transfer_s(1e6) == pytest.approx(2.06)
    assert cluster.link_between(0, 1).transfer_s(1e6) == pytest.approx(0.009)
    assert cluster.between_nodes == cluster.network.slowest


def test_stragglers_machines_memory_and_devices(tmp_path):
    more = 'speeds = [1.0, 0.5]\nmemory_gib = 10\nworkers_per_machine = 2\ndevice = "h100"\n'
    file = read(tmp_path, GOOD.replace("[sites.b]", f"{more}[sites.b]"))
    assert file.cluster.speed.tolist() == [1.0, 0.5, 1.0]
    assert file.cluster.node.tolist() == [0, 0, 1]
    assert file.cluster.memory_bytes[0] == pytest.approx(9 * 2**30)
    assert [preset.device.name for preset in file.presets] == ["h100", "a100"]
    assert file.cluster.device.tolist() == [0, 0, 1]


def test_a_file_that_is_written_says_the_same(tmp_path):
    more = 'speeds = [1.0, 0.5]\nmemory_gib = 10.25\nworkers_per_machine = 2\ndevice = "h100"\n'
    text = GOOD.replace("[sites.b]", f"{more}[sites.b]").replace("sites.b]", 'sites."b c"]').replace('"b"', '"b c"')
    path = tmp_path / "network.toml"
    path.write_text(f'source = "\u00fc, \\"quoted\\""\n{text}back_bandwidth_mbit_per_s = 0.3\nback_delay_ms = 60.1\n')
    parts = read_parts(path)
    path.write_text(network_text(parts))
    assert read_parts(path) == parts
    assert read_network(path).source == parts.source == 'ü, "quoted"'


def test_links_may_be_lacking_where_they_are_to_be_measured(tmp_path):
    path = tmp_path / "network.toml"
    path.write_text(f"{GOOD}[sites.c]\n{SITE.format(1)}")
    assert list(read_parts(path).links) == [("a", "b"), ("b", "a")]
    path.write_text(GOOD.replace("workers = 2", "workers = 0"))
    with pytest.raises(ConfigError, match=r"sites\.a\.workers: got 0"):
        read_parts(path)


def test_scaled_keeps_what_is_in_sites(tmp_path):
    cluster = scaled(read(tmp_path, GOOD).cluster, 80)
    assert cluster.link_between(0, 2).bandwidth_bytes_per_s == pytest.approx(1e7)
    assert cluster.link_between(0, 1).bandwidth_bytes_per_s == pytest.approx(1.25e8)


def test_bad_files_are_refused_with_every_fault(tmp_path):
    assert "there is none; give at least one table [sites.NAME]" in problem(tmp_path, "")
    assert "site: unknown table" in problem(tmp_path, GOOD + "[site]\n")
    assert "source: got 3, expected text" in problem(tmp_path, "source = 3\n" + GOOD)
    assert "sites.a: got 3, expected a table of keys" in problem(tmp_path, "[sites]\na = 3\n")
    assert "links: got 3, expected tables [[links]]" in problem(tmp_path, f"links = 3\n[sites.a]\n{SITE.format(1)}")
    assert "sites.a.delay_ms: is missing" in problem(tmp_path, GOOD.replace("delay_ms = 1\n", "", 1))
    assert "sites.a.workers: got 0" in problem(tmp_path, GOOD.replace("workers = 2", "workers = 0"))
    assert "1 speeds for 2 workers" in problem(tmp_path, GOOD.replace("[sites.b]", "speeds = [1.0]\n[sites.b]"))
    assert "there is no site 'c'; there are a, b" in problem(tmp_path, GOOD + LINK.format("a", "c"))
    assert "a with itself; its own link is in [sites.a]" in problem(tmp_path, GOOD + LINK.format("a", "a"))
    slash = GOOD.replace("[sites.a]", '[sites."a/b"]').replace('"a"', '"a/b"')
    assert "a/b: a site's name stands before the slash of SITE/HOST" in problem(tmp_path, slash)
    assert "a second link between b and a" in problem(tmp_path, GOOD + LINK.format("b", "a"))
    lacking = f"{GOOD}[sites.c]\n{SITE.format(1)}"
    assert "there is none between a and c; give [[links]] with between = ['a', 'c']" in problem(tmp_path, lacking)
    many = f"[sites.a]\n{SITE.format(600)}[sites.b]\n{SITE.format(600)}{LINK.format('a', 'b')}"
    assert "1200 workers in all, at most 1024" in problem(tmp_path, many)
    names = "".join(f"[sites.s{number}]\n{SITE.format(1)}" for number in range(1001))
    assert "there are 1001, at most 1000 are possible" in problem(tmp_path, names)


def test_the_examples():
    four, ten = (read_network(EXAMPLES / f"{name}_regions.toml") for name in ("four", "ten"))
    assert (len(four.cluster.network.sites), four.cluster.num_workers) == (4, 12)
    assert (len(ten.cluster.network.sites), ten.cluster.num_workers) == (10, 48)
    apart = ~np.eye(10, dtype=bool)
    assert ten.cluster.network.latency_s[apart].min() == pytest.approx(0.011)
    assert ten.cluster.network.latency_s[apart].max() == pytest.approx(0.265)
    assert ten.cluster.network.bandwidth_bytes_per_s[apart].min() * 8 == pytest.approx(0.323e9, rel=0.02)
    assert "DT-FM" in ten.source
