"""What a worker says it is doing, and for whom it waits."""

from types import SimpleNamespace

import pytest
import torch

from elaswave.comm.frames import Tag
from elaswave.comm.memory import MemoryNetwork
from elaswave.planning.layout import make_layout
from elaswave.runtime.activity import Activity
from elaswave.runtime.exchange import Exchange
from elaswave.state.placement import Placement, make_blocks


@pytest.fixture
def transports():
    network = MemoryNetwork()
    made = [network.transport(worker) for worker in range(3)]
    for transport in made:
        transport.connect({other: made[other].address for other in range(3)}, timeout_s=10.0)
    yield made
    for transport in made:
        transport.close()


def test_waiting_for_transfers_names_the_peers_of_those_that_have_not_ended(transports):
    activity = Activity()
    activity.compute("gather")
    handles = [transports[0].recv(peer, Tag(1, 1, 1, index, 0)) for index, peer in enumerate((2, 1, 2))]
    activity.wait_for(handles)
    assert activity.doing[:3] == ("gather", False, (1, 2))
    transports[1].send(0, Tag(1, 1, 1, 1, 0), torch.zeros(3))
    transports[0].wait(handles[1], 10.0)
    activity.wait_for(handles)
    assert activity.doing[:3] == ("gather", False, (2,))
    activity.wait_for([])
    assert activity.doing[:3] == ("gather", False, ())


class Waited(Exception):
    """Raised instead of waiting."""


@pytest.mark.parametrize("phase", ["reduce", "gather"])
def test_an_exchange_says_whose_frames_it_lacks(transports, phase, monkeypatch):
    layout = make_layout(widths=(3,), layers_per_stage=(1,), num_microbatches=3)
    blocks = make_blocks([96], 32)
    activity = Activity()
    exchange = Exchange(
        0,
        layout=layout,
        placement=Placement((0, 1, 2), ((), (), ())),
        blocks=blocks,
        shapes=(),
        store={0: SimpleNamespace(slots={"master": torch.zeros(32)})},
        layers={0: SimpleNamespace(flat=torch.zeros(96))},
        accumulators={},
        transport=transports[0],
        activity=activity,
    )
    activity.wait(phase)
    exchange.begin(1, 1)

    def wait(handles, timeout_s):
        raise Waited

    monkeypatch.setattr(transports[0], "wait", wait)
    with pytest.raises(Waited):
        if phase == "reduce":
            exchange.reduce(1, 1, ())
        else:
            exchange.gather(1, 1, lambda: None)
    assert activity.doing[:3] == (phase, False, (1, 2))
