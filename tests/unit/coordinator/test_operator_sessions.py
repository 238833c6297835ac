"""Who is served at the operators' desk, and how requests get to their last answer."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from elaswave.channel.messages.operator import (
    Answer,
    AskJoin,
    AskKey,
    AskStatus,
    AskStop,
    JobOver,
    OperatorHello,
    StatusAnswer,
    TurnedAway,
)
from elaswave.channel.messages.worker import Settled
from elaswave.channel.wire import is_reader, operator_id, role_of
from elaswave.coordinator.commands import operator_sessions
from elaswave.coordinator.commands.commands import Operations, Reply
from elaswave.coordinator.commands.job_status import JobParts
from elaswave.coordinator.commands.operator_sessions import OPERATORS_MAX, REQUESTS_MAX, OperatorSessions
from elaswave.errors import StoreError
from elaswave.job.keys import KeyRole

PETER, MARY = operator_id(1), operator_id(2)


class FakeServer:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.hung_up: list[int] = []

    def send(self, peer: int, message: msgspec.Struct) -> bool:
        self.sent.append((peer, message))
        return True

    def hang_up(self, peer: int) -> None:
        self.hung_up.append(peer)

    def take(self) -> list[tuple[int, Any]]:
        sent, self.sent = self.sent, []
        return sent


class World:
    """A desk with operations whose replies the test decides."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.now_s = 100.0
        self.replies: list[Reply] = []
        self.error: Exception | None = None
        operations = SimpleNamespace(reply_to=self._reply_to, turn=lambda: None, under_way=[])
        job = cast(JobParts, SimpleNamespace(core=SimpleNamespace(members=(0, 1))))
        self.sessions = OperatorSessions(self.server, job, cast(Operations, operations), clock=lambda: self.now_s)

    def _reply_to(self, request: Any) -> Reply:
        if self.error is not None:
            raise self.error
        return self.replies.pop(0)


@pytest.fixture
def world() -> World:
    world = World()
    world.sessions.connected(PETER)
    world.sessions.received(PETER, OperatorHello(version="0"))
    return world


def test_a_request_is_followed_to_its_last_answer(world: World) -> None:
    news: list[Reply | None] = [None, Reply("taken", "b", step=3), None]
    world.replies = [Reply("asked", "a", follow=lambda: news.pop(0))]
    world.sessions.received(PETER, AskStop(request=7))
    assert world.server.take() == [(PETER, Answer(request=7, is_last=False, decided="asked", reason="a"))]
    world.sessions.turn()
    assert world.server.take() == []
    world.sessions.turn()
    assert world.server.take() == [(PETER, Answer(request=7, is_last=True, decided="taken", reason="b", step=3))]
    world.sessions.turn()
    assert world.server.take() == [] and len(news) == 1


def test_what_a_gone_operator_has_asked_for_is_not_followed(world: World) -> None:
    world.replies = [Reply("asked", "a", follow=lambda: pytest.fail("nobody waits for it"))]
    world.sessions.received(PETER, AskStop(request=7))
    world.sessions.closed(PETER)
    world.sessions.turn()


def test_so_many_are_served_and_each_has_so_many_requests(world: World) -> None:
    for number in range(2, OPERATORS_MAX + 2):
        world.sessions.connected(operator_id(number))
    late = operator_id(OPERATORS_MAX + 1)
    ((peer, message),) = world.server.take()
    assert peer == late and isinstance(message, TurnedAway) and "16 operators are connected" in message.reason
    assert world.server.hung_up == [late]
    world.sessions.received(late, AskStop(request=1))
    assert world.server.take() == [], "it is not served"
    world.replies = [Reply("asked", "a", follow=lambda: None) for _ in range(REQUESTS_MAX)]
    for request in range(REQUESTS_MAX + 1):
        world.sessions.received(PETER, AskStop(request=request))
    peer, message = world.server.take()[-1]
    assert peer == PETER and message.decided == "refused" and message.is_last
    world.sessions.closed(MARY)
    world.sessions.connected(late)
    assert world.server.hung_up == [late], "there is room again"


def test_a_message_that_only_others_may_send_ends_the_connection(world: World) -> None:
    world.sessions.received(PETER, Settled(step=1))
    ((peer, message),) = world.server.take()
    assert peer == PETER and message == TurnedAway(reason="an operator may not send Settled")
    assert world.server.hung_up == [PETER]


def test_a_request_that_fails_is_refused_and_only_the_journals_errors_come_out(world: World) -> None:
    world.error = ZeroDivisionError("oh")
    world.sessions.received(PETER, AskJoin(request=1, num_workers=1))
    ((_, answer),) = world.server.take()
    assert answer.decided == "refused" and "it has failed (oh); the job goes on" in answer.reason

    def fail() -> Reply:
        raise KeyError("gone")

    world.error = None
    world.replies = [Reply("asked", "a", follow=fail)]
    world.sessions.received(PETER, AskStop(request=2))
    world.sessions.turn()
    assert world.server.take()[-1][1].decided == "refused"
    world.error = StoreError("the journal is full")
    with pytest.raises(StoreError):
        world.sessions.received(PETER, AskStop(request=3))


def test_a_status_is_made_seldom_and_its_failure_harms_nobody(world: World, monkeypatch) -> None:
    made: list[float] = []
    status = msgspec.structs.replace  # any value: the desk does not look into it

    def make(job: Any, heard: Any, under_way: Any, now_s: float) -> Any:
        made.append(now_s)
        return status

    monkeypatch.setattr(operator_sessions, "job_status", make)
    for request in (1, 2):
        world.sessions.received(PETER, AskStatus(request=request))
    world.now_s += 0.2
    world.sessions.received(PETER, AskStatus(request=3))
    answers = [message for _, message in world.server.take()]
    assert [answer.request for answer in answers if isinstance(answer, StatusAnswer)] == [1, 2, 3]
    assert made == [100.0, 100.2]
    world.now_s += 0.2
    monkeypatch.setattr(operator_sessions, "job_status", lambda *arguments: 1 / 0)
    world.sessions.received(PETER, AskStatus(request=4))
    ((_, answer),) = world.server.take()
    assert answer.request == 4 and answer.decided == "refused"


def test_at_the_end_all_are_told_and_nobody_is_waited_for(world: World) -> None:
    world.sessions.connected(MARY)
    news = [Reply("written", "b")]
    world.replies = [Reply("asked", "a", follow=lambda: news.pop(0) if news else None)]
    world.sessions.received(MARY, AskStop(request=1))
    world.server.take()
    world.sessions.ended("stopped", "after step 3")
    over = JobOver(outcome="stopped", reason="after step 3")
    last = Answer(request=1, is_last=True, decided="written", reason="b")
    assert world.server.take() == [(MARY, last), (PETER, over), (MARY, over)]
    assert world.server.hung_up == [PETER, MARY]
    world.sessions.connected(operator_id(3))
    assert world.server.take() == [(operator_id(3), over)]


def test_who_has_a_reading_key_may_ask_for_the_status_alone(world: World) -> None:
    reader = operator_id(1, KeyRole.READING)
    assert is_reader(reader) and not is_reader(PETER)
    world.sessions.connected(reader)
    for request in (AskStop(request=5), AskJoin(request=5, num_workers=1)):
        world.sessions.received(reader, request)
        ((peer, answer),) = world.server.take()
        assert (peer, answer.decided, answer.is_last) == (reader, "refused", True)
        assert "a reading key may ask for the status alone; use a steering key, or the job's" in answer.reason
    assert world.server.hung_up == [], "it may go on to ask for that"


@pytest.mark.parametrize("role", [KeyRole.READING, KeyRole.STEERING])
def test_who_has_a_lesser_key_may_not_change_the_jobs(world: World, role: KeyRole) -> None:
    peer = operator_id(1, role)
    assert role_of(peer) is role
    world.sessions.connected(peer)
    world.sessions.received(peer, AskKey(request=5, key=b"a new key of enough bytes"))
    ((told, answer),) = world.server.take()
    assert (told, answer.decided) == (peer, "refused")
    assert ("own key may change it" in answer.reason) is (role is KeyRole.STEERING)


def test_who_proves_the_jobs_own_key_may_do_all(world: World) -> None:
    peer = operator_id(1, KeyRole.CHANGING)
    world.sessions.connected(peer)
    for request in (AskKey(request=5, key=b"a new key of enough bytes"), AskStop(request=6)):
        world.replies = [Reply("asked", "a")]
        world.sessions.received(peer, request)
        ((_, answer),) = world.server.take()
        assert (answer.request, answer.decided) == (request.request, "asked")
