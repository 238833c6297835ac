"""Who must go when too many are in the handshake, and which lines are written about strangers."""

import pytest

from elaswave.transport import handshake
from elaswave.transport.handshake import LimitedLines, UnauthenticatedPeers, source_network


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(handshake, "MAX_UNAUTHENTICATED", 4)
    monkeypatch.setattr(handshake, "MAX_LINES_PER_PERIOD", 2)


def test_the_source_that_has_most_makes_room():
    peers = UnauthenticatedPeers()
    assert [peers.admit(name, source) for name, source in zip("abcd", ["friend", "flood", "flood", "flood"])] == [
        None
    ] * 4
    assert [peers.admit(name, "flood") for name in "efg"] == ["b", "c", "d"]
    assert "a" in peers and list(peers) == ["a", "e", "f", "g"]


def test_those_that_have_spoken_stay_while_others_have_not():
    peers = UnauthenticatedPeers()
    for name in "abcd":
        peers.admit(name)
    peers.spoke("a")
    assert [peers.admit(name) for name in "efg"] == ["b", "c", "d"]
    for name in "efg":
        peers.spoke(name)
    assert peers.admit("h") == "a"  # all have spoken: the oldest
    peers.remove("h")
    peers.remove("h")
    assert list(peers) == ["e", "f", "g"]


def test_a_flood_from_one_network_of_ipv6_has_one_source():
    assert (
        source_network(("2001:db8::1", 7, 0, 0))
        == source_network(("2001:db8::ffff:2%eth0", 9, 0, 0))
        == "2001:db8::/64"
    )
    assert source_network(("10.0.0.1", 7)) != source_network(("10.0.0.2", 7))
    assert source_network("") == source_network(None) == source_network(()) == ""
    assert source_network(("name", 1)) == "name"


def test_lines_of_a_flood_are_counted():
    lines = LimitedLines()
    assert [lines.admit(now_s) for now_s in (0.0, 1.0, 2.0, 3.0)] == [True, True, False, False]
    assert lines.ends_s == 10.0 and lines.unsaid(9.0) == ""
    assert lines.unsaid(10.0) == "2 more connections were turned away within 10 s"
    assert lines.unsaid(11.0) == "" and lines.ends_s is None
    assert lines.admit(12.0) and lines.ends_s is None and lines.unsaid(22.0) == ""
