"""What the launcher does when a commit ends, or the template: without processes."""

from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.control import local_job
from elaswave.control.agent_messages import BreakOffCommit, CheckpointCommitted, CommitCheckpoint, Ended
from elaswave.control.local_job import ABANDON_S_MAX, LocalJob
from elaswave.control.template_messages import AbandonCommits, CommitDone, CommitShards
from elaswave.errors import RecoveryError
from elaswave.protocol.agent import Agent


class Launcher(LocalJob):
    """A launcher whose coordinator has just been lost; its processes take note of what they are asked."""

    def __init__(self, tmp_path: Any) -> None:
        self.asked: list[object] = []
        self.sent: list[object] = []
        self.num_started = 0
        self._committing, self._abandoning, self._unforked, self._ended = None, None, set(), None
        self.last_words: Ended | None = None
        self._agent, self._run_dir = Agent(), tmp_path
        self._client = SimpleNamespace(turn=self._turn, send=self.sent.append)  # type: ignore[assignment]
        self._processes = SimpleNamespace(  # type: ignore[assignment]
            ask_template=self.asked.append,
            template_end=lambda: "was killed by SIGKILL",
        )
        self._way_on = lambda: "so it goes on"

    def _turn(self, max_wait_s: float = 0.0) -> float:
        self._ended = self.last_words
        return max_wait_s

    def _start_coordinator(self) -> None:
        self.num_started += 1


@pytest.fixture
def launcher(tmp_path: Any) -> Launcher:
    return Launcher(tmp_path)


def test_a_coordinator_is_started_at_once_where_nothing_is_being_committed(launcher: Launcher) -> None:
    launcher._on_coordinator_exit("was killed by SIGKILL", local_job.time.monotonic())
    assert (launcher.num_started, launcher.asked) == (1, [])


def test_a_coordinator_waits_for_the_end_of_the_commit_in_hand_and_of_no_other(launcher: Launcher) -> None:
    launcher._on_message(CommitCheckpoint(number=4, request=b"what"))
    launcher._on_message(CommitCheckpoint(number=5, request=b"next"))
    launcher._on_coordinator_exit("was killed by SIGKILL", local_job.time.monotonic())
    assert launcher.asked[1:] == [CommitShards(number=5, request=b"next"), AbandonCommits()]
    assert launcher.num_started == 0
    launcher._on_commit_done(CommitDone(number=4, error="late"))
    assert launcher.num_started == 0, "the newer one may still become durable"
    launcher._on_commit_done(CommitDone(number=5, error="lost", again=True))
    assert launcher.num_started == 1 and launcher.sent == []
    launcher._on_commit_done(CommitDone(number=6, error=None))
    assert launcher.num_started == 1
    assert launcher.sent == [CheckpointCommitted(number=6, error=None, again=False)]


def test_a_commit_that_does_not_end_is_not_waited_for_for_ever(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(local_job, "time", SimpleNamespace(monotonic=lambda: now_s))
    launcher._on_message(CommitCheckpoint(number=4, request=b"what"))
    launcher._on_coordinator_exit("was killed by SIGKILL", local_job.time.monotonic())
    for _ in range(round(ABANDON_S_MAX / 0.25) - 1):
        now_s += 0.25
        launcher._look_at_template()
    now_s += 3600.0
    launcher._look_at_template()  # it was stopped itself
    with pytest.raises(RecoveryError, match="has not ended within 60 s; is its disk gone, or .* so it goes on"):
        for _ in range(4):
            now_s += 0.25
            launcher._look_at_template()


def test_only_the_commit_in_hand_is_broken_off(launcher: Launcher) -> None:
    launcher._on_message(BreakOffCommit(number=4))
    assert launcher.asked == []
    launcher._on_message(CommitCheckpoint(number=4, request=b"what"))
    launcher._on_message(BreakOffCommit(number=3))
    assert launcher.asked == [CommitShards(number=4, request=b"what")]
    launcher._on_message(BreakOffCommit(number=4))
    assert launcher.asked[1:] == [AbandonCommits()]


@pytest.mark.parametrize("last_words", [None, Ended(outcome="failed", reason="all workers are lost")])
def test_the_end_of_the_template_is_the_jobs(
    last_words: Ended | None, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_job, "LAST_WORDS_S", 0.05)
    launcher.last_words = last_words
    with pytest.raises(RecoveryError, match="was killed by SIGKILL, and all workers have ended with it .* so it goes"):
        launcher._check_template()


@pytest.mark.parametrize("outcome", ["finished", "stopped"])
def test_the_end_of_the_template_is_no_trouble_to_a_job_that_was_over(outcome: str, launcher: Launcher) -> None:
    launcher.last_words = Ended(outcome=outcome)
    launcher._check_template()
    assert launcher._ended == Ended(outcome=outcome)
