"""An agent cut off at the end of its job learns how it has ended (H13); commits of its workers are seen (H12)."""

import os
from pathlib import Path

import msgspec
import pytest
from tests.fake_etcd import FakeEtcd, FakeGateway, lost

from elaswave.config.schema import ControlConfig
from elaswave.control import open_store
from elaswave.control.agent_messages import Ended
from elaswave.control.commit_count import CommitCount
from elaswave.control.late_outcome import LateOutcome
from elaswave.control.open_store import JobStore
from elaswave.observability.events import EventLog, RunFinished
from elaswave.observability.result import EVENTS_FILE, RESULT_FILE

ETCD = ControlConfig(store="etcd://a:1,b:2")


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    etcd = FakeEtcd()
    monkeypatch.setattr(open_store, "HttpGateway", lambda security: FakeGateway(etcd))
    return etcd


@pytest.mark.parametrize(
    "ended",
    [Ended(outcome="finished"), Ended(outcome="failed", reason="worker 3", worker=3, traceback_text="t", again=True)],
)
def test_the_outcome_stays_in_the_store_until_the_next_job_of_this_name(
    tmp_path: Path, etcd: FakeEtcd, ended: Ended
) -> None:
    late = LateOutcome(ETCD, "demo", tmp_path)
    job = JobStore(ETCD, tmp_path, tmp_path, job="demo")
    assert late.seek() is None, "the job goes on"
    assert job.end("", msgspec.json.encode(ended)) == ""
    assert list(etcd.keys) == [b"/elaswave/demo/outcome"]
    assert late.seek() == ended
    assert open_store.find_earlier(ETCD, "demo") is None, "it is in nobody's way"
    JobStore(ETCD, tmp_path, tmp_path, job="demo")
    assert list(etcd.keys) == [b"/elaswave/demo/spec"] and late.seek() is None


def test_a_store_that_does_not_answer_or_refuses_tells_nothing(
    tmp_path: Path, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    JobStore(ETCD, tmp_path, tmp_path, job="demo").end("", msgspec.json.encode(Ended(outcome="finished")))
    monkeypatch.setattr(open_store, "HttpGateway", lambda security: FakeGateway(etcd, [lost]))
    assert LateOutcome(ETCD, "demo", tmp_path).seek() is None
    config = ControlConfig(store="etcd://a:1", store_credentials=str(tmp_path / "not-on-this-host"))
    assert LateOutcome(config, "demo", tmp_path).seek() is None
    assert LateOutcome(ControlConfig(), "demo", tmp_path).seek() is None


@pytest.mark.parametrize(("outcome", "told"), [("failed", "failed"), ("interrupted", "stopped")])
def test_a_shared_run_folder_tells_it_too_but_not_of_earlier_parts_of_the_job(
    tmp_path: Path, outcome: str, told: str
) -> None:
    ending = RunFinished(outcome=outcome, steps=3, duration_s=1.0, reason="why")  # type: ignore[arg-type]
    late = LateOutcome(ControlConfig(), "demo", tmp_path)
    assert late.seek() is None
    with EventLog(tmp_path / EVENTS_FILE) as log:
        log.write(ending)
    assert late.seek() == Ended(outcome=told, reason="why")
    next_part = LateOutcome(ControlConfig(), "demo", tmp_path)
    assert next_part.seek() is None
    (tmp_path / RESULT_FILE).write_text("{}")
    assert next_part.seek() == Ended(outcome="finished")


def test_a_commit_of_a_forked_worker_is_seen() -> None:
    commits = CommitCount()
    pid = os.fork()
    if pid == 0:
        commits.add()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert commits.value == 1
