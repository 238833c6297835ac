"""Hosts with names: looked up again for every dial, never in the thread that computes, and given up after a time."""

import socket
import threading

import pytest
import torch
from tests.conformance.coordinators import Coordinator, Participant
from tests.conformance.coordinators import until as until_true
from tests.conformance.worlds import KEY, PATIENCE_S, finish, in_threads

from elaswave.errors import WaitTimeoutError
from elaswave.transport import addresses
from elaswave.transport.addresses import NameLookup, Place
from elaswave.transport.frames import Tag
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
    b = StreamTransport(1, key=KEY, listen=Place("tcp:127.0.0.1", advertise="node-1"))
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
        lookup.result(0)


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
