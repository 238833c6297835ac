"""Members that a person wants to join or to leave: followed until they have, or never will."""

from types import SimpleNamespace
from typing import cast

import pytest

from elaswave.coordinator.commands.commands import MemberCommands, Reply
from elaswave.coordinator.commands.job_status import JobParts
from elaswave.protocol.membership.driver import MembersDriver


class World:
    """A job of three members that needs two."""

    def __init__(self) -> None:
        self.core = SimpleNamespace(members=(0, 1, 2), generation=1, admissions=SimpleNamespace(leaving=set()))
        self.drained: list[tuple[int, float | None]] = []
        self.ids: list[int] = [3, 4]
        self.requests: list[int] = []
        elastic = SimpleNamespace(min_workers=2, drain_deadline_s=30.0)
        job = SimpleNamespace(core=self.core, config=SimpleNamespace(elastic=elastic))
        self.were_members = {0, 1, 2}
        self.membership = SimpleNamespace(joining=[], is_joiner=lambda worker: worker not in self.were_members)
        driver = SimpleNamespace(
            request_join=self._join,
            request_drain=lambda *asked: self.drained.append(asked),
            membership=self.membership,
        )
        self.asked = MemberCommands(cast(JobParts, job), cast(MembersDriver, driver))

    def _join(self, count: int, request: int) -> list[int] | str:
        self.requests.append(request)
        return self.ids[:count] or "the job is about to end"

    def becomes(self, *members: int) -> None:
        self.core.members, self.core.generation = members, self.core.generation + 1
        self.were_members.update(members)


@pytest.fixture
def world() -> World:
    return World()


def followed(reply: Reply) -> Reply | None:
    assert reply.follow is not None
    return reply.follow()


def test_a_join_is_followed_until_all_are_members(world: World) -> None:
    reply = world.asked.join(2, 7)
    assert (reply.decided, reply.workers) == ("joining", (3, 4)) and reply.reason.startswith("workers 3, 4: ")
    assert world.requests == [7], "by which a second one of the same is known"
    world.becomes(0, 1, 2, 3)
    assert followed(reply) is None
    world.becomes(0, 1, 2, 3, 4)
    joined = followed(reply)
    assert (
        joined is not None
        and joined.decided == "joined"
        and "workers 3, 4 are members since generation 3" in joined.reason
    )


def test_a_joiner_that_is_not_let_in_is_told_with_the_reason(world: World) -> None:
    reply = world.asked.join(1, 7)
    world.asked.refused(3, "its libraries are others")
    world.asked.refused(3, "its process was killed by SIGKILL")
    failed = followed(reply)
    assert failed is not None and failed.decided == "failed"
    assert failed.reason == "worker 3 is not admitted: its libraries are others"
    world.ids = []
    assert world.asked.join(1, 8) == Reply("refused", "the job is about to end")


@pytest.mark.parametrize("is_known_lost", [True, False])
def test_a_join_fails_as_soon_as_one_that_had_joined_is_no_member_any_more(world: World, is_known_lost: bool) -> None:
    """Worker 3 hangs when the generation begins with which it becomes a member; perhaps an earlier coordinator saw
    it."""
    reply = world.asked.join(2, 7)
    world.becomes(0, 1, 2, 3)
    assert followed(reply) is None
    if is_known_lost:
        world.asked.lost([3])
    world.becomes(0, 1, 2)
    failed = followed(reply)
    assert failed is not None and failed.decided == "failed"
    how = "was lost" if is_known_lost else "is none any more"
    assert failed.reason == f"worker 3 had become a member, and {how} before all had joined"


def test_who_is_on_the_way_is_shown(world: World) -> None:
    assert world.asked.under_way == []
    world.membership.joining, world.core.admissions.leaving = [3, 4], {1, 7}
    assert world.asked.under_way == ["workers 3, 4 to join", "worker 1 to leave"]


def test_a_worker_that_has_left_and_one_that_was_lost_are_told_apart(world: World) -> None:
    world.core.members = (0, 1, 2, 3)
    first, second = world.asked.drain(3, None), world.asked.drain(2, 5.0)
    assert world.drained == [(3, None), (2, 5.0)]
    assert "lost after 30 s otherwise" in first.reason and "lost after 5 s otherwise" in second.reason
    assert followed(first) is followed(second) is None
    world.becomes(0, 1, 2)
    drained = followed(first)
    assert drained is not None and drained.decided == "drained" and "no member of generation 2" in drained.reason
    world.asked.lost([2])
    world.becomes(0, 1)
    failed = followed(second)
    assert failed is not None and failed.decided == "failed" and "was lost before it could leave" in failed.reason


def test_a_successor_knows_that_a_worker_has_left_already(world: World) -> None:
    drained = world.asked.drain(7, None, begun=True)
    assert drained.decided == "drained" and world.drained == []
    assert world.asked.drain(2, None, begun=True).decided == "draining", "it is still there: all are told again"


def test_who_cannot_leave(world: World) -> None:
    assert "worker 7 is no member; the members are 0, 1, 2" in world.asked.drain(7, None).reason
    world.core.members = (0, 1)
    refused = world.asked.drain(1, None)
    assert refused.decided == "refused" and "has 2 members and needs 2" in refused.reason
    assert world.drained == []


def test_a_leave_is_refused_where_others_that_leave_already_would_make_it_one_too_many(world: World) -> None:
    world.core.admissions.leaving = {2}
    reply = world.asked.drain(1, None)
    assert reply.decided == "refused" and "3 members, of which 1 are to leave already, and needs 2" in reply.reason
    assert world.asked.drain(2, 5.0).decided == "draining", "it may be asked for again, with another deadline"
