"""Where the processes of a host listen and dial, and which agent creates a job."""

import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.agents import free_port

from elaswave.config.schema import NetConfig
from elaswave.errors import ConfigError, RetryError, UsageError
from elaswave.launcher import agent
from elaswave.launcher.agent import Seed, agent_network, hold, own_address, seed_of, seeds_of, where_to_listen


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
    assert hold(seeds[0], "127.0.0.1", Path("/")) is None
    for own in (1, None):
        network = agent_network(tcp(), seeds, own)
        assert network.launcher_dials == "tcp:127.0.0.1:7078"
        assert network.others == (("tcp:nowhere.invalid:7077", "nowhere.invalid"),)
    with pytest.raises(RetryError, match=r"--coordinator nowhere\.invalid:7077: nowhere\.invalid has no address"):
        seeds_of(["nowhere.invalid:7077", "elsewhere.invalid:7077"])
    with pytest.raises(UsageError, match="give HOST:PORT"):
        seeds_of(["127.0.0.1:7078", "nowhere.invalid"])


@contextmanager
def in_another_process(act: Callable[[], bool]) -> Iterator[bool]:
    """What an act returns in a process of its own, which lives until the block ends."""
    answered, answers = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(answers, b"1" if act() else b"0")
            signal.pause()
        finally:
            os._exit(1)
    os.close(answers)
    try:
        yield os.read(answered, 1) == b"1"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(answered)


def test_one_agent_of_a_host_holds_the_coordinators_port(tmp_path: Path) -> None:
    where = seed()
    first = hold(where, "127.0.0.1", tmp_path)
    assert first is not None
    with in_another_process(lambda: hold(where, "127.0.0.1", tmp_path) is None) as is_left:
        assert is_left, "another agent of this host has it"
    first.close()
    with in_another_process(lambda: hold(where, "127.0.0.1", tmp_path) is not None) as is_had:
        assert is_had, "it was given up"
        assert hold(where, "127.0.0.1", tmp_path) is None
    again = hold(where, "127.0.0.1", tmp_path)
    assert again is not None, "it has ended"
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["agents"]


def test_an_agents_children_keep_no_later_one_from_being_the_first(tmp_path: Path) -> None:
    """They end a little later than an agent that was killed."""
    where, (alive, held_open) = seed(), os.pipe()

    def act() -> bool:
        held = hold(where, "127.0.0.1", tmp_path)
        os.close(held_open)
        if os.fork() == 0:
            os.read(alive, 1)  # until the test is over
            os._exit(0)
        assert held is not None
        held.port.close()
        return True

    try:
        with in_another_process(act) as is_held:
            assert is_held
        lock = agent._Lock(tmp_path, f"127.0.0.1/{where.port}")
        assert lock.is_held
        lock.close()
    finally:
        os.close(held_open)
        os.close(alive)


def test_hosts_and_networks_that_share_a_folder_have_locks_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_free(what: str = "what") -> bool:
        lock = agent._Lock(tmp_path, what)
        lock.close()
        return lock.is_held

    other = tmp_path / "other"
    other.write_text("another boot")
    with in_another_process(lambda: agent._Lock(tmp_path, "what").is_held) as is_held:
        assert is_held and is_free("another") and not is_free()
        for place in ("_BOOT", "_NETWORK"):
            with monkeypatch.context() as patched:
                patched.setattr(agent, place, other)
                assert is_free()
        assert not is_free()


def test_without_locks_the_port_says_who_was_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = seed()
    for folder in (tmp_path / "gone", tmp_path):
        held = hold(where, "127.0.0.1", folder)
        assert held is not None
        held.close()

        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr(agent.fcntl, "lockf", no_locks)


def test_the_port_of_another_host_is_not_held(tmp_path: Path) -> None:
    assert hold(seed("198.51.100.1"), "198.51.100.1", tmp_path) is None
    assert hold(seed("198.51.100.1"), "127.0.0.1", tmp_path) is None, "it is free here, but nobody dials it here"
    with pytest.raises(ValueError, match="is not a numeric address"):
        hold(seed(), "localhost", tmp_path)


def test_a_port_that_another_program_has_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "FREE_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = Seed("127.0.0.1", port, "127.0.0.1")
        for _ in range(2):  # the lock is given up
            with pytest.raises(RetryError, match=f"port {port} of this host is used by another program"):
                hold(taken, "127.0.0.1", tmp_path)
    held = hold(taken, "127.0.0.1", tmp_path)
    assert held is not None
    held.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOBUFS])
def test_a_port_that_the_system_refuses_is_said(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(bind: str, ports: list[int]) -> socket.socket:
        raise OSError(number, "refused")

    monkeypatch.setattr(agent, "reserve", refuse)
    is_right = number == errno.EACCES
    expected = pytest.raises(UsageError, match="a port from 1024 up") if is_right else pytest.raises(OSError)
    with expected:
        hold(seed(), "127.0.0.1", tmp_path)


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
    monkeypatch.setattr(agent, "own_address", lambda seed: "192.0.2.7")
    with pytest.raises(ConfigError, match=r"other machines reach 192\.0\.2\.7, and could read"):
        agent_network(tcp(), [seed()], None)
    assert agent_network(tcp(trusted=True), [seed()], None).links.listen == "tcp:192.0.2.7:0"
