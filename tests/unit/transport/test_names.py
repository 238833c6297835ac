"""Hosts with names: looked up again for every dial, never in the thread that computes, and given up after a time."""

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
from tests.conformance.coordinators import KEY as CONTROL_KEY
from tests.conformance.coordinators import Coordinator, Owner, Participant, ToClient
from tests.conformance.coordinators import until as until_true
from tests.conformance.worlds import KEY, PATIENCE_S, finish, in_threads

from elaswave.channel import client as control_client
from elaswave.channel.client import ControlClient
from elaswave.errors import WaitTimeoutError
from elaswave.transport import addresses
from elaswave.transport.addresses import Endpoint, NameLookup
from elaswave.transport.interface import Tag
from elaswave.transport.stream import StreamTransport

TAG = Tag(1, 1, 0)


@pytest.fixture
def names(monkeypatch):
    """Addresses by name, and who has asked: (name, thread)."""
    known: dict[str, list[str]] = {}
    asked: list[tuple[str, threading.Thread]] = []

    def getaddrinfo(host, port, **options):
        asked.append((host, threading.current_thread()))
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known, asked


def test_a_link_to_a_name_is_dialled_at_its_newest_address(names):
    known, asked = names
    known["node-1"] = ["127.0.0.99"]  # where nobody listens: it has come back with another one
    a = StreamTransport(0, key=KEY, listen="tcp:127.0.0.1")
    b = StreamTransport(1, key=KEY, listen=Endpoint("tcp:127.0.0.1", advertise="node-1"))
    try:
        assert b.address.startswith("tcp:node-1:")

        def dial():
            with pytest.raises(WaitTimeoutError, match=r"worker 1 at tcp:node-1:\d+: .*refused"):
                a.connect({1: b.address}, 0.1)
            known["node-1"] = ["127.0.0.99", "127.0.0.1"]  # each of them has its turn
            a.connect({1: b.address}, PATIENCE_S)

        in_threads([dial, lambda: b.connect({0: a.address}, PATIENCE_S)])
        finish([b.recv(0, TAG), a.send(1, TAG, torch.ones(3))], a, b)
        assert len(asked) >= 3 and {host for host, _ in asked} == {"node-1"}
        assert all(thread.name == "look-up of node-1" for _, thread in asked)
    finally:
        a.close()
        b.close()


def test_each_address_of_each_peer_has_its_turn_and_first_the_preferred_one(names, monkeypatch):
    known, _ = names
    known["node-1"], known["node-2"] = ["127.0.0.91", "127.0.0.92"], ["127.0.0.93", "127.0.0.94"]  # nobody listens
    dialled: list[str] = []
    dial = addresses.dial
    monkeypatch.setattr(addresses, "dial", lambda address: dialled.append(address) or dial(address))
    a = StreamTransport(0, key=KEY, listen="tcp:127.0.0.1")
    of_nodes = [[f"tcp:{address}:70" for address in node] for node in known.values()]
    found = lambda: [[address for address in dialled if address in places] for places in of_nodes]  # noqa: E731
    try:
        while min(map(len, found())) < 2:
            with pytest.raises(WaitTimeoutError):
                a.connect({1: "tcp:node-1:70", 2: "tcp:node-2:70"}, 0.2)
    finally:
        a.close()
    assert [places[:2] for places in found()] == of_nodes, dialled


def test_a_name_without_an_address_is_named(names):
    a = StreamTransport(0, key=KEY, listen="tcp:127.0.0.1")
    try:
        with pytest.raises(WaitTimeoutError, match="the name nowhere has no address: .*Name or service not known"):
            a.connect({1: "tcp:nowhere:70"}, 0.2)
        assert a._acceptor.dialling == set()
    finally:
        a.close()


def test_a_look_up_that_stalls_blocks_nobody_and_is_given_up(monkeypatch):
    stalled = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: stalled.wait() and [])
    monkeypatch.setattr(addresses, "LOOKUP_TIMEOUT_S", 0.05)
    a = StreamTransport(0, key=KEY, listen="tcp:127.0.0.1")
    try:
        with pytest.raises(WaitTimeoutError, match="the name slow was not looked up within 0.05 s"):
            a.connect({1: "tcp:slow:70"}, 0.5)
    finally:
        stalled.set()
        a.close()


def test_a_name_that_cannot_be_one_is_an_error_of_the_dial():
    woken = threading.Event()
    lookup = NameLookup(f"tcp:{'x' * 70}.{'y' * 300}:70", woken.set)
    assert woken.wait(PATIENCE_S) and lookup.is_over
    with pytest.raises(OSError, match="has no address"):
        lookup.results()


def test_control_connections_look_names_up_for_every_connection(names):
    known, asked = names
    known["head"] = ["127.0.0.1"]
    coordinator = Coordinator("tcp:127.0.0.1")
    port = coordinator.address.rpartition(":")[2]
    member = Participant(f"tcp:head:{port}", 1)
    try:
        member.works()
        member.client.silence(True)
        member.client.silence(False)  # it connects again
        until_true(lambda: len(asked) >= 2)
        member.works()
        assert all(thread.name == "look-up of head" for _, thread in asked)
    finally:
        member.client.close(0.0)
        coordinator.close()
    gone = Participant("tcp:nowhere:70", 2)
    until_true(lambda: "the name nowhere has no address" in gone.client.trouble)
    gone.client.close(0.0)


def client_of(*targets: str) -> "tuple[ControlClient[ToClient], list[str]]":
    """A client of an owner without threads, as an agent is, and what it dials."""
    dialled: list[str] = []

    def dial(address: str) -> socket.socket:
        dialled.append(address)
        return addresses.dial(address)

    places = [(target, "") for target in targets]
    return ControlClient(places, CONTROL_KEY, 1, ToClient, Owner(), dial=dial), dialled


def turn_until(client: "ControlClient[ToClient]", condition: "Callable[[], object]") -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, client.trouble
        client.turn(0.05)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_candidate_that_comes_back_with_another_address_is_found_under_its_name(names, address):
    known, asked = names
    known["first"], known["second"] = ["127.0.0.98"], ["127.0.0.99"]
    coordinator = Coordinator(addresses.tcp_address(address, 0))
    port = coordinator.address.rpartition(":")[2]
    client, dialled = client_of(f"tcp:first:{port}", f"tcp:second:{port}")
    try:
        turn_until(client, lambda: len(dialled) >= 4)
        known["second"] = [address]
        turn_until(client, lambda: client.connected)
        assert dialled[:2] == [f"tcp:127.0.0.98:{port}", f"tcp:127.0.0.99:{port}"]
        assert dialled[-1] == coordinator.address
        assert len(asked) >= len(dialled) and {thread.name for _, thread in asked} == {
            "look-up of first",
            "look-up of second",
        }
    finally:
        client.close(0.0)
        coordinator.close()


def test_each_address_of_a_name_has_its_turn_beside_another_candidate(names):
    known, _ = names
    known["first"] = ["127.0.0.97", "127.0.0.98"]
    client, dialled = client_of("tcp:first:70", "tcp:127.0.0.99:70")
    try:
        turn_until(client, lambda: len(dialled) >= 4)
        assert dialled[:4:2] == ["tcp:127.0.0.97:70", "tcp:127.0.0.98:70"], "first the one that the system prefers"
    finally:
        client.close(0.0)


@pytest.mark.parametrize("names_are", ["slow", "unknown"])
def test_without_names_the_last_known_address_is_dialled(names, monkeypatch, names_are):
    """The host that answers for names may be the one that was lost."""
    known, asked = names
    known["head"] = ["127.0.0.1"]
    coordinator = Coordinator("tcp:127.0.0.1")
    port = coordinator.address.rpartition(":")[2]
    client, dialled = client_of(f"tcp:head:{port}")
    again = threading.Event()
    try:
        turn_until(client, lambda: client.connected)
        monkeypatch.setattr(control_client, "KNOWN_LOOKUP_S", 0.05)
        if names_are == "unknown":
            del known["head"]
        else:
            in_time = socket.getaddrinfo
            monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: again.wait() and in_time(*given, **more))
        for _ in range(2):
            client.silence(True)
            client.silence(False)
            client.turn()
            turn_until(client, lambda: client.connected)
        assert dialled == [f"tcp:127.0.0.1:{port}"] * 3
        assert len(asked) == (3 if names_are == "unknown" else 1)
        waiting = [thread for thread in threading.enumerate() if thread.name == "look-up of head"]
        assert len(waiting) <= 1, "one look-up of a name at a time"
        if names_are == "unknown":
            for thread in waiting:  # it has told what it has found, and is about to end
                thread.join(PATIENCE_S)
        assert any(thread.is_alive() for thread in waiting) == (names_are == "slow")
    finally:
        again.set()
        client.close(0.0)
        coordinator.close()


def test_a_name_that_stalls_holds_the_other_candidates_up_once(names, monkeypatch):
    known, _ = names
    monkeypatch.setattr(addresses, "LOOKUP_TIMEOUT_S", 0.3)
    again = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: again.wait() and [])
    client, dialled = client_of("tcp:first:70", "tcp:127.0.0.99:70")
    try:
        turn_until(client, lambda: dialled)
        began_s = time.monotonic()
        while len(dialled) < 3 and time.monotonic() < began_s + PATIENCE_S:
            assert client.turn(0.05) <= control_client.LAST_BACKOFF_S
        assert set(dialled) == {"tcp:127.0.0.99:70"}
    finally:
        again.set()
        client.close(0.0)


def test_a_fork_waits_for_look_ups_but_not_for_ever(monkeypatch):
    again = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: again.wait() and [])
    lookup = NameLookup("tcp:slow:70", lambda: None)
    addresses.await_lookups(0.05)
    assert not lookup.is_done
    threading.Timer(0.05, again.set).start()
    addresses.await_lookups(PATIENCE_S)
    assert lookup.is_done
