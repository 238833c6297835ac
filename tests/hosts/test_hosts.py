"""Jobs on hosts that die and are cut off: namespaces with a network, a process table and a clock of their own each."""

from pathlib import Path
from typing import Any

import pytest
from tests.agents import Agents
from tests.hosts.world import World, lacking
from tests.integration.jobs import SMALL, run_job

from elaswave.observability.result import read_digests, read_result

REASON = lacking()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")]

SIX = {
    **SMALL,
    "layout.widths": "[3, 3]",
    "elastic.num_followers": 5,
    "net.trusted": True,
    "run.steps": 60,
}
"""Six workers, two on each of three hosts, and copies of everything on all of them."""


def lost(agents: Agents) -> list[dict[str, Any]]:
    found = [event["recovery"] for event in agents.events("recovery")]
    return [each for each in found if each["kind"] == "lost"]


def computation(run_dir: Path) -> tuple[list[Any], str, dict[str, str] | None]:
    result = read_result(run_dir)
    return result.losses, result.state_digest, read_digests(run_dir)


def start_three(agents: Agents, hosts: list[Any]) -> list[Any]:
    """The same command on each host: who founds the job follows from where the coordinator is dialled."""
    return [agents.start(f"h{number}", founds=True, before=host.enter()) for number, host in enumerate(hosts, 1)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one machine computes."""
    return run_job(tmp_path_factory.mktemp("reference"), {**SIX, "net.trusted": False}).computation


def test_a_host_is_killed_and_survivors_go_on_to_the_same_bits(tmp_path: Path, reference: Any) -> None:
    with World(3) as hosts, Agents(tmp_path, {**SIX, "control.hosts": 3}, f"{hosts[0].address}:7077") as agents:
        first, _, third = start_three(agents, hosts)
        agents.wait_for_step(5)
        hosts[1].kill()
        assert (first.end(), third.end()) == (0, 0)
    losses = lost(agents)
    assert len(losses) == 2 and len({each["epoch"] for each in losses}) == 1, f"one event: {losses}"
    assert {each["critical_bytes"] for each in losses} == {0}
    assert computation(agents.run_dir) == reference


def test_a_host_that_is_cut_off_is_one_loss_and_may_not_come_back_as_it_was(tmp_path: Path, reference: Any) -> None:
    settings = {**SIX, "control.hosts": 3, "run.steps": 60}
    with World(3) as hosts, Agents(tmp_path, settings, f"{hosts[0].address}:7077") as agents:
        first, second, third = start_three(agents, hosts)
        agents.wait_for_step(5)
        hosts[1].cut()
        agents.wait_for(lambda: len(lost(agents)) == 2, "the loss of the host")
        hosts[1].heal()
        assert (first.end(), third.end()) == (0, 0)
        assert second.end() in (75, 0), second.text
    losses = lost(agents)
    assert len({each["epoch"] for each in losses}) == 1, f"one event: {losses}"
    assert computation(agents.run_dir) == reference
