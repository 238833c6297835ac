"""Control connections over every kind of socket: nothing that matters is lost, whichever side dies and returns."""

import asyncio
import contextlib
import math
import os
import re
import select
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.certificates import (
    client_only_tls,
    expired_tls,
    job_tls,
    misnamed_tls,
    second_tls,
    stranger_tls,
)
from tests.conformance.coordinators import (
    KEY,
    KINDS,
    PATIENCE_S,
    Coordinator,
    Hello,
    History,
    Owner,
    Participant,
    Say,
    Tell,
    Town,
    heard_by,
    kill,
    until,
)

from elaswave.channel import client as client_module
from elaswave.channel.client import ControlClient
from elaswave.channel.server import ControlServer, RefusedPeer
from elaswave.channel.wire import ControlFrameKind, agent_id
from elaswave.errors import BacklogError, ConfigError, FrameError
from elaswave.protocol.leadership.store_position import StorePosition, first_position
from elaswave.transport import addresses
from elaswave.transport.tls import Tls


def num_unacknowledged(client: ControlClient) -> int:
    """Durable messages that a client keeps."""
    return len(client._unacknowledged)


@pytest.fixture(params=KINDS)
def town(request, tmp_path):
    yield from _town(request.param, tmp_path)


@pytest.fixture
def one_town(tmp_path):
    """For what does not depend on the kind of socket."""
    yield from _town("unix", tmp_path)


def _town(kind, tmp_path):
    descriptors = set(os.listdir("/proc/self/fd"))
    town = Town(kind, tmp_path)
    yield town
    town.close()
    assert os.listdir(town.folder) == [], "a socket file is left"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("control of")]
    until(lambda: len(os.listdir("/proc/self/fd")) <= len(descriptors))


def test_a_client_says_hello_first_and_then_everybody_talks(town):
    coordinator = town.coordinator()
    worker = town.participant(3)
    agent = town.participant(agent_id(0))
    for participant in (worker, agent):
        participant.works()
        assert coordinator.events(participant.client.peer) == ["connected"]
        assert coordinator.log[[who for _, who, _ in coordinator.log].index(participant.client.peer)][0] == "connected"
        assert coordinator.hellos(participant.client.peer) == [1]
    assert coordinator.call(lambda: coordinator.server.peers) == [3, agent_id(0)]
    assert coordinator.call(lambda: coordinator.server.last_heartbeat_s(3)) >= 0
    assert coordinator.call(lambda: coordinator.server.last_heartbeat_s(4)) is None
    assert worker.client.connected and worker.client.disconnected_s == 0
    assert worker.client.close(PATIENCE_S)
    until(lambda: coordinator.events(3) == ["connected", "closed"])
    assert not worker.client.connected
    assert not worker.client.send(Say(1)) and not worker.client.send(Say(1), durable=True)
    agent.works()


def test_a_look_at_a_connection_gives_the_other_kernel_something_to_acknowledge(town):
    coordinator = town.coordinator()
    worker, other = town.participant(3), town.participant(4)
    for participant in (worker, other):
        participant.works()
    look = lambda: coordinator.call(lambda: coordinator.server.look([3, 9, 4]))  # noqa: E731
    first = look()
    if town.kind == "unix":
        assert first == [], "this kernel is the other one too"
        return
    assert len({each.connection for each in first}) == 2, "9 is not connected"
    until(lambda: all(now.num_acknowledged > then.num_acknowledged for now, then in zip(look(), first)))
    worker.client.silence(True)
    worker.client.silence(False)  # it makes a new connection
    until(lambda: coordinator.events(3).count("connected") == 2)
    assert {each.connection for each in look()} & {each.connection for each in first} == {first[1].connection}


def test_messages_keep_their_order_and_durable_ones_are_acknowledged(town):
    coordinator = town.coordinator()
    worker = town.participant(0)
    until(lambda: worker.client.connected)
    for number in range(300):
        assert worker.client.send(Say(number), durable=number % 3 == 0)
    until(lambda: len(worker.heard) == 300)
    assert coordinator.said(0) == worker.heard == list(range(300))
    until(lambda: not num_unacknowledged(worker.client))


def test_a_message_is_acknowledged_once_it_is_durable(one_town):
    durable: list[Callable[[], None]] = []
    coordinator = one_town.coordinator(history=History(when_durable=durable.append))
    worker = one_town.participant(0, silence_timeout_s=0.1)
    until(lambda: worker.client.connected)
    worker.client.send(Say(1), durable=True)
    until(lambda: 1 in worker.heard)
    connected = coordinator.events(0)
    until(lambda: len(durable) > 3)  # heartbeats were answered: they count as signs of life
    assert num_unacknowledged(worker.client) == 1 and coordinator.events(0) == connected
    for call in list(durable):
        coordinator.call(call)
    until(lambda: not num_unacknowledged(worker.client))
    assert coordinator.said(0) == [1]


def test_a_heartbeat_is_answered_while_the_store_is_waited_for(one_town):
    """Also where the peer has said nothing that would have to be acknowledged."""
    history = History()
    coordinator = one_town.coordinator(history=history)
    heartbeats: list[None] = []
    worker = one_town.participant(0, silence_timeout_s=0.2, heartbeat=lambda: heartbeats.append(None))
    worker.works()
    until(lambda: not num_unacknowledged(worker.client))
    history.when_durable = lambda call: None
    until(lambda: len(heartbeats) > 50)  # in five times as long as it bears without an answer
    assert coordinator.events(0) == ["connected"] and worker.num_hellos == 1


def test_a_message_that_was_not_durable_yet_is_said_again_to_a_successor(one_town):
    first = one_town.coordinator(history=History(when_durable=lambda call: None))
    worker = one_town.participant(0)
    worker.works()
    assert num_unacknowledged(worker.client) == 1
    first.close()
    successor = one_town.coordinator()
    until(lambda: not num_unacknowledged(worker.client))
    assert len(successor.said(0)) == 1


def test_peers_hear_of_a_server_whose_loop_waits(one_town):
    """As while a decision waits for the store: nothing that they say is handled, and they do not give up."""

    def wait(peer: int, message: Any) -> None:
        if isinstance(message, Say):
            for _ in range(50):  # five times as long as it bears without an answer
                coordinator.server.keep_alive()
                time.sleep(0.01)

    coordinator = one_town.coordinator(on_message=wait)
    worker = one_town.participant(0, silence_timeout_s=0.1)
    until(lambda: worker.client.connected)
    worker.client.send(Say(1))
    until(lambda: 1 in worker.heard)
    assert coordinator.events(0) == ["connected"] and worker.num_hellos == 1


def test_a_message_tells_how_long_it_has_waited_for_a_connection(one_town):
    ages: list[float] = []
    worker = one_town.participant(0)
    begun = time.monotonic()
    worker.client.send(Say(1), durable=True)
    until(lambda: worker.client.trouble)  # there is nobody
    least = time.monotonic() - begun
    coordinator = one_town.coordinator(on_message=lambda peer, message: ages.append(coordinator.server.age_s))
    until(lambda: coordinator.said(0) == [1])
    until(lambda: worker.client.connected)
    worker.client.send(Say(2))
    until(lambda: coordinator.said(0) == [1, 2])
    hello, late, present = ages
    assert hello == present == 0.0
    assert least - 0.001 <= late <= time.monotonic() - begun + 0.001


def test_large_messages_pass_in_both_directions(town):
    coordinator = town.coordinator()
    worker = town.participant(0)
    until(lambda: worker.client.connected)
    said = Say(1, os.urandom(3 << 19).hex())
    worker.client.send(said, durable=True)
    worker.works()
    coordinator.call(lambda: coordinator.server.send(0, Tell(5, os.urandom(3 << 20))))
    until(lambda: 5 in worker.heard)
    assert any(message == said for _, _, message in coordinator.log)


def test_one_message_goes_to_those_that_are_connected(one_town):
    coordinator = one_town.coordinator()
    workers = [one_town.participant(peer) for peer in range(3)]
    for worker in workers:
        worker.works()
    assert coordinator.call(lambda: coordinator.server.send_all([0, 1, 2, 9], Tell(77))) == [0, 1, 2]
    assert not coordinator.call(lambda: coordinator.server.send(9, Tell(78)))
    for worker in workers:
        until(lambda worker=worker: worker.heard[-1] == 77)


def test_everything_is_said_again_to_a_new_coordinator(town):
    first = town.coordinator()
    worker = town.participant(2)
    worker.works()
    first.close()
    until(lambda: not worker.client.connected)
    assert worker.client.disconnected_s > 0
    # A heartbeat on its way may have met the end; and it may have dialled again by now.
    why = ("the coordinator ended the connection", "reset by peer", "refused", "No such file")
    assert any(text in worker.client.trouble for text in why), worker.client.trouble
    for number in range(50):
        assert not worker.client.send(Say(number), durable=True)
        assert not worker.client.send(Say(1000 + number))
    assert num_unacknowledged(worker.client) == 50
    second = town.coordinator()
    until(lambda: not num_unacknowledged(worker.client))
    assert second.hellos(2) == [2]
    assert second.said(2) == list(range(50)), "durable messages once and in order, the others dropped"
    worker.works()


def test_the_newest_head_is_said_to_each_new_coordinator_before_anything_else(one_town):
    history = History(StorePosition(1, 1, 0, b""))
    first = one_town.coordinator(history=history)
    told, idle = one_town.participant(2), one_town.participant(3)
    told.works()
    history.store_position = StorePosition(1, 1, 1, b"one")
    told.works()
    until(lambda: idle.num_hellos)
    first.close()
    second = one_town.coordinator(history=History(StorePosition(1, 2, 0, b"")))
    told.works()
    idle.works()
    assert second.heads == [(2, history.store_position)], "nothing was sent to the other one"
    second.close()
    third = one_town.coordinator()
    told.works()
    idle.works()
    assert sorted(third.heads) == [(2, StorePosition(1, 2, 0, b"")), (3, StorePosition(1, 2, 0, b""))]
    assert [what for what, peer, _ in third.log if peer == 2][:2] == ["connected", "message"]


def test_who_is_of_another_founding_of_the_job_is_told_so_and_takes_no_place(one_town):
    """It has the id of a member, which keeps its connection."""
    coordinator = one_town.coordinator(
        turned_away=lambda peer, store_position: RefusedPeer(Tell(404)) if store_position.job_generation != 2 else None
    )
    member = one_town.participant(2, job_generation=2)
    member.works()
    stranger = one_town.participant(2, job_generation=1)
    until(lambda: stranger.heard.count(404) >= 2)
    member.works()
    assert coordinator.events(2) == ["connected"] and coordinator.hellos(2) == [1]
    assert {store_position for _, store_position in coordinator.heads} == {first_position(1), first_position(2)}


def test_a_killed_coordinator_loses_nothing(town, tmp_path):
    """Three coordinators are killed while four clients keep sending."""
    journal = tmp_path / "heard"
    workers = [town.participant(peer) for peer in range(4)]
    totals = [0] * 4
    stop = threading.Event()

    def talk(peer: int) -> None:
        while not stop.wait(0.01):
            for _ in range(20):
                totals[peer] += 1
                workers[peer].client.send(Say(totals[peer]), durable=True)

    threads = [threading.Thread(target=talk, args=(peer,)) for peer in range(4)]
    for thread in threads:
        thread.start()
    try:
        for generation in range(4):
            process = town.process(journal)
            until(lambda generation=generation: all(worker.num_hellos > generation for worker in workers))
            handled = len(heard_by(journal))
            until(lambda handled=handled: len(heard_by(journal)) > handled + 100)
            if generation < 3:
                kill(process)
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    for worker in workers:
        assert worker.client.close(PATIENCE_S)
    for peer in range(4):
        reached = 0
        for number in (number for who, number in heard_by(journal) if who == peer):
            assert number <= reached + 1, "a message has been left out"
            reached = max(reached, number)
        assert reached == totals[peer]


def test_thirty_two_clients(town):
    coordinator = town.coordinator()
    workers = [town.participant(peer) for peer in range(32)]
    until(lambda: all(worker.client.connected for worker in workers))
    for number in range(20):
        for worker in workers:
            worker.client.send(Say(number), durable=True)
    until(lambda: all(len(worker.heard) == 20 for worker in workers))
    assert all(coordinator.said(peer) == list(range(20)) for peer in range(32))
    assert len(coordinator.call(lambda: coordinator.server.send_all(range(32), Tell(99)))) == 32
    until(lambda: all(worker.heard[-1] == 99 for worker in workers))
    coordinator.close()
    again = town.coordinator()
    until(lambda: all(worker.client.connected for worker in workers))
    until(lambda: sorted(again.call(lambda: again.server.peers)) == list(range(32)))


def test_a_message_that_comes_again_is_handled_once_in_the_life_of_a_server(one_town):
    coordinator = one_town.coordinator()
    one_town.raw_peer(own=5).authenticate().say_hello(identity=11).say(1).say(2).close()
    until(lambda: coordinator.said(5) == [1, 2])
    again = one_town.raw_peer(own=5).authenticate().say_hello(identity=11).say(1).say(2).say(3)
    while again.acknowledged() < 3:
        pass
    assert coordinator.said(5) == [1, 2, 3]
    another = one_town.raw_peer(own=5).authenticate().say_hello(identity=12).say(1)
    assert another.acknowledged() == 1
    assert coordinator.said(5) == [1, 2, 3, 1], "another client counts from the start"


def test_a_peer_was_heard_by_the_servers_own_clock(one_town):
    """The clock of a coordinator stands still while its process does not run."""
    times = {"now_s": 100.0}
    coordinator = one_town.coordinator(now_s=lambda: times["now_s"])
    assert coordinator.call(lambda: coordinator.server.last_heartbeat_s(5)) is None, "it is not connected"
    peer = one_town.raw_peer(own=5).authenticate().say_hello(1)
    assert peer.say(1).acknowledged() == 1
    times["now_s"] = 103.0
    assert coordinator.call(lambda: coordinator.server.last_heartbeat_s(5)) == 3.0


def test_the_newest_connection_of_a_peer_replaces_the_older_one(one_town):
    coordinator = one_town.coordinator()
    older = one_town.raw_peer(own=5).authenticate().say_hello(1)
    until(lambda: coordinator.events(5) == ["connected"])
    newer = one_town.raw_peer(own=5).authenticate().say_hello(2)
    assert older.is_refused()
    assert newer.say(1).acknowledged() == 1
    assert coordinator.events(5) == ["connected", "connected"]
    newer.close()
    until(lambda: coordinator.events(5) == ["connected", "connected", "closed"])


def disconnect(server: ControlServer[Any], peer: int) -> None:
    """The connection ends after what was sent before."""
    server._peers[peer].transport.close()


def test_a_connection_may_end_after_what_was_sent(one_town):
    coordinator = one_town.coordinator()
    worker = one_town.participant(4)
    worker.works()
    coordinator.call(lambda: (coordinator.server.send(4, Tell(1)), disconnect(coordinator.server, 4)))
    until(lambda: coordinator.events(4)[:3] == ["connected", "closed", "connected"])
    assert 1 in worker.heard
    worker.works()


def test_last_words_are_heard_although_our_own_can_not_be_said_any_more(one_town):
    coordinator = one_town.coordinator()
    worker = one_town.participant(4, start=False, interval_s=math.inf)
    deadline = time.monotonic() + PATIENCE_S
    while not worker.client.connected and time.monotonic() < deadline:
        worker.client.turn(0.01)
    until(lambda: coordinator.events(4) == ["connected"])
    coordinator.call(lambda: (coordinator.server.send(4, Tell(1)), disconnect(coordinator.server, 4)))
    coordinator.wait_for_events(4, "connected", "closed")
    assert not worker.client.send(Say(1)) and not worker.client.send(Say(2), durable=True)
    assert worker.client.connected and worker.heard == []
    while worker.num_hellos < 2 and time.monotonic() < deadline:
        worker.client.turn(0.01)
    assert worker.heard[0] == 1
    assert worker.client.close(PATIENCE_S)
    assert coordinator.said(4) == [2]


def test_an_error_of_the_coordinator_is_raised_and_nothing_is_acknowledged(one_town):
    def fail(peer, message):
        if message == Say(3):
            raise RuntimeError("the disk is full")

    first = one_town.coordinator(on_message=fail)
    worker = one_town.participant(1)
    until(lambda: worker.client.connected)
    for number in range(1, 6):
        worker.client.send(Say(number), durable=True)
    until(lambda: first.failure is not None)
    assert str(first.failure) == "the disk is full"
    until(lambda: num_unacknowledged(worker.client) == 3)
    assert first.said(1) == [1, 2]
    first.close()
    second = one_town.coordinator()
    until(lambda: not num_unacknowledged(worker.client))
    assert second.said(1) == [3, 4, 5]


def test_heartbeats_go_on_while_the_main_thread_computes(town):
    coordinator = town.coordinator()
    beats = iter(range(10**6))
    worker = town.participant(1, heartbeat=lambda: Say(next(beats)), interval_s=0.005)
    until(lambda: worker.client.connected)
    while len(coordinator.said(1)) < 10:
        sum(range(10000))
    assert coordinator.said(1)[:10] == list(range(10))


def test_what_is_sent_while_hello_is_made_follows_it(one_town):
    coordinator = one_town.coordinator()

    def hello():
        # As another thread would, after the state that hello tells has been read.
        assert worker.send(Say(2)) and worker.send(Say(3), durable=True)
        return Hello(7)

    heard = []
    worker = ControlClient([(one_town.listen, "")], KEY, 8, Tell, Owner(heard.append, hello))
    worker.send(Say(1), durable=True)
    worker.start()
    until(lambda: len(heard) == 3)
    assert worker.close(PATIENCE_S)
    assert coordinator.hellos(8) == [7] and coordinator.said(8) == [1, 2, 3]


def test_facts_are_said_on_every_connection_after_what_was_not_acknowledged(one_town):
    """Also after what is sent while they are being told: the end of a job must not overtake its last loss."""
    replayed_state, during = [Say(8), Say(9)], [2]

    def tell():
        for number in during:
            worker.send(Say(number), durable=True)
        during.clear()
        return replayed_state

    heard = []
    worker = ControlClient([(one_town.listen, "")], KEY, 8, Tell, Owner(heard.append, standing=tell))
    worker.send(Say(1), durable=True)
    worker.start()
    first = one_town.coordinator()
    until(lambda: len(first.said(8)) == 4)
    assert first.said(8) == [1, 2, 8, 9]
    until(lambda: not num_unacknowledged(worker))
    first.close()
    until(lambda: not worker.connected)
    worker.send(Say(3), durable=True)
    replayed_state.pop(0)
    second = one_town.coordinator()
    until(lambda: len(second.said(8)) == 2)
    assert second.said(8) == [3, 9]
    assert worker.close(PATIENCE_S)


def test_what_is_sent_while_facts_are_told_neither_overtakes_them_nor_is_overtaken(one_town):
    """As the end of a worker, which must come after its parts of checkpoints and after its losses."""
    coordinator = one_town.coordinator()

    def replayed_state():
        # As another thread would: before the facts have been read, and after that.
        assert worker.send(Say(2), durable=True)
        found = [Say(3)]
        assert worker.send(Say(4))
        return found

    heard = []
    worker = ControlClient([(one_town.listen, "")], KEY, 8, Tell, Owner(heard.append, standing=replayed_state))
    worker.send(Say(1), durable=True)
    worker.start()
    until(lambda: len(heard) == 4)
    assert worker.close(PATIENCE_S)
    assert coordinator.said(8) == [1, 2, 3, 4]


def test_what_came_during_a_silence_is_not_heard_after_it(one_town):
    coordinator = one_town.coordinator()
    worker = one_town.participant(8, start=False)
    deadline = time.monotonic() + PATIENCE_S
    while not worker.client.connected and time.monotonic() < deadline:
        worker.client.turn(0.01)
    until(lambda: coordinator.events(8) == ["connected"])
    worker.client.silence(True)
    coordinator.call(lambda: coordinator.server.send(8, Tell(2)))
    worker.client.silence(False)
    worker.client._on_ready(select.EPOLLIN)  # it had begun to look before the silence was over
    assert worker.heard == []
    while worker.num_hellos < 2 and time.monotonic() < deadline:
        worker.client.turn(0.01)
    assert worker.num_hellos == 2 and worker.heard == []
    worker.client.close(PATIENCE_S)


def test_silence_drops_everything_and_closes_nothing(town):
    coordinator = town.coordinator()
    worker = town.participant(6)
    worker.works()
    heard = list(worker.heard)
    said = coordinator.said(6)
    worker.client.silence(True)
    for number in range(5):
        assert not worker.client.send(Say(number), durable=True)
        assert not worker.client.send(Say(100 + number))
    coordinator.call(lambda: coordinator.server.send(6, Tell(50)))
    other = town.participant(7)
    other.works()
    assert coordinator.events(6) == ["connected"] and coordinator.said(6) == said and worker.heard == heard
    worker.client.silence(False)
    until(lambda: not num_unacknowledged(worker.client))
    assert coordinator.said(6) == said + list(range(5))
    assert 50 not in worker.heard and coordinator.hellos(6) == [1, 2]
    worker.works()


def test_a_silent_client_does_not_connect_again_and_can_be_closed(one_town):
    coordinator = one_town.coordinator()
    worker = one_town.participant(6)
    worker.works()
    worker.client.silence(True)
    worker.client.send(Say(1), durable=True)
    coordinator.close()
    until(lambda: not worker.client.connected)
    coordinator = one_town.coordinator()
    other = one_town.participant(7)
    other.works()
    assert coordinator.events(6) == []
    assert not worker.client.close(PATIENCE_S), "it says that a message was not acknowledged, and does not wait"


def test_a_coordinator_that_never_answers_is_given_up(one_town):
    """It accepts connections and reads, but answers no heartbeat, as a stopped host would."""
    coordinator = one_town.coordinator()
    worker = one_town.participant(6, silence_timeout_s=0.05, interval_s=0.01)
    worker.works()
    release = threading.Event()
    try:
        coordinator._loop.call_soon_threadsafe(release.wait, PATIENCE_S)
        until(lambda: not worker.client.connected)
        until(lambda: "silent" in worker.client.trouble)
    finally:
        release.set()
    worker.works()
    assert worker.num_hellos >= 2


def test_a_coordinator_that_does_not_read_is_given_up(one_town, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_UNSENT_BYTES", 1 << 20)
    coordinator = one_town.coordinator()
    worker = one_town.participant(6)
    worker.works()
    release = threading.Event()
    try:
        coordinator._loop.call_soon_threadsafe(release.wait, PATIENCE_S)
        for number in range(100):
            worker.client.send(Say(number, os.urandom(1 << 18).hex()))
        until(lambda: "the coordinator does not read: " in worker.client.trouble)
    finally:
        release.set()
    worker.works()


def test_a_handshake_that_does_not_end_is_given_up(one_town, monkeypatch):
    monkeypatch.setattr(client_module, "HANDSHAKE_TIMEOUT_S", 0.02)
    sock, _, remove = addresses.listen_at(one_town.listen)
    worker = one_town.participant(6)
    until(lambda: "did not finish the handshake in time" in worker.client.trouble)
    sock.close()
    remove()
    one_town.coordinator()
    monkeypatch.undo()
    worker.works()


def test_without_a_thread_the_owner_takes_turns(town):
    coordinator = town.coordinator()
    agent = town.participant(agent_id(0), start=False)
    assert not agent.client.connected
    deadline = time.monotonic() + PATIENCE_S
    agent.client.send(Say(1), durable=True)
    num_threads = threading.active_count()
    while not agent.heard and time.monotonic() < deadline:
        wait_s = agent.client.turn(0.05)
        assert 0 <= wait_s <= 10
    assert agent.heard == [1] and coordinator.said(agent_id(0)) == [1]
    assert agent.client.fileno() >= 0 and threading.active_count() == num_threads
    agent.client.send(Say(2), durable=True)
    assert agent.client.close(PATIENCE_S)
    assert coordinator.said(agent_id(0)) == [1, 2]


def test_too_much_unacknowledged_is_an_error_and_not_a_leak(one_town):
    worker = one_town.participant(3, max_unacknowledged_bytes=1000)
    for number in range(8):
        worker.client.send(Say(number, "x" * 90), durable=True)
    with pytest.raises(BacklogError, match=r"8 messages \(9\d\d bytes\) of worker 3 wait for the coordinator.*at most"):
        worker.client.send(Say(8, "x" * 90), durable=True)
    coordinator = one_town.coordinator()
    until(lambda: not num_unacknowledged(worker.client))
    worker.client.send(Say(8, "x" * 90), durable=True)
    until(lambda: coordinator.said(3) == list(range(9)))


def test_a_message_that_is_too_large_is_refused_where_it_is_made(one_town):
    coordinator = one_town.coordinator(max_message_bytes=1000)
    worker = one_town.participant(3, max_message_bytes=1000)
    worker.works()
    with pytest.raises(FrameError, match="a Say of 10.. bytes is larger than the 1000"):
        worker.client.send(Say(1, "x" * 1000))
    with pytest.raises(FrameError, match="a Tell of 10.. bytes is larger than the 1000"):
        coordinator.call(lambda: coordinator.server.send(3, Tell(1, bytes(1000))))
    worker.works()


def test_a_coordinator_that_sends_what_it_may_not_is_left(one_town, caplog):
    coordinator = one_town.coordinator()
    worker = one_town.participant(3, max_message_bytes=1000)
    worker.works()
    coordinator.call(lambda: coordinator.server.send(3, Tell(1, bytes(2000))))
    until(lambda: "a message of 20" in worker.client.trouble)
    # It knows of the connection before the coordinator, which has dropped the one before, has taken it up.
    until(lambda: worker.client.connected and coordinator.call(lambda: 3 in coordinator.server._peers))
    coordinator.call(lambda: coordinator.server._peers[3].write(ControlFrameKind.OPEN, 0, b""))
    until(lambda: "OPEN from the coordinator, which only clients may send" in worker.client.trouble)
    assert "worker 3 has no connection to the coordinator: a message of 20" in caplog.text
    worker.works()


def test_an_impostor_of_the_coordinator_learns_and_changes_nothing(town, caplog):
    impostor = town.coordinator(key=b"some other key of enough bytes")
    worker = town.participant(3)
    worker.client.send(Say(1), durable=True)
    until(lambda: "the coordinator does not hold this job's key" in worker.client.trouble)
    assert impostor.log == []
    assert caplog.text.count("does not hold this job's key") >= 1
    impostor.close()
    coordinator = town.coordinator()
    until(lambda: coordinator.said(3) == [1])


@pytest.mark.parametrize("where", ["receive", "hello", "heartbeat"])
def test_an_error_of_its_owner_closes_the_client_and_ends_its_thread_as_any_other(one_town, monkeypatch, where):
    one_town.coordinator()
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: seen.append(arguments.exc_value))

    def fail(*arguments):
        raise RuntimeError("a bug")

    worker = ControlClient([(one_town.listen, "")], KEY, 3, Tell, Owner(**{where: fail}))
    worker.interval_s = 0.01
    worker.send(Say(1), durable=True)
    worker.start()
    until(lambda: seen)
    assert str(seen[0]) == "a bug"
    worker.close(0.0)
    assert not worker.connected and not worker.send(Say(2))


def test_a_client_may_be_closed_by_its_own_callback(one_town):
    coordinator = one_town.coordinator()
    worker = ControlClient([(one_town.listen, "")], KEY, 3, Tell, Owner(lambda message: worker.close()))
    worker.send(Say(1), durable=True)
    worker.start()
    until(lambda: coordinator.events(3) == ["connected", "closed"])
    worker.close(0.0)


def test_a_forked_child_lets_go_and_can_have_its_own(one_town):
    coordinator = one_town.coordinator()
    worker = one_town.participant(1)
    worker.works()
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the test itself
        child = os.fork()
    if child == 0:
        status = 1
        try:
            own = Participant(one_town.listen, 2)
            own.works()
            if not worker.client.connected and not worker.client.send(Say(1)) and own.client.close(PATIENCE_S):
                status = 0
            os.close(theirs)
            os.read(ours, 1)
        finally:
            os._exit(status)
    os.close(ours)
    try:
        until(lambda: coordinator.events(2) == ["connected", "closed"])
        worker.works()
        assert worker.client.close(PATIENCE_S)
        until(lambda: coordinator.events(1) == ["connected", "closed"])
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child lives on, and holds no connection of its parent"
    finally:
        os.close(theirs)
        assert os.waitpid(child, 0)[1] == 0


def test_a_successor_takes_over_the_address_and_the_predecessor_leaves_it_alone(tmp_path):
    folder = tmp_path / "private"
    listen = f"unix:{folder}/coordinator.sock"
    first, second = Coordinator(listen), None
    try:
        second = Coordinator(listen)
        first.close()
        participant = Participant(listen, 1)
        participant.works()
        assert second.said(1) and not first.log
        assert participant.client.close(PATIENCE_S)
    finally:
        first.close()
        if second is not None:
            second.close()
    assert os.listdir(folder) == []


def test_addresses_that_cannot_be_listened_at(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for listen, reason in [
        (f"unix:{tmp_path}/open/c.sock", "mode 0755"),
        ("unix:/", "a path to a socket file is needed"),
        ("unix:relative/c.sock", "absolute path"),
        ("file:/c.sock", "neither unix:FOLDER nor tcp"),
        ("tcp:localhost:1", "not a numeric address"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Coordinator(listen)
    folder = tmp_path / "private"
    (folder / "c.sock").mkdir(parents=True)
    folder.chmod(0o700)
    with pytest.raises(OSError):
        Coordinator(f"unix:{folder}/c.sock")
    assert os.listdir(folder) == ["c.sock"], "the temporary name is removed"


def test_keys_and_certificates_are_checked_where_they_are_given(tmp_path):
    listen = f"unix:{tmp_path}/private/c.sock"
    tls = Tls(certificate=f"{tmp_path}/none.pem", key=f"{tmp_path}/none.key", authority=f"{tmp_path}/all.pem")
    with pytest.raises(ValueError, match="at least 16"):
        Coordinator(listen, key=b"short")
    with pytest.raises(ValueError, match="at least 16"):
        Participant(listen, 1, key=b"short")
    for make in (lambda **options: Coordinator(listen, **options), lambda **options: Participant(listen, 1, **options)):
        with pytest.raises(ValueError, match="TLS is for tcp: addresses"):
            make(tls=tls)
    with pytest.raises(ConfigError, match=r"none.pem and .*none.key cannot be used.*PEM files that belong together"):
        Coordinator("tcp:127.0.0.1", tls=tls)


def test_a_network_that_others_can_read_is_warned_about(caplog):
    Coordinator("tcp:0.0.0.0").close()
    assert "authenticated but not encrypted: set net.tls" in caplog.text
    caplog.clear()
    Coordinator("tcp:127.0.0.1").close()
    assert caplog.text == ""


def test_a_server_that_was_not_started_can_be_closed():
    asyncio.run(ControlServer().close())


def test_closing_is_bounded_and_flushes(one_town):
    coordinator = one_town.coordinator()
    worker = one_town.participant(1)
    worker.works()
    deaf = one_town.raw_peer(own=2).authenticate().say_hello()
    half = one_town.raw_peer()
    until(lambda: coordinator.events(2))
    coordinator.call(
        lambda: (
            coordinator.server.send(1, Tell(1, os.urandom(1 << 20))),
            [coordinator.server.send(2, Tell(1, os.urandom(1 << 20))) for _ in range(40)],
        )
    )
    coordinator._run(coordinator.server.close(0.2))
    coordinator._run(coordinator.server.close(0.2))
    assert 1 in worker.heard
    assert half.is_refused() and deaf.is_refused()
    assert coordinator.events(1) == coordinator.events(2) == ["connected"]


def test_tls_material_that_does_not_fit(tmp_path):
    job, other = job_tls(), stranger_tls()
    with pytest.raises(ConfigError, match="belong together"):
        replace(job, key=other.key).dialling()
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="empty.pem"):
        replace(job, certificate=f"{tmp_path}/empty.pem").dialling()
    with pytest.raises(ConfigError, match="none.pem"):
        replace(job, authority=f"{tmp_path}/none.pem").listening()


REFUSED_DIALLERS = {
    "plain": (lambda: None, "ended the connection"),
    "stranger": (stranger_tls, "self-signed certificate in certificate chain|unable to get local issuer certificate"),
    "expired": (expired_tls, "CERTIFICATE_EXPIRED|CERTIFICATE_UNKNOWN|ended the connection|EXPIRED"),
}


@pytest.mark.parametrize("who", REFUSED_DIALLERS)
def test_a_dialler_whose_certificate_does_not_fit(who):
    """None at all; one of another authority; an expired one. Both sides say why, and members are not disturbed."""
    make_tls, seen = REFUSED_DIALLERS[who]
    coordinator = Coordinator("tcp:127.0.0.1", tls=job_tls())
    try:
        member = Participant(coordinator.address, 1, tls=job_tls())
        member.works()
        outsider = Participant(coordinator.address, 2, tls=make_tls())
        until(lambda: coordinator.refusals and outsider.client.trouble)
        assert re.search(seen, outsider.client.trouble), outsider.client.trouble
        assert any("TLS failed" in reason for reason in coordinator.refusals)
        member.works()
        for participant in (member, outsider):
            participant.client.close(0.0)
        assert {who for _, who, _ in coordinator.log} == {1}
    finally:
        coordinator.close()


REFUSED_LISTENERS = {
    "stranger": (stranger_tls, "in certificate chain|unable to get local issuer certificate"),
    "expired": (expired_tls, "certificate has expired"),
    "of another host": (misnamed_tls, "IP address mismatch"),
    "client": (client_only_tls, "(unsupported|unsuitable) certificate purpose"),
}


@pytest.mark.parametrize("who", REFUSED_LISTENERS)
def test_a_listener_whose_certificate_does_not_fit(who):
    """Of another authority, expired, of another host, or for clients alone: although it holds the job's key."""
    make_tls, seen = REFUSED_LISTENERS[who]
    impostor = Coordinator("tcp:127.0.0.1", tls=make_tls())
    try:
        careful = Participant(impostor.address, 1, tls=job_tls())
        until(lambda: re.search(seen, careful.client.trouble))
        until(lambda: any("TLS failed" in reason for reason in impostor.refusals))
        careful.client.close(0.0)
        assert impostor.log == []
    finally:
        impostor.close()


def test_a_name_that_the_certificate_has_serves_an_address_that_it_has_not():
    """Whoever dials the launcher's own address asks for the name that others dial."""
    coordinator = Coordinator("tcp:127.0.0.1", tls=misnamed_tls())
    try:
        member = Participant(coordinator.address, 1, tls=job_tls(), host="10.9.8.7")
        member.works()
        member.client.close(0.0)
    finally:
        coordinator.close()


def test_whoever_ends_tls_in_the_middle_fails_the_handshake():
    """With a certificate of the job's authority and the right name, as a host that was broken into has."""
    job, evil = job_tls(), second_tls()
    coordinator = Coordinator("tcp:127.0.0.1", tls=job, handshake_timeout_s=0.5)
    worker = Participant("tcp:127.0.0.1:1", 1, tls=job, start=False)
    listener = socket.create_server(("127.0.0.1", 0))
    worker.client._targets = [(f"tcp:127.0.0.1:{listener.getsockname()[1]}", "")]

    def relay() -> None:
        try:
            victim, _ = listener.accept()
            onward = addresses.dial(coordinator.address)
            victim.settimeout(PATIENCE_S)
            onward.settimeout(PATIENCE_S)
            with (
                evil.listening().context.wrap_socket(victim, server_side=True) as inward,
                evil.dialling().context.wrap_socket(onward, server_hostname="127.0.0.1") as outward,
            ):
                outward.sendall(inward.recv(1 << 16))
                inward.sendall(outward.recv(1 << 16))
                outward.sendall(inward.recv(1 << 16))
                inward.sendall(outward.recv(1 << 16))
        except OSError:
            pass

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        worker.client.start()
        until(lambda: "does not hold this job's key" in worker.client.trouble)
        assert coordinator.log == []
    finally:
        worker.client.close(0.0)
        listener.close()
        thread.join(PATIENCE_S)
        coordinator.close()


def test_candidates_are_dialled_in_turn_until_one_answers():
    """One host is gone, one has no coordinator now; and again when the coordinator is somewhere else."""
    first, second = Coordinator("tcp:127.0.0.1"), Coordinator("tcp:127.0.0.1")
    nobody = socket.create_server(("127.0.0.1", 0))
    gone = f"tcp:127.0.0.1:{nobody.getsockname()[1]}"
    nobody.close()
    addresses_of = [(first.address, ""), (second.address, "")]
    worker = Participant(gone, 1, others=addresses_of)
    try:
        worker.works()
        assert first.call(lambda: first.server.peers) == [1]
        first.close()
        worker.works()
        assert second.call(lambda: second.server.peers) == [1]
    finally:
        worker.client.close()
        first.close()
        second.close()


def test_candidates_are_dialled_without_a_wait_until_all_have_refused():
    dialled = []

    def refuse(address: str) -> socket.socket:
        dialled.append(address)
        raise ConnectionRefusedError(address)

    addresses_of = [f"tcp:127.0.0.1:{port}" for port in (1, 2, 3)]
    client = ControlClient([(address, "") for address in addresses_of], KEY, 1, Tell, Owner(), dial=refuse)
    assert client.turn() == 0.0 and dialled == addresses_of[:2]
    client.turn()
    assert dialled[:3] == addresses_of
    client.close()


def test_a_candidates_host_that_does_not_answer_is_left_soon(monkeypatch):
    """Its kernel would; nobody knows yet how long its coordinator takes."""
    monkeypatch.setattr(client_module, "CONNECT_AMONG_SEVERAL_S", 0.05)
    coordinator = Coordinator("tcp:127.0.0.1")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as held:
        for _ in range(4):  # of these it takes one, and drops what asks for more
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        gone = f"tcp:127.0.0.1:{full.getsockname()[1]}"
        worker = Participant(gone, 1, others=[(coordinator.address, "")])
        try:
            worker.works()
            assert "the coordinator's host does not answer" in worker.client.trouble
        finally:
            worker.client.close()
            coordinator.close()
