"""The rendezvous by which torchrun leaves each node alone."""

import os
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousHandler

from elaswave.api.environment import COORDINATOR_VARIABLE
from elaswave.api.torchrun import handler


def test_a_node_is_a_world_of_its_own_in_which_nobody_waits() -> None:
    rendezvous = handler()(SimpleNamespace(run_id="demo", endpoint=""))  # type: ignore[arg-type]
    assert isinstance(rendezvous, RendezvousHandler)
    info = rendezvous.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("key", "value")
    assert info.store.get("key") == b"value"
    assert (rendezvous.get_backend(), rendezvous.get_run_id(), rendezvous.num_nodes_waiting()) == (
        "elaswave",
        "demo",
        0,
    )
    assert not rendezvous.is_closed()
    rendezvous.set_closed()
    assert rendezvous.is_closed() and rendezvous.shutdown()


@pytest.mark.parametrize(("given", "said"), [(None, "10.77.0.1:7077"), ("10.77.0.9:1", "10.77.0.9:1")])
def test_the_endpoint_is_where_agents_dial_if_nothing_else_says_it(
    given: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {COORDINATOR_VARIABLE: given})
    handler()(SimpleNamespace(run_id="demo", endpoint="10.77.0.1:7077"))  # type: ignore[arg-type]
    assert os.environ[COORDINATOR_VARIABLE] == said
