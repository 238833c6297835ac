"""A checkpoint that a person asks for: told once, answered by the vote that takes it, followed until it is durable."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.reports import decision_of, report_of

from elaswave.channel.messages.worker import TakeCheckpoint
from elaswave.coordinator.commands.commands import CheckpointCommands
from elaswave.coordinator.commands.job_status import JobParts


class Sessions:
    """A job at step 4 of generation 1, and what its workers are told."""

    def __init__(self) -> None:
        self.published: list[TakeCheckpoint] = []
        self.settled: set[int] = set()
        self.records: list[Any] = []
        checkpoints = SimpleNamespace(is_settled=self.settled.__contains__, records=self.records)
        job = SimpleNamespace(
            core=SimpleNamespace(generation=1), state=SimpleNamespace(last_step=4), checkpoints=checkpoints
        )
        self.asked = CheckpointCommands(cast(JobParts, job), self.published.append)

    def commits(self, step: int, *, taken: bool = False, generation: int = 1) -> None:
        self.asked.committed(report_of(step, generation=generation, checkpoint=step if taken else 0))
        self.asked.turn()

    def writes(self, step: int) -> None:
        self.settled.add(step)
        self.records.append(SimpleNamespace(step=step, path=f"checkpoints/step-{step:08d}"))
        self.asked.turn()


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


def test_the_answer_names_the_step_whose_vote_took_it(sessions: Sessions) -> None:
    reply = sessions.asked.ask(wait=False)
    assert reply.decided == "asked" and reply.follow is not None
    assert sessions.published == [TakeCheckpoint(generation=1, after=4)]
    sessions.commits(5)
    assert reply.follow() is None
    sessions.commits(6, taken=True)
    taken = reply.follow()
    assert taken is not None and (taken.decided, taken.step, taken.follow) == ("taken", 6, None)
    assert sessions.asked.published is None and sessions.asked.under_way == []


def test_it_is_followed_until_it_is_durable_or_given_up(sessions: Sessions) -> None:
    replies = [sessions.asked.ask(wait=True) for _ in range(2)]
    assert len(sessions.published) == 2 and sessions.published[0] == sessions.published[1], "both get the same one"
    sessions.commits(5, taken=True)
    taken = [reply.follow() for reply in replies if reply.follow is not None]
    assert [each.step for each in taken if each is not None] == [5, 5]
    first, second = (each.follow for each in taken if each is not None and each.follow is not None)
    assert first() is None
    sessions.writes(5)
    written = first()
    assert written is not None and (written.decided, written.step) == ("written", 5)
    sessions.records.clear()
    given_up = second()
    assert given_up is not None and given_up.decided == "failed"


def test_the_next_one_waits_until_the_one_before_is_written(sessions: Sessions) -> None:
    sessions.asked.ask(wait=False)
    sessions.commits(5, taken=True)
    reply = sessions.asked.ask(wait=False)
    assert "as soon as the checkpoint before it is written" in reply.reason and len(sessions.published) == 1
    assert "still being written" in sessions.asked.under_way[0]
    sessions.commits(6)
    assert len(sessions.published) == 1
    sessions.writes(5)
    assert sessions.published[1:] == [TakeCheckpoint(generation=1, after=6)]
    assert reply.follow is not None and reply.follow() is None, "the vote of step 5 was before it was asked for"
    sessions.commits(7, taken=True)
    taken = reply.follow()
    assert taken is not None and taken.step == 7


def test_survivors_are_told_again_and_a_return_to_a_checkpoint_takes_a_new_one(sessions: Sessions) -> None:
    reply = sessions.asked.ask(wait=True)
    sessions.asked.decided(decision_of(2))
    assert sessions.published == [TakeCheckpoint(generation=1, after=4)] * 2
    sessions.asked.decided(decision_of(3, rollback=2))
    assert sessions.published[2:] == [TakeCheckpoint(generation=3, after=2)]
    sessions.commits(3, taken=True, generation=3)
    assert reply.follow is not None
    taken = reply.follow()
    assert taken is not None and taken.step == 3, "step 3 comes later than step 4 of the generation before"
    sessions.asked.decided(decision_of(4, rollback=2))
    assert taken.follow is not None
    void = taken.follow()
    assert void is not None and void.decided == "failed" and "gone back to the checkpoint of step 2" in void.reason
