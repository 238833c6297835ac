"""Operators hold the job's key, but are no part of the job: whatever they do or leave undone, no member notices."""

import os

import msgspec
import pytest
from tests.conformance.coordinators import Say, Tell, Town, until

from elaswave.channel.server import PeerLimits
from elaswave.channel.wire import (
    COORDINATOR,
    FIRST_OPERATOR,
    ControlFrameKind,
    encode_payload,
    is_operator,
    operator_id,
    peer_name,
)
from elaswave.protocol.leadership.store_position import StorePosition

OPERATOR = operator_id(5)
LIMITS = PeerLimits(message_bytes_max=4096, outbox_bytes_max=1 << 20, frames_per_s=10.0)


@pytest.fixture
def world(tmp_path):
    """A coordinator, and a member that must go on undisturbed."""
    town = Town("unix", tmp_path)
    try:
        coordinator = town.coordinator(operator_limits=LIMITS)
        member = town.participant(1)
        member.works()
        yield town, coordinator
        member.works()
        assert member.num_hellos == 1 and coordinator.events(1) == ["connected"], "the member was disturbed"
        assert coordinator.failure is None
    finally:
        town.close()


def test_ids_of_operators_are_nobody_elses():
    assert is_operator(FIRST_OPERATOR) and is_operator(operator_id(2**62)) and is_operator(COORDINATOR - 1)
    assert not any(map(is_operator, (0, FIRST_OPERATOR - 1, COORDINATOR)))
    assert peer_name(OPERATOR) == "operator 5"


def test_several_at_a_time_are_heard_and_forgotten_when_they_go(world):
    town, coordinator = world
    operators = [town.participant(operator_id(number)) for number in range(3)]
    for operator in operators:
        operator.works()
    for operator in operators:
        operator.client.close(0.0)
    until(lambda: coordinator.server.peers == [1])
    assert coordinator.call(lambda: list(coordinator.server._handled)) == [1]


def test_what_one_has_heard_of_the_history_is_not_asked_for(world):
    town, coordinator = world
    operator = town.raw_peer(own=OPERATOR).authenticate()
    operator.session.write(
        ControlFrameKind.STORE_POSITION, payload=msgspec.msgpack.encode(StorePosition(99, 99, 99, b"forged"))
    )
    operator.flush()
    operator.say_hello()
    until(lambda: coordinator.events(OPERATOR) == ["connected"])
    assert all(peer == 1 for peer, _ in coordinator.heads)


def test_one_that_says_too_much_is_cut_off(world):
    town, coordinator = world
    operator = town.raw_peer(own=OPERATOR).authenticate().say_hello()
    until(lambda: coordinator.events(OPERATOR) == ["connected"])
    for _ in range(200):
        operator.session.write(ControlFrameKind.HEARTBEAT)
    operator.flush()
    assert operator.is_refused()
    until(lambda: any("operator 5 sends more than 10 frames a second" in reason for reason in coordinator.refusals))


def test_one_with_a_large_message_is_cut_off(world):
    town, coordinator = world
    operator = town.raw_peer(own=OPERATOR).authenticate().say_hello()
    until(lambda: coordinator.events(OPERATOR) == ["connected"])
    operator.session.write(ControlFrameKind.MESSAGE, 0, encode_payload(Say(1, "x" * 5000)))
    operator.flush()
    assert operator.is_refused()
    until(lambda: any("bytes from operator 5; at most 4096" in reason for reason in coordinator.refusals))
    member = town.participant(2)
    member.client.send(Say(7, "x" * 5000), durable=True)  # a member may
    until(lambda: 7 in coordinator.said(2))


def test_one_that_does_not_read_is_cut_off_early(world):
    town, coordinator = world
    town.raw_peer(own=OPERATOR).authenticate().say_hello()
    until(lambda: coordinator.events(OPERATOR) == ["connected"])
    tell = Tell(1, os.urandom(1 << 18))
    sent = coordinator.call(lambda: sum(coordinator.server.send(OPERATOR, tell) for _ in range(100)))
    assert 4 <= sent < 20
    until(lambda: any("operator 5 does not read" in reason for reason in coordinator.refusals))


def test_hanging_up_waits_for_nobody_and_hears_nothing_more(world):
    town, coordinator = world
    deaf = town.raw_peer(own=OPERATOR).authenticate().say_hello()
    until(lambda: coordinator.events(OPERATOR) == ["connected"])
    tell = Tell(1, os.urandom(1 << 18))

    def fill_and_hang_up() -> None:
        while coordinator.server._peers[OPERATOR].transport.get_write_buffer_size() == 0:
            coordinator.server.send(OPERATOR, tell)
        coordinator.server.hang_up(OPERATOR)
        coordinator.server.hang_up(OPERATOR)
        assert not coordinator.server.send(OPERATOR, Tell(2))

    coordinator.call(fill_and_hang_up)
    coordinator.wait_for_events(OPERATOR, "connected", "closed")
    assert deaf.is_refused()
    last_words = town.participant(operator_id(6), start=True)
    until(lambda: last_words.client.connected)

    def tell_and_hang_up() -> None:
        coordinator.server.send(operator_id(6), Tell(3))
        coordinator.server.hang_up(operator_id(6))

    until(lambda: coordinator.events(operator_id(6)) == ["connected"])
    coordinator.call(tell_and_hang_up)
    until(lambda: last_words.heard == [3])


def test_no_connection_outlasts_a_key_by_a_handshake_that_was_begun_before(world):
    """Nor in the place of a member, whose id it claims."""
    town, coordinator = world
    coordinator.server.handshake_timeout_s = 1e6
    opened = town.raw_peer(own=OPERATOR).authenticate().say_hello()
    until(lambda: coordinator.events(OPERATOR) == ["connected"])
    done, claims = (town.raw_peer(own=own).authenticate() for own in (operator_id(6), 1))
    begun = town.raw_peer(own=operator_id(7)).flush()
    until(lambda: coordinator.call(lambda: len(list(coordinator.server._unauthenticated))) == 3)
    coordinator.call(lambda: coordinator.server.keep([1]))
    assert all(peer.is_refused() for peer in (opened, done, claims, begun))
    until(lambda: coordinator.server.peers == [1])
