"""What the launcher does when a commit ends, or the forkserver: without processes."""

import asyncio
import errno
import json
import os
import selectors
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.channel.messages.agent import (
    AgentKeysTaken,
    BreakOffCommit,
    CheckpointCommitted,
    CommitCheckpoint,
    Ended,
    Exited,
    StopAsked,
)
from elaswave.channel.messages.worker import KeysNow
from elaswave.config.schema import ControlConfig
from elaswave.coordinator.process import DISPLACED, PORT_TAKEN, STORE_GONE, CoordinatorProcess
from elaswave.errors import LaunchError, RecoveryError, RetryError, StoppedBySignalError
from elaswave.job.keys import JobKey, KeyRole, next_file
from elaswave.job.setup import AgentRole, own_role
from elaswave.launcher import local_job
from elaswave.launcher.forkserver import messages as template_messages
from elaswave.launcher.forkserver.messages import (
    AbandonCommits,
    CommitDone,
    CommitShards,
    KeysHeld,
    SpawnCoordinator,
    TakeKeys,
)
from elaswave.launcher.local_job import STOP_GRACE_S, LocalJob, StopRequest, with_ends
from elaswave.launcher.processes import LauncherWaits
from elaswave.launcher.supervisors import (
    AgentKeys,
    CandidateReports,
    CoordinatorStarts,
    CoordinatorSupervisor,
    LogSending,
    WorkerSupervisor,
)
from elaswave.observability.processes import ProcessFacts
from elaswave.protocol.membership.agent import STAND_BY_AGAIN_S, Agent, Standby
from elaswave.protocol.membership.effects import SpawnJoiner
from elaswave.store.claim import CandidateProgress, CandidateStage
from elaswave.store.opening import JobStore
from elaswave.system.processes import how_it_ended
from elaswave.transport.handshake import Secrets


class Launcher(LocalJob):
    """A launcher whose coordinator has just been lost; its processes take note of what they are asked."""

    def __init__(self, tmp_path: Any) -> None:
        self.asked: list[object] = []
        self.sent: list[object] = []
        self.num_started = 0
        self._waits, self._ended = LauncherWaits(), None
        self.last_words: Ended | None = None
        self._agent, self._run_dir = Agent(), tmp_path
        self._client = SimpleNamespace(turn=self._turn, send=self.sent.append)  # type: ignore[assignment]
        self._processes = SimpleNamespace(  # type: ignore[assignment]
            ask_forkserver=self.asked.append,
            forkserver_end=lambda: "was killed by SIGKILL",
            receive_from_forkserver=list,
            has_taken_over=lambda: None,
        )
        self._candidate_reports = CandidateReports(selectors.DefaultSelector())
        self._logs = LogSending(tmp_path)
        self._way_on = lambda: "so it goes on"
        self._workers = WorkerSupervisor(self._agent, self._processes, self._logs, self._waits, tmp_path)
        self._set_agent_role(own_role())

    def _set_agent_role(self, agent_role: AgentRole, *, leads: bool = True) -> None:
        self._agent_role, self._stop = agent_role, StopRequest(agent_role.leave_s)
        self._standby = Standby(leads=leads, is_candidate=agent_role.is_candidate)
        starts: Any = SimpleNamespace(start=self._count)
        self._coordinators = self.coordinators(starts, SimpleNamespace(check=lambda: None, patience_s=0.0))

    def coordinators(self, starts: Any, store: Any) -> CoordinatorSupervisor:
        """Those of this launcher, with another way of starting them."""
        log = self._run_dir / "logs" / "coordinator.log"
        return CoordinatorSupervisor(
            starts, store, self._agent, self._processes, self._standby, self._waits, log, self._way_on
        )

    def hear(self, *messages: Any) -> None:
        """The forkserver has said something."""
        self._processes.receive_from_forkserver = lambda: list(messages)  # type: ignore[method-assign]
        self._receive_from_forkserver()

    def _turn(self, max_wait_s: float = 0.0) -> float:
        self._ended = self.last_words
        return max_wait_s

    def _count(self, ends_s: tuple[float, ...]) -> None:
        self.num_started += 1


@pytest.fixture
def launcher(tmp_path: Any) -> Launcher:
    return Launcher(tmp_path)


def test_only_a_notice_of_its_own_hurries_a_host(launcher: Launcher) -> None:
    launcher._set_agent_role(own_role()._replace(leave_s=25.0))
    launcher.receive(StopAsked(cause="elaswave ctl stop"))
    assert launcher.stop_signal == signal.SIGTERM and launcher._stop.name == "elaswave ctl stop"
    assert launcher._stop.grace_s == STOP_GRACE_S, "the step in hand and its checkpoint may take their time"
    launcher._set_agent_role(own_role()._replace(leave_s=25.0))
    launcher._stop.on_signal(signal.SIGTERM, None)
    launcher.receive(StopAsked(cause="elaswave ctl stop"))
    assert launcher._stop.grace_s == 25.0 and launcher._stop.is_leaving
    launcher._stop.on_signal(signal.SIGHUP, None)
    with pytest.raises(StoppedBySignalError, match="stopped at once by a second signal"):
        launcher._stop.on_signal(signal.SIGINT, None)


@pytest.mark.parametrize(
    ("ended", "signal_number", "is_patient"),
    [
        (Ended(outcome="finished"), None, True),
        (Ended(outcome="failed", reason="why"), None, True),
        (Ended(outcome="failed", reason="the store is gone", again=True), None, False),
        (Ended(outcome="stopped"), signal.SIGTERM, False),
    ],
)
def test_who_leaves_the_outcome_waits_for_the_store_unless_told_to_stop_or_in_vain_before(
    launcher: Launcher, tmp_path: Path, ended: Ended, signal_number: int | None, is_patient: bool
) -> None:
    launcher._set_agent_role(own_role()._replace(job="demo", creates_job=True))
    launcher._is_over, launcher._ended = False, ended
    launcher._stop.signal = signal_number
    launcher._client = None
    launcher._candidate_reports = CandidateReports(selectors.DefaultSelector())
    launcher._processes = SimpleNamespace(end=lambda: None)  # type: ignore[assignment]
    launcher._reporter = SimpleNamespace(message=launcher.sent.append)  # type: ignore[assignment]
    steps: list[Any] = []

    def end(name: str, outcome: bytes, job_generation: int, **more: Any) -> str:
        steps.append((json.loads(outcome)["outcome"], job_generation, more["is_patient"]))
        return "trouble"

    launcher._place = SimpleNamespace(  # type: ignore[assignment]
        close=lambda: steps.append("folder"), store=SimpleNamespace(end=end), holder="", job_generation=7
    )
    launcher.end()
    launcher.end()
    assert steps == ["folder", (ended.outcome, 7, is_patient)], "what is killed while it waits leaves no file"
    assert launcher.sent == ["trouble"]


def test_a_coordinator_is_started_at_once_where_nothing_is_being_committed(launcher: Launcher) -> None:
    launcher._on_coordinator_exit("was killed by SIGKILL", local_job.time.monotonic())
    assert (launcher.num_started, launcher.asked) == (1, [])


@pytest.mark.parametrize(
    ("had_it", "how"), [(False, "was killed by SIGKILL"), (True, "ended with status 3"), (True, "ended with status 5")]
)
def test_a_candidate_stands_by_again_after_one_that_never_had_the_job_or_was_replaced(
    launcher: Launcher, had_it: bool, how: str
) -> None:
    launcher._set_agent_role(own_role()._replace(is_candidate=True), leads=had_it)
    launcher._on_coordinator_exit(how, 50.0)
    standby = launcher._standby
    assert (launcher.num_started, standby.leads) == (0, False)
    assert standby.stand_by_at_s == 50.0 + STAND_BY_AGAIN_S
    launcher._on_coordinator_exit(how, 60.0)
    assert standby.stand_by_at_s == 60.0 + 2 * STAND_BY_AGAIN_S, "no log fills with what it is refused for"
    assert not standby.is_due(61.9) and standby.is_due(62.0) and not standby.is_due(99.0)
    standby.has_it()
    launcher._on_coordinator_exit("was killed by SIGKILL", 51.0)
    assert (launcher.num_started, standby.leads) == (1, False), "its own coordinator is followed at once"


def test_a_candidate_that_has_ended_is_followed_at_once_if_it_has_just_told_that_it_had_the_job(
    launcher: Launcher,
) -> None:
    launcher._set_agent_role(own_role()._replace(is_candidate=True), leads=False)
    writes = launcher._candidate_reports.open()
    os.write(writes, CandidateProgress(CandidateStage.HOLDS, 1).line())
    os.close(writes)
    launcher._on_coordinator_exit("was killed by SIGKILL", 50.0)
    assert launcher.num_started == 1 and launcher._standby.had_it
    launcher._hear_candidate()
    assert not launcher._standby.leads, "what was told of the one that has ended is not heard of the next one"


def test_a_store_that_does_not_answer_the_next_coordinator_ends_the_part_and_not_the_job(launcher: Launcher) -> None:
    with pytest.raises(RetryError, match="the store does not answer the next one; see .*coordinator.log"):
        launcher._on_coordinator_exit(f"ended with status {STORE_GONE}", 50.0)
    assert launcher.num_started == 0


def test_a_coordinator_whose_port_another_program_has_ends_the_part_and_not_the_job(launcher: Launcher) -> None:
    with pytest.raises(RetryError, match="another program has the coordinator's port on this host; see .*coordinator"):
        launcher._on_coordinator_exit(f"ended with status {PORT_TAKEN}", 50.0)
    assert launcher.num_started == 0


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [(errno.EADDRINUSE, RetryError, "listens at tcp:127.0.0.1:7077"), (errno.ENOSPC, OSError, "refused")],
)
def test_a_coordinator_that_cannot_listen_says_whether_another_one_could(
    number: int, error: type[Exception], said: str
) -> None:
    async def start(*_: object, **__: object) -> None:
        raise OSError(number, "refused")

    this: Any = SimpleNamespace(
        _server=SimpleNamespace(start=start), _setup=SimpleNamespace(
            job=SimpleNamespace(network=SimpleNamespace(listen="tcp:127.0.0.1:7077", tls=None), home=1)
        ),
        _keys=SimpleNamespace(of_peer=lambda peer: b""),
        _on_message=None, _on_connected=None, _on_closed=None, _on_store_position=None,
        _terminal=SimpleNamespace(say_of_stranger=None),
    )  # fmt: skip
    with pytest.raises(error, match=said):
        asyncio.run(CoordinatorProcess._listen(this))


def test_a_coordinator_waits_for_the_end_of_the_commit_in_hand_and_of_no_other(launcher: Launcher) -> None:
    launcher.receive(CommitCheckpoint(number=4, request=b"what"))
    launcher.receive(CommitCheckpoint(number=5, request=b"next"))
    launcher._on_coordinator_exit("was killed by SIGKILL", local_job.time.monotonic())
    assert launcher.asked[1:] == [CommitShards(number=5, request=b"next"), AbandonCommits()]
    assert launcher.num_started == 0
    launcher.hear(CommitDone(number=4, error="late"))
    assert launcher.num_started == 0, "the newer one may still become durable"
    launcher.hear(CommitDone(number=5, error="lost", again=True))
    assert launcher.num_started == 1 and launcher.sent == []
    launcher.hear(CommitDone(number=6, error=None))
    assert launcher.num_started == 1
    assert launcher.sent == [CheckpointCommitted(number=6, error=None, again=False)]


def test_only_the_commit_in_hand_is_broken_off(launcher: Launcher) -> None:
    launcher.receive(BreakOffCommit(number=4))
    assert launcher.asked == []
    launcher.receive(CommitCheckpoint(number=4, request=b"what"))
    launcher.receive(BreakOffCommit(number=3))
    assert launcher.asked == [CommitShards(number=4, request=b"what")]
    launcher.receive(BreakOffCommit(number=4))
    assert launcher.asked[1:] == [AbandonCommits()]


def test_other_keys_are_taken_once_the_template_has_them(launcher: Launcher, tmp_path: Path) -> None:
    file, old, new = tmp_path / "job.key", b"the old key of this job", b"the new key of this job"
    next_file(file).write_bytes(new)
    next_file(file).chmod(0o600)
    starts: Any = SimpleNamespace(start=launcher._count, keys=Secrets((old,)))
    launcher._coordinators = launcher.coordinators(starts, SimpleNamespace(check=lambda: None, patience_s=0.0))
    launcher._keys = AgentKeys(JobKey(old, file), file, starts_coordinators=True)
    keys = tuple(JobKey(key, None).held(KeyRole.JOINING) for key in (old, new))
    launcher.receive(KeysNow(keys=keys))
    assert launcher.asked == [TakeKeys(keys=keys, job_keys=(old, new), retired=())]
    assert launcher.sent == [] and starts.keys == Secrets((old, new)), "a successor must know what was offered"
    launcher.hear(KeysHeld(ring=b"its name"))
    assert launcher.sent == [AgentKeysTaken(ring=b"its name")]
    launcher.receive(KeysNow(keys=(b"a secret of nobody's key",)))
    assert "stands neither in" in launcher.sent[1].problem  # type: ignore[attr-defined]
    assert starts.keys == Secrets((old, new)) and len(launcher.asked) == 1


def test_a_reason_says_how_processes_have_ended() -> None:
    """The coordinator hears only that they have."""
    ends = {0: how_it_ended(3 << 8), 1: how_it_ended(signal.SIGKILL), 11: how_it_ended(signal.SIGRTMIN + 1)}
    text = "0 workers are left: worker 0 has ended; worker 1 has ended, worker 2 has ended; worker 11 has ended"
    assert with_ends(text, ends) == (
        "0 workers are left: worker 0 ended with status 3; worker 1 was killed by SIGKILL, worker 2 has ended; worker "
        "11 was killed by signal 35"
    )
    assert with_ends("worker 0 has ended with its host", ends) == "worker 0 has ended with its host"


@pytest.mark.parametrize("last_words", [None, Ended(outcome="failed", reason="all workers are lost")])
def test_the_end_of_the_template_is_the_jobs(
    last_words: Ended | None, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_job, "LAST_WORDS_S", 0.05)
    launcher.last_words = last_words
    with pytest.raises(RecoveryError, match="was killed by SIGKILL, and all workers have ended with it .* so it goes"):
        launcher._check_forkserver()


def test_the_last_words_of_the_template_are_heard_after_its_end(launcher: Launcher) -> None:
    launcher.last_words = Ended(outcome="finished")
    launcher._processes.receive_from_forkserver = lambda: [CommitDone(number=6, error=None)]  # type: ignore[method-assign]
    launcher._check_forkserver()
    assert launcher.sent == [CheckpointCommitted(number=6, error=None, again=False)]


@pytest.mark.parametrize("outcome", ["finished", "stopped"])
def test_the_end_of_the_template_is_no_trouble_to_a_job_that_was_over(outcome: str, launcher: Launcher) -> None:
    launcher.last_words = Ended(outcome=outcome)
    launcher._check_forkserver()
    assert launcher._ended == Ended(outcome=outcome)


def test_a_coordinator_that_the_template_is_to_fork_is_not_waited_for_for_ever(
    launcher: Launcher, tmp_path: Path
) -> None:
    launcher._processes.ask_for_coordinator = lambda number, message: launcher.asked.append(message)  # type: ignore[method-assign]
    sampler = SimpleNamespace(num_samples=8)
    setup: Any = SimpleNamespace(sampler=sampler, checkpoint=None, keys=Secrets((b"the job's",)))
    processes, standby, waits = launcher._processes, launcher._standby, launcher._waits
    reports = CandidateReports(selectors.DefaultSelector())
    role = launcher._agent_role
    starts = CoordinatorStarts(setup, role, processes, standby, reports, waits, by_forkserver=True)
    launcher.coordinators(starts, JobStore(ControlConfig(), tmp_path, tmp_path, b"k" * 32)).start()
    assert [type(message) for message in launcher.asked] == [SpawnCoordinator]
    stopped = ProcessFacts(state="T", parent=1, cpu_s=1.0, start_ticks=0)
    begin_s = time.monotonic()
    told = [launcher._waits.overdue(lambda: stopped, begin_s + tick / 4) for tick in range(100)]
    assert told[0] is None and "does not fork the coordinator: it has used no processor time" in str(told[-1])
    assert len([text for text in told if text]) < 25


def test_the_template_is_asked_for_a_joiner_once(launcher: Launcher) -> None:
    for worker in (4, 4, 5):
        launcher.receive(SpawnJoiner(worker=worker))
    assert launcher.asked == [SpawnJoiner(worker=4), SpawnJoiner(worker=5)]


def test_a_joiner_that_the_system_refuses_is_reported_like_one_that_has_died(launcher: Launcher) -> None:
    launcher.receive(SpawnJoiner(worker=4))
    launcher.hear(template_messages.SpawnRefused(child=4, text="no process is left"))
    (exited,) = launcher.sent
    assert isinstance(exited, Exited)
    assert (exited.worker, exited.text) == (4, "was not started: no process is left")
    assert launcher.asked[-1] == template_messages.KillWorkers(workers=(4,)), "one that lacks a loader is there"


def test_any_other_process_that_the_system_refuses_ends_the_job(launcher: Launcher) -> None:
    with pytest.raises(LaunchError, match="no process is left"):
        launcher.hear(template_messages.SpawnRefused(child=1, text="no process is left"))


@pytest.mark.parametrize("is_candidate", [True, False])
def test_a_coordinator_whose_claim_was_taken_away_is_followed_after_a_while_and_never_once_too_often(
    launcher: Launcher, is_candidate: bool
) -> None:
    launcher._set_agent_role(own_role()._replace(is_candidate=is_candidate))
    at_s = 0.0
    for _ in range(120):
        launcher._coordinators.exited(f"ended with status {DISPLACED}", at_s)
        assert launcher._standby.leads is not is_candidate, "another host may be quicker"
        assert launcher._standby.missed_since_s == at_s
        at_s += 1000.0
        assert not launcher._standby.is_due(at_s - 1000.0) and launcher._standby.is_due(at_s)
        if is_candidate:
            launcher._standby.has_it()
    assert launcher.num_started == 0, "until it is due"
    launcher._coordinators.exited(f"ended with status {DISPLACED}", at_s)
    assert launcher._standby.is_due(at_s + STAND_BY_AGAIN_S), "however often it has come to that"
