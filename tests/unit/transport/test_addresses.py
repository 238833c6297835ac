"""Where a worker listens: private folders, long paths, numeric hosts, and nothing left behind."""

import os
import socket
import stat

import pytest
import torch
from tests.conformance.worlds import KEY, PATIENCE_S, finish, link

from elaswave.errors import PeerLostError
from elaswave.transport import addresses
from elaswave.transport.interface import Tag
from elaswave.transport.stream import StreamTransport

TAG = Tag(1, 1, 0)


def test_the_folder_of_sockets_is_made_private_and_left_empty(tmp_path):
    folder = tmp_path / "deep" / "private"
    transport = StreamTransport(3, key=KEY, listen=f"unix:{folder}")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (name,) = os.listdir(folder)
    assert name.startswith("w3-") and transport.address == f"unix:{folder}/{name}"
    transport.close()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_is_open_to_others_is_refused(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}.*0700"):
        StreamTransport(0, key=KEY, listen=f"unix:{folder}")
    assert os.listdir(folder) == []


def test_paths_longer_than_the_system_allows_work(tmp_path):
    folder = tmp_path / ("long" * 40) / ("er" * 60)
    a, b = (StreamTransport(worker, key=KEY, listen=f"unix:{folder}") for worker in range(2))
    try:
        assert len(a.address) > 300
        link([a, b])
        finish([b.recv(0, TAG), a.send(1, TAG, torch.ones(3))], a, b)
    finally:
        a.close()
        b.close()
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("where", "seen"),
    [
        ("", "neither unix:FOLDER nor tcp:HOST"),
        ("/tmp", "neither"),
        ("udp:1.2.3.4", "neither"),
        ("unix:", "neither"),
        ("unix:relative/folder", "absolute"),
        ("tcp:localhost", "write 127.0.0.1, not localhost"),
        ("tcp:127.0.0.1:x", "port 'x'"),
        ("tcp:127.0.0.1:65536", "port '65536'"),
        ("tcp:127.0.0.1:²", "port"),
    ],
)
def test_an_address_that_cannot_be_understood_is_refused(where, seen):
    with pytest.raises(ValueError, match=seen):
        addresses.listen(where, 0)


def test_an_address_to_dial_needs_a_port():
    with pytest.raises(ValueError, match="has no port"):
        addresses.dial("tcp:127.0.0.1")


def test_a_port_can_be_chosen_and_a_used_one_is_an_error():
    first, address, remove = addresses.listen("tcp:127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match="in use"):
            addresses.listen(address, 1)
    finally:
        first.close()
        remove()


def test_who_listens_everywhere_must_say_as_what_it_is_dialled():
    with pytest.raises(ValueError, match="no host can be dialled as 0.0.0.0"):
        addresses.listen("tcp:0.0.0.0", 0)
    sock, address, _ = addresses.listen("tcp:0.0.0.0", 0, advertise="fd00::7")
    sock.close()
    assert address == f"tcp:[fd00::7]:{address.rpartition(':')[2]}"


def test_the_first_free_port_of_some_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sock, address, _ = addresses.listen("tcp:127.0.0.1", 0, ports=[port, port + 1, port + 2])
        sock.close()
        assert int(address.rpartition(":")[2]) in (port + 1, port + 2)
        with pytest.raises(OSError, match=f"all 2 ports from {port} to {port} of 127.0.0.1 are in use: widen"):
            addresses.listen("tcp:127.0.0.1", 0, ports=[port, port])


def test_links_end_where_nothing_is_acknowledged():
    with socket.socket() as sock:
        addresses.tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


def test_ipv6():
    try:
        sock, address, remove = addresses.listen("tcp:[::1]", 0)
    except OSError:
        pytest.skip("this host has no IPv6")
    try:
        assert address.startswith("tcp:[::1]:")
        addresses.dial(address).close()
    finally:
        sock.close()
        remove()


def test_dialling_nobody_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        addresses.dial(f"unix:{tmp_path}/nobody.sock")


def test_a_forked_child_does_not_hold_the_links_of_its_parent(tmp_path):
    a, b = (StreamTransport(worker, key=KEY, listen=f"unix:{tmp_path / 's'}") for worker in range(2))
    link([a, b])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # holds on to whatever it has inherited until told to go
        os.close(writer)
        try:
            b.close()
            os.read(reader, 1)
        finally:
            os._exit(0)
    try:
        os.close(reader)
        finish([b.recv(0, TAG), a.send(1, TAG, torch.ones(3))], a, b)
        b.close()
        with pytest.raises(PeerLostError):  # seen although the child lives
            a.wait(a.recv(1, TAG), PATIENCE_S)
        a.close()
        assert os.listdir(tmp_path / "s") == []
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_a_data_socket_does_not_wait_to_send():
    listener, address, remove = addresses.listen("tcp:127.0.0.1", 0)
    try:
        with addresses.dial(address) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not sock.getblocking()
    finally:
        listener.close()
        remove()
