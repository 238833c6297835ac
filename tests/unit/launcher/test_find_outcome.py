"""An agent cut off at the end of its job learns how it has ended (H13); commits of its workers are seen (H12)."""

import os
from pathlib import Path

import msgspec
import pytest
from tests.fake_etcd import KEY, STRANGERS, FakeEtcd, FakeGateway, Written, lost

from elaswave.channel.messages.agent import Ended
from elaswave.config.schema import ControlConfig
from elaswave.job.keys import JobKey, KeyRole
from elaswave.launcher.forkserver.messages import CommitCount
from elaswave.launcher.supervisors import find_outcome
from elaswave.observability.events import EventLog, RunFinished
from elaswave.observability.run_folder import EVENTS_FILE, RESULT_FILE
from elaswave.store import opening
from elaswave.store.opening import JobStore

JOB_KEY = JobKey(KEY, None)
ETCD = ControlConfig(store="etcd://a:1,b:2")


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    etcd = FakeEtcd()
    monkeypatch.setattr(opening, "HttpGateway", lambda security: FakeGateway(etcd))
    return etcd


@pytest.mark.parametrize(
    "ended",
    [Ended(outcome="finished"), Ended(outcome="failed", reason="worker 3", worker=3, traceback_text="t", again=True)],
)
def test_the_outcome_stays_in_the_store_until_the_next_job_of_this_name(
    tmp_path: Path, etcd: FakeEtcd, ended: Ended
) -> None:
    job = JobStore(ETCD, tmp_path, tmp_path, KEY, job="demo")
    assert find_outcome(ETCD, "demo", tmp_path, JOB_KEY, job.job_generation) is None, "the job goes on"
    assert job.end("", msgspec.json.encode(ended)) == ""
    assert list(etcd.keys) == [b"/elaswave/demo/outcome"]
    assert find_outcome(ETCD, "demo", tmp_path, JOB_KEY, job.job_generation) == ended
    assert opening.look_for_earlier(ETCD, "demo", KEY).left is None, "it is in nobody's way"
    JobStore(ETCD, tmp_path, tmp_path, KEY, job="demo")
    assert (
        list(etcd.keys) == [b"/elaswave/demo/spec"]
        and find_outcome(ETCD, "demo", tmp_path, JOB_KEY, job.job_generation) is None
    )


def test_a_store_that_does_not_answer_or_refuses_tells_nothing(
    tmp_path: Path, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobStore(ETCD, tmp_path, tmp_path, KEY, job="demo")
    job.end("", msgspec.json.encode(Ended(outcome="finished")))
    monkeypatch.setattr(opening, "HttpGateway", lambda security: FakeGateway(etcd, [lost]))
    assert find_outcome(ETCD, "demo", tmp_path, JOB_KEY, job.job_generation) is None
    config = ControlConfig(store="etcd://a:1", store_credentials=str(tmp_path / "not-on-this-host"))
    assert find_outcome(config, "demo", tmp_path, JOB_KEY, 7) is None
    assert find_outcome(ControlConfig(), "demo", tmp_path, JOB_KEY, 7) is None


def test_a_shared_run_folder_tells_of_the_result_and_nothing_else(tmp_path: Path) -> None:
    """The log's last line may be of one host's part only: a host that has left has written it."""
    with EventLog(tmp_path / EVENTS_FILE) as log:
        log.write(RunFinished(outcome="failed", steps=3, duration_s=1.0, reason="why"))
    assert find_outcome(ControlConfig(), "demo", tmp_path, JOB_KEY, 7) is None
    (tmp_path / RESULT_FILE).write_text("{}")
    assert find_outcome(ControlConfig(), "demo", tmp_path, JOB_KEY, 7) == Ended(outcome="finished")


def test_a_commit_of_a_forked_worker_is_seen() -> None:
    commits = CommitCount()
    pid = os.fork()
    if pid == 0:
        commits.add()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert commits.value == 1


def test_an_outcome_that_a_stranger_has_written_or_that_is_of_another_founding_ends_nobody(
    tmp_path: Path, etcd: FakeEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    ended, key = msgspec.json.encode(Ended(outcome="finished")), b"/elaswave/demo/outcome"
    earlier = JobStore(ETCD, tmp_path, tmp_path, KEY, job="demo")
    earlier.end("", ended)
    old = etcd.keys[key].value
    job = JobStore(ETCD, tmp_path, tmp_path, KEY, job="demo")
    other = JobStore(ETCD, tmp_path, tmp_path, STRANGERS, job="other")
    other.end("", ended)
    for forged in (ended, old, etcd.keys[b"/elaswave/other/outcome"].value, b"", b"x" * 2**20):
        etcd.keys[key] = Written(forged, 99, 1)
        assert find_outcome(ETCD, "demo", tmp_path, JOB_KEY, job.job_generation) is None
        assert opening.read_outcome(ETCD, "demo", KEY, job.job_generation) is None
    assert "the outcome there was not written for this job with its key" in caplog.text
    job.end("", ended)
    assert find_outcome(ETCD, "demo", tmp_path, JOB_KEY, job.job_generation) == Ended(outcome="finished")
    caplog.clear()
    joining = JobKey(JOB_KEY.held(KeyRole.JOINING), None, KeyRole.JOINING)
    assert find_outcome(ETCD, "demo", tmp_path, joining, job.job_generation) is None
    assert not caplog.text, "it cannot tell who has written it, and asks nobody"
