"""A host behind a router: it takes part if its ports are forwarded as they are, and is refused if they are not."""

from pathlib import Path
from typing import Any

import pytest
from tests.agents import Agents
from tests.hosts.nat import HiddenHost, lacking_nat
from tests.hosts.world import World, lacking
from tests.integration.jobs import SMALL, run_job
from tests.integration.test_agents import finished, recoveries

REASON = lacking() or lacking_nat()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(REASON), reason=REASON or "there can be routers")]

TWO = {**SMALL, "layout.widths": "[2]", "elastic.num_followers": 1}
PORTS = range(7001, 7003)
HOSTS: dict[str, Any] = {"control.hosts": 2, "net.trusted": True}


def behind(router: str) -> tuple[str, ...]:
    """Options of an agent whose worker listens at one of `PORTS`, and is dialled at the router's."""
    return ("--set", f"net.ports={PORTS[0]}-{PORTS[-1]}", "--set", f"net.advertise={router}")


def test_a_host_whose_port_is_forwarded_takes_part(tmp_path: Path) -> None:
    with World(2) as world, HiddenHost(world.hosts[1], {port: port for port in PORTS}) as hidden:
        settings = {**TWO, **HOSTS, "run.steps": 40}
        with Agents(tmp_path, settings, f"{world.hosts[0].address}:7077") as agents:
            founder = agents.start("h1", creates_job=True, before=world.hosts[0].enter())
            options = behind(world.hosts[1].address)
            other = agents.start("h2", *options, creates_job=True, before=hidden.enter())
            assert (founder.end(), other.end()) == (0, 0), (founder.text, other.text)
        assert recoveries(agents, "lost") == []
        assert finished(agents.run_dir).computation == run_job(tmp_path / "one", {**TWO, "run.steps": 40}).computation


@pytest.mark.parametrize("comes", ["at the beginning", "later"])
def test_a_host_whose_port_becomes_another_one_is_refused_and_both_sides_say_why(tmp_path: Path, comes: str) -> None:
    """The router forwards other ports of its own. The creator's worker, whose id is lower, dials those of the host."""
    with World(2) as world, HiddenHost(world.hosts[1], {10_000 + port: port for port in PORTS}) as hidden:
        settings = {**TWO, **HOSTS, "run.steps": 100_000, "optimizer.schedule": "constant"}
        if comes == "later":
            settings |= {"control.hosts": 1, "layout.widths": "[1]", "elastic.num_followers": 0}
        with Agents(tmp_path, settings, f"{world.hosts[0].address}:7077") as agents:
            founder = agents.start("h1", "--slots", "1", creates_job=True, before=world.hosts[0].enter())
            if comes == "later":
                agents.wait_for_step(3)
            options = (*behind(world.hosts[1].address), "--slots", "1")
            other = agents.start("h2", *options, "--set", "net.trusted=true", before=hidden.enter())
            words = f"does not answer at tcp:{world.hosts[1].address}:700"
            for agent in (founder, other):
                agents.wait_for(lambda agent=agent: words in agent.text, "the refusal")
            agents.wait_for_step(max((event["step"] for event in agents.events("step")), default=0) + 3)
            founder.signal(15)
            assert founder.end() == 143, founder.text
            other.end()
        assert "net.advertise" in founder.text
        assert recoveries(agents, "joined") == []
