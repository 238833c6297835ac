"""The change of a job's key: what a person who asks for it hears, what participants are told and take."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.channel.messages.worker import KeysNow
from elaswave.channel.wire import FIRST_AGENT, operator_id
from elaswave.coordinator.commands.commands import SHOWN_MAX, KeyCommands, Reply, obstacle_to
from elaswave.coordinator.process import CoordinatorProcess
from elaswave.job.keys import JobKey, KeyRole, next_file
from elaswave.launcher.supervisors import AgentKeys
from elaswave.transport.handshake import Secrets

OLD, NEW, OTHER = b"the old key of this job", b"the new key of this job", b"another key of this job"
HOME = FIRST_AGENT + 7


def joining(*keys: bytes) -> tuple[bytes, ...]:
    return tuple(JobKey(key, None).held(KeyRole.JOINING) for key in keys)


class World:
    """A job of an agent and two workers, all of which are connected."""

    def __init__(self, keys: Secrets | None = None, obstacle: str = "") -> None:
        self.present = {0, 1, HOME}
        self.sent: dict[int, tuple[bytes, ...]] = {}
        self.num_retired = 0
        server: Any = SimpleNamespace(send_all=self._send_all)
        self.asked = KeyCommands(keys or Secrets((OLD,)), obstacle, server, lambda: self.present, self._retired)

    def _send_all(self, peers: object, message: KeysNow) -> None:
        self.sent |= dict.fromkeys(peers, message.keys)  # type: ignore[call-overload]

    def _retired(self) -> None:
        self.num_retired += 1

    def take(self, *peers: int) -> None:
        """They say that they go by what they were told."""
        for peer in peers:
            self.asked.taken(peer, Secrets(self.sent[peer]).name)


def follow(reply: Reply) -> Reply | None:
    assert reply.follow is not None
    return reply.follow()


def test_a_change_from_its_beginning_to_its_end() -> None:
    world = World()
    assert world.asked.sent == () and world.asked.under_way == []
    offered = world.asked.ask(NEW)
    assert offered.decided == "offered" and "worker 0, worker 1, agent 7 must still say so" in offered.reason
    assert world.sent == dict.fromkeys(world.present, joining(OLD, NEW)) and world.asked.sent == joining(OLD, NEW)
    assert world.asked.of_peer(0) == Secrets(joining(OLD, NEW))
    assert follow(offered) is None
    world.take(0, HOME)
    assert follow(offered) is None and world.num_retired == 0
    assert (
        "2 keys of the job are good: `elaswave keys rotate` ends the change, and worker 1 must"
        in (world.asked.under_way[0])
    )
    world.take(1)
    retiring = follow(offered)
    assert retiring is not None and retiring.decided == "retiring" and world.num_retired == 1
    assert world.sent == dict.fromkeys(world.present, joining(NEW))
    for peer, role in (
        (0, KeyRole.JOINING),
        (operator_id(3), KeyRole.STEERING),
        (operator_id(3, KeyRole.CHANGING), KeyRole.CHANGING),
    ):
        new, old = (JobKey(key, None).held(role) for key in (NEW, OLD))
        assert world.asked.of_peer(peer) == Secrets((new,), (old,))
    assert world.asked.under_way == []
    world.take(0, 1, HOME)
    changed = follow(retiring)
    assert changed is not None and (changed.decided, changed.follow) == ("changed", None)


def test_who_is_lost_is_waited_for_no_more_and_who_comes_is_told_first() -> None:
    world = World()
    offered = world.asked.ask(NEW)
    world.take(0, HOME)
    world.present = {0, 2, HOME}
    world.asked.connected(2)
    assert world.sent[2] == joining(OLD, NEW) and follow(offered) is None
    world.asked.connected(0)  # again: what it has said was said on another connection
    world.take(2)
    assert follow(offered) is None
    world.take(0)
    assert follow(offered) is not None
    late = World()
    late.asked.connected(2)
    assert 2 not in late.sent, "a job whose key was never changed tells nobody"


def test_what_was_said_of_older_keys_is_no_answer() -> None:
    world = World()
    offered = world.asked.ask(NEW)
    for peer in world.present:
        world.asked.taken(peer, Secrets(joining(OLD)).name)
        world.asked.taken(peer, b"")
    assert follow(offered) is None


def test_a_successor_goes_on_with_the_keys_that_it_is_started_with() -> None:
    world = World(Secrets((OLD, NEW)))
    assert world.asked.sent == joining(OLD, NEW)
    offered = world.asked.ask(NEW)
    assert offered.decided == "offered" and follow(offered) is None, "it goes by what was said to it"
    later = World(Secrets((NEW,), (OLD,)))
    later.asked.connected(1)
    assert later.sent == {1: joining(NEW)}
    retiring = later.asked.ask(NEW)
    assert retiring.decided == "retiring" and later.num_retired == 0 and follow(retiring) is None
    later.take(0, 1, HOME)
    changed = follow(retiring)
    assert changed is not None and changed.decided == "changed"
    assert "already" in later.asked.ask(OLD).reason


def test_an_agent_that_cannot_take_the_key_is_named_and_may_do_so_later() -> None:
    world = World()
    offered = world.asked.ask(NEW)
    world.asked.taken(HOME, b"", "it stands nowhere")
    failed = follow(offered)
    assert failed is not None and failed.decided == "failed"
    assert "agent 7 cannot take the new key: it stands nowhere" in failed.reason
    again = world.asked.ask(NEW)
    assert again.decided == "offered" and follow(again) is None
    world.take(0, 1, HOME)
    assert follow(again) is not None


def test_of_two_changes_at_a_time_one_comes_to_its_end() -> None:
    world = World()
    first, second = world.asked.ask(NEW), world.asked.ask(OTHER)
    world.take(0, 1, HOME)
    retiring = follow(second)
    assert retiring is not None and retiring.decided == "retiring"
    void = follow(first)
    assert void is not None and void.decided == "void"
    assert world.asked.of_peer(0) == Secrets(joining(OTHER), joining(OLD, NEW))


def test_the_key_that_the_job_has_is_not_changed_for_itself() -> None:
    world = World()
    retiring = world.asked.ask(OLD)
    assert retiring.decided == "retiring" and world.num_retired == 0
    assert world.sent == dict.fromkeys(world.present, joining(OLD)), "an empty ring is none"
    world.take(0, 1, HOME)
    changed = follow(retiring)
    assert changed is not None and changed.decided == "changed" and world.asked.of_peer(0) == Secrets(joining(OLD))


def test_members_joiners_and_agents_take_part_and_nobody_else_stays_connected() -> None:
    job = CoordinatorProcess.__new__(CoordinatorProcess)
    kept: list[set[int]] = []
    for name, part in {
        "core": SimpleNamespace(members=(0, 1)),
        "membership": SimpleNamespace(coming={2}),
        "_agents": SimpleNamespace(present=[HOME, HOME + 1]),
        "_server": SimpleNamespace(keep=kept.append),
        "_terminal": SimpleNamespace(say=lambda text: None),
    }.items():
        setattr(job, name, part)
    job._key_retired()
    assert kept == [{0, 1, 2, HOME, HOME + 1}]


def test_only_some_of_many_are_named() -> None:
    world = World()
    world.present = set(range(SHOWN_MAX + 3))
    assert f"worker {SHOWN_MAX - 1} and 3 more must still say so" in world.asked.ask(NEW).reason


@pytest.mark.parametrize(
    ("store", "listen", "has_tls", "seen"),
    [
        ("file", "unix:/x", False, ""),
        ("file", "tcp:127.0.0.1:1", True, ""),
        ("file", "tcp:127.0.0.1:1", False, "connections are not encrypted"),
        ("etcd://h:1", "unix:/x", False, "sealed with its key"),
    ],
)
def test_where_a_key_cannot_be_changed_it_is_refused_by_name(store: str, listen: str, has_tls: bool, seen: str) -> None:
    obstacle = obstacle_to(store, listen, has_tls=has_tls)
    assert seen in obstacle and bool(seen) is bool(obstacle)
    if obstacle:
        world = World(obstacle=obstacle)
        assert world.asked.ask(NEW).decided == "refused" and world.sent == {} and world.asked.sent == ()


# --------------------------------------------------------------------------------------------------------------- agents


def key_in(path: Path, secret: bytes) -> JobKey:
    path.write_bytes(secret)
    path.chmod(0o600)
    return JobKey(secret, path)


def test_the_agent_that_starts_coordinators_reads_the_jobs_key_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "job.key"
    own = AgentKeys(key_in(file, OLD), file, starts_coordinators=True)
    assert "stands neither in" in own.take(joining(OLD, NEW)) and own.job == Secrets((OLD,))
    assert own.ring.now == Secrets(joining(OLD)), "all of them, or none"
    key_in(next_file(file), NEW)
    assert own.take(joining(OLD, NEW)) == "" and own.job == Secrets((OLD, NEW))
    sent = own.for_forkserver()
    assert (sent.keys, sent.job_keys, sent.retired) == (joining(OLD, NEW), (OLD, NEW), ())
    next_file(file).unlink()
    assert own.take(joining(NEW)) == "" and own.job == Secrets((NEW,), (OLD,))
    assert own.ring.now == Secrets(joining(NEW))
    assert "stands neither in" in own.take(joining(OLD)), "who takes part could bring back a key that was retired"


def test_a_change_that_was_ended_by_hand_is_found_in_the_file_itself(tmp_path: Path) -> None:
    file = tmp_path / "job.key"
    own = AgentKeys(key_in(file, OLD), file, starts_coordinators=True)
    key_in(file, NEW)
    assert own.take(joining(OLD, NEW)) == "" and own.job == Secrets((OLD, NEW))


def test_other_agents_hold_what_they_are_told_and_nothing_of_the_jobs(tmp_path: Path) -> None:
    own = AgentKeys(JobKey(OLD, None), tmp_path / "job.key", starts_coordinators=False)
    assert own.take(joining(OLD, NEW)) == "" and own.job == Secrets(())
    assert own.for_forkserver().job_keys == ()
    key = JobKey(joining(OLD)[0], None, KeyRole.JOINING)
    later = AgentKeys(key, tmp_path / "joining.key", starts_coordinators=False, sent=joining(OLD, NEW))
    assert later.ring.now == Secrets(joining(OLD, NEW))
