"""Where the processes of a host listen and dial, and which agent founds a job."""

import socket

import pytest
from tests.agents import free_port

from elaswave.config.schema import NetConfig
from elaswave.control import host_network
from elaswave.control.host_network import Seed, agent_network, hold, own_address, seed_of, seeds_of, where_to_listen
from elaswave.errors import ConfigError, RetryError, UsageError


def seed(host: str = "127.0.0.1") -> Seed:
    return Seed(host, free_port(), host)


def tcp(**values: object) -> NetConfig:
    return NetConfig(transport="tcp", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:", ":7077", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:x"])
def test_a_coordinator_has_a_host_and_a_port(text: str) -> None:
    with pytest.raises(UsageError, match=r"give HOST:PORT, such as 10\.77\.0\.1:7077"):
        seed_of(text)


def test_addresses_and_names_of_coordinators() -> None:
    assert seed_of("10.0.0.1:7077") == Seed("10.0.0.1", 7077, "10.0.0.1")
    assert seed_of("[::1]:7077") == Seed("::1", 7077, "::1")
    assert seed_of("localhost:7077").address in ("127.0.0.1", "::1")
    with pytest.raises(RetryError, match=r"nowhere\.invalid has no address"):
        seed_of("nowhere.invalid:7077")


def test_a_name_without_an_address_keeps_its_place_among_the_candidates() -> None:
    seeds = seeds_of(["nowhere.invalid:7077", "127.0.0.1:7078"])
    assert seeds == (Seed("nowhere.invalid", 7077, ""), Seed("127.0.0.1", 7078, "127.0.0.1"))
    assert hold(seeds[0], "127.0.0.1") is None
    for own in (1, None):
        network = agent_network(tcp(), seeds, own)
        assert network.launcher_dials == "tcp:127.0.0.1:7078"
        assert network.others == (("tcp:nowhere.invalid:7077", "nowhere.invalid"),)
    with pytest.raises(RetryError, match=r"--coordinator nowhere\.invalid:7077: nowhere\.invalid has no address"):
        seeds_of(["nowhere.invalid:7077", "elsewhere.invalid:7077"])
    with pytest.raises(UsageError, match="give HOST:PORT"):
        seeds_of(["127.0.0.1:7078", "nowhere.invalid"])


def test_one_agent_of_a_host_holds_the_coordinators_port() -> None:
    where = seed()
    first = hold(where, "127.0.0.1")
    assert first is not None
    try:
        assert hold(where, "127.0.0.1") is None, "another agent of this host has it"
    finally:
        first.close()
    again = hold(where, "127.0.0.1")
    assert again is not None, "it was given up"
    again.close()


def test_the_port_of_another_host_is_not_held() -> None:
    assert hold(seed("198.51.100.1"), "198.51.100.1") is None
    assert hold(seed("198.51.100.1"), "127.0.0.1") is None, "the port is free here, but nobody dials it here"
    with pytest.raises(ValueError, match="is not a numeric address"):
        hold(seed(), "localhost")


def test_a_port_that_another_program_has_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_network, "FREE_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = Seed("127.0.0.1", port, "127.0.0.1")
        for _ in range(2):  # the lock is given up
            with pytest.raises(RetryError, match=f"port {port} of this host is used by another program"):
                hold(taken, "127.0.0.1")
    held = hold(taken, "127.0.0.1")
    assert held is not None
    held.close()


def test_a_host_listens_where_the_coordinators_host_is_reached_from() -> None:
    assert own_address(seed()) == "127.0.0.1"
    assert where_to_listen(tcp(), seed()) == "127.0.0.1"
    assert where_to_listen(tcp(bind="127.0.0.2"), seed()) == "127.0.0.2"
    assert where_to_listen(tcp(interface="lo"), seed()) == "127.0.0.1"
    with pytest.raises(RetryError, match="cannot be reached from here"):
        own_address(seed("255.255.255.255"))


def test_the_addresses_of_founder_and_follower() -> None:
    where = Seed("node-0", 7077, "127.0.0.1")
    network = agent_network(tcp(bind="0.0.0.0", advertise="node-0", trusted=True), [where], 0)
    assert (network.listen, network.dial) == ("tcp:0.0.0.0:7077", "tcp:node-0:7077")
    assert network.launcher_dials == "tcp:127.0.0.1:7077"
    assert (network.links.listen, network.links.advertise) == ("tcp:0.0.0.0:0", "node-0")
    network = agent_network(tcp(bind="127.0.0.3", ports="7077-7079"), [where], None)
    assert network.dial == network.launcher_dials == "tcp:node-0:7077", "looked up at every dial"
    assert network.links.listen == "tcp:127.0.0.3:0" and network.links.ports == (7078, 7079)


def test_a_host_needs_ports_for_its_own_workers_only() -> None:
    where = [Seed("node-0", 7077, "127.0.0.1")]
    assert agent_network(tcp(ports="7077-7078"), where, None).links.ports == (7078,), "before it knows the job"
    for own in (0, None):
        assert agent_network(tcp(ports="7077-7079"), where, own, slots=2).links.ports == (7078, 7079)
        with pytest.raises(ConfigError, match=r"net\.ports: 7077-7079 has 2 beside .* but 3 workers .* give 3 or more"):
            agent_network(tcp(ports="7077-7079"), where, own, slots=3)


@pytest.mark.parametrize("own", [0, 1, None])
def test_names_of_candidates_are_looked_up_at_every_dial(own: int | None) -> None:
    seeds = [Seed("node-0", 7077, "127.0.0.1"), Seed("node-1", 7078, "127.0.0.1")]
    network = agent_network(tcp(), seeds, own)
    own_port = None if own is None else seeds[own].port
    dialled = [network.launcher_dials, *(address for address, _ in network.others)]
    assert sorted(dialled, key=lambda address: address[-4:]) == [
        f"tcp:127.0.0.1:{seed.port}" if seed.port == own_port else f"tcp:{seed.host}:{seed.port}" for seed in seeds
    ]
    assert [host for _, host in network.others] == [seed.host for seed in seeds if seed is not seeds[own or 0]]


def test_what_others_reach_needs_tls_or_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_network, "own_address", lambda seed: "192.0.2.7")
    with pytest.raises(ConfigError, match=r"other machines reach 192\.0\.2\.7, and could read"):
        agent_network(tcp(), [seed()], None)
    assert agent_network(tcp(trusted=True), [seed()], None).links.listen == "tcp:192.0.2.7:0"
