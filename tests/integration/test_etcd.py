"""Jobs whose coordinators keep what they decide in a real etcd, which fails too."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.etcd_processes import Member, cluster, needs_etcd
from tests.fake_etcd import KEY, STRANGERS
from tests.integration.jobs import QuietReporter, run_job

from elaswave.errors import ElaswaveError, LaunchError, RetryError
from elaswave.observability.processes import read_processes
from elaswave.store.etcd_client import EtcdClient, HttpGateway

pytestmark = needs_etcd


def store_of(members: list[Member]) -> str:
    return f"etcd://{','.join(member.endpoint for member in members)}"


def keys_in(member: Member) -> list[str]:
    with closing(EtcdClient([member.endpoint], "/elaswave/", HttpGateway(), KEY)) as client:
        (found,) = client.transact([], [client.get_from("", "~", 1000, keys_only=True)]).ranges
    return [key.key for key in found]


class Watcher(QuietReporter):
    """Acts when a step is shown, or when something is said."""

    def __init__(
        self,
        on_step: dict[int, Callable[[], None]] | None = None,
        on_error: tuple[str, Callable[[], None]] | None = None,
    ) -> None:
        super().__init__()
        self._on_step = on_step or {}
        self._on_error = on_error

    def step(self, step: int, *arguments: object) -> None:  # type: ignore[override]
        super().step(step, *arguments)  # type: ignore[arg-type]
        self._on_step.pop(step, lambda: None)()

    def error(self, text: str) -> None:
        super().error(text)
        if self._on_error is not None and self._on_error[0] in text:
            act, self._on_error = self._on_error[1], None
            act()


def test_a_coordinator_that_is_killed_is_followed_by_one_that_reads_etcd(tmp_path: Path) -> None:
    with cluster(1) as members:
        settings = {"run.steps": 12, "control.store": store_of(members)}
        job = run_job(tmp_path / "run", settings, faults=["kill:coordinator@8", "kill:2@5:backward"])
        # What the first coordinator had not written yet the workers have told the next one, after its own beginning.
        assert sorted(recovery.kind for recovery in job.result.recoveries) == ["coordinator", "lost"]
        assert keys_in(members[0]) == [], "the job is over"
    assert job.computation == run_job(tmp_path / "reference", {"run.steps": 12}).computation


@pytest.mark.slow
def test_steps_go_on_and_are_shown_while_etcd_has_no_quorum(tmp_path: Path) -> None:
    with cluster(3) as members:

        def stop() -> None:
            for member in members[1:]:
                member.stop()

        def go_on() -> None:
            for member in members[1:]:
                member.go_on()

        reporter = Watcher({4: stop, 30: go_on})
        settings = {"run.steps": 40, "control.store": store_of(members)}
        job = run_job(tmp_path / "run", settings, reporter=reporter)
    assert sorted(reporter.losses) == list(range(1, 41)) and job.result.recoveries == []


def test_etcd_that_is_not_there_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaswave.store.opening.FOUND_S", 0.2)
    with pytest.raises(LaunchError, match="the job's store cannot be used: etcd://127.0.0.1:1/elaswave/run-.*refused"):
        run_job(tmp_path / "run", {"control.store": "etcd://127.0.0.1:1"})


@pytest.mark.slow
def test_a_loss_waits_for_a_quorum_of_10_s_and_nothing_is_lost(tmp_path: Path) -> None:
    with cluster(3) as members:
        timers = []

        def stop() -> None:
            for member in members[1:]:
                member.stop()

        def go_on_later() -> None:
            timers.append(threading.Timer(10.0, lambda: [member.go_on() for member in members[1:]]))
            timers[0].start()

        reporter = Watcher({4: stop}, ("the coordinator waits for its store", go_on_later))
        settings = {"run.steps": 20, "control.store": store_of(members)}
        job = run_job(tmp_path / "run", settings, faults=["kill:2@8:backward"], reporter=reporter)
        assert any("answers again" in text for text in reporter.errors)
        timers[0].join()
    assert [recovery.kind for recovery in job.result.recoveries] == ["lost"]
    assert job.computation == run_job(tmp_path / "reference", {"run.steps": 20}).computation


@pytest.mark.slow
def test_a_coordinator_lost_together_with_a_member_is_followed(tmp_path: Path) -> None:
    with cluster(3) as members:
        reporter = Watcher({7: members[0].kill})
        settings = {"run.steps": 40, "control.store": store_of(members)}
        job = run_job(tmp_path / "run", settings, faults=["kill:coordinator@8", "kill:2@20"], reporter=reporter)
    assert {recovery.kind for recovery in job.result.recoveries} == {"lost", "coordinator"}
    assert job.computation == run_job(tmp_path / "reference", {"run.steps": 40}).computation


@pytest.mark.slow
@pytest.mark.parametrize("loses", ["worker", "coordinator"])
def test_an_older_copy_of_etcd_ends_the_job(tmp_path: Path, loses: str) -> None:
    """The coordinator that wrote what is gone finds out by itself, one that follows it by what members have heard."""
    copy = tmp_path / "copy"
    with cluster(1) as members:
        (member,) = members
        data = member.folder

        def back_up() -> None:
            member.kill()
            shutil.copytree(data, copy)
            member.start()

        def put_back() -> None:
            member.kill()
            if loses == "coordinator":
                (pid,) = (each.pid for each in read_processes(tmp_path / "run") if each.role == "coordinator")
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(data)
            shutil.copytree(copy, data)
            member.start()

        faults = ["kill:3@12", *(["kill:2@30"] if loses == "worker" else [])]
        settings = {"run.steps": 5000, "control.store": store_of(members)}
        which = "a member has heard of" if loses == "coordinator" else "there were .* is not there"
        with pytest.raises(ElaswaveError, match=f"has gone back, as if an older copy .* the job ran: {which}"):
            run_job(tmp_path / "run", settings, faults=faults, reporter=Watcher({5: back_up, 24: put_back}))


@pytest.mark.slow
def test_a_loss_that_etcd_never_takes_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    with cluster(1) as members:
        settings = {"run.steps": 40, "control.store": store_of(members), "control.store_patience_s": 3}
        with pytest.raises(RetryError, match="has not taken a record for 3 s .*control.store_patience_s"):
            run_job(tmp_path / "run", settings, faults=["kill:2@8"], reporter=Watcher({4: members[0].stop}))


@pytest.mark.slow
def test_a_stranger_who_writes_to_etcd_ends_no_job_and_changes_no_bit(tmp_path: Path) -> None:
    with cluster(1) as members:
        (member,) = members

        def forge() -> None:
            (name,) = {key.partition("/")[0] for key in keys_in(member)}
            with closing(EtcdClient([member.endpoint], f"/elaswave/{name}/", HttpGateway(), STRANGERS)) as client:
                client.job_generation = 1
                puts = [client.put(key, b'{"term": 99, "holder": "x"}') for key in ("spec", "term", "beat", "outcome")]
                puts += [client.put(f"rec/{number:016d}", b"forged") for number in range(90, 100)]
                assert client.transact([], puts).succeeded

        settings = {"run.steps": 40, "control.store": store_of(members)}
        job = run_job(tmp_path / "run", settings, faults=["kill:2@20"], reporter=Watcher({5: forge}))
    assert {recovery.kind for recovery in job.result.recoveries} >= {"lost"}
    assert job.computation == run_job(tmp_path / "reference", {"run.steps": 40}).computation
