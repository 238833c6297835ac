"""Frames of a worker whose tensors are on a device: they leave when they have come from there, and arrive there."""

import pytest
import torch
from tests.memory_transport import MemoryNetwork
from tests.unit.worker.test_worker_start import mailbox

from elaswave.devices.interface import HOST, Device
from elaswave.devices.loopback import LOOKS, Loopback
from elaswave.protocol.step.engine import FrameKind, Key, Pause
from elaswave.worker.links import TransportLinks


def key(kind: FrameKind, a: int, peer: int) -> Key:
    return Key(kind, 1, 0, a, 0, peer)


def links_of(worker: int, network: MemoryNetwork, device: Device) -> TransportLinks:
    transport = network.transport(worker)
    links = TransportLinks(worker, (), transport, mailbox().activity, transport.poll, device=device)
    links.addresses = {0: "memory:0", 1: "memory:1"}
    return links


@pytest.fixture
def pair() -> tuple[TransportLinks, TransportLinks]:
    """Two workers that are linked, on a device each."""
    network = MemoryNetwork()
    a, b = links_of(0, network, Loopback()), links_of(1, network, Loopback())
    a.want({0: "memory:0", 1: "memory:1"})
    b.want({0: "memory:0", 1: "memory:1"})
    for links in (a, b, a, b):
        links.transport.poll()
    assert a.has(1) and b.has(0)
    return a, b


def test_a_frame_leaves_when_its_bytes_have_come_from_the_device(pair: tuple[TransportLinks, TransportLinks]) -> None:
    a, b = pair
    activation = torch.arange(6.0).view(2, 3)
    a.send(key(FrameKind.ACTIVATION, 7, 1), (activation, torch.tensor([4])))
    assert a.is_fetching
    for _ in range(LOOKS):
        a.hand_over()
        assert a.is_fetching
    a.hand_over()
    assert not a.is_fetching
    activation.fill_(9.0)  # its memory is the worker's again
    b.wait((key(FrameKind.ACTIVATION, 7, 0),))
    values, places = b.take(key(FrameKind.ACTIVATION, 7, 0))
    assert values.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and places.tolist() == [4]


def test_what_is_posted_is_on_the_device_once_it_is_taken(pair: tuple[TransportLinks, TransportLinks]) -> None:
    a, b = pair
    slot = [torch.full((3,), -1.0), torch.full((2,), -1.0)]
    b.post(key(FrameKind.REDUCED, 1, 0), slot)
    a.send(key(FrameKind.REDUCED, 1, 1), [torch.ones(3), torch.full((2,), 5.0)])
    a.wait(Pause.SENT)
    b.wait((key(FrameKind.REDUCED, 1, 0),))
    assert [part.tolist() for part in slot] == [[-1.0] * 3, [-1.0] * 2], "frames arrive in host memory"
    assert b.take(key(FrameKind.REDUCED, 1, 0)) is None
    assert [part.tolist() for part in slot] == [[1.0] * 3, [5.0] * 2]
    alone = torch.full((4,), -1.0)
    b.post(key(FrameKind.REDUCED, 2, 0), alone)
    a.send(key(FrameKind.REDUCED, 2, 1), [torch.arange(4.0)])
    a.wait(Pause.SENT)
    b.wait((key(FrameKind.REDUCED, 2, 0),))
    assert alone.tolist() == [-1.0] * 4
    assert b.take(key(FrameKind.REDUCED, 2, 0)) is None
    assert alone.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("number", [2, 500])
def test_a_frame_of_many_blocks_is_one_copy_on_either_side(
    pair: tuple[TransportLinks, TransportLinks], number: int
) -> None:
    a, b = pair
    copies: list[str] = []

    class Noting(Loopback):
        def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
            copies.append("fetch")
            return super().fetch(tensor)

        def room(self, like: torch.Tensor) -> torch.Tensor:
            copies.append("room")
            return super().room(like)

        def bring(self, tensor: torch.Tensor) -> torch.Tensor:
            copies.append("bring")
            return super().bring(tensor)

    blocks = [torch.full((3,), float(index)) for index in range(number)]
    low = [torch.full((2,), index, dtype=torch.int16) for index in range(number)]
    slot = [torch.empty(3 * number), torch.empty(2 * number, dtype=torch.int16)]  # what is sent may be cut elsewhere
    b._device = Noting()
    b.post(key(FrameKind.PARTIAL_SUM, 1, 0), slot)
    assert copies == ["room", "room"]
    copies.clear()
    a._device = Noting()
    a.send(key(FrameKind.PARTIAL_SUM, 1, 1), [*blocks, *low])
    assert copies.count("fetch") == 2
    a.wait(Pause.SENT)
    b.wait((key(FrameKind.PARTIAL_SUM, 1, 0),))
    b.take(key(FrameKind.PARTIAL_SUM, 1, 0))
    assert torch.equal(slot[0], torch.cat(blocks)) and torch.equal(slot[1], torch.cat(low))
    parts = [torch.empty(3) for _ in range(number)]
    copies.clear()
    b.post(key(FrameKind.REDUCED, 1, 0), parts)
    a.send(key(FrameKind.REDUCED, 1, 1), blocks)
    a.wait(Pause.SENT)
    b.wait((key(FrameKind.REDUCED, 1, 0),))
    b.take(key(FrameKind.REDUCED, 1, 0))
    assert all(torch.equal(part, block) for part, block in zip(parts, blocks, strict=True))
    assert copies.count("bring") == 1


def test_what_is_sent_first_leaves_first_whatever_it_comes_from(pair: tuple[TransportLinks, TransportLinks]) -> None:
    a, b = pair
    a.send(key(FrameKind.GRADIENT, 1, 1), torch.ones(4))
    a.send(key(FrameKind.VOTE, 1, 1), [3, 4])
    assert a.is_fetching and not a._sends, "the words wait for the tensor"
    a.hand_over()
    a.wait(Pause.SENT)
    b.wait((key(FrameKind.VOTE, 1, 0), key(FrameKind.GRADIENT, 1, 0)))
    assert b.take(key(FrameKind.VOTE, 1, 0)) == [3, 4]
    assert b.take(key(FrameKind.GRADIENT, 1, 0)).tolist() == [1.0] * 4


def test_a_wait_for_a_peer_sends_first_what_the_peer_may_wait_for(pair: tuple[TransportLinks, TransportLinks]) -> None:
    a, b = pair
    b.send(key(FrameKind.VOTE, 1, 0), [5])
    a.send(key(FrameKind.GRADIENT, 1, 1), torch.ones(4))
    a.wait((key(FrameKind.VOTE, 1, 1),))
    assert not a.is_fetching


def test_a_count_beside_gradients_stays_on_the_host(pair: tuple[TransportLinks, TransportLinks]) -> None:
    a, b = pair
    brought: list[torch.Tensor] = []

    class Noting(Loopback):
        def bring(self, tensor: torch.Tensor) -> torch.Tensor:
            brought.append(tensor)
            return super().bring(tensor)

    b._device = Noting()
    a.send(key(FrameKind.GRADIENT, 2, 1), (torch.ones(4), torch.tensor(12)))
    a.wait(Pause.SENT)
    b.wait((key(FrameKind.GRADIENT, 2, 0),))
    gradient, count = b.take(key(FrameKind.GRADIENT, 2, 0))
    assert gradient.tolist() == [1.0] * 4 and int(count) == 12
    assert [each.dtype for each in brought] == [torch.float32]


def test_a_new_generation_forgets_frames_that_have_not_left(pair: tuple[TransportLinks, TransportLinks]) -> None:
    a, _ = pair
    a.send(key(FrameKind.GRADIENT, 1, 1), torch.ones(4))
    a.post(key(FrameKind.REDUCED, 1, 1), torch.ones(4))
    a.edit(2, (0, 1))
    assert not a.is_fetching and not a._rooms
    a.wait(Pause.SENT)


def test_on_the_host_a_frame_leaves_at_once() -> None:
    network = MemoryNetwork()
    a, b = links_of(0, network, HOST), links_of(1, network, HOST)
    a.want({1: "memory:1"})
    b.want({0: "memory:0"})
    for links in (a, b, a, b):
        links.transport.poll()
    slot = torch.zeros(4)
    b.post(key(FrameKind.REDUCED, 1, 0), slot)
    a.send(key(FrameKind.REDUCED, 1, 1), torch.ones(4))
    assert not a.is_fetching
    b.wait((key(FrameKind.REDUCED, 1, 0),))
    b.take(key(FrameKind.REDUCED, 1, 0))
    assert slot.tolist() == [1.0] * 4
