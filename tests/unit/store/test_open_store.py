"""Which store a configuration names, and what its launcher says of one that cannot be used."""

from pathlib import Path

import pytest
from tests.fake_etcd import KEY, FakeEtcd, FakeGateway, Written, answer_lost, fine, lost

from elaswave.config.schema import ControlConfig
from elaswave.errors import ConfigError, LaunchError, RecoveryError
from elaswave.store import opening as module
from elaswave.store.etcd_entries import entry_key
from elaswave.store.file_store import FileStore
from elaswave.store.opening import JobStore, open_store
from elaswave.store.store import ClockRead, Owner

OWNER = Owner(post=lambda call: call(), turn=lambda: None, say=print, broken=print)
ETCD = ControlConfig(store="etcd://a:1,b:2", store_patience_s=5.0)


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    etcd = FakeEtcd()
    monkeypatch.setattr(module, "HttpGateway", lambda security: FakeGateway(etcd))
    return etcd


def test_the_default_is_a_file_that_must_stay(tmp_path: Path) -> None:
    job = JobStore(ControlConfig(), tmp_path / "run", tmp_path, KEY)
    job.check()
    store = open_store(ControlConfig(), tmp_path / "run", tmp_path, OWNER, KEY)
    assert isinstance(store, FileStore) and job.patience_s == 0
    store.close()
    (tmp_path / module.JOURNAL_FILE).unlink()
    with pytest.raises(RecoveryError, match="the coordinator is lost, and so is its journal: .* was removed"):
        job.check()
    assert job.end() == ""


def test_a_job_has_keys_of_its_own_from_start_to_end(tmp_path: Path, etcd: FakeEtcd) -> None:
    folders = [tmp_path / "elaswave-aaa", tmp_path / "elaswave-bbb"]
    jobs = [JobStore(ETCD, tmp_path / "run", folder, KEY) for folder in folders]
    assert sorted(etcd.keys) == [b"/elaswave/run-aaa/spec", b"/elaswave/run-bbb/spec"]
    store = open_store(ETCD, tmp_path / "run", folders[0], OWNER, KEY)
    store.close()
    jobs[0].check()
    assert jobs[0].patience_s == 5.0
    assert jobs[0].end() == jobs[0].end() == ""
    assert list(etcd.keys) == [b"/elaswave/run-bbb/spec"]


def test_keys_that_cannot_be_removed_are_named(tmp_path: Path, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMOVE_S", 0.0)
    job = JobStore(ETCD, tmp_path / "run", tmp_path / "elaswave-aaa", KEY)
    assert isinstance(job._client, module.EtcdClient)
    job._client._gateway = FakeGateway(etcd, [lost])
    assert (
        "its keys below /elaswave/run-aaa/ stay in etcd: etcd://a:1,b:2/elaswave/run-aaa/ has not answered" in job.end()
    )


@pytest.mark.parametrize("is_patient", [True, False])
def test_how_a_job_has_ended_is_written_once_etcd_answers_again(
    tmp_path: Path, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch, is_patient: bool
) -> None:
    monkeypatch.setattr(module, "REMOVE_S", 0.0)
    job = JobStore(ETCD, tmp_path / "run", tmp_path, KEY, job="demo")
    assert isinstance(job._client, module.EtcdClient)
    job._client._gateway = FakeGateway(etcd, [lost, answer_lost, fine, lost, answer_lost])
    said: list[str] = []
    trouble = job.end("a", b"finished", job.job_generation, is_patient=is_patient, say=said.append)
    kept = [b"/elaswave/demo/outcome"] if is_patient else [b"/elaswave/demo/spec"]
    assert list(etcd.keys) == kept
    if is_patient:
        assert trouble == ""
        (line,) = said
        assert "does not answer, and is to keep how it has ended for hosts that were cut off" in line
        assert "for up to 5 s" in line
        assert module.read_outcome(ETCD, "demo", KEY, job.job_generation) == b"finished"
    else:
        assert "its keys below /elaswave/demo/ stay in etcd" in trouble and said == []


def test_credentials_are_in_a_file_that_nobody_else_reads(tmp_path: Path, etcd: FakeEtcd) -> None:
    path = tmp_path / "secret"
    config = ControlConfig(store="etcd://a:1", store_credentials=str(path))
    for content, mode, problem in (
        (None, 0, "cannot be read: No such file"),
        ("ann:b:c\n", 0o644, "others can read"),
        ("ann\n", 0o600, "holds no USER:PASSWORD"),
    ):
        if content is not None:
            path.write_text(content)
            path.chmod(mode)
        with pytest.raises(
            LaunchError, match=f"the job's store cannot be used: .*control.store_credentials: .*{problem}"
        ):
            JobStore(config, tmp_path / "run", tmp_path, KEY)
    path.write_text("ann:b:c\n")
    assert module._credentials(path) == ("ann", "b:c")


@pytest.mark.parametrize("store", ["zookeeper://a:1", "etcd://", "etcd://a/b", "", "etcd:a:1"])
def test_a_store_of_another_kind_is_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="control.store"):
        ControlConfig(store=store)


def test_a_job_that_writes_is_not_removed_by_who_founds_it_again(tmp_path: Path, etcd: FakeEtcd) -> None:
    assert module.look_for_earlier(ControlConfig(), "demo", KEY) == (None, None), "a file is no other host's"
    assert module.look_for_earlier(ETCD, "demo", KEY) == (None, None)
    JobStore(ETCD, tmp_path / "run", tmp_path, KEY, job="demo")
    job_generation = module.look_for_earlier(ETCD, "demo", KEY).left
    store = open_store(ETCD, tmp_path / "run", tmp_path, OWNER, KEY, job="demo")
    opened = module.look_for_earlier(ETCD, "demo", KEY).left
    store.append(ClockRead(clock="c", at_s=1.0))
    store.close()
    assert job_generation is not None and opened is not None
    before = dict(etcd.keys)
    for seen in (job_generation, opened):
        assert not module.remove_earlier(ETCD, "demo", KEY, seen).succeeded and etcd.keys == before
    with pytest.raises(LaunchError, match="holds another job"):
        JobStore(ETCD, tmp_path / "other", tmp_path, KEY, job="demo")
    assert etcd.keys == before
    written = module.look_for_earlier(ETCD, "demo", KEY).left
    assert written is not None and (opened.next_entry, written.next_entry) == (entry_key(0), entry_key(1))
    etcd.keys[f"/elaswave/demo/{entry_key(1)}".encode()] = Written(b"a stranger's", 999, 1)
    assert not module.remove_earlier(ETCD, "demo", KEY, written).succeeded
    beside = module.look_for_earlier(ETCD, "demo", KEY).left
    assert beside == written._replace(in_its_place=999)
    kept = dict(etcd.keys)
    assert module.remove_earlier(ETCD, "demo", KEY, beside).succeeded and not etcd.keys, "it hinders nobody"
    etcd.keys = {key: value for key, value in kept.items() if value.revision != 999}
    assert module.remove_earlier(ETCD, "demo", KEY, written).succeeded and not etcd.keys
    again = module.remove_earlier(ETCD, "demo", KEY, written)
    assert not again.succeeded and again.found == (None,), "an answer that was lost: the request is said again"
    JobStore(ETCD, tmp_path / "run", tmp_path, KEY, job="demo")
    assert not module.remove_earlier(ETCD, "demo", KEY, written).succeeded and etcd.keys, "a request that comes late"
