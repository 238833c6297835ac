"""The links of a worker that are made in the background: which ones, when they stand, and who looks after them."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.memory_transport import MemoryNetwork
from tests.unit.worker.test_worker_start import Client, StartedMachine, mailbox, worker_with

from elaswave.blocks.placement import make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.channel.messages.worker import Exit
from elaswave.planning.programs.layout import make_layout
from elaswave.worker import links as links_module
from elaswave.worker import process as worker_module
from elaswave.worker.links import TransportLinks


def links_of(worker, network, blocks=(), unreached=lambda peers: None):
    client = SimpleNamespace(send=lambda message: unreached(message.peers), disconnected_s=0.0)
    links = TransportLinks(worker, blocks, network.transport(worker), mailbox().activity, lambda: None, client)
    links.addresses = {peer: f"memory:{peer}" for peer in range(6)}
    return links


def test_a_link_that_is_wanted_is_there_once_it_stands():
    network = MemoryNetwork()
    told = []
    a = links_of(0, network, unreached=told.append)
    a.want({0: "memory:0", 5: "memory:5"})
    assert a.is_dialling and not a.has(5)
    a.look_at_unreached()
    a.look_at_unreached()
    assert told == [{5: "at memory:5: no sign of it"}], "once in a while"
    joiner = links_of(5, network)
    joiner.want({0: "memory:0"})
    a.transport.poll()
    assert a.has(5) and joiner.has(0) and not a.is_dialling
    a.look_at_unreached()
    assert len(told) == 1


def test_who_is_dialled_by_the_other_side_is_not_said_to_be_unreached():
    told = []
    b = links_of(5, MemoryNetwork(), unreached=told.append)
    b.want({0: "memory:0"})
    b.look_at_unreached()
    assert told == []


def test_who_does_not_answer_when_the_first_links_are_made_is_said(monkeypatch):
    monkeypatch.setattr(links_module, "LINK_TURN_S", 0.01)
    told = []

    def look(peers):
        told.append(peers)
        if len(told) == 2:
            raise StopIteration

    a = links_of(0, MemoryNetwork(), unreached=look)
    monkeypatch.setattr(a.transport, "unreached", lambda peer: "refused" if peer == 1 else "", raising=False)
    layout = make_layout(widths=[1] * 3, layers_per_stage=[1] * 3, num_microbatches=1)
    with pytest.raises(StopIteration):
        a.connect(layout, place_blocks(layout.with_followers(0), make_blocks([1] * 3, 1), scatter_width=EVERYBODY))
    assert told == [{1: "at memory:1: refused"}] * 2


def test_the_address_of_a_wanted_peer_is_kept_for_the_time_when_it_is_a_member():
    a = links_of(0, MemoryNetwork())
    a.want({9: "memory:9"})
    a.want({})
    assert a.addresses[9] == "memory:9" and not a.is_dialling


@pytest.mark.parametrize(("num_members", "is_full"), [(8, True), (9, False)])
def test_members_are_counted_and_not_addresses(num_members, is_full, monkeypatch):
    """A grown job knows the addresses of all that have ever come."""
    monkeypatch.setattr(links_module, "FULL_MESH_WORKERS", 8)
    layout = make_layout(widths=[1] * num_members, layers_per_stage=[1] * num_members, num_microbatches=1)
    blocks = make_blocks([1] * num_members, 1)
    links = links_of(0, MemoryNetwork(), blocks)
    links.addresses = {peer: f"memory:{peer}" for peer in range(100)}
    placement = place_blocks(layout.with_followers(0), blocks, scatter_width=EVERYBODY)
    everyone = set(range(1, num_members))
    assert (links.needed(layout, placement) == everyone) is is_full
    idle = replace(layout, idle=(50,))
    assert (links.needed(idle, placement) == everyone | {50}) is False, "an idle member counts"


def test_links_are_looked_after_while_nothing_is_done_but_wait_for_a_message(monkeypatch):
    """Else a joiner would answer nobody until the coordinator speaks, which waits for its links."""
    monkeypatch.setattr(worker_module, "TURN_S", 0.0)
    monkeypatch.setattr(worker_module, "DIAL_TURN_S", 0.0)
    box, polls = mailbox(), []

    def poll():
        polls.append(len(polls))
        if len(polls) == 3:
            worker._links.is_dialling = False
            box.receive(Exit())

    worker = worker_with(box, Client(), StartedMachine(is_done=True))
    worker._transport = SimpleNamespace(poll=poll)
    worker._links = SimpleNamespace(addresses={}, is_dialling=True, is_fetching=False, hand_over=lambda: None)
    worker.train()
    assert polls[:3] == [0, 1, 2]
