"""`elaswave probe` between hosts: what it finds of wires that are slow, and slower in one direction."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hosts.world import World, lacking

REASON = lacking()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")]

OUT_MBIT, BACK_MBIT = 4.0, 0.8
DELAY_S = 0.03
COMMAND = [sys.executable, "-m", "elaswave", "probe"]


def test_a_link_with_two_rates_is_measured(tmp_path: Path) -> None:
    key = tmp_path / "job.key"
    key.touch(0o600)
    key.write_text("5a" * 32)
    environment = {**os.environ, "ELASWAVE_KEY_FILE": str(key)}
    sites = tmp_path / "sites.toml"
    sites.write_text(
        "".join(f"[sites.{name}]\nworkers = 1\nbandwidth_mbit_per_s = 1000\ndelay_ms = 1\n" for name in ("a", "b"))
    )
    with World(2, delay_s=DELAY_S, mtu_bytes=1500) as world:
        one, two = world.hosts
        for source, target, rate in ((one, two, OUT_MBIT), (two, one, BACK_MBIT)):
            for wire in world.wires([source], [target]):
                wire.rate_bytes_per_s = rate * 1e6 / 8
        answers = subprocess.Popen(
            [*two.enter(), *COMMAND, "--answer", f"{two.address}:7070", "--for", "300"],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert answers.stdout is not None and "answers probes" in answers.stdout.readline()
            done = subprocess.run(
                [*one.enter(), *COMMAND, str(sites), "--from", "a", "--to", f"b={two.address}:7070", "--json",
                 "--output", str(sites)],
                env=environment, capture_output=True, text=True, timeout=200,
            )  # fmt: skip
        finally:
            answers.kill()
            answers.wait()
            answers.stdout.close()
    assert done.returncode == 0, done.stderr
    (link,) = json.loads(done.stdout)["links"]
    print(link)
    # Headers of packets are a part of the rate that data does not have.
    assert link["bandwidth_mbit_per_s"] == pytest.approx(OUT_MBIT * 1448 / 1500, rel=0.1)
    assert link["back_bandwidth_mbit_per_s"] == pytest.approx(BACK_MBIT * 1448 / 1500, rel=0.1)
    assert 1e3 * DELAY_S <= link["delay_ms"] < 3e3 * DELAY_S
    assert "measured from a: b" in sites.read_text()
