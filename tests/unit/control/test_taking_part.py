"""What an agent finds out before it takes part: whether its job runs already, and whose coordinator is there."""

from pathlib import Path

import pytest
from tests.fake_etcd import FakeEtcd, FakeGateway

from elaswave.config.load import load_config
from elaswave.control import open_store, taking_part
from elaswave.control.host_network import Seed
from elaswave.control.journal import ClockRead
from elaswave.control.key_files import JobKey
from elaswave.control.local_job import ELECT_S
from elaswave.control.open_store import JobStore
from elaswave.control.store import Owner
from elaswave.control.taking_part import AgentOptions
from elaswave.errors import RetryError

OWNER = Owner(post=lambda call: call(), turn=lambda: None, say=print, broken=print)
SEEDS = (Seed("10.0.0.1", 7077, "10.0.0.1"), Seed("10.0.0.2", 7077, "10.0.0.2"))


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    etcd = FakeEtcd()
    monkeypatch.setattr(open_store, "HttpGateway", lambda security: FakeGateway(etcd))
    return etcd


def host_of(wait_s: float = 600.0, seeds: tuple[Seed, ...] = SEEDS) -> taking_part._Host:
    options = AgentOptions("demo", "10.0.0.1:7077,10.0.0.2:7077", "a", wait_s=wait_s)
    config = load_config(None, ("net.transport=tcp", "control.store=etcd://a:1"))
    return taking_part._Host(options, config, True, seeds, 0, JobKey(b"k" * 32, None), 1)


def test_a_job_is_founded_again_only_once_none_of_its_coordinators_writes(
    tmp_path: Path, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founder's agent is started again, and can reach the store but no other host."""
    host = host_of()
    JobStore(host.config.control, tmp_path, tmp_path, job="demo")
    store = open_store.open_store(host.config.control, tmp_path, tmp_path, OWNER, job="demo")
    waits: list[float] = []

    def nobody_answers(asked: taking_part._Host, wait_s: float) -> None:
        waits.append(wait_s)
        if len(waits) < 3:  # the coordinator that is not reached from here
            store.append(ClockRead(clock="c", at_s=1.0 * len(waits)))
        raise RetryError("nobody")

    monkeypatch.setattr(taking_part, "_ask", nobody_answers)
    with pytest.raises(RetryError, match="job demo runs, for its coordinator writes to etcd://a:1, but there is none"):
        taking_part._ask_whether_it_runs(host_of(wait_s=0.0))
    assert etcd.keys
    assert taking_part._ask_whether_it_runs(host) is None
    store.close()
    assert waits == [ELECT_S * 3 + taking_part.STARTS_S] * 3 and not etcd.keys
    assert taking_part._ask_whether_it_runs(host) is None
    assert waits[3:] == [taking_part.RUNS_S], "nothing is left of it"


def test_the_only_candidate_removes_what_its_earlier_agent_has_left(tmp_path: Path, etcd: FakeEtcd) -> None:
    host = host_of(seeds=SEEDS[:1])
    JobStore(host.config.control, tmp_path, tmp_path, job="demo")
    assert taking_part._ask_whether_it_runs(host) is None and not etcd.keys
