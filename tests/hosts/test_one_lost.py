"""One host of two is killed: the case of jobs on hosts that runs with the quick tests, where there can be hosts.

It asks for nothing that depends on how busy the machine is: a host that is late may be given up before it is killed.
"""

from pathlib import Path

import pytest
from tests.agents import Agents
from tests.hosts.world import World, lacking
from tests.integration.jobs import SMALL, run_job
from tests.integration.test_agents import finished, recoveries

REASON = lacking()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")

TWO = {**SMALL, "layout.widths": "[2]", "elastic.num_followers": 1, "run.steps": 150}


@pytest.mark.slow
def test_a_host_is_lost_and_the_other_one_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    with World(2) as world:
        settings = {**TWO, "control.hosts": 2, "net.trusted": True}
        with Agents(tmp_path, settings, f"{world.hosts[0].address}:7077") as agents:
            founder, other = [
                agents.start(f"h{host.number}", creates_job=True, before=host.enter()) for host in world.hosts
            ]
            agents.wait_for_step(3)
            world.hosts[1].kill()
            assert founder.end() == 0, founder.text
            assert other.process.wait() != 0
        (loss,) = recoveries(agents, "lost")
        assert (loss["worker"], loss["critical_bytes"]) == (1, 0)
        assert finished(agents.run_dir).computation == run_job(tmp_path / "one", TWO).computation
