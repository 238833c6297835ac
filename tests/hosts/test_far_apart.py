"""Sites that are really joined by slow links: what steps over them take, and whether data delays heartbeats."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.far_step import far_step
from tests.agents import Agents
from tests.hosts.world import World, lacking
from tests.integration.jobs import SMALL, run_job

from elaswave.config.cluster import cluster_of
from elaswave.config.load import load_config, own_costs
from elaswave.engine.blueprint import Blueprint
from elaswave.observability.result import read_result

REASON = lacking()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")]

DELAY_S = 0.02
VOTE_BYTES = 2000
SETTINGS: dict[str, Any] = {
    **SMALL,
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.num_heads": 2,
    "model.context_length": 64,
    "batch.num_microbatches": 8,
    "batch.microbatch_size": 2,
    "layout.widths": [1, 1],
    "run.steps": 4,
    "elastic.rebalance": False,
    "run.checkpoint_every_s": 0,
}


def network(folder: Path, mbit_per_s: float) -> Path:
    file = folder / "network.toml"
    sites = "".join(
        f"[sites.{name}]\nworkers = 1\nbandwidth_mbit_per_s = 1000\ndelay_ms = 0.1\n" for name in ("oslo", "quito")
    )
    link = f'[[links]]\nbetween = ["oslo", "quito"]\nbandwidth_mbit_per_s = {mbit_per_s}\ndelay_ms = {1e3 * DELAY_S}\n'
    file.write_text(sites + link)
    return file


def predicted_s(settings: Mapping[str, Any]) -> float:
    """By the plan's programs over the file's links, at the rate that data is paced to."""
    words = [f"{key}={str(value).replace(chr(39), chr(34))}" for key, value in settings.items()]
    config = load_config(None, [word.replace("=True", "=true").replace("=False", "=false") for word in words])
    plan = Blueprint(config)
    return far_step(
        plan.layout, plan.programs, plan.placement, plan.blocks, own_costs(config), cluster_of(config),
        vote_bytes=VOTE_BYTES,
    ).step_s  # fmt: skip


@pytest.mark.parametrize("mbit_per_s", [0.4, 0.5, 0.8])
def test_steps_take_what_was_predicted_and_data_loses_nobody(tmp_path: Path, mbit_per_s: float) -> None:
    """Unpaced, TCP fills the queue before the link with data, and heartbeats stand behind it."""
    with World(2, mtu_bytes=1500) as world:
        one, two = world.hosts
        apart = SETTINGS | {
            "sites.network": str(network(tmp_path, mbit_per_s)),
            "sites.links": "real",
            "sites.coordinator": "oslo",
            "elastic.hosts": ["oslo/h1=1", "quito/h2=1"],
            "net.transport": "tcp",
            "net.trusted": True,
            "control.hosts": 2,
        }
        with Agents(tmp_path / "job", apart, f"{one.address}:7077") as agents:
            started = [agents.start(f"h{host.number}", creates_job=True, before=host.enter()) for host in world.hosts]
            for wire in world.wires(world.hosts, world.hosts):
                wire.delay_s, wire.rate_bytes_per_s = DELAY_S, mbit_per_s * 1e6 / 8
            assert [agent.end() for agent in started] == [0, 0]
            steps_s = [event["duration_s"] for event in agents.events("step")][1:]
            assert not agents.events("recovery")
        longest_s = max(wire.longest_s for wire in world.wires([two], [one]))
    measured_s, expected_s = statistics.median(steps_s), predicted_s(apart)
    print(f"{mbit_per_s:g} Mbit/s: predicted {expected_s:.2f} s, measured {measured_s:.2f} s, queue {longest_s:.3f} s")
    assert measured_s == pytest.approx(expected_s, rel=0.1)
    assert longest_s < 0.5, "nothing stood before the link for longer"
    alone = {key: value for key, value in SETTINGS.items() if not key.startswith("layout")}
    reference = run_job(tmp_path / "alone", alone | {"layout.widths": [1]}).computation
    assert (read_result(agents.run_dir).losses, read_result(agents.run_dir).state_digest) == reference[:2]
