"""From the configuration's addresses to those that are listened at and dialled."""

import socket
from pathlib import Path

import pytest
from tests.agents import free_port
from tests.certificates import job_tls, keys_of

from elaswave.config.schema import NetConfig
from elaswave.errors import ConfigError, LaunchError
from elaswave.job import setup
from elaswave.job.setup import address_of, open_network
from elaswave.transport import addresses


def opened(folder: Path, **net) -> setup.JobNetwork:
    """The network; its port is given up at once."""
    network, kept = open_network(NetConfig(transport="tcp", **net), folder, num_workers=0)
    assert kept is not None
    kept.close()
    return network


def test_sockets_in_a_folder_need_no_port(tmp_path: Path) -> None:
    network, kept = open_network(NetConfig(), tmp_path, 4)
    assert kept is None and network.tls is None
    assert network.listen == network.dial == network.launcher_dials == f"unix:{tmp_path}/control.sock"
    assert network.links.listen == f"unix:{tmp_path}"


def test_tcp_listens_on_loopback_unless_told(tmp_path: Path) -> None:
    network = opened(tmp_path)
    assert network.listen == network.dial == network.launcher_dials
    assert network.listen.startswith("tcp:127.0.0.1:") and network.links.advertise == ""


def test_what_listens_everywhere_is_dialled_as_it_says(tmp_path: Path) -> None:
    network = opened(tmp_path, bind="::", advertise="fd00::5", trusted=True)
    port = network.listen.rpartition(":")[2]
    assert network.listen == f"tcp:[::]:{port}" and network.dial == f"tcp:[fd00::5]:{port}"
    assert network.launcher_dials == f"tcp:[::1]:{port}"
    assert network.links.advertise == network.host == "fd00::5"


def test_the_port_is_kept_for_one_coordinator_after_the_other(tmp_path: Path) -> None:
    network, kept = open_network(NetConfig(transport="tcp"), tmp_path, 4)
    assert kept is not None
    with kept:
        for _ in range(2):
            sock, address, _ = addresses.listen_at(network.listen)
            assert address == network.dial
            sock.close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(network.listen.rpartition(":")[2])))


def test_workers_take_other_ports_of_the_range_than_the_coordinator(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        network = opened(tmp_path, ports=f"{first}-{first + 3}")
        port = int(network.listen.rpartition(":")[2])
        assert port in range(first + 1, first + 4)
        assert network.links.ports == tuple(other for other in range(first, first + 4) if other != port)
        with pytest.raises(LaunchError, match=r"no port for the coordinator .* already in use; set net.bind"):
            opened(tmp_path, ports=f"{first}-{first}")


def test_a_job_needs_a_port_for_its_coordinator_and_each_worker(tmp_path: Path) -> None:
    first = max(free_port() for _ in range(9))
    net = NetConfig(transport="tcp", ports=f"{first}-{first + 4}")
    with pytest.raises(ConfigError, match="has 4 beside the coordinator's, but 5 workers may run on this host; give 5"):
        open_network(net, tmp_path, 5)
    for _ in range(2):  # the port was given up
        network, kept = open_network(net, tmp_path, 4)
        assert kept is not None and len(network.links.ports) == 4
        kept.close()


def test_an_interface_stands_for_its_address(tmp_path: Path) -> None:
    assert address_of("lo") == "127.0.0.1"
    assert opened(tmp_path, interface="lo").dial.startswith("tcp:127.0.0.1:")
    with pytest.raises(ConfigError, match="there is no eth77 here; there are "):
        address_of("eth77")


def test_an_interface_with_ipv6_alone_and_one_without_an_address(tmp_path: Path, monkeypatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80    dummy0\n"
        "fd000000000000000000000000000002 04 40 00 82    dummy0\n"
    )
    monkeypatch.setattr(setup, "IPV6_TABLE", table)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "dummy0"), (3, "dummy1")])
    assert address_of("dummy0") == "fd00::2"
    with pytest.raises(ConfigError, match="dummy1 has no address yet"):
        address_of("dummy1")


def test_an_interface_that_others_reach_needs_tls_or_trust(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(setup, "address_of", lambda name: "10.0.0.5")
    with pytest.raises(ConfigError, match=r"other machines reach net.interface = eth0 \(10.0.0.5\)"):
        open_network(NetConfig(transport="tcp", interface="eth0"), tmp_path, 4)


def test_certificates_are_checked_for_the_host_that_is_dialled(tmp_path: Path) -> None:
    net = {"tls": "required", "keys": str(keys_of("job"))}
    assert opened(tmp_path, **net).tls == job_tls()
    assert opened(tmp_path, **net, bind="0.0.0.0", advertise="localhost").host == "localhost"
    with pytest.raises(ConfigError, match="cannot serve node-9"):
        opened(tmp_path, **net, bind="0.0.0.0", advertise="node-9")
